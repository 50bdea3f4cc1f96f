"""Evaluation and validation of live versions, concurrent with training."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from loguru import logger

from prime_rl.configuration.errors import find_cause
from prime_rl.configuration.sections import GenerationEnvConfig
from prime_rl.eval.config import EvalConfig
from prime_rl.eval.envs import summarize, warn_unscored
from prime_rl.eval.results import write_results
from prime_rl.generation.resume_log import to_result
from prime_rl.generation.rollout_jobs import ModelEndpoint, choose_rows, run_environment
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.orchestrator.distillation.baseline_eval import BaselineEvaluator, HeldOutEnvironment, fingerprint
from prime_rl.runtime.run_dir import Attempts, RunDir
from rollouts.training.environments.protocol import require_row_prompts
from rollouts.training.metrics import load_jsonl

if TYPE_CHECKING:
    from prime_rl.orchestrator.distillation.teacher import Teacher
    from prime_rl.orchestrator.server_pool import ServerPool
    from prime_rl.utils.monitor import Monitor
    from rollouts.training.agent_integration import Rollout
    from rollouts.training.environments import Environment


VAL_CONCURRENCY = 256
"""Maximum concurrent rollouts of a validation, or those of one example if they are more."""


class EvalKind(StrEnum):
    """What an evaluation is for; also its prefix in metrics and logs."""

    EVAL = "eval"  # evaluation environments
    VAL = "val"  # held-out examples of the training environments


@dataclass
class EvalSchedule:
    """An evaluation that runs every `interval` versions, and its progress."""

    kind: EvalKind
    config: EvalConfig
    environments: Mapping[str, Environment]
    interval: int
    last: int  # version that last triggered it
    running: int | None = None
    pending: int | None = None
    wake: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.since = self.last

    def is_due(self, version: int, max_steps: int | None) -> bool:
        """Whether `version` is the first at or after a multiple of the interval, or the last of all."""
        return version > self.last and (version // self.interval > self.last // self.interval or version == max_steps)

    def state(self) -> tuple[int, int]:
        """Interval, and the version after which the first evaluation is due."""
        return self.interval, self.since

    def resume(self, version: int, max_steps: int | None, state: Sequence[int] | None) -> None:
        """Continue at `version`, which the run reached with a schedule of this `state`, None without such evaluations.

        An evaluation that was due then and has not finished is due at once, no other one.
        """
        interval, since = state or (self.interval, version)
        done = max(since, find_last_finished(self.config.output_dir, self.kind, version))
        was_due = replace(self, interval=interval, last=done).is_due(version, max_steps)
        self.last, self.since = (-1, done) if was_due else (version, version)

    def start(self) -> int | None:
        """Start the pending version, if any."""
        self.running, self.pending = self.pending, None
        return self.running


class Evaluations:
    """Runs due evaluations when a version goes live. They share the engines with training, so weights may change.

    Results are logged under the version that triggered them; `version/min` and `version/max` are the versions that
    generated the tokens. While one runs, only the newest due version is queued. Errors of an environment are logged,
    never raised, and do not affect the others.
    """

    def __init__(
        self,
        schedules: Sequence[EvalSchedule],
        servers: ServerPool,
        monitor: Monitor,
        *,
        model: str,
        max_steps: int | None,
        baseline_evaluator: BaselineEvaluator | None = None,
    ) -> None:
        self.schedules, self.servers, self.monitor = schedules, servers, monitor
        self.model, self.max_steps = model, max_steps
        self.baseline_evaluator = baseline_evaluator
        self.val_reward: float | None = None
        self._finished = anyio.Event()

    @property
    def in_progress(self) -> str | None:
        """Description of running and pending evaluations; None if there are none."""
        descriptions = [
            f"{schedule.kind} of version {version}"
            for schedule in self.schedules
            for version in (schedule.running, schedule.pending)
            if version is not None
        ]
        return " and ".join(descriptions) or None

    def on_version(self, version: int) -> None:
        """`version` is live: start the evaluations that are due."""
        for schedule in self.schedules:
            if not schedule.is_due(version, self.max_steps):
                continue
            if schedule.pending is not None:
                logger.warning(
                    f"{schedule.kind} of version {schedule.pending} skipped: an earlier one is still running"
                )
            schedule.last, schedule.pending = version, version
            schedule.wake.set()

    async def run(self) -> None:
        """Evaluate until cancelled."""
        async with anyio.create_task_group() as tasks:
            for schedule in self.schedules:
                tasks.start_soon(self._run_schedule, schedule)

    async def wait(self) -> None:
        """Return when no evaluation is running or pending."""
        while self.in_progress is not None:
            await self._finished.wait()

    async def _run_schedule(self, schedule: EvalSchedule) -> None:
        while True:
            await schedule.wake.wait()
            schedule.wake = anyio.Event()
            while (version := schedule.start()) is not None:
                try:
                    await self._evaluate(schedule, version)
                except Exception as error:
                    warn_of_failure(f"{schedule.kind} of version {version} failed", error)
            self._finished.set()
            self._finished = anyio.Event()

    async def _evaluate(self, schedule: EvalSchedule, version: int) -> None:
        start, rewards = time.time(), list[float]()
        clients = [self.servers.clients[i] for i in self.servers.reachable]
        endpoint = ModelEndpoint(clients, self.model, version)
        metrics: dict[str, float] = {}
        is_complete = True
        for env in schedule.config.env:
            try:
                groups = await self._evaluate_env(schedule, env, endpoint)
            except Exception as error:
                warn_of_failure(f"{schedule.kind} of version {version} failed in {env.display_name}", error)
                is_complete = False
                continue
            if schedule.kind is EvalKind.VAL:
                name = env.display_name
                scored = [rollout.reward for group in groups for rollout in group if not rollout.failed]
                metrics[f"val_reward/{name}"] = mean_or_nan(scored)
                metrics |= {f"val/{name}/{key}": value for key, value in version_span(groups, version).items()}
                rewards += scored
        if not is_complete:  # without an entry in the timeline a resumed run repeats it
            if metrics:
                self.monitor.log(metrics, version)
            return
        if schedule.kind is EvalKind.VAL:
            mean = mean_or_nan(rewards)
            self.val_reward = mean if rewards else None
            self.monitor.log({"val_reward/mean": mean, **metrics}, version)
            logger.info(f"Validated version {version} | Val. Reward: {format_value(self.val_reward)}")
        self.monitor.log_timeline(schedule.kind, start, time.time(), version)

    async def _evaluate_env(
        self, schedule: EvalSchedule, env: GenerationEnvConfig, endpoint: ModelEndpoint
    ) -> list[list[Rollout]]:
        """The rollouts of one environment; those of an evaluation are reported."""
        start = time.monotonic()
        groups = await run_environment(schedule.environments[env.display_name], env, schedule.config, endpoint)
        if schedule.kind is EvalKind.EVAL:
            await self._report_eval(schedule, env, endpoint, groups, time.monotonic() - start)
            if self.baseline_evaluator is not None:
                measured = self._measure_baselines(self.baseline_evaluator, schedule, env, groups, endpoint)
                self.monitor.log(await measured, endpoint.version)
        return groups

    async def _measure_baselines(
        self,
        baseline_evaluator: BaselineEvaluator,
        schedule: EvalSchedule,
        env: GenerationEnvConfig,
        groups: list[list[Rollout]],
        endpoint: ModelEndpoint,
    ) -> dict[str, float]:
        """Evaluate the baselines of a distillation on the same examples with the same seeds."""
        name = env.display_name
        environment = schedule.environments[name]

        async def run(environment: Environment, clients: Sequence[Any], model: str) -> list[list[Rollout]]:
            target = ModelEndpoint(clients, model, endpoint.version)
            return await run_environment(environment, env, schedule.config, target)

        rows = environment.rows("eval")[: len(groups)]
        return await baseline_evaluator.measure(
            name, environment, rows, endpoint, groups, schedule.config.sampling, run
        )

    async def _report_eval(
        self,
        schedule: EvalSchedule,
        env: GenerationEnvConfig,
        endpoint: ModelEndpoint,
        groups: list[list[Rollout]],
        seconds: float,
    ) -> None:
        name, version = env.display_name, endpoint.version
        num_rollouts = schedule.config.num_rollouts(env)
        results = [[to_result(rollout, number) for number, rollout in enumerate(group)] for group in groups]
        summary = summarize(results, num_rollouts, schedule.config.pass_threshold)
        summary |= {"time": seconds, **version_span(groups, version)}
        folder = RunDir(schedule.config.output_dir).eval_dir(name, version)
        await anyio.to_thread.run_sync(write_results, folder, results, summary, schedule.config, endpoint)
        self.monitor.log({f"eval/{name}/{key}": value for key, value in summary.items()}, version)
        lowest, highest = int(summary["version/min"]), int(summary["version/max"])
        span = f"version {version}" if lowest == highest == version else f"version {version} ({lowest} to {highest})"
        logger.info(
            f"Evaluated {name} at {span} | avg@{num_rollouts}: {format_value(summary[f'avg@{num_rollouts}'])} | "
            f"Examples: {len(groups)} | Errors: {summary['error/mean']:.1%} | Time: {seconds:.1f}s"
        )
        warn_unscored(name, results)


def build_evaluations(
    config: OrchestratorConfig,
    schedules: Sequence[EvalSchedule],
    servers: ServerPool,
    monitor: Monitor,
    teacher: Teacher | None = None,
) -> Evaluations:
    """Build the evaluations of `schedules`, with the baselines of a distillation if they are configured.

    `ValueError` if these need a context that cannot be built.
    """
    baseline_evaluator = None
    if teacher is not None and config.teacher_model is not None and config.teacher_model.eval_baseline:
        for schedule in (schedule for schedule in schedules if schedule.kind is EvalKind.EVAL):
            for env in schedule.config.env:
                name = env.display_name
                if teacher.contexts.role(name) == "context":
                    use = "teacher_model.eval_baseline cannot insert the context, leave it out"
                    require_row_prompts(schedule.environments[name], use)
                rows = choose_rows(schedule.environments[name], env, schedule.config)
                teacher.contexts.check_eval_rows(name, rows)
                if teacher.contexts.role(name) == "none" and name not in [trained.name for trained in config.env]:
                    logger.warning(
                        f"{name} is evaluated without a context: teacher_model has none, and no training environment "
                        "has this name; to measure the context of one, set eval.env.name to its name"
                    )
        baseline_evaluator = BaselineEvaluator(teacher, RunDir(config.output_dir))
    model, max_steps = config.model.name, config.max_steps
    return Evaluations(
        schedules, servers, monitor, model=model, max_steps=max_steps, baseline_evaluator=baseline_evaluator
    )


def build_schedules(
    config: OrchestratorConfig,
    environments: Mapping[str, Environment],
    eval_environments: Mapping[str, Environment],
    version: int,
    states: Mapping[str, Sequence[int]] | None = None,
) -> list[EvalSchedule]:
    """The configured evaluations of a run that starts at `version`, with the `states` there; None: of the same ones.

    Loads the rows now, because loading may take long and would block the event loop later.
    """
    schedules = []
    validated = environments if config.val is not None else {}
    for environment in (*eval_environments.values(), *validated.values()):
        environment.rows("eval")
    for name, environment in {**validated, **eval_environments}.items():
        warn_of_training_prompts(name, environment, environments.values())
    shared = {"model": {"name": config.model.name}, "seed": config.seed, "max_retries": config.max_retries}
    shared |= {"output_dir": config.output_dir}
    if (eval_settings := config.eval) is not None:
        eval_config = EvalConfig.model_validate(
            {
                **shared,
                "env": config.eval_envs,
                "sampling": eval_settings.sampling or config.sampling,
                "num_examples": eval_settings.num_examples,
                "rollouts_per_example": eval_settings.rollouts_per_example,
                "pass_threshold": eval_settings.pass_threshold,
                "max_concurrent": eval_settings.max_concurrent,
            }
        )
        has_baselines = config.teacher_model is not None and config.teacher_model.eval_baseline
        starts_now = (
            not eval_settings.skip_eval_on_resume if version else eval_settings.eval_base_model or has_baselines
        )
        last = -1 if starts_now else version
        if has_baselines:
            trained = {fingerprint(row) for one in environments.values() for row in one.rows("train")}
            eval_environments = {
                name: HeldOutEnvironment(environment, trained, name) for name, environment in eval_environments.items()
            }
        schedules.append(EvalSchedule(EvalKind.EVAL, eval_config, eval_environments, eval_settings.interval, last=last))
    if config.val is not None:
        val_config = EvalConfig.model_validate(
            {
                **shared,
                "env": config.held_out_envs,
                "sampling": config.sampling,
                "num_examples": config.val.num_examples,
                "rollouts_per_example": config.val.rollouts_per_example,
                "max_concurrent": max(VAL_CONCURRENCY, config.val.rollouts_per_example),
            }
        )
        schedules.append(EvalSchedule(EvalKind.VAL, val_config, environments, config.val.interval, last=version or -1))
    for schedule in schedules:
        if version and schedule.last == version:
            state = (schedule.interval, 0) if states is None else states.get(schedule.kind)
            schedule.resume(version, config.max_steps, state)
    return schedules


def warn_of_training_prompts(name: str, environment: Environment, trained: Iterable[Environment]) -> None:
    """Warn if the evaluation examples are the training prompts, which are also the fallback of environments."""
    examples = environment.rows("eval")
    if examples and any(is_same_split(examples, one.rows("train")) for one in trained):
        logger.warning(
            f"{name} is evaluated on its training prompts: give it an eval_dataset to measure what it does on others"
        )


def is_same_split(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> bool:
    """Whether two splits have the same examples in the same order."""
    return len(rows) == len(others) and all(map(operator.eq, map(fingerprint, rows), map(fingerprint, others)))


def max_concurrent_rollouts(config: OrchestratorConfig) -> int:
    """Rollouts of evaluation and validation that may run at once, beside those of training."""
    num_eval = 0 if config.eval is None else config.eval.max_concurrent
    if (val := config.val) is None:
        return num_eval
    per_example = val.rollouts_per_example
    return num_eval + min(max(VAL_CONCURRENCY, per_example), val.num_examples * per_example)


def find_last_finished(output_dir: Path, kind: EvalKind, version: int) -> int:
    """The last version up to `version` whose evaluation has finished, 0 without one.

    Those of attempts that a resumed run has abandoned do not count: they were of other weights.
    """
    attempts = Attempts(output_dir, "orchestrator")
    rows = (row for row in load_jsonl(RunDir(output_dir).metrics) if row.get("timeline/what") == kind)
    finished = ((row["step"], row.get("attempt", 0)) for row in rows if row.get("process") == "orchestrator")
    return max((step for step, attempt in finished if step <= version and attempt == attempts.find(step)), default=0)


def warn_of_failure(what: str, error: Exception) -> None:
    """Log what failed, with its cause."""
    cause = find_cause(error)
    logger.warning(f"{what}: {type(cause).__name__}: {cause}")


def mean_or_nan(rewards: Sequence[float]) -> float:
    """The mean, NaN of no rewards."""
    return sum(rewards) / len(rewards) if rewards else math.nan


def version_span(groups: Sequence[Sequence[Rollout]], version: int) -> dict[str, float]:
    """First and last version that generated these rollouts; `version` if the server does not report it."""
    versions = [v for group in groups for rollout in group for turn in rollout.turns for _, v in turn.versions] or [
        version
    ]
    return {"version/min": float(min(versions)), "version/max": float(max(versions))}


def format_value(value: float | None) -> str:
    """Format a number for the console."""
    return "none" if value is None else f"{value:.4f}"
