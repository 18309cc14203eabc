"""What a configuration of verl (0.9.1, `ppo_trainer.yaml` with FSDP) means where values decide.

All other keys go by the table in `config/aliases.py`. verl counts prompts per training step and per
mini-batch, as quatrain does; its micro-batches count sequences of one GPU.
"""

import re
from typing import Any

from quatrain.config.algorithms import ESTIMATORS, LOSSES, takes
from quatrain.config.aliases import value_for
from quatrain.config.convert.translation import OPTIMIZERS, Translation, put_lora_targets

DEFAULTS = {
    "data.train_batch_size": 1024,
    "data.max_response_length": 512,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "trainer.total_epochs": 30,
}
"""verl's defaults that differ from ours, of keys that the table of names translates."""
ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "ref"))
_DTYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
_BUFFER = re.compile(r"\boverlong_buffer(_cfg)?\.enable$")
"""The buffer of verl's reward manager `dapo`: below `reward_model`, `reward`, or `reward_kwargs` of these."""
_OF_SEQUENCES = ("gspo", "sapo", "gmpo")
"""Losses that verl takes the mean over sequences of, whatever `loss_agg_mode` says."""
_FRACTION = "a fraction of all steps there; give it as a number of optimizer steps: {}.warmup_steps"


def translate(t: Translation, devices: int | None) -> None:
    """Puts what depends on values into `t`; `devices` is null where the file says how many there are."""
    nodes, per_node = t.number("trainer.nnodes", 1), t.number("trainer.n_gpus_per_node", 8)
    t.taken -= {"trainer.nnodes", "trainer.n_gpus_per_node"}  # explained by the table
    devices = devices or nodes * per_node
    _data(t)
    _rollout(t, devices)
    _rewards(t)
    loss = _policy_loss(t)
    estimator = _advantages(t, loss)
    _kl(t)
    _correction(t)
    _batches(t, devices)
    _optimizer(t, f"{ACTOR}.optim", "optimizer", ACTOR)
    if takes(estimator, "values"):
        _critic(t, devices)
    else:
        critic = [name for name in t.given if name.startswith("critic.")]
        t.leave(f"no critic is trained with advantage.estimator {estimator}", *critic)
    _others(t)
    _run(t)


def _others(t: Translation) -> None:
    """Sections that act only if one key switches them on."""
    teacher = [name for name in t.given if name.startswith("distillation.")]
    if t.take("distillation.enabled", False):
        model = next((n for n in teacher if n.endswith(".model_path") and t.given[n] is not None), "")
        if path := t.take(model):
            t.put("distill.teacher", path, model)
        t.leave("docs/distill.md: the losses of both are compared in docs/coming_from.md", *teacher)
    else:
        t.leave("distillation.enabled is false", *teacher)
    mode, most = "trainer.v1.trainer_mode", "trainer.v1.sampler.max_off_policy_threshold"
    if t.take(mode, "sync") == "sync":
        t.leave_all("trainer_mode is sync", "trainer.v1.")
    else:
        remark = (
            "rollouts are older by at most this many training steps; samples that are older are dropped there"
        )
        t.put("rollout.max_staleness", t.number(most, 8), most, mode, remark=remark)
    t.leave_all("all weights of the critic are trained", "critic.model.lora")
    own = ("model", "fsdp_config.model_dtype", "fsdp_config.dtype", "fsdp_config.optimizer_offload")
    t.leave_all(
        "the reference is the policy at the start of the run here, and has its dtype",
        tuple(f"{REF}.{name}" for name in own),
    )


def _data(t: Translation) -> None:
    truncation = t.take("data.truncation", "error")
    if t.take("data.filter_overlong_prompts", False):
        t.put("data.on_long_prompt", "skip", "data.filter_overlong_prompts")
    elif truncation == "left":
        t.put("data.on_long_prompt", "truncate_left", "data.truncation")
    elif truncation != "error":
        t.leave("a long prompt is an error here, skipped, or cut on the left", "data.truncation")
    if t.take("data.prompt_key", "prompt") != "prompt":
        t.leave(
            "the column of a row's messages is called prompt or messages here: rename it", "data.prompt_key"
        )
    t.copy_mapping("data.chat_template_kwargs", "data.apply_chat_template_kwargs")
    t.take("data.return_raw_chat")
    t.take("data.reward_fn_key")


