from quatrain.config.errors import ConfigError, nearest_keys, shown

KEYS = [
    "seed",
    "rollout.n",
    "rollout.max_new_tokens",
    "optimizer.learning_rate",
    "update.epochs",
    "run.epochs",
]


def test_the_nearest_key_is_found_by_its_full_path():
    assert nearest_keys("rolout.n", KEYS) == ["rollout.n"]
    assert nearest_keys("rollout.max_tokens", KEYS) == ["rollout.max_new_tokens"]
    assert nearest_keys("update.epoch", KEYS) == ["update.epochs"]
    assert nearest_keys("sed", KEYS) == ["seed"]


def test_the_nearest_key_is_found_in_another_section():
    assert nearest_keys("learning_rate", KEYS) == ["optimizer.learning_rate"]
    assert nearest_keys("train.max_new_tokens", KEYS) == ["rollout.max_new_tokens"]


def test_keys_that_are_as_near_are_all_named():
    keys = ["sft.learning_rate", *KEYS]
    assert nearest_keys("learning_rte", keys) == ["sft.learning_rate", "optimizer.learning_rate"]
    assert nearest_keys("stf.learning_rate", keys) == ["sft.learning_rate"]


def test_an_error_has_a_line_for_each_problem():
    error = ConfigError(["one", "two"])
    assert error.problems == ("one", "two")
    assert str(error) == "one\ntwo"
    assert ConfigError("one").problems == ("one",)
    assert isinstance(error, ValueError)


def test_long_values_are_shortened():
    assert shown("abc") == "'abc'"
    assert len(shown("x" * 500)) == 80
