"""Pages of the cache: which sequences share them, and when they are free."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prime_rl.inference.embedded import scheduler
from prime_rl.inference.embedded.engine import EmbeddedEngine
from prime_rl.inference.embedded.kv_cache import BLOCK, FIRST_PAGES
from prime_rl.inference.embedded.paged_blocks import PADDING, PagedBlocks, PagePool
from prime_rl.inference.embedded.prefix_cache import FIRST_SHARE
from prime_rl.inference.engine import GenerationRequest, Output, SamplingParams
from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.trainer.models.causal_lm import tensor_names
from prime_rl.trainer.models.registry import load_decoder
from rollouts.kernels import cpu as cpu_kernels
from rollouts.kernels import native

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernels = pytest.mark.skipif(native.library() is None, reason="no C compiler; cure: apt-get install gcc")


def build_engine(**options: Any) -> tuple[EmbeddedEngine, PagedBlocks]:
    model = load_decoder(resolve_model_dir("tiny-qwen3"), random_init=True, seed=0).requires_grad_(False)
    engine = EmbeddedEngine(model, **options)
    blocks = engine._blocks
    assert isinstance(blocks, PagedBlocks)
    return engine, blocks


def add_group(engine: EmbeddedEngine, prompt: list[int], max_tokens: list[int], **params: Any) -> None:
    for seed, num in enumerate(max_tokens):
        engine.add(GenerationRequest(prompt, SamplingParams(max_tokens=num, seed=seed, ignore_eos=True, **params)))


def draw_prompt(length: int) -> list[int]:
    return random.Random(length).choices(range(256), k=length)


def run(engine: EmbeddedEngine) -> list[Output]:
    outputs: list[Output] = []
    while engine.has_work():
        outputs += [event for event in engine.step() if isinstance(event, Output)]
    return outputs


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=200))
def test_a_page_is_taken_once_and_free_after_its_last_owner(steps: list[tuple[int, int]]) -> None:
    """Against a count of users and holders per page: take, use, hold, and both undone."""
    pool, users, holders = PagePool(), Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    for block, choice in steps:
        owned = sorted(+(users + holders))
        kind = choice % 5
        mine = [one for one in (users if kind == 2 else holders if kind == 4 else owned) if (users + holders)[one] > 0]
        mine = [one for one in mine if kind not in (2, 4) or (users if kind == 2 else holders)[one] > 0]
        if kind == 0 or not mine:
            new = [0] * block + [1]
            enough = pool.count_needed(new)[block]
            page = pool.take(block)
            free = min(set(range(len(owned) + 1)) - {at for of, at in owned if of == block})
            assert page == free < enough
            users[block, page] += 1
            continue
        one = mine[choice % len(mine)]
        (None, pool.use, pool.leave, pool.hold, pool.drop)[kind](*one)  # type: ignore[misc]
        (users if kind in (1, 2) else holders)[one] += 1 if kind in (1, 3) else -1
        assert pool.num_used == len(+users)
    everything = users + holders
    assert [pool.is_shared(*one) for one in sorted(everything)] == [everything[one] > 1 for one in sorted(everything)]


@needs_kernels
def test_a_group_holds_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_CHUNK_ROWS", 0)  # so that `store_in_pages` writes the keys
    engine, blocks = build_engine(speculation=False)
    add_group(engine, draw_prompt(2 * BLOCK), [30] * 6)
    written: list[int] = []
    store = cpu_kernels.store_in_pages

    def record(k: Any, v: Any, addresses: Any, places: Any, *, narrow: bool) -> None:
        written.append(int((places[0] >= 0).sum()) if torch.equal(addresses, blocks.cache.addresses()[0]) else 0)
        store(k, v, addresses, places, narrow=narrow)

    monkeypatch.setattr(cpu_kernels, "store_in_pages", record)
    while len(seqs := engine._scheduler.running) < 6 or any(seq.num_generated < 2 for seq in seqs):
        engine.step()
    assert len({tuple(seq.pages[:2]) for seq in seqs}) == 1, "two pages of the prompt, the last token's included"
    assert len({seq.pages[2] for seq in seqs}) == 6
    assert sum(written) == 2 * BLOCK, "the last token of a prompt is computed for every sequence, and stored once"
    assert blocks._pool.num_used == 1 + 2 + 6
    assert engine.stats().cached_tokens == 2 * BLOCK + sum(seq.num_cached - 2 * BLOCK for seq in seqs)
    run(engine)
    blocks.start_epoch([])
    assert blocks.reserve([])
    assert blocks._pool.highest()[0] == PADDING + 1 and not any(blocks._pool.highest()[1:]), "all pages are free"


@needs_kernels
@pytest.mark.parametrize(("length", "as_rows"), [(2 * BLOCK, False), (2 * BLOCK + 1, True)])
def test_a_decode_step_writes_no_shared_page(length: int, as_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last token of a shared prompt may be in a page that another sequence has written and reads."""
    engine, _ = build_engine(speculation=False)
    chunks: list[tuple[bool, list[int]]] = []
    compute = engine._runner.run

    def record(batch: scheduler.ScheduledBatch) -> Any:
        if batch.chunks:
            chunks.append((batch.as_rows, [chunk.start for chunk in batch.chunks]))
        return compute(batch)

    monkeypatch.setattr(engine._runner, "run", record)
    prompt = draw_prompt(length)
    add_group(engine, prompt, [9])
    while not engine.stats().generated_tokens:
        engine.step()
    add_group(engine, prompt, [2])
    engine.step()
    assert chunks[-1] == (as_rows, [length - 1, length] if as_rows else [length - 1])
    run(engine)


