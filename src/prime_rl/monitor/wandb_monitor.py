"""`monitor`: metrics, failed samples and plots of runs, at Weights & Biases or in a local directory.

Also runs by path, `python src/prime_rl/monitor/wandb_monitor.py`, where nothing but wandb and pandas is installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if __package__ in (None, ""):  # run by path
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from prime_rl.configuration.arguments import CommandParser
from prime_rl.monitor import local_runs
from prime_rl.monitor.distillation import count_skipped, read_scores, scores_text, skipped_text
from prime_rl.monitor.explain import find_symptoms, findings_text
from prime_rl.monitor.plots import check_matplotlib, save_plots
from prime_rl.monitor.run_kind import Kind, RunKind, find_kind
from prime_rl.monitor.run_status import find_status
from prime_rl.monitor.summary import (
    failed_samples,
    printable,
    sample_text,
    summarize_metrics,
    summary_text,
    unscored_samples,
)

if TYPE_CHECKING:
    from prime_rl.monitor.series import Series

EPILOG = """\
RUN is the directory of a run (its --output-dir), or the id of a run at Weights & Biases.
W&B needs the variable WANDB_API_KEY.

  monitor                                         live page of all runs below outputs/
  monitor --list                                  runs below outputs/, and of the W&B project
  monitor outputs/rl --save-dir plots             summary, failed samples, loss.png, reward.png, optimizer.png
  monitor outputs/rl --report report.html         one page with curves, timeline and rollouts, to keep or to send
  monitor outputs/rl --open                       the same page, live, in the browser (--serve: only the address)
  monitor 4fj2k1x9 --entity my-team --project prime-rl --reward-threshold 0.3 --max-samples 20
"""


def build_parser() -> CommandParser:
    """The options of the command."""
    parser = CommandParser("monitor", "Summarize a run.", EPILOG)
    parser.add_argument("run", nargs="?", metavar="RUN", help="directory of a run, or its id at Weights & Biases")
    parser.add_argument("--list", action="store_true", help="list runs, the newest first")
    parser.add_argument("--num-runs", type=_count, default=20, metavar="N", help="runs that --list shows (20)")
    parser.add_argument("--runs-dir", type=Path, default=Path("outputs"), help="folder of the local runs (outputs)")
    parser.add_argument("--entity", help="team or user at Weights & Biases (your default one)")
    parser.add_argument("--project", help="project at Weights & Biases (prime-rl)")
    parser.add_argument(
        "--save-dir", type=Path, metavar="DIR", help="write loss.png, reward.png and optimizer.png there"
    )
    parser.add_argument(
        "--reward-threshold",
        type=float,
        metavar="R",
        help="samples below this reward failed (0.5; without it a distillation shows samples without teacher scores)",
    )
    parser.add_argument("--max-samples", type=_count, default=5, metavar="N", help="failed samples that are shown (5)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the run as one page that needs no network")
    parser.add_argument("--serve", action="store_true", help="show the run, or all runs of a folder, as a live page")
    parser.add_argument(
        "--port", type=int, help="where the page is served, 0 for any free port (8050, else a free one)"
    )
    parser.add_argument("--open", action="store_true", help="--serve, and open the page in the browser")
    parser.add_argument(
        "--explain", action="store_true", help="batch composition, pipeline stalls and recommended changes"
    )
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="first differences between two runs")
    parser.add_argument("--replay", type=_count, metavar="STEP", help="repeat an optimizer step and compare digests")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--metrics-only", action="store_true", help="no samples")
    only.add_argument("--samples-only", action="store_true", help="no metrics and no plots")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run the command with parsed options; returns the exit code."""
    if options.list:
        list_all(options)
        return 0
    if options.diff is not None:
        return diff(*options.diff)
    check_combination(options)
    if options.save_dir is not None:
        check_matplotlib()
    if options.run is None or options.serve or options.open:
        return serve_pages(options)
    if Path(options.run).is_dir():
        run = local_runs.open_run(Path(options.run))
        if options.replay is not None:
            return replay_step(run, options.replay)
        series = local_runs.load_series(run)
        kind = find_kind(series, run.tables(), bool(run.evaluations()))
        if options.report or options.explain:
            draw_plots(options, series, kind)
            return inspect_run(options, run)
        show(options, f"{run.name} ({find_status(run).text})", series, run.samples(), kind)
    else:
        from prime_rl.monitor import wandb_runs

        if options.report or options.explain or options.replay is not None:
            raise ValueError(f"{options.run} is no directory: --report, --explain, --replay read local runs")
        if "/" in options.run and options.run.count("/") != 2:
            raise ValueError(f"{options.run} is no directory; a W&B run is named by its id, or as entity/project/id")
        remote = wandb_runs.open_run(options.run, options.entity, options.project or "prime-rl")
        samples: Iterable[Mapping[str, Any]] = () if options.metrics_only else remote.samples()
        series = {} if options.samples_only else remote.load_series()
        show(options, f"{remote.name} ({remote.state})", series, samples, find_kind(series, {}))
    return 0


