"""Configuration of `scripts.prime_rl_train`: documented arguments and TOML sections, and their resolution."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pydantic import Field

from nanochat.env_file import ENV_FILE, read_env_file
from prime_rl.configuration.errors import COMMAND_LINE, ConfigError
from prime_rl.utils.pydantic_config import BaseConfig, parse_argv
from rollouts.training.environments import find_parameters
from rollouts.training.objectives import PRESETS, AdvantageChoice, Objective

PROG = "prime_rl_train"


class EnvSection(BaseConfig):
    """The environment."""

    id: str | None = None
    """Environment id, such as harleycooper/nanochatAquaRat; a folder below `environments` or an installed module."""
    args: dict[str, Any] = {}
    """Arguments of its load_environment."""


class TrainerArgs(BaseConfig):
    """Trainer arguments under the names of the TOML files; each sets one of the documented arguments."""

    learning_rate: float | None = Field(None, gt=0)
    """Learning rate of the matrices; embedding 10 times and head 0.2 times as much."""
    rollouts_per_example: int | None = Field(None, ge=1)
    """num_samples."""
    max_steps: int | None = Field(None, ge=1)
    """max_steps."""
    per_device_train_batch_size: int | None = Field(None, ge=1)
    """device_batch_size."""
    gradient_accumulation_steps: int = Field(1, ge=1)
    """With per_device_train_batch_size: sequences of a rank per step, rounded up to whole groups."""
    eval_steps: int | None = Field(None, ge=1)
    """eval_every."""
    save_steps: int | None = Field(None, ge=1)
    """save_every."""
    logging_steps: int | None = Field(None, ge=1)
    """log_every."""
    temperature: float | None = Field(None, gt=0)
    """temperature."""
    top_k: int | None = Field(None, ge=0)
    """top_k."""
    max_new_tokens: int | None = Field(None, ge=1)
    """max_new_tokens."""
    weight_decay: float | None = Field(None, ge=0)
    """weight_decay."""
    warmup_steps: int | None = Field(None, ge=0)
    """warmup_steps."""
    max_grad_norm: float | None = Field(None, gt=0)
    """max_grad_norm."""
    report_to: list[Literal["wandb", "none"]] = ["wandb"]
    """wandb; none or an empty list for local files only."""
    run_name: str | None = None
    """run."""


class TrainerSection(BaseConfig):
    """The trainer."""

    args: TrainerArgs = TrainerArgs()
    """Its arguments."""


class WandbSection(BaseConfig):
    """Weights & Biases."""

    spellings: ClassVar[Mapping[str, str]] = {"notes": "run_notes"}

    project: str | None = None
    """wandb_project."""
    entity: str | None = None
    """wandb_entity."""
    name: str | None = None
    """run."""
    tags: list[str] = []
    """Tags of the run."""
    run_notes: str | None = None
    """Notes of the run (`notes` in files)."""


class DistributedSection(BaseConfig):
    """Ranks."""

    backend: Literal["nccl", "gloo"] | None = None
    """Collectives: nccl on GPUs, gloo on CPUs, whatever is written here (a difference is said)."""
    find_unused_parameters: bool = False
    """Must stay false: every parameter of the model takes part in every step."""
    gradient_as_bucket_view: bool = True
    """Must stay true: gradients are summed over ranks in one message."""


class PrimeRLTrainConfig(BaseConfig):
    """Arguments of the command line, and the sections of the documented TOML files."""

    spellings: ClassVar[Mapping[str, str]] = {"num_steps": "max_steps", "wandb_run": "run"}

    run: str = "prime_rl_default"
    """Name of the run; "dummy" keeps all metrics local."""
    source: Literal["base", "mid", "sft", "rl", "prime_rl"] = "sft"
    """Stage whose checkpoint to begin with; one of prime_rl must be copied to rl, see the message."""
    model_tag: str | None = None
    """Model tag, such as d20; unset: the deepest."""
    step: int | None = None
    """Checkpoint step; unset: the last."""
    resume: bool = False
    """Resume exactly from the last prime_rl checkpoint of this model."""
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Compute dtype; unset: bfloat16 on a GPU, float32 on a CPU."""
    device_batch_size: int = Field(8, ge=1)
    """Maximum sequences per training pass and rank; 32 times as many are decoded at once. Lower it to save memory."""
    examples_per_step: int = Field(16, ge=1)
    """Questions per step, over all ranks."""
    num_samples: int = Field(16, ge=1)
    """Rollouts per question."""
    max_new_tokens: int = Field(256, ge=1)
    """Maximum tokens of a completion."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature."""
    top_k: int | None = Field(50, ge=0)
    """Sample from the k most probable tokens; None or 0: from all."""
    learning_rate: float | None = Field(None, gt=0)
    """Sets matrix_lr, embedding_lr (10 times it), unembedding_lr (0.2 times it) and init_lr_frac 1."""
    unembedding_lr: float = Field(0.004, ge=0)
    """Learning rate of the head, for a width of 768."""
    embedding_lr: float = Field(0.2, ge=0)
    """Learning rate of the embedding, for a width of 768."""
    matrix_lr: float = Field(0.02, ge=0)
    """Learning rate of the matrices (Muon)."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay of head and embedding."""
    init_lr_frac: float = Field(0.05, gt=0)
    """Initial fraction of all learning rates, which then decay linearly to 0."""
    warmup_steps: int = Field(0, ge=0)
    """Warm-up steps to that fraction."""
    max_grad_norm: float | None = Field(None, gt=0)
    """Maximum global gradient norm."""
    num_epochs: int = Field(1, ge=1)
    """Epochs over the training questions."""
    max_steps: int | None = Field(None, ge=1)
    """Maximum number of steps, overriding epochs."""
    num_train_examples: int = Field(2000, ge=-1)
    """Training questions; -1: all."""
    num_eval_examples: int = Field(254, ge=-1)
    """Held-out questions; -1: all; 0: no evaluation."""
    eval_examples: int = Field(400, ge=1)
    """Maximum number of questions per evaluation."""
    eval_samples: int = Field(8, ge=1)
    """Samples per question of an evaluation, for pass@k."""
    save_every: int = Field(60, ge=1)
    """Steps between checkpoints; the last step is always saved."""
    eval_every: int = Field(60, ge=1)
    """Steps between evaluations; there is one at the start and one at the end."""
    log_every: int = Field(1, ge=1)
    """Steps between printed lines."""
    viz_every: int | None = Field(None, ge=1)
    """Steps between figures; unset: with each evaluation."""
    use_verifiers_env: bool = True
    """Must stay true: rollouts always go through the environment and its rubric."""
    env_id: str = "harleycooper/nanochatAquaRat"
    """The environment."""
    wandb_project: str = "nanochat-prime-rl"
    """Project at Weights & Biases."""
    wandb_entity: str | None = None
    """User or team at Weights & Biases."""
    seed: int = 42
    """Random seed of questions and samples."""
    async_level: int = Field(0, ge=0)
    """Maximum staleness of rollouts in steps; 0: synchronous and reproducible."""
    objective: str | None = None
    """Preset of the loss (reinforce, grpo, aipo, ...); unset: policy gradient, with an importance ratio if async."""
    baseline: Literal["mean", "leave_one_out", "length_weighted", "none"] | None = None
    """Advantage baseline; unset: the objective's, or the group mean."""
    advantage_std: bool | None = None
    """Divide advantages by the group's standard deviation; unset: the objective's, or no."""
    clip: float | None = Field(None, gt=0)
    """Bounds of the importance ratio, 1 - clip and 1 + clip, for objectives that clip."""
    kl_coef: float = Field(0.0, ge=0)
    """Coefficient of the KL to the initial model."""
    env: EnvSection = EnvSection()
    """The environment, in TOML files."""
    trainer: TrainerSection = TrainerSection()
    """The trainer, in TOML files."""
    wandb: WandbSection = WandbSection()
    """Weights & Biases, in TOML files."""
    distributed: DistributedSection = DistributedSection()
    """Ranks, in TOML files."""
    model: str | None = None
    """nanochat-SOURCE, nanochat-SOURCE:TAG or nanochat-SOURCE:TAG@STEP, in TOML files."""


