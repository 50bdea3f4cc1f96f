"""Index over all rollouts of a run: columns and signatures in memory, rows on disk."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from prime_rl.monitor.full_text_index import TextIndex
from prime_rl.monitor.local_runs import EvalDir, LocalRun
from rollouts.training.metrics import AttemptSteps

KINDS = ("training", "evaluation")
SORTS = ("step", "reward", "advantage", "tokens")
PREVIEW = 160


class _Recorded(msgspec.Struct):
    """Key of a line of `trainer_logprobs.jsonl`."""

    step: int
    attempt: int = 0
    group_index: int | None = None
    index: int | None = None
    trainer_logprobs: msgspec.Raw = msgspec.Raw(b"")


class _Line(msgspec.Struct):
    """Indexed fields of a line of `samples.jsonl`; long lists are not parsed."""

    step: int = 0
    attempt: int = 0
    env: str | None = None
    group_index: int | None = None
    index: int | None = None
    prompt: Any = ""
    completion: Any = ""
    reward: float | None = None
    advantage: float | None = None
    status: str | None = None
    error: str | None = None
    tokens: msgspec.Raw = msgspec.Raw(b"")
    teacher_logprobs: msgspec.Raw = msgspec.Raw(b"")

    @property
    def is_scored(self) -> bool:
        """Whether a teacher scored the tokens."""
        return len(bytes(self.teacher_logprobs)) > 2 and bytes(self.teacher_logprobs) != b"null"

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including the prompt."""
        raw = bytes(self.tokens)
        return raw.count(b",") + 1 if len(raw) > 2 else 0


class _Result(msgspec.Struct):
    """Indexed fields of a line of an evaluation's `results.jsonl`."""

    example_id: int = 0
    rollout_idx: int = 0
    prompt: Any = ""
    completion: Any = ""
    reward: float | None = None
    completion_len: int | None = None
    is_truncated: bool = False
    error: str | None = None

    def to_line(self, place: EvalDir) -> _Line:
        """Convert to a line of samples; an example is a group."""
        return _Line(
            step=place.step or 0,
            env=place.env,
            group_index=self.example_id,
            index=self.rollout_idx,
            prompt=self.prompt,
            completion=self.completion,
            reward=self.reward,
            status="failed" if self.reward is None else "truncated" if self.is_truncated else "completed",
            error=self.error,
        )


@dataclass(frozen=True)
class Query:
    """Filter and order of rollouts. None: no condition; `text` matches prompt, completion or error."""

    text: str = ""
    step: int | None = None
    env: str | None = None
    status: str | None = None
    group: int | None = None
    kind: str | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    sort: str = "step"
    descending: bool = True


