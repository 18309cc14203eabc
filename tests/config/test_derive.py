from datetime import UTC, datetime

import pytest

from quatrain.config.derive import derived_values, longest_of_run
from quatrain.config.errors import ConfigError
from quatrain.config.fields import DERIVED, value_at
from quatrain.config.load import load_config
from quatrain.config.schema import Config, fields
from quatrain.config.warnings import warnings_about

OF_TEACHERS = ("distill.temperature", "distill.max_tokens_per_device")
OF_GIVEN_DATA = ("dpo.data", "rm.data", "dpo.learning_rate", "rm.learning_rate")
OF_REWARDS = ("reward.overlong_limit", "reward.overlong_buffer", "reward.model_max_tokens_per_device")
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def derived(environ=None, stem="mine", **sections):
    return derived_values(Config(**sections), stem, environ or {}, NOW)


def test_all_of_the_defaults():
    assert derived() == {
        "run.name": "mine-20260102-030405",
        "model.tokenizer": "builtin:tiny",
        "data.eval": "builtin:arithmetic-heldout",
        "sft.data": "builtin:arithmetic",
        "sft.learning_rate": 1e-3,
        "advantage.scale": "group",
        "update.mini_batch_size": 16,
        "update.loss_aggregation": "token_mean",
        "update.correction": "none",
        "optimizer.learning_rate": 1e-6,
        "update.max_tokens_per_device": 16384,
        "logprob.max_tokens_per_device": 32768,
        "critic.enabled": False,
        "rollout.greedy_baseline": False,
        "logging.wandb": "disabled",
    }


def test_values_that_are_set_are_left_alone():
    values = derived(
        run={"name": "x"},
        data={"eval": "e.jsonl"},
        update={"mini_batch_size": 3, "micro_batch_size": 5},
        advantage={"scale": "none"},
    )
    others = {
        "model.tokenizer", "sft.data", "critic.enabled", "rollout.greedy_baseline", "update.correction",
        "update.loss_aggregation", "optimizer.learning_rate", "sft.learning_rate", "logging.wandb",
    }  # fmt: skip
    assert values.keys() == {"logprob.micro_batch_size", *others}
    assert values["logprob.micro_batch_size"] == 10


@pytest.mark.parametrize(
    ("loss", "estimator", "aggregation"),
    [
        *((loss, "grpo", "seq_mean_token_mean") for loss in ("gspo", "gmpo", "sapo")),
        *((loss, "grpo", "token_mean") for loss in ("ppo_clip", "cispo", "clip_cov", "my.py:loss")),
        ("ppo_clip", "dr_grpo", "seq_mean_token_sum_norm"),
        ("cispo", "dr_grpo", "seq_mean_token_sum_norm"),
        ("gspo", "dr_grpo", "seq_mean_token_mean"),
        ("gpg", "gpg", "token_mean"),
    ],
)
def test_the_aggregation_is_that_of_the_paper(loss, estimator, aggregation):
    sections = {"update": {"loss": loss}, "advantage": {"estimator": estimator}}
    assert derived(**sections)["update.loss_aggregation"] == aggregation
    sections["update"]["loss_aggregation"] = "seq_mean_token_sum"
    assert "update.loss_aggregation" not in derived(**sections)


@pytest.mark.parametrize(
    ("path", "rank", "rate", "sft_rate"),
    [
        ("builtin:tiny", 0, 1e-6, 1e-3),
        ("builtin:tiny", 4, 1e-5, 1e-2),
        ("Qwen/Qwen2.5-0.5B-Instruct", 0, 1e-6, 1e-5),
        ("Qwen/Qwen2.5-0.5B-Instruct", 4, 1e-5, 1e-4),
    ],
)
def test_learning_rates_are_those_of_the_model_and_of_adapters(path, rank, rate, sft_rate):
    found = derived(model={"path": path}, lora={"rank": rank})
    assert (found["optimizer.learning_rate"], found["sft.learning_rate"]) == (rate, sft_rate)


