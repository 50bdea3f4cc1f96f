"""scripts/mismatch_by_layer.py: nothing differs in exact mode, and a changed layer is found."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[4]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, to be run with 16 tokens of the tiny model."""
    spec = importlib.util.spec_from_file_location("mismatch_by_layer", ROOT / "scripts" / "mismatch_by_layer.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr("sys.argv", ["mismatch_by_layer.py", "--random-init", "--tokens", "16"])
    return module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_differs_in_exact_mode(
    script: ModuleType, dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build, options = script.EmbeddedEngine, dict[str, Any]()
    monkeypatch.setattr(
        script, "EmbeddedEngine", lambda *args, **named: (options.update(named), build(*args, **named))[1]
    )
    monkeypatch.setattr("sys.argv", [*sys.argv, "--dtype", dtype])
    assert script.main() == 0
    assert "nothing differs" in capsys.readouterr().out
    assert options["speculation"] is False, "layers one by one cannot compute drafts"


@pytest.mark.parametrize("layer", [0, 1])
def test_the_first_changed_layer_is_named(
    script: ModuleType, layer: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load, models = script.load_decoder, list[Any]()

    def load_changed(*args: Any, **named: Any) -> Any:
        models.append(model := load(*args, **named))
        if len(models) == 2:  # the trainer's
            with torch.no_grad():
                next(iter(list(model.layers())[layer].parameters())).add_(1e-3)
        return model

    monkeypatch.setattr(script, "load_decoder", load_changed)
    assert script.main() == 1
    assert f"begins in layer {layer};" in capsys.readouterr().out
