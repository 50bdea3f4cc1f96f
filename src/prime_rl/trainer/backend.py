"""A model with its optimizer on a device, or spread over several: micro-batches in, new parameters out."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prime_rl.trainer.activations import recompute_layers
from prime_rl.trainer.average import WeightAverage
from prime_rl.trainer.config import ModelConfig, SFTConfig, TrainConfig
from prime_rl.trainer.gradients import Gradients
from prime_rl.trainer.lora import merged_tensors, peft_config, peft_tensors
from prime_rl.trainer.model import (
    Placement,
    build_adapter_spec,
    find_base_name,
    limit_threads,
    load_model,
    resolve_placement,
)
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.moe import Experts, compute_imbalance, counting, take_expert_load
from prime_rl.trainer.optim import MasterWeights, build_optimizer, build_schedule
from prime_rl.trainer.parallel_dims import Mesh, build_mesh, join_ranks
from prime_rl.trainer.passes import Layout, count_tokens, fill_up, lay_out, may_share_prefixes, read_out
from prime_rl.trainer.pipeline_parallel import Pipeline, PipelineLM
from prime_rl.trainer.shards import Cuts, Holders, find_holders, gather_whole
from prime_rl.trainer.splitting import split_model
from prime_rl.transport.canary import Canary, build_canary, canary_tokens
from rollouts.training.backends.fsdp import shard_units
from rollouts.training.backends.ranks import Ranks
from rollouts.training.backends.step import OptimizerStep, StepReport
from rollouts.training.batching import MicroBatch, TensorBatch, build_filler
from rollouts.training.rl_losses import LossInputs, LossOutput, TokenStats

Loss = Callable[[LossInputs], LossOutput]


@contextmanager
def memory_advice() -> Iterator[None]:
    """Out of memory, on a GPU or a CPU, becomes a `MemoryError` that says what to change."""
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one, and so is what a CPU says
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise MemoryError(
            "out of memory in a micro-batch: lower micro_bs or model.seq_len, switch on model.ac, or train on more "
            f"ranks (parallel.dp); the last checkpoint stays valid. {str(error).splitlines()[0]}"
        ) from error


@dataclass
class Backend:
    """One rank's share of a trainer.

    `parameters` are what the optimizer steps, by name: in float32, and where there are several ranks this rank's part
    of each. `holders` tells who has the other parts, `cuts` what `mesh` has taken from the model beyond sharding, and
    `whole` is the model's outline without such cuts.
    """

    model: CausalLM
    stepper: OptimizerStep
    parameters: dict[str, Tensor]
    placement: Placement
    model_dir: Path
    whole: CausalLM
    holders: Holders
    num_layers: int | None = None
    adapter_config: dict[str, Any] | None = None
    """Of the PEFT adapter that is published; None: whole models are."""
    ranks: Ranks = field(default_factory=Ranks)
    mesh: Mesh = field(default_factory=Mesh)
    cuts: Cuts = field(default_factory=dict)
    pipeline: Pipeline | None = None
    average: WeightAverage | None = None

    @functools.cached_property
    def _share_prefixes(self) -> bool:
        return may_share_prefixes(self.model, self.placement, self.mesh)

    @property
    def quadratic_cost(self) -> float:
        """Cost of attention for balancing, see `batching.QUADRATIC_COST`."""
        return 1 / (12 * self.model.config.hidden_size)

    def compute_inputs(self, batch: TensorBatch) -> LossInputs:
        """Run the model over a pack, without a pipeline; streams of the tokens with loss."""
        return self._compute(lay_out(batch, self.placement, self.mesh, share_prefixes=self._share_prefixes))

    def _compute(self, layout: Layout) -> LossInputs:
        pack = layout.pack
        with counting(self.model, pack.real):
            hidden = self.model(pack.input_ids, pack.positions, pack.attend)
        return read_out(layout, hidden, self.model, self.mesh)

    def run_micros(
        self, micros: Sequence[MicroBatch], finish: Callable[[MicroBatch, LossInputs], Tensor], *, train: bool
    ) -> None:
        """Run the model over micro-batches and `finish` each where its log-probs are; to `train`, go back from the
        losses that it returns."""
        if self.pipeline is not None:
            self._run_pipeline(self.pipeline, micros, finish, train=train)
            return
        for micro in micros:
            loss = finish(micro, self._compute(self._lay_out(micro)))
            if train:
                torch.autograd.backward(loss)

    def _lay_out(self, micro: MicroBatch, num_tokens: int = 0) -> Layout:
        batch = fill_up(micro, self.mesh, self.placement.device, num_tokens)
        num_real = len(micro.input_ids) if micro.loss_count else 0
        return lay_out(batch, self.placement, self.mesh, num_real, share_prefixes=self._share_prefixes)

    def _run_pipeline(
        self,
        pipeline: Pipeline,
        micros: Sequence[MicroBatch],
        finish: Callable[[MicroBatch, LossInputs], Tensor],
        *,
        train: bool,
    ) -> None:
        filled = [*micros, *[build_filler(micros[0])] * (-len(micros) % self.mesh.pp.size)]
        num_tokens = max(count_tokens(micro, self.mesh) for micro in filled)
        layouts = [self._lay_out(micro, num_tokens) for micro in filled]

        def at_end(hidden: Tensor, number: int) -> Tensor:
            return finish(filled[number], read_out(layouts[number], hidden, self.model, self.mesh))

        pipeline.run([layout.pack for layout in layouts], at_end, train=train)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: Loss) -> TokenStats:
        """Accumulate the gradient of a whole step; the statistics are those of all ranks.

        The sum of `loss` over all micro-batches of all ranks is divided by their count of what the loss is a mean over
        (its `mean_over`, else tokens), so neither packing nor sharding can change the gradient. Every rank passes as
        many micro-batches.
        """
        unit = getattr(loss, "mean_over", "token")
        [global_count] = self.ranks.sum([sum(micro.count(unit) for micro in micros) if self.mesh.speaks else 0.0])
        stats = TokenStats()

        def finish(micro: MicroBatch, inputs: LossInputs) -> Tensor:
            if (
                not micro.loss_count
            ):  # ranks gather parameters and add up gradients together: it goes through the motions
                return inputs.trainer_logprobs.sum()
            output = loss(inputs)
            stats.merge(output.stats)
            return output.loss_sum / global_count

        if global_count:
            with memory_advice():
                self.run_micros(self._needed(micros), finish, train=True)
        return merge_stats(stats if self.mesh.speaks else TokenStats(), self.ranks)

    def _needed(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Those with loss; of several ranks, which run as many, all."""
        return [micro for micro in micros if micro.loss_count or self.ranks.size > 1]

    @torch.no_grad()
    def evaluate(self, micros: Sequence[MicroBatch], loss: Loss) -> TokenStats:
        """The statistics of a loss over all ranks, without a gradient. Every rank passes as many micro-batches."""
        stats = TokenStats()

        def finish(micro: MicroBatch, inputs: LossInputs) -> Tensor:
            if micro.loss_count:
                stats.merge(loss(inputs).stats)
            return inputs.trainer_logprobs.sum()

        self.run_micros(self._needed(micros), finish, train=False)
        if self.ranks.size > 1:
            self.model.reshard()  # type: ignore[operator]  # a method that fully_shard adds
        return merge_stats(stats if self.mesh.speaks else TokenStats(), self.ranks)

    @torch.no_grad()
    def compute_canary(self, step: int) -> Canary:
        """The log-probs that engines must repeat with the weights of `step`; all ranks must call."""
        tokens = canary_tokens(self.model.config.vocab_size)
        n = len(tokens)
        labels, mask, zeros = [*tokens[1:], 0], [1.0] * (n - 1) + [0.0], [0.0] * n
        micro = MicroBatch(tokens, list(range(n)), labels, mask, zeros, zeros, [1.0] * n, None, [n], [0])
        found: list[float] = []

        def finish(micro: MicroBatch, inputs: LossInputs) -> Tensor:
            found.extend(inputs.trainer_logprobs.tolist() if micro.loss_count else [])
            return inputs.trainer_logprobs.sum()

        self.run_micros([micro], finish, train=False)
        if self.ranks.size > 1:
            self.model.reshard()  # type: ignore[operator]  # a method that fully_shard adds
        told = self.ranks.gather_bytes(json.dumps(found).encode())
        logprobs = next(filter(None, map(json.loads, told)))
        # A merged adapter, transformers' code, and whatever else is not the engine's very arithmetic, is only near.
        is_whole = self.ranks.size == 1 and self.model.meets_in_attend
        is_plain = is_whole and all(p.requires_grad for p in self.model.parameters())
        dtype = str(self.placement.dtype).removeprefix("torch.")
        return build_canary(step, tokens, logprobs, dtype, self.placement.attn == "exact" and is_plain)

    def optim_step(self, stats: TokenStats) -> StepReport:
        """Apply the accumulated gradient; a step in which no token carried loss is skipped."""
        if stats.empty:
            return self.stepper.skip("no token of the batch carries loss")
        Gradients(self.parameters, self.holders, self.mesh, self.ranks).complete()
        report = self.stepper.step()
        if self.average is not None:
            self.average.update()
        return report

    def publishable(self) -> dict[str, Tensor]:
        """The tensors that engines compute with, in the format the trainer computes with.

        Of several ranks, which must all ask, the first gets whole tensors on the CPU and the others nothing.
        """
        build = merged_tensors if self.adapter_config is None else peft_tensors
        if self.ranks.size == 1:
            return {name: tensor.to(self.placement.dtype) for name, tensor in build(self.model).items()}
        needed = {n: p.detach() for n, p in self.model.named_parameters() if not self.adapter_config or p.requires_grad}
        holders = find_holders(needed, self.ranks, self.cuts)
        tensors = gather_whole(needed, holders, self.ranks, self.placement.dtype)
        return build(self.whole, tensors) if self.ranks.rank == 0 else {}

    def take_imbalance(self) -> dict[str, float]:
        """How unevenly all ranks have used the experts since the last call; all must call."""
        loads: dict[str, list[float]] = {}
        for told in self.ranks.gather_bytes(json.dumps(take_expert_load(self.model)).encode()):
            for name, load in json.loads(told).items():
                loads[name] = [a + b for a, b in zip(loads.get(name, [0.0] * len(load)), load, strict=True)]
        return compute_imbalance(loads)


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
    environ = os.environ
    placement = resolve_placement(
        config.model, int(environ.get("LOCAL_RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    )
    ranks = join_ranks(config, placement.device)
    mesh = build_mesh(config.parallel, ranks)
    torch.manual_seed(config.seed + ranks.rank // mesh.tp.size)  # what they hold alike must drop the same inputs
    model, model_dir = load_model(config.model, placement, config.seed, sharded=ranks.size > 1)
    adapter_config = None
    if config.model.lora is not None and not config.model.lora.merge:
        spec = build_adapter_spec(config.model.lora)
        adapter_config = peft_config(model, spec, find_base_name(config.model.name, model_dir))
    model, whole, cuts = split_model(model, mesh)
    prepare_layers(model, config.model, placement.device)
    if ranks.size > 1:
        shard_model(model, config.model, placement, mesh)
    parameters: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    holders = find_holders(parameters, ranks, cuts)
    compute_norm, after_step = None, None
    if ranks.size > 1:
        compute_norm = Gradients(parameters, holders, mesh, ranks).compute_norm
    elif is_narrow(placement) or (config.model.optim_cpu_offload and placement.device.type != "cpu"):
        offload = torch.device("cpu") if config.model.optim_cpu_offload else None
        masters = MasterWeights(model, placement.dtype, offload, placement.arithmetic)
        parameters, after_step = masters.by_name, masters.write_back
    stepper = OptimizerStep(
        build_optimizer(config.optim, parameters),
        schedule=build_schedule(config.scheduler, config.optim.lr, config.max_steps),
        max_norm=config.optim.max_norm,
        after_step=after_step,
        compute_norm=compute_norm,
    )
    pipeline = None
    if isinstance(model, PipelineLM):
        pipeline = Pipeline(model, mesh.pp, placement.device, placement.dtype)
    average = None
    if isinstance(config, TrainConfig) and config.ema_decay is not None:
        average = WeightAverage(parameters, config.ema_decay, after_step)
    return Backend(
        model,
        stepper,
        parameters,
        placement,
        model_dir,
        whole,
        holders,
        num_layers=config.model.debug.num_layers,
        adapter_config=adapter_config,
        ranks=ranks,
        mesh=mesh,
        cuts=cuts,
        pipeline=pipeline,
        average=average,
    )


def is_narrow(placement: Placement) -> bool:
    """Whether the model computes in a narrower format than its optimizer."""
    return placement.dtype == torch.bfloat16


def shard_model(model: CausalLM, config: ModelConfig, placement: Placement, mesh: Mesh) -> None:
    """Spread what this rank has of the model over the ranks that have the same."""
    experts = [module for module in model.modules() if isinstance(module, Experts)] if mesh.experts is not None else []
    roots = model.all_stages() if isinstance(model, PipelineLM) else [model]
    for units, team in ((experts, mesh.experts), ((*model.layers(), *roots), mesh.dense)):
        if team is None:
            continue
        shard_units(
            units,
            team,
            param_dtype=placement.dtype if is_narrow(placement) else None,
            reduce_dtype=getattr(torch, config.reduce_dtype) if is_narrow(placement) else None,
            reshard_after_forward=config.reshard_after_forward,
            cpu_offload=config.optim_cpu_offload,
            sum_gradients=True,
            keep=roots[-1],
        )
