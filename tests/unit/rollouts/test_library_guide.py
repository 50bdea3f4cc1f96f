"""docs/library.md: its code is run as it is written there; the in-process engine and custom advantages."""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from prime_rl.config import RLConfig
from prime_rl.orchestrator.advantages import build_advantages
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.runtime.tokenizer import resolve_model_dir
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training import (
    AsyncRolloutManager,
    DataBuffer,
    ModelEngine,
    PyTorchTrainingBackend,
    RLTrainingConfig,
    RolloutBatch,
    RolloutConfig,
    Sample,
    Status,
    run_rl_training,
)
from rollouts.training.loops.rl_loop import batch_advantages
from rollouts.training.rl_losses import grpo_loss

PAGE = Path(__file__).parents[3] / "docs" / "library.md"
MODEL_DIR = str(resolve_model_dir("tiny-qwen3"))
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def load(block: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "guide", "Sample": Sample}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


def build_engine(generation: dict[str, Any] | None = None, **options: Any) -> ModelEngine:
    """An engine with an untrained model that has these `generation` settings."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL_DIR))
    model.generation_config.update(**generation or {})
    return ModelEngine(model, AutoTokenizer.from_pretrained(MODEL_DIR), **options)


def test_the_example_runs(tmp_path: Path) -> None:
    rows = anyio.run(load(BLOCKS[0])["train"], MODEL_DIR, tmp_path, 2)
    assert len(rows) == 2 and (tmp_path / "weights" / "step_2" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_learns(tmp_path: Path) -> None:
    rows = anyio.run(load(BLOCKS[0])["train"], MODEL_DIR, tmp_path, 25)
    first, last = (sum(row["mean_reward"] for row in part) / 3 for part in (rows[:3], rows[-3:]))
    assert last > 3 * first, (first, last)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_engine_logprobs_are_those_of_the_model(backend: str) -> None:
    engine = build_engine(max_tokens=6, temperature=0.7)
    check_logprobs(engine, ("a", "a much longer prompt", "bc"), backend)


@pytest.mark.parametrize(
    "setting",
    [{"min_p": 0.15}, {"typical_p": 0.5}, {"num_beams": 2}, {"min_new_tokens": 6}, {"repetition_penalty": 2.0}],
)
def test_generation_settings_of_the_model_are_ignored(setting: dict[str, Any]) -> None:
    check_logprobs(build_engine(setting, max_tokens=6, temperature=0.7), ["hi"])


def check_logprobs(engine: ModelEngine, prompts: Sequence[str], backend: str = "asyncio") -> None:
    """Log-probs of samples are those of the engine's model at temperature 0.7."""

    async def run() -> list[Sample]:
        samples: list[Sample] = []

        async def one(prompt: str) -> None:
            samples.extend(await engine([prompt]))

        async with anyio.create_task_group() as group:
            for prompt in prompts:
                group.start_soon(one, prompt)
        return samples

    for sample in anyio.run(run, backend=backend):
        sample.validate()
        with torch.no_grad():
            logits = engine.model(torch.tensor([sample.tokens])).logits[0, :-1].float() / 0.7
        logprobs = torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.tokens[1:])[:, None]).squeeze(1)
        start = sample.loss_mask.index(1.0)
        assert sample.inference_logprobs is not None
        assert sample.inference_logprobs[start:] == pytest.approx(logprobs[start - 1 :].tolist(), abs=1e-4)
        assert len(sample.tokens) - start <= 6 and sample.versions == [(start, 0)]
        is_complete = sample.tokens[-1] == engine.tokenizer.eos_token_id
        assert is_complete or sample.status is Status.TRUNCATED


def test_the_engine_keeps_no_scores_of_earlier_tokens() -> None:
    engine = build_engine(max_tokens=12)
    shape, counts = (3, engine.model.config.vocab_size), []

    def count(*_: Any) -> None:
        counts.append(sum(type(item) is torch.Tensor and item.shape == shape for item in gc.get_objects()))

    engine.model.register_forward_pre_hook(count)
    gc.freeze()  # other objects need not be looked at
    anyio.run(engine, ["a", "b", "c"])
    assert len(counts) > 6 and max(counts) <= counts[2], counts


