from datetime import UTC, datetime
from pathlib import Path

import pytest

from quatrain.config.errors import ConfigError
from quatrain.config.load import load_config
from quatrain.config.settings import valid_keys

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_each_layer_wins_over_the_one_below(tmp_path):
    path = write(tmp_path, "rollout: {n: 2, max_new_tokens: 20, temperature: 0.7, top_k: 5}")
    overrides = ["rollout.max_new_tokens=30", "rollout.temperature=0.8", "rollout.temperature=0.9"]
    resolved = load_config(path, overrides, {"QUATRAIN__ROLLOUT__MAX_NEW_TOKENS": "40"}, now=NOW)
    rollout = resolved.config.rollout
    assert (rollout.min_p, rollout.n, rollout.temperature, rollout.max_new_tokens) == (0.0, 2, 0.9, 40)
    layers = {
        key: resolved.provenance[f"rollout.{key}"] for key in ("min_p", "n", "temperature", "max_new_tokens")
    }
    assert layers == {
        "min_p": "default",
        "n": f"file {path}",
        "temperature": "--set",
        "max_new_tokens": "environment QUATRAIN__ROLLOUT__MAX_NEW_TOKENS",
    }
    assert resolved.config.run.name == "mine-20260102-030405"
    assert resolved.provenance["run.name"] == "derived"


def test_without_a_file_the_quickstart_is_taken():
    resolved = load_config(None, [], {}, now=NOW)
    assert resolved.config.data.train == "builtin:arithmetic"
    assert resolved.config.sft.steps > 0
    assert resolved.provenance["sft.steps"] == "quickstart"
    assert resolved.config.run.name == "quickstart-20260102-030405"
    assert resolved.warnings == []


def test_a_given_file_does_not_see_the_quickstart(tmp_path):
    resolved = load_config(write(tmp_path, "seed: 1"), [], {})
    assert resolved.config.sft.steps == 0
    assert resolved.provenance["sft.steps"] == "default"


def test_every_key_has_a_layer(tmp_path):
    resolved = load_config(write(tmp_path, "seed: 1"), [], {})
    entries = {f"reward.functions.{name}" for name in ("correct", "format", "tag_count")}
    assert set(resolved.provenance) == (set(valid_keys()) - {"reward.functions"}) | entries


def test_derived_values_fill_nulls_only(tmp_path):
    path = write(tmp_path, "run: {name: null}\nmodel: {tokenizer: my/tokenizer}")
    resolved = load_config(path, [], {}, now=NOW)
    assert resolved.config.model.tokenizer == "my/tokenizer"
    assert resolved.config.run.name == "mine-20260102-030405"
    assert resolved.provenance["model.tokenizer"] == f"file {path}"
    assert resolved.config.run.steps is None


def test_a_mapping_is_replaced_whole_by_a_layer_that_gives_it(tmp_path):
    path = write(tmp_path, "reward: {functions: {format: 1.0}}")
    resolved = load_config(path, [], {})
    assert resolved.config.reward.functions == {"format": 1.0}
    assert resolved.provenance["reward.functions.format"] == f"file {path}"
    assert "reward.functions.correct" not in resolved.provenance
    given = load_config(path, ["reward.functions={tag_count: 2}"], {})
    assert given.config.reward.functions == {"tag_count": 2.0}


def test_one_entry_of_a_mapping_can_be_changed(tmp_path):
    resolved = load_config(write(tmp_path, "seed: 1"), ["reward.functions.correct=2"], {})
    assert resolved.config.reward.functions == {"correct": 2.0, "format": 0.5, "tag_count": 0.5}
    assert resolved.provenance["reward.functions.correct"] == "--set"
    assert resolved.provenance["reward.functions.format"] == "default"


def test_a_variable_changes_the_entry_it_means_whatever_its_case(tmp_path):
    path = write(tmp_path, "reward: {functions: {Mine: 1.0}}")
    environ = {"QUATRAIN__REWARD__FUNCTIONS__MINE": "3", "QUATRAIN__REWARD__FUNCTIONS__CORRECT": "1"}
    assert load_config(path, [], environ).config.reward.functions == {"correct": 1.0, "Mine": 3.0}


def test_the_environment_over_set_is_reported():
    environ = {"QUATRAIN__ROLLOUT__N": "16", "QUATRAIN__SEED": "5"}
    resolved = load_config(None, ["rollout.n=4", "seed=5"], environ)
    assert resolved.config.rollout.n == 16
    assert resolved.warnings == [
        "--set rollout.n=4 is overridden by the environment: QUATRAIN__ROLLOUT__N is 16; "
        "unset the variable to use --set"
    ]


