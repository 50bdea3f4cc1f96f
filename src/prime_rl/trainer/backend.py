"""Training backend: model, optimizer and parallelism; runs forward, backward and optimizer steps."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from loguru import logger
from torch import Tensor, nn

from prime_rl.runtime.machine import keep_freed_memory
from prime_rl.trainer.activations import recompute_layers
from prime_rl.trainer.concurrent_micros import ConcurrentMicros, build_concurrent_micros
from prime_rl.trainer.config import SFTConfig, TrainConfig
from prime_rl.trainer.ema import WeightAverage
from prime_rl.trainer.forward import (
    ForwardInputs,
    can_share_prefixes,
    count_tokens,
    gather_loss_inputs,
    pad_micro_batch,
    prepare_forward,
)
from prime_rl.trainer.lora import describe_adapter, merged_tensors, peft_config, peft_tensors
from prime_rl.trainer.model import (
    DeviceConfig,
    build_adapter_spec,
    find_base_name,
    load_model,
    resolve_placement,
)
from prime_rl.trainer.model_config import ModelConfig
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.moe import Experts, compute_imbalance, pop_expert_load, record_expert_load
from prime_rl.trainer.models.placement import limit_threads
from prime_rl.trainer.models.value import VALUE, ValueModel, add_critic, without_critic
from prime_rl.trainer.optim import MasterWeights, build_optimizer, build_schedule
from prime_rl.trainer.optim_config import MuonConfig
from prime_rl.trainer.parallel.gradients import Gradients
from prime_rl.trainer.parallel.pipeline_parallel import Pipeline, PipelineLM, check_trained
from prime_rl.trainer.parallel.splitting import split_model
from prime_rl.trainer.parallel_dims import Mesh, build_mesh, init_process_group
from prime_rl.trainer.sharded_checkpoint import ShardMap, ShardSlices, gather_full_tensors, gather_shard_map
from prime_rl.transport.canary import Canary, build_canary, canary_prompts
from prime_rl.transport.weights import is_adapter
from rollouts.training.backends.fsdp import shard_units
from rollouts.training.backends.muon import find_embeddings
from rollouts.training.backends.ranks import Ranks
from rollouts.training.backends.step import OptimizerStep, StepReport
from rollouts.training.batching import UNITS, MicroBatch, TensorBatch, build_filler
from rollouts.training.numerics import using_threads
from rollouts.training.rl_losses import LossInputs, LossOutput, TokenStats

Loss = Callable[[LossInputs], LossOutput]


@dataclass(frozen=True)
class WrappedLoss:
    """Base of losses that add to another one, whose aggregation unit they keep."""

    loss: Loss

    @property
    def mean_over(self) -> str:
        """Aggregation unit of the loss."""
        return getattr(self.loss, "mean_over", "token")


@contextmanager
def step_advice() -> Iterator[None]:
    """Convert errors of torch whose cure is known: out of memory to `MemoryError`, a setting to `ValueError`."""
    try:
        yield
    except RuntimeError as error:  # base class of torch.OutOfMemoryError; also raised by the CPU allocator
        if "selective activation checkpoint has been mutated" in str(error):
            raise ValueError(
                "layers of this model change the outputs of matrix products, which selective checkpointing stores: "
                'set model.ac.mode = "full"'
            ) from error
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise MemoryError(
            "out of memory in a micro-batch: lower micro_bs or model.seq_len, set model.ac, or train on more "
            f"ranks (parallel.dp); the last checkpoint stays valid. {str(error).splitlines()[0]}"
        ) from error


@dataclass
class Backend:
    """Model and optimizer of one rank.

    `parameters` are the optimizer's parameters by name: in float32, and this rank's shards with several ranks.
    `shard_map` describes the shards of all ranks, `cuts` are this rank's slices beyond FSDP (tp, ep), `whole` is the
    unsplit model (on the meta device if split).
    """

    model: CausalLM
    stepper: OptimizerStep
    parameters: dict[str, Tensor]
    placement: DeviceConfig
    model_dir: Path
    whole: CausalLM
    shard_map: ShardMap
    num_layers: int | None = None
    adapter_config: dict[str, Any] | None = None
    """PEFT config of the published adapter; None: full models are published."""
    adapter: dict[str, Any] | None = None
    """Base and scale of a LoRA adapter, see `describe_adapter`."""
    ranks: Ranks = field(default_factory=Ranks)
    mesh: Mesh = field(default_factory=Mesh)
    cuts: ShardSlices = field(default_factory=dict)
    pipeline: Pipeline | None = None
    average: WeightAverage | None = None
    concurrent: ConcurrentMicros | None = None
    needs_observations: bool = False
    """Whether losses use the log-probs of observed tokens."""
    critic: ValueModel | None = None

    @functools.cached_property
    def shares_prefixes(self) -> bool:
        """Whether prefixes that samples of a micro-batch share are computed once."""
        return can_share_prefixes(self.model, self.placement, self.mesh)

    @property
    def num_threads(self) -> int:
        """Number of micro-batches that are computed at once."""
        return 1 if self.concurrent is None else self.concurrent.num_threads

    @property
    def quadratic_cost(self) -> float:
        """Attention cost for load balancing, see `batching.QUADRATIC_COST`."""
        return 1 / (12 * self.model.config.hidden_size)

    def compute_inputs(self, batch: TensorBatch) -> LossInputs:
        """Forward pass of a pack, without a pipeline; returns the loss inputs of the loss tokens."""
        return self._compute(self._arrange(batch))

    def _compute(self, layout: ForwardInputs) -> LossInputs:
        pack = layout.pack
        with record_expert_load(self.model, pack.real):
            hidden = self.model(pack.input_ids, pack.positions, pack.attend)
        return self._gather(layout, hidden)

    def _gather(self, layout: ForwardInputs, hidden: Tensor) -> LossInputs:
        inputs = gather_loss_inputs(layout, hidden, self.model, self.mesh, needs_observations=self.needs_observations)
        if self.critic is None:
            return inputs
        rows = layout.batch.loss_rows
        pack = layout.pack
        states = self.critic.hidden_states(hidden, pack.input_ids, pack.positions, pack.attend)
        return replace(inputs, values=self.critic(states[rows if layout.node is None else layout.node[rows]]))

    def run_micros(
        self, micros: Sequence[MicroBatch], finish: Callable[[MicroBatch, LossInputs], Tensor], *, train: bool
    ) -> None:
        """Forward pass of every micro-batch, with `finish` on the rank that has its log-probs; with `train`, backward
        pass from the returned losses."""
        if self.pipeline is not None:
            self._run_pipeline(self.pipeline, micros, finish, train=train)
            return
        if self.concurrent is not None and train and len(micros) > 1:
            named = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            masters = [self.parameters[name] for name in named]
            self.concurrent.run(micros, self._compute_micro, finish, list(named.values()), masters)
            return
        for micro in micros:
            loss = finish(micro, self._compute_micro(micro))
            if train:
                torch.autograd.backward(loss)

    def _compute_micro(self, micro: MicroBatch) -> LossInputs:
        return self._compute(self._prepare(micro))

    def _prepare(self, micro: MicroBatch, num_tokens: int = 0) -> ForwardInputs:
        batch = pad_micro_batch(micro, self.mesh, self.placement.device, num_tokens)
        num_real = len(micro.input_ids) if micro.loss_count else 0
        return self._arrange(batch, num_real)

    def _arrange(self, batch: TensorBatch, num_real: int | None = None) -> ForwardInputs:
        options = {"share_prefixes": self.shares_prefixes, "rounded": self.model.rounds_inputs}
        return prepare_forward(batch, self.placement, self.mesh, num_real, **options)

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
        layouts = [self._prepare(micro, num_tokens) for micro in filled]

        def at_end(hidden: Tensor, number: int) -> Tensor:
            return finish(filled[number], self._gather(layouts[number], hidden))

        pipeline.run([layout.pack for layout in layouts], at_end, train=train)

    def forward_backward(self, micros: Sequence[MicroBatch], loss: Loss) -> TokenStats:
        """Accumulate the gradient of a step; returns statistics over all ranks.

        The sum of `loss` over all micro-batches and ranks is divided by the global count of its `mean_over` unit
        (default: tokens), and its further sums by those of their units, so the gradient is independent of packing and
        sharding. All ranks pass the same number of micro-batches.
        """
        own = micros if self.mesh.is_reporting_rank else ()
        local_counts = [float(sum(micro.count(unit) for micro in own)) for unit in UNITS]
        counts = dict(zip(UNITS, self.ranks.sum(local_counts), strict=True))
        global_count = counts[getattr(loss, "mean_over", "token")]
        stats = TokenStats()

        def finish(micro: MicroBatch, inputs: LossInputs) -> Tensor:
            if not micro.loss_count:  # dummy forward/backward keeps the FSDP collectives in sync
                total = inputs.trainer_logprobs.sum()
                return total if inputs.values is None else total + inputs.values.sum()
            output = loss(replace(inputs, sample_ids=tuple(micro.sample_ids)))
            stats.merge(output.stats)
            further = (total / (counts[unit] or 1.0) for unit, total in output.further.items())
            return sum(further, output.loss_sum / global_count)

        if global_count:
            with step_advice():
                self.run_micros(self._needed(micros), finish, train=True)
        merged = self._merge(stats)
        merged.set_loss_count(global_count)
        return merged

    def _needed(self, micros: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Micro-batches with loss; all of them with several ranks, which must run the same number."""
        return [micro for micro in micros if micro.loss_count or self.ranks.size > 1]

    @torch.no_grad()
    def evaluate(self, micros: Sequence[MicroBatch], loss: Loss) -> TokenStats:
        """Loss statistics over all ranks, without gradients. All ranks pass the same number of micro-batches."""
        stats = TokenStats()

        def finish(micro: MicroBatch, inputs: LossInputs) -> Tensor:
            if micro.loss_count:
                stats.merge(loss(replace(inputs, sample_ids=tuple(micro.sample_ids))).stats)
            return inputs.trainer_logprobs.sum()

        self.run_micros(self._needed(micros), finish, train=False)
        self.reshard()
        return self._merge(stats)

    def _merge(self, stats: TokenStats) -> TokenStats:
        """Statistics over all ranks, on every rank; those that hold copies of the same samples report once."""
        if self.ranks.size == 1:
            return stats
        merged, own = TokenStats(), stats if self.mesh.is_reporting_rank else TokenStats()
        for part in self.ranks.gather_bytes(own.encode()):
            merged.merge(TokenStats.decode(part))
        return merged

    def reshard(self) -> None:
        """Reshard what forward passes without a backward pass have gathered: exported tensors are those of shards.

        Of every unit, as with `reshard_after_forward = false` the layers stay gathered, too.
        """
        for module in self.model.modules() if self.ranks.size > 1 else ():
            reshard: Callable[[], None] | None = getattr(module, "reshard", None)  # a method that fully_shard adds
            if reshard is not None:
                reshard()

    @torch.no_grad()
    def compute_canary(self, step: int, texts: Sequence[Sequence[int]] = ()) -> Canary:
        """Reference log-probs that engines must reproduce with the weights of `step` (collective).

        Prompts are also taken from `texts`, the tokens of samples. Numerical noise is measured on the longest prompt,
        unpacked, and with torch's kernel where attention is exact.
        """
        prompts = canary_prompts(self.model.config.vocab_size, texts)
        logprobs = self._score_prompts(prompts)
        longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
        attn = "sdpa" if self.placement.attn == "exact" else self.placement.attn
        other = replace(self, placement=replace(self.placement, attn=attn))
        pairs = zip(logprobs[longest], other._score_prompts([prompts[longest]])[0], strict=True)
        noise = fmean(abs(a - b) for a, b in pairs)
        self.reshard()
        # Merged adapters, transformers models and sharded models match the engine only approximately.
        is_whole = self.ranks.size == 1 and self.model.is_exact
        is_plain = is_whole and all(p.requires_grad for p in self.model.parameters())
        dtype = str(self.placement.dtype).removeprefix("torch.")
        exact = self.placement.attn == "exact" and is_plain
        routed, arithmetic = bool(self.model.config.num_experts), self.model.arithmetic
        return build_canary(step, prompts, logprobs, dtype, exact, noise, routed, arithmetic)

    def _score_prompts(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of all but the first token of each prompt, computed as one pack."""
        packed = [token for prompt in prompts for token in prompt]
        n, lengths = len(packed), [len(prompt) for prompt in prompts]
        micro = MicroBatch(
            input_ids=packed,
            positions=[i for length in lengths for i in range(length)],
            labels=[label for prompt in prompts for label in (*prompt[1:], 0)],
            loss_mask=[mask for length in lengths for mask in (*[1.0] * (length - 1), 0.0)],
            advantages=[0.0] * n,
            inference_logprobs=[0.0] * n,
            temperature=[1.0] * n,
            teacher_logprobs=None,
            lengths=lengths,
            sample_ids=list(range(len(prompts))),
        )
        local: list[float] = []

        def finish(micro: MicroBatch, inputs: LossInputs) -> Tensor:
            local.extend(inputs.trainer_logprobs.tolist() if micro.loss_count else [])
            return inputs.trainer_logprobs.sum()

        self.run_micros([micro], finish, train=False)
        gathered = self.ranks.gather_bytes(json.dumps(local).encode())
        logprobs = iter(next(filter(None, map(json.loads, gathered))))
        return [list(islice(logprobs, length - 1)) for length in lengths]

    def optim_step(self, stats: TokenStats, *, begins_step: bool = True, only_critic: bool = False) -> StepReport:
        """Apply the accumulated gradient; skipped when no token has loss. `begins_step`: see `OptimizerStep.step`.

        `only_critic`: the gradients of the policy's own parameters are dropped.
        """
        if stats.empty:
            return self.stepper.skip("no token of the batch has loss", begins_step=begins_step)
        Gradients(self.parameters, self.shard_map, self.mesh, self.ranks).complete()
        for parameter in without_critic(self.parameters).values() if only_critic else ():
            parameter.grad = None
        report = self.stepper.step(begins_step=begins_step)
        if self.average is not None:
            self.average.update()
        return report

    def export_state_dict(self) -> dict[str, Tensor]:
        """The published tensors, in the trainer's compute dtype, except for `float32_names` (collective).

        With several ranks, rank 0 gets full tensors on the CPU and the others an empty dict.
        """
        build = merged_tensors if self.adapter_config is None else peft_tensors
        dtype = self.placement.dtype
        if self.ranks.size == 1:
            with using_threads(None if self.concurrent is None else self.num_threads):
                return {
                    name: tensor if self.model.stays_float32(name) else tensor.to(dtype)
                    for name, tensor in build(self.model).items()
                }
        named = without_critic(dict(self.model.named_parameters()))
        needed = {n: p.detach() for n, p in named.items() if not self.adapter_config or p.requires_grad}
        shard_map = gather_shard_map(needed, self.ranks, self.cuts)
        wide = torch.float32 if is_narrow(self.placement) else dtype
        dtypes = {name: wide if self.whole.stays_float32(name) else dtype for name in shard_map.by_name}
        tensors = gather_full_tensors(needed, shard_map, self.ranks, dtypes)
        return build(self.whole, tensors) if self.ranks.rank == 0 else {}

    def pop_expert_load(self) -> dict[str, float]:
        """Expert load imbalance of the policy over all ranks since the last call (collective)."""
        loads: dict[str, list[float]] = {}
        own = without_critic(pop_expert_load(self.model))
        for data in self.ranks.gather_bytes(json.dumps(own).encode()):
            for name, load in json.loads(data).items():
                loads[name] = [a + b for a, b in zip(loads.get(name, [0.0] * len(load)), load, strict=True)]
        return compute_imbalance(loads)


def prepare_layers(model: CausalLM, config: ModelConfig, device: torch.device) -> None:
    """Apply activation checkpointing and torch.compile to the layers as configured."""
    layers = model.layers()
    if config.ac is not None:
        recompute_layers(layers, config.ac, config.ac_offloading)
    if config.compile is None:
        return
    compiler = os.environ.get("CXX", "g++")
    if config.compile.backend == "inductor" and device.type == "cpu" and shutil.which(compiler) is None:
        raise ValueError(f"model.compile needs a C++ compiler on a CPU, and {compiler} was not found: leave it out")
    # Layers share their code except for an index; packs differ in their lengths.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    limit = 8 + 4 * len(layers)
    torch._dynamo.config.recompile_limit = max(limit, torch._dynamo.config.recompile_limit)
    for layer in layers:
        layer.compile(fullgraph=config.compile.fullgraph, backend=config.compile.backend)


def build_backend(config: TrainConfig | SFTConfig) -> Backend:
    """Build model, optimizer and schedule; `ValueError` for options that this version or machine does not support.

    Under torchrun this initializes the process group and shards the model over the ranks.
    """
    limit_threads()
    local_rank, world_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    placement = resolve_placement(config.model, local_rank, world_size)
    if placement.device.type == "cpu":
        keep_freed_memory()
    ranks = init_process_group(config.parallel, config.dist_timeout_seconds, placement.device)
    mesh = build_mesh(config.parallel, ranks, config.dist_timeout_seconds)
    torch.manual_seed(config.seed + ranks.rank // mesh.tp.size)  # replicated parameters need the same dropout
    critic_config = config.critic if isinstance(config, TrainConfig) else None
    model, model_dir = load_model(
        config.model,
        placement,
        config.seed,
        sharded=ranks.size > 1,
        has_critic=critic_config is not None,
        max_len=config.data.seq_len if isinstance(config, SFTConfig) else config.model.seq_len,
    )
    adapter, adapter_config = describe_lora(config.model, model, model_dir, ranks)
    critic = None if critic_config is None else add_critic(model, critic_config.backbone)
    model, whole, cuts = split_model(model, mesh)
    prepare_layers(model, config.model, placement.device)
    if critic is not None and critic.backbone is not None:
        prepare_layers(critic.backbone, config.model, placement.device)
    if ranks.size > 1:
        shard_model(model, config.model, placement, mesh)
    parameters: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shard_map = gather_shard_map(parameters, ranks, cuts)
    check_trained(shard_map, mesh.pp.size, ranks.size)
    compute_norm, after_step = None, None
    if ranks.size > 1:
        compute_norm = Gradients(parameters, shard_map, mesh, ranks).compute_norm
    elif is_narrow(placement) or (config.model.optim_cpu_offload and placement.device.type != "cpu"):
        offload = torch.device("cpu") if config.model.optim_cpu_offload else None
        masters = MasterWeights(model, placement.dtype, offload, placement.arithmetic)
        parameters, after_step = masters.by_name, masters.write_back
    concurrent = build_concurrent_micros(
        config.max_concurrent_micro_batches, config.model, placement, model, ranks.size
    )
    stepper = OptimizerStep(
        build_optimizer(
            config.optim,
            parameters,
            None if critic_config is None else critic_config.lr,
            find_embeddings(model, model.lm_head),
        ),
        schedule=build_schedule(config.scheduler, config.optim.lr, config.max_steps),
        max_norm=config.optim.max_norm,
        after_step=after_step,
        compute_norm=compute_norm,
        num_threads=None if concurrent is None or isinstance(config.optim, MuonConfig) else concurrent.num_threads,
    )
    pipeline = None
    if isinstance(model, PipelineLM):
        pipeline = Pipeline(model, mesh.pp, placement.device, placement.dtype)
    decay = config.ema_decay if isinstance(config, TrainConfig) else None
    return Backend(
        model,
        stepper,
        parameters,
        placement,
        model_dir,
        whole,
        shard_map,
        num_layers=config.model.debug.num_layers,
        adapter_config=adapter_config,
        adapter=adapter,
        ranks=ranks,
        mesh=mesh,
        cuts=cuts,
        pipeline=pipeline,
        average=None if decay is None else WeightAverage(parameters, decay, after_step),
        concurrent=concurrent,
        needs_observations=isinstance(config, TrainConfig)
        and any(loss.observation_coef for loss in (config.loss, *config.env_loss.values())),
        critic=critic,
    )


def describe_lora(
    config: ModelConfig, model: CausalLM, model_dir: Path, ranks: Ranks
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """`adapter` and `adapter_config` of a `Backend`."""
    if config.lora is None:
        return None, None
    spec = build_adapter_spec(config.lora)
    if config.lora.merge:
        return describe_adapter(model, spec), None
    if is_adapter(model_dir) and ranks.rank == 0:
        logger.warning(
            f"{config.name} is a LoRA adapter itself: peft, transformers, vLLM and SGLang load no adapters of it. "
            f"Train from the merged model (convert {config.name} DIR), or set model.lora.merge = true"
        )
    return describe_adapter(model, spec), peft_config(model, spec, find_base_name(config.name, model_dir))


def is_narrow(placement: DeviceConfig) -> bool:
    """Whether the model has a lower precision than its optimizer."""
    return placement.dtype == torch.bfloat16


def shard_model(model: CausalLM, config: ModelConfig, placement: DeviceConfig, mesh: Mesh) -> None:
    """Shard this rank's part of the model with FSDP over the ranks that share it."""
    own = getattr(model, VALUE, None)
    backbone = own.backbone if isinstance(own, ValueModel) else None
    inner = [] if backbone is None else [*backbone.layers(), backbone]
    experts = [module for module in model.modules() if isinstance(module, Experts)] if mesh.experts is not None else []
    roots = model.all_stages() if isinstance(model, PipelineLM) else [model]
    dtype = placement.dtype if is_narrow(placement) else None
    wide = find_float32_modules(model) if is_narrow(placement) else []
    for units, device_mesh, param_dtype in (
        (wide, mesh.dense, None),
        (experts, mesh.experts, dtype),
        ((*model.layers(), *inner, *roots), mesh.dense, dtype),
    ):
        if device_mesh is None:
            continue
        shard_units(
            units,
            device_mesh,
            param_dtype=param_dtype,
            reduce_dtype=None if param_dtype is None else getattr(torch, config.reduce_dtype),
            reshard_after_forward=config.reshard_after_forward,
            cpu_offload=config.optim_cpu_offload,
            sum_gradients=True,
            keep=roots[-1],
        )


LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_float32_modules(model: CausalLM) -> list[nn.Module]:
    """The outermost modules whose parameters all stay in float32; none, with a warning, if others have one, too.

    Outermost, as some modules, such as convolutions, compute with the parameters of their children. None, as a model
    with such parameters in part of its modules may compute with tensors of two dtypes.
    """
    if not model.float32_names:
        return []
    names = [name for name, _ in model.named_parameters()]
    mixed = {path for name in names if not model.stays_float32(name) for path in find_parents(name)}
    # Lists of modules or parameters are no units, as they compute nothing.
    mixed |= {path for path, module in model.named_modules() if isinstance(module, LISTS)}
    found: dict[str, nn.Module] = {}
    for name in filter(model.stays_float32, names):
        path = next((path for path in find_parents(name) if path not in mixed), None)
        if path is None:
            logger.warning(
                f"{name} shares a module with other parameters, so several ranks compute in bfloat16 with all that "
                'transformers keeps in float32: to avoid it, set model.dtype = "float32"'
            )
            return []
        found[path] = model.get_submodule(path)
    return list(found.values())


def find_parents(name: str) -> list[str]:
    """Names of the modules that contain a parameter, the outermost first."""
    return list(accumulate(name.split(".")[:-1], lambda parent, child: f"{parent}.{child}"))
