"""The embedded engine on the device: against the trainer, with and without graphs, and its speed.

Speeds are measured by the functions of benchmarks/bench_decode_gpu.py.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from dev.gpu.context import Context, Measured, small_shape, write_model
from dev.gpu.runner import ROOT
from dev.gpu.training import build_samples, settings
from torch import Tensor

from prime_rl.inference.embedded.cuda_graphs import GraphCapturer, Step, build_recorder
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.engine import AdapterSpec, GenerationRequest, Output, SamplingParams
from prime_rl.trainer.backend import Backend, build_backend
from prime_rl.trainer.config import TrainConfig
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, tensor_names
from prime_rl.trainer.models.registry import load_decoder
from prime_rl.trainer.rl.loss import build_loss
from rollouts.training.batching import pack_samples
from rollouts.training.manifests import digest_tensor
from rollouts.training.types import Sample

sys.path.insert(0, str(ROOT / "benchmarks"))
import bench_decode_gpu as bench

SEQ_LEN = 1024


class CountingRecorder:
    """Counts the captured steps of another recorder; on a CPU a captured step is computed again."""

    def __init__(self, device: torch.device) -> None:
        self._inner: GraphCapturer = build_recorder(device, exact=False, eager=False) or bench.Rerun()
        self.num_captured = 0

    def warm_up(self, step: Step) -> Tensor:
        """As `GraphCapturer`."""
        return self._inner.warm_up(step)

    def record(self, step: Step) -> Step:
        """As `GraphCapturer`."""
        self.num_captured += 1
        return self._inner.record(step)


def generate(engine: EmbeddedEngine, context: Context, adapter: str | None = None, **params: Any) -> list[Output]:
    """Completions of random prompts of several lengths, in the order of the prompts."""
    num, longest, max_tokens = (4, 20, 12) if context.tiny else (24, 300, 96)
    draw = torch.Generator().manual_seed(1)
    requests = []
    for i in range(num):
        length = 1 + i * longest // num
        prompt = torch.randint(engine.vocab_size, (length,), generator=draw).tolist()
        options = {"max_tokens": max_tokens, "ignore_eos": True, "seed": i, **params}
        requests.append(GenerationRequest(prompt, SamplingParams(**options), adapter=adapter))
        engine.add(requests[-1])
    return run_to_end(engine, requests)


def run_to_end(engine: EmbeddedEngine, requests: Sequence[GenerationRequest]) -> list[Output]:
    """Step until all requests are finished; `RuntimeError` for a failed one."""
    outputs = {}
    while engine.has_work():
        outputs |= {event.request: event for event in engine.step() if isinstance(event, Output)}
    for output in outputs.values():
        if output.finish_reason == "error":
            raise RuntimeError(str(output.stop_reason))
    return [outputs[request] for request in requests]


@torch.no_grad()
def score(backend: Backend, outputs: Sequence[Output]) -> list[float]:
    """The trainer's log-probs of all sampled tokens, in the order of the outputs."""
    samples = [
        Sample(
            prompt="",
            tokens=[*output.request.prompt, *output.token_ids],
            loss_mask=[0.0] * len(output.request.prompt) + [1.0] * len(output.token_ids),
            inference_logprobs=[0.0] * (len(output.request.prompt) + len(output.token_ids)),
            advantages=[0.0] * (len(output.request.prompt) + len(output.token_ids)),
        )
        for output in outputs
    ]
    scored: dict[int, list[float]] = {}
    for micro in pack_samples(samples, SEQ_LEN)[0]:
        values = backend.compute_inputs(micro.to_tensors(backend.placement.device)).trainer_logprobs.tolist()
        for index in micro.sample_ids:
            num = len(outputs[index].token_ids)
            scored[index], values = values[:num], values[num:]
    return [value for index in range(len(outputs)) for value in scored[index]]


