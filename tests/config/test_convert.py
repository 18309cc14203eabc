"""`quatrain convert`: what becomes of keys and values of verl, TRL and Tunix (samples in `theirs/`)."""

import re
from pathlib import Path

import pytest

from quatrain.config.convert import convert, read_theirs
from quatrain.config.errors import ConfigError
from quatrain.config.fields import value_at
from quatrain.config.load import load_config
from quatrain.config.settings import file_layer

THEIRS = Path(__file__).with_name("theirs")
SAMPLES = sorted(path.name for path in THEIRS.iterdir())


def converted(text, tmp_path, *overrides, **options):
    """The text that a conversion writes, and the configuration that loads from it."""
    made = convert(text, "theirs.yaml", overrides, **options).text
    path = tmp_path / "mine.yaml"
    path.write_text(made)
    return made, load_config(path, [], {}, trains=False).config


def of_sample(name, tmp_path, **options):
    return converted((THEIRS / name).read_text(), tmp_path, **options)


@pytest.mark.parametrize("name", SAMPLES)
def test_each_key_of_a_sample_is_in_the_output_and_the_output_loads(name, tmp_path):
    """Catches a key that is dropped without a word, and output that our own loader refuses."""
    text = (THEIRS / name).read_text()
    made, _ = converted(text, tmp_path)
    given = [key for key, value in read_theirs(text, name).items() if value not in (None, [], {})]
    assert len(given) > 15
    lost = [key for key in given if not re.search(rf"\b{re.escape(key)}\b", made)]
    assert [key for key in lost if ".profiler." not in key] == []
    assert "profiler:" not in text or "profiler.*" in made


GRPO = {
    "data.train": "~/data/gsm8k/train.parquet",
    "data.batch_size": 512,
    "data.on_long_prompt": "skip",
    "rollout.n": 5,
    "rollout.max_new_tokens": 1024,
    "rollout.top_k": 0,
    "rollout.mesh": "-1,1,2",
    "rollout.max_concurrency": 8 * 256,  # 16 GPUs, 2 each: 8 engines
    "rollout.dynamic_sampling_rounds": 4,
    "reward.functions": {"my_reward.py:compute_score": 1.0, "overlong": 0.5},
    "reward.overlong_buffer": 256,
    "advantage.estimator": "grpo",
    "update.mini_batch_size": 128,
    "update.max_tokens_per_device": 24576,
    "update.clip_high": 0.28,
    "update.dual_clip": 3.0,  # verl's default, ours is null
    "update.kl_coef": 0.001,
    "update.kl_estimator": "k3",
    "update.correction": "mask",
    "update.correction_cap": 5.0,
    "update.correction_floor": 0.5,
    "logprob.max_tokens_per_device": 32768,
    "optimizer.warmup_steps": 40,  # 10 training steps of 4 optimizer steps
    "optimizer.weight_decay": 0.1,
    "optimizer.final_fraction": 0.1,
    "optimizer.max_grad_norm": 0.5,
    "model.tokenizer": "Qwen/Qwen2.5-3B",
    "model.dtype": "bfloat16",
    "offload.optimizer": True,
    "offload.reference": True,
    "eval.n": 8,
    "eval.temperature": 0.6,
    "eval.every_steps": 5,
    "eval.before": False,
    "checkpoint.every_steps": 20,
    "run.epochs": 15,
    "run.name": "qwen_grpo",
    "logging.wandb_project": "gsm8k",
}
PPO = {
    "data.train": ("$HOME/gsm8k/train.parquet", "$HOME/math/train.parquet"),
    "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
    "advantage.estimator": "gae",
    "advantage.args": {"lam": 0.95},
    "update.micro_batch_size": 4,
    "critic.path": "Qwen/Qwen2.5-0.5B",
    "critic.micro_batch_size": 8,
    "critic_optimizer.learning_rate": 2e-5,
    "critic_optimizer.weight_decay": 0.01,
    "reward.functions": {"correct": 1.0},
}
TRL = {
    "data.train": "trl-lib/DeepMath-103K:main",
    "data.eval": "trl-lib/DeepMath-103K:main:test",
    "data.answer_column": "solution",
    "data.batch_size": 32,  # 8 completions x 4 devices x 8 steps / 8
    "update.mini_batch_size": 16,  # 8 x 4 x 4 / 8
    "update.micro_batch_size": 8,
    "rollout.n": 8,
    "rollout.mesh": "-1,1,2",
    "reward.functions": {"correct": 1.0, "my_lib.rewards:short": 0.2, "overlong": 0.5},
    "reward.overlong_limit": 1280,
    "advantage.scale": "batch",
    "update.loss": "ppo_clip",
    "update.loss_aggregation": "token_mean",
    "update.clip_low": 0.2,
    "update.clip_high": 0.28,
    "update.dual_clip": 4.0,
    "update.kl_coef": 0.001,
    "update.kl_estimator": "k3_straight",
    "update.mask_truncated": True,
    "run.steps": 100,  # 200 optimizer steps, two of each batch
    "eval.every_steps": 10,
    "checkpoint.every_steps": 25,
    "checkpoint.keep": 2,
    "optimizer.warmup_steps": 20,
    "optimizer.eps": 1e-7,
    "lora.targets": ("qkv",),
    "logging.tensorboard": True,
    "seed": 42,
}
SERVER = {
    "rollout.servers": ("http://gpu1:8000",),
    "update.correction": "truncate",
    "update.correction_cap": 2.5,
    "update.loss_aggregation": "seq_mean_token_sum_norm",
    "advantage.scale": "none",
    "update.epochs": 2,
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 10,
    "eval.every_steps": 0,
    "checkpoint.every_steps": 50,
    "data.batch_size": 1,
}
TUNIX = {
    "model.path": "meta-llama/Llama-3.1-8B",
    "mesh": {"fsdp": 2, "tp": 4},
    "data.batch_size": 16,
    "update.mini_batch_size": 8,
    "update.micro_batch_size": 4,  # 2 prompts of 4 samples on 2 data shards
    "run.steps": 1869,
    "lora.rank": 64,
    "lora.targets": ("qkv", "o", "gate_up", "down"),
    "update.kl_estimator": "k1",
    "update.loss_aggregation": "seq_mean_token_mean",
    "optimizer.schedule": "cosine",
    "optimizer.learning_rate": 3e-6,
    "seed": 7,
}


