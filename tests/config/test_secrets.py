import pytest

from quatrain.config import secrets
from quatrain.config.dotenv import values_of_keys
from quatrain.config.errors import shown
from quatrain.config.secrets import (
    comparable,
    is_secret_name,
    redact,
    redact_values,
    remember_dotenv,
    same,
)


@pytest.fixture(autouse=True)
def _no_dotenv(monkeypatch):
    monkeypatch.setattr(secrets, "_of_dotenv", set())


@pytest.mark.parametrize(
    "name",
    [
        "WANDB_API_KEY",
        "HF_TOKEN",
        "TOKEN",
        "CLIENT_SECRET",
        "DB_PASSWORD",
        "PASSWORD_FILE",
        "GITHUB_PAT",
        "PGPASS",
        "SECRET_KEY_BASE",
        "AZURE_CREDENTIALS",
        "AWS_SECRET_ACCESS_KEY",
    ],
)
def test_names_of_secrets(name):
    assert is_secret_name(name)
    assert is_secret_name(name.lower())


@pytest.mark.parametrize(
    "name",
    [
        "HOME",
        "TOKENIZERS_PARALLELISM",
        "KEYBOARD",
        "QUATRAIN__ROLLOUT__MAX_NEW_TOKENS",
        "PWD",
        "OLDPWD",
        "PATH",
    ],
)
def test_other_names(name):
    assert not is_secret_name(name)


def test_secrets_are_redacted_wherever_they_stand():
    environ = {"A_TOKEN": "hunter2", "B_API_KEY": "hunter2-long", "HOME": "/home/me"}
    text = redact('at /home/me: "hunter2-long" and xhunter2x', environ)
    assert text == 'at /home/me: "[redacted]" and x[redacted]x'


def test_escaped_and_multiline_secrets_are_redacted():
    environ = {"A_SECRET": 'qu"ote\\d', "MY_PRIVATE_KEY": "first line\nsecond line\n"}
    assert redact('{"x": "qu\\"ote\\\\d"}', environ) == '{"x": "[redacted]"}'
    assert redact("> second line", environ) == "> [redacted]"


def test_a_secret_that_is_no_text_is_redacted():
    secret = b"\xff\xfesecret".decode(errors="surrogateescape")
    assert redact(f"a {secret} b", {"DB_PASSWORD": secret}) == "a [redacted] b"


def test_switches_and_empty_values_do_not_blank_text():
    environ = {"A_TOKEN": "", "B_TOKEN": "1", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "true"}
    assert redact("true 1", environ) == "true 1"


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("postgres://me:pa55w@rd@db.example/x", ["postgres://me:pa55w@rd@db.example/x", "pa55w@rd"]),
        ("https://ghp_0123456789abcdefghij@github.com/x", ["ghp_0123456789abcdefghij"]),
        ("Server=db;Password=pa55word;Pool=5", ["pa55word"]),
        ("hf_abcdefghijklmnopqrst", ["hf_abcdefghijklmnopqrst"]),
        ("sk-proj-abcdefghijklmnopqrst", ["sk-proj-abcdefghijklmnopqrst"]),
        ("AKIAABCDEFGHIJKLMNOP", ["AKIAABCDEFGHIJKLMNOP"]),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0", ["eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0"]),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n-----END", ["MIIEpAIBAAKCAQEA"]),
    ],
)
def test_secrets_by_their_form(value, parts):
    for part in parts:
        assert redact(f"a {part} b", {"ANYTHING": value}) == "a [redacted] b"


def test_a_password_is_redacted_as_it_stands_in_a_url_and_without_its_escapes():
    environ = {"X": "redis://:p%40ss%2Fword@host"}
    assert redact("p%40ss%2Fword p@ss/word", environ) == "[redacted] [redacted]"


@pytest.mark.parametrize(
    "value", ["https://example.com/x?a=1", "ssh://git@host/x", "sk-", "hf_home", "/tmp", "user@example.com"]
)
def test_other_forms(value):
    assert redact(f"a {value} b", {"ANYTHING": value}) == f"a {value} b"


