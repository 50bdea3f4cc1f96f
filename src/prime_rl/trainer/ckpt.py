"""Checkpoints: everything a trainer needs to go on as if nothing had happened, as safetensors and JSON."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from prime_rl.trainer.config import CkptConfig
from prime_rl.trainer.shards import (
    Box,
    Holders,
    Shards,
    find_holders,
    like_shard,
    local_part,
    open_shards,
    save_shards,
    shard_name,
)
from rollouts.training.backends.ranks import Ranks
from rollouts.training.backends.step import OptimizerStep
from rollouts.training.steps import (
    begin_dir,
    commit_dir,
    complete_steps,
    find_damage,
    is_complete,
    prune_steps,
    publish_dir,
    step_path,
    temporary_path,
)

SCHEMA = 3
READABLE = (1, 2, 3)
"""Schema 1 is that of one rank, whose files still have the same names and contents; 2 was cut between rows only."""

PART = "trainer"
"""Name of the trainer's part of `checkpoints/step_N`; the orchestrator publishes its own beside it."""

MODEL, OPTIMIZER, AVERAGE, RNG = "model", "optimizer", "average", "rng"
STATE_FILE = "state.json"


def save_checkpoint(
    root: Path,
    step: int,
    parameters: Mapping[str, Tensor],
    stepper: OptimizerStep,
    progress: Mapping[str, Any],
    ranks: Ranks | None = None,
    holders: Holders | None = None,
    *,
    average: Mapping[str, Tensor] | None = None,
) -> Path:
    """Publish `root/step_N/trainer`, whole or not at all; every rank writes its own files and all must call.

    `parameters` are those that the optimizer steps, by name, and `holders` tells who has which part of them (unset:
    asked for); `progress` is any JSON: data position, totals. What several ranks hold alike the first of them writes.
    `average` are this rank's parts of the weights' moving average, by name.
    """
    ranks = ranks or Ranks()
    holders = holders or find_holders(parameters, ranks)
    ours = {name: p for name, p in parameters.items() if holders.is_first(name, ranks.rank)}

    def write(directory: Path) -> None:
        save_shards(directory, MODEL, ours, holders.own, ranks)
        moments, boxes = _optimizer_tensors(ours, stepper.optimizer, holders)
        save_shards(directory, OPTIMIZER, moments, boxes, ranks)
        if average is not None:
            save_shards(directory, AVERAGE, {name: average[name] for name in ours}, holders.own, ranks)
        save_own(directory, RNG, _rng_tensors(ranks), ranks)
        if ranks.rank == 0:
            state = {
                "schema": SCHEMA,
                "step": step,
                "num_ranks": ranks.size,
                "stepper": stepper.state(),
                "progress": dict(progress),
            }
            (directory / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")

    return publish_together(step_path(root, step) / PART, write, ranks)


def publish_together(final: Path, write: Callable[[Path], None], ranks: Ranks) -> Path:
    """`publish_dir` where every rank writes a part: the directory appears when all are done, and a failure of one is
    a failure of all."""
    if ranks.size == 1:
        return publish_dir(final, write, sealed=True)
    token = ranks.broadcast(uuid.uuid4().hex[:8].encode()).decode()
    tmp = temporary_path(final, token)
    try:
        ranks.run_first(lambda: begin_dir(final, token))
        ranks.run_all(lambda: write(tmp))
        ranks.run_first(lambda: commit_dir(tmp, final, sealed=True))
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    return final


def save_own(directory: Path, kind: str, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Tensors of this rank alone, beside which other ranks have others of the same names."""
    save_file(dict(tensors), directory / shard_name(kind, ranks.rank, ranks.size))


@torch.no_grad()
def load_checkpoint(
    root: Path,
    step: int,
    parameters: Mapping[str, Tensor],
    stepper: OptimizerStep,
    ranks: Ranks | None = None,
    config: CkptConfig | None = None,
    holders: Holders | None = None,
    *,
    average: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Restore parameters, moments, `average`, counters and random states in place; returns the saved `progress`.

    A checkpoint of any mesh of ranks will do: each rank reads the part that `holders` (unset: asked for) says it has.
    `config` may skip parts.
    `ValueError` when the checkpoint is incomplete, of another edition, or of another model or optimizer.
    """
    ranks, config = ranks or Ranks(), config or CkptConfig()
    holders = holders or find_holders(parameters, ranks)
    directory = step_path(root, step) / PART
    if not is_complete(directory):
        raise ValueError(f"{directory} is not a complete checkpoint")
    state = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
    if state.get("schema") not in READABLE:
        raise ValueError(f"{directory} has schema {state.get('schema')}, this version reads schema {SCHEMA}")
    num_ranks = state.get("num_ranks", 1)
    with open_shards(directory, MODEL, num_ranks) as saved:
        for name in {*saved, *holders.by_name}:
            if name not in holders.by_name or saved.shape(name) != holders.whole_shape(name):
                raise ValueError(
                    f"{directory} belongs to another model: {name} differs; use the model.name it began with"
                )
        for name, parameter in parameters.items():
            local_part(parameter).copy_(saved.read(name, holders.own[name]))
    if not config.skip_optimizer:
        with open_shards(directory, OPTIMIZER, num_ranks) as saved:
            _load_optimizer(saved, parameters, stepper.optimizer, holders, directory)
    if average is not None:
        _load_average(directory, num_ranks, average, holders)
    _load_rng(directory, num_ranks, ranks)
    stepper.load_state(state["stepper"])
    if config.skip_progress:
        stepper.load_state({name: 0 for name in state["stepper"]})
    elif config.skip_scheduler:
        stepper.schedule_start = stepper.num_steps
    if stepper.after_step is not None:
        stepper.after_step()
    return _kept_progress(state["progress"], config)


def _kept_progress(progress: dict[str, Any], config: CkptConfig) -> dict[str, Any]:
    """Totals and data position, each unless it is skipped."""
    return {
        name: value
        for name, value in progress.items()
        if not (config.skip_progress if name.startswith("total_") else config.skip_dataloader)
    }


def find_resume_step(root: Path, config: CkptConfig | None, parts: tuple[str, ...] = (PART,)) -> int | None:
    """The checkpoint to continue from, or None for a fresh start.

    Counts only steps that all `parts` have completed. -1 means the latest, and a fresh start when there is none yet;
    a step that does not exist is a `ValueError` naming those that do.
    """
    if config is None or config.resume_step is None:
        return None
    steps = complete_steps(root, parts)
    if config.resume_step == -1 and not steps:
        return None
    step = steps[-1] if config.resume_step == -1 else config.resume_step
    if step not in steps:
        found = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"ckpt.resume_step is {step} but {root} has no such complete checkpoint (found: {found})")
    if PART in parts and (damage := find_damage(step_path(root, step) / PART)):
        raise ValueError(f"checkpoint {step} is damaged: {damage}\n  name another step in ckpt.resume_step: {steps}")
    return step


def is_checkpoint_due(step: int, config: CkptConfig | None, max_steps: int | None) -> bool:
    """Whether a checkpoint follows this step: every `interval`-th and the last."""
    if config is None:
        return False
    return step == max_steps or (config.interval is not None and step % config.interval == 0)


def prune_checkpoints(root: Path, keep: int | None) -> list[int]:
    """Remove the trainer's part of all but the newest `keep` checkpoints; returns the steps removed."""
    newest = [] if keep is None else complete_steps(root, (PART,))[-keep:]
    return prune_steps(root, lambda step: step >= newest[0], (PART,)) if newest else []


def _optimizer_tensors(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, holders: Holders
) -> tuple[dict[str, Tensor], dict[str, Box]]:
    """`<parameter>/<moment>` of every tensor the optimizer remembers, and where those lie that cover the parameter.

    A number beside them, as the count of steps, is kept by the rank that holds the first part.
    """
    moments, boxes = {}, {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                moments[f"{name}/{key}"], boxes[f"{name}/{key}"] = value, holders.own[name]
            elif isinstance(value, Tensor) and not any(holders.own[name].offset):
                moments[f"{name}/{key}"] = value
    return moments, boxes


def _load_optimizer(
    saved: Shards, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, holders: Holders, source: Path
) -> None:
    """Hand the moments to the optimizer by its own door, which puts each on the device it belongs to."""
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    index = {id(p): i for i, p in enumerate(ordered)}
    state: dict[int, dict[str, Tensor]] = {}
    for key in saved:
        name, _, moment = key.rpartition("/")
        if name not in holders.by_name:
            raise ValueError(f"{source} holds moments of {name}, which this run does not train")
        if name not in parameters:  # another rank's
            continue
        own = parameters[name]
        covers = saved.shape(key) == holders.whole_shape(name)
        value = like_shard(saved.read(key, holders.own[name]), own) if covers else saved.read(key)
        state.setdefault(index[id(own)], {})[moment] = value
    adamw, sgd = {"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"}
    known = {"AdamW": (adamw,), "SGD": (sgd,), "Muon": (adamw, sgd)}[type(optimizer).__name__]
    for moments in state.values():
        if not any(moments.keys() <= kind for kind in known):
            raise ValueError(
                f"{source} was written by another optimizer: use the optim.type it began with, or ckpt.skip_optimizer"
            )
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _load_average(directory: Path, num_ranks: int, average: Mapping[str, Tensor], holders: Holders) -> None:
    if not (directory / shard_name(AVERAGE, 0, num_ranks)).is_file():
        raise ValueError(f"{directory} holds no moving average of the weights: it was written without ema_decay")
    with open_shards(directory, AVERAGE, num_ranks) as saved:
        for name, mean in average.items():
            mean.copy_(saved.read(name, holders.own[name]))


def _rng_tensors(ranks: Ranks) -> dict[str, Tensor]:
    """The random states of this rank: its CPU's and its accelerator's."""
    states = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return states


def _load_rng(directory: Path, num_ranks: int, ranks: Ranks) -> None:
    """The inverse; a rank that did not exist then keeps the state that its own seed gave it."""
    if ranks.rank >= num_ranks:
        return
    states = load_file(directory / shard_name(RNG, ranks.rank, num_ranks))
    torch.set_rng_state(states["cpu"])
    own = states.get("cuda", states.get(f"cuda:{ranks.device.index or 0}"))
    if own is not None and ranks.device.type == "cuda":
        torch.cuda.set_rng_state(own, ranks.device)