SFT = {
    "run.task": "sft",
    "sft.data": "trl-lib/Capybara",
    "sft.eval": "trl-lib/Capybara:default:test",
    "sft.epochs": 1,
    "sft.batch_size": 32,  # 2 rows x 2 devices x 8 steps
    "sft.learning_rate": 2e-5,
    "sft.schedule": "linear",
    "sft.max_length": 1024,
    "sft.on_long": "truncate",
    "sft.train_on": "assistant",
    "update.max_tokens_per_device": 2048,
    "update.micro_batch_size": None,
    "lora.rank": 32,
    "checkpoint.best_metric": "eval/loss",
    "checkpoint.best_mode": "min",
    "eval.every_steps": 100,
}
DPO = {
    "run.task": "dpo",
    "dpo.data": "trl-lib/ultrafeedback_binarized:default:train_prefs",
    "dpo.eval": "trl-lib/ultrafeedback_binarized:default:test_prefs",
    "dpo.steps": 100,
    "dpo.epochs": 1.0,
    "dpo.batch_size": 8,
    "dpo.loss": "robust",
    "dpo.label_smoothing": 0.1,
    "dpo.beta": 0.2,
    "dpo.max_length": 2048,
    "dpo.on_long": "truncate",
    "dpo.learning_rate": 5e-7,
    "dpo.warmup_steps": 10,
    "dpo.schedule": "cosine",
    "update.micro_batch_size": 8,  # sequences, 4 pairs
    "optimizer.weight_decay": 0.01,
    "model.remat": "none",
}
REWARDS = {
    "run.task": "rm",
    "rm.data": "trl-lib/ultrafeedback_binarized",
    "rm.epochs": 2,
    "rm.batch_size": 16,
    "rm.center": 0.01,
    "rm.max_length": 512,
    "rm.on_long": "skip",
    "rm.learning_rate": 1e-4,
    "rm.schedule": "cosine",
    "rm.warmup_steps": 30,
    "model.param_dtype": "bfloat16",
    "checkpoint.best_metric": "eval/accuracy",
    "checkpoint.best_mode": "max",
    "checkpoint.keep": 2,
    "seed": 3,
}


