"""The teacher: asked about every group as soon as it is finished, while others are still being sampled.

rollout --> what the server rendered --> the same with the context --> token ids + the sampled ids --> log-probs
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import msgspec
from loguru import logger

from prime_rl.orchestrator.config import OrchestratorConfig, TeacherConfig
from prime_rl.orchestrator.context import Contexts
from prime_rl.orchestrator.engines import wait_until_ready
from prime_rl.utils.client import build_clients
from prime_rl.utils.config import BASE_MODEL
from prime_rl.utils.scoring import Scored, TokenScorer
from rollouts.training.environments.protocol import name_failure
from rollouts.training.types import Sample, TeacherTable

CACHED_PROMPTS = 4096
LEAST_LOGPROB = -100.0
"""Stands for a probability of zero: nothing on the wire is infinite."""


class Skipped(Exception):
    """A sample that the teacher cannot speak of; `reason` is what it is counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Teacher:
    """Fills the teacher's streams of samples. What it cannot score is left out and counted, never a crash."""

    def __init__(self, contexts: Contexts, scorer: TokenScorer, model: str, anchor: TokenScorer | None = None) -> None:
        self.contexts, self.scorer, self.model = contexts, scorer, model
        self.anchor = anchor or scorer
        """Who speaks of anchors: the model before training, also where the teacher's weights follow the student's."""
        self.last_error: str | None = None
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._prompts: OrderedDict[bytes, list[int]] = OrderedDict()

    async def teach(self, samples: list[Sample], env: str, row: Mapping[str, Any], client: Any) -> list[Sample]:
        """The samples of one group that the teacher has scored, or that need none. `client` knows the template."""
        role = self.contexts.role(env)
        context = None if role == "none" else "" if role == "anchor" else self.contexts.of(env, row)
        if context is None:
            for sample in samples:
                sample.taught = False
            return samples
        kept: dict[int, Sample] = {}
        begun = time.perf_counter()

        async def teach_one(index: int) -> None:
            sample = samples[index]
            try:
                tokens, start = await self._prompt_of(sample, env, context, client)
                scorer = self.anchor if role == "anchor" else self.scorer
                self._fill(sample, await self._score(scorer, tokens, start), start)
            except Skipped as skipped:
                self._counts[skipped.reason] += 1
                self.last_error = str(skipped)
                return
            sample.anchor = self.contexts.anchor_weight(env) if role == "anchor" else 0.0
            kept[index] = sample

        async with anyio.create_task_group() as tasks:
            for index in range(len(samples)):
                tasks.start_soon(teach_one, index)
        self._seconds += time.perf_counter() - begun
        return [kept[index] for index in sorted(kept)]

    def take_metrics(self) -> dict[str, float]:
        """Seconds that groups waited for the teacher, and samples left out by reason, since the last call."""
        counts, self._counts = self._counts, Counter()
        seconds, self._seconds = self._seconds, 0.0
        metrics = {f"teacher/skipped/{reason}": float(counts[reason]) for reason in ("overlong", "prompt", "server")}
        total = counts["tokens"]
        share = counts["cached_tokens"] / total if total else 0.0
        return {"time/teacher_logprobs": seconds, "teacher/cached_prompt": share, **metrics}

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until every server of the teacher answers; say what is odd about its contexts first."""
        for line in self.contexts.warnings():
            logger.warning(line)
        for client in self.scorer.clients:
            await wait_until_ready(client, timeout_s)

    async def close(self) -> None:
        """Close the connections."""
        for client in self.scorer.clients:
            await client.close()

    async def _prompt_of(self, sample: Sample, env: str, context: Any, client: Any) -> tuple[list[int], int]:
        """The teacher's tokens, and where the sampled ones begin among them."""
        asked, start = sample.metadata.get("asked"), sample.loss_mask.index(1.0)
        if not context:
            return sample.tokens, start
        if asked is None:
            raise Skipped("prompt", "the prompt of this rollout is not known as messages: the environment hides them")
        try:
            plain = await self.render(asked, client)
            prompt = await self.render(self.contexts.insert(env, asked, context), client)
        except ValueError as error:
            raise Skipped("prompt", str(error)) from error
        if sample.tokens[:start] != plain:
            raise Skipped("prompt", "the template renders this prompt to other tokens than the student was given")
        return [*prompt, *sample.tokens[start:]], len(prompt)

    async def render(self, asked: Mapping[str, Any], client: Any) -> list[int]:
        """Token ids of a prompt, by the student's server: the same template, tools and arguments."""
        key = msgspec.json.encode(asked)
        if (known := self._prompts.get(key)) is not None:
            self._prompts.move_to_end(key)
            return known
        try:
            ids = await client.tokenize({"model": self.model, **asked})
        except Exception as error:
            kind, said = name_failure(error)
            raise Skipped("server", f"/tokenize failed: {kind}: {said}") from error
        if ids is None:
            raise ValueError("the server cannot render the teacher's prompt: its template refuses the messages")
        self._prompts[key] = ids
        if len(self._prompts) > CACHED_PROMPTS:
            self._prompts.popitem(last=False)
        return list(ids)

    async def _score(self, scorer: TokenScorer, tokens: list[int], start: int) -> Scored:
        try:
            scored = await scorer.score(tokens, start)
        except ValueError:
            raise  # what this server can never do is for the user to change
        except Exception as error:
            kind, said = name_failure(error)
            reason = "overlong" if kind == "OverlongPrompt" else "server"
            raise Skipped(reason, f"the teacher did not score {len(tokens)} tokens: {kind}: {said}") from error
        self._counts["tokens"] += start
        self._counts["cached_tokens"] += min(scored.num_cached, start)
        return scored

    def _fill(self, sample: Sample, scored: Scored, start: int) -> None:
        """Put the scores where the sampled tokens are; everything else carries 0."""
        first = len(sample.tokens) - len(scored.logprobs)
        wanted = [i for i in range(len(scored.logprobs)) if sample.loss_mask[first + i] > 0]
        stream = [0.0] * len(sample.tokens)
        for i in wanted:
            stream[first + i] = max(scored.logprobs[i], LEAST_LOGPROB)
        sample.teacher_logprobs = stream
        if scored.top:
            sample.teacher_table = TeacherTable(
                k=scored.top,
                logprobs=_rows(scored.top_logprobs, wanted, scored.top),
                ids=_rows(scored.top_ids, wanted, scored.top),
                tail_mass=_rows(scored.tail_mass, wanted, 1),
            )


