"""Names of options in TRL, verl and prime-rl, for suggestions; `docs/coming_from.md` has these tables as a page."""

from __future__ import annotations

from prime_rl.configuration.schema import FieldSchema, KeyPath, child

TRL = {
    "model_name_or_path": "model.name",
    "num_generations": "orchestrator.rollouts_per_example",
    "generation_batch_size": "orchestrator.batch_size",
    "per_device_train_batch_size": "trainer.micro_bs micro_bs",
    "gradient_accumulation_steps": "orchestrator.batch_size data.batch_size",
    "max_completion_length": "orchestrator.sampling.max_tokens",
    "max_prompt_length": "seq_len trainer.model.seq_len data.seq_len",
    "max_length": "seq_len data.seq_len trainer.model.seq_len",
    "max_seq_length": "seq_len data.seq_len trainer.model.seq_len",
    "learning_rate": "trainer.optim.lr",
    "lr_scheduler_type": "trainer.scheduler.type",
    "warmup_steps": "trainer.scheduler.warmup_steps",
    "warmup_ratio": "trainer.scheduler.warmup_steps",
    "max_grad_norm": "trainer.optim.max_norm",
    "optim": "trainer.optim.type",
    "adam_beta1": "trainer.optim.betas1",
    "adam_beta2": "trainer.optim.betas2",
    "num_train_epochs": "num_epochs max_steps",
    "num_iterations": "trainer.num_epochs",
    "beta": "trainer.loss.kl_coef",
    "epsilon": "trainer.loss.clip_low",
    "epsilon_high": "trainer.loss.clip_high",
    "delta": "trainer.loss.dual_clip",
    "loss_type": "trainer.loss.type",
    "importance_sampling_level": "trainer.loss.ratio",
    "scale_rewards": "orchestrator.advantage.std",
    "mask_truncated_completions": "orchestrator.zero_truncated_completions",
    "reward_funcs": "orchestrator.env.0.id",
    "dataset_name": "data.name orchestrator.env.0.id",
    "dataset_config": "data.subsets",
    "packing": "data.pack_function",
    "assistant_only_loss": "data.loss_mask.assistant",
    "eval_strategy": "orchestrator.eval.interval val.interval",
    "eval_steps": "orchestrator.eval.interval val.interval",
    "save_steps": "ckpt.interval",
    "save_total_limit": "ckpt.keep",
    "resume_from_checkpoint": "resume ckpt.resume_step",
    "overwrite_output_dir": "clean",
    "bf16": "trainer.model.dtype",
    "torch_dtype": "trainer.model.dtype",
    "attn_implementation": "trainer.model.attn",
    "gradient_checkpointing": "trainer.model.ac",
    "use_peft": "trainer.model.lora",
    "lora_r": "trainer.model.lora.rank",
    "lora_alpha": "trainer.model.lora.alpha",
    "lora_dropout": "trainer.model.lora.dropout",
    "lora_target_modules": "trainer.model.lora.target_modules",
    "use_vllm": "inference.backend",
    "vllm_server_base_url": "orchestrator.client.base_url",
    "vllm_tensor_parallel_size": "inference.parallel.tp",
    "vllm_gpu_memory_utilization": "inference.vllm",
    "report_to": "wandb",
    "run_name": "wandb.name",
    "log_completions": "wandb.log_extras.samples",
}
"""Name in TRL -> keys here as `rl` has them, separated by spaces; the first that a command has is suggested."""

