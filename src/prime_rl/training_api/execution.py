"""Execution of training requests other than passes."""

from __future__ import annotations

import math
import time
from typing import Any

from prime_rl.training_api.adapters import AdapterTrainer
from prime_rl.training_api.checkpoints import AdapterCheckpoint, AdapterStore
from prime_rl.training_api.requests import Model, TrainingRequest
from prime_rl.training_api.snapshots import SnapshotStore
from prime_rl.transport.weights import ADAPTER_CONFIG_FILE
from rollouts.training.json_files import read_json_file

Result = bytes | dict[str, Any]
"""Protobuf of a pass, or a JSON object."""


class Executor:
    """Executes all requests but passes; a `ValueError` is the client's, and leaves the model as it was."""

    def __init__(self, trainer: AdapterTrainer, store: AdapterStore, base_name: str) -> None:
        self.trainer, self.store, self.base_name = trainer, store, base_name

    def run(self, model: Model, request: TrainingRequest) -> Result:
        """Execute one request; `model.adapter` stays None if the creation fails."""
        try:
            return self._run(model, request)
        finally:
            if model.adapter is None:
                self.trainer.remove(model.model_id)

    def _run(self, model: Model, request: TrainingRequest) -> Result:
        fields = request.fields()
        match request.kind:
            case "forward" | "forward_backward":
                raise AssertionError("passes run in `PassScheduler`")
            case "create_model":
                model.adapter = self.trainer.create(model.model_id, model.config)
                return {"type": request.kind, "model_id": model.model_id}
            case "load_weights":
                self._load(model, **fields)
                return {"type": request.kind, "path": fields["path"], "model_id": model.model_id}
            case "optim_step":
                assert model.adapter is not None
                # JSON has no NaN and infinities; the client reads them from text.
                metrics = model.adapter.step(fields).items()
                return {"metrics": {name: x if math.isfinite(x) else str(x) for name, x in metrics}}
            case "save_weights":
                return {"type": request.kind, "path": self._save(model, request, "weights", **fields).path}
            case "save_weights_for_sampler":
                return {"type": request.kind, "path": self._save(model, request, "sampler_weights", **fields).path}
            case "refused":
                raise ValueError(fields["error"])

    def check_base(self, checkpoint: AdapterCheckpoint) -> None:
        """`ValueError` for a checkpoint of another base model."""
        if checkpoint.base_digest in (None, self.trainer.base_digest):
            return
        saved = read_json_file(self.store.locate(checkpoint) / ADAPTER_CONFIG_FILE)["base_model_name_or_path"]
        raise ValueError(
            f"{checkpoint.path} was trained on other weights ({saved}) than those of this server ({self.base_name}): "
            "start serve with that model"
        )

    def load_snapshot(self, model: Model, snapshots: SnapshotStore) -> None:
        """Create a model's adapter from its snapshot."""
        assert model.snapshot is not None
        adapter = self.trainer.create(model.model_id, model.config)
        snapshots.load(adapter, model.snapshot)
        model.adapter = adapter

    def _load(self, model: Model, path: str, optimizer: bool) -> None:
        checkpoint = self.store.find(path, model.owner)
        if optimizer and checkpoint.kind != "weights":
            raise ValueError(f"{path} has no optimizer state: load a checkpoint of save_state")
        self.check_base(checkpoint)
        _, tensors, moments = self.store.read(checkpoint)
        adapter = model.adapter or self.trainer.create(model.model_id, model.config)
        adapter.load(tensors, moments if optimizer else None)
        adapter.num_steps = checkpoint.num_steps if optimizer else 0
        model.adapter = adapter

    def _save(
        self, model: Model, request: TrainingRequest, kind: str, name: str, overwrite: bool = False, **fields: Any
    ) -> AdapterCheckpoint:
        assert model.adapter is not None
        info = AdapterCheckpoint(
            model_id=model.model_id,
            kind=kind,
            name=name,
            owner=model.owner,
            base_model=model.base_model,
            config={},
            num_steps=0,
            created=time.time(),
            request_id=request.request_id,
            base_digest=self.trainer.base_digest,
            **fields,
        )
        return self.store.save(model.adapter, info, self.base_name, overwrite=overwrite)
