import math
import re
from pathlib import Path

import pytest

from quatrain.config.dump import dump_yaml
from quatrain.config.errors import ConfigError
from quatrain.config.load import load_config
from quatrain.config.settings import environment_layer, file_layer, is_mapping, override_layer, parse_yaml


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1E3", 1000.0),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("16", 16),
        ("-16", -16),
        ("+3", 3),
        ("16_384", 16384),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("1:30", "1:30"),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("off", "off"),
        ("no", "no"),
        ("null", None),
        ("~", None),
        ("", None),
        ("2026-01-01", "2026-01-01"),
        ("1e", "1e"),
        ("e5", "e5"),
        ("1.2.3", "1.2.3"),
        ("'1e-6'", "1e-6"),
        ("-.inf", -math.inf),
        ("[1, a]", [1, "a"]),
        ("{a: 1e-3}", {"a": 1e-3}),
        ("../shared/x.jsonl", "../shared/x.jsonl"),
        ("builtin:arithmetic", "builtin:arithmetic"),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    parsed = parse_yaml(text, "here")
    assert parsed == value
    assert type(parsed) is type(value)


def test_repeated_keys_are_refused_with_their_line():
    with pytest.raises(ConfigError, match=r"here, line 3: not valid YAML: the key 'n' is given twice"):
        parse_yaml("rollout:\n  n: 1\n  n: 2\n", "here")
    assert parse_yaml("a: {n: 1}\nb: {n: 2}", "here") == {"a": {"n": 1}, "b": {"n": 2}}


def test_a_colon_without_a_space_is_no_key():
    rule = r"'ep:2' is a key without a value; a colon needs a space after it: ep: 2"
    with pytest.raises(ConfigError, match=rf"here, line 1: not valid YAML: {rule}"):
        parse_yaml("{dp: 1, ep:2}", "here")
    assert parse_yaml("{'ep:2': ''}", "here") == {"ep:2": ""}
    assert parse_yaml("{a.py:f, b: }", "here") == {"a.py:f": None, "b": None}


def test_merged_mappings_may_be_overridden():
    text = "base: &base {n: 1, m: 2}\nrollout:\n  <<: *base\n  n: 3\n"
    assert parse_yaml(text, "here")["rollout"] == {"n": 3, "m": 2}


@pytest.mark.parametrize(
    "text",
    [
        "a: [1",
        "a: b: c",
        "\ta: 1",
        "@x",
        "!!python/object:os.system {}",
        "a\x00",
        "*x",
        "!!int x",
        "a: !!float x",
        "!!bool x",
        "!!timestamp x",
        "{[a]: 1}",
        "{{a: 1}: 1}",
    ],
)
def test_text_that_is_not_yaml_names_its_source(text):
    with pytest.raises(ConfigError, match=r"^here"):
        parse_yaml(text, "here")


def test_a_file_gives_settings_in_order(tmp_path):
    path = write(tmp_path, "seed: 3\nrollout:\n  n: 4\n  stop: [a]\nsft:\n")
    settings = file_layer(path)
    assert [(s.key, s.value) for s in settings] == [("seed", 3), ("rollout.n", 4), ("rollout.stop", ["a"])]
    assert {s.layer for s in settings} == {f"file {path}"}


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="the file is empty"):
        file_layer(write(tmp_path, text))


@pytest.mark.parametrize("text", ["- seed\n", "seed\n", "5\n"])
def test_a_file_must_be_a_mapping(tmp_path, text):
    with pytest.raises(ConfigError, match="the top level must be a mapping"):
        file_layer(write(tmp_path, text))


def test_a_missing_file_names_those_nearby(tmp_path):
    near = write(tmp_path, "seed: 1")
    with pytest.raises(ConfigError, match="no such configuration file") as caught:
        file_layer(tmp_path / "confg.yaml")
    assert str(near) in str(caught.value)


