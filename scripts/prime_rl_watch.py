"""Logging of `scripts.prime_rl_train`: a line per step, metrics of samples and ranks, and five figures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from nanochat.common import get_base_dir
from nanochat.loss_surface import compute_loss_surface
from nanochat.prime_rl_wandb import (
    OfflineWandbRun,
    RLMetricsTracker,
    log_prime_rl_metrics_to_wandb,
    setup_prime_rl_wandb,
)
from prime_rl.runtime.redacted_output import plain_output
from prime_rl.runtime.redaction import redact_fields
from prime_rl.runtime.run_dir import RunDir
from rollouts.training.types import Sample, Status

if TYPE_CHECKING:
    from scripts.prime_rl_train import Trainer

    from nanochat.learner import StepResult

SURFACE_SAMPLES = 8
"""Samples whose loss makes the surface; 82 passes over them each time."""
EVALUATION = "eval/"


class RunLogger:
    """Rank 0 prints, and logs metrics and figures to `prime_rl_runs/RUN` and Weights & Biases; others are silent."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.tracker = RLMetricsTracker(max_history=max(1000, trainer.num_steps + 1))
        self.runs: list[Any] = []
        self.last_error: str | None = None

    def begin(self, step: int) -> None:
        """Open the outputs of a run that has taken `step` steps, unless it is complete.

        A resumed run keeps the lines up to `step`; those of another run with this name are moved to `attempts/N`.
        """
        trainer, config = self.trainer, self.trainer.config
        if trainer.ranks.rank:
            return
        if 0 < step == trainer.num_steps:
            print(f"note: this run has taken all of its {step} steps", flush=True)
            return
        resolved = redact_fields(config.model_dump(mode="json"))
        local = OfflineWandbRun(get_base_dir() / "prime_rl_runs" / config.run, config.run, resolved)
        if trainer.resumed_run == config.run:
            local.continue_from(step)
        elif (folder := RunDir(local.directory).archive(local.files)) is not None:
            print(f"note: metrics of an earlier run moved to {folder}", flush=True)
        self.runs.append(local)
        if "wandb" in config.trainer.args.report_to:
            with plain_output():  # wandb replaces the `write` of the streams that it finds
                run = setup_prime_rl_wandb(
                    config.wandb_project,
                    config.run,
                    resolved,
                    config.wandb.tags,
                    entity=config.wandb_entity,
                    notes=config.wandb.run_notes,
                    log_dir=local.directory,
                )
            self.runs += [] if isinstance(run, OfflineWandbRun) else [run]

    def is_drawn(self, step: int) -> bool:
        """Whether figures are drawn at this step."""
        config = self.trainer.config
        return step == self.trainer.num_steps or step % (config.viz_every or config.eval_every) == 0

    def measure_surface(self, step: int, samples: Sequence[Sample]) -> None:
        """The loss around the policy, on samples with a gradient; call it in the training thread."""
        teaching = [s for s in samples if s.response_length and any(s.advantages or [])][:SURFACE_SAMPLES]
        if self.runs and teaching:
            learner = self.trainer.learner
            surface = compute_loss_surface(learner.model, lambda: learner.measure_loss(teaching))
            self.tracker.log_loss_surface(step, surface)

    def log(
        self, step: int, metrics: dict[str, float], samples: Sequence[Sample] = (), learned: StepResult | None = None
    ) -> None:
        """Log a step and its other measurements."""
        if not self.runs:
            return
        config, tracker = self.trainer.config, self.tracker
        rates = {f"train/lr_{group['name']}": float(group["lr"]) for group in self.trainer.optimizer.param_groups}
        tracker.log_metrics(step, {k: v for k, v in metrics.items() if not k.startswith(EVALUATION)} | rates)
        self._report_failures(step, samples)
        whole = [s for s in samples if s.status != Status.FAILED]
        if whole:
            tracker.log_rollout(
                step,
                [s.reward for s in whole],
                [s.response_length for s in whole],
                # One number per sample: every loss token of it has the same.
                [max(s.advantages or [0.0], key=abs) for s in whole],
            )
            size = self.trainer.ranks.size
            sync_s = metrics["distributed/mean_sync_time"]
            tracker.log_distributed_metrics(size, sync_s, describe_ranks(whole, size), step)
        if learned is not None:
            tracker.log_gradients(step, learned.grad_norms)
        evaluation = {k.removeprefix(EVALUATION): v for k, v in metrics.items() if k.startswith(EVALUATION)}
        if evaluation:
            pass_at_k = {int(k[5:]): v for k, v in evaluation.items() if k.startswith("pass@")}
            others = {k: v for k, v in evaluation.items() if not k.startswith("pass@")}
            tracker.log_evaluation(step, others.pop("accuracy"), pass_at_k)
            tracker.log_metrics(step, {f"eval/{k}": v for k, v in others.items()})  # named by the environment
        for run in self.runs:
            log_prime_rl_metrics_to_wandb(run, step, tracker, create_visualizations=self.is_drawn(step) and step > 0)
        if step % config.log_every == 0 or step == self.trainer.num_steps or evaluation:
            print(describe_step(step, self.trainer.num_steps, tracker.get_wandb_summary(step)), flush=True)

    def _report_failures(self, step: int, samples: Sequence[Sample]) -> None:
        """Print the first error of the step's rollouts, unless it was the last one printed."""
        errors = [s.error for s in samples if s.status == Status.FAILED]
        if errors and errors[0] != self.last_error:
            self.last_error = errors[0]
            print(f"warning: step {step}: {len(errors)} rollouts failed, the first: {errors[0]}", flush=True)

    def close(self) -> None:
        """Flush pending output and print the output paths."""
        for run in self.runs:
            run.finish()
        if self.runs:
            print(f"metrics.jsonl and figures (viz/*.html) are in {self.runs[0].directory}")


