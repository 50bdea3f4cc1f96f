"""vLLM worker extension: loads a published directory and verifies every tensor in the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prime_rl.inference.adapters import read_adapter
from prime_rl.inference.patches import repack, unpack
from prime_rl.transport.weights import PEFT_PREFIX
from rollouts.training.manifests import digest_tensor, read_index

TensorGetter = Callable[[], Tensor]
EXPERT_PARTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}


@dataclass
class Report:
    """Result of comparing a worker's weights with a directory."""

    digests: dict[str, str] = field(default_factory=dict)
    rounded: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    repaired: list[str] = field(default_factory=list)


class WeightWorker:
    """Mixed into vLLM's worker by `--worker-extension-cls`; public methods are called on all workers."""

    model_runner: Any
    vllm_config: Any
    rank: int

    def load_published_weights(self, directory: str) -> dict[str, Any]:
        """Load with vLLM's loader, then verify. `RuntimeError` if the worker's weights differ.

        On a CPU, vLLM 0.32 keeps stale packed copies (the output layer of models with tied embeddings): these are
        repacked and verified again.
        """
        self.model_runner.reload_weights(weights_path=directory)
        report = self._compare(directory)
        if report.wrong:
            stale = report.wrong
            repack(self.model_runner.get_model())
            report = self._compare(directory)
            report.repaired = [name for name in stale if name not in report.wrong]
        if report.wrong:
            shown = ", ".join(report.wrong[:3]) + (
                f" and {len(report.wrong) - 3} more" if len(report.wrong) > 3 else ""
            )
            raise RuntimeError(f"worker {self.rank} differs from {directory} after loading it: {shown}")
        return dict(report.__dict__)

    def compare_published_weights(self, directory: str) -> dict[str, Any]:
        """Compare the worker's weights with a directory, without loading."""
        return dict(self._compare(directory).__dict__)

    def load_published_adapter(self, directory: str, name: str, adapter_id: int) -> dict[str, Any]:
        """Load a LoRA adapter, replacing the one with this id, then verify. `RuntimeError` if it differs.

        It stays in memory: otherwise, once other adapters have replaced it there, a request that began with an earlier
        version would load that version's files in its place, for all requests.
        """
        from vllm.lora.request import LoRARequest

        self.model_runner.add_lora(LoRARequest(name, adapter_id, directory, load_inplace=True))
        manager, parallel = self.model_runner.lora_manager._adapter_manager, self.vllm_config.parallel_config
        if manager.capacity > 1:  # there must be room for others
            manager._registered_adapters.pin(adapter_id)
        size = parallel.tensor_parallel_size
        with torch.inference_mode():
            loaded = list_adapter_tensors(
                manager.modules, manager.packed_modules, manager.lora_index_to_id.index(adapter_id)
            )
            report = compare_adapter(loaded, Path(directory), self.rank % size, size)
        if report.wrong:
            raise RuntimeError(
                f"worker {self.rank} differs from {directory} after loading it: {', '.join(report.wrong[:3])}"
            )
        return dict(report.__dict__)

    def remove_published_adapter(self, adapter_id: int) -> None:
        """Unload an adapter; no effect if it is not loaded."""
        if self.model_runner.lora_manager is not None:
            self.model_runner.remove_lora(adapter_id)

    def _compare(self, directory: str) -> Report:
        model, parallel = self.model_runner.get_model(), self.vllm_config.parallel_config
        tied = bool(getattr(self.vllm_config.model_config.hf_config, "tie_word_embeddings", False))
        size = parallel.tensor_parallel_size
        with torch.inference_mode():
            return compare(list_loaded_tensors(model), read_published(Path(directory)), self.rank % size, size, tied)


def compare(
    loaded: Mapping[str, list[TensorGetter]],
    published: Mapping[str, TensorGetter],
    rank: int,
    size: int,
    tied: bool = False,
) -> Report:
    """Compare every published tensor with its shard on rank `rank` of `size`."""
    report = Report()
    names = dict.fromkeys([*published, *loaded])
    for name in names:
        source = published.get(name)
        if source is None and tied and name == "lm_head.weight":
            source = published.get("model.embed_tokens.weight")
        if source is None:
            report.wrong.append(f"{name} (not published)")
        elif name not in loaded:
            report.unknown.append(name)
        else:
            _compare_tensor(report, name, source(), [get() for get in loaded[name]], rank, size)
    return report


def _compare_tensor(report: Report, name: str, published: Tensor, loaded: list[Tensor], rank: int, size: int) -> None:
    rounded = False
    for local in loaded:
        share = cut_share(published, local.shape, rank, size)
        if share is None:
            report.unknown.append(name)
            return
        local = local[tuple(slice(0, n) for n in share.shape)].to("cpu")
        same = torch.equal(local.to(share.dtype), share)
        if not same and not torch.equal(local, share.to(local.dtype)):
            report.wrong.append(name)
            return
        rounded |= not same
    if rounded:
        report.rounded.append(name)
    else:
        report.digests[name] = digest_tensor(published)


