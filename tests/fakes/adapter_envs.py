"""One small environment of each `verifiers` class; the reward is 1 if the last reply is yes."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": "is it?", "answer": "yes"}]


def said_yes(completion: Any, answer: str) -> float:
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return float(text == answer)


def add(x: int, y: int) -> int:
    """Add two numbers.

    Args:
        x: one
        y: another
    """
    return x + y


def load_environment(kind: str) -> vf.Environment:
    dataset = Dataset.from_list(ROWS)
    common: dict[str, Any] = {"dataset": dataset, "rubric": vf.Rubric(funcs=[said_yes])}
    if kind == "single":
        return vf.SingleTurnEnv(**common)
    if kind == "multi":
        return Asking(max_turns=3, **common)
    if kind == "solved":
        return Solving(max_turns=3, **common)
    if kind == "tool":
        return vf.ToolEnv(tools=[add], **common)
    if kind == "stateful":
        return Hiding(**common)
    if kind == "group":
        parts = [vf.SingleTurnEnv(dataset=dataset, rubric=vf.Rubric(funcs=[said_yes])) for _ in "ab"]
        return vf.EnvGroup(envs=parts, env_names=["a", "b"])
    prompts = Dataset.from_list([{"prompt": "is it?", "answer": "yes"}])
    return vf.SingleTurnEnv(dataset=prompts, message_type="completion", rubric=common["rubric"])


class Asking(vf.MultiTurnEnv):
    """Repeats the question."""

    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
        return [{"role": "user", "content": "sure?"}]


class Solving(Asking):
    """Ends when the answer is right; one condition cannot be checked."""

    @vf.stop
    async def solved(self, state: vf.State) -> bool:
        return bool(state["trajectory"][-1]["completion"][-1]["content"] == "yes") if state["trajectory"] else False

    @vf.stop(priority=-1)
    async def unknown(self, state: vf.State) -> bool:
        if len(state["trajectory"]) == self.max_turns:
            raise KeyError("unknown")
        return False


class Hiding(vf.StatefulToolEnv):
    """Its tool takes a number that the model does not see."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_tool(self.add, args_to_skip=["hidden"])

    async def add(self, x: int, y: int, hidden: int = 0) -> int:
        """Add two numbers.

        Args:
            x: one
            y: another
        """
        return x + y + hidden

    def update_tool_args(self, tool_name: str, tool_args: dict[str, Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**tool_args, "hidden": 100}
