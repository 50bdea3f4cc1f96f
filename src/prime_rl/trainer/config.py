"""Configuration of the RL and SFT trainers. Their sections are defined beside the code that they configure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from prime_rl.configuration.sections import (
    LogConfig,
    SharedCkptConfig,
    TrackersConfig,
    TrainerWeightBroadcastConfig,
    TransportConfig,
)
from prime_rl.configuration.tables import ConfigTables
from prime_rl.deployment.config import Deployment, LocalDeployment
from prime_rl.runtime.run_dir import CKPT_PARTS
from prime_rl.trainer.model_config import ModelConfig
from prime_rl.trainer.optim_config import (
    LORA_LR_FACTOR,
    MIN_LORA_LR,
    RL_LR,
    SFT_LR,
    AdamConfig,
    ConstantSchedulerConfig,
    OptimConfig,
    SchedulerConfig,
    decays,
)
from prime_rl.trainer.parallel_config import ParallelDims
from prime_rl.trainer.rl.config import ENV_LOSS_KEYS, CriticConfig, DataConfig, LossConfig, RLModelConfig
from prime_rl.trainer.sft.config import FakeSFTDataConfig, SFTDataConfig, SFTModelConfig, SFTValConfig, TokenizerConfig
from prime_rl.utils.pydantic_config import find_source_key, note, note_source
from rollouts.training.objectives import PRESETS

MAX_TRACED_STEPS = 10
SKIPS = ("skip_optimizer", "skip_scheduler", "skip_dataloader", "skip_progress")
"""Keys of `ckpt` for one start."""


class CkptConfig(SharedCkptConfig):
    """Checkpointing and resume; enabled by the presence of the section."""

    skip_optimizer: bool = False
    """Do not restore the optimizer moments."""

    skip_scheduler: bool = False
    """Restart the learning-rate schedule over the remaining steps."""

    skip_dataloader: bool = False
    """Do not restore the data position (sft)."""

    skip_progress: bool = False
    """Reset step, schedule and totals (sft): start a new training stage from the checkpoint, as checkpoint 0."""

    @property
    def skips(self) -> list[str]:
        """The keys of `SKIPS` that are set."""
        return [name for name in SKIPS if getattr(self, name)]

    @model_validator(mode="after")
    def _check_skips_have_resume_step(self) -> CkptConfig:
        if self.skips and self.resume_step is None:
            raise ValueError(f"{self.skips[0]} has no effect without a checkpoint to resume from: set resume_step")
        return self


MAX_AUTO_TOKENS = {"cpu": 2048, "cuda": 32768}
"""Tokens of a micro-batch above which `micro_bs = "auto"` does not go, by device: it would not be computed faster."""


class TrainerConfig(TrackersConfig):
    """Settings shared by the RL and SFT trainers."""

    full_lr: ClassVar[float]
    """Default learning rate of full fine-tuning."""

    model: ModelConfig = ModelConfig()
    optim: OptimConfig = Field(default=AdamConfig(), validate_default=True)
    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    parallel: ParallelDims = ParallelDims()
    ckpt: CkptConfig | None = None
    log: LogConfig = LogConfig()
    micro_bs: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """Micro-batch size in rows of seq_len tokens; "auto": what fits into the memory that is free when the run begins,
    measured with one row and logged (a resumed run keeps its size)."""

    max_concurrent_micro_batches: int | None = Field(default=None, ge=1)
    """Micro-batches computed at once on a CPU while other processes leave cores free; unset: 2 for a model of 20M
    parameters or more. Needs one thread per product: the default on few cores, elsewhere OMP_NUM_THREADS=1. Each takes
    memory for its activations and gradients; the results do not change."""

    max_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps; unset: run until stopped."""

    seed: int = Field(default=42, ge=0)
    """Random seed."""

    dist_timeout_seconds: float = Field(default=600, gt=0)
    """Timeout of distributed operations."""

    output_dir: Path = Path("outputs")
    """Directory for weights, checkpoints, metrics and logs."""

    resume: bool = False
    """Resume from the latest complete checkpoint, if there is one: ckpt.resume_step = -1."""

    bench: bool = False
    """Benchmark a few steps on fake data of the configured sizes and print a table; writes no output."""

    trace_path: Path | None = None
    """Directory for a Chrome trace of all steps; needs max_steps <= 10."""

    memory_profiler_path: Path | None = None
    """Directory for a GPU memory snapshot of the run."""

    @property
    def has_end(self) -> bool:
        """Whether the run ends by itself."""
        return self.max_steps is not None

    @classmethod
    def default_lr(cls, *, lora: bool) -> float:
        """The learning rate when `optim.lr` is unset."""
        return cls.full_lr * LORA_LR_FACTOR if lora else cls.full_lr

    @cached_property
    def whole_scheduler(self) -> SchedulerConfig:
        """The schedule before it was shortened to max_steps."""
        return self.scheduler

    def find_single_use(self) -> dict[str, Any]:
        """Keys of one start, with values for later ones: `ckpt.skip_*`, the named checkpoint, a shortened schedule.

        Later starts resume from the latest checkpoint; not those of a new stage, which has none before its own first.
        """
        shortened = dict(self.scheduler)
        values = {f"scheduler.{name}": value for name, value in self.whole_scheduler if value != shortened[name]}
        if self.ckpt is None:
            return values
        values |= {f"ckpt.{name}": False for name in self.ckpt.skips}
        if self.ckpt.resume_step not in (None, -1) or self.ckpt.skip_progress:
            values["ckpt.resume_step"] = None if self.ckpt.skip_progress else -1
        return values

    @model_validator(mode="before")
    @classmethod
    def _resolve_resume(cls, values: Any, info: ValidationInfo) -> Any:
        """Resume from the latest checkpoint, unless one is named; `--resume` replaces one that is named in a file."""
        if not isinstance(values, dict) or str(values.get("resume")).lower() != "true":
            return values
        tables, key = ConfigTables(values, info), "ckpt.resume_step"
        if tables.has("ckpt") and not tables.is_section("ckpt"):
            return values
        if tables.has(key) and (tables.get("ckpt.skip_progress") or not tables.replaces("resume", key)):
            return values  # a new stage begins with the checkpoint that is named
        if tables.get(key, -1) != -1:
            tables.note(f"{tables.show('resume')} replaces {tables.show(key)}")
        note_source(info, key, "resume")
        return {**values, "ckpt": {**tables.section("ckpt"), "resume_step": -1}}

    @field_validator("optim")
    @classmethod
    def _resolve_lr(cls, optim: OptimConfig, info: ValidationInfo) -> OptimConfig:
        """Set the default learning rate for LoRA or full fine-tuning; note one that is too small for LoRA."""
        if "model" not in info.data:  # invalid: reported by its own validator
            return optim
        lora = info.data["model"].lora is not None
        if "lr" not in optim.model_fields_set:
            note_source(info, "optim.lr", f"default {'with' if lora else 'without'} LoRA")
            return optim.model_copy(update={"lr": cls.default_lr(lora=lora)})
        if lora and optim.type != "sgd" and 0 < optim.lr < MIN_LORA_LR:
            key = find_source_key(info, "optim.lr")
            note(info, f"warning: {key} = {optim.lr} hardly changes a LoRA adapter: set {MIN_LORA_LR} or more")
        return optim

    @model_validator(mode="after")
    def _check_model_parallelism(self) -> TrainerConfig:
        kinds = self.parallel.splits_model
        if kinds and self.model.impl == "hf":
            raise ValueError(f"parallel.{kinds[0]} needs the native decoder: set model.impl = auto or custom")
        if kinds and self.model.compile is not None:
            raise ValueError(f"parallel.{kinds[0]} does not support model.compile: leave it out")
        if self.parallel.cp_style == "ring" and self.model.attn not in ("auto", "sdpa"):
            raise ValueError(f"parallel.cp_style ring replaces the attention: leave model.attn {self.model.attn} out")
        if self.parallel.tp > 1 and self.optim.type == "muon":
            raise ValueError("optim.type muon needs whole matrices, which parallel.tp splits: use parallel.dp")
        return self

    @model_validator(mode="after")
    def _check_profiling(self) -> TrainerConfig:
        steps = self.max_steps if self.max_steps is not None else (1 if self.bench else None)
        if self.trace_path is not None and (steps is None or steps > MAX_TRACED_STEPS):
            raise ValueError(f"trace_path keeps every operation in memory: set max_steps to {MAX_TRACED_STEPS} or less")
        if self.bench and self.max_steps == 1:
            raise ValueError("bench excludes the first step (warmup): set max_steps to 2 or more")
        return self

    @model_validator(mode="after")
    def _check_schedule(self, info: ValidationInfo) -> TrainerConfig:
        scheduler = self.scheduler
        if isinstance(scheduler, ConstantSchedulerConfig):
            return self
        if scheduler.min_lr > self.optim.lr:
            raise ValueError(f"scheduler.min_lr {scheduler.min_lr} is above optim.lr {self.optim.lr}")
        if self.max_steps is None:
            if not self.has_end and decays(scheduler):
                raise ValueError(f"scheduler.type {scheduler.type} decays to the end of the run: set max_steps")
            return self
        fitting = scheduler.fit(self.max_steps)
        if fitting != scheduler:
            changes = " and ".join(
                f"{name} {getattr(scheduler, name)} -> {getattr(fitting, name)}"
                for name in ("warmup_steps", "decay_steps")
                if name in type(scheduler).model_fields
            )
            note(info, f"note: the learning-rate schedule is shortened to max_steps = {self.max_steps}: {changes}")
            self.__dict__["whole_scheduler"] = scheduler
            self.__dict__["scheduler"] = fitting
        return self