def test_mask_has_a_lower_bound():
    assert derived(update={"correction": "mask", "correction_cap": 5.0})["update.correction_floor"] == 0.2
    assert "update.correction_floor" not in derived(update={"correction": "truncate"})
    own = {"correction": "mask", "correction_floor": 0.5}
    assert "update.correction_floor" not in derived(update=own)


def test_overlong_begins_a_fifth_before_the_longest_completion():
    functions = {"functions": {"overlong": 1.0}}
    found = derived(reward=functions, rollout={"max_new_tokens": 100})
    assert (found["reward.overlong_limit"], found["reward.overlong_buffer"]) == (100, 20)
    assert derived(reward={**functions, "overlong_limit": 50})["reward.overlong_buffer"] == 10


def test_remax_draws_greedy_completions():
    assert derived(advantage={"estimator": "remax"})["rollout.greedy_baseline"] is True


def test_a_critic_has_the_sizes_of_the_policy():
    gae = {"estimator": "gae"}
    critic = {key: value for key, value in derived(advantage=gae).items() if key.startswith("critic.")}
    assert critic == {
        "critic.enabled": True,
        "critic.mini_batch_size": 16,
        "critic.epochs": 1,
        "critic.max_tokens_per_device": 16384,
        "critic.forward_max_tokens_per_device": 32768,
    }
    rows = derived(advantage=gae, update={"mini_batch_size": 4, "micro_batch_size": 3, "epochs": 2})
    assert rows["critic.mini_batch_size"] == 4
    assert rows["critic.epochs"] == 2
    assert rows["critic.micro_batch_size"] == 3
    assert rows["critic.forward_micro_batch_size"] == 6
    own = derived(advantage=gae, critic={"micro_batch_size": 5, "epochs": 3})
    assert own["critic.forward_micro_batch_size"] == 10
    assert "critic.max_tokens_per_device" not in own
    assert "critic.epochs" not in own


@pytest.mark.parametrize(
    ("prompt", "completion", "budget"), [(16, 16, 16384), (8192, 8192, 16384), (8192, 8193, 16385)]
)
def test_the_token_budget_holds_the_longest_sequence(prompt, completion, budget):
    values = derived(data={"max_prompt_length": prompt}, rollout={"max_new_tokens": completion})
    assert values["update.max_tokens_per_device"] == budget
    assert values["logprob.max_tokens_per_device"] == 2 * budget


def test_the_longest_sequence_of_a_run_is_of_training_or_evaluation_with_an_environments_tokens():
    def longest(**rollout):
        rollout = {"max_new_tokens": 30, **rollout}
        return longest_of_run(
            Config(data={"max_prompt_length": 100}, eval={"max_new_tokens": 60}, rollout=rollout)
        )

    assert longest() == 160
    assert longest(max_new_tokens=70) == 170
    assert longest(environment="echo.py:Echo", max_environment_tokens=40) == 200


@pytest.mark.parametrize(
    ("update", "logprob", "sizes"),
    [
        ({"micro_batch_size": 5}, {}, {"logprob.micro_batch_size": 10}),
        ({"micro_batch_size": 5}, {"micro_batch_size": 7}, {}),
        ({"micro_batch_size": 5}, {"max_tokens_per_device": 4096}, {}),
        ({"max_tokens_per_device": 1000}, {}, {"logprob.max_tokens_per_device": 2000}),
        ({"max_tokens_per_device": 1000}, {"max_tokens_per_device": 768}, {}),
        ({}, {"micro_batch_size": 7}, {"update.max_tokens_per_device": 16384}),
        ({}, {"max_tokens_per_device": 768}, {"update.max_tokens_per_device": 16384}),
    ],
)
def test_log_probabilities_take_the_mode_of_the_update_unless_they_have_one(update, logprob, sizes):
    values = derived(update=update, logprob=logprob)
    assert {key: value for key, value in values.items() if "micro_batch" in key or "tokens" in key} == sizes


