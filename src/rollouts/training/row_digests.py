"""Digests of rows and settings of any types, the same in every process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import xxhash

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""The part of an object's `repr` that differs between processes."""


def compute_digest(value: Any) -> str:
    """Digest of nested data of any types; objects count by their `repr`."""
    return xxhash.xxh3_64(describe(value).encode(errors="surrogatepass")).hexdigest()


def encode_row(row: Any) -> bytes:
    """A row for the fingerprint of prompts: JSON where that is possible, with the text of other objects."""
    try:
        return json.dumps(row, sort_keys=True, default=_as_text).encode()
    except TypeError:  # keys that JSON does not have, or that have no order
        return describe(row).encode(errors="surrogatepass")


def describe(value: Any) -> str:
    """Text of nested data, which does not depend on the order of keys and of sets, or on addresses of objects."""
    if isinstance(value, Mapping):
        return "{" + ",".join(sorted(f"{describe(key)}:{describe(item)}" for key, item in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ",".join(sorted(map(describe, value))) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(describe, value)) + "]"
    return repr(value) if isinstance(value, str) else ADDRESS.sub("", repr(value))


def _as_text(value: Any) -> str:
    return describe(value) if isinstance(value, set | frozenset) else ADDRESS.sub("", str(value))
