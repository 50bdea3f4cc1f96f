"""Mistakes of new users, replayed: each ends with at most two lines, without a traceback, that contain the cure.

The commands run in this process up to the point where they would start processes or load a model.
"""

from __future__ import annotations

import importlib
import importlib.util
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from fake_transport import END, Wire, encode, turn

from prime_rl.__main__ import COMMANDS
from prime_rl.configuration.sections import SamplingConfig
from prime_rl.launcher.new_environment import write_environment
from prime_rl.training import train
from prime_rl.utils.vf import build_sampling_args
from rollouts.training.environments import load_environment
from rollouts.training.steps import publish_step

MAX_LINES = 2
FILES = {
    "rl.toml": 'max_steps = 5\noutput_dir = "runs/rl"\n[model]\nname = "tiny-qwen3"\n',
    "sft.toml": 'max_steps = 5\noutput_dir = "runs/sft"\n[model]\nname = "tiny-qwen3"\n'
    'debug = { random_init = true }\n[data]\nname = "rows.jsonl"\n',
    "trl.toml": "num_generations = 8\n",
    "learning_rate.toml": "[trainer]\nlearning_rate = 1e-5\n",
    "duplicate.toml": "max_steps = 5\nmax_steps = 6\n",
    "twice.toml": "[model]\nname = 'tiny-qwen3'\n[model]\n",
    "unquoted.toml": "[model]\nname = tiny-qwen3\n",
    "python.toml": "resume = True\n",
    "yaml.toml": "max_steps: 5\n",
    "json.toml": '{"max_steps": 5}\n',
    "run.yaml": "max_steps: 5\n",
    "env_table.toml": "[orchestrator.env]\nid = 'reverse-text'\n",
    "loop.toml": 'toml_files = ["loop.toml"]\n',
    "rows.jsonl": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n',
    "losses.py": "def good(inputs): return inputs\ndef none(): return 0\nclip = 0.2\n",
    "broken_losses.py": "import a_missing_package\n",
    "envs/no_factory.py": "def make(): return {}\n",
    "envs/syntax.py": "def load_environment(:\n",
    "envs/takes_n.py": "def load_environment(n): return {}\n",
    "envs/three-words.py": "def load_environment(): return {}\n",
    "weights/step_3/config.json": "{}",
    "adapter/adapter_config.json": "{}",
    "models/small/config.json": "{}",
    "empty_run/.keep": "",
    "occupied": "a file",
}
OK = "--model.name tiny-qwen3 --model.debug.random_init"