def test_a_folder_and_a_binary_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="this is a folder"):
        file_layer(tmp_path)
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        file_layer(binary)


def test_every_unknown_key_is_named_with_the_nearest(tmp_path):
    path = write(tmp_path, "sead: 1\nrolout:\n  n: 1\nrollout:\n  tempature: 1\n")
    with pytest.raises(ConfigError) as caught:
        file_layer(path)
    assert caught.value.problems == (
        f"unknown key 'sead' (from file {path}); the nearest valid key is 'seed'",
        f"unknown key 'rolout' (from file {path}); the nearest valid key is 'rollout'",
        f"unknown key 'rollout.tempature' (from file {path}); the nearest valid key is 'rollout.temperature'",
    )


def test_a_section_takes_keys(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout is a section and takes keys, as rollout\.n; got 16"):
        file_layer(write(tmp_path, "rollout: 16"))
    with pytest.raises(ConfigError, match=r"rollout is a section .* got None \(from --set\)"):
        override_layer(["rollout=null"])


def test_overrides_are_yaml():
    settings = override_layer(
        [
            "data.train=../shared/x.jsonl",
            "optimizer.learning_rate=1e-6",
            "rollout={n: 4, top_k: 5}",
            "run.name=",
        ]
    )
    assert [(s.key, s.value) for s in settings] == [
        ("data.train", "../shared/x.jsonl"),
        ("optimizer.learning_rate", 1e-6),
        ("rollout.n", 4),
        ("rollout.top_k", 5),
        ("run.name", None),
    ]


def test_an_override_keeps_what_follows_the_first_equals_sign():
    assert override_layer(["data.system_prompt=a=b"])[0].value == "a=b"


@pytest.mark.parametrize("text", ["rollout.n", "", "=3", " = 3"])
def test_an_override_needs_key_and_value(text):
    with pytest.raises(ConfigError, match="--set needs KEY=VALUE"):
        override_layer([text])


def test_an_override_that_is_not_yaml_suggests_quotes():
    with pytest.raises(ConfigError, match=r"--set data\.train.*in quotes"):
        override_layer(["data.train=@file"])


def test_an_override_whose_key_is_a_list():
    with pytest.raises(ConfigError, match=r"--set reward\.functions, line 1: .*a key must be text"):
        override_layer(["reward.functions={[a]: 1}"])


def test_a_tag_that_does_not_fit_its_value():
    with pytest.raises(ConfigError, match=r"--set rollout\.n: not valid YAML: a tag does not fit its value"):
        override_layer(["rollout.n=!!int x"])


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("rollout.n.x", "the nearest valid key is 'rollout.n'"),
        ("rollout.", "the keys of rollout are n, max_new_tokens"),
        (".n", "the nearest valid key is 'rollout.n' or 'eval.n'"),
        ("n", "the nearest valid key is 'rollout.n' or 'eval.n'"),
        ("data.foo", "the keys of data are train, eval"),
        ("optimizer.xyz", "the keys of optimizer are name, learning_rate"),
        ("banana", "the keys and sections are seed, mesh, run"),
        ("optimizr.beta1", "the nearest valid key is 'optimizer.beta1'"),
        ("reward.function.correct", "the nearest valid key is 'reward.functions'"),
    ],
)
def test_an_unknown_key_has_advice_that_fits(key, advice):
    """Catches the nearest of all keys offered for a word that is near none."""
    with pytest.raises(ConfigError, match=rf"unknown key .* {re.escape(advice)}"):
        override_layer([f"{key}=1"])


def test_the_name_of_a_mapping_entry_may_have_dots():
    setting = override_layer(["reward.functions.my.module:score=0.5"])[0]
    assert setting.path == ("reward", "functions", "my.module:score")
    assert is_mapping(("reward", "functions"))
    assert not is_mapping(("reward",))
    assert not is_mapping(("rollout", "n"))


