import json
from copy import deepcopy
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from pictured import VISION, picture, tokens_of
from towers import CONFIGS, PROCESSORS

from quatrain.models.families import architecture_from_hf
from quatrain.models.rope import Rope, rope_angles
from quatrain.models.rope_positions import rope_positions

CASES = json.loads((Path(__file__).parents[1] / "golden" / "rope_positions.json").read_text())["cases"]


def pictures_of(runs):
    """The pictures of runs of tokens: a number of text tokens, or the [rows, columns] of a picture."""
    found = tokens_of([[5] * run if isinstance(run, int) else picture(*run) for run in runs])[1]
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES)
def test_positions_are_those_of_transformers(case):
    """Rows and columns exchanged, the wrong place after a picture, or a picture that stands twice."""
    pictures = pictures_of(CASES[case]["runs"])
    turns, shift = rope_positions(VISION, pictures, len(pictures))
    assert turns.dtype == np.int32
    assert (turns.tolist(), shift) == (CASES[case]["turns"], CASES[case]["shift"])


def test_tokens_behind_the_pictures_have_their_index_and_the_shift():
    """What decode adds for a sampled token must be what the update computes for it."""
    pictures = pictures_of([2, [3, 2], 1])
    turns, shift = rope_positions(VISION, pictures, 12)
    assert shift == -3
    assert (turns[:, 8:] == np.arange(8, 12) + shift).all()
    assert (turns[:, : len(pictures)] == rope_positions(VISION, pictures, len(pictures))[0]).all()


def test_pictures_side_by_side_are_two_grids():
    turns, shift = rope_positions(VISION, pictures_of([[2, 2], [1, 2]]), 6)
    assert turns.tolist() == [[0, 0, 0, 0, 2, 2], [0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 2, 3]]
    assert shift == -2


def test_the_axis_of_each_frequency():
    """Qwen2.5-VL has blocks; Qwen3 alternates, and what is left over is of time."""
    assert Rope(sections=(1, 2, 1)).axes(8).tolist() == [0, 1, 1, 2]
    assert Rope(sections=(4, 2, 2), alternating=True).axes(16).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]
    assert Rope(sections=(2, 1, 1), alternating=True, partial=0.25).axes(32).tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("sections", [(), (1, 2), (1, 2, 2)])
def test_sections_that_are_not_those_of_the_head_are_an_error(sections):
    with pytest.raises(ValueError, match=r"which sum to the 4 of a head of 8; got \["):
        Rope(sections=sections).axes(8)


def test_angles_turn_by_the_axis_of_their_frequency():
    rope = Rope(theta=16.0, sections=(1, 2, 1))
    turns = jnp.array([[[2, 3]], [[5, 3]], [[7, 3]]])  # a placeholder and a text token
    angles = rope_angles(turns, rope, 8)
    expected = [2 * 1.0, 5 * 0.5, 5 * 0.25, 7 * 0.125]
    np.testing.assert_allclose(angles.cos[0, 0, 0], np.cos(expected), atol=1e-6)
    np.testing.assert_allclose(angles.sin[0, 0, 0], np.sin(expected), atol=1e-6)
    text = rope_angles(jnp.array([[3, 3]]), rope, 8)
    np.testing.assert_array_equal(angles.cos[0, 1], text.cos[0, 1])


def test_a_tower_with_a_grid_needs_the_sections_of_its_text_model():
    """Else the error came with the first picture; and Qwen3 alternates, whatever config.json says."""
    config = deepcopy(CONFIGS["qwen3_vl"])
    rope = config["text_config"]["rope_parameters"]
    del rope["mrope_interleaved"]
    found = architecture_from_hf(config, vision=PROCESSORS["qwen3_vl"])
    assert found.attentions[0].rope.axes(8).tolist() == [0, 1, 2, 0]
    rope["mrope_section"] = [2, 2, 1]
    assert architecture_from_hf(config).attentions[0].rope.sections == ()  # text reads none of it
    with pytest.raises(ValueError, match=r"^config.json: mrope_section has three numbers .* got \[2, 2, 1\]"):
        architecture_from_hf(config, vision=PROCESSORS["qwen3_vl"])


@pytest.mark.parametrize("name", ["type", "rope_type"])
def test_sections_are_read_where_transformers_4_wrote_them(name):
    config = deepcopy(CONFIGS["qwen2_5_vl"])
    text = config["text_config"]
    text |= {"rope_scaling": {name: "mrope", "mrope_section": [1, 1, 2]}, "rope_parameters": None}
    rope = architecture_from_hf(config, vision=PROCESSORS["qwen2_5_vl"]).attentions[0].rope
    assert (rope.kind, rope.axes(8).tolist()) == ("default", [0, 1, 2, 2])
