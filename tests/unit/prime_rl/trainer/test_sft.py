"""SFT: loss masks, data order and training."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loguru import logger
from small_tokenizers import CHATML, build_tokenizer

from prime_rl.inference.adapters import read_adapter
from prime_rl.runtime.tokenizer import load_tokenizer
from prime_rl.trainer.config import SFTConfig
from prime_rl.trainer.models.registry import load_eos_ids
from prime_rl.trainer.optim_config import CosineSchedulerConfig, check_schedule
from prime_rl.trainer.sft import data as sft_data
from prime_rl.trainer.sft.config import SFTDataConfig
from prime_rl.trainer.sft.data import Position, SFTBatches, build_sft_batches, find_eos_ids
from prime_rl.trainer.sft.samples import TokenizationStats, check_data, tokenize_rows
from prime_rl.trainer.sft.train import train
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.datasets.rows import is_hub_resolvable, load_rows
from rollouts.training.datasets.sft import Conversation, read_conversation, render_conversation
from rollouts.training.metrics import load_jsonl
from rollouts.training.steps import complete_steps
from rollouts.training.types import Sample

ROOT = Path(__file__).parents[4]
USER, ANSWER = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("tiny-qwen3")


def tokenize(row: dict[str, Any], tokenizer: Any, vocab_size: int = 320, **data: Any) -> list[Sample]:
    """Samples of one row."""
    return list(tokenize_rows([row], SFTDataConfig(seq_len=512, **data), tokenizer, vocab_size, TokenizationStats()))


def trained_text(sample: Sample, tokenizer: Any) -> list[str]:
    """Text spans with loss."""
    runs: list[list[int]] = [[]]
    for token, mask in zip(sample.tokens, sample.loss_mask, strict=True):
        if mask:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "abc", "completion": "cba"}, ["cba<|im_end|>"]),
        ({"prompt": [USER], "completion": [ANSWER]}, ["ba<|im_end|>"]),
        ({"messages": [{"role": "system", "content": "s"}, USER, ANSWER, USER, ANSWER]}, ["ba<|im_end|>"] * 2),
        ({"prompt": [USER, ANSWER, USER], "completion": "x"}, ["x<|im_end|>"]),  # the answer in the prompt has no loss
        ({"messages": [ANSWER, USER, ANSWER]}, ["ba<|im_end|>"]),  # no prompt precedes the first answer
        ({"messages": [USER, ANSWER, {"role": "tool", "content": "t"}, ANSWER, USER]}, ["ba<|im_end|>"] * 2),
    ],
)
def test_only_assistant_turns_and_their_end_carry_loss(
    row: dict[str, Any], expected: list[str], tokenizer: Any
) -> None:
    [sample] = tokenize(row, tokenizer)
    assert trained_text(sample, tokenizer) == expected
    assert sample.loss_mask[0] == 0 and sample.loss_mask[-1] == 1, "nothing follows the last trained token"
    assert tokenizer.decode(sample.tokens).startswith("<|im_start|>")


def test_special_tokens_in_data_stay_text(tokenizer: Any) -> None:
    [sample] = tokenize({"prompt": "x<|im_end|>\n<|im_start|>assistant\n", "completion": "y"}, tokenizer)
    assert trained_text(sample, tokenizer) == ["y<|im_end|>"]
    assert sample.tokens.count(tokenizer.eos_token_id) == 2


@pytest.mark.parametrize("tail", ["<|endoftext|>", "\n<|endoftext|>", "<|im_start|>assistant\n"])
def test_loss_ends_with_the_first_end_token(tail: str) -> None:
    """Templates of Phi 3, Phi 4 and Llama 3 write more after the last message; turns stay prefix-stable."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
        f"{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% else %}}{tail}{{% endif %}}"
    )
    tokenizer = load_tokenizer("tiny-qwen3", template)
    [sample] = tokenize({"messages": [USER, ANSWER, USER, ANSWER]}, tokenizer)
    assert trained_text(sample, tokenizer) == ["ba<|im_end|>"] * 2


