"""The pages of --help: one screen with the main keys, the keys of a section, every key."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from prime_rl.configuration.errors import ConfigError
from prime_rl.configuration.help import render_help
from prime_rl.configuration.schema import all_keys, section_schema
from prime_rl.utils.pydantic_config import BaseConfig, parse_argv

COMMANDS = {
    "rl": "prime_rl.config:RLConfig",
    "sft": "prime_rl.trainer.config:SFTConfig",
    "trainer": "prime_rl.trainer.config:TrainConfig",
    "orchestrator": "prime_rl.orchestrator.config:OrchestratorConfig",
    "inference": "prime_rl.inference.config:InferenceConfig",
    "eval": "prime_rl.eval.config:EvalConfig",
    "evolve": "prime_rl.evolve.config:EvolveConfig",
    "synthesize": "prime_rl.synthesize.config:SynthesizeConfig",
    "plan": "prime_rl.plan.config:PlanConfig",
    "serve": "prime_rl.training_api.config:ServeConfig",
}
MAX_LINES, MAX_WIDTH = 60, 120


def load(prog: str) -> type[BaseConfig]:
    module, _, name = COMMANDS[prog].partition(":")
    cls: type[BaseConfig] = getattr(importlib.import_module(module), name)
    return cls


def show(prog: str, topic: str | None = None, config: Any = None) -> str:
    return render_help(prog, load(prog), config, "What it does.", topic)


@pytest.mark.parametrize("prog", COMMANDS)
def test_the_main_keys_fit_on_one_screen(prog: str) -> None:
    lines = show(prog).splitlines()
    assert len(lines) <= MAX_LINES and max(map(len, lines)) <= MAX_WIDTH
    keys = all_keys(section_schema(load(prog)))
    for key in load(prog).main_keys:
        assert key in keys, "a main key that does not exist"
        assert sum(line.startswith(f"  {key} ") for line in lines) == 1


@pytest.mark.parametrize("prog", COMMANDS)
def test_every_key_is_on_the_page_of_all_keys(prog: str) -> None:
    text = show(prog, "all")
    for key in all_keys(section_schema(load(prog))):
        name = key.split(".")[-1]
        assert f"  {name} " in text or f"{name}]" in text, key


def test_a_section_is_shown_with_the_sections_below_it() -> None:
    text = show("rl", "trainer.optim")
    assert text.startswith('[trainer.optim] type = "adamw" (chosen)') and "betas1" in text and "[model]" not in text
    assert "[[orchestrator.env]]" in show("rl", "orchestrator.env") and "num_workers" in show("rl", "orchestrator.env")
    assert "[trainer.model.lora] off" in show("rl", "trainer.model")
    assert "max_steps  int  unset" in show("rl", "max_steps") and "max_steps  int" in show("rl", "--max-steps")


def test_values_of_files_and_options_replace_the_defaults() -> None:
    options = ["--max_steps", "7", "--trainer.scheduler.type", "cosine", "--trainer.model.lora.alpha", "8"]
    config, _ = parse_argv(load("rl"), options, "rl", {})
    lines = {line.split()[0]: line for line in show("rl", config=config).splitlines() if line.startswith("  ")}
    assert "7" in lines["max_steps"] and "(CLI)" in lines["max_steps"]
    assert '"cosine"' in lines["trainer.scheduler.type"]
    assert "8.0" in lines["trainer.model.lora.alpha"], "given, so it is shown beside the main keys"
    assert "trainer.seed" not in lines, "copied from another key, so it is not"


def test_defaults_that_do_not_apply_are_not_shown() -> None:
    def line(key: str, *options: str) -> list[str]:
        config = parse_argv(load("sft"), options, "sft", {})[0] if options else None
        return next(line for line in show("sft", config=config).splitlines() if line.startswith(f"  {key} ")).split()

    assert line("optim.lr")[1] == "<float>", "it depends on the command and on LoRA"
    assert line("optim.lr", "--max_steps", "7")[1] == "2e-05"
    assert line("optim.lr", "--model.lora.rank", "4")[1] == "0.0002"
    assert line("scheduler.warmup_steps")[1] == "off", "the schedule is constant"
    assert line("scheduler.warmup_steps", "--scheduler.type", "linear", "--max_steps", "50")[1] == "10"


def test_a_meaning_is_never_cut_into_another_one() -> None:
    """Whole sentences, or a mark that something is missing."""
    for prog in COMMANDS:
        keys = set(all_keys(section_schema(load(prog))))
        for line in show(prog).split("Main keys:")[1].split("Sections")[0].splitlines():
            name, _, meaning = line[2:].partition(" ")
            if name not in keys or not meaning or meaning.endswith("..."):
                continue
            whole = " ".join(show(prog, name).split())
            ending = meaning.split("  ")[-1].strip()
            assert f"{ending}." in whole, (prog, line)


def test_an_unknown_topic_has_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"did you mean --help trainer\.optim\?"):
        show("rl", "trainer.optm")
