import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from quatrain.config.dump import dump_yaml, to_json
from quatrain.config.errors import ConfigError
from quatrain.config.load import Resolved, load_config
from quatrain.config.schema import Config
from quatrain.config.settings import file_layer

AWKWARD = [
    "no",
    "1e-6",
    "1:30",
    "",
    " x ",
    "a: b",
    "a # b",
    "- x",
    "[a]",
    "é 数\n\tx",
    "\x85\u2028\x07",
    "'\"\\",
    "null",
]


def reload(resolved, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(resolved), encoding="utf-8")
    return load_config(path, [], {})


def test_a_dump_loads_again_as_the_same_configuration(tmp_path):
    overrides = [
        "data.system_prompt=\"two\\nlines: 'quoted' # no comment\"",
        'rollout.stop=["###", "\\n\\n", "no", "1"]',
        "reward.functions={correct: 1, my.module:score: 0.5, 'dir/file.py:f': -1e-7}",
        "optimizer.learning_rate=3e-7",
        "update.dual_clip=3",
    ]
    resolved = load_config(None, overrides, {})
    again = reload(resolved, tmp_path)
    assert again.config == resolved.config
    # Nothing is left to derive but what depends on the data.
    assert {layer for key, layer in again.provenance.items()} == {f"file {tmp_path / 'config.yaml'}"}


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_text_survives_in_values_and_names(tmp_path, text):
    config = Config(
        data={"system_prompt": text}, reward={"functions": {text or "x": 1.0}}, rollout={"stop": ["a,b"]}
    )
    layers = dict.fromkeys(
        [*load_config(None, [], {}).provenance, f"reward.functions.{text or 'x'}"], "default"
    )
    dumped = dump_yaml(Resolved(config, layers))
    path = tmp_path / "config.yaml"
    path.write_text(dumped, encoding="utf-8")
    values = {s.key: s.value for s in file_layer(path)}
    assert values["data.system_prompt"] == text
    assert values["reward.functions"] == {text or "x": 1.0}
    assert values["rollout.stop"] == ["a,b"]


@settings(max_examples=10, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20), value=st.floats(0, 1e3))
def test_other_readers_of_yaml_see_the_same_values(text, value):
    config = Config(data={"system_prompt": text}, optimizer={"learning_rate": value})
    layers = load_config(None, [], {}).provenance
    read = yaml.safe_load(dump_yaml(Resolved(config, layers)))
    assert read == config.model_dump(mode="json")


def test_every_value_has_its_layer_beside_it():
    dumped = dump_yaml(load_config(None, ["rollout.n=4"], {"QUATRAIN__SEED": "3"}))
    lines = [line.split() for line in dumped.splitlines()]
    assert ["seed:", "3", "#", "environment", "QUATRAIN__SEED"] in lines
    assert ["n:", "4", "#", "--set"] in lines
    assert ["correct:", "1.0", "#", "default"] in lines
    assert ["mini_batch_size:", "32", "#", "derived"] in lines


def test_json_has_configuration_layers_and_warnings():
    content = json.loads(to_json(load_config(None, ["rollout.n=1"], {})))
    assert content["config"]["rollout"]["n"] == 1
    assert content["provenance"]["rollout.n"] == "--set"
    assert len(content["warnings"]) == 1


def test_secrets_reach_no_dump(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "abc123-secret")
    resolved = load_config(None, ["data.system_prompt=key abc123-secret", "rollout.stop=[abc123-secret]"], {})
    for text in (dump_yaml(resolved), to_json(resolved)):
        assert "abc123" not in text
        assert "key [redacted]" in text


def test_secrets_in_names_reach_no_dump_and_a_dump_with_them_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("MY_API_KEY", "abc123-secret")
    resolved = load_config(None, ["reward.functions={abc123-secret: 1.0}"], {})
    for text in (dump_yaml(resolved), to_json(resolved)):
        assert "abc123" not in text
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(resolved))
    with pytest.raises(
        ConfigError, match=r"reward\.functions has \[redacted\] in place of a secret"
    ) as refused:
        load_config(path, (), {})
    assert str(refused.value).endswith("set it again, as --set reward.functions=…, or in that file")
    assert load_config(path, ["reward.functions={correct: 1.0}"], {})
    assert load_config(path, (), {}, reads=("model.", "lora."))
    with pytest.raises(ConfigError, match=r"reward\.functions has \[redacted\]"):
        load_config(path, (), {}, reads=("model.", "reward."))
