"""Delta weight sync: a version as the elements that changed since the version before it.

    weights/step_A        the full weights: the first version, every `anchor_interval`-th, and those that are kept
    broadcasts/step_N     manifest, canary, and `delta.msgpack`: the version it starts from and the changed elements

A reader starts from the weights that it holds, or else from the newest full ones, and applies the deltas up to N in
order. Only the digests of version N decide whether the result is version N.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from prime_rl.transport.canary import Canary, write_canary
from prime_rl.transport.weights import verify_tensors
from rollouts.training.manifests import Manifest, build_manifest, find_dtype, read_manifest, write_manifest
from rollouts.training.steps import is_complete, parse_step, publish_step, step_path

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

SCHEMA = 1
DELTA_FILE = "delta.msgpack"
GAP_BYTES = 4
"""Width of the distance between two changed elements."""
Held: TypeAlias = "tuple[int, Mapping[str, Tensor]]"
"""Version and tensors of an engine, possibly in another dtype than the published ones."""


class Delta(msgspec.Struct, frozen=True):
    """Changes from version `base` to `step`, by tensor (see `encode_changes`); `base` None: no earlier version."""

    schema: int
    step: int
    base: int | None
    changes: dict[str, bytes]


def encode_changes(new: Tensor, old: Tensor) -> bytes:
    """The elements of `new` that differ from `old`, compressed; empty if there are none.

    Distances between their positions, and differences of their bits as integers (small: most weights move to a
    neighboring value), in planes of bytes of one significance.
    """
    import numpy as np

    ours, theirs = _view_words(new), _view_words(old)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.size < 2 ** (8 * GAP_BYTES)
    at = np.flatnonzero(ours != theirs)
    gaps = np.diff(at, prepend=-1).astype(f"u{GAP_BYTES}")
    if not at.size:
        return b""
    packer = zlib.compressobj(1, strategy=zlib.Z_RLE)  # smaller and faster than with a search for repetitions
    return packer.compress(_split_planes(gaps) + _split_planes(ours[at] - theirs[at])) + packer.flush()


def apply_changes(tensor: Tensor, changes: bytes) -> None:
    """Turn `tensor` (contiguous, on the CPU) into the new one in place; `ValueError` for changes of no such tensor."""
    import numpy as np

    words = _view_words(tensor)
    width = GAP_BYTES + words.itemsize
    try:
        data = zlib.decompressobj().decompress(changes, words.size * width + 1)
    except zlib.error as error:
        raise ValueError(f"changes cannot be decompressed: {error}") from error
    count, rest = divmod(len(data), width)
    if rest or count > words.size:
        raise ValueError(f"changes have {len(data)} bytes for {words.size} elements")
    gaps = _join_planes(data[: count * GAP_BYTES], np.dtype(f"u{GAP_BYTES}"))
    at = np.cumsum(gaps, dtype=np.int64) - 1
    if count and at[-1] >= words.size:
        raise ValueError(f"changes reach element {at[-1]} of {words.size}")
    words[at] += _join_planes(data[count * GAP_BYTES :], words.dtype)


def _view_words(tensor: Tensor) -> np.ndarray:
    """The bits of a contiguous tensor as unsigned integers, whose sums and differences wrap around."""
    import torch

    flat = tensor.detach().view(-1)
    return flat.view(torch.uint8).numpy().view(f"u{flat.element_size()}")


def _split_planes(values: np.ndarray) -> bytes:
    import numpy as np

    return values.view(np.uint8).reshape(-1, values.itemsize).T.tobytes()


def _join_planes(data: bytes, dtype: np.dtype) -> np.ndarray:
    import numpy as np

    return np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1).T.copy().reshape(-1).view(dtype)


class DeltaPublisher:
    """Publishes versions below `root` as changes to the version before, of which it holds a copy."""

    def __init__(self, root: Path, anchor_interval: int) -> None:
        self._root, self._anchor_interval = root, anchor_interval
        self._step: int | None = None
        self._anchor = 0
        self._tensors: dict[str, Tensor] = {}

    def needs_anchor(self, step: int) -> bool:
        """Whether the full weights of this version must be published first."""
        return self._step is None or step >= self._anchor + self._anchor_interval

    def publish(self, step: int, tensors: Mapping[str, Tensor], canary: Canary, *, is_anchor: bool) -> Path:
        """Publish `root/step_N`; `is_anchor`: its full weights have been published."""
        ours = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
        changes = {name: encode_changes(ours[name], old) for name, old in self._tensors.items()}
        delta = Delta(SCHEMA, step, self._step, {name: change for name, change in changes.items() if change})

        def write(directory: Path) -> None:
            (directory / DELTA_FILE).write_bytes(msgspec.msgpack.encode(delta))
            write_canary(directory, canary)
            write_manifest(directory, build_manifest(step, ours))

        path = publish_step(self._root, step, write)
        for name, tensor in ours.items():
            if name in self._tensors:
                self._tensors[name].copy_(tensor)
            else:
                self._tensors[name] = tensor.clone()
        self._step, self._anchor = step, step if is_anchor else self._anchor
        return path


def is_delta(directory: Path) -> bool:
    """Whether a published directory contains a delta instead of a model."""
    return (Path(directory) / DELTA_FILE).is_file()


def read_delta(directory: Path) -> Delta:
    """The delta of a published directory; `ValueError` if it is missing, damaged or of another version or schema."""
    path = Path(directory) / DELTA_FILE
    if not is_complete(directory):
        raise ValueError(f"{directory} does not exist or is incomplete")
    try:
        delta = msgspec.msgpack.decode(path.read_bytes(), type=Delta)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    step = parse_step(Path(directory).name)
    if delta.schema != SCHEMA or delta.step != step or (delta.base is not None and delta.base >= delta.step):
        raise ValueError(f"{path} is no delta of schema {SCHEMA} to version {step}")
    return delta


def read_version(
    directory: Path, held: Held | None, full_dir: Path, read_full: Callable[[Path], dict[str, Tensor]]
) -> tuple[dict[str, Tensor], int]:
    """Build the version of a published delta from `held`, or else from full weights below `full_dir`; verified.

    Returns tensors and version. `ValueError` with all reasons if no start leads to the digests of the manifest.
    """
    manifest, problems = read_manifest(directory), list[str]()
    if manifest.step != parse_step(Path(directory).name):
        raise ValueError(f"{directory} has the manifest of version {manifest.step}")

    def find_held(step: int) -> dict[str, Tensor] | None:
        return _convert(held[1], manifest) if held is not None and held[0] == step else None

    def find_full(step: int) -> dict[str, Tensor] | None:
        path = step_path(full_dir, step)
        return {name: tensor.clone() for name, tensor in read_full(path).items()} if is_complete(path) else None

    for find_start in (find_held, find_full):
        step: int | None = manifest.step
        deltas: list[Delta] = []
        while step is not None:
            try:
                if (tensors := find_start(step)) is not None:
                    _apply(deltas, tensors)
                    verify_tensors(tensors, manifest)
                    return tensors, manifest.step
            except (ValueError, OSError) as error:
                problems.append(f"from version {step}: {error}")
            try:
                deltas.insert(0, read_delta(step_path(Path(directory).parent, step)))
            except ValueError as error:
                problems.append(str(error))
                break
            step = deltas[0].base
    raise ValueError(f"version {manifest.step} cannot be built: {'; '.join(problems) or f'no weights in {full_dir}'}")


def _convert(tensors: Mapping[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
    """Copies of an engine's tensors in the dtypes of the manifest, which is exact if the engine's are wider."""
    dtypes = {name: find_dtype(entry.dtype) for name, entry in manifest.tensors.items() if name in tensors}
    return {n: tensors[n].detach().to("cpu", dtype, copy=True).contiguous() for n, dtype in dtypes.items()}


def _apply(deltas: Sequence[Delta], tensors: dict[str, Tensor]) -> None:
    """Apply deltas in order and in place."""
    for delta in deltas:
        for name, change in delta.changes.items():
            if name not in tensors:
                raise ValueError(f"there is no tensor {name}")
            apply_changes(tensors[name], change)
