"""From config sections to environments that run, and to the arguments of a request."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollouts.training.environments import Environment, load_environment

if TYPE_CHECKING:
    from prime_rl.utils.config import EnvConfig, SamplingConfig


def load_environments(configs: Sequence[EnvConfig]) -> dict[str, Environment]:
    """Name in metrics -> environment. Call it in the main thread, before signal handlers of your own are set."""
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")  # read when datasets is imported
    environments = {config.name or config.id: load_environment(config.id, config.args) for config in configs}
    # Importing verifiers gives its logger a handler of its own; its lines belong among ours.
    library = logging.getLogger("verifiers")
    library.handlers.clear()
    library.propagate = True
    library.setLevel(logging.WARNING)
    return environments


def build_sampling_args(sampling: SamplingConfig, seed: int | None = None) -> dict[str, Any]:
    """Arguments of one request; always asks for token ids and log-probs. `seed` is that of this one sample."""
    args: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "seed": seed,
        "stop": list(sampling.stop) or None,
        "logprobs": True,
        "extra_body": {
            "return_token_ids": True,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "min_tokens": sampling.min_tokens,
            "repetition_penalty": sampling.repetition_penalty,
            **sampling.extra_body,
        },
    }
    return {name: value for name, value in args.items() if value is not None}
