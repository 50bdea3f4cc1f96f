"""`make gpu`: checks that end badly end alone, a second run continues, and the table of checks is complete."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from dev.gpu import __main__ as command
from dev.gpu import runner, runs
from dev.gpu.bundle import MAX_BYTES, find_requirements, unpack_bundle
from dev.gpu.context import Context
from dev.gpu.registry import CHECKS, Check, Need
from dev.gpu.runner import FAILED, OK, SKIPPED, Machine, choose_exit_code, load_results, run_checks, select

from prime_rl.config import RLConfig
from prime_rl.trainer.config import SFTConfig
from prime_rl.utils.pydantic_config import parse_argv

ROOT = Path(__file__).parents[3]
CPU = Machine("cpu", 0, False)


def fake(name: str, function: str = "measure", need: Need = Need.NOTHING, **options: Any) -> Check:
    limit_s = 0.1 if function == "hang" else 60.0
    return Check(name, f"tests.fakes.gpu_checks:{function}", "<=", 1.0, "", limit_s, need, options=options)


def run(tmp_path: Path, checks: list[Check], finished: dict[str, Any] | None = None, **options: Any) -> Any:
    (tmp_path / "scratch").mkdir(exist_ok=True)
    options = {"out": tmp_path, "scratch": tmp_path / "scratch", "tiny": True, **options}
    return run_checks(checks, CPU, finished or {}, **options)


def test_a_check_that_ends_badly_ends_alone(tmp_path: Path) -> None:
    checks = [
        fake("a.low", number=0.5),
        fake("a.high", number=2.0),
        fake("a.nan", number=float("nan")),
        fake("b.skips", "skip"),
        fake("b.fails", "fail"),
        fake("b.crashes", "crash"),
        fake("c.device", need=Need.DEVICE, number=0.0),
        fake("c.low", number=0.1),
        fake("c.hangs", "hang"),
    ]
    rows, left = run(tmp_path, checks)
    assert {name: row["status"] for name, row in rows.items()} == {
        **{"a.low": OK, "a.high": FAILED, "a.nan": FAILED, "b.skips": SKIPPED, "b.fails": FAILED},
        **{"b.crashes": FAILED, "c.device": SKIPPED, "c.low": OK, "c.hangs": FAILED},
    }
    assert rows["b.fails"]["reason"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert rows["b.crashes"]["reason"].startswith("ended with code -6")
    assert "time limit" in rows["c.hangs"]["reason"]
    assert rows["c.device"]["reason"] == "needs a CUDA device"
    assert load_results(tmp_path) == list(rows.values()) and not left
    assert "and more" in (tmp_path / runner.LOG_FILE).read_text()
    assert choose_exit_code(rows.values(), left) == 1


def test_a_second_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [fake(f"stage.{name}", number=0.0) for name in ("ok", "failed", "skipped", "new")]
    monkeypatch.setattr(command, "CHECKS", checks)
    rows = [
        {"name": f"stage.{status}", "status": status, "tiny": True, "device": "cpu"} for status in (OK, FAILED, SKIPPED)
    ]
    other = [{**rows[0], "name": "stage.new", "device": "1 x GPU"}, {**rows[0], "name": "stage.new", "tiny": False}]
    lines = [*map(json.dumps, rows + other), '{"name": "stage.n']  # a kill cut off the last line
    (tmp_path / runner.RESULTS_FILE).write_text("\n".join(lines))
    finished = command.load_finished(tmp_path, True, "cpu", [])
    assert finished.keys() == {"stage.ok", "stage.failed"}
    assert command.load_finished(tmp_path, True, "cpu", ["failed"]).keys() == {"stage.ok"}
    assert command.load_finished(tmp_path, True, "cpu", ["stage"]) == {}
    rows_after, left = run(tmp_path, checks, finished, deadline=0.0)
    assert rows_after == finished and left == ["stage.skipped", "stage.new"]


def test_exit_code_tells_speed_from_correctness() -> None:
    slow = {"status": FAILED, "is_speed": True, "number": 1.0}
    assert choose_exit_code([{"status": OK}, {"status": SKIPPED}], []) == 0
    assert choose_exit_code([slow], []) == 2
    assert choose_exit_code([slow, {**slow, "is_speed": False}], []) == 1
    assert choose_exit_code([{**slow, "number": None}], []) == 1, "it did not run"
    assert choose_exit_code([{"status": OK}], ["left"]) == 3


def test_names_select_checks_and_stages() -> None:
    checks = [fake("kernels.a"), fake("kernels.b"), fake("engine.a")]
    assert [check.name for check in select(checks, ["kernels"])] == ["kernels.a", "kernels.b"]
    assert [check.name for check in select(checks, ["*.a"])] == ["kernels.a", "engine.a"]
    with pytest.raises(ValueError, match="no check matches 'decoder'"):
        select(checks, ["kernels", "decoder"])


def test_every_check_has_a_function_that_takes_its_options() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    for check in CHECKS:
        path = ROOT / (check.module.replace(".", "/") + ".py")
        name = check.function.partition(":")[2]
        [function] = [
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        names = [argument.arg for argument in function.args.args]
        required = names[: len(names) - len(function.args.defaults)]
        assert required[0] == "context" and set(required[1:]) <= check.options.keys(), check.name
        assert check.options.keys() <= set(names) or function.args.kwarg is not None, check.name


def test_commands_of_a_device_parse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU most of them are never run."""
    commands: list[list[str]] = []

    class NotStarted(Exception): ...

    def start(argv: list[str], **_: Any) -> None:
        commands.append(argv)
        raise NotStarted

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.chdir(ROOT)
    context = Context(torch.device("cuda", 0), False, tmp_path, tmp_path)
    checks = [check for check in CHECKS if check.module == runs.__name__]
    for check in checks:
        with pytest.raises(NotStarted):
            getattr(runs, check.function.partition(":")[2])(context, **check.options)
    for _, _, module, *argv in commands:
        config, _ = parse_argv(RLConfig if module == runs.MODULES["rl"] else SFTConfig, argv, "command", {})
        trained = config.trainer.model if isinstance(config, RLConfig) else config.model
        assert trained.device == "cuda"
    assert len(commands) == len(checks)


def test_the_page_describes_every_stage() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text()
    rows = [line.split("|")[1] for line in page.partition("## Table")[2].splitlines() if line.startswith("| `")]
    stages = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(stages) == sorted({check.name.partition(".")[0] for check in CHECKS})


def test_the_bundle_has_what_a_bare_machine_lacks() -> None:
    found = find_requirements()
    assert {"msgspec", "loguru", "pydantic-core", "pyzmq", "transformers"} <= found.keys()
    assert not {"torch", "numpy", "verifiers", "datasets"} & found.keys()
    assert MAX_BYTES == 64 << 20


def test_wheels_for_another_python_are_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, site = tmp_path / "bundle", tmp_path / "site"
    assert unpack_bundle(bundle, site) is None
    bundle.mkdir()
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for name in (f"fast-1.0-{tag}-{tag}-manylinux_2_17_x86_64", "plain-2.0-py3-none-any"):
        with zipfile.ZipFile(bundle / f"{name}.whl", "w") as wheel:
            wheel.writestr(f"{name.partition('-')[0]}/__init__.py", "")
    assert unpack_bundle(bundle, site) == site
    assert {path.name for path in site.iterdir()} == {"fast", "plain"}
    (bundle / "other-1.0-cp27-cp27-manylinux_2_17_x86_64.whl").write_bytes(b"")
    assert unpack_bundle(bundle, tmp_path / "none") is None
    assert "not for Python" in capsys.readouterr().out
