"""The names that keys and values have in verl, TRL and Tunix: the one table of them.

Used by messages about unknown keys and values, and by `quatrain convert` (`config/convert/`).
docs/coming_from.md explains the differences behind the names; a test reads its tables.
"""

from collections.abc import Collection, Mapping
from typing import Any

from quatrain.config.schema import valid_keys

_NAMES = {
    "data.train": "dataset_name train_files train_dataset train_ds",
    "data.answer_column": "reward_model.ground_truth",
    "data.on_long_prompt": "data.truncation filter_overlong_prompts",
    "data.max_prompt_length": "rollout.max_prompt_length",
    "seed": "data.seed",
    "lora.rank": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.targets": "lora_target_modules module_path target_modules",
    "rollout.lora": "lora.merge",
    "rollout.stop": "generation_kwargs eos_tokens",
    "rollout.tools": "function_tool_path",
    "rollout.environment": "agent_loop_config_path tool_config_path environment_factory env_class",
    "rollout.max_turns": "max_assistant_turns max_user_turns max_tool_calling_iterations",
    "rollout.environment_workers": "agent.num_workers",
    "rollout.environment_timeout_s": "episode_timeout",
    "placement.rollout": "vllm_mode",
    "advantage.scale": "scale_rewards norm_adv_by_std_in_grpo",
    "critic.enabled": "critic.enable",
    "mesh": (
        "fsdp_size role_to_mesh fsdp deepspeed ulysses_sequence_parallel_size context_parallel_size "
        "expert_model_parallel_size"
    ),
    "offload.policy": "param_offload offload_to_cpu",
    "offload.reference": "ref.fsdp_config.param_offload",
    "offload.critic": (
        "critic.fsdp.param_offload critic.fsdp_config.param_offload critic.model.fsdp_config.param_offload"
    ),
    "model.dtype": "fsdp_config.dtype bf16",
    "model.param_dtype": "model_dtype",
    "eval.temperature": "val_kwargs.temperature",
    "data.question_column": "prompt_key dataset_prompt_column",
    "data.system_prompt": "system_prompt",
    "data.shuffle": "shuffle_dataset",
    "data.chat_template": "custom_chat_template chat_template_path",
    "data.chat_template_kwargs": "apply_chat_template_kwargs chat_template_kwargs",
    "data.eval": "val_files eval_dataset eval_ds",
    "data.batch_size": "train_batch_size generation_batch_size",
    "rollout.n": "num_generations",
    "rollout.max_new_tokens": (
        "total_generation_steps max_response_length max_completion_length max_tokens_to_generate"
    ),
    "rollout.max_concurrency": "max_num_seqs rollout_vllm_max_num_seqs",
    "rollout.mesh": "tensor_model_parallel_size vllm_tensor_parallel_size tensor_parallel_size",
    "rollout.max_staleness": (
        "AsyncGRPOConfig.max_staleness max_off_policy_threshold off_policy_steps trainer_mode"
    ),
    "rollout.dynamic_sampling_rounds": "filter_groups.enable max_num_gen_batches",
    "reward.functions": (
        "reward_functions reward_funcs reward_fns reward_weights custom_reward_function.path "
        "custom_reward_function.name reward_kwargs"
    ),
    "reward.truncated_factor": "stop_properly_penalty_coef",
    "reward.kl_coef": "kl_ctrl.kl_coef use_kl_in_reward",
    "reward.kl_target": "target_kl",
    "reward.kl_horizon": "horizon",
    "advantage.estimator": "adv_estimator advantage_estimator multi_objective_aggregation",
    "update.loss": "loss_mode loss_type policy_loss_fn loss_algo divergence_type",
    "update.loss_aggregation": "loss_agg_mode",
    "update.clip_low": "clip_ratio_low epsilon epsilon_low",
    "update.clip_high": "clip_ratio_high epsilon_high",
    "update.dual_clip": "clip_ratio_c epsilon_c delta",
    "update.kl_coef": "kl_loss_coef use_kl_loss beta",
    "update.reference_sync_steps": "sync_ref_model ref_model_sync_steps",
    "update.reference_mixup": "ref_model_mixup_alpha",
    "update.kl_estimator": "kl_loss_type kl_loss_mode",
    "update.sampler_kl_coef": "kl_tau",
    "update.entropy_coef": "entropy_coeff",
    "update.correction": (
        "vllm_importance_sampling_correction sampler_is rollout_correction vllm_importance_sampling_mode"
    ),
    "update.correction_cap": (
        "vllm_importance_sampling_clip_max rollout_is_threshold vllm_importance_sampling_cap"
    ),
    "update.correction_level": "rollout_is",
    "update.reject": "rollout_rs rollout_rs_threshold off_policy_mask_threshold",
    "update.mask_truncated": "mask_truncated_completions",
    "update.mini_batch_size": "ppo_mini_batch_size training.mini_batch_size",
    "update.micro_batch_size": (
        "ppo_micro_batch_size_per_gpu per_device_train_batch_size train_micro_batch_size"
    ),
    "update.max_tokens_per_device": "ppo_max_token_len_per_gpu max_seq_token_per_tpu use_dynamic_bsz",
    "update.epochs": "ppo_epochs num_iterations",
    "distill.teacher": "teacher_models teacher_model_name_or_path",
    "distill.weight": "distillation_loss_coef",
    "distill.rl_weight": "task_loss_coef use_task_rewards",
    "distill.clip": "loss_max_clamp",
    "distill.top_k": "distillation_loss.topk",
    "logprob.micro_batch_size": "log_prob_micro_batch_size_per_gpu compute_logps_micro_batch_size",
    "logprob.max_tokens_per_device": "log_prob_max_token_len_per_gpu",
    "critic.path": "critic.model.path",
    "critic.mini_batch_size": "critic.ppo_mini_batch_size",
    "critic.epochs": "critic.ppo_epochs",
    "critic.micro_batch_size": "critic.ppo_micro_batch_size_per_gpu",
    "critic.max_tokens_per_device": "critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_tokens_per_device": "forward_max_token_len_per_gpu",
    "critic.clip_value": "cliprange_value clip_range_value",
    "critic.warmup_steps": "critic_warmup",
    "critic_optimizer.learning_rate": "critic.optim.lr critic.lr critic.learning_rate critic_optimizer",
    "sft.learning_rate": "sft.lr",
    "sft.train_on": "assistant_only_loss completion_only_loss",
    "dpo.reference": "ref_model",
    "dpo.label_smoothing": "label_smoothing",
    "dpo.desirable_weight": "desirable_weight",
    "dpo.undesirable_weight": "undesirable_weight",
    "dpo.gamma": "simpo_gamma",
    "rm.center": "center_rewards_coefficient",
    "optimizer.learning_rate": "lr actor_optimizer",
    "optimizer.schedule": "warmup_style schedule_type lr_scheduler_type",
    "optimizer.final_fraction": "min_lr_ratio",
    "optimizer.warmup_steps": "lr_warmup_steps lr_warmup_steps_ratio warmup_ratio",
    "optimizer.beta1": "betas adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.max_grad_norm": "grad_clip clip_grad",
    "model.remat": "enable_gradient_checkpointing gradient_checkpointing remat_config",
    "offload.optimizer": "optimizer_offload",
    "run.steps": "total_training_steps max_steps",
    "run.epochs": "total_epochs num_train_epochs",
    "run.profile_steps": "global_profiler.steps profiler_options",
    "run.dir": "default_local_dir output_dir log_dir",
    "run.name": "experiment_name run_name",
    "eval.every_steps": "test_freq eval_steps eval_every_n_steps eval_strategy",
    "eval.n": "val_kwargs.n num_generations_eval",
    "checkpoint.every_steps": "save_freq save_steps checkpointing_options",
    "checkpoint.keep": "max_actor_ckpt_to_keep save_total_limit",
    "checkpoint.best_metric": "metric_for_best_model load_best_model_at_end",
    "checkpoint.best_mode": "greater_is_better",
    "hub.push": "push_to_hub hub_model_id",
    "logging.wandb_project": "project_name",
    "eval.before": "eval_on_start val_before_train",
    "hub.private": "hub_private_repo",
    "logging.samples_per_step": "log_completions rollout_data_dir",
    "model.path": "model_name_or_path model_id",
    "model.tokenizer": "tokenizer_path",
    "optimizer.eps": "adam_epsilon",
    "optimizer.name": "opt_type",
    "update.correction_floor": "vllm_importance_sampling_clip_min",
    "rollout.servers": "vllm_server_host",
}
"""Key here -> the last part, or the last parts, of the keys of other libraries."""
NAMES_ELSEWHERE = {name: key for key, names in _NAMES.items() for name in names.split()}
_ALONE = {
    name: f"optimizer.{name}" for name in ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm")
}
_ALONE |= {name: f"rollout.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "tools")}
_ALONE |= {"entropy_coef": "update.entropy_coef", "max_prompt_length": "data.max_prompt_length"}
"""Keys of other libraries without a section, which keys of several sections here are called too."""
_LORA = "adapters have a section of their own here: 'lora.rank', 'lora.alpha' and 'lora.targets'"
_ENGINE = (
    "quatrain has an engine of its own, which no key chooses; 'rollout.servers' samples with vLLM or SGLang "
    "servers instead"
)
_ACCUMULATION = (
    "gradient accumulation is derived here: 'update.mini_batch_size' (prompts per optimizer step) in "
    "micro-batches of 'update.micro_batch_size' or 'update.max_tokens_per_device'; `quatrain plan` prints it"
)
_DEVICES = (
    "the number of devices is derived here: a run uses every device that JAX finds (CUDA_VISIBLE_DEVICES "
    "hides GPUs), and 'mesh' says how they are divided"
)
_MEMORY = (
    "no key reserves a part of the memory here: 'rollout.max_concurrency' limits the samples that decode at "
    "once, and so the KV cache; `quatrain plan --params` prints the memory of a device"
)
_RESUME = "a run is resumed by the option --resume RUN or --resume auto, not by a key"
_LOGGING = "here it is 'logging.wandb', 'logging.trackio' or 'logging.tensorboard'"
_REWARD_MODEL = "here a reward model is an entry 'model:PATH' of 'reward.functions'"
_CRITIC = "here a critic is trained if 'critic.enabled' is true, as derived from 'advantage.estimator: gae'"
_LOSS_ARGS = "here it is an argument of the loss, in 'update.loss_args'"
_LENGTH = (
    "here it is 'sft.max_length', 'dpo.max_length' or 'rm.max_length', with on_long beside it for longer rows"
)
_PACKING = "rows are always packed here where micro-batches have a budget, 'update.max_tokens_per_device'"
_ONCE = (
    "the log-probabilities of the reference are always computed once here, before the first step, so there "
    "is no such key"
)
_KL_PENALTY = (
    "the KL in the reward ('reward.kl_coef') is always estimated by k1 here, so there is no such key"
)
_WHOLE = "nothing that an environment answers is cut here, so there is no such key"
_EXPLAINED = {
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum_steps", "steps_per_generation"), _ACCUMULATION
    ),
    **dict.fromkeys(("n_gpus_per_node", "nnodes", "num_gpus", "num_nodes"), _DEVICES),
    **dict.fromkeys(("gpu_memory_utilization", "vllm_gpu_memory_utilization"), _MEMORY),
    **dict.fromkeys(("rollout_vllm_hbm_utilization", "kv_cache_size"), _MEMORY),
    **dict.fromkeys(("report_to", "trainer.logger", "MetricsLoggerOptions"), _LOGGING),
    **dict.fromkeys(("resume_mode", "resume_from_checkpoint", "checkpoint_root_directory"), _RESUME),
    **dict.fromkeys(("peft_config", "LoraProvider"), _LORA),
    **dict.fromkeys(("rollout.name", "use_vllm", "rollout_engine"), _ENGINE),
    **dict.fromkeys(("reward_model.enable", "reward_model.model_path"), _REWARD_MODEL),
    **dict.fromkeys(("kl_penalty", "kl_method"), _KL_PENALTY),
    **dict.fromkeys(("max_length", "truncation_mode"), _LENGTH),
    **dict.fromkeys(("packing", "packing_strategy", "padding_free"), _PACKING),
    **dict.fromkeys(("precompute_ref_log_probs", "precompute_ref_batch_size"), _ONCE),
    **dict.fromkeys(
        ("dataset_config", "dataset_train_split", "dataset_test_split"),
        "a data set on the Hub is written owner/name:config:split here",
    ),
    "dataset_text_field": "here plain text stands in the column text",
    **dict.fromkeys(("max_tool_response_length", "tool_response_truncate_side"), _WHOLE),
    **dict.fromkeys(("actor.tau_pos", "actor.tau_neg"), _LOSS_ARGS),
    "dro_beta": f"{_LOSS_ARGS}: beta",
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), f"{_LOSS_ARGS}: tau_pos, tau_neg"),
    **dict.fromkeys(
        ("algorithm.gamma", "algorithm.lam", "gamma", "lam", "gae_lambda"),
        "here it is an argument of the estimator: 'advantage.args' with gamma and lam",
    ),
    "importance_sampling_level": "here ratios of whole sequences are a loss: 'update.loss' with gspo",
    "kl_ctrl.type": "here the KL's weight adapts if 'reward.kl_target' and 'reward.kl_horizon' are set",
    "critic.optim": "here it is the section 'critic_optimizer'",
    "optim": "here it is the section 'optimizer'",
    "logging_steps": "every training step is logged here, so there is no such key",
    "PPOLearner": _CRITIC,
    "clip_max": "here the ratio is clipped at 1 - 'update.clip_low' and 1 + 'update.clip_high'",
    "role_to_mesh[Role.ROLLOUT]": "here it is 'rollout.mesh'",
    "rollout_config[Mode.EVAL]": "here the evaluations have a section of their own, 'eval'",
    "extends": "it stands at the top level of a configuration file only",
}
"""Keys of other libraries that no single key here replaces, and what to do instead."""
_INTERNAL = "it belongs to the parts of that library, which quatrain does not have"
INSIDE = {
    **dict.fromkeys(("_target_", "wrap_policy", "turbo_config", "fused_kernel_options"), _INTERNAL),
    **dict.fromkeys(("checkpoint_engine", "engine_kwargs", "custom_async_server", "prometheus"), _INTERNAL),
    **dict.fromkeys(("ray_kwargs", "transfer_queue", "override_config", "tiled_mlp", "skip"), _INTERNAL),
    **dict.fromkeys(("trace", "disaggregation", "sampler_kwargs", "hybrid_rollout"), _INTERNAL),
    **dict.fromkeys(
        ("accelerator_config", "parallelism_config", "fsdp_plan", "defaults", "hydra"), _INTERNAL
    ),
    **dict.fromkeys(("megatron", "veomni", "torchtitan"), "quatrain shards by 'mesh'"),
    **dict.fromkeys(
        ("profiler", "global_profiler", "perf_metrics_options"), "'run.profile_steps' writes JAX's profile"
    ),
    **dict.fromkeys(("qat", "mtp"), "quantised training and heads for several tokens are not here"),
    **dict.fromkeys(("vllm_config", "sglang_jax_config"), _ENGINE),
    "sandbox_fusion": "a reward function runs programs in a quatrain.Sandbox (docs/sandbox.md)",
}
"""Sections of other libraries without a counterpart, by one part of the key: why."""
_VALUES = {
    "update.loss": {
        **dict.fromkeys(("vanilla", "ppo", "grpo", "bnpo", "dr_grpo"), "ppo_clip"),
        "dapo": "ppo_clip, with its clip_high of 0.28 in 'update.clip_high', and "
        "'rollout.dynamic_sampling_rounds' of 2 or more",
        "gspo-token": "gspo",
        **dict.fromkeys(("dppo_tv", "binary_tv"), "dppo"),
        "binary_kl": "dppo_kl",
        "geo_mean": "gmpo",
        "luspo": "gspo with 'update.loss_aggregation' seq_mean_token_sum",
    },
    "update.loss_aggregation": {
        **dict.fromkeys(("token-mean", "dapo", "bnpo", "cispo"), "token_mean"),
        **dict.fromkeys(
            ("seq-mean-token-mean", "sequence-mean-token-mean", "grpo", "sapo"), "seq_mean_token_mean"
        ),
        **dict.fromkeys(
            ("seq-mean-token-sum", "sequence-mean-token-sum-norm", "luspo"), "seq_mean_token_sum"
        ),
        **dict.fromkeys(
            ("seq-mean-token-sum-norm", "sequence-mean-token-scale", "dr_grpo"), "seq_mean_token_sum_norm"
        ),
    },
    "update.kl_estimator": {
        "kl": "k1",
        **dict.fromkeys(("mse", "mse_kl"), "k2"),
        "low_var_kl": "k3",
        "k3+": "k3_straight",
    },
    "advantage.estimator": {
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
        "grpo_passk": "passk",
        "normalize_then_sum": "gdpo",
        "drgrpo": "dr_grpo",
        "dapo": "grpo, with 'update.loss' ppo_clip, 'update.clip_high' 0.28 and "
        "'rollout.dynamic_sampling_rounds' of 2 or more",
        "ppo": "gae, with a critic",
        "vapo": "length_adaptive_gae, with a critic",
    },
}
"""Values of other libraries for the key here -> the value here."""