VERL = {
    "actor_rollout_ref.model.path": "model.name",
    "actor_rollout_ref.model.lora_rank": "trainer.model.lora.rank",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "trainer.model.ac",
    "actor_rollout_ref.rollout.n": "orchestrator.rollouts_per_example",
    "actor_rollout_ref.rollout.name": "inference.backend",
    "actor_rollout_ref.rollout.temperature": "orchestrator.sampling.temperature",
    "actor_rollout_ref.rollout.top_p": "orchestrator.sampling.top_p",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "inference.parallel.tp",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "inference.vllm",
    "actor_rollout_ref.actor.optim.lr": "trainer.optim.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "trainer.optim.weight_decay",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "trainer.scheduler.warmup_steps",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "trainer.micro_bs",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "trainer.num_minibatches",
    "actor_rollout_ref.actor.ppo_epochs": "trainer.num_epochs",
    "actor_rollout_ref.actor.clip_ratio": "trainer.loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_low": "trainer.loss.clip_low",
    "actor_rollout_ref.actor.clip_ratio_high": "trainer.loss.clip_high",
    "actor_rollout_ref.actor.clip_ratio_c": "trainer.loss.dual_clip",
    "actor_rollout_ref.actor.kl_loss_coef": "trainer.loss.kl_coef",
    "actor_rollout_ref.actor.use_kl_loss": "trainer.loss.kl_coef",
    "actor_rollout_ref.actor.kl_loss_type": "trainer.loss.kl_estimator",
    "actor_rollout_ref.actor.entropy_coeff": "trainer.loss.entropy_coef",
    "actor_rollout_ref.actor.loss_agg_mode": "trainer.loss.loss_aggregation",
    "actor_rollout_ref.actor.grad_clip": "trainer.optim.max_norm",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": "trainer.parallel.cp",
    "algorithm.adv_estimator": "trainer.loss.type",
    "algorithm.norm_adv_by_std_in_grpo": "orchestrator.advantage.std",
    "algorithm.kl_ctrl.kl_coef": "orchestrator.advantage.kl_coef",
    "algorithm.use_kl_in_reward": "orchestrator.advantage.kl_coef",
    "algorithm.gamma": "trainer.critic.gamma",
    "algorithm.lam": "trainer.critic.gae_lambda",
    "critic.optim.lr": "trainer.critic.lr",
    "critic.cliprange_value": "trainer.critic.value_clip",
    "trainer.critic_warmup": "trainer.critic.warmup_steps",
    "data.train_files": "orchestrator.env.0.id",
    "data.val_files": "orchestrator.eval.env",
    "data.train_batch_size": "orchestrator.batch_size",
    "data.max_prompt_length": "seq_len",
    "data.max_response_length": "orchestrator.sampling.max_tokens",
    "custom_reward_function.path": "orchestrator.env.0.id",
    "reward_model.enable": "orchestrator.env.0.id",
    "trainer.total_epochs": "max_steps",
    "trainer.total_training_steps": "max_steps",
    "trainer.n_gpus_per_node": "trainer_gpu_ids",
    "trainer.nnodes": "deployment.num_train_nodes",
    "trainer.save_freq": "ckpt.interval",
    "trainer.test_freq": "orchestrator.eval.interval",
    "trainer.project_name": "wandb.project",
    "trainer.experiment_name": "wandb.name",
    "trainer.default_local_dir": "output_dir",
    "trainer.resume_mode": "resume",
    "trainer.val_before_train": "orchestrator.eval.eval_base_model",
}
"""Name in verl -> keys here, as in `TRL`."""

PRIME_RL = {
    "async_level": "max_async_level",
    "orchestrator.async_level": "orchestrator.max_async_level",
    "ckpt.keep_last": "ckpt.keep",
    "trainer.ckpt.keep_last": "trainer.ckpt.keep",
    "orchestrator.ckpt.keep_last": "orchestrator.ckpt.keep",
    "trainer.model.dp_replicate": "trainer.parallel.dp_replicate",
    "trainer.model.ep": "trainer.parallel.ep",
    "trainer.model.tp": "trainer.parallel.tp",
    "trainer.model.cp": "trainer.parallel.cp",
    "trainer.model.cp_style": "trainer.parallel.cp_style",
    "trainer.model.fsdp_cpu_offload": "trainer.model.optim_cpu_offload",
    "trainer.loss.ratio_type": "trainer.loss.ratio",
    "trainer.loss.geo_mask_low": "trainer.loss.seq_ratio_mask_low",
    "trainer.loss.geo_mask_high": "trainer.loss.seq_ratio_mask_high",
    "trainer.loss.dppo_mask_low": "trainer.loss.max_prob_diff",
    "trainer.loss.dppo_mask_high": "trainer.loss.max_prob_diff",
    "trainer.rollout_transport": "transport",
    "trainer.metrics_server": "trainer.prometheus",
    "data.micro_batch_size": "micro_bs",
    "orchestrator.rollout_transport": "transport",
    "orchestrator.algo": "trainer.loss.type",
    "orchestrator.group_size": "orchestrator.rollouts_per_example",
    "orchestrator.max_inflight_rollouts": "orchestrator.max_concurrent",
    "orchestrator.filter_zero_advantages": "trainer.skip_zero_advantage",
    "orchestrator.workers_per_env": "orchestrator.env.0.num_workers",
    "orchestrator.eval.retry": "orchestrator.max_retries",
    "inference.gpu_memory_utilization": "inference.vllm",
    "inference.max_loras": "inference.vllm",
    "inference.max_cpu_loras": "inference.vllm",
    "inference.model.enforce_eager": "inference.enforce_eager",
    "inference.model.rope_scaling": "inference.vllm",
    "deployment.num_train_gpus": "trainer_gpu_ids",
    "deployment.num_infer_gpus": "inference_gpu_ids",
}
"""Name in prime-rl's code, as `rl` has it -> keys here, as in `TRL`."""

