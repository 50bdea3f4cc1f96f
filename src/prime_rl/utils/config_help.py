"""The help of a command: how to configure it, and every key with its type, value, source and meaning."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prime_rl.utils.config_keys import KeyPath, Shape, field_shape
from prime_rl.utils.config_toml import describe_source, render_value

WIDTH = 100
VALUE_WIDTH = 26
REQUIRED = object()
# The name of a class, or a field and the text below it, in formatted source: to parse it takes a tenth of the help.
CLASS_OR_TEXT = re.compile(
    r'''^class (\w+)|^    (\w+): .*\n(?: {8}.*\n| {4}[\])}].*\n)*    """(\S(?:.|\n)*?)"""''', re.MULTILINE
)
COMMANDS = (
    ("@ base.toml @ more.toml", "read files: tables are merged, the later file wins"),
    ("@ run.toml --{key} {value}", "options > files > {variable}={value} > defaults"),
    ("--{section} @ part.toml", "read a file into one section"),
    ("@ run.toml --dry-run", "print every value and where it comes from, then stop"),
    ("@ run.toml --help", "this page with the values of run.toml"),
)
SPELLINGS = (
    ("keys", "--a.b_c or --a.b-c, with a value behind a space or ="),
    ("lists", "--ids 0,1 or --ids 0 1 or --ids '[0, 1]'"),
    ("switches", "--flag, --no-flag, --flag false"),
    ("sections", "--section turns an optional section on, --no-section turns it off"),
    ("unset", '--key None, in a file key = "None"'),
    ("tables", "--args n=3 or --args '{{\"n\": 3}}'; in a list of tables: --env.0.id x"),
    ("inheritance", 'toml_files = ["base.toml"] at the top of a file reads base.toml first'),
    ("errors", "--debug shows the traceback"),
)


@dataclass(frozen=True)
class Row:
    """One key as the help shows it."""

    name: str
    type: str
    value: str
    meaning: str


@dataclass(frozen=True)
class Group:
    """The keys of one section."""

    title: str
    meaning: str
    rows: list[Row]


def render_help(prog: str, config_cls: type[BaseModel], config: BaseModel | None, summary: str) -> str:
    """The whole help; with a config, its values and their sources stand where the defaults stand otherwise."""
    sources: Mapping[str, str] = getattr(config, "provenance", {})
    groups = list(
        _groups(config_cls, config, (), f"Keys of {prog}", "written --KEY VALUE, or KEY = VALUE in a file", sources)
    )
    blocks = [f"usage: {prog} [@ FILE.toml ...] [--KEY VALUE ...] [--dry-run] [--debug] [--help]"]
    blocks.append(textwrap.fill(summary, WIDTH))
    blocks += _introduction(prog, *_examples(config_cls))
    blocks += ["\n".join(_group_lines(group)) for group in groups]
    return "\n\n".join(blocks)


def _introduction(prog: str, key: str, value: str, section: str) -> list[str]:
    names = {"key": key, "value": value, "section": section, "variable": f"PRIME_{key.upper()}"}
    blocks = []
    for table, lead in ((COMMANDS, f"{prog} "), (SPELLINGS, "")):
        rows = [(lead + left.format(**names), right.format(**names)) for left, right in table]
        width = max(len(left) for left, _ in rows)
        blocks.append("\n".join(f"  {left:<{width}}  {right}" for left, right in rows))
    return blocks


def _examples(config_cls: type[BaseModel]) -> tuple[str, str, str]:
    """A key with a value, and a section, that this command really has."""
    fields = config_cls.model_fields
    key = next((name for name in ("max_steps", "seed", "output_dir") if name in fields), next(iter(fields), "key"))
    sections = [name for name, field in fields.items() if field_shape(field).kind == "section"]
    return key, {"output_dir": "outputs"}.get(key, "100"), next(iter(sections), "section")


def _groups(
    config_cls: type[BaseModel],
    config: BaseModel | None,
    path: KeyPath,
    title: str,
    meaning: str,
    sources: Mapping[str, str],
) -> Iterator[Group]:
    rows: list[Row] = []
    below: list[Group] = []
    for name, field in config_cls.model_fields.items():
        shape, value = field_shape(field), _value_of(field, config, name)
        if shape.kind == "section" or (shape.item and shape.item.kind == "section"):
            below += _section_groups(describe_field(config_cls, name), shape, value, (*path, name), sources)
        else:
            source = describe_source((*path, name), sources)
            rows.append(_row(name, describe_field(config_cls, name), shape, value, source))
    yield Group(title, meaning, rows)
    yield from below


def _section_groups(
    meaning: str, shape: Shape, value: Any, path: KeyPath, sources: Mapping[str, str]
) -> Iterator[Group]:
    """The groups of a section, of each member of a union of sections, or of each entry of a list of sections."""
    key = ".".join(path)
    if shape.kind == "list" and shape.item:
        entries = list(value) if isinstance(value, list | tuple) and value else [None]
        for index, entry in enumerate(entries):
            section = type(entry) if entry is not None else shape.item.sections[0]
            title, text = f"[[{key}]]", f"{meaning or _summary(section)} (--{key}.{index}.KEY)"
            yield from _groups(section, entry, (*path, str(index)), title, text, sources)
        return
    for section in shape.sections:
        title = f"[{key}]"
        active = isinstance(value, section)
        if shape.tag and len(shape.sections) > 1:
            title += f" {shape.tag} = {render_value(field_shape(section.model_fields[shape.tag]).choices[0])}"
            title += " (chosen)" if active else ""
        elif shape.optional and not active:
            title += f" off; --{key} turns it on"
        yield from _groups(
            section, value if active else None, path, title, meaning or _summary(section), sources if active else {}
        )


def _value_of(field: FieldInfo, config: BaseModel | None, name: str) -> Any:
    if config is not None:
        return getattr(config, name)
    if field.is_required():
        return REQUIRED
    # A default that is an object is not copied, as get_default would: nothing is written to it here.
    return field.default if field.default_factory is None else field.get_default(call_default_factory=True)


def _summary(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split())


def describe_field(section: type[BaseModel], name: str) -> str:
    """The text below a field in the source of its class, or of the class that it was inherited from, on one line."""
    for cls in section.__mro__[: section.__mro__.index(BaseModel)]:
        if text := _texts_of_module(cls.__module__).get((cls.__qualname__, name)):
            return " ".join(text.split())
    return ""


@cache
def _texts_of_module(module: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the string that stands directly below the field, in one module."""
    texts, owner = {}, ""
    for cls, field, text in CLASS_OR_TEXT.findall(inspect.getsource(sys.modules[module])):
        if cls:
            owner = cls
        else:
            texts[owner, field] = text
    return texts


