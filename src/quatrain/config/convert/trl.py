"""What a configuration of TRL (1.16.0, `trl grpo` or `GRPOConfig`, `RLOOConfig`) means where values decide.

All other keys go by the table in `config/aliases.py`. TRL counts completions per device, and optimizer steps;
quatrain counts prompts over all devices, and rollout batches.
"""

import math
from typing import Any

from quatrain.config.aliases import value_for
from quatrain.config.convert.translation import OPTIMIZERS, Translation, put_lora_targets

DEFAULTS = {"num_generations": 8, "max_completion_length": 512, "num_train_epochs": 3.0, "seed": 42}
"""TRL's defaults that differ from ours, of keys that the table of names translates."""
_REWARDS = {
    **dict.fromkeys(("accuracy", "accuracy_reward"), "correct"),  # the first as open-r1 calls it
    "reasoning_accuracy_reward": "correct",
    "think_format_reward": "format",
    "get_soft_overlong_punishment": "overlong",
}
_OVERLONG = (1280, 256)
"""Limit and buffer, in tokens, of `get_soft_overlong_punishment` as `trl grpo` makes it."""
_SCHEDULES = {
    **dict.fromkeys(("constant", "constant_with_warmup"), "constant"),
    **dict.fromkeys(("linear", "cosine"), "linear"),
    **dict.fromkeys(("cosine", "cosine_with_min_lr"), "cosine"),
}
_PEFT = ["q_proj", "v_proj"]
"""peft's default of `target_modules` for Llama, Mistral, Qwen, Gemma and others."""
_VLLM = (
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap",
)


def translate(t: Translation, devices: int | None) -> None:
    """Puts what depends on values into `t`; `devices` is null where nobody says how many there are."""
    put_model(t)
    put_data(t, "data.train", "data.eval")
    per_batch = _batches(t, devices)
    _rollout(t)
    _rewards(t)
    _loss(t)
    put_optimizer(t, "optimizer", 1e-6)
    put_run(t, per_batch, "run.steps", "eval/reward")


def put_model(t: Translation) -> None:
    """Model, dtypes, adapters and seed, which all trainers of TRL have in the same keys."""
    dtype = t.take("dtype", t.take("torch_dtype", "float32"))
    bf16 = t.take("bf16")
    if bf16 is None:
        bf16 = not t.take("fp16", False)
    if dtype in ("bfloat16", "float32"):
        t.put("model.param_dtype", dtype, "dtype", "torch_dtype")
    else:
        t.leave("parameters are float32 or bfloat16 here", "dtype", "torch_dtype")
    compute = "bfloat16" if bf16 or dtype == "bfloat16" else "float32"
    t.put("model.dtype", compute, "bf16")
    t.leave("activations are float32 or bfloat16 here", "fp16")
    t.put(
        "model.remat", "layer" if t.take("gradient_checkpointing", True) else "none", "gradient_checkpointing"
    )
    if t.take("use_peft", False):
        rank, alpha = t.number("lora_r", 16), t.number("lora_alpha", 32)
        t.put("lora.rank", rank, "lora_r", "use_peft")
        if t.take("use_rslora", False):
            remark = f"{alpha} x sqrt({rank}): what adapters add is multiplied by alpha / sqrt(rank) there"
            t.put("lora.alpha", alpha * math.sqrt(rank), "lora_alpha", "use_rslora", remark=remark)
        else:
            t.put("lora.alpha", alpha, "lora_alpha")
        put_lora_targets(t, "lora_target_modules", _PEFT)
        t.leave("adapters have no dropout here", "lora_dropout")
    else:
        t.leave_all("use_peft is false", "lora_")
    t.copy_mapping("data.chat_template_kwargs", "chat_template_kwargs")
    t.move("seed", "seed", 42)


def put_data(t: Translation, trained: str, evaluated: str) -> None:
    """The data sets, as the values of our keys `trained` and `evaluated`."""
    train, test = t.take("dataset_train_split", "train"), t.take("dataset_test_split", "test")
    evaluates = t.take("eval_strategy", "no") not in ("no", False)
    if mixture := t.take("datasets"):
        entries = [place(each.get("path"), each.get("name"), each.get("split", "train")) for each in mixture]
        t.put(trained, entries[0] if len(entries) == 1 else entries, "datasets")
        t.leave(
            "only path, name and split of each are read here",
            *(["datasets"] * any(_more(e) for e in mixture)),
        )
    elif (path := t.take("dataset_name")) is not None:
        config = t.take("dataset_config")
        t.put(trained, place(path, config, train), "dataset_name", "dataset_config")
        if evaluates:
            t.put(evaluated, place(path, config, test), "dataset_name", "dataset_test_split")


