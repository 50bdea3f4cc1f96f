"""Configuration of `rl`: one section per process, and the keys that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator, model_validator

from prime_rl.config_sharing import derive_keys, share_keys
from prime_rl.config_teacher import add_teacher
from prime_rl.configuration.sections import (
    BASE_MODEL,
    DebugModelConfig,
    LogConfig,
    SharedCkptConfig,
    TensorboardConfig,
    TrackerConfig,
    TrackioConfig,
    TrainerWeightBroadcastConfig,
    TransportConfig,
    WandbConfig,
)
from prime_rl.configuration.tables import ConfigTables
from prime_rl.deployment.config import Deployment, LocalDeployment
from prime_rl.inference.config import InferenceConfig, prefers_vllm
from prime_rl.orchestrator.config import OrchestratorConfig
from prime_rl.trainer.config import TrainConfig
from prime_rl.utils.pydantic_config import BaseConfig

GpuIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class SharedModelConfig(BaseConfig):
    """The model that is trained and served."""

    name: str = "Qwen/Qwen3-0.6B"
    """Directory, shipped name (tiny-qwen3) or hub name."""

    debug: DebugModelConfig = DebugModelConfig()


class SharedPrometheusConfig(TrackerConfig):
    """Prometheus endpoints of trainer and orchestrator at 127.0.0.1, ports 9401 and 9402."""


class RLConfig(BaseConfig):
    """Configuration of a whole run. A shared key applies to every process; a conflicting process key is an error."""

    main_keys: ClassVar[Sequence[str]] = """
        model.name max_steps output_dir resume clean seed seq_len max_async_level orchestrator.env.0.id
        orchestrator.env.0.args orchestrator.batch_size orchestrator.rollouts_per_example
        orchestrator.sampling.max_tokens orchestrator.sampling.temperature orchestrator.advantage.std
        orchestrator.max_concurrent orchestrator.eval.interval orchestrator.eval.num_examples
        orchestrator.teacher_model.context trainer.loss.type trainer.loss.kl_coef trainer.optim.lr
        trainer.optim.type trainer.optim.max_norm trainer.scheduler.type trainer.scheduler.warmup_steps
        trainer.micro_bs trainer.model.lora.rank trainer.model.dtype trainer.parallel.dp inference.backend
        inference.server.port inference.parallel.tp trainer_gpu_ids inference_gpu_ids ckpt.interval wandb.project
        log.level deployment.type
    """.split()

    spellings: ClassVar[Mapping[str, str]] = {"inspect_context": "orchestrator.teacher_model.inspect_context"}

    model: SharedModelConfig = SharedModelConfig()

    max_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps; unset: until the run is stopped."""

    max_async_level: int = Field(default=2, ge=0)
    """Maximum lag of the sampling policy behind the trained one, in versions; 0: synchronous."""

    seq_len: int = Field(default=2048, ge=1)
    """Maximum sequence length (prompt + completion); also the length of a packed sequence."""

    seed: int = Field(default=42, ge=0)
    """Random seed of prompt order, sampling and initialization."""

    output_dir: Path = Path("outputs")
    """Directory of the run: configs, logs, rollouts, weights, checkpoints, metrics.jsonl, samples.jsonl."""

    resume: bool = False
    """Resume from the last step that trainer and orchestrator have both committed: ckpt.resume_step = -1."""

    max_restarts: int = Field(default=3, ge=0)
    """Maximum restarts of a crashed server (inference, teacher); one more crash stops the run."""

    hang_timeout: float | None = Field(default=300.0, gt=0)
    """Seconds without progress after which rl reports which process waits for which; None: never."""

    clean: bool = False
    """Remove the steps of an earlier run from output_dir; metrics, samples, logs and evaluations move to attempts/."""

    open: bool = False
    """Serve the page of the run while it runs, and open it in the browser."""

    trainer_gpu_ids: GpuIds | None = None
    """GPUs of the trainer, as 0,1 or 0 1; unset: the first GPU that inference leaves free, or the CPU."""

    inference_gpu_ids: GpuIds | None = None
    """GPUs of the inference server; unset: the first GPU, or the CPU."""

    teacher_gpu_ids: GpuIds | None = None
    """GPUs of the teacher's server; unset: those that inference and trainer leave free, else those of inference."""

    deployment: Deployment = LocalDeployment()
    """Where the processes run: this machine, or one Slurm, Ray or Kubernetes job."""

    transport: TransportConfig = TransportConfig()

    weight_broadcast: TrainerWeightBroadcastConfig = TrainerWeightBroadcastConfig()

    ckpt: SharedCkptConfig | None = None

    wandb: WandbConfig | None = None

    tensorboard: TensorboardConfig | None = None

    trackio: TrackioConfig | None = None

    prometheus: SharedPrometheusConfig | None = None

    log: LogConfig = LogConfig()

    trainer: TrainConfig = TrainConfig()

    orchestrator: OrchestratorConfig = OrchestratorConfig()

    inference: InferenceConfig | None = InferenceConfig()
    """The server that rl starts; off: use the running server at orchestrator.client.base_url."""

    teacher_inference: InferenceConfig | None = None
    """The teacher's server: inherits the keys of inference, overridden here; its port follows that of inference."""

    @model_validator(mode="before")
    @classmethod
    def _resolve(cls, data: Any, info: ValidationInfo) -> Any:
        """Copy shared keys to the processes, and derive the keys by which the processes fit together."""
        tables = ConfigTables(data, info)
        share_keys(tables, _defaults())
        derive_keys(tables)
        add_teacher(tables)
        return tables.data

    @field_validator("trainer_gpu_ids", "inference_gpu_ids", "teacher_gpu_ids")
    @classmethod
    def _check_gpu_ids(cls, ids: list[int] | None) -> list[int] | None:
        if ids and len(set(ids)) < len(ids):
            raise ValueError("contains a GPU id twice")
        return ids

    @model_validator(mode="after")
    def _check_teacher_is_used(self) -> RLConfig:
        loss, teacher = self.trainer.loss, self.orchestrator.teacher_model
        if teacher is None and loss.needs_teacher:
            raise ValueError(
                f"trainer.loss.{loss.needs_teacher} is {getattr(loss, loss.needs_teacher)} but there is no teacher: "
                "set [orchestrator.teacher_model]"
            )
        if (key := self.orchestrator.reward_kl_key) is not None:
            if teacher is None:
                raise ValueError(f"orchestrator.{key} needs a reference: set [orchestrator.teacher_model]")
            if loss.needs_teacher:
                raise ValueError(
                    f"orchestrator.{key} uses the reference in the reward and trainer.loss.{loss.needs_teacher} = "
                    f"{getattr(loss, loss.needs_teacher)} in the loss: set one of them to 0"
                )
            return self
        if teacher is not None and not loss.needs_teacher:
            self._check_teacher_is_reference()
        # Without teacher_tau the teacher is only the reference of kl_coef: a copy of the first weights is one.
        if teacher is not None and loss.teacher_tau and not self._teacher_differs():
            raise ValueError(
                "orchestrator.teacher_model has no context, so the teacher is the student itself\n"
                "  set orchestrator.teacher_model.context (or context_file, context_template, context_fn, context_from)"
            )
        if self.teacher_gpu_ids and self.teacher_inference is None:
            raise ValueError("teacher_gpu_ids is set but rl starts no teacher: remove it")
        return self

    @model_validator(mode="after")
    def _check_base_is_served(self) -> RLConfig:
        teacher, student = self.orchestrator.teacher_model, self.orchestrator.client.servers
        if teacher is None or teacher.model.name != BASE_MODEL or self.trainer.model.publishes_adapters:
            return self
        if student & teacher.client.servers:  # it serves full models, the newest as the base
            raise ValueError(
                f'orchestrator.teacher_model.model.name = "{BASE_MODEL}" at the student\'s server is the student: '
                "the trainer publishes no LoRA adapters\n"
                "  leave orchestrator.teacher_model.model.name and .client.base_url out, or set another server"
            )
        return self

    @model_validator(mode="after")
    def _check_rewards_are_used(self) -> RLConfig:
        for i, env in enumerate(self.orchestrator.env):
            if env.teacher == "none" and not self.trainer.loss.adv_tau:
                raise ValueError(
                    f'orchestrator.env.{i}.teacher = "none" trains on rewards alone, whose weight is '
                    "trainer.loss.adv_tau = 0: raise it, or move the environment to orchestrator.eval.env"
                )
        return self

    def _check_teacher_is_reference(self) -> None:
        """Raise `ValueError` unless the only use of the teacher is in reference environments, where both taus are 1."""
        roles = [env.teacher for env in self.orchestrator.env]
        if "reference" not in roles:
            raise ValueError(
                "orchestrator.teacher_model has no effect with trainer.loss.teacher_tau = 0: raise it, or leave the "
                "section out"
            )
        if "context" in roles:
            raise ValueError(
                f'orchestrator.env.{roles.index("context")}.teacher = "context" has no effect with '
                'trainer.loss.teacher_tau = 0: set it to "none", or raise teacher_tau'
            )

    def _teacher_differs(self) -> bool:
        """Whether the teacher has a context, is a reference for an environment, or is another model."""
        teacher, server = self.orchestrator.teacher_model, self.teacher_inference
        assert teacher is not None
        if teacher.source or any(env.source or env.teacher == "reference" for env in self.orchestrator.env):
            return True
        return server is None or server.model.name != self.model.name

    @model_validator(mode="after")
    def _check_critic_has_rewards(self) -> RLConfig:
        for key, choice in self.orchestrator.advantages.items() if self.trainer.critic is not None else ():
            has_baseline = choice.baseline != "none" or choice.std != "none" or choice.length_weighted_mean
            # The values of a custom function are the rewards of the critic.
            if choice.import_path is None and (has_baseline or choice.rewards):
                raise ValueError(
                    "trainer.critic estimates the baseline of each token: leave out baseline, std, "
                    f"length_weighted_mean and rewards of orchestrator.{key}"
                )
        return self

    @model_validator(mode="after")
    def _check_processes_fit(self) -> RLConfig:
        if self.trainer.num_minibatches > self.orchestrator.batch_size:
            raise ValueError(
                f"trainer.num_minibatches {self.trainer.num_minibatches} is above the {self.orchestrator.batch_size} "
                "rollouts of orchestrator.batch_size: lower it"
            )
        self._check_support_replay()
        if self.inference is None:
            if self.inference_gpu_ids:
                raise ValueError("inference_gpu_ids is set but inference is off: remove one of them")
            return self
        # Requests of rollouts always have a repetition_penalty of their own.
        name = self.inference.sampling.model_copy(update={"repetition_penalty": 1.0}).reweighting
        if name is not None:
            raise ValueError(
                f"inference.sampling.{name} is the default of rollouts, too, whose log-probs are then not those of the "
                "trained policy: leave it out; for evaluations set orchestrator.eval.sampling"
            )
        teacher = self.teacher_inference
        if (
            teacher is not None
            and teacher.sglang.base_url
            and teacher.sglang.base_url == self.inference.sglang.base_url
        ):
            raise ValueError(
                f"teacher_inference.sglang.base_url = {teacher.sglang.base_url} is the student's server, which "
                "serves one model: start a second one, or leave teacher_inference.backend out"
            )
        lora = self.trainer.model.lora
        if lora is not None and lora.modules_to_save and not lora.merge:
            raise ValueError(
                "trainer.model.lora.modules_to_save is fully fine-tuned, which an adapter cannot contain\n"
                "  set trainer.model.lora.merge = true to publish full models"
            )
        length = self.inference.model.max_model_len
        if length is not None and length > self.seq_len:
            raise ValueError(
                f"inference.model.max_model_len = {length} allows longer samples than seq_len = {self.seq_len}\n"
                "  raise seq_len, or leave inference.model.max_model_len out: it then follows seq_len"
            )
        return self

    def _check_support_replay(self) -> None:
        """Raise `ValueError` for truncated sampling by an engine that does not return its support."""
        name = self.orchestrator.sampling.truncation
        if name is None or self.inference is None or not self.orchestrator.sampling_support_replay:
            return
        backend = self.inference.backend
        if backend == "auto" and prefers_vllm(self.inference):
            backend = "vllm"
        if backend in ("vllm", "sglang"):
            raise ValueError(
                f"orchestrator.sampling.{name} excludes tokens, and {backend} does not return which ones, so the "
                "trainer's log-probs would be those of another distribution\n"
                '  unset it, set inference.backend = "embedded", or accept biased ratios with '
                "orchestrator.sampling_support_replay = false"
            )


def given_gpus(config: RLConfig) -> dict[str, list[int]]:
    """The GPU ids set in the configuration."""
    keys = ("trainer_gpu_ids", "inference_gpu_ids", "teacher_gpu_ids")
    return {key: ids for key in keys if (ids := getattr(config, key))}


def teacher_follows_policy(config: RLConfig) -> bool:
    """Whether the teacher's server receives weight updates."""
    teacher = config.orchestrator.teacher_model
    return teacher is not None and teacher.weights == "ema"


@cache
def _defaults() -> RLConfig:
    """The defaults of `rl`, unvalidated and built once."""
    return RLConfig.model_construct()
