"""Raw configuration tables, for validators that derive keys of one section from those of others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationInfo

from prime_rl.utils.pydantic_config import note, note_source


class ConfigTables:
    """Unvalidated tables with access by dotted key. A section that is off is None."""

    def __init__(self, data: Any, info: ValidationInfo) -> None:
        self.data = _to_plain(data)
        self._info = info
        context = info.context if isinstance(info.context, dict) else {"sources": {}, "options": None}
        self._sources: Mapping[str, str] = context["sources"]
        self._options: str | None = context["options"]

    def _find(self, key: str) -> tuple[bool, Any]:
        node = self.data
        for part in key.split("."):
            if not isinstance(node, dict) or part not in node:
                return False, None
            node = node[part]
        return True, node

    def is_set(self, key: str) -> bool:
        """Whether a value is set, even None."""
        return self._find(key)[0]

    def has(self, key: str) -> bool:
        """Whether a value other than None is set."""
        return self._find(key)[1] is not None

    def is_off(self, key: str) -> bool:
        """Whether an optional section is switched off."""
        return self._find(key) == (True, None)

    def get(self, key: str, default: Any = None) -> Any:
        """The value set for a key; `default` without one, or if it is None."""
        value = self._find(key)[1]
        return default if value is None else value

    def section(self, key: str) -> dict[str, Any]:
        """The table of a section; empty if it is off or not set."""
        value = self.get(key)
        return value if isinstance(value, dict) else {}

    def is_section(self, key: str) -> bool:
        """Whether a section is given, even an empty one."""
        return isinstance(self.get(key), dict)

    def set(self, key: str, value: Any, source: str) -> None:
        """Set a key unless a parent section is off."""
        node = self.data
        *sections, last = key.split(".")
        for part in sections:
            node = node.setdefault(part, {})
            if node is None:
                return
        node[last] = value
        note_source(self._info, key, source)

    def source(self, key: str) -> str:
        """The source of a value."""
        return self._sources.get(key, "given")

    def is_option(self, key: str) -> bool:
        """Whether an option set the value, or the first value of its section; options win over files."""
        if key in self._sources:
            return self._sources[key] == self._options
        return any(source == self._options for known, source in self._sources.items() if known.startswith(f"{key}."))

    def replaces(self, key: str, other: str) -> bool:
        """Whether a key is an option, and another one, for the same, is set but not an option."""
        return self.is_option(key) and self.is_set(other) and not self.is_option(other)

    def show(self, key: str) -> str:
        """`key = value (source)`, for messages."""
        value = self.get(key)
        value = str(value) if isinstance(value, Path) else value
        shown = "on" if isinstance(value, dict) else "off" if value is None else repr(value)
        return f"{key} = {shown}" + (f" ({self.source(key)})" if key in self._sources else "")

    def note(self, text: str) -> None:
        """One line that the command prints before it starts."""
        note(self._info, f"note: {text}")


def _to_plain(data: Any) -> Any:
    """A copy as plain dicts, so that config objects are treated like parsed text."""
    if isinstance(data, BaseModel):
        return _to_plain(data.model_dump(exclude_unset=True))
    if isinstance(data, list):
        return [_to_plain(value) for value in data]
    return {key: _to_plain(value) for key, value in data.items()} if isinstance(data, dict) else data
