"""Teacher log-probs of every group as soon as it is finished, concurrent with sampling.

rollout --> the rendered chat request --> the same with the context --> token ids + the sampled ids --> log-probs
"""

from __future__ import annotations

import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import anyio
import msgspec
from loguru import logger

from prime_rl.client.contexts import Context
from prime_rl.client.scoring import ScoredTokens, ServerChoice, TokenScorer
from prime_rl.configuration.sections import BASE_MODEL
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.context import (
    DEFAULT_SYSTEM_PROBES,
    PROBE_USER,
    ContextProvider,
    read_default_system,
)
from prime_rl.orchestrator.distillation.outcomes import FeedbackCheck, read_outcomes
from prime_rl.orchestrator.servers import wait_until_ready
from prime_rl.utils.client import build_clients
from rollouts.training.environments.protocol import describe_failure
from rollouts.training.types import Sample, TeacherTable

MAX_CACHED_PROMPTS = 4096
LEAST_LOGPROB = -100.0
"""Finite stand-in for log 0, so that messages contain no infinities."""


TOKENIZER_PROBE = "def area(r): return 3.14 * r**2  # Größe, 東京, été"
"""Words, digits, code and other alphabets, without spaces before punctuation, which some decoders remove."""


class SkipReason(StrEnum):
    """Why the teacher cannot score a sample."""

    OVERLONG = "overlong"  # longer than the teacher's context
    PROMPT = "prompt"  # its prompt cannot be rendered with the context
    SERVER = "server"  # a request to a server failed


