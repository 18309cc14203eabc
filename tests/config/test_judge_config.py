"""The section `reward.judge`: its short form, its entries one by one, and what it refuses."""

import pytest

from quatrain.config.dump import dump_yaml
from quatrain.config.load import load_config

SERVER = "reward.judge.base_url=http://host/v1"


def _judge(*overrides, path=None):
    return load_config(path, overrides, environ={})


def test_the_short_form_and_single_entries_agree():
    """Catches a short form that loses entries of another layer, and a judge without a weight."""
    resolved = _judge("reward.judge=self", "reward.judge.n=3")
    judge = resolved.config.reward.judge
    assert (judge.self, judge.n, judge.judging_temperature) == (True, 3, 1.0)
    assert resolved.config.reward.functions == {"judge": 1.0}
    assert resolved.provenance["reward.judge.n"] == "--set"
    assert resolved.provenance["reward.judge.rpm"] == "default"


def test_what_is_written_is_read_again(tmp_path):
    """Catches a run's config.yaml that cannot be loaded, or has another judge."""
    resolved = _judge(SERVER, "reward.judge.budget={tokens: 5000}", "reward.judge.scale=[0, 10]")
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(resolved))
    assert _judge(path=path).config.reward == resolved.config.reward


def test_files_beside_a_configuration_are_found(tmp_path):
    """Catches a template beside its configuration that another folder does not find."""
    (tmp_path / "judge.txt").write_text("{completion}")
    path = tmp_path / "mine.yaml"
    path.write_text("reward: {judge: {self: true, template: judge.txt}}\n")
    assert _judge(path=path).config.reward.judge.template == str(tmp_path / "judge.txt")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["reward.judge={}"], r"exactly one of self, model and base_url, .*; it has none; keep one"),
        (["reward.judge={self: true, model: a}"], r"it has self and model; keep one"),
        ([SERVER, "reward.judge.body={n: 4}"], r"body without .*; it has n: set reward\.judge\.n"),
        ([SERVER, "reward.judge.body={stream: true}"], r"it has stream: an answer is read whole"),
        (
            [SERVER, "reward.judge.body={max_tokens: null, max_completion_tokens: 9}", "reward.judge.tpm=9"],
            r"tpm above max_tokens \(9\)",
        ),
        (["reward.judge={self: true, rpm: 3}"], r"must have rpm with base_url alone"),
        (["reward.judge=yes please"], r"reward\.judge.*unknown key|unknown key 'reward\.judge\.yes please'"),
        (
            ["reward.judge.self=true", "reward.judge.nn=1"],
            r"unknown key 'reward\.judge\.nn' .*reward\.judge\.n",
        ),
        ([SERVER, "reward.judge.scale=[1, 0]"], r"reward\.judge\.scale must be two numbers"),
        (
            [SERVER, "reward.judge={n: 2, temperature: 0.0, self: true}"],
            r"must have temperature above 0 for n 2",
        ),
        ([SERVER, "reward.judge.tpm=100"], r"must have tpm above max_tokens \(512\)"),
        (["reward.judge.base_url=http://user:pass@host"], r"without a user or a key"),
        (["reward.judge=self", "reward.functions={correct: 1.0}"], r"must have the entry judge"),
        (["reward.functions={judge: 1.0}"], r"names the reward of a judge, which there is not"),
        (
            [SERVER, "reward.functions={judge: {args: {a: 1}}}"],
            r"have no args for a reward model or the judge",
        ),
        (["reward.judge={self: true, cache: shared}"], r"must have cache true or false for the judge self"),
    ],
)
def test_what_cannot_be_is_refused(overrides, message):
    """Catches a rule that is not applied, or a message without rule, value and remedy."""
    with pytest.raises(ValueError, match=message):
        _judge(*overrides)


def test_a_key_in_the_place_of_its_variable_is_not_shown():
    """Catches an API key that an error writes to the terminal and the log."""
    with pytest.raises(ValueError, match=r"name of an environment variable") as error:
        _judge(SERVER, "reward.judge.key_variable=sk-abcdefabcdefabcdef123456")
    assert "abcdef" not in str(error.value)