def _rows(packed: bytes, wanted: Sequence[int], width: int) -> bytes:
    """Rows of a packed table of 4-byte numbers; nothing of nothing."""
    return b"".join(packed[4 * width * i : 4 * width * (i + 1)] for i in wanted)


def build_teacher(config: OrchestratorConfig) -> Teacher | None:
    """The teacher that the configuration names; None where nobody is asked. `ValueError` for what cannot work."""
    teacher = config.teacher_model
    if teacher is None:
        return None
    contexts = Contexts(config, teacher)
    clients = build_clients(teacher.client)
    temperature = config.sampling.temperature if teacher.temperature is None else teacher.temperature
    scorer = TokenScorer(clients, teacher_name(config, teacher), temperature, teacher.top_logprobs)
    anchor = None
    if teacher.weights != "frozen":
        anchor = TokenScorer(clients, BASE_MODEL, temperature, teacher.top_logprobs)
    return Teacher(contexts, scorer, config.model.name, anchor)


def teacher_name(config: OrchestratorConfig, teacher: TeacherConfig) -> str:
    """The name under which the teacher is asked; its server must be known."""
    if not teacher.client.base_url:
        raise ValueError(
            "teacher_model.client.base_url is unset: rl starts a teacher and fills it; alone, name the server of yours"
        )
    return teacher.model.name or config.model.name
