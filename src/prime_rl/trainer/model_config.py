"""Configuration of the trained model: device, number format, adapters, activation checkpointing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from prime_rl.configuration.sections import DebugModelConfig
from prime_rl.trainer.models.decoder_config import AttentionMode
from prime_rl.utils.pydantic_config import BaseConfig

AttentionChoice = Literal["auto", AttentionMode]
"""`auto` is resolved by `trainer.model.resolve_placement`."""


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


class ActivationConfig(BaseConfig):
    """Activation checkpointing: recompute activations in the backward pass; results do not change."""

    mode: Literal["full", "selective"] = "full"
    """full: store the layer inputs only; selective: also store the outputs of matrix products and attention."""

    freq: int = Field(default=1, ge=1)
    """Checkpoint every freq-th layer; 1: all layers."""


class ActivationOffloadConfig(BaseConfig):
    """Keep the layer inputs stored under model.ac in host memory until the backward pass; what ac.mode = selective
    stores besides stays on the device."""

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

    attn: AttentionChoice = "auto"
    """exact: batch-invariant, bit for bit; sdpa, flash (GPU): faster; auto: exact on a CPU, except for several ranks in
    bfloat16."""

    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Number format of forward and backward; the optimizer uses float32, or float64 for a float64 model. auto: bfloat16
    on a GPU, else float32. A single rank on a CPU rounds weights, keys, values and, with bfloat16 instructions, the
    inputs of products, and sums in float32; without exactness such a CPU computes in bfloat16."""

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

    @property
    def publishes_adapters(self) -> bool:
        """Whether PEFT adapters are published, rather than full models."""
        return self.lora is not None and not self.lora.merge

    @model_validator(mode="after")
    def _check_option_combinations(self) -> ModelConfig:
        if self.ac_offloading is not None and self.ac is None:
            raise ValueError("ac_offloading needs activation checkpointing: set model.ac too")
        if self.compile is not None and self.attn == "exact":
            raise ValueError("compile changes rounding, which attn = exact does not allow: set attn = sdpa")
        if self.compile is not None and self.ac is not None and self.ac.mode == "selective":
            raise ValueError("compile needs ac.mode = full: set it, or leave compile out")
        return self
