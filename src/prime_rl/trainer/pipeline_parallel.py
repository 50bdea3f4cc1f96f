"""Pipeline parallelism: each rank has some layers, and micro-batches go through all ranks forwards and then backwards.

    stage 0  F0 F1 F2 .. B0 F3 B1 ..        1F1B: as soon as a backward can run it does, which bounds what is kept
    stage 1     F0 F1 B0 F2 B1 ..           interleaved: several stages per rank, shorter waits, more messages

The schedules are torch's (`torch.distributed.pipelining`); micro-batches are filled up to the same length for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from prime_rl.trainer.models.attention import Attend
from prime_rl.trainer.models.causal_lm import CausalLM, DecoderConfig
from prime_rl.trainer.models.moe import counting
from prime_rl.trainer.parallel_dims import Team


@dataclass(frozen=True)
class Pack:
    """What a stage has to know of a micro-batch: its tokens, and which of them are more than filling."""

    input_ids: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]
    attend: Attend
    real: Bool[Tensor, " tokens"] | None = None


class StageLM(CausalLM):
    """Some layers that follow each other; the first stage has the embedding too, the last one norm and head.

    Parameters keep the names they have in the whole model. A tied head is held by both ends.
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
        self.packs: Sequence[Pack] = ()

    def forward(self, x: Tensor, number: Int[Tensor, "1"]) -> Float[Tensor, "tokens hidden"]:  # type: ignore[override]
        """The hidden states after these layers, of the micro-batch with this number."""
        pack = self.packs[int(number)]
        x = self.model.embed_tokens(x) if self.is_first else x
        longest, device = int(pack.positions.max()) + 1, pack.positions.device
        cos, sin = (table[pack.positions].to(x.dtype) for table in self.rope(longest, device))
        with counting(self, pack.real):
            for layer in self.layers():
                x = layer(x, cos, sin, pack.attend)
        return self.model.norm(x) if self.is_last else x

    def layers(self) -> list[nn.Module]:
        """The layers of this stage."""
        by_number: Any = self.model.layers
        return list(by_number.values())


class PipelineLM(CausalLM):
    """The stages of this rank, with the parameters of all of them."""

    def __init__(self, config: DecoderConfig, stages: Sequence[StageLM]) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.stages = nn.ModuleList(stages)
        self.__dict__["lm_head"] = getattr(stages[-1], "lm_head", None)

    def named_parameters(self, *args: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """By their names in the whole model."""
        for stage in self.stages:
            yield from stage.named_parameters(*args, **named)

    def all_stages(self) -> list[StageLM]:
        """First to last."""
        return [stage for stage in self.stages if isinstance(stage, StageLM)]

    def layers(self) -> list[nn.Module]:
        """The layers of this rank."""
        return [layer for stage in self.all_stages() for layer in stage.layers()]

    def reshard(self) -> None:
        """Give up gathered parameters."""
        for stage in self.stages:
            stage.reshard()  # type: ignore[operator]


def deal_layers(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage, as evenly as can be; what is over goes to the first ones, the last one has the head."""
    size, over = divmod(num_layers, num_stages)
    starts = [n * size + min(n, over) for n in range(num_stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def check_layers(num_layers: int, pp: int, stages_each: int) -> None:
    """`ValueError` when there is a stage without layers."""
    if pp > 1 and num_layers < pp * stages_each:
        raise ValueError(
            f"parallel.pp {pp} * pp_stages {stages_each} needs as many layers, this model has {num_layers}"
        )


def cut_stages(model: CausalLM, pp: Team, stages_each: int) -> PipelineLM:
    """This rank's stages; those of a rank lie `pp.size` apart."""
    dealt = deal_layers(model.config.num_hidden_layers, pp.size * stages_each)
    return PipelineLM(model.config, [StageLM(model, layers) for layers in dealt[pp.rank :: pp.size]])


class Pipeline:
    """Runs packs through the stages of all ranks."""

    def __init__(self, model: PipelineLM, pp: Team, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.pp, self.device, self.dtype = model, pp, device, dtype

    def run(self, packs: Sequence[Pack], finish: Callable[[Tensor, int], Tensor], *, train: bool) -> None:
        """Call `finish` on the last stage with the hidden states of each pack and its number; to `train`, go back from
        the losses that it returns. Packs have the same length, and pp ranks as many, a multiple of their number."""
        schedule = self._build_schedule(packs, lambda hidden, number: finish(hidden, int(number)))
        for stage in self.model.all_stages():
            stage.packs = packs
        numbers = torch.arange(len(packs))
        args = (torch.cat([pack.input_ids for pack in packs]),) if self.pp.rank == 0 else ()
        target = numbers if self.pp.rank == self.pp.size - 1 else None
        step = schedule.step if train else schedule.eval
        step(*args, target=target, number=numbers, return_outputs=False)

    def _build_schedule(self, packs: Sequence[Pack], loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
        # They import torch's compiler, a quarter of the start of a trainer that has no pipeline.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        num_tokens, stages = len(packs[0].input_ids), []
        hidden = torch.empty(
            num_tokens, self.model.config.hidden_size, dtype=self.dtype, device="meta", requires_grad=True
        )
        for n, module in enumerate(self.model.stages):
            first = torch.empty(num_tokens, dtype=torch.int64, device="meta")
            is_first, index = n == 0 and self.pp.rank == 0, n * self.pp.size + self.pp.rank
            total = len(self.model.stages) * self.pp.size
            # Told what comes in and goes out, stages need not ask each other, which they would do in pickles.
            comes = first if is_first else hidden
            stages.append(PipelineStage(module, index, total, self.device, comes, hidden, group=self.pp.group))
        if len(stages) == 1:
            return Schedule1F1B(stages[0], len(packs), loss_fn=loss, scale_grads=False)
        return ScheduleInterleaved1F1B(list(stages), len(packs), loss_fn=loss, scale_grads=False)
