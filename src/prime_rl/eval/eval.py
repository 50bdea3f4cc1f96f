"""`eval`: serve the model if need be, run the environments, write results, show a table.

model --> server (ours for a local model) --> environments --> journal --> evals/<env>/results.* --> table
                                                  ^               |
                                                  +-- what a killed run has finished is not done again
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.eval.config import EvalConfig
from prime_rl.utils.pydantic_config import run_command

if TYPE_CHECKING:
    from prime_rl.eval.results import Summaries
    from prime_rl.utils.asking import Target
    from prime_rl.utils.config import AskedEnvConfig
    from prime_rl.utils.journal import Journal, Result
    from prime_rl.utils.model_server import Server
    from prime_rl.utils.monitor import Monitor
    from rollouts.training.agent_integration import Rollout
    from rollouts.training.environments import Environment


@dataclass(frozen=True)
class Plan:
    """What is evaluated: the model's name for requests, who serves it (none: we), and the steps one after the other."""

    model: str
    base_urls: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()


@dataclass
class Evaluation:
    """One run of the command: its environments, its monitor, and the journals that are open until its end."""

    config: EvalConfig
    plan: Plan
    environments: Mapping[str, Environment]
    monitor: Monitor
    journals: list[Journal] = field(default_factory=list)
    summaries: Summaries = field(default_factory=dict)
    num_failed: int = 0


def evaluate(config: EvalConfig) -> int:
    """Evaluate as configured; returns the exit code."""
    import anyio
    from loguru import logger

    from prime_rl.eval.results import show_summary
    from prime_rl.utils.http import ensure_open_files
    from prime_rl.utils.logger import setup_logger
    from prime_rl.utils.model_server import start_server, wait_for_server
    from prime_rl.utils.monitor import build_monitor
    from prime_rl.utils.process import ChildFailed
    from prime_rl.utils.vf import check_environments, open_environments

    plan = make_plan(config)
    check_environments(config.env)
    setup_logger("eval", config.log, config.output_dir / "logs")
    if advice := ensure_open_files(config.max_concurrent):
        logger.warning(advice)
    serving = nullcontext() if plan.base_urls else start_server(config, "eval", server_options(config, plan))
    try:
        # The environments load while the server loads its model.
        with serving as server, open_environments(config.env) as environments, ExitStack() as stack:
            monitor = build_monitor(config.output_dir, "eval", config.wandb)
            stack.callback(monitor.finish)
            run = Evaluation(config, plan, environments, monitor)
            base_urls = plan.base_urls if server is None else wait_for_server(config, server)
            try:
                anyio.run(run_evaluation, run, base_urls, server)
            except BaseException:
                close_journals(run, remove=False)
                raise
    except ChildFailed as failure:
        if failure.wrong_input is None:
            raise
        raise ValueError(failure.wrong_input) from failure
    close_journals(run, remove=not run.num_failed)
    show_summary(run.summaries, config)
    if run.num_failed:
        logger.warning(f"{run.num_failed} rollouts failed: the same command tries them again, --no-resume begins anew")
    return 0


def make_plan(config: EvalConfig) -> Plan:
    """Decide who serves the model; `ValueError` for a model or a step that is not there."""
    from prime_rl.utils.model_server import find_base_urls
    from prime_rl.utils.tokenizer import resolve_model_dir
    from rollouts.training.steps import step_path

    if config.weights_dir is None:
        return Plan(config.model.name, find_base_urls(config))
    steps = find_steps(config)
    if config.client.base_url:
        return Plan(config.model.name, tuple(config.client.base_url), steps)
    return Plan(str(resolve_model_dir(str(step_path(config.weights_dir, steps[0])))), (), steps)


def find_steps(config: EvalConfig) -> tuple[int, ...]:
    """The steps to evaluate; `ValueError` naming those of `weights_dir` when one is missing."""
    from rollouts.training.steps import complete_steps

    assert config.weights_dir is not None
    present = complete_steps(config.weights_dir)
    missing = [step for step in config.steps if step not in present]
    if missing or not present:
        what = f"has no complete step_{missing[0]}" if missing else "holds no complete step_N"
        raise ValueError(
            f"weights_dir {config.weights_dir} {what}; there are: {', '.join(map(str, present)) or 'none'}"
        )
    return tuple(config.steps or present)


def server_options(config: EvalConfig, plan: Plan) -> dict[str, Any]:
    """What our own server is told beside the model's section."""
    options: dict[str, Any] = {"model.name": plan.model}
    if config.weights_dir is not None:
        options["weight_dirs"] = json.dumps([str(config.weights_dir.resolve())])
    return options


async def run_evaluation(run: Evaluation, base_urls: Sequence[str], server: Server | None) -> None:
    """Every step in every environment; a server that falls meanwhile ends it at once."""
    from prime_rl.utils.model_server import run_beside

    async def work() -> None:
        async with targets(run.config, run.plan, base_urls) as found:
            async for target in found:
                for env in run.config.env:
                    name = env.name or env.id
                    summary = await evaluate_environment(run, env, run.environments[name], target)
                    run.summaries[name, target.version] = summary

    await run_beside(server, work)


@asynccontextmanager
async def targets(config: EvalConfig, plan: Plan, base_urls: Sequence[str]) -> AsyncIterator[AsyncIterator[Target]]:
    """The model as it was given, or each step of `weights_dir` once the servers hold it."""
    from prime_rl.utils.model_server import connect

    async with connect(config.client, base_urls) as clients:
        yield _series(config, plan, base_urls, clients)


