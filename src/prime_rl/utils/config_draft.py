"""A configuration while it is put together: layer over layer, each value read as its key wants it, its source noted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from prime_rl.utils.config_errors import COMMAND_LINE, explain, fail, name_key, unknown_key, wrong_value
from prime_rl.utils.config_keys import KeyPath, Shape, child, fields_of, section_shape, variant

Label = Callable[[KeyPath], str]
TRUE_WORDS = ("true", "yes", "on", "1")
FALSE_WORDS = ("false", "no", "off", "0")


class Text(str):
    """A value that was typed as plain text (command line, environment) and still has to be read."""


def read_json(text: str) -> Any:
    """JSON typed as an option's value; raises ValueError with the problem and the cure."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}", "strings and keys in JSON need double quotes") from None


def read_any(text: str) -> Any:
    """A number, a switch or a structure if the text is JSON, otherwise the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return str(text)


def read_text(text: str, shape: Shape) -> Any:
    """The value that a text stands for at a key of this shape; lists and tables keep unread texts inside."""
    typed = isinstance(text, Text)
    if shape.optional and (text == "None" or (typed and text == "null")):
        return None
    if shape.kind == "any":
        return read_any(text) if typed else text
    if shape.kind == "scalar":
        return next((choice for choice in shape.choices if typed and str(choice) == text), str(text))
    if text.lstrip()[:1] in ("{", "["):
        found = read_json(text)
        return [found] if shape.kind == "list" and isinstance(found, dict) else found
    if shape.kind == "list":
        if shape.item and shape.item.kind in ("section", "dict"):
            inner = next(iter(fields_of(shape.item)), "key")
            raise ValueError("is a list of sections", f"give JSON, or key by key with an index: {{key}}.0.{inner}")
        return [Text(part.strip()) for part in text.split(",") if part.strip()]
    if shape.kind == "section":
        if shape.optional and text.lower() in TRUE_WORDS + FALSE_WORDS:
            return {} if text.lower() in TRUE_WORDS else None
        inner = next(iter(fields_of(shape)), "key")
        raise ValueError("is a section, not a single value", f"give JSON, or key by key: {{key}}.{inner}")
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError("is a table, not a single value", "give JSON, or {key} name=value")
    return {key.strip(): Text(value)}


def plain(value: Any) -> Any:
    """A configuration value as tables, lists and single values."""
    if isinstance(value, BaseModel):
        # What nobody set and has no default either follows from other keys, and follows from them again.
        fields, was_set = type(value).model_fields, value.model_fields_set
        kept = [name for name, field in fields.items() if name in was_set or field.default is not None]
        return {name: plain(getattr(value, name)) for name in kept}
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple | set | frozenset) else value


class Draft:
    """The merged values so far (`values`) and, by dotted key, where each came from (`sources`)."""

    def __init__(self, config_cls: type[BaseModel], prog: str) -> None:
        self.root = section_shape(config_cls)
        self.prog = prog
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def find(self, path: KeyPath) -> tuple[KeyPath, Shape] | None:
        """The key as its section spells it, and its shape; None where there is no such key."""
        found: KeyPath = ()
        shape = self.root
        for index, part in enumerate(path):
            if shape.kind == "section":
                part = part.replace("-", "_")
                spellings = getattr(shape.sections[0], "spellings", {})
                if child(shape, part) is None and part in spellings:
                    return self.find((*found, *spellings[part].split("."), *path[index + 1 :]))
            below = child(shape, part)
            if below is None:
                return None
            found, shape = (*found, part), below
        return found, shape

    def merge(self, table: dict[str, Any], label: Label, prefix: KeyPath = ()) -> None:
        """Lay a table over what is there: tables are merged key by key, everything else is replaced."""
        tag = self._shape(prefix).tag
        for key in sorted(table, key=lambda key: key != tag):
            self.put((*prefix, str(key)), table[key], label)

    def put(self, path: KeyPath, value: Any, label: Label) -> None:
        """Set one key; raises ConfigError for an unknown key or a value that does not fit."""
        source = label(path)
        located = self.find(path)
        if located is None:
            raise unknown_key(path, source, self.root, self.prog)
        path, shape = located
        value = self._read(value, path, shape, source)
        parent, key = self._open(path, source)
        if shape.kind == "section" and isinstance(value, dict):
            self._set(parent, key, parent[key] if isinstance(_get(parent, key), dict) else {})
            self.sources[".".join(path)] = source
            self.merge(value, label, path)
        elif shape.kind in ("dict", "any") and isinstance(value, dict):
            self._set(parent, key, parent[key] if isinstance(_get(parent, key), dict) else {})
            if not value:
                self.sources[".".join(path)] = source
            for name, item in value.items():
                self.put((*path, str(name)), item, label)
        elif shape.kind == "list" and isinstance(value, list):
            self._forget(path)
            self._set(parent, key, [])
            self.sources[".".join(path)] = source
            for index, item in enumerate(value):
                self.put((*path, str(index)), item, label)
        else:
            self._forget(path)
            self._drop_other_variant(path, value, parent)
            self._set(parent, key, value)
            self.sources[".".join(path)] = source

    def _read(self, value: Any, path: KeyPath, shape: Shape, source: str) -> Any:
        given = value
        try:
            if isinstance(value, list) and value and all(isinstance(item, Text) for item in value):
                given = " ".join(value)
                value = _read_tokens(value, shape)
            elif isinstance(value, str):
                value = read_text(value, shape)
            elif shape.kind == "any":
                value = _unset_none(value)
        except ValueError as error:
            problem, cure = error.args
            cure = cure.replace("{key}", ("--" if source == COMMAND_LINE else "") + ".".join(path))
            raise wrong_value(path, given, source, problem, cure, shape) from None
        if shape.kind in ("section", "list", "dict") and isinstance(value, dict if shape.kind != "list" else list):
            return value
        if shape.kind == "list" and value is not None and not isinstance(value, dict):
            return [value]
        if isinstance(value, bool) and shape.is_number:
            raise wrong_value(path, given, source, "must be a number, not a switch", None, shape)
        if isinstance(value, float) and math.isnan(value):
            raise wrong_value(path, given, source, "must be a number, not nan", None, shape)
        try:
            return TypeAdapter(shape.annotation).validate_python(value)
        except ValidationError as error:
            raise wrong_value(path, given, source, *explain(error.errors()[0], shape), shape) from None

    def _open(self, path: KeyPath, source: str) -> tuple[Any, Any]:
        """The table or list that holds `path`, made on the way where it is missing, and the key in it."""
        node: Any = self.values
        for depth, part in enumerate(path[:-1], 1):
            key = self._key(node, part, path[:depth], source)
            below = _get(node, key)
            if not isinstance(below, dict | list):
                below = self._default_list(path[:depth]) if self._shape(path[:depth]).kind == "list" else {}
                self._set(node, key, below)
                self.sources.pop(".".join(path[:depth]), None)
            node = below
        return node, self._key(node, path[-1], path, source)

    @staticmethod
    def _key(node: Any, part: str, path: KeyPath, source: str) -> Any:
        if not isinstance(node, list):
            return part
        if int(part) > len(node):
            raise fail(f"{name_key(path, source)}: the list ends before", f"the next free index is {len(node)}")
        return int(part)

    @staticmethod
    def _set(node: Any, key: Any, value: Any) -> None:
        if isinstance(node, list) and key == len(node):
            node.append(value)
        else:
            node[key] = value

    def _shape(self, path: KeyPath) -> Shape:
        located = self.find(path)
        assert located is not None
        return located[1]

    def _default_list(self, path: KeyPath) -> list[Any]:
        """The entries that a list has by default, so that one of them can be changed by index."""
        owner: Any = self.root.sections[0]
        shape: Shape | None = self.root
        for part in path:
            shape = child(shape, part) if shape else None
            if isinstance(owner, type) and issubclass(owner, BaseModel):
                field = owner.model_fields[part]
                owner = None if field.is_required() else field.get_default(call_default_factory=True)
            else:
                owner = getattr(owner, part, None)
            if owner is None and shape and shape.kind == "section":
                owner = shape.sections[0]
        return deepcopy(plain(owner)) if isinstance(owner, list) else []

    def _drop_other_variant(self, path: KeyPath, value: Any, parent: Any) -> None:
        """When a section's type is set, keys from lower layers that this type does not have fall away."""
        section = self._shape(path[:-1])
        chosen = variant(section, value) if section.tag == path[-1] else None
        for key in [key for key in parent if key not in chosen.model_fields] if chosen else []:
            del parent[key]
            self._forget((*path[:-1], key))

    def _forget(self, path: KeyPath) -> None:
        """Forget the sources of a key and of everything below it."""
        key = ".".join(path)
        for known in [k for k in self.sources if k == key or k.startswith(key + ".")]:
            del self.sources[known]


def _unset_none(value: Any) -> Any:
    """Lists in free-form tables: "None" stands for None there too. (Tables are read key by key.)"""
    if isinstance(value, list):
        return [_unset_none(item) for item in value]
    if isinstance(value, dict):
        return {key: _unset_none(item) for key, item in value.items()}
    return None if value == "None" else value


def _get(node: Any, key: Any) -> Any:
    if isinstance(node, list):
        return node[key] if key < len(node) else None
    return node.get(key)


def _read_tokens(tokens: list[Any], shape: Shape) -> Any:
    """The value of an option from all its words: list entries one after the other, table entries together."""
    if len(tokens) == 1:
        return read_text(tokens[0], shape)
    parts = [read_text(token, shape) for token in tokens]
    if shape.kind == "list":
        return [item for part in parts for item in (part if isinstance(part, list) else [part])]
    if shape.kind == "dict" and all(isinstance(part, dict) for part in parts):
        return {key: value for part in parts for key, value in part.items()}
    return parts
