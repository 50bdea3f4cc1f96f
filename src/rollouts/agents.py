"""Agents: a protocol from prompt to trajectory, and a chat agent for OpenAI-compatible servers."""

from __future__ import annotations

import base64
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import anyio
import msgspec

from rollouts.training.proxies import build_http_client
from rollouts.training.seeds import derive_seed
from rollouts.training.types import Message, Status, settle

Prompt = str | list[Message]


class Turn(msgspec.Struct):
    """One model call: prompt tokens and sampled tokens."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """Log-probs of the completion tokens under the sampling distribution."""
    versions: list[tuple[int, int]] = []
    """`(start, version)` spans; `start` counts completion tokens of this turn."""
    chat_request: dict[str, Any] | None = None
    """Messages, tools and template arguments, or the text, of a prompt rendered by the server; None for a prompt sent
    as tokens."""
    sampling_support: bytes = b""
    """The tokens that each completion token was sampled from, see `rollouts.training.sampling_support`."""
    constrained_by: str | None = None
    """The request field whose grammar restricted sampling, such as `response_format`."""
    seat: str | None = None
    """The player that the call was made for, in an episode of several."""


class Trajectory(msgspec.Struct, kw_only=True):
    """The result of one agent rollout. `turns` is empty if the server returned no tokens."""

    prompt: Prompt
    messages: list[Message] = []
    """All messages, starting with those of the prompt."""
    num_prompt_messages: int = 0
    turns: list[Turn] = []
    status: Status = Status.COMPLETED
    stop_reason: str | None = None
    error: str | None = None
    temperature: float = 1.0
    correct: bool | None = None
    """The judge's verdict, if there is a judge."""
    tools: list[dict[str, Any]] | None = None
    """Available tools, as OpenAI schemas."""

    @property
    def text(self) -> str:
        """The assistant's text, turns joined by newlines."""
        completion = self.messages[self.num_prompt_messages :]
        return "\n".join(str(m.get("content") or "") for m in completion if m.get("role") == "assistant")

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion tokens of the last turn."""
        return [*self.turns[-1].prompt_ids, *self.turns[-1].completion_ids] if self.turns else []

    @property
    def prompt_tokens(self) -> list[int]:
        """The tokens before the first sampled one."""
        return self.turns[0].prompt_ids if self.turns else []

    @property
    def response_tokens(self) -> list[int]:
        """The tokens after the prompt, including those of environment messages between turns."""
        return self.tokens[len(self.prompt_tokens) :]


class Agent(Protocol):
    """Runs rollouts from prompts."""

    async def rollout(self, prompt: Prompt) -> Trajectory:
        """Run one attempt. Failures are reported in `status` and `error`."""


class AgentEnvironment(Protocol):
    """The environment of one rollout. An optional attribute `tools` lists OpenAI tool schemas."""

    def respond(self, messages: list[Message]) -> Any:
        """The messages after the assistant's last one; an empty list ends the rollout. May be async."""


class EndpointError(RuntimeError):
    """A request failed or returned a malformed response."""


@dataclass(frozen=True)
class Endpoint:
    """A model on an OpenAI-compatible server, with sampling parameters.

    `token_ids` requests token ids and log-probs, so that training uses exactly the sampled tokens. Supported by the
    servers of this project and by vLLM (started with --logprobs-mode processed_logprobs).
    """

    model: str
    base_url: str = "http://localhost:8000/v1"
    api_key: str | None = field(default=None, repr=False)
    temperature: float = 1.0
    max_tokens: int | None = None
    timeout_s: float = 1200.0
    token_ids: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url {self.base_url!r} of an endpoint must begin with http:// or https://")
        if taken := sorted(self.extra_body.keys() & {own.name for own in fields(self)}):
            raise ValueError(f"extra_body of an endpoint must not set {taken[0]}: set it as an argument of Endpoint")

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, seed: int | None = None
    ) -> dict[str, Any]:
        """The JSON response of POST /chat/completions. Raises `EndpointError`."""
        import httpx  # imported here to keep the module import fast

        optional = {"max_tokens": self.max_tokens, "seed": seed, "tools": list(tools) if tools else None}
        ids = {"logprobs": True, "return_token_ids": True} if self.token_ids else {}
        body = {"model": self.model, "messages": list(messages), "temperature": self.temperature, **ids}
        body |= {name: value for name, value in optional.items() if value is not None} | self.extra_body
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        url = self.base_url.rstrip("/") + "/chat/completions"
        try:
            with anyio.fail_after(self.timeout_s):
                async with build_http_client(url, headers) as client:
                    reply = await client.post(url, json=body)
        except TimeoutError:
            raise EndpointError(f"{url} timed out after {self.timeout_s:g} s") from None
        except httpx.HTTPError as error:
            raise EndpointError(f"{url}: {type(error).__name__} {error}".rstrip()) from error
        if reply.status_code != 200:
            raise EndpointError(f"{url} returned status {reply.status_code}: {reply.text[:300]}")
        try:
            answer = reply.json()
            choice = answer["choices"][0]
            choice["message"]
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointError(f"{url} did not return a chat completion: {reply.text[:300]}") from error
        if choice.get("finish_reason") == "abort":
            raise EndpointError(f"{url} aborted the completion")
        return dict(answer)