def check_delta_dtype(name: str) -> None:
    """`ValueError` unless the trainer computes in bfloat16."""
    if name != "bfloat16":
        raise ValueError(
            f"weight_broadcast.delta with {name} weights, nearly all of which change in every step: set model.dtype = "
            '"bfloat16"'
        )


class TrainConfig(TrainerConfig):
    """The RL trainer."""

    main_keys: ClassVar[Sequence[str]] = """
        model.name max_steps output_dir seed model.seq_len max_async_level loss.type loss.kl_coef loss.teacher_tau
        micro_bs optim.lr optim.type optim.weight_decay optim.max_norm scheduler.type scheduler.warmup_steps
        model.lora.rank model.dtype model.attn parallel.dp parallel.tp data.fake.batch_size transport.type
        weight_broadcast.type ckpt.interval ckpt.keep resume wandb.project log.level
    """.split()

    full_lr = RL_LR

    model: RLModelConfig = RLModelConfig()
    loss: LossConfig = LossConfig()
    env_loss: dict[str, LossConfig] = {}
    """Losses of the samples of single environments, by name; rl fills it from orchestrator.env.loss. Options that are
    set for the whole run (teacher, entropy bonus, old_logprobs) follow `loss`."""

    critic: CriticConfig | None = None
    data: DataConfig = DataConfig()
    transport: TransportConfig = TransportConfig()
    weight_broadcast: TrainerWeightBroadcastConfig = TrainerWeightBroadcastConfig()

    max_async_level: int = Field(default=2, ge=0)
    """Maximum policy staleness of a sample, in versions (one for each batch); older published weights are pruned."""

    num_minibatches: int = Field(default=1, ge=1)
    """Parts of a batch, each with an optimizer step of its own."""

    num_epochs: int = Field(default=1, ge=1)
    """Passes over the minibatches of a batch. A step, with one published version, has num_minibatches * num_epochs
    optimizer steps at one learning rate."""

    skip_zero_advantage: bool = False
    """Do not compute samples whose advantages are 0 where the loss has no other terms. The gradient stays the same;
    token metrics (entropy, mismatch) are those of the other samples."""

    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """EMA decay: maintain a moving average of the weights and publish it as average/step_N; set by rl when the teacher
    weights are "ema"."""

    logprob_dump_interval: int | None = Field(default=None, ge=1)
    """Interval, in steps, of writing per-token trainer log-probs to trainer_logprobs.jsonl for `monitor`."""

    @property
    def has_fake_data(self) -> bool:
        """Whether batches are random tokens."""
        return self.data.fake is not None

    @property
    def ckpt_parts(self) -> tuple[str, ...]:
        """Parts of a complete checkpoint: that of the trainer, and with an orchestrator its own."""
        return CKPT_PARTS[: 1 if self.has_fake_data else 2]

    @model_validator(mode="after")
    def _check_distillation_parallelism(self) -> TrainConfig:
        cut = next((name for name in ("tp", "cp") if getattr(self.parallel, name) > 1), None)
        if cut and self.loss.distill.top_logprobs:
            raise ValueError(
                f"loss.distill.estimator {self.loss.distill.estimator} needs whole distributions, "
                f"which parallel.{cut} splits: use another estimator, or parallel.dp and pp"
            )
        return self

    @model_validator(mode="after")
    def _check_env_loss(self) -> TrainConfig:
        for name, loss in self.env_loss.items():
            if loss.type == "custom" or PRESETS[loss.type].teacher_tau:
                raise ValueError(f"env_loss.{name}.type {loss.type} is possible for whole runs only: set loss.type")
            if given := sorted(loss.changed_keys() - ENV_LOSS_KEYS):
                raise ValueError(f"env_loss.{name}.{given[0]} applies to whole runs only: set loss.{given[0]}")
        return self

    @model_validator(mode="after")
    def _check_skips(self) -> TrainConfig:
        other = "critic" if self.critic is not None else "loss.entropy_control" if self.loss.entropy_control else None
        if self.skip_zero_advantage and other:
            raise ValueError(f"skip_zero_advantage is not possible with {other}, which needs every sample: remove it")
        return self

    @model_validator(mode="after")
    def _check_critic(self) -> TrainConfig:
        if self.critic is None:
            return self
        kinds = [kind for kind in ("tp", "cp", "pp", "ep") if getattr(self.parallel, kind) > 1]
        if kinds:
            raise ValueError(f"critic does not support parallel.{kinds[0]}: use parallel.dp")
        if self.optim.type == "muon":
            raise ValueError("critic does not support optim.type muon: use adamw or sgd")
        if self.loss.distill.estimator in ("reward_to_go", "sequence"):
            raise ValueError(
                f"critic replaces the advantages, which loss.distill.estimator {self.loss.distill.estimator} adds to: "
                "use another estimator"
            )
        if self.loss.distill.gate != "none":
            raise ValueError(
                f"critic replaces the advantages, by which loss.distill.gate {self.loss.distill.gate} chooses "
                'completions: set loss.distill.gate = "none" or remove critic'
            )
        return self

    @model_validator(mode="after")
    def _check_updates(self) -> TrainConfig:
        fake = self.data.fake
        if fake is not None and self.num_minibatches > fake.batch_size:
            raise ValueError(f"num_minibatches {self.num_minibatches} is above data.fake.batch_size {fake.batch_size}")
        return self

    @model_validator(mode="after")
    def _check_delta(self) -> TrainConfig:
        lora = self.model.lora
        if self.weight_broadcast.delta and self.model.dtype != "auto":
            check_delta_dtype(self.model.dtype)
        if self.weight_broadcast.delta and lora is not None and not lora.merge:
            raise ValueError(
                "weight_broadcast.delta has no use for an adapter, which is small: leave it out, or set "
                "model.lora.merge = true"
            )
        return self

    @model_validator(mode="after")
    def _check_ckpt_skips(self) -> TrainConfig:
        for name in ("skip_progress", "skip_dataloader"):
            if self.ckpt is not None and getattr(self.ckpt, name):
                raise ValueError(
                    f"ckpt.{name} is for sft: RL steps are policy versions shared with batches and engines; "
                    "for a new stage start a run with model.name = weights/step_N"
                )
        return self


