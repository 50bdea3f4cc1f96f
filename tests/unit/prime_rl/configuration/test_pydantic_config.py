"""Configuration parsing: precedence of layers, spellings of values, provenance and --help."""

from __future__ import annotations

import json
import os
import tomllib
from datetime import UTC
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Field, ValidationInfo, model_validator

from prime_rl.configuration.command import run_command
from prime_rl.configuration.errors import ConfigError
from prime_rl.configuration.render import render_toml, uncomment
from prime_rl.configuration.sections import SamplingConfig
from prime_rl.configuration.sources import find_lines
from prime_rl.deployment.config import SlurmDeployment
from prime_rl.runtime.core_lease import DIRECTORY_VARIABLE
from prime_rl.runtime.machine import SHARED_GPU_VARIABLE
from prime_rl.utils.pydantic_config import BaseConfig, note_source, parse_argv, write_config, write_record

ROOT = Path(__file__).parents[4]


class LoraConfig(BaseConfig):
    """Low-rank adapters."""

    rank: int = 16


class ModelConfig(BaseConfig):
    """The model."""

    name: str = "small"
    """Which one."""

    max_len: int | None = None
    lora: LoraConfig | None = None


class AdamConfig(BaseConfig):
    type: Literal["adamw"] = "adamw"
    lr: float = Field(default=1e-6, ge=0)
    betas1: float = 0.9


class SGDConfig(BaseConfig):
    type: Literal["sgd"] = "sgd"
    lr: float = 1e-6
    momentum: float = 0.5


class EnvConfig(BaseConfig):
    id: str = "reverse"
    args: dict[str, Any] = {}


class WandbConfig(BaseConfig):
    enabled: bool = True
    project: str = "prime"


class TinyConfig(BaseConfig):
    """Everything a real config has, in small."""

    max_steps: int | None = None
    lr: float = 0.5
    flag: bool = False
    loud: bool = True
    name: str = "x"
    out: Path = Path("outputs")
    kind: Literal["one", "two"] = "one"
    ids: list[int] = [7]
    tags: list[str] | None = None
    headers: dict[str, str] = {}
    extra: dict[str, Any] = {}
    model: ModelConfig = ModelConfig(max_len=64)
    optim: Annotated[AdamConfig | SGDConfig, Field(discriminator="type")] = AdamConfig(betas1=0.8)
    env: list[EnvConfig] = [EnvConfig()]
    wandb: WandbConfig | None = None
    ckpt: LoraConfig | None = LoraConfig(rank=3)


def parse(*argv: str, **environ: str) -> TinyConfig:
    return parse_argv(TinyConfig, argv, "tiny", environ)[0]


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


# Which layer wins


@pytest.mark.parametrize("given_in", [set(s) for s in ("", "e", "1", "2", "c", "e1", "12", "e2", "1c", "ec", "e12c")])
def test_later_layers_win(tmp_path: Path, given_in: set[str]) -> None:
    one, two = write(tmp_path / "1.toml", "max_steps = 1"), write(tmp_path / "2.toml", "max_steps = 2")
    argv = [*(["@", one] if "1" in given_in else []), *(["@", two] if "2" in given_in else [])]
    argv = [*(["--max_steps", "9"] if "c" in given_in else []), *argv]  # the place of an option does not matter
    environ = {"PRIME_MAX_STEPS": "5"} if "e" in given_in else {}
    config, sources = parse_argv(TinyConfig, argv, "tiny", environ)
    expected = 9 if "c" in given_in else 2 if "2" in given_in else 1 if "1" in given_in else 5 if given_in else None
    source = "CLI" if "c" in given_in else f"{two}:1" if "2" in given_in else f"{one}:1" if "1" in given_in else None
    assert config.max_steps == expected
    assert sources.get("max_steps") == (source or ("env PRIME_MAX_STEPS" if given_in else None))


