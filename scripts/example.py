"""`make demo-real`: whole examples for one or several seeds, with evaluations before and after training.

    python scripts/example.py examples/smollm2/sums [--seeds 0 1 2] [--model.name smollm2] [--output-dir DIR]

An example is a folder with some of these files, which are used in this order: `data.py` (writes training rows),
`sft.toml`, `rl.toml`; `eval.toml` evaluates the untouched model and the model after each stage. Results are kept below
the output directory, where a seed with `result.json` is not repeated: `results.md` (table and samples), `curve.svg`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from stages import ROOT, Stages, digest_settings, format_score, is_local, newest_weights, read_summaries, shown

from prime_rl.monitor.summary import message_text
from prime_rl.pretrained.fetch import KNOWN_MODELS
from prime_rl.runtime.machine import find_free_port
from rollouts.training.metrics import load_jsonl, load_last_attempts

HELD_OUT_LOSS = "val_loss/mean"
DISTILLATION = tuple(f"distill/*/{name}" for name in ("gap_closed*", "retention", "student/avg", "teacher_context/avg"))
TRAINING = {"sft": ("SFT", ("loss/mean", HELD_OUT_LOSS)), "rl": ("RL", ("reward/mean", *DISTILLATION))}
"""Training stages in order: title, and patterns of the metrics that are kept."""
NOT_PLOTTED = ("*/ci_*", "*/avg")
EVALUATIONS = "seed_{}/rl/evals"
"""Evaluations that `rl` makes itself, below the output directory."""
UNTOUCHED = "untouched"
NUM_SAMPLES = 4
MAX_SAMPLE_CHARS = 200

Curve = list[tuple[int, float]]
Curves = dict[str, Curve]
Result = dict[str, Any]
"""Of a seed, or of the untouched model: `scores` (stage -> environment -> summary), `curves`, seconds, memory."""


@dataclass
class Example:
    """One example and the options of this run."""

    folder: Path
    output_dir: Path
    model: str
    max_steps: int | None = None
    num_examples: int | None = None
    console: Console = field(default_factory=lambda: Console(highlight=False))

    @property
    def training(self) -> list[str]:
        """The training stages of this example, in order."""
        return [stage for stage in TRAINING if (self.folder / f"{stage}.toml").is_file()]

    @property
    def is_evaluated(self) -> bool:
        """Whether there is something to evaluate."""
        return (self.folder / "eval.toml").is_file()

    def begin(self, directory: Path, num_stages: int) -> Stages:
        """Stages below a directory; models of the hub are downloaded by the first command that needs them."""
        return Stages(self.console, directory, num_stages, offline=is_local(self.model))

    def evaluate(self, stages: Stages, title: str, model: str, output_dir: Path, seed: int) -> dict[str, Any]:
        """Evaluate a model on the held-out examples; returns the summary of each environment."""
        options = ["@", str(self.folder / "eval.toml"), "--model.name", model, "--output-dir", shown(output_dir)]
        if self.num_examples is not None:
            options += ["--num_examples", str(self.num_examples)]
        stages.run(title, "eval", *options, "--seed", str(seed))
        return read_summaries(output_dir)

    def run_untouched(self, directory: Path) -> Result:
        """Download the model where necessary, write the data, evaluate the model before training."""
        has_data = (self.folder / "data.py").is_file()
        stages = self.begin(directory, (self.model in KNOWN_MODELS) + has_data + self.is_evaluated)
        if self.model in KNOWN_MODELS:
            stages.run("download, unless cached", "fetch", self.model)
        if has_data:
            stages.run("training rows", str(self.folder / "data.py"))
        scores = {}
        if self.is_evaluated:
            title = "evaluation of the untouched model"
            scores[UNTOUCHED] = self.evaluate(stages, title, self.model, directory, 0)
        return describe(stages, scores, {})

    def run_seed(self, directory: Path, seed: int) -> Result:
        """Training stages and evaluations with one seed."""
        stages = self.begin(directory, len(self.training) * (1 + self.is_evaluated))
        model, scores, curves = self.model, {}, {}
        for stage in self.training:
            title, patterns = TRAINING[stage]
            options = ["@", str(self.folder / f"{stage}.toml"), "--model.name", model, "--seed", str(seed)]
            options += ["--output-dir", shown(directory / stage)]
            if self.max_steps is not None:
                options += ["--max_steps", str(self.max_steps)]
            if stage == "rl":
                options += ["--inference.server.port", str(find_free_port())]
            stages.run(f"{title}, seed {seed}", stage, *options)
            curves[stage] = read_curves(directory / stage, patterns)
            model = shown(newest_weights(directory / stage))
            if self.is_evaluated:
                title = f"evaluation after {title}, seed {seed}"
                scores[stage] = self.evaluate(stages, title, model, directory / stage, seed)
        return describe(stages, scores, curves)

    def run(self, seeds: Sequence[int]) -> None:
        """Run what is missing, then write and print the results."""
        finished = [path for path in sorted(self.output_dir.glob("*/result.json")) if path.parent.name != UNTOUCHED]
        if finished:
            self.console.print(f"Finished before, not repeated: {', '.join(shown(path.parent) for path in finished)}")
        settings = {"--model.name": self.model, "--max-steps": self.max_steps, "--num-examples": self.num_examples}
        settings |= {
            file.name: digest_settings(file) for end in ("toml", "py") for file in self.folder.glob(f"*.{end}")
        }
        untouched = keep_result(self.output_dir / UNTOUCHED, self.run_untouched, settings)
        results = {}
        for seed in seeds:
            directory = self.output_dir / f"seed_{seed}"
            results[seed] = keep_result(directory, partial(self.run_seed, seed=seed), settings)
        page = render_scores(untouched, results) + self.render_samples(seeds[0])
        (self.output_dir / "results.md").write_text(page)
        self.console.rule(f"[bold]{self.folder.name}", align="left")
        self.console.print(Markdown(page))
        self.console.print(f"\nWritten: {shown(self.output_dir / 'results.md')}", soft_wrap=True)
        if save_curves(results, self.output_dir / "curve.svg"):
            self.console.print(f"Written: {shown(self.output_dir / 'curve.svg')}", soft_wrap=True)

    def render_samples(self, seed: int) -> str:
        """The first held-out examples with the answers of the model before and after each stage, as Markdown."""
        if self.is_evaluated:
            dirs = {UNTOUCHED: self.output_dir / UNTOUCHED / "evals"}
            dirs |= {name_stage(stage): self.output_dir / f"seed_{seed}" / stage / "evals" for stage in self.training}
        else:
            steps = sorted(
                (self.output_dir / EVALUATIONS.format(seed)).glob("step_*"), key=lambda path: int(path.name[5:])
            )
            dirs = {path.name.replace("_", " "): path for path in (steps[:1] + steps[1:][-1:])}
        if not dirs:
            return ""
        first = next(iter(dirs))
        lines = [f"\nFirst held-out examples, seed {seed}:\n"]
        for env in sorted(file.parent.name for file in dirs[first].glob("*/results.jsonl")):
            rows = {title: read_answers(path / env / "results.jsonl") for title, path in dirs.items()}
            for number, (prompt, _, _) in list(rows[first].items())[:NUM_SAMPLES]:
                lines.append(f"- {prompt}")
                for title, answers in rows.items():
                    _, answer, outcome = answers[number]
                    lines.append(f"  - {title} ({outcome}): {answer}")
        return "\n".join(lines) + "\n"


def describe(stages: Stages, scores: dict[str, Any], curves: dict[str, Any]) -> Result:
    """What is kept of the stages of a seed."""
    return {
        "scores": scores,
        "curves": curves,
        "seconds": sum(stages.seconds.values()),
        "stage_seconds": stages.seconds,
        "cpu_seconds": stages.cpu_seconds,
        "peak_bytes": stages.memory.peak,
    }


def keep_result(directory: Path, run: Callable[[Path], Result], settings: dict[str, Any]) -> Result:
    """The result in a directory; `run` makes it where it is missing."""
    path = directory / "result.json"
    if not path.is_file():
        if directory.exists():
            raise SystemExit(f"error: {shown(directory)} is an unfinished run: remove it, or choose --output-dir")
        result = run(directory) | {"settings": settings}
        path.write_text(json.dumps(result, indent=1) + "\n")
    kept: Result = json.loads(path.read_text())
    if other := [name for name, value in kept.get("settings", settings).items() if settings.get(name) != value]:
        raise SystemExit(f"error: {shown(directory)} has another {other[0]}: choose another --output-dir")
    return kept


def read_curves(run_dir: Path, patterns: Sequence[str]) -> Curves:
    """Steps and values of the metrics that match one of the patterns."""
    found: Curves = {}
    for row in load_last_attempts(run_dir / "metrics.jsonl"):
        for name in (name for pattern in patterns for name in fnmatch.filter(row, pattern)):
            found.setdefault(name, []).append((row["step"], row[name]))
    return found


def read_answers(path: Path) -> dict[int, tuple[str, str, str]]:
    """Last prompt message, completion and outcome of the first rollout of each example."""
    rows = sorted(load_jsonl(path), key=lambda row: (row["example_id"], row["rollout_idx"]), reverse=True)
    return {
        row["example_id"]: (
            shorten(next((text for _, text in reversed(read_messages(row["prompt"]))), "")),
            " &rarr; ".join(f"{render_role(role)}`{shorten(text)}`" for role, text in read_messages(row["completion"])),
            "failed" if row["reward"] is None else f"reward {row['reward']:.2g}",
        )
        for row in sorted(rows, key=lambda row: row["example_id"])
    }


def read_messages(value: str | list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Role and text of the messages of a prompt or completion, which may be text alone."""
    if isinstance(value, str):
        return [("assistant", value)] if value else []
    return [(message["role"], message_text(message)) for message in value]


