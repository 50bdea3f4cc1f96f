"""examples/smollm2/gsm8k_sft: its torch loop follows a run of `sft`, and its download names the cure."""

from __future__ import annotations

import importlib.util
import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType

import pytest
from gguf_models import TEMPLATE, save_model

from prime_rl.trainer.config import SFTConfig
from prime_rl.trainer.sft.train import train
from prime_rl.utils.pydantic_config import parse_argv, write_config

ROOT = Path(__file__).parents[4]
FOLDER = ROOT / "examples/smollm2/gsm8k_sft"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_torch_loop_follows_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    model = save_model(tmp_path / "model", "llama")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rows = [{"question": f"What is {i} + {i}?", "answer": f"{i} + {i} = {2 * i}\n#### {2 * i}"} for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ["@", str(FOLDER / "sft.toml"), "--model.name", str(model), "--data.name", str(tmp_path / "rows.jsonl")]
    options += ["--output-dir", str(tmp_path / "run"), "--max-steps", "6", "--val.interval", "3"]
    config, _ = parse_argv(SFTConfig, options, "sft", environ={})
    write_config(config, tmp_path / "run/configs/sft.toml")
    assert train(config) == 0
    monkeypatch.setattr(sys, "argv", ["torch_loop.py", str(tmp_path / "run")])
    capsys.readouterr()
    load("torch_loop").main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "largest difference" in line]
    assert [line.partition(":")[0] for line in lines] == ["loss/mean", "val_loss/mean"]
    assert all(float(line.split()[-1]) < 1e-5 for line in lines)


def test_download_names_the_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, timeout: float) -> None:
        raise urllib.error.URLError("no route")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    data = load("data")
    with pytest.raises(
        SystemExit, match=r"no route.*outputs/smollm2_gsm8k_sft/train\.jsonl.*--data\.name openai/gsm8k"
    ):
        data.main()
    assert not data.PATH.exists()
    data.PATH.write_text("{}\n")
    data.main()
    assert data.PATH.read_text() == "{}\n"
