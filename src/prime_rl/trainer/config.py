"""Configuration of both trainers: model, optimizer, schedule, loss, data, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from prime_rl.deployment.config import Deployment, LocalDeployment
from prime_rl.utils.config import DebugModelConfig, LogConfig, SendingConfig, TrackersConfig, TransportConfig
from prime_rl.utils.pydantic_config import BaseConfig
from rollouts.training.objectives import PRESETS

BOUND_OPTIONS = {name: name for name in ("clip_low", "clip_high", "dual_clip", "prob_bound")} | {"delta": "ratio_cap"}
"""Options of the loss that only some presets use, and the choice that each one is."""


class LoraConfig(BaseConfig):
    """Train a low-rank change beside frozen matrices (2106.09685); the section switches it on."""

    rank: int = Field(default=16, ge=1)
    """Rank of the change."""

    alpha: float = Field(default=32.0, gt=0)
    """The change is scaled by alpha / rank."""

    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of a changed layer's inputs that the change does not see in training."""

    target_modules: list[str] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    """Matrices that are changed: last parts of their names, whole names or regular expressions of these."""

    modules_to_save: list[str] = []
    """Modules that are trained whole beside it, such as lm_head or embed_tokens."""

    merge: bool = False
    """Publish whole models with the change merged in; false: PEFT adapters, a fraction of the size."""

    @model_validator(mode="after")
    def _changes_something(self) -> LoraConfig:
        if not self.target_modules:
            raise ValueError("target_modules is empty: name a matrix such as q_proj, or leave out model.lora")
        return self


MAX_TRACED_STEPS = 10


class ActivationConfig(BaseConfig):
    """Compute activations again in the backward pass instead of keeping them; results stay as they are."""

    mode: Literal["full", "selective"] = "full"
    """full: a layer keeps its inputs only; selective: also its matrix products and attention."""

    freq: int = Field(default=1, ge=1)
    """Every how many layers; 1: all."""


class ActivationOffloadConfig(BaseConfig):
    """Let the inputs of layers under model.ac wait for the backward pass in host memory."""

    pin_memory: bool = True
    """Use page-locked host memory: faster, and not to be swapped."""


class CompileConfig(BaseConfig):
    """Compile each layer with torch.compile; results differ from those without in the last bits.

    With attn = flash twice, for any pack; with sdpa again for every new number of rows that a pack is laid out in.
    """

    fullgraph: bool = False
    """Fail where a layer cannot be compiled whole."""

    backend: str = "inductor"
    """What makes code of the graph; aot_eager runs it without making any, to look for errors."""


class ModelConfig(BaseConfig):
    """The model that is trained and how it is computed."""

    name: str = "Qwen/Qwen3-0.6B"
    """A Hugging Face directory, a shipped model (tiny-qwen3) or a hub id."""

    impl: Literal["auto", "custom", "hf"] = "auto"
    """custom: our decoder, which engines share; hf: transformers; auto: custom where there is one, else hf."""

    attn: Literal["auto", "exact", "sdpa", "flash"] = "auto"
    """exact: a token's bits do not depend on its pack; sdpa, flash (GPU): faster; auto: exact where a CPU uses fp32."""

    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Number format of forward and backward; the optimizer works in float32, or in float64 beside a float64 model.
    auto: bfloat16 on a GPU, else float32. A CPU that would emulate bfloat16 rounds weights, keys and values to it and
    computes in float32."""

    device: str = "auto"
    """Where to compute, such as cpu or cuda:0; auto: a GPU when there is one."""

    lora: LoraConfig | None = None
    ac: ActivationConfig | None = None
    ac_offloading: ActivationOffloadConfig | None = None
    compile: CompileConfig | None = None

    optim_cpu_offload: bool = False
    """The optimizer's parameters and moments live in host memory, and it works there."""

    reshard_after_forward: bool = True
    """Give gathered parameters up between forward and backward where ranks share a model: less memory, more traffic."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Format in which bfloat16 ranks add up their gradients; parameters and moments stay float32."""
    debug: DebugModelConfig = DebugModelConfig()

    @model_validator(mode="after")
    def _options_fit_together(self) -> ModelConfig:
        if self.ac_offloading is not None and self.ac is None:
            raise ValueError("ac_offloading moves what recomputed layers keep: switch on ac too")
        if self.compile is not None and self.attn == "exact":
            raise ValueError("compile rounds in another order than attn = exact promises: set attn = sdpa")
        if self.compile is not None and self.ac is not None and self.ac.mode == "selective":
            raise ValueError("compile chooses itself what to compute again: set ac.mode = full, or leave compile out")
        return self


