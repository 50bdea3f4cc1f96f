"""A resolved configuration as TOML that `@` reads back, the source of each value beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from pydantic import BaseModel

from prime_rl.utils.config_keys import KeyPath

COMMENT_COLUMN = 56


def render_toml(config: BaseModel, sources: Mapping[str, str]) -> str:
    """Every key with its value; the comment says where the value came from. None is written as "None"."""
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
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(str(key))} = {render_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ", ".join(render_value(item) for item in value) + "]"
    return _quote(str(value))


def describe_source(path: KeyPath, sources: Mapping[str, str]) -> str:
    """Where a key's value came from: the source of the key, of parts of its value, or of the table around it."""
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
    """A key without list positions: TOML counts the tables of a list by itself."""
    return tuple(part for part in path if not part.isdigit())


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quote(name)


def _quote(text: str) -> str:
    """A string in TOML, which agrees with JSON except that DEL must be escaped and surrogates do not exist."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