class UnscorableSample(Exception):
    """A sample that the teacher cannot score."""

    def __init__(self, reason: SkipReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    @classmethod
    def from_error(cls, what: str, error: Exception) -> UnscorableSample:
        """The error of a failed request."""
        kind, message = describe_failure(error)
        reason = SkipReason.OVERLONG if kind == "OverlongPrompt" else SkipReason.SERVER
        return cls(reason, f"{what}: {kind}: {message}")


class Teacher:
    """Adds teacher log-probs to samples. Unscorable samples are dropped and counted. `model`: the student's name."""

    def __init__(
        self, contexts: ContextProvider, scorer: TokenScorer, model: str, reference: TokenScorer | None = None
    ) -> None:
        self.contexts, self.scorer, self.model = contexts, scorer, model
        self.reference = reference or scorer
        """Scorer of reference environments: the model before training, also with an EMA or live teacher."""
        self.last_error: UnscorableSample | None = None
        self._feedback = FeedbackCheck(contexts.teacher.success_reward)
        self._counts: Counter[str] = Counter()
        self._seconds = 0.0
        self._prompts: OrderedDict[bytes, list[int]] = OrderedDict()
        self._default_systems: dict[bytes, str] = {}

    async def score_group(self, samples: list[Sample], env: str, row: Mapping[str, Any], client: Any) -> list[Sample]:
        """Score the samples of a group; returns those that are scored or have no context. `client` renders the chat."""
        role, contexts = self.contexts.role(env), self._build_contexts(samples, env, row)
        for sample, context in zip(samples, contexts, strict=True):
            sample.has_teacher = context is not None
        if role == "context":
            self._counts["rollouts"] += len(samples)
            self._counts["with_context"] += sum(sample.has_teacher for sample in samples)
        scored: dict[int, Sample] = {}
        start_time = time.perf_counter()

        async def score_one(index: int) -> None:
            sample = samples[index]
            if contexts[index] is None:
                scored[index] = sample
                return
            try:
                tokens, start = await self._build_prompt(sample, env, contexts[index], client)
                scorer = self.reference if role == "reference" else self.scorer
                # The prompt's tokens are unfiltered, one byte each.
                support = sample.sampling_support[sample.loss_mask.index(1.0) :]
                self._fill(sample, await self.score(scorer, tokens, start, support), start)
            except UnscorableSample as skipped:
                self._counts[skipped.reason] += 1
                self.last_error = skipped
                return
            sample.reference_weight = self.contexts.reference_weight(env) if role == "reference" else 0.0
            scored[index] = sample

        async with anyio.create_task_group() as tasks:
            for index in range(len(samples)):
                tasks.start_soon(score_one, index)
        self._seconds += time.perf_counter() - start_time
        return [scored[index] for index in sorted(scored)]

    def _build_contexts(self, samples: Sequence[Sample], env: str, row: Mapping[str, Any]) -> list[Context | None]:
        """The context of each sample; None: no teacher, "": a teacher without context."""
        if (role := self.contexts.role(env)) != "context":
            return [None if role == "none" else ""] * len(samples)
        contexts = dict[tuple[str | None, int | None], Context | None]()
        for seat in dict.fromkeys(sample.seat for sample in samples):  # a seat is compared with itself
            rollouts = read_outcomes([sample for sample in samples if sample.seat == seat])
            group = list(rollouts.values())
            if self.contexts.context_from(env) == "feedback":
                self._feedback.count(env, group)
            for index, one in rollouts.items():
                contexts[seat, index] = self.contexts.context_for(env, row, one, group)
        return [contexts[sample.seat, sample.index] for sample in samples]

    def take_metrics(self) -> dict[str, float]:
        """Seconds of teacher scoring, and dropped samples by reason, since the last call."""
        counts, self._counts = self._counts, Counter()
        seconds, self._seconds = self._seconds, 0.0
        metrics = {f"teacher/skipped/{reason}": float(counts[reason]) for reason in SkipReason}
        total = counts["tokens"]
        share = counts["cached_tokens"] / total if total else 0.0
        if counts["rollouts"]:
            metrics["teacher/with_context"] = counts["with_context"] / counts["rollouts"]
        return {"time/teacher_logprobs": seconds, "teacher/cached_prompt": share, **metrics}

    async def wait_until_ready(self, timeout_s: float, student: Any) -> None:
        """Log configuration warnings, then wait until every server of the teacher's own responds.

        `ValueError` if a frozen teacher has another tokenizer than `student`, a client of the student's server, or its
        server has no model of that name.
        """
        for line in self.contexts.warnings():
            logger.warning(line)
        for client in self.scorer.clients if self.scorer.servers is None else ():
            await wait_until_ready(client, timeout_s)
        if self.scorer.servers is None and self.contexts.teacher.weights == "frozen":
            await self._check_tokenizer(student)

    async def _check_tokenizer(self, student: Any) -> None:
        """Compare how both servers read the student's tokens of a text, if they have routes for it."""
        ids = await student.tokenize({"model": self.model, "prompt": TOKENIZER_PROBE})
        if ids is None:
            return
        own = await student.try_detokenize({"model": self.model, "tokens": ids})
        try:
            read = await self.scorer.clients[0].try_detokenize({"model": self.scorer.model, "tokens": ids})
        except ValueError as error:
            raise ValueError(f"{error}\n  set teacher_model.model.name to a model of this server") from error
        if None not in (own, read) and own != read:
            raise ValueError(
                f"teacher_model.model.name = {self.scorer.model!r} has another tokenizer than the student: it reads "
                f"{own!r} as {read!r}; choose a teacher with the same vocabulary"
            )

    async def close(self) -> None:
        """Close the connections."""
        for client in self.scorer.clients:
            await client.close()

    async def _build_prompt(self, sample: Sample, env: str, context: Any, client: Any) -> tuple[list[int], int]:
        """The teacher's tokens and the start of the sampled ones."""
        chat_request, start = sample.metadata.get("chat_request"), sample.loss_mask.index(1.0)
        if not context:
            return sample.tokens, start
        if chat_request is None:
            message = "the prompt messages of this rollout are unknown: the environment does not expose them"
            raise UnscorableSample(SkipReason.PROMPT, message)
        try:
            given = await self._find_rendered(sample.tokens[:start], chat_request, client)
            default_system = await self.find_default_system(env, chat_request, client)
            prompt = await self.render(self.contexts.insert(env, chat_request, context, default_system), client, given)
        except ValueError as error:
            raise UnscorableSample(SkipReason.PROMPT, str(error)) from error
        return [*prompt, *sample.tokens[len(given) :]], len(prompt) + start - len(given)

    async def _find_rendered(self, tokens: list[int], chat_request: Mapping[str, Any], client: Any) -> list[int]:
        """The beginning of the student's prompt that is the rendered request: all of it, or the first turn's part.

        `ValueError` if the chat template renders the request to other tokens.
        """
        rendered = await self.render(chat_request, client)
        if tokens[: len(rendered)] == rendered:
            return rendered
        rendered = await self._tokenize(chat_request, client)
        if tokens[: len(rendered)] != rendered:
            raise ValueError("the chat template renders this prompt to other tokens than the student's")
        self._prompts.clear()  # the template writes the date, which has changed since
        self._default_systems.clear()
        return rendered

    async def find_default_system(self, env: str, chat_request: Mapping[str, Any], client: Any) -> str:
        """The default system message of the chat template, needed for `system_append`.

        Without it the teacher's prompt would lack a part of the student's. `ValueError` if it cannot be determined.
        """
        if self.contexts.position(env) != "system_append" or "prompt" in chat_request:
            return ""
        options = {key: value for key, value in chat_request.items() if key != "messages"}
        key = msgspec.json.encode(options)
        if key not in self._default_systems:
            plain, probed = [await self.render({**options, "messages": c}, client) for c in DEFAULT_SYSTEM_PROBES]
            default = read_default_system(*[await self._read_text(ids, client) for ids in (plain, probed)])
            given = {**options, "messages": [{"role": "system", "content": default}, PROBE_USER]}
            if default and await self.render(given, client) != plain:
                raise ValueError(
                    "the chat template formats its default system message differently from an explicit one: give "
                    'the prompts a system message, or set teacher_model.context_position = "user_prefix"'
                )
            self._default_systems[key] = default
        return self._default_systems[key]

    async def render(self, chat_request: Mapping[str, Any], client: Any, given: Sequence[int] = ()) -> list[int]:
        """Token ids of a prompt, rendered by the student's server with the same template, tools and arguments.

        `given`: the student's prompt; with another one, such as that of another date, it is rendered again.
        """
        key = msgspec.json.encode(chat_request) + array("i", given).tobytes()
        if (cached := self._prompts.get(key)) is not None:
            self._prompts.move_to_end(key)
            return cached
        ids = self._prompts[key] = await self._tokenize(chat_request, client)
        if len(self._prompts) > MAX_CACHED_PROMPTS:
            self._prompts.popitem(last=False)
        return list(ids)

    async def _tokenize(self, chat_request: Mapping[str, Any], client: Any) -> list[int]:
        try:
            ids: list[int] | None = await client.tokenize({"model": self.model, **chat_request})
        except Exception as error:
            raise UnscorableSample.from_error("/tokenize failed", error) from error
        if ids is None:
            raise ValueError("the server cannot render the teacher's prompt: its chat template rejects the messages")
        return ids

    async def _read_text(self, tokens: list[int], client: Any) -> str:
        try:
            return str(await client.detokenize({"model": self.model, "tokens": tokens}))
        except Exception as error:
            raise UnscorableSample.from_error("/detokenize failed", error) from error

    async def score(self, scorer: TokenScorer, tokens: list[int], start: int, support: bytes = b"") -> ScoredTokens:
        """The result of `scorer`; `UnscorableSample` if the request fails, `ValueError` for a limit of its server."""
        try:
            scored = await scorer.score(tokens, start, support)
        except ValueError:
            raise  # a permanent limit of this server, which the user must fix
        except Exception as error:
            raise UnscorableSample.from_error(f"scoring {len(tokens)} tokens failed", error) from error
        self._counts["tokens"] += start
        self._counts["cached_tokens"] += min(scored.num_cached, start)
        return scored

    def _fill(self, sample: Sample, scored: ScoredTokens, start: int) -> None:
        """Write the scores of the trained tokens to the sample; all other positions are 0."""
        first = len(sample.tokens) - len(scored.logprobs)
        selected = [i for i in range(len(scored.logprobs)) if sample.loss_mask[first + i] > 0]
        stream = [0.0] * len(sample.tokens)
        for i in selected:
            stream[first + i] = max(scored.logprobs[i], LEAST_LOGPROB)
        sample.teacher_logprobs = stream
        if scored.top:
            sample.teacher_table = TeacherTable(
                k=scored.top,
                logprobs=_rows(scored.top_logprobs, selected, scored.top),
                ids=_rows(scored.top_ids, selected, scored.top),
                tail_mass=_rows(scored.tail_mass, selected, 1),
            )


def _rows(packed: bytes, selected: Sequence[int], width: int) -> bytes:
    """Select rows of a packed table with `width` 4-byte numbers per row."""
    return b"".join(packed[4 * width * i : 4 * width * (i + 1)] for i in selected)


def build_teacher(config: OrchestratorConfig, servers: ServerChoice | None = None) -> Teacher | None:
    """Build the configured teacher; None without one. `ValueError` for an invalid configuration.

    `servers` supervises those of the student, on which a teacher without servers of its own scores.
    """
    teacher = config.teacher_model
    if teacher is None:
        return None
    contexts = ContextProvider(teacher, config.env, config.seed)
    if not teacher.client.base_url:
        raise ValueError(
            "teacher_model.client.base_url is unset: rl starts a teacher and sets it; without rl, set it yourself"
        )
    if teacher.client.base_url != config.client.base_url:
        servers = None
    clients = build_clients(teacher.client)
    temperature = config.sampling.temperature if teacher.temperature is None else teacher.temperature
    name = teacher.model.name or config.model.name
    scorer = TokenScorer(clients, name, temperature, teacher.top_logprobs, servers)
    reference = None
    if teacher.weights != "frozen":
        reference = TokenScorer(clients, BASE_MODEL, temperature, teacher.top_logprobs, servers)
    return Teacher(contexts, scorer, config.model.name, reference)
