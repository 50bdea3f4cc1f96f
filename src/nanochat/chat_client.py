"""In-process chat client for environments, backed by an engine, and rollout groups generated with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from itertools import groupby
from operator import itemgetter
from typing import Any

from nanochat.engine import Completion, Engine, Request
from nanochat.tokenizer import NanochatTokenizer
from rollouts.training.agent_integration import Rollout, rollout_to_samples
from rollouts.training.environments.answers import (
    Answer,
    AnswerMessage,
    Choice,
    Logprobs,
    TokenLogprob,
    Usage,
    as_completion,
)
from rollouts.training.environments.protocol import Environment, Row
from rollouts.training.rollout_gen.async_rollout_manager import sample_seed
from rollouts.training.seeds import RequestSeeds
from rollouts.training.types import Message, Sample, Status

QUIET_TURNS = 3
"""Event-loop iterations without a new request after which pending requests are batched."""


class ChatClient:
    """`.chat.completions.create(...)` backed by an engine; concurrent requests form one batch.

    `executor` is the thread in which the engine computes; `version` is returned with every answer.
    """

    def __init__(self, engine: Engine, executor: Executor, max_tokens: int = 256) -> None:
        self.engine, self.executor, self.max_tokens = engine, executor, max_tokens
        self.version = 0
        self.chat = self
        self.completions = self
        self.generated_tokens = 0
        self._open: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._drain: asyncio.Task[None] | None = None

    def open_conversation(self) -> _Conversation:
        """The client for one rollout."""
        return _Conversation(self)

    async def create(self, *, messages: Sequence[Message], **asked: Any) -> Any:
        """Complete a conversation, with the types of `openai`; non-sampling options are ignored.

        `ValueError` for tools, which nanochat's chat format cannot show to the model, and as in `Engine.check`: here,
        because an error in the engine would fail all requests of a batch.
        """
        extra = {**asked, **(asked.get("extra_body") or {})}
        if extra.get("tools"):
            raise ValueError("nanochat's chat format has no place for tools: use an environment without them")
        tokenizer = self.engine.tokenizer
        temperature = extra.get("temperature")
        request = Request(
            tuple(tokenizer.render_for_completion(list(messages))),
            int(extra.get("max_completion_tokens") or extra.get("max_tokens") or self.max_tokens),
            1.0 if temperature is None else float(temperature),
            extra.get("top_k"),
            int(extra.get("seed") or 0),
        )
        self.engine.check(request)
        done = await self._ask(request)
        self.generated_tokens += len(done.tokens)
        return as_completion(_to_answer(request, done, self.version, tokenizer), chat=True)

    def loss_mask(self, sample: Sample) -> list[float]:
        """The mask of a sample, with 0 on tool outputs."""
        mask: list[float] = []
        for weight, pairs in groupby(zip(sample.loss_mask, sample.tokens, strict=True), key=itemgetter(0)):
            tokens = [token for _, token in pairs]
            mask += map(float, self.engine.find_mask(tokens)) if weight else [0.0] * len(tokens)
        return mask

    async def _ask(self, request: Request) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._open.append((request, answer))
        if self._drain is None:
            self._drain = asyncio.create_task(self._serve())
        return await answer

    async def _serve(self) -> None:
        """Batch concurrent requests and generate, until none is pending."""
        loop = asyncio.get_running_loop()
        while self._open:
            seen, quiet = 0, 0
            while quiet < QUIET_TURNS:
                quiet, seen = (quiet + 1, seen) if len(self._open) == seen else (0, len(self._open))
                await asyncio.sleep(0)
            # Sorted by seed: the batch does not depend on the order of tasks.
            batch, self._open = sorted(self._open, key=lambda pair: pair[0].seed), []
            try:
                answers = await loop.run_in_executor(self.executor, self.engine.complete, [r for r, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), done in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(done)
        self._drain = None


class _Conversation:
    """`.chat.completions.create(...)` for one rollout, whose requests have seeds of their own."""

    def __init__(self, client: ChatClient) -> None:
        self._client, self._seeds = client, RequestSeeds()

    # Properties, since attributes would form reference cycles.
    @property
    def chat(self) -> _Conversation:
        return self

    @property
    def completions(self) -> _Conversation:
        return self

    async def create(self, *, messages: Sequence[Message], **asked: Any) -> Any:
        """As `ChatClient.create`."""
        if (seed := asked.get("seed")) is not None:
            asked["seed"] = self._seeds.take(seed)
        return await self._client.create(messages=messages, **asked)


def _to_answer(request: Request, done: Completion, version: int, tokenizer: NanochatTokenizer) -> Answer:
    choice = Choice(
        message=AnswerMessage(content=tokenizer.decode(done.tokens, skip_special_tokens=True)),
        finish_reason=done.finish_reason,
        logprobs=Logprobs(content=[TokenLogprob(logprob) for logprob in done.logprobs]),
        token_ids=done.tokens,
        versions=[(0, version)],
    )
    sizes = len(request.prompt), len(done.tokens)
    return Answer(
        choices=[choice],
        id=f"nanochat-{request.seed}",
        model="nanochat",
        usage=Usage(*sizes, sum(sizes)),
        prompt_token_ids=list(request.prompt),
    )


async def run_rollouts(
    env: Environment, client: ChatClient, row: Row, num: int, seed: tuple[int, int], sampling: dict[str, Any]
) -> list[Rollout]:
    """`num` rollouts of one row; `seed` combines the run's seed with the row's."""
    arguments = [{"logprobs": True, **sampling, "seed": sample_seed(*seed, i)} for i in range(num)]
    return await env.run_group(row, client, "nanochat", arguments)


def is_scored(rollout: Rollout) -> bool:
    """Whether the rollout has its reward: neither it nor a reward function failed."""
    return not rollout.failed and rollout.error_type != "RewardError"


def group_samples(client: ChatClient, rollouts: Sequence[Rollout], group_index: int) -> list[Sample]:
    """The samples of a group; a rollout without its reward becomes a sample with an error and no tokens."""
    samples = []
    for index, rollout in enumerate(rollouts):
        if not is_scored(rollout) or not rollout.turns:
            error = rollout.error or "the rollout has no tokens"
            samples.append(
                Sample(rollout.prompt, status=Status.FAILED, error=error, group_index=group_index, index=index)
            )
            continue
        for sample in rollout_to_samples(rollout, group_index=group_index, index=index):
            sample.loss_mask, sample.metadata = client.loss_mask(sample), {"metrics": rollout.metrics}
            samples.append(sample)
    return samples
