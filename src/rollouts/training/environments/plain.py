"""Environments in plain Python: rows and reward functions, without other libraries."""

from __future__ import annotations

import inspect
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from rollouts.agents import Turn
from rollouts.training.agent_integration import Rollout, completion_text
from rollouts.training.environments.protocol import (
    RewardError,
    Row,
    add_usage,
    check_reward,
    describe_failure,
    locate_error,
    number_row,
    open_conversation,
    open_rollout,
    read_feedback,
    run_attempts,
    run_with_timeout,
)
from rollouts.training.types import Message, Status, settle

Reward = Callable[..., Any]
Respond = Callable[..., Any]
Agent = Callable[[Rollout, Row, dict[str, Any], Any, str, dict[str, Any]], Awaitable[None]]
"""Runs the turns of one rollout: rollout, row, state, client, model and arguments of a request."""


REWARD_PARAMETERS = ("completion", "messages", "prompt", "answer", "info", "row", "state")


class PlainEnvironment:
    """A dataset with one or several reward functions, each with an optional weight.

    A row is a dict with `prompt` (text or messages), and optionally `answer`, `info` and other keys. A reward function
    takes any of `completion` (the model's text), `messages` (of the completion), `prompt`, `answer`, `info`, `row` and
    `state` (a dict of this rollout) by name and returns a number; it may be async. An exception fails the rollout.

    For several turns, `respond(messages, row, state)` returns the messages after the model's last one, or none to end;
    `state` is shared with the reward functions. `tools` are OpenAI tool schemas, whose calls `respond` handles. Text in
    `state["feedback"]` says what was wrong with an attempt; contexts of a teacher and `evolve` can show it.
    """

    prompts_are_messages = True

    def __init__(
        self,
        dataset: Iterable[Mapping[str, Any]],
        rewards: Reward | Sequence[Reward | tuple[Reward, float]],
        *,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        system_prompt: str | None = None,
        respond: Respond | None = None,
        max_turns: int = 10,
        tools: Sequence[dict[str, Any]] | None = None,
        id: str = "",
    ) -> None:
        self.id = id
        self.agent: Agent | None = None
        """Runs the turns instead of the loop over `respond`."""
        self.timeout_s: float | None = None
        self.score = True
        self.respond, self.max_turns, self.tools = respond, max_turns, _read_tools(tools)
        self._rows = [_as_row(row, i, system_prompt) for i, row in enumerate(dataset)]
        held_out = enumerate(eval_dataset) if eval_dataset is not None else []
        self._eval_rows = [_as_row(row, i, system_prompt) for i, row in held_out] or self._rows
        if not self._eval_rows:
            raise ValueError("the dataset has no rows: give at least one dict with a prompt")
        pairs = [rewards] if callable(rewards) else list(rewards)
        self.rewards = [pair if isinstance(pair, tuple) else (pair, 1.0) for pair in pairs]
        self._reward_names = _check_rewards(self.rewards)

    def rows(self, split: str = "train") -> list[Row]:
        """The rows of a split; "eval" falls back to the training rows."""
        return self._eval_rows if split == "eval" else self._rows

    async def run_group(
        self, row: Row, client: Any, model: str, sampling_args: Sequence[dict[str, Any]], retries: int = 0
    ) -> list[Rollout]:
        """See `Environment.run_group`."""

        async def attempt(args: dict[str, Any]) -> Any:
            rollout, own_client, state = open_rollout(row, args), open_conversation(client), dict[str, Any]()
            run, started = self.agent or self._run_turns, time.perf_counter()
            error = await run_with_timeout(
                self.timeout_s, "the rollout", lambda: run(rollout, row, state, own_client, model, args)
            )
            generated = time.perf_counter()
            rollout.generation_ms = 1e3 * (generated - started)
            if not isinstance(error, Exception):
                error = await run_with_timeout(self.timeout_s, "scoring", lambda: self._finish(rollout, row, state))
                rollout.scoring_ms = 1e3 * (time.perf_counter() - generated)
            rollout.num_sampled = getattr(own_client, "num_sampled", 0)
            if isinstance(error, Exception):
                rollout.status, (rollout.error_type, rollout.error) = Status.FAILED, describe_failure(error)
                rollout.turns, rollout.metrics, rollout.reward = [], {}, 0.0
            return rollout

        def failure(rollout: Rollout) -> tuple[str, str] | None:
            return (rollout.error_type or "Error", rollout.error or "") if rollout.failed else None

        attempts = await run_attempts(sampling_args, retries, attempt, failure)
        for tries in attempts:
            tries[-1].num_sampled = sum(rollout.num_sampled for rollout in tries)
        return [tries[-1] for tries in attempts]

    async def _finish(self, rollout: Rollout, row: Row, state: dict[str, Any]) -> None:
        if self.score:
            await self._score(rollout, row, state)
        rollout.feedback = read_feedback(state)

    async def _run_turns(
        self, rollout: Rollout, row: Row, state: dict[str, Any], client: Any, model: str, args: dict[str, Any]
    ) -> None:
        messages: list[Message] = list(row["prompt"])
        request = build_request(args)
        if self.tools:
            request["tools"] = rollout.tools = self.tools
        rollout.completion = []
        for number in range(1, self.max_turns + 1):
            try:
                answer = await client.chat.completions.create(model=model, messages=messages, **request)
            except Exception as error:
                if number == 1 or describe_failure(error)[0] != "OverlongPrompt":
                    raise
                rollout.status, rollout.stop_reason = Status.TRUNCATED, "prompt_too_long"
                return
            choice = answer.choices[0]
            message = read_message(choice.message)
            rollout.completion = [*rollout.completion, add_reasoning(message, choice.message)]
            messages = [*messages, message]
            rollout.num_turns, rollout.stop_reason = number, choice.finish_reason
            rollout.completion_tokens = add_usage(rollout.completion_tokens, answer)
            if (turn := read_turn(answer)) is not None:
                rollout.turns = [*rollout.turns, turn]
            if choice.finish_reason == "length":
                rollout.status = Status.TRUNCATED
                return
            if self.respond is None:
                return
            replies = await settle(self.respond(messages, row, state))
            if not replies:
                return
            if not isinstance(replies, (list, tuple)) or not all(map(_is_message, replies)):
                raise TypeError("respond must return a list of messages with role and content, or none to end")
            rollout.completion = [*rollout.completion, *replies]
            messages = [*messages, *replies]
        rollout.status, rollout.stop_reason = Status.TRUNCATED, "max_turns"

    async def _score(self, rollout: Rollout, row: Row, state: dict[str, Any]) -> None:
        text, messages = completion_text(rollout.completion), rollout.completion
        values = (text, messages, row["prompt"], row.get("answer"), row.get("info"), row, state)
        known = dict(zip(REWARD_PARAMETERS, values, strict=True))
        terms = list[float]()
        for name, (function, weight) in zip(self._reward_names, self.rewards, strict=True):
            try:
                value = await settle(function(**_select_arguments(function, known)))
            except Exception as error:
                raise RewardError(f"{name}: {locate_error(error)}") from error
            value = check_reward(name, value)
            rollout.metrics = {**rollout.metrics, name: value}
            terms.append(weight * value)
        rollout.reward = math.fsum(terms)  # rewards of 1 with weights .7, .2 and .1 are 1, not 0.9999999999999999


