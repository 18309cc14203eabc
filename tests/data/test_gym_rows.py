import importlib.util

import pytest
import small_gym

from quatrain.cli.main import _one_configuration
from quatrain.config.load import load_config
from quatrain.config.schema import DataConfig
from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.prompts import load_prompts
from quatrain.data.rows import read_rows
from quatrain.loop.inputs import _shared_questions


@pytest.fixture
def gym(tmp_path, monkeypatch):
    small_gym.install(tmp_path, monkeypatch)


def test_rows_have_the_question_the_answer_and_what_names_the_entry(gym):
    spec = 'reasoning_gym:sums?size=3&seed=7&least=50&names=["x","*"]&kind=odd'
    rows = read_rows(spec)
    assert len(rows) == 3
    assert [set(row) for row in rows] == [{"prompt", "answer", "rg"}] * 3
    (message,) = rows[1]["prompt"]
    assert message["role"] == "user"
    assert message["content"].startswith("['x', 'odd'] ")
    a, b = map(int, message["content"].removeprefix("['x', 'odd'] ").removesuffix(" =").split(" + "))
    assert a >= 50
    assert rows[1]["answer"] == str(a + b)
    digest = rows[1]["rg"].pop("digest")
    assert len(digest) == 16
    config = {"size": 3, "least": 50, "names": ["x", "*"], "kind": "odd"}
    assert rows[1]["rg"] == {"name": "sums", "config": config, "seed": 7, "index": 1}
    # Entry i of seed s is entry i - 1 of seed s + 1.
    assert read_rows(spec.replace("seed=7", "seed=8"))[0]["prompt"] == rows[1]["prompt"]


def test_the_order_of_sets_is_the_same_in_every_process(gym):
    first, second = (read_rows("reasoning_gym:unordered?size=1") for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("product", "data sets are countdown, global, matrices, sums, unordered; got 'product'; name one"),
        ("composite", "got 'composite'; name one of these; for a mixture, give a list of data sets"),
        ("sums?leest=3", "the parameters of sums are size, seed, least, names, kind; got 'leest'"),
        ("sums?least=few", "the parameter least of sums must be int; got 'few'"),
        ("sums?kind=strange", "the parameter kind of sums must be Kind; got 'strange'"),
        ("sums?least=-1", r"sums refuses .*AssertionError: least must be non-negative\); correct it"),
        ("sums?least=100", r"cannot be generated \(error\): ValueError: empty range .*; correct its config"),
        ("sums?size=0", "size must be a whole number, at least 1; got 0"),
        ("sums?seed=-1", "seed must be a whole number, at least 0; got -1"),
        ("sums?size", "parameters must be NAME=VALUE, each name once, with & between them; got 'size'"),
        ("sums?least=1&least=2", "each name once, with & between them; got 'least=2'"),
    ],
)
def test_what_is_no_data_set_of_the_package_is_one_error(gym, spec, message):
    with pytest.raises(ValueError, match=f"data set 'reasoning_gym:{spec[:4]}.*{message}"):
        read_rows(f"reasoning_gym:{spec}")


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[reasoning-gym\]'"):
        read_rows("reasoning_gym:sums")


def test_reward_accuracy_and_evaluation_are_derived():
    def config(*overrides):
        return load_config(None, overrides, {}).config

    found = config("data.train=reasoning_gym:sums?size=2000&seed=5&least=2")
    assert found.data.eval == "reasoning_gym:sums?size=2000&least=2&seed=2005"
    assert found.reward.functions == {"reasoning_gym": 1.0}
    assert found.eval.accuracy == "reasoning_gym"
    several = config("data.train=[reasoning_gym:sums, 'reasoning_gym:countdown?seed=3']")
    assert several.data.eval == ("reasoning_gym:sums?seed=500", "reasoning_gym:countdown?seed=503")
    own = config("data.train=reasoning_gym:sums", "data.eval=mine.jsonl", "reward.functions={format: 1.0}")
    assert own.reward.functions == {"format": 1.0}
    assert own.eval.accuracy is None
    mixed = config("data.train=[reasoning_gym:sums, mine.jsonl]")
    assert mixed.data.eval is None
    assert "correct" in mixed.reward.functions


def test_processes_agree_on_a_derived_reward():
    resolved = load_config(None, ["data.train=reasoning_gym:sums"], {})
    assert _one_configuration(resolved).config == resolved.config


def test_evaluation_asks_other_questions_than_training():
    def prompts(*questions):
        rows = [{"prompt": text, "rg": {"digest": text}} for text in questions]
        return load_prompts("mine", DataConfig(), builtin_tokenizer(), seed=0, rows={"mine": rows})

    train = prompts("a", "b", "c")
    assert _shared_questions("e", train, prompts("d", "e")) == []
    assert _shared_questions("e", train, prompts("d", "a", "f")) == [
        "e: 1 of 3 are questions of data.train too"
    ]
    with pytest.raises(ValueError, match=r"other questions than training; 2 of its 4 are in data\.train; "):
        _shared_questions("e", train, prompts("d", "a", "f", "a"))
    other = load_prompts(
        "x", DataConfig(), builtin_tokenizer(), seed=0, rows={"x": [{"prompt": "a", "answer": "1"}]}
    )
    assert _shared_questions("e", train, other) == _shared_questions("e", other, other) == []