class RecordedLogprobs:
    """Recorded trainer log-probs by step, group, rollout and number of tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._places: dict[tuple[int, int | None, int | None, int], dict[int, list[tuple[int, int]]]] = {}
        self._decode = msgspec.json.Decoder(_Recorded).decode

    def grow(self) -> bool:
        """Index appended lines; returns whether there were any."""
        begun = self._read
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            file.seek(begun)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                start, self._read = self._read, self._read + len(line)
                try:
                    row = self._decode(line)
                except (msgspec.DecodeError, RecursionError):
                    continue
                key = (row.step, row.group_index, row.index, bytes(row.trainer_logprobs).count(b",") + 1)
                self._places.setdefault(key, {}).setdefault(row.attempt, []).append((start, self._read))
        return self._read > begun

    def of(self, row: dict[str, Any]) -> list[float] | None:
        """The log-probs of a sample in the last attempt at its step; None without a unique match."""
        key = (row.get("step", 0), row.get("group_index"), row.get("index"), len(row.get("tokens") or ()))
        attempts = self._places.get(key, {})
        places = attempts[max(attempts)] if attempts else []
        if len(places) != 1:
            return None
        [(start, end)] = places
        with self.path.open("rb") as file:
            file.seek(start)
            found: list[float] = msgspec.json.decode(file.read(end - start))["trainer_logprobs"]
        return found


class _Seen:
    """Statistics of the rollouts of one source."""

    def __init__(self) -> None:
        self.count = 0
        self.envs: set[str] = set()
        self.statuses: set[str] = set()
        self.steps: set[int] = set()

    def add(self, step: int, env: str | None, status: str | None) -> None:
        """Add one rollout."""
        self.count += 1
        self.envs.add(env or "none")
        self.statuses.add(status or "none")
        self.steps.add(step)


class RolloutIndex:
    """A growing index over the training and evaluation rollouts of a run.

    Methods may be called from any thread.
    """

    def __init__(self, run: LocalRun) -> None:
        self.run = run
        self.recorded = RecordedLogprobs(run.files.trainer_logprobs)
        self.envs: list[str] = []
        self.statuses: list[str] = []
        self._read = 0
        self._places: list[EvalDir | None] = [None]  # source of a rollout: 0 is training
        self._seen = [_Seen()]  # by source
        self._replaced: set[int] = set()
        self._attempts = AttemptSteps()
        self._starts, self._ends, self._place, self._attempt = array("q"), array("q"), array("l"), array("l")
        self._steps, self._groups, self._tokens = array("q"), array("q"), array("q")
        self._env, self._status = array("h"), array("h")
        self._rewards, self._advantages = array("d"), array("d")
        self._texts = TextIndex()
        self._lock = threading.Lock()
        self._decode = msgspec.json.Decoder(_Line).decode
        self._decode_result = msgspec.json.Decoder(_Result).decode

    def __len__(self) -> int:
        return len(self._starts)

    def grow(self, max_bytes: int = 1 << 62) -> bool:
        """Index new lines, up to about `max_bytes` of training; returns whether there were any."""
        recorded, evaluated = self.recorded.grow(), self._grow_evaluations()
        if not self.run.samples_path.exists():
            return recorded or evaluated
        with self.run.samples_path.open("rb") as file:
            file.seek(self._read)
            begun = self._read
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    break
                start, self._read = self._read, self._read + len(line)
                with self._lock:
                    self._take(line, start, 0)
                if self._read - begun > max_bytes:
                    break
        return recorded or evaluated or self._read > begun

    def select(self, query: Query) -> NDArray[np.int64]:
        """Numbers of the matching rollouts, in the requested order."""
        with self._lock:
            fits = self._of_kind(query.kind)
            for wanted, column in ((query.step, self._steps), (query.group, self._groups)):
                if wanted is not None:
                    fits &= np.array(column) == wanted
            for name, names, codes in ((query.env, self.envs, self._env), (query.status, self.statuses, self._status)):
                if name is not None:
                    fits &= np.array(codes) == (names.index(name) if name in names else -1)
            rewards = np.array(self._rewards)
            if query.min_reward is not None:
                fits &= rewards >= query.min_reward
            if query.max_reward is not None:
                fits &= rewards <= query.max_reward
            if query.text:
                fits &= self._texts.search(query.text)
            found = np.flatnonzero(fits)
            columns = {"step": self._steps, "advantage": self._advantages, "tokens": self._tokens}
            keys = rewards[found] if query.sort == "reward" else np.array(columns[query.sort])[found]
        ascending = -keys if query.descending else keys  # NaN sorts last either way
        order: NDArray[np.int64] = found[np.argsort(ascending, kind="stable")]
        return order

    def groups(self) -> list[list[int]]:
        """Rollouts by group, in the order the groups appear."""
        with self._lock:
            found: dict[tuple[int, int, int], list[int]] = {}
            for number in np.flatnonzero(self._of_kind(None)).tolist():
                place, step, group = self._place[number], self._steps[number], self._groups[number]
                found.setdefault((place, step, group if group >= 0 else -number - 1), []).append(number)
        return list(found.values())

    def row(self, number: int) -> dict[str, Any]:
        """The full line of a rollout, with recorded trainer log-probs."""
        place = self._places[self._place[number]]
        row: dict[str, Any] = msgspec.json.decode(self._lines([number])[0])
        if place is not None:
            line = self._decode_result(msgspec.json.encode(row)).to_line(place)
            shared = ("step", "env", "group_index", "index", "status")
            return {**row, **{name: getattr(line, name) for name in shared}}
        if "trainer_logprobs" not in row and (recorded := self.recorded.of(row)) is not None:
            row["trainer_logprobs"] = recorded
        return row

    def brief(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """List entries of rollouts."""
        rows = []
        for number, data in zip(numbers, self._lines(numbers), strict=True):
            line, place = self._read_line(data, self._place[number]), self._place[number]
            asked, said = _last_words(line.prompt), plain_text(line.completion)
            rows.append(
                {
                    "id": number,
                    "kind": KINDS[place > 0],
                    "place": place,
                    "step": line.step,
                    "env": line.env,
                    "group": line.group_index,
                    "index": line.index,
                    "reward": line.reward,
                    "advantage": line.advantage,
                    "status": line.status,
                    "tokens": self._tokens[number],
                    "scored": line.is_scored,
                    "asked": asked[:PREVIEW],
                    "said": said[:PREVIEW],
                }
            )
        return rows

    def siblings(self, number: int) -> list[int]:
        """The rollouts of the same group, including this one."""
        with self._lock:
            if self._groups[number] < 0:
                return [number]
            columns = (self._place, self._steps, self._groups, self._attempt)
            same = [np.array(column) == column[number] for column in columns]
        return [int(n) for n in np.flatnonzero(np.logical_and.reduce(same))]

    def facts(self) -> dict[str, Any]:
        """Values available to filters, over all rollouts and per kind."""
        with self._lock:
            parts = [(n, seen) for n, seen in enumerate(self._seen) if n not in self._replaced]
            kinds = {kind: _join([seen for n, seen in parts if KINDS[n > 0] == kind]) for kind in KINDS}
            return {**_join([seen for _, seen in parts]), "kinds": {k: f for k, f in kinds.items() if f["count"]}}

    def _of_kind(self, kind: str | None) -> NDArray[np.bool_]:
        """Mask of valid rollouts of this kind, without abandoned attempts and repeated evaluations."""
        places = np.array(self._place)
        fits = np.ones(len(places), dtype=bool) if kind is None else (places > 0) == (kind == "evaluation")
        if len(numbers := np.unique(np.array(self._attempt))) > 1:
            steps, attempts = np.array(self._steps), np.array(self._attempt)
            for number in numbers.tolist():
                limit = self._attempts.first_abandoned(None, number)
                fits &= (places > 0) | (attempts != number) | (steps < limit)
        return fits & ~np.isin(places, list(self._replaced)) if self._replaced else fits

    def _grow_evaluations(self) -> bool:
        """Index new and rewritten evaluations."""
        fresh = [place for place in self.run.evaluations() if place not in self._places and place.results.exists()]
        for place in fresh:
            start = 0
            with self._lock, place.results.open("rb") as file:
                self._replaced |= {n for n, old in enumerate(self._places) if old and old.path == place.path}
                self._places.append(place)
                self._seen.append(_Seen())
                for line in file:
                    self._take(line, start, len(self._places) - 1)
                    start += len(line)
        return bool(fresh)

    def _read_line(self, data: bytes, number: int) -> _Line:
        place = self._places[number]
        return self._decode(data) if place is None else self._decode_result(data).to_line(place)

    def _take(self, data: bytes, start: int, place: int) -> None:
        try:
            line = self._read_line(data, place)
        except (msgspec.DecodeError, RecursionError):
            return  # skip an invalid line only
        # A repeated evaluation replaces its directory.
        abandons = place == 0 and self._attempts.add(None, line.attempt, line.step)
        self._ends.append(start + len(data))
        self._attempt.append(line.attempt)
        self._place.append(place)
        self._steps.append(line.step)
        self._groups.append(-1 if line.group_index is None else line.group_index)
        self._tokens.append(line.num_tokens if place == 0 else self._decode_result(data).completion_len or 0)
        self._env.append(_code(self.envs, line.env))
        self._status.append(_code(self.statuses, line.status))
        self._rewards.append(float("nan") if line.reward is None else line.reward)
        self._advantages.append(float("nan") if line.advantage is None else line.advantage)
        self._texts.add("\n".join(map(plain_text, (line.prompt, line.completion, line.error or ""))))
        self._starts.append(start)
        self._seen[place].add(line.step, line.env, line.status)
        if abandons:
            self._count_training()

    def _count_training(self) -> None:
        """Recompute the statistics of training rollouts after an attempt was abandoned."""
        self._seen[0] = _Seen()
        for number in np.flatnonzero(self._of_kind("training")).tolist():
            env, status = self.envs[self._env[number]], self.statuses[self._status[number]]
            self._seen[0].add(self._steps[number], env, status)

    def _lines(self, numbers: Sequence[int]) -> list[bytes]:
        """The lines of these rollouts; opens each file once."""
        found: dict[int, bytes] = {}
        for place in {self._place[number] for number in numbers}:
            folder = self._places[place]
            with (self.run.samples_path if folder is None else folder.results).open("rb") as file:
                for number in (n for n in numbers if self._place[n] == place):
                    file.seek(self._starts[number])
                    found[number] = file.read(self._ends[number] - self._starts[number])
        return [found[number] for number in numbers]


def _join(parts: Sequence[_Seen]) -> dict[str, Any]:
    return {
        "count": sum(seen.count for seen in parts),
        "envs": sorted(set().union(*(seen.envs for seen in parts))),
        "statuses": sorted(set().union(*(seen.statuses for seen in parts))),
        "steps": sorted(set().union(*(seen.steps for seen in parts))),
    }


def _last_words(prompt: Any) -> str:
    """The last message of the prompt; earlier ones are often shared by all prompts."""
    return plain_text(prompt[-1:] if isinstance(prompt, list) else prompt)


def plain_text(value: Any) -> str:
    """Plain text of a prompt or completion: a string, or messages."""
    if isinstance(value, list):
        return "\n".join(plain_text(part.get("content", part.get("text"))) for part in value if isinstance(part, dict))
    return "" if value is None else str(value)


def _code(names: list[str], name: str | None) -> int:
    name = name or "none"
    if name not in names:
        names.append(name)
    return names.index(name)
