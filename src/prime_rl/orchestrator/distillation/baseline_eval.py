"""Baseline evaluation of a distillation: student and teacher with and without context, on held-out examples."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio.to_thread
from loguru import logger

from prime_rl.client.constraints import find_constraint
from prime_rl.client.contexts import Context, shows_context
from prime_rl.client.scoring import TokenScorer
from prime_rl.configuration.sections import BASE_MODEL, SamplingConfig
from prime_rl.generation.rollout_jobs import ModelEndpoint
from prime_rl.orchestrator.distillation.answers import write_answers
from prime_rl.orchestrator.distillation.context import ContextProvider
from prime_rl.orchestrator.distillation.outcomes import to_outcomes
from prime_rl.orchestrator.distillation.teacher import Teacher, UnscorableSample
from prime_rl.runtime.run_dir import RunDir
from rollouts.training.agent_integration import Rollout, describe_completion, rollout_to_samples
from rollouts.training.environments import Environment
from rollouts.training.files import replace_file
from rollouts.training.metrics import compute_gap_closed
from rollouts.training.objectives import MAX_LOG_RATIO
from rollouts.training.row_digests import compute_digest
from rollouts.training.types import Sample

Row = dict[str, Any]
Groups = list[list[Rollout]]
Run = Callable[[Environment, Sequence[Any], str], Awaitable[Groups]]
"""Rollouts of an environment's evaluation examples, with these clients and this model name."""
COLLAPSE_FRACTION = 0.5
"""Warn if the student drops below this fraction: with context of the teacher's, without of its own initial score."""


class ContextEnvironment:
    """The evaluated rows of an environment, the first ones, with the teacher's context in their prompts. `groups`: the
    student's rollouts of them, of which contexts from outcomes are made; a row without such a context keeps its
    prompt."""

    def __init__(
        self, environment: Environment, contexts: ContextProvider, name: str, groups: Groups, default_system: str = ""
    ) -> None:
        self.id, self._groups = environment.id, groups
        self._environment, self._contexts, self._name = environment, contexts, name
        self._default_system = default_system

    def rows(self, split: str = "train") -> list[Row]:
        """Rows with the teacher's prompts."""
        return [self._insert(row, context) for row, context in self._find_contexts(split)]

    async def run_group(
        self, row: Row, client: Any, model: str, sampling_args: Sequence[dict[str, Any]], retries: int = 0
    ) -> list[Rollout]:
        """Delegate to the environment."""
        return await self._environment.run_group(row, client, model, sampling_args, retries)

    def are_prompts_sent(self, groups: Groups) -> bool:
        """Whether rollouts of the rows show their contexts; not of an environment that writes its prompts itself."""
        return all(
            not context or not group or any(shows_context(rollout, context) for rollout in group)
            for (_, context), group in zip(self._find_contexts("eval"), groups, strict=False)
        )

    def _find_contexts(self, split: str) -> list[tuple[Row, Context | None]]:
        rows = zip(self._environment.rows(split), self._groups, strict=False)
        return [(row, self._contexts.context_for(self._name, row, group=to_outcomes(group))) for row, group in rows]

    def _insert(self, row: Row, context: Context | None) -> Row:
        if not context:
            return row
        key = "prompt" if isinstance(row["prompt"], str) else "messages"
        request = {key: row["prompt"]}
        return {**row, "prompt": self._contexts.insert(self._name, request, context, self._default_system)[key]}


class HeldOutEnvironment(ContextEnvironment):
    """An environment without evaluation examples that are also training prompts; `ValueError` if none remains.

    `training_prompts`: fingerprints of the rows of all training environments.
    """

    def __init__(self, environment: Environment, training_prompts: Set[str], name: str) -> None:
        self.id, self._environment = environment.id, environment
        self.builds_prompts = getattr(environment, "builds_prompts", False)
        examples = environment.rows("eval")
        self._rows = [row for row in examples if fingerprint(row) not in training_prompts]
        if examples and not self._rows:
            raise ValueError(
                f"every evaluation example of {name!r} is a training prompt: eval_baseline would measure memorization\n"
                "  give the environment a held-out split, or set eval_baseline = false"
            )
        if num_skipped := len(examples) - len(self._rows):
            logger.warning(f"{num_skipped} evaluation examples of {name} are training prompts: skipped")

    def rows(self, split: str = "train") -> list[Row]:
        """The held-out examples, or the training prompts."""
        return self._rows if split == "eval" else self._environment.rows(split)