@pytest.mark.parametrize(
    ("name", "devices", "expected"),
    [
        ("trl_sft.yaml", 2, SFT),
        ("trl_dpo.yaml", 2, DPO),
        ("trl_rm.yaml", None, REWARDS),
        ("verl_grpo.yaml", None, GRPO),
        ("verl_ppo.sh", None, PPO),
        ("trl_grpo.yaml", 4, TRL),
        ("trl_config.json", None, SERVER),
        ("tunix_grpo.yaml", None, TUNIX),
    ],
)
def test_values_of_a_sample(name, devices, expected, tmp_path):
    """Catches a value whose meaning or unit is lost, worked out by hand from the other library's pages."""
    _, config = of_sample(name, tmp_path, devices=devices)
    got = {key: value_at(config, key) for key in expected}
    assert got == expected


TRL_ = "num_generations: 4\n"
VERL = "algorithm: {adv_estimator: grpo}\n"
ACTOR = "actor_rollout_ref.actor: "
TUNIX_ = "grpo_config: {beta: 0.0}\nrl_training_config: "
OPEN_R1 = """max_prompt_length: 512
system_prompt: Think.
dataset_prompt_column: problem
reward_funcs: [accuracy]
reward_weights: [2]
"""
MIN_LR = "lr_scheduler_type: cosine_with_min_lr\nlearning_rate: 1e-5\nlr_scheduler_kwargs: {min_lr: 1.0e-6}"
RATIO = {"clip_low": 0.2, "clip_high": 0.28}
DECAYS = TUNIX_.replace("{", "{{").replace("}", "}}") + (
    "{{actor_optimizer_config: {{schedule_type: {}, init_value: 2.0e-5, warmup_steps: 186.9, {}: 0.1}}}}"
)
OF_REFERENCE = """actor_rollout_ref.ref:
  model: {path: other/model}
  fsdp_config: {model_dtype: bfloat16, optimizer_offload: true, param_offload: true}
actor_rollout_ref.actor: {use_kl_loss: true}
"""
GSPO = "{policy_loss: {loss_mode: gspo}, loss_agg_mode: token-mean}"
SAMPLED = "actor_rollout_ref.rollout: {val_kwargs: "
CRITIC = """algorithm.adv_estimator: gae
data.train_batch_size: 256
actor_rollout_ref.actor: {ppo_mini_batch_size: 64, optim: {lr_warmup_steps: 10}}
critic: {ppo_mini_batch_size: 32, ppo_epochs: 4, ppo_micro_batch_size: 32, optim: {lr_warmup_steps: 10}}
trainer.critic_warmup: 5
"""


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        (TRL_ + "loss_type: grpo", "update.loss_aggregation", "seq_mean_token_mean"),
        (TRL_ + "loss_type: bnpo", "update.loss_aggregation", "token_mean"),
        (
            TRL_ + "loss_type: cispo\nepsilon_high: 5.0",
            "update.loss_args",
            {"clip_low": 1.0, "clip_high": 4.0},
        ),
        (TRL_ + "importance_sampling_level: sequence\nloss_type: grpo", "update.loss", "gspo"),
        (TRL_ + "multi_objective_aggregation: normalize_then_sum", "advantage.estimator", "gdpo"),
        (TRL_ + "scale_rewards: none", "advantage.scale", "none"),
        (TRL_ + "scale_rewards: True", "advantage.scale", "group"),
        (TRL_ + "beta: 0.04\nuse_bias_correction_kl: false", "update.kl_estimator", "k3"),
        (TRL_ + "fp16: true", "model.dtype", "float32"),
        (TRL_ + "max_grad_norm: 0", "optimizer.max_grad_norm", None),
        (TRL_ + "optim: adafactor", "optimizer.name", "adafactor"),
        (TRL_ + "optim: adafactor\nadam_beta1: 0.8", "optimizer.beta1", 0.0),
        (TRL_ + "optim: sgd", "optimizer.beta1", 0.0),
        (TRL_ + "warmup_steps: 0.25\nmax_steps: 40", "optimizer.warmup_steps", 10),
        ("num_generations: 3\nper_device_train_batch_size: 8", "data.batch_size", 3),
        (TRL_, "optimizer.schedule", "linear"),
        (TRL_ + "lr_scheduler_type: constant\nwarmup_steps: 9", "optimizer.warmup_steps", 0),
        (TRL_ + "gradient_accumulation_steps: 6\nsteps_per_generation: 2", "data.batch_size", 12),
        (TRL_ + "gradient_accumulation_steps: 6\nsteps_per_generation: 2", "update.mini_batch_size", 12),
        (TRL_ + OPEN_R1, "data.max_prompt_length", 512),
        (TRL_ + OPEN_R1, "data.on_long_prompt", "truncate_left"),
        (TRL_ + OPEN_R1, "data.system_prompt", "Think."),
        (TRL_ + OPEN_R1, "data.question_column", "problem"),
        (TRL_ + OPEN_R1, "reward.functions", {"correct": 2}),
        (TRL_ + "reward_funcs: [a.b.c, org/V2.1]", "reward.functions", {"a.b:c": 1, "model:org/V2.1": 1}),
        (TRL_ + MIN_LR, "optimizer.final_fraction", 0.1),
        (TRL_ + "use_peft: true", "lora.targets", ("qkv",)),  # peft's q_proj and v_proj
        (TRL_ + "use_peft: true\nlora_target_modules: all-linear", "lora.targets", ("all-linear",)),
        (TRL_ + "use_peft: true\nlora_r: 64\nuse_rslora: true", "lora.alpha", 256.0),  # 32 x 8
        (TRL_ + "generation_kwargs: {stop: [x, y], top_k: 5}", "rollout.stop", ("x", "y")),
        (TRL_ + "top_k: 7\ngeneration_kwargs: {stop_strings: x, top_k: 5}", "rollout.top_k", 5),
        (TRL_ + "chat_template_kwargs: {a: false}", "data.chat_template_kwargs", {"a": False}),
        (VERL + "data.apply_chat_template_kwargs: {a: 1}", "data.chat_template_kwargs", {"a": 1}),
        (
            TRL_ + "reward_funcs: [accuracy_reward, reasoning_accuracy_reward]\nreward_weights: [1, 2]",
            "reward.functions",
            {"correct": 3},
        ),
        (TRL_ + "normalize_advantages: true", "advantage.estimator", "rloo"),
        (VERL, "data.batch_size", 1024),
        (VERL, "optimizer.weight_decay", 0.01),
        ("algorithm: {gamma: 0.9}", "advantage.estimator", "gae"),
        # verl's gspo, sapo and geo_mean are means over sequences, whatever the key and its default say
        (VERL + ACTOR + GSPO, "update.loss_aggregation", "seq_mean_token_mean"),
        (VERL + ACTOR + GSPO.replace("gspo", "sapo"), "update.loss_aggregation", "seq_mean_token_mean"),
        (VERL + ACTOR + GSPO.replace("gspo", "geo_mean"), "update.loss_aggregation", "seq_mean_token_mean"),
        (VERL + ACTOR + GSPO.replace("gspo", "gpg"), "update.loss_aggregation", "token_mean"),
        (VERL + ACTOR + GSPO.replace("gspo", "clip_cov"), "update.dual_clip", None),
        (
            "algorithm: {adv_estimator: reinforce_plus_plus_baseline, gamma: 0.9}",
            "advantage.args",
            {},
        ),
        ("algorithm: {adv_estimator: reinforce_plus_plus, gamma: 0.9}", "advantage.args", {"gamma": 0.9}),
        # What verl says of the reference alone is not the policy's
        (VERL + OF_REFERENCE, "model.param_dtype", "float32"),
        (VERL + OF_REFERENCE, "offload.optimizer", False),
        (VERL + OF_REFERENCE, "offload.reference", True),
        (VERL + "trainer: {total_training_steps: 70, total_epochs: 2}", "run.steps", 70),
        (VERL + "trainer: {total_training_steps: 70, total_epochs: 2}", "run.epochs", 1.0),
        (VERL + SAMPLED + "{do_sample: true, temperature: 0, n: 4}}", "eval.n", 0),
        (VERL + SAMPLED + "{do_sample: true, temperature: 0.6, n: 4}}", "eval.n", 4),
        (CRITIC, "critic_optimizer.warmup_steps", 320),  # 10 training steps of 8 mini-batches, 4 times
        (CRITIC, "optimizer.warmup_steps", 40),  # 10 of 4 mini-batches, once
        (CRITIC, "critic.micro_batch_size", 4),  # 32 sequences of 8 GPUs
        (CRITIC, "critic.warmup_steps", 4),  # verl trains the policy from step 5 on
        (VERL + ACTOR + "{policy_loss: {loss_mode: gspo}, clip_ratio_high: 0.28}", "update.loss_args", RATIO),
        (VERL + ACTOR + "{policy_loss: {loss_mode: geo_mean}}", "update.loss", "gmpo"),
        (
            VERL + ACTOR + "{loss_agg_mode: seq-mean-token-sum}",
            "update.loss_aggregation",
            "seq_mean_token_sum",
        ),
        (VERL + ACTOR + "{ppo_micro_batch_size: 32}", "update.micro_batch_size", 4),
        (VERL + "actor_rollout_ref: {rollout: {do_sample: false}}", "rollout.temperature", 0),
        ("algorithm.adv_estimator: rloo\ntrainer.nnodes: 1", "advantage.estimator", "rloo"),
        ("trainer: {v1: {trainer_mode: separate_async}}", "rollout.max_staleness", 8),
        (
            "trainer: {v1: {trainer_mode: sync, sampler: {max_off_policy_threshold: 8}}}",
            "rollout.max_staleness",
            0,
        ),
        (
            "algorithm: {use_kl_in_reward: true, kl_ctrl: {type: fixed, target_kl: 0.1}}",
            "reward.kl_target",
            None,
        ),
        (
            "reward: {reward_model: {enable: true, model_path: org/rm}}\ntrainer: {}",
            "reward.functions",
            {"model:org/rm": 1.0},
        ),
        ("grpo_config: {beta: 0.0}", "update.kl_coef", 0.0),
        ("grpo_config: {loss_algo: gspo-token, epsilon: 0.001}", "update.loss", "gspo"),
        ("ppo_config: {gae_lambda: 0.9}", "advantage.args", {"gamma": 1.0, "lam": 0.9}),
        ("ppo_config: {epsilon: 0.1, epsilon_low: 0.15}", "update.clip_high", 0.1),
        ("ppo_config: {epsilon: 0.1, epsilon_low: 0.15}", "update.clip_low", 0.15),
        ("ppo_config: {entropy_coef: 0.01}", "update.entropy_coef", 0.01),
        (DECAYS.format("cosine_decay_schedule", "alpha"), "optimizer.learning_rate", 2e-5),
        (DECAYS.format("cosine_decay_schedule", "alpha"), "optimizer.final_fraction", 0.1),
        (
            DECAYS.replace("0.1", "2.0e-6").format("linear_schedule", "end_value"),
            "optimizer.final_fraction",
            0.1,
        ),
        (DECAYS.format("warmup_constant_schedule", "peak_value"), "optimizer.learning_rate", 0.1),
        (DECAYS.format("warmup_constant_schedule", "peak_value"), "optimizer.warmup_steps", 187),
        ('["algorithm.adv_estimator=grpo", "++data.train_batch_size=8"]', "data.batch_size", 8),
    ],
)
def test_values_whose_meaning_depends_on_others(text, key, value, tmp_path):
    assert value_at(converted(text, tmp_path)[1], key) == value


