"""How much of the gap is closed: student and teacher, with and without the context, on the same held-out examples."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio.to_thread
import msgspec
from loguru import logger

from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.context import Contexts
from prime_rl.orchestrator.teacher import Teacher
from prime_rl.utils.config import BASE_MODEL
from prime_rl.utils.scoring import TokenScorer
from rollouts.training.agent_integration import Rollout, rollout_to_samples
from rollouts.training.environments import Environment
from rollouts.training.metrics import compute_gap_closed
from rollouts.training.types import Sample

Row = dict[str, Any]
Groups = list[list[Rollout]]
Run = Callable[[Environment, Sequence[Any], str], Awaitable[Groups]]
"""The rollouts of an environment's evaluation examples, by the model of this name at these servers."""
ALARM = 0.5
"""An arm that has fallen below this part of what it was before training is told."""


class ToldEnvironment:
    """An environment whose prompts carry the teacher's context: what the student does when it is told."""

    def __init__(self, environment: Environment, contexts: Contexts, name: str) -> None:
        self.id = environment.id
        self._environment, self._contexts, self._name = environment, contexts, name

    def rows(self, split: str = "train") -> list[Row]:
        """The rows, their prompts as the teacher sees them."""
        return [self._tell(row) for row in self._environment.rows(split)]

    async def run_group(
        self, row: Row, client: Any, model: str, sampling_args: Sequence[dict[str, Any]], retries: int = 0
    ) -> list[Rollout]:
        """As the environment does."""
        return await self._environment.run_group(row, client, model, sampling_args, retries)

    def _tell(self, row: Row) -> Row:
        context, prompt = self._contexts.of(self._name, row), row["prompt"]
        if not context:
            return row
        key = "prompt" if isinstance(prompt, str) else "messages"
        return {**row, "prompt": self._contexts.insert(self._name, {key: prompt}, context)[key]}


class HeldOutEnvironment(ToldEnvironment):
    """An environment without the evaluation examples that are training prompts too; `ValueError` when all are."""

    def __init__(self, environment: Environment, trained: Environment | None, name: str) -> None:
        self.id, self._environment = environment.id, environment
        known = {fingerprint(row) for row in trained.rows("train")} if trained is not None else set[bytes]()
        everything = environment.rows("eval")
        self._rows = [row for row in everything if fingerprint(row) not in known]
        if everything and not self._rows:
            raise ValueError(
                f"every evaluation example of {name!r} is a training prompt: eval_baseline would measure memory\n"
                "  give the environment a held-out split, or set eval_baseline = false"
            )
        if left := len(everything) - len(self._rows):
            logger.warning(f"{left} evaluation examples of {name} are training prompts: left out")

    def rows(self, split: str = "train") -> list[Row]:
        """The examples that are left, or the training prompts."""
        return self._rows if split == "eval" else self._environment.rows(split)


def fingerprint(row: Mapping[str, Any]) -> bytes:
    """The prompt of a row, to compare it with others."""
    return msgspec.json.encode(row["prompt"], enc_hook=str, order="deterministic")


@dataclass
class Arm:
    """One environment's measurements that later ones are compared with: mean reward of each example, failures as 0."""

    before: list[float] = field(default_factory=list)
    teacher: list[float] = field(default_factory=list)
    teacher_plain: list[float] = field(default_factory=list)
    taught: list[tuple[Sample, list[int], int]] = field(default_factory=list)
    """The teacher's samples under the context, with the student's prompt in its place and where it ends."""


