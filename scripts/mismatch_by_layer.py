"""Where engine and trainer begin to differ: by layer of the model and by position of the token.

    python scripts/mismatch_by_layer.py --model smollm2 [--dtype bfloat16] [--fast] [--tokens 128] [--seed 0]

The engine samples a completion, and the trainer computes the same tokens. Printed are, for each layer and for the
log-probs, the largest difference, the mean size of the values and the first position that differs. In exact mode on a
CPU every difference must be 0. A run does not measure this: it would have to keep the hidden states of all layers in
both processes.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.embedded.prepared_decoder import PreparedDecoder
from prime_rl.inference.embedded.scheduler import Scheduler
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.models.attention import PackedAttention, RoundedAttention
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.registry import load_decoder
from rollouts.kernels.cpu import arithmetic_dtype
from rollouts.training.numerics import MIN_TOKENS
from rollouts.training.rl_losses import compute_head_logprobs

NUM_PROMPT = 32


class RecordedLayer:
    """A layer of the engine that keeps the residual stream of the sequence's tokens."""

    def __init__(self, layer: Any, kept: list[Tensor]) -> None:
        self._layer, self._kept = layer, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        x, added = self._layer(x, *rest)
        # The prompt in one pass, then one token per step; further rows are padding.
        num = 1 if self._kept else NUM_PROMPT
        self._kept.append((x + added)[:num].clone())
        return x, added


def run_engine(
    engine: EmbeddedEngine, scheduler: Scheduler, decoder: PreparedDecoder, request: GenerationRequest
) -> tuple[Output, list[Tensor]]:
    """The completion, and the residual stream after each layer: [tokens, hidden]."""
    kept: list[list[Tensor]] = [[] for _ in decoder.layers]
    decoder.layers = [RecordedLayer(layer, states) for layer, states in zip(decoder.layers, kept, strict=True)]
    # The fused step computes all layers in one call, with the same bits in exact mode.
    decoder.fused, scheduler.max_chunk_pairs = None, 0
    engine.add(request)
    while engine.has_work():
        for event in engine.step():
            if isinstance(event, Output):
                return event, [torch.cat(states) for states in kept]
    raise AssertionError("the engine returned nothing")


@torch.no_grad()
def run_trainer(model: CausalLM, tokens: list[int], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Log-probs of all tokens but the first, and the residual stream after each layer."""
    kept: list[Tensor] = []
    hooks = [layer.register_forward_hook(lambda *args: kept.append(args[-1])) for layer in model.layers()]
    padded = torch.tensor(tokens + [0] * (MIN_TOKENS - len(tokens)))
    attend = RoundedAttention(PackedAttention([len(padded)], rounded=model.rounds_inputs), dtype)
    hidden = model(padded, torch.arange(len(padded)), attend)
    for hook in hooks:
        hook.remove()
    labels = torch.cat((padded[1:], padded[:1]))
    cap = model.config.logit_cap
    options = {"cap": cap, "rounded": model.rounds_inputs}
    logprobs, _ = compute_head_logprobs(hidden, model.lm_head.weight, labels, torch.ones(len(padded)), **options)
    return logprobs[: len(tokens) - 1], kept


def compare(name: str, ours: Tensor, theirs: Tensor) -> tuple[str, bool]:
    """One line of the table, and whether they are equal; rows are positions."""
    apart = (ours.double() - theirs.double()).abs().reshape(len(ours), -1).amax(1)
    unequal = apart.nonzero()
    first = int(unequal[0]) if len(unequal) else None
    scale = theirs.double().abs().mean()
    return (
        f"{name:<12} {float(apart.max()):>12.3g} {float(scale):>12.3g}   {'-' if first is None else first}",
        first is None,
    )


def main() -> int:
    """Print the table; exit code 1 if anything differs in exact mode."""
    parser = argparse.ArgumentParser(description="Differences between engine and trainer by layer and position.")
    parser.add_argument("--model", default="tiny-qwen3")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--fast", action="store_true", help="the engine's fast mode instead of exact mode")
    parser.add_argument("--tokens", type=int, default=128, help="length of the completion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random-init", action="store_true", help="random weights, for models shipped without any")
    arguments = parser.parse_args()
    dtype, directory = getattr(torch, arguments.dtype), resolve_model_dir(arguments.model)
    torch.set_num_threads(1)
    served, trained = (
        load_decoder(directory, random_init=arguments.random_init, seed=arguments.seed) for _ in range(2)
    )
    if type(served) is not CausalLM:
        print(
            f"{type(served).__name__} runs the same forward pass in engine and trainer: there are no layers to compare"
        )
        return 0
    # Only the fused step computes drafts.
    engine = EmbeddedEngine(served.to(dtype), exact=not arguments.fast, speculation=False)
    trained = trained.to(dtype).to(arithmetic_dtype(dtype, torch.device("cpu"))).requires_grad_(False)
    trained.round_inputs(dtype)
    prompt = random.Random(arguments.seed).choices(range(trained.config.vocab_size), k=NUM_PROMPT)
    params = SamplingParams(max_tokens=arguments.tokens, seed=arguments.seed, ignore_eos=True)
    output, engine_states = run_engine(engine, engine._scheduler, engine._decoder, GenerationRequest(prompt, params))
    logprobs, trainer_states = run_trainer(trained, [*prompt, *output.token_ids], dtype)
    print(f"{'':<12} {'difference':>12} {'mean size':>12}   first position")
    lines = [
        compare(f"layer {i}", ours, theirs[: len(ours)])
        for i, (ours, theirs) in enumerate(zip(engine_states, trainer_states, strict=True))
    ]
    lines.append(compare("log-probs", torch.tensor(output.logprobs), logprobs[NUM_PROMPT - 1 :]))
    print("\n".join(line for line, _ in lines))
    begins = next((i for i, (_, is_equal) in enumerate(lines) if not is_equal), None)
    where = "nothing differs" if begins is None else f"begins in {lines[begins][0].split('  ')[0]}"
    print(f"{where}; positions count from the first token of the prompt, those of log-probs from the first sampled one")
    return int(begins is not None and not arguments.fast)


if __name__ == "__main__":
    raise SystemExit(main())