# Command line -> words of its error. PORT is a port that is in use.
MISTAKES = {
    # names of options
    "rl --max-step 5": "did you mean --max_steps?",
    "rl --lr 1e-5": "trainer.optim.lr",
    "rl --model tiny-qwen3": "--model.name",
    "rl --modle.name tiny-qwen3": "--model.name",
    "rl --batch-size 64": "--orchestrator.batch_size",
    "rl --env reverse-text": "--orchestrator.env",
    "rl --temperature 0.7": "--orchestrator.sampling.temperature",
    "rl --trainer.lr 1e-5": "--trainer.optim.lr",
    "rl --gpus 0,1": "rl --help",
    "rl --steps 5": "--max_steps",
    "rl -n 5": "two dashes",
    "rl max_steps=5": "--max_steps",
    "rl --max_steps": "needs a value",
    "rl --max_steps 5 6": "takes one value",
    "rl --no-max_async_level": "--max_async_level VALUE",
    "rl --help nothing-like-it-at-all": "--help all",
    "rl --help orchestrator.envs": "did you mean --help orchestrator.env?",
    # names of TRL and verl
    "rl --num_generations 8": "--orchestrator.rollouts_per_example",
    "rl --learning_rate 1e-6": "--trainer.optim.lr",
    "rl --per_device_train_batch_size 8": "--trainer.micro_bs",
    "rl --max_completion_length 256": "--orchestrator.sampling.max_tokens",
    "rl --beta 0.04": "--trainer.loss.kl_coef",
    "rl --use_vllm true": "--inference.backend",
    "rl --report_to wandb": "--wandb",
    "rl --dataset_name gsm8k": "--orchestrator.env.0.id",
    "rl --bf16": "--trainer.model.dtype",
    "rl --actor_rollout_ref.rollout.n 8": "--orchestrator.rollouts_per_example",
    "rl --trainer.total_epochs 3": "--max_steps",
    "rl data.train_batch_size=512": "--orchestrator.batch_size",
    "rl algorithm.adv_estimator=grpo": "--trainer.loss.type",
    "rl @ trl.toml": "orchestrator.rollouts_per_example",
    "rl @ learning_rate.toml": "trainer.optim.lr",
    "sft --dataset_name x": "--data.name",
    "sft --packing true": "--data.pack_function",
    "sft --num_train_epochs 3": "--num_epochs",
    "sft --model_name_or_path tiny-qwen3": "--model.name",
    "sft --lora_r 8": "--model.lora.rank",
    "env-eval --num_generations 4": "--rollouts_per_example",
    # values
    "rl --max_steps ten": "a whole number",
    "rl --max_steps -5": "at least 1",
    "rl --max_steps 1e3": "a whole number",
    "rl --trainer.optim.lr -1": "at least 0",
    "rl --trainer.optim.lr 1e-5,": "a number",
    "rl --seq_len 2k": "a whole number",
    "rl --trainer.loss.type grop": "did you mean grpo?",
    "rl --trainer.optim.type adam": "did you mean adamw?",
    "rl --trainer.model.dtype bf16": "did you mean bfloat16?",
    "rl --trainer.model.attn flash_attention_2": "must be one of auto, exact, sdpa, flash",
    "rl --inference.backend vlm": "did you mean vllm?",
    "rl --orchestrator.sampling.top_p 1.5": "at most 1",
    "rl --orchestrator.sampling.temperature hot": "a number",
    "rl --orchestrator.env.0.args {'n':3}": "double quotes",
    "rl --orchestrator.env.0.args 3": "name=value",
    "rl --orchestrator.env.1.id": "needs a value",
    "rl --orchestrator.env.5.id x": "next free index is 1",
    "rl --trainer_gpu_ids gpu0": "a whole number",
    "rl --trainer_gpu_ids 0 0": "twice",
    "rl help": "did you mean --help?",
    "rl --resume maybe": "unexpected word 'maybe'",
    f"rl {OK} --log.level loud": "choose one of",
    f"sft {OK} --log.level verbose": "choose one of",
    "env-eval --num-examples -3": "at least -1",
    "inference --server.port 80000": "at most 65535",
    # values that do not fit together
    "rl --orchestrator.batch_size 100 --orchestrator.rollouts_per_example 16": "whole groups",
    "rl --max_steps 5 --trainer.max_steps 6": "max_steps",
    "rl --seq_len 128 --inference.model.max_model_len 256": "raise seq_len",
    "rl --trainer.loss.teacher_tau 0.5": "teacher_model",
    "rl --trainer.loss.clip_low 0.2": "one of grpo",
    "rl --trainer.loss.type custom": "import_path",
    "rl --trainer.scheduler.type cosine": "set max_steps",
    "rl --orchestrator.buffer.easy_fraction 0.5": "set easy_threshold",
    "rl --no-inference --inference_gpu_ids 0": "remove one of them",
    "rl --inference.parallel.tp 2 --inference.backend embedded": "vllm",
    "sft --num_epochs 1 --max_steps 5": "leave one of them out",
    "sft --data.type fake --val.interval 5": "leave the section out",
    "env-eval --steps 3": "weights_dir",
    # files
    "rl @ zzzzzzzz.toml": "TOML files there",
    "rl @ r1.toml": "did you mean rl.toml?",
    "rl @ configs/mine/rl.toml": "does not exist",
    "rl rl.toml": "@ rl.toml",
    "rl @rl.toml": "a space is missing",
    "rl @": "must be followed by a file",
    "rl --config rl.toml": "@ rl.toml",
    "rl @ .": "is a directory",
    "rl @ duplicate.toml": "line 2",
    "rl @ twice.toml": "line 3",
    "rl @ unquoted.toml": "text needs quotes",
    "rl @ python.toml": "true or false",
    "rl @ yaml.toml": "not valid TOML",
    "rl @ json.toml": "not valid TOML",
    "rl @ run.yaml": "not valid TOML",
    "rl @ env_table.toml": "[[orchestrator.env]]",
    "rl @ loop.toml": "inherits from itself",
    "rl @ examples/reverse_txt/rl.toml": "does not exist",
    # models
    "rl --model.name tiny-qwen33": "did you mean tiny-qwen3?",
    "rl --model.name smolm2": "did you mean smollm2?",
    "rl --model.name Qwen3-0.6B": "owner/name",
    "rl --model.name weights": "--model.name weights/step_3",
    "rl --model.name ./no/such/dir": "no directory",
    "rl --model.name models": "did you mean models/small?",
    "rl --model.name adapter": "LoRA adapter",
    "rl --model.name rl.toml": "GGUF",
    "rl @ examples/reverse_text/tiny/rl.toml": "an earlier run writes it",
    "sft @ sft.toml --model.name weights": "weights/step_3",
    "env-eval --model.name weights": "weights/step_3",
    "env-eval --model.name gpt-4.1-mini": "OPENAI_API_KEY",
    "env-eval --model.name tiny-qwen3 --weights-dir nowhere": "no complete step",
    "env-eval --model.name tiny-qwen3 --weights-dir weights --steps 9": "available: 3",
    # environments
    f"rl {OK} --orchestrator.env.0.id reverse-txt": "did you mean 'reverse-text'?",
    f"rl {OK} --orchestrator.env.0.id gsm9k": "did you mean 'gsm8k'?",
    f"rl {OK} --orchestrator.env.0.id ./envs/missing.py": "correct the path",
    f"rl {OK} --orchestrator.env.0.id ./envs/no_factory.py": "has no function load_environment",
    f"rl {OK} --orchestrator.env.0.id ./envs/syntax.py": "SyntaxError",
    f"rl {OK} --orchestrator.env.0.id ./envs/takes_n.py": "add it to its args",
    f"rl {OK} --orchestrator.env.0.id ./envs/three-words.py": "without dashes",
    f"rl {OK} --orchestrator.env.0.id reverse-text --orchestrator.env.0.args min_len=3": "min_length",
    f"rl {OK} --orchestrator.env.0.id 'my env'": "is not a name",
    f"rl {OK} --orchestrator.env.1.id reverse-text": "rename one of them",
    "env-eval --model.name tiny-qwen3 --env.0.id wordl": "did you mean 'wordle'?",
    # losses, trackers, devices, ports, directories
    f"rl {OK} --trainer.loss.type custom --trainer.loss.import_path losses": "package.module:name",
    f"rl {OK} --trainer.loss.type custom --trainer.loss.import_path lossess:good": "package.module:name",
    f"rl {OK} --trainer.loss.type custom --trainer.loss.import_path losses:god": "package.module:name",
    f"rl {OK} --trainer.loss.type custom --trainer.loss.import_path losses:none": "does not take the arguments",
    f"rl {OK} --trainer.loss.type custom --trainer.loss.import_path losses:clip": "not a function",
    f"rl {OK} --trainer.loss.type custom --trainer.loss.import_path broken_losses:good": "a_missing_package",
    f"rl {OK} --trainer.loss.type custom --trainer.loss.import_path losses:good --trainer.loss.kwargs a=1": "arguments",
    f"rl {OK} --wandb": "pip install",
    f"rl {OK} --trackio": "pip install",
    f"rl {OK} --tensorboard": "pip install",
    "sft @ sft.toml --wandb": "pip install",
    f"rl {OK} --inference.server.port PORT": "choose another one",
    f"rl {OK} --output-dir occupied": "choose another --output-dir",
    f"rl {OK} --output-dir /proc/runs": "choose another --output-dir",
    "inference --model.name tiny-qwen3 --server.port PORT": "choose another --server.port",
    "inference --model.name tiny-qwen3 --backend vllm": "pip install",
    "rl --model.name tiny-qwen3": "model.debug.random_init = true",
    # earlier runs
    f"rl {OK} --resume --clean": "leave one of them out",
    f"rl {OK} --output-dir used": "--clean",
    f"rl {OK} --output-dir used --ckpt.resume_step 7": "no complete checkpoint",
    f"rl {OK} --output-dir used --resume": "no complete checkpoint",
    # data of sft
    "sft @ sft.toml --data.name rows.json": "was not found",
    "sft @ sft.toml --data.split test": "no split 'test'",
    "sft @ sft.toml --data.seq_len 0": "at least 2",
    # monitor, init, plan and the module
    "monitor nowhere/at/all/x": "no directory",
    "monitor empty_run": "metrics",
    "monitor --sevre": "monitor --help",
    "monitor empty_run --port http --serve": "invalid int value",
    "rl init": "rl init my_task",
    "rl init 9lives": "my_task",
    "rl init json": "choose another name",
    "rl init Class": "lower-case",
    "rl init there": "choose another name",
    "plan --cluster.gpu h10": "did you mean h100?",
    "convert missing.gguf out": "missing.gguf",
    "fetch smollm3": "smollm2",
}


