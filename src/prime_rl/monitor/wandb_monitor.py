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

from prime_rl.monitor import local_runs
from prime_rl.monitor.summary import failed_samples, printable, sample_text, summarise, summary_text

if TYPE_CHECKING:
    from prime_rl.monitor.series import Series

EPILOG = """\
RUN is the directory of a run (its --output-dir), or the id of a run at Weights & Biases.
W&B needs the variable WANDB_API_KEY.

  monitor --list                                  runs below outputs/, and of the W&B project
  monitor outputs/rl --save-dir plots             summary, failed samples, loss.png, reward.png, optimizer.png
  monitor outputs/rl --report report.html         one page with curves, timeline and rollouts, to keep or to send
  monitor outputs/rl --serve                      the same page, live
  monitor 4fj2k1x9 --entity my-team --project prime-rl --reward-threshold 0.3 --max-samples 20
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"error: {message}\n  monitor --help lists the options\n")
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser = _Parser(
        "monitor",
        description="Show what became of a run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", nargs="?", metavar="RUN", help="directory of a run, or its id at Weights & Biases")
    parser.add_argument("--list", action="store_true", help="list runs, the newest first")
    parser.add_argument("--num-runs", type=_count, default=20, metavar="N", help="runs that --list shows (20)")
    parser.add_argument(
        "--runs-dir", type=Path, default=Path("outputs"), help="where --list looks for local runs (outputs)"
    )
    parser.add_argument("--entity", help="team or user at Weights & Biases (your default one)")
    parser.add_argument("--project", help="project at Weights & Biases (prime-rl)")
    parser.add_argument(
        "--save-dir", type=Path, metavar="DIR", help="write loss.png, reward.png and optimizer.png there"
    )
    parser.add_argument(
        "--reward-threshold", type=float, default=0.5, metavar="R", help="samples below this reward failed (0.5)"
    )
    parser.add_argument("--max-samples", type=_count, default=5, metavar="N", help="failed samples that are shown (5)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the run as one page that needs no network")
    parser.add_argument("--serve", action="store_true", help="show the run as a page on this machine, live")
    parser.add_argument("--port", type=int, default=8050, help="where --serve listens, 0 for any free port (8050)")
    parser.add_argument("--explain", action="store_true", help="batch algebra, who waits for whom, and what to change")
    parser.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="where two runs part for the first time")
    parser.add_argument("--replay", type=_count, metavar="STEP", help="take an optimizer step again and compare hashes")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--metrics-only", action="store_true", help="no samples")
    only.add_argument("--samples-only", action="store_true", help="no metrics and no plots")
    return parser


def run(options: argparse.Namespace) -> int:
    """The command after its arguments are read; returns the exit code."""
    if options.list:
        list_all(options)
        return 0
    if options.diff is not None:
        return diff(*options.diff)
    if options.run is None:
        raise ValueError("which run? give a directory or a W&B run id, or --list to see what there is")
    if Path(options.run).is_dir():
        found = local_runs.open_run(Path(options.run))
        if options.replay is not None:
            return replay_step(found, options.replay)
        if options.report or options.serve or options.explain:
            return look(options, found)
        series = local_runs.load_series(found)
        show(options, f"{found.name} ({local_runs.state_of(found, series)})", series, found.samples())
    else:
        from prime_rl.monitor import wandb_runs

        if options.report or options.serve or options.explain or options.replay is not None:
            raise ValueError(f"{options.run} is no directory: --report, --serve, --explain, --replay read local runs")
        if "/" in options.run and options.run.count("/") != 2:
            raise ValueError(f"{options.run} is no directory; a W&B run is named by its id, or as entity/project/id")
        remote = wandb_runs.open_run(options.run, options.entity, options.project or "prime-rl")
        samples: Iterable[Mapping[str, Any]] = () if options.metrics_only else remote.samples()
        series = {} if options.samples_only else remote.load_series()
        show(options, f"{remote.name} ({remote.state})", series, samples)
    return 0


def look(options: argparse.Namespace, found: local_runs.LocalRun) -> int:
    """The report, the explanation and the live page of a local run."""
    if options.explain:
        from prime_rl.monitor.explain import findings_text
        from prime_rl.monitor.page_data import explain_run

        say(f"{found.name}\n\n{findings_text(explain_run(found))}")
    if options.report:
        from prime_rl.monitor.report import write_report

        held = write_report(found, options.report)
        tokens = "" if held["with_tokens"] == held["rollouts"] else f", {held['with_tokens']} of them with their tokens"
        say(
            f"{options.report}: {held['rollouts']} of {held['total']} rollouts{tokens}, {held['bytes'] / 1e6:.2f} MB; "
            "open it in a browser"
        )
    if options.serve:
        from prime_rl.monitor.serve import serve

        return serve(found, options.port, say)
    return 0


def diff(a: Path, b: Path) -> int:
    """Tell where two runs part; 0 when they do not, else 1."""
    from prime_rl.monitor.compare import compare_runs, differences_text

    runs = local_runs.open_run(a), local_runs.open_run(b)
    found = compare_runs(*runs)
    say(differences_text(*runs, found))
    return int(any(difference.step is not None for difference in found))


def replay_step(found: local_runs.LocalRun, step: int) -> int:
    """Take a step again; 0 when it comes out equal, else 1."""
    from prime_rl.monitor.replay import replay, verdict_text

    verdict = replay(found, step, say)
    say(verdict_text(step, verdict))
    return 0 if verdict.equal else 1


def show(
    options: argparse.Namespace, title: str, series: Mapping[str, Series], samples: Iterable[Mapping[str, Any]]
) -> None:
    """Summary, plots and failed samples, as far as they are asked for."""
    say(title)
    if not options.samples_only:
        say("\n" + summary_text(summarise(series)))
        if options.save_dir is not None:
            from prime_rl.monitor.plots import save_plots

            written = save_plots(series, options.save_dir)
            say("\n" + ("plots: " + ", ".join(map(str, written)) if written else "nothing to plot yet"))
    if not options.metrics_only:
        failed = failed_samples(samples, options.reward_threshold, options.max_samples)
        say(
            f"\n{len(failed)} samples with a reward below {options.reward_threshold:g}, the newest first"
            if failed
            else f"\nno sample has a reward below {options.reward_threshold:g}"
        )
        for row in failed:
            say("\n" + sample_text(row))


def list_all(options: argparse.Namespace) -> None:
    """Local runs, then those of the W&B project where there is a key or a project is asked for."""
    from prime_rl.monitor import wandb_runs

    local = local_runs.find_runs(options.runs_dir)[: options.num_runs]
    say(f"{options.runs_dir}: {len(local) or 'no'} runs")
    for found in local:
        series = local_runs.load_series(found)
        facts = [
            f"{name} {series[key][-1][1]:.4g}"
            for name, key in (("loss", "loss/mean"), ("reward", "reward/mean"))
            if series.get(key)
        ]
        last = max((points[-1][0] for points in series.values()), default=0)
        say(f"  {found.name}  {local_runs.state_of(found, series)}  step {last}  {'  '.join(facts)}".rstrip())
    if not (wandb_runs.has_key() or options.project or options.entity):
        say("W&B: set WANDB_API_KEY to list its runs")
        return
    project = options.project or "prime-rl"
    rows = wandb_runs.runs_text(wandb_runs.list_runs(options.entity, project, options.num_runs))
    say(f"W&B {project}: {len(rows) or 'no'} runs")
    for row in rows:
        say("  " + "  ".join(row))


def say(text: str) -> None:
    """One piece of output; what it quotes cannot move the cursor."""
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


def _count(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return value


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Console script `monitor`: exit code 0, 1 where runs differ or a replay fails, 2 for wrong input."""
    options = build_parser().parse_args(argv)
    try:
        raise SystemExit(run(options))
    except ValueError as error:
        sys.stderr.write("\n".join(f"error: {error}".splitlines()[:3]) + "\n")
        raise SystemExit(2) from None
    except RuntimeError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:
        sys.stderr.close()  # the reader (a pager, head) has gone; Python must not complain once more
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
