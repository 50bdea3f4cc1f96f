"""Prompt order: ratios, epochs, pools, curriculum, quarantine, filters by name, exact resume."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.advantages import shape_rewards
from prime_rl.orchestrator.buffer import MAX_FAILED_BATCHES, PromptBuffer, build_buffer
from prime_rl.orchestrator.config import BufferConfig, FilterConfig, LengthPenaltyConfig, OrchestratorConfig
from prime_rl.orchestrator.filters import build_filter, build_group_filter
from prime_rl.orchestrator.policy_version import PolicyVersion
from rollouts.training.environments.plain import PlainEnvironment
from rollouts.training.rollout_gen.groups import DropReason, GroupBuffer, Outcome
from rollouts.training.types import Sample, Status


class Rows:
    """An environment with prompts and nothing else."""

    def __init__(self, name: str, size: int) -> None:
        self.id = name
        self.size = size

    def rows(self, split: str = "train") -> list[dict[str, Any]]:
        return [{"prompt": f"{self.id}{i}", "level": i} for i in range(self.size)]

    async def run_group(self, *args: Any, **kwargs: Any) -> list[Any]:
        return []


def make(sizes: dict[str, int], seed: int = 0, **config: Any) -> PromptBuffer:
    return PromptBuffer(
        {name: Rows(name, size) for name, size in sizes.items()}, BufferConfig(**config), seed, PolicyVersion()
    )


def draw(buffer: PromptBuffer, num: int) -> list[str]:
    drawn = [buffer.draw() for _ in range(num)]
    assert all(position == prompt["id"] and buffer.prompt_at(position) == prompt for position, prompt in drawn)
    return [prompt["row"]["prompt"] for _, prompt in drawn]


def early_levels(row: dict[str, Any], *, env: str, version: int, reward: float | None) -> bool:
    """A curriculum: row i from version i on; solved ones no more."""
    return row["level"] <= version and (reward is None or reward < 1)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    ratios=st.none() | st.lists(st.floats(0.1, 10), min_size=4, max_size=4),
    num=st.integers(1, 100),
)
def test_environment_ratios_hold_after_any_draw(sizes: list[int], ratios: list[float] | None, num: int) -> None:
    names = [f"e{i}" for i in range(len(sizes))]
    ratios = ratios and ratios[: len(sizes)]
    buffer = make(dict(zip(names, sizes, strict=True)), env_ratios=ratios)
    count: Counter[str] = Counter()
    weights = ratios or list(map(float, sizes))
    for n in range(1, num + 1):
        count[buffer.draw()[1]["env"]] += 1
        for name, weight in zip(names, weights, strict=True):
            assert abs(count[name] - n * weight / sum(weights)) < len(sizes)


def test_epochs_visit_every_row_once() -> None:
    first, second = make({"a": 9}, seed=1), make({"a": 9}, seed=2)
    epochs = [draw(first, 9) for _ in range(3)]
    assert epochs[0] == [f"a{i}" for i in range(9)]
    assert [sorted(epoch) for epoch in epochs] == [epochs[0]] * 3 and epochs[1] != epochs[2] != epochs[0]
    draw(second, 9)
    assert draw(second, 9) != epochs[1] and first.epoch_id == 3


@settings(max_examples=60, deadline=None)
@given(data=st.data(), before=st.integers(0, 40), after=st.integers(1, 40))
def test_saved_buffer_continues_identically(data: st.DataObject, before: int, after: int) -> None:
    config = {
        "easy_threshold": 0.8,
        "hard_threshold": 0.1,
        "easy_fraction": data.draw(st.sampled_from([0.0, 0.3])),
        "hard_fraction": data.draw(st.sampled_from([0.0, 0.2])),
        "curriculum": data.draw(st.sampled_from([None, f"{__name__}:early_levels"])),
        "env_ratios": [1.0, 3.0],
    }

    def advance(buffer: PromptBuffer, num: int, first: int) -> list[int]:
        positions = []
        for i in range(first, first + num):
            position, _ = buffer.draw()
            positions.append(position)
            reason = DropReason.ALL_FAILED if i % 11 == 10 else DropReason.ENGINE_ERROR if i % 7 == 6 else None
            buffer.record_outcomes([Outcome(position, None if reason else (i * 37 % 11) / 10, reason)])
            buffer.version.live = i // 3
        return positions

    whole, cut, resumed = (make({"a": 7, "b": 12}, **config) for _ in range(3))
    expected = advance(whole, before + after, 0)
    assert advance(cut, before, 0) == expected[:before]
    resumed.load_state(json.loads(json.dumps(cut.save_state())))
    resumed.version.live = cut.version.live
    assert advance(resumed, after, before) == expected[before:]
    assert resumed.save_state() == whole.save_state()


def test_easy_and_hard_prompts_are_skipped_and_counted() -> None:
    buffer = make({"a": 4}, easy_threshold=0.9, hard_threshold=0.0)
    draw(buffer, 4)
    buffer.record_outcomes([Outcome(0, 1.0), Outcome(1, 0.0), Outcome(2, 0.5), Outcome(3, 0.5, "min_reward")])
    metrics = buffer.take_metrics()
    assert metrics["pool/easy"] == metrics["pool/hard"] == 0.25 and metrics["pool/normal"] == 0.5
    assert metrics["evicted_examples/easy"] == metrics["evicted_examples/hard"] == 1
    assert buffer.take_metrics()["evicted_examples/easy"] == 0
    assert set(draw(buffer, 8)) == {"a2", "a3"}
    buffer.record_outcomes([Outcome(2, 0.9 - 1e-16), Outcome(3, 1.0)])
    assert set(draw(buffer, 8)) == {"a0", "a1", "a2", "a3"}, "with nothing left, all come back"


def test_prompts_of_references_are_in_no_difficulty_pool() -> None:
    envs = [{"id": "a"}, {"id": "b", "teacher": "reference"}]
    values = {"env": envs, "teacher_model": {"context": "c "}, "buffer": {"easy_threshold": 0.9, "hard_threshold": 0.1}}
    config = OrchestratorConfig.model_validate(values)
    buffer = build_buffer(config, {"a": Rows("a", 4), "b": Rows("b", 4)}, PolicyVersion())
    buffer.record_outcomes([Outcome(position, float(position % 2)) for position in range(8)])
    assert [env.pool_rows() for env in buffer.envs] == [
        {"easy": [1, 3], "hard": [0, 2], "quarantined": []},
        {"easy": [], "hard": [], "quarantined": []},
    ]


def test_rewards_of_references_are_ignored_after_resume() -> None:
    values = {"curriculum": f"{__name__}:early_levels", "easy_threshold": 0.9, "hard_threshold": 0.1}
    earlier, config = make({"a": 2, "b": 2}), BufferConfig.model_validate(values)
    state = earlier.save_state() | {"rewards": [[0, 1.0], [2, 1.0]]}
    for env in state["envs"]:
        env[3] = {"easy": [0], "hard": [1], "quarantined": []}
    buffer = PromptBuffer({"a": Rows("a", 2), "b": Rows("b", 2)}, config, 0, PolicyVersion(), ["b"])
    buffer.load_state(state)
    buffer.record_outcomes([Outcome(position, 0.0) for position in (1, 3)])
    assert buffer.envs[0].pool_rows() == {"easy": [0], "hard": [1], "quarantined": []}
    assert buffer.envs[1].pool_rows() == {"easy": [], "hard": [], "quarantined": []}
    assert buffer.save_state()["rewards"] == [(0, 1.0), (1, 0.0)]


def test_pool_fraction_is_drawn_and_pool_is_left() -> None:
    buffer = make({"a": 10}, easy_threshold=0.9, easy_fraction=0.25)
    draw(buffer, 10)
    buffer.record_outcomes([Outcome(0, 1.0), Outcome(1, 1.0)])
    drawn = draw(buffer, 40)
    assert sum(prompt in ("a0", "a1") for prompt in drawn) == 10
    assert drawn.count("a0") == drawn.count("a1") == 5
    buffer.record_outcomes([Outcome(0, 0.5), Outcome(1, 0.5)])
    assert buffer.take_metrics()["pool/normal"] == 1


@pytest.mark.parametrize(("easy", "hard"), [(0.1, 0.1), (0.2, 0.1), (0.5, 0.25), (0.25, 0.75)])
def test_both_pools_get_their_share(easy: float, hard: float) -> None:
    buffer = make({"a": 30}, easy_threshold=0.9, hard_threshold=0.1, easy_fraction=easy, hard_fraction=hard)
    draw(buffer, 7)
    buffer.record_outcomes([Outcome(i, 1.0) for i in range(10)] + [Outcome(i, 0.0) for i in range(10, 20)])
    kinds: Counter[str] = Counter()
    for num in range(1, 201):
        kinds["easy" if (position := buffer.draw()[0]) < 10 else "hard" if position < 20 else "normal"] += 1
        assert abs(kinds["easy"] - easy * num) < 2 and abs(kinds["hard"] - hard * num) < 2


def test_state_without_pool_draws_loads() -> None:
    config = {"easy_threshold": 0.9, "easy_fraction": 0.5}
    buffer, resumed = make({"a": 4}, **config), make({"a": 4}, **config)
    buffer.record_outcomes([Outcome(0, 1.0)])
    draw(buffer, 3)
    state = buffer.save_state()
    state["envs"] = [entry[:4] for entry in state["envs"]]
    resumed.load_state(state)
    assert draw(resumed, 4).count("a0") == 2


def test_changed_shares_count_from_the_resume_on() -> None:
    buffer = make({"a": 50, "b": 50}, env_ratios=[1.0, 1.0], easy_threshold=0.9)
    draw(buffer, 60)
    buffer.record_outcomes([Outcome(0, 1.0), Outcome(1, 1.0)])
    draw(buffer, 40)
    resumed = make({"a": 50, "b": 50}, env_ratios=[3.0, 1.0], easy_threshold=0.9, easy_fraction=0.25)
    resumed.load_state(json.loads(json.dumps(buffer.save_state())))
    drawn = draw(resumed, 16)
    assert Counter(prompt[0] for prompt in drawn) == {"a": 12, "b": 4}
    assert sum(prompt in ("a0", "a1") for prompt in drawn) == 3


def test_pools_without_a_threshold_are_empty_after_resume() -> None:
    buffer, resumed = make({"a": 4}, easy_threshold=0.9, hard_threshold=0.1), make({"a": 4}, hard_threshold=0.1)
    buffer.record_outcomes([Outcome(0, 1.0), Outcome(1, 0.0)])
    resumed.load_state(json.loads(json.dumps(buffer.save_state())))
    assert resumed.envs[0].pool_rows() == {"easy": [], "hard": [1], "quarantined": []}
    assert set(draw(resumed, 8)) == {"a0", "a2", "a3"}


def test_quarantine_after_failed_groups() -> None:
    buffer = make({"a": 2, "b": 1})
    buffer.record_outcomes([Outcome(0, None, DropReason.ALL_FAILED)])
    assert "a0" not in draw(buffer, 12) and buffer.num_quarantined == 1
    for _ in range(MAX_FAILED_BATCHES - 1):
        buffer.record_outcomes([Outcome(1, None, DropReason.ENGINE_ERROR)])
    buffer.record_outcomes([Outcome(1, 0.5)])
    for _ in range(MAX_FAILED_BATCHES - 1):
        buffer.record_outcomes([Outcome(1, None, DropReason.ENGINE_ERROR)])
    for _ in range(MAX_FAILED_BATCHES):
        buffer.record_outcomes([Outcome(1, None, DropReason.STALE)])
    assert "a1" in draw(buffer, 3), "a success forgives, and a stale group is no failure"
    buffer.record_outcomes([Outcome(1, None, DropReason.ENGINE_ERROR)])
    assert set(draw(buffer, 4)) == {"b0"}, "an environment with nothing left is passed over"
    buffer.record_outcomes([Outcome(2, None, DropReason.ALL_FAILED)])
    with pytest.raises(ValueError, match="every prompt of every environment failed"):
        buffer.draw()


def test_drop_reasons_are_restored() -> None:
    groups, restored = GroupBuffer(), GroupBuffer()
    groups.draw(3)
    groups.drop(0, DropReason.ALL_FAILED)
    state = json.loads(json.dumps(groups.state_dict()))
    assert state["drops"] == {"all_failed": 1} and state["outcomes"] == [[0, 3, None, "all_failed"]]
    restored.load_state_dict(state)
    assert restored.drops == {DropReason.ALL_FAILED: 1} and restored.state_dict() == groups.state_dict()


def test_curriculum_defers_rows() -> None:
    buffer = make({"a": 5}, curriculum=f"{__name__}:early_levels")
    assert set(draw(buffer, 6)) == {"a0"}
    buffer.version.live = 2
    assert set(draw(buffer, 9)) == {"a0", "a1", "a2"}
    buffer.record_outcomes([Outcome(1, 1.0)])
    assert set(draw(buffer, 9)) == {"a0", "a2"}
    buffer.record_outcomes([Outcome(0, 1.0), Outcome(2, 1.0)])
    assert draw(buffer, 1), "held back altogether: better one too early than none"


def test_prompts_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make({"a": 3})
    state = buffer.save_state()
    monkeypatch.setattr("prime_rl.orchestrator.buffer.hashlib", None)
    assert buffer.save_state() == state


def test_state_loads_after_rewards_changed_rows_in_place() -> None:
    def build() -> PromptBuffer:
        environment = PlainEnvironment([{"prompt": "p", "info": {"text": "a b"}}], lambda info: 0.0)
        return PromptBuffer({"e": environment}, BufferConfig(), 0, PolicyVersion())

    buffer = build()
    _, prompt = buffer.draw()
    prompt["row"]["info"]["words"] = ["a", "b"]
    build().load_state(buffer.save_state())


def test_state_of_other_prompts_raises() -> None:
    state = make({"a": 3}).save_state()
    with pytest.raises(ValueError, match=r"other prompts \(environments a\)"):
        make({"a": 4}).load_state(state)
    with pytest.raises(ValueError, match="'a' has no training prompts"):
        make({"a": 0})


def test_rows_with_sets_and_objects_resume() -> None:
    def build(accepted: set[int]) -> PromptBuffer:
        environment = PlainEnvironment([{"prompt": "a", "answer": accepted, "judge": object()}], lambda **_: 1.0)
        return PromptBuffer({"a": environment}, BufferConfig(), 0, PolicyVersion())

    assert list({0, 8}) != list({8, 0}), "two orders of one set, as those of text in two processes"
    build({0, 8}).load_state(build({8, 0}).save_state())


def sample(index: int, reward: float, response: str = "x", group: int = 0, size: int = 2) -> Sample:
    status = Status.COMPLETED
    return Sample(
        prompt="p",
        response=response,
        tokens=[1] * size,
        loss_mask=[1.0] * size,
        reward=reward,
        index=index,
        status=status,
    )


def never(samples: list[Sample]) -> bool:
    """A user's own filter."""
    return False