class Arms:
    """Measures the four arms beside every evaluation; the teacher's, which do not change, once.

    student and student_context follow the training; teacher and teacher_context are those of the start, with live
    weights the student's own, with their average those of now.
    """

    def __init__(self, config: OrchestratorConfig, teacher: Teacher, clients: Sequence[Any], directory: Path) -> None:
        assert config.teacher_model is not None
        self.config, self.clients = config, clients
        # The same teacher with counters of its own: those of training are not mixed with evaluation.
        self.teacher = Teacher(teacher.contexts, teacher.scorer, teacher.model, teacher.anchor)
        self.directory = directory
        self._settings = config.teacher_model
        self._arms: dict[str, Arm] = {}
        temperature = teacher.scorer.temperature
        self._student = TokenScorer(list(clients), config.model.name, temperature)

    async def measure(
        self,
        name: str,
        environment: Environment,
        rows: Sequence[Row],
        version: int,
        groups: Groups,
        temperature: float,
        run: Run,
    ) -> dict[str, float]:
        """Metrics of one environment at `version`; `groups` are the student's rollouts of `rows`, `run` makes more."""
        if self.teacher.contexts.role(name) != "context":
            return await self._measure_other(name, rows, version, groups, temperature)
        told = ToldEnvironment(environment, self.teacher.contexts, name)
        scores = {"student": example_scores(groups)}
        own = (self.clients, self.config.model.name)
        told_groups = await run(told, *own)
        scores["student_context"] = example_scores(told_groups)
        metrics: dict[str, float] = {}
        arm = self._arms.get(name)
        if arm is None:
            arm = self._arms[name] = await self._begin(name, environment, told, version, scores, told_groups, run)
            metrics |= baseline_metrics(name, arm)
        if self._settings.weights == "ema" and version:
            target = (self.teacher.scorer.clients, self.teacher.scorer.model)
            scores["teacher"] = example_scores(await run(environment, *target))
            scores["teacher_context"] = example_scores(await run(told, *target))
        else:
            is_live = self._settings.weights == "live"
            scores["teacher"] = scores["student"] if is_live else arm.teacher_plain
            scores["teacher_context"] = scores["student_context"] if is_live else arm.teacher
        found = {f"{what}/avg": statistics.fmean(values) for what, values in scores.items() if values}
        closed = await anyio.to_thread.run_sync(compute_gap_closed, scores["student"], arm.before, arm.teacher)
        if closed is not None:
            found |= dict(zip(("gap_closed", "gap_closed/ci_low", "gap_closed/ci_high"), closed, strict=True))
        if temperature == self.teacher.scorer.temperature:
            found |= await self._divergences(name, rows, groups, arm)
        found["collapsed"] = float(self._is_collapsed(name, found, arm))
        if version == 0:
            self._tell(name, found, closed)
        return metrics | {f"distill/{name}/{key}": value for key, value in found.items()}

    async def _begin(
        self,
        name: str,
        environment: Environment,
        told: Environment,
        version: int,
        scores: Mapping[str, list[float]],
        told_groups: Groups,
        run: Run,
    ) -> Arm:
        """The teacher's arms, and the student's as it was before training."""
        arm = Arm(self._recall(name) if version else list(scores["student"]))
        if len(arm.before) != len(scores["student"]):
            logger.warning(f"{name}: the student before training is not known: compared with version {version}")
            arm.before = list(scores["student"])
        groups, arm.teacher_plain = told_groups, list(arm.before)
        if self._settings.weights == "frozen" and (version or not self._is_own_model()):
            target = (self.teacher.scorer.clients, self.teacher.scorer.model)
            groups = await run(told, *target)
            if not self._is_own_model():
                arm.teacher_plain = example_scores(await run(environment, *target))
        arm.teacher = example_scores(groups)
        if version and self._settings.weights != "frozen":  # it has changed since
            arm.teacher = self._recall(name, "teacher") or arm.teacher
        arm.taught = await self._swap_prompts(groups, environment.rows("eval"))
        if not version:
            self._remember(name, arm)
        return arm

    async def _measure_other(
        self, name: str, rows: Sequence[Row], version: int, groups: Groups, temperature: float
    ) -> dict[str, float]:
        """What is left of the student where no context is learnt."""
        scores = example_scores(groups)
        arm = self._arms.get(name)
        if arm is None:
            arm = self._arms[name] = Arm((self._recall(name) if version else scores) or scores)
            self._remember(name, arm)
        found = {"student/avg": statistics.fmean(scores)}
        if was := statistics.fmean(arm.before):
            found["retention"] = found["student/avg"] / was
        if temperature == self.teacher.scorer.temperature:
            found |= await self._divergences(name, rows, groups, arm)
        return {f"distill/{name}/{key}": value for key, value in found.items()}

    def _remember(self, name: str, arm: Arm) -> None:
        path = self.directory / f"baseline_{name.replace('/', '_')}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"student": arm.before, "teacher": arm.teacher}), encoding="utf-8")

    def _is_own_model(self) -> bool:
        return self._settings.model.name in (None, BASE_MODEL, self.config.model.name)

    def _recall(self, name: str, who: str = "student") -> list[float]:
        """Scores before training, as the first attempt of this run wrote them."""
        try:
            text = (self.directory / f"baseline_{name.replace('/', '_')}.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        return [float(value) for value in json.loads(text)[who]]

    async def _swap_prompts(self, groups: Groups, rows: Sequence[Row]) -> list[tuple[Sample, list[int], int]]:
        """The teacher's samples of one turn, behind the prompt that the student sees."""
        found = []
        for group, row in zip(groups, rows, strict=False):
            for sample in (sample for rollout in group for sample in rollout_to_samples(rollout)):
                asked = sample.metadata.get("asked")
                if asked is None:
                    continue
                key = "prompt" if "prompt" in asked else "messages"
                start = sample.loss_mask.index(1.0)
                prompt = await self.teacher.render({**asked, key: row["prompt"]}, self.clients[0])
                found.append((sample, [*prompt, *sample.tokens[start:]], len(prompt)))
        return found

    async def _divergences(self, name: str, rows: Sequence[Row], groups: Groups, arm: Arm) -> dict[str, float]:
        """KL(student || teacher) on the student's samples, KL(teacher || student) on the teacher's, and the entropy."""
        reverse, entropy = await self._reverse_kl(name, rows, groups)
        forward: list[float] = []
        for sample, tokens, start in arm.taught:
            scored = await self._student.score(tokens, start)
            own = zip(sample.inference_logprobs or [], sample.loss_mask, strict=True)
            spoken = [lt for lt, mask in list(own)[sample.loss_mask.index(1.0) :] if mask > 0]
            asked = sample.loss_mask[sample.loss_mask.index(1.0) :]
            answer = [ls for ls, mask in zip(scored.logprobs, asked, strict=True) if mask > 0]
            forward += [lt - ls for lt, ls in zip(spoken, answer, strict=True)]
        found = {"kl_fwd": forward, "kl_rev": reverse, "entropy": entropy}
        metrics = {key: statistics.fmean(values) for key, values in found.items() if values}
        if reverse:
            metrics["kl_rev_k3"] = statistics.fmean(math.expm1(-gap) + gap for gap in reverse)
            metrics["kl_rev_sequence"] = sum(reverse) / max(1, sum(len(group) for group in groups))
        return metrics

    async def _reverse_kl(self, name: str, rows: Sequence[Row], groups: Groups) -> tuple[list[float], list[float]]:
        """ls - lt of every sampled token, and -ls."""
        gaps, entropy = list[float](), list[float]()
        for number, (group, row) in enumerate(zip(groups, rows, strict=False)):
            samples = [sample for rollout in group if not rollout.failed for sample in rollout_to_samples(rollout)]
            client = self.clients[number % len(self.clients)]
            for sample in await self.teacher.teach(samples, name, row, client):
                streams = (sample.inference_logprobs or [], sample.teacher_logprobs or [], sample.loss_mask)
                for ls, lt, mask in zip(*streams, strict=False):
                    if mask > 0:
                        gaps.append(ls - lt)
                        entropy.append(-ls)
        return gaps, entropy

    def _is_collapsed(self, name: str, found: Mapping[str, float], arm: Arm) -> bool:
        """Whether the student, told the context, does far worse than the teacher did: it forgets how to be told."""
        was, now = statistics.fmean(arm.teacher) if arm.teacher else 0.0, found["student_context/avg"]
        if not was > 0 or now >= ALARM * was:
            return False
        logger.warning(
            f"{name}: with the context the student earns {now:.4f}, the teacher did {was:.4f}: it is collapsing or "
            'forgetting; add an environment with teacher = "anchor", or lower the learning rate'
        )
        return True

    def _tell(self, name: str, found: Mapping[str, float], closed: Any) -> None:
        gap = found["teacher_context/avg"] - found["student/avg"]
        note = "" if closed is not None else " (not more than chance: gap_closed is not told)"
        logger.info(f"Baseline of {name} | student {found['student/avg']:.4f} | gap to the teacher {gap:.4f}{note}")


def baseline_metrics(name: str, arm: Arm) -> dict[str, float]:
    """The documented names, told once."""
    student, teacher = statistics.fmean(arm.before), statistics.fmean(arm.teacher)
    return {
        f"eval/{name}/baseline_student/avg": student,
        f"eval/{name}/baseline_teacher/avg": teacher,
        f"eval/{name}/baseline_diff": teacher - student,
    }


def example_scores(groups: Groups) -> list[float]:
    """Mean reward of each example; a rollout that failed has earned nothing."""
    return [statistics.fmean(0.0 if r.failed else r.reward for r in group) if group else 0.0 for group in groups]