def name_rewards(functions: Sequence[Reward]) -> list[str]:
    """Names of the metrics of reward functions: their own, else that of a partial's function or of the class.

    The second and later objects of one class, or partials of one function, have a number: `Contains_2`. `ValueError`
    for two functions of one name.
    """
    names = list[str]()
    for function in functions:
        own = getattr(function, "__name__", None)
        name = str(own or getattr(getattr(function, "func", None), "__name__", None) or type(function).__name__)
        if own is None:
            numbered = (f"{name}_{n}" for n in itertools.count(2))
            name = name if name not in names else next(other for other in numbered if other not in names)
        if name in names:
            raise ValueError(f"two reward functions have the name {name!r}: give each its own, by def or its __name__")
        names.append(name)
    return names


def agent_reward(state: dict[str, Any]) -> float:
    """The reward that an agent reported itself, else 1 if its program ended with exit code 0."""
    reported = state.get("reward")
    return float(state.get("exit_code") == 0) if reported is None else float(reported)


def _check_rewards(rewards: Sequence[tuple[Reward, Any]]) -> list[str]:
    """The names of rewards; `ValueError` for those that cannot be called in a rollout, or have the same name."""
    if not rewards or not all(len(pair) == 2 and callable(pair[0]) for pair in rewards):
        raise ValueError("rewards must be a function, or a list of functions or (function, weight) pairs")
    names = name_rewards([function for function, _ in rewards])
    for name, (function, weight) in zip(names, rewards, strict=True):
        if not isinstance(weight, Real) or not math.isfinite(weight):
            raise ValueError(f"the weight of reward {name} is {weight!r}: it must be a finite number")
        if unknown := [parameter for parameter in _find_required(function) if parameter not in REWARD_PARAMETERS]:
            raise ValueError(
                f"reward {name} takes {unknown[0]!r}: its parameters can be {', '.join(REWARD_PARAMETERS)}; "
                "other columns are in row"
            )
    return names