async def never_async(samples: list[Sample]) -> bool:
    """A user's own filter, with a request."""
    return never(samples)


def group_filter(config: BufferConfig) -> Callable[[list[Sample]], str | None]:
    judge = build_group_filter(config)
    return lambda samples: anyio.run(judge, samples)


def test_filters_by_name_with_arguments_and_by_import_path() -> None:
    judge = group_filter(
        BufferConfig(filters=[{"name": "zero_variance"}, {"name": "check_min_reward", "args": {"threshold": 0.8}}])
    )
    assert judge([sample(0, 1.0), sample(1, 1.0)]) == "zero_variance"
    assert judge([sample(0, 0.7), sample(1, 0.5)]) == "check_min_reward"
    assert judge([sample(0, 0.9), sample(1, 0.5)]) is None
    # a rollout of two samples is one rollout: its reward has no spread of its own
    assert judge([sample(0, 0.9), sample(0, 0.9)]) is None
    reference = sample(0, 1.0)
    reference.reference_weight = 1.0
    assert judge([reference, sample(1, 1.0)]) is None, "its rewards are ignored"
    for name in (f"{__name__}:never", f"{__name__}:never_async"):
        assert group_filter(BufferConfig(filters=[{"name": name}]))([sample(0, 1.0)]) == name
    for config, message in (
        ({"name": "min_rewrd"}, "'min_rewrd' is not one of any_success"),
        ({"name": "min_reward", "args": {"treshold": 1}}, "unexpected keyword argument 'treshold'"),
        ({"name": "nowhere:f"}, "nowhere:f' cannot be imported"),
    ):
        with pytest.raises(ValueError, match=message):
            build_filter(FilterConfig(**config))


