import pytest

from quatrain.config.dump import dump_yaml
from quatrain.config.errors import ConfigError
from quatrain.config.load import load_config


def test_what_is_written_in_several_forms_is_read_back(tmp_path):
    entry = "{args: {words: [a, 'no', {b: 1e-7}]}, data_source: gsm8k}"
    settings = (
        f"reward.functions={{correct: 1, 'dir/a.py:f': {entry}}}",
        "data.train=[a.jsonl, 'b, c.jsonl']",
        "data.eval=a.jsonl",
        "data.chat_template_kwargs={enable_thinking: false, names: [x, 1:30]}",
        "run.profile_steps=[3, 4]",
    )
    resolved = load_config(None, settings, {})
    (tmp_path / "config.yaml").write_text(dump_yaml(resolved))
    again = load_config(tmp_path / "config.yaml", [], {}).config
    assert again == resolved.config
    entry = again.reward.entries["dir/a.py:f"]
    assert (entry.weight, entry.data_source) == (1.0, ("gsm8k",))
    assert entry.args == {"words": ["a", "no", {"b": 1e-7}]}
    assert again.data.train == again.sft.data == ("a.jsonl", "b, c.jsonl")


def test_a_list_of_one_data_set_is_the_one():
    config = load_config(None, ["data.train=['builtin:arithmetic']"], {}).config
    assert config.data.train == config.sft.data == "builtin:arithmetic"
    assert config.data.eval == "builtin:arithmetic-heldout"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train=[]", "data.train must be a data set, or a list of data sets, as [a.jsonl, b.parquet]"),
        ("data.train=''", "data.train must be a data set, or a list of data sets"),
        ("data.train=[a, 1]", "data.train must be a data set, or a list"),
        (
            "reward.functions={f: {wieght: 1}}",
            "no other keys than weight, args and data_source; it has wieght",
        ),
        ("reward.functions={f: {weight: x}}", "reward.functions.f.weight must be a number; got 'x'"),
        (
            "reward.functions=rewards.py:f",
            "reward.functions must be a mapping from functions to weights, as {",
        ),
        ("reward.functions={f: {args: [1]}}", "reward.functions.f.args must be a mapping of names to values"),
        ("reward.functions={f: {data_source: [1]}}", "reward.functions.f.data_source.0 must be text"),
        ("reward.functions={f: true}", "reward.functions.f must be a number, or a mapping"),
        (
            "reward.functions={'model:x': {args: {a: 1}}}",
            "must have no args for a reward model or the judge; model:x has some",
        ),
        ("run.profile_steps=3", "run.profile_steps must be a list"),
        ("update.reference_sync_steps=2", "update.reference_sync_steps has no effect without a reference"),
        ("update.reference_mixup=0.5", "has no effect without update.reference_sync_steps"),
        ("checkpoint.best_mode=min", "has no effect without checkpoint.best_metric"),
    ],
)
def test_a_bad_form_is_one_error(override, message):
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["update.kl_coef=0", override], {})
    (problem,) = caught.value.problems
    assert message in problem


@pytest.mark.parametrize(
    "override",
    ["optimizer.beta1=1.0", "optimizer.beta2=1", "critic_optimizer.beta2=1", "optimizer.eps=1e-50"],
)
def test_an_optimizer_that_would_divide_by_zero(override):
    """With a decay of 1, or an eps that is 0 in float32, the first step made the weights NaN."""
    with pytest.raises(ConfigError, match=rf"{override.partition('=')[0]} must be .*; got"):
        load_config(None, ["advantage.estimator=gae", override], {})


def test_mini_batches_are_given_by_size_or_number():
    sizes = ["data.batch_size=10", "update.num_mini_batches=4"]
    assert load_config(None, sizes, {}).config.update.mini_batch_size == 3
    assert load_config(None, [*sizes, "update.mini_batch_size=3"], {})
    message = r"must be null, or 3 as update\.num_mini_batches 4 and data\.batch_size 10 make it"
    with pytest.raises(ConfigError, match=message):
        load_config(None, [*sizes, "update.mini_batch_size=5"], {})
    both = ["data.batch_size=2", "update.mini_batch_size=4"]
    with pytest.raises(ConfigError, match=r"must be at most data\.batch_size \(2\)"):
        load_config(None, both, {})
