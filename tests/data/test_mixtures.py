"""Rows of a mixture as prompts and demonstrations, and what its data sets are called."""

import json

import pytest

from quatrain.config.data_sets import MixedSet
from quatrain.config.schema import DataConfig
from quatrain.data.examples import load_examples
from quatrain.data.preferences import load_judged, load_pairs
from quatrain.data.prompts import load_prompts
from quatrain.data.tokenizer import load_tokenizer

ROWS = {
    "easy": [{"prompt": f"{i} + 1", "answer": f"{i + 1}", "completion": f"{i + 1}"} for i in range(64)],
    "hard": [{"prompt": f"{i} - 1", "answer": f"{i - 1}", "completion": f"{i - 1}"} for i in range(32)],
}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("builtin:tiny")


def mixed(easy=3, hard=1):
    return MixedSet("easy", easy), MixedSet("hard", hard)


def load(tokenizer, spec=None, rows=ROWS, **data):
    return load_prompts(spec or mixed(), DataConfig(**data), tokenizer, seed=2, rows=rows)


def test_prompts_are_drawn_by_weight_and_know_their_source(tokenizer):
    source = load(tokenizer)
    drawn = source.take(0, 128)
    assert [prompt.source for prompt in drawn] == [
        "easy" if "+" in prompt.text else "hard" for prompt in drawn
    ]
    for first in range(0, 128, 4):
        own = [prompt.source for prompt in drawn[first : first + 4]]
        assert (own.count("easy"), own.count("hard")) == (3, 1)
    hard = [prompt.text for prompt in drawn if prompt.source == "hard"]
    assert sorted(hard) == sorted(row["prompt"] for row in ROWS["hard"])  # one epoch of its own
    assert [prompt.group_id for prompt in source.take(10**7, 3)] == [10**7 + at for at in range(3)]
    # `head`, which evaluation reads, is in the order of the files, whatever the weights.
    assert [prompt.text for prompt in source.head(65)][-1] == "0 - 1"


def test_examples_pairs_and_judged_answers_are_drawn_by_weight(tokenizer):
    """Their sources were empty, of which metrics by data set are made."""
    source = load_examples(mixed(1, 1), DataConfig(), tokenizer, train_on="assistant", seed=2, rows=ROWS)
    drawn = [each for index in range(4) for each in source.batch(index, 8)]
    assert [each.source for each in drawn].count("easy") == 16
    assert all(("+" in tokenizer.decode(each.input_ids)) == (each.source == "easy") for each in drawn)
    pairs = {name: [{"prompt": name, "chosen": "5", "rejected": "6"}] * 8 for name in ROWS}
    for load in (load_pairs, load_judged):
        drawn = load(mixed(1, 1), DataConfig(), tokenizer, seed=2, rows=pairs).batch(0, 8)
        assert [each.source for each in drawn].count("easy") == 4
        assert all(tokenizer.decode(each.prompt_ids) == each.source for each in drawn)


def test_what_is_said_of_a_mixture(tokenizer):
    assert load(tokenizer).mixture(256) == [
        "mixture: easy, weight 3 of 4: 64 rows, 3 epochs of them",
        "mixture: hard, weight 1 of 4: 32 rows, 2 epochs of them",
    ]
    assert load(tokenizer, ["easy", "hard"]).mixture(256) == []


def test_a_list_is_read_as_one_and_its_sources_are_named(tokenizer):
    listed, alone = load(tokenizer, ["easy", "hard"], shuffle=False), load(tokenizer, "easy")
    assert [prompt.source for prompt in listed.take(60, 8)] == ["easy"] * 4 + ["hard"] * 4
    assert {prompt.source for prompt in alone.take(0, 8)} == {""}


def test_digests_tell_weights_and_where_a_data_set_ends(tokenizer):
    """They decide whether a run may be resumed with its data."""
    usual = load(tokenizer).digests()
    assert usual == load(tokenizer, mixed(6, 2)).digests()  # the same proportions
    moved = {"easy": ROWS["easy"][:-1], "hard": [ROWS["easy"][-1], *ROWS["hard"]]}
    for other in (load(tokenizer, mixed(2, 1)), load(tokenizer, rows=moved)):
        found = other.digests()
        assert {name for name in usual if found[name] != usual[name]} == {"the data sets of the mixture"}
    assert "the data sets of the mixture" not in load(tokenizer, ["easy", "hard"]).digests()


def test_a_data_set_of_which_nothing_is_left_is_named(tokenizer):
    """It has a share of the draws: the others may not take it in silence."""
    rows = {**ROWS, "hard": [{"prompt": "9 - 1 " * 20}]}
    with pytest.raises(ValueError, match=r"^hard: all prompts are longer than data.max_prompt_length=40"):
        load(tokenizer, rows=rows, max_prompt_length=40, on_long_prompt="skip")
    assert len(load(tokenizer, ["easy", "hard"], rows, max_prompt_length=40, on_long_prompt="skip")) == 64


def test_files_of_a_mixture_are_found(tokenizer, tmp_path):
    paths = []
    for name, rows in ROWS.items():
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("\n".join(map(json.dumps, rows)))
    sets = [{"path": str(path), "weight": weight} for path, weight in zip(paths, (3, 1), strict=True)]
    of_files, given = (source.take(0, 12) for source in (load(tokenizer, sets), load(tokenizer)))
    assert [(p.text, p.source) for p in of_files] == [(p.text, p.source) for p in given]