# Documented argument -> its keys in TOML files, the first given wins.
TOML_KEYS = {
    "run": ("trainer.args.run_name", "wandb.name"),
    "learning_rate": ("trainer.args.learning_rate",),
    "num_samples": ("trainer.args.rollouts_per_example",),
    "max_steps": ("trainer.args.max_steps",),
    "device_batch_size": ("trainer.args.per_device_train_batch_size",),
    "eval_every": ("trainer.args.eval_steps",),
    "save_every": ("trainer.args.save_steps",),
    "log_every": ("trainer.args.logging_steps",),
    "temperature": ("trainer.args.temperature",),
    "top_k": ("trainer.args.top_k",),
    "max_new_tokens": ("trainer.args.max_new_tokens",),
    "weight_decay": ("trainer.args.weight_decay",),
    "warmup_steps": ("trainer.args.warmup_steps",),
    "max_grad_norm": ("trainer.args.max_grad_norm",),
    "num_train_examples": ("env.args.num_train_examples",),
    "num_eval_examples": ("env.args.num_eval_examples",),
    "seed": ("env.args.seed",),
    "env_id": ("env.id",),
    "wandb_project": ("wandb.project",),
    "wandb_entity": ("wandb.entity",),
}
# Documented argument -> environment variable, also looked for in `.env`.
VARIABLES = {"wandb_project": "WANDB_PROJECT", "wandb_entity": "WANDB_ENTITY", "env_id": "PRIME_INTELLECT_ENV_ID"}
OWN_ENVIRONMENT = "nanochatAquaRat"
RATIOS = {"matrix_lr": 1.0, "embedding_lr": 10.0, "unembedding_lr": 0.2}


