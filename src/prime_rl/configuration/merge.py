"""Merge configuration layers: parse each value by the schema of its key and record its source."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from prime_rl.configuration.errors import COMMAND_LINE, ConfigError, explain, fail, name_key, unknown_key, wrong_value
from prime_rl.configuration.schema import FieldSchema, KeyPath, child, default_of, fields_of, section_schema, variant

Label = Callable[[KeyPath], str]
TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")


class RawString(str):
    """An unparsed text value from the command line or environment."""


def read_json(text: str) -> Any:
    """Parse JSON from an option's value; raises ValueError with the problem and the fix."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply", "write fewer brackets, or a TOML file") from None
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}", "strings and keys in JSON need double quotes") from None


def read_any(text: str) -> Any:
    """The parsed value if the text is JSON, otherwise the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return str(text)


def read_text(text: str, schema: FieldSchema) -> Any:
    """Parse a text by the schema of its key; entries of lists and tables stay unparsed."""
    typed = isinstance(text, RawString)
    if schema.optional and (text == "None" or (typed and text == "null")):
        return None
    if schema.kind == "any":
        return read_any(text) if typed else text
    if schema.kind == "scalar":
        return next((choice for choice in schema.choices if typed and str(choice) == text), str(text))
    if text.lstrip()[:1] in ("{", "["):
        value = read_json(text)
        return [value] if schema.kind == "list" and isinstance(value, dict) else value
    if schema.kind == "list":
        if schema.item and schema.item.kind in ("section", "dict"):
            inner = next(iter(fields_of(schema.item)), "key")
            raise ValueError("is a list of sections", f"give JSON, or key by key with an index: {{key}}.0.{inner}")
        return [RawString(part) for part in split_list(text, schema)]
    if schema.kind == "section":
        if schema.optional and text.lower() in TRUE_WORDS + FALSE_WORDS:
            return {} if text.lower() in TRUE_WORDS else None
        inner = next(iter(fields_of(schema)), "key")
        raise ValueError("is a section, not a single value", f"give JSON, or key by key: {{key}}.{inner}")
    key, equals, item = text.partition("=")
    if not equals:
        raise ValueError("is a table, not a single value", "give JSON, or {key} name=value")
    return {key.strip(): RawString(item)}


def split_list(text: str, schema: FieldSchema) -> list[str]:
    """The entries of a comma-separated list; raises `ValueError` for a text with none.

    Entries of free text, such as stop sequences, keep their spaces, except for one after a comma.
    """
    if schema.item is not None and schema.item.is_free_text:
        return [part for part in re.split(", ?", text) if part] or ([text] if text else [])
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if text and not parts:
        raise ValueError("has no entries", "write [] for an empty list")
    return parts


def plain(value: Any) -> Any:
    """A configuration value as tables, lists and single values."""
    if isinstance(value, BaseModel):
        # Unset fields without a fixed default are derived from other keys by validation, which will run again.
        fields, was_set = type(value).model_fields, value.model_fields_set
        names = [name for name, field in fields.items() if name in was_set or default_of(field) is not None]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple | set | frozenset) else value


class ConfigBuilder:
    """The merged values so far (`values`), the source of each dotted key (`sources`), and the `errors` found."""

    def __init__(self, config_cls: type[BaseModel], prog: str) -> None:
        self.root = section_schema(config_cls)
        self.prog = prog
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}
        self.errors: list[ConfigError] = []
        self.notes: list[str] = []

    @contextmanager
    def collect_errors(self) -> Iterator[None]:
        """Record a `ConfigError` of the body instead of raising it."""
        try:
            yield
        except ConfigError as error:
            self.errors.append(error)

    def find(self, path: KeyPath) -> tuple[KeyPath, FieldSchema] | None:
        """The normalized key and its schema; None if there is no such key."""
        normalized: KeyPath = ()
        schema = self.root
        for index, part in enumerate(path):
            if schema.kind == "section":
                part = part.replace("-", "_")
                spellings = getattr(schema.sections[0], "spellings", {})
                if child(schema, part) is None and part in spellings:
                    return self.find((*normalized, *spellings[part].split("."), *path[index + 1 :]))
            below = child(schema, part)
            if below is None:
                return None
            normalized, schema = (*normalized, part), below
        return normalized, schema

    def merge(self, table: dict[str, Any], label: Label, prefix: KeyPath = ()) -> None:
        """Merge a table into the values: tables key by key, everything else is replaced."""
        for key in sorted(table, key=lambda key: not self.goes_first((*prefix, str(key)))):
            with self.collect_errors():
                self.put((*prefix, str(key)), table[key], label)

    def goes_first(self, path: KeyPath) -> bool:
        """Whether other keys of its section depend on this one, so that it is set before them."""
        located = self.find(path[:-1])
        if located is None or located[1].kind != "section":
            return False
        return located[1].tag == path[-1] or path[-1] in getattr(located[1].sections[0], "dependents", {})

    def put(self, path: KeyPath, value: Any, label: Label) -> None:
        """Set one key; raises ConfigError for an unknown key or an invalid value."""
        source = label(path)
        located = self.find(path)
        if located is None:
            raise unknown_key(path, source, self.root, self.prog)
        path, schema = located
        value = self._read(value, path, schema, source)
        parent, key = self._open(path, source)
        if schema.kind == "section" and isinstance(value, dict):
            self._set(parent, key, parent[key] if isinstance(_get(parent, key), dict) else {})
            self.sources[".".join(path)] = source
            self.merge(value, label, path)
        elif schema.kind in ("dict", "any") and isinstance(value, dict):
            self._set(parent, key, parent[key] if value and isinstance(_get(parent, key), dict) else {})
            if not value:  # an empty table removes the entries of lower layers
                self._forget(path)
                self.sources[".".join(path)] = source
            for name, item in value.items():
                self.put((*path, str(name)), item, label)
        elif schema.kind == "list" and isinstance(value, list):
            self._forget(path)
            self._set(parent, key, [])
            self.sources[".".join(path)] = source
            for index, item in enumerate(value):
                self.put((*path, str(index)), item, label)
        else:
            self._forget(path)
            self._drop_other_variant(path, value, parent)
            self._drop_dependents(path, value, parent, source)
            self._set(parent, key, value)
            self.sources[".".join(path)] = source

    def _read(self, value: Any, path: KeyPath, schema: FieldSchema, source: str) -> Any:
        given = value
        try:
            if isinstance(value, list) and value and all(isinstance(item, RawString) for item in value):
                given = " ".join(value)
                value = _read_tokens(value, schema)
            elif isinstance(value, str):
                value = read_text(value, schema)
            elif schema.kind == "any":
                value = _unset_none(value)
        except ValueError as error:
            problem, hint = error.args
            hint = hint.replace("{key}", ("--" if source == COMMAND_LINE else "") + ".".join(path))
            raise wrong_value(path, given, source, problem, hint, schema) from None
        if schema.kind in ("section", "list", "dict") and isinstance(value, dict if schema.kind != "list" else list):
            return value
        if schema.kind == "list" and value is not None and not isinstance(value, dict):
            return [value]
        if isinstance(value, bool) and schema.is_number:
            raise wrong_value(path, given, source, "must be a number, not a switch", None, schema)
        if isinstance(value, float) and math.isnan(value):
            raise wrong_value(path, given, source, "must be a number, not nan", None, schema)
        try:
            read = TypeAdapter(schema.annotation).validate_python(value)
        except ValidationError as error:
            raise wrong_value(path, given, source, *explain(error.errors()[0], schema), schema) from None
        if isinstance(read, Path) and value == "":  # such as an unset variable of a shell
            raise wrong_value(path, given, source, "is an empty path", "write . for the working directory", schema)
        return Path(os.path.expanduser(read)) if isinstance(read, Path) else read

    def _open(self, path: KeyPath, source: str) -> tuple[Any, Any]:
        """The table or list that contains `path`, created if missing, and the key in it."""
        node: Any = self.values
        for depth, part in enumerate(path[:-1], 1):
            key = self._key(node, part, path[:depth], source)
            below = _get(node, key)
            if not isinstance(below, dict | list):
                below = self._default_list(path[:depth]) if self._schema_at(path[:depth]).kind == "list" else {}
                self._set(node, key, below)
                if (name := ".".join(path[:depth])) in self.sources:  # off until now: this key switches it on
                    self.sources[name] = source
            node = below
        return node, self._key(node, path[-1], path, source)

    @staticmethod
    def _key(node: Any, part: str, path: KeyPath, source: str) -> Any:
        if not isinstance(node, list):
            return part
        if not part.isdecimal():
            raise fail(
                f"{name_key(path, source)}: {part!r} is no index of a list", f"the next free index is {len(node)}"
            )
        if int(part) > len(node):
            raise fail(f"{name_key(path, source)}: the list ends before", f"the next free index is {len(node)}")
        return int(part)

    @staticmethod
    def _set(node: Any, key: Any, value: Any) -> None:
        if isinstance(node, list) and key == len(node):
            node.append(value)
        else:
            node[key] = value

    def _schema_at(self, path: KeyPath) -> FieldSchema:
        located = self.find(path)
        assert located is not None
        return located[1]

    def _default_list(self, path: KeyPath) -> list[Any]:
        """The default entries of a list, so that one of them can be changed by index."""
        owner: Any = self.root.sections[0]
        schema: FieldSchema | None = self.root
        for part in path:
            schema = child(schema, part) if schema else None
            if isinstance(owner, type) and issubclass(owner, BaseModel):
                field = owner.model_fields[part]
                owner = None if field.is_required() else default_of(field)
            else:
                owner = getattr(owner, part, None)
            if owner is None and schema and schema.kind == "section":
                owner = schema.sections[0]
        return deepcopy(plain(owner)) if isinstance(owner, list) else []

    def _drop_other_variant(self, path: KeyPath, value: Any, parent: Any) -> None:
        """After a section's type is set, remove keys of lower layers that this variant does not have."""
        section = self._schema_at(path[:-1])
        chosen = variant(section, value) if section.tag == path[-1] else None
        for key in [key for key in parent if key not in chosen.model_fields] if chosen else []:
            del parent[key]
            self._forget((*path[:-1], key))

    def _drop_dependents(self, path: KeyPath, value: Any, parent: Any, source: str) -> None:
        """After a key has changed, remove the keys of lower layers that belong to its old value."""
        section = self._schema_at(path[:-1])
        if section.kind != "section":
            return
        config_cls = section.sections[0]
        for name in getattr(config_cls, "dependents", {}).get(path[-1], ()):
            old = parent.get(path[-1], default_of(config_cls.model_fields[path[-1]]))
            is_other_text = isinstance(parent.get(name), str) and parent[name] != old
            if value != old and not is_other_text and parent.pop(name, None):
                key = ".".join(path[:-1])
                self.notes.append(f"note: {key}.{name} of {old!r} is left out: {name_key(path, source)} is {value!r}")
                self._forget((*path[:-1], name))

    def _forget(self, path: KeyPath) -> None:
        """Remove the sources of a key and of everything below it."""
        key = ".".join(path)
        for known in [k for k in self.sources if k == key or k.startswith(key + ".")]:
            del self.sources[known]


def _unset_none(value: Any) -> Any:
    """Convert "None" to None in free-form lists. (Tables are read key by key.)"""
    if isinstance(value, list):
        return [_unset_none(item) for item in value]
    if isinstance(value, dict):
        return {key: _unset_none(item) for key, item in value.items()}
    return None if value == "None" else value


def _get(node: Any, key: Any) -> Any:
    if isinstance(node, list):
        return node[key] if key < len(node) else None
    return node.get(key)


def _read_tokens(tokens: list[Any], schema: FieldSchema) -> Any:
    """Parse all words of an option: list entries are concatenated, table entries merged."""
    if len(tokens) == 1:
        return read_text(tokens[0], schema)
    parts = [read_text(token, schema) for token in tokens]
    if schema.kind == "list":
        return [item for part in parts for item in (part if isinstance(part, list) else [part])]
    if schema.kind == "dict" and all(isinstance(part, dict) for part in parts):
        return {key: value for part in parts for key, value in part.items()}
    return parts
