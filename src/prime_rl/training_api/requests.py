"""Training requests as data, so that they can be queued, batched, stored and executed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import orjson

from prime_rl.training_api.adapters import AdapterConfig, TrainedAdapter

Kind = Literal[
    "create_model", "load_weights", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler"
]


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


@dataclass(frozen=True)
class TrainingRequest:
    """A validated request: `body` is the protobuf of a pass (`wire.decode_pass`), JSON for all other kinds."""

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
