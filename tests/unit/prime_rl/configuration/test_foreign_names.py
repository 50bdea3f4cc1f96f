"""Names of TRL, verl and prime-rl: every one has a key or advice here, and the page lists them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prime_rl.config import RLConfig
from prime_rl.configuration.errors import ConfigError
from prime_rl.configuration.foreign_names import (
    PRIME_RL,
    PRIME_RL_VALUES,
    PRIME_RL_WITHOUT_KEY,
    TRL,
    VERL,
    advise,
    translate_name,
)
from prime_rl.configuration.schema import FieldSchema, all_keys, child, section_schema, suggest_key
from prime_rl.eval.config import EvalConfig
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.trainer.config import SFTConfig
from prime_rl.utils.pydantic_config import parse_argv

PAGE = Path(__file__).parents[4] / "docs" / "coming_from.md"


@pytest.mark.parametrize("name", [*TRL, *VERL, *PRIME_RL])
def test_every_name_has_a_key_of_rl_or_sft(name: str) -> None:
    path = tuple(name.split("."))
    assert translate_name(path, section_schema(RLConfig)) or translate_name(path, section_schema(SFTConfig))


def test_commands_have_the_keys_of_their_section_at_the_top() -> None:
    assert translate_name(("lora_r",), section_schema(RLConfig)) == ("trainer.model.lora.rank", "lora_r in TRL")
    assert translate_name(("lora-r",), section_schema(SFTConfig)) == ("model.lora.rank", "lora_r in TRL")
    assert translate_name(("num_generations",), section_schema(EvalConfig)) is not None
    assert translate_name(("nonsense",), section_schema(RLConfig)) is None


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("trainer.model.tp 1", "did you mean --trainer.parallel.tp? (trainer.model.tp in prime-rl)"),
        ("trainer.loss.geo-mask-low 0.1", "did you mean --trainer.loss.seq_ratio_mask_low?"),
        ("orchestrator.eval.env.1.skip_first 0", "leave it out: num_examples takes the first rows (a key of prime-rl)"),
        ("trainer.tokenizer.name x", "leave it out: the tokenizer is the model's"),
        ("trainer.model.attn flash_attention_2", "did you mean flash?"),
        ("trainer.loss.ratio sequence", "did you mean product?"),
    ],
)
def test_errors_advise_on_keys_of_prime_rl(option: str, hint: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_argv(RLConfig, f"--{option}".split(), "rl")
    assert hint in str(raised.value)


def test_names_of_prime_rl_are_unknown_and_their_keys_known() -> None:
    roots = [section_schema(config) for config in (RLConfig, SFTConfig, EvalConfig)]
    known = {key for root in roots for key in all_keys(root)}
    assert not (PRIME_RL.keys() | PRIME_RL_WITHOUT_KEY) & known, "a key that exists is not refused"
    assert set(PRIME_RL.values()) <= known
    advice = " ".join(PRIME_RL_WITHOUT_KEY.values())
    assert set(re.findall(r"[a-z_]+(?:\.[a-z_]+)+", advice)) <= known


def test_values_of_prime_rl_have_one_of_the_same_key() -> None:
    root = section_schema(RLConfig)
    choices = [find_choices(root, key) for key in all_keys(root)]
    for value, own in PRIME_RL_VALUES.items():
        assert any(own in found and value not in found for found in choices), value


def find_choices(root: FieldSchema, key: str) -> tuple[object, ...]:
    schema: FieldSchema | None = root
    for part in key.split("."):
        schema = child(schema, part) if schema else None
    return schema.choices if schema else ()


def test_advice_applies_to_the_command_of_a_section() -> None:
    orchestrator, evaluation = section_schema(OrchestratorConfig), section_schema(EvalConfig)
    assert translate_name(("workers_per_env",), orchestrator) is not None
    assert (advise(("eval", "save", "disk"), orchestrator) or "").startswith("leave it out: results are always written")
    assert (advise(("save",), evaluation) or "").startswith("leave it out: results are always written")
    assert advise(("save",), section_schema(RLConfig)) is None and advise(("nonsense",), evaluation) is None


def test_suggestions_stay_close() -> None:
    root = section_schema(RLConfig)
    assert suggest_key("orchestrator.workers_per_env", root) is None, "as long a prefix is no likeness"
    assert suggest_key("trainer.model.tp", root) == "trainer.parallel.tp"
    assert suggest_key("trainer.optm.lrr", root) == "trainer.optim.lr"
    assert suggest_key("trainer-model-dtype", root) == "trainer.model.dtype"
    assert suggest_key("trainer.model-lora-rank", root) == "trainer.model.lora.rank"


def test_the_page_lists_every_name_of_prime_rl() -> None:
    text = PAGE.read_text().split("## prime-rl\n")[1]
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE))
    renamed = {name: f"`{key}`" for name, key in (PRIME_RL | PRIME_RL_VALUES).items()}
    assert rows == renamed | PRIME_RL_WITHOUT_KEY


@pytest.mark.parametrize(("project", "table"), [("TRL", TRL), ("verl", VERL)])
def test_the_page_lists_every_name(project: str, table: dict[str, str]) -> None:
    text = PAGE.read_text().split(f"## {project}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE)
    expected = {name: ", ".join(f"`{key}`" for key in keys.split()) for name, keys in table.items()}
    assert dict(rows) == expected