def test_a_variable_with_single_underscores_is_reported():
    environ = {"QUATRAIN_RUN_STEPS": "5", "QUATRAIN_DEBUG": "1", "quatrain_rollout_max_new_tokens": "5"}
    assert load_config(None, [], environ).warnings == [
        f"{name} sets nothing: a variable has two underscores before a section and a key; rename it to "
        f"{right}"
        for name, right in (
            ("QUATRAIN_RUN_STEPS", "QUATRAIN__RUN__STEPS"),
            ("quatrain_rollout_max_new_tokens", "QUATRAIN__ROLLOUT__MAX_NEW_TOKENS"),
        )
    ]


def test_the_environment_over_an_entry_of_a_mapping_is_reported():
    entry = load_config(None, ["reward.functions.correct=2"], {"QUATRAIN__REWARD__FUNCTIONS__CORRECT": "3"})
    assert len(entry.warnings) == 1
    whole = load_config(None, ["reward.functions.correct=2"], {"QUATRAIN__REWARD__FUNCTIONS": "{format: 1}"})
    assert len(whole.warnings) == 1
    beside = load_config(
        None, ["reward.functions={correct: 2}"], {"QUATRAIN__REWARD__FUNCTIONS__FORMAT": "3"}
    )
    assert beside.warnings == []
    assert beside.config.reward.functions == {"correct": 2.0, "format": 3.0}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.n=0", "rollout.n must be greater than or equal to 1; got 0 (from --set; default: 8)"),
        ("rollout.n=2.5", "rollout.n must be a whole number; got 2.5 (from --set; default: 8)"),
        ("rollout.n=true", "rollout.n must be a whole number; got true (from --set; default: 8)"),
        (
            "model.dtype=fp16",
            "model.dtype must be 'float32' or 'bfloat16'; got 'fp16' (from --set; default: 'float32')",
        ),
        (
            "run.name=2024",
            "run.name must be text; put it in quotes if YAML reads it as a number or a boolean; got 2024 "
            "(from --set; default: null)",
        ),
        ("rollout.stop=x", "rollout.stop must be a list, as [a, b]; got 'x' (from --set; default: [])"),
        (
            "update.mini_batch_size=99",
            "update.mini_batch_size must be at most data.batch_size (32), the number of prompts in a "
            "training step; set a smaller number, or null for all of them; got 99 (from --set; "
            "default: null)",
        ),
        (
            "update={micro_batch_size: 8, max_tokens_per_device: 4096}",
            "update.micro_batch_size must be null if update.max_tokens_per_device (4096) is set: "
            "the size of micro-batches is given in sequences or in tokens, not both; set one of the two to "
            "null; got 8 (from --set; default: null)",
        ),
        (
            "update.max_tokens_per_device=0",
            "update.max_tokens_per_device must be greater than or equal to 1; got 0 (from --set; "
            "default: null)",
        ),
        (
            "reward.functions.correct=high",
            "reward.functions.correct must be a number, or a mapping as {weight: 1.0, args: {name: value}, "
            "data_source: [name]}; got 'high' (from --set; default: {'correct': 1.0, 'format': 0.5, "
            "'tag_count': 0.5})",
        ),
    ],
)
def test_a_bad_value_gives_rule_value_and_layer(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override, "data.batch_size=32"], {})
    assert caught.value.problems == (message,)


def test_a_token_budget_below_the_longest_sequence_is_refused():
    longest = ["data.max_prompt_length=2048", "rollout.max_new_tokens=4096"]
    sum_of_both = "data.max_prompt_length (2048) + rollout.max_new_tokens (4096) = 6144 tokens"
    with pytest.raises(ConfigError) as caught:
        load_config(
            None, [*longest, "update.max_tokens_per_device=4096", "logprob.max_tokens_per_device=6143"], {}
        )
    assert caught.value.problems == (
        f"update.max_tokens_per_device=4096 cannot hold one sequence of {sum_of_both}; set it to at least "
        "6144",
        f"logprob.max_tokens_per_device=6143 cannot hold one sequence of {sum_of_both}; set it to at least "
        "6144",
    )
    config = load_config(None, [*longest, "update.max_tokens_per_device=6144"], {}).config
    assert (config.update.max_tokens_per_device, config.logprob.max_tokens_per_device) == (6144, 12288)


def test_the_devices_of_cp_hold_a_sequence_together():
    longest = ["data.max_prompt_length=2048", "rollout.max_new_tokens=4096", "mesh={fsdp: 2, cp: 4}"]
    load_config(None, [*longest, "update.max_tokens_per_device=1536"], {})
    with pytest.raises(
        ConfigError, match=r"6144 tokens on 4 devices \(cp of mesh\); set it to at least 1536"
    ):
        load_config(None, [*longest, "update.max_tokens_per_device=1535"], {})


