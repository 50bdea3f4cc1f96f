"""Files of tensors."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rollouts.training.manifests import describe_tensors, digest_tensor
from rollouts.training.tensor_files import PIECE, MappedTensors, copy_tensor, save_tensors


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_saved_tensors_have_the_mode_of_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        save_tensors({"a": torch.ones(2)}, tmp_path / "x.safetensors", {"format": "pt"})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.safetensors").stat().st_mode) == mode
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"} and torch.equal(file.get_tensor("a"), torch.ones(2))


def read_mapped_mb() -> float:
    """Memory of this process that is mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssFile")) / 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mapped_tensors_leave_the_memory_when_the_next_is_read(tmp_path: Path) -> None:
    written = {name: torch.full((2**21 + 3,), float(i)) for i, name in enumerate("abcd")}  # 8 MB, not whole pages
    save_tensors(written, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in written}
    mapped, before = MappedTensors(tensors), read_mapped_mb()
    for _ in range(2):
        for name, tensor in written.items():
            assert torch.equal(mapped[name], tensor)
            assert read_mapped_mb() - before < 12
    assert all(torch.equal(tensors[name], tensor) for name, tensor in written.items())
    assert read_mapped_mb() - before > 28, "all at once"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_mapped_tensor_is_digested_and_copied_in_pieces(tmp_path: Path) -> None:
    written = torch.arange(3 * PIECE + 5, dtype=torch.float32)  # 48 MB in pieces of 16
    save_tensors({"a": written}, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        mapped = MappedTensors({"a": file.get_tensor("a")})
    before, most = read_mapped_mb(), 0.0
    for piece in mapped.pieces("a"):
        assert piece.sum() != 0
        most = max(most, read_mapped_mb() - before)
    assert most < 24
    assert describe_tensors(mapped)["a"].digest == digest_tensor(written)
    target = torch.empty_like(written)
    copy_tensor(mapped, "a", target)
    assert torch.equal(target, written)
    assert read_mapped_mb() - before < 8
    turned = torch.empty(2, 3).t()  # not contiguous
    copy_tensor(MappedTensors({"a": written[:6].view(3, 2)}), "a", turned)
    assert torch.equal(turned, written[:6].view(3, 2))
