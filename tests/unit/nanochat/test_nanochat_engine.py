"""nanochat engine: KV cache, independent seeded samples, tool calls and masks."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from nanochat.calculator import use_calculator
from nanochat.chat_client import ChatClient, group_samples, run_rollouts
from nanochat.engine import Completion, Engine, Request
from nanochat.evaluation import QuestionScore, evaluate, letter_is_right, summarize_scores
from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import NanochatTokenizer
from rollouts.agents import Turn
from rollouts.training.agent_integration import Rollout
from rollouts.training.backends.ranks import Ranks
from rollouts.training.environments.plain import PlainEnvironment
from rollouts.training.environments.protocol import Row
from rollouts.training.sampling import keep_top_k
from rollouts.training.types import Message, Status


@pytest.fixture(scope="module")
def tokenizer() -> NanochatTokenizer:
    return NanochatTokenizer.train(["12+30 is 42"] * 3, 270)


@pytest.fixture(scope="module")
def model(tokenizer: NanochatTokenizer) -> GPT:
    built = GPT(GPTConfig(64, tokenizer.get_vocab_size(), 2, 4, 2, 32))
    built.init_weights(3)
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            if name == "lm_head.weight" or name.endswith("c_proj.weight"):
                parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(5))
    return built


@torch.no_grad()
def whole_logprobs(model: GPT, request: Request, done: Completion) -> list[float]:
    """Of the sampled tokens, by one pass over the whole sequence."""
    ids = [*request.prompt, *done.tokens]
    logits = keep_top_k(model(torch.tensor([ids]))[0], request.top_k) / (request.temperature or 1.0)
    rows = logits.log_softmax(-1)[len(request.prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(done.tokens)[:, None])[:, 0].tolist()


def test_cached_ragged_generation_matches_full_forward(model: GPT, tokenizer: NanochatTokenizer) -> None:
    settings = [(0.0, None), (1.0, None), (0.7, 5), (1.0, 0)]
    requests = [
        Request(tuple(range(10, 10 + n)), 12, temperature, top_k, seed=n)
        for n in (1, 3, 3, 9)
        for temperature, top_k in settings
    ]
    batch = Engine(model, tokenizer, max_rows=7).complete(requests)
    for request, done in zip(requests, batch, strict=True):
        assert done.logprobs == pytest.approx(whole_logprobs(model, request, done), abs=1e-5)
        assert done.finish_reason == ("length" if len(done.tokens) == 12 else "stop")
        assert [done.tokens] == [one.tokens for one in Engine(model, tokenizer).complete([request])]
    greedy = batch[0]
    with torch.no_grad():
        ids = list(requests[0].prompt)
        for token in greedy.tokens:
            assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
            ids.append(token)


def test_samples_follow_the_first_token_distribution(model: GPT, tokenizer: NanochatTokenizer) -> None:
    requests = [Request((1, 2, 3), 1, seed=i) for i in range(4000)]
    firsts = torch.tensor([done.tokens[0] for done in Engine(model, tokenizer, max_rows=4000).complete(requests)])
    with torch.no_grad():
        expected = model(torch.tensor([[1, 2, 3]]))[0, -1].softmax(-1)
    seen = torch.bincount(firsts, minlength=len(expected)) / 4000
    assert float((seen - expected).abs().sum()) / 2 < 0.12  # of 4000 draws from this distribution: 0.08 or so
    assert len(firsts.unique()) > 10


def test_the_documented_generators(model: GPT, tokenizer: NanochatTokenizer) -> None:
    engine = Engine(model, tokenizer)
    sequences, masks = engine.generate_batch([1, 2, 3], num_samples=5, max_tokens=6, seed=1)
    assert all(s[:3] == [1, 2, 3] and len(s) == len(m) <= 9 for s, m in zip(sequences, masks, strict=True))
    assert engine.generate_batch([1, 2, 3], num_samples=5, max_tokens=6, seed=1)[0] == sequences
    assert len({tuple(s) for s in sequences}) == 5
    columns = list(engine.generate([1, 2, 3], num_samples=5, max_tokens=6, seed=1))
    assert [column[0] for column, _ in columns][: len(sequences[0]) - 3] == sequences[0][3:]


def test_too_long_requests_are_rejected(model: GPT, tokenizer: NanochatTokenizer) -> None:
    with pytest.raises(ValueError, match="at most 640: lower max_tokens"):
        Engine(model, tokenizer).complete([Request((1,), 640)])


class Scripted(GPT):
    """A model with scripted output, independent of its input."""

    def __init__(self, config: GPTConfig, script: list[int]) -> None:
        super().__init__(config)
        self.script, self.said = script, 0

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.full((*x.shape[:-1], self.config.vocab_size), -50.0)
        out[..., self.script[min(self.said, len(self.script) - 1)]] = 0.0
        self.said += 1
        return out


def test_calculator_results_are_inserted_and_masked(tokenizer: NanochatTokenizer) -> None:
    special = tokenizer.encode_special
    requested = [special("<|python_start|>"), *tokenizer.encode("12+30"), special("<|python_end|>")]
    answer = [special("<|output_start|>"), *tokenizer.encode("42"), special("<|output_end|>")]
    end = special("<|assistant_end|>")
    script = [*requested, *[0] * len(answer), end]  # overrides the model's own tokens
    model = Scripted(GPTConfig(32, tokenizer.get_vocab_size(), 1, 1, 1, 8), script)
    model.init_weights()
    done = Engine(model, tokenizer).complete([Request((1, 2), 30)])[0]
    assert done.tokens == [*requested, *answer, end]
    assert done.mask == [*[1] * len(requested), *[0] * len(answer), 1] and done.finish_reason == "stop"
    model.said = 0
    short = Engine(model, tokenizer).complete([Request((1, 2), len(requested) + 1)])[0]
    assert short.mask == [*[1] * len(requested), 0] and short.finish_reason == "length"
    assert all(Engine(model, tokenizer).find_mask(one.tokens) == one.mask for one in (done, short))


def test_equal_rollouts_do_not_train_on_tool_output(tokenizer: NanochatTokenizer) -> None:
    special = tokenizer.encode_special
    requested = [special("<|python_start|>"), *tokenizer.encode("12+30"), special("<|python_end|>")]
    forced = len(tokenizer.encode("42")) + 2
    model = Scripted(
        GPTConfig(64, tokenizer.get_vocab_size(), 1, 1, 1, 8),
        [*requested, *[0] * forced, special("<|assistant_end|>")],
    )
    model.init_weights()

    async def ask(client: ChatClient) -> list[Rollout]:
        prompt: list[Message] = [{"role": "user", "content": "12+30?"}]
        asked = [client.create(messages=prompt, seed=seed) for seed in range(3)]
        turns = []
        for answer in await asyncio.gather(*asked):
            choice = answer.choices[0]
            logprobs = [entry.logprob for entry in choice.logprobs.content]
            turns.append(Turn(answer.prompt_token_ids, choice.token_ids, logprobs))
        return [Rollout(prompt=prompt, turns=[turn]) for turn in turns]

    with ThreadPoolExecutor(1) as executor:
        client = ChatClient(Engine(model, tokenizer), executor, 30)
        rollouts = asyncio.run(ask(client))
    completion = [*[1.0] * len(requested), *[0.0] * forced, 1.0]
    masks = [sample.loss_mask for sample in group_samples(client, rollouts, 0)]
    assert masks == [[*[0.0] * (len(masks[0]) - len(completion)), *completion]] * 3


def test_turns_have_seeds_of_their_own(tokenizer: NanochatTokenizer) -> None:
    """The engine draws by seed and number of the token: turns of one seed would have the same noise."""
    model = Scripted(
        GPTConfig(64, tokenizer.get_vocab_size(), 1, 1, 1, 8), [tokenizer.encode_special("<|assistant_end|>")]
    )
    model.init_weights()
    again: Message = {"role": "user", "content": "12?"}
    env = PlainEnvironment([{"prompt": [again]}], lambda: 0.0, respond=lambda *_: [again], max_turns=3)
    seeds = []
    for _ in range(2):
        asked: list[int] = []

        class Recorder(ChatClient):
            async def create(self, *, messages: Any, **options: Any) -> Any:
                asked.append(options["seed"])  # noqa: B023 - used before the next round
                return await super().create(messages=messages, **options)

        with ThreadPoolExecutor(1) as executor:
            client = Recorder(Engine(model, tokenizer), executor, 4)
            asyncio.run(run_rollouts(env, client, env.rows()[0], 2, (0, 0), {}))
        seeds.append(asked)
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 6


def test_a_wrong_request_fails_alone(model: GPT, tokenizer: NanochatTokenizer) -> None:
    async def ask(client: ChatClient) -> list[Any]:
        options: list[dict[str, Any]] = [{}, {"max_tokens": 640}, {"max_tokens": -1}, {"extra_body": {"top_k": -1}}]
        asked = [client.create(messages=[{"role": "user", "content": "12?"}], **one) for one in options]
        return await asyncio.gather(*asked, return_exceptions=True)

    with ThreadPoolExecutor(1) as executor:
        good, *others = asyncio.run(ask(ChatClient(Engine(model, tokenizer), executor, 4)))
    assert good.choices[0].token_ids
    words = ("model reads at most 640: lower max_tokens or shorten the prompt", "at least 1 and 0", "at least 1 and 0")
    assert all(text in str(error) for text, error in zip(words, others, strict=True))


@pytest.mark.parametrize("content", ["12 " * 400, None])
def test_letters_of_prompts_that_do_not_fit_are_not_scored(
    model: GPT, tokenizer: NanochatTokenizer, content: str | None
) -> None:
    engine = Engine(model, tokenizer)
    assert letter_is_right(engine, {"prompt": [{"role": "user", "content": "12"}], "answer": "A"}) is not None
    assert letter_is_right(engine, {"prompt": [{"role": "user", "content": content}], "answer": "A"}) is None


class WithErrors:
    """An environment whose reward function fails for every second rollout, with the reward that `verifiers` gives."""

    async def run_group(self, row: Row, client: Any, model: str, sampling: list[Any]) -> list[Rollout]:
        good = Rollout(prompt="", turns=[Turn([1], [2], [-0.5])], reward=1.0)
        bad = Rollout(prompt="", turns=good.turns, reward=1.0, error_type="RewardError", error="KeyError: 'x'")
        return [bad if i % 2 else good for i in range(len(sampling))]


def test_rollouts_whose_reward_function_raised_are_failed(tokenizer: NanochatTokenizer) -> None:
    env: Any = WithErrors()
    engine = Engine(Scripted(GPTConfig(64, tokenizer.get_vocab_size(), 1, 1, 1, 8), [0]), tokenizer)
    client = ChatClient(engine, None)  # type: ignore[arg-type]
    rollouts = asyncio.run(run_rollouts(env, client, {}, 4, (0, 0), {}))
    samples = group_samples(client, rollouts, 0)
    assert [sample.status for sample in samples] == [Status.COMPLETED, Status.FAILED] * 2
    assert samples[1].error == "KeyError: 'x'" and not samples[1].tokens
    scored = asyncio.run(evaluate(env, client, [{}], Ranks(), num_samples=4, seed=0, sampling={}, letters=False))
    summary = summarize_scores(scored)
    assert (summary["accuracy"], summary["reward"], summary["failed"]) == (0.5, 0.5, 0.5)


def test_metrics_of_an_environment_replace_none_of_ours() -> None:
    metrics = {name: [9.0, 9.0] for name in ("accuracy", "reward", "samples", "pass@1", "own")}
    summary = summarize_scores([QuestionScore(0, 1, [1.0, 0.0], [1, 1], metrics)])
    assert (summary["accuracy"], summary["reward"], summary["samples"], summary["pass@1"]) == (0.5, 0.5, 2.0, 0.5)
    assert summary["own"] == 9.0


def test_standard_error_of_accuracy_is_that_of_a_sample() -> None:
    right, wrong = QuestionScore(0, 1, [1.0], [1], {}), QuestionScore(1, 0, [0.0], [1], {})
    assert summarize_scores([right, wrong])["accuracy_se"] == pytest.approx(0.5)
    assert "accuracy_se" not in summarize_scores([right]), "one question tells nothing of others"


@pytest.mark.parametrize(
    ("requested", "answer"),
    [
        ("1+2*3", "7"),
        ("(1,000 - 1)/3", "333.0"),
        ("-2.5*4", "-10.0"),
        ("'strawberry'.count('r')", "3"),
        ('"a,b".count(",")', "1"),
        ("2**9", None),
        ("1/0", None),
        ("9" * 40, None),
        ("__import__('os').system('true')", None),
        ("'a'.upper()", None),
        ("'a'*9", None),
        ("print(1)", None),
        ("1+", None),
        ("(" * 150, None),
        ("True+1", None),
    ],
)
def test_the_calculator(requested: str, answer: str | None) -> None:
    assert use_calculator(requested) == answer
