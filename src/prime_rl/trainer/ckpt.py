"""Checkpoints: everything a trainer needs to go on as if nothing had happened, as safetensors and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from prime_rl.trainer.config import CkptConfig
from rollouts.training.backends.step import OptimizerStep
from rollouts.training.steps import complete_steps, is_complete, prune_steps, publish_dir, step_path

SCHEMA = 1
PART = "trainer"
"""Name of the trainer's part of `checkpoints/step_N`; the orchestrator publishes its own beside it."""

MODEL_FILE, OPTIMIZER_FILE, RNG_FILE, STATE_FILE = (
    "model.safetensors",
    "optimizer.safetensors",
    "rng.safetensors",
    "state.json",
)


def save_checkpoint(
    root: Path, step: int, parameters: Mapping[str, Tensor], stepper: OptimizerStep, progress: Mapping[str, Any]
) -> Path:
    """Publish `root/step_N/trainer`, whole or not at all.

    `parameters` are those that the optimizer steps, by name; `progress` is any JSON: data position, totals.
    """

    def write(directory: Path) -> None:
        save_file({name: _held(p) for name, p in parameters.items()}, directory / MODEL_FILE)
        save_file(_optimizer_tensors(parameters, stepper.optimizer), directory / OPTIMIZER_FILE)
        save_file(_rng_tensors(), directory / RNG_FILE)
        state = {"schema": SCHEMA, "step": step, "stepper": stepper.state(), "progress": dict(progress)}
        (directory / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")

    return publish_dir(step_path(root, step) / PART, write)


@torch.no_grad()
def load_checkpoint(root: Path, step: int, parameters: Mapping[str, Tensor], stepper: OptimizerStep) -> dict[str, Any]:
    """Restore parameters, moments, counters and random states in place; returns the saved `progress`.

    `ValueError` when the checkpoint is incomplete, of another edition, or of another model or optimizer.
    """
    directory = step_path(root, step) / PART
    if not is_complete(directory):
        raise ValueError(f"{directory} is not a complete checkpoint")
    state = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
    if state.get("schema") != SCHEMA:
        raise ValueError(f"{directory} has schema {state.get('schema')}, this version reads schema {SCHEMA}")
    saved = load_file(directory / MODEL_FILE)
    for name in saved.keys() | parameters.keys():
        if name not in saved or name not in parameters or saved[name].shape != parameters[name].shape:
            raise ValueError(f"{directory} belongs to another model: {name} differs; use the model.name it began with")
    for name, parameter in parameters.items():
        parameter.copy_(saved[name])
    _load_optimizer(load_file(directory / OPTIMIZER_FILE), parameters, stepper.optimizer, directory)
    _load_rng(load_file(directory / RNG_FILE))
    stepper.load_state(state["stepper"])
    if stepper.after_step is not None:
        stepper.after_step()
    progress: dict[str, Any] = state["progress"]
    return progress


def find_resume_step(root: Path, config: CkptConfig | None, parts: tuple[str, ...] = (PART,)) -> int | None:
    """The checkpoint to continue from, or None for a fresh start.

    Counts only steps that all `parts` have completed. -1 means the latest, and a fresh start when there is none yet;
    a step that does not exist is a `ValueError` naming those that do.
    """
    if config is None or config.resume_step is None:
        return None
    steps = complete_steps(root, parts)
    if config.resume_step == -1:
        return steps[-1] if steps else None
    if config.resume_step not in steps:
        found = ", ".join(map(str, steps)) or "none"
        raise ValueError(
            f"ckpt.resume_step is {config.resume_step} but {root} has no such complete checkpoint (found: {found})"
        )
    return config.resume_step


def is_checkpoint_due(step: int, config: CkptConfig | None, max_steps: int | None) -> bool:
    """Whether a checkpoint follows this step: every `interval`-th and the last."""
    if config is None:
        return False
    return step == max_steps or (config.interval is not None and step % config.interval == 0)


def prune_checkpoints(root: Path, keep: int | None) -> list[int]:
    """Remove the trainer's part of all but the newest `keep` checkpoints; returns the steps removed."""
    return [] if keep is None else prune_steps(root, complete_steps(root, (PART,))[-keep:], (PART,))


def _held(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


def _optimizer_tensors(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`<parameter>/<moment>` of every tensor the optimizer remembers."""
    return {
        f"{name}/{key}": _held(value)
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _load_optimizer(
    saved: dict[str, Tensor], parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, source: Path
) -> None:
    """Hand the moments to the optimizer by its own door, which puts each on the device it belongs to."""
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    index = {id(p): i for i, p in enumerate(ordered)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in saved.items():
        name, _, moment = key.rpartition("/")
        if name not in parameters:
            raise ValueError(f"{source} holds moments of {name}, which this run does not train")
        state.setdefault(index[id(parameters[name])], {})[moment] = value
    known = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "SGD": {"momentum_buffer"}}[type(optimizer).__name__]
    for moments in state.values():
        if moments.keys() - known:
            raise ValueError(f"{source} was written by another optimizer: use the optim.type it began with")
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _rng_tensors() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _load_rng(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for name, state in states.items():
        if name.startswith("cuda:") and torch.cuda.is_available() and int(name[5:]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, name)