GIVEN_ = "model_name_or_path: m\ndataset_name: a/b\n"


@pytest.mark.parametrize(
    ("text", "library", "values"),
    [
        ("", "trl-sft", {"sft.learning_rate": 2e-5, "sft.epochs": 3.0, "sft.train_on": "assistant"}),
        ("completion_only_loss: true", None, {"sft.train_on": "completion"}),
        ("completion_only_loss: false", None, {"sft.train_on": "all", "update.micro_batch_size": 8}),
        ("max_length: null\npacking: true", None, {"sft.max_length": None, "sft.on_long": "error"}),
        ("", "trl-dpo", {"dpo.learning_rate": 1e-6, "dpo.loss": "sigmoid", "dpo.beta": 0.1}),
        ("loss_type: ipo", None, {"run.task": "dpo", "dpo.loss": "ipo", "update.micro_batch_size": 16}),
        ("loss_type: sigmoid\nlabel_smoothing: 0.1", None, {"dpo.label_smoothing": 0.0}),
        ("loss_type: [sigmoid, sft]", None, {"dpo.loss": "sigmoid"}),
        ("loss_type: apo_zero", None, {"run.task": "dpo"}),
        ("", "trl-rm", {"rm.learning_rate": 1e-4, "rm.center": 0.0, "rm.on_long": "skip"}),
        (
            "desirable_weight: 1.5\nbeta: 0.3",
            None,
            {"dpo.loss": "kto", "dpo.desirable_weight": 1.5, "dpo.beta": 0.3, "update.micro_batch_size": 8},
        ),
        ("beta: 0.3", "trl-orpo", {"dpo.loss": "orpo", "dpo.beta": 0.3}),
        (
            "max_seq_length: 2048\npacking: true",
            None,
            {"sft.max_length": 2048, "update.max_tokens_per_device": 8 * 2048},
        ),
        (
            "beta: 0.1",
            "trl-rloo",
            {"advantage.estimator": "rloo", "rollout.n": 2, "reward.kl_coef": 0.1, "update.kl_coef": 0.0},
        ),
        ("lr_scheduler_type: constant", "trl-orpo", {"dpo.schedule": "constant", "dpo.warmup_steps": 0}),
    ],
)
def test_each_trainer_of_trl_on_given_data_has_its_section_and_its_defaults(text, library, values, tmp_path):
    """Catches the defaults of another trainer, and output that the command it is for refuses."""
    path = tmp_path / "mine.yaml"
    path.write_text(convert(GIVEN_ + text, "theirs.yaml", library=library).text)
    config = load_config(path, [], {}).config
    assert {key: value_at(config, key) for key in values} == values
    assert config.given.data == "a/b"


