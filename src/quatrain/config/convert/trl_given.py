"""What a configuration of TRL (1.16.0) for training on data that exist means: SFT, DPO, KTO, ORPO, rewards.

Keys that TRL's trainers share are in `trl.py`, all others in the table in `config/aliases.py`. TRL counts
rows per device, and cuts or drops what is longer than `max_length`.
"""

from collections.abc import Mapping
from typing import Any

from quatrain.config.convert.translation import Translation
from quatrain.config.convert.trl import devices_of, put_data, put_model, put_optimizer, put_run
from quatrain.config.sections.given import PREFERENCE_LOSSES

DEFAULTS: Mapping[str, Any] = {}
"""All of TRL's defaults that differ from ours depend on the trainer: `translate` puts them."""
KINDS = {"sft": "SFT", "dpo": "DPO", "rm": "rewards", "kto": "KTO", "orpo": "ORPO"}
"""Trainers as the end of `--from trl-KIND`, and as messages name them."""
_SIGNS = {
    "kto": {"desirable_weight", "undesirable_weight"},
    "rm": {"center_rewards_coefficient"},
    "sft": {
        *("assistant_only_loss", "completion_only_loss", "packing", "packing_strategy", "eval_packing"),
        *("dataset_text_field", "dataset_kwargs", "neftune_noise_alpha"),
    },
    "dpo": {
        *("precompute_ref_log_probs", "precompute_ref_batch_size", "f_divergence_type", "ld_alpha"),
        *("loss_weights", "use_weighting", "discopop_tau", "label_smoothing", "rpo_alpha"),
    },
}
_LOSSES_OF_DPO = {
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot"),
    *("aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm"),
}
_RATES = {"sft": 2e-5, "rm": 1e-4}
"""TRL's default learning rates; that of the others is 1e-6."""
_ROWS = ("per_device_train_batch_size", "gradient_accumulation_steps")
_REFERENCE = "the reference stays what it was at the start here"
_ONCE = "the reference's log-probabilities are always computed once here, before the first step"
_PADDING = "micro-batches hold rows of any length here, by update.max_tokens_per_device"


def kind_of(given: Mapping[str, object]) -> str | None:
    """Which of `KINDS` a file of TRL is for, by keys that no other trainer has; None if none says."""
    losses = given.get("loss_type")
    named = {losses} if isinstance(losses, str) else {*losses} if isinstance(losses, list) else set()
    if named & _LOSSES_OF_DPO:
        return "dpo"
    return next((kind for kind, signs in _SIGNS.items() if signs & given.keys()), None)


def translate(t: Translation, devices: int | None) -> None:
    """Puts what depends on values into `t`; `devices` is null where nobody says how many there are."""
    kind = next(kind for kind, name in KINDS.items() if t.library == f"TRL ({name})")
    task = kind if kind in ("sft", "rm") else "dpo"
    t.put("run.task", task)
    put_model(t)
    t.leave("there is no dropout here", "disable_dropout")
    put_data(t, f"{task}.data", f"{task}.eval")
    _batches(t, task, devices, pairs=kind not in ("sft", "kto"))
    together = f"prompt and answer together have {task}.max_length here"
    t.leave(together, "max_completion_length", "max_prompt_length")
    _lengths(t, task, drops=kind == "rm")
    {"sft": _supervised, "rm": _scores, "dpo": _preferences, "kto": _judged, "orpo": _odds}[kind](t)
    put_optimizer(t, task, _RATES.get(kind, 1e-6))
    if t.number("max_steps", -1) <= 0:
        t.move(f"{task}.epochs", "num_train_epochs", 3.0)
    metric = str(t.take("metric_for_best_model", "loss")).removeprefix("eval_").rpartition("/")[2]
    metrics = {"accurac": "eval/accuracy", "margin": "eval/margin"}
    best = next((ours for begin, ours in metrics.items() if metric.startswith(begin)), "eval/loss")
    put_run(t, 1, f"{task}.steps", best)
    if "checkpoint.best_metric" in t.lines:
        t.put("checkpoint.best_mode", "min" if best == "eval/loss" else "max", "greater_is_better")