def render_role(role: str) -> str:
    """Prefix of a message of a transcript."""
    return "" if role == "assistant" else f"{role}: "


def shorten(text: str) -> str:
    """One line of at most `MAX_SAMPLE_CHARS`."""
    line = " / ".join(part for part in text.replace("`", "'").splitlines() if part.strip())
    return line if len(line) <= MAX_SAMPLE_CHARS else line[:MAX_SAMPLE_CHARS] + " ..."


def render_scores(untouched: Result, results: dict[int, Result]) -> str:
    """Held-out scores with 95% intervals, minutes and memory of each seed, as Markdown."""
    stages = list(dict.fromkeys([*untouched["scores"], *(stage for r in results.values() for stage in r["scores"])]))
    envs = list(dict.fromkeys(env for stage in untouched["scores"].values() for env in stage))
    columns = ["seed", *(f"{env}, {name_stage(stage)}" for env in envs for stage in stages)]
    losses = [stage for stage in TRAINING if any(HELD_OUT_LOSS in r["curves"].get(stage, {}) for r in results.values())]
    columns += [f"held-out loss, {TRAINING[stage][0]}" for stage in losses]
    distilled = list(dict.fromkeys(name for result in results.values() for name in render_distillation(result)))
    columns += [*distilled, "minutes", "CPU minutes", "peak memory, GiB"]
    lines = [columns, ["---:" for _ in columns]]
    for seed, result in results.items():
        scores = untouched["scores"] | result["scores"]
        cost = [result[key] + untouched[key] for key in ("seconds", "cpu_seconds")]
        peak = max(result["peak_bytes"], untouched["peak_bytes"])
        lines.append([str(seed), *(format_score(scores[stage][env]) for env in envs for stage in stages)])
        curves = [result["curves"][stage][HELD_OUT_LOSS] for stage in losses]
        lines[-1] += [f"{curve[0][1]:.3f} to {curve[-1][1]:.3f}" for curve in curves]
        lines[-1] += [render_distillation(result).get(name, "") for name in distilled]
        lines[-1] += [f"{cost[0] / 60:.1f}", f"{cost[1] / 60:.1f}", f"{peak / 2**30:.1f}"]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render_distillation(result: Result) -> dict[str, str]:
    """Cells for the last evaluation of a distillation: scores, gap closed with its 95% interval, retention."""
    curves = result["curves"].get("rl", {})
    cells = {}
    for name in fnmatch.filter(curves, "distill/*/student/avg"):
        env = name.removeprefix("distill/").removesuffix("/student/avg")  # may be a path
        first, last = curves[name][0][1], curves[name][-1][1]
        cells[f"{env}, before and after"] = f"{first:.2f}, {last:.2f}"
        if gap := curves.get(f"distill/{env}/gap_closed"):
            keys = [f"distill/{env}/gap_closed/{end}" for end in ("ci_low", "ci_high")]
            if interval := [f"{curves[key][-1][1]:.2f}" for key in keys if key in curves]:
                cells["teacher"] = f"{curves[f'distill/{env}/teacher_context/avg'][-1][1]:.2f}"
                cells["gap closed"] = f"{gap[-1][1]:.2f} ({' to '.join(interval)})"
            else:  # a single context of the environment
                cells[f"{env}, gap closed"] = f"{gap[-1][1]:.2f}"
        if retention := curves.get(f"distill/{env}/retention"):
            cells[f"{env}, retention"] = f"{retention[-1][1]:.2f}"
    return cells


