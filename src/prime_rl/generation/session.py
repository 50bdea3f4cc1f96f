"""Lifecycle of `eval` and `synthesize`: server, environments, resume logs, missing rollouts.

start server (for a local model) + load environments --> work --> remove resume logs unless rollouts can be retried
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.generation.resume_log import Result, ResumeLog, to_result
from prime_rl.generation.rollout_jobs import ModelEndpoint, find_extensions, is_strict, run_rows
from prime_rl.runtime.run_dir import RunDir
from rollouts.training.row_digests import compute_digest

if TYPE_CHECKING:
    from prime_rl.configuration.sections import GenerationConfig, GenerationEnvConfig
    from prime_rl.utils.monitor import Monitor
    from rollouts.training.agent_integration import Rollout
    from rollouts.training.environments import Environment

Work = Callable[["GenerationRun", Sequence[str]], Awaitable[None]]


class AllRolloutsFailed(RuntimeError):
    """No rollout of an environment has a reward."""


@dataclass
class GenerationRun:
    """One run of a command: its configuration, environments and resume logs."""

    config: GenerationConfig
    environments: Mapping[str, Environment]
    monitor: Monitor
    base_urls: tuple[str, ...] = ()
    """Running servers; empty: this command serves the model."""
    resume_logs: list[ResumeLog] = field(default_factory=list)
    row_digests: dict[str, list[str]] = field(default_factory=dict)
    num_failed: int = 0
    failures: list[AllRolloutsFailed] = field(default_factory=list)
    """Environments without a result, after which the others run."""

    def digest_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Digests of an environment's rows before the first rollout, as rewards may change rows in place."""
        if name not in self.row_digests:
            self.row_digests[name] = [compute_digest(row) for row in rows]
        return self.row_digests[name]

    def open_resume_log(
        self, folder: Path, env: GenerationEnvConfig, endpoint: ModelEndpoint, model: str, split: str = "eval"
    ) -> ResumeLog:
        """Open the resume log of an environment in `folder`, keyed by everything that its rollouts depend on."""
        settings = self.resume_settings(env, endpoint, model, split)
        resume_log = ResumeLog(folder, settings, resume=self.config.resume)
        self.resume_logs.append(resume_log)
        return resume_log

    def resume_settings(
        self, env: GenerationEnvConfig, endpoint: ModelEndpoint, model: str, split: str
    ) -> dict[str, Any]:
        """Everything that the rollouts of an environment depend on, except its rows."""
        from prime_rl.runtime.tokenizer import fingerprint_model
        from rollouts.training.environments import digest_code, find_environment

        config = self.config
        served = config.model.model_dump(exclude={"name"})
        return {
            "model": [model, endpoint.version, fingerprint_model(model), served],
            "servers": self.base_urls,
            "env": [*env.factory, *([] if env.command is None else [env.command])],
            "split": split,
            "code": digest_code(find_environment(env.factory[0])),
            "rollouts": config.num_rollouts(env),
            "sampling": config.sampling.model_dump(),
            "seed": config.seed,
        }

    def archive_results(self, found: str | None, model: str, files: Iterable[Path]) -> None:
        """Move results to `attempts/N` if they are of another model, `found`: those of `model` would replace them."""
        from loguru import logger

        if found not in (None, model) and (folder := RunDir(self.config.output_dir).archive(files)) is not None:
            logger.info(f"The earlier results, of {found}, moved to {folder}")

    def report_failures(self, name: str, groups: Sequence[Sequence[Result]]) -> None:
        """Log the number of failed rollouts and the last error; `AllRolloutsFailed` if there are no others."""
        from loguru import logger

        failed = [result for group in groups for result in group if result.failed]
        if not failed:
            return
        is_empty = len(failed) == sum(map(len, groups))
        self.num_failed += len(failed) if is_empty else sum(result.is_retryable for result in failed)
        logger.warning(f"{name}: {len(failed)} rollouts failed and are excluded; last error: {failed[-1].error}")
        if is_empty:
            raise AllRolloutsFailed(f"all rollouts of {name} failed; last error: {failed[-1].error}")

    @contextmanager
    def collect_failures(self) -> Iterator[None]:
        """Go on after an environment whose rollouts all failed."""
        try:
            yield
        except AllRolloutsFailed as error:
            self.failures.append(error)

    def close_resume_logs(self, *, remove: bool) -> None:
        """Close the resume logs; `remove`: delete those of a complete command."""
        for resume_log in self.resume_logs:
            resume_log.close(remove=remove)
        self.resume_logs.clear()


