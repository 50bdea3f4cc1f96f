"""Resume log: finished rollouts, appended to disk, so that an interrupted command does not repeat them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.runtime.redaction import redact_fields
from prime_rl.runtime.run_dir import lock_file
from rollouts.training.agent_integration import Rollout
from rollouts.training.metrics import append_jsonl
from rollouts.training.row_digests import compute_digest
from rollouts.training.types import Message, Status


class Result(msgspec.Struct, kw_only=True):
    """Result of a rollout: one line of `results.jsonl`. A failed rollout has an error and no reward."""

    example_id: int = 0
    rollout_idx: int = 0
    task: str = ""
    prompt: str | list[Message] = ""
    completion: str | list[Message] = ""
    answer: Any = None
    reward: float | None = None
    metrics: dict[str, float | None] = {}
    completion_len: int | None = None
    is_truncated: bool = False
    stop_reason: str | None = None
    num_turns: int = 0
    error: str | None = None
    generation_ms: float | None = None
    scoring_ms: float | None = None
    tools: list[dict[str, Any]] | None = None
    feedback: str | None = None

    @property
    def failed(self) -> bool:
        """Whether the rollout has no reward."""
        return self.reward is None

    @property
    def error_type(self) -> str:
        """The type of the error; "" without one."""
        return (self.error or "").partition(":")[0]

    @property
    def unscored(self) -> bool:
        """Whether a reward function raised, which then counts as 0 in the reward."""
        return not self.failed and self.error_type == "RewardError"

    @property
    def is_retryable(self) -> bool:
        """Whether it failed with an error that the same command may resolve, such as a timeout."""
        return self.failed and self.error_type != "OverlongPrompt"


def to_result(rollout: Rollout, number: int) -> Result:
    """Result of rollout `number` of an example, with secrets redacted."""
    result = Result(
        example_id=rollout.example_id,
        rollout_idx=number,
        task=rollout.task,
        prompt=rollout.prompt,
        completion=rollout.completion,
        answer=msgspec.to_builtins(rollout.answer, enc_hook=str),
        reward=None if rollout.failed else rollout.reward,
        metrics=dict(rollout.metrics),
        completion_len=completion_length(rollout),
        is_truncated=rollout.status == Status.TRUNCATED,
        stop_reason=rollout.stop_reason,
        num_turns=rollout.num_turns,
        error=f"{rollout.error_type}: {rollout.error}" if rollout.error else None,
        generation_ms=rollout.generation_ms,
        scoring_ms=rollout.scoring_ms,
        tools=rollout.tools,
        feedback=rollout.feedback,
    )
    return msgspec.convert(redact_fields(msgspec.structs.asdict(result)), Result)


def completion_length(rollout: Rollout) -> int | None:
    """Sampled tokens of all turns, else the usage count of the server."""
    if rollout.turns:
        return sum(len(turn.completion_ids) for turn in rollout.turns)
    return rollout.completion_tokens


class ResumeEntry(msgspec.Struct, kw_only=True):
    """One line of the log: rollouts of one example and the elapsed seconds. Index -1: results were reported."""

    index: int
    row: str
    elapsed: float
    results: list[Result]


class ResumeLog:
    """Finished rollouts of one environment by example; `elapsed` is the total time in seconds.

    The file name contains a digest of the settings that the rollouts depend on, every line a digest of its row.
    A warning names logs of other settings in the same folder, which are kept. Raises `ValueError` while another process
    writes the file, on a file system with locks.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, resume: bool = True) -> None:
        digest = compute_digest(settings)
        self.path = folder / f".unfinished-{digest}.journal"
        self.elapsed = 0.0
        self.reported = False
        """Whether the current content was reported."""
        self._rows: dict[int, str] = {}
        self._results: dict[int, dict[int, Result]] = {}
        # A file of its own: `append_jsonl` locks the log, over NFS with the same kind of lock.
        self._lock_path, self._lock = folder / f".lock-{digest}", ExitStack()
        message = f"{folder} is being written by the same command: wait for it, or change output_dir"
        self._lock.enter_context(lock_file(self._lock_path, message))
        if not resume:
            self.path.unlink(missing_ok=True)
        if self.path.exists():
            self._read()
        if resume and not self._results:
            self._report_others()

    def _report_others(self) -> None:
        """Log that rollouts of the same folder are not used."""
        from loguru import logger

        for path in sorted(self.path.parent.glob(".unfinished-*.journal")):
            if path != self.path and path.stat().st_size:
                logger.warning(
                    f"The rollouts in {path} are of other settings or other code of the environment: they are kept, "
                    "but not used"
                )

    def _read(self) -> None:
        """Load the file and truncate an incomplete last line, to which the next one would be appended."""
        data = self.path.read_bytes()
        end = data.rfind(b"\n") + 1
        os.truncate(self.path, end)
        for line in data[:end].splitlines():
            try:
                entry = msgspec.json.decode(line, type=ResumeEntry)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ValueError(f"{self.path} is damaged ({error}): remove it, or pass --no-resume") from error
            self._apply(entry)

    def _apply(self, entry: ResumeEntry) -> None:
        self.reported = entry.index < 0
        if self.reported:
            return
        if self._rows.get(entry.index) != entry.row:
            self._rows[entry.index], self._results[entry.index] = entry.row, {}
        self._results[entry.index].update({result.rollout_idx: result for result in entry.results})
        self.elapsed = max(self.elapsed, entry.elapsed)

    def missing(
        self,
        index: int,
        row: str,
        num_rollouts: int,
        is_retried: Callable[[Result], bool] = lambda result: result.failed,
        *,
        together: bool = False,
    ) -> list[int]:
        """Rollouts of an example still to run: absent, of another row, or failed and to be retried.

        `row` is the digest of the row before its first rollout, as rewards may change a row in place. `together`: all
        of them if one is to run, because rewards compare them.
        """
        if self._rows.get(index) != row:
            return list(range(num_rollouts))
        results = self._results[index]
        found = [n for n in range(num_rollouts) if n not in results or is_retried(results[n])]
        return list(range(num_rollouts)) if found and together else found

    def add(self, index: int, row: str, results: Sequence[Result], elapsed: float) -> None:
        """Append rollouts of an example; they are on disk when this returns."""
        entry = ResumeEntry(index=index, row=row, elapsed=elapsed, results=list(results))
        append_jsonl(self.path, [msgspec.structs.asdict(entry)])
        self._apply(entry)

    def mark_reported(self) -> None:
        """Record that results and metrics were written."""
        entry = ResumeEntry(index=-1, row="", elapsed=self.elapsed, results=[])
        append_jsonl(self.path, [msgspec.structs.asdict(entry)])
        self._apply(entry)

    def results(self, index: int, num_rollouts: int) -> list[Result]:
        """The finished rollouts of an example, in order."""
        results = self._results.get(index, {})
        return [results[number] for number in range(num_rollouts) if number in results]

    def release(self) -> None:
        """Release the lock and the results, which were reported; the files stay until `close`."""
        self._rows.clear()
        self._results.clear()
        self._lock.close()

    def close(self, *, remove: bool = False) -> None:
        """Release the lock; `remove`: delete the files because the command is complete."""
        if remove or not (self._results or self.reported):
            self.path.unlink(missing_ok=True)
            self._lock_path.unlink(missing_ok=True)
        self._lock.close()
