"""A small inference engine in this process: its own copy of the model, whole groups sampled token by token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch
from safetensors.torch import load_file
from torch import nn

from rollouts.training.datasets.chat import render_chat
from rollouts.training.rollout_gen.async_rollout_manager import sample_seed
from rollouts.training.types import Sample, Status


class InProcessEngine:
    """Samples at temperature 1; noise is a function of (seed, group, sample), so results do not depend on timing."""

    def __init__(self, model: nn.Module, tokenizer: Any, max_tokens: int, seed: int) -> None:
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.seed = seed
        self._one_at_a_time = anyio.CapacityLimiter(1)

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load a directory of published weights."""
        await anyio.to_thread.run_sync(self._load, Path(checkpoint_path))
        return {"success": True}

    def build_generate_group(self, reward_fn: Callable[[str, str], float], n: int) -> Callable[..., Any]:
        """`generate_group(group_index, prompt)` for a rollout manager: `n` scored samples."""

        async def generate_group(group_index: int, prompt: str) -> list[Sample]:
            samples = await anyio.to_thread.run_sync(
                self.sample_group, group_index, prompt, n, limiter=self._one_at_a_time
            )
            for sample in samples:
                sample.reward = reward_fn(prompt, sample.response)
            return samples

        return generate_group

    @torch.no_grad()
    def sample_group(self, group_index: int, prompt: str, n: int) -> list[Sample]:
        """`n` answers to one prompt, with the log-probs they were sampled with."""
        messages = [{"role": "user", "content": prompt}]
        given = render_chat(self.tokenizer, messages)
        draws = [torch.Generator().manual_seed(sample_seed(self.seed, group_index, i)) for i in range(n)]
        tokens: list[list[int]] = [[] for _ in range(n)]
        logprobs: list[list[float]] = [[] for _ in range(n)]
        ended = [False] * n
        step, cache = torch.tensor([given] * n), None
        for _ in range(self.max_tokens):
            output = self.model(step, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            logp = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
            picks = [int(torch.multinomial(row.exp(), 1, generator=g)) for row, g in zip(logp, draws, strict=True)]
            for i, pick in enumerate(picks):
                if not ended[i]:
                    tokens[i].append(pick)
                    logprobs[i].append(float(logp[i, pick]))
                    ended[i] = pick == self.tokenizer.eos_token_id
            if all(ended):
                break
            step = torch.tensor(picks)[:, None]
        return [self._to_sample(prompt, given, *row) for row in zip(tokens, logprobs, ended, strict=True)]

    def _to_sample(
        self, prompt: str, given: list[int], tokens: list[int], logprobs: list[float], ended: bool
    ) -> Sample:
        return Sample(
            prompt=prompt,
            response=self.tokenizer.decode(tokens, skip_special_tokens=True),
            tokens=[*given, *tokens],
            loss_mask=[0.0] * len(given) + [1.0] * len(tokens),
            inference_logprobs=[0.0] * len(given) + logprobs,
            status=Status.COMPLETED if ended else Status.TRUNCATED,
        )

    def _load(self, directory: Path) -> None:
        tied = json.loads((directory / "config.json").read_text()).get("tie_word_embeddings", False)
        missing, unknown = self.model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
        if unknown or (missing and not tied):
            raise ValueError(f"{directory} belongs to another model: {[*missing, *unknown][0]}")
