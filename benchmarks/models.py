"""Models of the benchmarks by name: random weights in shapes of Qwen3, or pretrained ones."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
ASSETS = ROOT / "src/prime_rl/assets/tiny-qwen3"


def build_shape(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, head_dim: int = 64, vocab: int = 512
) -> dict[str, int]:
    """Changes to the configuration of `tiny-qwen3`, whose tokenizer all shapes have."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 8192,
    }


SHAPES = {
    "tiny": {},
    "3M": build_shape(256, 4, 4, 2, 768),
    "25M": build_shape(512, 8, 8, 4, 1536),
    "smollm2-random": build_shape(576, 30, 9, 3, 1536, vocab=49_152),
    "qwen3-8-layers": build_shape(1024, 8, 16, 8, 3072, head_dim=128, vocab=151_936),
}
"""`smollm2-random`: SmolLM2-135M with the query norms of Qwen3. `qwen3-8-layers`: Qwen3-0.6B with 8 of its 28 layers,
281M parameters."""


def write_model(name: str, directory: Path) -> Path:
    """The directory of a pretrained model, or `directory` with random weights of a shape."""
    import torch
    from safetensors.torch import save_file

    from prime_rl.runtime.tokenizer import resolve_model_dir
    from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, tensor_names
    from prime_rl.trainer.models.decoder_config import DecoderConfig

    if name not in SHAPES:
        return resolve_model_dir(name)
    if directory.exists():
        return directory
    shutil.copytree(ASSETS, directory)
    config = json.loads((ASSETS / "config.json").read_text()) | SHAPES[name]
    (directory / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        model = CausalLM(DecoderConfig.from_hf(config))
        init_weights(model, 0)
        tensors = {name: tensor.contiguous() for name, tensor in tensor_names(model).items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory
