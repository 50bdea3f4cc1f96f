"""`eval`: serve the model if need be, run the environments, write results, show a table.

model --> server (ours for a local model) --> environments --> journal --> evals/<env>/results.* --> table
                                                  ^               |
                                                  +-- what a killed run has finished is not done again
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.utils.command import run_command

if TYPE_CHECKING:
    from prime_rl.eval.config import EvalConfig
    from prime_rl.eval.results import Summaries
    from prime_rl.utils.ask_command import AskRun
    from prime_rl.utils.asking import Target
    from prime_rl.utils.config import AskedEnvConfig
    from rollouts.training.environments import Environment


@dataclass(frozen=True)
class Plan:
    """What is evaluated: the model's name for requests, who serves it (none: we), and the steps one after the other."""

    model: str
    base_urls: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()


def evaluate(config: EvalConfig) -> int:
    """Evaluate as configured; returns the exit code."""
    from prime_rl.eval.results import show_summary
    from prime_rl.utils.ask_command import run_asking

    plan, summaries = make_plan(config), dict[tuple[str, int], dict[str, float]]()

    async def work(run: AskRun, base_urls: Sequence[str]) -> None:
        await run_evaluation(run, config, plan, base_urls, summaries)

    run_asking("eval", config, plan.base_urls, server_options(config, plan), work)
    show_summary(summaries, config)
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


async def run_evaluation(
    run: AskRun, config: EvalConfig, plan: Plan, base_urls: Sequence[str], summaries: Summaries
) -> None:
    """Every step in every environment."""
    from prime_rl.utils.model_server import connect

    async with connect(config.client, base_urls) as clients:
        async for target in targets(config, plan, base_urls, clients):
            for env in config.env:
                name = env.name or env.id
                environment = run.environments[name]
                summaries[name, target.version] = await evaluate_environment(run, config, env, environment, target)


async def targets(
    config: EvalConfig, plan: Plan, base_urls: Sequence[str], clients: list[Any]
) -> AsyncIterator[Target]:
    """The model as it was given, or each step of `weights_dir` once the servers hold it."""
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
    run: AskRun, config: EvalConfig, env: AskedEnvConfig, environment: Environment, target: Target
) -> dict[str, float]:
    """Run what is missing in one environment, write its results, and return its summary."""
    from prime_rl.eval.envs import summarize
    from prime_rl.eval.results import results_dir, write_results
    from prime_rl.utils.ask_command import run_missing
    from prime_rl.utils.asking import choose_rows
    from rollouts.training.steps import step_path

    name, version = env.name or env.id, target.version
    folder, rows = results_dir(config, name, version), choose_rows(environment, env, config)
    model = config.model.name if config.weights_dir is None else str(step_path(config.weights_dir, version))
    journal = run.open_journal(folder, env, target, model)
    groups = await run_missing(journal, environment, rows, env, config, target)
    summary = summarize(groups, config.num_rollouts(env), config.pass_threshold) | {"time": journal.elapsed}
    write_results(folder, groups, summary, config, target)
    if not journal.reported:
        run.monitor.log({f"eval/{name}/{key}": value for key, value in summary.items()}, version)
        journal.mark_reported()
    run.report_failures(name, groups)
    return summary


def main() -> None:
    """Console script `eval`."""
    run_command(
        "eval",
        "prime_rl.eval.config:EvalConfig",
        evaluate,
        summary="Evaluate a model, a server or a series of checkpoints in verifiers environments.",
    )


if __name__ == "__main__":
    main()
