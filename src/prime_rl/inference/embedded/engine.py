"""The embedded engine: continuous batching with the trainer's model code.

In exact mode, log-probs are bitwise equal to the trainer's for the same tokens and weights (on a CPU), regardless of
batching, prefix sharing, preemption and chunked prefill: every matrix product has a minimum number of rows, keys are
padded to `KEY_MULTIPLE`, and running sequences are recomputed after a weight update. Fast mode skips these measures
and keeps the cache of running sequences across updates.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from prime_rl.inference.config import Quantization
from prime_rl.inference.detokenizer import Decode, Detokenizer, StopStringMatcher
from prime_rl.inference.embedded.adapters import Adapters
from prime_rl.inference.embedded.block_manager import BlockManager, SlotBlocks
from prime_rl.inference.embedded.cuda_graphs import GraphCapturer, GraphDecoder, find_decode_kernels
from prime_rl.inference.embedded.kv_cache import BLOCK, KVCache, num_blocks
from prime_rl.inference.embedded.model_runner import ModelRunner
from prime_rl.inference.embedded.paged_blocks import PagedBlocks
from prime_rl.inference.embedded.prefix_cache import PrefixIndex
from prime_rl.inference.embedded.prepared_decoder import PreparedDecoder
from prime_rl.inference.embedded.sampler import SamplerOutput, has_penalty
from prime_rl.inference.embedded.scheduler import ScheduledBatch, Scheduler
from prime_rl.inference.embedded.sequence import Sequence
from prime_rl.inference.embedded.speculation import Drafter
from prime_rl.inference.embedded.step_costs import StepCosts
from prime_rl.inference.engine import (
    FULL,
    AdapterSpec,
    ComputeDigests,
    EngineStats,
    Event,
    GenerationRequest,
    InProcessEngineMixin,
    Output,
    SamplingParams,
)
from prime_rl.inference.grammar import GrammarCompiler, GrammarState
from prime_rl.runtime.core_lease import MIN_PARAMETERS, CoreLease
from prime_rl.runtime.machine import SHARED_GPU_VARIABLE, find_memory
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.registry import fill_weights
from prime_rl.transport.digests import digest_tensors
from rollouts.training.sampling_support import check_supports

PADDED_TOKENS, FLASH_TOKENS = 2048, 8192
"""Default prompt tokens of a pass: with their attention scores in memory, and without."""

MAX_ROW_WORK = 1 << 24
"""Pairs of query and key x heads x dimensions of prompt chunks up to which the fused decode step computes them.

