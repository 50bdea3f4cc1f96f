"""An inference engine in the training process: a `transformers` model with weights of its own."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import torch
from torch import Tensor

from rollouts.training.backends.checkpoint import unwrap_compiled
from rollouts.training.datasets.chat import render_chat
from rollouts.training.datasets.prompts import read_prompt
from rollouts.training.manifests import MANIFEST_FILE, describe_tensors, read_manifest
from rollouts.training.rollout_gen.async_rollout_manager import sample_seed
from rollouts.training.steps import parse_step
from rollouts.training.types import Sample, Status

WEIGHTS_FILE = "model.safetensors"


@dataclass(eq=False)
class _PendingPrompt:
    """A prompt that waits for the next batch."""

    prompt: Any
    prompt_ids: list[int]
    seed: int
    result: Sample | Exception | None = None


@dataclass(eq=False)
class _Sampling:
    """A logits processor that applies the temperature and keeps the log-probs of drawn tokens.

    `generate` itself would keep the scores of the whole vocabulary for every token.
    """

    temperature: float
    logprobs: list[Tensor] = field(default_factory=list)
    """[prompts] for each drawn token."""
    _distribution: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.note_drawn(input_ids[:, -1])
        scores = scores / self.temperature
        self._distribution = scores.float().log_softmax(dim=-1)
        return scores

    def note_drawn(self, tokens: Tensor) -> None:
        """Look up the log-probs of [prompts] tokens, if they were drawn from the last distribution."""
        if self._distribution is not None:
            self.logprobs.append(self._distribution.gather(1, tokens[:, None]).squeeze(1))
        self._distribution = None


class ModelEngine:
    """A `generate_fn` that samples from a copy of `model`, and the `InferenceEngine` that updates this copy.

    Pass it to `RolloutConfig(generate_fn=engine)` and in the list of engines of `run_rl_training`. A prompt is text,
    rendered as a user message if the tokenizer has a chat template, a list of messages, or a row with one of these (see
    `load_rl_prompts`). Samples have the tokens, a loss mask over the completion, the log-probs under the sampling
    distribution and the version of the weights; a completion without an end token is `Status.TRUNCATED`. Concurrent
    calls are generated as one batch of at most `max_batch_size`, in the order of the calls' seeds, which the manager
    passes; its draws depend on `seed`, the version and the number of batches before it. Generation blocks the event
    loop; use a server for models that need more than one process.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: Any,
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        max_batch_size: int = 64,
        seed: int = 0,
    ) -> None:
        if not hasattr(model, "generate"):
            raise ValueError(f"{type(model).__name__} has no `generate`: pass a causal language model of transformers")
        if max_tokens < 1 or max_batch_size < 1 or not 0 < temperature < math.inf:
            raise ValueError("max_tokens and max_batch_size must be at least 1, and temperature a number above 0")
        own: Any = copy.deepcopy(unwrap_compiled(model))
        self.model = own.eval().requires_grad_(False)
        self.tokenizer, self.max_tokens, self.temperature = tokenizer, max_tokens, float(temperature)
        self.version, self.max_batch_size = 0, max_batch_size
        self._waiting: list[_PendingPrompt] = []
        self.seed = seed
        self._num_batches = 0  # since the weights were loaded
        eos = self.model.generation_config.eos_token_id
        eos = tokenizer.eos_token_id if eos is None else eos
        self._eos_ids: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        # The model's own settings, such as min_p or beams, would sample from another distribution than the trainer's.
        self.model.generation_config = type(own.generation_config)()

    async def __call__(self, prompts: Sequence[Any], seed: int = 0) -> list[Sample]:
        """One sample per prompt; `seed` is the place of the call among concurrent ones."""
        requests = [_PendingPrompt(prompt, self._encode(prompt), seed) for prompt in prompts]
        self._waiting += requests
        try:
            await anyio.sleep(0)  # concurrent calls are added
        except BaseException:  # canceled, as at the end of a stream of groups: no prompts for the next batch
            own = set(map(id, requests))
            self._waiting = [request for request in self._waiting if id(request) not in own]
            raise
        while any(request.result is None for request in requests):
            # By seed: an event loop may start concurrent calls in any order.
            waiting = sorted(self._waiting, key=lambda request: request.seed)
            batch, self._waiting = waiting[: self.max_batch_size], waiting[self.max_batch_size :]
            self._run(batch)
        samples = [request.result for request in requests]
        for sample in samples:
            if isinstance(sample, Exception):
                raise sample
        return [sample for sample in samples if isinstance(sample, Sample)]

    def _run(self, batch: list[_PendingPrompt]) -> None:
        try:
            rows = self._generate([request.prompt_ids for request in batch])
        except Exception as error:
            for request in batch:
                request.result = error
            return
        for request, ids, logprobs in zip(batch, *rows, strict=True):
            request.result = self._build_sample(request.prompt, request.prompt_ids, ids, logprobs)

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        """Load published weights (`backend.publish_weights`), verified against their manifest; keeps its own if they
        are incomplete or differ. `ValueError` names the file or tensor."""
        from safetensors.torch import load_file

        directory = Path(checkpoint_path)
        if not (directory / WEIGHTS_FILE).is_file():
            raise ValueError(f"{directory} has no {WEIGHTS_FILE}: pass a directory of published weights")
        tensors = load_file(directory / WEIGHTS_FILE)
        if (directory / MANIFEST_FILE).is_file():
            listed, found = read_manifest(directory).tensors, describe_tensors(tensors)
            if wrong := sorted(name for name in listed.keys() | found.keys() if listed.get(name) != found.get(name)):
                raise ValueError(f"{directory} does not match its manifest: {wrong[0]} differs")
        self._load(tensors)
        step = parse_step(directory.name)
        self.version, self._num_batches = self.version + 1 if step is None else step, 0
        return {"success": True, "version": self.version}

    def _load(self, tensors: Mapping[str, Tensor]) -> None:
        own = self.model.state_dict()
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        wrong = sorted(name for name, shape in shapes.items() if name not in own or own[name].shape != shape)
        tied = {tensor.data_ptr() for name, tensor in own.items() if name in tensors}
        missing = sorted(name for name, tensor in own.items() if name not in tensors and tensor.data_ptr() not in tied)
        if wrong or missing:
            raise ValueError(f"the weights do not fit the engine's model: {(wrong or missing)[0]} differs")
        self.model.load_state_dict(dict(tensors), strict=False)

    def _encode(self, prompt: Any) -> list[int]:
        prompt = read_prompt(prompt, "a prompt") if isinstance(prompt, Mapping) else prompt
        if isinstance(prompt, str) and not self.tokenizer.chat_template:
            if not (ids := list(self.tokenizer.encode(prompt))):
                raise ValueError(f"the prompt {prompt!r} has no tokens: give the model a text to continue")
            return ids
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return render_chat(self.tokenizer, messages)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
        """Completions and their log-probs; prompts are padded on the left."""
        self._num_batches += 1
        width, device = max(map(len, prompts)), next(self.model.parameters()).device
        pad, sampling = (self._eos_ids or [0])[0], _Sampling(self.temperature)  # padding is masked: any token will do
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            # By version, so that a resumed run, whose engine is new, draws the same tokens.
            torch.manual_seed(sample_seed(self.seed, self.version, self._num_batches))
            sequences = self.model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=self.max_tokens,
                do_sample=True,
                logits_processor=[sampling],
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=pad,
                eos_token_id=self._eos_ids or None,
            )
        sampling.note_drawn(sequences[:, -1])
        logprobs = torch.stack(sampling.logprobs, dim=1).tolist()
        completions = [self._cut(row) for row in sequences[:, width:].tolist()]
        return completions, [row[: len(tokens)] for row, tokens in zip(logprobs, completions, strict=True)]

    def _cut(self, tokens: list[int]) -> list[int]:
        """Tokens up to the first end token."""
        end = next((i for i, token in enumerate(tokens) if token in self._eos_ids), len(tokens) - 1)
        return tokens[: end + 1]

    def _build_sample(self, prompt: Any, prompt_ids: list[int], ids: list[int], logprobs: list[float]) -> Sample:
        is_complete = ids[-1] in self._eos_ids
        return Sample(
            prompt=prompt,
            response=self.tokenizer.decode(ids, skip_special_tokens=True),
            tokens=[*prompt_ids, *ids],
            loss_mask=[0.0] * len(prompt_ids) + [1.0] * len(ids),
            inference_logprobs=[0.0] * len(prompt_ids) + logprobs,
            versions=[(len(prompt_ids), self.version)],
            status=Status.COMPLETED if is_complete else Status.TRUNCATED,
            temperature=self.temperature,
        )
