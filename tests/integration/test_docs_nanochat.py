"""Every command and snippet of docs/nanochat.md, and of the document behind it where PRIME_TEST_SPEC names its folder.

They run as written, on a CPU with a tiny model, but for what this machine lacks: sizes are cut by flags behind the
command, the hub's dataset is a file, torchrun starts two ranks. Commands of one program run in one process in turns.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SPEC = Path(os.environ.get("PRIME_TEST_SPEC", "/nowhere"))
PATHS = {"page": ROOT / "docs" / "nanochat.md"}
PATHS |= dict(zip(("document",), SPEC.glob("002*.txt"), strict=False))
WITHOUT_SPEC = pytest.mark.skipif(
    "document" not in PATHS, reason="no documents to compare with; cure: make test SPEC=<their folder>"
)
PAGES = ["page", pytest.param("document", marks=WITHOUT_SPEC)]
# documented: sizes of a real run. Each is added where the command does not say it.
SMALL = {
    "max_steps": 1, "max_new_tokens": 3, "examples_per_step": 2, "num_samples": 2, "num_train_examples": 6,
    "num_eval_examples": 3, "eval_examples": 2, "eval_samples": 2, "model_tag": "d1",
}  # fmt: skip
TRAIN = "scripts.prime_rl_train"
BEGINNINGS = ("scripts.prepare_aqua", "scripts.tiny_bootstrap")
# Runs `python -m NAME arguments` for each line of its input, in one process, and prints the exit code of each.
IN_TURNS = """
import json, runpy, sys
for argv in map(json.loads, sys.stdin):
    sys.argv = argv[:]
    code = 0
    try:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
    print("ENDED", json.dumps([code, argv]), flush=True)
