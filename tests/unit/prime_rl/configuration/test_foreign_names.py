"""Names of TRL and verl: every one has a key here, and the page lists them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prime_rl.config import RLConfig
from prime_rl.configuration.foreign_names import TRL, VERL, translate_name
from prime_rl.configuration.schema import section_schema
from prime_rl.eval.config import EvalConfig
from prime_rl.trainer.config import SFTConfig

PAGE = Path(__file__).parents[4] / "docs" / "coming_from.md"


@pytest.mark.parametrize("name", [*TRL, *VERL])
def test_every_name_has_a_key_of_rl_or_sft(name: str) -> None:
    path = tuple(name.split("."))
    assert translate_name(path, section_schema(RLConfig)) or translate_name(path, section_schema(SFTConfig))


def test_commands_have_the_keys_of_their_section_at_the_top() -> None:
    assert translate_name(("lora_r",), section_schema(RLConfig)) == ("trainer.model.lora.rank", "lora_r in TRL")
    assert translate_name(("lora-r",), section_schema(SFTConfig)) == ("model.lora.rank", "lora_r in TRL")
    assert translate_name(("num_generations",), section_schema(EvalConfig)) is not None
    assert translate_name(("nonsense",), section_schema(RLConfig)) is None


@pytest.mark.parametrize(("project", "table"), [("TRL", TRL), ("verl", VERL)])
def test_the_page_lists_every_name(project: str, table: dict[str, str]) -> None:
    text = PAGE.read_text().split(f"## {project}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \|$", text, re.MULTILINE)
    expected = {name: ", ".join(f"`{key}`" for key in keys.split()) for name, keys in table.items()}
    assert dict(rows) == expected
