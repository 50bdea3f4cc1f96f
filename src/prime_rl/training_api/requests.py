"""Sessions, models and training requests as data, which can be queued, stored and executed again."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from prime_rl.training_api.adapters import AdapterConfig, TrainedAdapter
from prime_rl.training_api.checkpoints import AdapterCheckpoint

Kind = Literal[
    "create_model",
    "load_weights",
    "forward",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "refused",
]
"""`refused`: a request with invalid fields, which takes its turn to fail."""

REPLAYED = ("create_model", "forward_backward", "optim_step")
"""Requests that change a model, and only as functions of their content: a restart executes them again."""

SAVES = ("save_weights", "save_weights_for_sampler")


@dataclass
class ClientSession:
    """One client."""

    session_id: str
    owner: str
    number: int
    """Number of this session among those of its key."""
    metadata: dict[str, Any] | None
    display_name: str | None
    last_seen: float = field(default_factory=time.monotonic)
    ephemeral: deque[AdapterCheckpoint] = field(default_factory=deque)

    def describe(self) -> dict[str, Any]:
        """What the request log stores."""
        return _describe(self, "session_id", "owner", "number", "metadata", "display_name")


@dataclass
class SamplingSession:
    """Weights that a client samples from; `checkpoint` None: the base model."""

    sampling_session_id: str
    session_id: str
    owner: str
    base_model: str
    checkpoint: AdapterCheckpoint | None
    num_clients: int = 1
    completed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, when a sample completes."""

    def describe(self) -> dict[str, Any]:
        """What the request log stores."""
        fields = ("sampling_session_id", "session_id", "owner", "base_model", "checkpoint", "num_clients")
        return _describe(self, *fields)


def _describe(record: Any, *fields: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in fields}


@dataclass
class Model:
    """A model in training."""

    model_id: str
    session_id: str
    owner: str
    base_model: str
    """The name that the client gave."""
    config: AdapterConfig
    metadata: dict[str, Any] | None
    last_request: float
    adapter: TrainedAdapter | None = None
    """None before creation, and until the model is restored after a restart, a failure or an eviction."""
    snapshot: int | None = None
    """Number of the request after which the last snapshot was taken."""
    unsaved_s: float = 0.0
    """Computation since then, in seconds."""
    last_run: float = 0.0
    """Time at which its last request finished, in seconds of the monotonic clock."""

    def describe(self) -> dict[str, Any]:
        """What the request log stores."""
        return _describe(self, "model_id", "session_id", "owner", "base_model", "config", "metadata", "last_request")


@dataclass(frozen=True)
class TrainingRequest:
    """`body`: the protobuf of a pass, which is validated when it runs (`wire.decode_pass`), or validated JSON."""

    model_id: str
    seq_id: int
    kind: Kind
    body: bytes

    @property
    def request_id(self) -> str:
        """The id that clients poll."""
        return f"{self.model_id}:{self.seq_id}"

    def fields(self) -> dict[str, Any]:
        """The fields of a JSON body."""
        fields: dict[str, Any] = orjson.loads(self.body)
        return fields
