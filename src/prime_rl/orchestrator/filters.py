"""Which groups are trained on: filters by name, online difficulty, or a function of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial

import rollouts.training.filters as library
from prime_rl.orchestrator.buffer import load_function
from prime_rl.orchestrator.config import BufferConfig, FilterConfig
from rollouts.training.filters import Filter
from rollouts.training.rollout_gen.groups import mean_reward
from rollouts.training.types import Sample

ALIASES = {"zero_variance": "reward_nonzero_std"}


def build_judge(config: BufferConfig) -> Callable[[list[Sample]], str | None]:
    """A function that names the first reason to refuse a scored group, or None for a group to train on."""
    accepts = [(filter_config.name, build_filter(filter_config)) for filter_config in config.filters]

    def judge(samples: list[Sample]) -> str | None:
        if config.online_difficulty_filtering and (mean := mean_reward(samples)) in (0.0, 1.0):
            return "easy" if mean else "hard"
        rollouts = one_per_rollout(samples)
        return next((name for name, accept in accepts if not accept(rollouts)), None)

    return judge


def build_filter(config: FilterConfig) -> Filter:
    """The filter of the library, or at `module:function`, with its arguments; `ValueError` for an unknown one."""
    if ":" in config.name:
        found = load_function(config.name, "buffer.filters")
    else:
        name = ALIASES.get(config.name, config.name.removeprefix("check_"))
        if name not in names_of_filters():
            known = ", ".join(sorted([*names_of_filters(), *ALIASES]))
            raise ValueError(f"buffer.filters: {config.name!r} is not one of {known}, nor module:function")
        found = getattr(library, f"check_{name}")
    try:
        inspect.signature(found).bind([], **config.args)
    except TypeError as error:
        raise ValueError(f"buffer.filters: {config.name}: {error}") from error
    return partial(found, **config.args)


def names_of_filters() -> list[str]:
    """Names of the library's filters, without their common beginning."""
    return [name.removeprefix("check_") for name in vars(library) if name.startswith("check_")]


def one_per_rollout(samples: Sequence[Sample]) -> list[Sample]:
    """The last sample of each rollout: a rollout of several samples has one reward."""
    return list({sample.index: sample for sample in samples}.values())