def test_prompts_that_the_engine_takes_and_refuses() -> None:
    engine = build_engine(max_tokens=3, temperature=2)
    row = {"question": "hi", "answer": "ho"}
    text, by_row = anyio.run(engine, ["hi", row])
    start = text.loss_mask.index(1.0)
    assert by_row.prompt == row and by_row.tokens[:start] == text.tokens[:start] and type(text.temperature) is float
    with pytest.raises(ValueError, match="a prompt has the columns q: a prompt is one of"):
        anyio.run(engine, [{"q": "hi"}])
    engine.tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the prompt '' has no tokens"):
        anyio.run(engine, [""])
    with pytest.raises(ValueError, match="temperature a number above 0"):
        build_engine(temperature=float("nan"))


def test_a_model_without_an_end_token_goes_on_to_the_limit() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL_DIR))
    tokenizer = AutoTokenizer.from_pretrained(MODEL_DIR)
    model.generation_config.eos_token_id = tokenizer.eos_token = None
    samples = anyio.run(ModelEngine(model, tokenizer, max_tokens=5), ["a", "a longer one"])
    assert [(sample.response_length, sample.status) for sample in samples] == [(5, Status.TRUNCATED)] * 2


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_draws_do_not_depend_on_the_order_of_calls(backend: str) -> None:
    pytest.importorskip(backend)

    async def draw(order: Sequence[int]) -> dict[int, list[int]]:
        engine, drawn = build_engine(max_tokens=4, max_batch_size=2), {}

        async def call(seed: int) -> None:
            [sample] = await engine(["Write a."], seed=seed)
            drawn[seed] = sample.tokens

        async with anyio.create_task_group() as tasks:
            for seed in order:
                tasks.start_soon(call, seed)
        return drawn

    assert anyio.run(draw, [1, 2, 3], backend=backend) == anyio.run(draw, [3, 1, 2], backend=backend)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_canceled_call_is_in_no_later_batch(backend: str) -> None:
    pytest.importorskip(backend)
    engine = build_engine(max_tokens=4, max_batch_size=1)
    [expected] = anyio.run(build_engine(max_tokens=4, max_batch_size=1), ["Write a."], backend=backend)

    async def draw() -> list[Sample]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engine, ["Write b."])
            tasks.cancel_scope.cancel()
        return await engine(["Write a."])

    assert [sample.tokens for sample in anyio.run(draw, backend=backend)] == [expected.tokens]


def test_a_resumed_run_draws_the_same_tokens(tmp_path: Path) -> None:
    def train(name: str, num_steps: int, start: Path | None = None) -> list[dict[str, float]]:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL_DIR))
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        backend = PyTorchTrainingBackend(model, optimizer, grpo_loss, tmp_path / name)
        engine = ModelEngine(model, AutoTokenizer.from_pretrained(MODEL_DIR), max_tokens=4)
        if start is not None:
            backend.start_from(start)
        buffer = DataBuffer(["Write a.", "Which?"])
        rollouts = RolloutConfig(2, 2, generate_fn=engine, reward_fn=lambda sample: len(set(sample.tokens)))
        config = RLTrainingConfig(num_steps, sync_every=1, checkpoint_every=2)
        manager = AsyncRolloutManager(buffer, rollouts)
        return anyio.run(run_rl_training, backend, buffer, manager, [engine], config)

    rows = train("a", 4)
    assert train("b", 2, start=tmp_path / "a" / "step_2") == rows[2:]


def test_engine_refuses_foreign_weights(tmp_path: Path) -> None:
    engine = build_engine()
    before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    with pytest.raises(ValueError, match=r"has no model.safetensors"):
        anyio.run(engine.update_weights_from_checkpoint, str(tmp_path))
    from safetensors.torch import save_file

    (tmp_path / "step_1").mkdir()
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / "step_1" / "model.safetensors")
    with pytest.raises(ValueError, match=r"model.norm.weight differs"):
        anyio.run(engine.update_weights_from_checkpoint, str(tmp_path / "step_1"))
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.model.state_dict().items())
    with pytest.raises(ValueError, match="no `generate`"):
        ModelEngine(torch.nn.Linear(1, 1), None)


