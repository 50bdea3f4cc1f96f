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


def sort_set(items: set[Any] | frozenset[Any]) -> list[Any]:
    """The items in an order that is the same in every process: that of a set of numbers, else by their text.

    Hashes of numbers are the same in every process, and a set that is built in ascending order has one order. Earlier
    versions sent and compared sets of numbers in it.
    """
    return list(set(sorted(items))) if _has_numbers(items) else sorted(items, key=describe)


def _as_text(value: Any) -> str:
    if isinstance(value, set | frozenset) and not _has_numbers(value):
        return describe(value)
    # Sets of numbers as in earlier versions: their order does not depend on the process.
    return str(type(value)(sorted(value))) if type(value) in (set, frozenset) else ADDRESS.sub("", str(value))


def _has_numbers(items: set[Any] | frozenset[Any]) -> bool:
    return all(isinstance(item, int | float) for item in items)
