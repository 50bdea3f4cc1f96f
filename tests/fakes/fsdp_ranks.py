"""One rank of `test_two_ranks_equal_one`: steps under every strategy, then rank 0 writes what it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import torch
import torch.distributed as dist
from forked_ranks import run_ranks
from tiny_hf import build_batch, build_tiny_hf

from rollouts.training.backends.fsdp import FSDPConfig, FSDPTrainingBackend
from rollouts.training.backends.pytorch_factory import create_adamw_optimizer, create_cross_entropy_loss

STRATEGIES = {"full": "FULL_SHARD", "grad_op": "SHARD_GRAD_OP", "none": "NO_SHARD"}


def build(root: Path, checkpoint_path: Path | None = None, **flags: Any) -> FSDPTrainingBackend:
    # A seed per rank: rank 0's parameters must win.
    return FSDPTrainingBackend(
        build_tiny_hf(dist.get_rank()),
        lambda model: create_adamw_optimizer(model, 1e-2),
        create_cross_entropy_loss(),
        root,
        FSDPConfig(clip_grad=0.5, auto_wrap_min_params=1000, **flags),
        checkpoint_path,
    )


async def run(single: Path, root: Path) -> None:
    """Two steps from scratch, two more from the checkpoint that one rank has written."""
    rank = dist.get_rank()
    results: dict[str, Any] = {"exact": {}}
    for name, strategy in STRATEGIES.items():
        backend = build(root / name, sharding_strategy=strategy, mixed_precision=False)
        assert (backend.rank, backend.world_size) == (rank, dist.get_world_size())
        reports = []
        for seed in range(4):
            batch = {key: value[rank::2] for key, value in build_batch(4, seed).items()}
            if seed == 2:
                await backend.load_checkpoint(single)
            if seed < 2:  # unequal parts: one row now, one later
                backend.forward_backward({key: value[:1] for key, value in batch.items()})
                backend.forward_backward({key: value[1:] for key, value in batch.items()})
            else:
                backend.forward_backward(batch)
            reports.append(await backend.optim_step())
        await backend.save_checkpoint(4, {"loss": reports[-1]["loss"]})
        results["exact"][name] = reports
    continued = build(root / "continued", checkpoint_path=single)
    facts = torch.tensor([continued.current_step, len(await continued.get_weights())])
    table = torch.stack(continued.ranks.gather(facts)).tolist()
    results["continued"], results["num_tensors"] = map(list, zip(*table, strict=True))
    half = build(root / "half", gradient_checkpointing=True)
    batch = {key: value[rank::2] for key, value in build_batch(4, 0).items()}
    loss = (await half.forward_backward(batch))["loss"]
    results["bfloat16"] = {"loss": loss, "param_dtype": str(next(half.model.parameters()).dtype)}
    words = await half.broadcast(b"hello" if rank == 0 else b"")
    gathered = half.ranks.gather(torch.tensor(list(words), dtype=torch.uint8))
    results["broadcast"] = [bytes(part.tolist()).decode() for part in gathered]
    if rank == 0:
        (root / "results.json").write_text(json.dumps(results))


def run_rank(rank: int) -> None:
    """All that this rank does."""
    torch.set_num_threads(1)
    checkpoint, root = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=(root / "store").as_uri(), rank=rank, world_size=2)
    anyio.run(run, checkpoint, root)
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(run_ranks(2, run_rank))