def test_the_derived_budget_has_its_layer():
    resolved = load_config(None, ["logprob.max_tokens_per_device=9000"], {})
    layers = {key: resolved.provenance[f"{key}.max_tokens_per_device"] for key in ("update", "logprob")}
    assert layers == {"update": "derived", "logprob": "--set"}
    fixed = load_config(None, ["update.micro_batch_size=4"], {})
    assert (fixed.config.update.max_tokens_per_device, fixed.config.logprob.micro_batch_size) == (None, 8)
    assert fixed.provenance["logprob.micro_batch_size"] == "derived"
    assert fixed.provenance["update.max_tokens_per_device"] == "default"


def test_every_bad_key_is_reported_with_its_own_layer(tmp_path):
    path = write(tmp_path, "rollout: {n: 0}")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["data.batch_size=0"], {"QUATRAIN__SEED": "-1"})
    problems = sorted(caught.value.problems)
    assert [p.split(" ", 1)[0] for p in problems] == ["data.batch_size", "rollout.n", "seed"]
    assert "from --set" in problems[0]
    assert f"from file {path}" in problems[1]
    assert "from environment QUATRAIN__SEED" in problems[2]


def test_a_mapping_that_is_none_is_an_error_even_with_an_entry_over_it(tmp_path):
    with pytest.raises(ConfigError, match=r"reward\.functions must be a mapping"):
        load_config(write(tmp_path, "reward: {functions: correct}"), ["reward.functions.format=1"], {})