def check_combination(options: argparse.Namespace) -> None:
    """`ValueError` for an option that another one would make ineffective."""
    ineffective = {
        "serve": ("replay", "save_dir"),
        "open": ("replay", "save_dir"),
        "replay": ("report", "explain", "save_dir"),
        "samples_only": ("save_dir",),
    }
    for option, others in ineffective.items():
        for other in others:
            if options.run is not None and getattr(options, option) and getattr(options, other):
                text = f"--{other} has no effect with --{option}".replace("_", "-")
                raise ValueError(f"{text}: run the command once with each of them")


def serve_pages(options: argparse.Namespace) -> int:
    """Serve the live page of a run, which may not have started, or of all runs below a folder."""
    try:
        from prime_rl.monitor.live_runs import LiveRuns
        from prime_rl.monitor.serve import serve
    except ImportError as error:
        raise ValueError(f"the page needs the package {error.name}: pip install prime-rl") from error
    if options.run is None:
        for name in ("report", "explain", "replay", "save_dir"):
            if getattr(options, name):
                raise ValueError(f"--{name.replace('_', '-')}: which run? pass its directory")
        return serve(LiveRuns(options.runs_dir), options.port, print_text, open_browser=options.open)
    path = Path(options.run)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is no directory: pass the --output-dir of a run")
    run = local_runs.LocalRun(path.resolve())
    if options.report or options.explain:
        inspect_run(options, local_runs.open_run(path))
    is_folder = not run.exists() and any(True for _ in local_runs.find_runs(path))
    return serve(LiveRuns(path) if is_folder else run, options.port, print_text, open_browser=options.open)


def inspect_run(options: argparse.Namespace, run: local_runs.LocalRun) -> int:
    """The report and the explanation of a local run."""
    if options.explain:
        from prime_rl.monitor.page_data import explain_run

        print_text(f"{run.name}\n\n{findings_text(explain_run(run))}")
    if options.report:
        from prime_rl.monitor.report import write_report

        counts = write_report(run, options.report)
        tokens = "" if counts["with_tokens"] == counts["rollouts"] else f", {counts['with_tokens']} with tokens"
        print_text(
            f"{options.report}: {counts['rollouts']} of {counts['total']} rollouts{tokens}, "
            f"{counts['bytes'] / 1e6:.2f} MB; open it in a browser"
        )
    return 0


def diff(a: Path, b: Path) -> int:
    """Print the first differences of two runs; returns 0 if there are none, else 1."""
    from prime_rl.monitor.compare import compare_runs, differences_text

    runs = local_runs.open_run(a), local_runs.open_run(b)
    differences = compare_runs(*runs)
    print_text(differences_text(*runs, differences))
    return int(any(difference.step is not None for difference in differences))


def replay_step(run: local_runs.LocalRun, step: int) -> int:
    """Replay a step; returns 0 if it is identical, else 1."""
    from prime_rl.monitor.replay import replay, verdict_text

    verdict = replay(run, step, print_text)
    print_text(verdict_text(step, verdict))
    return 0 if verdict.equal else 1