"""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PATHS[page].read_text(), re.DOTALL)


def commands(page: str) -> list[list[str]]:
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def shortened(argv: list[str]) -> list[str]:
    output = {word.removeprefix("--").partition("=")[0].replace("-", "_") for word in argv}
    return [*argv, *(f"--{name}={value}" for name, value in SMALL.items() if name not in output)]


@pytest.fixture
def base(tmp_path: Path) -> dict[str, str]:
    """Environment variables of a user without an account; everything is in one folder."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "NANOCHAT_", "AQUA_"))}
    return {
        **clean, "NANOCHAT_BASE_DIR": str(tmp_path / "base"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "NETRC": str(tmp_path / "netrc"), "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.timeout(900)
def test_training_commands(page: str, base: dict[str, str]) -> None:
    trainings = [argv[3:] for argv in commands(page) if argv[:3] == ["python", "-m", TRAIN]]
    trainings += [argv[argv.index("--") :] for argv in commands(page) if argv[0] == "torchrun"]
    assert len(trainings) >= 9
    # documented: minutes, for a model that has learned something
    first = ["scripts.tiny_bootstrap", "--depth=1", "--num_steps=2", "--num_examples=40", "--batch_size=4"]
    prepare = [argv[2:] for argv in commands(page) if argv[2:3] == ["scripts.prepare_aqua"]]
    everything = [*prepare, first, *([TRAIN, *shortened(argv)] for argv in trainings)]
    lines = "\n".join(map(json.dumps, everything))
    done = subprocess.run(
        [sys.executable, "-c", IN_TURNS], input=lines, cwd=ROOT, env=base, capture_output=True, text=True, timeout=900
    )
    ended = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("ENDED ")]
    assert [code for code, _ in ended] == [0] * len(everything), (done.stdout[-3000:], done.stderr[-3000:])
    runs = Path(base["NANOCHAT_BASE_DIR"]) / "prime_rl_runs"
    for run in ("prime_rl_default", "debug", "small-scale", "my_experiment"):
        rows = [json.loads(line) for line in (runs / run / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["step"] == 1 and "rollout/mean_reward" in rows[-1] and "eval/pass@2" in rows[-1], run
        assert "policy/value_loss" not in rows[-1] and (runs / run / "viz" / "pass_at_k.html").is_file(), run
    assert list((runs.parent / "prime_rl_checkpoints" / "d1" / "step_1").glob("model.pt"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_by_torchrun(base: dict[str, str]) -> None:
    save_model(Path(base["NANOCHAT_BASE_DIR"]), "sft", "d1", 2)
    argv = next(argv for argv in commands("page") if argv[0] == "torchrun")
    # documented: 8 GPUs
    argv = [word.replace("nproc_per_node=8", "nproc_per_node=2") for word in shortened(argv)]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *argv[1:]], cwd=ROOT, env=base, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    last = (Path(base["NANOCHAT_BASE_DIR"]) / "prime_rl_runs/my_experiment/metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["distributed/world_size"] == 2 and "distributed/rank_1/samples" in last


def save_model(base: Path, source: str, tag: str, step: int) -> None:
    """A tokenizer and an untrained model of one layer, as a user has them; below $NANOCHAT_BASE_DIR."""
    from nanochat.checkpoint_manager import save_checkpoint
    from nanochat.gpt import GPT, GPTConfig
    from nanochat.tokenizer import NanochatTokenizer

    tokenizer = NanochatTokenizer.train(["What is 2+2? Answer: B\n"] * 3, 280)
    tokenizer.save(base / "tokenizer")
    model = GPT(GPTConfig(512, tokenizer.get_vocab_size(), n_layer=1, n_head=2, n_kv_head=2, n_embd=32))
    model.init_weights(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        save_checkpoint(source, tag, step, model, {})


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.timeout(900)
def test_other_commands(page: str, base: dict[str, str], tmp_path: Path) -> None:
    """Imports and template as written; `vf-rl` up to where training begins; none is left that this file forgot."""
    known = {
        "pip": "the network", "wandb": "the network", "uv": "test_vf_scripts and below", "cd": "below",
        "export": "test_nanochat_watch", "torchrun": "above", "cp": "here", "python": "here",
    }  # fmt: skip
    words = {argv[0].partition("=")[0] for argv in commands(page)}
    assert {word for word in words if not word.isupper() and "_" not in word} <= set(known)
    for argv in commands(page):
        if argv[0] == "cp":
            assert (ROOT / argv[1]).is_file() and argv[2] == ".env"
        elif argv[:2] == ["python", "-c"]:
            done = subprocess.run(
                [sys.executable, *argv[1:]], cwd=ROOT, env=base, capture_output=True, text=True, timeout=300
            )
            assert done.returncode == 0 and re.search(r"0\.1\.|nanochatAquaRat\(2000 problems", done.stdout), (
                done.stderr
            )
        elif argv[0] == "python":
            # documented: minutes; the benchmark runs the first three commands as they are written
            assert argv[1] == "benchmarks/bench_nanochat.py" or argv[2] in (TRAIN, *BEGINNINGS), argv
    command = [sys.executable, "-m", "prime_rl.envs.vf_rl", "@", "../../configs/prime_rl/default.toml", "--dry-run"]
    folder = ROOT / "environments" / "nanochatAquaRat"
    done = subprocess.run(command, cwd=folder, env=base, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "rollouts_per_example = 8" in done.stdout, done.stderr


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.timeout(600)
def test_snippets(page: str, base: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All snippets of a page in one namespace, in order; the custom rewards score as documented."""
    for name in ("NANOCHAT_BASE_DIR", "NETRC", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, base[name])
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NANOCHAT_AQUA_DIR", "AQUA_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own.jsonl"
    own.write_text("\n".join(json.dumps({"question": f"{i} + 0?", "answer": str(i)}) for i in range(4)))
    import datasets

    if importlib.util.find_spec("wandb") is None:  # an extra
        monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))
    load = datasets.load_dataset
    # documented: a dataset of the hub, and runs at Weights & Biases
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **options: load("json", data_files=str(own), **options))
    runs = [SimpleNamespace(name="a", summary={"rollout/mean_reward": 0.5})]
    monkeypatch.setattr("wandb.Api", lambda: SimpleNamespace(runs=lambda path: runs), raising=False)
    for source, tag, step in (("sft", "d1", 2), ("prime_rl", "d20", 400)):
        save_model(Path(base["NANOCHAT_BASE_DIR"]), source, tag, step)
    names: dict[str, Any] = {
        "step": 1, "rewards_list": [1.0, 0.0], "lengths": [3, 4], "advantages": [0.5, -0.5]
    }  # fmt: skip
    for source in blocks(page, "python"):
        exec(compile(source, f"<{page}>", "exec"), names)
    assert names["metadata"]["step"] == 400 and (Path(base["NANOCHAT_BASE_DIR"]) / "prime_rl_runs").is_dir()
    texts = names.get("responses") or names["answers"]
    assert len(texts) == 4 and all(isinstance(text, str) for text in texts)
    if page == "page":
        env, own_env = names["load_with_reasons"](num_train_examples=2, num_eval_examples=1), names["load_own"]()
    else:
        env, own_env = names["env"], names["custom_env"]
    check_rewards(env, own_env)


def check_rewards(env: Any, own_env: Any) -> None:
    """0.2 x the reward for a reason; 1 for the answer."""
    from rollouts.training.environments.verifiers_adapter import VerifiersEnvironment

    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    from scripted_client import play

    door = VerifiersEnvironment("own", own_env)
    output = play(door, door.rows()[:2], lambda row: lambda _: f"I say {row['answer']}.")
    assert [rollout.reward for rollout in output] == [1.0, 1.0]
    door = VerifiersEnvironment("aqua", env)
    [plain] = play(door, door.rows()[:1], lambda row: lambda _: f"Answer: {row['answer']}")
    [reasoned] = play(door, door.rows()[:1], lambda row: lambda _: f"Therefore\nAnswer: {row['answer']}")
    assert plain.reward == pytest.approx(1.1) and reasoned.reward > plain.reward and not reasoned.error
