"""The config of `rl`: shared keys reach every process, conflicts are rejected by name, every TOML file parses."""

from __future__ import annotations

import copy
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_rl.config import RLConfig
from prime_rl.config_sharing import SHARED_KEYS, TRACKERS
from prime_rl.configuration.errors import ConfigError
from prime_rl.inference.config import InferenceConfig
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.trainer.config import TrainConfig
from prime_rl.utils.pydantic_config import parse_argv, parse_settings, write_config, write_record
from rollouts.training.objectives import PRESETS

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ports in use on this machine have no effect."""
    monkeypatch.setattr("prime_rl.config_sharing.check_port_free", lambda host, port: None)


def parse(*argv: str, **environ: str) -> RLConfig:
    return parse_argv(RLConfig, argv, "rl", environ)[0]


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def lookup(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


# The table

VALUES = {
    "model.name": "some/dir", "model.debug.random_init": True, "model.debug.num_layers": 1, "model.debug.seed": 3,
    "max_steps": 5, "max_async_level": 0, "seq_len": 99, "seed": 7, "output_dir": Path("elsewhere"),
    "transport.type": "zmq", "transport.host": "far", "transport.port": 6000,
    "weight_broadcast.type": "gloo", "weight_broadcast.host": "far", "weight_broadcast.port": 6001,
    "weight_broadcast.timeout": 5, "weight_broadcast.delta": True, "weight_broadcast.anchor_interval": 3,
    "ckpt.interval": 4, "ckpt.resume_step": -1, "ckpt.keep": 2,
    "wandb.enabled": False, "wandb.project": "p", "wandb.entity": "e", "wandb.offline": True, "wandb.group": "g",
    "wandb.tags": ["t"], "wandb.log_extras.samples": False, "wandb.log_extras.distributions": False,
    "wandb.log_extras.interval": 3, "wandb.log_extras.max_samples": 4, "tensorboard.enabled": False,
    "trackio.enabled": False, "trackio.project": "p", "trackio.name": "n", "trackio.space_id": "me/runs",
    "prometheus.enabled": False, "log.level": "debug", "log.file": False,
}  # fmt: skip


def spell(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("row", SHARED_KEYS, ids=lambda row: row.key)
def test_a_shared_key_reaches_every_process(row: Any) -> None:
    value = VALUES[row.key]
    config, sources = parse_argv(RLConfig, [f"--{row.key}", spell(value)], "rl", {})
    for key in (row.key, *row.targets):
        assert lookup(config, key) == value, key
    assert lookup(RLConfig(), row.key.split(".")[0]) is None or lookup(RLConfig(), row.key) != value
    assert {sources[key] for key in row.targets} == {f"shared key {row.key}"}


@pytest.mark.parametrize("row", [row for row in SHARED_KEYS if row.must_agree], ids=lambda row: row.key)
def test_value_for_one_process_applies_to_all(row: Any, tmp_path: Path) -> None:
    value = VALUES[row.key]
    for target in row.targets:
        config = parse(f"--{target}", spell(value))
        assert all(lookup(config, key) == value for key in (row.key, *row.targets))


@pytest.mark.parametrize("row", SHARED_KEYS, ids=lambda row: row.key)
def test_contradictions_name_both_keys(row: Any) -> None:
    other = {bool: lambda v: not v, int: lambda v: v + 1}.get(
        type(VALUES[row.key]), lambda v: "filesystem" if row.key.endswith(".type") else "other"
    )
    for target in row.targets:
        argv = [f"--{row.key}", spell(VALUES[row.key]), f"--{target}", spell(other(VALUES[row.key]))]
        with pytest.raises(ConfigError) as error:
            parse(*argv)
        assert row.key in str(error.value) and target in str(error.value) and "disagree" in str(error.value)
        assert str(error.value).count("\n") <= 2


def test_defaults_agree_everywhere() -> None:
    config = parse()
    for row in SHARED_KEYS:
        if row.must_agree and not row.key.startswith("ckpt."):
            assert len({str(lookup(config, key)) for key in (row.key, *row.targets)}) == 1, row.key
    assert config.max_async_level == 2 and config.output_dir == Path("outputs")
    assert (
        config.ckpt is config.trainer.ckpt is config.orchestrator.ckpt is config.wandb is config.trainer.wandb is None
    )


def test_no_dead_shared_keys() -> None:
    """Every key of `rl` that is not a process goes somewhere: through the table, or it is read by the launcher."""
    shared = {row.key.split(".")[0] for row in SHARED_KEYS}
    files = [ROOT / "src/prime_rl/rl.py", *(ROOT / "src/prime_rl/launcher").glob("*.py")]
    launcher = "".join(path.read_text() for path in files)
    dead = [name for name in RLConfig.model_fields if name not in shared and f"config.{name}" not in launcher]
    assert not dead, f"nothing reads these keys of rl: {dead}"


def test_learning_rate_default_and_warning_name_the_key() -> None:
    config = parse("--trainer.model.lora")
    assert config.trainer.optim.lr == pytest.approx(1e-4)
    assert config.provenance["trainer.optim.lr"] == "default with LoRA"
    config = parse("--trainer.model.lora", "--trainer.optim.lr", "1e-5")
    assert any(line.startswith("warning: trainer.optim.lr = 1e-05") for line in config.notes)


# Files for the processes


def test_three_files_make_one_run(tmp_path: Path) -> None:
    trainer = "max_steps = 6\n[model]\nname = 'm'\n[optim]\nlr = 0.5\n[data.fake]"
    argv = [
        "--trainer", "@", write(tmp_path / "t.toml", trainer),
        "--orchestrator", "@", write(tmp_path / "o.toml", "batch_size = 8\nrollouts_per_example = 4\nmax_steps = 6"),
        "--inference", "@", write(tmp_path / "i.toml", "[server]\nport = 8123"),
    ]  # fmt: skip
    config = parse(*argv)
    assert config.max_steps == 6 and config.trainer.optim.lr == 0.5
    assert config.inference is not None and config.inference.model.name == config.orchestrator.model.name == "m"
    assert config.orchestrator.client.base_url == ["http://127.0.0.1:8123/v1"]
    assert config.trainer.data.fake is None
    (note,) = config.notes
    assert "trainer.data.fake" in note and f"{tmp_path}/t.toml:6" in note


def test_an_option_wins_over_the_files_of_processes(tmp_path: Path) -> None:
    files = ["--trainer", "@", write(tmp_path / "t.toml", "max_steps = 6\n[ckpt]\ninterval = 2")]
    config = parse(*files, "--max-steps", "3", "--no-ckpt")
    assert config.max_steps == config.trainer.max_steps == config.orchestrator.max_steps == 3
    assert config.ckpt is config.trainer.ckpt is config.orchestrator.ckpt is None
    assert sum("replaces" in note for note in config.notes) == 2
    with pytest.raises(ConfigError, match=r"t\.toml:1"):
        parse(*files, PRIME_MAX_STEPS="4")


def test_settings_of_train_win_over_the_files_of_processes(tmp_path: Path) -> None:
    recorded = tmp_path / "rl.toml"
    write_config(parse("--max-steps", "100", "--output-dir", "old"), recorded)
    settings = {"max_steps": 20, "output_dir": "new", "ckpt.interval": 5}
    config = parse_settings(RLConfig, settings, "train", [str(recorded)])
    assert config.max_steps == config.trainer.max_steps == config.orchestrator.max_steps == 20
    assert config.inference and config.inference.output_dir == config.trainer.output_dir == Path("new")
    assert config.trainer.ckpt and config.trainer.ckpt.interval == 5


def test_a_key_of_a_section_replaces_one_that_is_off(tmp_path: Path) -> None:
    recorded = tmp_path / "rl.toml"
    write_config(parse(), recorded)
    config = parse("@", str(recorded), "--ckpt.interval", "10")
    assert config.ckpt and config.trainer.ckpt and config.orchestrator.ckpt
    assert config.ckpt.interval == config.trainer.ckpt.interval == config.orchestrator.ckpt.interval == 10
    assert any(note.startswith("note: ckpt = on (CLI) replaces") for note in config.notes)


@pytest.mark.parametrize("argv", [["--ckpt"], ["--trainer.ckpt"], ["--orchestrator.ckpt.interval", "3"]])
def test_checkpoints_are_for_both_or_none(argv: list[str]) -> None:
    config = parse(*argv)
    assert config.ckpt and config.trainer.ckpt and config.orchestrator.ckpt
    assert config.trainer.ckpt.interval == config.orchestrator.ckpt.interval == config.ckpt.interval
    with pytest.raises(ConfigError, match=r"ckpt = off"):
        parse("--trainer.ckpt", "--orchestrator.ckpt", "None")


def test_wandb_runs_have_names_of_their_own() -> None:
    config = parse("--wandb.name", "run", "--orchestrator.wandb.project", "q", "--wandb.project", "q")
    assert config.trainer.wandb and config.orchestrator.wandb
    assert (config.trainer.wandb.name, config.orchestrator.wandb.name) == ("run-trainer", "run-orchestrator")
    assert parse("--trainer.wandb").orchestrator.wandb is None
    assert parse("--wandb", "--orchestrator.wandb", "None").orchestrator.wandb is None
    named = parse("--wandb.name", "run", "--trainer.wandb.name", "mine")
    assert named.trainer.wandb and named.trainer.wandb.name == "mine"


def test_recorded_limits_that_are_unset_have_their_default(tmp_path: Path) -> None:
    recorded = tmp_path / "rl.toml"
    recorded.write_text('[inference.server]\nmax_request_mb = "None"\n')
    for config, megabytes in (
        (parse("@", str(recorded)), 64),
        (parse("--inference.server.max-request-mb", "0.5"), 0.5),
    ):
        assert config.inference is not None and config.inference.server.max_request_bytes == megabytes * 2**20


@pytest.mark.parametrize("tracker", TRACKERS)
def test_an_option_switches_a_recorded_tracker(tracker: str, tmp_path: Path) -> None:
    write_config(parse(f"--{tracker}"), tmp_path / "on.toml")
    config = parse("@", str(tmp_path / "on.toml"), f"--no-{tracker}")
    processes = (config, config.trainer, config.orchestrator)
    assert [getattr(process, tracker) for process in processes] == [None, None, None]
    assert sum(f"{tracker} = off (CLI) replaces" in note for note in config.notes) == 2
    write_config(config, tmp_path / "off.toml")
    for options in ((f"--{tracker}",), (f"--{tracker}.enabled", "true")):
        config = parse("@", str(tmp_path / "off.toml"), *options)
        assert all(getattr(process, tracker) for process in (config, config.trainer, config.orchestrator))


def test_an_option_leaves_a_tracker_of_one_process_alone(tmp_path: Path) -> None:
    text = "[wandb]\nproject = 'p'\n[trainer]\nwandb = 'None'"
    config = parse("@", write(tmp_path / "rl.toml", text), "--wandb.project", "q")
    assert config.trainer.wandb is None and config.orchestrator.wandb and config.orchestrator.wandb.project == "q"


@pytest.mark.parametrize("first", [(), ("--wandb.name", "first")])
def test_a_name_as_an_option_replaces_recorded_names(first: tuple[str, ...], tmp_path: Path) -> None:
    write_config(parse("--wandb", *first), tmp_path / "rl.toml")
    config = parse("@", str(tmp_path / "rl.toml"), "--wandb.name", "second")
    assert config.trainer.wandb and config.trainer.wandb.name == "second-trainer"
    assert config.orchestrator.wandb and config.orchestrator.wandb.name == "second-orchestrator"
    config = parse("@", str(tmp_path / "rl.toml"), "--wandb.name", "None")
    assert config.trainer.wandb and config.trainer.wandb.name is None


@pytest.mark.parametrize(
    ("options", "group"),
    [(("--wandb",), "outputs"), (("--wandb", "--output-dir", "runs/a"), "runs/a"), (("--wandb.name", "n"), "n"),
     (("--wandb.name", "n", "--wandb.group", "g"), "g")],
)  # fmt: skip
def test_wandb_runs_of_an_experiment_share_a_group(options: tuple[str, ...], group: str) -> None:
    config = parse(*options)
    assert config.trainer.wandb and config.orchestrator.wandb
    assert (config.trainer.wandb.group, config.orchestrator.wandb.group) == (group, group)


def test_each_process_can_be_written_and_read_alone(tmp_path: Path) -> None:
    config = parse("--max-steps", "4", "--wandb.name", "n", "--ckpt.interval", "2", "--model.debug.random_init")
    for name, config_cls in (
        ("trainer", TrainConfig),
        ("orchestrator", OrchestratorConfig),
        ("inference", InferenceConfig),
    ):
        path = tmp_path / f"{name}.toml"
        write_config(getattr(config, name), path)
        assert parse_argv(config_cls, ["@", str(path)], name, {})[0] == getattr(config, name)
        assert "# shared key " in path.read_text()
    write_config(config, tmp_path / "rl.toml")
    assert parse("@", str(tmp_path / "rl.toml")) == config


@pytest.mark.parametrize(
    "options",
    [
        ("--orchestrator.advantage.import_path", "math:sqrt"),
        ("--orchestrator.advantage.rewards.correct", "1"),
        ("--orchestrator.env.0.advantage.import_path", "math:sqrt"),
        ("--orchestrator.env.0.loss.type", "grpo"),
        ("--trainer.loss.anneal.margin", "8", "--orchestrator.teacher_model.context", "x"),
    ],
)
def test_written_defaults_do_not_conflict(options: tuple[str, ...], tmp_path: Path) -> None:
    """A file has every key, so it cannot say which of two exclusive ones was chosen."""
    config = parse(*options)
    for name, config_cls in (("orchestrator", OrchestratorConfig), ("trainer", TrainConfig)):
        write_config(getattr(config, name), tmp_path / name)
        assert parse_argv(config_cls, ["@", str(tmp_path / name)], name, {})[0] == getattr(config, name)


def test_configs_as_objects_are_shared_too() -> None:
    config = RLConfig(trainer=TrainConfig(max_steps=3), max_async_level=1)
    assert config.orchestrator.max_steps == 3 and config.orchestrator.max_async_level == 1


# Fitting the processes together


@pytest.mark.parametrize("words", [["0,1"], ["0", "1"], ["[0, 1]"]])
@pytest.mark.parametrize("key", ["--trainer_gpu_ids", "--inference-gpu-ids"])
def test_gpu_ids(key: str, words: list[str]) -> None:
    config = parse(key, *words, "--max-steps", "2")
    assert (config.trainer_gpu_ids or config.inference_gpu_ids) == [0, 1]


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ([], "http://127.0.0.1:8000/v1"),
        (["--inference.server.host", "0.0.0.0"], "http://localhost:8000/v1"),
        (["--inference.server.host", "10.0.0.5", "--inference.server.port", "81"], "http://10.0.0.5:81/v1"),
        (["--orchestrator.client.base-url", "http://localhost:8000/v1"], "http://localhost:8000/v1"),
        (["--no-inference", "--orchestrator.client.base-url", "http://far:9/v1"], "http://far:9/v1"),
    ],
)
def test_the_orchestrator_finds_the_server(server: list[str], url: str) -> None:
    assert parse(*server).orchestrator.client.base_url == [url]


def test_clients_send_the_key_of_their_server() -> None:
    given = ("--inference.server.api-key-var", "MINE")
    assert parse(*given).orchestrator.client.api_key_var == "MINE"
    assert parse(*given, "--orchestrator.client.api-key-var", "YOURS").orchestrator.client.api_key_var == "YOURS"
    assert parse().orchestrator.client.api_key_var == "OPENAI_API_KEY"


def test_a_taken_default_port_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(host: str, port: int) -> None:
        if port == 8000:
            raise ValueError("in use")

    monkeypatch.setattr("prime_rl.config_sharing.check_port_free", check)
    config = parse()
    assert config.inference is not None and config.inference.server.port == 8001
    assert config.orchestrator.client.base_url == ["http://127.0.0.1:8001/v1"]
    assert config.notes == ["note: port 8000 is in use: the inference server listens on 8001 (inference.server.port)"]
    url = "http://localhost:8000/v1"
    named = [
        ["--inference.server.port", "8000"],
        ["--orchestrator.client.base-url", url],
        ["--deployment.type", "slurm"],
    ]
    for argv in named:
        config = parse(*argv)
        assert config.inference is not None and config.inference.server.port == 8000 and config.notes == []


def test_max_model_len_follows_seq_len() -> None:
    for argv, length in (["--seq-len", "64"], 64), (["--seq-len", "64", "--inference.model.max_model_len", "32"], 32):
        config = parse(*argv)
        assert config.inference is not None and config.inference.model.max_model_len == length


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--inference.model.max_model_len", "4096"], ["inference.model.max_model_len = 4096", "seq_len = 2048"]),
        (
            ["--orchestrator.batch_size", "6", "--orchestrator.rollouts_per_example", "4"],
            ["batch_size = 6", "example = 4"],
        ),
        (["--trainer_gpu_ids", "0,0"], ["trainer_gpu_ids", "twice"]),
        (["--trainer_gpu_ids", "-1"], ["trainer_gpu_ids", "at least 0"]),
        (["--no-inference", "--inference_gpu_ids", "0"], ["inference_gpu_ids", "inference is off"]),
        (
            ["--inference.server.port", "9", "--orchestrator.client.base_url", "http://localhost:8/v1"],
            ["base_url", "port 9"],
        ),
    ],
)
def test_what_does_not_fit_is_refused(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(*argv)
    assert all(word in str(error.value) for word in words) and str(error.value).count("\n") <= 2


# The files of the repository

CLASSES = {
    "rl.toml": ("prime_rl.config", "RLConfig"),
    "sft.toml": ("prime_rl.trainer.config", "SFTConfig"),
    "tiny.toml": ("prime_rl.config", "RLConfig"),
    "context_distill/pure.toml": ("prime_rl.config", "RLConfig"),
    "context_distill/hybrid.toml": ("prime_rl.config", "RLConfig"),
    "context_distill/tiny_modes.toml": ("prime_rl.config", "RLConfig"),
    "context_distill/tiny_hybrid.toml": ("prime_rl.config", "RLConfig"),
    "context_distill/tiny_sft.toml": ("prime_rl.trainer.config", "SFTConfig"),
    "context_distill/tiny_hybrid_sft.toml": ("prime_rl.trainer.config", "SFTConfig"),
    "context_distill/tiny_modes_sft.toml": ("prime_rl.trainer.config", "SFTConfig"),
    "eval.toml": ("prime_rl.eval.config", "EvalConfig"),
    "agents/openai.toml": ("prime_rl.config", "RLConfig"),
    "agents/anthropic.toml": ("prime_rl.config", "RLConfig"),
    "agents/agents.toml": ("prime_rl.config", "RLConfig"),
    "evolve.toml": ("prime_rl.evolve.config", "EvolveConfig"),
    "infer.toml": ("prime_rl.inference.config", "InferenceConfig"),
    "orch.toml": ("prime_rl.orchestrator.config", "OrchestratorConfig"),
    "eval/single_env.toml": ("prime_rl.eval.config", "EvalConfig"),
    "eval/multi_env.toml": ("prime_rl.eval.config", "EvalConfig"),
    "eval/local_model.toml": ("prime_rl.eval.config", "EvalConfig"),
    "synthesize/single_turn.toml": ("prime_rl.synthesize.config", "SynthesizeConfig"),
    "synthesize/multi_turn.toml": ("prime_rl.synthesize.config", "SynthesizeConfig"),
    "synthesize/tools.toml": ("prime_rl.synthesize.config", "SynthesizeConfig"),
    "rl/train.toml": ("prime_rl.trainer.config", "TrainConfig"),
    "sft/train.toml": ("prime_rl.trainer.config", "SFTConfig"),
}
FILES = sorted(
    path
    for folder in ("configs", "examples", "experiments")
    for path in (ROOT / folder).rglob("*.toml")
    # those of scripts.prime_rl_train, which reads them itself: test_prime_rl_train
    if path.parent.name != "prime_rl" and path.name != "prime_rl.toml"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_of_the_repository_parses(path: Path, tmp_path: Path) -> None:
    names = [names for end, names in CLASSES.items() if path.as_posix().endswith("/" + end)]
    assert names, f"{path} belongs to no command: name it like its neighbours, or add its ending to CLASSES"
    config_cls = getattr(importlib.import_module(names[0][0]), names[0][1])
    config, sources = parse_argv(config_cls, ["@", str(path)], path.stem, {})
    assert any(".toml:" in source for source in sources.values()), "no value came from the file, or from its base"
    assert not [note for note in config.notes if note.startswith("warning")]
    write_record(config, tmp_path / "record.toml")
    assert parse_argv(config_cls, ["@", str(tmp_path / "record.toml")], path.stem, {})[0] == config


def test_the_documented_three_files_parse_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    debug = "configs/debug"
    config = parse(
        "--trainer", "@", f"{debug}/rl/train.toml", "--orchestrator", "@", f"{debug}/orch.toml",
        "--inference", "@", f"{debug}/infer.toml",
    )  # fmt: skip
    assert config.trainer.data.fake is None and config.max_steps == config.orchestrator.max_steps


# `--help` is instant

ENTRIES = {
    "rl": "prime_rl.rl", "trainer": "prime_rl.trainer.rl.train", "sft": "prime_rl.trainer.sft.train",
    "orchestrator": "prime_rl.orchestrator.orchestrator", "inference": "prime_rl.inference.server",
    "eval": "prime_rl.eval.eval", "synthesize": "prime_rl.synthesize.synthesize",
    "evolve": "prime_rl.evolve.evolve",
    "plan": "prime_rl.plan.plan", "serve": "prime_rl.training_api.serve",
}  # fmt: skip
ASK = """
import sys
from {module} import main
sys.argv = ["{name}", "--help"]
try:
    main()
