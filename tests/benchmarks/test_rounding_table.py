"""The script that finds which operations of the sampler round otherwise than the update."""

import json

import pytest


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("rounding")


@pytest.fixture(scope="module")
def report(script, tmp_path_factory):
    out = tmp_path_factory.mktemp("rounding") / "rounding.json"
    script.main(["--small", "--json", str(out)])
    return json.loads(out.read_text())["float32"]


def test_with_all_sums_in_one_order_decode_and_update_have_the_same_bits(report):
    """Fails if an operation of decode or of the update gets a form that the script does not replace: the gap
    of the others would then hold its rounding too."""
    none = report["operations"]["none"]
    assert none["max"] == 0.0
    assert none["equal"] == 1.0
    assert none["first"] is None


def test_each_operation_is_first_seen_where_it_is(report):
    """Fails if an operation is not replaced alone, or its results are taken from other tokens."""
    rows = report["operations"]
    assert rows["norm"]["first"] == "layer 0, norm"
    assert rows["down"]["first"] == "layer 0, down"
    assert 0 < rows["norm"]["max"] < 1e-4
    assert 0 < rows["down"]["max"] < 1e-4
    assert rows["norm"]["share"] + rows["down"]["share"] == pytest.approx(1)


def test_the_programs_as_they_are_have_the_engines_gap(report):
    """Fails if the script's decode is not the engine's: their gaps would be of another size."""
    assert report["operations"]["all"]["mean"] == pytest.approx(report["engine"]["mean"], rel=0.5)


def test_prompts_that_are_no_whole_blocks_are_refused(script, capsys):
    """Fails if blocks of packed rows could begin within a sequence without a word."""
    with pytest.raises(SystemExit):
        script.main(["--prompt-tokens", "65"])
    assert "multiples" in capsys.readouterr().err