@pytest.mark.parametrize(
    ("sections", "budget"),
    [
        ({}, 32768),
        ({"logprob": {"max_tokens_per_device": 4096}}, 4096),
        ({"update": {"max_tokens_per_device": 1000}}, 2000),
        ({"update": {"micro_batch_size": 5}}, 32768),
        ({"update": {"micro_batch_size": 5}, "rollout": {"max_new_tokens": 32000}}, 65024),
    ],
)
def test_reward_models_take_the_budget_of_log_probabilities(sections, budget):
    reward = {"functions": {"model:judge": 1.0}}
    assert derived(reward=reward, **sections)["reward.model_max_tokens_per_device"] == budget


def test_a_budget_of_reward_models_below_the_longest_sequence_is_an_error():
    with pytest.raises(ConfigError, match=r"reward\.model_max_tokens_per_device=512 cannot hold one"):
        derived(reward={"functions": {"model:judge": 1.0}, "model_max_tokens_per_device": 512})


@pytest.mark.parametrize(("teacher", "budget"), [({"teacher": "initial"}, 256), ({}, 128)])
def test_the_budget_of_log_probabilities_holds_the_evaluations_that_a_teacher_reads(teacher, budget):
    """The KL of an evaluation ended the run with an error of the packer, once a completion was so long."""
    sections = {
        "data": {"max_prompt_length": 56},
        "rollout": {"max_new_tokens": 8},
        "eval": {"max_new_tokens": 200},
        "update": {"max_tokens_per_device": 64},
        "distill": teacher,
    }
    assert derived(**sections)["logprob.max_tokens_per_device"] == budget
    if teacher:
        with pytest.raises(ConfigError, match=r"logprob\.max_tokens_per_device=200 cannot hold one sequence"):
            derived(**sections, logprob={"max_tokens_per_device": 200})
    else:
        derived(**sections, logprob={"max_tokens_per_device": 200})


@pytest.mark.parametrize(
    ("estimator", "scale"), [("grpo", "group"), ("reinforce", "batch"), ("rloo", "none"), ("dr_grpo", "none")]
)
def test_the_scale_follows_the_estimator(estimator, scale):
    assert derived(advantage={"estimator": estimator})["advantage.scale"] == scale


@pytest.mark.parametrize("train", ["rows.jsonl", "openai/gsm8k:main", "builtin:arithmetic-heldout"])
def test_only_a_builtin_has_a_held_out_part(train):
    assert "data.eval" not in derived(data={"train": train})


@pytest.mark.parametrize(
    ("environ", "mode"),
    [
        ({}, "disabled"),
        ({"WANDB_API_KEY": "k"}, "online"),
        ({"WANDB_API_KEY": ""}, "disabled"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "dryrun"}, "disabled"),
    ],
)
def test_wandb_follows_the_key_unless_a_mode_was_set(environ, mode):
    assert derived(environ)["logging.wandb"] == mode
    assert "logging.wandb" not in derived(environ, logging={"wandb": "offline"})


@pytest.mark.parametrize(
    ("stem", "name"),
    [("a b/c", "a-b-c-20260102-030405"), ("...", "run-20260102-030405"), ("-x", "x-20260102-030405")],
)
def test_a_run_name_is_always_a_folder_name(stem, name):
    values = derived(stem=stem)
    assert values["run.name"] == name
    assert Config(run={"name": name}).run.name == name


def warnings(environ=None, **sections):
    data = {"eval": "e.jsonl"} | sections.pop("data", {})
    return warnings_about(Config(data=data, **sections), environ or {})


def test_an_ordinary_configuration_gives_no_warning():
    assert warnings() == []
    assert warnings(rollout={"n": 1}, advantage={"estimator": "reinforce"}) == []


@pytest.mark.parametrize(
    "estimator", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline", "opo", "gpg", "passk"]
)
def test_one_sample_with_a_group_estimator(estimator):
    (warning,) = warnings(rollout={"n": 1}, advantage={"estimator": estimator})
    assert "nothing will be learned" in warning
    assert estimator in warning


