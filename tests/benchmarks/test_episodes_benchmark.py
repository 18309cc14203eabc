"""The benchmark of the cache that is kept between turns."""

import json

import pytest


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("episodes")


def test_tokens_prefilled_grow_with_the_length_or_with_its_square(script, tmp_path, capsys):
    sizes = {"prompts": 2, "samples": 2, "prompt-tokens": 8, "turn-tokens": 3, "answer-tokens": 5}
    path = tmp_path / "episodes.json"
    options = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    script.main([*options, "--turns", "1", "3", "--json", str(path)])
    one, three = json.loads(path.read_text("utf-8"))["rows"]
    assert (one["length"], three["length"]) == (11, 27)
    # A prompt is computed once for both of its samples; a turn computes the token before its answer, too.
    assert one["kept"]["prefilled_tokens"] == one["recomputed"]["prefilled_tokens"] == 8 / 2
    assert three["kept"]["prefilled_tokens"] == 8 / 2 + 2 * (5 + 1)
    assert three["recomputed"]["prefilled_tokens"] == 8 / 2 + 16 + 24
    assert three["same_tokens"]
    assert three["logprob_diff"] < 1e-4
    assert all(row[mode]["decode_s"] > 0 for row in (one, three) for mode in script.MODES)
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in printed[2:]] == ["1", "3"]
