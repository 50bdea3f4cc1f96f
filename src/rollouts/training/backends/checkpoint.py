"""Reads and writes checkpoint directories; the format is the same for one device and for sharded parameters.

    step_N/  pytorch_model.bin  optimizer.bin  metadata.json  [config.json  generation_config.json]  [tokenizer files]
             STABLE

Both `.bin` files contain full tensors by parameter name. They are loaded with `weights_only=True`, which executes no
code.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollouts.training.backends.ranks import Ranks, is_shard
from rollouts.training.json_files import read_json_file
from rollouts.training.manifests import build_manifest, write_manifest
from rollouts.training.steps import is_complete, latest_step, step_path
from rollouts.training.tensor_files import save_tensors

FORMAT = 1
COMPILED = "_orig_mod"
"""Attribute of a model of `torch.compile` with the module that it wraps, and prefix of the names of its tensors."""
MODEL_FILE, OPTIMIZER_FILE, METADATA_FILE, CONFIG_FILE, GENERATION_FILE = (
    "pytorch_model.bin",
    "optimizer.bin",
    "metadata.json",
    "config.json",
    "generation_config.json",
)


@dataclass(frozen=True)
class Checkpoint:
    """The contents of a checkpoint directory."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    metadata: dict[str, Any]


def latest_checkpoint(checkpoint_dir: Path) -> Path | None:
    """The complete checkpoint with the highest step (10000 after 9999), or None."""
    step = latest_step(checkpoint_dir)
    return None if step is None else step_path(checkpoint_dir, step)


def write_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Write model, optimizer and metadata."""
    torch.save(checkpoint.model, directory / MODEL_FILE)
    torch.save(checkpoint.optimizer, directory / OPTIMIZER_FILE)
    metadata = {"format": FORMAT, **checkpoint.metadata}
    (directory / METADATA_FILE).write_text(json.dumps(metadata, indent=2, allow_nan=False), encoding="utf-8")


def read_checkpoint(path: Path) -> Checkpoint:
    """Read `step_N`. `ValueError` if it is incomplete, of another format, or contains other objects than tensors."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory: pass a checkpoint such as checkpoints/step_10")
    if not is_complete(path):
        raise ValueError(f"{path} is not a complete checkpoint: its writer was interrupted, use an earlier step")
    metadata = read_json_file(path / METADATA_FILE)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} has checkpoint format {metadata.get('format')}, this version reads format {FORMAT}")
    model, optimizer = read_tensors(path / MODEL_FILE), read_tensors(path / OPTIMIZER_FILE)
    if any(name.startswith(COMPILED) for name in model):  # earlier versions kept the prefix
        model, optimizer = _without_prefix(model), _without_prefix(optimizer)
    return Checkpoint(model, optimizer, metadata)


def unwrap_compiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module that a model of `torch.compile` wraps; any other model itself."""
    wrapped: torch.nn.Module = getattr(model, COMPILED, model)
    return wrapped


def collect_model(model: torch.nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """Full tensors of the state dict, on the CPU of rank 0; empty on other ranks. Collective."""
    return collect_tensors(model.state_dict().items(), ranks)


def collect_tensors(tensors: Iterable[tuple[str, Tensor]], ranks: Ranks) -> dict[str, Tensor]:
    """Full tensors by name, gathered one after the other, on the CPU of rank 0. Collective."""
    return _collect_on_rank0(((name, _full_tensor(tensor, ranks)) for name, tensor in tensors), ranks)


def collect_optimizer(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ranks: Ranks) -> dict[str, Any]:
    """`{"state": {parameter: moments}, "param_groups": [{..., "params": [names]}]}` with full tensors. Collective."""
    names = name_parameters(model, optimizer)
    state = {
        names[id(parameter)]: _collect_on_rank0(
            ((key, _full_tensor(value, ranks)) for key, value in moments.items()), ranks
        )
        for parameter, moments in optimizer.state.items()
    }
    groups = [
        {key: _as_plain(value) for key, value in group.items()} | {"params": [names[id(p)] for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {"state": state, "param_groups": groups}


def check_model(model: torch.nn.Module, saved: Mapping[str, Tensor], source: str) -> None:
    """Raise `ValueError` naming the first tensor that is missing, unexpected, or of another shape."""
    own = model.state_dict()
    for name in sorted(saved.keys() | own.keys()):
        if name not in saved or name not in own or saved[name].shape != own[name].shape:
            raise ValueError(f"{source} belongs to another model: {_difference(name, saved, own)}")


@torch.no_grad()
def restore_model(model: torch.nn.Module, saved: Mapping[str, Tensor], source: str) -> None:
    """Copy full tensors, or this rank's shards of them, into the model, after `check_model`."""
    check_model(model, saved, source)
    for name, tensor in model.state_dict().items():
        tensor.copy_(_match_sharding(saved[name], tensor))


