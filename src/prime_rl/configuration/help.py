"""The --help page of a command: usage, and every key with its type, value, source and description."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prime_rl.configuration.render import describe_source, render_value
from prime_rl.configuration.schema import FieldSchema, KeyPath, default_of, field_schema

WIDTH = 100
VALUE_WIDTH = 26
REQUIRED = object()
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


Row = tuple[str, str, str, str]
"""Name, type, value and meaning of a key."""


def render_help(prog: str, config_cls: type[BaseModel], config: BaseModel | None, summary: str) -> str:
    """The whole page; with `config`, its values and their sources replace the defaults."""
    sources: Mapping[str, str] = getattr(config, "provenance", {})
    heading = f"Keys of {prog}  written --KEY VALUE, or KEY = VALUE in a file"
    blocks = [f"usage: {prog} [@ FILE.toml ...] [--KEY VALUE ...] [--dry-run] [--debug] [--help]"]
    blocks.append(textwrap.fill(summary, WIDTH))
    blocks += _introduction(prog, *_examples(config_cls))
    return "\n\n".join([*blocks, *_blocks(config_cls, config, (), heading, sources)])


def _introduction(prog: str, key: str, value: str, section: str) -> list[str]:
    names = {"key": key, "value": value, "section": section, "variable": f"PRIME_{key.upper()}"}
    blocks = []
    for table, lead in ((COMMANDS, f"{prog} "), (SPELLINGS, "")):
        rows = [(lead + left.format(**names), right.format(**names)) for left, right in table]
        width = max(len(left) for left, _ in rows)
        blocks.append("\n".join(f"  {left:<{width}}  {right}" for left, right in rows))
    return blocks


def _examples(config_cls: type[BaseModel]) -> tuple[str, str, str]:
    """An existing key with a value, and an existing section, for the usage examples."""
    fields = config_cls.model_fields
    key = next((name for name in ("max_steps", "seed", "output_dir") if name in fields), next(iter(fields), "key"))
    sections = [name for name, field in fields.items() if field_schema(field).kind == "section"]
    return key, {"output_dir": "outputs"}.get(key, "100"), next(iter(sections), "section")


def _blocks(
    config_cls: type[BaseModel], config: BaseModel | None, path: KeyPath, heading: str, sources: Mapping[str, str]
) -> Iterator[str]:
    """The text of a section, and of each section below it."""
    rows: list[Row] = []
    below: list[str] = []
    for name, field in config_cls.model_fields.items():
        schema, value, meaning = field_schema(field), _value_of(field, config, name), describe_field(config_cls, name)
        if schema.kind == "section" or (schema.item and schema.item.kind == "section"):
            below += _section_blocks(meaning, schema, value, (*path, name), sources)
        else:
            rows.append(_row(name, meaning, schema, value, describe_source((*path, name), sources)))
    yield "\n".join(_lines(heading, rows))
    yield from below


def _section_blocks(
    meaning: str, schema: FieldSchema, value: Any, path: KeyPath, sources: Mapping[str, str]
) -> Iterator[str]:
    """Blocks of a nested config, of each member of a union, or of each entry of a list of sections."""
    key = ".".join(path)
    if schema.kind == "list" and schema.item:
        entries = list(value) if isinstance(value, list | tuple) and value else [None]
        for index, entry in enumerate(entries):
            section = type(entry) if entry is not None else schema.item.sections[0]
            heading = f"[[{key}]]  {meaning or _summary(section)} (--{key}.{index}.KEY)"
            yield from _blocks(section, entry, (*path, str(index)), heading, sources)
        return
    for section in schema.sections:
        title = f"[{key}]"
        active = isinstance(value, section)
        if schema.tag and len(schema.sections) > 1:
            title += f" {schema.tag} = {render_value(field_schema(section.model_fields[schema.tag]).choices[0])}"
            title += " (chosen)" if active else ""
        elif schema.optional and not active:
            title += f" off; --{key} turns it on"
        heading = f"{title}  {meaning or _summary(section)}"
        yield from _blocks(section, value if active else None, path, heading, sources if active else {})


def _value_of(field: FieldInfo, config: BaseModel | None, name: str) -> Any:
    if config is not None:
        return getattr(config, name)
    if field.is_required():
        return REQUIRED
    return default_of(field)


def _summary(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split())


def describe_field(section: type[BaseModel], name: str) -> str:
    """The attribute docstring of a field, also an inherited one, on one line."""
    for cls in section.__mro__[: section.__mro__.index(BaseModel)]:
        if text := _field_docstrings(cls.__module__).get((cls.__qualname__, name)):
            return " ".join(text.split())
    return ""


@cache
def _field_docstrings(module: str) -> dict[tuple[str, str], str]:
    """(class, field) -> the string literal directly below the field, for the top-level classes of one module."""
    docstrings = {}
    statements = ast.parse(inspect.getsource(sys.modules[module])).body
    for cls in (statement for statement in statements if isinstance(statement, ast.ClassDef)):
        for field, below in pairwise(cls.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docstrings[cls.name, name] = text
    return docstrings


def _row(name: str, meaning: str, schema: FieldSchema, value: Any, source: str) -> Row:
    kind = schema.describe()
    if schema.choices:
        kind = "choice"
        if len(schema.choices) > 1:
            meaning += f" One of: {', '.join(map(str, schema.choices))}."
    shown = "(required)" if value is REQUIRED else "unset" if value is None else render_value(value)
    if len(shown) > VALUE_WIDTH:
        shown = f"{shown[: VALUE_WIDTH // 3]}...{shown[-(VALUE_WIDTH - VALUE_WIDTH // 3 - 3) :]}"
    return name, kind, shown, (meaning if source == "default" else f"({_short(source)}) {meaning}")


def _short(source: str) -> str:
    """Sources with file names only; the full paths are on the command line."""
    return ", ".join(part.rsplit("/", 1)[-1] for part in source.split(", "))


def _lines(heading: str, rows: Sequence[Row]) -> Iterator[str]:
    yield from _wrap(heading, WIDTH, "    ")
    widths = [max(map(len, column)) for column in zip(*(row[:3] for row in rows), strict=True)]
    for row in rows:
        left = "  " + "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True))
        first, *more = _wrap(row[3], max(WIDTH - len(left) - 2, 30))
        yield f"{left}  {first}".rstrip()
        yield from (" " * (len(left) + 2) + line for line in more)


def _wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap a text to at least one line; skip `textwrap` (slow) for texts that fit."""
    return [text] if len(text) <= width else textwrap.wrap(text, width, subsequent_indent=indent)
