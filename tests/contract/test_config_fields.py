"""Every field of every configuration is used in the code."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from pydantic import BaseModel

ROOT = Path(__file__).parents[2]
MODULES = [
    "prime_rl.config",
    "prime_rl.config_teacher",
    "prime_rl.configuration.sections",
    "prime_rl.orchestrator.distillation.config",
    *(
        f"prime_rl.{package}.config"
        for package in ("trainer", "orchestrator", "inference", "eval", "synthesize", "plan", "deployment")
    ),
]
READ_AS_A_WHOLE = {
    "SlurmDeployment": "the template of the job sees every key: `model_dump`",
    "LossMaskConfig": "the roles with loss: `model_dump`",
    "LossConfig.delta": "overrides the preset's of the same name: `getattr`",
}


def config_classes() -> set[type[BaseModel]]:
    """Every class of fields of the configuration modules."""
    members = [value for name in MODULES for value in vars(importlib.import_module(name)).values()]
    return {value for value in members if isinstance(value, type) and issubclass(value, BaseModel)}


def find_unread(fields: set[str]) -> set[str]:
    """Those of the names that are in no template of a job file, and behind no dot anywhere in the sources."""
    templates = " ".join(path.read_text() for path in (ROOT / "src").glob("*/assets/deployment/*"))
    unread = fields - set(re.findall(r"\bconfig\.(\w+)", templates))
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text()
        if not unread.isdisjoint(re.findall(r"\.\s*(\w+)", text)):  # quicker than the tree, which has no comments
            unread -= {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    return unread


def test_every_field_is_read() -> None:
    fields = [(cls.__name__, field) for cls in config_classes() for field in cls.model_fields]
    names = find_unread({field for _, field in fields})
    unread = {f"{cls}.{field}" for cls, field in fields if field in names and cls not in READ_AS_A_WHOLE}
    assert unread - READ_AS_A_WHOLE.keys() == set(), "fields that no code reads: use or remove them"
    assert len(config_classes()) > 50
