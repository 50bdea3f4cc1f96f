"""`synthesize`: run a model in environments and write the filtered conversations as a data set for `sft`.

model --> server (started for a local model) --> environments --> resume log --> filter --> synthesize/<env>.jsonl
                                                                      ^ an interrupted run resumes here
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.configuration.command import run_command
from prime_rl.runtime.run_dir import RunDir

if TYPE_CHECKING:
    from prime_rl.configuration.sections import GenerationEnvConfig
    from prime_rl.generation.resume_log import Result
    from prime_rl.generation.rollout_jobs import ModelEndpoint
    from prime_rl.generation.session import GenerationRun
    from prime_rl.synthesize.config import SynthesizeConfig
    from prime_rl.synthesize.rows import FilterVerdict
    from rollouts.training.environments import Environment


def synthesize(config: SynthesizeConfig) -> int:
    """Generate the data set; returns the exit code."""
    from prime_rl.generation.model_server import resolve_base_urls
    from prime_rl.generation.session import run_generation
    from prime_rl.runtime.run_state import StateRecorder

    base_urls, summaries = resolve_base_urls(config), dict[str, dict[str, float]]()

    async def work(run: GenerationRun, urls: Sequence[str]) -> None:
        from prime_rl.generation.model_server import connect
        from prime_rl.generation.rollout_jobs import ModelEndpoint

        async with connect(config.client, urls) as clients:
            endpoint = ModelEndpoint(clients, config.model.name)
            for env in config.env:
                name = env.display_name
                with run.collect_failures():
                    summaries[name] = await synthesize_environment(run, config, env, run.environments[name], endpoint)

    def show() -> None:
        if summaries:
            show_summary(summaries, config)

    with StateRecorder(config.output_dir, "synthesize"):
        run_generation("synthesize", config, base_urls, {}, work, show)
    return 0


async def synthesize_environment(
    run: GenerationRun,
    config: SynthesizeConfig,
    env: GenerationEnvConfig,
    environment: Environment,
    endpoint: ModelEndpoint,
) -> dict[str, float]:
    """Run the missing rollouts of one environment, write the rows and return the summary."""
    from prime_rl.generation.rollout_jobs import choose_rows
    from prime_rl.generation.session import run_missing
    from prime_rl.synthesize.rows import choose_results
    from rollouts.training.environments.protocol import require_row_prompts
    from rollouts.training.metrics import load_jsonl

    require_row_prompts(environment, "synthesize cannot write its games as conversations of one model")
    name, root = env.display_name, RunDir(config.output_dir).synthesize
    rows = choose_rows(environment, env, config, config.split)
    file = name.replace("/", "_")
    folder, data = _find_rollouts(root) / file, root / f"{file}.jsonl"
    resume_log = run.open_resume_log(folder, env, endpoint, config.model.name, config.split)
    groups = await run_missing(run, resume_log, environment, rows, env, endpoint)
    verdicts = choose_results(groups, config.keep)
    found = next(load_jsonl(data), {}).get("model")
    run.archive_results(found, config.model.name, [data, folder / "results.jsonl"])
    template_kwargs = config.sampling.extra_body.get("chat_template_kwargs")
    write_rows(root, name, groups, verdicts, config.model.name, template_kwargs)
    summary = summarize(groups, verdicts) | {"time": resume_log.elapsed}
    if not resume_log.reported:
        run.monitor.log({f"synthesize/{name}/{key}": value for key, value in summary.items()}, 0)
        resume_log.mark_reported()
    resume_log.release()
    run.report_failures(name, groups)
    return summary


def write_rows(
    root: Path,
    name: str,
    groups: Sequence[Sequence[Result]],
    verdicts: Sequence[Sequence[FilterVerdict]],
    model: str,
    template_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Write the data set `<env>.jsonl`, and all results with verdicts to `rollouts/<env>/results.jsonl`."""
    import msgspec

    from prime_rl.synthesize.rows import FilterVerdict, to_row
    from rollouts.training.metrics import replace_jsonl

    file, pairs = name.replace("/", "_"), list(_pairs(groups, verdicts))
    all_rows = [msgspec.structs.asdict(result) | {"verdict": verdict} for result, verdict in pairs]
    replace_jsonl(_find_rollouts(root) / file / "results.jsonl", all_rows)
    kept = [to_row(result, name, model, template_kwargs) for result, verdict in pairs if verdict is FilterVerdict.KEPT]
    replace_jsonl(root / f"{file}.jsonl", kept)


def summarize(groups: Sequence[Sequence[Result]], verdicts: Sequence[Sequence[FilterVerdict]]) -> dict[str, float]:
    """Counts, mean rewards of all and of kept rollouts, and dropped rollouts by reason."""
    from prime_rl.synthesize.rows import FilterVerdict

    pairs = list(_pairs(groups, verdicts))
    counts = Counter(verdict for _, verdict in pairs)
    rewards = [result.reward for result, _ in pairs if result.reward is not None]
    kept_rewards = [
        result.reward for result, verdict in pairs if verdict is FilterVerdict.KEPT and result.reward is not None
    ]
    return {
        "examples": len(groups),
        "rollouts": len(pairs),
        "kept": counts.pop(FilterVerdict.KEPT, 0),
        "reward/mean": statistics.fmean(rewards) if rewards else float("nan"),
        "kept/reward/mean": statistics.fmean(kept_rewards) if kept_rewards else float("nan"),
        **{f"dropped/{reason}": count for reason, count in sorted(counts.items())},
    }


def _pairs(
    groups: Sequence[Sequence[Result]], verdicts: Sequence[Sequence[FilterVerdict]]
) -> list[tuple[Result, FilterVerdict]]:
    return [pair for group, row in zip(groups, verdicts, strict=True) for pair in zip(group, row, strict=True)]


def _find_rollouts(root: Path) -> Path:
    """Folder of all rollouts, kept or dropped."""
    from rollouts.training.datasets.rows import ROLLOUTS

    return root / ROLLOUTS


def show_summary(summaries: Mapping[str, Mapping[str, float]], config: SynthesizeConfig) -> None:
    """Print a line per environment, the output paths, and the training command."""
    lines = []
    for name, summary in summaries.items():
        dropped = ", ".join(f"{count:.0f} {key[8:]}" for key, count in summary.items() if key.startswith("dropped/"))
        lines.append(
            f"{name}: kept {summary['kept']:.0f} of {summary['rollouts']:.0f} rollouts of {summary['examples']:.0f} "
            f"examples{f' (dropped: {dropped})' if dropped else ''} | Reward: {summary['reward/mean']:.4f}, "
            f"kept {summary['kept/reward/mean']:.4f} | Time: {summary['time']:.1f}s"
        )
    root = RunDir(config.output_dir).synthesize
    first = f"{next(iter(summaries)).replace('/', '_')}.jsonl"
    paths = {
        "data set": root / first if len(summaries) == 1 else root,
        "rollouts": _find_rollouts(root),
        "metrics": RunDir(config.output_dir).metrics,
        "next": f"sft --data.name {root / first if len(summaries) == 1 else root} --model.name <model>",
    }
    sys.stdout.write("\n".join(["", *lines, *(f"  {key:<8} {value}" for key, value in paths.items()), ""]))


def main() -> None:
    """Console script `synthesize`."""
    run_command(
        "synthesize",
        "prime_rl.synthesize.config:SynthesizeConfig",
        synthesize,
        summary="Generate filtered training conversations with any model in verifiers environments, for sft.",
    )


if __name__ == "__main__":
    main()
