"""Training of many LoRA adapters over one frozen model.

A request is computed by itself, in micro-batches that only its own data determine, so the bits of a client's results
and gradients do not depend on other clients. Gradients are sums, accumulated until the optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from prime_rl.trainer.forward import compute_head
from prime_rl.trainer.lora import EXPERT_MATRICES, Adapter, LoraSpec, init_matrix_a
from prime_rl.trainer.models.attention import PackedAttention
from prime_rl.trainer.models.causal_lm import CausalLM
from prime_rl.trainer.models.multi_lora import AdapterTable
from prime_rl.trainer.parallel_dims import Mesh
from prime_rl.training_api.losses import INPUTS, LOSSES, check_loss
from prime_rl.training_api.wire import Datum, PassRequest
from rollouts.training.numerics import MIN_TOKENS
from rollouts.training.rl_losses import compute_head_table

ALPHA = 32.0
"""LoRA alpha of every adapter, as on the Tinker service; the scale is ALPHA / rank."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


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
        targets = (*(ATTENTION if self.train_attn else ()), *(MLP if self.train_mlp else ()))
        return LoraSpec(self.rank, ALPHA, target_modules=targets)


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


@dataclass(frozen=True)
class PassResult:
    """Log-probs of the targets of every datum, in the shape of its targets, and the loss summed over all tokens."""

    logprobs: list[Tensor]
    loss: float