def test_greedy_sampling():
    (warning,) = warnings(rollout={"temperature": 0.0, "n": 4})
    assert "explores nothing, so the 4 samples of a prompt are identical" in warning
    (single,) = warnings(rollout={"temperature": 0, "n": 1}, advantage={"estimator": "reinforce"})
    assert "explores nothing; set it above 0" in single


def test_filters_train_what_they_sample():
    """No warning; the words that may be recorded are bounded, unless nothing is recorded."""
    assert warnings(rollout={"top_p": 0.9}) == []
    assert derived(rollout={"top_p": 0.9})["rollout.top_k"] == 512
    assert derived(rollout={"min_p": 0.1})["rollout.top_k"] == 512
    for rollout in ({}, {"top_k": 5}, {"top_p": 0.9, "replay_mask": False}, {"top_p": 0.9, "temperature": 0}):
        assert "rollout.top_k" not in derived(rollout=rollout)


def test_updates_below_the_precision_of_the_parameters():
    stored, nearest = {"model": {"param_dtype": "bfloat16"}}, {"stochastic_rounding": False}
    nearest["learning_rate"] = 1e-6
    (warning,) = warnings(**stored, optimizer=nearest)
    assert "model.param_dtype bfloat16 and optimizer.learning_rate 1e-06: " in warning
    assert "set optimizer.stochastic_rounding to true, or model.param_dtype to float32" in warning
    both = warnings(**stored, optimizer=nearest, sft={"steps": 1, "learning_rate": 1e-5})
    assert ["sft.learning_rate 1e-05" in warning for warning in both] == [False, True]
    assert warnings(**stored, optimizer={**nearest, "learning_rate": 1e-4}) == []
    assert warnings(**stored) == []
    assert warnings(model={"dtype": "bfloat16"}) == []


def test_adapters_with_a_rate_for_all_weights():
    assert warnings(lora={"rank": 4}) == []
    rates = {"optimizer": {"learning_rate": 1e-6}, "sft": {"steps": 1, "learning_rate": 1e-5}}
    assert warnings(**rates) == []
    first, second = warnings(lora={"rank": 4}, **rates)
    assert "lora.rank is 4 and optimizer.learning_rate 1e-06" in first
    assert "set optimizer.learning_rate to 1e-05" in first
    assert "set sft.learning_rate to 0.0001" in second
    assert warnings(lora={"rank": 4}, optimizer={"learning_rate": 1e-5}) == []


def test_a_kl_without_a_gradient():
    (warning,) = warnings(update={"kl_coef": 0.1, "kl_estimator": "k1"})
    assert "does not pull the policy towards the reference" in warning
    assert warnings(update={"kl_estimator": "k1"}) == []
    assert warnings(update={"kl_coef": 0.1}) == []


def test_other_surprises():
    assert "every reward is 0" in warnings(reward={"functions": {"correct": 0.0}})[0]
    assert "does not change the weights" in warnings(optimizer={"learning_rate": 0.0})[0]
    assert "has no reward model" in warnings(reward={"model_max_tokens_per_device": 1000})[0]
    assert "data.eval is null" in warnings(data={"eval": None})[0]
    assert "run.epochs (2) has no effect" in warnings(run={"steps": 5, "epochs": 2.0})[0]
    (mode,) = warnings({"WANDB_MODE": "dryrun"}, logging={"wandb": "disabled"})
    assert "WANDB_MODE is none of disabled, offline, online" in mode


def test_a_critic_that_warms_up_in_every_step():
    """The policy was never trained, and nothing said so."""
    critic = {"advantage": {"estimator": "gae"}, "critic": {"warmup_steps": 20}}
    (warning,) = warnings(run={"steps": 20}, **critic)
    assert "the policy rests in every training step and is not trained" in warning
    assert warnings(run={"steps": 21}, **critic) == []


