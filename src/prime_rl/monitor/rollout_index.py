"""All rollouts of a run, found quickly: columns and search text in memory, the rows themselves stay on disk."""

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

from prime_rl.utils.monitor import TRAINER_LOGPROBS_FILE

SORTS = ("step", "reward", "advantage", "tokens")
PREVIEW = 160


class _Recorded(msgspec.Struct):
    """What is needed of a line of `trainer_logprobs.jsonl` to find it again."""

    step: int
    group_index: int | None = None
    index: int | None = None
    trainer_logprobs: msgspec.Raw = msgspec.Raw(b"")


class _Line(msgspec.Struct):
    """What the index needs of a line of `samples.jsonl`; the long lists are not even parsed."""

    step: int = 0
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


@dataclass(frozen=True)
class Query:
    """Which rollouts, in which order. None leaves a condition out; `text` may stand in prompt, completion or error."""

    text: str = ""
    step: int | None = None
    env: str | None = None
    status: str | None = None
    group: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    sort: str = "step"
    descending: bool = True


class RecordedLogprobs:
    """Log-probs that the trainer recorded, found by step, group, rollout and number of tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._places: dict[tuple[int, int | None, int | None, int], list[tuple[int, int]]] = {}
        self._decode = msgspec.json.Decoder(_Recorded).decode

    def grow(self) -> bool:
        """Take in what was appended; returns whether there was anything."""
        begun = self._read
        if not self.path.exists():
            return False
        with self.path.open("rb") as file:
            file.seek(begun)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                start, self._read = self._read, self._read + len(line)
                row = self._decode(line)
                key = (row.step, row.group_index, row.index, bytes(row.trainer_logprobs).count(b",") + 1)
                self._places.setdefault(key, []).append((start, self._read))
        return self._read > begun

    def of(self, row: dict[str, Any]) -> list[float] | None:
        """The log-probs of a sample; None where none were recorded, or where several would fit."""
        key = (row.get("step", 0), row.get("group_index"), row.get("index"), len(row.get("tokens") or ()))
        places = self._places.get(key, [])
        if len(places) != 1:
            return None
        [(start, end)] = places
        with self.path.open("rb") as file:
            file.seek(start)
            found: list[float] = msgspec.json.decode(file.read(end - start))["trainer_logprobs"]
        return found


class RolloutIndex:
    """An index over `samples.jsonl` that grows with it. Methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.recorded = RecordedLogprobs(path.with_name(TRAINER_LOGPROBS_FILE))
        self.envs: list[str] = []
        self.statuses: list[str] = []
        self._read = 0
        self._starts, self._ends = array("q"), array("q")
        self._steps, self._groups, self._tokens = array("q"), array("q"), array("q")
        self._env, self._status = array("h"), array("h")
        self._rewards, self._advantages = array("d"), array("d")
        self._text, self._text_starts = bytearray(), array("q")
        self._lock = threading.Lock()
        self._decode = msgspec.json.Decoder(_Line).decode

    def __len__(self) -> int:
        return len(self._starts)

    def grow(self, max_bytes: int = 1 << 62) -> bool:
        """Take in what was appended to the file, up to about `max_bytes`; returns whether there was anything."""
        recorded = self.recorded.grow()
        if not self.path.exists():
            return recorded
        with self.path.open("rb") as file:
            file.seek(self._read)
            begun = self._read
            for line in file:
                if not line.endswith(b"\n"):  # still being written
                    break
                with self._lock:
                    self._take(line)
                if self._read - begun > max_bytes:
                    break
        return recorded or self._read > begun

    def select(self, query: Query) -> NDArray[np.int64]:
        """Numbers of the rollouts that fit, in the order that is asked for."""
        with self._lock:
            n = len(self)
            fits = np.ones(n, dtype=bool)
            for wanted, column in ((query.step, self._steps), (query.group, self._groups)):
                if wanted is not None:
                    fits &= np.array(column)[:n] == wanted
            for name, names, codes in ((query.env, self.envs, self._env), (query.status, self.statuses, self._status)):
                if name is not None:
                    fits &= np.array(codes)[:n] == (names.index(name) if name in names else -1)
            rewards = np.array(self._rewards)
            if query.min_reward is not None:
                fits &= rewards >= query.min_reward
            if query.max_reward is not None:
                fits &= rewards <= query.max_reward
            if query.text:
                fits &= self._search(query.text)
            found = np.flatnonzero(fits)
            keys = {
                "step": np.array(self._steps),
                "reward": rewards,
                "advantage": np.array(self._advantages),
                "tokens": np.array(self._tokens),
            }[query.sort][found]
        ascending = -keys if query.descending else keys  # NaN sorts last either way
        order: NDArray[np.int64] = found[np.argsort(ascending, kind="stable")]
        return order

    def groups(self) -> list[list[int]]:
        """Rollouts by group, in the order the groups appear."""
        with self._lock:
            found: dict[tuple[int, int], list[int]] = {}
            for number, key in enumerate(zip(self._steps, self._groups, strict=True)):
                found.setdefault(key if key[1] >= 0 else (key[0], -number - 1), []).append(number)
        return list(found.values())

    def row(self, number: int) -> dict[str, Any]:
        """The whole line of a rollout, with the trainer's log-probs where they were recorded."""
        with self._lock:
            start, end = self._starts[number], self._ends[number]
        with self.path.open("rb") as file:
            file.seek(start)
            row: dict[str, Any] = msgspec.json.decode(file.read(end - start))
        if "trainer_logprobs" not in row and (recorded := self.recorded.of(row)) is not None:
            row["trainer_logprobs"] = recorded
        return row

    def brief(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """What a list shows of rollouts."""
        return [brief_row(int(number), self.row(int(number))) for number in numbers]

    def facts(self) -> dict[str, Any]:
        """What filters can choose from."""
        with self._lock:
            steps = sorted(set(self._steps))
            return {"count": len(self), "envs": list(self.envs), "statuses": list(self.statuses), "steps": steps}

    def _take(self, line: bytes) -> None:
        start, self._read = self._read, self._read + len(line)
        try:
            row = self._decode(line)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return  # a line that is no sample hides no other
        self._starts.append(start)
        self._ends.append(start + len(line))
        self._steps.append(row.step)
        self._groups.append(-1 if row.group_index is None else row.group_index)
        raw = bytes(row.tokens)
        self._tokens.append(raw.count(b",") + 1 if len(raw) > 2 else 0)
        self._env.append(_code(self.envs, row.env))
        self._status.append(_code(self.statuses, row.status))
        self._rewards.append(float("nan") if row.reward is None else row.reward)
        self._advantages.append(float("nan") if row.advantage is None else row.advantage)
        self._text_starts.append(len(self._text))
        words = "\n".join(map(plain_text, (row.prompt, row.completion, row.error or "")))
        self._text += words.lower().encode() + b"\0"

    def _search(self, text: str) -> NDArray[np.bool_]:
        """Rollouts that hold the text, upper and lower case alike; each is looked at once."""
        needle, starts = text.lower().encode(), np.array(self._text_starts)
        fits, at = np.zeros(len(starts), dtype=bool), self._text.find(needle)
        while at >= 0:
            number = int(np.searchsorted(starts, at, side="right")) - 1
            fits[number] = True
            at = self._text.find(needle, int(starts[number + 1])) if number + 1 < len(starts) else -1
        return fits


def brief_row(number: int, row: dict[str, Any]) -> dict[str, Any]:
    """The line of a list for one rollout."""
    asked = plain_text(row.get("prompt"))
    said = plain_text(row.get("completion"))
    return {
        "id": number,
        "step": row.get("step", 0),
        "env": row.get("env"),
        "group": row.get("group_index"),
        "index": row.get("index"),
        "reward": row.get("reward"),
        "advantage": row.get("advantage"),
        "status": row.get("status"),
        "tokens": len(row.get("tokens") or ()),
        "asked": asked[-PREVIEW:] if len(asked) > PREVIEW else asked,
        "said": said[:PREVIEW],
    }


def plain_text(value: Any) -> str:
    """The words of a prompt or completion: a string, or messages."""
    if isinstance(value, list):
        return "\n".join(plain_text(part.get("content", part.get("text"))) for part in value if isinstance(part, dict))
    return "" if value is None else str(value)


def _code(names: list[str], name: str | None) -> int:
    name = name or "none"
    if name not in names:
        names.append(name)
    return names.index(name)