@dataclass(frozen=True)
class ChatAgent:
    """A chat agent with an optional environment; runs until the environment returns no message, or `max_turns`."""

    endpoint: Endpoint
    environment_cls: Callable[[], AgentEnvironment] | None = None
    max_turns: int = 10
    system_prompt: str | None = None
    judge: Callable[[Trajectory], Any] | None = None
    """Computes `correct` of a finished trajectory. May be async."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns {self.max_turns} of an agent must be at least 1")

    async def rollout(self, prompt: Prompt, *, seed: int | None = None) -> Trajectory:
        """Run one attempt; `seed` is that of the first turn, those of later turns are derived from it.

        Raises `ValueError` for an empty prompt; server failures set `status` to FAILED.
        """
        messages = self._prompt_messages(prompt)
        trajectory = Trajectory(
            prompt=prompt,
            messages=messages,
            num_prompt_messages=len(messages),
            temperature=self.endpoint.temperature,
        )
        try:
            await self._run_turns(trajectory, seed)
        except EndpointError as error:
            trajectory.status, trajectory.error = Status.FAILED, str(error)
            return trajectory
        trajectory.correct = await settle(self.judge(trajectory)) if self.judge else None
        return trajectory

    async def _run_turns(self, trajectory: Trajectory, seed: int | None) -> None:
        environment = self.environment_cls() if self.environment_cls else None
        trajectory.tools = list(getattr(environment, "tools", None) or []) or None
        has_all_tokens = True
        for number in range(self.max_turns):
            turn_seed = derive_seed(seed, number) if number and seed is not None else seed
            answer = await self.endpoint.chat(trajectory.messages, tools=trajectory.tools, seed=turn_seed)
            choice = answer["choices"][0]
            trajectory.messages.append(_assistant_message(choice["message"]))
            trajectory.stop_reason = choice.get("finish_reason")
            turn = read_turn(answer)
            has_all_tokens = has_all_tokens and turn is not None
            trajectory.turns = [*trajectory.turns, turn] if has_all_tokens and turn is not None else []
            if trajectory.stop_reason == "length":
                trajectory.status = Status.TRUNCATED
                return
            if environment is None:
                return
            replies = environment.respond(trajectory.messages)
            replies = await replies if inspect.isawaitable(replies) else replies
            if not replies:
                return
            trajectory.messages += [dict(reply) for reply in replies]
        trajectory.status, trajectory.stop_reason = Status.TRUNCATED, "max_turns"

    def _prompt_messages(self, prompt: Prompt) -> list[Message]:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        if not prompt or not messages:
            raise ValueError("the prompt is empty: pass text or a list of messages")
        return [{"role": "system", "content": self.system_prompt}, *messages] if self.system_prompt else messages


def read_turn(answer: dict[str, Any]) -> Turn | None:
    """The tokens of a chat response; None without ids or log-probs. Raises `EndpointError` if their numbers differ."""
    choice = answer["choices"][0]
    prompt_ids = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    completion_ids, content = choice.get("token_ids"), (choice.get("logprobs") or {}).get("content")
    if prompt_ids is None or completion_ids is None or content is None:
        return None
    if len(content) != len(completion_ids):
        raise EndpointError(f"the server returned {len(completion_ids)} token ids but {len(content)} log-probs")
    versions = [(int(start), int(version)) for start, version in choice.get("versions") or []]
    logprobs = [float(entry["logprob"]) for entry in content]
    support = base64.b64decode(choice.get("sampling_support") or "")
    return Turn(list(prompt_ids), list(completion_ids), logprobs, versions, sampling_support=support)


def _assistant_message(message: dict[str, Any]) -> Message:
    """The assistant's message without nulls and empty lists of calls, which chat templates do not handle."""
    kept = {key: value for key, value in message.items() if value not in (None, [])}
    return {"role": "assistant", "content": ""} | kept
