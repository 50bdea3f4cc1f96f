"""Configuration of the orchestrator."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from prime_rl.utils.config import (
    AskedEnvConfig,
    ClientConfig,
    EnvConfig,
    LogConfig,
    SamplingConfig,
    TrackersConfig,
    TransportConfig,
    WeightBroadcastConfig,
)
from prime_rl.utils.output_dir import BROADCASTS_DIR
from prime_rl.utils.pydantic_config import BaseConfig


class ModelConfig(BaseConfig):
    """The model that the inference server serves."""

    name: str = "Qwen/Qwen3-0.6B"
    """Name sent with every request."""


class FilterConfig(BaseConfig):
    """A test that a scored group must pass to be trained on."""

    name: str
    """A filter of the library (zero_variance, min_reward, any_success, ...) or module:function."""

    args: dict[str, Any] = {}
    """Its arguments, such as {threshold = 0.3}."""


class BufferConfig(BaseConfig):
    """Which prompts come, and which groups are worth training on."""

    seed: int | None = None
    """Seed of the order of prompts from the second epoch on; unset: the run's seed."""

    env_ratios: list[Annotated[float, Field(gt=0)]] | None = None
    """How often each environment is drawn from, relative to the others; unset: in proportion to its size."""

    easy_threshold: float | None = None
    """A prompt whose group's mean reward reaches this moves to the easy pool, which is passed over."""

    hard_threshold: float | None = None
    """A prompt whose group's mean reward is not above this moves to the hard pool, which is passed over."""

    easy_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of draws that comes from the easy pool all the same; what turns out less easy goes back."""

    hard_fraction: float = Field(default=0.0, ge=0, le=1)
    """Share of draws that comes from the hard pool all the same; what turns out less hard goes back."""

    online_difficulty_filtering: bool = False
    """Drop groups whose mean reward is exactly 0 or 1, and draw others in their place."""

    filters: list[FilterConfig] = []
    """Tests a scored group must pass; of one that fails, another is drawn in its place."""

    curriculum: str | None = None
    """module:function(row, env, version, reward) -> bool: may this row be drawn yet? reward: its last mean, or None."""

    skip_verification: bool = False
    """Run no reward functions: every reward is 0, for distillation."""

    @model_validator(mode="after")
    def _check_sense(self) -> BufferConfig:
        needs_rewards = {
            "easy_threshold": self.easy_threshold is not None,
            "hard_threshold": self.hard_threshold is not None,
            "online_difficulty_filtering": self.online_difficulty_filtering,
        }
        if self.skip_verification and (given := [name for name, is_set in needs_rewards.items() if is_set]):
            raise ValueError(f"skip_verification leaves no rewards for {given[0]}: remove one of them")
        for pool in ("easy", "hard"):
            if getattr(self, f"{pool}_fraction") and not needs_rewards[f"{pool}_threshold"]:
                raise ValueError(f"{pool}_fraction is set but no prompt becomes {pool}: set {pool}_threshold too")
        easy, hard = self.easy_threshold, self.hard_threshold
        if easy is not None and hard is not None and easy <= hard:
            raise ValueError(f"easy_threshold = {easy} must be above hard_threshold = {hard}")
        return self


class LengthPenaltyConfig(BaseConfig):
    """Reward taken off long rollouts before advantages are computed; the reward in metrics stays what was earned."""

    type: Literal["relative", "linear", "overlong"] = "relative"
    """relative: r / (1 + coef * n / mean n of the group); linear: r - coef * pass rate * n / seq_len;
    overlong: r - coef * the share of the last `window` tokens before max_tokens that n uses up."""

    coef: float = Field(default=0.33, gt=0)
    """How much length costs."""

    window: int = Field(default=128, ge=1)
    """overlong: tokens before max_tokens over which the penalty grows from 0 to coef."""


class AdvantageConfig(BaseConfig):
    """How the rewards of a group become advantages."""

    baseline: Literal["mean", "leave_one_out", "length_weighted", "none"] = "mean"
    """What is subtracted from each reward of a group."""

    length_weighted_mean: bool = False
    """Short for baseline = "length_weighted"."""

    std: Literal["none", "group", "batch"] = "none"
    """Divide by the standard deviation of the rewards of the group, or of the whole batch."""

    @model_validator(mode="after")
    def _check_one_baseline(self) -> AdvantageConfig:
        if self.length_weighted_mean and self.baseline not in ("mean", "length_weighted"):
            raise ValueError(
                f'length_weighted_mean and baseline = "{self.baseline}" name two baselines: remove one of them'
            )
        return self


class OnlineEvalConfig(BaseConfig):
    """Evaluation of versions while training goes on beside it."""

    env: list[AskedEnvConfig] = Field(default=[AskedEnvConfig()], min_length=1)
    """Environments, one after the other; their held-out examples are used."""

    sampling: SamplingConfig | None = None
    """How completions are drawn; unset: as in training."""

    num_examples: int = Field(default=-1, ge=-1)
    """First examples of each environment; -1: all."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Rollouts of each example."""

    interval: int = Field(default=100, ge=1)
    """Versions between evaluations; the last version is evaluated too. What comes due while one runs is skipped."""

    eval_base_model: bool = True
    """Evaluate version 0, the model before training."""

    skip_eval_on_resume: bool = True
    """Do not evaluate the version that a resumed run begins with."""

    pass_threshold: float = 1.0
    """A rollout with at least this reward counts as passed in pass@k."""

    max_concurrent: int = Field(default=256, ge=1)
    """Rollouts of evaluation that run at the same time, beside those of training."""