class RLModelConfig(ModelConfig):
    """The policy."""

    seq_len: int = Field(default=2048, ge=2)
    """Most tokens of one sample, prompt included."""


class TokenizerConfig(BaseConfig):
    """How conversations become tokens."""

    name: str | None = None
    """Model or directory the tokenizer comes from; unset: model.name."""

    chat_template: str | None = None
    """Replaces the tokenizer's chat template: its text, or the path of a file."""


class AdamConfig(BaseConfig):
    """AdamW (1711.05101)."""

    type: Literal["adamw"] = "adamw"
    """AdamW."""

    lr: float = Field(default=1e-6, ge=0)
    """Learning rate at its highest."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""

    max_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm; None: never."""

    betas1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean gradient."""

    betas2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the mean squared gradient."""


class SGDConfig(BaseConfig):
    """Stochastic gradient descent with momentum."""

    type: Literal["sgd"] = "sgd"
    """SGD."""

    lr: float = Field(default=1e-6, ge=0)
    """Learning rate at its highest."""

    weight_decay: float = Field(default=0.01, ge=0)
    """L2 penalty."""

    max_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm; None: never."""

    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the velocity."""

    nesterov: bool = True
    """Look ahead along the velocity; needs momentum above 0."""

    @model_validator(mode="after")
    def _nesterov_needs_momentum(self) -> SGDConfig:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0: set nesterov = false")
        return self


class MuonConfig(BaseConfig):
    """Orthogonal momentum for matrices (2502.16982), AdamW for embeddings, head, norms and biases."""

    type: Literal["muon"] = "muon"
    """Muon."""

    lr: float = Field(default=1e-6, ge=0)
    """Learning rate at its highest."""

    weight_decay: float = Field(default=0.01, ge=0)
    """Decoupled weight decay."""

    max_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm; None: never."""

    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the velocity of matrices."""

    nesterov: bool = True
    """Look ahead along the velocity."""

    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of a matrix's update: as large as AdamW's, so that its lr fits; or sqrt(max(1, rows / columns))."""

    betas1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the mean gradient."""

    betas2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's decay of the mean squared gradient."""


OptimConfig = Annotated[AdamConfig | SGDConfig | MuonConfig, Field(discriminator="type")]


class ConstantSchedulerConfig(BaseConfig):
    """The learning rate stays as it is."""

    type: Literal["constant"] = "constant"
    """No schedule."""


class LinearSchedulerConfig(BaseConfig):
    """Warm up, stay, decay linearly at the end of the run."""

    type: Literal["linear"] = "linear"
    """Linear."""

    warmup_steps: int = Field(default=10, ge=0)
    """Steps until the full learning rate."""

    decay_steps: int = Field(default=10, ge=0)
    """Last steps of the run, over which it falls to min_lr."""

    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate of the last step."""


class CosineSchedulerConfig(BaseConfig):
    """Warm up, then half a cosine down to the end of the run."""

    type: Literal["cosine"] = "cosine"
    """Cosine."""

    warmup_steps: int = Field(default=10, ge=0)
    """Steps until the full learning rate."""

    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate of the last step."""


SchedulerConfig = Annotated[
    ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig, Field(discriminator="type")
]