class LetterChat:
    """A character-level template that can rewrite earlier answers."""

    end_ids = frozenset([ord("$")])
    turn_end = [ord("$"), ord("\n")]
    next_turn: dict[str, int] = {}

    def __init__(self, rewrites: bool = False, tail: str = "\n") -> None:
        self.rewrites, self.tail = rewrites, tail

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, add_generation_prompt: bool) -> list[int]:
        parts = []
        for i, message in enumerate(messages):
            is_last = i == len(messages) - 1
            content = message["content"].upper() if self.rewrites and not is_last else message["content"]
            parts.append(f"{message['role'][0]}:{content}${self.tail}")
        return [ord(c) for c in "".join(parts) + ("a:" if add_generation_prompt else "")]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))


def test_template_that_rewrites_turns_is_rejected() -> None:
    messages = [USER, ANSWER, USER, ANSWER]
    assert sum(render_conversation(Conversation(messages), LetterChat()).loss_mask) == 6
    with pytest.raises(ValueError, match=r"row 4 .* not prefix-stable at message 1.* tokenizer\.chat_template"):
        render_conversation(Conversation(messages), LetterChat(rewrites=True), 4)


def test_text_after_the_end_token_belongs_to_the_turn() -> None:
    sample = render_conversation(Conversation([USER, ANSWER]), LetterChat(tail="!"))
    assert [chr(t) for t, m in zip(sample.tokens, sample.loss_mask, strict=True) if m] == list("ba$!")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"text": "a"},
            "row 3 .*columns text.*`messages`, `prompt` and `completion`, .* or `instruction` and `output`",
        ),
        ({"prompt": "a", "completion": 5}, "`completion` is neither text nor a list"),
        ({"messages": [{"content": "a"}]}, "`messages` is neither"),
    ],
)
def test_invalid_rows_are_reported(row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_conversation(row, 3)


def test_mismatched_tokenizer_is_rejected(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.name and model\.name"):
        tokenize({"prompt": "a", "completion": "b"}, tokenizer, vocab_size=40)


def test_row_without_tokens_is_reported() -> None:
    class Silent:
        chat_template, bos_token_id, eos_token_id = None, None, None
        all_special_ids, all_special_tokens = [], []

        def __len__(self) -> int:
            return 0

        def encode(self, text: str, **options: bool) -> list[int]:
            return []

    with pytest.raises(ValueError, match="row 0 of the dataset renders to no token"):
        tokenize({"prompt": "a", "completion": "b"}, Silent())


def test_files_and_directories_are_read(tmp_path: Path) -> None:
    rows = [{"prompt": str(i), "completion": "x"} for i in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    assert load_rows(str(tmp_path / "a.jsonl")) == rows == load_rows(str(tmp_path))
    (tmp_path / "broken.jsonl").write_text('{"prompt": 1}\n{"prompt": \n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "a.yaml").write_text("prompt: x\n")
    for name, words in {
        "broken.jsonl": "line 2 is not valid JSON",
        "empty.jsonl": "holds no rows",
        "a.yaml": "use a file that ends in .jsonl, .json, .csv",
        "none.jsonl": "was not found",
    }.items():
        with pytest.raises(ValueError, match=words):
            load_rows(str(tmp_path / name))


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"])
def test_hub_is_resolvable_by_name_or_by_proxy(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://localhost:1")
    assert is_hub_resolvable()
    monkeypatch.setenv("HF_ENDPOINT", "https://no-such-host.invalid")
    assert not is_hub_resolvable()
    monkeypatch.setenv(variable, "http://proxy:3128")
    assert is_hub_resolvable()


def test_parquet_files_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [{"messages": [USER, ANSWER]}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert load_rows(str(tmp_path / "a.parquet")) == rows


class Lengths:
    """Samples of given lengths, identified by their first token."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    @property
    def sizes(self) -> list[int]:
        return [len(self.lengths)]

    def __len__(self) -> int:
        return len(self.lengths)

    def length(self, index: int) -> int:
        return self.lengths[index]

    def sample(self, index: int) -> Sample:
        n = self.lengths[index]
        return Sample(prompt="", tokens=[index] * n, loss_mask=[1.0] * n, index=index)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=30), st.integers(1, 4), st.booleans(), st.integers(1, 6))
def test_epoch_reads_every_sample_once(lengths: list[int], batch_size: int, shuffle: bool, num_batches: int) -> None:
    def take(position: Position, num: int) -> tuple[list[Sample], Position]:
        batches = SFTBatches(Lengths(lengths), 12, batch_size, shuffle, seed=3)  # a new instance, as after a restart
        out: list[Sample] = []
        for _ in range(num):
            samples, position = batches.take(position)
            assert samples and sum(len(s.tokens) for s in samples) <= 12 * batch_size
            out += samples
        return out, position

    straight, end = take(Position(), num_batches)
    first, middle = take(Position(), num_batches // 2)
    second, resumed_end = take(middle, num_batches - num_batches // 2)
    assert [s.index for s in straight] == [s.index for s in first + second] and end == resumed_end
    for start in range(0, len(straight) - len(lengths) + 1, len(lengths)):
        epoch = [s.index for s in straight[start : start + len(lengths)]]
        assert sorted(epoch) == list(range(len(lengths))), "whole samples, none lost or doubled"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=30),
    st.integers(1, 4),
    st.integers(1, 3),
    st.booleans(),
)
def test_num_epochs_are_as_many_steps_as_they_fill(
    lengths: list[int], batch_size: int, num_epochs: int, stack: bool
) -> None:
    batches, position = SFTBatches(Lengths(lengths), 12, batch_size, True, seed=3, stack=stack), Position()
    taken: list[Sample] = []
    num_steps, positions = 0, []
    while len(taken) < num_epochs * len(lengths):
        positions.append(position)
        samples, position = batches.take(position)
        taken, num_steps = taken + samples, num_steps + 1
    assert batches.count_steps(num_epochs) == num_steps
    assert [batches.count_steps(num_epochs, start) for start in positions] == list(range(num_steps, 0, -1))


def test_num_epochs_are_completed_with_another_batch_size(tmp_path: Path) -> None:
    """12 conversations: 2 steps of 4, then 1 of 4 becomes 2 of 2."""
    rows = "".join(json.dumps({"prompt": "a", "completion": c}) + "\n" for c in "bcdefghijklm")
    (tmp_path / "rows.jsonl").write_text(rows)
    data = {"name": str(tmp_path / "rows.jsonl"), "seq_len": 32, "batch_size": 4, "pack_function": "stack"}
    train(make_config(tmp_path / "out", data, max_steps=2, ckpt={}))
    changes = {"max_steps": None, "num_epochs": 1, "ckpt": {}, "resume": True}
    train(make_config(tmp_path / "out", data | {"batch_size": 2}, **changes))
    metrics = [row for row in load_jsonl(tmp_path / "out/metrics.jsonl") if "loss/mean" in row]
    assert [row["progress/num_samples"] for row in metrics] == [4, 8, 10, 12]


def test_epochs_differ_in_order_and_overlong_samples_are_counted() -> None:
    batches = SFTBatches(Lengths([3] * 20 + [99]), 6, 10, True, seed=0)
    assert [batches.order(0).at(i) for i in range(21)] != [batches.order(1).at(i) for i in range(21)]
    samples, position = batches.take(Position())
    _, position = batches.take(position)
    assert len(samples) == 20 and position.num_overlong == 2 and position.epoch == 2 - (position.offset > 0)
    with pytest.raises(ValueError, match=r"data\.seq_len = 6"):
        SFTBatches(Lengths([7, 8]), 6, 1, True, seed=0).take(Position())


def make_config(output_dir: Path, data: dict[str, Any], **changes: Any) -> SFTConfig:
    values = {
        "model": {"name": "tiny-qwen3", "debug": {"random_init": True}},
        "optim": {"lr": 3e-3},
        "data": data,
        "output_dir": output_dir,
        "log": {"file": False},
        "max_steps": 12,
    }
    return SFTConfig.model_validate({**values, **changes})


def test_training_reduces_loss_and_publishes_template(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "abc", "completion": "cba"}) + "\n")
    template = (ROOT / "src/prime_rl/assets/tiny-qwen3/chat_template.jinja").read_text() + "{# mine #}"
    (tmp_path / "mine.jinja").write_text(template)
    data = {"name": str(tmp_path / "rows.jsonl"), "seq_len": 32, "batch_size": 4}
    config = make_config(tmp_path, data, tokenizer={"chat_template": str(tmp_path / "mine.jinja")})
    assert train(config) == 0
    losses = [row["loss/mean"] for row in load_jsonl(tmp_path / "metrics.jsonl") if "loss/mean" in row]
    assert len(losses) == 12 and losses[-1] < losses[0] / 3
    assert complete_steps(tmp_path / "weights") == [12]
    assert (tmp_path / "weights/step_12/chat_template.jinja").read_text() == template
    assert load_tokenizer(str(tmp_path / "weights/step_12")).chat_template == template


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_published_weights_end_as_the_trained_turns_do(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    """A base model names the end of a document only; those of its generation settings that stay are kept."""
    base = shutil.copytree(ROOT / "src/prime_rl/assets/tiny-qwen3", tmp_path / "base")
    generation = {"eos_token_id": 256, "temperature": 0.5}
    (base / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "abc", "completion": "cba"}) + "\n")
    data = {"name": str(tmp_path / "rows.jsonl"), "seq_len": 32, "batch_size": 4}
    model = {"name": str(base), "debug": {"random_init": True}, "lora": lora}
    train(make_config(tmp_path, data, max_steps=1, model=model))
    published = tmp_path / "weights/step_1"
    [end] = load_tokenizer(str(base)).encode("<|im_end|>")
    assert json.loads((published / "generation_config.json").read_text()) == generation | {"eos_token_id": [256, end]}
    if lora is not None:
        assert read_adapter(published)[1].eos_ids == {256, end}


def test_models_with_the_trained_end_token_keep_theirs(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 258}')
    assert find_eos_ids(tokenizer, tmp_path) == []
    (tmp_path / "config.json").write_text('{"eos_token_id": 256}')
    assert find_eos_ids(tokenizer, tmp_path) == [256, 258]


def test_end_tokens_are_those_of_another_tokenizer(tmp_path: Path, tokenizer: Any) -> None:
    model, name = ROOT / "src/prime_rl/assets/tiny-qwen3", str(tmp_path / "other")
    assert load_eos_ids(model) == [258, 256] and find_eos_ids(tokenizer, model, name) == []
    other = build_tokenizer(tmp_path / "other", CHATML, ["<|im_end|>", "<|im_start|>", "<x>"], [], {})
    assert other.convert_tokens_to_ids(["<|im_end|>", "<x>"]) == [256, 258]
    assert find_eos_ids(other, model, name) == [256]


@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_a_template_without_an_end_token_warns(end: str, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "\n{% endfor %}"
    lines: list[str] = []
    handler = logger.add(lambda message: lines.append(str(message)))
    sft_data.build_tokenizer(make_config(tmp_path, {"name": "rows.jsonl"}, tokenizer={"chat_template": template}))
    logger.remove(handler)
    assert ("Answers are trained without an end token: the chat template of tiny-qwen3" in "".join(lines)) != bool(end)


def test_loss_is_a_token_mean(tmp_path: Path) -> None:
    """The loss of a long and a short answer is the mean over all tokens, independent of packing."""
    rows = [{"prompt": "a", "completion": "b" * 20}, {"prompt": "a", "completion": "c"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses = []
    for name, micro_bs in (("one", 1), ("two", 8)):
        data = {"name": str(tmp_path / "rows.jsonl"), "seq_len": 26, "batch_size": 2, "shuffle": False}
        train(make_config(tmp_path / name, data, max_steps=1, micro_bs=micro_bs))
        [row] = [r for r in load_jsonl(tmp_path / name / "metrics.jsonl") if "loss/mean" in r]
        losses.append(row["loss/mean"])
        assert row["batch/micro_batches"] == (2 if micro_bs == 1 else 1) and row["batch/samples"] == 2
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_weights_are_published_with_checkpoints_too(tmp_path: Path) -> None:
    data = {"type": "fake", "seq_len": 16, "batch_size": 2}
    train(make_config(tmp_path, data, max_steps=5, ckpt={"interval": 2}))
    assert complete_steps(tmp_path / "weights") == [2, 4, 5] == complete_steps(tmp_path / "checkpoints", ("trainer",))


def test_num_epochs_set_schedule_and_last_step(tmp_path: Path) -> None:
    """10 conversations, one per row, in batches of 4, twice: 5 steps; 3 epochs resume as if planned from the start."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": "a", "completion": c}) + "\n" for c in "bcdefghijk")
    )
    data = {"name": str(tmp_path / "rows.jsonl"), "seq_len": 32, "batch_size": 4, "pack_function": "stack"}
    changes = {"max_steps": None, "num_epochs": 2, "ckpt": {}}
    train(
        make_config(tmp_path / "out", data, scheduler={"type": "cosine", "warmup_steps": 1, "min_lr": 1e-4}, **changes)
    )
    rows = [row for row in load_jsonl(tmp_path / "out/metrics.jsonl") if "loss/mean" in row]
    assert len(rows) == 5 and rows[-1]["optim/lr"] == pytest.approx(1e-4)
    assert rows[-1]["progress/num_samples"] == 20 and complete_steps(tmp_path / "out/weights") == [5]
    train(make_config(tmp_path / "out", data, **changes | {"num_epochs": 3, "resume": True, "ckpt": None}))
    train(make_config(tmp_path / "straight", data, **changes | {"num_epochs": 3}))
    assert complete_steps(tmp_path / "out/weights") == [5, 8] and complete_steps(tmp_path / "straight/weights") == [8]


def test_num_epochs_of_a_new_stage_count_from_its_start(tmp_path: Path) -> None:
    """10 conversations in batches of 4: 3 steps, and 3 of a new stage, which has 20 - 12 left for a second epoch."""
    text = "".join(json.dumps({"prompt": "a", "completion": c}) + "\n" for c in "bcdefghijk")
    (tmp_path / "rows.jsonl").write_text(text)
    data = {"name": str(tmp_path / "rows.jsonl"), "seq_len": 32, "batch_size": 4, "pack_function": "stack"}
    for num_epochs, ckpt, steps in (
        (1, {}, [3]),
        (1, {"resume_step": 3, "skip_progress": True}, [3]),
        (1, {"resume_step": -1}, [3]),
        (2, {"resume_step": -1}, [3, 5]),
    ):
        train(make_config(tmp_path / "out", data, max_steps=None, num_epochs=num_epochs, ckpt=ckpt))
        assert complete_steps(tmp_path / "out/weights") == steps
    metrics = [row for row in load_jsonl(tmp_path / "out/metrics.jsonl") if "loss/mean" in row]
    assert [row["progress/num_samples"] for row in metrics] == [*range(4, 25, 4), 28, 32]


def test_num_epochs_settings_are_checked(tmp_path: Path) -> None:
    data = {"type": "fake", "seq_len": 16, "batch_size": 512}  # 1024 rows: 2 steps
    with pytest.raises(ValueError, match="num_epochs 1 and max_steps 12 both end the run"):
        make_config(tmp_path, data, num_epochs=1)
    config = make_config(tmp_path, data, max_steps=None, num_epochs=1, scheduler={"type": "linear"})
    with pytest.raises(
        ValueError, match=r"warmup_steps 10 and decay_steps 10 do not fit into num_epochs 1 \(2 steps\)"
    ):
        train(config)
    with pytest.raises(ValueError, match="warmup_steps 2 do not fit into num_epochs 1"):
        check_schedule(CosineSchedulerConfig(warmup_steps=2), 2, "num_epochs 1")


@pytest.mark.parametrize(
    ("argv", "is_noted"),
    [
        ([], True),
        (["--ckpt.keep", "1"], True),
        (["--max-steps", "3"], False),
        (["--num-epochs", "1"], False),
        (["--ckpt.interval", "9"], False),
        (["--bench"], False),
    ],
)
def test_a_run_that_saves_nothing_is_noted(argv: list[str], is_noted: bool) -> None:
    config, _ = parse_argv(SFTConfig, argv, "sft", environ={})
    assert any("saves nothing: set num_epochs or max_steps" in note for note in config.notes) == is_noted


def test_fake_lengths(tmp_path: Path) -> None:
    for length, expected in (("fixed", {16}), ("variable", set(range(2, 17)))):
        config = make_config(tmp_path, {"type": "fake", "length": length, "seq_len": 16, "batch_size": 64})
        samples, _ = build_sft_batches(config, 320, None).take(Position())
        assert {len(s.tokens) for s in samples} == expected


def test_debug_config_runs_five_fake_steps() -> None:
    config, _ = parse_argv(SFTConfig, ["@", str(ROOT / "configs/debug/sft/train.toml")], "sft", environ={})
    assert config.max_steps == 5 and config.data.type == "fake"


def test_text_is_trained_whole(tokenizer: Any) -> None:
    [sample] = tokenize({"text": "abc"}, tokenizer)
    assert trained_text(sample, tokenizer) == ["abc<|im_end|>"]
    assert tokenize({"text": ""}, tokenizer) == []


@pytest.mark.parametrize(
    ("prompt", "completion", "tokens"),
    [
        ("a:", " b", ["<s>", "▁a", ":", "▁b"]),
        ("a", "b\n", ["<s>", "▁a", "b", "\n"]),
        ("ab", "cb", ["<s>", "▁a", "b", "c", "b"]),  # the whole text has the token bc
        ("", "ab", ["<s>", "▁a", "b"]),
    ],
)
def test_completions_do_not_begin_with_an_added_space(prompt: str, completion: str, tokens: list[str]) -> None:
    from tokenizers import Tokenizer, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    merges = [("▁", "a"), ("▁", "b"), ("▁", "c"), ("b", "c")]
    words = ["<s>", "▁", "\n", ":", "a", "b", "c", *map("".join, merges)]
    model = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    llama2: Any = PreTrainedTokenizerFast(tokenizer_object=model)
    [sample] = tokenize({"prompt": prompt, "completion": completion}, llama2)
    assert llama2.convert_ids_to_tokens(sample.tokens) == tokens
    assert sample.loss_mask.index(1) == len(llama2.encode(prompt))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"prompt": "a", "completion": "b"}\n{"input": "a"}\n', "row 1 of the data set has the columns input"),
        ('{"messages": [{"role": "robot", "content": "x"}]}\n', r"row 0 .*role is 'robot'"),
        ("", "holds no rows"),
        ('{"prompt": "a", "completion": "\\ud83d"}\n', "row 0 .*is not valid Unicode"),
    ],
)
def test_data_are_checked_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(rows)
    monkeypatch.setattr("prime_rl.trainer.run.start_backend", lambda *_, **__: pytest.fail("the model was loaded"))
    for data in (
        {"data": {"name": str(path)}},
        {"val": {"name": str(path)}, "data": {"name": str(ROOT / "examples/reverse_text/tiny/sft.jsonl")}},
    ):
        config = SFTConfig.model_validate({"model": {"name": "tiny-qwen3"}, "output_dir": tmp_path / "out", **data})
        with pytest.raises(ValueError, match=message) as caught:
            train(config)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("prompt", "completion"), [("prompt", "completion"), ("question", "answer")])
def test_system_is_text_without_a_chat_template(prompt: str, completion: str, tokenizer: Any) -> None:
    plain = copy.copy(tokenizer)
    plain.chat_template = None
    for system, expected in (("Be brief.", "Be brief.\n\n2+2="), (None, "2+2=")):
        [sample] = tokenize({"system": system, prompt: "2+2=", completion: " 4"}, plain)
        assert plain.decode(sample.tokens) == f"{expected} 4<|im_end|>"
        assert trained_text(sample, plain) == [" 4<|im_end|>"]


def test_missing_template_is_found_before_the_model_is_loaded(tmp_path: Path, tokenizer: Any) -> None:
    rows = {"messages.jsonl": {"messages": [USER, ANSWER]}, "text.jsonl": {"prompt": "a", "completion": "b"}}
    for name, row in rows.items():
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    plain = copy.copy(tokenizer)
    plain.chat_template = None
    check_data(SFTDataConfig(name=str(tmp_path / "text.jsonl")), plain)
    with pytest.raises(ValueError, match=r"row 0 .*the model has no chat template"):
        check_data(SFTDataConfig(name=str(tmp_path / "messages.jsonl")), plain)
