"""Render a resolved configuration as TOML that `@` reads back, with the source of each value as a comment."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from datetime import date, time
from typing import Any

from pydantic import BaseModel

from prime_rl.configuration.schema import KeyPath

COMMENT_COLUMN = 56
COMMENT = "# "


def render_toml(config: BaseModel, sources: Mapping[str, str], given: Collection[str] | None = None) -> str:
    """Every key with its value and a comment with its source. None is written as "None".

    `given`: the keys to set; lines of others are comments, so that their values follow from these when read back.
    """
    return "\n".join(_section_lines(config, (), sources, given)).lstrip("\n") + "\n"


def uncomment(text: str) -> str:
    """A rendered configuration that sets every key."""
    return re.sub(f"^{COMMENT}", "", text, flags=re.MULTILINE)


def render_value(value: Any) -> str:
    """One value in TOML."""
    if value is None:
        return '"None"'
    if isinstance(value, BaseModel):
        return render_value({name: getattr(value, name) for name in type(value).model_fields})
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


def _section_lines(
    config: BaseModel, path: KeyPath, sources: Mapping[str, str], given: Collection[str] | None
) -> Iterator[str]:
    sections: list[tuple[KeyPath, BaseModel, str]] = []
    for name in type(config).model_fields:
        value, key = getattr(config, name), (*path, name)
        if isinstance(value, BaseModel):
            sections.append((key, value, f"{_mark_section(key, given)}[{'.'.join(_bare(key))}]"))
        elif isinstance(value, list | tuple) and value and all(isinstance(item, BaseModel) for item in value):
            header = f"{_mark_section(key, given)}[[{'.'.join(_bare(key))}]]"
            sections += [((*key, str(index)), item, header) for index, item in enumerate(value)]
        else:
            line = f"{_mark_key(key, sources, given)}{_key(name)} = {render_value(value)}"
            yield _commented(line, describe_source(key, sources))
    for key, section, header in sections:
        yield ""
        switched_on = sources.get(".".join(key))
        yield _commented(header, switched_on) if switched_on else header
        yield from _section_lines(section, key, sources, given)


def _mark_section(path: KeyPath, given: Collection[str] | None) -> str:
    """What comments out the header of a section: nothing if the section or a key in it is given."""
    key = ".".join(path)
    is_given = given is None or key in given or any(known.startswith(f"{key}.") for known in given)
    return "" if is_given else COMMENT


def _mark_key(path: KeyPath, sources: Mapping[str, str], given: Collection[str] | None) -> str:
    """What comments out a key: nothing if it is given, as a whole or entry by entry."""
    is_derived = given is not None and ".".join(path) in sources and ".".join(path) not in given
    return COMMENT if is_derived else _mark_section(path, given)


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
