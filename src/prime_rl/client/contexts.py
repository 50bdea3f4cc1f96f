"""Contexts: their files, and their insertion into prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rollouts.training.agent_integration import Rollout

Message = dict[str, Any]
Context = str | list[Message]
ContextPosition = Literal["user_prefix", "system_append", "system_replace", "message"]


def insert_context(
    messages: Sequence[Message], context: Context, position: ContextPosition, separator: str, default_system: str = ""
) -> list[Message]:
    """The teacher's messages: those of the student plus the context. `ValueError` if it cannot be inserted.

    user_prefix      context + separator + the first user message
    system_append    system message + separator + context; without a system message, that of the template
                     (`default_system`), else the context alone
    system_replace   the context as the system message
    message          a separate user message after the system message; also for contexts given as messages

    A first message of the role developer is a system message, too.
    """
    out = [dict(message) for message in messages]
    has_system = bool(out) and out[0].get("role") in ("system", "developer")
    if isinstance(context, list) or position == "message":
        new = context if isinstance(context, list) else [{"role": "user", "content": context}]
        return [*out[:has_system], *new, *out[has_system:]]
    if position == "user_prefix":
        first = next((message for message in out if message.get("role") == "user"), None)
        if first is None:
            raise ValueError('the prompt has no user message: set teacher_model.context_position = "system_append"')
        first["content"] = _join(context + separator, first.get("content"))
        return out
    if position == "system_append" and not has_system and default_system:
        out, has_system = [{"role": "system", "content": default_system}, *out], True
    if position == "system_append" and has_system:
        out[0]["content"] = _append(out[0].get("content"), separator + context)
        return out
    return [{"role": out[0]["role"] if has_system else "system", "content": context}, *out[has_system:]]


def insert_text(prompt: str, context: Context, position: ContextPosition, separator: str) -> str:
    """`insert_context` for a plain-text prompt, which only supports `user_prefix`."""
    if isinstance(context, list) or position != "user_prefix":
        raise ValueError(
            f'a plain-text prompt only supports a text prefix: context_position = "user_prefix", not "{position}"'
        )
    return context + separator + prompt


def shows_context(rollout: Rollout, context: Context) -> bool:
    """Whether a request of the rollout contains the context, from whose ends an environment may strip white space.

    True if the server does not report requests.
    """
    import msgspec  # lazy: --help imports this module

    texts = [context] if isinstance(context, str) else [message.get("content") for message in context]
    parts = [msgspec.json.encode(text.strip())[1:-1] for text in texts if isinstance(text, str)]
    requests = [msgspec.json.encode(turn.chat_request) for turn in rollout.turns if turn.chat_request is not None]
    return not requests or any(all(part in request for part in parts) for request in requests)


def read_context_file(path: Path) -> str:
    """The text of a `context_file`, without a byte order mark; `ValueError` if it is empty or unreadable."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"context_file {path} is not text in UTF-8: save it in this encoding") from error
    except OSError as error:
        raise ValueError(f"context_file {path} cannot be read: {error.strerror}") from error
    if not text.strip():
        raise ValueError(f"context_file {path} is empty: write the context into it, or leave it out")
    return text


def _join(text: str, content: Any) -> Any:
    return [{"type": "text", "text": text}, *content] if isinstance(content, list) else text + (content or "")


def _append(content: Any, text: str) -> Any:
    return [*content, {"type": "text", "text": text}] if isinstance(content, list) else (content or "") + text
