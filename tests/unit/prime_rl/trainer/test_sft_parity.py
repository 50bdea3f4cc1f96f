"""The `sft` command against a plain torch loop over transformers' model: losses, gradient norms, schedule, clipping."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from gguf_models import TEMPLATE, save_model
from torch_sft import check_parity

HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("data", "micro_bs"),
    [
        ({"pack_function": "stack", "batch_size": 6, "seq_len": 64}, 1),
        ({"pack_function": "stack", "batch_size": 6, "seq_len": 64}, 4),
        ({"pack_function": "cat", "batch_size": 2, "seq_len": 120}, 1),
    ],
    ids=["one-row", "micro-batches", "packed"],
)
def test_sft_equals_a_torch_loop(data: dict[str, Any], micro_bs: int, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", "llama")
    (model / "chat_template.jinja").write_text(TEMPLATE + HEADER)
    draw = random.Random(0)
    words = ["fox", "dog", "lazy", "quick", "brown", "jumps", "over", "the"]
    rows = [{"prompt": " ".join(draw.choices(words, k=draw.randint(1, 4)))} for _ in range(100)]
    lines = [json.dumps(row | {"completion": row["prompt"][::-1]}) + "\n" for row in rows]
    (tmp_path / "rows.jsonl").write_text("".join(lines))
    check_parity(model, tmp_path / "rows.jsonl", tmp_path / "out", micro_bs=micro_bs, **data)
