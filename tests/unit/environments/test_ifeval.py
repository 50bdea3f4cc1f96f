"""IFEval: rewards are those of the checkers of lm-eval, which are replaced by a fake."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PATH = Path(__file__).parents[3] / "environments" / "ifeval" / "ifeval.py"
ROWS = [{"key": i, "prompt": f"Say {i}.", "instruction_id_list": ["a", "b"], "kwargs": [{}, {}]} for i in range(5)]


def load(path: Path, end: str = "", **arguments: Any) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + end, encoding="utf-8-sig")
    spec = importlib.util.spec_from_file_location("ifeval", PATH)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    found: dict[str, Any] = module.load_environment(str(path), **arguments)
    return found


@pytest.fixture
def fake_checkers(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = ModuleType("lm_eval.tasks.ifeval.utils")

    def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, Any]:
        followed = [str(doc["key"]) in results[0], len(results[0]) < 3]
        strict = all(followed)
        return {
            "prompt_level_strict_acc": strict,
            "prompt_level_loose_acc": any(followed),
            "inst_level_strict_acc": followed,
        }

    utils.process_results = process_results  # type: ignore[attr-defined]
    package = ModuleType("lm_eval.tasks.ifeval")
    package.utils = utils  # type: ignore[attr-defined]
    for name, module in {"lm_eval": ModuleType("lm_eval"), "lm_eval.tasks": ModuleType("lm_eval.tasks")}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.ifeval", package)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.ifeval.utils", utils)


@pytest.mark.usefixtures("fake_checkers")
def test_rewards_are_those_of_the_checkers(tmp_path: Path) -> None:
    environment = load(tmp_path / "rows.jsonl")
    assert [row["prompt"] for row in environment["eval_dataset"]] == [row["prompt"] for row in ROWS]
    row = environment["dataset"][3]["info"]
    values = {
        text: [function(completion=text, info=row) for function, _ in environment["rewards"]]
        for text in ("3", "345", "12")
    }
    assert values == {"3": [1.0, 1.0, 1.0], "345": [0.0, 1.0, 0.5], "12": [0.0, 1.0, 0.5]}
    assert [weight for _, weight in environment["rewards"]] == [1.0, 0.0, 0.0]


@pytest.mark.usefixtures("fake_checkers")
def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 6 is not valid JSON"):
        load(tmp_path / "rows.jsonl", end="{'key'}\n")


@pytest.mark.usefixtures("fake_checkers")
def test_drawn_prompts_depend_on_the_seed_alone(tmp_path: Path) -> None:
    drawn = [load(tmp_path / "rows.jsonl", num_examples=3, seed=seed)["dataset"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and len(drawn[0]) == 3


def test_missing_checkers_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match="pip install 'lm-eval"):
        load(tmp_path / "rows.jsonl")
