"""An engine of this process as the client that environments talk to, and groups of rollouts made with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
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
from rollouts.training.types import Message, Sample, Status

QUIET_TURNS = 3
"""Requests are computed together once the event loop has gone round so often without a new one."""


class ChatClient:
    """`.chat.completions.create(...)` answered by an engine, requests that are open together in one batch.

    `executor` is the thread in which the engine computes; `version` is told with every answer.
    """

    def __init__(self, engine: Engine, executor: Executor, max_tokens: int = 256) -> None:
        self.engine, self.executor, self.max_tokens = engine, executor, max_tokens
        self.version = 0
        self.chat = self
        self.completions = self
        self.generated_tokens = 0
        self._forced: dict[tuple[int, ...], list[int]] = {}
        self._open: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._drain: asyncio.Task[None] | None = None

    async def create(self, *, messages: Sequence[Message], **asked: Any) -> Any:
        """The answer to a conversation, as `openai` has it; options that are not about sampling are not read."""
        extra = {**asked, **(asked.get("extra_body") or {})}
        tokenizer = self.engine.tokenizer
        temperature = extra.get("temperature")
        request = Request(
            tuple(tokenizer.render_for_completion(list(messages))),
            int(extra.get("max_completion_tokens") or extra.get("max_tokens") or self.max_tokens),
            1.0 if temperature is None else float(temperature),
            extra.get("top_k"),
            int(extra.get("seed") or 0),
        )
        done = await self._ask(request)
        self.generated_tokens += len(done.tokens)
        if 0 in done.mask:
            self._forced[(*request.prompt, *done.tokens)] = done.mask
        return as_completion(_to_answer(request, done, self.version, tokenizer), chat=True)

    def loss_mask(self, sample: Sample) -> list[float]:
        """The mask of a sample without what tools said, which the policy did not choose."""
        mask = self._forced.pop(tuple(sample.tokens), None)
        if mask is None:
            return sample.loss_mask
        return [*sample.loss_mask[: len(sample.tokens) - len(mask)], *map(float, mask)]

    async def _ask(self, request: Request) -> Completion:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._open.append((request, answer))
        if self._drain is None:
            self._drain = asyncio.create_task(self._serve())
        return await answer

    async def _serve(self) -> None:
        """Gather what is asked at the same time, compute it, and again until nothing is open."""
        loop = asyncio.get_running_loop()
        while self._open:
            seen, quiet = 0, 0
            while quiet < QUIET_TURNS:
                quiet, seen = (quiet + 1, seen) if len(self._open) == seen else (0, len(self._open))
                await asyncio.sleep(0)
            # By seed, so that a batch is the same whichever task happened to ask first.
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
    """`num` rollouts of one row; `seed` is that of the run and a number of the row's own."""
    arguments = [
        {"logprobs": True, **sampling, "extra_body": {**sampling.get("extra_body", {}), "seed": sample_seed(*seed, i)}}
        for i in range(num)
    ]
    return await env.run_group(row, client, "nanochat", arguments)


def group_samples(client: ChatClient, rollouts: Sequence[Rollout], group_index: int) -> list[Sample]:
    """The samples of a group's rollouts; a rollout that failed is one without tokens that says why."""
    samples = []
    for index, rollout in enumerate(rollouts):
        metadata = {"metrics": rollout.metrics, "completion_error": rollout.error}
        if rollout.failed or not rollout.turns:
            error = rollout.error or "the rollout has no tokens"
            samples.append(
                Sample(rollout.prompt, status=Status.FAILED, error=error, group_index=group_index, index=index)
            )
            continue
        for sample in rollout_to_samples(rollout, group_index=group_index, index=index):
            sample.loss_mask, sample.metadata = client.loss_mask(sample), metadata
            samples.append(sample)
    return samples
