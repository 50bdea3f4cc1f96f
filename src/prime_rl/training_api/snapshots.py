"""Snapshots of models in training, in `<root>/<model>/step_<request number>/`, from which a restart continues."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from prime_rl.training_api.adapters import TrainedAdapter
from rollouts.training.steps import prune_steps, publish_step, step_path
from rollouts.training.tensor_files import save_tensors

FILE = "snapshot.safetensors"


class SnapshotStore:
    """At most one snapshot per model is in use; it is published by renaming and synced to disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def _folder(self, model_id: str) -> Path:
        return self.root / model_id.replace(":", "_")

    def save(self, adapter: TrainedAdapter, seq_id: int) -> None:
        """Publish parameters, moments and the gradient that waits for a step, after request `seq_id`."""
        tensors = {f"parameter.{name}": p.detach() for name, p in adapter.parameters.items()}
        tensors |= {f"gradient.{name}": p.grad for name, p in adapter.parameters.items() if p.grad is not None}
        tensors |= {f"moment.{name}": tensor for name, tensor in adapter.optimizer_tensors().items()}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        metadata = {"num_steps": str(adapter.num_steps)}
        publish_step(self._folder(adapter.name), seq_id, lambda folder: save_tensors(tensors, folder / FILE, metadata))

    def load(self, adapter: TrainedAdapter, seq_id: int) -> None:
        """Restore the state after request `seq_id`, bit for bit."""
        groups: dict[str, dict[str, Tensor]] = {"parameter": {}, "gradient": {}, "moment": {}}
        with safe_open(step_path(self._folder(adapter.name), seq_id) / FILE, "pt") as file:
            for key in file.keys():  # noqa: SIM118
                group, _, name = key.partition(".")
                groups[group][name] = file.get_tensor(key)
            adapter.num_steps = int(file.metadata()["num_steps"])
        adapter.load(groups["parameter"], groups["moment"])
        for name, gradient in groups["gradient"].items():
            parameter = adapter.parameters[name]
            parameter.grad = gradient.to(parameter.device)

    def prune(self, model_id: str, seq_id: int | None) -> None:
        """Delete a model's snapshots except that after request `seq_id`; None: all."""
        if seq_id is None:
            shutil.rmtree(self._folder(model_id), ignore_errors=True)
        else:
            prune_steps(self._folder(model_id), lambda step: step == seq_id)

    def keep_only(self, model_ids: Collection[str]) -> None:
        """Delete the snapshots of all other models, and unfinished ones."""
        kept = {self._folder(model_id).name for model_id in model_ids}
        for folder in self.root.glob("*"):
            if folder.name not in kept:
                shutil.rmtree(folder, ignore_errors=True)
        for unfinished in self.root.glob("*/.tmp-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