def place(path: Any, config: Any, split: Any) -> str:
    """A data set as `owner/name:config:split`; the name alone for a file, and where all is as usual."""
    if split == "train" and not config:
        return str(path)
    return f"{path}:{config or 'default'}" + (f":{split}" if split != "train" else "")


def _more(entry: dict[str, Any]) -> bool:
    return any(entry.get(name) for name in ("data_files", "data_dir", "columns", "fraction"))


def devices_of(t: Translation, devices: int | None) -> tuple[int, str]:
    """The devices of the run, 1 where nobody says how many, and how a remark names them."""
    known = t.number("num_processes", devices)
    count = known or 1
    return count, f"{count} device{'s' * (count > 1)}" + ("" if known else " (give others with --devices)")


def _batches(t: Translation, devices: int | None) -> float:
    """Optimizer steps per rollout batch, after batch sizes in completions are put as prompts."""
    count, said = devices_of(t, devices)
    n = t.number("num_generations", 2 if t.library == "TRL (RLOO)" else 8)
    t.put("rollout.n", n, "num_generations")
    rows = t.number("per_device_train_batch_size", 8)
    accumulation = t.number("gradient_accumulation_steps", 1)
    generation, steps = t.number("generation_batch_size"), t.number("steps_per_generation")
    if generation is None:
        generation = rows * count * (steps or accumulation)
        product = f"{rows} completions x {count} devices x {steps or accumulation} steps"
    else:
        product = f"{generation} completions"
    step = rows * count * accumulation
    if generation < step:  # an optimizer step accumulates over several generations, all of the same weights
        generation = step
        product = f"{rows} completions x {count} devices x {accumulation} steps of an optimizer step"
    batch, mini = (max(1, math.ceil(size / n)) for size in (generation, step))
    even = "" if generation % n == 0 and step % n == 0 else "; rounded up"
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    sizes = ("generation_batch_size", "steps_per_generation")
    remark = f"prompts: {product} / {n} completions of a prompt, on {said}{even}"
    t.put("data.batch_size", batch, *names, *sizes, remark=remark)
    if mini < batch:
        remark = f"prompts: {rows} x {count} x {accumulation} completions / {n}{even}"
        t.put("update.mini_batch_size", mini, *names, remark=remark)
    t.put("update.micro_batch_size", rows, "per_device_train_batch_size", remark="sequences, there as here")
    epochs = t.number("num_iterations", 1)
    t.put("update.epochs", epochs, "num_iterations")
    return max(1.0, generation / step) * epochs


def _rollout(t: Translation) -> None:
    if t.number(longest := "max_prompt_length") is not None:
        t.put("data.max_prompt_length", t.given[longest], longest)
        remark = "TRL, which had the key before version 1, cut longer prompts on the left"
        t.put("data.on_long_prompt", "truncate_left", longest, remark=remark)
    t.put("rollout.top_k", max(0, t.number("top_k", 0)), "top_k")
    t.move("rollout.min_p", "min_p", 0.0)
    section = "generation_kwargs"
    extra = t.mapping(section)
    ours = {
        **{name: name for name in ("stop", "temperature", "top_p", "top_k", "min_p")},
        "stop_strings": "stop",
    }
    for name, value in extra.items():
        place = section if section in t.given else f"{section}.{name}"
        if name not in ours:
            t.leave("of these, keys of rollout have the stop strings, the temperature and the filters", place)
        elif ours[name] == "stop":
            t.put("rollout.stop", [value] if isinstance(value, str) else value, place)
        else:
            t.put(f"rollout.{name}", value, place, remark="it comes before the key of its own in TRL")
    vllm, mode = t.take("use_vllm", False), t.take("vllm_mode", "colocate")
    server = bool(vllm) and mode == "server"
    if server:
        host, port = t.take("vllm_server_host", "0.0.0.0"), t.take("vllm_server_port", 8000)
        url = t.take("vllm_server_base_url", f"http://{host.replace('0.0.0.0', 'localhost')}:{port}")
        remark = "a vLLM server of its own, or `quatrain serve`, not `trl vllm-serve`: docs/servers.md"
        t.put(
            "rollout.servers", [url], "vllm_server_base_url", "vllm_mode", "vllm_server_port", remark=remark
        )
        t.take("vllm_server_host")
    elif vllm and mode == "colocate":
        t.leave(
            "the default here: quatrain's own engine samples on the devices of training",
            "use_vllm",
            "vllm_mode",
        )
    else:
        t.leave("use_vllm is false", "vllm_mode")
    if not server:
        t.leave_all("no server samples", "vllm_server_")
    parallel = t.number("vllm_tensor_parallel_size", 1)
    if parallel > 1 and vllm and not server:
        t.put("rollout.mesh", f"-1,1,{parallel}", "vllm_tensor_parallel_size")
    corrects = t.take("vllm_importance_sampling_correction", True)
    if not server:
        t.leave("quatrain's own engine needs no correction while rollout.max_staleness is 0", *_VLLM)
    elif corrects:
        level, kind = str(t.take("vllm_importance_sampling_mode", "sequence_mask")).split("_")
        t.put("update.correction", kind, "vllm_importance_sampling_mode", _VLLM[0])
        t.put("update.correction_level", level, "vllm_importance_sampling_mode")
        cap = t.number(_VLLM[2], t.number(_VLLM[4], 3.0))
        t.put("update.correction_cap", cap, _VLLM[2], _VLLM[4])
        if kind == "mask":
            t.move("update.correction_floor", _VLLM[3], 0.0)
    else:
        t.put("update.correction", "none", _VLLM[0])


