"""Configuration of every command: `BaseConfig`, and from an argument list to a checked config or a clear message."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator

from prime_rl.utils.config_draft import Draft
from prime_rl.utils.config_errors import ConfigError, translate
from prime_rl.utils.config_keys import field_shape, variant
from prime_rl.utils.config_sources import apply_options, read_arguments, read_environment, read_file

__all__ = [
    "BaseConfig",
    "ConfigError",
    "merge_tables",
    "note",
    "note_source",
    "parse_argv",
    "write_config",
]

Config = TypeVar("Config", bound="BaseConfig")
Provenance = dict[str, str]


class BaseConfig(BaseModel):
    """A section or a whole configuration: unknown keys are errors, and nothing is written to after parsing."""

    # What stands below a field is read where the help needs it: pydantic would parse the source of every class
    # at import, a sixth of the start of every process.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    spellings: ClassVar[Mapping[str, str]] = {}
    """Other documented names of keys: name -> dotted key below this section."""

    @cached_property
    def provenance(self) -> Provenance:
        """Dotted key -> where its value came from; keys that are missing have their default."""
        return {}

    @cached_property
    def notes(self) -> list[str]:
        """What was changed or ignored while parsing, for the user to read."""
        return []

    @model_validator(mode="before")
    @classmethod
    def _complete_sections(cls, data: Any) -> Any:
        """A section given in part keeps the other values, and the type, of the default that this class has for it."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for name, field in cls.model_fields.items():
            if not isinstance(data.get(name), dict) or field.is_required():
                continue
            default = field.get_default(call_default_factory=True)
            if not isinstance(default, BaseModel):
                continue
            given, shape = data[name], field_shape(field)
            if shape.tag and variant(shape, given.get(shape.tag, getattr(default, shape.tag))) is not type(default):
                continue
            tag = {shape.tag: getattr(default, shape.tag)} if shape.tag else {}
            data[name] = merge_tables({**default.model_dump(exclude_unset=True), **tag}, given)
        return data


def note_source(info: ValidationInfo, key: str, source: str) -> None:
    """For validators that fill keys: record that the dotted `key` got its value from `source`."""
    if isinstance(info.context, dict):
        info.context["sources"][key] = source


def note(info: ValidationInfo, text: str) -> None:
    """For validators: one line that the command prints before it starts."""
    if isinstance(info.context, dict):
        info.context["notes"].append(text)


def parse_argv(
    config_cls: type[Config], argv: Sequence[str], prog: str, environ: Mapping[str, str] | None = None
) -> tuple[Config, Provenance]:
    """The config of an argument list (without the program) and the source of each value; raises ConfigError.

    Precedence: options > `@` files from left to right > PRIME_A__B variables > defaults.
    """
    draft = Draft(config_cls, prog)
    arguments = read_arguments(draft, argv)
    notes = [f"warning: {text}" for text in read_environment(draft, os.environ if environ is None else environ)]
    for prefix, name in arguments.files:
        read_file(draft, prefix, name)
    apply_options(draft, arguments.options)
    context = {"sources": draft.sources, "notes": notes}
    try:
        config = config_cls.model_validate(draft.values, context=context)
    except ValidationError as error:
        raise translate(error.errors(), draft.root, draft.sources, prog) from None
    _attach_sources(config, draft.sources)
    config.notes.extend(notes)
    return config, config.provenance


def write_config(config: BaseConfig, path: Path, provenance: Mapping[str, str] | None = None) -> None:
    """Write the resolved config as TOML that `@` reads back, with the source of each value as a comment.

    It may hold keys (headers, arguments of environments), so its owner alone may read it.
    """
    from prime_rl.utils.config_toml import render_toml

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.touch(0o600)
    temporary.write_text(render_toml(config, config.provenance if provenance is None else provenance), encoding="utf-8")
    temporary.replace(path)


def merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, key by key at any depth."""
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merge_tables(result[key], value) if both else value
    return result


def _attach_sources(config: BaseConfig, sources: Mapping[str, str]) -> None:
    """Give each section its own view of the sources, so that a part can be written out alone."""
    config.provenance.update(sources)
    for name in type(config).model_fields:
        section = getattr(config, name)
        if isinstance(section, BaseConfig):
            below = {key[len(name) + 1 :]: source for key, source in sources.items() if key.startswith(name + ".")}
            _attach_sources(section, below)