def test_no_warning_is_given_twice_and_the_environment_is_left_alone():
    environ = {"QUATRAIN__ROLLOUT__N": "1"}
    resolved = load_config(None, [], environ)
    assert len(resolved.warnings) == len(set(resolved.warnings)) == 1
    assert environ == {"QUATRAIN__ROLLOUT__N": "1"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("advantage.estimator=gae critic.enabled=false", "critic.enabled must not be false for "),
        (
            "rollout.servers=[http://a:1] rollout.speculate=2",
            "rollout.speculate has no effect with rollout.servers or rollout.sampler, which sample as they",
        ),
        ("critic.epochs=2", "critic.epochs has no effect without a critic; set advantage.estimator to gae"),
        ("critic_optimizer.name=sgd", "critic_optimizer.name has no effect without a critic"),
        ("placement.critic=1", "placement.critic has no effect without a critic"),
        ("offload.critic=true", "offload.critic has no effect without a critic"),
        (
            "placement.reward=1",
            "placement.reward has no effect without a reward model or a judge on this run's devices; add "
            "model:PATH",
        ),
        ("offload.reward_models=true", "offload.reward_models has no effect without a reward model"),
        (
            "optimizer.state_dtype=bfloat16 optimizer.name=sgd optimizer.beta1=0.0",
            "optimizer.state_dtype has no effect for optimizer.name sgd with beta1 0",
        ),
        (
            "advantage.estimator=gae critic_optimizer.state_dtype=bfloat16 critic_optimizer.name=sgd "
            "critic_optimizer.beta1=0.0",
            "critic_optimizer.state_dtype has no effect for critic_optimizer.name sgd with beta1 0",
        ),
        (
            "optimizer.state_dtype=bfloat16 optimizer.name=adafactor optimizer.beta1=0",
            "optimizer.state_dtype has no effect for optimizer.name adafactor with beta1 0",
        ),
        (
            "optimizer.name=adafactor optimizer.beta2=0.9",
            "optimizer.beta2 has no effect for optimizer.name ada",
        ),
        ("optimizer.name=sgd optimizer.beta2=0.9", "optimizer.beta2 has no effect for optimizer.name sgd"),
        ("optimizer.name=adafactor optimizer.eps=1e-6", "optimizer.eps has no effect for optimizer.name ada"),
        ("optimizer.name=lion optimizer.eps=1e-6", "optimizer.eps has no effect for optimizer.name lion"),
        (
            "advantage.estimator=gae critic_optimizer.name=adafactor critic_optimizer.eps=1e-6",
            "critic_optimizer.eps has no effect for critic_optimizer.name adafactor",
        ),
        ("optimizer.name=muon lora.rank=2", "optimizer.name must not be muon with lora.rank 2"),
        (
            "optimizer.stochastic_rounding=false",
            "optimizer.stochastic_rounding has no effect where what is trained is float32",
        ),
        (
            "optimizer.stochastic_rounding=false model.param_dtype=bfloat16 lora.rank=2",
            "optimizer.stochastic_rounding has no effect where what is trained is float32",
        ),
        ("reward.kl_target=0.1", "reward.kl_target needs reward.kl_coef above 0"),
        ("reward.overlong_buffer=5", "reward.overlong_buffer has no effect without the function overlong"),
        ("rollout.greedy_baseline=false advantage.estimator=remax", "rollout.greedy_baseline must not be "),
        (
            "update.correction=mask update.old_logprobs=rollout",
            "update.correction must be none for update.old",
        ),
        (
            "update.correction=mask rollout.replay_mask=false rollout.top_k=5",
            "update.correction needs log-probabilities of the policy's",
        ),
        *(
            (
                f"{given}update.correction_floor=0.5",
                f"update.correction_floor has no effect for update.correction {correction};",
            )
            for given, correction in (("", "none"), ("update.correction=truncate ", "truncate"))
        ),
        *(
            (
                f"update.old_logprobs=rollout rollout.replay_mask=false rollout.{filtered}",
                "update.old_logprobs must not be rollout with rollout.top_p, top_k or min_p without "
                "rollout.replay_mask, or temperature 0",
            )
            for filtered in ("top_p=0.9", "top_k=5", "min_p=0.1", "temperature=0")
        ),
        (
            "rollout.max_staleness=1 rollout.replay_mask=false rollout.top_p=0.9",
            "rollout.max_staleness must be 0 with rollout.top_p, ",
        ),
        ("rollout.replay_mask=true rollout.temperature=0", "rollout.replay_mask must not be true with"),
        ("rollout.top_k=513", "rollout.top_k must be at most 512 where"),
        ("distill.teacher=x distill.loss=jsd rollout.top_k=5", "distill.loss compares whole distributions"),
        (
            "rollout.max_staleness=1 update.correction=none",
            "update.correction must not be none for rollout.max",
        ),
        ("rollout.in_flight=true", "rollout.in_flight needs rollout.max_staleness of 1 or more"),
        (
            "rollout.in_flight=true rollout.max_staleness=1 rollout.dynamic_sampling_rounds=2",
            "rollout.in_flight needs rollout.dynamic_sampling_rounds 1",
        ),
        (
            "rollout.in_flight=true rollout.max_staleness=1 advantage.estimator=remax",
            "rollout.in_flight needs no greedy baseline",
        ),
        ("rollout.workers=1 rollout.sampler=a.py:B", "rollout.sampler must be null with rollout.workers"),
        ("rollout.weights_dir=/tmp/w", "rollout.weights_dir has no effect without rollout.workers"),
        ("rollout.stream_weights=true", "rollout.stream_weights has no effect without rollout.servers"),
        (
            "rollout.servers=[http://a:1] rollout.stream_weights=true rollout.weights_dir=/tmp/w",
            "rollout.stream_weights must be false with rollout.weights_dir",
        ),
        (
            "rollout.servers=[http://a:1] rollout.workers=1",
            "rollout.servers must be empty with rollout.workers",
        ),
        (
            "rollout.servers=[http://a:1,http://a:1]",
            "rollout.servers must name each server once",
        ),
        (
            "rollout.servers=[http://a:1] rollout.replay_mask=false rollout.top_p=0.9",
            "rollout.servers must be empty with rollout.top_p",
        ),
        (
            "rollout.servers=[http://a:1] rollout.mesh=1,1,2",
            "rollout.mesh must be null with rollout.servers",
        ),
        (
            "rollout.workers=1 placement.train=0 placement.rollout=1",
            "placement.rollout must be null with rollout.workers",
        ),
        ("rollout.servers=[http://gpu1:99999]", "rollout.servers.0 must be an address such as http://host"),
        ("rollout.servers=[gpu1:8000]", "rollout.servers.0 must be an address such as http://host:8000"),
        (
            "rollout.weights_dir=/tmp/w rollout.workers=1 lora.rank=2",
            "rollout.weights_dir must be null with lora.rank",
        ),
        (
            "rollout.weights_dir=/tmp/w rollout.workers=1 model.vision=all",
            "rollout.weights_dir must be null with model.vision all: its folders hold the text model alone",
        ),
        (
            "model.vision=all advantage.estimator=gae",
            "model.vision must be frozen or none with a critic",
        ),
        (
            "model.vision=frozen model.path=a.gguf model.tokenizer=builtin:tiny",
            "model.vision must be none for a .gguf file",
        ),
        (
            "model.vision=frozen optimizer.vision_learning_rate=1e-6",
            "optimizer.vision_learning_rate has no effect unless a part of the tower is trained",
        ),
        (
            "advantage.estimator=gae critic_optimizer.vision_learning_rate=1e-6",
            "critic_optimizer.vision_learning_rate has no effect because the critic trains no tower",
        ),
        (
            "model.vision=none model.vision_cache_bytes=1",
            "model.vision_cache_bytes has no effect for model.vision none",
        ),
        ("rollout.timeout_s=0", "rollout.timeout_s must be greater than 0"),
        ("rollout.max_staleness=-1", "rollout.max_staleness must be greater than or equal to 0"),
        ("rollout.max_staleness=1000", "rollout.max_staleness must be less than or equal to 64"),
        ("rollout.dynamic_sampling_rounds=2 rollout.n=1", "rollout.dynamic_sampling_rounds must be 1 for "),
        (
            "data.min_pass_rate=0.5 data.max_pass_rate=0.4",
            "data.min_pass_rate must be at most data.max_pass_rate (0.4); lower it",
        ),
        ("data.pass_rate_column=rate", "data.pass_rate_column has no effect without data.min_pass_rate or"),
        ("update.share_prompts=true update.micro_batch_size=2", "update.share_prompts needs a token budget"),
        (
            "advantage.estimator=gae critic.micro_batch_size=2 critic.max_tokens_per_device=99",
            "critic.micro_batch_size must be null if critic.max_tokens_per_device ",
        ),
        (
            "advantage.estimator=gae critic.max_tokens_per_device=9",
            "critic.max_tokens_per_device=9 cannot hold one sequence",
        ),
    ],
)
def test_keys_that_do_not_go_together_give_one_sentence(settings, message):
    with pytest.raises(ConfigError) as error:
        load_config(None, settings.split(), {})
    (problem,) = error.value.problems
    assert problem.startswith(message)
    assert "must be needs" not in problem