@dataclass(frozen=True)
class Resolved:
    """The resolved configuration by documented argument, with the source of each value."""

    config: PrimeRLTrainConfig
    sources: dict[str, str]
    notes: list[str]

    @property
    def env_args(self) -> dict[str, Any]:
        """Arguments for the environment; numbers of questions and seed only for our environment or if given.

        A default of ours does not replace a None of `env.args`. A seed, and 0 held-out questions, have an effect of
        their own, so other environments need not take them.
        """
        config = self.config
        known = {
            name: getattr(config, name)
            for name in ("num_train_examples", "num_eval_examples", "seed")
            if name in self.sources or (self.is_own_env and name not in config.env.args)
        }
        if not self.is_own_env:
            taken = find_parameters(config.env_id)
            for name in () if taken is None or taken.takes_any else known.keys() - set(taken.names):
                if name == "seed" or known[name] == 0:
                    del known[name]
        return {**config.env.args, **known}

    @property
    def is_own_env(self) -> bool:
        """Whether the environment is nanochatAquaRat."""
        return self.config.env_id.rpartition("/")[2].partition("@")[0] == OWN_ENVIRONMENT

    @property
    def has_evaluation(self) -> bool:
        """Whether there are held-out questions, as far as the arguments tell."""
        without_split = self.is_own_env and self.env_args.get("eval_split", "") is None
        return self.config.num_eval_examples != 0 and not without_split

    @property
    def objective(self) -> Objective:
        """The loss as options."""
        return build_objective(self.config)

    def describe(self) -> str:
        """A line per argument that was set, and derived values.

        Other sources may have replaced values of the sections of a TOML file, which are left out.
        """
        config = self.config
        lines = [
            f"  {name} = {getattr(config, name)!r}  ({self.sources[name]})"
            for name in PrimeRLTrainConfig.model_fields
            if name in self.sources and name != "model" and not isinstance(getattr(config, name), BaseConfig)
        ]
        lines += [f"  env.args.{name} = {self.env_args[name]!r}" for name in config.env.args]
        size = config.examples_per_step * config.num_samples
        return "\n".join(
            [*lines, f"  {config.examples_per_step} questions x {config.num_samples} = {size} sequences per step"]
        )