class AdapterTrainer:
    """Adapters over one model, which nothing else may use; not thread-safe."""

    def __init__(self, model: CausalLM, max_len: int, micro_batch_tokens: int) -> None:
        if model.recomputes:
            raise ValueError("the training API needs the native decoder: this architecture runs on transformers")
        self.model = model.eval().requires_grad_(False)
        self.max_len, self.micro_batch_tokens = max_len, micro_batch_tokens
        self.table = AdapterTable(model)
        self.adapters: dict[str, TrainedAdapter] = {}

    def create(self, name: str, config: AdapterConfig) -> TrainedAdapter:
        """Add an adapter: A uniform as a function of seed and module, B zero."""
        frozen = EXPERT_MATRICES if self.model.config.num_experts else ()
        targets = [target for target in config.spec.target_modules if target not in frozen]
        parameters: dict[str, Tensor] = {}
        for path, module in self.model.named_modules():
            if isinstance(module, nn.Linear) and path.endswith(tuple(f".{target}" for target in targets)):
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

    def run_pass(self, name: str, request: PassRequest) -> PassResult:
        """Forward pass, and backward pass unless `forward_only`; `ValueError`, without any change, for bad data."""
        config = check_loss(request.loss_fn, request.loss_config)
        loss_fn, data = LOSSES[request.loss_fn], request.data
        if not data:
            raise ValueError("forward_backward needs at least one datum")
        tensors = [self._check(datum, request.loss_fn, f"data[{i}]") for i, datum in enumerate(data)]
        logprobs: list[Tensor] = []
        total = 0.0
        for part in self._micro_batches(data):
            with torch.set_grad_enabled(not request.forward_only):
                computed = self._compute_logprobs(name, [data[i] for i in part], [tensors[i] for i in part])
                loss = torch.stack([loss_fn(x, tensors[i], config) for x, i in zip(computed, part, strict=True)]).sum()
            if not request.forward_only:
                torch.autograd.backward(loss)
            logprobs += [x.detach() for x in computed]
            total += float(loss.detach())
        return PassResult(logprobs, total)

    def _micro_batches(self, data: Sequence[Datum]) -> Iterator[list[int]]:
        part: list[int] = []
        size = 0
        for i, datum in enumerate(data):
            if part and size + len(datum.tokens) > self.micro_batch_tokens:
                yield part
                part, size = [], 0
            part.append(i)
            size += len(datum.tokens)
        yield part

    def _compute_logprobs(self, name: str, data: Sequence[Datum], tensors: Sequence[Mapping[str, Tensor]]) -> list[Any]:
        """Log-probs of the targets of each datum, of the pack that the data form."""
        lengths = [len(datum.tokens) for datum in data]
        ids = [token for datum in data for token in datum.tokens]
        positions = [i for length in lengths for i in range(length)]
        missing = max(MIN_TOKENS - len(ids), 0)
        if missing:  # padding is a sequence of its own
            ids, positions, lengths = ids + [0] * missing, positions + list(range(missing)), [*lengths, missing]
        rows = torch.arange(len(ids))
        attend = PackedAttention(lengths, "cpu", "exact")
        with self.table.route({name: rows}):
            hidden = self.model(torch.tensor(ids), torch.tensor(positions), attend)
        results: list[Tensor | None] = [None] * len(data)
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        flat = [i for i in range(len(data)) if tensors[i]["target_tokens"].dim() == 1]
        if flat:
            own = torch.cat([rows[starts[i] : starts[i + 1]] for i in flat])
            labels = torch.zeros(len(ids), dtype=torch.long)
            labels[own] = torch.cat([tensors[i]["target_tokens"] for i in flat])
            temperature = torch.ones(len(ids), dtype=hidden.dtype)
            logprobs, _ = compute_head(hidden, own, labels, temperature, self.model, Mesh())
            for i, part in zip(flat, logprobs.split([lengths[i] for i in flat]), strict=True):
                results[i] = part
        for i in range(len(data)):
            if results[i] is None:
                results[i] = self._compute_many(hidden[starts[i] : starts[i + 1]], tensors[i]["target_tokens"])
        return results

    def _compute_many(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Log-probs of several targets per row, [tokens, k]; 0 for the target -1."""
        table = compute_head_table(hidden, self.model.lm_head.weight, torch.ones(len(hidden), dtype=hidden.dtype))
        return table.gather(1, targets.clamp(min=0)).masked_fill(targets < 0, 0.0)

    def _check(self, datum: Datum, loss_fn: str, where: str) -> dict[str, Tensor]:
        """The tensors of the loss; `ValueError` in the words of the client."""
        num, vocab = len(datum.tokens), self.model.config.vocab_size
        if not 1 <= num <= self.max_len:
            raise ValueError(f"{where}.model_input has {num} tokens; this model takes 1 to {self.max_len}")
        if not 0 <= min(datum.tokens) <= max(datum.tokens) < vocab:
            raise ValueError(f"{where}.model_input has a token id outside of the vocabulary of {vocab}")
        given = {name: torch.from_numpy(array.copy()) for name, array in datum.inputs.items()}
        targets = given.get("target_tokens")
        if targets is None or targets.dtype != torch.int64:
            raise ValueError(f"{where}: loss_fn_inputs needs target_tokens as int64")
        if targets.dim() not in (1, 2) or len(targets) != num:
            raise ValueError(f"{where}.target_tokens has shape {list(targets.shape)}, model_input {num} tokens")
        lowest = 0 if targets.dim() == 1 else -1
        if targets.numel() and not lowest <= int(targets.min()) <= int(targets.max()) < vocab:
            raise ValueError(f"{where}.target_tokens has a token id outside of the vocabulary of {vocab}")
        if unknown := sorted(given.keys() - {"target_tokens", *INPUTS[loss_fn]}):
            raise ValueError(f"{where}: loss_fn_inputs.{unknown[0]} is not an input of {loss_fn}")
        if loss_fn == "cross_entropy":
            given.setdefault("weights", torch.ones(targets.shape))
        for name in INPUTS[loss_fn]:
            if name not in given:
                raise ValueError(f"{where}: {loss_fn} needs loss_fn_inputs.{name}")
            if given[name].shape != targets.shape:
                raise ValueError(f"{where}.{name} has shape {list(given[name].shape)}, not {list(targets.shape)}")
            given[name] = given[name].to(self.model.embedding().dtype)
        if loss_fn == "gspo" and not given["sequence_ratio_mask"].any():
            raise ValueError(f"{where}.sequence_ratio_mask has no token other than 0: gspo needs their mean")
        return given