LIBRARIES = {"verl": "verl", "trl": "TRL", "tunix": "Tunix"}
"""The name of each library as an option's value, and as it writes itself."""
_SIGNS = {
    "verl": {"actor_rollout_ref", "algorithm", "trainer", "custom_reward_function", "reward_model"},
    "tunix": {
        *("grpo_config", "agentic_grpo_config", "ppo_config", "rl_training_config", "actor_model_config"),
        *("rollout_model_config", "cluster_config", "kl_loss_mode", "loss_algo", "policy_loss_fn"),
    },
    "trl": {
        *("per_device_train_batch_size", "model_name_or_path", "num_generations", "max_completion_length"),
        *("gradient_accumulation_steps", "use_vllm", "vllm_mode", "scale_rewards", "reward_funcs"),
        *("steps_per_generation", "generation_batch_size", "num_train_epochs", "lr_scheduler_type"),
        *("dataset_name", "lora_r", "use_peft", "report_to", "assistant_only_loss", "completion_only_loss"),
        *("precompute_ref_log_probs", "center_rewards_coefficient"),
    },
}
"""Keys at the top of a file that say whose it is; quatrain has none of these."""


def library_of(keys: Mapping[str, Any]) -> str | None:
    """Whose file has these keys at its top (or dotted keys that begin so); None: none that is known."""
    tops = {str(key).partition(".")[0] for key in keys}
    return next((name for name, signs in _SIGNS.items() if tops & signs), None)


