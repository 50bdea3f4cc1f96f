"""Schema of configuration keys, derived from a config class and shared by files, options and help."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

KeyPath = tuple[str, ...]
FREE_TEXT = "free text"
FreeText = Annotated[str, FREE_TEXT]
"""An entry of a list whose spaces and line breaks matter."""
KEEPS_CASE = "keeps case"
"""Marks a table whose keys are taken as written from PRIME_ variables, too."""
WORDS: dict[Any, str] = {int: "int", float: "float", str: "str", bool: "bool", Path: "path", Any: "any"}


def default_of(field: FieldInfo) -> Any:
    """The default of a field, not copied; None if it is derived from other fields."""
    if field.default_factory is None:
        return field.default
    return None if field.default_factory_takes_validated_data else field.get_default(call_default_factory=True)


@dataclass(frozen=True)
class FieldSchema:
    """The kind of value at one key; `annotation` is the type that pydantic validates a single value against."""

    kind: Literal["section", "list", "dict", "scalar", "any"]
    annotation: Any
    optional: bool = False
    sections: tuple[type[BaseModel], ...] = ()
    tag: str | None = None
    item: FieldSchema | None = None
    choices: tuple[Any, ...] = ()

    @property
    def is_bool(self) -> bool:
        """Whether the key is a boolean."""
        return self.kind == "scalar" and _strip(self.annotation)[0] == (bool,)

    @property
    def is_number(self) -> bool:
        """Whether the key takes only numbers."""
        return self.kind == "scalar" and set(_strip(self.annotation)[0]) <= {int, float}

    @property
    def is_free_text(self) -> bool:
        """Whether spaces around a text belong to it."""
        return FREE_TEXT in getattr(self.annotation, "__metadata__", ())

    @property
    def keeps_case(self) -> bool:
        """Whether keys in upper case stay so."""
        return KEEPS_CASE in getattr(self.annotation, "__metadata__", ())

    def describe(self) -> str:
        """The kind of value in one word, as shown by --help."""
        if self.choices:
            return "{" + ",".join(map(str, self.choices)) + "}"
        if self.kind == "list":
            return f"list[{self.item.describe()}]" if self.item else "list"
        if self.kind in ("section", "dict"):
            return "section" if self.kind == "section" else "table"
        return "|".join(
            WORDS.get(member, getattr(member, "__name__", "value")) for member in _strip(self.annotation)[0]
        )


def _strip(annotation: Any) -> tuple[tuple[Any, ...], bool, str | None]:
    """The members of an annotation without Annotated, Union and None; whether None is allowed; the discriminator."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        members, optional, tag = _strip(inner)
        tags = [item.discriminator for item in metadata if isinstance(item, FieldInfo) and item.discriminator]
        return members, optional, tags[0] if tags and isinstance(tags[0], str) else tag
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [_strip(member) for member in get_args(annotation)]
        member_tags = [part[2] for part in parts if part[2]]
        members = tuple(member for part in parts for member in part[0])
        return members, any(part[1] for part in parts), member_tags[0] if member_tags else None
    if annotation is type(None) or annotation is None:
        return (), True, None
    return (annotation,), False, None


def build_schema(annotation: Any, metadata: Iterable[Any] = (), tag: str | None = None) -> FieldSchema:
    """The schema of a value with this annotation; `metadata` holds a field's constraints."""
    members, optional, union_tag = _strip(annotation)
    tag = tag or union_tag
    rules = tuple(metadata)
    full = Annotated[(annotation, *rules)] if rules else annotation
    if members and all(isinstance(member, type) and issubclass(member, BaseModel) for member in members):
        return FieldSchema("section", full, optional, sections=members, tag=tag)
    origins = {get_origin(member) or member for member in members}
    if len(members) == 1:
        args = get_args(members[0])
        if origins <= {list, tuple, set, frozenset}:
            return FieldSchema("list", full, optional, item=build_schema(args[0] if args else Any))
        if origins <= {dict, Mapping} or any(isinstance(o, type) and issubclass(o, Mapping) for o in origins):
            return FieldSchema("dict", full, optional, item=build_schema(args[1] if len(args) > 1 else Any))
        if origins == {Literal}:
            return FieldSchema("scalar", full, optional, choices=args)
    if not members or Any in members:
        return FieldSchema("any", full, True)
    simple = all(isinstance(member, type) and member in WORDS for member in members)
    return FieldSchema("scalar" if simple else "any", full, optional)


