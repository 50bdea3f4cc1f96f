"""Trainer checkpoints: the complete training state as safetensors and JSON."""

from __future__ import annotations

import json
import shutil
import uuid
from collections import ChainMap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from prime_rl.runtime.run_dir import CKPT_PARTS
from prime_rl.trainer.config import CkptConfig
from prime_rl.trainer.models.value import without_critic
from prime_rl.trainer.sharded_checkpoint import (
    ShardMap,
    Shards,
    ShardSlice,
    gather_shard_map,
    local_part,
    open_shards,
    save_shards,
    shard_like,
    shard_name,
)
from rollouts.training.backends.ranks import Ranks
from rollouts.training.backends.step import OptimizerStep
from rollouts.training.json_files import read_json_file
from rollouts.training.steps import (
    begin_dir,
    commit_dir,
    describe_files,
    is_complete,
    publish_dir,
    step_path,
    temporary_path,
)
from rollouts.training.tensor_files import save_tensors

SCHEMA = 3
READABLE = (1, 2, 3)
"""Schema 1: one rank, with the same file names and contents; schema 2: sharded by rows only."""

PART = CKPT_PARTS[0]
"""Trainer part of `checkpoints/step_N`; the orchestrator publishes a separate part."""

MODEL, OPTIMIZER, AVERAGE, RNG = "model", "optimizer", "average", "rng"
STATE_FILE = "state.json"
ADAMW, SGD = frozenset(["step", "exp_avg", "exp_avg_sq"]), frozenset(["momentum_buffer"])
"""State of a parameter by the rule that updates it; Muon updates matrices by momentum and the rest by AdamW."""