def find_comparable_samples(rollout: Rollout, index: int | None = None) -> list[Sample]:
    """Samples with log-probs of whole distributions; none of a rollout with a grammar of its environment."""
    if any(turn.constrained_by is not None for turn in rollout.turns):
        return []
    return rollout_to_samples(rollout, index=index)


def find_chat_request(groups: Groups) -> dict[str, Any]:
    """A chat request of the rollouts, whose tools and template arguments are those of all; {} if none is known."""
    turns = (turn for group in groups for rollout in group for turn in rollout.turns)
    return next((turn.chat_request for turn in turns if turn.chat_request is not None), {})


def describe_examples(rows: Sequence[Row]) -> str:
    """Digest of the examples of an evaluation; without `info`, which rewards may change."""
    return compute_digest([[row["prompt"], row.get("answer")] for row in rows])


def fingerprint(row: Mapping[str, Any]) -> str:
    """Digest of a row's task, for equality: prompts of games are equal, their answers differ."""
    return compute_digest([row["prompt"], row.get("answer"), row.get("info")])


@dataclass
class Baseline:
    """Reference scores of one environment: mean reward of each example, failures as 0."""

    before: list[float] = field(default_factory=list)
    teacher: list[float] = field(default_factory=list)
    teacher_plain: list[float] = field(default_factory=list)
    teacher_groups: Groups = field(default_factory=list)
    """The teacher's rollouts under the context."""
    history: dict[int, dict[str, float]] = field(default_factory=dict)
    """The student's mean score at each version, of each context and of all ("")."""
    teacher_samples: list[tuple[Sample, list[int], int]] = field(default_factory=list)
    """The teacher's samples under the context; tokens with the student's prompt instead; length of that prompt."""
    is_known: bool = True
    """Whether `before` are the scores before training; else those of a later version, which are not saved."""