def _rewards(t: Translation) -> None:
    functions = t.take("reward_funcs", [])
    functions = [functions] if isinstance(functions, str) else functions
    model = t.take("reward_model_name_or_path")
    weights = t.take("reward_weights") or []
    ours = [f"model:{model}"] if model else []
    names = [
        name for name in ("reward_model_name_or_path", "reward_funcs", "reward_weights") if t.given.get(name)
    ]
    remarks = []
    for name in functions:
        if "/" in str(name):
            ours.append(f"model:{name}")
        elif "." in str(name):  # package.module.function
            ours.append(":".join(str(name).rsplit(".", 1)))
        else:
            ours.append(_REWARDS.get(name, str(name)))
        if _REWARDS.get(name) == "correct":
            t.put(
                "data.answer_column", "solution", "reward_funcs", remark=f"{name} reads the column solution"
            )
        if name == "think_format_reward":
            remarks.append(
                "`format` also wants <answer>…</answer>; think_format_reward wants <think>…</think>"
            )
        if name == "get_soft_overlong_punishment":
            t.put("reward.overlong_limit", _OVERLONG[0], "reward_funcs")
            t.put("reward.overlong_buffer", _OVERLONG[1], "reward_funcs")
    if ours:
        weighted: dict[str, float] = {}
        for name, weight in zip(ours, [*weights, *[1.0] * len(ours)], strict=False):
            weighted[name] = weighted.get(name, 0.0) + weight
        t.put("reward.functions", weighted, *names, remark="; ".join(remarks))


