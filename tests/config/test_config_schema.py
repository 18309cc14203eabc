import pytest
from pydantic import ValidationError

from quatrain.config.schema import (
    AdvantageConfig,
    Config,
    DataConfig,
    LoggingConfig,
    LogprobConfig,
    ModelConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    UpdateConfig,
)
from quatrain.config.settings import sections, valid_keys

SIZES = ("mini_batch_size", "micro_batch_size", "max_tokens_per_device")


def test_every_key_is_described():
    for name, kind in {"": Config, **sections()}.items():
        for key, field in kind.model_fields.items():
            if key not in sections():
                assert field.description, f"{name}.{key}"
                assert field.description.endswith("."), f"{name}.{key}"


def test_the_keys_that_were_agreed_are_there():
    agreed = """
    seed run.name run.dir run.steps run.epochs model.path model.dtype model.param_dtype model.remat
    data.train data.eval data.batch_size data.max_prompt_length data.on_long_prompt data.system_prompt
    sft.steps rollout.n rollout.max_new_tokens rollout.temperature rollout.top_p rollout.top_k
    rollout.min_p rollout.stop reward.functions advantage.estimator advantage.scale
    update.mini_batch_size update.epochs update.micro_batch_size update.loss update.clip_low
    update.clip_high update.dual_clip update.loss_aggregation update.kl_coef update.kl_estimator
    update.entropy_coef update.old_logprobs logprob.micro_batch_size optimizer.learning_rate
    model.attention update.max_tokens_per_device logprob.max_tokens_per_device update.share_prompts
    eval.every_steps checkpoint.every_steps checkpoint.keep logging.wandb logging.tensorboard
    """
    assert set(agreed.split()) <= set(valid_keys())


def test_sections_are_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Config().rollout.n = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (RolloutConfig, {"n": 0}),
        (RolloutConfig, {"max_new_tokens": 0}),
        (RolloutConfig, {"logprob_diff_warning": 0.0}),
        (RolloutConfig, {"logprob_diff_warning": -0.1}),
        (RolloutConfig, {"n": "8"}),
        (RolloutConfig, {"mesh": "1,8"}),
        (RolloutConfig, {"mesh": {"pp": 2}}),
        (Config, {"mesh": "-1,-1,1"}),
        (Config, {"mesh": {"dp": "2"}}),
        (Config, {"mesh": 8}),
        (Config, {"mesh": None}),
        (RolloutConfig, {"n": True}),
        (RolloutConfig, {"n": 8.0}),
        (RolloutConfig, {"top_p": 0.0}),
        (RolloutConfig, {"top_p": 1.5}),
        (RolloutConfig, {"temperature": -1.0}),
        (RolloutConfig, {"temperature": float("nan")}),
        (RolloutConfig, {"stop": "###"}),
        (RolloutConfig, {"stop": [""]}),
        (RolloutConfig, {"stop": [1]}),
        (DataConfig, {"train": ""}),
        (Config, {"reward": {"functions": {}}}),
        (RewardConfig, {"functions": {"": 1.0}}),
        (RewardConfig, {"functions": {"correct": float("inf")}}),
        (RewardConfig, {"functions": ["correct"]}),
        (RunConfig, {"name": "../elsewhere"}),
        (RunConfig, {"name": ".."}),
        (RunConfig, {"name": "a b"}),
        (UpdateConfig, {"dual_clip": 1.0}),
        *((UpdateConfig, {key: size}) for key in SIZES for size in (0, -1)),
        *((LogprobConfig, {key: size}) for key in SIZES[1:] for size in (0, -1)),
        (UpdateConfig, {"epochs": 0}),
        (DataConfig, {"batch_size": 0}),
        (DataConfig, {"batch_size": -16}),
        (RolloutConfig, {"n": -8}),
        (ModelConfig, {"attention": "flash"}),
        (LoggingConfig, {"tensorboard": "yes"}),
        (Config, {"seed": -1}),
        (Config, {"seed": 2**32}),
        (Config, {"rollout": {"num": 3}}),
    ],
)
def test_bad_values_are_refused(kind, values):
    with pytest.raises(ValidationError):
        kind(**values)


