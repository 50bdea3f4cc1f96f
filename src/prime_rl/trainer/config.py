"""Configuration of the RL and SFT trainers: model, optimizer, schedule, loss, data, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from prime_rl.configuration.sections import (
    DebugModelConfig,
    LogConfig,
    TrackersConfig,
    TrainerWeightBroadcastConfig,
    TransportConfig,
)
from prime_rl.deployment.config import Deployment, LocalDeployment
from prime_rl.utils.pydantic_config import BaseConfig
from rollouts.training.objectives import PRESETS

BOUND_OPTIONS = {name: name for name in ("clip_low", "clip_high", "dual_clip", "max_prob_diff")} | {
    "delta": "ratio_cap"
}
"""Loss options that only some presets use, mapped to their field of `Objective`."""


class LoraConfig(BaseConfig):
    """LoRA (2106.09685): train low-rank adapters of frozen matrices; enabled by the presence of the section."""

    rank: int = Field(default=16, ge=1)
    """LoRA rank."""

    alpha: float = Field(default=32.0, gt=0)
    """LoRA scaling is alpha / rank."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability on the adapter inputs during training."""

    target_modules: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Modules to which LoRA is applied: name suffixes, full names or regular expressions."""

    modules_to_save: list[str] = []
    """Modules that are fully fine-tuned, such as lm_head or embed_tokens."""

    merge: bool = False
    """Publish full models with the adapter merged into the weights; false: publish PEFT adapters."""

    @model_validator(mode="after")
    def _check_target_modules(self) -> LoraConfig:
        if not self.target_modules:
            raise ValueError("target_modules is empty: name a matrix such as q_proj, or leave out model.lora")
        return self


MAX_TRACED_STEPS = 10


class ActivationConfig(BaseConfig):
    """Activation checkpointing: recompute activations in the backward pass; results do not change."""

    mode: Literal["full", "selective"] = "full"
    """full: store the layer inputs only; selective: also store the outputs of matrix products and attention."""

    freq: int = Field(default=1, ge=1)
    """Checkpoint every freq-th layer; 1: all layers."""


class ActivationOffloadConfig(BaseConfig):
    """Offload the activations stored under model.ac to host memory until the backward pass."""

    pin_memory: bool = True
    """Use pinned (page-locked) host memory for faster transfers."""


class CompileConfig(BaseConfig):
    """Compile each layer with torch.compile; results differ from eager mode in the last bits.

    With attn = flash, two compilations cover all packs; with sdpa, each new number of padded rows recompiles.
    """

    fullgraph: bool = False
    """Raise an error on graph breaks."""

    backend: str = "inductor"
    """torch.compile backend; aot_eager traces without code generation, for debugging."""


class ModelConfig(BaseConfig):
    """The trained model and how it is computed."""

    name: str = "Qwen/Qwen3-0.6B"
    """Hugging Face model directory, bundled model (tiny-qwen3) or hub id."""

    impl: Literal["auto", "custom", "hf"] = "auto"
    """custom: the native decoder, also used by the embedded engine; hf: transformers; auto: custom if supported."""

    attn: Literal["auto", "exact", "sdpa", "flash"] = "auto"
    """exact: batch-invariant, bit for bit; sdpa, flash (GPU): faster; auto: exact for fp32 on a CPU."""

    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Number format of forward and backward; the optimizer uses float32, or float64 for a float64 model. auto: bfloat16
    on a GPU, else float32. A CPU without native bfloat16 rounds weights, keys and values to it and computes in
    float32."""

    device: str = "auto"
    """Device, such as cpu or cuda:0; auto: a GPU if available."""

    lora: LoraConfig | None = None
    ac: ActivationConfig | None = None
    ac_offloading: ActivationOffloadConfig | None = None
    compile: CompileConfig | None = None

    optim_cpu_offload: bool = False
    """Keep the optimizer state in host memory and run the optimizer step on the CPU."""

    reshard_after_forward: bool = True
    """FSDP: reshard parameters after the forward pass; less memory, more communication."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the gradient reduction over bfloat16 ranks; parameters and moments stay float32."""
    debug: DebugModelConfig = DebugModelConfig()

    @model_validator(mode="after")
    def _check_option_combinations(self) -> ModelConfig:
        if self.ac_offloading is not None and self.ac is None:
            raise ValueError("ac_offloading needs activation checkpointing: set model.ac too")
        if self.compile is not None and self.attn == "exact":
            raise ValueError("compile changes rounding, which attn = exact does not allow: set attn = sdpa")
        if self.compile is not None and self.ac is not None and self.ac.mode == "selective":
            raise ValueError("compile needs ac.mode = full: set it, or leave compile out")
        return self


