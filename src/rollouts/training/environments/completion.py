"""A completion as reward functions expect it: a list of messages that also answers as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollouts.training.types import Message


class ChatCompletion(list[Message]):
    """The messages of a completion. What a list does not know is asked of the last assistant's text.

    So `completion[-1]["content"]`, `completion.lower()`, `"x" in completion` and `str(completion)` all work.
    """

    def __init__(self, messages: Iterable[Message]) -> None:
        super().__init__(messages)

    @property
    def text(self) -> str:
        """What the assistant said last, without tool calls; "" when it said nothing."""
        said = (message.get("content") for message in reversed(self) if message.get("role") == "assistant")
        content = next(said, None)
        if isinstance(content, list):  # parts, as multimodal messages have
            return "".join(str(part.get("text") or "") for part in content)
        return str(content or "")

    def __str__(self) -> str:
        return self.text

    def __contains__(self, wanted: object) -> bool:
        return wanted in self.text if isinstance(wanted, str) else super().__contains__(wanted)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(str, name):
            raise AttributeError(f"a completion has neither the list's nor the text's {name!r}")
        return getattr(self.text, name)


def plain_completion(completion: Any) -> Any:
    """The list that a `ChatCompletion` was made from; anything else as it is."""
    return list(completion) if isinstance(completion, ChatCompletion) else completion