def test_kl_in_the_loss_and_in_the_reward_is_warned_about():
    both = load_config(None, ["update.kl_coef=0.1", "reward.kl_coef=0.1"], {}).warnings
    assert any("the KL to the reference counts twice" in warning for warning in both)
    one = load_config(None, ["update.kl_coef=0", "reward.kl_coef=0.1"], {}).warnings
    assert not any("counts twice" in warning for warning in one)


def test_the_quickstarts_training_is_for_its_model_alone(tmp_path):
    quickstart = load_config(None, [], {})
    assert (quickstart.config.optimizer.learning_rate, quickstart.config.sft.steps) == (5e-4, 80)
    other = load_config(None, ["model.path=some/model", "optimizer.beta2=0.95"], {})
    optimizer, sft = other.config.optimizer, other.config.sft
    assert (optimizer.learning_rate, optimizer.beta2, optimizer.schedule) == (1e-6, 0.95, "constant")
    assert (sft.steps, sft.learning_rate, other.config.model.remat) == (0, 1e-5, "layer")
    assert other.config.data.batch_size == quickstart.config.data.batch_size == 32
    assert other.provenance["optimizer.learning_rate"] == "derived"
    (warning,) = other.warnings[:1]
    assert warning.startswith("model.path is not the quickstart's builtin:tiny, and without a CONFIG")
    assert load_config(None, ["model.path=some/model"], {}, trains=False).warnings == []
    by_variable = load_config(None, [], {"QUATRAIN__MODEL__PATH": "some/model"}).config
    assert (by_variable.sft, by_variable.optimizer.learning_rate) == (sft, 1e-6)
    same = load_config(None, ["model.path=builtin:tiny"], {})
    assert (same.config.sft, same.warnings) == (quickstart.config.sft, [])


@pytest.mark.parametrize(
    ("name", "beta2"), [("lion", 0.99), ("muon", 0.99), ("sgd", 0.999), ("adafactor", 0.999)]
)
def test_an_optimizer_for_the_quickstart_does_not_meet_what_it_has_for_another(name, beta2):
    """Catches `--set optimizer.name=adafactor` refused for a key that nobody set."""
    assert load_config(None, [f"optimizer.name={name}"], {}).config.optimizer.beta2 == beta2


def test_the_quickstarts_learning_rates_are_too_low_for_adapters():
    found = load_config(None, ["lora.rank=4"], {}).warnings
    assert [text.partition(":")[0] for text in found] == [
        "lora.rank is 4 and sft.learning_rate is the quickstart's 0.002, for training all weights",
        "lora.rank is 4 and optimizer.learning_rate is the quickstart's 0.0005, for training all weights",
    ]
    set_by_hand = ["optimizer.learning_rate=5e-3", "sft.steps=0"]
    assert load_config(None, ["lora.rank=4", *set_by_hand], {}).warnings == []
