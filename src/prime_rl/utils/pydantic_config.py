"""Configuration of every command: `BaseConfig`, and parsing of an argument list into a validated config."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator

from prime_rl.configuration.errors import COMMAND_LINE, join_errors, translate
from prime_rl.configuration.merge import ConfigBuilder
from prime_rl.configuration.schema import KeyPath, default_of, field_schema, variant
from prime_rl.configuration.sources import apply_options, read_arguments, read_environment, read_file
from rollouts.training.files import replace_file

Config = TypeVar("Config", bound="BaseConfig")
Provenance = dict[str, str]


class BaseConfig(BaseModel):
    """A section or a whole configuration: unknown keys are errors, and values are immutable after parsing."""

    # No use_attribute_docstrings: it parses the source of every class at import, a sixth of each process's start.
    # `configuration.help` reads the docstrings when it needs them.
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    spellings: ClassVar[Mapping[str, str]] = {}
    """Alternative documented names of keys: name -> dotted key below this section."""

    main_keys: ClassVar[Sequence[str]] = ()
    """For the class of a command: the dotted keys that `--help` shows; none: all."""

    dependents: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Key -> keys of its value: those of lower layers are removed when it changes, texts only if they repeat it."""

    @cached_property
    def provenance(self) -> Provenance:
        """Dotted key -> source of its value; missing keys have their default."""
        return {}

    @cached_property
    def given(self) -> frozenset[str] | None:
        """For a parsed config: dotted keys whose values were given and not derived."""
        return None

    @cached_property
    def notes(self) -> list[str]:
        """Messages for the user about values that parsing changed or ignored."""
        return []

    def changed_keys(self) -> set[str]:
        """Keys whose value is not the default. `model_fields_set` has every key once a file was written and read."""
        values, fields = dict(self), type(self).model_fields
        defaults = {k: f.get_default(call_default_factory=True, validated_data=values) for k, f in fields.items()}
        return {key for key, value in values.items() if value != defaults[key]}

    def for_later_starts(self, values: Mapping[str, Any]) -> Self:
        """A copy to record, with other values of dotted keys, whose sections are on."""
        changes: dict[str, Any] = {}
        for key, value in values.items():
            name, _, rest = key.partition(".")
            section = changes.get(name, getattr(self, name))
            changes[name] = section.for_later_starts({rest: value}) if rest else value
        later = self.model_copy(update=changes)
        later.__dict__["provenance"] = {**self.provenance, **dict.fromkeys(values, "later starts")}
        if self.given is not None:
            later.__dict__["given"] = self.given.union(values)
        return later

    @model_validator(mode="before")
    @classmethod
    def _complete_sections(cls, data: Any) -> Any:
        """Complete a partially given section with the values and the type of this class's default for it."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for name, field in cls.model_fields.items():
            if not isinstance(data.get(name), dict) or field.is_required():
                continue
            default = default_of(field)
            if not isinstance(default, BaseModel):
                continue
            given, schema = data[name], field_schema(field)
            if schema.tag and variant(schema, given.get(schema.tag, getattr(default, schema.tag))) is not type(default):
                continue
            tag = {schema.tag: getattr(default, schema.tag)} if schema.tag else {}
            data[name] = merge_tables({**default.model_dump(exclude_unset=True), **tag}, given)
        return data


def note_source(info: ValidationInfo, key: str, source: str) -> None:
    """For validators that fill keys: record that the dotted `key` got its value from `source`."""
    if isinstance(info.context, dict):
        info.context["sources"][key] = source


def find_source_key(info: ValidationInfo, key: str) -> str:
    """For messages of validators: the dotted key as it was given, from the top, whose end is `key`."""
    sources = info.context["sources"] if isinstance(info.context, dict) else {}
    return next((known for known in sources if f".{known}".endswith(f".{key}")), key)


def note(info: ValidationInfo, text: str) -> None:
    """For validators: one line that the command prints before it starts."""
    if isinstance(info.context, dict):
        info.context["notes"].append(text)


def parse_argv(
    config_cls: type[Config], argv: Sequence[str], prog: str, environ: Mapping[str, str] | None = None
) -> tuple[Config, Provenance]:
    """Parse an argument list (without the program) into a config and the source of each value.

    Raises ConfigError with all unknown keys and wrong values, else with all values that do not fit together.

    Precedence: options > `@` files from left to right > PRIME_A__B variables > defaults.
    """
    builder = ConfigBuilder(config_cls, prog)
    arguments = read_arguments(builder, argv)
    notes = _read_lower_layers(builder, arguments.files, os.environ if environ is None else environ)
    apply_options(builder, arguments.options)
    config = _build(config_cls, builder, notes, COMMAND_LINE)
    return config, config.provenance


def parse_settings(
    config_cls: type[Config], settings: Mapping[str, Any], prog: str, files: Sequence[str] = ()
) -> Config:
    """Parse dotted keys with their values into a config.

    Precedence: `settings` > `files` from left to right > PRIME_A__B variables > defaults.

    Raises ConfigError as `parse_argv` does; `prog` is the source of the settings in messages.
    """
    builder = ConfigBuilder(config_cls, prog)
    notes = _read_lower_layers(builder, [((), name) for name in files], os.environ)
    paths = {tuple(key.split(".")): value for key, value in settings.items()}
    for path in sorted(paths, key=lambda path: not builder.goes_first(path)):
        with builder.collect_errors():
            builder.put(path, paths[path], lambda _: prog)
    return _build(config_cls, builder, notes, prog)


def _read_lower_layers(
    builder: ConfigBuilder, files: Sequence[tuple[KeyPath, str]], environ: Mapping[str, str]
) -> list[str]:
    """Merge variables, then files; returns warnings."""
    notes = [f"warning: {text}" for text in read_environment(builder, environ)]
    for prefix, name in files:
        with builder.collect_errors():
            read_file(builder, prefix, name)
    return notes


def _build(config_cls: type[Config], builder: ConfigBuilder, notes: list[str], options: str) -> Config:
    """Validate the merged values; raises ConfigError with all problems. `options`: the source of the top layer."""
    if builder.errors:
        raise join_errors(builder.errors)
    notes += builder.notes
    given = dict(builder.sources)
    context = {"sources": builder.sources, "notes": notes, "options": options}
    try:
        config = config_cls.model_validate(builder.values, context=context)
    except ValidationError as error:
        raise translate(error.errors(), builder.root, builder.sources, builder.prog) from None
    _attach_sources(config, builder.sources)
    config.__dict__["given"] = frozenset(key for key in given if builder.sources[key] == given[key])
    config.notes.extend(notes)
    return config


def write_config(config: BaseConfig, path: Path, provenance: Mapping[str, str] | None = None) -> None:
    """Write the resolved config as TOML that `@` reads back, with the source of each value as a comment.

    It may contain secrets (headers, environment arguments), so only its owner may read it.
    """
    from prime_rl.configuration.render import render_toml

    replace_file(path, render_toml(config, config.provenance if provenance is None else provenance), mode=0o600)


def write_record(config: BaseConfig, path: Path) -> None:
    """Write a parsed config for later starts: it sets the keys that were given, and has the others as comments.

    What follows from a key then follows from the option that replaces it.
    """
    from prime_rl.configuration.render import render_toml

    replace_file(path, render_toml(config, config.provenance, config.given), mode=0o600)


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
