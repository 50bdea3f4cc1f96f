"""Requests whose sampling is restricted to a grammar."""

from __future__ import annotations

from typing import Any

UNCONSTRAINED: dict[str, tuple[Any, ...]] = {
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto", "none"),
    "structured_outputs": (None,),
}
"""Request fields that can restrict sampling by a grammar (vLLM's included), with the values that do not."""


def find_constraint(body: dict[str, Any]) -> str | None:
    """The request field whose grammar restricts sampling; None if there is none."""
    for name, neutral in UNCONSTRAINED.items():
        if body.get(name) not in neutral:
            return name
    return next((name for name in body if name.startswith("guided_") and body[name] is not None), None)