def test_tables_merge_deeply_and_lists_are_replaced(tmp_path: Path) -> None:
    one = write(
        tmp_path / "1.toml", 'ids = [1, 2]\n[model]\nname = "a"\n[model.lora]\nrank = 1\n[extra.deep]\na = 1\nb = 1'
    )
    two = write(tmp_path / "2.toml", "ids = [3]\n[model]\nmax_len = 5\n[extra.deep]\nb = 2")
    config = parse("@", one, "@", two, PRIME_EXTRA__DEEP__C="3")
    assert config.ids == [3]
    assert (config.model.name, config.model.max_len, config.model.lora) == ("a", 5, LoraConfig(rank=1))
    assert config.extra == {"deep": {"a": 1, "b": 2, "c": 3}}


def test_none_can_stand_in_lists_of_free_form_tables(tmp_path: Path) -> None:
    """TOML has no null. Where text is wanted, it is text."""
    extra = 'extra = { names = ["None", "a"], deep = [{ x = "None" }] }'
    found = parse("@", write(tmp_path / "a.toml", f'tags = ["None", "a"]\nheaders = {{ b = "None" }}\n{extra}'))
    assert found.extra == {"names": [None, "a"], "deep": [{"x": None}]}
    assert found.tags == ["None", "a"] and found.headers == {"b": "None"}


def test_a_section_given_in_part_keeps_the_rest_of_its_default() -> None:
    assert parse("--model.name", "big").model == ModelConfig(name="big", max_len=64)
    assert parse("--optim.lr", "1").optim == AdamConfig(lr=1, betas1=0.8)
    assert TinyConfig(model={"name": "big"}).model.max_len == 64  # type: ignore[arg-type]


def test_changing_the_type_drops_keys_of_the_old_variant(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "[optim]\nbetas1 = 0.7\nlr = 2")
    assert parse("@", file, "--optim.type", "sgd").optim == SGDConfig(lr=2)
    assert parse("--optim.momentum", "0", "--optim.type", "sgd", "@", file).optim == SGDConfig(lr=2, momentum=0)
    with pytest.raises(ConfigError, match=r"betas1 does not belong to optim.type = sgd"):
        parse("--optim.betas1", "0", "--optim.type", "sgd")


# Files


def test_paths_may_start_with_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path / "a.toml", 'out = "~/runs"\n')
    assert parse("@", file).out == parse("--out=~/runs").out == tmp_path / "runs"
    assert parse("--name=~/model").name == "~/model"


def test_child_overrides_and_paths_are_relative(tmp_path: Path) -> None:
    write(tmp_path / "base" / "deep.toml", 'name = "deep"\nlr = 1\nmax_steps = 1')
    write(tmp_path / "base" / "mid.toml", 'toml_files = ["deep.toml"]\nlr = 2\nmax_steps = 2')
    child = write(tmp_path / "child.toml", 'toml_files = ["base/mid.toml"]\nmax_steps = 3')
    config, sources = parse_argv(TinyConfig, ["@", child], "tiny", {})
    assert (config.name, config.lr, config.max_steps) == ("deep", 2, 3)
    assert sources["name"].endswith("base/deep.toml:1") and sources["max_steps"].endswith("child.toml:2")


def test_circular_inheritance_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", 'toml_files = ["b.toml"]')
    b = write(tmp_path / "b.toml", 'toml_files = ["a.toml"]')
    with pytest.raises(ConfigError, match="inherits from itself"):
        parse("@", b)


def test_a_file_for_one_section(tmp_path: Path) -> None:
    write(tmp_path / "base.toml", "max_len = 8")
    model = write(tmp_path / "m.toml", 'toml_files = ["base.toml"]\nname = "m"\n[lora]\nrank = 2')
    lora = write(tmp_path / "l.toml", "rank = 5")
    config, sources = parse_argv(TinyConfig, ["--model", "@", model, "--model.lora", "@", lora], "tiny", {})
    assert config.model == ModelConfig(name="m", max_len=8, lora=LoraConfig(rank=5))
    assert sources["model.lora.rank"] == f"{lora}:1"
    assert sources["model.name"] == f"{model}:2"


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfmax_steps = 4\r\n")
    assert parse("@", str(tmp_path / "a.toml")).max_steps == 4