def summarize_step(step: int, samples: Sequence[Sample], learned: StepResult) -> dict[str, float]:
    """Metrics of one step other than statistics of rewards, lengths and advantages."""
    whole = [s for s in samples if s.status != Status.FAILED]
    groups: dict[int | None, list[float]] = {}
    for sample in whole:
        groups.setdefault(sample.group_index, []).append(sample.reward)
    metrics = {
        "rollout/truncated": fmean(s.status == Status.TRUNCATED for s in whole),
        "rollout/failed": 1 - len(whole) / len(samples),
        "rollout/staleness": fmean(step - 1 - min((v for _, v in s.versions), default=step - 1) for s in whole),
        "advantages/equal_groups": fmean(max(group) == min(group) for group in groups.values()),
        "train/grad_norm": learned.report.grad_norm,
        "train/skipped": float(learned.report.skipped is not None),
        "distributed/mean_sync_time": learned.sync_s,
    }
    names = {
        "loss/policy": ("policy/loss", "train/loss"),
        "entropy/mean": ("policy/entropy", "tokens/mean_entropy"),
        "logprobs/mean": ("tokens/mean_logprob",),
        "mismatch_kl/mean": ("tokens/mismatch_kl",),
        "loss_ref_kl/mean": ("policy/ref_kl",),
    }
    for theirs, ours in names.items():
        if theirs in learned.stats:
            metrics |= dict.fromkeys(ours, learned.stats[theirs])
    for name in sorted({name for s in whole for name in s.metadata.get("metrics", {})}):
        values = [s.metadata["metrics"][name] for s in whole if name in s.metadata.get("metrics", {})]
        metrics[f"rollout/{name}"] = fmean(values)
    return metrics


def describe_ranks(samples: Sequence[Sample], size: int) -> list[dict[str, float]]:
    """Reward, length and number of samples per rank; groups are assigned round-robin."""
    ranks = []
    for rank in range(size):
        own = [s for s in samples if (s.group_index or 0) % size == rank]
        numbers = {"samples": float(len(own))}
        if own:
            numbers |= {
                "mean_reward": fmean(s.reward for s in own),
                "mean_length": fmean(s.response_length for s in own),
            }
        ranks.append(numbers)
    return ranks


def describe_step(step: int, num_steps: int, metrics: dict[str, float]) -> str:
    """One line: reward, length and loss of the step, and its evaluation where there was one."""
    shown = {
        "reward": "rollout/mean_reward",
        "length": "rollout/mean_length",
        "equal": "advantages/equal_groups",
        "loss": "train/loss",
        "grad": "train/grad_norm",
        "pass@1": "eval/pass@1",
        "pass@8": "eval/pass@8",
        "letter": "eval/categorical_accuracy",
        "s": "time/step_s",
    }
    parts = [f"{label} {metrics[name]:.3f}" for label, name in shown.items() if name in metrics]
    return f"step {step}/{num_steps}  " + "  ".join(parts)