except SystemExit as stop:
    assert stop.code == 0
LARGE = ("torch", "transformers", "verifiers", "starlette", "openai", "asyncio", "msgspec", "pydantic")
print("HEAVY", *(name for name in LARGE if name in sys.modules))
print(len(sys.modules))
"""
MAX_MODULES = 310
"""Limit for --help: pydantic (215), our configurations, the standard library."""


@pytest.mark.parametrize("name", ENTRIES)
def test_help_imports_no_heavy_package(name: str) -> None:
    code = ASK.format(module=ENTRIES[name], name=name)
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PRIME_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environ)
    assert done.returncode == 0, done.stderr
    *shown, heavy, num_modules = done.stdout.splitlines()
    assert heavy.split() == ["HEAVY", "pydantic"] and int(num_modules) <= MAX_MODULES
    assert shown[0].startswith(f"usage: {name} ") and max(map(len, shown)) <= 120


def test_an_environment_is_called_by_its_id_unless_it_has_a_name() -> None:
    assert parse("--orchestrator.env.0.id", "gsm8k").orchestrator.env[0].name == "gsm8k"
    assert parse("--orchestrator.env.0.name", "letters").orchestrator.env[0].name == "letters"
    assert parse("--orchestrator.env.0.name", "None").orchestrator.env[0].name == "reverse-text"


def test_another_environment_id_drops_the_arguments_of_the_old(tmp_path: Path) -> None:
    env = '[[orchestrator.env]]\nargs = { n = 1, deep = { a = 2 } }\nid = "old"\n'
    file = write(tmp_path / "rl.toml", env)
    key = "--orchestrator.env.0"
    assert parse("@", file).orchestrator.env[0].args == {"n": 1, "deep": {"a": 2}}
    changed = parse("@", file, f"{key}.id", "new")
    assert (changed.orchestrator.env[0].id, changed.orchestrator.env[0].args) == ("new", {})
    assert changed.notes == ["note: orchestrator.env.0.args of 'old' is left out: --orchestrator.env.0.id is 'new'"]
    assert parse("@", file, f"{key}.args.m", "3", f"{key}.id", "new").orchestrator.env[0].args == {"m": 3}
    assert parse("@", file, f"{key}.id", "old").orchestrator.env[0].args == {"n": 1, "deep": {"a": 2}}
    variables = {"PRIME_ORCHESTRATOR__ENV__0__ARGS": '{"n": 4}', "PRIME_ORCHESTRATOR__ENV__0__ID": "new"}
    assert parse(**variables).orchestrator.env[0].args == {"n": 4}


def test_another_environment_id_drops_a_name_that_repeats_it(tmp_path: Path) -> None:
    """As in `configs/eval.toml`, which has every key."""
    file = write(tmp_path / "rl.toml", '[[orchestrator.env]]\nname = "old"\nid = "old"\n')
    assert parse("@", file, "--orchestrator.env.0.id", "new").orchestrator.env[0].name == "new"
    assert parse("@", file, "--orchestrator.env.0.id", "old").orchestrator.env[0].name == "old"
    given = parse("@", file, "--orchestrator.env.0.id", "new", "--orchestrator.env.0.name", "old")
    assert given.orchestrator.env[0].name == "old" and given.notes
    file = write(tmp_path / "rl.toml", '[[orchestrator.env]]\nname = "letters"\nid = "old"\n')
    assert parse("@", file, "--orchestrator.env.0.id", "new").orchestrator.env[0].name == "letters"


def test_arguments_of_an_environment_can_be_cleared(tmp_path: Path) -> None:
    file = write(tmp_path / "rl.toml", '[[orchestrator.env]]\nid = "old"\nargs = { n = 1, m = 2 }\n')
    config = parse("@", file, "--orchestrator.env.0.args", "{}")
    assert config.orchestrator.env[0].args == {} and config.notes == []
    assert config.provenance["orchestrator.env.0.args"] == "CLI"
    assert parse("@", file, "--orchestrator.env.0.args", '{"n": 3}').orchestrator.env[0].args == {"n": 3, "m": 2}


def test_eval_defaults_to_the_training_environments() -> None:
    train = [
        "--orchestrator.env.0.id",
        "gsm8k",
        "--orchestrator.env.0.args",
        '{"n": 3}',
        "--orchestrator.env.0.name",
        "g",
    ]
    orchestrator = parse(*train, "--orchestrator.eval.interval", "10").orchestrator
    assert [(env.id, env.args, env.name) for env in orchestrator.eval_envs] == [("gsm8k", {"n": 3}, "g")]
    orchestrator = parse(*train, "--orchestrator.eval.env.0.id", "reverse-text").orchestrator
    assert [env.id for env in orchestrator.eval_envs] == ["reverse-text"]
    assert parse(*train).orchestrator.eval_envs == []


def test_evaluations_sample_as_training_unless_set() -> None:
    train = ["--orchestrator.sampling.max-tokens", "128", "--orchestrator.sampling.top-p", "0.9"]
    greedy = ["--orchestrator.eval.sampling.temperature", "0", "--orchestrator.eval.sampling.top-p", "1"]
    for argv in ([*train, *greedy], [*greedy, *train]):
        evaluation = parse(*argv).orchestrator.eval
        assert evaluation is not None and evaluation.sampling is not None
        found = evaluation.sampling
        assert (found.temperature, found.top_p, found.max_tokens) == (0, 1, 128)
    assert parse(*greedy).orchestrator.sampling.temperature == 1
    empty = RLConfig.model_validate({"orchestrator": {"sampling": {"max_tokens": 128}, "eval": {"sampling": {}}}})
    assert empty.orchestrator.eval is not None and empty.orchestrator.eval.sampling is not None
    assert empty.orchestrator.eval.sampling.max_tokens == 128, "an empty section sets no key"


# The advantage half of an objective


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "custom"])
def test_preset_sets_the_orchestrator_advantage(name: str) -> None:
    options = ["--orchestrator.sampling.max_tokens", "100", "--orchestrator.rollouts_per_example", "4"]
    config, sources = parse_argv(RLConfig, ["--trainer.loss.type", name, *options], "rl", {})
    choice, reported = PRESETS[name].advantage, config.orchestrator
    assert reported.advantage is not None
    assert (reported.advantage.baseline, reported.advantage.std) == (choice.baseline, choice.std)
    assert sources["orchestrator.advantage.baseline"] == f"trainer.loss.type {name}"
    assert [filter.name for filter in reported.buffer.filters] == (["zero_variance"] if name == "dapo" else [])
    penalty = reported.length_penalty
    assert (penalty is not None) == (name == "dapo")
    if penalty is not None:
        assert (penalty.type, penalty.coef, penalty.window) == ("overlong", 1.0, 20)
    assert config.trainer.loss.max_tokens == (100 if name == "dr_grpo" else None)
    assert config.notes == []


def test_a_recorded_preset_has_no_notes(tmp_path: Path) -> None:
    dapo = ("--trainer.loss.type", "dapo", "--orchestrator.sampling.max_tokens", "100")
    write_config(parse(*dapo), tmp_path / "rl.toml")
    assert parse("@", str(tmp_path / "rl.toml")).notes == []
    [text] = parse(*dapo, "--orchestrator.buffer.filters", '[{"name": "min_reward"}]').notes
    assert "buffer.filters = [{'name': 'min_reward'}] (CLI) overrides the [{'name': 'zero_variance'}]" in text


def test_a_preset_keeps_groups_without_rewards() -> None:
    """Their rewards are all 0, so that its filter would drop every one."""
    dapo = ("--trainer.loss.type", "dapo", "--orchestrator.buffer.skip_verification")
    for value in ((), ("true",)):
        assert parse(*dapo, *value).orchestrator.buffer.filters == []
    assert parse(*dapo, "false").orchestrator.buffer.filters


@pytest.mark.parametrize("loss", [{}, {"type": "aipo"}, {"type": "custom", "import_path": "math:sqrt"}])
def test_the_constant_of_a_loss_is_the_completion_length(loss: dict[str, str]) -> None:
    for aggregation, expected in (("constant", 100), ("token-mean", None)):
        settings = {
            "trainer": {"loss": {**loss, "loss_aggregation": aggregation}},
            "orchestrator": {"sampling": {"max_tokens": 100}},
        }
        assert RLConfig.model_validate(settings).trainer.loss.max_tokens == expected


def test_explicit_advantage_keys_override_the_preset_with_a_note() -> None:
    rloo = ["--trainer.loss.type", "rloo"]
    config = parse(*rloo, "--orchestrator.advantage.baseline", "mean")
    assert config.orchestrator.advantage is not None and config.orchestrator.advantage.baseline == "mean"
    [text] = config.notes
    assert "orchestrator.advantage.baseline = 'mean' (CLI) overrides" in text and "'leave_one_out'" in text
    config = parse(*rloo, "--no-orchestrator.advantage")
    assert config.orchestrator.advantage is None and ["advantage = off" in text for text in config.notes] == [True]
    config = parse(*rloo, "--orchestrator.advantage.length_weighted_mean")
    assert config.orchestrator.advantage is not None and config.orchestrator.advantage.length_weighted_mean
    [text] = parse("--trainer.loss.type", "dapo").notes
    assert "without orchestrator.sampling.max_tokens" in text
    assert parse().orchestrator.advantage == parse("--trainer.loss.type", "aipo").orchestrator.advantage


@pytest.mark.parametrize(
    ("advantage", "key"),
    [
        ({"rewards": {"f": 1.0}}, "rewards"),
        ({"import_path": "math:fsum"}, "import_path"),
        ({"baseline": "role"}, "role"),
        ({"std": "mean"}, "mean"),
    ],
)
def test_dapo_has_no_penalty_where_an_advantage_takes_none(advantage: dict[str, Any], key: str) -> None:
    settings: dict[str, Any] = {"trainer": {"loss": {"type": "dapo"}}}
    env = {"id": "math", "advantage": advantage}
    for part in ({"env": [env]}, {"advantage": advantage}, {"env": [env | {"loss": {"type": "grpo"}}]}):
        config = RLConfig.model_validate({**settings, "orchestrator": {"sampling": {"max_tokens": 100}, **part}})
        assert config.orchestrator.length_penalty is None
    argv = [f"--orchestrator.advantage.{name}={value}" for name, value in advantage.items() if isinstance(value, str)]
    notes = parse("--trainer.loss.type", "dapo", "--orchestrator.sampling.max-tokens", "100", *argv).notes
    assert not argv or any("has no overlong penalty" in note and key in note for note in notes)
    own = {"env": [{"id": "math", "loss": {"type": "maxrl"}}], "sampling": {"max_tokens": 100}}
    assert RLConfig.model_validate({**settings, "orchestrator": own}).orchestrator.length_penalty is None


def test_maxrl_takes_no_costs_that_make_the_mean_negative() -> None:
    maxrl = ("--trainer.loss.type", "maxrl", "--orchestrator.sampling.max_tokens", "100")
    with pytest.raises(ConfigError, match=r'advantage\.std "mean", as in maxrl,.* "overlong" can make negative'):
        parse(*maxrl, "--orchestrator.length_penalty.type", "overlong")
    with pytest.raises(ConfigError, match="which kl_coef can make negative: set kl_coef to 0"):
        parse(*maxrl, "--orchestrator.advantage.kl_coef", "0.01", "--orchestrator.teacher_model", "{}")
    env = {"id": "math", "loss": {"type": "maxrl"}, "advantage": {"kl_coef": 0.1}}
    with pytest.raises(ValueError, match="which kl_coef can make negative"):
        RLConfig.model_validate({"orchestrator": {"env": [env], "teacher_model": {}}})
    linear = (*maxrl, "--orchestrator.length_penalty.type", "linear")
    with pytest.raises(ConfigError, match=r'"linear" with coef 1\.5, above 1, can make negative: set the type'):
        parse(*linear, "--orchestrator.length_penalty.coef", "1.5")
    assert parse(*linear, "--orchestrator.length_penalty.coef", "1").orchestrator.length_penalty is not None
    assert parse(*maxrl, "--orchestrator.length_penalty.type", "relative").orchestrator.length_penalty is not None


def test_losses_of_environments_reach_the_trainer(tmp_path: Path) -> None:
    text = """
    [[orchestrator.env]]
    id = "math"
    loss = { type = "dapo", clip_high = 0.3 }
    [[orchestrator.env]]
    id = "./play.py"
    name = "games"
    loss = { type = "rloo" }
    advantage = { std = "batch" }
    [[orchestrator.env]]
    id = "plain"
    """
    config = parse("@", write(tmp_path / "run.toml", text))
    losses = config.trainer.env_loss
    assert {name: loss.type for name, loss in losses.items()} == {"math": "dapo", "games": "rloo"}
    assert losses["math"].clip_high == 0.3
    found = [env.advantage and (env.advantage.baseline, env.advantage.std) for env in config.orchestrator.env]
    assert found == [("mean", "group"), ("leave_one_out", "batch"), None]
    [text] = config.notes
    assert "dapo sets no filter and no overlong penalty" in text
    env = {"id": "math", "loss": {"teacher_tau": 0.5}}
    with pytest.raises(ValueError, match=r"env_loss\.math\.teacher_tau applies to whole runs only"):
        RLConfig.model_validate({"orchestrator": {"env": [env]}})


def test_partial_advantages_of_environments_follow_the_loss() -> None:
    partial = [{"kl_coef": 0.1}, {"std": "batch"}, {"baseline": "role"}, {"length_weighted_mean": True}]
    own = {"import_path": "math:fsum"}
    envs = [{"id": f"e{i}", "advantage": advantage} for i, advantage in enumerate([*partial, own])]
    given = copy.deepcopy(envs)
    settings = {"trainer": {"loss": {"type": "grpo"}}, "orchestrator": {"env": envs, "teacher_model": {}}}
    config = RLConfig.model_validate(settings)
    found = [(env.advantage.baseline, env.advantage.std) for env in config.orchestrator.env if env.advantage]
    group = ("mean", "group")
    assert found == [group, ("mean", "batch"), ("role", "none"), group, ("mean", "none")]
    assert envs == given, "the caller's settings stay"


def test_the_loss_of_a_taskset_goes_by_its_id() -> None:
    env = {"taskset": {"id": "reverse-text-v1"}, "python": "python3", "loss": {"type": "dapo"}}
    config = RLConfig.model_validate({"orchestrator": {"env": [env, {"id": "reverse-text"}]}})
    assert list(config.trainer.env_loss) == ["reverse-text-v1"]


def test_a_critic_takes_rewards_without_a_baseline() -> None:
    for options in ({}, {"loss": {"type": "grpo"}}, {"loss": {"type": "ppo"}}):
        config = RLConfig.model_validate({"trainer": {"critic": {}, **options}})
        assert config.orchestrator.advantage is not None and config.trainer.critic is not None
        assert (config.orchestrator.advantage.baseline, config.orchestrator.advantage.std) == ("none", "none")
    with pytest.raises(ValueError, match="estimates the baseline of each token"):
        RLConfig.model_validate({"trainer": {"critic": {}}, "orchestrator": {"advantage": {"baseline": "mean"}}})


def test_a_critic_takes_advantages_of_environments() -> None:
    def build(advantage: dict[str, Any]) -> RLConfig:
        env = {"id": "a", "loss": {"type": "grpo"}, "advantage": advantage}
        orchestrator = {"env": [env], "teacher_model": {}} if "kl_coef" in advantage else {"env": [env]}
        return RLConfig.model_validate({"trainer": {"critic": {}}, "orchestrator": orchestrator})

    found = build({"kl_coef": 0.1}).orchestrator.env[0].advantage
    assert found is not None and (found.baseline, found.std) == ("none", "none")
    custom = {"import_path": "math:fsum"}
    assert build(custom).orchestrator.env[0].advantage is not None
    RLConfig.model_validate({"trainer": {"critic": {}}, "orchestrator": {"advantage": custom}})
    for refused in ({"rewards": {"f": 1.0}}, {"std": "group"}, {"length_weighted_mean": True}):
        with pytest.raises(ValueError, match=r"leave out .* and rewards of orchestrator\.env\.0\.advantage"):
            build(refused)


def test_a_kl_in_the_reward_needs_a_reference_of_its_own() -> None:
    teacher = {"model": {"name": "other"}}
    values = {"orchestrator": {"advantage": {"kl_coef": 0.1}, "teacher_model": teacher}}
    loss = RLConfig.model_validate(values).trainer.loss
    assert (loss.adv_tau, loss.teacher_tau, loss.student_tau) == (1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="needs a reference"):
        RLConfig.model_validate({"orchestrator": {"advantage": {"kl_coef": 0.1}}})
    with pytest.raises(ValueError, match="set one of them to 0"):
        RLConfig.model_validate({**values, "trainer": {"loss": {"teacher_tau": 0.5}}})
    values["orchestrator"]["env"] = [{"id": "a"}, {"id": "b", "teacher": "reference"}]
    with pytest.raises(ValueError, match=r'env\.1\.teacher = "reference" ignores rewards, but advantage\.kl_coef'):
        RLConfig.model_validate(values)


def test_one_environment_may_have_a_kl_in_its_reward() -> None:
    plain, costly = {"id": "a"}, {"id": "b", "advantage": {"kl_coef": 0.1}}
    teacher = {"model": {"name": "other"}}
    loss = RLConfig.model_validate({"orchestrator": {"env": [plain, costly], "teacher_model": teacher}}).trainer.loss
    assert (loss.adv_tau, loss.teacher_tau, loss.student_tau) == (1.0, 0.0, 0.0)
    with pytest.raises(ValueError, match=r"orchestrator\.env\.1\.advantage\.kl_coef needs a reference"):
        RLConfig.model_validate({"orchestrator": {"env": [plain, costly]}})
    taught = {"env": [plain | {"context": "x"}, costly], "teacher_model": teacher}
    with pytest.raises(ValueError, match=r"env\.1\.advantage\.kl_coef uses .* trainer\.loss\.teacher_tau = 0\.5 in"):
        RLConfig.model_validate({"orchestrator": taught})


def test_modules_trained_whole_cannot_travel_in_an_adapter() -> None:
    lora = {"modules_to_save": ["lm_head"]}
    with pytest.raises(ValueError, match=r"lora\.merge = true"):
        RLConfig.model_validate({"trainer": {"model": {"lora": lora}}})
    assert RLConfig.model_validate({"trainer": {"model": {"lora": {**lora, "merge": True}}}}).trainer.model.lora


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_truncated_sampling_needs_an_engine_with_supports(backend: str) -> None:
    argv = ("--inference.backend", backend, "--inference.sglang.base_url", "http://localhost:1")
    argv = argv if backend == "sglang" else argv[:2]
    with pytest.raises(ConfigError, match=f"sampling.top_k excludes tokens, and {backend} does not return which ones"):
        parse(*argv, "--orchestrator.sampling.top_k", "20")
    config = parse(*argv, "--orchestrator.sampling.top_k", "20", "--no-orchestrator.sampling_support_replay")
    assert not config.orchestrator.replays_support
    assert parse("--orchestrator.sampling.top_k", "20").orchestrator.replays_support


def test_penalties_of_the_server_are_refused() -> None:
    penalty = ("--inference.sampling.repetition_penalty", "1.1")
    for argv in ((), penalty):
        with pytest.raises(
            ConfigError, match=r"inference\.sampling\.extra_body\.logit_bias is the default of rollouts"
        ):
            parse(*argv, "--inference.sampling.extra_body", '{"logit_bias": {"5": 2.0}}')
    assert parse(*penalty).orchestrator.sampling.repetition_penalty == 1


def test_truncated_sampling_with_vllm_on_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_rl.runtime.machine.find_gpus", lambda: [0])
    monkeypatch.setattr("prime_rl.runtime.machine.is_installed", lambda name: True)
    with pytest.raises(ConfigError, match=r"sampling\.top_k excludes tokens, and vllm does not return"):
        parse("--orchestrator.sampling.top_k", "20")
    assert parse("--orchestrator.sampling.top_k", "20", "--inference.exact").orchestrator.replays_support
