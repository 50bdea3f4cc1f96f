"""Documented behaviors, by document and line, and the test that covers each of them.

A row without its test fails. Document 004 has its snippets executed in `tests/unit/rollouts/test_document_004.py`, document
002 in `tests/integration/test_docs_nanochat.py`; their rows here name the parts.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LIBRARY, CLI = "unit/rollouts/test_document_004.py", "integration/test_rl_command.py"
NANO, WATCH = "integration/test_docs_nanochat.py", "unit/nanochat/test_nanochat_logging.py"
SCRIPT, AQUA = "unit/nanochat/test_prime_rl_train.py", "unit/environments/test_aqua_environment.py"
PROMISES = [
    ("000:16", "an async framework of four processes", CLI, "test_rl_with_three_files"),
    ("000:36", "options above files above variables above defaults", "unit/prime_rl/configuration/test_pydantic_config.py", "test_later_layers_win"),
    ("000:76", "the trainer alone on fake data, five steps", CLI, "test_a_trainer_alone_on_fake_data"),
    ("000:94", "the trainer under torchrun, by its path", CLI, "test_a_trainer_runs_by_its_path"),
    ("000:94", "the same on several ranks", "integration/test_two_ranks.py", "test_two_ranks_equal_one"),
    ("000:103", "distillation with GPUs for everyone", "unit/prime_rl/test_rl_teacher.py", "test_documented_commands_draw_their_map_of_gpus"),
    ("000:148", "weights of one run are the model of the next", CLI, "test_eval_of_published_weights"),
    ("000:159", "WANDB_MODE=disabled logs nothing", "unit/prime_rl/telemetry/test_trackers.py", "test_wandb_mode_disabled_starts_nothing"),
    ("000:160", "weights/step_N is a directory transformers loads", CLI, "test_the_weights_load_in_transformers"),
    ("000:177", "the three taus mix the advantage", "unit/rollouts/test_losses.py", "test_taus_mix_the_advantage_without_gradient_through_it"),
    ("000:182", "LoRA alone is trained and published", "unit/prime_rl/trainer/test_lora_training.py", "test_published_adapter_is_a_valid_model_name"),
    ("001:27", "hybrid and pure distillation", "integration/test_distillation.py", "test_a_teacher_of_its_own_by_the_documented_flags"),
    ("001:67", "the teacher's server follows that of inference", "unit/prime_rl/test_rl_teacher.py", "test_teacher_server_inherits_inference_config"),
    ("001:77", "the context is put before the student's prompt", "unit/prime_rl/orchestrator/test_teacher.py", "test_context_positions"),
    ("001:114", "baselines of student and teacher under their names", "unit/prime_rl/orchestrator/test_baseline_eval.py", "test_baselines_over_time"),
    ("001:123", "metrics of every step under their names", "integration/test_distillation.py", "test_a_teacher_of_its_own_by_the_documented_flags"),
    ("001:141", "prompt_text is in every rollout record", "integration/test_distillation.py", "test_a_teacher_of_its_own_by_the_documented_flags"),
    ("003:10", "lists of options agree in both spellings", "unit/prime_rl/configuration/test_pydantic_config.py", "test_all_spellings_of_a_list_are_equivalent"),
    ("003:12", "update_weights and reload_weights", "unit/prime_rl/inference/test_server.py", "test_an_update_in_flight_drops_nothing_and_marks_the_span"),
    ("003:47", "SFT on several ranks equals one", "integration/test_two_ranks.py", "test_two_ranks_equal_one"),
    ("003:54", "three terminals", CLI, "test_three_terminals"),
    ("003:63", "all three from one command with three files", "unit/prime_rl/test_rl_config.py", "test_the_documented_three_files_parse_together"),
    ("003:73", "an API model is evaluated", "integration/test_eval_commands.py", "test_an_api_model"),
    ("003:76", "a local server is evaluated", "integration/test_eval_commands.py", "test_a_local_model_by_itself_and_behind_a_server"),
    ("003:79", "a series of checkpoints is evaluated", "integration/test_eval_commands.py", "test_a_series_of_checkpoints"),
    ("003:85", "data are synthesized, and sft learns from them", "integration/test_synthesize_commands.py", "test_killed_synthesis_resumes_and_feeds_sft"),
    ("003:129", "files merge from left to right", "unit/prime_rl/configuration/test_pydantic_config.py", "test_tables_merge_deeply_and_lists_are_replaced"),
    ("003:133", "--help shows every option, and the merged values", "unit/prime_rl/configuration/test_pydantic_config.py", "test_help_shows_every_key_once_merged"),
    ("003:205", "the loop of RL, level 0 exact", "integration/test_chaos.py", "test_a_run_that_is_hit_ends_where_the_undisturbed_one_does"),
    ("003:212", "SFT masks what is not learned", "unit/prime_rl/trainer/test_sft_data.py", "test_loss_mask_enables_roles"),
    ("003:220", "progressions of checkpoints", "integration/test_eval_commands.py", "test_a_series_of_checkpoints"),
    ("003:224", "parallel training equals one rank", "integration/test_meshes.py", "test_a_mesh_equals_one_rank"),
    ("003:242", "org/env is installed when asked", "unit/prime_rl/envs/test_env_install.py", "test_install_true_installs_the_environment"),
    ("003:265", "checkpoints resume exactly", "unit/prime_rl/trainer/test_ckpt.py", "test_resumed_runs_are_bit_identical"),
    ("003:268", "engines reload from what the trainer saved", "unit/prime_rl/inference/test_vllm_backend.py", "test_update_pauses_loads_clears_cache_and_resumes"),
    ("003:272", "PRIME_MODEL__NAME", "unit/prime_rl/configuration/test_pydantic_config.py", "test_variables_reach_sections_lists_and_none"),
    ("003:282", "LOGGING_LEVEL", "unit/prime_rl/telemetry/test_logger.py", "test_level_by_config_then_variable_then_info"),
    ("003:297", "the monitor runs with wandb and pandas alone", "unit/prime_rl/monitor/test_monitor_command.py", "test_it_runs_by_path_with_nothing_but_wandb_and_pandas"),
    ("003:320", "the summary under the documented names", "unit/prime_rl/monitor/test_monitor_command.py", "test_local_run_is_summed_up_under_the_documented_names"),
    ("003:321", "failed samples", "unit/prime_rl/monitor/test_monitor_command.py", "test_failed_samples_are_the_newest_below_the_threshold"),
    ("003:322", "loss.png, reward.png, optimizer.png", "unit/prime_rl/monitor/test_monitor_command.py", "test_plots_are_png_files"),
    ("003:350", "/health answers", "unit/prime_rl/inference/test_server.py", "test_models_and_health_report_the_version"),
    ("002:105", "the environment loads as the document does it", NANO, "test_other_commands"),
    ("002:121", "training by default, by file, by options", NANO, "test_training_commands"),
    ("002:130", "torchrun with its --", NANO, "test_two_ranks_by_torchrun"),
    ("002:173", "adapter, rewards, data sets, tracker: the snippets", NANO, "test_snippets"),
    ("002:25", "the metrics that are listed", WATCH, "test_statistics_are_over_samples_of_the_step"),
    ("002:48", "five figures", WATCH, "test_the_five_figures_are_three_dimensional"),
    ("002:59", "four configurations", WATCH, "test_the_four_configurations"),
    ("002:91", ".env.template", WATCH, "test_the_template_has_the_five_keys"),
    ("002:304", "arguments of the environment", AQUA, "test_arguments_are_those_of_the_document"),
    ("002:318", "arguments of the training", SCRIPT, "test_defaults_are_the_documented_table"),
    ("002:363", "checkpoints of nanochat", "unit/nanochat/test_nanochat_model.py", "test_checkpoints_of_both_layouts_round_trip"),
    ("004:1", "every import", LIBRARY, "test_every_import"),
    ("004:1", "every signature and default", LIBRARY, "test_every_signature"),
    ("004:65", "configs", LIBRARY, "test_configs"),
    ("004:100", "the rollout manager", LIBRARY, "test_async_rollout_manager"),
    ("004:119", "pure rollout generation", LIBRARY, "test_pure_function_rollout_generation"),
    ("004:133", "a backend of your own", LIBRARY, "test_a_backend_of_your_own_needs_no_base_class"),
    ("004:149", "the PyTorch backend", LIBRARY, "test_pytorch_backend"),
    ("004:162", "the FSDP backend", LIBRARY, "test_fsdp_backend"),
    ("004:183", "factory functions", LIBRARY, "test_factory_function_and_single_gpu_sft"),
    ("004:197", "grpo_loss", LIBRARY, "test_grpo_loss"),
    ("004:213", "ppo_loss, which is no placeholder", LIBRARY, "test_ppo_loss_is_no_placeholder"),
    ("004:227", "weight sync", LIBRARY, "test_weight_sync_after_a_checkpoint"),
    ("004:260", "DataBuffer", LIBRARY, "test_data_buffer"),
    ("004:278", "load_sft_dataset", LIBRARY, "test_sft_dataset_loading"),
    ("004:297", "SFT, then RL from its latest checkpoint", LIBRARY, "test_sft_to_rl_by_the_latest_checkpoint"),
    ("004:328", "JSONLLogger", LIBRARY, "test_jsonl_logger"),
    ("004:361", "torchrun --nproc_per_node=4 train.py", "integration/test_integration_training.py", "test_sft_then_rl_raises_the_reward_and_two_ranks_agree"),
    ("004:367", "RL with SGLang and an agent", LIBRARY, "test_rl_with_sglang_and_an_agent"),
    ("004:401", "compute_advantages", LIBRARY, "test_advantage_computation"),
    ("004:412", "filters", LIBRARY, "test_sample_filtering"),
    ("004:436", "pipelining with futures", LIBRARY, "test_pipelining_with_futures"),
    ("004:454", "loading a checkpoint", LIBRARY, "test_loading_a_checkpoint_is_implemented"),
    ("004:461", "over-sampling", LIBRARY, "test_over_sampling_needs_the_manager"),
]  # fmt: skip


@pytest.mark.parametrize("row", PROMISES, ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_test_of_a_promise_is_there(row: tuple[str, str, str, str]) -> None:
    _, promise, file, name = row
    functions = {
        node.name
        for node in ast.walk(ast.parse((TESTS / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name in functions, f"{promise}: {file} has no {name}"