async def _series(
    config: EvalConfig, plan: Plan, base_urls: Sequence[str], clients: list[Any]
) -> AsyncIterator[Target]:
    from loguru import logger

    from prime_rl.utils.asking import Target
    from prime_rl.utils.model_server import list_models
    from rollouts.training.steps import parse_step, step_path
    from rollouts.training.weight_sync import PrimeEngine, sync_weights_to_engines

    if config.weights_dir is None:
        yield Target(clients, plan.model, parse_step(Path(plan.model).name) or 0)
        return
    served = await list_models(clients[0])
    name = plan.model if plan.model in served or not served else served[0]
    engines = [PrimeEngine(url, headers=clients[0].headers) for url in base_urls]
    for step in plan.steps:
        path = step_path(config.weights_dir, step).resolve()
        logger.info(f"Loading {path}")
        await sync_weights_to_engines(engines, str(path))
        yield Target(clients, name, step)


async def evaluate_environment(
    run: Evaluation, env: AskedEnvConfig, environment: Environment, target: Target
) -> dict[str, float]:
    """Run what is missing in one environment, write its results, and return its summary."""
    from prime_rl.eval.envs import summarize
    from prime_rl.eval.results import results_dir, write_results
    from prime_rl.utils.asking import choose_rows
    from prime_rl.utils.journal import Journal

    config, name = run.config, env.name or env.id
    folder = results_dir(config, name, target.version)
    rows, num_rollouts = choose_rows(environment, env, config), config.num_rollouts(env)
    journal = Journal(folder, settings_of(config, env, run.plan, target), resume=config.resume)
    run.journals.append(journal)
    await fill_journal(journal, environment, rows, env, config, target)
    groups = [journal.results(index, num_rollouts) for index in range(len(rows))]
    summary = summarize(groups, num_rollouts, config.pass_threshold) | {"time": journal.elapsed}
    write_results(folder, groups, summary, config, target)
    if not journal.reported:
        run.monitor.log({f"eval/{name}/{key}": value for key, value in summary.items()}, target.version)
        journal.mark_reported()
    report_failures(run, name, [result for group in groups for result in group if result.failed], summary)
    return summary


async def fill_journal(
    journal: Journal,
    environment: Environment,
    rows: Sequence[dict[str, Any]],
    env: AskedEnvConfig,
    config: EvalConfig,
    target: Target,
) -> None:
    """Run the rollouts that the journal lacks; each group is in it as soon as it is finished."""
    from loguru import logger

    from prime_rl.utils.asking import run_rows
    from prime_rl.utils.journal import to_result
    from prime_rl.utils.progress import show_progress

    name, num_rollouts = env.name or env.id, config.num_rollouts(env)
    missing = [journal.missing(index, row, num_rollouts) for index, row in enumerate(rows)]
    total, todo = len(rows) * num_rollouts, sum(map(len, missing))
    if todo < total:
        logger.info(f"{name}: {total - todo} of {total} rollouts are there already, going on with the rest")
    started, before = time.monotonic(), journal.elapsed
    rewards: list[float] = []

    with show_progress(name, total, total - todo) as progress:

        def keep(index: int, numbers: Sequence[int], rollouts: list[Rollout]) -> None:
            results = [to_result(rollout, number) for number, rollout in zip(numbers, rollouts, strict=True)]
            journal.add(index, rows[index], results, before + time.monotonic() - started)
            rewards.extend(result.reward for result in results if result.reward is not None)
            mean = f"reward {sum(rewards) / len(rewards):.4f}" if rewards else ""
            progress.advance(len(results), mean)

        await run_rows(environment, rows, missing, config, target, keep)


def settings_of(config: EvalConfig, env: AskedEnvConfig, plan: Plan, target: Target) -> dict[str, Any]:
    """What the rollouts of an environment depend on; with other settings nothing is taken over."""
    from prime_rl.utils.tokenizer import fingerprint_model
    from rollouts.training.steps import step_path

    folder = plan.model if config.weights_dir is None else str(step_path(config.weights_dir, target.version))
    return {
        "model": [plan.model, target.version, fingerprint_model(folder), config.model.model_dump(exclude={"name"})],
        "servers": plan.base_urls,
        "env": [env.id, env.args],
        "rollouts": config.num_rollouts(env),
        "sampling": config.sampling.model_dump(),
        "seed": config.seed,
    }


def report_failures(run: Evaluation, name: str, failed: Sequence[Result], summary: Mapping[str, float]) -> None:
    """Say how many rollouts failed and why; `RuntimeError` when all of them did."""
    from loguru import logger

    if not failed:
        return
    run.num_failed += sum(result.may_be_tried_again for result in failed)
    logger.warning(f"{name}: {len(failed)} rollouts failed and are in no average; the last: {failed[-1].error}")
    if not summary["rollouts"]:
        raise RuntimeError(f"all rollouts of {name} failed; the last: {failed[-1].error}")


def close_journals(run: Evaluation, *, remove: bool) -> None:
    """Remove the journals of an evaluation that is through; keep them where the same command may go on."""
    for journal in run.journals:
        journal.close(remove=remove)


def main() -> None:
    """Console script `eval`."""
    run_command(
        "eval",
        EvalConfig,
        evaluate,
        summary="Evaluate a model, a server or a series of checkpoints in verifiers environments.",
    )


if __name__ == "__main__":
    main()
