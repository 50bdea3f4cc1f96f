"""One generation engine in a process of its own, driven over stdin and stdout by `bench_engine.py`.

    python engine_peers.py KIND MODEL_DIR DTYPE THREADS

It reads one JSON request per line, `{"prompts": [[id, ...], ...], "new": 128, "seed": 0}`, generates exactly `new`
tokens for each prompt at temperature 1 with the log-prob of every sampled token, and answers
`{"seconds": s, "cpu_seconds": c}` (the latter of all its threads). KIND is ours, ours-exact, ours-unshared, ours-int8,
transformers-static, transformers-dynamic, vllm or llama, whose MODEL_DIR is a GGUF file. Only the standard library is
imported at the top, because each kind runs in its own environment.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Generate = Callable[[list[list[int]], int, int], int]
"""(prompts, new tokens, seed) -> number of tokens that came with a log-prob."""


def build_ours(model_dir: str, dtype: str, kind: str) -> Generate:
    """The embedded engine in fast mode, quantized or not, in exact mode, or without sharing prefixes."""
    import torch

    from prime_rl.inference.embedded.engine import EmbeddedEngine
    from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
    from prime_rl.trainer.models.registry import load_decoder

    model = load_decoder(Path(model_dir), dtype=getattr(torch, dtype))
    engine = EmbeddedEngine(
        model,
        exact=kind == "ours-exact",
        enable_prefix_caching=kind != "ours-unshared",
        quantization="int8" if kind == "ours-int8" else None,
        owns_model=True,  # as in the server
    )

    def generate(prompts: list[list[int]], new: int, seed: int) -> int:
        for i, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=new, seed=seed * 100003 + i, ignore_eos=True)
            engine.add(GenerationRequest(prompt, params))
        count = 0
        while engine.has_work():
            count += sum(len(event.logprobs) for event in engine.step() if isinstance(event, Output))
        return count

    return generate


def build_transformers(model_dir: str, dtype: str, kind: str) -> Generate:
    """`generate` over one batch, with its static or its dynamic cache."""
    import torch
    from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    model.eval()
    cache = {"cache_implementation": "static", "disable_compile": True} if kind.endswith("static") else {}

    class Record(LogitsProcessor):  # type: ignore[misc]
        """Log-probs of the sampled tokens, from the logits of one step at a time: those of all would take gigabytes."""

        def __init__(self) -> None:
            self.logprobs: list[torch.Tensor] = []
            self.logits: torch.Tensor | None = None

        def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            if self.logits is not None:
                self.logprobs.append(torch.log_softmax(self.logits.float(), -1).gather(1, ids[:, -1:]))
            self.logits = logits
            return logits

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new: int, seed: int) -> int:
        torch.manual_seed(seed)
        ids, record = torch.tensor(prompts), Record()
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            min_new_tokens=new,
            max_new_tokens=new,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([record]),
            **cache,
        )
        record(out, torch.empty(0))
        return int(torch.cat(record.logprobs, dim=1).isfinite().sum())

    return generate


def build_vllm(model_dir: str, dtype: str, kind: str) -> Generate:
    """vLLM's offline engine in this process, compiled as it is by default."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model_dir,
        dtype=dtype,
        max_model_len=max(1024, int(os.environ.get("BENCH_MAX_LEN", "0"))),
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        logprobs_mode="processed_logprobs",
        enforce_eager=bool(os.environ.get("BENCH_VLLM_EAGER")),
    )

    def generate(prompts: list[list[int]], new: int, seed: int) -> int:
        params = [
            SamplingParams(temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=0, seed=None) for _ in prompts
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].logprobs or ()) for output in outputs)

    return generate