class RLModelConfig(ModelConfig):
    """The policy model."""

    seq_len: int = Field(default=2048, ge=2)
    """Maximum sequence length (prompt + completion)."""


class TokenizerConfig(BaseConfig):
    """Tokenizer and chat template."""

    name: str | None = None
    """Model or directory of the tokenizer; unset: model.name."""

    chat_template: str | None = None
    """Chat template that replaces the tokenizer's: template text or a file path."""


class AdamConfig(BaseConfig):
    """AdamW (1711.05101)."""

    type: Literal["adamw"] = "adamw"
    """AdamW."""

    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""

    max_norm: float | None = Field(default=1.0, gt=0)
    """Global gradient norm for clipping; None: no clipping."""

    betas1: float = Field(default=0.9, ge=0, lt=1)
    """Decay rate of the first moment."""

    betas2: float = Field(default=0.999, ge=0, lt=1)
    """Decay rate of the second moment."""


class SGDConfig(BaseConfig):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"] = "sgd"
    """SGD."""

    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""

    weight_decay: float = Field(default=0.01, ge=0)
    """L2 penalty."""

    max_norm: float | None = Field(default=1.0, gt=0)
    """Global gradient norm for clipping; None: no clipping."""

    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum."""

    nesterov: bool = True
    """Nesterov momentum; needs momentum > 0."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGDConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0: set nesterov = false")
        return self


class MuonConfig(BaseConfig):
    """Muon (2502.16982) for matrices, AdamW for embeddings, head, norms and biases."""

    type: Literal["muon"] = "muon"
    """Muon."""

    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""

    max_norm: float | None = Field(default=1.0, gt=0)
    """Global gradient norm for clipping; None: no clipping."""

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of the Muon updates."""

    nesterov: bool = True
    """Nesterov momentum."""

    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of matrix updates: match the RMS of AdamW updates, or sqrt(max(1, rows / columns))."""

    betas1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW: decay rate of the first moment."""

    betas2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW: decay rate of the second moment."""


OptimConfig = Annotated[AdamConfig | SGDConfig | MuonConfig, Field(discriminator="type")]


class ConstantSchedulerConfig(BaseConfig):
    """Constant learning rate."""

    type: Literal["constant"] = "constant"
    """Constant."""


class LinearSchedulerConfig(BaseConfig):
    """Linear warmup, constant, linear decay at the end of the run."""

    type: Literal["linear"] = "linear"
    """Linear."""

    warmup_steps: int = Field(default=10, ge=0)
    """Linear warmup steps."""

    decay_steps: int = Field(default=10, ge=0)
    """Decay steps at the end of the run."""

    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the last step."""


class CosineSchedulerConfig(BaseConfig):
    """Linear warmup, then cosine decay to the end of the run."""

    type: Literal["cosine"] = "cosine"
    """Cosine."""

    warmup_steps: int = Field(default=10, ge=0)
    """Linear warmup steps."""

    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the last step."""


SchedulerConfig = Annotated[
    ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig, Field(discriminator="type")
]