class SFTConfig(TrainerConfig):
    """The SFT trainer."""

    main_keys: ClassVar[Sequence[str]] = """
        model.name max_steps num_epochs output_dir seed data.name data.split data.seq_len data.batch_size
        data.pack_function data.truncate data.loss_mask.assistant val.interval val.num_samples
        tokenizer.chat_template micro_bs optim.lr optim.type optim.weight_decay optim.max_norm scheduler.type
        scheduler.warmup_steps model.lora.rank model.dtype model.attn parallel.dp ckpt.interval ckpt.keep
        resume wandb.project log.level deployment.type
    """.split()

    full_lr = SFT_LR

    model: SFTModelConfig = SFTModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: Annotated[SFTDataConfig | FakeSFTDataConfig, Field(discriminator="type")] = SFTDataConfig()
    val: SFTValConfig | None = None

    num_epochs: int | None = Field(default=None, ge=1)
    """Number of passes over the data, instead of max_steps; a last batch that is not full takes samples of the next."""

    open: bool = False
    """Serve the page of the run while it runs, and open it in the browser."""

    deployment: Deployment = LocalDeployment()
    """Where the ranks run: locally, or as a Slurm, Ray or Kubernetes job."""

    def find_single_use(self) -> dict[str, Any]:
        """Keys of one start: those of every trainer, and `open`."""
        return super().find_single_use() | ({"open": False} if self.open else {})

    @property
    def has_end(self) -> bool:
        """Whether the run ends by itself."""
        return self.max_steps is not None or self.num_epochs is not None

    @property
    def has_fake_data(self) -> bool:
        """Whether batches are random tokens."""
        return self.data.type == "fake"

    @property
    def ckpt_parts(self) -> tuple[str, ...]:
        """Parts of a complete checkpoint: that of the trainer."""
        return CKPT_PARTS[:1]

    @model_validator(mode="after")
    def _check_num_epochs(self) -> SFTConfig:
        if self.num_epochs is not None and self.max_steps is not None:
            raise ValueError(
                f"num_epochs {self.num_epochs} and max_steps {self.max_steps} both end the run: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_end(self, info: ValidationInfo) -> SFTConfig:
        saves = self.ckpt is not None and self.ckpt.interval is not None
        if not (self.has_end or saves or self.bench):
            note(
                info,
                "note: the run has no end and saves nothing: set num_epochs or max_steps, or ckpt.interval to save "
                "while it runs",
            )
        return self

    @model_validator(mode="after")
    def _check_val_data(self) -> SFTConfig:
        if self.val is not None and not isinstance(self.data, SFTDataConfig):
            raise ValueError("val needs conversations, but data.type is fake: leave the section out")
        return self
