"""`synthesize`: a model attempts the examples of environments; what passes the filters is a data set for `sft`.

model --> server (ours for a local model) --> environments --> journal --> filters --> synthesize/<env>.jsonl --> sft
                                                                 ^ a killed run goes on here
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.utils.command import run_command

if TYPE_CHECKING:
    from prime_rl.synthesize.config import SynthesizeConfig
    from prime_rl.utils.ask_command import AskRun
    from prime_rl.utils.asking import Target
    from prime_rl.utils.config import AskedEnvConfig
    from prime_rl.utils.journal import Result
    from rollouts.training.environments import Environment

FOLDER = "synthesize"


def synthesize(config: SynthesizeConfig) -> int:
    """Make the data set; returns the exit code."""
    from prime_rl.utils.ask_command import run_asking
    from prime_rl.utils.model_server import find_base_urls

    summaries: dict[str, dict[str, float]] = {}

    async def work(run: AskRun, base_urls: Sequence[str]) -> None:
        from prime_rl.utils.asking import Target
        from prime_rl.utils.model_server import connect

        async with connect(config.client, base_urls) as clients:
            target = Target(clients, config.model.name)
            for env in config.env:
                name = env.name or env.id
                summaries[name] = await synthesize_environment(run, config, env, run.environments[name], target)

    run_asking("synthesize", config, find_base_urls(config), {}, work)
    show_summary(summaries, config)
    return 0


async def synthesize_environment(
    run: AskRun, config: SynthesizeConfig, env: AskedEnvConfig, environment: Environment, target: Target
) -> dict[str, float]:
    """Run what is missing in one environment, write its rows, and return how many were kept and why not all."""
    from prime_rl.synthesize.rows import choose_results
    from prime_rl.utils.ask_command import run_missing
    from prime_rl.utils.asking import choose_rows

    name, root = env.name or env.id, config.output_dir / FOLDER
    rows = choose_rows(environment, env, config, config.split)
    journal = run.open_journal(root / "rollouts" / name.replace("/", "_"), env, target, config.model.name)
    groups = await run_missing(journal, environment, rows, env, config, target)
    verdicts = choose_results(groups, config.keep)
    write_rows(root, name, groups, verdicts, config.model.name)
    summary = summarize(groups, verdicts) | {"time": journal.elapsed}
    if not journal.reported:
        run.monitor.log({f"synthesize/{name}/{key}": value for key, value in summary.items()}, 0)
        journal.mark_reported()
    run.report_failures(name, groups)
    return summary


def write_rows(
    root: Path, name: str, groups: Sequence[Sequence[Result]], verdicts: Sequence[Sequence[str]], model: str
) -> None:
    """Write `<env>.jsonl`, the data set, and `rollouts/<env>/results.jsonl`, everything with its verdict."""
    import msgspec

    from prime_rl.synthesize.rows import KEPT, to_row

    file, pairs = name.replace("/", "_"), list(_pairs(groups, verdicts))
    everything = [msgspec.structs.asdict(result) | {"verdict": verdict} for result, verdict in pairs]
    _write_whole(root / "rollouts" / file / "results.jsonl", everything)
    _write_whole(root / f"{file}.jsonl", [to_row(result, name, model) for result, verdict in pairs if verdict == KEPT])


def summarize(groups: Sequence[Sequence[Result]], verdicts: Sequence[Sequence[str]]) -> dict[str, float]:
    """How many rows there are, what they earned beside what all earned, and how many were dropped for what reason."""
    from prime_rl.synthesize.rows import KEPT

    pairs = list(_pairs(groups, verdicts))
    counts = Counter(verdict for _, verdict in pairs)
    rewards = [result.reward for result, _ in pairs if result.reward is not None]
    earned = [result.reward for result, verdict in pairs if verdict == KEPT and result.reward is not None]
    return {
        "examples": len(groups),
        "rollouts": len(pairs),
        "kept": counts.pop(KEPT, 0),
        "reward/mean": statistics.fmean(rewards) if rewards else float("nan"),
        "kept/reward/mean": statistics.fmean(earned) if earned else float("nan"),
        **{f"dropped/{reason}": count for reason, count in sorted(counts.items())},
    }


def _pairs(groups: Sequence[Sequence[Result]], verdicts: Sequence[Sequence[str]]) -> list[tuple[Result, str]]:
    return [pair for group, row in zip(groups, verdicts, strict=True) for pair in zip(group, row, strict=True)]


def _write_whole(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    from rollouts.training.metrics import append_jsonl

    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.writing")
    temporary.write_bytes(b"")
    append_jsonl(temporary, rows)
    temporary.replace(path)


def show_summary(summaries: Mapping[str, Mapping[str, float]], config: SynthesizeConfig) -> None:
    """What came of each environment, where it lies, and how to train on it."""
    lines = []
    for name, summary in summaries.items():
        dropped = ", ".join(f"{count:.0f} {key[8:]}" for key, count in summary.items() if key.startswith("dropped/"))
        lines.append(
            f"{name}: kept {summary['kept']:.0f} of {summary['rollouts']:.0f} rollouts of {summary['examples']:.0f} "
            f"examples{f' (dropped: {dropped})' if dropped else ''} | Reward: {summary['reward/mean']:.4f}, "
            f"kept {summary['kept/reward/mean']:.4f} | Time: {summary['time']:.1f}s"
        )
    root = config.output_dir / FOLDER
    first = f"{next(iter(summaries)).replace('/', '_')}.jsonl"
    where = {
        "data set": root / first if len(summaries) == 1 else root,
        "rollouts": root / "rollouts",
        "metrics": config.output_dir / "metrics.jsonl",
        "next": f"sft --data.name {root / first if len(summaries) == 1 else root} --model.name <model>",
    }
    sys.stdout.write("\n".join(["", *lines, *(f"  {key:<8} {value}" for key, value in where.items()), ""]))


def main() -> None:
    """Console script `synthesize`."""
    run_command(
        "synthesize",
        "prime_rl.synthesize.config:SynthesizeConfig",
        synthesize,
        summary="Make training conversations with any model in verifiers environments, filtered, for sft.",
    )


if __name__ == "__main__":
    main()