def parse_arguments(argv: Sequence[str], num_ranks: int, environ: Mapping[str, str] | None = None) -> Resolved:
    """Read a command line. Precedence: command line > TOML > environment > `.env` > defaults; raises `ConfigError`."""
    environ = os.environ if environ is None else environ
    config, sources = parse_argv(PrimeRLTrainConfig, normalize_argv(argv), PROG, environ)
    return resolve(config, sources, num_ranks, environ)


def normalize_argv(argv: Sequence[str]) -> list[str]:
    """One leading `--` is torchrun's and dropped; `--config F`, `--config=F`, `@F` and a bare `F.toml` become `@ F`."""
    words = list(argv)[1:] if list(argv[:1]) == ["--"] else list(argv)
    out: list[str] = []
    while words:
        word = words.pop(0)
        if word == "--config" and words:
            out += ["@", words.pop(0)]
        elif word.startswith("--config="):
            out += ["@", word.removeprefix("--config=")]
        elif word.startswith("@") and len(word) > 1:
            out += ["@", word[1:]]
        elif word.endswith(".toml") and not word.startswith("-") and out[-1:] != ["@"]:
            out += ["@", word]
        else:
            out.append(word)
    return out


def resolve(
    config: PrimeRLTrainConfig, given: Mapping[str, str], num_ranks: int, environ: Mapping[str, str]
) -> Resolved:
    """Resolve every documented argument from its sources."""
    draft = _Draft(config, {name: given[name] for name in PrimeRLTrainConfig.model_fields if name in given})
    notes = list(config.notes)
    for name, keys in TOML_KEYS.items():
        for key in keys:
            if (found := _find(config, key)) is not None and (source := _source_of(key, given)):
                draft.fill(name, found, source)
    files = read_env_file()
    for name, variable in VARIABLES.items():
        draft.fill(name, environ.get(variable) or None, f"${variable}")
        draft.fill(name, files.get(variable) or None, f"{ENV_FILE} {variable}")
    if config.model is not None:
        _fill_model(draft, config.model, _source_of("model", given) or "model")
    if (rate := draft.get("learning_rate")) is not None:
        source = draft.sources.get("learning_rate", "")
        for name, value in {**{name: rate * ratio for name, ratio in RATIOS.items()}, "init_lr_frac": 1.0}.items():
            draft.fill(name, value, source, label="learning_rate")
    _fill_batch(draft, given, num_ranks, notes)
    merged = config.model_copy(update=draft.values)
    _check(merged, notes)
    return Resolved(merged, draft.sources, notes)


class _Draft:
    """Values of documented arguments with their sources, which are ranked by `_rank`; of equal ones the first wins."""

    def __init__(self, config: PrimeRLTrainConfig, sources: dict[str, str]) -> None:
        self.config, self.sources = config, sources
        self.values: dict[str, Any] = {}

    def get(self, name: str) -> Any:
        """The present value of an argument."""
        return self.values.get(name, getattr(self.config, name))

    def fill(self, name: str, value: Any, source: str, label: str | None = None) -> None:
        """Set an argument unless it has a value of an equal or higher source; None is no value.

        `label` is the source in messages.
        """
        if value is not None and (name not in self.sources or _rank(self.sources[name]) < _rank(source)):
            self.values[name], self.sources[name] = value, label or source


def _rank(source: str) -> int:
    """Precedence of a source: the command line, TOML files, environment variables, `.env`."""
    if source == COMMAND_LINE:
        return 3
    if source.startswith(f"{ENV_FILE} "):
        return 0
    return 1 if source.startswith(("env ", "$")) else 2


def _fill_model(draft: _Draft, name: str, source: str) -> None:
    """The parts of `model`; its step only with its own source and tag."""
    parts = _read_model(name)
    step = parts.pop("step")
    for part, value in parts.items():
        draft.fill(part, value, source)
    if all(value in (None, draft.get(part)) for part, value in parts.items()):
        draft.fill("step", step, source)