def compare_with_trainer(context: Context, exact: bool, lora: int | None = None) -> Measured:
    """Log-probs of engine and trainer for the tokens that the engine sampled, also from a LoRA adapter of this rank.

    Exact mode in fp32: the largest difference. Fast mode: the mean of r - 1 - log r, as in `mismatch_kl`.
    """
    directory = write_model(context.folder("model"), small_shape(context.tiny))
    dtype = torch.float32 if exact else context.dtype
    model: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "seq_len": SEQ_LEN}
    model |= {"attn": "exact"} if exact else {}
    model |= {"lora": {"rank": lora}} if lora else {}
    config = TrainConfig.model_validate(settings(context, directory, model=model, optim={"lr": 1e-2}))
    backend = build_backend(config)
    decoder = load_decoder(directory, dtype=dtype, device=context.device)
    recorder = None if exact else build_recorder(context.device, exact=False, eager=False)
    engine = EmbeddedEngine(decoder, exact=exact, recorder=recorder, max_model_len=SEQ_LEN)
    if lora:
        samples = build_samples([40, 30], engine.vocab_size)
        [micros] = pack_samples(samples, 64)
        for _ in range(3):  # the adapter is zero before the first step
            backend.optim_step(backend.forward_backward(micros, build_loss(config.loss, SEQ_LEN)))
        engine.load_adapter("adapter", backend.export_state_dict(), AdapterSpec(lora, config.model.lora.alpha))  # type: ignore[union-attr]
    outputs = generate(engine, context, adapter="adapter" if lora else None)
    found = torch.tensor([value for output in outputs for value in output.logprobs], dtype=torch.float64)
    difference = torch.tensor(score(backend, outputs), dtype=torch.float64) - found
    kl = float((difference.exp() - 1 - difference).mean())
    equal = float((difference == 0).double().mean())
    note = f"{equal:.0%} bitwise equal, largest difference {difference.abs().max():.2g}, attn {backend.placement.attn}"
    return Measured(float(difference.abs().max()) if exact else kl, note, {"mismatch_kl": kl, "equal": equal})


def compare_graphs(context: Context) -> Measured:
    """Mean difference of the log-probs of greedy tokens with and without graphs, as far as the tokens agree."""
    directory = write_model(context.folder("model"), small_shape(context.tiny))
    recorder = CountingRecorder(context.device)
    outputs = []
    for chosen in (recorder, None):
        model = load_decoder(directory, dtype=context.dtype, device=context.device)
        engine = EmbeddedEngine(model, exact=False, recorder=chosen, max_model_len=SEQ_LEN)
        outputs.append(generate(engine, context, temperature=0.0))
    if not recorder.num_captured:
        raise RuntimeError("no step was captured")
    differences: list[float] = []
    total = 0
    for with_graphs, eager in zip(*outputs, strict=True):
        pairs = list(zip(with_graphs.token_ids, eager.token_ids, with_graphs.logprobs, eager.logprobs, strict=True))
        same = next((i for i, (a, b, _, _) in enumerate(pairs) if a != b), len(pairs))
        total += len(pairs)
        differences += [abs(p - q) for _, _, p, q in pairs[:same]]
    return Measured(
        statistics.fmean(differences),
        f"{len(differences)} of {total} tokens before the first other one, {recorder.num_captured} graphs, "
        f"largest difference {max(differences):.2g}",
    )


def check_update(context: Context) -> Measured:
    """Digests of an engine that receives new weights at work, against those of the published tensors."""
    directory = write_model(context.folder("model"), small_shape(context.tiny))
    model, newer = (load_decoder(directory, dtype=context.dtype, device=context.device) for _ in range(2))
    init_weights(newer, 1)
    published = {name: tensor.cpu() for name, tensor in tensor_names(newer).items()}
    recorder = build_recorder(context.device, exact=False, eager=False)
    engine = EmbeddedEngine(model, exact=False, recorder=recorder, max_model_len=SEQ_LEN)
    bench.start(engine, 4, 16, 24, 0)
    for _ in range(8):
        engine.step()
    found = engine.load_weights(published, 1)()
    while engine.has_work():
        engine.step()
    fresh = EmbeddedEngine(newer, exact=False, max_model_len=SEQ_LEN)
    pairs = [generate(e, context, temperature=0.0)[0].logprobs[0] for e in (engine, fresh)]
    if abs(pairs[0] - pairs[1]) > 0.05:
        raise RuntimeError(f"log-prob {pairs[0]} after the update, {pairs[1]} in a new engine")
    wrong = [name for name, tensor in published.items() if found[name] != digest_tensor(tensor)]
    return Measured(len(wrong), f"{len(found)} tensors {' '.join(wrong[:3])}".strip())


