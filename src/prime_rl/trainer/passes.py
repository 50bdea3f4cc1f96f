"""One pass of a micro-batch: laid out for this rank's part of the model, and read out as what losses take."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from prime_rl.trainer.context_parallel import ContextShare, count_slots
from prime_rl.trainer.model import Placement
from prime_rl.trainer.models.attention import Attend, PackedAttention, RoundedAttention
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.parallel_dims import Mesh
from prime_rl.trainer.pipeline_parallel import Pack
from prime_rl.trainer.prefixes import find_shared
from prime_rl.trainer.tensor_parallel import vocab_part
from rollouts.training.batching import MIN_TOKENS, MicroBatch, TensorBatch
from rollouts.training.rl_losses import LossInputs, compute_head_logprobs, compute_head_table


@dataclass(frozen=True)
class Layout:
    """A micro-batch as tensors, and the tokens of it that this rank computes: all, a `share`, or those that differ,
    with the `place` of every token among them."""

    batch: TensorBatch
    pack: Pack
    share: ContextShare | None = None
    place: Int[Tensor, " tokens"] | None = None


def fill_up(micro: MicroBatch, mesh: Mesh, device: torch.device, num_tokens: int = 0) -> TensorBatch:
    """A micro-batch as tensors, filled up to `num_tokens` and to what the ranks that share its tokens need."""
    return micro.to_tensors(device, max(num_tokens, count_tokens(micro, mesh)))


def may_share_prefixes(model: CausalLM, placement: Placement, mesh: Mesh) -> bool:
    """Whether equal tokens may be computed once: not where ranks cut a pack, where experts count their tokens, for
    FlashAttention, which takes whole sequences, or for a model whose tokens meet outside of our attention."""
    is_whole = mesh.cp.size == mesh.tp.size == mesh.pp.size == mesh.ep.size == 1
    return is_whole and model.meets_in_attend and placement.attn != "flash" and not model.config.num_experts


def lay_out(
    batch: TensorBatch,
    placement: Placement,
    mesh: Mesh,
    num_real: int | None = None,
    *,
    share_prefixes: bool = False,
) -> Layout:
    """Which tokens of a batch this rank computes, and how they see the others; those from `num_real` on are filling."""
    num, device = len(batch.input_ids), placement.device
    real = None if num_real in (None, num) else torch.arange(num, device=device) < (num_real or 0)
    if mesh.cp.size == 1:
        shared = find_shared(batch.input_ids.tolist(), batch.lengths) if share_prefixes else None
        attend: Attend = PackedAttention(batch.lengths, device, placement.attn, shared)
        if placement.arithmetic != placement.dtype:
            attend = RoundedAttention(attend, placement.dtype)
        if shared is None:
            return Layout(batch, Pack(batch.input_ids, batch.positions, attend, real))
        first = shared.first.to(device)
        pack = Pack(batch.input_ids[first], batch.positions[first], attend)
        return Layout(batch, pack, place=shared.place.to(device))
    share = ContextShare(batch, mesh.cp, mesh.dims.cp_style)
    own = share.own
    pack = Pack(
        batch.input_ids[own],
        batch.positions[own],
        share.attend(placement.attn),
        None if real is None else real[own],
    )
    return Layout(batch, pack, share)


def count_tokens(micro: MicroBatch, mesh: Mesh) -> int:
    """Tokens of a micro-batch when it is laid out."""
    num = len(micro.input_ids)
    if mesh.cp.size > 1:
        return count_slots(micro, mesh.cp, mesh.dims.cp_style)
    return num if num >= MIN_TOKENS else num + MIN_TOKENS


def read_out(layout: Layout, hidden: Float[Tensor, "own hidden"], model: CausalLM, mesh: Mesh) -> LossInputs:
    """Streams of the tokens with loss only, because no other needs logits."""
    batch, share = layout.batch, layout.share
    chosen = batch.loss_mask.nonzero().squeeze(1)
    student_table: Tensor | None = None
    if share is None:
        hidden = hidden if layout.place is None else hidden[layout.place]
        logprobs, entropy = compute_head(hidden, chosen, batch.labels, batch.temperature, model, mesh)
        if batch.teacher_table is not None:
            student_table = compute_table(hidden, chosen, batch.temperature, batch.teacher_table[0], model)
    else:
        own = share.own
        rows = batch.loss_mask[own].nonzero().squeeze(1)
        found = compute_head(hidden, rows, batch.labels[own], batch.temperature[own], model, mesh)
        logprobs, entropy = (share.join(spread(x, rows, len(own)))[chosen] for x in found)
    return LossInputs(
        trainer_logprobs=logprobs,
        inference_logprobs=batch.inference_logprobs[chosen],
        advantages=batch.advantages[chosen],
        loss_mask=batch.loss_mask[chosen],
        sequence=batch.sequence[chosen],
        teacher_logprobs=None if batch.teacher_logprobs is None else batch.teacher_logprobs[chosen],
        entropy=entropy,
        num_sequences=len(batch.lengths),
        taught=None if batch.taught is None else batch.taught[chosen],
        anchored=None if batch.anchored is None else batch.anchored[chosen],
        student_table=student_table,
        teacher_table=None if batch.teacher_table is None else batch.teacher_table[1],
        has_tail=batch.teacher_table is not None and batch.teacher_table[0] is not None,
    )


def compute_head(
    hidden: Float[Tensor, "own hidden"],
    rows: Int[Tensor, " rows"],
    labels: Int[Tensor, " own"],
    temperature: Float[Tensor, " own"],
    model: CausalLM,
    mesh: Mesh,
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
    """Log-probs of the labels, and entropies, at some rows of the hidden states."""
    enough = _enough(rows)
    part = vocab_part(model.config.vocab_size, mesh.tp) if mesh.tp.size > 1 else None
    logprobs, entropy = compute_head_logprobs(
        hidden[enough],
        model.lm_head.weight,
        labels[enough],
        temperature[enough],
        cap=model.config.logit_cap,
        part=part,
    )
    return logprobs[: len(rows)], entropy[: len(rows)]


def compute_table(
    hidden: Float[Tensor, "own hidden"],
    rows: Int[Tensor, " rows"],
    temperature: Float[Tensor, " own"],
    ids: Int[Tensor, "rows k"] | None,
    model: CausalLM,
) -> Float[Tensor, "rows outcomes"]:
    """Log-probs of the tokens with these ids and of the rest, or of all tokens, at some rows of the hidden states."""
    enough = _enough(rows)
    table = compute_head_table(hidden[enough], model.lm_head.weight, temperature[enough], _repeat(ids, enough))
    return table[: len(rows)]


def _enough(rows: Int[Tensor, " rows"]) -> Int[Tensor, " enough"]:
    """A product of fewer rows rounds differently (see attention.min_rows), so a few that are not needed go along."""
    return rows if len(rows) >= MIN_TOKENS else torch.cat((rows, rows.new_zeros(MIN_TOKENS)))


def _repeat(ids: Int[Tensor, "chosen k"] | None, rows: Int[Tensor, " rows"]) -> Int[Tensor, "rows k"] | None:
    """The ids of each row, the last ones again for the rows that only go along."""
    if ids is None or len(ids) == len(rows):
        return ids
    last = ids[-1:] if len(ids) else torch.arange(ids.shape[1], device=ids.device)[None]
    return torch.cat((ids, last.expand(len(rows) - len(ids), -1)))


def spread(values: Float[Tensor, " rows"], rows: Int[Tensor, " rows"], num: int) -> Float[Tensor, " num"]:
    """`values` at `rows`, and zeros elsewhere."""
    return values.new_zeros(num).index_put((rows,), values)