def show(
    options: argparse.Namespace,
    title: str,
    series: Mapping[str, Series],
    samples: Iterable[Mapping[str, Any]],
    kind: RunKind,
) -> None:
    """Print the requested summary, plots and samples."""
    print_text(title if kind.kind is Kind.UNKNOWN else f"{title}\n{kind.title}")
    if not options.samples_only:
        print_text("\n" + summary_text(summarize_metrics(series, kind)))
        if symptoms := find_symptoms(series, kind):
            print_text("\n" + findings_text(symptoms))
        if kind.has_teacher:
            show_distillation(series)
        draw_plots(options, series, kind)
    if not options.metrics_only:
        show_samples(options, samples, kind)


def draw_plots(options: argparse.Namespace, series: Mapping[str, Series], kind: RunKind) -> None:
    """Write the plots to --save-dir, if it is given."""
    if options.save_dir is not None:
        written = save_plots(series, options.save_dir, kind)
        print_text("\n" + ("plots: " + ", ".join(map(str, written)) if written else "nothing to plot yet"))


def show_distillation(series: Mapping[str, Series]) -> None:
    """Print scores of student and teacher, and samples without teacher scores."""
    scores = read_scores(series)
    print_text(
        "\n"
        + (scores_text(scores) if scores else "no gap or retention: orchestrator.teacher_model.eval_baseline is off")
    )
    if skipped := count_skipped(series):
        print_text("\n" + skipped_text(skipped))


def show_samples(options: argparse.Namespace, samples: Iterable[Mapping[str, Any]], kind: RunKind) -> None:
    """Print failed samples: low reward, or without teacher scores if the run uses no reward."""
    failed: Sequence[Mapping[str, Any]]
    if kind.kind is Kind.DISTILLATION and options.reward_threshold is None:
        unscored = unscored_samples(samples, options.max_samples)
        failed, what = unscored or [], "without teacher scores"
        if unscored is None:
            return
    else:
        threshold = 0.5 if options.reward_threshold is None else options.reward_threshold
        failed, what = failed_samples(samples, threshold, options.max_samples), f"with a reward below {threshold:g}"
    if not failed and kind.kind in (Kind.SFT, Kind.SERVER):
        return  # they have no rewards
    noun = "sample" if len(failed) == 1 else "samples"
    print_text(f"\n{len(failed) or 'no'} {noun} {what}" + (", the newest first" if len(failed) > 1 else ""))
    for row in failed:
        print_text("\n" + sample_text(row, kind.scores_rewards))


def list_all(options: argparse.Namespace) -> None:
    """List local runs, then those of the W&B project if a key or a project is set."""
    from prime_rl.monitor import wandb_runs

    local = local_runs.find_runs(options.runs_dir)[: options.num_runs]
    print_text(f"{options.runs_dir}: {len(local) or 'no'} runs")
    for run in local:
        try:
            text = describe_run(run)
        except OSError as error:
            text = f"cannot be read ({error.strerror or error})"
        print_text(f"  {run.name}  {text}")
    if not (wandb_runs.has_key() or options.project or options.entity):
        print_text("W&B: set WANDB_API_KEY to list its runs")
        return
    project = options.project or "prime-rl"
    rows = wandb_runs.runs_text(wandb_runs.list_runs(options.entity, project, options.num_runs))
    print_text(f"W&B {project}: {len(rows) or 'no'} runs")
    for row in rows:
        print_text("  " + "  ".join(row))


def describe_run(run: local_runs.LocalRun) -> str:
    """State, step, last loss and last reward or teacher KL of a run."""
    series = local_runs.load_series(run)
    kind = find_kind(series, run.tables(), bool(run.evaluations()))
    progress = ("teacher KL", "teacher_kl/mean") if kind.kind is Kind.DISTILLATION else ("reward", "reward/mean")
    facts = [f"{name} {series[key][-1][1]:.4g}" for name, key in (("loss", "loss/mean"), progress) if series.get(key)]
    status = find_status(run)
    at = "" if status.state == "stopped" else f"  step {status.step}"  # its text has the step
    return f"{status.text}{at}  {'  '.join(facts)}".rstrip()


def print_text(text: str) -> None:
    """Print a text without control characters."""
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


def _count(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Console script `monitor`: exit code 0; 1 if runs differ or a replay fails; 2 for invalid input."""
    build_parser().run(run, argv)


if __name__ == "__main__":
    main()
