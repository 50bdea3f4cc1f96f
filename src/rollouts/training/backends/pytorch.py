"""PyTorch training backend for one device, or for one rank of several."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from rollouts.training.backends import checkpoint as files
from rollouts.training.backends.loss_fn import as_loss_fn
from rollouts.training.backends.ranks import Ranks
from rollouts.training.backends.step import OptimizerStep, compute_total_norm
from rollouts.training.steps import complete_steps, prune_steps, publish_step, remove_unfinished, step_path
from rollouts.training.types import TrainFuture

T = TypeVar("T")

REQUIRED = ("input_ids", "labels", "loss_mask")
FORWARD_ARGUMENTS = ("attention_mask", "position_ids")
MAX_PUBLISHED_VERSIONS = 2
"""Published versions on disk: the one that engines serve and the one that they load next."""


class PyTorchTrainingBackend:
    """A model and its optimizer; one worker thread executes operations in the order of submission.

    `forward_backward` and `optim_step` return a future immediately. Gradients accumulate until `optim_step`, as the
    mean over all accumulated batches. `loss_fn` takes `(logits, batch)`, or logits and batch streams by name like
    `grpo_loss`. After an error in a step the backend rejects operations ("poisoned") until `load_checkpoint`, because
    parameters and gradients may be inconsistent.

    `max_grad_norm` clips the gradient norm, `scheduler` is stepped with the optimizer, `tokenizer` is saved with the
    model. A model of `torch.compile` computes the forward pass; `model` and files are those of the module it wraps.
    `data_state` is the data position of the training loop; it is saved and restored with checkpoints.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any],
        checkpoint_dir: Path,
        device: torch.device | str | None = None,
        weight_version: int = 0,
        current_step: int = 0,
        *,
        max_grad_norm: float | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        tokenizer: Any = None,
        ranks: Ranks | None = None,
        architecture: str | None = None,
    ) -> None:
        self.device = _resolve_device(device, model)
        self._forward = model.to(self.device) if ranks is None else model
        self.model = files.unwrap_compiled(self._forward)
        self.optimizer = optimizer
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("scheduler ReduceLROnPlateau needs a metric, which no step has: use one that counts steps")
        _plain_state(scheduler)  # refused here, not in the first checkpoint
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.checkpoint_dir = Path(checkpoint_dir)
        self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        self.ranks = ranks or Ranks(device=self.device)
        self.weight_version = weight_version
        self.current_step = current_step
        self.data_state: dict[str, Any] = {}
        self.is_restored = False  # whether `data_state` is that of a checkpoint, and no loop has continued it yet
        files.name_parameters(self.model, optimizer)
        self._architecture = architecture or type(self.model).__name__
        self._loss_fn = as_loss_fn(loss_fn)
        self._stepper = OptimizerStep(optimizer, max_norm=max_grad_norm)
        self._forward_names = set(inspect.signature(self.model.forward).parameters)
        self._weight, self._loss_sum, self._num_batches = 0.0, 0.0, 0
        self._poison: BaseException | None = None
        self._worker = ThreadPoolExecutor(1, "training", _prepare_thread, (self.device,))

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.ranks.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.ranks.size

    def forward_backward(self, batch: dict[str, Any]) -> TrainFuture[dict[str, float]]:
        """Accumulate the gradient of a batch of [batch, seq] `input_ids`, `labels` (shifted) and `loss_mask`.

        Returns `loss`, the mean over this batch, and `grad_norm`, that of the accumulated mean gradient. `ValueError`
        immediately for a batch with a missing stream or different shapes.
        """
        check_batch(batch)
        return self._submit("forward_backward", self._forward_backward, batch)

    def optim_step(self) -> TrainFuture[dict[str, float]]:
        """Clip, step and clear; returns `lr`, `step`, `loss` and `grad_norm` of the step, and `skipped` 0 or 1."""
        return self._submit("optim_step", self._optim_step)

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        """A copy of the state dict on the CPU of rank 0. Collective."""
        return self._submit("get_weights", files.collect_model, self.model, self.ranks)

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Load a full state dict, strictly; the optimizer is unchanged."""
        return self._submit("load_weights", self._load_weights, weights)

    async def save_checkpoint(self, step: int, metrics: Mapping[str, float]) -> Path:
        """Publish `checkpoint_dir/step_N` atomically and return it. Collective."""
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ValueError(f"step {step!r} of a checkpoint must be a whole number of at least 0")
        return await self._submit("save_checkpoint", self._save, step, dict(metrics), dict(self.data_state))

    async def load_checkpoint(self, path: Path | str, *, parameters_only: bool = False) -> dict[str, Any]:
        """Restore the complete training state; returns the metadata. Clears the poisoned state.

        `parameters_only` starts a new stage: it restores parameters and the step count, but not optimizer, scheduler,
        random state and data position.
        """
        return await self._submit("load_checkpoint", self._load, Path(path), parameters_only, clears_poison=True)

    def start_from(self, path: Path | str) -> dict[str, Any]:
        """Blocking `load_checkpoint`, for code outside of an event loop."""
        return self._submit("load_checkpoint", self._load, Path(path), False, clears_poison=True).wait()

    async def publish_weights(self, step: int) -> Path:
        """Write `checkpoint_dir/weights/step_N` for inference engines: safetensors, config, tokenizer; no optimizer."""
        return await self._submit("publish_weights", self._publish, step)

    async def broadcast(self, data: bytes) -> bytes:
        """Broadcast `data` of rank 0, in order with the other operations."""
        return await self._submit("broadcast", self.ranks.broadcast, data)

    def _submit(
        self, operation: str, work: Callable[..., T], *args: Any, clears_poison: bool = False
    ) -> TrainFuture[T]:
        future: TrainFuture[T] = TrainFuture(operation)

        def run() -> None:
            try:
                if self._poison is not None and not clears_poison:
                    raise RuntimeError(
                        f"Backend is poisoned (previous error: {self._poison}): load a checkpoint to go on"
                    ) from self._poison
                value = work(*args)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(value)

        self._worker.submit(run)
        return future

    @contextmanager
    def _poison_on_error(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._poison = error
            raise RuntimeError(f"Training step failed: {error}") from error

    def _forward_backward(self, batch: dict[str, Any]) -> dict[str, float]:
        with self._poison_on_error():
            self.model.train()
            batch = {k: v.to(self.device) if isinstance(v, Tensor) else v for k, v in batch.items()}
            loss = self._loss_fn(self._compute_logits(batch), batch)
            weight, loss_sum = self.ranks.sum([loss.weight, float(loss.mean.detach()) * loss.weight])
            total = self._weight + weight
            if self._weight:
                for parameter in self._stepper.parameters:
                    if parameter.grad is not None:
                        parameter.grad.mul_(self._weight / total)
            # Ranks average their gradients, so each share of the mean is multiplied by `size`.
            (loss.mean * (self.ranks.size * loss.weight / total if total else 0.0)).backward()
            self._weight, self._loss_sum, self._num_batches = total, self._loss_sum + loss_sum, self._num_batches + 1
            norm = compute_total_norm(self._stepper.parameters)
            return {**loss.metrics, "loss": loss_sum / weight if weight else 0.0, "grad_norm": float(norm)}

    def _compute_logits(self, batch: dict[str, Any]) -> Tensor:
        arguments = {name: batch[name] for name in FORWARD_ARGUMENTS if name in batch and name in self._forward_names}
        if "use_cache" in self._forward_names:
            arguments["use_cache"] = False
        output = self._forward(batch["input_ids"], **arguments)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        return logits / batch["temperature"][:, None, None] if "temperature" in batch else logits

    def _optim_step(self) -> dict[str, float]:
        if not self._num_batches:
            raise ValueError("optim_step needs a gradient: call forward_backward before it")
        with self._poison_on_error():
            loss = self._loss_sum / self._weight if self._weight else 0.0
            has_loss = self._weight > 0
            self._weight, self._loss_sum, self._num_batches = 0.0, 0.0, 0
            # A scheduler or the user may have changed the learning rates.
            self._stepper.base_lrs = [group["lr"] for group in self.optimizer.param_groups]
            report = self._stepper.step() if has_loss else self._stepper.skip("no token of the batch carries loss")
            if self.scheduler is not None:
                self.scheduler.step()
            self.current_step += 1
            self.weight_version += report.skipped is None
        return {
            "lr": report.lr,
            "step": self.current_step,
            "loss": loss,
            "grad_norm": report.grad_norm,
            "skipped": float(report.skipped is not None),
        }

    def _load_weights(self, weights: Mapping[str, Tensor]) -> None:
        files.restore_model(self.model, weights, "the weights given")
        self.weight_version += 1

    def _save(self, step: int, metrics: dict[str, float], data_state: dict[str, Any]) -> Path:
        if self._num_batches:
            raise ValueError("accumulated gradients would be lost: call optim_step before saving")
        snapshot = files.Checkpoint(
            files.collect_model(self.model, self.ranks),
            files.collect_optimizer(self.model, self.optimizer, self.ranks),
            {
                "step": step,
                "weight_version": self.weight_version,
                "timestamp": time.time(),
                "metrics": files.finite_or_null(metrics),
                "current_step": self.current_step,
                "stepper": self._stepper.state(),
                "scheduler": _plain_state(self.scheduler),
                "data_state": data_state,
                "rng": files.collect_rng(self.ranks),
            },
        )

        def write(directory: Path) -> None:
            files.write_checkpoint(directory, snapshot)
            files.write_model_card(directory, self.model, self._architecture, self.tokenizer)

        self.ranks.run_on_rank0(lambda: _publish_alone(self.checkpoint_dir, step, write))
        return step_path(self.checkpoint_dir, step)

    def _load(self, path: Path, parameters_only: bool) -> dict[str, Any]:
        saved = files.read_checkpoint(path)
        # Validate before changing anything.
        files.check_model(self.model, saved.model, str(path))
        if not parameters_only:
            self._restore_progress(saved, path)
        files.restore_model(self.model, saved.model, str(path))
        self.weight_version, self.current_step = saved.metadata["weight_version"], saved.metadata["current_step"]
        self.is_restored = not parameters_only
        self.optimizer.zero_grad(set_to_none=True)
        self._weight, self._loss_sum, self._num_batches, self._poison = 0.0, 0.0, 0, None
        return saved.metadata

    def _restore_progress(self, saved: files.Checkpoint, path: Path) -> None:
        """Restore everything except the parameters."""
        metadata = saved.metadata
        if (metadata["scheduler"] is None) != (self.scheduler is None):
            there, here = ("no", "one") if metadata["scheduler"] is None else ("a", "none")
            raise ValueError(
                f"{path} was written with {there} scheduler and this backend has {here}: build them alike, "
                "or load with parameters_only=True"
            )
        files.restore_optimizer(self.model, self.optimizer, saved.optimizer, str(path))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(_restore_keys(metadata["scheduler"], self.scheduler.state_dict()))
        self._stepper.load_state(metadata["stepper"])
        self.data_state = metadata["data_state"]
        files.restore_rng(metadata["rng"], self.ranks)

    def _publish(self, step: int) -> Path:
        state = files.collect_model(self.model, self.ranks)
        root = self.checkpoint_dir / "weights"

        def write(directory: Path) -> None:
            files.write_weights(directory, step, self.model, state)
            files.write_model_card(directory, self.model, self._architecture, self.tokenizer)

        def publish() -> None:
            _publish_alone(root, step, write)
            recent = [s for s in complete_steps(root) if s <= step][-MAX_PUBLISHED_VERSIONS:]
            prune_steps(root, lambda other: other in recent or other > step)  # later ones belong to another run

        self.ranks.run_on_rank0(publish)
        return step_path(root, step)


def check_batch(batch: Mapping[str, Any]) -> None:
    """Raise `ValueError` naming the stream that is missing or differs in shape."""
    missing = [name for name in REQUIRED if name not in batch]
    if missing:
        raise ValueError(f"the batch lacks {', '.join(missing)}: it needs {', '.join(REQUIRED)}")
    shapes = {name: list(batch[name].shape[:2]) for name in (*REQUIRED, *FORWARD_ARGUMENTS) if name in batch}
    if any(shape != shapes["input_ids"] for shape in shapes.values()):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"streams of the batch differ in shape: {listed}")
    if "cu_seqlens" in batch:
        raise ValueError("packed rows (cu_seqlens) are not supported: pad them with pad_samples")


def _publish_alone(root: Path, step: int, write: Callable[[Path], None]) -> None:
    """`publish_step` by the only writer of `root`, without what a crashed one has left there."""
    remove_unfinished(root)
    publish_step(root, step, write)


def _plain_state(scheduler: torch.optim.lr_scheduler.LRScheduler | None) -> dict[str, Any] | None:
    """A scheduler's state as JSON values; `ValueError` if it is not serializable."""
    if scheduler is None:
        return None
    try:
        state: dict[str, Any] = json.loads(json.dumps(scheduler.state_dict()))
    except TypeError as error:
        raise ValueError(f"the state of {type(scheduler).__name__} does not fit into metadata.json: {error}") from error
    return state


def _restore_keys(saved: Any, own: Any) -> Any:
    """`saved` with keys like those of `own`: JSON turned those that are numbers, such as milestones, into text."""
    if isinstance(saved, dict) and isinstance(own, dict):
        are_numbers = bool(own) and all(isinstance(key, int) for key in own)
        keys = {name: int(name) if are_numbers and name.isdecimal() else name for name in saved}
        return {keys[name]: _restore_keys(value, own.get(keys[name])) for name, value in saved.items()}
    if isinstance(saved, list) and isinstance(own, list) and len(saved) == len(own):
        return [_restore_keys(value, mine) for value, mine in zip(saved, own, strict=True)]
    return saved


def _resolve_device(device: torch.device | str | None, model: torch.nn.Module) -> torch.device:
    if device is None:
        first = next(model.parameters(), None)
        if first is None:
            raise ValueError("the model has no parameters to train")
        return first.device
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"device {str(device)!r} cannot be used here: {reason}") from error


def _prepare_thread(device: torch.device) -> None:
    """Set the current CUDA device, which is a per-thread setting."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