@needs_kernels
def test_what_sequences_share_counts_once_in_their_limit() -> None:
    """Eight sequences of three blocks, two of them shared, run at once in 11 pages: two, eight, and one for padding."""
    engine, _ = build_engine(
        max_model_len=3 * BLOCK - 1, max_cache_tokens=11 * BLOCK, max_prefix_cache_tokens=0, speculation=False
    )
    add_group(engine, draw_prompt(2 * BLOCK + 1), [60] * 8)
    most, outputs = 0, list[Output]()
    while engine.has_work():
        outputs += [event for event in engine.step() if isinstance(event, Output)]
        most = max(most, engine.stats().running)
    assert most == 8 and engine.stats().preempted == 0
    assert [len(output.token_ids) for output in outputs] == [60] * 8


@needs_kernels
def test_memory_of_a_group_is_allocated_once() -> None:
    engine, blocks = build_engine(speculation=False)
    add_group(engine, draw_prompt(2 * BLOCK + 1), [60] * 40)
    generations = set()
    while engine.has_work():
        engine.step()
        generations.add(blocks.cache.generation)
    assert blocks.cache.num_pages == [FIRST_PAGES, FIRST_PAGES, 2 * 40], "blocks grow by doubling"
    assert len(generations) == 1


@needs_kernels
def test_a_group_reads_all_pages_of_a_kept_prompt() -> None:
    """Also the page of its last token, which every sequence computes again."""
    engine, _ = build_engine(speculation=False)
    prompt = draw_prompt(BLOCK)
    for _ in range(2):
        add_group(engine, prompt, [2] * FIRST_PAGES)
        engine.step()
        assert len({seq.pages[0] for seq in engine._scheduler.running}) == 1
        assert len(run(engine)) == FIRST_PAGES


@needs_kernels
def test_a_group_goes_on_without_its_first_sequence() -> None:
    """The next one takes its place, and the memory that was counted for the first one."""
    engine, blocks = build_engine(max_num_batched_tokens=BLOCK, speculation=False)
    add_group(engine, draw_prompt(3 * BLOCK), [20] * 30)
    engine.step()
    first = engine._scheduler.running[0]
    assert 0 < first.num_cached < 3 * BLOCK
    engine.cancel(first.request)
    assert len(run(engine)) == 29
    check_pages(engine, blocks)


@needs_kernels
def test_a_conversation_shares_the_pages_of_its_last_turn() -> None:
    engine, blocks = build_engine()
    prompt = draw_prompt(200)
    add_group(engine, prompt, [100])
    (first,) = run(engine)
    (pages,) = (prefix.pages for prefix in blocks.prefixes._cached)
    add_group(engine, [*prompt, *first.token_ids, 1, 2, 3], [2])
    engine.step()
    (seq,) = engine._scheduler.running
    assert seq.pages[:2] == pages[:2] and seq.pages[2] != pages[2]
    (second,) = run(engine)
    assert second.num_cached == 299


@needs_kernels
def test_rows_of_a_group_stay_adjacent_when_others_finish() -> None:
    engine, _ = build_engine(speculation=False)
    for length in (140, 150):
        add_group(engine, draw_prompt(length), [5, 20, 10, 20])
    firsts: list[list[int]] = []
    while engine.has_work():
        engine.step()
        running = engine._scheduler.running
        assert [seq.slot for seq in running] == list(range(len(running)))
        firsts.append([seq.tokens[0] for seq in running])
    groups = [first for first in firsts if len(set(first)) == 2]
    assert {len(first) for first in groups} >= {4, 6, 8}
    assert all(first == sorted(first, key=first.index) for first in groups)


