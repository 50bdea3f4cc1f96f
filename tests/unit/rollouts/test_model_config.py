"""Invalid sizes in a model's config are rejected by key before allocation."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from nanochat.gpt import GPTConfig
from prime_rl.plan.shapes import read_shape
from prime_rl.trainer.models.hf_model import load_hf_model
from prime_rl.trainer.models.registry import load_decoder
from rollouts.training.model_config import check_model_config
from rollouts.training.types import LOGPROB_TOLERANCE, Sample

TINY = Path(__file__).parents[3] / "src" / "prime_rl" / "assets" / "tiny-qwen3" / "config.json"
SIZES = [
    ("num_attention_heads", -4),
    ("num_hidden_layers", 1e9),
    ("num_hidden_layers", 10**9),
    ("hidden_size", 0),
    ("vocab_size", "151936"),
    ("num_key_value_heads", -1),
    ("intermediate_size", True),
    ("head_dim", 10**12),
]


def write(folder: Path, **changes: Any) -> Path:
    config = json.loads(TINY.read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "missing"}))
    return folder


def refuse(folder: Path, key: str, value: Any) -> None:
    write(folder, **{key: value})
    options: dict[str, Any] = {"random_init": True, "num_layers": None, "seed": 0, "dtype": None, "device": "cpu"}
    for load in (
        lambda: load_decoder(folder, random_init=True),
        lambda: load_hf_model(folder, **options),
        lambda: read_shape(str(folder)),
    ):
        with pytest.raises(ValueError, match=f"{key} = .* must be a whole number from"):
            load()


@pytest.mark.parametrize(("key", "value"), SIZES)
def test_impossible_sizes_are_refused_by_key(key: str, value: Any, tmp_path: Path) -> None:
    refuse(tmp_path, "vocab_size", 0)  # the first imports transformers, which takes memory, too
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refuse(tmp_path, key, value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024, "KiB"


def test_missing_sizes_and_uneven_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no num_attention_heads"):
        load_decoder(write(tmp_path, num_attention_heads="missing"), random_init=True)
    with pytest.raises(ValueError, match="num_attention_heads = 4 must be a multiple of num_key_value_heads = 3"):
        load_decoder(write(tmp_path, num_attention_heads=4, num_key_value_heads=3), random_init=True)
    with pytest.raises(ValueError, match="n_layer = -1"):
        GPTConfig.from_meta({"n_layer": -1})


def test_unusual_but_valid_configs_are_accepted() -> None:
    check_model_config({"intermediate_size": [64, 128], "max_position_embeddings": -1, "num_experts": None})
    check_model_config(json.loads(TINY.read_text()), required=("vocab_size",))
    with pytest.raises(ValueError, match="hidden_size = -1 in text_config"):
        check_model_config({"text_config": {"hidden_size": -1}})


@pytest.mark.parametrize("name", ["inference_logprobs", "teacher_logprobs"])
def test_positive_logprobs_are_refused(name: str) -> None:
    def sample(value: float) -> Sample:
        return Sample(prompt="p", tokens=[1, 2], loss_mask=[0.0, 1.0], **{name: [0.0, value]})

    sample(1e-7).validate()
    sample(LOGPROB_TOLERANCE).validate()
    with pytest.raises(ValueError, match=f"`{name}` of a sample holds 0.5: a log-prob is at most 0"):
        sample(0.5).validate()