def _rollout(t: Translation, devices: int) -> None:
    t.move("rollout.n", f"{ROLLOUT}.n", 1)
    top_k = t.number(f"{ROLLOUT}.top_k", -1)
    t.put("rollout.top_k", max(top_k, 0), f"{ROLLOUT}.top_k")
    if t.take(f"{ROLLOUT}.do_sample", True) is False:
        t.put("rollout.temperature", 0, f"{ROLLOUT}.do_sample")
    tensor = t.number(f"{ROLLOUT}.tensor_model_parallel_size", 1)
    if tensor > 1:
        t.put("rollout.mesh", f"-1,1,{tensor}", f"{ROLLOUT}.tensor_model_parallel_size")
    if (sequences := t.number(f"{ROLLOUT}.max_num_seqs")) is not None:
        replicas = max(1, devices // tensor)
        remark = f"of all {replicas} replicas together; of one engine there"
        t.put("rollout.max_concurrency", sequences * replicas, f"{ROLLOUT}.max_num_seqs", remark=remark)
    validation = f"{ROLLOUT}.val_kwargs"
    n, samples = t.number(f"{validation}.n", 1), t.take(f"{validation}.do_sample", False)
    temperature = t.number(f"{validation}.temperature", 0)
    if samples and temperature:
        t.put("eval.n", n, f"{validation}.n", f"{validation}.do_sample")
        t.put("eval.temperature", temperature, f"{validation}.temperature")
        t.move("eval.top_p", f"{validation}.top_p", 1.0)
        if t.number(f"{validation}.top_k", -1) > 0:
            t.leave("evaluations have no top_k here", f"{validation}.top_k")
    else:
        lacks = "a temperature above 0" if samples else "do_sample"
        why = f"evaluations are greedy without {lacks}, there as here; eval.n samples beside"
        t.leave(why, *(f"{validation}.{name}" for name in ("n", "temperature", "top_p", "top_k")))
    if t.take(f"{ROLLOUT}.multi_turn.enable", False) is False:
        sections = (f"{ROLLOUT}.multi_turn.", f"{ROLLOUT}.agent.")
        t.leave_all("multi_turn.enable is false", sections)
    lora = "actor_rollout_ref.model.lora"
    rank = t.number("actor_rollout_ref.model.lora_rank", 0)
    t.put("lora.rank", rank, "actor_rollout_ref.model.lora_rank")
    if not rank:
        off = ("lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path")
        names = [
            *(f"actor_rollout_ref.model.{n}" for n in off),
            *(n for n in t.given if n.startswith(lora + ".")),
        ]
        t.leave("lora_rank is 0", *names)
    else:
        alpha = t.number("actor_rollout_ref.model.lora_alpha", 16)
        t.put("lora.alpha", alpha, "actor_rollout_ref.model.lora_alpha")
        put_lora_targets(t, "actor_rollout_ref.model.target_modules")
        if t.take(f"{lora}.merge"):
            t.put("rollout.lora", "merged", f"{lora}.merge")


def _rewards(t: Translation) -> None:
    functions: dict[str, Any] = {}
    names = []
    for section in ("custom_reward_function", "reward.custom_reward_function"):
        path, name = t.take(f"{section}.path"), t.take(f"{section}.name", "compute_score")
        args = t.mapping(f"{section}.reward_kwargs")
        if path:
            entry = {"weight": 1.0, "args": args} if args else 1.0
            functions[f"{path}:{name}"] = entry
            names += [f"{section}.path", f"{section}.name"]
    buffer = next((n for n in t.given if _BUFFER.search(n) and t.given[n]), None)
    for enable, path_name in (
        ("reward_model.enable", "reward_model.model.path"),
        ("reward.reward_model.enable", "reward.reward_model.model_path"),
    ):
        path = t.take(path_name)
        if t.take(enable) and path:
            functions[f"model:{path}"] = 1.0
            names += [enable, path_name]
        else:
            section = enable.rpartition(".")[0]
            others = ("reward_manager", "reward_kwargs", "overlong_buffer", "max_resp_len")
            about = [n for n in t.given if n.startswith(f"{section}.") and not any(o in n for o in others)]
            t.leave("no reward model is enabled", *about)
    if buffer:
        prefix = buffer.removesuffix("enable")
        functions["overlong"] = t.number(f"{prefix}penalty_factor", 1.0)
        t.put("reward.overlong_buffer", t.number(f"{prefix}len"), f"{prefix}len", buffer)
        longest = f"{prefix.rstrip('.').rpartition('.')[0]}.max_resp_len"
        if (limit := t.number(longest)) is not None:
            t.put("reward.overlong_limit", limit, longest)
        t.take(f"{prefix}log")
        names.append(f"{prefix}penalty_factor")
    else:
        unread = (n for n in t.given if "overlong_buffer" in n or n.endswith(".max_resp_len"))
        t.leave("overlong_buffer is not enabled", *unread)
    remark = ""
    if not set(functions) - {"overlong"}:
        functions = {"correct": 1.0, **functions}
        remark = (
            "verl scores by the column data_source; `correct` compares the completion's answer with "
            "reward_model.ground_truth"
        )
    t.put("reward.functions", functions, *(names or ["custom_reward_function.path"]), remark=remark)


def _policy_loss(t: Translation) -> str:
    mode = f"{ACTOR}.policy_loss.loss_mode"
    theirs = t.take(mode, "vanilla")
    loss = value_for("update.loss", theirs) or theirs
    low, high = (t.number(f"{ACTOR}.clip_ratio_{side}", 0.2) for side in ("low", "high"))
    sides = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")
    why = "verl reads clip_ratio_low and clip_ratio_high, whose defaults of 0.2 it does not replace"
    if t.take(f"{ACTOR}.clip_ratio", 0.2) not in (low, high):
        t.leave(why, f"{ACTOR}.clip_ratio")
    t.put("update.loss", loss, mode)
    policy = f"{ACTOR}.policy_loss"
    places = {
        **{name: f"{policy}.{name}" for name in ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")},
        **{name: f"{policy}.{name}" for name in ("kl_cov_ratio", "ppo_kl_coef")},
        **{name: f"{ACTOR}.{name}" for name in ("tau_pos", "tau_neg")},
        "beta": f"{policy}.dro_beta",
    }
    known = LOSSES[loss].parameters if loss in LOSSES else ()
    args = {name: t.given[place] for name, place in places.items() if name in known and place in t.given}
    if loss == "kl_cov":
        args.setdefault("ppo_kl_coef", 0.1)  # verl's default; ours is 1.0
    sources = [places[name] for name in args]
    if loss in ("ppo_clip", "clip_cov"):
        t.put("update.clip_low", low, sides[0])
        t.put("update.clip_high", high, sides[1])
        if loss == "ppo_clip":
            t.move("update.dual_clip", f"{ACTOR}.clip_ratio_c", 3.0)
        else:
            t.leave("clip_cov does not read it there", f"{ACTOR}.clip_ratio_c")
    else:
        if "clip_low" in known:
            args |= {"clip_low": low, "clip_high": high}
            sources += sides
        unread = [f"{ACTOR}.clip_ratio_c", *(side for side in sides if side not in sources)]
        t.leave(f"update.loss {loss} does not read it", *unread)
    if args:
        t.put("update.loss_args", args, *(sources or [mode]))
    t.leave(f"update.loss {loss} does not read it", *(p for p in places.values() if p not in t.taken))
    aggregation = f"{ACTOR}.loss_agg_mode"
    if loss in _OF_SEQUENCES:
        t.put("update.loss_aggregation", "seq_mean_token_mean", mode)
        t.leave(f"{theirs} does not read it there: it is a mean over sequences", aggregation)
    else:
        named = t.take(aggregation, "token-mean")
        ours = value_for("update.loss_aggregation", named) or named
        t.put("update.loss_aggregation", ours, aggregation)
    if t.take(f"{ACTOR}.loss_scale_factor") is not None:
        t.leave(
            "the divisor of seq_mean_token_sum_norm is rollout.max_new_tokens", f"{ACTOR}.loss_scale_factor"
        )
    if not t.number(f"{ACTOR}.entropy_coeff", 0):
        t.take(f"{ACTOR}.entropy_coeff")
    else:
        t.move("update.entropy_coef", f"{ACTOR}.entropy_coeff")
    return loss


def _advantages(t: Translation, loss: str) -> str:
    name = "algorithm.adv_estimator"
    theirs = t.take(name, "gae")
    estimator = value_for("advantage.estimator", theirs) or theirs
    t.put("advantage.estimator", estimator, name)
    if t.take("algorithm.norm_adv_by_std_in_grpo", True) is False and estimator in ("grpo", "passk"):
        remark = "with loss_agg_mode seq-mean-token-sum-norm this is dr_grpo" if estimator == "grpo" else ""
        t.put("advantage.scale", "none", "algorithm.norm_adv_by_std_in_grpo", remark=remark)
    else:
        t.take("algorithm.norm_adv_by_std_in_grpo")
    known = ESTIMATORS[estimator].parameters if estimator in ESTIMATORS else ()
    if estimator == "reinforce_pp_baseline":  # verl's gives every token the same return
        known = ()
    args = {
        argument: t.given[f"algorithm.{argument}"]
        for argument in ("gamma", "lam")
        if argument in known and t.given.get(f"algorithm.{argument}") is not None
    }
    if args:
        t.put("advantage.args", args, *(f"algorithm.{argument}" for argument in args))
    unread = [f"algorithm.{a}" for a in ("gamma", "lam") if a not in args]
    t.leave(f"{theirs} does not read it", *unread)
    rounds, groups = "rollout.dynamic_sampling_rounds", "algorithm.filter_groups"
    if t.take(f"{groups}.enable", False):
        most = t.number(f"{groups}.max_num_gen_batches", 0)
        remark = (
            "" if most else "no limit there; the batch is filled with other groups after the last round here"
        )
        t.put(rounds, max(2, most or 10), f"{groups}.max_num_gen_batches", f"{groups}.enable", remark=remark)
        t.leave("groups are told apart by their total reward here", f"{groups}.metric")
        t.leave("further prompts are drawn as they are needed", f"{groups}.max_inflight_gen_batches")
    else:
        t.leave_all("filter_groups.enable is false", f"{groups}.")
    return str(estimator)


def _kl(t: Translation) -> None:
    use, coefficient = f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef"
    kind = f"{ACTOR}.kl_loss_type"
    if t.take(use, False):
        t.put("update.kl_coef", t.number(coefficient, 0.001), coefficient, use)
        ours = value_for("update.kl_estimator", t.take(kind, "low_var_kl")) or t.take(kind)
        t.put("update.kl_estimator", ours, kind)
    else:
        t.leave("use_kl_loss is false", coefficient, kind)
    control = "algorithm.kl_ctrl"
    if t.take("algorithm.use_kl_in_reward", False):
        t.move("reward.kl_coef", f"{control}.kl_coef", 0.001)
        if t.take(f"{control}.type", "fixed") == "adaptive":
            t.move("reward.kl_target", f"{control}.target_kl", 0.1)
            t.move("reward.kl_horizon", f"{control}.horizon", 10000)
        else:
            t.leave("kl_ctrl.type is fixed", f"{control}.target_kl", f"{control}.horizon")
    else:
        names = [name for name in t.given if name.startswith(f"{control}.")]
        t.leave("use_kl_in_reward is false", "algorithm.kl_penalty", *names)


def _correction(t: Translation) -> None:
    section = "algorithm.rollout_correction"
    level, threshold = t.take(f"{section}.rollout_is"), t.take(f"{section}.rollout_is_threshold", 2.0)
    if t.take(f"{section}.bypass_mode", False):
        t.put("update.old_logprobs", "rollout", f"{section}.bypass_mode")
        t.leave("with old log-probabilities of the sampler the ratio corrects", f"{section}.rollout_is")
    elif level in ("token", "sequence"):
        bounds = str(threshold).split("_")
        t.put("update.correction", "mask" if len(bounds) == 2 else "truncate", f"{section}.rollout_is")
        t.put("update.correction_cap", float(bounds[-1]), f"{section}.rollout_is_threshold")
        t.put("update.correction_level", level, f"{section}.rollout_is")
        if len(bounds) == 2:
            t.put("update.correction_floor", float(bounds[0]), f"{section}.rollout_is_threshold")
    elif level is None:
        t.leave("rollout_is is null", f"{section}.rollout_is_threshold")
    rejects = f"{section}.rollout_rs"
    if t.take(rejects) is None:
        t.leave("rollout_rs is null", f"{rejects}_threshold")
    else:
        t.leave("here it is update.reject, whose rules have other names", rejects, f"{rejects}_threshold")
    t.leave(
        "it is read in bypass mode, where it chooses the loss; here update.loss does", f"{section}.loss_type"
    )


def _batches(t: Translation, devices: int) -> None:
    dynamic = t.take(f"{ACTOR}.use_dynamic_bsz", False)
    _micro(t, "update", ACTOR, "ppo_micro_batch_size", "ppo_max_token_len_per_gpu", dynamic, devices)
    for role in (REF, ROLLOUT):
        own = t.take(f"{role}.log_prob_use_dynamic_bsz", dynamic)
        names = ("log_prob_micro_batch_size", "log_prob_max_token_len_per_gpu")
        if not {"logprob.micro_batch_size", "logprob.max_tokens_per_device"} & t.lines.keys():
            _micro(t, "logprob", role, *names, own, devices)
        else:
            why = "one size for old and reference log-probabilities here, and it has its value above"
            t.leave(why, *(f"{role}.{name}{end}" for name in names for end in ("", "_per_gpu")))
    ulysses = f"{ACTOR}.ulysses_sequence_parallel_size"
    if (ranks := t.number(ulysses, 1)) > 1:
        t.put("mesh", {"fsdp": -1, "cp": ranks}, ulysses)


def _micro(
    t: Translation, section: str, role: str, rows: str, tokens: str, dynamic: object, devices: int
) -> None:
    """The size of micro-batches of one pass: a token budget if it is `dynamic`, else sequences."""
    old, new, budget = f"{role}.{rows}", f"{role}.{rows}_per_gpu", f"{role}.{tokens}"
    if dynamic:
        if t.given.get(budget) is not None:
            t.move(f"{section}.max_tokens_per_device", budget)
        t.leave("use_dynamic_bsz is true: the token budget counts", old, new)
        return
    if (size := t.number(new)) is not None:
        t.put(f"{section}.micro_batch_size", size, new)
        t.take(old)
    elif (size := t.number(old)) is not None:
        remark = f"of one device; {size} sequences of {devices} devices there"
        t.put(f"{section}.micro_batch_size", max(1, size // devices), old, remark=remark)
    t.leave("use_dynamic_bsz is false: sequences are counted", budget)


def _optimizer(t: Translation, theirs: str, ours: str, role: str) -> None:
    rate = t.number(f"{theirs}.lr", 1e-6 if ours == "optimizer" else 1e-5)
    t.put(f"{ours}.learning_rate", rate, f"{theirs}.lr")
    t.move(f"{ours}.weight_decay", f"{theirs}.weight_decay", 0.01)
    if betas := t.take(f"{theirs}.betas"):
        t.put(f"{ours}.beta1", betas[0], f"{theirs}.betas")
        t.put(f"{ours}.beta2", betas[1], f"{theirs}.betas")
    old = f"{role}.grad_clip"
    clip = t.number(f"{theirs}.clip_grad", t.number(old, 1.0))
    t.put(f"{ours}.max_grad_norm", clip or None, f"{theirs}.clip_grad", old)
    schedule, old = f"{theirs}.lr_scheduler_type", f"{theirs}.warmup_style"
    name = t.take(schedule, t.take(old, "constant"))
    t.put(f"{ours}.schedule", name, schedule, old)
    if name == "cosine":
        final = t.number(f"{theirs}.min_lr_ratio", 0.0)
        t.put(f"{ours}.final_fraction", final, f"{theirs}.min_lr_ratio")
    t.leave("it belongs to the cosine", f"{theirs}.min_lr_ratio", f"{theirs}.num_cycles")
    warmup, ratio = f"{theirs}.lr_warmup_steps", f"{theirs}.lr_warmup_steps_ratio"
    per_step = _optimizer_steps(t, role)
    total = t.number("trainer.total_training_steps")
    steps, fraction = t.number(warmup, -1), t.number(ratio, 0.0)
    counted = f"optimizer steps, {per_step} in a training step; training steps there"
    if steps > 0:
        t.put(f"{ours}.warmup_steps", steps * per_step, warmup, remark=counted if per_step > 1 else "")
        t.leave("lr_warmup_steps counts", ratio)
    elif fraction and total:
        t.put(f"{ours}.warmup_steps", round(fraction * total) * per_step, ratio, remark=counted)
    elif fraction:
        t.leave(_FRACTION.format(ours), ratio)
    t.take(f"{theirs}.total_training_steps")
    if (kind := t.take(f"{theirs}.optimizer", "AdamW")) != "AdamW":
        t.leave(f"{ours}.name is {OPTIMIZERS} here, not {kind}", f"{theirs}.optimizer")


def _optimizer_steps(t: Translation, role: str) -> int:
    """Optimizer steps of the policy or the critic in a training step; the critic's sizes are the policy's."""

    def of_role(name: str) -> Any:
        return t.given.get(f"{role}.{name}") or t.given.get(f"{ACTOR}.{name}")

    batch = t.given.get("data.train_batch_size") or DEFAULTS["data.train_batch_size"]
    mini = of_role("ppo_mini_batch_size") or DEFAULTS[f"{ACTOR}.ppo_mini_batch_size"]
    return max(1, round(batch / mini)) * (of_role("ppo_epochs") or 1)


def _critic(t: Translation, devices: int) -> None:
    path = t.take("critic.model.path")
    if path is not None:
        t.put("critic.path", path, "critic.model.path")
    dynamic = t.take("critic.use_dynamic_bsz", t.given.get(f"{ACTOR}.use_dynamic_bsz", False))
    _micro(t, "critic", "critic", "ppo_micro_batch_size", "ppo_max_token_len_per_gpu", dynamic, devices)
    for name in ("forward_micro_batch_size", "forward_micro_batch_size_per_gpu"):
        t.leave("it is twice critic.micro_batch_size here", f"critic.{name}")
    if not dynamic:
        t.leave("use_dynamic_bsz is false: sequences are counted", "critic.forward_max_token_len_per_gpu")
    t.leave("the critic's loss is a mean over tokens here", "critic.loss_agg_mode")
    rests = t.number("trainer.critic_warmup", 0)
    remark = "the policy's first step is the one of this number there" * (rests > 0)
    t.put("critic.warmup_steps", max(0, rests - 1), "trainer.critic_warmup", remark=remark)
    _optimizer(t, "critic.optim", "critic_optimizer", "critic")


def _run(t: Translation) -> None:
    most = "trainer.total_training_steps"
    if t.number(most) is not None:
        t.put("run.steps", t.given[most], most)
        t.leave(
            "total_training_steps counts; verl ends sooner, after total_epochs, if the data are fewer",
            "trainer.total_epochs",
        )
    for name, ours, never in (
        ("trainer.test_freq", "eval.every_steps", "only before and after training here"),
        ("trainer.save_freq", "checkpoint.every_steps", "only after the last step here"),
    ):
        every = t.number(name, -1)
        remark = f"never there; {never}" if every <= 0 and name in t.given else ""
        t.put(ours, max(every, 0), name, remark=remark)
    dtype, stored = f"{ACTOR}.fsdp_config.dtype", f"{ACTOR}.fsdp_config.model_dtype"
    t.put("model.dtype", _DTYPES.get(str(t.take(dtype, "bfloat16")), "bfloat16"), dtype)
    t.put("model.param_dtype", _DTYPES.get(str(t.take(stored, "fp32")), "float32"), stored)
    remat = "actor_rollout_ref.model.enable_gradient_checkpointing"
    t.put("model.remat", "layer" if t.take(remat, True) else "none", remat)
    for name, ours in (("param_offload", "offload.policy"), ("optimizer_offload", "offload.optimizer")):
        theirs = f"{ACTOR}.fsdp_config.{name}"
        t.put(ours, bool(t.take(theirs, False)), theirs)
    loggers = t.take("trainer.logger", [])
    loggers = [loggers] if isinstance(loggers, str) else loggers
    if "wandb" in loggers:
        t.put("logging.wandb", "online", "trainer.logger")
    if "tensorboard" in loggers:
        t.put("logging.tensorboard", True, "trainer.logger")
    others = [name for name in loggers if name not in ("console", "wandb", "tensorboard")]
    if others:
        t.left["trainer.logger"] = f"no logger here for {', '.join(map(str, others))}"
    t.leave("a run is a folder here: run.dir holds all runs, run.name is one", "trainer.default_local_dir")
