"""Speculative decoding: the same tokens and log-probs as without it, whatever is drafted."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_embedded import DECODE, MODEL_DIR, build_adapter, build_model, check_exact, request, run

from prime_rl.inference.embedded import speculation, step_costs
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.embedded.kv_cache import BLOCK
from prime_rl.inference.embedded.speculation import MAX_SEQUENCES, Drafter, find_values
from prime_rl.inference.embedded.step_costs import FORGETTING, MAX_ROWS, MIN_MEASURED_BYTES, PLAIN_INTERVAL, StepCosts
from prime_rl.inference.engine import AdapterSpec, GenerationRequest, Output, SamplingParams, StreamUpdate
from prime_rl.trainer.models.causal_lm import CausalLM, init_weights, tensor_names
from prime_rl.trainer.models.decoder_config import DecoderConfig
from rollouts.kernels import native

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native.library() is None, reason="needs the CPU kernels"),
]


@pytest.fixture
def long_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts as long as possible, also where they are mostly rejected."""
    monkeypatch.setattr(step_costs, "FREE_ROWS", 1e9)


def draw_requests(seed: int) -> list[tuple[list[int], dict[str, Any], str | None]]:
    """Groups with the same prompt and similar samples, with all kinds of settings."""
    rng = random.Random(seed)
    requests = []
    for _ in range(4):
        prompt = rng.choices(range(256), k=rng.choice([1, 7, 40, BLOCK - 3, 2 * BLOCK - 20]))
        params: dict[str, Any] = {"temperature": rng.choice([0.0, 0.2, 0.5, 1.0]), "max_tokens": rng.randint(1, 60)}
        params |= rng.choice(
            [
                {"top_p": 0.7, "return_support": True},
                {"top_k": 3, "top_logprobs": 2},
                {"min_p": 0.1, "min_tokens": 9, "stop_token_ids": tuple(range(0, 256, 4))},
                {"stop": ("a", "e ", "7"), "logit_bias": ((5, 2.0),)},
                {"stop_token_ids": tuple(range(0, 256, 9))},
                {"repetition_penalty": 1.2, "presence_penalty": 0.3},
            ]
        )
        adapter = rng.choice([None, "a"])
        requests += [(prompt, {**params, "seed": rng.randrange(3)}, adapter) for _ in range(rng.randint(1, 5))]
    rng.shuffle(requests)
    return requests


def generate(seed: int, speculate: bool, mode: str) -> tuple[list[Any], EmbeddedEngine]:
    """Two rounds of the same requests; short memory, so that sequences are preempted and slots move."""
    engine = EmbeddedEngine(
        build_model(seed).to(torch.bfloat16 if mode.startswith("bfloat16") else torch.float32),
        eos_ids=[1],
        decode=DECODE,
        exact=mode.endswith("exact"),
        quantization="int8" if mode == "int8" else None,
        max_running=8,
        max_model_len=3 * BLOCK,
        max_cache_tokens=1,
        speculation=speculate,
    )
    engine.load_adapter("a", build_adapter(1)[1], AdapterSpec(4, 8.0))
    outputs = []
    for _ in range(2):
        drawn = draw_requests(seed)
        requests = (GenerationRequest(prompt, SamplingParams(**params), adapter=name) for prompt, params, name in drawn)
        outputs += run(engine, *requests)
    return [describe(output) for output in outputs], engine


def describe(output: Output) -> tuple[Any, ...]:
    """All that a request determines; beside requests with top log-probs others have empty ones."""
    tops = output.top_logprobs if output.request.params.top_logprobs else None
    ends = (output.versions, output.finish_reason, output.stop_reason, output.text)
    return (output.token_ids, output.logprobs, tops, *ends, output.sampling_support)


