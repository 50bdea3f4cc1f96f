"""Contextual learning in rounds: search a context, distill it, evaluate without it, search for what still fails.

    python scripts/contextual_learning.py FOLDER --model.name MODEL [--rounds 2] [--seed 0] [--output-dir DIR]

FOLDER has `evolve.toml`, `rl.toml` (a distillation with evaluations) and `eval.toml`. Round n starts from the weights
of round n - 1, with its adapter merged if it has one; after the first it starts from the context of the round before,
and searches on training examples that the model fails. The same command with the same --output-dir continues an
interrupted loop. `report.md` shows what each context gained and what of it reached the weights.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from stages import (
    ROOT,
    Stages,
    digest,
    digest_settings,
    find_average,
    format_score,
    is_local,
    newest_weights,
    next_directory,
    read_summaries,
    shown,
)

from prime_rl.evolve.config import EvolveConfig
from prime_rl.evolve.evolve import SOLVED
from prime_rl.runtime.machine import find_free_port
from prime_rl.runtime.process import ChildFailed
from prime_rl.runtime.run_dir import CKPT_PARTS, RunDir
from prime_rl.utils.pydantic_config import parse_argv
from rollouts.training.metrics import load_last_attempts
from rollouts.training.steps import complete_steps

STEPS_FILE = "loop.json"


@dataclass
class Loop:
    """The rounds of one loop; a stage whose results are recorded in `loop.json` is not repeated."""

    folder: Path
    output_dir: Path
    model: str
    rounds: int
    seed: int
    stages: Stages
    results: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Model, seed and digests of the files of finished stages."""

    def run(self) -> None:
        """Run all rounds; ends early once no context is found, or all training or held-out examples are solved."""
        file = self.output_dir / STEPS_FILE
        self.results = json.loads(file.read_text()) if file.is_file() else {}
        self.settings = self.results.pop("settings", {})
        self.check({"model": self.model, "seed": self.seed})
        self.evaluate("start", self.model)
        model = self.model
        for number in range(1, self.rounds + 1):
            folder = self.output_dir / f"round_{number}"
            if not self.search(number, folder, model):
                self.write_report()
                break
            self.distill(number, folder, model)
            model = self.merge(number, folder)
            self.evaluate(f"round {number}", model)
            self.write_report()
            summary = first_summary(self.results[f"round {number}: eval"])
            if summary[find_average(summary)] >= 1:
                break

    def search(self, number: int, folder: Path, model: str) -> bool:
        """Search the context of a round; False if every example is solved without one, or it is not `is_new`."""
        title, before = (
            f"round {number}: search",
            self.output_dir / f"round_{number - 1}" / "evolve" / "evolve" / "best.md",
        )
        distilled = "" if number == 1 else before.read_text()
        options = ["--examples", "failed", "--context-file", "None", "--context", distilled]
        try:
            is_done = self.do(title, "evolve", folder / "evolve", model, [] if number == 1 else options)
        except ChildFailed as failure:
            if SOLVED not in (failure.wrong_input or ""):
                raise
            self.record(title, {"is_solved": True})
            return False
        if is_done:
            found = folder / "evolve" / "evolve"
            summary = json.loads((found / "summary.json").read_text())
            self.record(title, {**summary, "context": (found / "best.md").read_text()})
        return is_new(self.results[title].get("context", ""), distilled)

    def distill(self, number: int, folder: Path, model: str) -> None:
        """Distill the context of a round into the weights."""
        context = folder / "evolve" / "evolve" / "best.md"
        searched, _ = parse_argv(EvolveConfig, ["@", str(self.folder / "evolve.toml"), "--model.name", model], "evolve")
        options = ["--orchestrator.teacher_model.context-file", str(context)]
        for name in ("context_position", "separator"):  # the teacher sees the context as the search did
            options += [f"--orchestrator.teacher_model.{name}", getattr(searched, name)]
        options += ["--orchestrator.teacher_model.eval-baseline", "true"]
        options += ["--inference.server.port", str(find_free_port())]
        if (folder / "rl").exists():
            options.append("--resume" if complete_steps(RunDir(folder / "rl").checkpoints, CKPT_PARTS) else "--clean")
        if self.do(f"round {number}: distillation", "rl", folder / "rl", model, options):
            rows = list(load_last_attempts(folder / "rl" / "metrics.jsonl"))
            last = {key: value for row in rows for key, value in row.items() if key.startswith(("distill/", "eval/"))}
            self.record(f"round {number}: distillation", last)

    def merge(self, number: int, folder: Path) -> str:
        """The model of a round: the newest weights, with an adapter merged into its base."""
        weights, merged = newest_weights(folder / "rl"), folder / "model"
        if not (weights / "adapter_config.json").is_file():
            return str(weights)
        if not merged.exists():
            self.stages.run(f"round {number}: merge", "convert", str(weights), str(merged))
        return str(merged)

    def evaluate(self, title: str, model: str) -> None:
        """Evaluate a model on held-out examples without a context."""
        folder = self.output_dir / title.replace(" ", "_") / "eval"
        if self.do(f"{title}: eval", "eval", folder, model, []):
            self.record(f"{title}: eval", read_summaries(folder))

    def do(self, title: str, command: str, output_dir: Path, model: str, options: list[str]) -> bool:
        """Run a stage unless its results are recorded; whether it was run."""
        file = self.folder / f"{command}.toml"
        settings = {file.name: digest_settings(file)}
        if self.settings.get(file.name) == digest(file.read_bytes()):  # as earlier versions recorded it
            self.settings |= settings
        self.check(settings)
        if title in self.results:
            return False
        given = ["@", shown(file), "--model.name", model, "--seed", str(self.seed)]
        self.stages.run(title, command, *given, "--output-dir", str(output_dir), *options)
        self.settings |= {"model": self.model, "seed": self.seed, **settings}
        return True

    def check(self, settings: Mapping[str, Any]) -> None:
        """End the script if finished stages had other settings."""
        for name, value in settings.items():
            if self.settings.get(name, value) != value:
                other = f": {self.settings[name]}" if name in ("model", "seed") else ""
                raise SystemExit(
                    f"error: {shown(self.output_dir)} has finished stages with another {name}{other}\n"
                    "  choose another --output-dir"
                )

    def record(self, title: str, result: Mapping[str, Any]) -> None:
        """Record a finished stage."""
        self.results[title] = result
        temporary = self.output_dir / f".{STEPS_FILE}"
        temporary.write_text(json.dumps({"settings": self.settings, **self.results}, indent=1) + "\n")
        temporary.replace(self.output_dir / STEPS_FILE)

    def write_report(self) -> None:
        """Write `report.md`."""
        (self.output_dir / "report.md").write_text(format_report(self.results, self.model))


