"""Prepares a micro-batch for the forward pass and gathers the loss inputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prime_rl.trainer.model import DeviceConfig
from prime_rl.trainer.models.attention import AttentionBackend, PackedAttention, RoundedAttention
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.hf_model import HFCausalLM
from prime_rl.trainer.parallel.context_parallel import ContextShare, count_slots
from prime_rl.trainer.parallel.pipeline_parallel import PackedInputs
from prime_rl.trainer.parallel.tensor_parallel import vocab_part
from prime_rl.trainer.parallel_dims import Mesh
from rollouts.training.batching import MicroBatch, TensorBatch
from rollouts.training.numerics import MIN_TOKENS, pad_rows
from rollouts.training.prefix_tree import build_prefix_tree
from rollouts.training.rl_losses import LossInputs, compute_head_logprobs, compute_head_table
from rollouts.training.sampling_support import Support


@dataclass(frozen=True)
class ForwardInputs:
    """A micro-batch as tensors, and the tokens that this rank computes: all, its context-parallel `share`, or the
    nodes of its prefix tree with the `node` of every token."""

    batch: TensorBatch
    pack: PackedInputs
    share: ContextShare | None = None
    node: Int[Tensor, " tokens"] | None = None


def pad_micro_batch(micro: MicroBatch, mesh: Mesh, device: torch.device, num_tokens: int = 0) -> TensorBatch:
    """Convert a micro-batch to tensors, padded to `num_tokens` and to the multiple required by context parallelism."""
    return micro.to_tensors(device, max(num_tokens, count_tokens(micro, mesh)))


def can_share_prefixes(model: CausalLM, placement: DeviceConfig, mesh: Mesh) -> bool:
    """Whether shared prefixes can be computed once: not with cp, tp, pp or ep, with our experts (which count tokens),
    with FlashAttention (which takes full sequences), or for models whose tokens interact outside of `attend`."""
    is_whole = mesh.cp.size == mesh.tp.size == mesh.pp.size == mesh.ep.size == 1
    counts_tokens = model.config.num_experts > 0 and not isinstance(model, HFCausalLM)
    return is_whole and model.mixes_tokens_only_in_attend and placement.attn != "flash" and not counts_tokens


def prepare_forward(
    batch: TensorBatch,
    placement: DeviceConfig,
    mesh: Mesh,
    num_real: int | None = None,
    *,
    share_prefixes: bool = False,
    rounded: bool = False,
) -> ForwardInputs:
    """Select the tokens that this rank computes and their attention, which may be `rounded` (`PackedAttention`).

    Tokens from `num_real` on are padding.
    """
    num, device = len(batch.input_ids), placement.device
    real = None if num_real in (None, num) else torch.arange(num, device=device) < (num_real or 0)
    if mesh.cp.size == 1:
        tree = build_prefix_tree(batch.lengths, batch.shared) if share_prefixes and batch.shared is not None else None
        how = (placement.attn, tree, placement.arithmetic)
        attend: AttentionBackend = PackedAttention(batch.lengths, device, *how, rounded=rounded)
        if placement.arithmetic != placement.dtype:
            attend = RoundedAttention(attend, placement.dtype)
        if tree is None:
            return ForwardInputs(batch, PackedInputs(batch.input_ids, batch.positions, attend, real))
        first = tree.first.to(device)
        pack = PackedInputs(batch.input_ids[first], batch.positions[first], attend)
        return ForwardInputs(batch, pack, node=tree.node.to(device))
    share = ContextShare(batch, mesh.cp, mesh.dims.cp_style)
    local = share.local_indices
    pack = PackedInputs(
        batch.input_ids[local],
        batch.positions[local],
        share.attend(placement.attn),
        None if real is None else real[local],
    )
    return ForwardInputs(batch, pack, share)


def count_tokens(micro: MicroBatch, mesh: Mesh) -> int:
    """Number of tokens of a micro-batch after padding."""
    if mesh.cp.size > 1:
        return count_slots(micro, mesh.cp, mesh.dims.cp_style)
    return max(len(micro.input_ids), MIN_TOKENS)


def gather_loss_inputs(
    layout: ForwardInputs,
    hidden: Float[Tensor, "local hidden"],
    model: CausalLM,
    mesh: Mesh,
    *,
    needs_observations: bool = False,
) -> LossInputs:
    """Compute log-probs and entropies of the loss tokens, and of observed tokens if needed; no other needs logits."""
    batch, share = layout.batch, layout.share
    hidden = hidden if layout.node is None else hidden[layout.node]

    def compute_at(rows: Tensor, mask: Tensor, temperature: Tensor, support: Support | None = None) -> Iterable[Tensor]:
        if share is None:
            return compute_head(hidden, rows, batch.labels, temperature, model, mesh, support)
        local = share.local_indices
        own = mask[local].nonzero().squeeze(1)
        support = None if support is None else support.select(local)
        outputs = compute_head(hidden, own, batch.labels[local], temperature[local], model, mesh, support)
        return (share.gather(scatter_rows(x, own, len(local)))[rows] for x in outputs)

    chosen = batch.loss_rows
    logprobs, entropy = compute_at(chosen, batch.loss_mask, batch.temperature, batch.support)
    student_table: Tensor | None = None
    # With tp, no rank has the whole head; the configuration refuses estimators that need tables.
    if share is None and mesh.tp.size == 1 and batch.teacher_table is not None:
        student_table = compute_table(hidden, chosen, batch.temperature, batch.teacher_table[0], model)
    observation_logprobs: Tensor | None = None
    observed = batch.find_observed() if needs_observations else None
    if observed is not None:
        rows = observed.nonzero().squeeze(1)
        observation_logprobs, _ = compute_at(rows, observed, torch.ones_like(batch.temperature))
    return LossInputs(
        trainer_logprobs=logprobs,
        inference_logprobs=batch.inference_logprobs[chosen],
        advantages=batch.advantages[chosen],
        loss_mask=batch.loss_mask[chosen],
        sequence=batch.sequence[chosen],
        teacher_logprobs=None if batch.teacher_logprobs is None else batch.teacher_logprobs[chosen],
        entropy=entropy,
        num_sequences=len(batch.lengths),
        has_teacher=None if batch.has_teacher is None else batch.has_teacher[chosen],
        is_reference=None if batch.is_reference is None else batch.is_reference[chosen],
        student_table=student_table,
        teacher_table=None if batch.teacher_table is None else batch.teacher_table[1],
        has_tail=batch.teacher_table is not None and batch.teacher_table[0] is not None,
        observation_logprobs=observation_logprobs,
        observation_sequence=None if observed is None else batch.sequence[observed],
        objectives=batch.objectives,
    )


def compute_head(
    hidden: Float[Tensor, "local hidden"],
    rows: Int[Tensor, " rows"],
    labels: Int[Tensor, " local"],
    temperature: Float[Tensor, " local"],
    model: CausalLM,
    mesh: Mesh,
    support: Support | None = None,
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Log-probs of the labels, and entropies, at `rows` of the hidden states; over the support of each label."""
    padded = pad_rows(rows, MIN_TOKENS)
    part = vocab_part(model.config.vocab_size, mesh.tp) if mesh.tp.size > 1 else None
    logprobs, entropy = compute_head_logprobs(
        hidden[padded],
        model.lm_head.weight,
        labels[padded],
        temperature[padded],
        cap=model.config.logit_cap,
        part=part,
        support=None if support is None else support.select(padded),
        rounded=model.rounds_inputs,
    )
    return logprobs[: len(rows)], entropy[: len(rows)]