def test_bounds_that_a_loss_of_verl_reads_are_not_among_what_it_does_not_read(tmp_path):
    """Catches clip ratios of gspo, which stood both in `update.loss_args` and as not translated."""
    text = VERL + ACTOR + "{policy_loss: {loss_mode: gspo}, clip_ratio_high: 0.28, clip_ratio_c: 4.0}"
    left = converted(text, tmp_path)[0].partition("Not translated")[2]
    assert "clip_ratio_c: 4.0" in left
    assert "clip_ratio_high" not in left


def test_a_bound_of_cispo_below_1_is_said_to_be_1_here():
    """Catches TRL's default, 0.2, which became a bound of 1 without a word."""
    said = "TRL bounds the weight of a token at 0.2"
    assert said in convert(TRL_ + "loss_type: cispo", "theirs.yaml").text
    assert said not in convert(TRL_ + "loss_type: cispo\nepsilon_high: 5.0", "theirs.yaml").text


def test_a_batch_of_packs_is_said_to_be_no_batch_of_rows(tmp_path):
    """Catches a step of 8 short rows in place of 8 packs of 1024 tokens, without a word."""
    said = "packs of 1024 tokens there, and rows here"
    made = convert(GIVEN_ + "packing: true", "theirs.yaml").text
    assert said in re.sub(r"\n\s*#\s+", " ", made)
    assert said not in convert(GIVEN_ + "packing: false", "theirs.yaml").text


