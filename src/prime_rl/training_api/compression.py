"""Compressed request bodies: zstd, with the optional package `zstandard`."""

from __future__ import annotations

import importlib.util

ENCODING = "zstd"
MAX_WINDOW_BYTES = 2**23
"""Maximum memory of a decoder beside its output (RFC 8878 recommends to support this much)."""


def supports_zstd() -> bool:
    """Whether the package is installed: the client compresses only then."""
    return importlib.util.find_spec("zstandard") is not None


def read_size(body: bytes) -> int:
    """Size of a decompressed body, from its header; `ValueError` if it is not there."""
    import zstandard

    try:
        size = zstandard.frame_content_size(body)
    except zstandard.ZstdError as error:
        raise ValueError("the body is not a zstd frame") from error
    if size < 0:
        raise ValueError("the zstd frame of the body needs the size of its content")
    return int(size)


def decompress(body: bytes) -> bytes:
    """Decompress a body, to at most `read_size` bytes; `ValueError` for a damaged one."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        return bytes(decompressor.decompress(body, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise ValueError(f"the zstd frame of the body is damaged: {error}") from error