def test_good_values_at_the_bounds():
    assert Config(seed=2**32 - 1).seed == 4294967295
    assert RunConfig(name="gsm8k_2.v-1").name == "gsm8k_2.v-1"
    assert RolloutConfig(stop=["###", "\n\n"]).stop == ("###", "\n\n")
    assert RolloutConfig(logprob_diff_warning=None).logprob_diff_warning is None
    assert UpdateConfig(clip_low=0).clip_low == 0.0


def test_a_mini_batch_larger_than_the_batch_is_refused():
    update = UpdateConfig(mini_batch_size=17)
    with pytest.raises(ValidationError, match=r"at most data\.batch_size \(16\)"):
        Config(update=update)
    assert Config(update=update, data=DataConfig(batch_size=17)).update.mini_batch_size == 17


@pytest.mark.parametrize("section", ["update", "logprob"])
def test_two_micro_batch_modes_in_one_section_are_refused(section):
    both = {"micro_batch_size": 8, "max_tokens_per_device": 4096}
    with pytest.raises(ValidationError, match=rf"{section}\.max_tokens_per_device \(4096\) is set"):
        Config(**{section: both})
    mixed = Config(update={"micro_batch_size": 8}, logprob={"max_tokens_per_device": 4096})
    assert (mixed.update.micro_batch_size, mixed.logprob.max_tokens_per_device) == (8, 4096)


@pytest.mark.parametrize(
    ("estimator", "scale", "known"),
    [
        ("dr_grpo", "group", "none"),
        ("dr_grpo", "batch", "none"),
        ("rloo", "group", "none"),
        ("rloo", "batch", "none"),
        ("reinforce", "group", "batch or none"),
    ],
)
def test_a_scale_that_the_estimator_does_not_know_is_refused(estimator, scale, known):
    with pytest.raises(ValidationError, match=f"must be {known} for advantage.estimator {estimator}"):
        Config(advantage=AdvantageConfig(estimator=estimator, scale=scale))
    assert Config(advantage=AdvantageConfig(estimator=estimator, scale="none")).advantage.scale == "none"


def test_prompts_are_shared_only_where_they_can_be():
    with pytest.raises(ValidationError, match=r"needs a token budget, and update.micro_batch_size is 8"):
        Config(update=UpdateConfig(share_prompts=True, micro_batch_size=8))
    assert Config(update=UpdateConfig(micro_batch_size=8)).update.share_prompts == "auto"
    with pytest.raises(ValidationError):
        UpdateConfig(share_prompts="yes")


def test_weight_decay_without_effect_is_refused():
    with pytest.raises(ValidationError, match=r"must be 0 for optimizer\.name sgd"):
        Config(optimizer=OptimizerConfig(name="sgd", weight_decay=0.1))
    assert Config(optimizer=OptimizerConfig(name="sgd")).optimizer.weight_decay == 0
    assert Config(optimizer=OptimizerConfig(name="lion", weight_decay=0.1)).optimizer.weight_decay == 0.1


def test_an_argument_of_a_function_is_a_scalar():
    for value in (1, 0.5, True, "text", None):
        assert UpdateConfig(loss_args={"x": value}).loss_args == {"x": value}
    with pytest.raises(ValidationError, match="must be a finite number, text, true, false or null") as error:
        AdvantageConfig(args={"x": [1, 2]})
    assert error.value.error_count() == 1
    with pytest.raises(ValidationError, match="must be a finite number") as error:
        RunConfig(stop_when={"metric": "eval/accuracy", "at_least": float("nan")})
    assert error.value.error_count() == 1


def test_reward_models_are_named_by_their_paths():
    functions = {"correct": 1.0, "model:models/judge": 0.5, "model:org/name": 2.0}
    reward = Config(reward={"functions": functions}).reward
    assert reward.models == {"model:models/judge": "models/judge", "model:org/name": "org/name"}
    with pytest.raises(ValidationError, match="must name a reward model with its path"):
        Config(reward={"functions": {"model:": 1.0}})
