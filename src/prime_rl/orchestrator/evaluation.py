"""Evaluation and validation of live versions, beside the training and never inside a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from loguru import logger

from prime_rl.eval.config import EvalConfig
from prime_rl.eval.envs import summarize
from prime_rl.eval.results import write_results
from prime_rl.orchestrator.arms import HeldOutEnvironment
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.utils.asking import Target, run_environment
from prime_rl.utils.config import AskedEnvConfig
from prime_rl.utils.journal import to_result

if TYPE_CHECKING:
    from prime_rl.orchestrator.arms import Arms
    from prime_rl.utils.monitor import Monitor
    from rollouts.training.agent_integration import Rollout
    from rollouts.training.environments import Environment


@dataclass
class Plan:
    """What is run every `interval` versions, and how far it has come."""

    what: str  # "eval" or "val"
    config: EvalConfig
    environments: Mapping[str, Environment]
    interval: int
    last: int  # version that was last looked at
    running: int | None = None
    pending: int | None = None
    wake: anyio.Event = field(default_factory=anyio.Event)

    def is_due(self, version: int, max_steps: int | None) -> bool:
        """Whether `version` is the first at or after a multiple of the interval, or the last of all."""
        return version > self.last and (version // self.interval > self.last // self.interval or version == max_steps)

    def start(self) -> int | None:
        """Take what is pending as what runs."""
        self.running, self.pending = self.pending, None
        return self.running


class Evaluations:
    """Runs what is due when a version goes live. Requests mix with those of training; weights change under them.

    Results are filed under the version that made them due; `version/min` and `version/max` say which versions really
    wrote the tokens. While one evaluation runs only the newest that comes due is remembered. None can fail the run.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        plans: Sequence[Plan],
        clients: Sequence[Any],
        monitor: Monitor,
        arms: Arms | None = None,
        find_present: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self.config = config
        self._find_present = find_present or (lambda: range(len(clients)))
        self.arms = arms
        self.plans = plans
        self.clients = clients
        self.monitor = monitor
        self.val_reward: float | None = None
        self._finished = anyio.Event()

    @property
    def under_way(self) -> str | None:
        """What is running or waits to be run, in words."""
        found = [
            f"{plan.what} of version {version}"
            for plan in self.plans
            for version in (plan.running, plan.pending)
            if version is not None
        ]
        return " and ".join(found) or None

    def on_version(self, version: int) -> None:
        """`version` is live: begin what it makes due."""
        for plan in self.plans:
            if not plan.is_due(version, self.config.max_steps):
                continue
            if plan.pending is not None:
                logger.warning(f"{plan.what} of version {plan.pending} is skipped: an earlier one still runs")
            plan.last, plan.pending = version, version
            plan.wake.set()

    async def run(self) -> None:
        """Evaluate until cancelled."""
        async with anyio.create_task_group() as tasks:
            for plan in self.plans:
                tasks.start_soon(self._run_plan, plan)

    async def wait(self) -> None:
        """Return when nothing is running or pending."""
        while self.under_way is not None:
            await self._finished.wait()

    async def _run_plan(self, plan: Plan) -> None:
        while True:
            await plan.wake.wait()
            plan.wake = anyio.Event()
            while (version := plan.start()) is not None:
                try:
                    await self._evaluate(plan, version)
                except Exception as error:
                    logger.warning(f"{plan.what} of version {version} failed: {type(error).__name__}: {error}")
            self._finished.set()
            self._finished = anyio.Event()

    async def _evaluate(self, plan: Plan, version: int) -> None:
        start, rewards = time.time(), list[float]()
        there = [self.clients[i] for i in self._find_present()]
        target = Target(there, self.config.model.name, version)
        metrics: dict[str, float] = {}
        for env in plan.config.env:
            name, begun = env.name or env.id, time.monotonic()
            groups = await run_environment(plan.environments[name], env, plan.config, target)
            seconds = time.monotonic() - begun
            if plan.what == "eval":
                await self._report_eval(plan, env, target, groups, seconds)
                if self.arms is not None:
                    self.monitor.log(await self._measure_arms(self.arms, plan, env, groups, version), version)
            else:
                scored = [rollout.reward for group in groups for rollout in group if not rollout.failed]
                metrics[f"val_reward/{name}"] = sum(scored) / len(scored) if scored else math.nan
                metrics |= {f"val/{name}/{key}": value for key, value in version_span(groups, version).items()}
                rewards += scored
        if plan.what == "val":
            self.val_reward = sum(rewards) / len(rewards) if rewards else None
            self.monitor.log({"val_reward/mean": self.val_reward or math.nan, **metrics}, version)
            logger.info(f"Validated version {version} | Val. Reward: {metrics_text(self.val_reward)}")
        self.monitor.log_timeline(plan.what, start, time.time(), version)

    async def _measure_arms(
        self, arms: Arms, plan: Plan, env: AskedEnvConfig, groups: list[list[Rollout]], version: int
    ) -> dict[str, float]:
        """The other arms of a distillation, asked the same questions with the same seeds."""
        name = env.name or env.id
        environment = plan.environments[name]

        async def run(asked: Environment, clients: Sequence[Any], model: str) -> list[list[Rollout]]:
            return await run_environment(asked, env, plan.config, Target(clients, model, version))

        rows = environment.rows("eval")[: len(groups)]
        return await arms.measure(name, environment, rows, version, groups, plan.config.sampling.temperature, run)

    async def _report_eval(
        self, plan: Plan, env: AskedEnvConfig, target: Target, groups: list[list[Rollout]], seconds: float
    ) -> None:
        name, version = env.name or env.id, target.version
        num_rollouts = plan.config.num_rollouts(env)
        results = [[to_result(rollout, number) for number, rollout in enumerate(group)] for group in groups]
        summary = summarize(results, num_rollouts, plan.config.pass_threshold)
        summary |= {"time": seconds, **version_span(groups, version)}
        folder = plan.config.output_dir / "evals" / f"step_{version}" / name.replace("/", "_")
        await anyio.to_thread.run_sync(write_results, folder, results, summary, plan.config, target)
        self.monitor.log({f"eval/{name}/{key}": value for key, value in summary.items()}, version)
        lowest, highest = int(summary["version/min"]), int(summary["version/max"])
        span = f"version {version}" if lowest == highest == version else f"version {version} ({lowest} to {highest})"
        logger.info(
            f"Evaluated {name} at {span} | avg@{num_rollouts}: {metrics_text(summary[f'avg@{num_rollouts}'])} | "
            f"Examples: {len(groups)} | Errors: {summary['error/mean']:.1%} | Time: {seconds:.1f}s"
        )