def name_stage(stage: str) -> str:
    """Title of a column."""
    return stage if stage == UNTOUCHED else f"after {TRAINING[stage][0]}"


def save_curves(results: dict[int, Result], path: Path) -> bool:
    """Draw the curves of all seeds, a panel for each metric; False without matplotlib."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.figure import Figure

    first = next(iter(results.values()))["curves"]
    panels = [(stage, name) for stage, curves in first.items() for name in curves if is_plotted(name, curves[name])]
    figure = Figure((4.4 * len(panels), 2.8), layout="constrained")
    for axes, (stage, metric) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True):
        for seed, result in results.items():
            axes.plot(*zip(*result["curves"][stage][metric], strict=True), label=f"seed {seed}")
        axes.set(title=f"{TRAINING[stage][0]}: {metric}", xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, metadata={"Date": None})
    return True


def is_plotted(metric: str, curve: Curve) -> bool:
    """Whether a kept metric has a panel of its own; a reward that is not computed stays 0."""
    return any(value for _, value in curve) and not any(fnmatch.fnmatch(metric, pattern) for pattern in NOT_PLOTTED)


def main() -> int:
    """Run the examples one after the other; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run examples with evaluations before and after training.")
    parser.add_argument("examples", nargs="+", type=Path, help="folders, such as examples/smollm2/sums")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="seeds of prompt order and sampling")
    parser.add_argument("--model.name", dest="model", default="smollm2", help="model to start from")
    parser.add_argument("--max-steps", type=int, help="steps of each training stage; default: as in the files")
    parser.add_argument("--num-examples", type=int, help="held-out examples; default: as in the files")
    parser.add_argument("--output-dir", type=Path, help="default: outputs/examples/NAME")
    options = parser.parse_args()
    folders = [shown(folder.resolve()) for folder in options.examples]
    output_dir = (options.output_dir or ROOT / "outputs" / "examples").resolve()
    os.chdir(ROOT)  # the paths in the files are relative to the repository
    for folder in map(Path, folders):
        if not any((folder / f"{stage}.toml").is_file() for stage in TRAINING):
            parser.error(f"{folder} has neither sft.toml nor rl.toml: name the folder of an example")
        example = Example(folder, output_dir / folder.name, options.model, options.max_steps, options.num_examples)
        if code := example.begin(output_dir, 0).attempt(partial(example.run, options.seeds)):
            return code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
