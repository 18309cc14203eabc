"""The forms of `data.train` and `sft.data`, a mixture among them, and of `data.curriculum`."""

import json

import pytest

from quatrain.config.data_sets import MixedSet, source_names, whole_weights
from quatrain.config.dump import dump_yaml
from quatrain.config.errors import ConfigError
from quatrain.config.load import load_config

BAND = "data.curriculum={low: 0.2}"


def load(*overrides):
    return load_config(None, overrides, {}).config


def mixture(**weights):
    return f"data.train={json.dumps([{'path': path, 'weight': weight} for path, weight in weights.items()])}"


def test_a_mixture_is_the_same_after_it_was_written(tmp_path):
    resolved = load_config(None, [mixture(a=3, b=0.1)], {})
    data = resolved.config.data
    assert data.train == (MixedSet("a", 3.0), MixedSet("b", 0.1))
    assert resolved.config.sft.data == data.train  # derived
    file = tmp_path / "again.yaml"
    file.write_text(dump_yaml(resolved))
    assert load_config(file, [], {}).config.data == data


def test_a_mixture_of_one_is_that_data_set():
    assert load(mixture(a=3)).data.train == "a"
    assert load("data.train=[a, a]").data.train == ("a", "a")


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ((3, 1), (3, 1)),
        ((0.1, 0.7), (1, 7)),
        ((0.5, 0.25, 0.25), (2, 1, 1)),
        ((6, 4), (3, 2)),
        ((1e-3, 1), (1, 1000)),
    ],
)
def test_weights_are_the_decimal_numbers_that_were_written(weights, whole):
    """0.1 in binary is no tenth: proportions of it would be those of two very large numbers."""
    sets = load(mixture(**{f"s{number}": weight for number, weight in enumerate(weights)})).data.train
    assert whole_weights(sets) == whole
    assert whole_weights("a") == whole_weights(("a", "b")) == ()


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("[]", "must be a data set, or a list of data sets"),
        (
            "{path: a, weight: 1}",
            "must be a data set, .* or a mixture, a list of {path, weight}; give a list",
        ),
        ("[{path: a, weight: 1}, b]", "both forms; give each entry a weight"),
        ("[{path: a, weight: 1}, {path: a, weight: 2}]", "each data set of a mixture once; a is there twice"),
        ("[{path: a, weight: 1}, {path: b}]", "with these two keys"),
        ("[{path: a, weight: 1}, {path: b, weight: 1, repeat: 2}]", "with these two keys"),
        ("[{path: a, weight: 1}, {path: '', weight: 1}]", "and a path as text"),
        (
            "[{path: a, weight: 0.3333333}, {path: b, weight: 0.6666661}]",
            "at most 1,000,000; these need larger",
        ),
        *(
            (f"[{{path: a, weight: 1}}, {{path: b, weight: {weight}}}]", "a weight above 0, a finite number")
            for weight in ("0", "-1", ".inf", ".nan", "true", "'2'", "null")
        ),
    ],
)
def test_a_mixture_that_cannot_be_drawn_is_refused_by_its_key(value, rule):
    for key in ("data.train", "sft.data"):
        with pytest.raises(ConfigError, match=rule) as refused:
            load(f"{key}={value}")
        assert str(refused.value).startswith(f"{key} must ")


def test_evaluation_reads_whole_sets():
    whole = r" must be a data set, or a list of data sets, .*; these are read whole and take no weights"
    for key in ("data.eval", "sft.eval"):
        with pytest.raises(ConfigError, match=key + whole):
            load(f"{key}=[{{path: a, weight: 1}}, {{path: b, weight: 1}}]")


def test_sources_have_short_names_of_their_own():
    paths = ["x/train.jsonl", "y/train.parquet", "builtin:arithmetic", "reasoning_gym:chain_sum?size=9"]
    paths += ["openai/gsm8k:main", "z/part-*.csv", "s.v2"]
    assert list(source_names(tuple(paths)).values()) == [
        "x-train.jsonl", "y-train.parquet", "arithmetic", "chain_sum", "openai-gsm8k-main", "part", "s.v2",
    ]  # fmt: skip
    assert list(source_names(("a b", "a-b", "a*b")).values()) == ["a-b", "a-b-2", "a-b-3"]
    assert source_names(("a", "a")) == {"a": "a"}


def test_a_curriculum_is_off_unless_asked_for_and_has_defaults_then():
    assert load().data.difficulty is None
    on = load(BAND).data
    assert on.curriculum == {
        "reward": "correct", "low": 0.2, "high": 0.9, "outside": 0.1, "prior": 0.5, "newest": 0.5
    }  # fmt: skip
    assert load("data.curriculum.low=0.2").data == on
    assert on.difficulty.model_dump() == on.curriculum


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ("{low: 0.5, high: 0.4}", "low at most high"),
        ("{lowest: 0.5}", "must have entries of reward, .*, newest; lowest: is none of them; correct it"),
        ("{outside: 0}", "outside: must be greater than 0"),
        ("{outside: 2}", "outside: must be less than or equal to 1"),
        ("{newest: 0}", "newest: must be greater than 0"),
        ("{newest: 1.5}", "newest: must be less than or equal to 1"),
        ("{prior: .nan}", "prior: must be a finite number"),
        ("{low: '0'}", "low: must be a number"),
        ("{reward: ''}", "reward: must not be empty"),
        ("true", "must be a mapping"),
    ],
)
def test_a_curriculum_that_means_nothing_is_refused(value, rule):
    with pytest.raises(ConfigError, match=rule) as refused:
        load(f"data.curriculum={value}")
    assert str(refused.value).startswith("data.curriculum must ")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("data.shuffle=false", "data.shuffle must be true"),
        ("rollout.dynamic_sampling_rounds=2", "rollout.dynamic_sampling_rounds must be 1"),
        ("rollout.in_flight=true", "rollout.in_flight must be false"),
    ],
)
def test_what_leaves_a_curriculum_undefined_is_refused(override, key):
    more = ("rollout.max_staleness=1",) if "in_flight" in override else ()
    load(override, *more)
    with pytest.raises(ConfigError, match=f"{key} with data.curriculum"):
        load(override, BAND, *more)
    load(BAND, "rollout.max_staleness=1", "data.min_pass_rate=0.1")
