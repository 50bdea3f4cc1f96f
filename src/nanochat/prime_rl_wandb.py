"""Metrics of a nanochat run per step, logged to Weights & Biases or to local files."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import msgspec

from nanochat import prime_rl_figures as figures
from nanochat.env_file import read_variable
from nanochat.wandb_login import is_logged_in
from rollouts.training.metrics import JSONLLogger, load_jsonl, replace_jsonl
from rollouts.training.types import as_plain

DEFAULT_TAGS = ("prime-rl", "nanochat", "aquarat", "reinforcement-learning")
SUMMARY_FILE, FIGURES_DIR = "summary.json", "viz"
INIT_TIMEOUT_S = 60.0
OFFLINE = "WANDB_MODE=offline keeps them for wandb sync"
log = logging.getLogger("nanochat")


@dataclass
class _Step:
    """One step: samples, metrics, gradient norms of layers, pass@k of its evaluation."""

    rewards: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    layer_norms: dict[str, float] = field(default_factory=dict)
    pass_at_k: dict[int, float] = field(default_factory=dict)


class RLMetricsTracker:
    """The last `max_history` steps of a run. Lists may be those of numpy or torch; nothing appears that was not logged.

    Samples and tokens of a step may come in several parts: statistics are over the finite values of all of them.
    """

    def __init__(self, max_history: int = 1000) -> None:
        self.max_history = max_history
        self.steps: dict[int, _Step] = {}
        self.loss_surface: dict[str, Any] | None = None

    def log_rollout(self, step: int, rewards: Any, sequence_lengths: Any, advantages: Any = None) -> None:
        """One value per sample of each; raises `ValueError` if their lengths differ."""
        values = {"rewards": _numbers(rewards), "sequence_lengths": _numbers(sequence_lengths)}
        if advantages is not None:
            values["advantages"] = _numbers(advantages)
        counts = {name: len(numbers) for name, numbers in values.items()}
        if len(set(counts.values())) > 1 or not values["rewards"]:
            counted = ", ".join(f"{count} {name}" for name, count in counts.items())
            raise ValueError(f"step {step}: {counted}; give one number of each per sample")
        record = self._at(step)
        record.rewards += _finite(values["rewards"])
        record.lengths += _finite(values["sequence_lengths"])
        record.advantages += _finite(values.get("advantages", []))

    def log_policy_update(
        self, step: int, policy_loss: float, value_loss: float | None = None, entropy: float | None = None
    ) -> None:
        """The step's losses; a value loss only with a value model."""
        given = {"policy/loss": policy_loss, "policy/value_loss": value_loss, "policy/entropy": entropy}
        self.log_metrics(step, {name: value for name, value in given.items() if value is not None})

    def log_token_metrics(self, logprobs: Any, entropies: Any = None, step: int | None = None) -> None:
        """Log-probs and entropies of sampled tokens, of the newest step unless `step` names another."""
        record = self._at(max(self.steps, default=0) if step is None else step)
        record.logprobs += _finite(_numbers(logprobs))
        record.entropies += [] if entropies is None else _finite(_numbers(entropies))

    def log_evaluation(self, step: int, accuracy: float, pass_at_k: Any = None, **others: float) -> None:
        """An evaluation: `pass_at_k` by k, or its values for k = 1, 2, ...; `others` such as categorical_accuracy."""
        values = [] if pass_at_k is None else pass_at_k
        by_k = dict(values) if isinstance(values, Mapping) else dict(enumerate(_numbers(values), 1))
        record = self._at(step)
        record.pass_at_k = {int(str(k).removeprefix("pass@")): float(value) for k, value in by_k.items()}
        record.metrics |= {f"eval/{name}": float(value) for name, value in {"accuracy": accuracy, **others}.items()}
        record.metrics |= {f"eval/pass@{k}": value for k, value in record.pass_at_k.items()}

    def log_distributed_metrics(
        self, world_size: int, sync_time: float, per_rank: Sequence[Mapping[str, float]] = (), step: int | None = None
    ) -> None:
        """Number of ranks, seconds of synchronization, and metrics of each rank as `distributed/rank_0/...`."""
        given = {"distributed/world_size": float(world_size), "distributed/mean_sync_time": sync_time}
        for rank, numbers in enumerate(per_rank):
            given |= {f"distributed/rank_{rank}/{name}": float(value) for name, value in numbers.items()}
        self.log_metrics(max(self.steps, default=0) if step is None else step, given)

    def log_gradients(self, step: int, norms: Mapping[str, float]) -> None:
        """Norm of the gradient of every parameter, by its name."""
        self._at(step).layer_norms = figures.layer_norms(norms)

    def log_loss_surface(self, step: int, surface: Mapping[str, Any]) -> None:
        """The result of `compute_loss_surface` at a step; the newest is drawn."""
        self.loss_surface = {"step": step, **surface}

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Any other metrics of a step, under their full names."""
        self._at(step).metrics |= {name: float(value) for name, value in metrics.items()}

    def get_wandb_summary(self, step: int | None = None) -> dict[str, float]:
        """All metrics of a step, by default the newest; raises `ValueError` for an unknown step."""
        newest = max(self.steps, default=None)
        record = self.steps.get(newest if step is None else step) if newest is not None else None
        if record is None:
            if step is None:
                return {}
            raise ValueError(f"nothing was logged for step {step}; the steps here are {list(self.steps)[-10:]}")
        summary = {
            **_describe("rollout", "reward", record.rewards),
            **_describe("rollout", "length", record.lengths),
            **{f"tokens/mean_{name}": fmean(v) for name, v in _tokens(record).items() if v},
        }
        if record.advantages:
            summary |= {"advantages/mean": fmean(record.advantages), "advantages/std": pstdev(record.advantages)}
            summary["advantages/zero"] = fmean(value == 0 for value in record.advantages)
        return {**summary, **{f"gradients/{k}": v for k, v in record.layer_norms.items()}, **record.metrics}

    def figure_data(self) -> dict[str, dict[str, Any]]:
        """Data of the five figures; only those with enough data."""
        data = {
            "reward_landscape_3d": figures.density_data({n: s.rewards for n, s in self.steps.items()}),
            "advantage_distribution": figures.density_data({n: s.advantages for n, s in self.steps.items()}),
            "gradient_flow": figures.gradient_data({n: s.layer_norms for n, s in self.steps.items()}),
            "loss_surface": self.loss_surface,
            "pass_at_k": figures.pass_at_k_data({n: s.pass_at_k for n, s in self.steps.items()}),
        }
        return {name: found for name, found in data.items() if found is not None}

    def create_reward_landscape_3d(self) -> Any:
        """The figure, or None while there are fewer than two steps of samples; raises `ValueError` without plotly."""
        return self._draw("reward_landscape_3d")

    def create_advantage_distribution_plot(self) -> Any:
        """The figure, or None while there are fewer than two steps with advantages."""
        return self._draw("advantage_distribution")

    def create_gradient_flow_3d(self) -> Any:
        """The figure, or None while there are fewer than two steps with gradients."""
        return self._draw("gradient_flow")

    def create_loss_surface_3d(self) -> Any:
        """The figure, or None when no surface was computed."""
        return self._draw("loss_surface")

    def create_pass_at_k_plot(self) -> Any:
        """The figure, or None without an evaluation."""
        return self._draw("pass_at_k")

    def _draw(self, name: str) -> Any:
        data = self.figure_data().get(name)
        return None if data is None else draw_figure(name, data)

    def _at(self, step: int) -> _Step:
        record = self.steps.setdefault(int(step), _Step())
        while len(self.steps) > self.max_history:
            del self.steps[min(self.steps)]
        return record


def draw_figure(name: str, data: Mapping[str, Any]) -> Any:
    """A plotly figure of the data that `figure_data` has under `name`; raises `ValueError` without plotly."""
    match name:
        case "reward_landscape_3d":
            return figures.draw_density(dict(data), "Reward landscape: rewards of the samples", "reward")
        case "advantage_distribution":
            return figures.draw_density(dict(data), "Advantages of the samples", "advantage")
        case "gradient_flow":
            return figures.draw_gradient_flow(dict(data))
        case "loss_surface":
            return figures.draw_loss_surface(dict(data))
        case "pass_at_k":
            return figures.draw_pass_at_k(dict(data))
    raise ValueError(f"there is no figure {name!r}")


class OfflineWandbRun:
    """A local run with the interface of a Weights & Biases run.

    `directory` holds metrics.jsonl, summary.json (the last value of every metric, at the end), and in viz/ every
    figure as a page and as data.
    """

    def __init__(self, directory: Path, name: str, config: Mapping[str, Any] | None = None) -> None:
        self.directory, self.name, self.config = Path(directory), name, dict(config or {})
        self.summary: dict[str, float] = {}
        self._next_step = 0
        self._lines = JSONLLogger(self.directory)

    @property
    def files(self) -> list[Path]:
        """What the run writes."""
        return [self._lines.path, self.directory / SUMMARY_FILE, self.directory / FIGURES_DIR]

    def continue_from(self, step: int) -> None:
        """Drop the lines after `step`, which a resumed run repeats; the summary is that of the others."""
        path = self._lines.path
        rows = list(load_jsonl(path))
        kept = [row for row in rows if row.get("step", 0) <= step]
        if len(kept) < len(rows):
            replace_jsonl(path, kept)
        for row in kept:
            self.summary |= {name: value for name, value in row.items() if name != "timestamp" and value is not None}
        self._next_step = int(self.summary.get("step", -1)) + 1

    def log(self, data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Append a line of metrics, and write other values as figures.

        The step is that of `data`, else `step`, else the one after the last; with `commit` False the next call without
        a step has the same one, as in a Weights & Biases run.
        """
        step = int(data.get("step", self._next_step if step is None else step))
        self._next_step = step if commit is False else step + 1
        numbers = {k: number for k, v in data.items() if k != "step" and (number := _as_number(v)) is not None}
        if numbers:
            self._lines.log(numbers, step)
        self.summary |= {"step": step, **numbers}
        for name, value in data.items():
            if name != "step" and name not in numbers:
                self._write_figure(name, value)

    def finish(self) -> None:
        """Write the summary of what was logged, if anything was."""
        if not self.summary:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / SUMMARY_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(self.summary)))

    def _write_figure(self, name: str, value: Any) -> None:
        path = self.directory.joinpath(*name.split("/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        if hasattr(value, "write_html"):
            # One local copy of the library: the pages work without a network.
            value.write_html(str(path.with_name(path.name + ".html")), include_plotlyjs="directory")
        else:
            path.with_name(path.name + ".json").write_bytes(msgspec.json.encode(value, enc_hook=as_plain))


def _as_number(value: Any) -> int | float | None:
    """The number that a value is, or that a tensor or an array holds; None for others."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError):  # it has several elements
            return None
    return value if isinstance(value, (int, float)) else None


def setup_prime_rl_wandb(
    project_name: str = "nanochat-prime-rl",
    run_name: str | None = None,
    config: Mapping[str, Any] | None = None,
    tags: Sequence[str] | None = None,
    *,
    entity: str | None = None,
    notes: str | None = None,
    log_dir: Path | None = None,
) -> Any:
    """An open run: at Weights & Biases where there is a key (the environment's, or that of `.env`), offline with
    WANDB_MODE=offline, and else an `OfflineWandbRun`, as also for the name "dummy", WANDB_MODE=disabled and without
    wandb.

    A run that cannot be opened is kept offline, to be sent later by `wandb sync`.
    """
    directory = Path(log_dir) if log_dir is not None else _default_dir(run_name)
    mode = read_variable("WANDB_MODE") or "online"
    if run_name == "dummy" or mode == "disabled":
        return OfflineWandbRun(directory, run_name or directory.name, config)
    key = read_variable("WANDB_API_KEY")
    if mode == "online" and not key and not is_logged_in():
        return _run_here(directory, run_name, config, "no WANDB_API_KEY and no `wandb login`", OFFLINE)
    try:
        import wandb
    except ImportError:
        return _run_here(directory, run_name, config, "wandb is not installed", "pip install 'prime-rl[wandb]'")
    directory.mkdir(parents=True, exist_ok=True)

    def open_run(mode: str) -> Any:
        return wandb.init(
            project=project_name,
            name=run_name,
            entity=entity or read_variable("WANDB_ENTITY"),
            config=dict(config or {}),
            tags=list(tags or DEFAULT_TAGS),
            notes=notes,
            dir=str(directory),
            mode=mode,  # type: ignore[arg-type, unused-ignore]
            settings=wandb.Settings(api_key=key, init_timeout=INIT_TIMEOUT_S),
        )

    try:
        run = open_run("offline" if mode == "offline" else "online")
    except wandb.Error as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        log.warning("wandb did not start (%s): the run is kept in %s for `wandb sync`", reason, directory)
        run = open_run("offline")
    run.define_metric("*", step_metric="step")
    return run


def log_prime_rl_metrics_to_wandb(
    wandb_run: Any, step: int, rl_tracker: RLMetricsTracker, create_visualizations: bool = True
) -> None:
    """The metrics of `step` to a run, and on request the figures over all its steps.

    An `OfflineWandbRun` gets the figures' data too, and without plotly only that. Raises `ValueError` for an unknown
    step.
    """
    wandb_run.log({"step": step, **rl_tracker.get_wandb_summary(step)})
    if not create_visualizations:
        return
    data = rl_tracker.figure_data()
    if isinstance(wandb_run, OfflineWandbRun):
        wandb_run.log({"step": step, **{f"{FIGURES_DIR}/{name}": found for name, found in data.items()}})
    try:
        drawn = {f"{FIGURES_DIR}/{name}": draw_figure(name, found) for name, found in data.items()}
    except ValueError as error:
        log.warning("%s", error)
        return
    if drawn:
        wandb_run.log({"step": step, **drawn})


def _run_here(
    directory: Path, name: str | None, config: Mapping[str, Any] | None, reason: str, cure: str
) -> OfflineWandbRun:
    log.warning("%s: metrics and figures go to %s (%s)", reason, directory, cure)
    return OfflineWandbRun(directory, name or directory.name, config)


def _default_dir(run_name: str | None) -> Path:
    from nanochat.common import get_base_dir

    return get_base_dir() / "prime_rl_runs" / (run_name or "prime_rl_default")


def _numbers(values: Any) -> list[float]:
    """A flat list of floats from a list, an array or a tensor of any shape."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(plain, Iterable):
        return [float(plain)]
    return [number for value in plain for number in _numbers(value)]


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _describe(group: str, what: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    numbers = {"mean": fmean(values), "max": max(values), "min": min(values), "std": pstdev(values)}
    return {f"{group}/{name}_{what}": value for name, value in numbers.items()}


def _tokens(record: _Step) -> dict[str, list[float]]:
    return {"logprob": record.logprobs, "entropy": record.entropies}