def test_length_penalties_in_closed_form() -> None:
    rewards, lengths = [1.0, 1.0, 0.0], [[10], [30], [20]]

    def shaped(**config: Any) -> list[float]:
        return shape_rewards(rewards, lengths, LengthPenaltyConfig(**config), seq_len=100, max_tokens=30)

    assert shape_rewards(rewards, lengths, None, seq_len=1) == rewards
    assert shaped(coef=0.5) == pytest.approx([1 / 1.25, 1 / 1.75, 0])
    negative = shape_rewards([-1.0, -1.0, 0.5], lengths, LengthPenaltyConfig(coef=0.5), seq_len=100)
    assert negative == pytest.approx([-1.25, -1.75, 0.5 / 1.5]), "longer is never better"
    assert shaped(type="linear", coef=0.3) == pytest.approx([1 - 0.02, 1 - 0.06, -0.04])
    several = shape_rewards(rewards, [[90, 90], [30], []], LengthPenaltyConfig(type="linear", coef=0.3), seq_len=100)
    assert several == pytest.approx([1 - 0.2, 1 - 0.06, 0]), "at most that of seq_len"
    assert shaped(type="overlong", coef=1.0, window=20) == pytest.approx([1.0, 0.0, -0.5])
    lengths = [[5, 5, 10, 10], [10, 25], []]
    assert shaped(type="overlong", coef=1.0, window=20) == pytest.approx([1.0, 0.25, 0.0]), "the longest completion"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"buffer": {"skip_verification": True, "easy_threshold": 1}}, "no rewards for easy_threshold"),
        ({"buffer": {"skip_verification": True, "online_difficulty_filtering": True}}, "for online_difficulty"),
        (
            {"buffer": {"skip_verification": True, "filters": [{"name": "min_reward"}]}},
            "for filters min_reward: remove",
        ),
        ({"buffer": {"easy_fraction": 0.5}}, "set easy_threshold too"),
        ({"buffer": {"easy_threshold": 0.1, "hard_threshold": 0.2}}, "easy_threshold = 0.1 must be above"),
        ({"buffer": {"env_ratios": [1, 2]}}, "2 entries for 1 environments"),
        ({"strict_async_level": True, "oversampling_factor": 2}, "choose one of them"),
        ({"length_penalty": {"type": "overlong"}}, "needs sampling.max_tokens"),
        ({"length_penalty": {"type": "overlong", "window": 1}}, "needs sampling.max_tokens"),
        ({"sampling": {"temperature": 0}}, r"greedy decoding.* set eval\.sampling\.temperature"),
        (
            {"sampling": {"repetition_penalty": 1.1}},
            r"sampling\.repetition_penalty changes .* set it in eval\.sampling",
        ),
        ({"sampling": {"extra_body": {"logit_bias": {"5": 1.0}}}}, r"sampling\.extra_body\.logit_bias changes"),
        ({"sampling": {"extra_body": {"presence_penalty": 0.5}}}, r"sampling\.extra_body\.presence_penalty changes"),
        ({"sampling": {"extra_body": {"allowed_token_ids": [5]}}}, r"sampling\.extra_body\.allowed_token_ids changes"),
        ({"sampling": {"extra_body": {"bad_words": ["a"]}}}, r"sampling\.extra_body\.bad_words changes"),
        *(
            ({"sampling": {"extra_body": {name: 0.5}}}, rf"sampling\.extra_body\.{name} overrides sampling\.{name}")
            for name in ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
        ),
    ],
)
def test_contradictory_settings_raise(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OrchestratorConfig.model_validate(values)


def test_neutral_penalties_and_those_of_evaluations_are_kept() -> None:
    neutral = {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": None, "repetition_penalty": 1.0}
    OrchestratorConfig.model_validate(
        {
            "sampling": {"extra_body": neutral, "min_tokens": 2},
            "eval": {"sampling": {"temperature": 0, "repetition_penalty": 1.1}},
        }
    )