class Started(AssertionError):
    """The command went on to start processes or to load a model."""


def fail_to_start(*_: object, **__: object) -> None:
    raise Started


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "weights/step_3/STABLE").touch()
    publish_step(tmp_path / "used" / "weights", 2, lambda path: (path / "config.json").write_text("{}"))
    write_environment("there", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for tracker in ("wandb", "trackio", "tensorboardX"):
        monkeypatch.setitem(sys.modules, tracker, None)
    monkeypatch.setattr("importlib.util.find_spec", without_trackers(importlib.util.find_spec))
    monkeypatch.setattr("prime_rl.rl.run_processes", fail_to_start)
    monkeypatch.setattr("prime_rl.generation.model_server.start_server", fail_to_start)
    return tmp_path


def without_trackers(find: Callable[..., Any]) -> Callable[..., Any]:
    """`find_spec` on a machine without the packages of trackers and without vLLM."""
    missing = ("wandb", "trackio", "tensorboardX", "vllm")
    return lambda name, *rest: None if name in missing else find(name, *rest)


FAST_SHARE = 4
"""One command line in so many is part of the fast suite."""


@pytest.mark.parametrize(
    ("line", "words_of_cure"),
    [
        pytest.param(line, words, id=line, marks=pytest.mark.slow if index % FAST_SHARE else ())
        for index, (line, words) in enumerate(MISTAKES.items())
    ],
)
def test_a_mistake_is_answered_in_two_lines(
    line: str, words_of_cure: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("localhost", 0)) as taken:
        prog, *words = shlex.split(
            line.replace("PORT", str(taken.getsockname()[1])), posix="'" in line and "{" not in line
        )
        name = prog.removeprefix("env-")
        monkeypatch.setattr("sys.argv", [name, *words])
        module, _, function = COMMANDS[name][0].partition(":")
        with pytest.raises(SystemExit) as end:
            getattr(importlib.import_module(module), function)()
    shown = capsys.readouterr().err
    lines = [row for row in shown.splitlines() if not row.startswith(("note: ", "warning: "))]
    assert end.value.code == 2, shown
    assert len(lines) <= MAX_LINES and "Traceback" not in shown and "error: " in shown, shown
    assert words_of_cure in " ".join(lines), shown


# Code of an environment -> words of the error, when it is loaded or when its reward is computed.
ROWS = "[{'prompt': 'a', 'answer': 'b'}]"
ENVIRONMENTS = {
    "import a_missing_package\ndef load_environment(): return {}": "No module named 'a_missing_package'",
    "def load_environment(): return 3": "return a verifiers environment",
    "def load_environment(): return None": "return a verifiers environment",
    "def load_environment(): return {'dataset': [], 'rewards': len}": "dataset has no rows",
    "def load_environment(): return {'rewards': len}": "dataset",
    f"def load_environment(): return {{'dataset': {ROWS}}}": "rewards",
    f"def load_environment(): return {{'dataset': {ROWS}, 'rewards': []}}": "rewards must be a function",
    f"def load_environment(): return {{'dataset': {ROWS}, 'reward': len}}": "reward",
    "def load_environment(): return {'dataset': [{'text': 'a'}], 'rewards': len}": "has no prompt",
    "def load_environment(): return {'dataset': ['a'], 'rewards': len}": "row 0 of the dataset",
    "def load_environment(): return {'dataset': [{'prompt': 3}], 'rewards': len}": "text or a list of messages",
    "def load_environment(): return open('no/such/file')": "env.py:1",
}
REWARDS = {
    "return None": "returned None: return a finite number",
    "pass": "returned None",
    "return float('nan')": "returned nan",
    "return float('inf')": "returned inf",
    "return 'good'": "returned 'good'",
    "return '1.0'": "returned '1.0'",
    "return [1.0]": "returned [1.0]",
    "return {'reward': 1.0}": "return a finite number",
    "return answer['value']": "TypeError",
    "return float(completion)": "could not convert",
    "return 1 / 0": "ZeroDivisionError: division by zero",
}


def write_module(folder: Path, code: str) -> str:
    """The id of a new environment with this code; every one has its own name, as modules are imported once."""
    name = f"mistake_{len(list(folder.glob('mistake_*')))}_{abs(hash(code))}"
    (folder / name).mkdir()
    (folder / name / f"{name}_env.py").write_text(code)
    return str(folder / name / f"{name}_env.py")


@pytest.mark.parametrize("code", ENVIRONMENTS)
def test_a_mistake_in_an_environment_is_named(code: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        load_environment(write_module(tmp_path, code))
    assert ENVIRONMENTS[code] in str(error.value) and len(str(error.value).splitlines()) <= MAX_LINES


@pytest.mark.parametrize("body", REWARDS)
@pytest.mark.parametrize("library", ["plain", "verifiers"])
def test_a_mistake_in_a_reward_is_named(body: str, library: str, tmp_path: Path) -> None:
    """None of these is trained on as a reward of 0."""
    reward = f"def score(completion, answer):\n    {body}\n"
    made = {
        "plain": f"def load_environment(): return {{'dataset': {ROWS}, 'rewards': score}}\n",
        "verifiers": "import verifiers as vf\nfrom datasets import Dataset\ndef load_environment():\n"
        "    rows = Dataset.from_list([{'question': 'a', 'answer': 'b'}])\n"
        "    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[score]))\n",
    }[library]
    environment = load_environment(write_module(tmp_path, reward + made))
    wire = Wire(script=[turn([*encode("word"), END])])
    args = [build_sampling_args(SamplingConfig(), 0)]
    [rollout] = anyio.run(environment.run_group, environment.rows()[0], wire, "m", args, 0)
    assert rollout.error_type == "RewardError" and len((rollout.error or "").splitlines()) <= MAX_LINES
    assert "score" in (rollout.error or "")
    assert REWARDS[body] in (rollout.error or "") or (library == "verifiers" and body == "return float(completion)")


def test_mistakes_in_a_call_of_train_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="top of a module"):
        train("tiny-qwen3", lambda: {}, 5)
    with pytest.raises(ValueError, match="at least 1"):
        train("tiny-qwen3", "reverse-text", 0)
    with pytest.raises(ValueError, match=r"did you mean orchestrator\.batch_size"):
        train("tiny-qwen3", "reverse-text", 5, settings={"batch_size": 8})
    with pytest.raises(ValueError, match=r"did you mean orchestrator\.rollouts_per_example"):
        train("tiny-qwen3", "reverse-text", 5, settings={"num_generations": 8})
    with pytest.raises(ValueError, match="did you mean 'reverse-text'"):
        train("tiny-qwen3", "reverse-txt", 5, settings={"model.debug.random_init": True}, output_dir="runs/x")


def test_at_least_a_hundred_mistakes_are_replayed() -> None:
    assert len(MISTAKES) + len(ENVIRONMENTS) + len(REWARDS) >= 150
