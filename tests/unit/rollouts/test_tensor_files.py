"""Files of tensors."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rollouts.training.tensor_files import save_tensors


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
