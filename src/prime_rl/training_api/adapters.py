"""Training of many LoRA adapters over one frozen model.

The data of a request alone determine its micro-batches, and a pack of several requests gives each the bits that it has
alone (see `passes`). Gradients are sums, accumulated until the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from prime_rl.trainer.lora import Adapter, LoraSpec, digest_frozen, init_matrix_a
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.multi_lora import AdapterTable
from prime_rl.training_api.passes import RunningPass, compute_pack, start_pass
from prime_rl.training_api.wire import PassRequest
from rollouts.kernels.linear import Linear

ALPHA = 32.0
"""LoRA alpha of every adapter, as on the Tinker service; the scale is ALPHA / rank."""


@dataclass(frozen=True)
class AdapterConfig:
    """Choices of `create_model`."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True

    @property
    def spec(self) -> LoraSpec:
        """The adapter's hyperparameters."""
        return LoraSpec(self.rank, ALPHA)


@dataclass
class TrainedAdapter:
    """Parameters, gradients and optimizer state of one adapter."""

    name: str
    config: AdapterConfig
    parameters: dict[str, Tensor]
    optimizer: torch.optim.AdamW = field(init=False)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.reset_optimizer()

    def reset_optimizer(self) -> None:
        """Start with new moments."""
        self.optimizer = torch.optim.AdamW(list(self.parameters.values()), foreach=False)

    @property
    def adapter(self) -> Adapter:
        """The adapter with its current tensors."""
        return Adapter(self.config.spec, {name: tensor.detach() for name, tensor in self.parameters.items()})

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Moments by `<name>.<parameter>`."""
        state = self.optimizer.state
        return {f"{key}.{name}": value for name, p in self.parameters.items() for key, value in state[p].items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor], moments: Mapping[str, Tensor] | None) -> None:
        """Replace parameters, and moments or none; `ValueError`, without any change, for other names or shapes."""
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if shapes != {name: tensor.shape for name, tensor in self.parameters.items()}:
            raise ValueError("the checkpoint has other matrices than the model: create the model with its rank")
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
            parameter.grad = None
        self.reset_optimizer()
        for key, value in (moments or {}).items():
            kind, _, name = key.partition(".")
            self.optimizer.state[self.parameters[name]][kind] = value.clone()

    def step(self, params: Mapping[str, float]) -> dict[str, float]:
        """One AdamW step (Loshchilov and Hutter, 1711.05101) with the accumulated gradient, which is then cleared."""
        trained = list(self.parameters.values())
        if all(p.grad is None for p in trained):
            raise ValueError("optim_step needs a gradient: call forward_backward before it")
        limit = params["grad_clip_norm"]
        norm = nn.utils.clip_grad_norm_(trained, limit if limit > 0 else float("inf"), foreach=False)
        self.optimizer.param_groups[0].update(
            lr=params["learning_rate"],
            betas=(params["beta1"], params["beta2"]),
            eps=params["eps"],
            weight_decay=params["weight_decay"],
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1
        return {"grad_norm": float(norm)}


def find_matrices(model: CausalLM) -> dict[str, tuple[nn.Linear, bool]]:
    """Linear layers that adapters change, by name, and whether they belong to attention.

    All of the decoder layers, whatever their names are; in mixture-of-experts models those of attention only.
    `ValueError` if there are none.
    """
    inside = {module for layer in model.layers() for module in layer.modules()}
    found: dict[str, tuple[nn.Linear, bool]] = {}
    for name, module in model.named_modules():
        if module in inside and isinstance(module, nn.Linear):
            is_attention = "attn" in name or "attention" in name
            if is_attention or not model.config.num_experts:
                found[name] = (module, is_attention)
    if not found:
        raise ValueError("the training API cannot train this model: its layers have no module of the type nn.Linear")
    return found


class AdapterTrainer:
    """Adapters over one model, which nothing else may use; threads may `advance` different adapters."""

    def __init__(self, model: CausalLM, max_len: int, micro_batch_tokens: int) -> None:
        if model.recomputes:
            raise ValueError("the training API cannot train a model that is computed on whole sequences")
        self.model = model.eval().requires_grad_(False)
        self.base_digest = digest_frozen(self.model)
        self.max_len, self.micro_batch_tokens = max_len, micro_batch_tokens
        self.table = AdapterTable(model)
        self._matrices = find_matrices(model)
        self.mixes = type(model) is CausalLM and not model.config.num_experts
        """Whether the bits of a row's gradient do not depend on the other rows: not known of other models."""
        for module in model.modules():
            if isinstance(module, Linear):
                module.exact_backward = True
        self.adapters: dict[str, TrainedAdapter] = {}

    def create(self, name: str, config: AdapterConfig) -> TrainedAdapter:
        """Add an adapter: A uniform as a function of seed and module, B zero."""
        parameters: dict[str, Tensor] = {}
        for path, (module, is_attention) in self._matrices.items():
            if config.train_attn if is_attention else config.train_mlp:
                a = init_matrix_a(config.seed, path, config.rank, module.in_features)
                b = torch.zeros(module.out_features, config.rank)
                dtype, device = module.weight.dtype, module.weight.device
                parameters[f"{path}.lora_A.weight"] = a.to(device, dtype).requires_grad_()
                parameters[f"{path}.lora_B.weight"] = b.to(device, dtype).requires_grad_()
        if not parameters:
            raise ValueError("lora_config selects no matrices: set train_attn or train_mlp")
        adapter = TrainedAdapter(name, config, parameters)
        self.table.put(name, Adapter(config.spec, parameters))
        self.adapters[name] = adapter
        return adapter

    def remove(self, name: str) -> None:
        """Forget an adapter, if there is one of this name."""
        self.adapters.pop(name, None)
        self.table.remove(name)

    def start_pass(self, name: str, request: PassRequest) -> RunningPass:
        """Validate a pass; `ValueError` for bad data."""
        return start_pass(name, request, self.model.config.vocab_size, self.max_len, self.micro_batch_tokens)

    def advance(self, passes: Sequence[RunningPass]) -> None:
        """Compute the next micro-batch of every pass, and its gradient, in one pack."""
        compute_pack(self.model, self.table, passes)

    def choose_mix(self, passes: Iterable[RunningPass]) -> list[RunningPass]:
        """The first pass, and those after it whose next micro-batches fit into one pack with the same bits."""
        first, *others = passes
        chosen, size = [first], first.next_size
        for other in others if self.mixes else ():
            same = other.request.forward_only == first.request.forward_only
            if same and size + other.next_size <= self.micro_batch_tokens:
                chosen.append(other)
                size += other.next_size
        return chosen
