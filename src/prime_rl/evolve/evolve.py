"""`evolve`: search a context for an environment, scored by rollouts of its training examples.

model --> server (started for a local model) --> search <--> proposer
                                                   |
                                                   +--> evolve/{candidates.jsonl, best.md, summary.json}
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prime_rl.configuration.command import run_command
from prime_rl.runtime.run_dir import RunDir
from prime_rl.runtime.run_state import StateRecorder

if TYPE_CHECKING:
    from pathlib import Path

    from prime_rl.evolve.config import EvolveConfig
    from prime_rl.evolve.proposer import Proposer
    from prime_rl.evolve.records import ProposalLog
    from prime_rl.evolve.search import Candidate, Search
    from prime_rl.generation.resume_log import Result, ResumeLog
    from prime_rl.generation.rollout_jobs import ModelEndpoint
    from prime_rl.generation.session import GenerationRun
    from rollouts.training.environments import Environment


MAX_LENGTH = "model.max_model_len"
LOST = ("AuthenticationError", "PermissionDeniedError", "NotFoundError", "WorkerDied", "WorkerStalled", "WorkerMemory")
"""Errors of a server that lost its key or model, and of lost workers, besides the infrastructure errors."""
SOLVED = "every training example is solved without a context"
"""The error if no examples are left to search on."""


def evolve(config: EvolveConfig) -> int:
    """Run the search; returns the exit code."""
    from prime_rl.generation.model_server import resolve_base_urls
    from prime_rl.generation.session import run_generation
    from prime_rl.runtime.tokenizer import check_window

    base_urls, context = resolve_base_urls(config), read_context(config)
    check_proposer(config)
    if not base_urls:
        check_window(context, config.model.name, config.model.max_model_len, "the initial context", MAX_LENGTH)
    found: list[Search] = []

    async def work(run: GenerationRun, urls: Sequence[str]) -> None:
        found.append(await run_search(run, config, context, urls))

    with StateRecorder(config.output_dir, "evolve"):
        run_generation("evolve", config, base_urls, {}, work)
    show_search(found[0], config)
    return 0


def read_context(config: EvolveConfig) -> str:
    """The initial context."""
    from prime_rl.client.contexts import read_context_file

    return config.context if config.context_file is None else read_context_file(config.context_file)


def check_proposer(config: EvolveConfig) -> None:
    """`ValueError` for a function that cannot be imported or called, or a server that does not respond."""
    import anyio

    from prime_rl.configuration.imports import check_arguments, import_function
    from prime_rl.generation.model_server import check_servers

    proposer = config.proposer
    if proposer.function is not None:
        key = "proposer.function"
        function = import_function(proposer.function, key)
        check_arguments(function, proposer.function, key, {}, ["context", "examples", "rng"])
    elif proposer.client.base_url:
        try:
            anyio.run(check_servers, proposer.client, proposer.client.base_url)
        except ConnectionError as error:
            raise ValueError(
                f"proposer.client.base_url {proposer.client.base_url[0]} does not respond: start that server, or unset "
                "it to use the model of the rollouts as proposer"
            ) from error


async def run_search(run: GenerationRun, config: EvolveConfig, context: str, base_urls: Sequence[str]) -> Search:
    """Search with the environment's training examples; writes the files after every candidate."""
    from prime_rl.evolve.proposer import build_proposer, describe_proposer
    from prime_rl.evolve.records import ProposalLog
    from prime_rl.generation.model_server import connect
    from prime_rl.generation.resume_log import ResumeLog
    from prime_rl.generation.rollout_jobs import ModelEndpoint, choose_rows
    from rollouts.training.environments.protocol import require_row_prompts
    from rollouts.training.row_digests import compute_digest

    [env] = config.env
    environment, folder = run.environments[env.display_name], RunDir(config.output_dir).evolve
    require_row_prompts(environment, "evolve cannot insert a context")
    async with AsyncExitStack() as stack:
        clients = await stack.enter_async_context(connect(config.client, base_urls))
        servers = config.proposer.client.base_url
        proposer_clients = (
            await stack.enter_async_context(connect(config.proposer.client, servers)) if servers else clients
        )
        endpoint = ModelEndpoint(clients, config.model.name)
        rows = choose_rows(environment, env, config, "train")
        settings = {
            **run.resume_settings(env, endpoint, config.model.name, "train"),
            "context": [context, config.context_position, config.separator],
            "search": [config.examples, config.minibatch_size, config.stop_reward, len(rows)],
            "timeouts": [env.timeout, config.client.timeout],  # rollouts that took longer count as 0
            "proposer": describe_proposer(config.proposer),
        }
        search_id = compute_digest({**settings, "rows": run.digest_rows(env.display_name, rows)})
        resume_log = ResumeLog(folder, settings, resume=config.resume)
        stack.callback(resume_log.close)
        proposals = ProposalLog(folder / "proposals.jsonl", search_id, resume=config.resume)
        proposer = build_proposer(config, proposer_clients[0])
        session = EvolveSession(run, config, environment, endpoint, rows, resume_log, proposals, proposer, search_id)
        return await session.search(context)


