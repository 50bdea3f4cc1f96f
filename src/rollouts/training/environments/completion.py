"""Completions for reward functions: a list of messages with the methods of a string."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollouts.training.types import Message


class ChatCompletion(list[Message]):
    """The messages of a completion; string methods are delegated to the last assistant message.

    `completion[-1]["content"]`, `completion.lower()`, `"x" in completion` and `str(completion)` all work. What list and
    str both have, such as `==` and `count`, is that of the str where the argument is one.
    """

    def __init__(self, messages: Iterable[Message]) -> None:
        super().__init__(messages)

    @property
    def text(self) -> str:
        """Text of the last assistant message, without tool calls; "" if there is none."""
        contents = (message.get("content") for message in reversed(self) if message.get("role") == "assistant")
        content = next(contents, None)
        if isinstance(content, list):  # parts, as multimodal messages have
            return "".join(str(part.get("text") or "") for part in content)
        return str(content or "")

    def __str__(self) -> str:
        return self.text

    def __contains__(self, item: object) -> bool:
        return item in self.text if isinstance(item, str) else super().__contains__(item)

    def __eq__(self, other: object) -> bool:
        return self.text == other if isinstance(other, str) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def count(self, item: Any, *bounds: Any) -> int:
        """Occurrences of a text, or of a message."""
        return self.text.count(item, *bounds) if isinstance(item, str) else super().count(item)

    def index(self, item: Any, *bounds: Any) -> int:
        """Position of a text, or of a message."""
        return self.text.index(item, *bounds) if isinstance(item, str) else super().index(item, *bounds)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(str, name):
            raise AttributeError(f"neither list nor str has an attribute {name!r}")
        return getattr(self.text, name)


def plain_completion(completion: Any) -> Any:
    """Convert a `ChatCompletion` to a plain list; return other values unchanged."""
    return list(completion) if isinstance(completion, ChatCompletion) else completion