def field_schema(field: FieldInfo) -> FieldSchema:
    """The schema of one field of a config class."""
    tag = field.discriminator if isinstance(field.discriminator, str) else None
    return build_schema(field.annotation, field.metadata, tag)


def section_schema(config_cls: type[BaseModel]) -> FieldSchema:
    """The schema of a whole config class."""
    return FieldSchema("section", config_cls, sections=(config_cls,))


def variant(schema: FieldSchema, tag_value: Any) -> type[BaseModel] | None:
    """The member of a section union with this tag value."""
    for section in schema.sections:
        if schema.tag and tag_value in field_schema(section.model_fields[schema.tag]).choices:
            return section
    return None


def fields_of(schema: FieldSchema) -> dict[str, FieldInfo]:
    """Fields of all members of the section."""
    return {name: field for section in reversed(schema.sections) for name, field in section.model_fields.items()}


@cache
def _schema_below(section: type[BaseModel], name: str) -> FieldSchema:
    """The cached schema of a field: a large config reads each one thousands of times."""
    return field_schema(section.model_fields[name])


def child(schema: FieldSchema, name: str) -> FieldSchema | None:
    """The schema one key below, or None if there is no such key."""
    if schema.kind == "section":
        shapes = [_schema_below(s, name) for s in schema.sections if name in s.model_fields]
        if len(shapes) > 1 and all(s.kind == "scalar" for s in shapes):
            choices = tuple(dict.fromkeys(choice for s in shapes for choice in s.choices))
            either = Union.__getitem__(tuple(s.annotation for s in shapes))
            return FieldSchema("scalar", either, shapes[0].optional, choices=choices)
        return shapes[0] if shapes else None
    if schema.kind == "list":
        return schema.item if name.isdigit() else None
    return schema.item if schema.kind == "dict" else build_schema(Any) if schema.kind == "any" else None


def all_keys(schema: FieldSchema, prefix: KeyPath = (), depth: int = 6) -> list[str]:
    """Every dotted key below a section, lists as their first item."""
    keys: list[str] = []
    for name in fields_of(schema) if depth else ():
        below = child(schema, name)
        keys.append(".".join((*prefix, name)))
        if below and below.kind == "section":
            keys += all_keys(below, (*prefix, name), depth - 1)
        elif below and below.kind == "list" and below.item and below.item.kind == "section":
            keys += all_keys(below.item, (*prefix, name, "0"), depth - 1)
    return keys


def suggest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The closest known word, if any is close enough."""
    choices = list(known)
    lowered = {choice.lower(): choice for choice in reversed(choices)}
    close = difflib.get_close_matches(word.lower(), lowered, n=1, cutoff=cutoff)
    return lowered[close[0]] if close else None


def suggest_key(key: str, schema: FieldSchema) -> str | None:
    """The closest dotted key: a similar spelling in the same section, or the same last part in another section.

    Dashes may stand for dots. Of several sections, those below the same top section come first, then the main keys.
    """
    keys = all_keys(schema)
    normalized = key.replace("-", "_")
    if dashed := [known for known in keys if known.replace(".", "_") == normalized.replace(".", "_")]:
        return dashed[0]
    *section, last = normalized.split(".")
    siblings = [known for known in keys if known.split(".")[:-1] == section]
    near = suggest(last, [known.split(".")[-1] for known in siblings])
    if near:
        return ".".join((*section, near))
    elsewhere = [known for known in keys if known.split(".")[-1] == last]
    if not elsewhere:
        alike = [known for known in keys if suggest(last, [known.split(".")[-1]])]
        return suggest(key, alike, cutoff=0.75)
    same = [known for known in elsewhere if known.split(".")[:1] == section[:1]]
    main_keys = getattr(schema.sections[0], "main_keys", ())
    main = [known for known in same or elsewhere if any(f"{name}.".startswith(f"{known}.") for name in main_keys)]
    return min(main or same or elsewhere, key=len)
