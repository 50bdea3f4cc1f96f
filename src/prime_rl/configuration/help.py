"""The --help pages of a command: its main keys on one screen, the keys of one section, or every key."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from prime_rl.configuration.errors import COMMAND_LINE, fail
from prime_rl.configuration.render import describe_source, render_value
from prime_rl.configuration.schema import (
    FieldSchema,
    KeyPath,
    child,
    default_of,
    field_schema,
    section_schema,
    suggest,
    suggest_key,
)

WIDTH = 100
SCREEN_WIDTH = 120
VALUE_WIDTH = 26
SHORT_VALUE_WIDTH = 17
EVERYTHING = "all"
OPTIONS = "[@ FILE.toml ...] [--KEY VALUE ...] [--dry-run] [--help [SECTION]] [--version] [--debug]"
REQUIRED = object()
OFF = object()
"""Value of a key in a section that is off."""
COMMANDS = (
    ("@ base.toml @ more.toml", "read files: tables are merged, the later file wins"),
    ("@ run.toml --{key} {value}", "options > files > {variable}={value} > defaults"),
    ("--{section} @ part.toml", "read a file into one section"),
    ("@ run.toml --dry-run", "print every value and where it comes from, then stop"),
    ("@ run.toml --help", "the main keys with the values of run.toml; --help SECTION: others"),
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


def render_help(
    prog: str, config_cls: type[BaseModel], config: BaseModel | None, summary: str, topic: str | None = None
) -> str:
    """The page of a `topic`: None for the main keys, `EVERYTHING`, or a section or key.

    With `config`, its values and their sources replace the defaults. Raises `ConfigError` for an unknown topic.
    """
    sources: Mapping[str, str] = getattr(config, "provenance", {})
    main_keys: Sequence[str] = getattr(config_cls, "main_keys", ())
    if topic not in (None, EVERYTHING):
        return "\n\n".join(_render_topic(prog, config_cls, config, str(topic)))
    blocks = [f"usage: {prog} {OPTIONS}", textwrap.fill(summary, WIDTH)]
    if topic is None and main_keys:
        return "\n\n".join([blocks[0] + "\n" + summary, *_overview(prog, config_cls, config, main_keys)])
    heading = f"Keys of {prog}  written --KEY VALUE, or KEY = VALUE in a file"
    blocks += _introduction(prog, *_examples(config_cls))
    return "\n\n".join([*blocks, *_blocks(config_cls, config, (), heading, sources)])


def _overview(
    prog: str, config_cls: type[BaseModel], config: BaseModel | None, main_keys: Sequence[str]
) -> Iterator[str]:
    """The main keys, the keys that were given besides, and the names of all sections, on one screen."""
    key, value, _ = _examples(config_cls)
    examples = (
        (f"{prog} @ run.toml --{key} {value}", f"options > files > PRIME_{key.upper()}={value} > defaults"),
        (f"{prog} @ run.toml --dry-run", "print every value and where it comes from"),
    )
    yield "\n".join(f"  {left:<{len(examples[0][0])}}  {right}" for left, right in examples)
    sources: Mapping[str, str] = getattr(config, "provenance", {})
    given = [name for name, source in sources.items() if is_given(source)]
    located = {
        name: _locate(config_cls, config, tuple(name.split("."))) for name in dict.fromkeys([*main_keys, *given])
    }
    rows = [
        _short_row(name, meaning, schema, value, describe_source(path, sources))
        for name, (path, schema, value, meaning) in located.items()
        if name in main_keys or schema.kind != "section"
    ]
    yield "\n".join(["Main keys:", *_one_line_each(rows)])
    lead = f"Sections ({prog} --help SECTION shows the keys of one, {prog} --help all every key): "
    text = lead + "  ".join(_section_names(section_schema(config_cls)))
    yield textwrap.fill(text, SCREEN_WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _section_names(root: FieldSchema) -> list[str]:
    """Sections and the sections directly below them, those of the same class once."""
    names = _names_below(root)
    seen = {section for section in names.values() if section.kind == "section"}
    for name, section in list(names.items()):
        below = {f"{name}.{inner}": schema for inner, schema in _names_below(section).items() if schema not in seen}
        names |= below
        seen |= set(below.values())
    return sorted(names, key=lambda name: list(names).index(name.partition(".")[0]))


def _names_below(schema: FieldSchema) -> dict[str, FieldSchema]:
    found = {}
    for name, field in schema.sections[0].model_fields.items():
        below = field_schema(field)
        below = below.item if below.kind == "list" and below.item else below
        if below.kind == "section":
            found[name] = FieldSchema("section", below.sections[0], sections=below.sections, tag=below.tag)
    return found


def _render_topic(prog: str, config_cls: type[BaseModel], config: BaseModel | None, topic: str) -> Iterator[str]:
    """The blocks of a section, or the row of a key."""
    words = tuple(part.replace("-", "_") for part in topic.removeprefix("--").split("."))
    path, schema, value, meaning = _locate(config_cls, config, words)
    sources: Mapping[str, str] = getattr(config, "provenance", {})
    if schema.kind == "section" or (schema.item and schema.item.kind == "section"):
        yield from _section_blocks(meaning, schema, value, path, sources)
    else:
        row = _row(".".join(path), meaning, schema, value, describe_source(path, sources))
        yield "\n".join(_lines(f"Key of {prog}", [row]))


def _locate(
    config_cls: type[BaseModel], config: BaseModel | None, path: KeyPath
) -> tuple[KeyPath, FieldSchema, Any, str]:
    """Path, schema, value (or default) and meaning of a key; raises `ConfigError` if there is none."""
    root = schema = section_schema(config_cls)
    node: Any = config
    meaning, is_off = "", False
    for part in path:
        owners = [cls for cls in schema.sections if part in cls.model_fields]
        owner = next((cls for cls in owners if isinstance(node, cls)), owners[0] if owners else None)
        below = child(schema, part)
        if below is None:
            names = [*_section_names(root), EVERYTHING]
            near = suggest(".".join(path), names) or suggest_key(".".join(path), root)
            hint = f"did you mean --help {near}?" if near else "--help lists the sections, --help all every key"
            raise fail(f"--help {'.'.join(path)}: there is no such section or key", hint)
        if owner is not None:
            meaning = describe_field(owner, part)
            known = isinstance(node, owner) if isinstance(node, BaseModel) else False
            is_off = is_off or (not known and (config is not None or isinstance(node, BaseModel)))
            node = _value_of(owner.model_fields[part], node if known else None, part, is_default=config is None)
            is_off = is_off or (node is None and below.kind == "section")
        elif isinstance(node, list | tuple):
            node = node[int(part)] if part.isdigit() and int(part) < len(node) else None
        elif isinstance(node, Mapping):
            node = node.get(part)
        schema = below
    return path, schema, OFF if is_off and schema.kind != "section" else node, meaning


def _short_row(name: str, meaning: str, schema: FieldSchema, value: Any, source: str) -> Row:
    """A row without the type, which stands for the value where there is none."""
    name, kind, shown, meaning = _row(name, meaning, schema, value, source, SHORT_VALUE_WIDTH)
    return name, "", f"<{kind}>" if value in (None, REQUIRED) else shown, meaning


def _one_line_each(rows: Sequence[Row]) -> Iterator[str]:
    """The rows; of a meaning that does not fit, the whole sentences that do, or its beginning and "..."."""
    width = max(len(row[0]) for row in rows)
    for name, _, value, meaning in rows:
        left = f"  {name:<{width}}  {value:<{SHORT_VALUE_WIDTH}}  "
        room = SCREEN_WIDTH - len(left)
        meaning = meaning.strip().removesuffix(".")
        if len(meaning) > room:
            sentences = meaning[: room + 1].rpartition(". ")[0]
            words = meaning[: room - 3].rpartition(" ")[0].rstrip(";,:")
            meaning = sentences if len(sentences) > room // 3 else words + "..."
        yield (left + meaning).rstrip()


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
        schema, meaning = field_schema(field), describe_field(config_cls, name)
        value = _value_of(field, config, name, is_default=not sources)
        is_list = schema.kind == "list" and schema.item is not None and schema.item.kind == "section"
        if schema.kind == "section" or is_list:
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


def _value_of(field: FieldInfo, config: BaseModel | None, name: str, is_default: bool = False) -> Any:
    """The value in `config`, or the default; in a default config None if it is derived from other sections."""
    is_derived = is_default and bool(field.default_factory_takes_validated_data)
    if config is not None and not (is_derived and name not in config.model_fields_set):
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


def _row(name: str, meaning: str, schema: FieldSchema, value: Any, source: str, value_width: int = VALUE_WIDTH) -> Row:
    kind = schema.describe()
    if schema.choices:
        kind = "choice"
        if len(schema.choices) > 1:
            meaning += f" One of: {', '.join(map(str, schema.choices))}."
    special = "(required)" if value is REQUIRED else "off" if value is OFF else "unset" if value is None else None
    shown = special or render_value(value)
    if len(shown) > value_width:
        shown = f"{shown[: value_width // 3]}...{shown[-(value_width - value_width // 3 - 3) :]}"
    return name, kind, shown, (meaning if source == "default" else f"({_short(source)}) {meaning}")


def is_given(source: str) -> bool:
    """Whether a value comes from an option, a file or a variable, and was not derived."""
    return source == COMMAND_LINE or source.startswith("env ") or re.search(r"(:\d+|\.toml)$", source) is not None


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