class ValConfig(BaseConfig):
    """Rewards on held-out examples of the training environments, sampled as in training."""

    num_examples: int = Field(default=16, ge=1)
    """First held-out examples of each environment."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Rollouts of each example."""

    interval: int = Field(default=10, ge=1)
    """Versions between validations."""


class CkptConfig(BaseConfig):
    """Checkpoints of the orchestrator's half: prompt cursor, groups under way, counters."""

    interval: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; unset: only after the last step."""

    resume_step: int | None = Field(default=None, ge=-1)
    """Continue from this step; -1: from the latest one that trainer and orchestrator both completed."""

    keep: int | None = Field(default=None, ge=1)
    """Number of latest checkpoints that stay on disk; unset: all."""


Insert = Literal["user_prefix", "system_append", "system_replace", "message"]


class ContextConfig(BaseConfig):
    """What the teacher is told and the student is not; at most one of the four sources."""

    context: str | None = None
    """The text itself."""

    context_file: Path | None = None
    """A file that holds the text."""

    context_template: str | None = None
    """Text with {{example.KEY}} in it, filled from each prompt's row: {{example.info.hint}}."""

    context_fn: str | None = None
    """module:function(example, rng) -> text, a list of messages, or None for a prompt without a teacher."""

    @property
    def source(self) -> str | None:
        """The key that says the context, if one does."""
        given = [name for name in CONTEXT_SOURCES if getattr(self, name) is not None]
        return given[0] if given else None

    @model_validator(mode="after")
    def _check_one_source(self) -> ContextConfig:
        given = [name for name in CONTEXT_SOURCES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} both say the context: remove one of them")
        return self


CONTEXT_SOURCES = ("context", "context_file", "context_template", "context_fn")


class TeacherModelConfig(BaseConfig):
    """Which model teaches."""

    name: str | None = None
    """Name sent with every request; unset: the student's own model, as it was before training."""


class TeacherClientConfig(ClientConfig):
    """How to reach a teacher that runs already."""

    base_url: list[str] = []
    """Its addresses, /v1 included; any server that tells prompt_logprobs. Unset: rl starts one."""


class TeacherConfig(ContextConfig):
    """The model that is learnt from, under a context that the student does not see."""

    model: TeacherModelConfig = TeacherModelConfig()

    client: TeacherClientConfig = TeacherClientConfig()

    insert: Insert = "user_prefix"
    """Where the context goes: before the first user message, to the end of the system message, in its place, or as
    a message of its own after it."""

    separator: str = ""
    """What stands between the context and the text that it joins."""

    weights: Literal["frozen", "ema", "live"] = "frozen"
    """The teacher's weights: those before training, the moving average of the student's (ema), or always the student's
    own (live)."""

    ema_decay: float = Field(default=0.98, gt=0, lt=1)
    """ema: what the average keeps of itself in a step of the trainer; .98 follows by about 50 steps."""

    temperature: float | None = Field(default=None, gt=0)
    """Temperature of the teacher's distribution; unset: that of sampling, so that the two can be compared."""

    top_logprobs: int = Field(default=0, ge=-1)
    """Most likely tokens told beside the sampled one; -1: all. rl sets what trainer.loss.distill needs."""

    inspect_context: int | None = Field(default=None, ge=1)
    """Show so many prompts of each environment as student and teacher see them, and do nothing else."""

    eval_baseline: bool = False
    """Evaluate student and teacher, with and without the context, before training and at every evaluation."""


class TrainEnvConfig(ContextConfig, EnvConfig):
    """An environment that is trained on, and what its teacher is told; unset: what teacher_model says."""

    insert: Insert | None = None
    """Where the context goes; unset: teacher_model.insert."""

    teacher: Literal["context", "anchor", "none"] = "context"
    """context: learn from the teacher under the context; anchor: stay near the teacher without one, which retains what
    the student could do; none: reward only."""

    anchor_weight: float = Field(default=1.0, gt=0)
    """anchor: what the taus are multiplied by on these rollouts."""