@pytest.mark.parametrize(
    "value", ["any value of eight or more", "12ab-34cd", "training data", "no path: /etc"]
)
def test_values_of_a_dotenv_file(value):
    remember_dotenv({"SOMETHING": value})
    assert redact(f"a {value} b", {}) == "a [redacted] b"


@pytest.mark.parametrize(
    "value",
    ["short", "1", "12345", "1e-4", "true", "0,1,2,3,4,5", "2026-01-01", "/tmp", "bfloat16", "online"],
)
def test_ordinary_values_of_a_dotenv_file(value):
    remember_dotenv({"SOMETHING": value}, values_of_keys())
    assert redact(f"a {value} b", {}) == f"a {value} b"


def test_configuration_is_no_secret_but_a_token_in_it_is():
    remember_dotenv(
        {"QUATRAIN__RUN__NAME": "my-long-name", "QUATRAIN__MODEL__PATH": "hf_abcdefghijklmnopqrst"}
    )
    assert redact("my-long-name hf_abcdefghijklmnopqrst", {}) == "my-long-name [redacted]"


def test_paths_that_exist_and_short_numbers_are_no_secrets_whatever_their_names(tmp_path):
    environ = {"PASSWORD_FILE": str(tmp_path), "MAX_PASS": "1000"}
    assert redact(f"{tmp_path} 1000", environ) == f"{tmp_path} 1000"


def test_names_and_values_are_redacted():
    value = {"hunter2": ["a hunter2", 1, None, ("hunter2",)]}
    expected = {"[redacted]": ["a [redacted]", 1, None, ["[redacted]"]]}
    assert redact_values(value, {"A_TOKEN": "hunter2"}) == expected


def test_a_secret_is_redacted_before_a_message_cuts_it(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "x" * 50 + "secret" * 10)
    assert shown("at " + "x" * 50 + "secret" * 10) == "'at [redacted]'"


@pytest.mark.parametrize("word", ["data", "runs", "Train", "GSM", "my-run", "a/b.c"])
def test_short_words_are_no_secrets_whatever_their_names(word):
    """`S3_KEY=data` must not turn `data/train.jsonl` into `[redacted]/train.jsonl`."""
    environ = {"S3_KEY": word, "DB": f"postgres://me:{word}@db.example/x"}
    assert redact(f"{word}/train.jsonl", environ) == f"{word}/train.jsonl"


@pytest.mark.parametrize("secret", ["hunter2", "xyzzy7", "aBcDeF", "pa$$word", "training-data", "sunshine"])
def test_short_secrets_that_are_no_words_and_longer_ones_stay_redacted(secret):
    assert redact(f"at {secret}", {"A_KEY": secret}) == "at [redacted]"


def test_a_short_word_among_the_lines_of_a_secret_is_no_secret():
    assert redact("data 12ab34", {"MY_PRIVATE_KEY": "12ab34\ndata\n"}) == "data [redacted]"


def test_a_relative_path_that_exists_is_no_secret(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("")
    assert redact("at data/train.jsonl", {"S3_KEY": "data/train.jsonl"}) == "at data/train.jsonl"


def test_values_are_compared_by_themselves_whatever_is_redacted():
    key = {"A_KEY": "hunter2"}
    value = {"data.train": ("hunter2/a.jsonl", "b.jsonl")}
    with_secret, without = comparable(value, key), comparable(value, {})
    assert without == {"data.train": ["hunter2/a.jsonl", "b.jsonl"]}
    assert "hunter2" not in repr(with_secret)
    for saved in (with_secret, without):
        assert same(saved, value)
        assert not same(saved, {"data.train": ("other99/a.jsonl", "b.jsonl")})
        assert not same(saved, {"data.train": ("[redacted]/a.jsonl", "b.jsonl")})
