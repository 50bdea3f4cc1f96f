"""Render a resolved configuration as TOML that `@` reads back, with the source of each value as a comment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from datetime import date, time
from enum import Enum
from typing import Any

from pydantic import BaseModel

from prime_rl.configuration.schema import KeyPath

COMMENT_COLUMN = 56


def render_toml(config: BaseModel, sources: Mapping[str, str]) -> str:
    """Every key with its value and a comment with its source. None is written as "None"."""
    return "\n".join(_section_lines(config, (), sources)).lstrip("\n") + "\n"


def render_value(value: Any) -> str:
    """One value in TOML."""
    if value is None:
        return '"None"'
    if isinstance(value, BaseModel):
        return render_value({name: getattr(value, name) for name in type(value).model_fields})
    if isinstance(value, Enum):
        return render_value(value.value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(str(key))} = {render_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(render_value(item) for item in value) + "]"
    return _quote(str(value))


def describe_source(path: KeyPath, sources: Mapping[str, str]) -> str:
    """The sources of a key's value and of the keys below it; "default" without any."""
    key = ".".join(path)
    inner = [source for known, source in sources.items() if known == key or known.startswith(key + ".")]
    return ", ".join(dict.fromkeys(inner)) or "default"


def _section_lines(config: BaseModel, path: KeyPath, sources: Mapping[str, str]) -> Iterator[str]:
    sections: list[tuple[KeyPath, BaseModel, str]] = []
    for name in type(config).model_fields:
        value, key = getattr(config, name), (*path, name)
        if isinstance(value, BaseModel):
            sections.append((key, value, f"[{'.'.join(_bare(key))}]"))
        elif isinstance(value, list | tuple) and value and all(isinstance(item, BaseModel) for item in value):
            header = f"[[{'.'.join(_bare(key))}]]"
            sections += [((*key, str(index)), item, header) for index, item in enumerate(value)]
        else:
            yield _commented(f"{_key(name)} = {render_value(value)}", describe_source(key, sources))
    for key, section, header in sections:
        yield ""
        switched_on = sources.get(".".join(key))
        yield _commented(header, switched_on) if switched_on else header
        yield from _section_lines(section, key, sources)


def _commented(text: str, comment: str) -> str:
    return f"{text:<{COMMENT_COLUMN}}  # {comment}"


def _bare(path: KeyPath) -> KeyPath:
    """A key without list indices: TOML numbers the tables of an array implicitly."""
    return tuple(part for part in path if not part.isdigit())


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quote(name)


def _quote(text: str) -> str:
    """A string in TOML, which agrees with JSON except that DEL must be escaped and surrogates do not exist."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
