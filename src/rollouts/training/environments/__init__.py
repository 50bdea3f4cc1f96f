"""Environments: protocol, lookup by id, and adapters for plain Python and `verifiers` environments."""

from __future__ import annotations

from rollouts.training.environments.loading import load_environment
from rollouts.training.environments.plain import PlainEnvironment
from rollouts.training.environments.protocol import Environment, Row
from rollouts.training.environments.resolve import check_environment, check_verifiers, find_environment, find_parameters
from rollouts.training.environments.seats import Frozen, Game, SeatEnvironment
from rollouts.training.environments.source_code import digest_code
from rollouts.training.environments.verifiers_adapter import VerifiersEnvironment

__all__ = [
    "Environment",
    "Frozen",
    "Game",
    "PlainEnvironment",
    "Row",
    "SeatEnvironment",
    "VerifiersEnvironment",
    "check_environment",
    "check_verifiers",
    "digest_code",
    "find_environment",
    "find_parameters",
    "load_environment",
]