class CkptConfig(BaseConfig):
    """Checkpointing and resume; enabled by the presence of the section."""

    interval: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; unset: only at the last step."""

    keep: int | None = Field(default=None, ge=1)
    """Number of most recent checkpoints to keep; unset: all."""

    resume_step: int | None = Field(default=None, ge=-1)
    """Step of the checkpoint to resume from; -1: the latest complete one."""

    skip_optimizer: bool = False
    """Do not restore the optimizer moments."""

    skip_scheduler: bool = False
    """Restart the learning-rate schedule over the remaining steps."""

    skip_dataloader: bool = False
    """Do not restore the data position (sft)."""

    skip_progress: bool = False
    """Reset step, schedule and totals (sft): start a new training stage from the checkpoint."""

    @model_validator(mode="after")
    def _check_skips_have_resume_step(self) -> CkptConfig:
        for name in ("skip_optimizer", "skip_scheduler", "skip_dataloader", "skip_progress"):
            if getattr(self, name) and self.resume_step is None:
                raise ValueError(f"{name} has no effect without a checkpoint to resume from: set resume_step")
        return self


class ParallelDims(BaseConfig):
    """Parallelism sizes: world size = pp * dp * cp * tp, where dp = dp_replicate * dp_shard."""

    dp: int | None = Field(default=None, ge=1)
    """Data parallel size; unset: world size / (pp * cp * tp)."""

    dp_replicate: int = Field(default=1, ge=1)
    """Number of replicas of the sharded model (HSDP); 1: fully sharded over all dp ranks."""

    dp_shard: int | None = Field(default=None, ge=1)
    """Shards per replica; unset: dp / dp_replicate."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel size; splits matrices by heads, columns and vocabulary."""

    pp: int = Field(default=1, ge=1)
    """Pipeline parallel size; splits the model by layers."""

    pp_stages: int = Field(default=1, ge=1)
    """Stages per pp rank; 1: 1F1B schedule; more: interleaved 1F1B, with a smaller bubble and more messages."""

    cp: int = Field(default=1, ge=1)
    """Context parallel size; splits a micro-batch by tokens."""

    cp_style: Literal["ulysses", "ring"] = "ulysses"
    """ulysses: all-to-all over heads; ring: ring attention, for more ranks than attention heads."""

    ep: int = Field(default=1, ge=1)
    """Expert parallel size; splits experts over the dp_shard and cp ranks; divides dp_shard * cp."""

    @property
    def num_ranks(self) -> int:
        """World size that follows from this section."""
        return self.model_ranks * (self.dp or self.dp_replicate * (self.dp_shard or 1))

    @property
    def model_ranks(self) -> int:
        """Ranks per data parallel group."""
        return self.pp * self.cp * self.tp

    @property
    def splits_model(self) -> list[str]:
        """The dimensions above 1 that need the native decoder."""
        return [name for name in ("tp", "cp", "pp", "ep") if getattr(self, name) > 1]

    def resolve(self, num_ranks: int) -> ParallelDims:
        """All sizes for `num_ranks` ranks; `ValueError` when they are inconsistent."""
        if num_ranks % self.model_ranks:
            raise ValueError(
                f"parallel: pp {self.pp} * cp {self.cp} * tp {self.tp} = {self.model_ranks} ranks "
                f"per data parallel group does not divide {num_ranks} ranks"
            )
        dp = num_ranks // self.model_ranks
        if self.dp not in (None, dp) or (self.dp is None and self.dp_shard and self.num_ranks != num_ranks):
            given = "parallel.dp" if self.dp else "parallel.dp_shard"
            raise ValueError(
                f"{given} is {self.dp or self.dp_shard} but {num_ranks} ranks were started: leave {given} out, "
                f"or use torchrun --nproc-per-node {self.num_ranks}"
            )
        if dp % self.dp_replicate:
            raise ValueError(f"parallel.dp_replicate is {self.dp_replicate}, which does not divide {dp} ranks")
        if dp // self.dp_replicate * self.cp % self.ep:
            raise ValueError(
                f"parallel.ep {self.ep} does not divide dp_shard {dp // self.dp_replicate} * cp {self.cp}: "
                "experts are split over the dp_shard and cp ranks"
            )
        return self.model_copy(update={"dp": dp, "dp_shard": dp // self.dp_replicate})

    @model_validator(mode="after")
    def _check_sizes(self) -> ParallelDims:
        if self.pp_stages > 1 and self.pp == 1:
            raise ValueError("pp_stages needs pipeline parallelism: set pp above 1, or leave it out")
        if self.cp_style == "ring" and self.cp == 1:
            raise ValueError("cp_style needs context parallelism: set cp above 1, or leave it out")
        if self.dp is not None and self.dp % self.dp_replicate:
            raise ValueError(f"dp_replicate {self.dp_replicate} does not divide dp {self.dp}")
        if self.dp is not None and self.dp_shard not in (None, self.dp // self.dp_replicate):
            raise ValueError(
                f"dp {self.dp} is not dp_replicate {self.dp_replicate} * dp_shard {self.dp_shard}: leave one out"
            )
        return self


class DistillConfig(BaseConfig):
    """Estimator of the distillation loss (docs/on_policy_distillation.md)."""

    estimator: Literal["auto", "token", "reward_to_go", "sequence", "topk+tail", "full"] = "token"
    """token: KL at the sampled token; reward_to_go: KL summed over the sampled token and its successors; sequence:
    sequence KL relative to the group; topk+tail: the teacher's top-k tokens plus one tail bucket; full: the whole
    vocabulary; auto: topk+tail, with the forward direction while the student rarely samples the teacher's choice at
    uncertain positions; token if the teacher has no top-k."""

    direction: Literal["reverse", "forward", "jsd"] = "reverse"
    """reverse: KL(student || teacher); forward: KL(teacher || student); jsd: generalized Jensen-Shannon divergence. The
    last two need topk+tail or full."""

    k: int = Field(default=8, ge=1, le=100)
    """topk+tail: number of top teacher tokens."""

    jsd_beta: float = Field(default=0.5, gt=0, lt=1)
    """jsd: weight of the teacher in the mixture."""

    clip: float | None = Field(default=None, gt=0)
    """token, reward_to_go, sequence: clip the per-token log-prob difference to +-clip, so that a few tokens do not
    dominate."""

    @property
    def top_logprobs(self) -> int:
        """Number of top teacher log-probs needed per token; 0: the sampled token only, -1: all."""
        return {"auto": self.k, "topk+tail": self.k, "full": -1}.get(self.estimator, 0)

    @model_validator(mode="after")
    def _check_direction(self) -> DistillConfig:
        if self.direction != "reverse" and self.estimator not in ("topk+tail", "full"):
            raise ValueError(
                f'direction = "{self.direction}" compares distributions, but estimator = "{self.estimator}" uses '
                'one token\n  set estimator to "topk+tail" or "full"'
            )
        if self.clip is not None and self.top_logprobs:
            raise ValueError('clip applies to sampled tokens only: remove it, or set estimator to "token"')
        return self


class AnnealConfig(BaseConfig):
    """Anneal the distillation weights: teacher_tau and student_tau decay, so that the reward gains relative weight.

    Enabled by the presence of the section. The student can surpass its teacher once adv_tau / student_tau exceeds the
    cost, in nats per completion, of deviating from it.
    """

    after: int = Field(default=50, ge=0)
    """Steps before the decay begins."""

    steps: int = Field(default=50, ge=1)
    """Steps of the exponential decay."""

    factor: float = Field(default=0.01, ge=0, lt=1)
    """Final fraction of both taus."""

    margin: float | None = Field(default=None, gt=0)
    """Replaces `factor`: at the end, adv_tau / student_tau is `margin` times the largest batch-mean distance from the
    teacher so far, in nats per completion. A margin of 8 overrides an incorrect teacher."""

    def scale(self, step: int, measured: float = 1.0) -> float:
        """Multiplier of both taus at a step, counted from 1; `measured` is the final factor derived from `margin`."""
        factor = self.factor if self.margin is None else min(measured, 1.0)
        part = min(max(step - self.after, 0) / self.steps, 1.0)
        return factor**part if factor else 1.0 - part

    @model_validator(mode="after")
    def _check_margin_or_factor(self) -> AnnealConfig:
        if self.margin is not None and "factor" in self.model_fields_set:
            raise ValueError("factor and margin both set the final taus: remove one of them")
        return self


class LossConfig(BaseConfig):
    """The policy objective: a preset (docs/algorithms.md) whose fields can be overridden.

    Unset fields follow the preset; None disables a bound. Ratios are exp(trainer - inference log-prob).
    """

    type: Literal[
        "aipo", "grpo", "gspo", "opo", "rloo", "cispo", "ppo", "dapo", "dr_grpo", "reinforce", "dppo", "custom"
    ] = "aipo"
    """Preset. Its baseline and scaling are also the defaults of orchestrator.advantage in rl."""

    ratio: Literal["none", "token", "geometric", "arithmetic", "product"] | None = None
    """Importance ratio: per token, or per sequence as the mean (geometric, arithmetic) or product of token ratios."""

    delta: float | None = Field(default=None, gt=0)
    """Cap on the importance ratio (aipo, opo, rloo)."""

    clip_low: float | None = Field(default=None, ge=0, le=1)
    """Lower clip range: 1 - clip_low (grpo, gspo, cispo, ppo, dapo, dr_grpo)."""

    clip_high: float | None = Field(default=None, ge=0)
    """Upper clip range: 1 + clip_high (same presets)."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Dual clip: bound the loss at -dual_clip A for negative advantages A (grpo, gspo, ppo, dapo, dr_grpo)."""

    max_prob_diff: float | None = Field(default=None, gt=0, le=1)
    """Mask tokens whose probability moved further than this in the direction of their advantage (dppo)."""

    token_mask_low: float | None = Field(default=None, ge=0)
    """Mask tokens with a ratio below this value."""

    token_mask_high: float | None = Field(default=None, gt=0)
    """Mask tokens with a ratio above this value."""

    seq_ratio_mask_low: float | None = Field(default=None, ge=0)
    """Mask sequences with a geometric mean ratio below this value."""

    seq_ratio_mask_high: float | None = Field(default=None, gt=0)
    """Mask sequences with a geometric mean ratio above this value."""

    sequence_mask_low: float | None = Field(default=None, ge=0)
    """Mask sequences that contain a token ratio below this value."""

    sequence_mask_high: float | None = Field(default=None, gt=0)
    """Mask sequences that contain a token ratio above this value."""

    adv_tau: float = 1.0
    """Weight of the advantage; rl defaults to 0.5 when orchestrator.teacher_model is set."""

    teacher_tau: float = Field(default=0.0, ge=0)
    """Weight of the teacher log-prob in the advantage; rl defaults to 0.5 with a teacher."""

    student_tau: float | None = None
    """Weight of the student log-prob, subtracted from the advantage; unset: teacher_tau."""

    distill: DistillConfig = DistillConfig()

    anneal: AnnealConfig | None = None

    inference_kl_coef: float = Field(default=0.0, ge=0)
    """KL penalty to the sampling policy: weight of the log-ratio subtracted from the advantage."""

    kl_tau: float | None = Field(default=None, ge=0)
    """Weight of the squared log-ratio in the loss."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || reference) in the loss; the reference model is orchestrator.teacher_model."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the reference KL."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""

    loss_aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"] | None = None
    """token-mean: mean over tokens; the others average over sequences: their means (seq-mean-token-mean), sums
    (seq-mean-token-sum) or sums / max_tokens (constant)."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Divisor of loss_aggregation constant; unset: orchestrator.sampling.max_tokens, or model.seq_len."""

    import_path: str | None = None
    """Custom loss function as package.module:name; maps LossInputs to per-token losses."""

    kwargs: dict[str, Any] = {}
    """Keyword arguments of the custom loss function."""

    @property
    def needs_teacher(self) -> str | None:
        """The enabled option that requires teacher log-probs, if any."""
        return next((name for name in ("teacher_tau", "kl_coef") if getattr(self, name)), None)

    @model_validator(mode="after")
    def _check_options_of_preset(self) -> LossConfig:
        preset, is_custom = PRESETS[self.type], self.type == "custom"
        for option, choice in BOUND_OPTIONS.items():
            if choice not in preset.bounds and getattr(self, option) is not None:
                users = ", ".join(name for name, row in PRESETS.items() if choice in row.bounds)
                raise ValueError(
                    f"{option} has no effect with type {self.type}: remove it or set it to None, or use one of {users}"
                )
        if self.ratio is not None and (self.ratio == "none") != (preset.ratio == "none"):
            raise ValueError(f"ratio {self.ratio} is incompatible with type {self.type}, whose ratio is {preset.ratio}")
        if is_custom != (self.import_path is not None):
            raise ValueError("type custom and import_path go together: set both or neither")
        if self.kwargs and not is_custom:
            raise ValueError("kwargs are arguments of a custom loss: set type custom, or remove them")
        if self.anneal is not None and not self.teacher_tau:
            raise ValueError("anneal decays teacher_tau but it is 0: raise it, or leave anneal out")
        if self.anneal is not None and self.anneal.margin and not (self.adv_tau > 0 and self.student_tau != 0):
            raise ValueError(
                "anneal.margin compares adv_tau with student_tau: raise both above 0, or set anneal.factor"
            )
        if self.max_tokens is not None and (self.loss_aggregation or preset.loss_aggregation) != "constant":
            raise ValueError(
                "max_tokens is the divisor of loss_aggregation constant: remove it, or set that loss_aggregation"
            )
        return self

    @model_validator(mode="after")
    def _follow_preset(self) -> LossConfig:
        """Fill unset fields from the preset, so that the resolved config is complete."""
        unset = [name for name in BOUND_OPTIONS if name not in self.model_fields_set]
        unset += [name for name in ("ratio", "kl_tau", "loss_aggregation") if getattr(self, name) is None]
        for name in unset:
            # Bypass __setattr__, which would mark the field as set and keep its value when the type changes.
            self.__dict__[name] = getattr(PRESETS[self.type], BOUND_OPTIONS.get(name, name))
        return self


class FakeDataConfig(BaseConfig):
    """Random samples instead of those of the orchestrator."""

    batch_size: int = Field(default=16, ge=1)
    """Samples per step."""

    group_size: int = Field(default=4, ge=1)
    """Samples per prompt."""


class DataConfig(BaseConfig):
    """Source of training batches."""

    fake: FakeDataConfig | None = None

    timeout_s: float = Field(default=3600, gt=0)
    """Timeout for one batch of the orchestrator, in seconds."""


class TrainerConfig(TrackersConfig):
    """Settings shared by the RL and SFT trainers."""

    model: ModelConfig = ModelConfig()
    optim: OptimConfig = AdamConfig()
    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    parallel: ParallelDims = ParallelDims()
    ckpt: CkptConfig | None = None
    log: LogConfig = LogConfig()
    micro_bs: int = Field(default=1, ge=1)
    """Micro-batch size in rows of seq_len tokens."""

    max_steps: int | None = Field(default=None, ge=1)
    """Number of optimizer steps; unset: run until stopped."""

    seed: int = Field(default=42, ge=0)
    """Random seed."""

    dist_timeout_seconds: float = Field(default=600, gt=0)
    """Timeout of distributed operations."""

    output_dir: Path = Path("outputs")
    """Directory for weights, checkpoints, metrics and logs."""

    bench: bool = False
    """Benchmark a few steps on fake data of the configured sizes and print a table; writes no output."""

    trace_path: Path | None = None
    """Directory for a Chrome trace of all steps; needs max_steps <= 10."""

    memory_profiler_path: Path | None = None
    """Directory for a GPU memory snapshot of the run."""

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
    def _check_schedule(self) -> TrainerConfig:
        scheduler = self.scheduler
        warmup = 0 if isinstance(scheduler, ConstantSchedulerConfig) else scheduler.warmup_steps
        decay = scheduler.decay_steps if isinstance(scheduler, LinearSchedulerConfig) else 0
        if self.max_steps is None:
            if decay or isinstance(scheduler, CosineSchedulerConfig):
                raise ValueError(f"scheduler.type {scheduler.type} decays to the end of the run: set max_steps")
        elif warmup + decay > self.max_steps:
            raise ValueError(
                f"scheduler.warmup_steps {warmup} and decay_steps {decay} do not fit into max_steps {self.max_steps}"
            )
        if not isinstance(scheduler, ConstantSchedulerConfig) and scheduler.min_lr > self.optim.lr:
            raise ValueError(f"scheduler.min_lr {scheduler.min_lr} is above optim.lr {self.optim.lr}")
        return self


class TrainConfig(TrainerConfig):
    """The RL trainer."""

    model: RLModelConfig = RLModelConfig()
    loss: LossConfig = LossConfig()
    data: DataConfig = DataConfig()
    transport: TransportConfig = TransportConfig()
    weight_broadcast: TrainerWeightBroadcastConfig = TrainerWeightBroadcastConfig()

    max_async_level: int = Field(default=2, ge=0)
    """Maximum policy staleness of a sample, in optimizer steps; older published weights are pruned."""

    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """EMA decay: maintain a moving average of the weights and publish it as average/step_N; set by rl when the teacher
    weights are "ema"."""

    logprob_dump_interval: int | None = Field(default=None, ge=1)
    """Interval, in steps, of writing per-token trainer log-probs to trainer_logprobs.jsonl for `monitor`."""

    @model_validator(mode="after")
    def _check_distillation_parallelism(self) -> TrainConfig:
        cut = next((name for name in ("tp", "cp") if getattr(self.parallel, name) > 1), None)
        if cut and self.loss.distill.estimator in ("topk+tail", "full"):
            raise ValueError(
                f"loss.distill.estimator {self.loss.distill.estimator} needs whole distributions, "
                f"which parallel.{cut} splits: use another estimator, or parallel.dp and pp"
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


class LossMaskConfig(BaseConfig):
    """Roles that are trained on."""

    system: bool = False
    """System messages."""

    user: bool = False
    """User messages."""

    assistant: bool = True
    """Assistant messages, including their end-of-turn token."""

    tool: bool = False
    """Tool results."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that are trained on."""
        return tuple(role for role in ("system", "user", "assistant", "tool") if getattr(self, role))


class SFTModelConfig(ModelConfig):
    """The fine-tuned model."""

    attn: Literal["auto", "exact", "sdpa", "flash"] = "auto"
    """exact: batch-invariant, bit for bit; auto: sdpa or flash."""


class SFTDataConfig(BaseConfig):
    """Training conversations."""

    type: Literal["sft"] = "sft"
    """A dataset of conversations."""

    name: str = "PrimeIntellect/Reverse-Text-SFT"
    """JSONL or parquet file, directory of such files, or hub dataset."""

    split: str = "train"
    """Dataset split; in a directory, the files T.* and T-* of split T."""

    subsets: list[str] | None = None
    """Subsets to mix: hub configurations, or files or directories in a directory."""

    splits: list[str] | None = None
    """Split of each subset, or the splits to mix; unset: split."""

    probabilities: list[float] | None = None
    """Sampling probability of each subset (sum 1); unset: round robin."""

    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "all_exhausted"
    """Whether an epoch over several subsets ends when the first or the last one is exhausted."""

    seq_len: int = Field(default=128, ge=2)
    """Tokens per row; longer conversations are dropped and reported."""

    truncate: bool = False
    """Truncate longer conversations to seq_len instead of dropping them."""

    batch_size: int = Field(default=128, ge=1)
    """Rows per step, over all ranks."""

    pack_function: Literal["cat", "stack"] = "cat"
    """cat: pack whole conversations into each row; stack: one conversation per row."""

    shuffle: bool = True
    """Shuffle each epoch with a seed derived from `seed`."""

    loss_mask: LossMaskConfig = LossMaskConfig()

    split_turns: bool = False
    """Make one sample per assistant turn; for chat templates that rewrite earlier turns."""

    @model_validator(mode="after")
    def _check_mixture(self) -> SFTDataConfig:
        parts = self.parts
        if self.subsets and self.splits and len(self.subsets) != len(self.splits):
            raise ValueError(f"data.splits has {len(self.splits)} entries for {len(self.subsets)} data.subsets")
        if self.probabilities is not None:
            if len(self.probabilities) != len(parts):
                raise ValueError(f"data.probabilities has {len(self.probabilities)} entries for {len(parts)} subsets")
            if min(self.probabilities) <= 0 or abs(sum(self.probabilities) - 1) > 1e-3:
                raise ValueError(f"data.probabilities {self.probabilities} must be above 0 and add up to 1")
        if not self.loss_mask.roles:
            raise ValueError("data.loss_mask disables all roles: enable at least one")
        if self.split_turns and self.loss_mask.roles != ("assistant",):
            raise ValueError("data.split_turns needs a data.loss_mask with assistant only")
        return self

    @property
    def parts(self) -> list[tuple[str | None, str]]:
        """Subset and split of every source."""
        if self.subsets:
            return list(zip(self.subsets, self.splits or [self.split] * len(self.subsets), strict=False))
        return [(None, split) for split in self.splits or [self.split]]


class SFTValConfig(BaseConfig):
    """Validation loss on held-out conversations; enabled by the presence of the section."""

    name: str | None = None
    """Validation dataset; unset: hold out samples of the training data."""

    split: str = "train"
    """Split of the validation dataset."""

    num_samples: int = Field(default=64, ge=1)
    """Number of held-out samples, or maximum number from the validation dataset."""

    interval: int = Field(default=50, ge=1)
    """Steps between evaluations; the last step is always evaluated."""

    eval_on_start: bool = True
    """Also evaluate before the first step."""


class FakeSFTDataConfig(BaseConfig):
    """Random tokens."""

    type: Literal["fake"] = "fake"
    """Random tokens."""

    length: Literal["fixed", "variable"] = "fixed"
    """Whether sequences fill the row or have random lengths."""

    seq_len: int = Field(default=128, ge=2)
    """Tokens per row."""

    batch_size: int = Field(default=128, ge=1)
    """Rows per step, over all ranks."""


class SFTConfig(TrainerConfig):
    """The SFT trainer."""

    model: SFTModelConfig = SFTModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: Annotated[SFTDataConfig | FakeSFTDataConfig, Field(discriminator="type")] = SFTDataConfig()
    val: SFTValConfig | None = None

    deployment: Deployment = LocalDeployment()
    """Where the ranks run: locally, or as a Slurm, Ray or Kubernetes job."""

    @model_validator(mode="after")
    def _check_val_data(self) -> SFTConfig:
        if self.val is not None and not isinstance(self.data, SFTDataConfig):
            raise ValueError("val needs conversations, but data.type is fake: leave the section out")
        return self