@dataclass
class EvolveSession:
    """Scores contexts and requests proposals; both are recorded before they are used."""

    run: GenerationRun
    config: EvolveConfig
    environment: Environment
    endpoint: ModelEndpoint
    rows: Sequence[dict[str, Any]]
    resume_log: ResumeLog
    proposals: ProposalLog
    proposer: Proposer
    search_id: str
    """Digest of everything that the proposals depend on."""

    is_new: bool = field(default=False)
    """Whether the current candidate caused work that was not recorded before."""

    @property
    def num_rollouts(self) -> int:
        """Rollouts per example."""
        return self.config.num_rollouts(self.config.env[0])

    async def search(self, context: str) -> Search:
        """Run the search; `ValueError` if the budget does not suffice for the first context."""
        from prime_rl.evolve.search import Search
        from rollouts.training.metrics import reaches

        examples, spent, known = list(range(len(self.rows))), 0, dict[int, float]()
        self._check_budget(len(examples))
        if self.config.examples == "failed":
            scores, spent = await self.evaluate(-1, "", examples), len(examples) * self.num_rollouts
            examples = [i for i in examples if not reaches(scores[i], self.config.stop_reward)]
            if not examples:
                raise ValueError(f'{SOLVED}: set examples = "all"')
            known = {} if context else {i: scores[i] for i in examples}
            self._check_budget(len(self.rows) + len(examples) - len(known))
        search = Search(self.config, examples, self.num_rollouts, self.evaluate, self.propose, self.report)
        search.num_rollouts = spent
        await search.run(context, known)
        return search

    def _check_budget(self, num_evaluations: int) -> None:
        needed = num_evaluations * self.num_rollouts
        if needed > self.config.budget:
            raise ValueError(
                f"budget = {self.config.budget} is less than the {needed} rollouts of the first context: raise it, or "
                "lower num_examples"
            )

    async def evaluate(self, number: int, context: str, examples: Sequence[int]) -> dict[int, float]:
        """Mean reward of each example under a context; runs the rollouts that are not recorded."""
        from loguru import logger

        from prime_rl.client.contexts import shows_context
        from prime_rl.generation.resume_log import to_result
        from prime_rl.generation.rollout_jobs import run_rows
        from rollouts.training.row_digests import compute_digest

        env = self.config.env[0]
        digests = [compute_digest([row, context]) for row in self.run.digest_rows(env.display_name, self.rows)]
        rows = [insert_into_row(row, context, self.config) for row in self.rows]
        block = self._block(number, context)
        find, together = self.resume_log.missing, getattr(self.environment, "scores_groups", False)
        missing = [
            find(block + i, digest, self.num_rollouts, is_interrupted, together=together) if i in set(examples) else []
            for i, digest in enumerate(digests)
        ]
        self.is_new |= any(missing)

        without = list[int]()

        def record(index: int, numbers: Sequence[int], rollouts: Sequence[Any]) -> None:
            if not any(shows_context(rollout, context) for rollout in rollouts):
                without.append(index)  # not recorded, or a resumed search would not notice it
                return
            results = [to_result(rollout, number) for number, rollout in zip(numbers, rollouts, strict=True)]
            self.resume_log.add(block + index, digests[index], results, 0.0)

        await run_rows(self.environment, rows, missing, self.config, self.endpoint, record)
        if without:
            raise ValueError(
                f"environment {env.id!r} does not send the prompts of its rows, so evolve cannot insert a context"
            )
        results = [result for i in examples for result in self.resume_log.results(block + i, self.num_rollouts)]
        failed = [result for result in results if result.failed]
        interrupted = [result for result in failed if is_interrupted(result)]
        if interrupted or (number <= 0 and len(failed) == len(results)):
            cure = "run the same command to retry them" if interrupted else "correct the cause and pass --no-resume"
            last = (interrupted or failed)[-1].error
            raise RuntimeError(f"{len(failed)} of {len(results)} rollouts failed: {last}\n  {cure}")
        if failed:
            logger.warning(f"Candidate {number}: {len(failed)} rollouts failed and count as 0: {failed[-1].error}")
        return {i: self._score(block + i) for i in examples}

    def _block(self, number: int, context: str) -> int:
        """First index of a candidate's rollouts in the resume log; those without a context come first."""
        return (number + 1 if context else 0) * len(self.rows)

    def _score(self, index: int) -> float:
        results = self.resume_log.results(index, self.num_rollouts)
        return sum(result.reward or 0.0 for result in results) / len(results)

    async def propose(self, number: int, parent: Candidate, examples: Sequence[int]) -> str:
        """The recorded proposal, else a new one."""
        from prime_rl.evolve.proposer import describe_result

        if (text := self.proposals.find(number)) is None:
            block = self._block(parent.number, parent.text)
            described = [
                describe_result(self.rows[i]["prompt"], result)
                for i in examples
                for result in self.resume_log.results(block + i, self.num_rollouts)
            ]
            text = await self.proposer(number, parent.text, described)
            self.proposals.add(number, text)
            self.is_new = True
        return text

    def report(self, search: Search) -> None:
        """Write the files, and log a candidate that was not recorded before."""
        from loguru import logger

        from prime_rl.evolve.records import archive_search, write_search

        run = RunDir(self.config.output_dir)
        if len(search.candidates) == 1:  # a search that is refused, or fails before, leaves the files alone
            archive_search(run, self.search_id, resume=self.config.resume)
        write_search(run.evolve, search, self.search_id)
        candidate, best = search.candidates[-1], search.best
        if self.is_new:
            values = {"best": best.mean, "score": candidate.mean, "rollouts": search.num_rollouts}
            metrics = {f"evolve/{key}": float(value) for key, value in values.items() if value is not None}
            self.run.monitor.log(metrics, candidate.number)
            score = "" if candidate.mean is None else f" score={candidate.mean:.4f}"
            logger.info(
                f"Candidate {candidate.number} {candidate.status.value}{score} parent={candidate.parent} "
                f"best={best.mean:.4f} rollouts={search.num_rollouts}"
            )
        self.is_new = False


