"""Prefix trees of token sequences: a beginning that sequences share, at any depth, is computed once.

In lexicographic order a sequence shares its longest beginning with the one before it, so one number per sequence, the
tokens that it shares with its predecessor, describes the whole tree:

    sequences     shared   own tokens
    5 9 7 3       0        5 9 7 3
    5 9 7 4 2     3        4 2
    5 9 8         2        8

In a causal decoder hidden states depend only on a token and its prefix. So only own tokens pass through the layers, and
an own token attends to its sequence: shared tokens, then own ones. The gradients of all its sequences add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from jaxtyping import Int
from torch import Tensor

from rollouts.training.numerics import MIN_TOKENS, pad_rows


@dataclass(frozen=True)
class PrefixTree:
    """The tree of a pack; its nodes are the own tokens of every sequence.

    first   index in the pack of each node, at least MIN_TOKENS (the first token is repeated)
    node    node of every token of the pack
    shared  tokens that each sequence shares with the one before
    """

    first: Int[Tensor, " nodes"]
    node: Int[Tensor, " tokens"]
    shared: list[int]


def order_by_prefix(sequences: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """Indices of the sequences in lexicographic order, and the tokens that each shares with the one before."""
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    shared = [_count_common(sequences[a], sequences[b]) for a, b in pairwise(order)]
    return order, [0, *shared][: len(order)]


def _count_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def build_prefix_tree(lengths: Sequence[int], shared: Sequence[int]) -> PrefixTree:
    """The tree of packed sequences that share `shared` tokens with the one before."""
    first: list[int] = []
    node: list[int] = []
    before = 0
    for start, length, common in zip(accumulate(lengths, initial=0), lengths, shared, strict=False):
        node += node[before : before + common]
        node += range(len(first), len(first) + length - common)
        first += range(start + common, start + length)
        before = start
    return PrefixTree(pad_rows(torch.tensor(first), MIN_TOKENS), torch.tensor(node), list(shared))