PRIME_RL_WITHOUT_KEY = {
    "run": "set output_dir",
    "slurm": 'set deployment.type = "slurm"',
    "log.vf_level": "leave it out: log.level applies to all",
    "log.log_data": "leave it out: `monitor` shows the rollouts",
    "ckpt.keep_interval": "leave it out: weights of every ckpt.interval-th step are kept",
    "trainer.weight_broadcast.save_sharded": "leave it out",
    "trainer.weight_broadcast.save_format": "leave it out: weights are safetensors",
    "trainer.weight_broadcast.inference_world_size": "leave it out: it follows from the servers",
    "loss_impl": "leave it out",
    "trainer.tokenizer": "leave it out: the tokenizer is the model's",
    "trainer.heartbeat": "leave it out",
    "trainer.max_concurrent_runs": "leave it out: a trainer has one run; `serve` trains several adapters",
    "trainer.ckpt.weights": "leave it out: weights/step_N is always written, as safetensors",
    "trainer.loss.sequence_clip_high": 'set trainer.loss.delta if trainer.loss.ratio = "product", else leave it out',
    "trainer.model.ac_offloading.max_inflight_activations": "leave it out",
    "trainer.model.enable_router_replay": "leave it out",
    "trainer.model.fused_lm_head_chunk_size": "leave it out: logits are always computed in chunks",
    "trainer.model.fused_lm_head_token_chunk_size": "leave it out: logits are always computed in chunks",
    "trainer.model.moe_router_dtype": "leave it out",
    "trainer.model.moe_use_grouped_mm": "leave it out",
    "trainer.model.optimization_dtype": "leave it out: the optimizer computes in float32, or float64 for such a model",
    "trainer.model.quantization": "leave it out: trainer.model.dtype has the number formats",
    "orchestrator.heartbeat": "leave it out",
    "orchestrator.lora_name": "leave it out: it follows from trainer.model.lora",
    "orchestrator.mask_env_responses": "leave it out: only sampled tokens are trained",
    "orchestrator.max_concurrent_runs": "leave it out: an orchestrator has one run",
    "orchestrator.num_train_workers": "leave it out: it follows from the trainer's ranks",
    "orchestrator.train": "move its sources to [[orchestrator.env]], its sampling to [orchestrator.sampling]",
    "orchestrator.trajectory_strategy": "leave it out: a turn that does not extend the tokens starts a new sample",
    "orchestrator.buffer.hash_keys": "leave it out: example_id names an example",
    "orchestrator.eval.env.0.skip_first": "leave it out: num_examples takes the first rows",
    "orchestrator.eval.per_rollout": "leave it out",
    "orchestrator.eval.reasoning_field": "leave it out",
    "orchestrator.eval.save": "leave it out: results are always written to evals/",
    "eval_base": "leave it out: without weights_dir, the model itself is evaluated",
    "resume_path": "leave it out: the same command resumes",
    "use_tqdm": "leave it out",
    "inference.api_server_count": "leave it out",
    "inference.enable_lora": "leave it out: it follows from trainer.model.lora",
    "inference.model.enable_auto_tool_choice": "leave it out: inference.model.tool_call_parser is enough",
}
"""Name in prime-rl's code without a key here -> what to do."""

PRIME_RL_VALUES = {
    "flash_attention_2": "flash",
    "flash_attention_3": "flash",
    "liger_kernel": "auto",
    "default": "dppo",
    "sequence": "product",
    "single_node": "local",
    "multi_node": "slurm",
}
"""Value in prime-rl's code -> value here, where a key has it."""

COMMAND_SECTIONS = ("trainer", "orchestrator", "orchestrator.eval", "inference")
"""Sections of `rl` whose keys another command has at the top."""


def translate_name(path: KeyPath, root: FieldSchema) -> tuple[str, str] | None:
    """A key of `root` for an option of TRL, verl or prime-rl, and `option in project`; None for unknown names."""
    normalized = _normalize(path)
    full = [("prime-rl", PRIME_RL, name) for name in _full_names(normalized, root)]
    for project, table, name in (("verl", VERL, ".".join(normalized)), *full, ("TRL", TRL, normalized[-1])):
        for key in table.get(name, "").split():
            parts = tuple(key.split("."))
            for known in (parts, parts[1:]):  # commands other than `rl` have the keys of their section at the top
                if known and _has_key(root, known):
                    return ".".join(known), f"{name} in {project}"
    return None


def advise(path: KeyPath, root: FieldSchema) -> str | None:
    """What to do instead of an option of prime-rl, or of its section, that has no key here; None for unknown names."""
    normalized = _normalize(path)
    for end in range(len(normalized), 0, -1):
        for name in _full_names(normalized[:end], root):
            if name in PRIME_RL_WITHOUT_KEY:
                return f"{PRIME_RL_WITHOUT_KEY[name]} (a key of prime-rl)"
    return None


def _normalize(path: KeyPath) -> KeyPath:
    return tuple(part.lstrip("+~").replace("-", "_") for part in path)


def _full_names(path: KeyPath, root: FieldSchema) -> list[str]:
    """The names that a key of a command may have in `rl`, lists as their first item."""
    name = ".".join("0" if part.isdigit() else part for part in path)
    above = [section for section in COMMAND_SECTIONS if not _has_key(root, tuple(section.split(".")[:1]))]
    return [name, *(f"{section}.{name}" for section in above)]


def _has_key(root: FieldSchema, path: KeyPath) -> bool:
    schema: FieldSchema | None = root
    for part in path:
        if schema is None or schema.kind == "any":
            return False
        schema = child(schema, part)
    return schema is not None