@pytest.mark.parametrize("switch", ["--flag", "--no-loud", "--no-ckpt", "--model.no-lora"])
def test_a_file_behind_a_switch_is_for_the_whole_config(switch: str, tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "max_steps = 4")
    config = parse(switch, "@", file)
    assert config == parse("@", file, switch) and config.max_steps == 4


@pytest.mark.parametrize("option", ["--model.name=x", "--loud=False", "--model.lora=None"])
def test_an_option_with_its_value_may_stand_before_a_file(option: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("max_steps = 4\n")
    file = str(tmp_path / "run.toml")
    assert parse(option, "@", file) == parse("@", file, option) and parse(option, "@", file).max_steps == 4
    with pytest.raises(ConfigError) as caught:
        parse("--stepz=3", "@", str(tmp_path / "missing.toml"))
    assert len(caught.value.problems) == 2, "files behind a wrong option are read, too"


def test_lines_of_keys() -> None:
    text = '# top\na = 1\n[s]\n"b.c" = """\nfake = 1\n"""\nd.e = 2\n[[t]]\nx = 1\n[t.in]\ny = 1\n[[t]]  # two\nx = 2\n'
    lines = find_lines(text)
    assert lines["a"] == 2 and lines["s.b.c"] == 4 and lines["s.d.e"] == 7 and "s.fake" not in lines
    assert lines["t.0.x"] == 9 and lines["t.0.in.y"] == 11 and lines["t.1.x"] == 13


# Variables


def test_credentials_are_not_config_and_unknown_variables_warn() -> None:
    environ = {"PRIME_API_KEY": "k", "PRIME_INTELLECT_TEAM": "t", "PRIME_MAX_STEP": "1", "HOME": "/", "PRIME_NAME": "n"}
    config, _ = parse_argv(TinyConfig, [], "tiny", {**environ, SHARED_GPU_VARIABLE: "1", DIRECTORY_VARIABLE: "leases"})
    assert config.name == "n"
    (warning,) = config.notes
    assert "PRIME_MAX_STEP " in warning and "PRIME_MAX_STEPS?" in warning


def test_variables_reach_sections_lists_and_none() -> None:
    config = parse(PRIME_MODEL__LORA__RANK="4", PRIME_IDS="1,2", PRIME_ENV__0__ID="e", PRIME_MODEL__MAX_LEN="None")
    assert config.model == ModelConfig(max_len=None, lora=LoraConfig(rank=4))
    assert config.ids == [1, 2] and config.env == [EnvConfig(id="e")]


def test_variables_keep_mixed_case_in_free_form_tables() -> None:
    config = parse(PRIME_EXTRA__maxLen="1", PRIME_EXTRA__DEEP__dataDir="a", PRIME_EXTRA__LAST="2", PRIME_Name="n")
    assert config.extra == {"maxLen": 1, "deep": {"dataDir": "a"}, "last": 2} and config.name == "n"


def test_variables_of_a_deployment_keep_their_case() -> None:
    environ = {"PRIME_ENV__NCCL_SOCKET_IFNAME": "eth0", "PRIME_OPTIONS__ACCOUNT": "a"}
    config = parse_argv(SlurmDeployment, [], "x", environ)[0]
    assert config.env == {"NCCL_SOCKET_IFNAME": "eth0"} and config.options == {"account": "a"}


# Spellings on the command line


@pytest.mark.parametrize(
    ("argv", "key", "value"),
    [
        ("--max-steps 5", "max_steps", 5),
        ("--max_steps=5", "max_steps", 5),
        ("--max-steps 5 --max_steps 6", "max_steps", 6),
        ("--max-steps None", "max_steps", None),
        ("--max-steps null", "max_steps", None),
        ("--lr 1e-3", "lr", 1e-3),
        ("--lr -1", "lr", -1.0),
        ("--lr=-1e-2", "lr", -1e-2),
        ("--name None", "name", "None"),
        ("--name=--dashes", "name", "--dashes"),
        ("--name a=b", "name", "a=b"),
        ("--name=", "name", ""),
        ("--out some/dir", "out", Path("some/dir")),
        ("--kind two", "kind", "two"),
        ("--flag", "flag", True),
        ("--flag true", "flag", True),
        ("--flag=false", "flag", False),
        ("--flag --no-flag", "flag", False),
        ("--no-loud", "loud", False),
        ("--no_loud --lr 2", "loud", False),
        ("--ids 0,1", "ids", [0, 1]),
        ("--ids 0 1", "ids", [0, 1]),
        ("--ids 0, 1", "ids", [0, 1]),
        ("--ids [0,1]", "ids", [0, 1]),
        ("--ids=0,1", "ids", [0, 1]),
        ("--ids 0 --ids 1", "ids", [0, 1]),
        ("--ids 0,1 --lr 2 --ids=2", "ids", [0, 1, 2]),
        ("--ids -1 2 --flag", "ids", [-1, 2]),
        ("--ids []", "ids", []),
        ("--ids.0 3", "ids", [3]),
        ("--ids.1 3", "ids", [7, 3]),
        ("--tags a,b c", "tags", ["a", "b", "c"]),
        ('--tags ["a,b"]', "tags", ["a,b"]),
        ("--tags None", "tags", None),
        ("--no-tags", "tags", None),
        ('--headers {"X-a":"1"}', "headers", {"X-a": "1"}),
        ("--headers X-a=1 b=c=d", "headers", {"X-a": "1", "b": "c=d"}),
        ("--headers X-a=1 --headers b=2", "headers", {"X-a": "1", "b": "2"}),
        ("--headers.X-a 1", "headers", {"X-a": "1"}),
        ("--extra n=3 s=word", "extra", {"n": 3, "s": "word"}),
        ("--extra.a.b [1]", "extra", {"a": {"b": [1]}}),
        ("--wandb", "wandb", WandbConfig()),
        ("--wandb --lr 1", "wandb", WandbConfig()),
        ("--wandb.enabled --wandb.project p", "wandb", WandbConfig(project="p")),
        ("--wandb.enabled false", "wandb", WandbConfig(enabled=False)),
        ("--wandb true", "wandb", WandbConfig()),
        ("--wandb --no-wandb", "wandb", None),
        ('--wandb {"project":"p"}', "wandb", WandbConfig(project="p")),
        ("--no-ckpt", "ckpt", None),
        ("--ckpt None", "ckpt", None),
        ("--no-ckpt --ckpt.rank 5", "ckpt", LoraConfig(rank=5)),
        ("--ckpt", "ckpt", LoraConfig(rank=3)),
        ("--model.lora", "model", ModelConfig(max_len=64, lora=LoraConfig())),
        ("--model.lora.rank 2", "model", ModelConfig(max_len=64, lora=LoraConfig(rank=2))),
        ("--model.lora --model.no-lora", "model", ModelConfig(max_len=64)),
        ("--no-model.max-len", "model", ModelConfig(max_len=None)),
        ("--optim.type sgd", "optim", SGDConfig()),
        ("--optim.momentum 0 --optim.type sgd", "optim", SGDConfig(momentum=0)),
        ('--env [{"id":"a"},{"id":"b"}]', "env", [EnvConfig(id="a"), EnvConfig(id="b")]),
        ('--env {"id":"a"} {"id":"b"}', "env", [EnvConfig(id="a"), EnvConfig(id="b")]),
        ('--env {"id":"a"} --env {"id":"b"}', "env", [EnvConfig(id="a"), EnvConfig(id="b")]),
        ("--env.0.id a --env.1.args n=1", "env", [EnvConfig(id="a"), EnvConfig(args={"n": 1})]),
        ("--env.0.args.n true", "env", [EnvConfig(args={"n": True})]),
    ],
)  # fmt: skip
def test_spellings(argv: str, key: str, value: Any) -> None:
    config, sources = parse_argv(TinyConfig, argv.split(" "), "tiny", {})
    assert getattr(config, key) == value
    assert {source for name, source in sources.items() if name.startswith(key)} <= {"CLI"}


def test_an_index_changes_one_entry_of_a_files_list(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", '[[env]]\nid = "a"\n[[env]]\nid = "b"\nargs = {n = 1}')
    config, sources = parse_argv(TinyConfig, ["@", file, "--env.1.args.m", "2"], "tiny", {})
    assert config.env == [EnvConfig(id="a"), EnvConfig(id="b", args={"n": 1, "m": 2})]
    assert sources["env.1.args.m"] == "CLI" and sources["env.1.id"] == f"{file}:4"
    with pytest.raises(ConfigError, match=r"the next free index is 2"):
        parse("@", file, "--env.3.id", "x")


def test_none_in_files_unsets_and_later_layers_can_set_again(tmp_path: Path) -> None:
    off = write(tmp_path / "off.toml", 'max_steps = "None"\nckpt = "None"\nname = "None"\n[model]\nmax_len = "None"')
    config = parse("@", off)
    assert (config.max_steps, config.ckpt, config.name, config.model.max_len) == (None, None, "None", None)
    assert parse("@", off, "--ckpt").ckpt == LoraConfig(rank=3)


def test_text_in_files_for_lists(tmp_path: Path) -> None:
    assert parse("@", write(tmp_path / "a.toml", 'ids = "0,1"')).ids == [0, 1]
    assert parse("@", write(tmp_path / "b.toml", "ids = 4")).ids == [4]


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("\n", ["\n"]),
        (" END", [" END"]),
        (", ", [", "]),
        (",", [","]),
        ("a,b", ["a", "b"]),
        ("a, b", ["a", "b"]),
        ("\n,END ", ["\n", "END "]),
        ("", []),
        ("[]", []),
        ('[" a, b"]', [" a, b"]),
    ],
)
def test_entries_of_free_text_keep_their_spaces(text: str, stop: list[str]) -> None:
    assert parse_argv(SamplingConfig, ["--stop", text], "x", {})[0].stop == stop
    assert parse_argv(SamplingConfig, [f"--stop={text}", "--stop", "c "], "x", {})[0].stop == [*stop, "c "]
    assert parse_argv(SamplingConfig, [], "x", {"PRIME_STOP": text})[0].stop == stop