def is_interrupted(result: Result) -> bool:
    """Whether a rollout failed because of a server or a lost worker and is repeated; others that failed count as 0.

    Timeouts count as 0, too: an answer that takes too long does so again.
    """
    from rollouts.training.environments.protocol import INFRASTRUCTURE_ERRORS, PERMANENT

    kind = result.error_type
    return result.failed and kind not in PERMANENT and (kind in INFRASTRUCTURE_ERRORS or kind in LOST)


def insert_into_row(row: Mapping[str, Any], context: str, config: EvolveConfig) -> dict[str, Any]:
    """The row with the context in its prompt."""
    from prime_rl.client.contexts import insert_context, insert_text

    prompt, position = row["prompt"], config.context_position
    if not context:
        return dict(row)
    insert = insert_text if isinstance(prompt, str) else insert_context
    return {**row, "prompt": insert(prompt, context, position, config.separator)}


def show_search(search: Search, config: EvolveConfig) -> None:
    """Print the result, the output paths and the options that distill the best context."""
    best, folder = search.best, RunDir(config.output_dir).evolve
    if search.num_repeats >= config.max_repeats:
        sys.stdout.write(
            f"\nThe last {search.num_repeats} proposals were empty, cut off or repeated an earlier context: raise "
            "proposer.sampling.temperature or max_tokens, or use another proposer\n"
        )
    sys.stdout.write(
        f"\nBest context: candidate {best.number} of {len(search.candidates)} | Score: "
        f"{search.candidates[0].mean:.4f} -> {best.mean:.4f} | Rollouts: {search.num_rollouts} of {config.budget}\n"
        f"  context    {folder / 'best.md'}\n  candidates {folder / 'candidates.jsonl'}\n"
    )
    if best.text.strip():
        sys.stdout.write(f"  distill    rl ... {format_teacher_options(folder / 'best.md', config)}\n")
    else:
        sys.stdout.write("No context improved the score: best.md is empty, there is nothing to distill\n")


def format_teacher_options(context_file: Path, config: EvolveConfig) -> str:
    """Options of `rl`, for a shell, with which the teacher sees the context as the search did."""
    options = {"context-file": shlex.quote(str(context_file)), "context-position": config.context_position}
    if config.separator:
        # $'...' of bash and zsh: a line break stays in the line.
        text = config.separator.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
        options["separator"] = f"$'{text}'"
    return " ".join(f"--orchestrator.teacher_model.{name} {value}" for name, value in options.items())


def main() -> None:
    """Console script `evolve`."""
    run_command(
        "evolve",
        "prime_rl.evolve.config:EvolveConfig",
        evolve,
        summary="Search a context (system prompt, playbook) for an environment, proposed by a model or a function.",
        locks=lambda config: "evolve",
    )


if __name__ == "__main__":
    main()
