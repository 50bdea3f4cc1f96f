"""One of four ranks that train three steps on each mesh in turn, then resume the run of the previous mesh.

Rank 0 writes the results of each mesh, for `test_meshes` to compare with one rank.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from forked_ranks import run_ranks
from safetensors.torch import save_file

from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.ckpt import load_checkpoint, save_checkpoint
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.parallel_dims import destroy_process_group
from prime_rl.trainer.rl.data import build_batches
from prime_rl.trainer.rl.loss import build_loss
from prime_rl.transport.weights import publish_weights
from rollouts.training.batching import pack_share

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": False},
    "tied": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
}
NUM_STEPS = 3
SEQ_LEN = 40
LORA = {"rank": 4, "modules_to_save": ["lm_head"]}
BF16 = {"dtype": "bfloat16"}
MUON = {"type": "muon"}
GRPO = {"type": "grpo", "entropy_coef": 0.1}


@dataclass(frozen=True)
class Way:
    """A mesh, the model that is trained on it and what else is on."""

    name: str
    kind: str
    parallel: dict[str, Any]
    model: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    optim: dict[str, Any] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """Name of the run of one rank that must come to the same."""
        marks = ["lora" if "lora" in self.model else "", self.loss.get("type", ""), self.optim.get("type", "")]
        return "_".join(filter(None, [self.kind, *marks, self.model.get("dtype", "")]))

    @property
    def is_narrow(self) -> bool:
        """Whether it computes in a format in which the order of a sum shows."""
        return "dtype" in self.model


WAYS = [
    Way("dp", "dense", {"dp": 4}),
    Way("hsdp", "dense", {"dp_replicate": 2}),
    Way("tp", "dense", {"tp": 4}),
    Way("tp_dp", "dense", {"tp": 2}),
    Way("tp_tied", "tied", {"tp": 4}),
    Way("tp_hsdp_tied", "tied", {"tp": 2, "dp_replicate": 2}),
    Way("tp_lora", "dense", {"tp": 2}, {"lora": LORA}),
    Way("tp_sparing", "dense", {"tp": 2}, {"ac": {"mode": "selective"}, "ac_offloading": {}, "attn": "sdpa"}),
    Way("tp_grpo", "dense", {"tp": 2}, loss=GRPO),
    Way("cp", "dense", {"cp": 4}),
    Way("cp_gqa", "dense", {"cp": 4}, {"attn": "exact"}, GRPO),
    Way("cp_dp", "tied", {"cp": 2, "dp": 2}),
    Way("ring", "dense", {"cp": 4, "cp_style": "ring"}),
    Way("ring_dp", "dense", {"cp": 2, "cp_style": "ring"}, {"ac": {"freq": 2}}),
    Way("ring_tp", "tied", {"cp": 2, "tp": 2, "cp_style": "ring"}),
    Way("cp_tp_lora", "dense", {"cp": 2, "tp": 2}, {"lora": LORA}),
    Way("cp_moe", "moe", {"cp": 2}),
    Way("ep", "moe", {"ep": 4}),
    Way("ep_hsdp", "moe", {"ep": 2, "dp_replicate": 2}, {"ac": {"freq": 1}}),
    Way("ep_dp", "moe", {"ep": 2}),
    Way("ep_tp", "moe", {"ep": 2, "tp": 2}),
    Way("ep_cp", "moe", {"ep": 4, "cp": 2, "cp_style": "ring"}),
    Way("pp", "dense", {"pp": 4}),
    Way("pp_dp_tied", "tied", {"pp": 2, "dp": 2}),
    Way("pp_interleaved", "tied", {"pp": 2, "pp_stages": 2, "tp": 2}),
    Way("pp_cp_lora", "dense", {"pp": 2, "cp": 2}, {"lora": LORA, "ac": {"freq": 1}}),
    Way("pp_ep", "moe", {"pp": 2, "ep": 2}, {"reshard_after_forward": False}),
    Way("tp_moe", "moe", {"tp": 4}),
    Way("ep_lora", "moe", {"ep": 2}, {"lora": LORA}),
    Way("muon_cp", "dense", {"cp": 2}, optim=MUON),
    Way("muon_pp", "dense", {"pp": 2}, optim=MUON),
    Way("muon_ep", "moe", {"ep": 2}, optim=MUON),
    Way("bf16_hsdp", "dense", {"dp_replicate": 2}, BF16),
    Way("bf16_tp", "dense", {"tp": 2}, BF16),
    Way("bf16_cp", "dense", {"cp": 4}, BF16),
    Way("bf16_ring_tp", "dense", {"cp": 2, "tp": 2, "cp_style": "ring"}, BF16),
    Way("bf16_pp", "dense", {"pp": 2}, BF16),
    Way("bf16_ep", "moe", {"ep": 4}, BF16),
]


def build_config(root: Path, way: Way | None, kind: str, **changes: Any) -> TrainConfig:
    """A small policy in float64 on fake samples, several to a pack; clipping and decay take part."""
    directory = root / kind
    if not (directory / "config.json").exists():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps({**SHAPE, **MODELS[kind]}))
    model = {"name": str(directory), "debug": {"random_init": True}, "dtype": "float64", "seq_len": SEQ_LEN}
    values: dict[str, Any] = {
        "model": {**model, **(way.model if way else {})},
        "optim": {"lr": 1e-2, "weight_decay": 0.1, "max_norm": 0.05, **(way.optim if way else {})},
        "data": {"fake": {"batch_size": 9}},
        "loss": way.loss if way else {},
        "parallel": way.parallel if way else {},
    }
    return TrainConfig.model_validate({**values, **changes})


def train(backend: Backend, config: TrainConfig, step: int) -> dict[str, float]:
    """One step; in the second only one sample has loss."""
    loss, batches = build_loss(config.loss, SEQ_LEN), build_batches(config, backend.model.config.vocab_size)
    samples = batches.receive(step)
    for sample in samples[1:] if step == 2 else []:
        sample.loss_mask = [0.0] * len(sample.tokens)
    share = pack_share(samples, SEQ_LEN, backend.mesh.dp_size, backend.mesh.dp_rank, rows=3)
    stats = backend.forward_backward(share.micros, loss)
    report = backend.optim_step(stats)
    imbalance = backend.pop_expert_load()  # in the second it depends on what shares a pack with the one
    return {**stats.summary(), "grad_norm": report.grad_norm, **(imbalance if step != 2 else {})}


def walk(root: Path, way: Way, leg: int) -> None:
    """Three steps from the beginning, then one more of the run that goes from mesh to mesh."""
    started = time.monotonic()
    config = build_config(root, way, way.kind)
    backend = build_backend(config)
    rows = [train(backend, config, step) for step in range(1, NUM_STEPS + 1)]
    share = pack_share(build_batches(config, 97).receive(9), SEQ_LEN, backend.mesh.dp_size, backend.mesh.dp_rank)
    loss = build_loss(config.loss, SEQ_LEN)
    evaluated, canary = backend.evaluate(share.micros, loss).summary(), backend.compute_canary(NUM_STEPS)
    tensors = backend.export_state_dict()
    if backend.ranks.rank == 0:
        save_file(tensors, root / f"{way.name}.safetensors")
        reported = {"rows": rows, "evaluated": evaluated, "canary": canary.logprobs}
        (root / f"{way.name}.json").write_text(json.dumps(reported))
        if backend.adapter_config is None:
            directory = root / "weights" / way.name
            publish_weights(directory, NUM_STEPS, tensors, backend.model_dir, tie_word_embeddings=way.kind == "tied")
    relay = root / "relay" / way.reference
    held = (backend.parameters, backend.stepper)
    load_checkpoint(relay, leg, *held, backend.ranks, shard_map=backend.shard_map)
    train(backend, config, NUM_STEPS + 1 + leg)
    save_checkpoint(relay, leg + 1, *held, {}, backend.ranks, backend.shard_map)
    if backend.ranks.rank == 0:
        print(f"{way.name}: {time.monotonic() - started:.1f} s", flush=True)


def run_rank(_: int) -> None:
    """All that this rank does."""
    torch.set_num_threads(1)
    for word in sys.argv[2:]:  # name:leg
        name, _, leg = word.partition(":")
        walk(Path(sys.argv[1]), next(way for way in WAYS if way.name == name), int(leg))
    destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(run_ranks(4, run_rank))