def _find_required(function: Reward) -> list[str]:
    """Parameters without a default; `ValueError` for a built-in that does not name its parameters."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:
        raise ValueError(f"reward {function!r} does not name its parameters: wrap it in a function") from error
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _read_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError("tools must be a list of OpenAI tool schemas (dicts), whose calls respond handles")
    return list(tools or [])


def _is_message(message: Any) -> bool:
    return isinstance(message, Mapping) and isinstance(message.get("role"), str)


def _select_arguments(function: Reward, known: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return known
    return {p.name: known[p.name] for p in parameters if p.name in known}


def _as_row(row: Mapping[str, Any], number: int, system_prompt: str | None) -> Row:
    if not isinstance(row, Mapping):
        raise ValueError(f"row {number} of the dataset is a {type(row).__name__}: give a dict with prompt and answer")
    prompt = row.get("prompt", row.get("question"))
    if not isinstance(prompt, (str, list)) or not prompt:
        raise ValueError(f"row {number} of the dataset has no prompt: give it text or a list of messages")
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not all(map(_is_message, messages)):
        raise ValueError(f"row {number} of the dataset has a prompt whose items are no messages with role and content")
    if system_prompt and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    return number_row({**row, "prompt": messages}, number)


def build_request(args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a chat request with these sampling arguments."""
    request = dict(args)
    if (limit := request.pop("max_tokens", None)) is not None:
        request["max_completion_tokens"] = limit
    return request


def read_message(message: Any) -> Message:
    """The assistant's message of a response, as it is sent again: without reasoning, which some servers refuse."""
    plain: Message = {"role": "assistant", "content": message.content or ""}
    if message.tool_calls:
        plain["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    return plain


def add_reasoning(plain: Message, message: Any) -> Message:
    """A message with the reasoning of `message`, that of the response, for the completion of a rollout."""
    reasoning = getattr(message, "reasoning_content", None)
    return {**plain, "reasoning_content": reasoning} if reasoning else plain


def read_turn(answer: Any) -> Turn | None:
    """The tokens of a response; None if the server returned none."""
    choice = answer.choices[0]
    prompt_ids = getattr(answer, "prompt_token_ids", None)
    content = choice.logprobs.content if choice.logprobs is not None else None
    if prompt_ids is None or getattr(choice, "token_ids", None) is None or content is None:
        return None
    return build_turn(choice, prompt_ids, choice.token_ids, [entry.logprob for entry in content])


def build_turn(choice: Any, prompt_ids: Any, completion_ids: Any, logprobs: Any) -> Turn:
    """A turn with these tokens and what else `choice`, that of the response, has on them."""
    return Turn(
        prompt_ids=list(prompt_ids),
        completion_ids=list(completion_ids),
        logprobs=list(logprobs),
        versions=[(int(start), int(version)) for start, version in getattr(choice, "versions", None) or []],
        chat_request=getattr(choice, "chat_request", None),
        constrained_by=getattr(choice, "constrained_by", None),
        sampling_support=getattr(choice, "sampling_support", b""),
    )