def _row(name: str, meaning: str, shape: Shape, value: Any, source: str) -> Row:
    kind = shape.describe()
    if shape.choices:
        kind = "choice"
        if len(shape.choices) > 1:
            meaning += f" One of: {', '.join(map(str, shape.choices))}."
    shown = "(required)" if value is REQUIRED else "unset" if value is None else render_value(value)
    if len(shown) > VALUE_WIDTH:
        shown = f"{shown[: VALUE_WIDTH // 3]}...{shown[-(VALUE_WIDTH - VALUE_WIDTH // 3 - 3) :]}"
    return Row(name, kind, shown, meaning if source == "default" else f"({_short(source)}) {meaning}")


def _short(source: str) -> str:
    """Sources with the names of files alone: the whole paths stand in the command that asked for help."""
    return ", ".join(part.rsplit("/", 1)[-1] for part in source.split(", "))


def _group_lines(group: Group) -> Iterator[str]:
    yield from _wrap(f"{group.title}  {group.meaning}", WIDTH, "    ")
    columns = [[row.name, row.type, row.value] for row in group.rows]
    widths = [max(map(len, column)) for column in zip(*columns, strict=True)]
    for row, cells in zip(group.rows, columns, strict=True):
        left = "  " + "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        room = max(WIDTH - len(left) - 2, 30)
        first, *more = _wrap(row.meaning, room)
        yield f"{left}  {first}".rstrip()
        yield from (" " * (len(left) + 2) + line for line in more)


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Lines of a text, at least one; most texts are one line and need no search for places to break."""
    return [text] if len(text) <= width else textwrap.wrap(text, width, subsequent_indent=indent)