@pytest.mark.parametrize("text", [",", " ", "\n"])
def test_text_without_entries_is_no_empty_list(text: str) -> None:
    with pytest.raises(ConfigError, match="has no entries"):
        parse("--ids", text)
    with pytest.raises(ConfigError, match="has no entries"):
        parse(PRIME_TAGS=text)


def test_alternative_names_of_keys() -> None:
    class Aliased(BaseConfig):
        spellings = {"lora_rank": "model.lora.rank"}
        model: ModelConfig = ModelConfig()

    assert parse_argv(Aliased, ["--lora-rank", "2"], "x", {})[0].model.lora == LoraConfig(rank=2)


# Validators that fill keys


def test_validators_can_set_keys_and_record_their_source() -> None:
    class Outer(BaseConfig):
        name: str = "a"
        model: ModelConfig = ModelConfig()

        @model_validator(mode="before")
        @classmethod
        def _share(cls, data: Any, info: ValidationInfo) -> Any:
            note_source(info, "model.name", "shared key name")
            return {**data, "model": {**data.get("model", {}), "name": data["name"]}}

    config, sources = parse_argv(Outer, ["--name", "b"], "outer", {})
    assert config.model.name == "b" and sources["model.name"] == "shared key name"
    assert config.model.provenance == {"name": "shared key name"}
    assert 'name = "b"' in render_toml(config.model, config.model.provenance)


