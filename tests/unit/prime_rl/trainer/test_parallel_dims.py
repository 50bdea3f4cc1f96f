"""Mesh sizes and the slices of a model per rank."""

from __future__ import annotations

from array import array
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.testing._internal.distributed.fake_pg import FakeStore

from prime_rl.trainer import forward
from prime_rl.trainer.command import count_missing_ranks
from prime_rl.trainer.forward import gather_loss_inputs, prepare_forward
from prime_rl.trainer.model import DeviceConfig
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights
from prime_rl.trainer.models.decoder_config import DecoderConfig
from prime_rl.trainer.parallel.context_parallel import check_heads, find_token_indices, repeat_heads
from prime_rl.trainer.parallel.pipeline_parallel import check_layers, check_trained, split_layers
from prime_rl.trainer.parallel.tensor_parallel import check_shape, find_split_dim, split_parameters
from prime_rl.trainer.parallel_config import ParallelDims
from prime_rl.trainer.parallel_dims import Mesh, MeshAxisGroup, build_mesh, destroy_process_group, init_process_group
from prime_rl.trainer.parallel_dims import ParallelDims as SameDims
from prime_rl.trainer.sharded_checkpoint import ROWS, ShardMap, ShardSlice, open_shards, save_shards
from rollouts.training.backends.ranks import Ranks
from rollouts.training.batching import pack_samples
from rollouts.training.types import Sample, TeacherTable

