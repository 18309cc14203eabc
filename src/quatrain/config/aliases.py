"""The names that configuration keys have in verl, TRL and Tunix, for the message about an unknown key.

docs/coming_from.md explains the differences behind the names.
"""

from __future__ import annotations

_NAMES = {
    "data.train": ("train_files", "train_dataset", "train_ds"),
    "data.question_column": ("prompt_key",),
    "data.shuffle": ("shuffle_dataset",),
    "data.chat_template": ("custom_chat_template", "chat_template_path"),
    "data.chat_template_kwargs": ("apply_chat_template_kwargs", "chat_template_kwargs"),
    "data.eval": ("val_files", "eval_dataset", "eval_ds"),
    "data.batch_size": ("train_batch_size", "generation_batch_size"),
    "rollout.n": ("num_generations",),
    "rollout.max_new_tokens": ("max_response_length", "max_completion_length", "max_tokens_to_generate"),
    "rollout.max_concurrency": ("max_num_seqs", "rollout_vllm_max_num_seqs"),
    "rollout.mesh": ("tensor_model_parallel_size", "vllm_tensor_parallel_size"),
    "rollout.max_staleness": ("max_off_policy_threshold", "off_policy_steps"),
    "rollout.dynamic_sampling_rounds": ("filter_groups.enable", "max_num_gen_batches"),
    "reward.functions": (
        *("reward_funcs", "reward_fns", "reward_weights"),
        *("custom_reward_function.path", "custom_reward_function.name", "reward_kwargs"),
    ),
    "reward.kl_coef": ("kl_ctrl.kl_coef", "use_kl_in_reward"),
    "reward.kl_target": ("target_kl",),
    "reward.kl_horizon": ("horizon",),
    "advantage.estimator": ("adv_estimator", "advantage_estimator"),
    "update.loss": ("loss_mode", "loss_type", "policy_loss_fn", "loss_algo"),
    "update.loss_aggregation": ("loss_agg_mode",),
    "update.clip_low": ("clip_ratio_low", "epsilon", "epsilon_low"),
    "update.clip_high": ("clip_ratio_high", "epsilon_high"),
    "update.dual_clip": ("clip_ratio_c", "epsilon_c", "delta"),
    "update.kl_coef": ("kl_loss_coef", "use_kl_loss", "beta"),
    "update.reference_sync_steps": ("sync_ref_model", "ref_model_sync_steps"),
    "update.reference_mixup": ("ref_model_mixup_alpha",),
    "update.kl_estimator": ("kl_loss_type", "kl_loss_mode"),
    "update.entropy_coef": ("entropy_coeff",),
    "update.correction": ("vllm_importance_sampling_correction", "sampler_is"),
    "update.correction_cap": ("vllm_importance_sampling_cap",),
    "update.mask_truncated": ("mask_truncated_completions",),
    "update.mini_batch_size": ("ppo_mini_batch_size",),
    "update.micro_batch_size": (
        "ppo_micro_batch_size_per_gpu",
        "per_device_train_batch_size",
        "train_micro_batch_size",
    ),
    "update.max_tokens_per_device": ("ppo_max_token_len_per_gpu", "max_seq_token_per_tpu", "use_dynamic_bsz"),
    "update.epochs": ("ppo_epochs", "num_iterations"),
    "logprob.micro_batch_size": ("log_prob_micro_batch_size_per_gpu", "compute_logps_micro_batch_size"),
    "logprob.max_tokens_per_device": ("log_prob_max_token_len_per_gpu",),
    "critic.path": ("critic.model.path",),
    "critic.mini_batch_size": ("critic.ppo_mini_batch_size",),
    "critic.epochs": ("critic.ppo_epochs",),
    "critic.micro_batch_size": ("critic.ppo_micro_batch_size_per_gpu",),
    "critic.max_tokens_per_device": ("critic.ppo_max_token_len_per_gpu",),
    "critic.forward_max_tokens_per_device": ("forward_max_token_len_per_gpu",),
    "critic.clip_value": ("cliprange_value", "clip_range_value"),
    "critic.warmup_steps": ("critic_warmup",),
    "critic_optimizer.learning_rate": ("critic.optim.lr", "critic.lr", "critic.learning_rate"),
    "sft.learning_rate": ("sft.lr",),
    "optimizer.learning_rate": ("lr",),
    "optimizer.schedule": ("lr_scheduler_type",),
    "optimizer.final_fraction": ("min_lr_ratio",),
    "optimizer.warmup_steps": ("lr_warmup_steps", "lr_warmup_steps_ratio"),
    "optimizer.beta1": ("betas", "adam_beta1"),
    "optimizer.beta2": ("adam_beta2",),
    "optimizer.max_grad_norm": ("clip_grad",),
    "model.remat": ("enable_gradient_checkpointing", "gradient_checkpointing"),
    "offload.optimizer": ("optimizer_offload",),
    "run.steps": ("total_training_steps", "max_steps"),
    "run.epochs": ("total_epochs", "num_train_epochs"),
    "run.profile_steps": ("global_profiler.steps", "profiler_options"),
    "run.dir": ("default_local_dir", "output_dir"),
    "run.name": ("experiment_name", "run_name"),
    "eval.every_steps": ("test_freq", "eval_steps", "eval_every_n_steps"),
    "eval.n": ("val_kwargs.n", "num_generations_eval"),
    "checkpoint.every_steps": ("save_freq", "save_steps"),
    "checkpoint.keep": ("max_actor_ckpt_to_keep", "save_total_limit"),
    "checkpoint.best_metric": ("metric_for_best_model", "load_best_model_at_end"),
    "checkpoint.best_mode": ("greater_is_better",),
    "logging.samples_per_step": ("log_completions", "rollout_data_dir"),
}
NAMES_ELSEWHERE = {name: key for key, names in _NAMES.items() for name in names}
"""The last part, or the last parts, of another library's key -> the key here."""
_ALONE = {name: f"optimizer.{name}" for name in ("learning_rate", "warmup_steps")}
"""Keys of other libraries without a section, which keys of several sections here are called too."""


def key_for(name: str) -> str | None:
    """The key here of another library's key, such as `actor_rollout_ref.actor.optim.lr`; None if unknown."""
    parts = name.split(".")
    tails = (".".join(parts[start:]) for start in range(len(parts)))
    found = next((NAMES_ELSEWHERE[tail] for tail in tails if tail in NAMES_ELSEWHERE), None)
    return found or _ALONE.get(name)
