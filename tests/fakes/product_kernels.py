"""A part of the CPU kernels that compiles in a third of the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.kernels import native

FUNCTIONS = ("pack", "unpack", "linear")
NUMBERS = ("packed_size", "packed_inputs", "quantized_size", "max_rows_at_once", "has_threads", "enable_amx")


def compile_products_alone(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Products with packed weights are all that the library has when it is loaded the next time, below `folder`."""
    source = folder / "products.c"
    source.write_text(f'#include "{native.SOURCE.with_name("linear.h")}"\n')
    patch.setattr(native, "SOURCE", source)
    patch.setattr(native, "SIGNATURES", {name: native.SIGNATURES[name] for name in FUNCTIONS})
    patch.setattr(native, "NUMBERS", {name: native.NUMBERS[name] for name in NUMBERS})
    patch.setattr(native, "STRUCTS", {})
    patch.setattr(native, "FLAGS", ["-O0" if flag == "-O3" else flag for flag in native.FLAGS])
    patch.setenv("XDG_CACHE_HOME", str(folder))