def save_checkpoint(
    root: Path,
    step: int,
    parameters: Mapping[str, Tensor],
    stepper: OptimizerStep,
    progress: Mapping[str, Any],
    ranks: Ranks | None = None,
    shard_map: ShardMap | None = None,
    *,
    average: Mapping[str, Tensor] | None = None,
    adapter: Mapping[str, Any] | None = None,
) -> Path:
    """Publish `root/step_N/trainer` atomically; every rank writes its own files (collective).

    `parameters` are the optimizer's parameters by name, and `shard_map` their shards (unset: gathered); `progress` is
    any JSON: data position, totals. Replicated tensors are written by the first rank that has them. `average` are this
    rank's shards of the EMA weights by name, `adapter` is from `describe_adapter`.
    """
    ranks = ranks or Ranks()
    shard_map = shard_map or gather_shard_map(parameters, ranks)
    ours = {name: p for name, p in parameters.items() if shard_map.is_first(name, ranks.rank)}

    def write(directory: Path) -> None:
        save_shards(directory, MODEL, ours, shard_map.local, ranks)
        moments, boxes = _optimizer_tensors(ours, stepper.optimizer, shard_map)
        save_shards(directory, OPTIMIZER, moments, boxes, ranks)
        if average is not None:
            save_shards(directory, AVERAGE, {name: average[name] for name in ours}, shard_map.local, ranks)
        save_own(directory, RNG, _rng_tensors(ranks), ranks)
        if ranks.rank == 0:
            state = {
                "schema": SCHEMA,
                "step": step,
                "num_ranks": ranks.size,
                "stepper": stepper.state(),
                "progress": dict(progress),
                "adapter": adapter,
            }
            (directory / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")

    return publish_together(step_path(root, step) / PART, write, ranks)


def publish_together(final: Path, write: Callable[[Path], None], ranks: Ranks) -> Path:
    """`publish_dir` with files from every rank: the directory appears after all ranks have written; a failure on one
    rank fails all.

    Every rank computes the digests of its own files: while rank 0 read all of them, the others might time out.
    """
    if ranks.size == 1:
        return publish_dir(final, write, sealed=True)
    token = ranks.broadcast(uuid.uuid4().hex[:8].encode()).decode()
    tmp, own = temporary_path(final, token), dict[str, Any]()

    def write_own() -> None:
        write(tmp)
        own.update(describe_files(tmp, shard_name("*", ranks.rank, ranks.size)))

    try:
        ranks.run_on_rank0(lambda: begin_dir(final, token))
        ranks.run_on_all_ranks(write_own)
        described = ChainMap(*map(json.loads, ranks.gather_bytes(json.dumps(own).encode())))
        ranks.run_on_rank0(lambda: commit_dir(tmp, final, sealed=True, described=described))
    except BaseException:
        shutil.rmtree(tmp, ignore_errors=True)
        raise
    return final


def save_own(directory: Path, kind: str, tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Save tensors specific to this rank; other ranks have different tensors of the same names."""
    save_tensors(tensors, directory / shard_name(kind, ranks.rank, ranks.size))


@torch.no_grad()
def load_checkpoint(
    root: Path,
    step: int,
    parameters: Mapping[str, Tensor],
    stepper: OptimizerStep,
    ranks: Ranks | None = None,
    config: CkptConfig | None = None,
    shard_map: ShardMap | None = None,
    *,
    average: Mapping[str, Tensor] | None = None,
    adapter: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Restore parameters, moments, `average`, counters and RNG states in place; returns the saved `progress`.

    The checkpoint may come from any mesh: each rank reads its own shards according to `shard_map` (unset: gathered).
    `config` may skip parts.
    `ValueError` when the checkpoint is incomplete or of another schema, model or optimizer.
    """
    ranks, config = ranks or Ranks(), config or CkptConfig()
    shard_map = shard_map or gather_shard_map(parameters, ranks)
    directory = step_path(root, step) / PART
    if not is_complete(directory):
        raise ValueError(f"{directory} is not a complete checkpoint")
    state = read_json_file(directory / STATE_FILE)
    if state.get("schema") not in READABLE:
        raise ValueError(f"{directory} has schema {state.get('schema')}, this version reads schema {SCHEMA}")
    saved_adapter = state.get("adapter") or {}
    if adapter and (wrong := [name for name, value in saved_adapter.items() if adapter[name] != value]):
        raise ValueError(f"{directory} has an adapter of another {wrong[0]}: use the original one")
    num_ranks = state.get("num_ranks", 1)
    with open_shards(directory, MODEL, num_ranks) as saved:
        _check_shapes(saved, shard_map, directory)
        for name, parameter in parameters.items():
            local_part(parameter).copy_(saved.read(name, shard_map.local[name]))
    if not config.skip_optimizer:
        with open_shards(directory, OPTIMIZER, num_ranks) as saved:
            _load_optimizer(saved, parameters, stepper.optimizer, shard_map, directory)
    if average is not None:
        _load_average(directory, num_ranks, average, shard_map)
    _load_rng(directory, num_ranks, ranks)
    stepper.load_state(state["stepper"])
    if config.skip_progress:
        stepper.load_state({name: 0 for name in state["stepper"]})
    elif config.skip_scheduler:
        stepper.schedule_start = stepper.num_steps
    if stepper.after_step is not None:
        stepper.after_step()
    return _select_progress(state["progress"], config)


def _check_shapes(saved: Shards, shard_map: ShardMap, directory: Path) -> None:
    """`ValueError` with the key that decides on the parameters in which the checkpoint and the run differ."""
    held = {name: saved.shape(name) for name in saved}
    wanted = {name: shard_map.full_shape(name) for name in shard_map.by_name}
    different = {name for name in {*held, *wanted} if held.get(name) != wanted.get(name)}
    if not different:
        return
    key = "model.lora" if any(".lora_" in name for name in {*held, *wanted}) else "model.name"
    if not without_critic(dict.fromkeys(different)):
        key = "critic"
    name = min(different)
    how = "is not in it" if name not in held else "is in it only" if name not in wanted else "has another shape in it"
    raise ValueError(f"{directory} is of a run with another {key}: {name} {how}; use the original {key}")


def read_progress(root: Path, step: int, config: CkptConfig) -> dict[str, Any]:
    """The saved `progress` as `load_checkpoint` returns it."""
    return _select_progress(read_json_file(step_path(root, step) / PART / STATE_FILE)["progress"], config)


def _select_progress(progress: dict[str, Any], config: CkptConfig) -> dict[str, Any]:
    """Totals and data position, without the skipped ones; with `skip_progress` a stage starts at the position."""
    selected = {
        name: value
        for name, value in progress.items()
        if not (config.skip_progress if name.startswith("total_") else config.skip_dataloader)
    }
    if config.skip_progress and (position := selected.get("position")):
        selected["position"] = {**position, "start": [position["epoch"], position["offset"]]}
    return selected


def _optimizer_tensors(
    parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, shard_map: ShardMap
) -> tuple[dict[str, Tensor], dict[str, ShardSlice]]:
    """Optimizer state as `<parameter>/<moment>`, and the slices of the moments shaped like the parameter.

    Scalar state such as the step count is saved by the rank with the first shard.
    """
    moments, boxes = {}, {}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                moments[f"{name}/{key}"], boxes[f"{name}/{key}"] = value, shard_map.local[name]
            elif isinstance(value, Tensor) and not any(shard_map.local[name].offset):
                moments[f"{name}/{key}"] = value
    return moments, boxes


def _load_optimizer(
    saved: Shards, parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, shard_map: ShardMap, source: Path
) -> None:
    """Load the moments with `load_state_dict`, which moves each to the device of its parameter."""
    ordered = [p for group in optimizer.param_groups for p in group["params"]]
    index = {id(p): i for i, p in enumerate(ordered)}
    state: dict[int, dict[str, Tensor]] = {}
    for key in saved:
        name, _, moment = key.rpartition("/")
        if name not in shard_map.by_name:
            raise ValueError(f"{source} contains moments of {name}, which this run does not train")
        if name not in parameters:  # on another rank
            continue
        parameter = parameters[name]
        covers = saved.shape(key) == shard_map.full_shape(name)
        value = shard_like(saved.read(key, shard_map.local[name]), parameter) if covers else saved.read(key)
        state.setdefault(index[id(parameter)], {})[moment] = value
    kinds = [ADAMW if "betas" in group else SGD for group in optimizer.param_groups for _ in group["params"]]
    for i, moments in state.items():
        if not moments.keys() <= kinds[i]:
            raise ValueError(
                f"{source} was written by another optimizer: use the original optim.type, or ckpt.skip_optimizer"
            )
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _load_average(directory: Path, num_ranks: int, average: Mapping[str, Tensor], shard_map: ShardMap) -> None:
    if not (directory / shard_name(AVERAGE, 0, num_ranks)).is_file():
        raise ValueError(f"{directory} has no moving average of the weights: it was written without ema_decay")
    with open_shards(directory, AVERAGE, num_ranks) as saved:
        for name, mean in average.items():
            mean.copy_(saved.read(name, shard_map.local[name]))


def _rng_tensors(ranks: Ranks) -> dict[str, Tensor]:
    """RNG states of this rank: CPU and accelerator."""
    states = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return states


def _load_rng(directory: Path, num_ranks: int, ranks: Ranks) -> None:
    """Restore the RNG states; ranks that are new in this run keep their seeded state."""
    if ranks.rank >= num_ranks:
        return
    states = load_file(directory / shard_name(RNG, ranks.rank, num_ranks))
    torch.set_rng_state(states["cpu"])
    cuda_state = states.get("cuda", states.get(f"cuda:{ranks.device.index or 0}"))
    if cuda_state is not None and ranks.device.type == "cuda":
        torch.cuda.set_rng_state(cuda_state, ranks.device)
