"""Configuration of the orchestrator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, model_validator

from prime_rl.client.constraints import find_constraint
from prime_rl.client.contexts import ContextPosition
from prime_rl.configuration.imports import check_arguments, import_function
from prime_rl.configuration.sections import (
    REWEIGHTING,
    ClientConfig,
    EnvConfig,
    GenerationEnvConfig,
    LogConfig,
    SamplingConfig,
    SharedCkptConfig,
    TrackersConfig,
    TransportConfig,
    WeightBroadcastConfig,
    check_generation_envs,
)
from prime_rl.orchestrator.distillation.config import ContextConfig, TeacherConfig
from prime_rl.runtime.run_dir import RunDir
from prime_rl.utils.pydantic_config import BaseConfig, find_source_key, note_source


class OrchestratorModelConfig(BaseConfig):
    """The served model."""

    name: str = "Qwen/Qwen3-0.6B"
    """Model name in requests."""


REWARD_FILTERS = ("zero_variance", "reward_nonzero_std", "min_reward", "quality_and_diversity")
"""Library filters that look at rewards."""


class FilterConfig(BaseConfig):
    """A filter that a scored group must pass to be trained on."""

    name: str
    """A library filter (zero_variance, min_reward, any_success, ...) or module:function."""

    args: dict[str, Any] = {}
    """Filter arguments, such as {threshold = 0.3}."""


class BufferConfig(BaseConfig):
    """Prompt sampling and group filtering."""

    seed: int | None = None
    """Seed of the prompt order from the second epoch on; unset: the run's seed."""

    env_ratios: list[Annotated[float, Field(gt=0)]] | None = None
    """Relative sampling ratio of each environment; unset: proportional to its size."""

    easy_threshold: float | None = None
    """A prompt whose group's mean reward is at least this moves to the easy pool, which is skipped."""

    hard_threshold: float | None = None
    """A prompt whose group's mean reward is at most this moves to the hard pool, which is skipped."""

    easy_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of draws from the easy pool; prompts that are no longer easy leave it."""

    hard_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of draws from the hard pool; prompts that are no longer hard leave it."""

    online_difficulty_filtering: bool = False
    """Drop groups whose mean reward is exactly 0 or 1 and draw replacements."""

    filters: list[FilterConfig] = []
    """Filters that a scored group must pass; rejected groups are replaced."""

    curriculum: str | None = None
    """module:function(row, env, version, reward) -> bool: may the row be drawn? reward: its last mean or None."""

    skip_verification: bool = False
    """Run no reward functions; every reward is 0 (for distillation)."""

    @model_validator(mode="after")
    def _check_sense(self) -> BufferConfig:
        needs_rewards = {
            "easy_threshold": self.easy_threshold is not None,
            "hard_threshold": self.hard_threshold is not None,
            "online_difficulty_filtering": self.online_difficulty_filtering,
            **{f"filters {one.name}": one.name.removeprefix("check_") in REWARD_FILTERS for one in self.filters},
        }
        if self.skip_verification and (given := [name for name, is_set in needs_rewards.items() if is_set]):
            raise ValueError(f"skip_verification leaves no rewards for {given[0]}: remove one of them")
        for pool in ("easy", "hard"):
            if getattr(self, f"{pool}_fraction") and not needs_rewards[f"{pool}_threshold"]:
                raise ValueError(f"{pool}_fraction is set but the {pool} pool stays empty: set {pool}_threshold too")
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            raise ValueError(f"easy_threshold = {easy} must be above hard_threshold = {hard}")
        return self


class LengthPenaltyConfig(BaseConfig):
    """Length penalty on rewards before advantages are computed; logged rewards are unpenalized."""

    type: Literal["relative", "linear", "overlong"] = "relative"
    """relative: r / (1 + coef * n / mean n of the group), negative r times it; linear: r - coef * pass rate *
    min(n / seq_len, 1); overlong: r - coef * the share of the last `window` tokens before max_tokens that the longest
    completion of the rollout uses up."""

    coef: float = Field(default=0.33, gt=0)
    """Penalty coefficient."""

    window: int = Field(default=128, ge=1)
    """overlong: tokens before max_tokens over which the penalty grows from 0 to coef."""