def find_shortest(context: Context, work: Callable[[], object]) -> float:
    """Shortest time of `work` in seconds, after a warm-up run."""
    return min([bench.clock(context.device, work) for _ in range(6)][1:])


def measure_bandwidth(context: Context) -> float:
    """Bytes per second, read and written, of a copy within the device's memory."""
    source = torch.ones(1 << (28 if context.device.type == "cuda" else 22), device=context.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / find_shortest(context, lambda: target.copy_(source))


def build_model(context: Context) -> CausalLM:
    """The shape of Qwen3-0.6B, or a tiny one."""
    return bench.build_model(context.device, context.tiny)


def measure_decode(context: Context, batch: int, context_tokens: int) -> Measured:
    """Decoding speed as a share of what the measured copy bandwidth allows, with CUDA graphs."""
    model = build_model(context)
    case = bench.Case(min(batch, 2), 40) if context.tiny else bench.Case(batch, context_tokens)
    recorder = CountingRecorder(context.device)
    rates = {
        name: case.batch / statistics.median(bench.time_steps(model, case, 4 if context.tiny else 48, 2, **options))
        for name, options in {"graphs": {"exact": False, "recorder": recorder}, "eager": {"exact": False}}.items()
    }
    best = case.batch * measure_bandwidth(context) / bench.count_bytes(model, case)
    note = f"{rates['graphs']:,.0f} tokens/s, eager {rates['eager']:,.0f}, bandwidth allows {best:,.0f}"
    return Measured(rates["graphs"] / best, note, {"tokens_per_s": rates["graphs"], **rates})


def compare_decode(context: Context, batch: int, context_tokens: int, **options: Any) -> Measured:
    """Decoding speed with other options, over that of greedy decoding without an adapter; with CUDA graphs."""
    model = build_model(context)
    case = bench.Case(min(batch, 2), 40) if context.tiny else bench.Case(batch, context_tokens)
    rates = []
    for chosen in ({}, options):
        recorder = CountingRecorder(context.device)
        steps = bench.time_steps(model, case, 4 if context.tiny else 48, 2, exact=False, recorder=recorder, **chosen)
        rates.append(case.batch / statistics.median(steps))
        if not recorder.num_captured and not context.tiny:
            raise RuntimeError("no step was captured")
    return Measured(rates[1] / rates[0], f"{rates[1]:,.0f} of {rates[0]:,.0f} tokens/s", {"tokens_per_s": rates[1]})


def measure_sharing(context: Context) -> Measured:
    """Time of groups with a common prompt without prefix sharing, over the time with it."""
    model = build_model(context)
    group, length, new = (4, 40, 4) if context.tiny else (16, 1024, 16)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (4, length), generator=draw).tolist()
    seconds = {}
    for share in (False, True):
        recorder = CountingRecorder(context.device)
        engine = bench.build_engine(model, exact=False, enable_prefix_caching=share, recorder=recorder)
        for repeat in range(2):  # the first warms up

            def work(engine: EmbeddedEngine = engine, repeat: int = repeat) -> None:
                params = [SamplingParams(max_tokens=new, ignore_eos=True, seed=seed) for seed in range(group)]
                requests = [GenerationRequest([repeat, *prompt], p) for prompt in prompts for p in params]
                for request in requests:
                    engine.add(request)
                run_to_end(engine, requests)

            seconds[share] = bench.clock(context.device, work)
    shared = engine.stats().shared_prompt_tokens
    if not shared:
        raise RuntimeError("no prompt token was shared")
    return Measured(seconds[False] / seconds[True], f"{shared} of {8 * group * (length + 1)} prompt tokens shared")


def measure_requests(context: Context) -> Measured:
    """Whole requests per second: 512 prompt tokens, 128 new ones."""
    row = bench.measure_requests(build_model(context), context.tiny, CountingRecorder(context.device))
    return Measured(row.value, f"{row.name}, {row.detail}")


def measure_update_pause(context: Context) -> Measured:
    """Milliseconds in which an engine draws nothing while it takes new weights from the same device."""
    row = bench.measure_update(build_model(context), context.tiny, CountingRecorder(context.device), 3)
    return Measured(row.value, row.detail)
