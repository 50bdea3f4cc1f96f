"""Connects a nanochat model with a `verifiers` environment: load, generate, and score with its rubric."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from nanochat.chat_client import is_scored
from nanochat.engine import Engine, Request
from nanochat.gpt import GPT
from nanochat.tokenizer import NanochatTokenizer
from rollouts.training.environments import Environment, load_environment
from rollouts.training.environments.answers import Answer, AnswerMessage, Choice, as_completion
from rollouts.training.environments.protocol import Row
from rollouts.training.rollout_gen.async_rollout_manager import sample_seed
from rollouts.training.types import Message


class PrimeIntellectRLAdapter:
    """A nanochat `model` and `tokenizer` with the environment `env_id`, built with `env_args`.

    Answers depend on `seed` and the number of the call: a new adapter gives the same answers in the same order.
    """

    def __init__(
        self,
        model: GPT,
        tokenizer: NanochatTokenizer,
        env_id: str = "harleycooper/nanochatAquaRat",
        env_args: dict[str, Any] | None = None,
        *,
        seed: int = 42,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.env_id, self.env_args, self.seed = env_id, dict(env_args or {}), seed
        self._engine = Engine(model, tokenizer)
        self._calls = 0
        self._door: Environment | None = None

    @property
    def environment(self) -> Environment:
        """The environment wrapped for this package; raises `ValueError` if it does not load."""
        if self._door is None:
            self._door = load_environment(self.env_id, self.env_args)
        return self._door

    def load_environment(self) -> Any:
        """The environment object of `verifiers`, cached; raises `ValueError`."""
        return getattr(self.environment, "env", self.environment)

    def convert_messages_to_tokens(self, messages: Sequence[Message] | dict[str, Any]) -> Int[Tensor, "1 tokens"]:
        """The tokens of a conversation up to the start of the assistant's turn."""
        return torch.tensor([self.tokenizer.render_for_completion(messages)], device=self.model.get_device())

    def generate_response(
        self,
        messages: Sequence[Message] | dict[str, Any],
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_k: int | None = 50,
        num_samples: int = 1,
    ) -> list[str]:
        """`num_samples` independent completions of a conversation, as texts; temperature 0 is greedy."""
        prompt = tuple(self.tokenizer.render_for_completion(messages))
        requests = [
            Request(prompt, max_tokens, temperature, top_k, sample_seed(self.seed, self._calls, i))
            for i in range(num_samples)
        ]
        self._calls += 1
        return [
            self.tokenizer.decode(done.tokens, skip_special_tokens=True) for done in self._engine.complete(requests)
        ]

    def compute_reward(self, messages: Sequence[Message], response: str) -> float:
        """The environment's reward of `response` to one of its prompts; raises `ValueError` for unknown prompts."""
        scoring = self.environment.run_group(self._find_row(messages), _Saying(response), "nanochat", [{}])
        with ThreadPoolExecutor(1) as thread:  # the caller may be inside an event loop, as in a notebook
            [rollout] = thread.submit(asyncio.run, scoring).result()
        if not is_scored(rollout):
            raise ValueError(f"the environment could not score this: {rollout.error}")
        return rollout.reward

    def _find_row(self, messages: Sequence[Message]) -> Row:
        wanted = [(m["role"], m["content"]) for m in messages]
        for split in ("train", "eval"):
            for row in self.environment.rows(split):
                if [(m["role"], m["content"]) for m in row["prompt"]] == wanted:
                    return row
        raise ValueError(f"environment {self.env_id!r} has no such prompt: take the prompt of one of its rows")


class _Saying:
    """A client that always returns `text`."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, **asked: Any) -> Any:
        choice = Choice(message=AnswerMessage(content=self._text), finish_reason="stop")
        return as_completion(Answer(choices=[choice]), chat=True)