class AdvantageConfig(BaseConfig):
    """Advantage estimation within a group."""

    baseline: Literal["mean", "leave_one_out", "length_weighted", "role", "none"] = "mean"
    """Baseline subtracted from each reward of a group; role: a running mean of the rewards of the environment, and in
    self-play of the seat (RAE)."""

    decay: float = Field(default=0.95, ge=0, lt=1)
    """role: weight of the old mean at each reward."""

    length_weighted_mean: bool = False
    """Alias of baseline = "length_weighted"."""

    std: Literal["none", "group", "batch", "mean"] = "none"
    """Divide by the standard deviation of the rewards in the group or in the batch, or by the group's mean reward."""

    rewards: dict[str, float] = {}
    """Weights of reward functions by name, as in samples.jsonl: each is normalized within its group before they are
    added, and the sums over the batch (GDPO); replaces baseline and std."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference, orchestrator.teacher_model, subtracted from the reward of a rollout."""

    import_path: str | None = None
    """Custom advantage function as package.module:name; maps the samples of a group to one number per rollout."""

    kwargs: dict[str, Any] = {}
    """Keyword arguments of the custom advantage function."""

    def import_custom(self) -> Callable[..., Any] | None:
        """The custom function with its keyword arguments, None without one; `ValueError` if it cannot be called."""
        if self.import_path is None:
            return None
        function = import_function(self.import_path, "advantage.import_path")
        check_arguments(function, self.import_path, "advantage.import_path", self.kwargs, ["group"])
        return partial(function, **self.kwargs)

    @model_validator(mode="after")
    def _check_custom(self) -> AdvantageConfig:
        if self.import_path is None and self.kwargs:
            raise ValueError("kwargs are arguments of a custom advantage function: set import_path, or remove them")
        chosen = "import_path" if self.import_path is not None else "rewards" if self.rewards else None
        without_effect = {"baseline", "length_weighted_mean", "std"}
        if self.import_path is not None:
            without_effect |= {"rewards", "kl_coef"}
        elif self.rewards:
            without_effect |= {"kl_coef"}
        for name in sorted(self.changed_keys() & without_effect) if chosen else ():
            raise ValueError(f"{name} has no effect with {chosen}: remove one of them")
        return self

    @model_validator(mode="after")
    def _check_role(self) -> AdvantageConfig:
        if self.baseline == "role" and (self.std != "none" or self.kl_coef):
            raise ValueError('baseline "role" compares with other batches: set std to "none" and kl_coef to 0')
        if self.baseline != "role" and "decay" in self.changed_keys():
            raise ValueError('decay has no effect without baseline = "role": remove it')
        return self

    @model_validator(mode="after")
    def _check_mean(self) -> AdvantageConfig:
        if self.std == "mean" and self.kl_coef:
            raise ValueError(
                'std "mean", as in maxrl, divides by the mean reward, which kl_coef can make negative: set kl_coef to '
                "0, or another std"
            )
        return self

    @model_validator(mode="after")
    def _check_one_baseline(self) -> AdvantageConfig:
        if self.length_weighted_mean and self.baseline not in ("mean", "length_weighted"):
            raise ValueError(
                f'length_weighted_mean and baseline = "{self.baseline}" name two baselines: remove one of them'
            )
        return self


