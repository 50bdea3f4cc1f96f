"""Arguments of scripts.prime_rl_train: documented spellings, files, defaults and their resolution."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.prime_rl_config import PrimeRLTrainConfig, Resolved, normalize_argv, parse_arguments
from scripts.prime_rl_train import learning_rate_factor

from prime_rl.configuration.errors import ConfigError

ROOT = Path(__file__).parents[3]
DOCUMENTED = {
    "run": "prime_rl_default",
    "source": "sft",
    "device_batch_size": 8,
    "examples_per_step": 16,
    "num_samples": 16,
    "max_new_tokens": 256,
    "temperature": 1.0,
    "top_k": 50,
    "unembedding_lr": 0.004,
    "embedding_lr": 0.2,
    "matrix_lr": 0.02,
    "weight_decay": 0.0,
    "num_epochs": 1,
    "save_every": 60,
    "eval_every": 60,
}


def parse(*argv: str, num_ranks: int = 1, **environ: str) -> Resolved:
    return parse_arguments(argv, num_ranks, environ)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # without a .env


def test_defaults_are_the_documented_table() -> None:
    config = parse().config
    assert {name: getattr(config, name) for name in DOCUMENTED} == DOCUMENTED


@pytest.mark.parametrize(
    "argv",
    [
        ["--run=x", "--num_train_examples=5000", "--learning_rate=1e-4", "--num_samples=32", "--eval_every=50"],
        [
            "--run",
            "x",
            "--num-train-examples",
            "5000",
            "--learning-rate",
            "1e-4",
            "--num-samples",
            "32",
            "--eval-every=50",
        ],
        ["--", "--run=x", "--num_train_examples=5000", "--learning_rate=1e-4", "--num_samples=32", "--eval_every=50"],
    ],
)
def test_both_spellings_and_torchruns_separator(argv: list[str]) -> None:
    config = parse(*argv).config
    assert (config.run, config.num_train_examples, config.num_samples, config.eval_every) == ("x", 5000, 32, 50)
    assert (config.matrix_lr, config.embedding_lr, config.unembedding_lr) == pytest.approx((1e-4, 1e-3, 2e-5))
    assert config.init_lr_frac == 1.0


@pytest.mark.parametrize(
    "words", [["--config", "F"], ["--config=F"], ["F"], ["@", "F"], ["@F"], ["--", "--config", "F"]]
)
def test_a_file_may_be_named_in_every_way(words: list[str]) -> None:
    path = str(ROOT / "configs/prime_rl/small_scale.toml")
    config = parse(*[word.replace("F", path) for word in words], "--run=mine").config
    assert (config.num_train_examples, config.max_steps, config.num_samples, config.run) == (500, 100, 4, "mine")
    assert normalize_argv(["--run=a"]) == ["--run=a"]


@pytest.mark.parametrize(
    ("name", "ranks", "sizes"),
    [
        ("default", 1, (2000, 400, 8, 2, 2e-5)),
        ("small_scale", 1, (500, 100, 4, 1, 2e-5)),
        ("distributed", 8, (10000, 1000, 16, 16, 5e-5)),
        ("full_dataset", 1, (-1, 2000, 12, 3, 3e-5)),
    ],
)
def test_the_shipped_files_have_the_documented_sizes(name: str, ranks: int, sizes: tuple[float, ...]) -> None:
    resolved = parse("--config", str(ROOT / f"configs/prime_rl/{name}.toml"), num_ranks=ranks)
    c = resolved.config
    assert (c.num_train_examples, c.max_steps, c.num_samples, c.examples_per_step, c.matrix_lr) == sizes
    assert resolved.env_args["num_train_examples"] == sizes[0] and c.run == c.trainer.args.run_name
    assert bool(resolved.notes) == (name == "full_dataset"), "12 does not divide 32, which is noted"


def test_the_tiny_example_is_read() -> None:
    resolved = parse("@", str(ROOT / "examples/nanochat/tiny/prime_rl.toml"))
    assert not resolved.notes and resolved.env_args["short"] is True and resolved.config.max_steps == 30


def test_precedence_cli_file_environment_env_file(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("WANDB_PROJECT=dotted\nWANDB_ENTITY='me'\n")
    (tmp_path / "f.toml").write_text('[wandb]\nproject = "filed"\n')
    assert parse().config.wandb_project == "dotted" and parse().config.wandb_entity == "me"
    assert parse(WANDB_PROJECT="set").config.wandb_project == "set"
    assert parse("f.toml", WANDB_PROJECT="set").config.wandb_project == "filed"
    assert parse("f.toml", "--wandb_project=typed", WANDB_PROJECT="set").config.wandb_project == "typed"
    resolved = parse("f.toml", PRIME_INTELLECT_ENV_ID="me/mine")
    assert resolved.config.env_id == "me/mine" and resolved.sources["wandb_project"].startswith("f.toml")


@pytest.mark.parametrize(
    ("text", "argv", "values"),
    [
        (
            "matrix_lr = 0.5\ninit_lr_frac = 0.1\nunembedding_lr = 0.3",
            ["--learning_rate=1e-4", "--unembedding_lr=0.2"],
            {"matrix_lr": 1e-4, "embedding_lr": 1e-3, "unembedding_lr": 0.2, "init_lr_frac": 1.0},
        ),
        ("matrix_lr = 0.5\n[trainer.args]\nlearning_rate = 0.1", [], {"matrix_lr": 0.5, "embedding_lr": 1.0}),
        ("max_steps = 30", ["--trainer.args.max_steps=5"], {"max_steps": 5}),
        ("max_steps = 30\n[trainer.args]\nmax_steps = 20", [], {"max_steps": 30}),
        ("num_eval_examples = 400", ["--env.args", "num_eval_examples=10"], {"num_eval_examples": 10}),
        ('[trainer.args]\nrun_name = "a"', ["--wandb.name=b"], {"run": "b"}),
        ("examples_per_step = 9", ["--trainer.args.per_device_train_batch_size=32"], {"examples_per_step": 2}),
        (
            'source = "mid"\nmodel_tag = "d20"',
            ["--model=nanochat-rl:d32@7"],
            {"source": "rl", "model_tag": "d32", "step": 7},
        ),
        ('model = "nanochat-sft:d32@500"', ["--model_tag=d20"], {"source": "sft", "model_tag": "d20", "step": None}),
        ('model = "nanochat-sft@500"', ["--model_tag=d20"], {"source": "sft", "model_tag": "d20", "step": 500}),
    ],
)
def test_the_higher_source_wins_whatever_the_name(
    text: str, argv: list[str], values: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "f.toml").write_text(text)
    config = parse("f.toml", *argv).config
    assert {name: getattr(config, name) for name in values} == pytest.approx(values)


def test_values_that_another_source_replaced_are_not_shown(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(
        'model = "nanochat-sft:d32"\n[trainer.args]\nmax_steps = 20\n[env.args]\nshort = true\nseed = 1\n'
    )
    lines = parse("f.toml", "--max_steps=5", "--model_tag=d20", "--seed=2").describe().splitlines()
    shown = {line.split("  (")[0].strip() for line in lines}
    assert shown >= {"max_steps = 5", "model_tag = 'd20'", "env.args.short = True", "env.args.seed = 2"}
    assert not any(old in line for line in lines for old in ("d32", "max_steps=20", "'seed': 1"))


def test_files_win_over_variables_whatever_the_name(tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text("[trainer.args]\nmax_steps = 20\n")
    assert parse("f.toml", PRIME_MAX_STEPS="5").config.max_steps == 20
    assert parse(PRIME_MAX_STEPS="5").config.max_steps == 5
    assert parse(PRIME_WANDB_PROJECT="a", WANDB_PROJECT="b").config.wandb_project == "a"


def test_sample_counts_are_passed_to_the_environment() -> None:
    assert parse().env_args == {"num_train_examples": 2000, "num_eval_examples": 254, "seed": 42}
    assert parse("--env_id=other", "--seed=3").env_args == {"seed": 3}
    assert parse("--env_id=other", "--env.args", "n=1").env_args == {"n": 1}
    none = parse("--env.args", '{"seed": null, "num_train_examples": null}', "--num_train_examples=5").env_args
    assert none == {"num_train_examples": 5, "num_eval_examples": 254, "seed": None}


def test_seed_and_counts_are_passed_where_they_are_taken(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def load_environment(n=1, *, seed=0): ...\ndef load_any(**options): ...\ndef load_none(): ...\n"
    )
    given = ("--seed=3", "--num_eval_examples=0")
    assert parse("--env_id=./own.py", *given).env_args == {"seed": 3}
    assert parse("--env_id=./own.py:load_any", *given).env_args == {"seed": 3, "num_eval_examples": 0}
    assert parse("--env_id=./own.py:load_none", *given).env_args == {}
    assert parse("--env_id=./own.py:load_none", "--num_eval_examples=9").env_args == {"num_eval_examples": 9}, "refused"
    (tmp_path / "f.toml").write_text("[env]\nid = './own.py'\n[env.args]\nnum_eval_examples = 5\n")
    assert parse("f.toml").env_args == {"num_eval_examples": 5}, "refused, too"


def test_a_run_without_held_out_questions_has_no_evaluation() -> None:
    assert parse().has_evaluation and parse("--env_id=other", "--env.args", "eval_split=None").has_evaluation
    assert not parse("--num_eval_examples=0").has_evaluation
    assert not parse("--env.args", "eval_split=None").has_evaluation


def test_a_model_is_named_with_its_tag_and_step(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('model = "nanochat-mid:d20@500"\n')
    config = parse("m.toml").config
    assert (config.source, config.model_tag, config.step) == ("mid", "d20", 500)
    assert parse("m.toml", "--source=base").config.source == "base"


@pytest.mark.parametrize(
    ("argv", "output"),
    [
        (["--num_sample=3"], "num_samples"),
        (["--objective=grop"], "'grop' is unknown: set --objective to one of aipo, .*, grpo, (?!.*sdpo)"),
        (["--objective=sdpo"], "'sdpo' needs a teacher, which only rl has: set --objective to one of aipo"),
        (["--clip=0.2"], "clip has no effect"),
        (["--use_verifiers_env=False"], "always go through the environment"),
        (["--distributed.find-unused-parameters"], "gradients travel in one message"),
        (["--model=gpt2"], "nanochat-SOURCE"),
        (["--num_samples=0"], "num_samples"),
        (["--dtype=float16"], "dtype"),
    ],
)
def test_mistakes_are_reported_with_a_fix(argv: list[str], output: str) -> None:
    with pytest.raises(ConfigError, match=output):
        parse(*argv)


@pytest.mark.parametrize(
    "line",
    [
        "max_steps = -1",
        "eval_steps = 0",
        "save_steps = -1",
        "logging_steps = 0",
        "temperature = 0",
        "top_k = -1",
        "learning_rate = -1.0",
        "max_new_tokens = 0",
        "warmup_steps = -5",
        "weight_decay = -0.1",
        "max_grad_norm = 0.0",
        "rollouts_per_example = 0",
        "per_device_train_batch_size = 0",
        "gradient_accumulation_steps = 0",
        "gradient_accumulation_steps = 4",
    ],
)
def test_values_of_files_have_the_bounds_of_options(line: str, tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(f"[trainer.args]\n{line}\n")
    with pytest.raises(ConfigError, match=f"trainer.args.{line.split()[0]}"):
        parse("f.toml")


@pytest.mark.parametrize("value", ["inf", "2026-01-01", "{ a = [nan] }"])
def test_arguments_that_no_checkpoint_can_hold_are_refused(value: str, tmp_path: Path) -> None:
    (tmp_path / "f.toml").write_text(f"[env.args]\nlimit = {value}\n")
    with pytest.raises(ConfigError, match=r"env\.args\.limit = .* cannot be saved with checkpoints: use text"):
        parse("f.toml")


def test_objectives_are_rows_with_options_over_them() -> None:
    assert parse().objective.name == "reinforce" and parse().objective.advantage.baseline == "mean"
    assert parse("--async_level=1").objective.name == "aipo"
    changed = parse("--objective=grpo", "--clip=0.1", "--baseline=leave_one_out", "--kl_coef=0.01").objective
    assert (changed.clip_low, changed.clip_high, changed.kl_coef) == (0.1, 0.1, 0.01)
    assert changed.advantage.baseline == "leave_one_out" and changed.advantage.std == "group"
    assert parse("--objective=grpo", "--no-advantage-std").objective.advantage.std == "none"
    assert parse("--objective=dr_grpo", "--max_new_tokens=9").objective.max_tokens == 9
    assert "keeps groups of equal rewards and has no overlong penalty" in parse("--objective=dapo").notes[0]
    assert not parse("--objective=grpo").notes


def test_learning_rate_warms_up_and_decays_to_zero() -> None:
    config = PrimeRLTrainConfig(init_lr_frac=0.5, warmup_steps=2)
    factors = [learning_rate_factor(step, config=config, num_steps=4) for step in range(1, 5)]
    assert factors == pytest.approx([0.5 * 0.5, 0.5 * 0.75, 0.5 * 0.5, 0.5 * 0.25])
