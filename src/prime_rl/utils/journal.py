"""Finished rollouts of a long command, kept line by line, so that being killed costs none of them twice."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rollouts.training.agent_integration import Rollout
from rollouts.training.environments.protocol import PERMANENT
from rollouts.training.metrics import append_jsonl
from rollouts.training.types import Message, Status


class Result(msgspec.Struct, kw_only=True):
    """What is kept of a rollout: one line of `results.jsonl`. A rollout that failed has an error and no reward."""

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

    @property
    def failed(self) -> bool:
        """Nothing to count: it has no reward."""
        return self.reward is None

    @property
    def may_be_tried_again(self) -> bool:
        """It failed, by something that another try may cure."""
        return self.failed and (self.error or "").partition(":")[0] not in PERMANENT


def to_result(rollout: Rollout, number: int) -> Result:
    """What is kept of rollout `number` of an example."""
    return Result(
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
    )


def completion_length(rollout: Rollout) -> int | None:
    """Sampled tokens of all turns: those that the server told, else as many as it says it used."""
    if rollout.turns:
        return sum(len(turn.completion_ids) for turn in rollout.turns)
    return rollout.completion_tokens


class Entry(msgspec.Struct, kw_only=True):
    """One line of a journal: rollouts of one example, and the seconds of work until then. Index -1: it was reported."""

    index: int
    row: str
    elapsed: float
    results: list[Result]


class Journal:
    """Rollouts of one environment that are finished, by example. `elapsed` are the seconds that they took so far.

    The file is bound to what its rollouts depend on (`settings`), by its name, and to the rows by a digest of each.
    Raises `ValueError` while another process writes it.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], *, resume: bool = True) -> None:
        digest = compute_digest(settings)
        self.path = folder / f".unfinished-{digest}.journal"
        self.elapsed = 0.0
        self.reported = False
        """Whether what is in here now was reported."""
        self._rows: dict[int, str] = {}
        self._results: dict[int, dict[int, Result]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise ValueError(
                f"{folder} is being written by the same command: wait for it, or change output_dir"
            ) from None
        if not resume:
            os.truncate(self._fd, 0)
        self._read()

    def _read(self) -> None:
        """Load what is there; a last line that was cut short is taken off, or the next would hang on to it."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        os.truncate(self._fd, whole)
        for line in data[:whole].splitlines():
            self._take(msgspec.json.decode(line, type=Entry))

    def _take(self, entry: Entry) -> None:
        self.reported = entry.index < 0
        if self.reported:
            return
        if self._rows.get(entry.index) != entry.row:
            self._rows[entry.index], self._results[entry.index] = entry.row, {}
        self._results[entry.index].update({result.rollout_idx: result for result in entry.results})
        self.elapsed = max(self.elapsed, entry.elapsed)

    def missing(self, index: int, row: Mapping[str, Any], num_rollouts: int) -> list[int]:
        """Rollouts of an example that are still to be made: not there, of another row, or failed but not for good."""
        if self._rows.get(index) != compute_digest([row.get("prompt"), row.get("answer")]):
            return list(range(num_rollouts))
        found = self._results[index]
        return [n for n in range(num_rollouts) if n not in found or found[n].may_be_tried_again]

    def add(self, index: int, row: Mapping[str, Any], results: Sequence[Result], elapsed: float) -> None:
        """Keep rollouts of an example: when this returns, they outlive the process."""
        digest = compute_digest([row.get("prompt"), row.get("answer")])
        entry = Entry(index=index, row=digest, elapsed=elapsed, results=list(results))
        append_jsonl(self.path, [msgspec.structs.asdict(entry)])
        self._take(entry)

    def mark_reported(self) -> None:
        """Remember that results and metrics were written."""
        entry = Entry(index=-1, row="", elapsed=self.elapsed, results=[])
        append_jsonl(self.path, [msgspec.structs.asdict(entry)])
        self._take(entry)

    def results(self, index: int, num_rollouts: int) -> list[Result]:
        """The finished rollouts of an example, in their order."""
        found = self._results.get(index, {})
        return [found[number] for number in range(num_rollouts) if number in found]

    def close(self, *, remove: bool = False) -> None:
        """Let go of the file; `remove` it when nobody needs to go on from here."""
        if remove or not self._results:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


def compute_digest(value: Any) -> str:
    """A short name of JSON-like data: equal for equal data."""
    return xxhash.xxh3_64(msgspec.json.encode(value, order="deterministic", enc_hook=str)).hexdigest()