SmolLM2: it takes half as long as a pass over chunks for 64 tokens, as long for 64 after 500 or 16 after 2,000 others.
"""

MEMORY_SHARE = 4
"""By default, the KV cache takes at most 1 / MEMORY_SHARE of the memory; of the free memory of a GPU that no other
process of the run uses, 3 / MEMORY_SHARE."""

PREFIX_MEMORY_SHARE = 64
"""By default, the prefix cache takes at most 1 / PREFIX_MEMORY_SHARE of the memory of a machine without a GPU."""


class EmbeddedEngine(InProcessEngineMixin):
    """Implements `prime_rl.inference.engine.GenerationEngine` over a slot-based KV cache; not thread-safe."""

    def __init__(
        self,
        model: CausalLM,
        *,
        eos_ids: Iterable[int] = (),
        decode: Decode | None = None,
        max_model_len: int | None = None,
        max_running: int = 256,
        max_num_batched_tokens: int | None = None,
        max_cache_tokens: int | None = None,
        max_prefix_cache_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        exact: bool = True,
        speculation: bool = True,
        layers_kept: int | None = None,
        recorder: GraphCapturer | None = None,
        grammars: GrammarCompiler | None = None,
        quantization: Quantization | None = None,
        lease: CoreLease | None = None,
        owns_model: bool = False,
    ) -> None:
        """`owns_model`: nothing else uses the model, so weights need not be kept beside those that kernels hold."""
        self.dtype = model.embedding().dtype
        """Precision to which weights, keys and values are rounded; storage and compute may use a wider dtype."""
        self.quantization = quantization
        device = model.embedding().device
        if quantization is not None and (exact or device.type != "cpu"):
            raise ValueError(f'model.quantization = "{quantization}" needs a CPU and exact = false')
        self.model = model.eval().requires_grad_(False)
        self.version = 0
        self.exact = exact
        """Whether log-probs are bitwise equal to those of a trainer with the same `arithmetic`."""
        self.max_model_len = max_model_len or model.config.max_position_embeddings
        self._eos_ids = frozenset(eos_ids)
        self._decode_text = decode
        self._grammars = grammars
        self._layers_kept = layers_kept
        decoder = PreparedDecoder(model, exact, self.dtype, None if quantization is None else torch.int8, owns_model)
        if quantization is not None and decoder.fused is None:
            raise ValueError(
                f'model.quantization = "{quantization}" needs a dense decoder with impl = "custom" and a C compiler'
            )
        self._decoder, self.arithmetic = decoder, model.arithmetic
        smallest = (num_blocks(self.max_model_len + 1) + decoder.min_rows) * BLOCK  # of one sequence
        self.max_cache_tokens = max(max_cache_tokens or self._default_cache_tokens(max_running), smallest)
        records = recorder is not None and decoder.is_static
        is_paged = find_decode_kernels(model.config, device) is not None if records else decoder.fused is not None
        num_kept = self._default_prefix_tokens() if max_prefix_cache_tokens is None else max_prefix_cache_tokens
        max_cached = self.max_cache_tokens + (num_kept if is_paged else 0)  # others copy what they keep
        cache = KVCache(self._cache_config, self.dtype, device, max_running, max_cached)
        graphs = None
        if recorder is not None and records:
            assert not exact, "CUDA graphs may differ in the last bits"
            graphs = GraphDecoder(decoder, cache, recorder, self.max_model_len + 1)
        self._prefixes = PrefixIndex(num_kept)
        shares = enable_prefix_caching and not model.recomputes
        self._blocks: BlockManager = (
            PagedBlocks(cache, self._prefixes, shares, self.max_cache_tokens)
            if is_paged
            else SlotBlocks(cache, self._prefixes, shares)
        )
        self._adapters = Adapters(model, decoder.arithmetic)
        can_verify = decoder.fused is not None and graphs is None
        head = decoder.head.kernel if can_verify else None
        drafter = Drafter(self._adapters, StepCosts.of_head(head)) if speculation and head is not None else None
        pads = decoder.prefill_kernels is None
        budget = max_num_batched_tokens or (PADDED_TOKENS if pads else FLASH_TOKENS)
        chunk_pairs = MAX_ROW_WORK // (model.config.num_attention_heads * model.config.head_dim) if can_verify else 0
        self._scheduler = Scheduler(
            self._blocks, self._adapters, max_running, budget, decoder.min_rows, pads, chunk_pairs, drafter
        )
        self._runner = ModelRunner(decoder, self._blocks, self._adapters, exact, graphs)
        is_large = sum(p.numel() for p in model.parameters()) >= MIN_PARAMETERS
        # Bits of the kernels do not depend on the number of threads.
        can_lease = lease is not None and lease.directory is not None and decoder.fused is not None and is_large
        self._lease = lease if can_lease else None
        self._num_threads = torch.get_num_threads()
        self._sequences: dict[GenerationRequest, Sequence] = {}
        self._num_prompt_tokens = self._num_steps = 0

    @property
    def vocab_size(self) -> int:
        """Vocabulary size; token ids are below it."""
        return self.model.config.vocab_size

    @property
    def max_score_len(self) -> int:
        """Maximum length of a scored sequence: the model's context length, if the cache is large enough."""
        capacity = (self.max_cache_tokens // BLOCK - self._decoder.min_rows) * BLOCK - 1
        return max(min(self.model.config.max_position_embeddings, capacity), self.max_model_len - 1)

    def check(self, request: GenerationRequest) -> None:
        """`ValueError` if the prompt is too long or has tokens of another model, or the request is unsupported."""
        num_prompt, params = len(request.prompt), request.params
        longest = self.max_score_len if params.max_tokens == 0 else self.max_model_len - 1
        if not 0 < num_prompt <= longest:
            raise ValueError(f"a prompt of {num_prompt} tokens does not fit in {longest + (params.max_tokens > 0)}")
        if (largest := max(request.prompt)) >= self.vocab_size:  # kernels would read other memory
            raise ValueError(
                f"the prompt has token id {largest}, but the model has {self.vocab_size} tokens: its tokenizer does "
                "not fit, use that of the model"
            )
        if params.max_tokens < (params.prompt_logprobs is None):
            raise ValueError(f"max_tokens must be at least 1, got {params.max_tokens}")
        if params.prompt_logprobs is not None and (params.prompt_logprobs < FULL or params.prompt_temperature <= 0):
            raise ValueError("prompt_logprobs must be at least 0 and prompt_temperature above 0")
        if params.prompt_logprobs is not None and not 1 <= params.prompt_start <= max(num_prompt - 1, 1):
            raise ValueError(f"prompt_start {params.prompt_start} must be from 1 to the last of {num_prompt} tokens")
        if params.prompt_support:
            check_supports(params.prompt_support, request.prompt[params.prompt_start :], self.vocab_size)
        if request.adapter is not None and request.adapter not in self._adapters.served:
            raise ValueError(f"no adapter {request.adapter!r} is loaded")
        self._open_grammar(params)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; raises as `check`."""
        self.check(request)
        num_prompt, params = len(request.prompt), request.params
        eos_ids = self._adapters.eos_ids(request.adapter) | self._eos_ids
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        stop_strings = None
        if params.stop and self._decode_text is not None:
            detokenizer = Detokenizer(self._decode_text, params.skip_special_tokens, request.context)
            stop_strings = StopStringMatcher(detokenizer, params.stop, params.include_stop)
        seq = Sequence(
            request=request,
            eos_ids=eos_ids,
            stop_ids=frozenset(token for token in stop_ids if token < self.vocab_size),  # the others have no logit
            tokens=list(request.prompt),
            num_prompt=num_prompt,
            max_tokens=max(min(num_prompt + params.max_tokens, self.max_model_len), num_prompt),
            stop_strings=stop_strings,
            cache_namespace=self._adapters.cache_namespace(request.adapter),
            grammar=self._open_grammar(params),
            can_draft=params.grammar is None and not has_penalty(params),
            prompt_key=hash(tuple(request.prompt)),
        )
        self._sequences[request] = seq
        self._scheduler.waiting.append(seq)
        self._num_prompt_tokens += num_prompt

    @torch.inference_mode()
    def cancel(self, request: GenerationRequest) -> None:
        """Cancel a request; no effect if it has finished."""
        seq = self._sequences.pop(request, None)
        if seq is not None:
            self._scheduler.remove(seq)

    @torch.no_grad()
    def load_adapter(self, name: str, tensors: dict[str, Tensor], spec: AdapterSpec) -> dict[str, str]:
        """Add or replace a LoRA adapter (PEFT tensor names); returns the digest of every loaded tensor.

        Running requests continue with the new one, as after `load_weights`. `ValueError` without changes if it does
        not fit.
        """
        if self.model.recomputes:
            raise ValueError("adapters cannot be served for this architecture: set model.lora.merge = true")
        try:
            digests = self._adapters.load(name, tensors, spec)
        finally:
            self._runner.forget_adapter(name)
        mine = [seq for seq in self._scheduler.running if seq.request.adapter == name]
        for seq in mine:
            seq.mark_version(spec.version)
        if self.exact:
            self._scheduler.recompute(mine)
        # Those that have keys, in fast mode, go on with them; the others must not share such keys.
        for seq in (*self._scheduler.waiting, *(seq for seq in mine if not seq.num_cached)):
            seq.cache_namespace = self._adapters.cache_namespace(seq.request.adapter)
        return digests

    @torch.inference_mode()
    def remove_adapter(self, name: str) -> list[Event]:
        """Unload an adapter and abort its requests, as `abort`; `ValueError` if it is not loaded."""
        self._adapters.remove(name)
        self._runner.forget_adapter(name)
        return self._abort_all([seq for seq in self._sequences.values() if seq.request.adapter == name])

    def adapters(self) -> dict[str, AdapterSpec]:
        """Loaded adapters by name; in any thread, while others are loaded."""
        return {name: served.spec for name, served in list(self._adapters.served.items())}

    @torch.inference_mode()
    def abort(self) -> list[Event]:
        """Abort every request; partial completions are returned with finish_reason "abort"."""
        return self._abort_all(list(self._sequences.values()))

    def has_work(self) -> bool:
        """Whether a request is queued or running."""
        return bool(self._sequences)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Run one forward pass: over chunks of pending prompts, of a token of other running sequences, or of both."""
        batch = self._scheduler.schedule(self._runner.in_flight)
        for seq in batch.admitted:
            seq.mark_version(self._version_of(seq))
        start = time.perf_counter()
        sampled = self._runner.run(batch) if self._lease is None else self._run_leased(self._lease, batch)
        events = self._scheduler.postprocess(batch, sampled, time.perf_counter() - start)
        for event in events:
            if isinstance(event, Output):
                del self._sequences[event.request]
        self._num_steps += 1
        return events

    @torch.no_grad()
    def load_weights(self, tensors: dict[str, Tensor], version: int) -> ComputeDigests:
        """Copy `tensors` into the weights in place.

        A tensor published in another dtype is digested in that dtype, so equal digests imply lossless loading.
        `ValueError` without changes if names or shapes do not match.
        """
        given = fill_weights(self.model, tensors, ignore_layers_from=self._layers_kept, source="the new weights")
        if any(tensor.itemsize > self.dtype.itemsize for tensor in given.values()):
            for name, parameter in self.model.named_parameters():
                is_kept = self.model.stays_float32(name)
                if parameter.dtype != self.dtype and not parameter.is_meta and not is_kept:
                    parameter.copy_(parameter.to(self.dtype))
        self._decoder.refresh(given)
        self._change_version(version)
        compute = partial(_digest, self.tensors(), {name: tensor.dtype for name, tensor in tensors.items()})
        if self._decoder.device.type == "cpu":
            return compute
        digests = compute()  # now: other threads must not use a GPU while a graph is captured
        return lambda: digests

    def tensors(self) -> Mapping[str, Tensor]:
        """The weights by the names of the checkpoint, possibly in a wider dtype; each is read when it is looked up."""
        return self._decoder.tensors()

    def stats(self) -> EngineStats:
        """Counters for `/metrics`."""
        scheduler = self._scheduler
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            shared_prompt_tokens=self._blocks.num_shared,
            preempted=scheduler.num_preempted,
            cached_tokens=self._blocks.count_cached(scheduler.running) + self._prefixes.num_kept_tokens,
            kept_tokens=self._prefixes.num_kept_tokens,
            cache_size=self.max_cache_tokens + self._prefixes.max_prefix_cache_tokens,
            prompt_tokens=self._num_prompt_tokens,
            generated_tokens=scheduler.num_generated,
            finished=scheduler.num_finished,
            steps=self._num_steps,
            drafted_tokens=scheduler.num_drafted,
            accepted_tokens=scheduler.num_accepted,
        )

    def _change_version(self, version: int) -> None:
        """Invalidate the prefix cache; in exact mode also recompute running sequences."""
        self.version = version
        self._runner.reset()
        running = self._scheduler.running
        for seq in running:
            seq.mark_version(self._version_of(seq))
        if self.exact:
            self._scheduler.recompute(running)
        self._scheduler.clear_prefix_cache()

    def _run_leased(self, lease: CoreLease, batch: ScheduledBatch) -> SamplerOutput | None:
        """Compute with the cores that no other process of the run uses, if all operations are those of the kernels."""
        with lease.hold():
            uses_kernels = self._adapters.are_packed({seq.request.adapter for seq in batch.sequences})
            torch.set_num_threads(lease.count_threads() if uses_kernels else self._num_threads)
            return self._runner.run(batch)

    def _open_grammar(self, params: SamplingParams) -> GrammarState | None:
        """The request's grammar at its start; `ValueError` for an invalid one."""
        if params.grammar is None:
            return None
        if self._grammars is None:
            raise ValueError("this engine was built without a tokenizer: it samples without grammars")
        return self._grammars.open(params.grammar)

    def _version_of(self, seq: Sequence) -> int:
        """Version reported for this sequence: the adapter's, or that of the weights."""
        name = seq.request.adapter
        return self.version if name is None else self._adapters.served[name].spec.version

    def _abort_all(self, seqs: list[Sequence]) -> list[Event]:
        outputs = [seq.output("abort") for seq in seqs]
        for output in outputs:
            self.cancel(output.request)
        return list(outputs)

    @property
    def _cache_config(self) -> DecoderConfig:
        """Dimensions of the KV cache, which is minimal and unused for models that recompute."""
        config = self.model.config
        if not self.model.recomputes:
            return config
        return replace(config, num_hidden_layers=1, num_key_value_heads=1, head_dim=1)

    def _default_cache_tokens(self, max_running: int) -> int:
        """Default cache size in tokens: a fraction of the memory, at most what `max_running` sequences need."""
        if self._decoder.device.type == "cuda":
            shares = 1 if SHARED_GPU_VARIABLE in os.environ else 3
            memory = torch.cuda.mem_get_info(self._decoder.device)[0] * shares
        else:
            memory = find_memory()
        longest = self.model.config.max_position_embeddings + BLOCK
        return min(memory // MEMORY_SHARE // self._token_bytes, max_running * longest)

    def _default_prefix_tokens(self) -> int:
        """Default size of the prefix cache: a fraction of the cache and, on a CPU, of the memory."""
        share = self.max_cache_tokens // 4
        if self._decoder.device.type == "cuda":
            return share
        return min(share, find_memory() // PREFIX_MEMORY_SHARE // self._token_bytes)

    @property
    def _token_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        config = self._cache_config
        return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * self.dtype.itemsize


@torch.no_grad()
def _digest(held: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, str]:
    """Digests of tensors in the dtypes in which they were published."""
    return digest_tensors((name, tensor.to(dtypes.get(name, tensor.dtype))) for name, tensor in held.items())