def test_losses_of_trl_that_are_not_here_are_named(tmp_path):
    for loss in ("loss_type: apo_zero", "loss_type: [sigmoid, sft]"):
        made = convert(GIVEN_ + loss, "theirs.yaml").text
        assert "dpo.loss is one of sigmoid, ipo, robust, hinge, orpo, simpo, kto, or a" in made
    made = re.sub(r"\n#\s+", " ", of_sample("trl_dpo.yaml", tmp_path)[0])
    assert "sync_ref_model: true ^ the reference stays what it was at the start here" in made
    made = re.sub(r"\n#\s+", " ", of_sample("trl_rm.yaml", tmp_path)[0])
    assert "min_lr_rate: 0.1 ^ rm.schedule cosine ends at 0 here" in made


def test_data_to_fill_in_do_not_stop_a_conversion():
    converted = convert("model_name_or_path: m\n", "theirs.yaml", library="trl-rm")
    assert "# To fill in: rm.data, what it is trained on." in converted.text
    assert converted.warnings == [
        "theirs.yaml does not say rm.data, what it is trained on: the default of quatrain stands until you "
        "set it"
    ]


def test_overrides_of_hydra_come_after_the_file_and_need_none(tmp_path):
    """Catches `+key=`, `++key=` and `~key`, which are Hydra's and no key of the file."""
    overrides = ("actor_rollout_ref.rollout.n=5", "+data.train_batch_size=64", "~algorithm.gamma")
    made, config = converted("algorithm: {adv_estimator: grpo, gamma: 0.9}", tmp_path, *overrides)
    assert (config.rollout.n, config.data.batch_size) == (5, 64)
    assert "gamma" not in made
    assert converted("", tmp_path, "actor_rollout_ref.rollout.n=3")[1].rollout.n == 3