def run_generation(
    process: str,
    config: GenerationConfig,
    base_urls: tuple[str, ...],
    options: Mapping[str, Any],
    work: Work,
    show: Callable[[], None] = lambda: None,
) -> None:
    """Run `work(run, server addresses)`, then `show`; `AllRolloutsFailed` after both if that of an environment did.

    `options` are for the server that is started if `base_urls` is empty.
    """
    import anyio
    from loguru import logger

    from prime_rl.client.http import ensure_open_files
    from prime_rl.generation.model_server import (
        check_servers,
        find_server_options,
        run_with_server,
        start_server,
        wait_for_server,
    )
    from prime_rl.runtime.interrupts import cancel_on_signals
    from prime_rl.runtime.process import ChildFailed
    from prime_rl.telemetry.trackers import check_trackers
    from prime_rl.utils.logger import setup_logger
    from prime_rl.utils.monitor import build_monitor
    from prime_rl.utils.vf import check_environments, open_environments

    check_trackers(config)
    check_environments(config.env)
    setup_logger(process, config.log, RunDir(config.output_dir).logs)
    if base_urls:
        for key in find_server_options(config):
            logger.warning(f"{key} has no effect: it is for a model served by this command, not by {base_urls[0]}")
        if is_strict(base_urls[0], config.model.name):
            for key in find_extensions(config.sampling):
                logger.warning(f"sampling.{key} has no effect: the OpenAI API has no such parameter; remove it")
        anyio.run(check_servers, config.client, base_urls)
    if advice := ensure_open_files(config.max_concurrent):
        logger.warning(advice)
    serving = nullcontext() if base_urls else start_server(config, process, options)
    try:
        # Environments load while the server loads the model.
        with serving as server, open_environments(config.env) as environments, ExitStack() as stack:
            monitor = build_monitor(config.output_dir, process, config)
            stack.callback(monitor.finish)
            run = GenerationRun(config, environments, monitor, base_urls)
            urls = base_urls if server is None else wait_for_server(config, server)
            try:
                with cancel_on_signals():
                    anyio.run(run_with_server, server, lambda: work(run, urls))
            except BaseException:
                run.close_resume_logs(remove=False)
                raise
    except ChildFailed as failure:
        if failure.wrong_input is None:
            raise
        raise ValueError(failure.wrong_input) from failure
    run.close_resume_logs(remove=not run.num_failed)
    if run.num_failed:
        logger.warning(
            f"{run.num_failed} rollouts failed: run the same command to retry them, or pass --no-resume to start over"
        )
    show()
    if run.failures:
        raise run.failures[0]


async def run_missing(
    run: GenerationRun,
    resume_log: ResumeLog,
    environment: Environment,
    rows: Sequence[dict[str, Any]],
    env: GenerationEnvConfig,
    endpoint: ModelEndpoint,
) -> list[list[Result]]:
    """Results of all rows: runs missing rollouts and appends each finished group to the resume log."""
    from loguru import logger

    from prime_rl.telemetry.progress import show_progress

    name, num_rollouts = env.display_name, run.config.num_rollouts(env)
    digests = run.digest_rows(name, rows)
    together = getattr(environment, "scores_groups", False)
    missing = [
        resume_log.missing(index, digest, num_rollouts, together=together) for index, digest in enumerate(digests)
    ]
    total, todo = len(rows) * num_rollouts, sum(map(len, missing))
    if todo < total:
        logger.info(f"{name}: {total - todo} of {total} rollouts are finished, running the rest")
    started, before = time.monotonic(), resume_log.elapsed
    rewards: list[float] = []

    with show_progress(name, total, total - todo) as progress:

        def record(index: int, numbers: Sequence[int], rollouts: list[Rollout]) -> None:
            results = [to_result(rollout, number) for number, rollout in zip(numbers, rollouts, strict=True)]
            resume_log.add(index, digests[index], results, before + time.monotonic() - started)
            rewards.extend(result.reward for result in results if result.reward is not None)
            mean = f"reward {sum(rewards) / len(rewards):.4f}" if rewards else ""
            progress.advance(len(results), mean)

        await run_rows(environment, rows, missing, run.config, endpoint, record)
    return [resume_log.results(index, num_rollouts) for index in range(len(rows))]