def build_batch(rewards: list[float], groups: list[int]) -> RolloutBatch:
    samples = [Sample(prompt="", tokens=[1, 2], loss_mask=[0.0, 1.0], reward=r) for r in rewards]
    tokens, masks = [s.tokens for s in samples], [s.loss_mask for s in samples]
    return RolloutBatch(tokens, masks, rewards, [1] * 4, {}, samples, groups)


def test_unset_estimator_is_grpo_for_groups() -> None:
    rewards = [1.0, 0.0, 3.0, 1.0]
    for config, groups, expected in (
        (RLTrainingConfig(1), [0, 0, 1, 1], [0.5, -0.5, 1.0, -1.0]),
        (RLTrainingConfig(1), [0, 1, 2, 3], rewards),
        (RLTrainingConfig(1, baseline=1.0), [0, 0, 1, 1], [0.0, -1.0, 2.0, 0.0]),
        (RLTrainingConfig(1, advantage_fn=load(BLOCKS[-1])["best_of_group"]), [0, 0, 1, 1], [1.0, 0.0, 1.0, 0.0]),
    ):
        assert batch_advantages(build_batch(rewards, groups), rewards, config) == expected


def test_bad_advantage_functions_are_named() -> None:
    def one_too_few(group: list[Sample]) -> list[float]:
        return [0.0]

    with pytest.raises(ValueError, match=r"one_too_few returned .* for a group of 2"):
        config = RLTrainingConfig(1, advantage_fn=one_too_few)
        batch_advantages(build_batch([1.0] * 4, [0, 0, 1, 1]), [1.0] * 4, config)
    with pytest.raises(ValueError, match="has no effect with advantage_fn"):
        RLTrainingConfig(1, advantage_fn=one_too_few, estimator="mean")


def best(group: list[Sample], bonus: float = 1.0) -> list[float]:
    """As the page's, at a path that can be imported."""
    return [bonus * (sample.reward == max(other.reward for other in group)) for sample in group]


async def waiting(group: list[Sample]) -> list[float]:
    return best(group)


def test_rl_takes_a_custom_advantage_function() -> None:
    advantage = {"import_path": f"{__name__}:best", "kwargs": {"bonus": 0.5}}
    assign = build_advantages(OrchestratorConfig.model_validate({"advantage": advantage}))
    samples = [Sample("", "", [1, 2], [0.0, 1.0], r, group_index=0, index=i) for i, r in enumerate((1.0, 0.0))]
    assign(samples)
    assert [sample.advantages for sample in samples] == [[0.0, 0.5], [0.0, 0.0]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"advantage": {"import_path": "nowhere:f"}}, "advantage.import_path = 'nowhere:f' cannot be imported"),
        ({"advantage": {"import_path": "math:pi"}}, "is a float, not a function"),
        ({"advantage": {"import_path": f"{__name__}:best", "kwargs": {"x": 1}}}, "does not take the arguments"),
        ({"advantage": {"import_path": "math:sqrt", "std": "group"}}, "std has no effect with import_path"),
        ({"advantage": {"import_path": f"{__name__}:waiting"}}, "import_path = .* is async: write it with def"),
        ({"advantage": {"kwargs": {"x": 1}}}, "set import_path"),
        ({"advantage": {"import_path": "math:sqrt"}, "length_penalty": {}}, "length_penalty has no effect"),
    ],
)
def test_bad_advantage_configs_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_advantages(OrchestratorConfig.model_validate(changes))


@pytest.mark.parametrize("loss", ["grpo", "dapo"])
def test_the_loss_type_keeps_a_custom_advantage_function(loss: str) -> None:
    argv = ["--trainer.loss.type", loss, "--orchestrator.advantage.import-path", f"{__name__}:best"]
    argv += ["--orchestrator.rollouts-per-example", "4", "--output-dir", "outputs/x"]
    config, _ = parse_argv(RLConfig, argv, "rl")
    advantage = config.orchestrator.advantage
    assert advantage is not None and advantage.import_path == f"{__name__}:best"
    assert advantage.model_fields_set == {"import_path"} and config.orchestrator.length_penalty is None