# The resolved config as a file


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "--wandb --ids [] --max-steps 3",
        "--optim.type sgd --no-ckpt --no-model.max-len",
        '--extra.a null --extra.b [{"c":null}] --tags None',
        "--env.1.id b --env.1.args.n 2 --name None --lr 1e-05",
        '--headers.X-"q" \\ --out /a/"b"/ö',
        "--env [] --extra {}",
    ],
)
def test_the_resolved_config_reads_back(tmp_path: Path, argv: str) -> None:
    config = parse(*argv.split())
    path = tmp_path / "configs" / "tiny.toml"
    write_config(config, path)
    assert parse("@", str(path)) == config
    assert parse("@", str(path), PRIME_LR="9", PRIME_TAGS="x", PRIME_CKPT__RANK="1") == config
    assert os.listdir(path.parent) == ["tiny.toml"]


def test_a_record_sets_the_given_keys_only(tmp_path: Path) -> None:
    config = parse("--env.1.id", "b", "--ckpt", "--headers.X", "# y", PRIME_LR="0.5")
    path = tmp_path / "tiny.toml"
    write_record(config, path)
    assert parse("@", str(path)) == config
    given = parse_argv(TinyConfig, ["@", str(path)], "tiny", {})[1]
    assert given.keys() == {"env", "env.0", "env.1", "env.1.id", "ckpt", "headers.X", "lr"}
    complete = render_toml(config, config.provenance)
    assert uncomment(path.read_text()).split() == complete.split()