class BaselineEvaluator:
    """Measures student and teacher with and without context at every evaluation.

    student and student_context use the current weights. teacher and teacher_context are measured once for a frozen
    teacher, at every evaluation for an EMA teacher, and equal the student's scores for a live teacher.
    """

    def __init__(self, teacher: Teacher, run_dir: RunDir) -> None:
        # The same teacher with separate counters, so that training metrics exclude evaluation.
        self.teacher = Teacher(teacher.contexts, teacher.scorer, teacher.model, teacher.reference)
        self.run_dir = run_dir
        self.clients: Sequence[Any] = ()
        """Servers of the student in the current evaluation."""
        self._weights = teacher.contexts.teacher.weights
        self._is_student_model = teacher.scorer.model in (BASE_MODEL, teacher.model)
        self._baselines: dict[str, Baseline] = {}
        self._without_context: set[str] = set()
        """Environments that did not send the prompts with the context."""
        self._student = TokenScorer([], teacher.model, teacher.scorer.temperature)

    async def measure(
        self,
        name: str,
        environment: Environment,
        rows: Sequence[Row],
        endpoint: ModelEndpoint,
        groups: Groups,
        sampling: SamplingConfig,
        run: Run,
    ) -> dict[str, float]:
        """Metrics of one environment; `groups`: the student's rollouts of `rows` at `endpoint` with `sampling`; `run`
        generates more."""
        version, self.clients, self._student.clients = endpoint.version, endpoint.clients, list(endpoint.clients)
        if self.teacher.contexts.role(name) != "context" or name in self._without_context:
            return await self._measure_without_context(name, rows, version, groups, sampling)
        default_system = await self.teacher.find_default_system(name, find_chat_request(groups), self.clients[0])
        context_environment = ContextEnvironment(environment, self.teacher.contexts, name, groups, default_system)
        scores = {"student": example_scores(groups)}
        student = (self.clients, self.teacher.model)
        context_groups = await run(context_environment, *student)
        if not context_environment.are_prompts_sent(context_groups):
            logger.warning(
                f"{name} does not send the prompts of its rows, so that eval_baseline cannot insert the context: the "
                "teacher with the context and the gap are not measured"
            )
            self._without_context.add(name)
            return await self._measure_without_context(name, rows, version, groups, sampling)
        warn_of_failures(name, "student", context_groups)
        scores["student_context"] = example_scores(context_groups)
        metrics: dict[str, float] = {}
        baseline = self._baselines.get(name)
        if baseline is None:
            baseline = self._baselines[name] = await self._begin(
                name, environment, context_environment, rows, version, scores, context_groups, run
            )
            if not version:
                metrics |= baseline_metrics(name, baseline)
        answers = {"student": groups, "student_context": context_groups}
        if self._weights == "live":
            teacher_groups = context_groups
            scores |= {"teacher": scores["student"], "teacher_context": scores["student_context"]}
        elif self._weights == "ema" and version:
            target = (self.teacher.scorer.reachable, self.teacher.scorer.model)
            scores["teacher"] = example_scores(await run(environment, *target))
            answers["teacher_context"] = teacher_groups = await run(context_environment, *target)
            scores["teacher_context"] = example_scores(teacher_groups)
        else:
            answers["teacher_context"] = teacher_groups = baseline.teacher_groups
            scores |= {"teacher": baseline.teacher_plain, "teacher_context": baseline.teacher}
        folder = self.run_dir.eval_dir(name, version)
        await anyio.to_thread.run_sync(write_answers, folder, rows, answers)
        found = {f"{what}/avg": statistics.fmean(values) for what, values in scores.items() if values}
        closed = await anyio.to_thread.run_sync(
            compute_gap_closed, scores["student"], baseline.before, baseline.teacher
        )
        if closed is not None:
            found |= dict(zip(("gap_closed", "gap_closed/ci_low", "gap_closed/ci_high"), closed, strict=True))
        found |= await anyio.to_thread.run_sync(self._compare_contexts, rows, version, scores, baseline)
        self._save_baseline(name, rows, baseline)
        if self._can_compare(name, sampling):
            if self._weights != "frozen" or not baseline.teacher_samples:
                context_rows = context_environment.rows("eval")
                baseline.teacher_samples = await self._swap_prompts(teacher_groups, rows, context_rows)
            found |= await self._divergences(name, rows, groups, baseline)
        found["collapsed"] = float(self._is_collapsed(name, found, baseline))
        if version == 0:
            self._log_gap(name, found, closed, baseline)
        logger.info(format_scores(name, version, found))
        return metrics | {f"distill/{name}/{key}": value for key, value in found.items()}

    async def _begin(
        self,
        name: str,
        environment: Environment,
        context_environment: Environment,
        rows: Sequence[Row],
        version: int,
        scores: Mapping[str, list[float]],
        context_groups: Groups,
        run: Run,
    ) -> Baseline:
        """Measure the teacher's baselines and the student's before training."""
        baseline, saved_teacher = self._load_baseline(name, rows, version, scores["student"])
        groups, baseline.teacher_plain = context_groups, list(baseline.before)
        is_student = not version and self._is_student_model and not self._has_larger_window(context_groups)
        if self._weights == "frozen" and not is_student:
            target = (self.teacher.scorer.reachable, self.teacher.scorer.model)
            groups = await run(context_environment, *target)
            warn_of_failures(name, "teacher", groups)
            if not (self._is_student_model and baseline.is_known):
                baseline.teacher_plain = example_scores(await run(environment, *target))
        baseline.teacher, baseline.teacher_groups = example_scores(groups), groups
        is_outcome = self.teacher.contexts.context_from(name) in ("sibling", "feedback")
        if version and (self._weights != "frozen" or is_outcome):  # it, or its context, has changed since
            baseline.teacher = saved_teacher or baseline.teacher
        return baseline

    def _has_larger_window(self, groups: Groups) -> bool:
        """Whether rollouts with the context failed on the student's servers, and the teacher has servers of its own."""
        urls = {client.base_url for client in self.teacher.scorer.clients}
        has_own = bool(urls) and urls.isdisjoint(client.base_url for client in self.clients)
        return has_own and any(rollout.failed for group in groups for rollout in group)

    def _compare_contexts(
        self, rows: Sequence[Row], version: int, scores: Mapping[str, list[float]], baseline: Baseline
    ) -> dict[str, float]:
        """Scores and gap of each context of the rows, and what training on the others cost it (`interference`)."""
        places: dict[str, list[int]] = {"": list(range(len(rows)))}
        for i, row in enumerate(rows):
            if label := self.teacher.contexts.label(row):
                places.setdefault(label, []).append(i)
        found: dict[str, float] = {}
        means = baseline.history[version] = dict[str, float]()
        for label, chosen in places.items():
            parts = {name: [values[i] for i in chosen] for name, values in scores.items() if values}
            now = means[label] = statistics.fmean(parts["student"])
            best = max(past.get(label, now) for past in baseline.history.values())
            found[f"{label}/interference".lstrip("/")] = best - now
            if not label:
                continue
            found |= {f"{label}/{name}/avg": statistics.fmean(values) for name, values in parts.items()}
            before, teacher = ([values[i] for i in chosen] for values in (baseline.before, baseline.teacher))
            if (closed := compute_gap_closed(parts["student"], before, teacher)) is not None:
                found[f"{label}/gap_closed"] = closed[0]
        return found

    async def _measure_without_context(
        self, name: str, rows: Sequence[Row], version: int, groups: Groups, sampling: SamplingConfig
    ) -> dict[str, float]:
        """Retention of the student in environments without a distilled context."""
        scores = example_scores(groups)
        baseline = self._baselines.get(name)
        if baseline is None:
            baseline = self._baselines[name] = self._load_baseline(name, rows, version, scores)[0]
            self._save_baseline(name, rows, baseline)
        found = {"student/avg": statistics.fmean(scores)}
        if was := statistics.fmean(baseline.before):
            found["retention"] = found["student/avg"] / was
        if self._can_compare(name, sampling):
            found |= await self._divergences(name, rows, groups, baseline)
        logger.info(format_scores(name, version, found))
        return {f"distill/{name}/{key}": value for key, value in found.items()}

    def _save_baseline(self, name: str, rows: Sequence[Row], baseline: Baseline) -> None:
        """Write the scores before training and the later ones of the student, unless the former are unknown."""
        if baseline.is_known:
            content = {"examples": describe_examples(rows), "student": baseline.before, "teacher": baseline.teacher}
            replace_file(self._baseline_path(name), json.dumps(content | {"history": baseline.history}))

    def _load_baseline(
        self, name: str, rows: Sequence[Row], version: int, scores: Sequence[float]
    ) -> tuple[Baseline, list[float]]:
        """The baseline without its teacher, and the teacher's scores of an earlier attempt of this run ([] if unknown).

        `scores`: those of the student at `version`, used if those before training are unknown.
        """
        path = self._baseline_path(name)
        if not version:
            return Baseline(list(scores)), []
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if "examples" in found:
                is_same, means = found["examples"] == describe_examples(rows), found["history"]
            else:  # of an older release, which wrote the best means only
                is_same, means = len(found["student"]) == len(rows), {"0": found["best"]}
            if is_same:
                # Later versions are of attempts that this one replaces.
                history = {int(past): mean for past, mean in means.items() if int(past) < version}
                return Baseline(found["student"], history=history), found["teacher"]
            problem = f"{path} is of other examples, and is kept"
        except FileNotFoundError:
            problem = f"there is no {path}"
        except (ValueError, KeyError, TypeError) as error:
            problem = f"{path} is damaged: {error}"
        logger.warning(f"{name}: scores before training are unknown, comparing with version {version} ({problem})")
        return Baseline(list(scores), is_known=False), []

    def _baseline_path(self, name: str) -> Path:
        return self.run_dir.evals / f"baseline_{name.replace('/', '_')}.json"

    async def _swap_prompts(
        self, groups: Groups, rows: Sequence[Row], context_rows: Sequence[Row]
    ) -> list[tuple[Sample, list[int], int]]:
        """The teacher's samples with the student's prompt, that of `rows`, instead of the one of `context_rows`.

        Samples with another prompt, such as later ones of a conversation, are left out, and those that the student's
        server cannot tokenize.
        """
        found = []
        for group, row, context_row in zip(groups, rows, context_rows, strict=False):
            for sample in (sample for rollout in group for sample in find_comparable_samples(rollout)):
                chat_request = sample.metadata.get("chat_request")
                if chat_request is None:
                    continue
                key = "prompt" if "prompt" in chat_request else "messages"
                start = sample.loss_mask.index(1.0)
                prompts = (chat_request[key], context_row["prompt"], row["prompt"])
                try:
                    sent, shown, prompt = [
                        await self.teacher.render({**chat_request, key: one}, self.clients[0]) for one in prompts
                    ]
                except UnscorableSample:  # such as a prompt beyond the window of the student's server
                    continue
                if sent == shown and len(sent) == start:
                    found.append((sample, [*prompt, *sample.tokens[start:]], len(prompt)))
        return found

    def _can_compare(self, name: str, sampling: SamplingConfig) -> bool:
        """Whether samples have log-probs of whole distributions at the teacher's temperature; logs it if not."""
        is_same = sampling.temperature == self.teacher.scorer.temperature
        key = sampling.truncation or sampling.reweighting if is_same else "temperature"
        if key is None and sampling.min_tokens:
            key = "min_tokens"
        if key is None and (field := find_constraint(sampling.extra_body)) is not None:
            key = f"extra_body.{field}"
        if key is not None:
            logger.info(
                f"{name}: kl_* and entropy are not measured, because sampling.{key} of the evaluation makes its "
                "log-probs incomparable with the teacher's"
            )
        return key is None

    async def _divergences(
        self, name: str, rows: Sequence[Row], groups: Groups, baseline: Baseline
    ) -> dict[str, float]:
        """KL(student || teacher) on student samples, KL(teacher || student) on teacher samples, and the entropy.

        Samples of the teacher that the student's server does not score, such as long ones, are left out.
        """
        reverse, entropy, num_answers = await self._reverse_kl(name, rows, groups)
        forward, skipped = list[float](), list[UnscorableSample]()
        for sample, tokens, start in baseline.teacher_samples:
            try:
                scored = await self.teacher.score(self._student, tokens, start)
            except UnscorableSample as error:
                skipped.append(error)
                continue
            teacher_tokens = zip(sample.inference_logprobs or [], sample.loss_mask, strict=True)
            teacher_logprobs = [lt for lt, mask in list(teacher_tokens)[sample.loss_mask.index(1.0) :] if mask > 0]
            trained_mask = sample.loss_mask[sample.loss_mask.index(1.0) :]
            student_logprobs = [ls for ls, mask in zip(scored.logprobs, trained_mask, strict=True) if mask > 0]
            forward += [lt - ls for lt, ls in zip(teacher_logprobs, student_logprobs, strict=True)]
        if skipped:
            count = f"{len(skipped)} of {len(baseline.teacher_samples)}"
            logger.warning(f"{name}: kl_fwd leaves out {count} samples of the teacher: {skipped[-1]}")
        found = {"kl_fwd": forward, "kl_rev": reverse, "entropy": entropy}
        metrics = {key: statistics.fmean(values) for key, values in found.items() if values}
        if reverse:
            metrics["kl_rev_k3"] = estimate_k3(reverse)
            metrics["kl_rev_sequence"] = sum(reverse) / num_answers
        return metrics

    async def _reverse_kl(self, name: str, rows: Sequence[Row], groups: Groups) -> tuple[list[float], list[float], int]:
        """ls - lt of every sampled token, and -ls; the number of scored answers."""
        gaps, entropy, scored = list[float](), list[float](), set[tuple[int, int | None]]()
        for number, (group, row) in enumerate(zip(groups, rows, strict=False)):
            samples = [
                sample
                for index, rollout in enumerate(group)
                if not rollout.failed
                for sample in find_comparable_samples(rollout, index)
            ]
            for sample in samples:
                assert sample.index is not None
                rollout = group[sample.index]
                sample.metadata["feedback"] = rollout.feedback
                sample.metadata["transcript"] = describe_completion(rollout.completion)
            client = self.clients[number % len(self.clients)]
            for sample in await self.teacher.score_group(samples, name, row, client):
                if sample.teacher_logprobs is not None:
                    scored.add((number, sample.index))
                streams = (sample.inference_logprobs or [], sample.teacher_logprobs or [], sample.loss_mask)
                for ls, lt, mask in zip(*streams, strict=False):
                    if mask > 0:
                        gaps.append(ls - lt)
                        entropy.append(-ls)
        return gaps, entropy, len(scored)

    def _is_collapsed(self, name: str, found: Mapping[str, float], baseline: Baseline) -> bool:
        """Whether the student collapses; logs a warning."""
        before, teacher = (statistics.fmean(scores or [0.0]) for scores in (baseline.before, baseline.teacher))
        problem = find_collapse(found["student/avg"], found["student_context/avg"], before, teacher)
        if problem is not None:
            logger.warning(f"{name}: {problem}")
        return problem is not None

    def _log_gap(self, name: str, found: Mapping[str, float], closed: Any, baseline: Baseline) -> None:
        gap = found["teacher_context/avg"] - found["student/avg"]
        note = "" if closed is not None else " (not significant: gap_closed is not reported)"
        if compute_gap_closed(baseline.before, baseline.teacher, baseline.before) is not None:  # teacher below student
            logger.warning(
                f"{name}: the context lowers the score, from {found['student/avg']:.4f} to "
                f"{found['teacher_context/avg']:.4f}: the student will learn to be worse; correct the context"
            )
        logger.info(f"Baseline of {name} | student {found['student/avg']:.4f} | gap to the teacher {gap:.4f}{note}")


