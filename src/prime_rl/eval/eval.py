"""`eval`: serve the model if it is local, run the environments, write results, print a table.

model --> server (started for a local model) --> environments --> resume log --> evals/<env>/results.* --> table
                                                      ^               |
                                                      +---------------+ finished rollouts of an interrupted run
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.configuration.command import run_command

if TYPE_CHECKING:
    from prime_rl.configuration.sections import GenerationEnvConfig
    from prime_rl.eval.config import EvalConfig
    from prime_rl.eval.results import Summaries
    from prime_rl.generation.rollout_jobs import ModelEndpoint
    from prime_rl.generation.session import GenerationRun
    from rollouts.training.environments import Environment


@dataclass(frozen=True)
class EvalJob:
    """Model name for requests, server addresses (empty: start one), and the steps to evaluate in order."""

    model: str
    base_urls: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()


def evaluate(config: EvalConfig) -> int:
    """Run the configured evaluation; returns the exit code."""
    from prime_rl.eval.results import show_summary
    from prime_rl.generation.session import run_generation
    from prime_rl.runtime.run_state import StateRecorder

    job, summaries = build_job(config), dict[tuple[str, int], dict[str, float]]()

    async def work(run: GenerationRun, base_urls: Sequence[str]) -> None:
        await run_evaluation(run, config, job, base_urls, summaries)

    def show() -> None:
        if summaries:
            show_summary(summaries, config)

    with StateRecorder(config.output_dir, "eval"):
        run_generation("eval", config, job.base_urls, server_options(config, job), work, show)
    return 0


def build_job(config: EvalConfig) -> EvalJob:
    """Resolve model, servers and steps; `ValueError` for a missing model or step."""
    from prime_rl.generation.model_server import resolve_base_urls
    from prime_rl.runtime.tokenizer import resolve_model_dir
    from rollouts.training.steps import step_path

    if config.weights_dir is None:
        return EvalJob(config.model.name, resolve_base_urls(config))
    steps = find_steps(config)
    if config.client.base_url:
        return EvalJob(config.model.name, tuple(config.client.base_url), steps)
    # The server starts with the newest: a run in progress removes the oldest first.
    return EvalJob(str(resolve_model_dir(str(step_path(config.weights_dir, max(steps))))), (), steps)


def find_steps(config: EvalConfig) -> tuple[int, ...]:
    """The steps to evaluate; `ValueError` listing the available ones if one is missing."""
    from rollouts.training.steps import complete_steps

    assert config.weights_dir is not None
    available = complete_steps(config.weights_dir)
    missing = [step for step in config.steps if step not in available]
    if missing or not available:
        what = f"has no complete step_{missing[0]}" if missing else "has no complete step_N"
        raise ValueError(
            f"weights_dir {config.weights_dir} {what}; available: {', '.join(map(str, available)) or 'none'} "
            "(rl keeps the newest, the last and every ckpt.interval-th)"
        )
    return tuple(config.steps or available)


def server_options(config: EvalConfig, job: EvalJob) -> dict[str, Any]:
    """Options of the local server besides the model section."""
    options: dict[str, Any] = {"model.name": job.model}
    if config.weights_dir is not None:
        options["weight_dirs"] = json.dumps([str(config.weights_dir.resolve())])
    return options


async def run_evaluation(
    run: GenerationRun, config: EvalConfig, job: EvalJob, base_urls: Sequence[str], summaries: Summaries
) -> None:
    """Evaluate every step in every environment, also after one whose rollouts all failed."""
    from prime_rl.generation.model_server import connect

    async with connect(config.client, base_urls) as clients:
        async for endpoint in iter_endpoints(config, job, base_urls, clients):
            for env in config.env:
                name = env.display_name
                environment = run.environments[name]
                with run.collect_failures():
                    summary = await evaluate_environment(run, config, env, environment, endpoint)
                    summaries[name, endpoint.version] = summary


async def iter_endpoints(
    config: EvalConfig, job: EvalJob, base_urls: Sequence[str], clients: list[Any]
) -> AsyncIterator[ModelEndpoint]:
    """Yield the given model, or each step of `weights_dir` after the servers loaded it.

    Steps that were not named, and that a run in progress has removed meanwhile, are skipped.
    """
    from loguru import logger

    from prime_rl.generation.model_server import list_models
    from prime_rl.generation.rollout_jobs import ModelEndpoint
    from rollouts.training.steps import is_complete, parse_step, step_path
    from rollouts.training.weight_sync import PrimeEngine, WeightSyncError, sync_weights_to_engines

    if config.weights_dir is None:
        yield ModelEndpoint(clients, job.model, parse_step(Path(job.model).name) or 0)
        return
    served = await list_models(clients[0])
    name = job.model if job.model in served or not served else served[0]
    timeout = max(config.client.timeout, PrimeEngine.timeout)
    engines = [PrimeEngine(url, timeout, headers=clients[0].headers) for url in base_urls]
    for step in job.steps:
        path = step_path(config.weights_dir, step).resolve()
        logger.info(f"Loading {path}")
        try:
            await sync_weights_to_engines(engines, str(path))
        except WeightSyncError:
            if config.steps or is_complete(path):
                raise
            logger.warning(f"Skipped {path}: the run that writes weights_dir has removed it meanwhile")
            continue
        yield ModelEndpoint(clients, name, step)


async def evaluate_environment(
    run: GenerationRun, config: EvalConfig, env: GenerationEnvConfig, environment: Environment, endpoint: ModelEndpoint
) -> dict[str, float]:
    """Run the missing rollouts of one environment, write the results and return the summary."""
    from prime_rl.eval.envs import summarize, warn_unscored
    from prime_rl.eval.results import FILES, read_model, results_dir, write_results
    from prime_rl.generation.rollout_jobs import choose_rows
    from prime_rl.generation.session import run_missing
    from rollouts.training.steps import step_path

    name, version = env.display_name, endpoint.version
    folder, rows = results_dir(config, name, version), choose_rows(environment, env, config)
    model = config.model.name if config.weights_dir is None else str(step_path(config.weights_dir, version))
    resume_log = run.open_resume_log(folder, env, endpoint, model)
    groups = await run_missing(run, resume_log, environment, rows, env, endpoint)
    summary = summarize(groups, config.num_rollouts(env), config.pass_threshold) | {"time": resume_log.elapsed}
    run.archive_results(read_model(folder), model, [folder / file for file in FILES])
    write_results(folder, groups, summary, config, endpoint)
    if not resume_log.reported:
        run.monitor.log({f"eval/{name}/{key}": value for key, value in summary.items()}, version)
        resume_log.mark_reported()
    resume_log.release()
    run.report_failures(name, groups)
    warn_unscored(name, groups)
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