SCRIPT = """set -x
max_response_length=$((1024 * 20))
export MINI=${MINI:-$((64 / 2))} N=16
MODEL_PATH=${MODEL_PATH:-"${ROOT:-"${HOME}/verl"}/models/Qwen2.5-32B"}
name="grpo_$(date +%Y %m)"
#   an old command with \\
DATA=(
    data.max_response_length=${max_response_length}
    data.train_batch_size=$((MINI << 4)))
python3 -m verl.trainer.main_ppo "${DATA[@]}" \\
    algorithm.adv_estimator=grpo actor_rollout_ref.model.path="${MODEL_PATH}" \\
    actor_rollout_ref.actor.ppo_mini_batch_size=$MINI actor_rollout_ref.rollout.n=$(( N - 2 * 4 )) \\
    trainer.project_name=run#1 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True trainer.experiment_name=$name \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((max_response_length + 1024) * 2)) $@
"""


def test_a_script_has_the_numbers_that_a_shell_computes(tmp_path):
    """Catches `$((1024 * 20))`, which was taken for a key of OmegaConf and left out in silence: rollouts had
    quatrain's 256 tokens in place of the 20480 of verl's own DAPO scripts."""
    made, config = converted(SCRIPT, tmp_path)
    assert config.rollout.max_new_tokens == 20480
    assert (config.data.batch_size, config.update.mini_batch_size, config.rollout.n) == (512, 32, 8)
    assert config.update.max_tokens_per_device == 43008
    assert config.logging.wandb_project == "run#1"
    assert config.model.path == "${HOME}/verl/models/Qwen2.5-32B"
    assert "trainer.experiment_name: grpo_$(date +%Y %m)" in made


@pytest.mark.parametrize(
    "value", ["$1", "${LENGTH}", "${LENGTH:?set it}", "$((LENGTH * 2))", "$(nproc --all)", "$((7 / 0))"]
)
def test_a_value_that_a_script_does_not_say_is_asked_for(value, tmp_path):
    """Catches a variable of the environment that became a default, without a word."""
    script = f"n={value}\npython3 -m verl data.max_response_length=$n trainer.nnodes=1 data.seed={value}\n"
    with pytest.raises(ConfigError, match=r"theirs.yaml must say its values itself; got data.max_resp") as e:
        converted(script, tmp_path)
    assert "quatrain convert theirs.yaml data.max_response_length=VALUE data.seed=VALUE" in str(e.value)
    given = ("data.max_response_length=99", "data.seed=1")
    assert converted(script, tmp_path, *given)[1].rollout.max_new_tokens == 99


@pytest.mark.parametrize(
    "section",
    [
        "reward_model.overlong_buffer",
        "reward_model.overlong_buffer_cfg",
        "reward_model.reward_kwargs.overlong_buffer_cfg",
        "reward.reward_kwargs.overlong_buffer_cfg",
    ],
)
def test_the_penalty_on_long_completions_is_read_where_verl_has_it(section, tmp_path):
    """Catches one below `reward_kwargs` that was left out as if it belonged to a reward model."""
    longest = section.rpartition(".")[0] + ".max_resp_len"
    text = f"algorithm.adv_estimator: grpo\n{section}: {{enable: true, len: 64, penalty_factor: 0.5}}\n"
    made, config = converted(f"{text}{longest}: 400\n", tmp_path)
    assert config.reward.functions == {"correct": 1.0, "overlong": 0.5}
    assert (config.reward.overlong_buffer, config.reward.overlong_limit) == (64, 400)
    assert "no reward model" not in made
    assert "overlong" not in converted(text.replace("true", "false"), tmp_path)[1].reward.functions