def _loss(t: Translation) -> None:
    rloo = t.library == "TRL (RLOO)"
    theirs = t.take("loss_type", "dapo")
    sequence = t.take("importance_sampling_level", "token") == "sequence"
    low = t.number("epsilon", 0.2)
    high = t.number("epsilon_high", low)
    if rloo:
        t.put("advantage.estimator", "rloo", "num_generations")
        t.put(
            "update.loss",
            "reinforce",
            "epsilon",
            remark="its clipping acts with several optimizer steps alone",
        )
        t.put("update.loss_aggregation", "seq_mean_token_sum", "epsilon")
        t.move("reward.kl_coef", "beta", 0.05)
        t.leave(
            "TRL's RLOO has other bounds; see docs/coming_from.md", "epsilon_high", "normalize_advantages"
        )
        return
    remark = ""
    if theirs == "dapo":
        remark = (
            "loss_type dapo is an aggregation, the mean over tokens, and not the algorithm DAPO, which also "
            "has update.clip_high 0.28 and rollout.dynamic_sampling_rounds 2 or more"
        )
    aggregation = value_for("update.loss_aggregation", theirs)
    if aggregation:
        t.put("update.loss_aggregation", aggregation, "loss_type", remark=remark)
    args: dict[str, float] = {}
    of_loss = ""
    if sequence or theirs == "luspo":
        loss, args = "gspo", {"clip_low": low, "clip_high": high}
    elif theirs == "cispo":
        # TRL bounds the ratio itself; ours are distances from 1, and there is no lower bound.
        loss, args = "cispo", {"clip_low": 1.0, "clip_high": max(0.0, high - 1)}
        if high < 1:
            of_loss = f"TRL bounds the weight of a token at {high:g}; no bound here is below 1, so it is 1"
    elif theirs == "sapo":
        places = {"tau_pos": ("sapo_temperature_pos", 1.0), "tau_neg": ("sapo_temperature_neg", 1.05)}
        loss, args = "sapo", {name: t.number(*place) for name, place in places.items()}
    elif aggregation:
        loss = "ppo_clip"
    else:
        loss = ""
        t.leave("no such loss here; update.loss may be a function of your own", "loss_type")
    if loss == "ppo_clip":
        t.put("update.clip_low", low, "epsilon")
        t.put(
            "update.clip_high", high, "epsilon_high", *(() if t.given.get("epsilon_high") else ("epsilon",))
        )
        t.move("update.dual_clip", "delta")
    elif loss:
        t.put("update.loss", loss, "loss_type", "importance_sampling_level", remark=of_loss)
        names = (
            ("sapo_temperature_pos", "sapo_temperature_neg")
            if loss == "sapo"
            else ("epsilon", "epsilon_high")
        )
        t.put("update.loss_args", args, *names)
    t.leave(
        f"update.loss {loss or 'of another kind'} does not read it",
        "sapo_temperature_pos",
        "sapo_temperature_neg",
    )
    _advantages(t)
    if beta := t.number("beta", 0.0):
        t.put("update.kl_coef", beta, "beta")
        corrected = t.take("use_bias_correction_kl", True)
        t.put("update.kl_estimator", "k3_straight" if corrected else "k3", "use_bias_correction_kl")
    else:
        t.put(
            "update.kl_coef",
            0.0,
            "beta",
            remark="no reference is loaded, there as here" * ("beta" in t.given),
        )
        t.leave("beta is 0", "use_bias_correction_kl")
    if not t.take("sync_ref_model", False):
        t.leave("sync_ref_model is false", "ref_model_sync_steps", "ref_model_mixup_alpha")
    else:
        t.move("update.reference_sync_steps", "ref_model_sync_steps", 512)
        t.move("update.reference_mixup", "ref_model_mixup_alpha", 0.6)


def _advantages(t: Translation) -> None:
    scale = t.take("scale_rewards", "group")
    scale = {True: "group", False: "none", "True": "group", "False": "none"}.get(scale, scale)
    if t.take("multi_objective_aggregation", "sum_then_normalize") == "normalize_then_sum":
        t.put("advantage.estimator", "gdpo", "multi_objective_aggregation")
        t.leave("gdpo divides by the standard deviation of each function in its group", "scale_rewards")
    elif scale != "group":
        remark = "without it, and with loss_type dr_grpo, this is dr_grpo" if scale == "none" else ""
        t.put("advantage.scale", scale, "scale_rewards", remark=remark)
    else:
        t.put("advantage.scale", scale if "scale_rewards" in t.given else None, "scale_rewards")


def put_optimizer(t: Translation, section: str, rate: float) -> None:
    """The optimizer, whose learning rate (TRL's default is `rate`) and schedule are keys of our `section`."""
    t.move(f"{section}.learning_rate", "learning_rate", rate)
    scheduler = t.take("lr_scheduler_type", "linear")
    schedule = _SCHEDULES.get(scheduler)
    extra = t.take("lr_scheduler_kwargs") or t.mapping("lr_scheduler_kwargs")
    if schedule:
        t.put(f"{section}.schedule", schedule, "lr_scheduler_type")
        ends = f"lr_scheduler_kwargs.min_lr{'_rate' * ('min_lr_rate' in extra)}"
        last = extra.get("min_lr_rate")
        if last is None and extra.get("min_lr") is not None:
            last = round(extra["min_lr"] / t.number("learning_rate", rate), 9)
        if scheduler == "cosine_with_min_lr" and last is not None and section == "optimizer":
            t.put("optimizer.final_fraction", last, ends)
        elif last is not None:
            t.leave(f"{section}.schedule {schedule} ends at 0 here", ends)
        others = (f"lr_scheduler_kwargs.{name}" for name in extra if not name.startswith("min_lr"))
        t.leave("a cosine is one half of a wave here, from the warm-up to the last step", *others)
    else:
        t.leave(f"{section}.schedule is constant, linear or cosine here", "lr_scheduler_type")
    warmup, ratio = t.number("warmup_steps", 0), t.number("warmup_ratio", 0.0)
    fraction = warmup if 0 < warmup < 1 else ratio if not warmup else 0
    total = t.number("max_steps", -1)
    if scheduler == "constant":
        t.put(f"{section}.warmup_steps", 0, "lr_scheduler_type")
        t.leave("only constant_with_warmup has a warm-up in TRL", "warmup_ratio", "warmup_steps")
    elif fraction and total > 0:
        remark = f"{fraction} of {total} optimizer steps"
        t.put(
            f"{section}.warmup_steps",
            math.ceil(fraction * total),
            "warmup_ratio",
            "warmup_steps",
            remark=remark,
        )
    elif fraction:
        t.leave(
            f"a fraction of all optimizer steps there; give {section}.warmup_steps",
            "warmup_ratio",
            "warmup_steps",
        )
    else:
        t.put(f"{section}.warmup_steps", warmup, "warmup_steps")
    kind = str(t.take("optim", "adamw_torch"))
    name = next((each for each in ("adamw", "lion", "sgd", "adafactor") if kind.startswith(each)), None)
    if "8bit" in kind or "4bit" in kind:
        t.leave("no moments of 8 bits here; optimizer.state_dtype bfloat16 halves the first one", "optim")
    elif name is None:
        t.leave(f"optimizer.name is {OPTIMIZERS} here", "optim")
    else:
        t.put("optimizer.name", name, "optim")
        if name in ("sgd", "adafactor"):  # transformers' `Trainer` gives these no momentum
            t.put("optimizer.beta1", 0.0, "optim")
            t.leave(f"{name} does not read it", "adam_beta1")
    t.put("optimizer.max_grad_norm", t.number("max_grad_norm", 1.0) or None, "max_grad_norm")