@pytest.mark.parametrize(("prompts", "parts", "made"), [(9, 4, 3), (2, 4, 2), (10, 4, None), (9, 3, None)])
def test_fewer_mini_batches_than_were_asked_for(prompts, parts, made):
    """9 prompts in 4 parts were trained in 3 optimizer steps, and nothing said so."""
    found = warnings(data={"batch_size": prompts}, update={"num_mini_batches": parts})
    assert len(found) == (made is not None)
    assert all(f"are {made}, and an epoch has as many optimizer steps" in warning for warning in found)


@pytest.mark.parametrize(
    ("estimator", "warned"), [("gae", True), ("reinforce", True), ("rloo", False), ("remax", False)]
)
def test_dynamic_sampling_fits_estimators_that_compare_samples(estimator, warned):
    config = Config(rollout={"dynamic_sampling_rounds": 2}, advantage={"estimator": estimator})
    found = [
        w for w in warnings_about(config, {}) if w.startswith("rollout.dynamic_sampling_rounds is 2 and")
    ]
    assert bool(found) == warned


@pytest.mark.parametrize(
    ("sections", "correction"),
    [
        ({}, "none"),
        ({"model": {"dtype": "bfloat16"}}, "truncate"),
        ({"rollout": {"max_staleness": 1}}, "truncate"),
        ({"rollout": {"max_staleness": 1}, "update": {"old_logprobs": "rollout"}}, "none"),
        ({"model": {"dtype": "bfloat16"}, "rollout": {"top_p": 0.9}}, "truncate"),
        ({"model": {"dtype": "bfloat16"}, "rollout": {"top_p": 0.9, "replay_mask": False}}, "none"),
    ],
)
def test_differences_of_sampler_and_trainer_are_corrected(sections, correction):
    assert derived(**sections)["update.correction"] == correction


def test_a_lag_that_checkpoints_never_allow_is_warned_about():
    def warned(every_steps):
        sections = {"rollout": {"max_staleness": 2}, "placement": {"train": "0", "rollout": "1"}}
        config = Config(**sections, checkpoint={"every_steps": every_steps})
        return [text for text in warnings_about(config, {}) if text.startswith("checkpoint.every_steps is")]

    assert "so the staleness stays below 2;" in warned(2)[0]
    assert warned(3) == warned(0) == []


@pytest.mark.parametrize(
    ("rollout", "shared"), [({}, True), ({"workers": 1}, False), ({"servers": ["http://a:1"]}, False)]
)
def test_a_lag_on_the_devices_of_training_is_warned_about(rollout, shared):
    found = warnings_about(Config(rollout={"max_staleness": 1, **rollout}), {})
    assert any("the rollout has the devices of training" in text for text in found) == shared


@pytest.mark.parametrize(
    ("parts", "left"),
    [
        ([], {"critic.mini_batch_size", "critic.epochs", *OF_TEACHERS, *OF_REWARDS}),
        (["advantage.estimator=gae"], {*OF_TEACHERS, *OF_REWARDS}),
        (["distill.teacher=m"], {"critic.mini_batch_size", "critic.epochs", *OF_REWARDS}),
        (
            ["reward.functions={overlong: 1, 'model:m': 1}"],
            {"critic.mini_batch_size", "critic.epochs", *OF_TEACHERS},
        ),
    ],
)
def test_what_a_run_reads_of_derived_keys_is_there(parts, left):
    """A `Derived` key is null to nobody who reads it: types say so, and nothing else checks it."""
    config = load_config(None, parts, {}).config
    keys = [key for key, field in fields().items() if DERIVED in field.metadata]
    assert {key for key in keys if value_at(config, key) is None} == {*left, *OF_GIVEN_DATA}
    assert len(keys) >= 17


def test_an_agents_contexts_are_kept():
    """Each of its requests would compute its whole context; without one, memory for them would be lost."""
    assert derived(rollout={"agent": "command: play"})["rollout.prefix_share"] == 0.5
    assert "rollout.prefix_share" not in derived(rollout={"agent": "command: play", "prefix_share": 0.0})