def test_what_has_no_counterpart_is_a_comment_with_its_reason(tmp_path):
    made, _ = of_sample("trl_grpo.yaml", tmp_path)
    comments = re.sub(r"\n#\s+", " ", made)
    assert "top_entropy_quantile: 0.2 ^ no key here does this" in comments
    assert "lora_dropout: 0.05 ^ adapters have no dropout here" in comments
    assert "vllm_mode: colocate ^ the default here" in comments
    assert "deepspeed: zero3.json ^ here it is 'mesh'" in comments
    assert "loss_type dapo is an aggregation" in comments
    assert "on 1 device (give others with" in comments
    text = "algorithm.rollout_correction: {rollout_rs: token_k1, rollout_rs_threshold: 2.0}"
    made = re.sub(r"\n#\s+", " ", converted(text, tmp_path)[0])
    assert "rollout_rs: token_k1 algorithm.rollout_correction.rollout_rs_threshold: 2.0 ^ here it is" in made


@pytest.mark.parametrize(
    ("text", "comment"),
    [
        (TRL_ + "optim: adamw_bnb_8bit", "optim: adamw_bnb_8bit ^ no moments of 8 bits here; "),
        (TRL_ + "optim: adagrad", "optim: adagrad ^ optimizer.name is adamw, lion, sgd, muon or adafactor"),
        (TUNIX_ + "{actor_optimizer_config: {opt_type: adagrad}}", "here, not adagrad"),
    ],
)
def test_optimizers_without_a_counterpart(text, comment, tmp_path):
    """Catches one that is dropped in silence, and moments of 8 bits taken for those of AdamW."""
    made, config = converted(text, tmp_path)
    assert comment in re.sub(r"\n#\s+", " ", made)
    assert config.optimizer.name == "adamw"


def test_a_secret_of_the_file_stays_in_it(tmp_path):
    assert "notarealtoken" not in of_sample("trl_config.json", tmp_path)[0]


def test_a_value_that_our_rules_refuse_becomes_a_comment(tmp_path):
    """Catches output that does not load because two of their settings exclude each other here."""
    text = VERL + "actor_rollout_ref: {model: {lora_rank: 8}}\nactor_rollout_ref.x: 1\n"
    text = text.replace("grpo", "gae")
    made, config = converted(text, tmp_path)
    assert "lora_rank: 8\n#      ^ quatrain refuses it: lora.rank must be 0 with a critic" in made
    assert config.lora.rank == 0


def test_what_is_missing_is_said(tmp_path):
    """Catches a converted file that would train the built-in model because theirs names none."""
    warnings = convert(TRL_, "theirs.yaml").warnings
    assert [each.partition(",")[0].split()[-1] for each in warnings[:2]] == ["model.path", "data.train"]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "a: 1",
            {},
            r"must be a configuration of verl, TRL, Tunix; .*\(a\); name the library, as --from verl",
        ),
        ("", {}, "found no keys in it"),
        (TRL_, {"library": "trlx"}, "--from must be verl or trl or tunix or trl-rloo or .*; got 'trlx'"),
        (GIVEN_ + "max_length: 9", {}, "has keys of several trainers of TRL .*; name the trainer, as --from"),
        ("num_generations: four", {}, "num_generations must be a number to be translated; got 'four'"),
        ("num_generations: [", {}, "not valid YAML"),
    ],
)
def test_files_that_cannot_be_translated(text, options, message):
    with pytest.raises(ConfigError, match=message):
        convert(text, "theirs.yaml", **options)


@pytest.mark.parametrize(
    ("name", "library"), [("trl_grpo.yaml", "TRL"), ("verl_grpo.yaml", "verl"), ("tunix_grpo.yaml", "Tunix")]
)
def test_training_with_another_librarys_file_names_every_key_and_the_command(name, library):
    """Catches a person who mends ten keys, and gets an error about the next ten."""
    path = THEIRS / name
    with pytest.raises(ConfigError) as error:
        file_layer(path)
    said = str(error.value)
    unknown = [problem.split("'")[1] for problem in error.value.problems if problem.startswith("unknown key")]
    assert len(unknown) > 20
    assert [key for key in unknown if f"'{key}'" not in said] == []
    assert said.endswith(
        f"{path} is a configuration of {library}; translate it: quatrain convert {path} > mine.yaml"
    )
