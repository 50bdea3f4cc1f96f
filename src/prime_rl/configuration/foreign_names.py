"""Names of options in TRL and verl, for suggestions; `docs/coming_from.md` is this table as a page."""

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


def translate_name(path: KeyPath, root: FieldSchema) -> tuple[str, str] | None:
    """A key of `root` for an option of TRL or verl, and `option in project`; None for unknown names."""
    normalized = tuple(part.lstrip("+~").replace("-", "_") for part in path)
    tables = (("verl", VERL, ".".join(normalized)), ("TRL", TRL, normalized[-1]))
    for project, table, name in tables:
        for key in table.get(name, "").split():
            parts = tuple(key.split("."))
            for known in (parts, parts[1:]):  # commands other than `rl` have the keys of their section at the top
                if known and _has_key(root, known):
                    return ".".join(known), f"{name} in {project}"
    return None


def _has_key(root: FieldSchema, path: KeyPath) -> bool:
    schema: FieldSchema | None = root
    for part in path:
        if schema is None or schema.kind == "any":
            return False
        schema = child(schema, part)
    return schema is not None