@pytest.mark.parametrize(
    ("mode", "threads"),
    [
        ("float32 exact", 1),
        ("bfloat16 exact", 1),
        ("float32", 1),
        ("bfloat16", 1),
        ("int8", 1),
        pytest.param("float32 exact", 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_drafts_change_no_token_and_no_logprob(seed: int, mode: str, threads: int, long_drafts: None) -> None:
    torch.set_num_threads(threads)
    plain, _ = generate(seed, False, mode)
    drafted, engine = generate(seed, True, mode)
    if engine._scheduler.drafter is None:
        pytest.skip(f"no fused decode step for {mode} on this machine")
    assert drafted == plain
    stats = engine.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens, "both outcomes were tested"


def test_updates_in_flight_stay_exact(long_drafts: None) -> None:
    models = {version: build_model(version) for version in range(3)}
    engine = EmbeddedEngine(build_model(0))
    prompt = list(range(40))
    requests = [request(prompt, max_tokens=60, temperature=0.3, seed=seed) for seed in (0, 0, 1, 1)]
    outputs: list[Output] = []
    for step in range(10**6):
        if step in (0, 20):  # those of the same seed follow the first ones
            engine.add(requests.pop())
            engine.add(requests.pop(0))
        if step in (25, 30):
            engine.load_weights(tensor_names(models[engine.version + 1]), engine.version + 1)
        outputs += [event for event in engine.step() if isinstance(event, Output)]
        if not engine.has_work():
            break
    assert all(len(output.versions) == 3 for output in outputs)
    assert sum(check_exact(output, models) for output in outputs) == 4 * 60
    assert engine.stats().accepted_tokens > 0


def test_a_repeated_request_takes_few_steps_and_streams_once() -> None:
    engine = EmbeddedEngine(build_model(0))
    (first,) = run(engine, request([1, 2, 3, 4], max_tokens=100))
    steps = engine.stats().steps
    engine.add(request([1, 2, 3, 4], max_tokens=100, stream=True))
    events = []
    while engine.has_work():
        events += engine.step()
    *pieces, output = events
    assert isinstance(output, Output) and output.token_ids == first.token_ids
    assert [piece.start for piece in pieces if isinstance(piece, StreamUpdate)] == list(range(99))
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids[:-1]
    assert engine.stats().steps - steps < 25
    assert 75 < engine.stats().accepted_tokens <= engine.stats().drafted_tokens < 110


def test_samples_of_a_group_draft_for_each_other() -> None:
    engine = EmbeddedEngine(build_model(0))
    leader = request([1, 2, 3, 4], max_tokens=60)
    engine.add(leader)
    for _ in range(40):
        engine.step()
    assert engine.stats().drafted_tokens == 0
    run(engine, request([1, 2, 3, 4], max_tokens=30))
    assert engine.stats().accepted_tokens >= 10
    assert engine.stats().steps <= 62, "it ends with the leader, after 20 steps instead of 30"


def test_text_that_does_not_repeat_is_not_drafted_for_long() -> None:
    engine = EmbeddedEngine(build_model(0))
    cycle = [5, 6, 7] * 20  # each token seems predictable, and random weights continue otherwise
    run(engine, *(request([*cycle, seed], max_tokens=100, seed=seed) for seed in range(4)))
    assert engine.stats().drafted_tokens < 20


def test_rejected_drafts_stop_drafting_for_some_hundred_steps() -> None:
    engine = EmbeddedEngine(build_model(0))
    drafter = engine._scheduler.drafter
    assert drafter is not None
    run(engine, request([1, 2, 3, 4], max_tokens=100))
    drafter._expected, drafter._accepted = 50.0, 0.0
    run(engine, request([1, 2, 3, 4], max_tokens=100))
    assert engine.stats().drafted_tokens < 5
    for _ in range(400):
        drafter.propose([])
    run(engine, request([1, 2, 3, 4], max_tokens=100))
    assert engine.stats().accepted_tokens > 50


def test_costs_of_rows_are_those_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    class Head:
        inputs, data, seconds = 8, torch.empty(MIN_MEASURED_BYTES, dtype=torch.int8), 0.0

        def __call__(self, x: torch.Tensor) -> None:
            self.seconds += max(12, len(x))  # reads of the weights, then products

    head = Head()
    monkeypatch.setattr(step_costs.time, "perf_counter", lambda: head.seconds)
    costs = StepCosts.of_head(head).by_rows()  # type: ignore[arg-type]
    assert len(costs) == MAX_ROWS + 1
    assert costs[12] - costs[1] == pytest.approx(11 * 12 / 64)
    assert costs[48] - costs[24] == pytest.approx(24 + 24 * 12 / 64)
    head.data = head.data[1:]
    assert StepCosts.of_head(head).by_rows()[:3] == [3, 4, 5]  # type: ignore[arg-type]


def true_cost(rows: int, products: float) -> float:
    """Seconds of a step whose weights are read in 10, and whose products take `products` a row."""
    return max(10.0, products * rows) + rows / 8


@pytest.mark.parametrize("before, after", [(0.4, 1.0), (1.0, 0.4)])
def test_costs_follow_the_time_of_steps(before: float, after: float, one_thread: None) -> None:
    rng = random.Random(0)
    costs = StepCosts([true_cost(rows, before) for rows in range(MAX_ROWS + 1)])
    assert costs.needs_plain
    for _ in range(300):
        for rows in (8, rng.randint(9, 16), rng.randint(17, 40)):
            is_interrupted = rng.random() < 0.03
            noise = rng.gauss(1, 0.03) * (5 if is_interrupted else 1)
            costs.learn(8, rows, 1e-3 * true_cost(rows, after) * noise)
    found = costs.by_rows()
    assert not costs.needs_plain
    for rows in (8, 16, 24, 40):
        assert found[rows] / found[8] == pytest.approx(true_cost(rows, after) / true_cost(8, after), rel=0.1)


def test_costs_of_drafts_are_forgotten_in_steps_without() -> None:
    costs = StepCosts([10.0] * (MAX_ROWS + 1))
    costs.learn(8, 8, 1.0)
    for _ in range(100):
        costs.learn(8, 24, 3.0)
    assert costs.by_rows()[24] > 2 * costs.by_rows()[8]
    for _ in range(8 * round(1 / FORGETTING)):
        costs.learn(8, 8, 1.0)
    assert costs.by_rows()[24] == pytest.approx(costs.by_rows()[8], rel=0.02)


def test_a_step_without_drafts_is_measured_now_and_then() -> None:
    costs = StepCosts([10.0] * (MAX_ROWS + 1))
    costs.learn(1, 9, 1.0)
    assert costs.needs_plain, "the time of a step without drafts is unknown"
    costs.learn(1, 1, 1.0)
    for _ in range(PLAIN_INTERVAL):
        assert not costs.needs_plain
        costs.learn(1, 9, 1.0)
    assert costs.needs_plain
    torch.set_num_threads(2)  # of which nothing is known
    costs.learn(1, 9, 1.0)
    assert costs.needs_plain
    costs.learn(1, 1, 1.0)
    assert not costs.needs_plain


def test_tokens_at_which_samples_differ_are_expected_less() -> None:
    adapters: Any = SimpleNamespace(are_packed=lambda names: True)
    drafter = Drafter(adapters, StepCosts([1.0 + rows / 100 for rows in range(MAX_ROWS + 1)], is_fixed=True))
    rng, prompt = random.Random(0), [1, 2]

    def start() -> Any:
        fields = {"source": [], "source_at": 0, "num_predicted": 0, "num_indexed": 0, "can_draft": True}
        return SimpleNamespace(
            request=request([]), tokens=list(prompt), num_prompt=2, max_tokens=200, prompt_key=7, **fields
        )

    for _ in range(20):
        seq = start()
        for token in range(10, 60):
            seq.tokens.append(rng.randint(100, 200) if token % 10 == 0 else token)  # every tenth one is another one
            drafter.propose([seq])
    seq = start()
    seq.tokens += [100, 11, 12]
    drafter.propose([seq])
    steps = drafter._expect(seq, 1.0)
    ratios = [after / before for before, after in zip([1.0, *steps], steps, strict=False)]
    assert len(ratios) == 7 and min(ratios) > 0.9, "of 13 to 19; the next one is unlikely"


@pytest.mark.parametrize(("num", "most"), [(1, 24), (8, 10)])
def test_drafts_are_considered_less_often_while_none_is_worth_it(
    num: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters: Any = SimpleNamespace(are_packed=lambda names: True)
    drafter = Drafter(adapters, StepCosts([1.0] * (MAX_ROWS + 1), is_fixed=True))
    running: list[Any] = [
        SimpleNamespace(request=request([]), source=[7], source_at=0, can_draft=True) for _ in range(num)
    ]
    considered: list[int] = []
    chosen: list[tuple[float, int]] = []
    monkeypatch.setattr(drafter, "_follow", lambda seq: None)
    monkeypatch.setattr(drafter, "_expect", lambda seq, trust: [0.9 * trust])
    monkeypatch.setattr(drafter, "_choose", lambda *arguments: considered.append(1) or chosen)
    for _ in range(24):
        assert drafter.propose(running) == []
    assert most - 2 <= len(considered) <= most
    chosen.append((0.9, 0))
    while not drafter.propose(running):
        pass
    considered.clear()
    for _ in range(8):
        assert drafter.propose(running)[0] == [7]
    assert len(considered) == 8, "as soon as one is worth it"


def test_only_what_ends_last_is_drafted_in_a_closed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters: Any = SimpleNamespace(are_packed=lambda names: True)
    drafter = Drafter(adapters, StepCosts([3.0 + rows for rows in range(MAX_ROWS + 1)], is_fixed=True))
    monkeypatch.setattr(drafter, "_follow", lambda seq: None)
    monkeypatch.setattr(drafter, "_expect", lambda seq, trust: [0.9 * trust, 0.81 * trust])
    running: list[Any] = [
        SimpleNamespace(
            request=request([]),
            tokens=[0] * num,
            max_tokens=100,
            source=[7, 8],
            source_at=0,
            can_draft=True,
        )
        for num in (20, 20, 60, 60)
    ]
    assert drafter.propose(running) == [[7, 8]] * 4
    drafter.learn(8)
    assert drafter.propose(running, is_closed=True) == [[7, 8], [7, 8], [], []]
    costs = drafter.costs.by_rows()
    assert find_values(running, {0, 1, 2, 3}, costs) == pytest.approx([1.43] * 2 + [0.57] * 2, abs=0.01)
    one, other = find_values(running, {0}, costs)[::2]
    assert one == pytest.approx(1, abs=0.01) and other == pytest.approx(0.57, abs=0.01), "the second one ends last"


def test_a_batch_is_closed_until_a_request_follows_one_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(Drafter, "propose", lambda self, running, is_closed: closed.append(is_closed) or [])
    engine = EmbeddedEngine(build_model(0), max_running=2)

    def finish(num: int) -> None:
        while engine.stats().finished < num:
            engine.step()

    for request_of in (request([1, 2], max_tokens=9), request([3, 4], max_tokens=30)):
        engine.add(request_of)
    finish(1)
    assert closed and all(closed)
    engine.add(request([5, 6], max_tokens=9))
    engine.step()  # prefill
    closed.clear()
    finish(3)
    assert closed and not any(closed)
    closed.clear()
    run(engine, request([7, 8], max_tokens=9))
    assert all(closed)
    closed.clear()
    for seed in range(3):
        engine.add(request([seed], max_tokens=9))
    finish(5)
    assert not any(closed)


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.1}, {"frequency_penalty": 0.1}, {"presence_penalty": 0.1}])
def test_penalties_disable_drafts(params: dict[str, float], long_drafts: None) -> None:
    engine = EmbeddedEngine(build_model(0))
    for _ in range(2):
        run(engine, request([1, 2, 3, 4], max_tokens=20, temperature=0.01, **params))
    assert engine.stats().drafted_tokens == 0


def test_large_batches_have_no_drafts_but_serve_later_ones(long_drafts: None) -> None:
    engine = EmbeddedEngine(build_model(0))
    crowd = [request([1, 2, 3, 4], max_tokens=20, seed=seed) for seed in range(MAX_SEQUENCES + 1)]
    run(engine, *crowd)
    assert engine.stats().drafted_tokens == 0
    run(engine, request([1, 2, 3, 4], max_tokens=20, seed=7))
    assert engine.stats().accepted_tokens > 10


def test_index_forgets_the_oldest_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MAX_NGRAMS", 50)
    engine = EmbeddedEngine(build_model(0))
    drafter = engine._scheduler.drafter
    assert drafter is not None
    for seed in range(6):
        run(engine, request([seed] * 5, max_tokens=30, seed=seed))
        assert len(drafter._recent) <= 50 + 35 and len(drafter._older) <= 50 + 35
    before = engine.stats().accepted_tokens
    run(engine, request([0] * 5, max_tokens=30, seed=0))
    assert engine.stats().accepted_tokens == before
    for seed in range(6):  # requests that do not finish
        canceled = request([seed, *range(40)], max_tokens=30, seed=seed)
        engine.add(canceled)
        while engine.stats().running == 0 or engine._scheduler.running[0].num_generated < 3:
            engine.step()
        engine.cancel(canceled)
        assert len(drafter._recent) <= 50 + 45 and len(drafter._older) <= 50 + 45


def test_rejected_draft_leaves_no_nan_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((MODEL_DIR / "config.json").read_text()) | {"tie_word_embeddings": False}
    model = CausalLM(DecoderConfig.from_hf(config))
    init_weights(model, 0)
    with torch.no_grad():
        model.embedding()[7] = torch.nan
    engine = EmbeddedEngine(model)
    monkeypatch.setattr(Drafter, "propose", lambda self, running, is_closed: [[7]] * len(running))
    (output,) = run(engine, request([1, 2, 3], max_tokens=5, logit_bias=((7, -1e9),)))
    assert output.finish_reason == "length" and 7 not in output.token_ids
    assert all(block.isfinite().all() for block in engine._blocks.cache.blocks)
