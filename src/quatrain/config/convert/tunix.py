"""What a configuration of Tunix (0.1.7, the YAML of its command line) means where values decide.

All other keys go by the table in `config/aliases.py`. Tunix counts prompts over all devices, in micro-batches
too, and optimizer steps.
"""

import math
import re
from typing import Any

from quatrain.config.aliases import value_for
from quatrain.config.convert.translation import OPTIMIZERS, Translation, put_lora_targets

DEFAULTS: dict[str, Any] = {}
TRAINING = "rl_training_config"
ALGORITHMS = ("grpo_config", "agentic_grpo_config", "ppo_config")
_FLAT = {"num_generations", "beta", "epsilon", "kl_loss_mode", "loss_algo", "policy_loss_fn", "loss_agg_mode"}
_AXES = {"fsdp": "fsdp", "tp": "tp", "dp": "dp", "data": "dp", "expert": "ep", "ep": "ep", "sp": "cp"}


def translate(t: Translation, devices: int | None) -> None:
    """Puts what depends on values into `t`; `devices` is read from the mesh where it is null."""
    t.given = _as_sections(t.given)
    actor = _model(t)
    shards = _mesh(t, actor)
    algorithm = _algorithm(t)
    per_batch = _batches(t, algorithm, shards)
    _rollout(t)
    _loss(t, algorithm)
    _optimizer(t)
    _run(t, per_batch)


def _as_sections(given: Any) -> dict[str, Any]:
    """Flat keys of `GRPOConfig` get its section; those of a plain `training_config` that of RL."""
    flat = not any(name.startswith(ALGORITHMS) for name in given)
    sections = {
        (f"grpo_config.{name}" if flat and name in _FLAT else name): value for name, value in given.items()
    }
    old = {name: value for name, value in sections.items() if name.startswith("training_config.")}
    return {f"rl_{name}": value for name, value in old.items()} | {
        name: value for name, value in sections.items() if name not in old
    }


def _model(t: Translation) -> str:
    """The section of the trained model."""
    actor = "actor_model_config"
    role = next(
        (
            role
            for role in (actor, "reference_model_config", "model_config", "rollout_model_config")
            if t.given.get(f"{role}.model_id") or t.given.get(f"{role}.model_name")
        ),
        actor,
    )
    source = t.take(f"{role}.model_source", "huggingface")
    name = f"{role}.model_id" if t.given.get(f"{role}.model_id") else f"{role}.model_name"
    model = t.take(name)
    if source in ("huggingface", "") and model:
        t.put("model.path", model, name)
    else:
        t.leave(f"from {source} there; give model.path, a folder or a model on the Hugging Face Hub", name)
    seed = f"{role}.rng_seed"
    t.move("seed", seed, 0)
    tokenizer = t.take("tokenizer_config.tokenizer_path")
    if tokenizer and tokenizer != model:
        t.put("model.tokenizer", tokenizer, "tokenizer_config.tokenizer_path")
    rank = t.number(f"{actor}.lora_config.rank", 0)
    if rank:
        t.put("lora.rank", rank, f"{actor}.lora_config.rank")
        t.move("lora.alpha", f"{actor}.lora_config.alpha", rank)
        put_lora_targets(t, f"{actor}.lora_config.module_path")
    roles = ("reference_model_config", "rollout_model_config", "model_config", "critic_model_config", actor)
    for other in roles:
        names = [n for n in t.given if n.startswith(f"{other}.") and n not in t.taken and ".mesh." not in n]
        t.leave("one model trains and samples here, model.path, and it is its own reference", *names)
    return actor


def _mesh(t: Translation, actor: str) -> int:
    """Data shards of the trained model's mesh, 1 if the file has none."""
    shape, axes = f"{actor}.mesh.shape", f"{actor}.mesh.axis_names"
    sizes = [int(size) for size in re.findall(r"-?\d+", str(t.take(shape, "")))]
    names = re.findall(r"\w+", str(t.take(axes, "")))
    mesh = {_AXES[name]: size for name, size in zip(names, sizes, strict=False) if name in _AXES}
    if mesh and len(mesh) == len(sizes):
        t.put("mesh", mesh, shape, axes)
    else:
        t.leave("axes here are dp, fsdp, tp, cp and ep: mesh", shape, axes)
    others = [name for name in t.given if ".mesh." in name and name not in (shape, axes)]
    differ = [n for n in others if n.endswith(".shape") and t.given[n] != t.given.get(shape)]
    why = "devices of their own are placement.rollout, .reference and .critic, and their meshes rollout.mesh"
    t.leave(why if differ else "the mesh of training serves every role here", *others)
    return math.prod(size for axis, size in mesh.items() if axis in ("dp", "fsdp", "ep") and size > 0)