def suggestion(name: str) -> str | None:
    """What to use for another library's key, such as `actor_rollout_ref.actor.optim.lr`; None if unknown."""
    if key := key_for(name):
        return f"here it is {key!r}"
    inside = next((part for part in name.split(".") if part in INSIDE), "")
    return _EXPLAINED.get(_longest_tail(name, _EXPLAINED)) or INSIDE.get(inside)


def value_for(key: str, value: object) -> str | None:
    """The value of `key` here for another library's `value`, with what belongs to it; None if unknown."""
    return _VALUES.get(key, {}).get(value) if isinstance(value, str) else None


def key_for(name: str) -> str | None:
    """The key here of another library's key, such as `actor_rollout_ref.actor.optim.lr`; None if unknown."""
    tail = _longest_tail(name, NAMES_ELSEWHERE)
    same = _longest_tail(name, valid_keys())
    if "." in same and len(same) >= len(tail):
        return same
    return NAMES_ELSEWHERE.get(tail) or _ALONE.get(name)


def _longest_tail(name: str, known: Collection[str]) -> str:
    """The longest part of the dotted `name`, up to its end, that is in `known`; empty if there is none."""
    parts = name.split(".")
    tails = (".".join(parts[start:]) for start in range(len(parts)))
    return next((tail for tail in tails if tail in known), "")