@needs_kernels
def test_failed_sequences_leave_no_nan_in_pages_that_they_shared() -> None:
    engine, blocks = build_engine()
    weight = engine.model.embedding()
    with torch.no_grad():
        weight[7] = torch.nan
    engine._decoder.refresh({})
    add_group(engine, [*draw_prompt(150), 7, *draw_prompt(150)], [5] * 3)
    assert {output.finish_reason for output in run(engine)} == {"error"}
    assert all(block.isfinite().all() for block in blocks.cache.blocks)


def check_pages(engine: EmbeddedEngine, blocks: PagedBlocks) -> None:
    """Every page has as many owners as there are sequences and kept prefixes with it, and none is free."""
    running = [list(enumerate(seq.pages)) for seq in engine._scheduler.running]
    kept = [list(enumerate(prefix.pages)) for prefix in blocks.prefixes._cached]
    users = Counter(page for pages in running for page in pages) + Counter([(0, PADDING)])
    owners = users + Counter(page for pages in kept for page in pages)
    assert blocks._pool.num_used == len(users)
    for j, counts in enumerate(blocks._pool._owners):
        assert counts == [owners[j, page] for page in range(len(counts))]
    assert len(owners) == sum(len(counts) - counts.count(0) for counts in blocks._pool._owners)
    positions = set[tuple[int, int]]()
    for seq in engine._scheduler.running:
        assert len(seq.pages) * BLOCK >= seq.num_cached
        length = max(seq.num_cached, BLOCK * seq.num_shared_blocks)
        positions |= {(at, seq.pages[at // BLOCK]) for at in range(length)}
    assert blocks.count_cached(engine._scheduler.running) == len(positions)


@needs_kernels
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_events_keeps_the_pages_consistent(seed: int, exact: bool) -> None:
    """Requests of a tree of prompts arrive, end, are canceled and preempted while weights change."""
    rng = random.Random(seed)
    engine, blocks = build_engine(
        exact=exact, max_model_len=600, max_running=8, max_cache_tokens=1, max_num_batched_tokens=256
    )
    stem = draw_prompt(400)
    alive: list[GenerationRequest] = []
    num_done, version = 0, 0
    for step in range(220):
        if step < 200 and rng.random() < 0.3:
            prompt = [*stem[: rng.choice((60, 128, 200, 256, 380))], *draw_prompt(rng.choice((1, 3, 130)))]
            for _ in range(rng.choice((1, 1, 3))):
                params = SamplingParams(max_tokens=rng.choice((1, 5, 130)), seed=step, ignore_eos=True)
                alive.append(GenerationRequest(prompt, params))
                engine.add(alive[-1])
        if alive and rng.random() < 0.03:
            engine.cancel(alive.pop(rng.randrange(len(alive))))
        if rng.random() < 0.03:
            version += 1
            engine.load_weights(tensor_names(engine.model), version)
        for event in engine.step() if engine.has_work() else []:
            if isinstance(event, Output):
                assert event.finish_reason == "length"
                alive.remove(event.request)
                num_done += 1
        check_pages(engine, blocks)
    num_done += len(run(engine))
    check_pages(engine, blocks)
    stats = engine.stats()
    assert num_done > 30 and stats.shared_prompt_tokens > 1000 and stats.preempted > 0


@needs_kernels
def test_kept_pages_count_whole_where_they_take_memory() -> None:
    """As on a GPU: short conversations would take many times the memory that is set."""
    engine, blocks = build_engine(max_prefix_cache_tokens=FIRST_SHARE * 4 * BLOCK)
    blocks.cache.has_whole_pages = True
    for seed in range(12):
        engine.add(GenerationRequest(draw_prompt(9 + seed), SamplingParams(max_tokens=3)))
        run(engine)
    assert engine.stats().kept_tokens == 4 * BLOCK and len(blocks.prefixes._cached) == 4
    check_pages(engine, blocks)


@needs_kernels
def test_growth_keeps_what_a_finished_sequence_wrote_last() -> None:
    """It grew within its block after memory was reserved for it, and memory is moved when it is gone."""
    engine, blocks = build_engine(max_running=40)
    add_group(engine, draw_prompt(BLOCK + 2), [70])
    (first,) = run(engine)
    turn = [*draw_prompt(BLOCK + 2), *first.token_ids]
    (prefix,) = blocks.prefixes._cached
    before = blocks.cache.blocks[1][:, :, prefix.pages[1], :, : prefix.num_cached - BLOCK].clone()
    generation = blocks.cache.generation
    for seed in range(30):
        engine.add(GenerationRequest(draw_prompt(BLOCK + 1)[seed:] + [seed] * seed, SamplingParams(max_tokens=1)))
    engine.step()
    assert blocks.cache.generation > generation
    assert torch.equal(blocks.cache.blocks[1][:, :, prefix.pages[1], :, : prefix.num_cached - BLOCK], before)
    assert prefix.tokens == turn
