"""The life of a command that asks a model in environments: server, environments, journals, and what is missing.

start server (for a local model) + load environments --> work --> journals go when nothing is left to be tried again
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.utils.asking import Target, run_rows
from prime_rl.utils.journal import Journal, Result, to_result

if TYPE_CHECKING:
    from prime_rl.utils.config import AskConfig, AskedEnvConfig
    from prime_rl.utils.monitor import Monitor
    from rollouts.training.agent_integration import Rollout
    from rollouts.training.environments import Environment

Work = Callable[["AskRun", Sequence[str]], Awaitable[None]]


@dataclass
class AskRun:
    """One run of a command: what it works with, and the journals that are open until its end."""

    config: AskConfig
    environments: Mapping[str, Environment]
    monitor: Monitor
    base_urls: tuple[str, ...] = ()
    """Servers that already run; none: we serve the model ourselves."""
    journals: list[Journal] = field(default_factory=list)
    num_failed: int = 0

    def open_journal(self, folder: Path, env: AskedEnvConfig, target: Target, model: str) -> Journal:
        """The journal of an environment below `folder`, bound to all that its rollouts depend on."""
        from prime_rl.utils.tokenizer import fingerprint_model

        config = self.config
        served = config.model.model_dump(exclude={"name"})
        settings = {
            "model": [model, target.version, fingerprint_model(model), served],
            "servers": self.base_urls,
            "env": [env.id, env.args],
            "rollouts": config.num_rollouts(env),
            "sampling": config.sampling.model_dump(),
            "seed": config.seed,
        }
        journal = Journal(folder, settings, resume=config.resume)
        self.journals.append(journal)
        return journal

    def report_failures(self, name: str, groups: Sequence[Sequence[Result]]) -> None:
        """Say how many rollouts failed and why; `RuntimeError` when all of them did."""
        from loguru import logger

        failed = [result for group in groups for result in group if result.failed]
        if not failed:
            return
        self.num_failed += sum(result.may_be_tried_again for result in failed)
        logger.warning(f"{name}: {len(failed)} rollouts failed and are left out; the last: {failed[-1].error}")
        if len(failed) == sum(map(len, groups)):
            raise RuntimeError(f"all rollouts of {name} failed; the last: {failed[-1].error}")

    def close_journals(self, *, remove: bool) -> None:
        """Remove the journals of a command that is through; keep them where the same command may go on."""
        for journal in self.journals:
            journal.close(remove=remove)
        self.journals.clear()


def run_asking(
    process: str, config: AskConfig, base_urls: tuple[str, ...], options: Mapping[str, Any], work: Work
) -> None:
    """Run `work(run, addresses of servers)`; `options` are those of the server that is started without `base_urls`."""
    import anyio
    from loguru import logger

    from prime_rl.utils.http import ensure_open_files
    from prime_rl.utils.logger import setup_logger
    from prime_rl.utils.model_server import check_servers, run_beside, start_server, wait_for_server
    from prime_rl.utils.monitor import build_monitor
    from prime_rl.utils.process import ChildFailed
    from prime_rl.utils.vf import check_environments, open_environments

    check_environments(config.env)
    setup_logger(process, config.log, config.output_dir / "logs")
    if base_urls:
        anyio.run(check_servers, config.client, base_urls)
    if advice := ensure_open_files(config.max_concurrent):
        logger.warning(advice)
    serving = nullcontext() if base_urls else start_server(config, process, options)
    try:
        # The environments load while the server loads its model.
        with serving as server, open_environments(config.env) as environments, ExitStack() as stack:
            monitor = build_monitor(config.output_dir, process, config)
            stack.callback(monitor.finish)
            run = AskRun(config, environments, monitor, base_urls)
            urls = base_urls if server is None else wait_for_server(config, server)
            try:
                anyio.run(run_beside, server, lambda: work(run, urls))
            except BaseException:
                run.close_journals(remove=False)
                raise
    except ChildFailed as failure:
        if failure.wrong_input is None:
            raise
        raise ValueError(failure.wrong_input) from failure
    run.close_journals(remove=not run.num_failed)
    if run.num_failed:
        logger.warning(f"{run.num_failed} rollouts failed: the same command tries them again, --no-resume begins anew")


async def run_missing(
    journal: Journal,
    environment: Environment,
    rows: Sequence[dict[str, Any]],
    env: AskedEnvConfig,
    config: AskConfig,
    target: Target,
) -> list[list[Result]]:
    """The results of all rows: runs what the journal lacks, and each group is in it as soon as it is finished."""
    from loguru import logger

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
    return [journal.results(index, num_rollouts) for index in range(len(rows))]