def _batches(t: Translation, task: str, devices: int | None, *, pairs: bool) -> None:
    count, said = devices_of(t, devices)
    rows, accumulation = t.number(_ROWS[0], 8), t.number(_ROWS[1], 1)
    packed, longest = t.take("packing", False), t.number(*_longest(t))
    remark = f"{rows} x {count} x {accumulation}, on {said}"
    if packed:
        remark += (
            f"; packs of {longest or 'max_length'} tokens there, and rows here: for as many tokens in a "
            "step, multiply by the rows of a pack"
        )
    t.put(f"{task}.batch_size", rows * count * accumulation, *_ROWS, remark=remark)
    if packed and longest:
        remark = f"{rows} x {longest}: rows are packed whole, and none sees another"
        t.put("update.max_tokens_per_device", rows * longest, "packing", remark=remark)
        t.leave("rows are packed as they fit here, in no other order", "packing_strategy")
    else:
        remark = "sequences, two of a pair" if pairs else "sequences"
        t.put("update.micro_batch_size", rows * (1 + pairs), _ROWS[0], remark=remark)
    t.leave(_PADDING, "padding_free", "pad_to_multiple_of", "eval_packing", "per_device_eval_batch_size")


def _longest(t: Translation) -> tuple[str, int | None]:
    """The key of the longest row and its default; null, which cuts none, is none."""
    if "max_seq_length" in t.given and "max_length" not in t.given:  # its name before TRL 0.16
        return "max_seq_length", None
    return "max_length", None if "max_length" in t.given else 1024


def _lengths(t: Translation, task: str, *, drops: bool) -> None:
    name, default = _longest(t)
    longest = t.number(name, default)
    if longest is None:
        return
    t.put(f"{task}.max_length", longest, name)
    remark = "TRL drops such rows" if drops else "TRL cuts such rows"
    t.put(f"{task}.on_long", "skip" if drops else "truncate", name, remark=remark)
    if t.take("truncation_mode", "keep_start") != "keep_start":
        t.leave("what is cut here is the end of a row", "truncation_mode")


def _supervised(t: Translation) -> None:
    answers, completion = t.take("assistant_only_loss", False), t.take("completion_only_loss")
    if answers or completion is not None:
        train_on = "assistant" if answers else "completion" if completion else "all"
        t.put("sft.train_on", train_on, "assistant_only_loss" if answers else "completion_only_loss")
    else:
        remark = (
            "TRL trains on every token of `messages` or `text` here, for which set all; rows of `prompt` and "
            "`completion` are trained on the completion, there as here"
        )
        t.put("sft.train_on", "assistant", "assistant_only_loss", "completion_only_loss", remark=remark)
    if t.take("dataset_text_field", "text") != "text":
        t.leave("the column is `text` here; rename it", "dataset_text_field")
    if t.take("loss_type", "nll") not in ("nll", "chunked_nll"):
        t.leave("quatrain sft has one loss, the mean over tokens of -log p", "loss_type")


def _scores(t: Translation) -> None:
    t.move("rm.center", "center_rewards_coefficient", 0.0)


def _preferences(t: Translation) -> None:
    theirs = t.take("loss_type", "sigmoid")
    names = [theirs] if isinstance(theirs, str) else theirs
    loss = names[0] if len(names) == 1 and names[0] in PREFERENCE_LOSSES else None
    if loss:
        t.put("dpo.loss", loss, "loss_type")
    else:
        known = ", ".join(PREFERENCE_LOSSES)
        t.leave(f"dpo.loss is one of {known}, or a function of your own", "loss_type")
    t.move("dpo.beta", "beta", 0.1)
    if loss == "robust":
        t.move("dpo.label_smoothing", "label_smoothing", 0.0)
    else:
        t.leave(f"TRL's loss_type {loss or theirs} does not read it", "label_smoothing")
    t.leave(_ONCE, "precompute_ref_log_probs", "precompute_ref_batch_size")
    _fixed_reference(t)


def _fixed_reference(t: Translation) -> None:
    why = _REFERENCE if t.take("sync_ref_model", False) else "sync_ref_model is false"
    t.leave(why, "ref_model_sync_steps", "ref_model_mixup_alpha", *["sync_ref_model"] * (why == _REFERENCE))


def _judged(t: Translation) -> None:
    t.put("dpo.loss", "kto")
    if t.take("loss_type", "kto") != "kto":
        t.leave("dpo.loss: kto is TRL's loss_type kto", "loss_type")
    t.move("dpo.beta", "beta", 0.1)
    t.move("dpo.desirable_weight", "desirable_weight", 1.0)
    t.move("dpo.undesirable_weight", "undesirable_weight", 1.0)
    t.leave(_ONCE, "precompute_ref_log_probs", "precompute_ref_batch_size")
    _fixed_reference(t)


def _odds(t: Translation) -> None:
    t.put("dpo.loss", "orpo")
    t.move("dpo.beta", "beta", 0.1)
