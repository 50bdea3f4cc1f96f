"""A model with its optimizer on a device: micro-batches in, a new version of the parameters out."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from prime_rl.trainer.config import SFTConfig, TrainConfig
from prime_rl.trainer.model import Placement, limit_threads, load_model, resolve_placement
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.causal_lm import CausalLM, tensor_names
from prime_rl.trainer.optim import MasterWeights, build_optimizer, build_schedule
from rollouts.training.backends.step import OptimizerStep, StepReport
from rollouts.training.batching import MIN_TOKENS, MicroBatch, TensorBatch
from rollouts.training.rl_losses import LossInputs, LossOutput, TokenStats, compute_head_logprobs

Loss = Callable[[LossInputs], LossOutput]


@dataclass
class Backend:
    """One rank's share of a trainer; `parameters` are what the optimizer steps, in float32."""

    model: CausalLM
    stepper: OptimizerStep
    parameters: dict[str, Tensor]
    placement: Placement
    model_dir: Path
    num_layers: int | None = None

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
            hidden[rows], self.model.lm_head.weight, batch.labels[rows], batch.temperature[rows]
        )
        n = len(chosen)
        return LossInputs(
            trainer_logprobs=logprobs[:n],
            inference_logprobs=batch.inference_logprobs[chosen],
            advantages=batch.advantages[chosen],
            loss_mask=batch.loss_mask[chosen],
            sequence=batch.sequence[chosen],
            teacher_logprobs=None if batch.teacher_logprobs is None else batch.teacher_logprobs[chosen],
            entropy=entropy[:n],
        )

    def forward_backward(self, micros: Sequence[MicroBatch], loss: Loss) -> TokenStats:
        """Accumulate the gradient of a whole step, scaled by its global count of loss tokens."""
        global_count = sum(micro.loss_count for micro in micros)
        stats = TokenStats()
        for micro in micros:
            if micro.loss_count:
                output = loss(self.compute_inputs(micro.to_tensors(self.placement.device)))
                self.stepper.backward(output.loss_sum, global_count)
                stats.merge(output.stats)
        return stats

    def optim_step(self, stats: TokenStats) -> StepReport:
        """Apply the accumulated gradient; a step in which no token carried loss is skipped."""
        return self.stepper.step() if stats.rows else self.stepper.skip("no token of the batch carries loss")

    def publishable(self) -> dict[str, Tensor]:
        """The tensors that engines compute with, in the format the trainer computes with."""
        return tensor_names(self.model)


def build_backend(config: TrainConfig | SFTConfig) -> Backend:
    """Model, optimizer and schedule of a config; `ValueError` for what this version or machine cannot do."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"this version trains on one rank, but WORLD_SIZE is {os.environ['WORLD_SIZE']}: use --nproc-per-node 1"
        )
    limit_threads()
    torch.manual_seed(config.seed)
    placement = resolve_placement(config.model)
    model, model_dir = load_model(config.model, placement)
    after_step = None
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    if placement.dtype != torch.float32:
        masters = MasterWeights(model, placement.dtype)
        parameters, after_step = masters.by_name, masters.write_back
    stepper = OptimizerStep(
        build_optimizer(config.optim, parameters.values()),
        schedule=build_schedule(config.scheduler, config.optim.lr, config.max_steps),
        max_norm=config.optim.max_norm,
        after_step=after_step,
    )
    return Backend(model, stepper, parameters, placement, model_dir, config.model.debug.num_layers)
