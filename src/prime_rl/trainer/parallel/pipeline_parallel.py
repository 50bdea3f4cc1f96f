"""Pipeline parallelism: layers are split over ranks, and micro-batches pass through all stages.

    stage 0  F0 F1 F2 .. B0 F3 B1 ..        1F1B: backward passes run as early as possible, which bounds memory
    stage 1     F0 F1 B0 F2 B1 ..           interleaved: several stages per rank, a smaller bubble, more messages

The schedules are torch's (`torch.distributed.pipelining`), which require micro-batches padded to the same length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from prime_rl.trainer.models.attention import AttentionBackend, count_positions
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.models.moe import record_expert_load
from prime_rl.trainer.parallel_dims import MeshAxisGroup
from prime_rl.trainer.sharded_checkpoint import ShardMap


@dataclass(frozen=True)
class PackedInputs:
    """Inputs of a stage for one micro-batch; `real` masks out padding tokens."""

    input_ids: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    attend: AttentionBackend
    real: Bool[Tensor, " tokens"] | None = None


class StageLM(CausalLM):
    """A pipeline stage of consecutive layers; the first stage also has the embedding, the last one norm and head.

    Parameters keep their names in the full model. A tied embedding is replicated on the first and last stage.
    """

    def __init__(self, model: CausalLM, layers: Sequence[int]) -> None:
        nn.Module.__init__(self)
        last = model.config.num_hidden_layers - 1
        self.config, self._rope = model.config, None
        self.is_first, self.is_last = 0 in layers, last in layers
        decoder: Any = nn.Module()
        if self.is_first or (self.is_last and model.config.tie_word_embeddings):
            decoder.embed_tokens = model.model.embed_tokens
        decoder.layers = nn.ModuleDict({str(i): model.model.layers[i] for i in layers})
        self.model = decoder
        if self.is_last:
            decoder.norm, self.lm_head = model.model.norm, model.lm_head
        self.packs: Sequence[PackedInputs] = ()

    def forward(self, x: Tensor, number: Int[Tensor, "1"]) -> Float[Tensor, "tokens hidden"]:  # type: ignore[override]
        """Hidden states of micro-batch `number` after the layers of this stage."""
        pack = self.packs[int(number)]
        x = self.model.embed_tokens(x) if self.is_first else x
        longest, device = count_positions(pack.positions, pack.attend), pack.positions.device
        cos, sin = (table[pack.positions].to(x.dtype) for table in self.rope(longest, device))
        with record_expert_load(self, pack.real):
            for layer in self.layers():
                x = layer(x, cos, sin, pack.attend)
        return self.model.norm(x) if self.is_last else x

    def layers(self) -> list[nn.Module]:
        """The layers of this stage."""
        by_number: Any = self.model.layers
        return list(by_number.values())


class PipelineLM(CausalLM):
    """The stages of this rank as one module."""

    def __init__(self, config: DecoderConfig, stages: Sequence[StageLM]) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.stages = nn.ModuleList(stages)
        self.__dict__["lm_head"] = getattr(stages[-1], "lm_head", None)

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters by their names in the full model."""
        for stage in self.stages:
            yield from stage.named_parameters(*args, **named)

    def all_stages(self) -> list[StageLM]:
        """Stages of this rank, in order."""
        return [stage for stage in self.stages if isinstance(stage, StageLM)]

    def layers(self) -> list[nn.Module]:
        """The layers of this rank."""
        return [layer for stage in self.all_stages() for layer in stage.layers()]


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Layer ranges of the stages, split evenly; the first stages get the remainder, because the last has the head."""
    size, over = divmod(num_layers, num_stages)
    starts = [n * size + min(n, over) for n in range(num_stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def check_layers(num_layers: int, pp: int, stages_each: int) -> None:
    """`ValueError` when a stage would have no layers."""
    if pp > 1 and num_layers < pp * stages_each:
        raise ValueError(
            f"parallel.pp {pp} * pp_stages {stages_each} needs at least that many layers, the model has {num_layers}"
        )


def check_trained(shard_map: ShardMap, pp: int, num_ranks: int) -> None:
    """`ValueError`, on all ranks alike, when a rank of the pipeline has no trained parameters, as LoRA may leave it."""
    owners = {rank for parts in shard_map.by_name.values() for ranks in parts.values() for rank in ranks}
    trained = {rank // (num_ranks // pp) for rank in owners}  # pipeline ranks are outermost
    if missing := sorted(set(range(pp)) - trained):
        raise ValueError(
            f"parallel.pp {pp} leaves rank {missing[0]} of the pipeline without trained parameters: adapt layers of "
            "every rank with model.lora.target_modules, or lower parallel.pp"
        )


def build_stages(model: CausalLM, pp: MeshAxisGroup, stages_each: int) -> PipelineLM:
    """Build this rank's stages: every `pp.size`-th stage."""
    ranges = split_layers(model.config.num_hidden_layers, pp.size * stages_each)
    return PipelineLM(model.config, [StageLM(model, layers) for layers in ranges[pp.rank :: pp.size]])


class Pipeline:
    """Runs micro-batches through the stages of all ranks."""

    def __init__(self, model: PipelineLM, pp: MeshAxisGroup, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.pp, self.device, self.dtype = model, pp, device, dtype

    def run(self, packs: Sequence[PackedInputs], finish: Callable[[Tensor, int], Tensor], *, train: bool) -> None:
        """Call `finish` on the last stage with the hidden states and number of each pack; with `train`, backward from
        the returned losses. All packs have the same length; their number is a multiple of the pp size."""
        schedule = self._build_schedule(packs, lambda hidden, number: finish(hidden, int(number)))
        for stage in self.model.all_stages():
            stage.packs = packs
        numbers = torch.arange(len(packs))
        args = (torch.cat([pack.input_ids for pack in packs]),) if self.pp.rank == 0 else ()
        target = numbers if self.pp.rank == self.pp.size - 1 else None
        step = schedule.step if train else schedule.eval
        step(*args, target=target, number=numbers, return_outputs=False)

    def _build_schedule(self, packs: Sequence[PackedInputs], loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
        # Imported lazily: these import torch's compiler, a quarter of the start-up time.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        num_tokens, stages = len(packs[0].input_ids), []
        hidden = torch.empty(
            num_tokens, self.model.config.hidden_size, dtype=self.dtype, device="meta", requires_grad=True
        )
        for n, module in enumerate(self.model.stages):
            first = torch.empty(num_tokens, dtype=torch.int64, device="meta")
            is_first, index = n == 0 and self.pp.rank == 0, n * self.pp.size + self.pp.rank
            total = len(self.model.stages) * self.pp.size
            # Explicit input and output shapes avoid shape inference between stages, which uses pickle.
            inputs = first if is_first else hidden
            stages.append(PipelineStage(module, index, total, self.device, inputs, hidden, group=self.pp.group))
        if len(stages) == 1:
            return Schedule1F1B(stages[0], len(packs), loss_fn=loss, scale_grads=False)
        return ScheduleInterleaved1F1B(list(stages), len(packs), loss_fn=loss, scale_grads=False)
