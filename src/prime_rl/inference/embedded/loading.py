"""Builds the embedded engine from its config, and reads weights for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loguru import logger
from torch import Tensor

from prime_rl.inference.adapters import read_adapter
from prime_rl.inference.config import InferenceConfig
from prime_rl.inference.detokenizer import Decode
from prime_rl.inference.embedded.cuda_graphs import build_recorder
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import AdapterSpec
from prime_rl.inference.grammar import GrammarCompiler
from prime_rl.inference.weight_dirs import allowed_dirs, resolve_allowed
from prime_rl.runtime.core_lease import open_core_lease
from prime_rl.runtime.run_dir import RunDir
from prime_rl.trainer.lora import load_adapter
from prime_rl.trainer.models.causal_lm import tensor_names
from prime_rl.trainer.models.placement import find_device, find_dtype, limit_threads
from prime_rl.trainer.models.registry import find_base, load_causal_lm, load_eos_ids, read_files
from prime_rl.transport.broadcast import Broadcast, ReceivedWeights, receive_weights
from prime_rl.transport.deltas import is_delta, read_version
from prime_rl.transport.weights import is_adapter, verify_tensors
from rollouts.training.manifests import read_manifest
from rollouts.training.steps import is_complete
from rollouts.training.tensor_files import MappedTensors


@dataclass(frozen=True)
class WeightReader:
    """Reads weights independently of the engine, which keeps serving."""

    config: InferenceConfig
    model_dir: Path
    engine: EmbeddedEngine | None = None
    """The engine whose weights deltas are applied to; None: to full weights only."""

    def read_base(self) -> tuple[dict[str, Tensor], int]:
        """Read the initial weights, as version 0."""
        debug = self.config.model.debug
        model = load_causal_lm(
            self.model_dir,
            impl=self.config.model.impl,
            random_init=debug.random_init,
            num_layers=debug.num_layers,
            seed=debug.seed,
        )
        return tensor_names(model), 0

    def read_step(self, directory: Path) -> tuple[dict[str, Tensor], int]:
        """Read tensors and version of a published directory, or build them from its delta; verified by its manifest.

        `ValueError` if it is incomplete, corrupt, or has no manifest.
        """
        if not directory.is_dir():
            raise ValueError(f"{directory} does not exist")
        if not is_complete(directory):
            raise ValueError(f"{directory} is incomplete: it has no STABLE marker")
        if is_delta(directory):
            held = None if self.engine is None else (self.engine.version, self.engine.tensors())
            return read_version(directory, held, RunDir(directory.parents[1]).weights, self._read_allowed)
        manifest, tensors = read_manifest(directory), MappedTensors(read_files(directory))
        verify_tensors(tensors, manifest)
        return tensors, manifest.step

    def _read_allowed(self, directory: Path) -> dict[str, Tensor]:
        return read_files(resolve_allowed(str(directory), allowed_dirs(self.config)))

    def read_adapter(self, directory: Path, version: int | None = None) -> tuple[dict[str, Tensor], AdapterSpec]:
        """Read tensors and spec of a LoRA adapter; see `read_adapter`."""
        return read_adapter(directory, version)

    def find_other_base(self, directory: Path, held: Path | None) -> Path | None:
        """The base model of an adapter if it is not the model in the engine; see `WeightSource`."""
        if not is_adapter(self.model_dir):
            return None
        base = find_base(directory, load_adapter(directory))
        return None if base.resolve() == (held or self.model_dir).resolve() else base

    def read_model(self, directory: Path) -> dict[str, Tensor]:
        """Read the weights of a model directory."""
        return replace(self, model_dir=directory).read_base()[0]

    def receive_step(self, broadcast: Broadcast, step: int) -> ReceivedWeights:
        """Receive a version from the trainer, verified against its manifest."""
        return receive_weights(broadcast, step, self.config.name, find_device(self.config.model.device))


def build_engine(config: InferenceConfig, model_dir: Path, decode: Decode, tokenizer: Any = None) -> EmbeddedEngine:
    """Load the model and build the engine, with grammars if a tokenizer is given; `ValueError` names an invalid key."""
    device = find_device(config.model.device)
    dtype = find_dtype(config.model.dtype, device)
    limit_threads()
    debug = config.model.debug
    model = load_causal_lm(
        model_dir,
        impl=config.model.impl,
        random_init=debug.random_init,
        num_layers=debug.num_layers,
        seed=debug.seed,
        dtype=dtype,
        device=device,
        max_len=config.model.max_model_len,
    )
    model_max_len = model.config.max_position_embeddings
    max_len = config.model.max_model_len
    if max_len is not None and max_len > model_max_len:
        raise ValueError(f"model.max_model_len is {max_len}, but {config.model.name} supports at most {model_max_len}")
    exact = config.exact
    if exact is None:
        exact = device.type == "cpu" and config.model.quantization is None
    eos_ids = load_eos_ids(model_dir)
    if not eos_ids:
        logger.warning(
            "the model names no end token, so every completion runs to max_tokens: add eos_token_id to its "
            "generation_config.json"
        )
    return EmbeddedEngine(
        model,
        eos_ids=eos_ids,
        decode=decode,
        max_model_len=max_len,
        max_running=config.max_batch_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_cache_tokens=config.cache.max_tokens,
        max_prefix_cache_tokens=config.cache.max_prefix_cache_tokens,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        exact=exact,
        speculation=config.speculation,
        layers_kept=debug.num_layers,
        recorder=build_recorder(device, exact=exact, eager=config.enforce_eager),
        grammars=None if tokenizer is None else GrammarCompiler(tokenizer, model.config.vocab_size, eos_ids),
        quantization=config.model.quantization,
        lease=open_core_lease(),
        owns_model=True,
    )