SHAPE = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = DecoderConfig.from_hf({"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 4, **SHAPE})


def test_sizes_are_inferred() -> None:
    assert SameDims is ParallelDims
    dims = ParallelDims(tp=2, cp=2, dp_replicate=2).resolve(16)
    assert (dims.dp, dims.dp_shard) == (4, 2)
    assert ParallelDims().resolve(3).dp_shard == 3
    assert ParallelDims(dp_shard=2, dp_replicate=2, pp=2).num_ranks == 8
    assert count_missing_ranks(ParallelDims(tp=2, pp=2), {}) == 4
    assert count_missing_ranks(ParallelDims(tp=2), {"WORLD_SIZE": "2"}) == count_missing_ranks(ParallelDims(), {}) == 0


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "words"),
    [
        ({"tp": 2, "cp": 3}, 4, r"pp 1 \* cp 3 \* tp 2 = 6 ranks .* does not divide 4 ranks"),
        ({"dp": 4, "tp": 2}, 4, r"parallel\.dp is 4 but 4 ranks .*--nproc-per-node 8"),
        ({"dp_shard": 4}, 2, r"parallel\.dp_shard is 4 but 2 ranks .*--nproc-per-node 4"),
        ({"dp_replicate": 4}, 6, r"dp_replicate is 4, which does not divide 6"),
        ({"ep": 4, "dp_replicate": 2}, 4, r"ep 4 does not divide dp_shard 2 \* cp 1"),
    ],
)
def test_inconsistent_sizes_are_rejected(sizes: dict[str, int], num_ranks: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParallelDims.model_validate(sizes).resolve(num_ranks)


def test_indivisible_shapes_are_rejected() -> None:
    for words, config, sizes in (
        ("tp 4 does not divide the 2 key heads", CONFIG, (4, 1)),
        ("tp 2 does not divide the 5 attention heads", replace(CONFIG, num_attention_heads=5), (2, 1)),
        ("ep 2 needs a model with divisible experts, but it has none", CONFIG, (1, 2)),
        (r"ep 2 \* tp 2 does not divide its 6", replace(CONFIG, num_experts=6), (2, 2)),
        ("biases of row-parallel layers", replace(CONFIG, out_bias=True), (2, 1)),
    ):
        with pytest.raises(ValueError, match=words):
            check_shape(config, *sizes)
    with pytest.raises(ValueError, match=r"cp 4 does not divide 2 attention heads: set parallel\.cp_style = ring"):
        check_heads(CONFIG, 4, 2, "ulysses")
    with pytest.raises(ValueError, match=r"pp 2 \* pp_stages 2 needs at least that many layers, the model has 2"):
        check_layers(2, 2, 2)


def test_layers_are_split_evenly() -> None:
    assert split_layers(7, 3) == [range(3), range(3, 5), range(5, 7)]


def test_the_groups_of_a_mesh_have_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not torch's default of 10 or 30 minutes."""
    timeouts, new_group = set[timedelta | None](), dist.new_group

    def record(members: list[int], timeout: timedelta | None = None) -> dist.ProcessGroup:
        timeouts.add(timeout)
        return new_group(members, timeout)

    monkeypatch.setattr(dist, "new_group", record)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        mesh = build_mesh(ParallelDims(pp=2, tp=2), Ranks(0, 8), 77.0)
    finally:
        destroy_process_group()
    assert (mesh.pp.size, mesh.tp.size, mesh.dp_size) == (2, 2, 2) and timeouts == {timedelta(seconds=77)}


@pytest.mark.parametrize(("variable", "device"), [("GLOO_SOCKET_IFNAME", "cpu"), ("NCCL_SOCKET_IFNAME", "cuda")])
def test_ranks_check_the_network_interface(variable: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(variable, "nope")
    with pytest.raises(ValueError, match=f"{variable} = 'nope' is no network interface"):
        init_process_group(ParallelDims(), 1.0, torch.device(device))


@pytest.mark.parametrize(("owners", "missing"), [([0, 1, 2], None), ([0, 1], 1), ([2, 3], 0)])
def test_every_rank_of_a_pipeline_needs_parameters(owners: list[int], missing: int | None) -> None:
    """Four ranks in two stages; a slice is on some ranks of a stage."""
    shard_map = ShardMap({}, {f"lora_A.{rank}": {ShardSlice((0,), (1,), (1,)): [rank]} for rank in owners})
    if missing is None:
        check_trained(shard_map, 2, 4)
        return
    with pytest.raises(ValueError, match=rf"parallel\.pp 2 leaves rank {missing} of the pipeline without"):
        check_trained(shard_map, 2, 4)


@pytest.mark.parametrize("style", ["ulysses", "ring"])
def test_every_token_has_one_rank(style: str) -> None:
    parts = [find_token_indices(24, rank, 3, style) for rank in range(3)]  # type: ignore[arg-type]
    assert torch.cat(parts).sort().values.tolist() == list(range(24)) and {len(part) for part in parts} == {8}
    if style == "ring":  # balanced causal attention
        assert len({int(part.sum()) for part in parts}) == 1


def test_key_heads_are_repeated_no_more_than_needed() -> None:
    x = torch.arange(2.0)[None, :, None]
    assert repeat_heads(x, 8, 2) is x
    assert repeat_heads(x, 8, 4).flatten().tolist() == [0, 0, 1, 1]
    assert repeat_heads(x, 12, 3).flatten().tolist() == [0, 0, 0, 1, 1, 1]


def test_slices_cover_the_model() -> None:
    """Every element of a split parameter is on exactly one rank, also for indivisible vocabularies."""
    config, tp = replace(CONFIG, vocab_size=51), 2
    source = CausalLM(config)
    init_weights(source, 0)
    whole = {name: p.detach().clone() for name, p in source.named_parameters()}
    rebuilt = {name: torch.full_like(p, torch.nan) for name, p in whole.items()}
    for rank in range(tp):
        model = CausalLM(config)
        model.load_state_dict(whole)
        boxes = split_parameters(model, Mesh(tp=MeshAxisGroup(rank, tp, group=object())))  # type: ignore[arg-type]
        for name, p in model.named_parameters():
            box = boxes.get(name) or ShardSlice((0,) * p.ndim, tuple(p.shape), tuple(p.shape))
            assert (name in boxes) == (find_split_dim(name) is not None)
            place = tuple(slice(a, a + n) for a, n in zip(box.offset, box.shape, strict=True))
            rebuilt[name][place] = p.detach()
    assert all(torch.equal(rebuilt[name], whole[name]) for name in whole)


@pytest.mark.parametrize("tp", [1, 2])
def test_tables_are_computed_from_whole_heads_only(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimators of single tokens also train on samples that have tables."""
    table = TeacherTable(2, array("f", [-1.0] * 4).tobytes(), array("i", [0, 30] * 2).tobytes(), bytes(8))
    sample = Sample(prompt="", tokens=[1, 2, 3], loss_mask=[0, 1, 1], inference_logprobs=[0.0] * 3)
    sample.teacher_table, sample.teacher_logprobs = table, [-1.0] * 3
    mesh, model = Mesh(tp=MeshAxisGroup(0, tp, group=object())), CausalLM(CONFIG)  # type: ignore[arg-type]
    init_weights(model, 0)
    if tp > 1:
        split_parameters(model, mesh)
    monkeypatch.setattr(forward, "compute_head", lambda _, rows, *rest: (rows.float(), rows.float()))
    placement = DeviceConfig(torch.device("cpu"), torch.float32, "sdpa", torch.float32)
    layout = prepare_forward(pack_samples([sample], 3)[0][0].to_tensors(), placement, mesh)
    inputs = gather_loss_inputs(layout, torch.ones(len(layout.batch.labels), 16), model, mesh)
    assert inputs.teacher_table is not None
    assert inputs.student_table is None if tp > 1 else inputs.student_table.shape == (2, 3)


sizes = st.tuples(st.integers(1, 9), st.integers(1, 7))


@settings(deadline=None, max_examples=20)
@given(whole=sizes, cuts=st.tuples(st.integers(1, 4), st.integers(1, 3)), data=st.data())
def test_any_slice_can_be_read_from_any_sharding(
    tmp_path_factory: pytest.TempPathFactory, whole: tuple[int, int], cuts: tuple[int, int], data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("boxes")
    full = torch.arange(whole[0] * whole[1], dtype=torch.float64).view(whole)
    edges = [[n * at // num for at in range(num + 1)] for n, num in zip(whole, cuts, strict=True)]
    places = [(a, b) for a in range(cuts[0]) for b in range(cuts[1])]
    for rank, (a, b) in enumerate(places):
        (top, bottom), (left, right) = edges[0][a : a + 2], edges[1][b : b + 2]
        box = ShardSlice((top, left), (bottom - top, right - left), whole)
        save_shards(directory, "model", {"w": full[top:bottom, left:right]}, {"w": box}, Ranks(rank, len(places)))
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in whole)
    shape = tuple(data.draw(st.integers(1, n - at)) for n, at in zip(whole, offset, strict=True))
    with open_shards(directory, "model", len(places)) as shards:
        assert shards.shape("w") == whole and torch.equal(shards.read("w"), full)
        found = shards.read("w", ShardSlice(offset, shape, whole))
    assert torch.equal(found, full[offset[0] : offset[0] + shape[0], offset[1] : offset[1] + shape[1]])


def test_schema_2_row_shards_load(tmp_path: Path) -> None:
    full = torch.arange(10.0).view(5, 2)
    for rank, (start, end) in enumerate([(0, 3), (3, 5)]):
        rows = {ROWS: f'{{"w": [{start}, 5]}}'}
        save_file({"w": full[start:end].clone()}, tmp_path / f"model-{rank + 1}-of-2.safetensors", metadata=rows)
    with open_shards(tmp_path, "model", 2) as shards:
        assert torch.equal(shards.read("w"), full)
        assert torch.equal(shards.read("w", ShardSlice((2, 1), (2, 1), (5, 2))), full[2:4, 1:])