class OnlineEvalConfig(BaseConfig):
    """Online evaluation, concurrent with training."""

    env: list[GenerationEnvConfig] = []
    """Evaluation environments, run sequentially on their held-out examples; unset: the training environments."""

    sampling: SamplingConfig | None = None
    """Sampling parameters; unset keys: as in training."""

    num_examples: int = Field(default=-1, ge=-1)
    """Number of examples of each environment (the first ones); -1: all."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Rollouts per example."""

    interval: int = Field(default=100, ge=1)
    """Versions between evaluations; the last version is always evaluated. At most one evaluation is queued."""

    eval_base_model: bool = True
    """Evaluate version 0, the model before training."""

    skip_eval_on_resume: bool = True
    """Do not evaluate the version that a run resumes from, except if the run was killed before a due evaluation had
    finished."""

    pass_threshold: float = 1.0
    """A rollout with at least this reward counts as passed in pass@k."""

    max_concurrent: int = Field(default=256, ge=1)
    """Maximum concurrent evaluation rollouts, in addition to training."""

    @model_validator(mode="after")
    def _check_env(self) -> OnlineEvalConfig:
        check_generation_envs(self.env, self.rollouts_per_example, self.max_concurrent)
        return self


class ValConfig(BaseConfig):
    """Rewards on held-out examples of the training environments, sampled as in training."""

    num_examples: int = Field(default=16, ge=1)
    """Number of held-out examples of each environment (the first ones)."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Rollouts per example."""

    interval: int = Field(default=10, ge=1)
    """Versions between validations."""


class OrchestratorCkptConfig(SharedCkptConfig):
    """Orchestrator checkpoints: prompt cursors, groups in flight, counters."""


class TrainEnvConfig(ContextConfig, EnvConfig):
    """A training environment and the context of its teacher; unset: that of teacher_model."""

    context_position: ContextPosition | None = None
    """Position of the context; unset: teacher_model.context_position."""

    teacher: Literal["context", "reference", "none"] = "context"
    """context: distill the teacher with the context; reference: regularize toward the initial model, or the one of
    teacher_model.model.name, without context, to retain other abilities; none: reward only."""

    reference_weight: float = Field(default=1.0, gt=0)
    """reference: weight of these tokens in sum and count of the loss; teacher_tau and student_tau are 1 on them."""

    loss: dict[str, Any] | None = None
    """Loss of this environment's samples, as keys of trainer.loss such as {type = "dapo"}; rl gives it to the trainer
    as trainer.env_loss. Unset: trainer.loss."""

    advantage: AdvantageConfig | None = None
    """Advantage estimation in this environment; unset: orchestrator.advantage. rl sets baseline and std, where unset,
    to those of the loss."""