class OrchestratorConfig(TrackersConfig):
    """Everything the orchestrator reads."""

    spellings: ClassVar[Mapping[str, str]] = {"inspect_context": "teacher_model.inspect_context"}

    client: ClientConfig = ClientConfig()

    model: ModelConfig = ModelConfig()

    sampling: SamplingConfig = SamplingConfig()

    teacher_model: TeacherConfig | None = None

    env: list[TrainEnvConfig] = Field(default=[TrainEnvConfig()], min_length=1)
    """Environments; their prompts are mixed evenly, each in proportion to its size."""

    buffer: BufferConfig = BufferConfig()

    eval: OnlineEvalConfig | None = None

    val: ValConfig | None = None

    advantage: AdvantageConfig | None = AdvantageConfig()
    """Off: the plain reward is the advantage."""

    length_penalty: LengthPenaltyConfig | None = None

    batch_size: int = Field(default=128, ge=1)
    """Rollouts of one training step."""

    rollouts_per_example: int = Field(default=1, ge=1)
    """Rollouts of one prompt, compared with each other: a group."""

    seq_len: int = Field(default=2048, ge=1)
    """Most tokens of a sample, prompt included; longer ones are counted and not trained on."""

    zero_truncated_completions: bool = False
    """A rollout that was cut off at max_tokens earns 0: an answer that does not end is no answer."""

    max_steps: int | None = Field(default=None, ge=1)
    """Batches to send; unset: until stopped."""

    max_async_level: int = Field(default=2, ge=0)
    """Versions that a sample's policy may be behind the one it trains; 0: strictly in turn, deterministic."""

    strict_async_level: bool = False
    """Make the whole of batch N by version N - 1 - max_async_level: exactly repeatable at any level, but slower."""

    max_off_policy_steps: int = Field(default=8, ge=0)
    """Weight changes a rollout may see while it is generated; beyond, its group is begun again with the new weights."""

    oversampling_factor: float = Field(default=1.0, ge=1)
    """Above 1, more groups are begun than needed and a batch takes those that finish first; the rest is carried over
    while max_async_level allows, then begun again. 1: in the order they were drawn."""

    max_concurrent: int | None = Field(default=None, ge=1)
    """Rollouts that may run at the same time; unset: as many as max_async_level allows."""

    max_retries: int = Field(default=2, ge=0)
    """Further tries of a rollout that failed; a prompt none of whose rollouts succeed is not drawn again."""

    inference_timeout: float = Field(default=600, gt=0)
    """Seconds to wait for the inference server to be ready."""

    min_servers: int | None = Field(default=None, ge=1)
    """Go on while this many of client.base_url answer: others may leave and come back. Unset: all of them."""

    weights_timeout: float = Field(default=3600, gt=0)
    """Seconds to wait for the trainer's next version."""

    canary_interval: int | None = Field(default=10, ge=1)
    """Versions between two comparisons of the engines' log-probs with the trainer's, the first one included; off: none.

    A difference that rounding does not explain ends the run: it would train on samples of other weights."""

    seed: int = Field(default=42, ge=0)
    """Seed of the order of prompts and of every sampled token."""

    output_dir: Path = Path("outputs")
    """Directory of the run, shared with trainer and inference server."""

    ckpt: CkptConfig | None = None

    transport: TransportConfig = TransportConfig()

    weight_broadcast: WeightBroadcastConfig = WeightBroadcastConfig()

    keep_rollouts: bool = False
    """Keep every rollouts/step_N; else a batch goes once it is trained on and, with checkpoints, covered by one."""

    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _check_whole_groups(self) -> OrchestratorConfig:
        if self.batch_size % self.rollouts_per_example:
            raise ValueError(
                f"batch_size = {self.batch_size} is not a multiple of rollouts_per_example = "
                f"{self.rollouts_per_example}: a step takes whole groups"
            )
        return self

    @model_validator(mode="after")
    def _check_env_names(self) -> OrchestratorConfig:
        names = [env.name or env.id for env in self.env]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"env has two environments called {sorted(twice)[0]!r}: give one of them another name")
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
                "strict_async_level repeats a run exactly, oversampling_factor above 1 takes what is finished first: "
                "choose one of them"
            )
        if self.val is not None and self.buffer.skip_verification:
            raise ValueError("val wants rewards but buffer.skip_verification leaves none: remove one of them")
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
            if teacher is None and (env.teacher == "anchor" or env.source is not None):
                what = 'teacher = "anchor"' if env.source is None else env.source
                raise ValueError(f"env.{i} has {what} but there is no teacher: set the section teacher_model")
            if env.teacher != "context" and env.source is not None:
                raise ValueError(f'env.{i} has teacher = "{env.teacher}" and {env.source}: remove one of them')
        if teacher is not None and teacher.eval_baseline and self.eval is None:
            raise ValueError(
                "teacher_model.eval_baseline needs evaluation environments: add [orchestrator.eval], or leave it out"
            )
        return self

    @property
    def versions_dir(self) -> Path:
        """Where the trainer publishes its versions, as files or as announcements."""
        return self.output_dir / ("weights" if self.weight_broadcast.type == "filesystem" else BROADCASTS_DIR)

    @property
    def num_groups(self) -> int:
        """Groups of one training step."""
        return self.batch_size // self.rollouts_per_example