def _fill_batch(draft: _Draft, given: Mapping[str, str], num_ranks: int, notes: list[str]) -> None:
    """Sequences per rank (the TOML keys) to whole groups over all ranks."""
    args = draft.config.trainer.args
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    sources = [source for key in keys if (source := _source_of(f"trainer.args.{key}", given))]
    if args.per_device_train_batch_size is None or not sources:
        return
    num_samples = draft.get("num_samples")
    sequences = args.per_device_train_batch_size * args.gradient_accumulation_steps * num_ranks
    groups = math.ceil(sequences / num_samples)
    if groups * num_samples != sequences:
        notes.append(
            f"{sequences} sequences per step are no whole number of groups of {num_samples}: taking {groups} "
            f"groups, {groups * num_samples} sequences"
        )
    draft.fill("examples_per_step", groups, max(sources, key=_rank))


def _check(config: PrimeRLTrainConfig, notes: list[str]) -> None:
    if not config.use_verifiers_env:
        raise ConfigError("use_verifiers_env is false, but rollouts always go through the environment: leave it out")
    if config.distributed.find_unused_parameters or not config.distributed.gradient_as_bucket_view:
        raise ConfigError(
            "distributed: every parameter is used and gradients travel in one message here: set "
            "find_unused_parameters = false and gradient_as_bucket_view = true, or leave both out"
        )
    args = config.trainer.args
    if args.gradient_accumulation_steps > 1 and args.per_device_train_batch_size is None:
        raise ConfigError(
            f"trainer.args.gradient_accumulation_steps = {args.gradient_accumulation_steps} has no effect alone: set "
            "trainer.args.per_device_train_batch_size too, or examples_per_step instead of both"
        )
    for name, value in config.env.args.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise ConfigError(
                f"env.args.{name} = {value!r} cannot be saved with checkpoints: use text, finite numbers, true, false, "
                "and lists and tables of them"
            ) from None
    advantage = build_objective(config).advantage
    if advantage.drop_equal or advantage.overlong:
        notes.append(
            f"objective {config.objective} keeps groups of equal rewards and has no overlong penalty here; rl has both"
        )


def build_objective(config: PrimeRLTrainConfig) -> Objective:
    """The preset with its overrides. Unset: the per-token policy gradient with the group mean as baseline, and for
    asynchronous rollouts the importance ratio capped at 8 (2505.24034).
    """
    name = config.objective or ("aipo" if config.async_level else "reinforce")
    known = {preset: row for preset, row in PRESETS.items() if preset != "custom" and not row.teacher_tau}
    if name not in known:
        why = "needs a teacher, which only rl has" if name in PRESETS.keys() - {"custom"} else "is unknown"
        raise ConfigError(f"objective {name!r} {why}: set --objective to one of {', '.join(sorted(known))}")
    row = known[name]
    advantage = row.advantage if config.objective else AdvantageChoice("mean")
    if config.baseline is not None:
        advantage = replace(advantage, baseline=config.baseline)
    if config.advantage_std is not None:
        advantage = replace(advantage, std="group" if config.advantage_std else "none")
    if config.clip is not None:
        if "clip_low" not in row.bounds:
            raise ConfigError(
                f"clip has no effect in objective {name!r}: choose --objective grpo, ppo or cispo, or leave it out"
            )
        row = replace(row, clip_low=config.clip, clip_high=config.clip)
    if row.loss_aggregation == "constant":
        row = replace(row, max_tokens=config.max_new_tokens)
    return replace(row, advantage=advantage, kl_coef=config.kl_coef)


def _read_model(name: str) -> dict[str, Any]:
    """source, model_tag and step of nanochat-SOURCE:TAG@STEP."""
    body, _, step = name.removeprefix("nanochat-").partition("@")
    source, _, tag = body.partition(":")
    sources = ("base", "mid", "sft", "rl", "prime_rl")
    if not name.startswith("nanochat-") or source not in sources or (step and not step.isdigit()):
        raise ConfigError(f"model {name!r} is not nanochat-SOURCE[:TAG[@STEP]] with a source of {', '.join(sources)}")
    return {"source": source, "model_tag": tag or None, "step": int(step) if step else None}


def _find(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part, None)
    return config


def _source_of(key: str, given: Mapping[str, str]) -> str | None:
    """Source of a key or of its table; None for a default."""
    while key:
        if key in given:
            return given[key]
        key = key.rpartition(".")[0]
    return None
