"""A model with its optimizer on a device, or spread over several: micro-batches in, new parameters out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from prime_rl.trainer.activations import recompute_layers
from prime_rl.trainer.config import ModelConfig, SFTConfig, TrainConfig
from prime_rl.trainer.model import (
    Placement,
    build_adapter_spec,
    find_base_name,
    limit_threads,
    load_model,
    resolve_placement,
)
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.lora import merged_tensors, peft_config, peft_tensors
from prime_rl.trainer.optim import MasterWeights, build_optimizer, build_schedule
from prime_rl.trainer.parallel_dims import build_mesh, join_ranks
from prime_rl.transport.canary import Canary, build_canary, canary_tokens
from rollouts.training.backends.checkpoint import collect_tensors
from rollouts.training.backends.fsdp import shard_units
from rollouts.training.backends.ranks import Ranks
from rollouts.training.backends.step import OptimizerStep, StepReport
from rollouts.training.batching import MIN_TOKENS, MicroBatch, TensorBatch
from rollouts.training.rl_losses import LossInputs, LossOutput, TokenStats, compute_head_logprobs, compute_head_table

Loss = Callable[[LossInputs], LossOutput]


@dataclass
class Backend:
    """One rank's share of a trainer.

    `parameters` are what the optimizer steps, by name: in float32, and where there are several ranks this rank's part
    of each.
    """

    model: CausalLM
    stepper: OptimizerStep
    parameters: dict[str, Tensor]
    placement: Placement
    model_dir: Path
    num_layers: int | None = None
    adapter_config: dict[str, Any] | None = None
    """Of the PEFT adapter that is published; None: whole models are."""
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def quadratic_cost(self) -> float:
        """Cost of attention for balancing, see `batching.QUADRATIC_COST`."""
        return 1 / (12 * self.model.config.hidden_size)

    def compute_inputs(self, batch: TensorBatch) -> LossInputs:
        """Run the model over a pack; streams of the tokens with loss only, because no other needs logits."""
        attend = PackedAttention(batch.lengths, self.placement.device, self.placement.attn)
        hidden = self.model(batch.input_ids, batch.positions, attend)
        chosen = batch.loss_mask.nonzero().squeeze(1)
        # A product of fewer rows rounds differently (see attention.MIN_ROWS), so a few that are not needed go along.
        rows = chosen if len(chosen) >= MIN_TOKENS else torch.cat((chosen, chosen.new_zeros(MIN_TOKENS)))
        logprobs, entropy = compute_head_logprobs(
            hidden[rows],
            self.model.lm_head.weight,
            batch.labels[rows],
            batch.temperature[rows],
            cap=self.model.config.logit_cap,
        )
        n = len(chosen)
        student_table = None
        if batch.teacher_table is not None:
            student_table = compute_head_table(
                hidden[rows], self.model.lm_head.weight, batch.temperature[rows], _repeat(batch.teacher_table[0], rows)
            )[:n]
        return LossInputs(
            trainer_logprobs=logprobs[:n],
            inference_logprobs=batch.inference_logprobs[chosen],
            advantages=batch.advantages[chosen],
            loss_mask=batch.loss_mask[chosen],
            sequence=batch.sequence[chosen],
            teacher_logprobs=None if batch.teacher_logprobs is None else batch.teacher_logprobs[chosen],
            entropy=entropy[:n],
            num_sequences=len(batch.lengths),
            taught=None if batch.taught is None else batch.taught[chosen],
            student_table=student_table,
            teacher_table=None if batch.teacher_table is None else batch.teacher_table[1],
            has_tail=batch.teacher_table is not None and batch.teacher_table[0] is not None,
        )

    def forward_backward(self, micros: Sequence[MicroBatch], loss: Loss) -> TokenStats:
        """Accumulate the gradient of a whole step; the statistics are those of all ranks.

        The sum of `loss` over all micro-batches of all ranks is divided by their count of what the loss is a mean over
        (its `mean_over`, else tokens), so neither packing nor sharding can change the gradient. Every rank passes as
        many micro-batches.
        """
        unit = getattr(loss, "mean_over", "token")
        [global_count] = self.ranks.sum([sum(micro.count(unit) for micro in micros)])
        stats = TokenStats()
        for micro in micros if global_count else ():
            if not micro.loss_count and self.ranks.size == 1:
                continue
            inputs = self.compute_inputs(micro.to_tensors(self.placement.device))
            if micro.loss_count:
                output = loss(inputs)
                self.stepper.backward(output.loss_sum, global_count)
                stats.merge(output.stats)
            else:  # ranks gather parameters and add up gradients together, so this one goes through the motions
                self.stepper.backward(inputs.trainer_logprobs.sum(), global_count)
        return merge_stats(stats, self.ranks)

    @torch.no_grad()
    def evaluate(self, micros: Sequence[MicroBatch], loss: Loss) -> TokenStats:
        """The statistics of a loss over all ranks, without a gradient. Every rank passes as many micro-batches."""
        stats = TokenStats()
        for micro in micros:
            if micro.loss_count or self.ranks.size > 1:
                inputs = self.compute_inputs(micro.to_tensors(self.placement.device))
                if micro.loss_count:
                    stats.merge(loss(inputs).stats)
        if self.ranks.size > 1:
            self.model.reshard()  # type: ignore[operator]  # a method that fully_shard adds
        return merge_stats(stats, self.ranks)

    @torch.no_grad()
    def compute_canary(self, step: int) -> Canary:
        """The log-probs that engines must repeat with the weights of `step`; all ranks must call."""
        tokens = canary_tokens(self.model.config.vocab_size)
        n = len(tokens)
        labels, mask, zeros = [*tokens[1:], 0], [1.0] * (n - 1) + [0.0], [0.0] * n
        micro = MicroBatch(tokens, list(range(n)), labels, mask, zeros, zeros, [1.0] * n, None, [n], [0])
        logprobs = self.compute_inputs(micro.to_tensors(self.placement.device)).trainer_logprobs
        if self.ranks.size > 1:
            self.model.reshard()  # type: ignore[operator]  # a method that fully_shard adds
        # A merged adapter, and whatever else is not this very arithmetic, is only near.
        is_plain = self.ranks.size == 1 and all(p.requires_grad for p in self.model.parameters())
        dtype = str(self.placement.dtype).removeprefix("torch.")
        return build_canary(step, tokens, logprobs.tolist(), dtype, self.placement.attn == "exact" and is_plain)

    def optim_step(self, stats: TokenStats) -> StepReport:
        """Apply the accumulated gradient; a step in which no token carried loss is skipped."""
        return self.stepper.step() if not stats.empty else self.stepper.skip("no token of the batch carries loss")

    def publishable(self) -> dict[str, Tensor]:
        """The tensors that engines compute with, in the format the trainer computes with.

        Of several ranks, which must all ask, the first gets whole tensors on the CPU and the others nothing.
        """
        build = merged_tensors if self.adapter_config is None else peft_tensors
        if self.ranks.size == 1:
            return build(self.model)
        needed = (
            (name, tensor.detach().to(self.placement.dtype))
            for name, tensor in self.model.named_parameters()
            if self.adapter_config is None or tensor.requires_grad
        )
        whole = collect_tensors(needed, self.ranks)
        return build(self.model, whole) if self.ranks.rank == 0 else {}


def _repeat(ids: Int[Tensor, "chosen k"] | None, rows: Int[Tensor, " rows"]) -> Int[Tensor, "rows k"] | None:
    """The ids of each row, the last ones again for the rows that only go along."""
    if ids is None or len(ids) == len(rows):
        return ids
    last = ids[-1:] if len(ids) else torch.arange(ids.shape[1], device=ids.device)[None]
    return torch.cat((ids, last.expand(len(rows) - len(ids), -1)))


def merge_stats(stats: TokenStats, ranks: Ranks) -> TokenStats:
    """What all ranks have seen, on every rank; a rank may have seen nothing."""
    if ranks.size == 1:
        return stats
    merged = TokenStats()
    for part in ranks.gather_bytes(stats.encode()):
        merged.merge(TokenStats.decode(part))
    return merged


def prepare_layers(model: CausalLM, config: ModelConfig, device: torch.device) -> None:
    """Recompute activations of layers and compile them, as the config says."""
    layers = model.layers()
    if config.ac is not None:
        recompute_layers(layers, config.ac, config.ac_offloading)
    if config.compile is None:
        return
    compiler = os.environ.get("CXX", "g++")
    if config.compile.backend == "inductor" and device.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(f"model.compile needs a C++ compiler on a CPU, and there is no {compiler}: leave it out")
    # Layers share their code and differ in a number; packs differ in their lengths.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    limit = 8 + 4 * len(layers)
    torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)
    for layer in layers:
        layer.compile(fullgraph=config.compile.fullgraph, backend=config.compile.backend)


def build_backend(config: TrainConfig | SFTConfig) -> Backend:
    """Model, optimizer and schedule of a config; `ValueError` for what this version or machine cannot do.

    Under torchrun this joins the other ranks and shards the model over them.
    """
    limit_threads()
    placement = resolve_placement(config.model, int(os.environ.get("LOCAL_RANK", "0")))
    ranks = join_ranks(config, placement.device)
    torch.manual_seed(config.seed + ranks.rank)
    model, model_dir = load_model(config.model, placement, config.seed, sharded=ranks.size > 1)
    adapter_config = None
    if config.model.lora is not None and not config.model.lora.merge:
        spec = build_adapter_spec(config.model.lora)
        adapter_config = peft_config(model, spec, find_base_name(config.model.name, model_dir))
    prepare_layers(model, config.model, placement.device)
    after_step = None
    is_narrow = placement.dtype == torch.bfloat16
    if ranks.size > 1:
        shard_units(
            model,
            model.layers(),
            build_mesh(config.parallel, ranks),
            param_dtype=placement.dtype if is_narrow else None,
            reduce_dtype=getattr(torch, config.model.reduce_dtype) if is_narrow else None,
            reshard_after_forward=config.model.reshard_after_forward,
            cpu_offload=config.model.optim_cpu_offload,
            sum_gradients=True,
            keep_root=True,
        )
    parameters: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if ranks.size == 1 and (is_narrow or (config.model.optim_cpu_offload and placement.device.type != "cpu")):
        offload = torch.device("cpu") if config.model.optim_cpu_offload else None
        masters = MasterWeights(model, placement.dtype, offload)
        parameters, after_step = masters.by_name, masters.write_back
    stepper = OptimizerStep(
        build_optimizer(config.optim, parameters),
        schedule=build_schedule(config.scheduler, config.optim.lr, config.max_steps),
        max_norm=config.optim.max_norm,
        after_step=after_step,
    )
    num_layers = config.model.debug.num_layers
    return Backend(model, stepper, parameters, placement, model_dir, num_layers, adapter_config, ranks)