def find_collapse(student: float, student_context: float, before: float, teacher: float) -> str | None:
    """What collapsed and the cure, from the mean scores of the student now (without and with context), of the student
    before training, and of the teacher with context before training; None if nothing did."""
    if teacher > 0 and student_context < COLLAPSE_FRACTION * teacher:
        return (
            f"the student with context scores {student_context:.4f}, the teacher scored {teacher:.4f}: it is "
            'collapsing or forgetting; add an environment with teacher = "reference", or lower the learning rate'
        )
    if before > 0 and student < COLLAPSE_FRACTION * before:
        return (
            f"the student scores {student:.4f}, before training {before:.4f}: the context teaches it wrong "
            f"answers (the teacher scored {teacher:.4f}); stop the run and correct the context"
        )
    return None


def format_scores(name: str, version: int, found: Mapping[str, float]) -> str:
    """The console line of one environment's measurements; `found` has the keys below `distill/{name}/`."""
    parts = [f"Distillation of {name} at version {version}"]
    labels = {
        "Student": "student/avg",
        "Student with Context": "student_context/avg",
        "Teacher with Context": "teacher_context/avg",
        "Retention": "retention",
        "KL to Teacher": "kl_rev",
    }
    parts += [f"{label}: {found[key]:.4f}" for label, key in labels.items() if key in found]
    if "gap_closed" in found:
        low, high = found["gap_closed/ci_low"], found["gap_closed/ci_high"]
        parts.append(f"Gap Closed: {found['gap_closed']:.2f} ({low:.2f} to {high:.2f})")
    return " | ".join(parts)