def restore_optimizer(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], source: str
) -> None:
    """Restore the optimizer state. Groups must have the same parameters in the same order."""
    names = name_parameters(model, optimizer)
    own = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if own != [group["params"] for group in saved["param_groups"]]:
        raise ValueError(f"the optimizer of {source} steps other parameters: build it as in the run it comes from")
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    index = {name: i for i, name in enumerate(parameters)}
    state = {
        index[name]: {
            key: _match_sharding(value, parameters[name]) if _covers(value, parameters[name]) else value
            for key, value in moments.items()
        }
        for name, moments in saved["state"].items()
    }
    positions = iter(range(len(parameters)))
    groups = [{**group, "params": [next(positions) for _ in group["params"]]} for group in saved["param_groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def name_parameters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Name of each parameter by `id`. `ValueError` if the optimizer has a parameter that is not the model's."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ValueError(
                    f"the optimizer steps a parameter of shape {list(parameter.shape)} that the model does not have: "
                    "build it from model.parameters() after the model is on its device"
                )
    return names


def collect_rng(ranks: Ranks) -> dict[str, list[str]]:
    """Random states of torch (CPU and CUDA) per rank, base64-encoded."""
    states = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return {
        name: [base64.b64encode(part.numpy().tobytes()).decode() for part in ranks.gather(state)]
        for name, state in states.items()
    }


def restore_rng(saved: Mapping[str, list[str]], ranks: Ranks) -> None:
    """The inverse; additional ranks start from rank 0's state."""

    def state(name: str) -> Tensor:
        texts = saved[name]
        data = base64.b64decode(texts[ranks.rank] if ranks.rank < len(texts) else texts[0])
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    torch.set_rng_state(state("cpu"))
    if "cuda" in saved and ranks.device.type == "cuda":
        torch.cuda.set_rng_state(state("cuda"), ranks.device)


def write_weights(directory: Path, step: int, model: torch.nn.Module, state: Mapping[str, Tensor]) -> None:
    """Write `model.safetensors` without the aliases of tied tensors, and its manifest."""
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    aliases -= {name for name, _ in model.named_parameters()}
    tensors = {name: tensor.contiguous() for name, tensor in state.items() if name not in aliases}
    save_tensors(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_manifest(directory, build_manifest(step, tensors))


def write_model_card(directory: Path, model: torch.nn.Module, architecture: str, tokenizer: Any) -> None:
    """Write configurations and tokenizer, if present, so that `from_pretrained` can load the directory."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_string"):
        fields = json.loads(config.to_json_string())
        fields["architectures"] = fields.get("architectures") or [architecture]
        (directory / CONFIG_FILE).write_text(json.dumps(fields, indent=2), encoding="utf-8")
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "to_json_string"):  # not its `save_pretrained`, which refuses some published configurations
        (directory / GENERATION_FILE).write_text(generation.to_json_string(), encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(str(directory))


def finite_or_null(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Replace values that are not finite by None, for JSON."""
    return {name: float(value) if math.isfinite(float(value)) else None for name, value in metrics.items()}


def read_tensors(path: Path) -> dict[str, Any]:
    """Load a torch zip file with tensors and plain values only (no code); `ValueError` if it is damaged or unsafe."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # torch distinguishes truncated, invalid and unsafe files only in the text of the error.
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} cannot be read as tensors and numbers only: {reason}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} contains a {type(content).__name__}, not tensors by name")
    return content


def _without_prefix(value: Any) -> Any:
    """`value` with its names as those of a model that is not compiled."""
    if isinstance(value, dict):
        return {_without_prefix(key): _without_prefix(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_prefix(item) for item in value]
    return value.removeprefix(f"{COMPILED}.") if isinstance(value, str) else value


def _collect_on_rank0(entries: Iterator[tuple[str, Any]], ranks: Ranks) -> dict[str, Any]:
    """Iterate `entries` on all ranks, because gathering them is collective, and store them on rank 0."""
    out = {}
    for name, value in entries:
        if ranks.rank == 0:
            out[name] = value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
    return out


def _as_plain(value: Any) -> Any:
    """A setting without NumPy scalars, which `read_tensors` refuses, also in a list or tuple such as `betas`."""
    if isinstance(value, list | tuple):
        return type(value)(map(_as_plain, value))
    return value.item() if hasattr(value, "item") and not isinstance(value, Tensor) else value


def _full_tensor(value: Any, ranks: Ranks) -> Any:
    if not is_shard(value):
        return value
    # Offloaded shards are on the CPU, but the process group may support accelerator tensors only.
    local: Any = value.detach().to(ranks.device)
    return local.full_tensor()


def _match_sharding(whole: Tensor, own: Tensor) -> Tensor:
    """The full tensor with the sharding of `own`: unchanged, or this rank's shard."""
    if not is_shard(own):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.detach(), own.device_mesh, own.placements, src_data_rank=None)


def _covers(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _difference(name: str, saved: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    if name not in saved:
        return f"it has no {name}"
    if name not in own:
        return f"the model has no {name}"
    return f"{name} has shape {list(saved[name].shape)} there and {list(own[name].shape)} here"