def put_run(t: Translation, per_batch: float, steps_key: str, best: str) -> None:
    """Steps, evaluations, checkpoints and logs; `best` is the metric in place of `metric_for_best_model`.

    Counts of optimizer steps become counts of training steps, of `per_batch` optimizer steps each.
    """
    counted = f"training steps, of {per_batch:g} optimizer steps each; optimizer steps there"

    def put(key: str, steps: float, *names: str) -> None:
        remark = counted if per_batch != 1 else ""
        t.put(key, max(1, round(steps / per_batch)), *names, remark=remark)

    if (most := t.number("max_steps", -1)) > 0:
        put(steps_key, most, "max_steps")
        t.leave("max_steps counts", "num_train_epochs")
    strategy = t.take("eval_strategy", "no")
    every = t.number("eval_steps", t.number("logging_steps", 10))
    if strategy == "steps" and every >= 1:
        put("eval.every_steps", every, "eval_steps", "eval_strategy")
    elif strategy in ("no", False):
        t.put("eval.every_steps", 0, "eval_strategy")
        t.leave("eval_strategy is no", "eval_steps")
    else:
        t.leave("give eval.every_steps, a number of training steps", "eval_strategy", "eval_steps")
    t.put("eval.before", bool(t.take("eval_on_start", False)), "eval_on_start")
    strategy, every = t.take("save_strategy", "steps"), t.number("save_steps", 500)
    if strategy == "steps" and every >= 1:
        put("checkpoint.every_steps", every, "save_steps")
    elif strategy in ("no", False):
        t.put("checkpoint.every_steps", 0, "save_strategy", remark="a checkpoint after the last step")
        t.leave("save_strategy is no", "save_steps")
    else:
        t.leave("give checkpoint.every_steps, a number of training steps", "save_strategy", "save_steps")
    if not t.take("load_best_model_at_end", False):
        t.leave("load_best_model_at_end is false", "greater_is_better", "metric_for_best_model")
    elif (metric := t.take("metric_for_best_model")) is not None:
        t.put("checkpoint.best_metric", best, "metric_for_best_model", remark=f"{metric} there")
    report = t.take("report_to", [])
    report = [report] if isinstance(report, str) else report
    for name, key, value in (
        ("wandb", "logging.wandb", "online"),
        ("tensorboard", "logging.tensorboard", True),
        ("trackio", "logging.trackio", t.take("project", "quatrain")),
    ):
        if name in report or "all" in report:
            t.put(key, value, "report_to")
    if t.take("log_completions", False) is False:
        t.leave("samples are always written to samples/ here", "log_completions")
    else:
        t.leave("on by default here: logging.samples_per_step", "log_completions")
    if t.take("push_to_hub", False):
        t.put("hub.push", t.take("hub_model_id"), "hub_model_id", "push_to_hub")
        t.put("hub.private", bool(t.take("hub_private_repo", False)), "hub_private_repo")
    else:
        t.leave_all("push_to_hub is false", "hub_")
