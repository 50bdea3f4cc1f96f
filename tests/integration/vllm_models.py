"""Child process of a test: loads one model's weights into vLLM's workers with our extension and prints the result.

python vllm_models.py MODEL_DIR_0 MODEL_DIR_1 DTYPE
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

PROMPT = [5, 6, 7, 8, 9, 20, 30, 40]


def main(first: str, second: str, dtype: str) -> None:
    """Log-probs before and after, and the worker's report."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    worker = "prime_rl.inference.vllm.worker.WeightWorker"
    llm = LLM(first, enforce_eager=True, max_model_len=128, dtype=dtype, worker_extension_cls=worker)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0)

    def score() -> list[float]:
        rows = llm.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)[0].prompt_logprobs
        return [next(iter(row.values())).logprob for row in rows if row]

    reported: dict[str, Any] = {"before": score()}
    reported["held"] = llm.collective_rpc("compare_published_weights", args=(first,))[0]
    reported["foreign"] = llm.collective_rpc("compare_published_weights", args=(second,))[0]["wrong"]
    reported["report"] = llm.collective_rpc("load_published_weights", args=(second,))[0]
    llm.reset_prefix_cache()
    reported["after"] = score()
    sys.stdout.write("\nRESULT " + json.dumps(reported) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