plain_values = st.recursive(
    st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False)
    | st.text(max_size=8).filter(lambda s: s != "None")
    | st.dates()
    | st.times()
    | st.datetimes(timezones=st.sampled_from([None, UTC])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(max_size=6), plain_values, max_size=4), st.text(max_size=10), st.lists(st.integers()))
def test_any_value_survives_a_toml_round_trip(extra: dict[str, Any], name: str, ids: list[int]) -> None:
    config = TinyConfig(extra=extra, name=name, ids=ids)
    table = tomllib.loads(render_toml(config, {}))
    assert table["extra"] == extra and table["name"] == name and table["ids"] == ids


@given(st.lists(st.integers(-99, 99), min_size=1, max_size=5), st.randoms())
def test_all_spellings_of_a_list_are_equivalent(ids: list[int], random: Any) -> None:
    words = [str(number) for number in ids]
    spellings = [
        ["--ids", ",".join(words)], ["--ids", *words], ["--ids", json.dumps(ids)], ["--ids=" + ",".join(words)],
        [word for number in words for word in ("--ids", number)],
    ]  # fmt: skip
    assert parse(*random.choice(spellings)).ids == ids


WORDS = [
    *(
        f"--{key}"
        for key in ("max-steps", "lr", "flag", "ids", "tags", "headers", "extra", "model", "model.lora", "optim")
    ),
    *("--optim.type", "--env", "--env.0", "--env.0.args", "--env.1.id", "--wandb", "--ids.0", "--extra.a.b", "--a.b"),
    *(
        "--no-flag",
        "--no-model",
        "--no-ckpt",
        "--no-",
        "--",
        "-",
        "-x",
        "--=",
        "--lr=",
        "--.",
        "--model.",
        "--ckpt.rank.x",
    ),
    *(
        "@",
        "@x",
        "x",
        "1",
        "-1",
        "None",
        "null",
        "true",
        "sgd",
        "a=b",
        "=",
        "[",
        "{",
        "[]",
        "{}",
        '{"id":1}',
        "[[1]]",
        "",
    ),
]