def baseline_metrics(name: str, baseline: Baseline) -> dict[str, float]:
    """The documented baseline metrics, logged once."""
    student, teacher = statistics.fmean(baseline.before), statistics.fmean(baseline.teacher)
    return {
        f"eval/{name}/baseline_student/avg": student,
        f"eval/{name}/baseline_teacher/avg": teacher,
        f"eval/{name}/baseline_diff": teacher - student,
    }


def warn_of_failures(name: str, role: str, groups: Groups) -> None:
    """Warn if rollouts with the context failed, for example because it does not fit the window of the server."""
    rollouts = [rollout for group in groups for rollout in group]
    if failed := [rollout for rollout in rollouts if rollout.failed]:
        share = len(failed) / len(rollouts)
        logger.warning(
            f"{name}: {share:.0%} of the {role}'s rollouts with the context failed and count as 0: {failed[0].error}"
        )


def example_scores(groups: Groups) -> list[float]:
    """Mean reward of each example; failed rollouts count as 0."""
    return [statistics.fmean(0.0 if r.failed else r.reward for r in group) if group else 0.0 for group in groups]


def estimate_k3(gaps: Sequence[float]) -> float:
    """Mean k3 of the gaps `ls - lt`, bounded as in `rl_losses.compute_kl`."""
    bounded = [max(gap, -MAX_LOG_RATIO) for gap in gaps]
    return statistics.fmean(math.expm1(-gap) + gap for gap in bounded)