class OrchestratorConfig(TrackersConfig):
    """Configuration of the orchestrator."""

    main_keys: ClassVar[Sequence[str]] = """
        model.name max_steps output_dir seed seq_len max_async_level client.base_url env.0.id env.0.args
        env.0.num_workers batch_size rollouts_per_example sampling.max_tokens sampling.temperature sampling.top_p
        zero_truncated_completions advantage.baseline advantage.std length_penalty.type
        buffer.online_difficulty_filtering eval.interval eval.num_examples val.interval teacher_model.context
        max_concurrent max_retries inference_timeout transport.type weight_broadcast.type ckpt.interval
        ckpt.resume_step wandb.project log.level
    """.split()

    spellings: ClassVar[Mapping[str, str]] = {"inspect_context": "teacher_model.inspect_context"}

    client: ClientConfig = ClientConfig()

    model: OrchestratorModelConfig = OrchestratorModelConfig()

    sampling: SamplingConfig = SamplingConfig()

    sampling_support_replay: bool = True
    """With sampling.top_p, top_k or min_p: keep the tokens that each token was sampled from, and renormalize the
    log-probs of trainer and teacher over them, so that importance ratios are unbiased. Embedded engine only."""

    teacher_model: TeacherConfig | None = None

    env: list[TrainEnvConfig] = Field(default=[TrainEnvConfig()], min_length=1)
    """Training environments, mixed in proportion to their size."""

    buffer: BufferConfig = BufferConfig()

    eval: OnlineEvalConfig | None = None

    val: ValConfig | None = None

    advantage: AdvantageConfig | None = AdvantageConfig()
    """Off: the reward is the advantage."""

    length_penalty: LengthPenaltyConfig | None = None

    batch_size: int = Field(default=128, ge=1)
    """Rollouts per training step."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Rollouts per prompt (group size)."""

    seq_len: int = Field(default=2048, ge=1)
    """Maximum sequence length (prompt + completion); longer samples are counted and not trained on."""

    zero_truncated_completions: bool = False
    """Set the reward of truncated completions to 0, and each of advantage.rewards."""

    max_steps: int | None = Field(default=None, ge=1)
    """Batches to send; unset: until stopped."""

    max_async_level: int = Field(default=2, ge=0)
    """Maximum policy staleness of a sample, in versions; 0: synchronous and deterministic."""

    strict_async_level: bool = False
    """Generate all of batch N with version N - 1 - max_async_level: exactly repeatable at any level, but slower."""

    max_off_policy_steps: int = Field(default=8, ge=0)
    """Maximum weight updates during one rollout; beyond it, the group is restarted with the new weights."""

    oversampling_factor: float = Field(default=1.0, ge=1)
    """Above 1, more groups are started than needed and a batch takes the first to finish; the rest is carried over
    while max_async_level allows, then restarted. 1: batches in draw order."""

    max_concurrent: int | None = Field(default=None, ge=1)
    """Maximum concurrent rollouts; unset: as many as max_async_level allows."""

    max_retries: int = Field(default=2, ge=0)
    """Retries of a failed rollout; a prompt without a successful rollout is not drawn again."""

    inference_timeout: float = Field(default=600, gt=0)
    """Seconds to wait for the inference server to be ready."""

    min_servers: int | None = Field(default=None, ge=1)
    """Continue while this many servers of client.base_url respond; others may leave and rejoin. Unset: all."""

    weights_timeout: float = Field(default=3600, gt=0)
    """Seconds to wait for the trainer's next version."""

    weight_check_interval: int | None = Field(default=10, ge=1)
    """Versions between checks of the engines' log-probs against the trainer's. The first three versions, resumed runs
    and restarted servers are always checked; None: never.

    A difference beyond rounding ends the run, which would otherwise train on samples of other weights."""

    seed: int = Field(default=42, ge=0)
    """Seed of the prompt order and of token sampling."""

    output_dir: Path = Path("outputs")
    """Run directory, shared with trainer and inference server."""

    ckpt: OrchestratorCkptConfig | None = None

    transport: TransportConfig = TransportConfig()

    weight_broadcast: WeightBroadcastConfig = WeightBroadcastConfig()

    keep_rollouts: bool = False
    """Keep every rollouts/step_N; otherwise batches are removed once trained on and covered by a checkpoint."""

    log: LogConfig = LogConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_eval_sampling(cls, data: Any, info: ValidationInfo) -> Any:
        """Keys that eval.sampling does not set are those of training."""
        evaluation, trained = (data.get("eval"), data.get("sampling")) if isinstance(data, dict) else (None, None)
        given = evaluation.get("sampling") if isinstance(evaluation, dict) else None
        if not isinstance(evaluation, dict) or not isinstance(given, dict):
            return data
        trained = dict(trained) if isinstance(trained, (dict, SamplingConfig)) else {}
        first = find_source_key(info, ".".join(["eval.sampling", *list(given)[:1]]))
        for name in trained.keys() - given.keys():
            note_source(info, f"{first.partition('eval.sampling')[0]}eval.sampling.{name}", "sampling of training")
        return {**data, "eval": {**evaluation, "sampling": {**trained, **given}}}

    @model_validator(mode="after")
    def _check_whole_groups(self) -> OrchestratorConfig:
        if self.batch_size % self.rollouts_per_example:
            raise ValueError(
                f"batch_size = {self.batch_size} is not a multiple of rollouts_per_example = "
                f"{self.rollouts_per_example}: a batch consists of whole groups"
            )
        return self

    @model_validator(mode="after")
    def _check_length_penalty(self) -> OrchestratorConfig:
        for choice in self.advantages.values():
            if self.length_penalty is None:
                continue
            is_role = choice.baseline == "role"
            kinds = {"import_path": choice.import_path, "rewards": choice.rewards, "baseline role": is_role}
            for name in (name for name, is_set in kinds.items() if is_set):
                raise ValueError(f"length_penalty has no effect with advantage.{name}: remove one of them")
            kind, coef = self.length_penalty.type, self.length_penalty.coef
            if choice.std == "mean" and (kind == "overlong" or (kind == "linear" and coef > 1)):
                of = "" if kind == "overlong" else f" with coef {coef:g}, above 1,"
                raise ValueError(
                    f'advantage.std "mean", as in maxrl, divides by the mean reward, which length_penalty.type "{kind}"'
                    f'{of} can make negative: set the type "relative", or another std'
                )
        return self

    @property
    def advantages(self) -> dict[str, AdvantageConfig]:
        """The advantage estimators of the run and of its environments, by key."""
        choices = {"advantage": self.advantage} | {
            f"env.{i}.advantage": env.advantage for i, env in enumerate(self.env)
        }
        return {key: choice for key, choice in choices.items() if choice is not None}

    @property
    def reward_kl_key(self) -> str | None:
        """The first key that subtracts a KL to the reference from rewards; None if there is none."""
        return next((f"{key}.kl_coef" for key, choice in self.advantages.items() if choice.kl_coef), None)

    @model_validator(mode="after")
    def _check_sampling(self) -> OrchestratorConfig:
        if (name := find_constraint(self.sampling.extra_body)) is not None:
            raise ValueError(
                f"sampling.extra_body.{name} restricts sampling by a grammar, whose log-probs are not those of the "
                "trained policy: leave it out in training"
            )
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature = 0 is greedy decoding, which has no log-probs to train on: set it above 0; for "
                "evaluations set eval.sampling.temperature"
            )
        if (name := self.sampling.reweighting) is not None:
            raise ValueError(
                f"sampling.{name} changes log-probs, which are then not those of the trained policy: leave "
                "it out in training; for evaluations set it in eval.sampling"
            )
        named = SamplingConfig.model_fields.keys() - REWEIGHTING.keys()
        if twice := sorted(named & self.sampling.extra_body.keys()):
            raise ValueError(
                f"sampling.extra_body.{twice[0]} overrides sampling.{twice[0]}, which training uses: set that instead"
            )
        return self

    @model_validator(mode="after")
    def _check_env_names(self) -> OrchestratorConfig:
        names = [env.display_name for env in self.env]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"env has two environments called {sorted(twice)[0]!r}: rename one of them")
        return self

    @model_validator(mode="after")
    def _check_data(self) -> OrchestratorConfig:
        ratios = self.buffer.env_ratios
        if ratios is not None and len(ratios) != len(self.env):
            raise ValueError(
                f"buffer.env_ratios has {len(ratios)} entries for {len(self.env)} environments: give each one"
            )
        if self.strict_async_level and self.oversampling_factor > 1:
            raise ValueError(
                "strict_async_level makes runs repeatable, oversampling_factor above 1 does not: choose one of them"
            )
        if self.val is not None and self.buffer.skip_verification:
            raise ValueError("val needs rewards but buffer.skip_verification disables them: remove one of them")
        penalty, max_tokens = self.length_penalty, self.sampling.max_tokens or 0
        if penalty is not None and penalty.type == "overlong" and penalty.window > max_tokens:
            raise ValueError(
                f'length_penalty.type = "overlong" needs sampling.max_tokens of at least window = {penalty.window}: '
                "set it"
            )
        return self

    @model_validator(mode="after")
    def _check_teacher(self) -> OrchestratorConfig:
        teacher = self.teacher_model
        for i, env in enumerate(self.env):
            if teacher is None and (env.teacher == "reference" or env.source is not None):
                what = 'teacher = "reference"' if env.source is None else env.source
                raise ValueError(f"env.{i} has {what} but there is no teacher: add the section teacher_model")
            if env.teacher != "context" and env.source is not None:
                raise ValueError(f'env.{i} has teacher = "{env.teacher}" and {env.source}: remove one of them')
            if env.teacher == "reference" and self.reward_kl_key is not None:
                raise ValueError(
                    f'env.{i}.teacher = "reference" ignores rewards, but {self.reward_kl_key} uses the reference in '
                    "the reward: leave out one of them (kl_coef needs no other key than teacher_model)"
                )
        if teacher is not None:
            self._check_outcomes(teacher)
            self._check_teacher_server(teacher)
        if teacher is not None and teacher.eval_baseline and self.eval is None:
            raise ValueError(
                "teacher_model.eval_baseline needs evaluation environments: add [orchestrator.eval], or leave it out"
            )
        if teacher is not None and teacher.eval_baseline:
            for name in (evaluated.id for evaluated in self.eval_envs if evaluated.taskset is not None):
                raise ValueError(
                    f"teacher_model.eval_baseline cannot insert the context into taskset {name!r}, whose prompts are "
                    "built in verifiers: leave it out, or set eval.env to environments with an id"
                )
        return self

    def _check_outcomes(self, teacher: TeacherConfig) -> None:
        for config in (teacher, *self.env):
            if config.context_from in ("sibling", "feedback") and self.buffer.skip_verification:
                lacks = "rewards" if config.context_from == "sibling" else "feedback, which reward functions write"
                raise ValueError(
                    f'context_from = "{config.context_from}" shows what rollouts achieved, but '
                    f"buffer.skip_verification leaves no {lacks}: remove it"
                )
            if config.context_from == "sibling" and self.rollouts_per_example == 1:
                raise ValueError(
                    'context_from = "sibling" needs other rollouts of the same prompt: set rollouts_per_example above 1'
                )

    def _check_teacher_server(self, teacher: TeacherConfig) -> None:
        """The weights that a server has must be those of the teacher."""
        urls, student = teacher.client.servers, self.client.servers
        key = "teacher_model.client.base_url"
        if teacher.weights == "live" and not urls <= student:
            raise ValueError(f'teacher_model.weights = "live" is the student\'s server: set {key} to client.base_url')
        is_policy = teacher.weights == "ema" or teacher.model.name in (None, self.model.name)
        if teacher.weights != "live" and urls & student and is_policy:
            cure = "" if teacher.weights == "ema" else ', teacher_model.model.name = "base" if it serves LoRA adapters,'
            raise ValueError(
                f"{key} is the student's server, whose weights are the student's, but teacher_model.weights = "
                f'"{teacher.weights}"\n  set another server{cure} or teacher_model.weights = "live"'
            )

    @property
    def replays_support(self) -> bool:
        """Whether sampling is truncated and its supports are requested."""
        return self.sampling_support_replay and self.sampling.truncation is not None

    @property
    def held_out_envs(self) -> list[GenerationEnvConfig]:
        """The training environments, to be run on their held-out examples."""
        return [GenerationEnvConfig.model_validate(env.plain()) for env in self.env]

    @property
    def eval_envs(self) -> list[GenerationEnvConfig]:
        """Environments of online evaluation: those of eval.env, else the training environments; none if it is off."""
        return [] if self.eval is None else self.eval.env or self.held_out_envs

    @property
    def versions_dir(self) -> Path:
        """Directory of published versions: weight files, or deltas and announcements of broadcasts."""
        run, broadcast = RunDir(self.output_dir), self.weight_broadcast
        return run.weights if broadcast.type == "filesystem" and not broadcast.delta else run.broadcasts

    @property
    def has_group_baseline(self) -> bool:
        """Whether the advantage of a rollout depends on the others of its group."""
        return self.advantage is not None and self.advantage.baseline not in ("none", "role")

    @property
    def num_groups(self) -> int:
        """Groups per training step."""
        return self.batch_size // self.rollouts_per_example