def cut_share(published: Tensor, shape: torch.Size, rank: int, size: int) -> Tensor | None:
    """The part of a tensor that belongs to a shard of `shape`; further rows are padding. None if it does not fit."""
    if published.shape == shape:
        return published
    if published.dim() != len(shape):
        return None
    axes = [axis for axis in range(len(shape)) if published.shape[axis] != shape[axis]]
    if len(axes) != 1:
        return None
    axis, have, want = axes[0], published.shape[axes[0]], shape[axes[0]]
    if have > want and have % want == 0 and have // want < size:
        rank = rank // (size // (have // want))  # fewer heads than ranks: heads are replicated
    start = min(rank * want, have)
    return published.narrow(axis, start, min(want, have - start))


def list_loaded_tensors(model: nn.Module) -> dict[str, list[TensorGetter]]:
    """The model's tensors by their published names, with fused tensors split.

    Several entries of one name are copies that must agree, such as an embedding and its packed form.
    """
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", None) or {}
    found: dict[str, list[TensorGetter]] = {}
    for path, module in model.named_modules():
        path = path.removesuffix(".base_layer")  # LoRA-wrapped layers
        for kind, parameter in module.named_parameters(recurse=False):
            for name, get in _entries(path, module, kind, parameter, fused):
                found.setdefault(name, []).append(get)
    return found


def _entries(
    path: str, module: Any, kind: str, parameter: Tensor, fused: Mapping[str, list[str]]
) -> Iterator[tuple[str, TensorGetter]]:
    parent, _, leaf = path.rpartition(".")
    if kind in EXPERT_PARTS and parameter.dim() == 3:
        yield from _expert_entries(path, kind, parameter)
        return
    copies = [lambda: parameter] if parameter.numel() else []
    if kind == "weight" and hasattr(module, "cpu_linear"):
        copies.append(lambda: unpack(module))
    for copy in copies:
        if leaf not in fused:
            yield f"{path}.{kind}", copy
            continue
        sizes = list(module.output_partition_sizes)
        for i, part in enumerate(fused[leaf]):
            yield f"{parent}.{part}.{kind}", _rows(copy, sum(sizes[:i]), sizes[i])


def _expert_entries(path: str, kind: str, parameter: Tensor) -> Iterator[tuple[str, TensorGetter]]:
    parts = EXPERT_PARTS[kind]
    rows = parameter.shape[1] // len(parts)
    for expert in range(parameter.shape[0]):
        for i, part in enumerate(parts):
            yield f"{path}.{expert}.{part}.weight", _rows(lambda e=expert: parameter[e], i * rows, rows)  # type: ignore[misc]


def list_adapter_tensors(
    modules: Mapping[str, Any], packed: Mapping[str, list[str]], slot: int
) -> dict[str, tuple[Tensor, Tensor]]:
    """`lora_A [max rank, in]` and `lora_B [out, max rank]` of a LoRA slot by published names; one of the two is
    sharded across workers."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for path, module in modules.items():
        names = packed.get(path) or [path]
        stacks = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
        found |= {name: (a[slot, 0], b[slot, 0]) for name, (a, b) in zip(names, stacks, strict=True)}
    return found


def compare_adapter(loaded: Mapping[str, tuple[Tensor, Tensor]], directory: Path, rank: int, size: int) -> Report:
    """Compare every matrix of a published adapter with the worker's (B scaled); unpublished ones must be zero."""
    tensors, spec = read_adapter(directory, 0)
    report = Report()
    for name in dict.fromkeys([key.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for key in tensors]):
        if name not in loaded:
            report.wrong.append(f"{name} (not adapted here)")
    for name, (a, b) in loaded.items():
        for kind, local, scale in (("lora_A", a, 1.0), ("lora_B", b, spec.alpha / spec.rank)):
            key = f"{PEFT_PREFIX}{name}.{kind}.weight"
            local = local.to("cpu")
            if (published := tensors.get(key)) is None:
                if kind == "lora_B" and local.any():
                    report.wrong.append(f"{key} (not published)")
                continue
            wide = local[: spec.rank] if kind == "lora_A" else local[:, : spec.rank]
            share = cut_share(published, wide.shape, rank, size)
            if share is None:
                report.unknown.append(key)
                continue
            expected = share.to(local.dtype) if scale == 1 else share.to(local.dtype) * scale
            if not torch.equal(wide, expected):
                report.wrong.append(key)
            elif torch.equal(share.to(local.dtype).to(share.dtype), share):
                report.digests[key] = digest_tensor(published)
            else:
                report.rounded.append(key)
    return report


def _rows(get: TensorGetter, start: int, length: int) -> TensorGetter:
    return lambda: get()[start : start + length]


def read_published(directory: Path) -> dict[str, TensorGetter]:
    """The tensors of a directory's safetensors files, loaded lazily."""
    from safetensors import safe_open

    files = read_index(directory)
    if not files:
        with safe_open(directory / "model.safetensors", "pt") as handle:
            files = dict.fromkeys(handle.keys(), "model.safetensors")

    def reader(name: str, file: str) -> TensorGetter:
        def read() -> Tensor:
            with safe_open(directory / file, "pt") as handle:
                return handle.get_tensor(name)

        return read

    return {name: reader(name, file) for name, file in files.items()}
