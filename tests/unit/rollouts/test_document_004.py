"""The library's document: every name it imports, every signature and default, and every snippet, executed.

The snippets run as documented but for what this machine lacks: models of the hub become a tiny one on the CPU, data
sets of the hub a file, servers strict fakes. Each such change carries a comment that begins with "documented:".
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import torch.distributed as dist
from fake_engine import FakeEngine, serve
from fake_servers import FakeSGLang, FakeVLLM, serve_fakes
from tiny_hf import VOCAB, build_batch, build_samples, build_tiny_hf

from prime_rl.runtime.tokenizer import load_tokenizer

both_loops = pytest.mark.parametrize("loop", ["asyncio", "trio"])

NAMES = {
    "rollouts.training": """run_sft_training run_rl_training DataBuffer load_sft_dataset generate_rollout_batches
        AsyncRolloutManager PyTorchTrainingBackend TrainingBackend MetricsLogger JSONLLogger Sample SFTTrainingConfig
        RLTrainingConfig RolloutConfig RolloutBatch check_reward_nonzero_std check_min_reward check_response_diversity
        check_reasonable_length check_any_success check_quality_and_diversity make_threshold_filter make_length_filter
        agent_rollout_to_sample generate_rollout_batch trajectory_to_sample""",
    "rollouts.training.types": """Sample RolloutBatch SFTTrainingConfig RLTrainingConfig RolloutConfig TrainFuture
        ImmediateTrainFuture TrainingBackend""",
    "rollouts.training.rollout_gen": "generate_rollout_batches convert_to_batch AsyncRolloutManager RolloutManager",
    "rollouts.training.rollout_gen.async_rollout_manager": "AsyncRolloutManager generate_rollout_batch",
    "rollouts.training.rollout_gen.rollout_generation": "generate_rollout_batches convert_to_batch",
    "rollouts.training.backends": """create_pytorch_backend create_backend_with_scheduler parse_dtype
        compute_device_map_single_gpu load_hf_model create_adamw_optimizer create_cross_entropy_loss
        create_warmup_cosine_scheduler PyTorchTrainingBackend TrainingBackend""",
    "rollouts.training.backends.pytorch": "PyTorchTrainingBackend",
    "rollouts.training.backends.pytorch_factory": "create_pytorch_backend",
    "rollouts.training.backends.fsdp": "FSDPTrainingBackend FSDPConfig",
    "rollouts.training.rl_losses": "grpo_loss ppo_loss",
    "rollouts.training.weight_sync": """SGLangEngine VLLMEngine sync_weights_to_engines InferenceEngine
        update_sglang_weights_from_disk update_vllm_weights_from_disk""",
    "rollouts.training.datasets": """DataBuffer load_sft_dataset load_rl_prompts load_dataset_with_answers
        load_prompts_from_jsonl load_prompts_from_list create_buffer_from_jsonl tokenize_conversation compute_loss_mask
        prepare_sft_sample export_samples_to_jsonl export_samples_to_huggingface_format load_samples_from_jsonl""",
    "rollouts.training.datasets.data_buffer": "DataBuffer",
    "rollouts.training.datasets.sft": """load_sft_dataset tokenize_conversation compute_loss_mask prepare_sft_sample
        export_samples_to_jsonl export_samples_to_huggingface_format load_samples_from_jsonl""",
    "rollouts.training.metrics": """JSONLLogger MetricsLogger WandbLogger CompositeLogger compute_stats_from_jsonl""",
    "rollouts.training.filters": """check_reward_nonzero_std check_min_reward check_response_diversity
        check_reasonable_length check_any_success check_quality_and_diversity make_threshold_filter
        make_length_filter""",
    "rollouts.training.loops.sft_loop": "run_sft_training",
    "rollouts.training.loops.rl_loop": "run_rl_training compute_advantages prepare_grpo_batch compute_reward",
    "rollouts.training.agent_integration": "agent_rollout_to_sample generate_rollout_batch trajectory_to_sample",
    "rollouts.agents": "Agent ChatAgent Endpoint Trajectory",
}

# name -> documented parameters in order, "name" or "name=default"; more may follow if they have defaults
SIGNATURES = {
    "types.Sample": """prompt response='' tokens=<factory> loss_mask=<factory> reward=0.0 group_index=None index=None
        metadata=<factory>""",
    "types.RolloutBatch": "tokens loss_masks rewards response_lengths metadata=<factory>",
    "types.RolloutConfig": """batch_size n_samples_per_prompt=1 over_sampling_factor=1.0 generate_fn=None reward_fn=None
        filter_fn=None""",
    "types.SFTTrainingConfig": "num_steps batch_size log_every=100 checkpoint_every=500",
    "types.RLTrainingConfig": "num_steps sync_every=10 baseline=0.0 log_every=10 checkpoint_every=100",
    "datasets.DataBuffer": "prompts epoch_id=0 sample_offset=0 seed=42",
    "datasets.load_sft_dataset": """dataset_name split='train' subset=None tokenizer=None max_samples=None
        max_length=2048""",
    "datasets.load_prompts_from_jsonl": "path prompt_key='prompt' limit=None",
    "datasets.create_buffer_from_jsonl": "path prompt_key='prompt' limit=None seed=42",
    "datasets.sft.tokenize_conversation": "messages tokenizer max_length=2048",
    "datasets.sft.compute_loss_mask": "tokens user_message_spans",
    "datasets.sft.prepare_sft_sample": "prompt response tokenizer max_length=2048",
    "datasets.sft.export_samples_to_jsonl": "samples path include_tokens=False",
    "datasets.sft.export_samples_to_huggingface_format": "samples path",
    "datasets.sft.load_samples_from_jsonl": "path limit=None",
    "rl_losses.grpo_loss": "logits labels loss_mask advantages",
    "rl_losses.ppo_loss": "logits labels loss_mask advantages old_log_probs clip_range=0.2",
    "filters.check_min_reward": "samples threshold=0.5",
    "filters.check_response_diversity": "samples min_unique_ratio=0.5",
    "filters.check_reasonable_length": "samples min_tokens=10 max_tokens=2048",
    "filters.make_threshold_filter": "threshold",
    "filters.make_length_filter": "min_tokens max_tokens",
    "rollout_gen.AsyncRolloutManager": "data_buffer config",
    "rollout_gen.convert_to_batch": "samples epoch_id=0 step_id=0",
    "rollout_gen.generate_rollout_batches": "data_buffer config",
    "backends.pytorch.PyTorchTrainingBackend": """model optimizer loss_fn checkpoint_dir device=None weight_version=0
        current_step=0""",
    "backends.fsdp.FSDPConfig": """sharding_strategy='FULL_SHARD' mixed_precision=True cpu_offload=False
        auto_wrap_min_params=1000000 gradient_checkpointing=False clip_grad=1.0""",
    "backends.create_pytorch_backend": """model_name checkpoint_dir device_type='cuda' dtype='bfloat16' gpu_rank=0
        learning_rate=0.0001 adam_betas=(0.9,0.95) weight_decay=0.0 loss_fn=None""",
    "loops.sft_loop.run_sft_training": "backend samples config metrics_logger=None",
    "loops.rl_loop.run_rl_training": """backend data_buffer rollout_manager inference_engines config
        metrics_logger=None""",
    "loops.rl_loop.compute_advantages": "rewards baseline=0.0",
    "metrics.JSONLLogger": "log_dir",
    "metrics.compute_stats_from_jsonl": "file key",
    "weight_sync.SGLangEngine": "base_url timeout=300.0",
    "weight_sync.VLLMEngine": "base_url timeout=300.0",
    "weight_sync.sync_weights_to_engines": "engines checkpoint_path",
    "weight_sync.update_sglang_weights_from_disk": "base_url checkpoint_path timeout=300.0",
    "weight_sync.update_vllm_weights_from_disk": "base_url checkpoint_path timeout=300.0",
    "agent_integration.agent_rollout_to_sample": """prompt environment_cls endpoint tokenizer max_turns=10
        metadata=None""",
    "agent_integration.generate_rollout_batch": """prompts environment_cls endpoint tokenizer max_turns=10
        metadata_list=None""",
    "agent_integration.trajectory_to_sample": "trajectory tokenizer metadata=None",
}


def run(loop: str, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Any:
    async def main() -> Any:
        with anyio.fail_after(60):
            return await function(*arguments)

    return anyio.run(main, backend=loop)


@pytest.mark.parametrize("module", NAMES)
def test_every_import(module: str) -> None:
    home = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(home, name)] == []


@pytest.mark.parametrize("name", SIGNATURES)
def test_every_signature(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    function = getattr(importlib.import_module(f"rollouts.training.{module}"), attribute)
    given = list(inspect.signature(function).parameters.values())
    documented = SIGNATURES[name].split()
    for parameter, text in zip(given, documented, strict=False):
        found = parameter.name
        if parameter.default is not parameter.empty:
            found += f"={parameter.default!r}".replace(" ", "")
        assert found == text
    assert len(given) >= len(documented)
    for parameter in given[len(documented) :]:
        optional = parameter.default is not parameter.empty or parameter.kind is parameter.VAR_KEYWORD
        assert optional, f"{name} needs {parameter.name}, which the document does not name"


def test_a_backend_needs_the_documented_methods_alone() -> None:
    from rollouts.training.types import TrainingBackend

    methods = {name for name in vars(TrainingBackend) if not name.startswith("_")}
    assert methods == {"forward_backward", "optim_step", "save_checkpoint"}


def test_fsdp_backend_takes_the_documented_keywords() -> None:
    from rollouts.training.backends.fsdp import FSDPTrainingBackend

    inspect.signature(FSDPTrainingBackend).bind(
        model=1, optimizer_fn=2, loss_fn=3, checkpoint_dir=4, config=5, checkpoint_path=6, device=7
    )


# --- snippets, in the order of the document -------------------------------------------------------------------------


def build_parts(loss_fn: Any = None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = build_tiny_hf()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


async def my_generate_fn(prompts: list[str]) -> list[Any]:
    from rollouts.training.types import Sample

    await anyio.sleep(0)
    return [
        Sample(
            prompt=prompt,
            response=prompt.upper(),
            tokens=[2, 3, 4 + len(prompt) % (VOCAB - 4), 5],
            loss_mask=[0.0, 0.0, 1.0, 1.0],
            metadata={"correct": len(prompt) % 2 == 0},
        )
        for prompt in prompts
    ]


@both_loops
def test_core_sft_training(loop: str, tmp_path: Path) -> None:
    from rollouts.training import JSONLLogger, PyTorchTrainingBackend, SFTTrainingConfig, run_sft_training
    from rollouts.training.backends import create_cross_entropy_loss

    model, optimizer = build_parts()
    loss_fn = create_cross_entropy_loss()
    backend = PyTorchTrainingBackend(model, optimizer, loss_fn, tmp_path)
    config = SFTTrainingConfig(num_steps=3, batch_size=4)  # documented: num_steps=1000
    metrics = run(loop, run_sft_training, backend, build_samples(6), config, JSONLLogger(tmp_path / "logs"))
    assert [row["step"] for row in metrics] == [1, 2, 3] and all(row["loss"] > 0 for row in metrics)


@both_loops
def test_core_rl_training_with_bare_grpo_loss(loop: str, tmp_path: Path) -> None:
    from rollouts.training import (
        AsyncRolloutManager,
        DataBuffer,
        PyTorchTrainingBackend,
        RLTrainingConfig,
        RolloutConfig,
        run_rl_training,
    )
    from rollouts.training.rl_losses import grpo_loss
    from rollouts.training.weight_sync import SGLangEngine

    buffer = DataBuffer(prompts=["a", "bc", "def", "g"])
    rollout_config = RolloutConfig(batch_size=4, generate_fn=my_generate_fn)  # documented: batch_size=32
    rollout_manager = AsyncRolloutManager(buffer, rollout_config)
    fake = FakeSGLang()
    with serve_fakes(fake):
        engines = [SGLangEngine(fake.url)]  # documented: http://localhost:30000
        model, optimizer = build_parts()
        backend = PyTorchTrainingBackend(model, optimizer, grpo_loss, tmp_path)
        config = RLTrainingConfig(num_steps=4, sync_every=2)  # documented: num_steps=1000, sync_every=10
        metrics = run(loop, run_rl_training, backend, buffer, rollout_manager, engines, config)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "lr", "mean_reward", "max_reward", "min_reward"} <= set(metrics[0])
    assert metrics[0]["mean_reward"] == 0.25  # one of the four prompts has even length
    assert fake.calls.count("/update_weights_from_disk") == 3 and fake.version == "4"


def test_sample() -> None:
    from rollouts.training.types import Sample

    sample = Sample(
        prompt="What is 2+2?",
        response="4",
        tokens=[1, 2, 3, 4],
        loss_mask=[0.0, 0.0, 1.0, 1.0],
        reward=1.0,
        metadata={"correct": True},
    )
    sample.validate()
    assert sample.status == Sample.Status.PENDING and Sample.from_dict(sample.to_dict()) == sample
    bare, other = Sample("p"), Sample("p")
    assert (bare.tokens, bare.loss_mask, bare.metadata) == ([], [], {})
    assert bare.tokens is not other.tokens and bare.metadata is not other.metadata, "defaults are never shared"


def test_rollout_batch() -> None:
    from rollouts.training.types import RolloutBatch

    batch = RolloutBatch(
        tokens=[[1, 2], [3]], loss_masks=[[0.0, 1.0], [1.0]], rewards=[1.0, 0.0], response_lengths=[5, 3], metadata={}
    )
    assert batch.rewards == [1.0, 0.0] and batch.response_lengths == [5, 3]


def test_configs() -> None:
    from rollouts.training.types import RLTrainingConfig, RolloutConfig, SFTTrainingConfig

    SFTTrainingConfig(num_steps=1000, batch_size=4, log_every=100, checkpoint_every=500)
    RLTrainingConfig(num_steps=1000, sync_every=10, baseline=0.0, log_every=10, checkpoint_every=100)
    config = RolloutConfig(
        batch_size=32,
        n_samples_per_prompt=1,
        over_sampling_factor=1.5,
        generate_fn=my_generate_fn,
        reward_fn=None,
        filter_fn=None,
    )
    assert RolloutConfig.from_dict(config.to_dict(), generate_fn=my_generate_fn) == config


@both_loops
@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_async_rollout_manager(loop: str, factor: float) -> None:
    from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig

    async def main() -> None:
        buffer = DataBuffer(prompts=["a", "bc", "def", "g", "hi", "jkl", "m", "no"])
        config = RolloutConfig(batch_size=4, generate_fn=my_generate_fn, over_sampling_factor=factor)
        manager = AsyncRolloutManager(buffer, config)
        async with manager:
            batch = await manager.generate_batch(reward_fn=lambda sample: float(len(sample.response)))
            assert batch.rewards == [1.0, 2.0, 3.0, 1.0] and len(batch.tokens) == len(batch.loss_masks) == 4
            left_over = manager.state_dict()["partial_samples"]
            assert len(left_over) == (2 if factor > 1 else 0), "over-sampling keeps what it made for the next batch"
            assert [s.prompt for s in (await manager.generate_batch()).samples] == ["hi", "jkl", "m", "no"]

    run(loop, main)


def test_pure_function_rollout_generation() -> None:
    from rollouts.training import DataBuffer, RolloutConfig
    from rollouts.training.rollout_gen import generate_rollout_batches
    from rollouts.training.types import RolloutBatch

    buffer = DataBuffer(prompts=["a", "bc", "def"])
    config = RolloutConfig(batch_size=4, generate_fn=my_generate_fn)
    batches = generate_rollout_batches(buffer, config)
    for number, batch in enumerate(batches):
        assert isinstance(batch, RolloutBatch) and len(batch.tokens) == 4
        if number == 2:  # documented: the loop has no end
            break


@both_loops
def test_a_backend_of_your_own_needs_no_base_class(loop: str, tmp_path: Path) -> None:
    """The documented protocol, as its text has it: coroutines that answer with futures."""
    from rollouts.training import SFTTrainingConfig, run_sft_training
    from rollouts.training.types import ImmediateTrainFuture, TrainFuture

    class MyBackend:
        steps = 0

        async def forward_backward(self, batch: dict[str, Any]) -> TrainFuture[dict[str, float]]:
            assert {"input_ids", "labels", "loss_mask"} <= set(batch)
            return ImmediateTrainFuture({"loss": 1.0, "grad_norm": 2.0})

        async def optim_step(self) -> TrainFuture[dict[str, float]]:
            self.steps += 1
            return ImmediateTrainFuture({"lr": 0.1, "step": self.steps})

        async def save_checkpoint(self, step: int, metrics: dict[str, float]) -> Path:
            return tmp_path

    config = SFTTrainingConfig(num_steps=2, batch_size=2)
    metrics = run(loop, run_sft_training, MyBackend(), build_samples(4), config)
    assert [(row["loss"], row["step"]) for row in metrics] == [(1.0, 1), (1.0, 2)]


def test_pytorch_backend(tmp_path: Path) -> None:
    from rollouts.training import PyTorchTrainingBackend

    model, optimizer = build_parts()
    backend = PyTorchTrainingBackend(
        model=model,
        optimizer=optimizer,
        loss_fn=lambda logits, batch: logits.square().mean(),
        checkpoint_dir=tmp_path / "checkpoints",
        device=torch.device("cpu"),  # documented: cuda:0
    )
    assert backend.forward_backward(build_batch()).wait()["loss"] > 0


def test_fsdp_backend(tmp_path: Path) -> None:
    from rollouts.training.backends.fsdp import FSDPConfig, FSDPTrainingBackend
    from rollouts.training.rl_losses import grpo_loss

    # documented: backend="nccl", started by torchrun
    dist.init_process_group(backend="gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        backend = FSDPTrainingBackend(
            model=build_tiny_hf(),
            optimizer_fn=lambda m: torch.optim.AdamW(m.parameters()),
            loss_fn=grpo_loss,
            checkpoint_dir=tmp_path / "checkpoints",
            config=FSDPConfig(sharding_strategy="FULL_SHARD", mixed_precision=True, gradient_checkpointing=False),
        )
        backend.forward_backward(build_batch())
        assert backend.optim_step().wait()["step"] == 1
    finally:
        dist.destroy_process_group()


def test_fsdp_requires_a_process_group(tmp_path: Path) -> None:
    from rollouts.training.backends.fsdp import FSDPConfig, FSDPTrainingBackend

    with pytest.raises((RuntimeError, ValueError), match="init_process_group"):
        FSDPTrainingBackend(
            model=build_tiny_hf(),
            optimizer_fn=lambda m: torch.optim.AdamW(m.parameters()),
            loss_fn=lambda logits, batch: logits.mean(),
            checkpoint_dir=tmp_path,
            config=FSDPConfig(),
        )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory of a tiny model with its tokenizer, in place of Qwen2.5-7B."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = load_tokenizer("tiny-qwen3")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_factory_function_and_single_gpu_sft(model_dir: Path, tmp_path: Path) -> None:
    from rollouts.training import SFTTrainingConfig, run_sft_training
    from rollouts.training.backends import create_pytorch_backend

    backend = create_pytorch_backend(
        model_name=str(model_dir),  # documented: Qwen/Qwen2.5-7B
        checkpoint_dir=tmp_path / "ckpts",
        device_type="cpu",  # documented: cuda
        learning_rate=1e-4,
    )

    async def main() -> Any:
        return await run_sft_training(
            backend=backend,
            samples=build_samples(4),
            config=SFTTrainingConfig(num_steps=2, batch_size=4),  # documented: num_steps=1000
        )

    assert len(run("asyncio", main)) == 2


def test_grpo_loss() -> None:
    from rollouts.training.rl_losses import grpo_loss

    model, batch = build_tiny_hf(), build_batch()
    model_output = model(batch["input_ids"])
    loss = grpo_loss(
        logits=model_output.logits,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        advantages=batch["advantages"],
    )
    logprobs = model_output.logits.float().log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
    mask = batch["loss_mask"]
    per_sequence = (logprobs * mask).sum(1) / mask.sum(1).clamp(min=1)
    assert torch.allclose(loss, -(per_sequence * batch["advantages"]).mean(), atol=1e-6)
    loss.backward()


def test_ppo_loss_is_no_placeholder() -> None:
    from rollouts.training.rl_losses import ppo_loss

    model, batch = build_tiny_hf(), build_batch()
    logits = model(batch["input_ids"]).logits
    old = logits.detach().float().log_softmax(-1).gather(-1, batch["labels"][..., None])[..., 0]
    loss = ppo_loss(
        logits=logits,
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        advantages=batch["advantages"],
        old_log_probs=old,
        clip_range=0.2,
    )
    mask = batch["loss_mask"]
    expected = -(batch["advantages"][:, None] * mask).sum() / mask.sum()  # every ratio is 1
    assert torch.allclose(loss, expected, atol=1e-6)


@both_loops
def test_weight_sync_after_a_checkpoint(loop: str, tmp_path: Path) -> None:
    from rollouts.training import PyTorchTrainingBackend
    from rollouts.training.rl_losses import grpo_loss
    from rollouts.training.weight_sync import SGLangEngine, VLLMEngine, sync_weights_to_engines

    class MyEngine:
        async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
            return {"success": True}

    sglang, vllm = FakeSGLang(), FakeVLLM()

    async def main() -> list[dict[str, Any]]:
        engines = [SGLangEngine(sglang.url), VLLMEngine(vllm.url), MyEngine()]  # documented: localhost:30000, :30001
        model, optimizer = build_parts()
        backend = PyTorchTrainingBackend(model, optimizer, grpo_loss, tmp_path)
        ckpt_path = await backend.save_checkpoint(7, {"loss": 0.5})
        return await sync_weights_to_engines(engines, str(ckpt_path))

    with serve_fakes(sglang, vllm):
        responses = run(loop, main)
    assert [response["success"] for response in responses] == [True] * 3
    assert sglang.version == vllm.version == "7" and sglang.loaded == vllm.loaded == str(tmp_path / "step_7")


def test_data_buffer() -> None:
    from rollouts.training.datasets import DataBuffer

    buffer = DataBuffer(prompts=["What is 2+2?", "Calculate 5*7"], seed=42)
    batch = buffer.get_prompts(32)
    assert len(batch) == 32 and batch.count("What is 2+2?") == 16
    state = buffer.save_state()
    following = buffer.get_prompts(5)
    buffer.load_state(state)
    assert buffer.get_prompts(5) == following


def test_sft_dataset_loading(tmp_path: Path) -> None:
    from rollouts.training.datasets import load_sft_dataset

    tokenizer = load_tokenizer("tiny-qwen3")  # documented: AutoTokenizer of Qwen/Qwen2.5-7B
    path = tmp_path / "gsm8k.jsonl"  # documented: "gsm8k" of the hub, with subset="main"
    path.write_text("".join(json.dumps({"question": f"{i}+1?", "answer": str(i + 1)}) + "\n" for i in range(20)))
    samples = load_sft_dataset(str(path), tokenizer=tokenizer, split="train", max_samples=10, max_length=2048)
    assert len(samples) == 10
    learned = [token for token, mask in zip(samples[3].tokens, samples[3].loss_mask, strict=True) if mask]
    assert tokenizer.decode(learned) == "4<|im_end|>"
    tokenizer.chat_template = None
    for without in (None, tokenizer):
        with pytest.raises(ValueError, match="a tokenizer with a chat template"):
            load_sft_dataset(str(path), tokenizer=without)


def test_one_conversation_becomes_a_sample(tmp_path: Path) -> None:
    from rollouts.training.datasets.sft import (
        compute_loss_mask,
        export_samples_to_huggingface_format,
        export_samples_to_jsonl,
        load_samples_from_jsonl,
        load_sft_dataset,
        prepare_sft_sample,
        tokenize_conversation,
    )

    tokenizer = load_tokenizer("tiny-qwen3")
    turns = [("user", "ab"), ("assistant", "cd"), ("user", "e"), ("assistant", "f")]
    messages = [{"role": role, "content": content} for role, content in turns]
    tokens, spans = tokenize_conversation(messages, tokenizer)
    mask = compute_loss_mask(tokens, spans)

    def learned(mask: list[float]) -> str:
        return str(tokenizer.decode([t for t, m in zip(tokens, mask, strict=True) if m]))

    assert learned(mask) == "cd<|im_end|>f<|im_end|>" and len(spans) == 2
    sample = prepare_sft_sample(messages[:3], "f", tokenizer)
    assert sample.tokens == tokens and learned(sample.loss_mask) == "f<|im_end|>"
    assert (sample.prompt, sample.response) == (messages[:3], "f")
    assert compute_loss_mask([7] * 8, [(0, 3), (6, 8)]) == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    one, file = prepare_sft_sample("ab", "cd", tokenizer), tmp_path / "samples.jsonl"
    assert export_samples_to_jsonl([sample, one], file, include_tokens=True) == 2
    assert load_samples_from_jsonl(file) == [sample, one] and load_samples_from_jsonl(file, limit=1) == [sample]
    assert export_samples_to_huggingface_format([sample, one], file) == 2
    assert [s.tokens for s in load_sft_dataset(str(file), tokenizer=tokenizer)] == [sample.tokens, one.tokens]
    for call, sentence in [
        (lambda: tokenize_conversation(messages, tokenizer, max_length=5), "max_length is 5"),
        (lambda: tokenize_conversation(messages[:1], tokenizer), "no assistant message"),
        (lambda: compute_loss_mask([1, 2], [(1, 3)]), r"span \(1, 3\)"),
        (lambda: compute_loss_mask([], []), "no tokens"),
        (lambda: prepare_sft_sample("", "cd", tokenizer), "prompt is empty"),
        (lambda: prepare_sft_sample("ab", "", tokenizer), "response is empty"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            call()


def test_sft_to_rl_by_the_latest_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    from rollouts.training import (
        AsyncRolloutManager,
        DataBuffer,
        RLTrainingConfig,
        RolloutConfig,
        SFTTrainingConfig,
        run_rl_training,
        run_sft_training,
    )
    from rollouts.training.backends import create_pytorch_backend, latest_checkpoint
    from rollouts.training.rl_losses import grpo_loss

    def build(loss_fn: Any = None) -> Any:
        return create_pytorch_backend(
            str(model_dir), tmp_path / "checkpoints", device_type="cpu", dtype="float32", loss_fn=loss_fn
        )

    async def main() -> None:
        sft_config = SFTTrainingConfig(num_steps=10, batch_size=2, checkpoint_every=9)
        backend = build()
        await run_sft_training(backend, build_samples(4), sft_config)
        # documented: sorted(output_dir / "checkpoints" / "step_*")[-1], which is no glob and would put 9 after 10
        latest_ckpt = latest_checkpoint(tmp_path / "checkpoints")
        assert latest_ckpt is not None and latest_ckpt.name == "step_10"
        assert {"pytorch_model.bin", "optimizer.bin", "metadata.json"} <= {p.name for p in latest_ckpt.iterdir()}
        assert json.loads((latest_ckpt / "metadata.json").read_text())["step"] == 10
        rl = build(grpo_loss)
        await rl.load_checkpoint(latest_ckpt, parameters_only=True)
        trained, loaded = await backend.get_weights(), await rl.get_weights()
        assert all(torch.equal(trained[name], loaded[name]) for name in trained)
        buffer = DataBuffer(["a", "bc"])
        manager = AsyncRolloutManager(buffer, RolloutConfig(batch_size=2, generate_fn=my_generate_fn))
        metrics = await run_rl_training(rl, buffer, manager, [], RLTrainingConfig(num_steps=2))
        assert len(metrics) == 2

    run("asyncio", main)


def test_loading_a_checkpoint_is_implemented(tmp_path: Path) -> None:
    from rollouts.training import PyTorchTrainingBackend
    from rollouts.training.rl_losses import grpo_loss

    def build(seed: int) -> PyTorchTrainingBackend:
        model = build_tiny_hf(seed)
        return PyTorchTrainingBackend(model, torch.optim.AdamW(model.parameters()), grpo_loss, tmp_path)

    async def main() -> None:
        first, second = build(0), build(1)
        first.forward_backward(build_batch())
        await first.optim_step()
        metadata = await second.load_checkpoint(await first.save_checkpoint(1, {"loss": 0.5}))
        assert metadata["step"] == 1 and second.current_step == 1
        a, b = await first.get_weights(), await second.get_weights()
        assert all(torch.equal(a[name], b[name]) for name in a)

    run("asyncio", main)


def test_jsonl_logger(tmp_path: Path) -> None:
    from rollouts.training.metrics import JSONLLogger

    logger = JSONLLogger(tmp_path / "logs" / "experiment_001")
    logger.log({"loss": 0.5, "reward": 1.0, "step": 42}, step=42)
    logger.finish()
    row = json.loads((tmp_path / "logs" / "experiment_001" / "metrics.jsonl").read_text())
    assert row["loss"] == 0.5 and row["step"] == 42


@both_loops
def test_rl_with_sglang_and_an_agent(loop: str, tmp_path: Path) -> None:
    """As documented, the tokens are the response only, which is an error; with all tokens it runs to the end."""
    from rollouts.agents import ChatAgent, Endpoint
    from rollouts.training import (
        AsyncRolloutManager,
        DataBuffer,
        PyTorchTrainingBackend,
        RLTrainingConfig,
        RolloutConfig,
        run_rl_training,
    )
    from rollouts.training.filters import check_quality_and_diversity
    from rollouts.training.rl_losses import grpo_loss
    from rollouts.training.types import Sample
    from rollouts.training.weight_sync import SGLangEngine

    engine = FakeEngine(lambda body: body["messages"][-1]["content"].upper())

    def encode(text: str) -> list[int]:
        return [ord(c) % VOCAB for c in text]

    async def documented(prompts: list[str]) -> list[Sample]:
        samples = []
        for prompt in prompts:
            response = await agent.rollout(prompt)
            prompt_tokens, response_tokens = response.prompt_tokens, response.response_tokens
            sample = Sample(
                prompt=prompt,
                response=response.text,
                tokens=encode(response.text),
                loss_mask=[0] * len(prompt_tokens) + [1] * len(response_tokens),
                metadata={"correct": response.correct},
            )
            samples.append(sample)
        return samples

    async def corrected(prompts: list[str]) -> list[Sample]:
        samples = await documented(prompts)
        for sample in samples:
            sample.tokens = encode(f"u:{sample.prompt};{sample.response}")
        return samples

    def build(generate_fn: Any) -> tuple[DataBuffer, AsyncRolloutManager]:
        buffer = DataBuffer(["ab", "cd"])
        rollout_config = RolloutConfig(
            batch_size=2,  # documented: 32
            generate_fn=generate_fn,
            filter_fn=check_quality_and_diversity,
        )
        return buffer, AsyncRolloutManager(buffer, rollout_config)

    fake = FakeSGLang()
    with serve(engine), serve_fakes(fake):
        agent = ChatAgent(Endpoint("m", engine.base_url), judge=lambda done: done.text == "AB")
        with pytest.raises(ValueError, match="2 tokens but 7 entries in `loss_mask`"):
            run(loop, build(documented)[1].generate_batch)
        model, optimizer = build_parts()
        backend = PyTorchTrainingBackend(model, optimizer, grpo_loss, tmp_path)
        engines = [SGLangEngine(fake.url)]  # documented: http://localhost:30000
        buffer, manager = build(corrected)
        rl_config = RLTrainingConfig(num_steps=2, sync_every=1)
        metrics = run(loop, run_rl_training, backend, buffer, manager, engines, rl_config)
    assert [row["mean_reward"] for row in metrics] == [0.5, 0.5] and fake.version == "2"


def test_advantage_computation() -> None:
    from rollouts.training.loops.rl_loop import compute_advantages

    advantages = compute_advantages([1.0, 0.0], baseline=0.5)
    assert torch.tensor(advantages).tolist() == [0.5, -0.5]


def test_sample_filtering() -> None:
    from rollouts.training import AsyncRolloutManager, DataBuffer, RolloutConfig
    from rollouts.training.filters import check_min_reward, check_response_diversity
    from rollouts.training.types import Sample

    def my_filter(samples: list[Sample]) -> bool:
        return all([check_min_reward(samples, threshold=0.5), check_response_diversity(samples)])

    config = RolloutConfig(
        batch_size=2,
        generate_fn=my_generate_fn,
        reward_fn=lambda sample: float(sample.metadata["correct"]),
        filter_fn=my_filter,
    )
    batch = anyio.run(AsyncRolloutManager(DataBuffer(["a", "bc", "def"]), config).generate_batch)
    assert [sample.prompt for sample in batch.samples] == ["bc", "bc"] and batch.group_indices == [1, 4]


@both_loops
def test_pipelining_with_futures(loop: str, tmp_path: Path) -> None:
    from rollouts.training import PyTorchTrainingBackend
    from rollouts.training.rl_losses import grpo_loss

    async def main() -> None:
        model, optimizer = build_parts()
        backend = PyTorchTrainingBackend(model, optimizer, grpo_loss, tmp_path)
        fwd_future = backend.forward_backward(build_batch())
        await anyio.sleep(0)
        fwd_metrics = await fwd_future.result()
        opt_metrics = await backend.optim_step().result()
        assert fwd_metrics["grad_norm"] > 0 and opt_metrics["step"] == 1

    run(loop, main)


def test_over_sampling_needs_the_manager() -> None:
    from rollouts.training import DataBuffer, RolloutConfig
    from rollouts.training.rollout_gen import generate_rollout_batches

    config = RolloutConfig(batch_size=2, over_sampling_factor=1.5, generate_fn=my_generate_fn)
    with pytest.raises(ValueError, match="use AsyncRolloutManager"):
        generate_rollout_batches(DataBuffer(["a"]), config)
