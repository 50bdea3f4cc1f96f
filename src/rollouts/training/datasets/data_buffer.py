"""Prompt buffer: deterministic prompt order over epochs, resumable."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollouts.training.row_digests import encode_row


class DataBuffer:
    """Returns prompts in order: epoch 0 as given, epoch e shuffled by `Random(seed + e)`.

    The order is a pure function of (source, seed, epoch): the source list is not modified, prompts are returned as
    copies, and 0 <= `sample_offset` < len(prompts), so that states are unique.
    """

    def __init__(self, prompts: Sequence[Any], epoch_id: int = 0, sample_offset: int = 0, seed: int = 42) -> None:
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            raise TypeError(f"prompts {prompts!r:.50} are a {type(prompts).__name__}: pass a list of prompts")
        self.prompts = prompts
        self.epoch_id = epoch_id
        self.sample_offset = sample_offset
        self.seed = seed
        self._order: tuple[int, list[int]] | None = None
        self._fingerprint: str | None = None

    @property
    def position(self) -> int:
        """Number of prompts returned since the beginning of epoch 0."""
        return self.epoch_id * len(self.prompts) + self.sample_offset

    def get_prompts(self, n: int) -> list[Any]:
        """The next `n` prompts; `n` may exceed the size of the dataset. Raises `ValueError` for n < 1."""
        if n < 1:
            raise ValueError(f"get_prompts({n}): ask for at least 1 prompt")
        start = self.position
        prompts = [self.prompt_at(position) for position in range(start, start + n)]
        self.epoch_id, self.sample_offset = divmod(start + n, len(self.prompts))
        return prompts

    def draw(self) -> tuple[int, Any]:
        """Position and content of the next prompt."""
        position = self.position
        return position, self.get_prompts(1)[0]

    def prompt_at(self, position: int) -> Any:
        """The prompt at any `position`, without moving the cursor."""
        return copy.deepcopy(self.prompts[self.index_at(position)])

    def index_at(self, position: int) -> int:
        """Index in the source of the prompt at `position`."""
        if not len(self.prompts):
            raise ValueError("the dataset is empty: a buffer needs at least one prompt")
        epoch, offset = divmod(position, len(self.prompts))
        return offset if epoch == 0 else self._permutation(epoch)[offset]

    def save_state(self) -> dict[str, Any]:
        """The state, serializable as JSON, with a fingerprint of the dataset."""
        return {
            "epoch_id": self.epoch_id,
            "sample_offset": self.sample_offset,
            "seed": self.seed,
            "num_prompts": len(self.prompts),
            "fingerprint": self.fingerprint,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore `state`. Raises `ValueError` if it belongs to other prompts."""
        if missing := {"epoch_id", "sample_offset", "seed"} - state.keys():
            raise ValueError(f"this is no state of a data buffer: it lacks {', '.join(sorted(missing))}")
        size, fingerprint = state.get("num_prompts", len(self.prompts)), state.get("fingerprint")
        if size != len(self.prompts) or fingerprint not in (None, self.fingerprint):
            raise ValueError(
                f"the saved state belongs to a dataset of {size} other prompts, this one has {len(self.prompts)}: "
                "resume with the same dataset and arguments"
            )
        self.epoch_id, self.sample_offset, self.seed = state["epoch_id"], state["sample_offset"], state["seed"]
        self._order = None

    @property
    def fingerprint(self) -> str:
        """Hash over the prompts in source order."""
        if self._fingerprint is None:
            digest = hashlib.blake2b(digest_size=16)
            for prompt in self.prompts:
                digest.update(encode_row(prompt) + b"\n")
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def _permutation(self, epoch: int) -> list[int]:
        if self._order is None or self._order[0] != epoch:
            order = list(range(len(self.prompts)))
            random.Random(self.seed + epoch).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]


def load_prompts_from_jsonl(path: Path | str, prompt_key: str = "prompt", limit: int | None = None) -> list[Any]:
    """The `prompt_key` of every row of a JSON lines file, at most `limit` rows; a row without the key is the prompt."""
    if limit is not None and limit < 0:
        raise ValueError(f"limit {limit} of prompts to read must not be negative")
    prompts: list[Any] = []
    with Path(path).open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(prompts) >= limit:
                break
            if line.strip():
                prompts.append(_prompt_of(line, prompt_key, f"{path}:{number}"))
    return prompts


def load_prompts_from_list(prompts: Sequence[Any]) -> list[Any]:
    """A copy of `prompts`."""
    return list(prompts)


def create_buffer_from_jsonl(
    path: Path | str, prompt_key: str = "prompt", limit: int | None = None, seed: int = 42
) -> DataBuffer:
    """A buffer over the prompts of a JSON lines file."""
    return DataBuffer(load_prompts_from_jsonl(path, prompt_key, limit), seed=seed)


def _prompt_of(line: str, prompt_key: str, where: str) -> Any:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    return row.get(prompt_key, row) if isinstance(row, dict) else row