def build_plans(
    config: OrchestratorConfig,
    environments: Mapping[str, Environment],
    eval_environments: Mapping[str, Environment],
    version: int,
) -> list[Plan]:
    """The evaluations that the configuration asks for, in a run that begins at `version`.

    Asks for the rows now: making them may take a while, which would hold up the loop later.
    """
    plans = []
    for judged in (*eval_environments.values(), *(environments.values() if config.val is not None else ())):
        judged.rows("eval")
    shared = {"model": {"name": config.model.name}, "seed": config.seed, "max_retries": config.max_retries}
    shared |= {"output_dir": config.output_dir}
    if (wanted := config.eval) is not None:
        eval_config = EvalConfig.model_validate(
            {
                **shared,
                "env": wanted.env,
                "sampling": wanted.sampling or config.sampling,
                "num_examples": wanted.num_examples,
                "rollouts_per_example": wanted.rollouts_per_example,
                "pass_threshold": wanted.pass_threshold,
                "max_concurrent": wanted.max_concurrent,
            }
        )
        has_arms = config.teacher_model is not None and config.teacher_model.eval_baseline
        begins = not wanted.skip_eval_on_resume if version else wanted.eval_base_model or has_arms
        if has_arms:
            eval_environments = {
                name: HeldOutEnvironment(environment, environments.get(name), name)
                for name, environment in eval_environments.items()
            }
        plans.append(Plan("eval", eval_config, eval_environments, wanted.interval, last=-1 if begins else version))
    if config.val is not None:
        val_config = EvalConfig.model_validate(
            {
                **shared,
                "env": [AskedEnvConfig.model_validate(env.plain()) for env in config.env],
                "sampling": config.sampling,
                "num_examples": config.val.num_examples,
                "rollouts_per_example": config.val.rollouts_per_example,
            }
        )
        plans.append(Plan("val", val_config, environments, config.val.interval, last=version or -1))
    return plans


def version_span(groups: Sequence[Sequence[Rollout]], version: int) -> dict[str, float]:
    """First and last version that wrote tokens of these rollouts; `version` where the server does not tell."""
    found = [v for group in groups for rollout in group for turn in rollout.turns for _, v in turn.versions] or [
        version
    ]
    return {"version/min": float(min(found)), "version/max": float(max(found))}


def metrics_text(value: float | None) -> str:
    """A number for the console."""
    return "none" if value is None else f"{value:.4f}"
