"""Packing does not change a step, ranks share a batch, and their number is checked."""

from __future__ import annotations

import pytest
import torch
from rank_steps import pack, rl_config

from prime_rl.trainer.backend import build_backend
from prime_rl.trainer.parallel_config import ParallelDims
from prime_rl.trainer.rl.data import build_batches
from prime_rl.trainer.rl.loss import build_loss
from rollouts.training.backends.ranks import Ranks
from rollouts.training.batching import pack_samples, pack_share


def test_result_is_independent_of_packing() -> None:
    """Packed == padded (a micro-batch per sample); one micro-batch == eight."""
    config = rl_config(data={"fake": {"batch_size": 8}})
    results = []
    for rows in (100, 1, 0):
        backend = build_backend(config)
        loss = build_loss(config.loss, 48)
        for step in (1, 2, 3):
            samples = build_batches(config, 320).receive(step)
            micros = pack(backend, samples, rows).micros if rows else [pack_samples([s], 48)[0][0] for s in samples]
            assert rows != 100 or len(micros) == 1
            assert rows or len(micros) == 8
            stats = backend.forward_backward(micros, loss)
            backend.optim_step(stats)
        results.append((stats.summary(), backend.export_state_dict()))
    for summary, tensors in results[1:]:
        assert summary == pytest.approx(results[0][0], rel=1e-9, abs=1e-9)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, results[0][1][name], rtol=1e-9, atol=1e-9)


def test_share_has_local_samples_and_global_totals() -> None:
    config = rl_config(data={"fake": {"batch_size": 5}})
    samples = build_batches(config, 320).receive(1)
    packs = pack_samples(samples, 48, 3)
    shares = [pack_share(samples, 48, 3, rank) for rank in range(3)]
    assert [share.micros for share in shares] == packs
    assert all(share.lengths == [len(s.tokens) for s in samples] for share in shares)
    assert len({(share.padding_ratio, share.imbalance) for share in shares}) == 1
    computed = sum(share.micro_batch_tokens * len(share.micros) for share in shares)
    assert computed == pytest.approx(sum(shares[0].lengths)), "each rank counts its own"
    alone = pack_share(samples[:1], 48, 2, 1)
    assert alone.micros[0].sample_ids == [] and alone.imbalance == pytest.approx(1.0)
    assert alone.padding_ratio == pytest.approx(4 / (4 + len(samples[0].tokens)))


def test_the_number_of_ranks_is_checked() -> None:
    assert ParallelDims().resolve(3).dp == ParallelDims(dp=3).resolve(3).dp == 3
    with pytest.raises(ValueError, match=r"parallel\.dp is 4 but 2 ranks .*--nproc-per-node 4"):
        ParallelDims(dp=4).resolve(2)
    with pytest.raises(ValueError, match=r"dp_replicate is 2, which does not divide 3"):
        ParallelDims(dp_replicate=2).resolve(3)
    with pytest.raises(ValueError, match="dp_replicate 3 does not divide dp 4"):
        ParallelDims(dp=4, dp_replicate=3)


class OneOfTwo(Ranks):
    """A rank that gets nothing from the other one."""

    def gather_bytes(self, data: bytes) -> list[bytes]:
        return [data]


def test_evaluation_leaves_no_layer_gathered() -> None:
    """Average weights are exported in place of the shards, which gathered layers would hide."""
    config = rl_config()
    backend = build_backend(config)
    micros, resharded = pack(backend, build_batches(config, 320).receive(1), 1).micros, list[torch.nn.Module]()
    units = [backend.model, *backend.model.layers()]
    for unit in units:
        object.__setattr__(unit, "reshard", lambda unit=unit: resharded.append(unit))
    backend.ranks = OneOfTwo(0, 2)
    backend.evaluate(micros, build_loss(config.loss, 48))
    assert {id(unit) for unit in resharded} == {id(unit) for unit in units}