@example(["@\n"])
@example(["@a\nb"])
@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=6))
def test_any_command_line_gives_a_config_or_a_short_error(argv: list[str]) -> None:
    try:
        config = parse(*argv)
    except ConfigError as error:
        assert error.problems and all(text and text.count("\n") <= 2 for text in error.problems)
    else:
        tomllib.loads(render_toml(config, config.provenance))


# The command


def run_tiny(monkeypatch: pytest.MonkeyPatch, *argv: str, run: Any = lambda config: None) -> int | None:
    monkeypatch.setattr("sys.argv", ["tiny", *argv])
    for name in [name for name in os.environ if name.startswith("PRIME_")]:
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as stop:
        run_command("tiny", TinyConfig, run, summary="Does little.")
    return stop.value.code  # type: ignore[return-value]


def test_dry_run_shows_values_and_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = write(tmp_path / "a.toml", "\n[model]\nmax_len = 2")
    assert run_tiny(monkeypatch, "@", file, "--max-steps", "3", "--dry-run", run=lambda config: 1 / 0) == 0
    lines = {line.split(" =")[0]: line.split("# ")[-1] for line in capsys.readouterr().out.splitlines() if " =" in line}
    assert lines["max_steps"] == "CLI" and lines["max_len"] == f"{file}:3" and lines["flag"] == "default"


def test_help_shows_every_key_once_merged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run_tiny(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    for name in TinyConfig.model_fields:
        assert f"  {name} " in text or f"[{name}]" in text, name
    assert "Which one." in text and "Does little." in text and "\033" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert run_tiny(monkeypatch, "@", write(tmp_path / "a.toml", "lr = 2.25"), "--help", "--optim.type", "sgd") == 0
    text = capsys.readouterr().out
    assert "2.25" in text and "a.toml:1" in text and '[optim] type = "sgd" (chosen)' in text


def test_credentials_are_no_configuration(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tiny(monkeypatch, "--help") == 0
    plain = capsys.readouterr().out
    monkeypatch.setenv("PRIME_API_KEY", "secret")
    monkeypatch.setenv("PRIME_MAX_STEPS", "")
    assert run_tiny(monkeypatch, "--help") == 0
    assert capsys.readouterr().out == plain


def test_help_with_a_wrong_file_shows_both(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tiny(monkeypatch, "--help", "@", "none.toml") == 2
    shown = capsys.readouterr()
    assert "max_steps" in shown.out and "none.toml" in shown.err


def test_config_variables_are_removed_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tiny"])
    monkeypatch.setenv("PRIME_LR", "0.25")
    monkeypatch.setenv("PRIME_API_KEY", "secret")
    seen = {}

    def run(config: TinyConfig) -> None:
        seen.update(os.environ, lr=str(config.lr))

    with pytest.raises(SystemExit):
        run_command("tiny", TinyConfig, run, summary="")
    assert seen["lr"] == "0.25" and seen["PRIME_API_KEY"] == "secret" and "PRIME_LR" not in seen


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ValueError("model.name is wrong: take another"), 2, "error: model.name is wrong"),
        (RuntimeError("broke"), 1, "--debug"),
        (ExceptionGroup("tasks", [ValueError("inside")]), 2, "error: inside"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, words: str
) -> None:
    def run(_: TinyConfig) -> None:
        raise error

    assert run_tiny(monkeypatch, run=run) == code
    assert words in capsys.readouterr().err
    assert run_tiny(monkeypatch, run=lambda _: 3) == 3
    assert run_tiny(monkeypatch) == 0


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tiny", "--debug", "--lr", "x"])
    with pytest.raises(ConfigError):
        run_command("tiny", TinyConfig, lambda _: None, summary="")


def test_configs_are_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        parse().lr = 1  # type: ignore[misc]
    for value in ("inf", "-inf", "nan"):
        with pytest.raises(ConfigError, match=r"--lr .*finite"):
            parse("--lr", value)