def compute_table(
    hidden: Float[Tensor, "local hidden"],
    rows: Int[Tensor, " rows"],
    temperature: Float[Tensor, " local"],
    ids: Int[Tensor, "rows k"] | None,
    model: CausalLM,
) -> Float[Tensor, "rows outcomes"]:
    """Log-probs of the tokens `ids` and of the remainder, or of all tokens, at `rows` of the hidden states."""
    padded = pad_rows(rows, MIN_TOKENS)
    table = compute_head_table(
        hidden[padded],
        model.lm_head.weight,
        temperature[padded],
        _pad_ids(ids, padded),
        cap=model.config.logit_cap,
        rounded=model.rounds_inputs,
    )
    return table[: len(rows)]


def _pad_ids(ids: Int[Tensor, "chosen k"] | None, rows: Int[Tensor, " rows"]) -> Int[Tensor, "rows k"] | None:
    """The ids of each row; padding rows repeat the last ones."""
    if ids is None or len(ids) == len(rows):
        return ids
    last = ids[-1:] if len(ids) else torch.arange(ids.shape[1], device=ids.device)[None]
    return torch.cat((ids, last.expand(len(rows) - len(ids), -1)))


def scatter_rows(values: Float[Tensor, " rows"], rows: Int[Tensor, " rows"], num: int) -> Float[Tensor, " num"]:
    """`values` at `rows`, and zeros elsewhere."""
    return values.new_zeros(num).index_put((rows,), values)