class CkptConfig(BaseConfig):
    """Checkpoints to continue from; the section switches them on."""

    interval: int | None = Field(default=None, ge=1)
    """Steps between checkpoints; unset: only after the last step."""

    keep: int | None = Field(default=None, ge=1)
    """Newest checkpoints that are kept; unset: all."""

    resume_step: int | None = Field(default=None, ge=-1)
    """Continue from this checkpoint; -1: from the latest complete one."""

    skip_optimizer: bool = False
    """Resume without the optimizer's moments: they begin at zero."""

    skip_scheduler: bool = False
    """Resume with the learning-rate schedule begun anew, over the steps that are left."""

    skip_dataloader: bool = False
    """Resume at the beginning of the data (sft)."""

    skip_progress: bool = False
    """Resume with steps, schedule and totals counted from the beginning (sft): a new stage from these parameters."""

    @model_validator(mode="after")
    def _skips_need_a_checkpoint(self) -> CkptConfig:
        for name in ("skip_optimizer", "skip_scheduler", "skip_dataloader", "skip_progress"):
            if getattr(self, name) and self.resume_step is None:
                raise ValueError(f"{name} leaves out a part of a checkpoint to continue from: set resume_step")
        return self


class ParallelDims(BaseConfig):
    """How many ranks share the work, by dimension: pp * dp * cp * tp of them, where dp = dp_replicate * dp_shard."""

    dp: int | None = Field(default=None, ge=1)
    """Data parallel: groups of ranks that each train a share of the batch; unset: as many as there are ranks for."""

    dp_replicate: int = Field(default=1, ge=1)
    """Copies of the sharded model among the dp ranks; 1: parameters are sharded over all of them."""

    dp_shard: int | None = Field(default=None, ge=1)
    """Ranks over which each copy is sharded; unset: dp / dp_replicate."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel: ranks that share every matrix, by heads, columns and vocabulary."""

    pp: int = Field(default=1, ge=1)
    """Pipeline parallel: ranks that have different layers, through which micro-batches pass one after another."""

    pp_stages: int = Field(default=1, ge=1)
    """Stages of each pp rank; 1: 1F1B; more: interleaved 1F1B, with shorter waits and more messages."""

    cp: int = Field(default=1, ge=1)
    """Context parallel: ranks that share the tokens of a micro-batch."""

    cp_style: Literal["ulysses", "ring"] = "ulysses"
    """ulysses: each rank attends for some heads; ring: keys go round, for more ranks than a model has heads."""

    ep: int = Field(default=1, ge=1)
    """Expert parallel: ranks, of those with other tokens, that have different experts; divides dp_shard * cp."""

    @property
    def num_ranks(self) -> int:
        """Ranks that this section asks for, of its own."""
        return self.model_ranks * (self.dp or self.dp_replicate * (self.dp_shard or 1))

    @property
    def model_ranks(self) -> int:
        """Ranks that train one micro-batch together."""
        return self.pp * self.cp * self.tp

    @property
    def splits_model(self) -> list[str]:
        """The dimensions above 1 that need a model of our own."""
        return [name for name in ("tp", "cp", "pp", "ep") if getattr(self, name) > 1]

    def resolve(self, num_ranks: int) -> ParallelDims:
        """The same for `num_ranks` ranks, with nothing left unset; `ValueError` says why they do not fit."""
        if num_ranks % self.model_ranks:
            raise ValueError(
                f"parallel: pp {self.pp} * cp {self.cp} * tp {self.tp} = {self.model_ranks} ranks train a micro-batch "
                f"together, which does not divide {num_ranks} ranks"
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
                "the ranks of ep are among those that have other tokens"
            )
        return self.model_copy(update={"dp": dp, "dp_shard": dp // self.dp_replicate})

    @model_validator(mode="after")
    def _sizes_fit(self) -> ParallelDims:
        if self.pp_stages > 1 and self.pp == 1:
            raise ValueError("pp_stages says how a pipeline is cut: set pp above 1, or leave it out")
        if self.cp_style == "ring" and self.cp == 1:
            raise ValueError("cp_style says how cp ranks share attention: set cp above 1, or leave it out")
        if self.dp is not None and self.dp % self.dp_replicate:
            raise ValueError(f"dp_replicate {self.dp_replicate} does not divide dp {self.dp}")
        if self.dp is not None and self.dp_shard not in (None, self.dp // self.dp_replicate):
            raise ValueError(
                f"dp {self.dp} is not dp_replicate {self.dp_replicate} * dp_shard {self.dp_shard}: leave one out"
            )
        return self


class DistillConfig(BaseConfig):
    """How the pull towards the teacher is estimated (docs/on_policy_distillation.md)."""

    estimator: Literal["auto", "token", "togo", "sequence", "topk+tail", "full"] = "token"
    """token: of the sampled token alone; togo: of it and all that follow; sequence: of the whole answer, against its
    group; topk+tail: over the teacher's k most likely tokens and the rest as one; full: over all tokens; auto:
    topk+tail, in the forward direction while students seldom sample what the teacher would say where that is not
    settled, or else token."""

    direction: Literal["reverse", "forward", "jsd"] = "reverse"
    """reverse: KL(student || teacher); forward: KL(teacher || student); jsd: both against their mixture. The last two
    need topk+tail or full."""

    k: int = Field(default=8, ge=1, le=100)
    """topk+tail: tokens of the teacher that are told apart."""

    jsd_beta: float = Field(default=0.5, gt=0, lt=1)
    """jsd: the teacher's share of the mixture."""

    clip: float | None = Field(default=None, gt=0)
    """token, togo, sequence: bound on the difference of a token's two log-probs, so that a few tokens of style do not
    outweigh all others."""

    @property
    def top_logprobs(self) -> int:
        """What the teacher must tell beside the sampled token: so many most likely tokens, -1 for all."""
        return {"auto": self.k, "topk+tail": self.k, "full": -1}.get(self.estimator, 0)

    @model_validator(mode="after")
    def _check_direction(self) -> DistillConfig:
        if self.direction != "reverse" and self.estimator not in ("topk+tail", "full"):
            raise ValueError(
                f'direction = "{self.direction}" compares distributions, of which estimator = "{self.estimator}" sees '
                'one token\n  set estimator to "topk+tail" or "full"'
            )
        if self.clip is not None and self.top_logprobs:
            raise ValueError('clip bounds sampled tokens: remove it, or set estimator to "token"')
        return self


class AnnealConfig(BaseConfig):
    """Distil first, then let the reward lead: both taus shrink, so that a reward is worth more and more nats.

    The section switches it on. A student passes its teacher once adv_tau / student_tau is more than it costs, in nats
    per answer, to leave it.
    """

    after: int = Field(default=50, ge=0)
    """Steps at the taus as they are."""

    steps: int = Field(default=50, ge=1)
    """Steps over which they shrink, by the same factor each."""

    factor: float = Field(default=0.01, ge=0, lt=1)
    """What is left of them in the end."""

    margin: float | None = Field(default=None, gt=0)
    """Set: in place of `factor`, a reward of 1 is in the end worth so many times the nats by which answers were from
    their teacher in the farthest batch so far; a margin of 8 leaves a teacher that is wrong."""

    def scale(self, step: int, measured: float = 1.0) -> float:
        """What the taus are multiplied with in a step, counted from 1; `measured` is the factor that `margin` wants."""
        factor = self.factor if self.margin is None else min(measured, 1.0)
        part = min(max(step - self.after, 0) / self.steps, 1.0)
        return factor**part if factor else 1.0 - part

    @model_validator(mode="after")
    def _end_once(self) -> AnnealConfig:
        if self.margin is not None and "factor" in self.model_fields_set:
            raise ValueError("factor and margin both say where the taus end: remove one of them")
        return self


class LossConfig(BaseConfig):
    """The policy objective: a preset of five choices (docs/algorithms.md), each of which can be changed.

    What is unset follows the preset; None switches a bound off. Ratios are exp(trainer - inference log-prob).
    """

    type: Literal[
        "aipo", "grpo", "gspo", "opo", "rloo", "cispo", "ppo", "dapo", "dr_grpo", "reinforce", "dppo", "custom"
    ] = "aipo"
    """Preset. rl also takes its baseline and deviation for orchestrator.advantage, unless they are set there."""

    ratio: Literal["none", "token", "geometric", "arithmetic", "product"] | None = None
    """Importance ratio: per token, or of the sequence the mean (geometric, arithmetic) or product of its tokens'."""

    delta: float | None = Field(default=None, gt=0)
    """Cap on the importance ratio (aipo, opo, rloo)."""

    clip_low: float | None = Field(default=None, ge=0, le=1)
    """The ratio is clipped below 1 - clip_low (grpo, gspo, cispo, ppo, dapo, dr_grpo)."""

    clip_high: float | None = Field(default=None, ge=0)
    """The ratio is clipped above 1 + clip_high (the same)."""

    dual_clip: float | None = Field(default=None, gt=1)
    """A token with negative advantage A loses at most -dual_clip A (grpo, gspo, ppo, dapo, dr_grpo)."""

    prob_bound: float | None = Field(default=None, gt=0, le=1)
    """Drop tokens whose probability has moved further than this in the direction of their advantage (dppo)."""

    token_mask_low: float | None = Field(default=None, ge=0)
    """Drop tokens whose ratio is below."""

    token_mask_high: float | None = Field(default=None, gt=0)
    """Drop tokens whose ratio is above."""

    geo_mask_low: float | None = Field(default=None, ge=0)
    """Drop sequences whose geometric mean ratio is below."""

    geo_mask_high: float | None = Field(default=None, gt=0)
    """Drop sequences whose geometric mean ratio is above."""

    sequence_mask_low: float | None = Field(default=None, ge=0)
    """Drop sequences that contain a ratio below."""

    sequence_mask_high: float | None = Field(default=None, gt=0)
    """Drop sequences that contain a ratio above."""

    adv_tau: float = 1.0
    """Weight of the advantage; rl makes it 0.5 where there is an orchestrator.teacher_model and it is unset."""

    teacher_tau: float = Field(default=0.0, ge=0)
    """Weight of the teacher's log-prob in the advantage; rl makes it 0.5 with a teacher."""

    student_tau: float | None = None
    """Weight of the student's own log-prob, subtracted from the advantage; unset: as teacher_tau."""

    distill: DistillConfig = DistillConfig()

    anneal: AnnealConfig | None = None

    sampler_tau: float = Field(default=0.0, ge=0)
    """Weight of the log-ratio, subtracted from the advantage: keeps the policy near the one that sampled."""

    kl_tau: float | None = Field(default=None, ge=0)
    """Weight of the squared log-ratio, added to the loss."""

    ref_kl_tau: float = Field(default=0.0, ge=0)
    """Weight of KL(policy || reference), added to the loss; the reference is orchestrator.teacher_model."""

    ref_kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""

    entropy_tau: float = 0.0
    """Weight of the entropy, subtracted from the loss."""

    normaliser: Literal["tokens", "sequences", "sums", "constant"] | None = None
    """Mean over tokens; over sequences of their means (sequences), sums (sums), or sums / max_tokens (constant)."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Divisor of normaliser constant; unset: orchestrator.sampling.max_tokens, or model.seq_len."""

    import_path: str | None = None
    """Function of type custom, as package.module:name; from LossInputs to one loss per token."""

    kwargs: dict[str, Any] = {}
    """Further arguments of that function."""

    @property
    def needs_teacher(self) -> str | None:
        """The option that cannot do without teacher log-probs, if one is set."""
        return next((name for name in ("teacher_tau", "ref_kl_tau") if getattr(self, name)), None)

    @model_validator(mode="after")
    def _refuse_what_means_nothing(self) -> LossConfig:
        preset, is_custom = PRESETS[self.type], self.type == "custom"
        for option, choice in BOUND_OPTIONS.items():
            if choice not in preset.bounds and getattr(self, option) is not None:
                users = ", ".join(name for name, row in PRESETS.items() if choice in row.bounds)
                raise ValueError(
                    f"{option} means nothing to type {self.type}: remove it or set it to None, or use one of {users}"
                )
        if self.ratio is not None and (self.ratio == "none") != (preset.ratio == "none"):
            raise ValueError(f"ratio {self.ratio} does not go with type {self.type}, whose ratio is {preset.ratio}")
        if is_custom != (self.import_path is not None):
            raise ValueError("type custom and import_path go together: set both or neither")
        if self.kwargs and not is_custom:
            raise ValueError("kwargs are arguments of a custom loss: set type custom, or remove them")
        if self.anneal is not None and not self.teacher_tau:
            raise ValueError("anneal shrinks the taus but teacher_tau is 0: raise it, or leave anneal out")
        if self.anneal is not None and self.anneal.margin and not (self.adv_tau > 0 and self.student_tau != 0):
            raise ValueError(
                "anneal.margin compares adv_tau with student_tau: raise both above 0, or set anneal.factor"
            )
        if self.max_tokens is not None and (self.normaliser or preset.normaliser) != "constant":
            raise ValueError("max_tokens is the divisor of normaliser constant: remove it, or set that normaliser")
        return self

    @model_validator(mode="after")
    def _follow_preset(self) -> LossConfig:
        """Fill what is unset, so that the resolved config shows every number of the objective."""
        unset = [name for name in BOUND_OPTIONS if name not in self.model_fields_set]
        unset += [name for name in ("ratio", "kl_tau", "normaliser") if getattr(self, name) is None]
        for name in unset:
            # Not an assignment: that would mark the option as given, and it would outlive a change of type.
            self.__dict__[name] = getattr(PRESETS[self.type], BOUND_OPTIONS.get(name, name))
        return self


class FakeDataConfig(BaseConfig):
    """Random samples instead of an orchestrator."""

    batch_size: int = Field(default=16, ge=1)
    """Samples per step."""

    group_size: int = Field(default=4, ge=1)
    """Samples that share a prompt."""


class DataConfig(BaseConfig):
    """Where batches come from."""

    fake: FakeDataConfig | None = None

    timeout_s: float = Field(default=3600, gt=0)
    """How long to wait for one batch of the orchestrator."""


class TrainerConfig(TrackersConfig):
    """What both trainers share."""

    model: ModelConfig = ModelConfig()
    optim: OptimConfig = AdamConfig()
    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    parallel: ParallelDims = ParallelDims()
    ckpt: CkptConfig | None = None
    log: LogConfig = LogConfig()
    micro_bs: int = Field(default=1, ge=1)
    """Rows of seq_len tokens that go through the model at once."""

    max_steps: int | None = Field(default=None, ge=1)
    """Steps of the run; unset: until stopped."""

    seed: int = Field(default=42, ge=0)
    """Seed of everything random."""

    dist_timeout_seconds: float = Field(default=600, gt=0)
    """How long one rank waits for another before it gives the run up."""

    output_dir: Path = Path("outputs")
    """Where weights, checkpoints, metrics and logs go."""

    bench: bool = False
    """Time a few steps on fake data of the configured sizes, show a table, keep nothing."""

    trace_path: Path | None = None
    """Directory for a chrome trace of all steps; needs max_steps of at most 10."""

    memory_profiler_path: Path | None = None
    """Directory for a record of GPU memory over the run."""

    @model_validator(mode="after")
    def _parts_of_a_model_fit_together(self) -> TrainerConfig:
        kinds = self.parallel.splits_model
        if kinds and self.model.impl == "hf":
            raise ValueError(f"parallel.{kinds[0]} needs a decoder of our own: set model.impl = auto or custom")
        if kinds and self.model.compile is not None:
            raise ValueError(f"parallel.{kinds[0]} talks to other ranks inside a layer: leave model.compile out")
        if self.parallel.cp_style == "ring" and self.model.attn not in ("auto", "sdpa"):
            raise ValueError(
                f"parallel.cp_style ring has an attention of its own: leave model.attn {self.model.attn} out"
            )
        if self.parallel.tp > 1 and self.optim.type == "muon":
            raise ValueError("optim.type muon needs whole matrices, and parallel.tp cuts them: use parallel.dp")
        return self

    @model_validator(mode="after")
    def _traces_are_short(self) -> TrainerConfig:
        steps = self.max_steps if self.max_steps is not None else (1 if self.bench else None)
        if self.trace_path is not None and (steps is None or steps > MAX_TRACED_STEPS):
            raise ValueError(f"trace_path keeps every operation in memory: set max_steps to {MAX_TRACED_STEPS} or less")
        if self.bench and self.max_steps == 1:
            raise ValueError("bench does not count the first step, which warms up: set max_steps to 2 or more")
        return self

    @model_validator(mode="after")
    def _schedules_need_an_end(self) -> TrainerConfig:
        scheduler = self.scheduler
        warmup = 0 if isinstance(scheduler, ConstantSchedulerConfig) else scheduler.warmup_steps
        decay = scheduler.decay_steps if isinstance(scheduler, LinearSchedulerConfig) else 0
        if self.max_steps is None:
            if decay or isinstance(scheduler, CosineSchedulerConfig):
                raise ValueError(f"scheduler.type {scheduler.type} falls towards the end of the run: set max_steps")
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
    weight_broadcast: SendingConfig = SendingConfig()

    max_async_level: int = Field(default=2, ge=0)
    """How many versions behind the policy that generates may be; decides which published weights are kept."""

    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Set: a moving average of the weights is kept with this decay and published as average/step_N beside weights/;
    rl sets it for a teacher whose weights are "ema"."""

    record_logprobs: int | None = Field(default=None, ge=1)
    """Steps between two whose log-probs by the trainer, token by token, go to trainer_logprobs.jsonl for `monitor`."""

    @model_validator(mode="after")
    def _distributions_are_whole(self) -> TrainConfig:
        cut = next((name for name in ("tp", "cp") if getattr(self.parallel, name) > 1), None)
        if cut and self.loss.distill.estimator in ("topk+tail", "full"):
            raise ValueError(
                f"loss.distill.estimator {self.loss.distill.estimator} compares whole distributions, "
                f"which parallel.{cut} cuts: use another estimator, or parallel.dp and pp"
            )
        return self

    @model_validator(mode="after")
    def _steps_are_versions(self) -> TrainConfig:
        for name in ("skip_progress", "skip_dataloader"):
            if self.ckpt is not None and getattr(self.ckpt, name):
                raise ValueError(
                    f"ckpt.{name} is for sft: steps of RL are versions that batches and engines go by; "
                    "for a new stage start a run whose model.name is weights/step_N"
                )
        return self


class LossMaskConfig(BaseConfig):
    """Which roles carry loss."""

    system: bool = False
    """System messages."""

    user: bool = False
    """User messages."""

    assistant: bool = True
    """Assistant messages and what ends them."""

    tool: bool = False
    """Results of tools."""

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles that carry loss."""
        return tuple(role for role in ("system", "user", "assistant", "tool") if getattr(self, role))


class SFTModelConfig(ModelConfig):
    """The model that learns from conversations."""

    attn: Literal["auto", "exact", "sdpa", "flash"] = "auto"
    """exact: a token's bits do not depend on its pack; auto: sdpa or flash, because no engine has to agree here."""


class SFTDataConfig(BaseConfig):
    """Conversations to learn from."""

    type: Literal["sft"] = "sft"
    """Conversations of a data set."""

    name: str = "PrimeIntellect/Reverse-Text-SFT"
    """A JSONL or parquet file, a directory of them, or a data set on the hub."""

    split: str = "train"
    """Split that is read; of a directory the files T.* and T-*."""

    subsets: list[str] | None = None
    """Subsets that are mixed: configurations on the hub, files or directories in a directory."""

    splits: list[str] | None = None
    """Split of each subset, or the splits that are mixed; unset: split."""

    probabilities: list[float] | None = None
    """How often each subset is drawn from, 1 in all; unset: in rotation."""

    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "all_exhausted"
    """Whether an epoch over several subsets ends with the first or the last one that has been read."""

    seq_len: int = Field(default=128, ge=2)
    """Tokens of one row; longer conversations are left out, counted and reported."""

    truncate: bool = False
    """Cut longer conversations at seq_len instead of leaving them out."""

    batch_size: int = Field(default=128, ge=1)
    """Rows per step over all ranks."""

    pack_function: Literal["cat", "stack"] = "cat"
    """cat: rows are filled with whole conversations; stack: each row is one conversation."""

    shuffle: bool = True
    """Another order in each epoch, derived from seed."""

    loss_mask: LossMaskConfig = LossMaskConfig()

    split_turns: bool = False
    """Make a sample of each assistant turn; for templates that rewrite earlier turns."""

    @model_validator(mode="after")
    def _mixed_parts_match(self) -> SFTDataConfig:
        parts = self.parts
        if self.subsets and self.splits and len(self.subsets) != len(self.splits):
            raise ValueError(f"data.splits has {len(self.splits)} entries for {len(self.subsets)} data.subsets")
        if self.probabilities is not None:
            if len(self.probabilities) != len(parts):
                raise ValueError(f"data.probabilities has {len(self.probabilities)} entries for {len(parts)} subsets")
            if min(self.probabilities) <= 0 or abs(sum(self.probabilities) - 1) > 1e-3:
                raise ValueError(f"data.probabilities {self.probabilities} must be above 0 and add up to 1")
        if not self.loss_mask.roles:
            raise ValueError("data.loss_mask leaves no role with loss: nothing could be learnt")
        if self.split_turns and self.loss_mask.roles != ("assistant",):
            raise ValueError(
                "data.split_turns needs a data.loss_mask with the assistant alone: it samples assistant turns"
            )
        return self

    @property
    def parts(self) -> list[tuple[str | None, str]]:
        """Subset and split of every source."""
        if self.subsets:
            return list(zip(self.subsets, self.splits or [self.split] * len(self.subsets), strict=False))
        return [(None, split) for split in self.splits or [self.split]]


class ValConfig(BaseConfig):
    """Loss on conversations that are not trained on; the section switches it on."""

    name: str | None = None
    """Data set of its own; unset: samples are held out of the training data."""

    split: str = "train"
    """Split of the data set of its own."""

    num_samples: int = Field(default=64, ge=1)
    """Samples that are held out, or at most taken from the data set of its own."""

    interval: int = Field(default=50, ge=1)
    """Steps between evaluations; the last step is always evaluated."""

    eval_on_start: bool = True
    """Evaluate before the first step too."""


class FakeSFTDataConfig(BaseConfig):
    """Random tokens."""

    type: Literal["fake"] = "fake"
    """Random tokens."""

    length: Literal["fixed", "variable"] = "fixed"
    """Whether sequences fill the row or vary in length."""

    seq_len: int = Field(default=128, ge=2)
    """Tokens of one row."""

    batch_size: int = Field(default=128, ge=1)
    """Rows per step over all ranks."""


class SFTConfig(TrainerConfig):
    """The trainer for supervised fine-tuning."""

    model: SFTModelConfig = SFTModelConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    data: Annotated[SFTDataConfig | FakeSFTDataConfig, Field(discriminator="type")] = SFTDataConfig()
    val: ValConfig | None = None

    deployment: Deployment = LocalDeployment()
    """Where the ranks run: this machine, or one job of Slurm, Ray or Kubernetes."""

    @model_validator(mode="after")
    def _val_needs_conversations(self) -> SFTConfig:
        if self.val is not None and not isinstance(self.data, SFTDataConfig):
            raise ValueError("val needs conversations, but data.type is fake: leave the section out")
        return self
