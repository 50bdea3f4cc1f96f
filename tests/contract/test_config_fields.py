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


def attributes_read() -> set[str]:
    """Names behind a dot anywhere in the sources, and fields in the templates of job files."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py")]
    templates = " ".join(path.read_text() for path in (ROOT / "src").glob("*/assets/deployment/*"))
    fields = set(re.findall(r"\bconfig\.(\w+)", templates))
    return fields | {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_every_field_is_read() -> None:
    read = attributes_read()
    fields = [(cls.__name__, field) for cls in config_classes() for field in cls.model_fields if field not in read]
    unread = {f"{cls}.{field}" for cls, field in fields if cls not in READ_AS_A_WHOLE}
    assert unread - READ_AS_A_WHOLE.keys() == set(), "fields that no code reads: use or remove them"
    assert len(config_classes()) > 50