def test_the_environment_is_read_by_its_prefix_whatever_the_case():
    environ = {"QUATRAIN__ROLLOUT__N": "16", "quatrain__seed": "7", "ROLLOUT__N": "1", "QUATRAIN_DEBUG": "1"}
    settings = environment_layer(environ)
    assert {s.key: (s.value, s.layer) for s in settings} == {
        "rollout.n": (16, "environment QUATRAIN__ROLLOUT__N"),
        "seed": (7, "environment quatrain__seed"),
    }


def test_two_variables_for_one_key_are_refused():
    with pytest.raises(ConfigError, match=r"both set rollout\.n"):
        environment_layer({"QUATRAIN__ROLLOUT__N": "1", "QUATRAIN__rollout__n": "2"})


def test_an_unknown_variable_is_an_error_that_keeps_its_value_to_itself():
    with pytest.raises(ConfigError, match=r"unknown key 'logging\.wandb_api_key'") as caught:
        environment_layer({"QUATRAIN__LOGGING__WANDB_API_KEY": "abcdef"})
    assert "abcdef" not in str(caught.value)


def _files(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_a_file_extends_others_in_a_chain_and_provenance_names_each(tmp_path):
    (tmp_path / "bases").mkdir()
    _files(tmp_path / "bases", low="seed: 1\nrollout: {n: 2, top_p: 0.5}\nreward: {functions: {format: 1}}\n")
    _files(tmp_path / "bases", middle="extends: low.yaml\nrollout: {n: 4, temperature: 0.5}\n")
    _files(
        tmp_path,
        top="rollout: {temperature: 0.7}\nreward: {functions: {correct: 1}}\nextends: bases/middle.yaml\n",
    )
    resolved = load_config(tmp_path / "top.yaml", ["seed=9"], environ={})
    rollout = resolved.config.rollout
    assert (rollout.n, rollout.top_p, rollout.temperature, resolved.config.seed) == (4, 0.5, 0.7, 9)
    assert list(resolved.config.reward.functions) == ["correct"]
    came_from = resolved.provenance
    assert came_from["rollout.top_p"] == f"file {tmp_path / 'bases' / 'low.yaml'}"
    assert came_from["rollout.n"] == f"file {tmp_path / 'bases' / 'middle.yaml'}"
    assert came_from["rollout.temperature"] == f"file {tmp_path / 'top.yaml'}"
    assert came_from["seed"] == "--set"
    assert "extends" not in parse_yaml(dump_yaml(resolved), "the file of a run")


def test_later_bases_override_earlier_ones_and_a_common_base_counts_once(tmp_path):
    _files(tmp_path, common="seed: 1\nrollout: {n: 2}\n", a="extends: common.yaml\nseed: 5\n")
    _files(tmp_path, b="extends: common.yaml\nrollout: {n: 8}\n", top="extends: [a.yaml, b.yaml]\n")
    config = load_config(tmp_path / "top.yaml", environ={}).config
    assert (config.seed, config.rollout.n) == (5, 8)


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (
            {"top": "extends: a.yaml", "a": "extends: top.yaml"},
            r"top.yaml extends \S*a.yaml extends \S*top.yaml",
        ),
        ({"top": "extends: top.yaml"}, r"must not lead back to the same file"),
        ({"top": "extends: gone.yaml"}, r"gone.yaml: there is no such .* \(which \S*top.yaml extends\)"),
        ({"top": "extends: {a: 1}"}, r"top.yaml: extends must be the path .* or a list of paths; got"),
        ({"top": "extends: a.yaml", "a": "seeed: 1"}, r"unknown key 'seeed' \(from file \S*a.yaml\)"),
        ({"top": "run: {extends: a.yaml}"}, r"'run.extends' .*; it stands at the top level"),
    ],
)
def test_what_cannot_be_extended(tmp_path, texts, said):
    with pytest.raises(ConfigError, match=said):
        load_config(_files(tmp_path, **texts) / "top.yaml", environ={})