def is_new(context: str, distilled: str) -> bool:
    """Whether a context is not empty and not the one that the weights were trained on last."""
    return context.strip() not in ("", distilled.strip())


def first_summary(summaries: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The summary of the first environment of an evaluation."""
    return next(iter(summaries.values()))


def format_report(results: Mapping[str, Any], model: str) -> str:
    """The gains of every round as a table, and the contexts as diffs."""
    lines = [
        f"# Contextual learning of {model}",
        "",
        "Scores without and with the context are of held-out examples, with 95 % intervals; those of the search are of",
        "its training examples, after the first round those that the model fails. *Reached the weights*: the share of",
        "the context's gain that is left without the context.",
        "",
        "| round | score of the search | rollouts | without context, before | with context | without context, after "
        "| reached the weights | retained |",
        "|---|---|---|---|---|---|---|---|",
    ]
    before, texts = results["start: eval"], [""]
    for number in range(1, len(results)):
        stages = [results.get(f"round {number}: {stage}") for stage in ("search", "distillation", "eval")]
        if None in stages:
            break
        search, distillation, after = stages
        key = next((key for key in distillation if key.endswith("/baseline_teacher/avg")), "")
        env, teacher = key.removeprefix("eval/").removesuffix("/baseline_teacher/avg"), distillation.get(key)
        closed, no_gap = distillation.get(f"distill/{env}/gap_closed"), "-" if teacher is None else "no gain"
        interval = [distillation.get(f"distill/{env}/gap_closed/{end}", 0.0) for end in ("ci_low", "ci_high")]
        retained = [value for key, value in distillation.items() if key.endswith("/retention")]
        cells = [
            f"{number}",
            f"{search['initial_mean']:.3f} -> {search['mean']:.3f}",
            f"{search['rollouts']}",
            format_score(first_summary(before)),
            "-" if teacher is None else f"{teacher:.3f}",
            format_score(first_summary(after)),
            no_gap if closed is None else f"{closed:.2f} ({interval[0]:.2f} to {interval[1]:.2f})",
            ", ".join(f"{value:.2f}" for value in retained) or "-",
        ]
        lines.append("| " + " | ".join(cells) + " |")
        texts.append(search["context"])
        before = after
    solved = [title.partition(":")[0] for title, result in results.items() if "is_solved" in result]
    lines += ["", f"Before {solved[0]} every training example is solved without a context."] if solved else []
    last = results.get(f"round {len(texts)}: search", {}).get("context")
    if last is not None and not is_new(last, texts[-1]):
        lines += ["", f"No context improved the score in round {len(texts)}."]
    for number in range(1, len(texts)):
        pair = [text.splitlines() for text in texts[number - 1 : number + 1]]
        diff = list(difflib.unified_diff(*pair, lineterm=""))[2:]
        lines += ["", f"## Context of round {number}", "", "```diff", *diff, "```"]
    return "\n".join(lines) + "\n"


def find_model(name: str) -> str:
    """A model's name, or its path from the repository; the same each time, as the stages resume by it."""
    path = Path(name)
    return str(path.absolute()) if path.exists() and Path.cwd() != ROOT else name


def main() -> int:
    """Run the loop; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=lambda text: Path(text).resolve())
    parser.add_argument("--model.name", dest="model", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=lambda text: Path(text).resolve())
    arguments = parser.parse_args()
    model = find_model(arguments.model)
    os.chdir(ROOT)  # the paths in the files are relative to the repository
    output_dir = arguments.output_dir or next_directory(ROOT / "outputs" / "contextual_learning")
    output_dir.mkdir(parents=True, exist_ok=True)
    trainer = tomllib.loads((arguments.folder / "rl.toml").read_text()).get("trainer", {})
    has_adapter = "lora" in trainer.get("model", {})
    num_stages = (3 + has_adapter) * arguments.rounds + 1
    stages = Stages(Console(highlight=False), output_dir, num_stages, offline=is_local(model))
    loop = Loop(arguments.folder, output_dir, model, arguments.rounds, arguments.seed, stages)
    code = stages.attempt(loop.run)
    if code == 0:
        stages.console.print(Markdown((output_dir / "report.md").read_text()))
        stages.console.print(f"Report: {shown(output_dir / 'report.md')}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