def _algorithm(t: Translation) -> str:
    """The section of the algorithm: GRPO's, unless the file has PPO's alone."""
    inside = {section for section in ALGORITHMS for name in t.given if name.startswith(f"{section}.")}
    mode = t.take("training_mode")
    if mode == "agentic_grpo" and "agentic_grpo_config" in inside:
        return "agentic_grpo_config"
    chosen = next((section for section in ALGORITHMS if section in inside), "grpo_config")
    for section in inside - {chosen}:
        t.leave_all(f"{chosen} is read", f"{section}.")
    return chosen


def _batches(t: Translation, algorithm: str, shards: int) -> float:
    """Optimizer steps per rollout batch."""
    n = t.number(f"{algorithm}.num_generations", 1 if algorithm == "ppo_config" else 2)
    t.put("rollout.n", n, f"{algorithm}.num_generations")
    batch = t.number("batch_size", 1)
    t.put("data.batch_size", batch, "batch_size", remark="prompts, there as here")
    mini_name, micro_name = f"{TRAINING}.mini_batch_size", f"{TRAINING}.train_micro_batch_size"
    mini = t.number(mini_name, batch)
    t.put("update.mini_batch_size", mini if mini < batch else None, mini_name)
    if (micro := t.number(micro_name)) is not None:
        remark = f"sequences of one of {shards} data shards; {micro} prompts of {n} on all devices there"
        t.put("update.micro_batch_size", max(1, micro * n // shards), micro_name, remark=remark)
    scores = f"{TRAINING}.compute_logps_micro_batch_size"
    if (micro := t.number(scores)) is not None:
        t.put("logprob.micro_batch_size", max(1, micro * n // shards), scores)
    iterations = t.number(f"{algorithm}.num_iterations", 1)
    t.put("update.epochs", iterations, f"{algorithm}.num_iterations")
    return max(1, round(batch / mini)) * iterations


def _rollout(t: Translation) -> None:
    section = "rollout_config"
    names = (f"{section}.total_generation_steps", f"{section}.max_tokens_to_generate")
    t.put("rollout.max_new_tokens", t.number(names[0], t.number(names[1], 64)), *names)
    t.move("rollout.temperature", f"{section}.temperature", 0.9)
    t.move("rollout.top_p", f"{section}.top_p", 1.0)
    t.put("rollout.top_k", max(0, t.number(f"{section}.top_k", 0)), f"{section}.top_k")
    t.move("data.max_prompt_length", f"{section}.max_prompt_length", 64)
    dataset, source = t.take("dataset_name"), t.take("data_source", "tfds")
    if dataset == "gsm8k":
        remark = "the copy on the Hugging Face Hub; its column question becomes the prompt"
        t.put("data.train", "openai/gsm8k:main", "dataset_name", remark=remark)
        t.put("data.question_column", "question", "dataset_name")
    elif dataset and ("/" in dataset or dataset.endswith((".json", ".jsonl", ".parquet", ".csv"))):
        t.put("data.train", dataset, "dataset_name", "data_source")
    else:
        t.leave(
            f"from {source} there; give data.train, a file or a data set of the Hub",
            "dataset_name",
            "data_source",
        )
    functions = t.take("reward_functions", [])
    if functions:
        t.leave(
            "every function of the file there; name each in reward.functions, as file.py:function: 1.0",
            "reward_functions",
        )


def _loss(t: Translation, algorithm: str) -> None:
    def place(name: str) -> str:
        return f"{algorithm}.{name}"

    if algorithm == "ppo_config":
        t.put("advantage.estimator", "gae", place("gae_lambda"))
        args = {"gamma": t.number(place("gamma"), 1.0), "lam": t.number(place("gae_lambda"), 0.95)}
        t.put("advantage.args", args, place("gamma"), place("gae_lambda"))
        t.move("reward.kl_coef", place("beta"), 0.04)
        t.move("update.dual_clip", place("epsilon_c"))
        t.copy("update.entropy_coef", place("entropy_coef"))
        t.move("critic.clip_value", place("clip_range_value"), 0.2)
    else:
        theirs = t.take(place("advantage_estimator"), "grpo")
        t.put(
            "advantage.estimator",
            value_for("advantage.estimator", theirs) or theirs,
            place("advantage_estimator"),
        )
        aggregation = t.take(place("loss_agg_mode"), "sequence-mean-token-mean")
        ours = value_for("update.loss_aggregation", aggregation) or aggregation
        t.put("update.loss_aggregation", ours, place("loss_agg_mode"))
        _kl(t, place("beta"), place("kl_loss_mode"))
    both = t.number(place("epsilon"), 0.2)
    low, high = (t.number(place(f"epsilon_{side}"), both) for side in ("low", "high"))
    if t.take(place("loss_algo"), "grpo") in ("gspo-token", "gspo"):
        t.put("update.loss", "gspo", place("loss_algo"))
        t.put(
            "update.loss_args", {"clip_low": low, "clip_high": high}, place("epsilon"), place("epsilon_high")
        )
    else:
        t.put("update.clip_low", low, place("epsilon_low"), place("epsilon"))
        t.put("update.clip_high", high, place("epsilon_high"), place("epsilon"))


def _kl(t: Translation, beta: str, mode: str) -> None:
    t.move("update.kl_coef", beta, 0.04)
    if not t.number(beta, 0.04):
        t.leave("beta is 0", mode)
        return
    kind = t.take(mode, "kl")
    remark = "as a term of the loss, k1 has a gradient of mean 0: k3 is what is usually meant" * (
        kind == "kl"
    )
    t.put("update.kl_estimator", value_for("update.kl_estimator", kind) or kind, mode, remark=remark)


def _optimizer(t: Translation) -> None:
    for theirs, ours in (
        ("actor_optimizer_config", "optimizer"),
        ("critic_optimizer_config", "critic_optimizer"),
    ):
        at = f"{TRAINING}.{theirs}"
        if not any(name.startswith(f"{at}.") for name in t.given):
            continue
        schedule = str(t.take(f"{at}.schedule_type") or "")
        cosine, linear = "cosine" in schedule, "linear" in schedule
        # optax's schedules that decay without a warm-up have their peak at the beginning
        decays = cosine or linear
        first = ["init_value"] if decays and "warmup" not in schedule else []
        order = ["peak_value", "value", "learning_rate"]
        order = first + (order if cosine else order[::-1])
        rates = {name: rate for name in order if (rate := t.number(f"{at}.{name}")) is not None}
        used = next(iter(rates), None)
        if used is not None:
            t.put(f"{ours}.learning_rate", rates[used], f"{at}.{used}")
        unread = (f"{at}.{name}" for name in rates if name != used)
        t.leave(f"schedule_type {schedule or None} does not read it", *unread)
        if schedule:
            kind = "cosine" if cosine else "linear" if linear else "constant"
            t.put(f"{ours}.schedule", kind, f"{at}.schedule_type")
        end, part = t.number(f"{at}.end_value", 0.0), t.number(f"{at}.alpha", 0.0)
        if decays and (part or end) and used:
            fraction = part or round(end / rates[used], 9)
            t.put(f"{ours}.final_fraction", fraction, f"{at}.alpha" if part else f"{at}.end_value")
        elif part or end:
            t.leave("it belongs to a schedule that decays, with a peak", f"{at}.alpha", f"{at}.end_value")
        steps = round(t.number(f"{at}.warmup_steps", 0))
        t.put(f"{ours}.warmup_steps", steps, f"{at}.warmup_steps")
        t.leave("warmup_steps counts", *([f"{at}.warmup_ratio"] if steps else []))
        length = (f"{at}.decay_steps", f"{at}.transition_steps")
        t.leave("the schedule ends with the run here", *length)
        if used != "init_value":
            t.leave("the warm-up begins near 0 here", f"{at}.init_value")
        for name, key in (("b1", "beta1"), ("b2", "beta2"), ("eps", "eps")):
            t.copy(f"{ours}.{key}", f"{at}.{name}")
        t.move(f"{ours}.weight_decay", f"{at}.weight_decay", 0.0)
        t.move(f"{ours}.max_grad_norm", f"{at}.max_grad_norm")
        if (kind := t.take(f"{at}.opt_type", "adamw")) in ("adamw", "adam", "sgd", "lion"):
            t.put(f"{ours}.name", "adamw" if kind == "adam" else kind, f"{at}.opt_type")
        else:
            t.leave(f"{ours}.name is {OPTIMIZERS} here, not {kind}", f"{at}.opt_type")


def _run(t: Translation, per_batch: float) -> None:
    counted = f"training steps, of {per_batch:g} optimizer steps each; optimizer steps there"
    for theirs, ours in (
        (f"{TRAINING}.max_steps", "run.steps"),
        (f"{TRAINING}.eval_every_n_steps", "eval.every_steps"),
        (f"{TRAINING}.checkpointing_options.save_interval_steps", "checkpoint.every_steps"),
    ):
        if (steps := t.number(theirs)) is not None:
            remark = counted if per_batch != 1 else ""
            t.put(ours, max(1, round(steps / per_batch)), theirs, remark=remark)
    if "run.steps" in t.lines:
        t.leave("max_steps counts", "num_train_epochs")
    keep = f"{TRAINING}.checkpointing_options.max_to_keep"
    t.copy("checkpoint.keep", keep)
    t.leave("max_steps counts" if "run.steps" in t.lines else "give run.steps, or run.epochs", "num_batches")
    profiler = [name for name in t.given if name.startswith(f"{TRAINING}.profiler_options")]
    t.leave("here it is 'run.profile_steps', a list of training steps", *profiler)
    options = f"{TRAINING}.metrics_logging_options"
    if run_name := t.take(f"{options}.run_name"):
        t.put("run.name", run_name, f"{options}.run_name")
    project = t.take(f"{options}.project_name")
    if project:
        t.put("logging.wandb_project", project, f"{options}.project_name")
    t.leave("run.dir holds all runs, with logs and checkpoints", f"{options}.log_dir")
    t.leave("run.dir holds all runs, with logs and checkpoints", f"{TRAINING}.checkpoint_root_directory")
