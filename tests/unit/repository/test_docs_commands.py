"""The commands of some pages, such as evaluation, search and synthesis: every line of their shell blocks parses."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from prime_rl.utils.pydantic_config import parse_argv

ROOT = Path(__file__).parents[3]
CLASSES = {
    "eval": ("prime_rl.eval.config", "EvalConfig"),
    "evolve": ("prime_rl.evolve.config", "EvolveConfig"),
    "synthesize": ("prime_rl.synthesize.config", "SynthesizeConfig"),
    "rl": ("prime_rl.config", "RLConfig"),
    "sft": ("prime_rl.trainer.config", "SFTConfig"),
    "trainer": ("prime_rl.trainer.config", "TrainConfig"),
    "plan": ("prime_rl.plan.config", "PlanConfig"),
    "serve": ("prime_rl.training_api.config", "ServeConfig"),
    "inference": ("prime_rl.inference.config", "InferenceConfig"),
}
LINES = [
    line.removeprefix("env ")
    for page in ("evaluation", "evolve", "synthesis", "trackers", "planning", "training_api")
    for block in re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(), re.DOTALL)
    for line in block.replace("\\\n", "").splitlines()
    if not line.startswith("export ")
]


@pytest.mark.parametrize("line", LINES)
def test_a_documented_command_parses(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command, *argv = shlex.split(line, comments=True)
    module, name = CLASSES[command]
    config, sources = parse_argv(getattr(importlib.import_module(module), name), argv, command, {})
    assert sources and not [note for note in config.notes if note.startswith("warning")]


def test_clients_are_shown_with_the_served_model_name() -> None:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    [served] = re.findall(r"--served-model-name (\S+)", page)
    requested = re.findall(r"model=\"?(\w+)|-m (\w+)", page)
    assert len(requested) == 4 and {first or second for first, second in requested} == {served}
