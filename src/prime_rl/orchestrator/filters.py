"""Group filters: online difficulty, library filters by name, or user functions."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from functools import partial

import rollouts.training.filters as library
from prime_rl.configuration.imports import import_function
from prime_rl.orchestrator.config import BufferConfig, FilterConfig
from rollouts.training.advantages import split_groups
from rollouts.training.filters import Filter
from rollouts.training.metrics import REWARD_DIGITS
from rollouts.training.rollout_gen.groups import DropReason, mean_reward
from rollouts.training.types import Sample, settle

ALIASES = {"zero_variance": "reward_nonzero_std"}


def build_group_filter(config: BufferConfig) -> Callable[[list[Sample]], Awaitable[str | None]]:
    """Build a function that returns the first reason to reject a scored group, or None to accept it.

    Filters see the last sample of each rollout; they may be async. With several seats, they see one seat at a time, and
    accept the group if they accept one of them. Reference groups, whose rewards are ignored, are accepted.
    """
    accepts = [(filter_config.name, build_filter(filter_config)) for filter_config in config.filters]

    async def reject_reason(samples: list[Sample]) -> str | None:
        if samples[0].reference_weight:
            return None
        if config.online_difficulty_filtering and (mean := round(mean_reward(samples), REWARD_DIGITS)) in (0.0, 1.0):
            return DropReason.EASY if mean else DropReason.HARD
        seats = split_groups(samples)
        for name, accept in accepts:
            if not any([await settle(accept([rollout[-1] for rollout in rollouts])) for rollouts in seats]):
                return name
        return None

    return reject_reason


def build_filter(config: FilterConfig) -> Filter:
    """A library filter, or the function at `module:function`, bound to its arguments; `ValueError` if unknown."""
    if ":" in config.name:
        function = import_function(config.name, "buffer.filters")
    else:
        name = ALIASES.get(config.name, config.name.removeprefix("check_"))
        if name not in list_filters():
            known = ", ".join(sorted([*list_filters(), *ALIASES]))
            raise ValueError(f"buffer.filters: {config.name!r} is not one of {known}, nor module:function")
        function = getattr(library, f"check_{name}")
    try:
        inspect.signature(function).bind([], **config.args)
    except TypeError as error:
        raise ValueError(f"buffer.filters: {config.name}: {error}") from error
    return partial(function, **config.args)


def list_filters() -> list[str]:
    """Names of the library's filters, without the prefix `check_`."""
    return [name.removeprefix("check_") for name in vars(library) if name.startswith("check_")]
