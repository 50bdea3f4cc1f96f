"""Unmodified recipes of `tinker-cookbook` against `serve`: each ends without an error, and its own metrics improve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tinker_server import PYTHON, ROOT, Server

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
"""Name of the tiny model, by which recipes choose their chat template (ChatML)."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("tinker_recipes"),
    pytest.mark.skipif(
        not any(PYTHON.parents[1].glob("lib/*/site-packages/tinker_cookbook")),
        reason="tinker-cookbook is not installed: make test-tinker",
    ),
]
NO_ROBOTS = f"""dataset_builder=tinker_cookbook.recipes.chat_sl.chat_datasets:NoRobotsBuilder
    dataset_builder.common_config.model_name_for_tokenizer={MODEL}
    dataset_builder.common_config.renderer_name=qwen3_instruct
    dataset_builder.common_config.batch_size=8 dataset_builder.common_config.max_length=256"""
GSM8K = f"""dataset_builder=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder
    dataset_builder.model_name_for_tokenizer={MODEL} dataset_builder.renderer_name=qwen3_instruct
    dataset_builder.batch_size=16 dataset_builder.group_size=8 dataset_builder.convo_prefix=None"""
OPTIONS = {
    "sl_loop": "batch_size=8 learning_rate=2e-2 lora_rank=8",
    "sl_basic": f"{NO_ROBOTS} learning_rate=2e-2 lora_rank=8",
    "rl_loop": "batch_size=8 group_size=8 max_tokens=16 max_steps=20 learning_rate=2e-3 lora_rank=8",
    "rl_basic": f"{GSM8K} max_tokens=16 max_steps=20 eval_every=19 learning_rate=2e-3 lora_rank=8",
    "prompt_distillation.train": "file_path=languages.jsonl batch_size=16 num_epochs=2 learning_rate=1e-2 lora_rank=8",
    "distillation.on_policy_distillation": f"""dataset=deepmath teacher_model={MODEL} teacher_checkpoint=TEACHER
        groups_per_batch=8 group_size=4 max_tokens=16 max_steps=20 learning_rate=2e-3 lora_rank=8""",
    "preference.dpo.train": "dataset=hhh batch_size=16 learning_rate=5e-3 dpo_beta=0.5",
    "math_rl.train": """env=polaris loss_fn=ppo num_substeps=2 groups_per_batch=16 group_size=8 max_tokens=16
        max_steps=16 learning_rate=2e-3 lora_rank=8""",
}
"""Recipe -> its options; those of docs/training_api.md."""

Rows = list[dict[str, Any]]


@dataclass
class Recipes:
    """Runs each recipe at most once, in a folder with its data, against one server."""

    server: Server
    folder: Path
    done: dict[str, Rows] = field(default_factory=dict)

    def run(self, name: str) -> Rows:
        """The metrics that a recipe wrote."""
        if name not in self.done:
            self.done[name] = self._start(name, OPTIONS[name])
        return self.done[name]

    def _start(self, name: str, options: str) -> Rows:
        if "TEACHER" in options:
            self.run("preference.dpo.train")
            saved = _read(self.folder / "logs" / "preference.dpo.train" / "checkpoints.jsonl")
            options = options.replace("TEACHER", saved[-1]["sampler_path"])
        command = [PYTHON, "-W", "ignore", "-m", f"tinker_cookbook.recipes.{name}", f"model_name={MODEL}"]
        found = subprocess.run(
            [*map(str, command), f"log_path=logs/{name}", *options.split()],
            cwd=self.folder,
            env=self.server.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
        return _read(self.folder / "logs" / name / "metrics.jsonl")


def _read(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _values(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recipes]:
    """A warmed-up tiny model behind `serve`, and data in folders that have the names of data sets of the hub."""
    folder = tmp_path_factory.mktemp("recipes")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    tasks = [str(ROOT / "examples" / "tinker" / "tasks.py")]
    warm_up = ["-m", "prime_rl", "sft", "@", str(ROOT / "examples" / "tinker" / "sft.toml"), "--log.level", "warning"]
    for command in ([sys.executable, *tasks], [sys.executable, *warm_up]):
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=900)
    work = folder / "outputs" / "tinker"
    [weights] = (work / "sft" / "weights").glob("step_*")
    (work / MODEL).parent.mkdir(parents=True)
    (work / MODEL).symlink_to(weights)
    server = Server(folder, ("--model.name", str(weights), "--model.served_names", json.dumps([MODEL])))
    yield Recipes(server, work)
    server.kill()


@pytest.mark.parametrize("name", ["sl_loop", "sl_basic", "prompt_distillation.train"])
def test_supervised_recipe_lowers_its_loss(recipes: Recipes, name: str) -> None:
    losses = _values(recipes.run(name), "train_mean_nll")
    assert _mean(losses[-4:]) < 0.6 * losses[0]


def test_supervised_recipe_lowers_its_held_out_loss(recipes: Recipes) -> None:
    losses = _values(recipes.run("sl_basic"), "test/nll")
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("name", ["rl_loop", "rl_basic", "math_rl.train"])
def test_rl_recipe_raises_its_reward(recipes: Recipes, name: str) -> None:
    """By its best four steps in a row: a policy of this size may lose its format for some steps, and find it again."""
    key = "reward/total" if name == "rl_loop" else "env/all/reward/total"
    rewards = _values(recipes.run(name), key)
    assert max(_mean(rewards[i : i + 4]) for i in range(len(rewards) - 3)) > _mean(rewards[:2]) + 0.1


def test_rl_recipe_solves_more_held_out_problems(recipes: Recipes) -> None:
    solved = _values(recipes.run("rl_basic"), "test/env/all/correct")
    assert solved[-1] > solved[0] + 0.1


def test_distillation_recipe_lowers_the_teacher_kl(recipes: Recipes) -> None:
    divergences = _values(recipes.run("distillation.on_policy_distillation"), "teacher_kl")
    assert _mean(divergences[-4:]) < 0.75 * _mean(divergences[:4])


def test_preference_recipe_prefers_the_chosen_replies(recipes: Recipes) -> None:
    rows = recipes.run("preference.dpo.train")
    losses, margins = _values(rows, "dpo_loss"), _values(rows, "margin")
    assert losses[0] == pytest.approx(0.6931, abs=1e-3)  # policy and reference are the same model
    assert _mean(losses[-4:]) < 0.7 * losses[0] and margins[-1] > margins[0]