def build_llama(gguf: str, dtype: str, kind: str) -> Generate:
    """llama.cpp, all sequences in one batch per step; numpy samples and computes log-probs."""
    import llama_cpp as cpp
    import numpy as np
    from llama_cpp._logger import set_verbose

    set_verbose(False)
    model = cpp.llama_model_load_from_file(gguf.encode(), cpp.llama_model_default_params())
    vocab = cpp.llama_vocab_n_tokens(cpp.llama_model_get_vocab(model))
    batch_size = 512
    batch = cpp.llama_batch_init(batch_size, 0, 1)
    contexts: dict[tuple[int, int], Any] = {}

    def open_context(num: int, length: int) -> Any:
        params = cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num * -(-length // 256) * 256, num  # llama.cpp rounds, too
        params.n_batch = params.n_ubatch = batch_size
        params.n_threads = params.n_threads_batch = int(sys.argv[4])
        params.type_k = params.type_v = cpp.GGML_TYPE_F32 if dtype == "float32" else cpp.GGML_TYPE_F16
        return cpp.llama_init_from_model(model, params)

    def decode(context: Any, rows: list[tuple[int, int, int, bool]], rng: Any) -> list[tuple[int, float]]:
        """Compute rows of (token, position, sequence, whether to sample); returns samples with their log-probs."""
        found: list[tuple[int, float]] = []
        for start in range(0, len(rows), batch_size):
            part = rows[start : start + batch_size]
            batch.n_tokens = len(part)
            for i, (token, position, sequence, is_sampled) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_sampled
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            assert cpp.llama_decode(context, batch) == 0
            if num := sum(row[3] for row in part):
                logits = np.ctypeslib.as_array(cpp.llama_get_logits(context), (num, vocab))
                scores = logits - logits.max(1, keepdims=True)
                cumulative = np.exp(scores).cumsum(1)
                drawn = rng.random((num, 1), dtype=np.float32) * cumulative[:, -1:]
                tokens = np.minimum((cumulative <= drawn).sum(1), vocab - 1)
                logprobs = scores[np.arange(num), tokens] - np.log(cumulative[:, -1])
                found += zip(tokens.tolist(), logprobs.tolist(), strict=True)
        return found

    def generate(prompts: list[list[int]], new: int, seed: int) -> int:
        num, length, rng = len(prompts), len(prompts[0]), np.random.default_rng(seed % (1 << 32))
        if (num, length + new) not in contexts:
            contexts[num, length + new] = open_context(num, length + new)
        context = contexts[num, length + new]
        cpp.llama_memory_clear(cpp.llama_get_memory(context), False)
        samples = decode(
            context, [(t, i, s, i == length - 1) for s, ids in enumerate(prompts) for i, t in enumerate(ids)], rng
        )
        count = sum(math.isfinite(logprob) for _, logprob in samples)
        for position in range(length, length + new - 1):
            samples = decode(context, [(token, position, s, True) for s, (token, _) in enumerate(samples)], rng)
            count += sum(math.isfinite(logprob) for _, logprob in samples)
        return count

    return generate


BUILDERS: dict[str, Callable[[str, str, str], Generate]] = {
    "ours": build_ours,
    "transformers": build_transformers,
    "vllm": build_vllm,
    "llama": build_llama,
}


def serve(generate: Generate, answer: Any) -> None:
    """Requests from stdin, answers to `answer`."""
    for line in sys.stdin:
        request = json.loads(line)
        prompts, new = request["prompts"], request["new"]
        start, cpu = time.perf_counter(), time.process_time()
        count = generate(prompts, new, request["seed"])
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
        assert count == len(prompts) * new, f"{count} log-probs for {len(prompts)} x {new} tokens"
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds}), file=answer, flush=True)


def main() -> None:
    """Build the engine that the command line names, say that it is ready, serve."""
    kind, model_dir, dtype, threads = sys.argv[1:5]
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to stderr, so that stdout carries answers only
    if kind != "llama":
        import torch

        torch.set_num_threads(int(threads))
    generate = BUILDERS[kind.split("-")[0]](model_dir, dtype, kind)
    print(json.dumps({"ready": True}), file=answer, flush=True)
    serve(generate, answer)


if __name__ == "__main__":
    main()
