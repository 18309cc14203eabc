"""The ids and masks of every form of rows with answers are those that TRL prepares."""

import json

import pytest
from chat_templates import Family, tokenizer_of
from goldens import GOLDEN

from quatrain.config.schema import DataConfig
from quatrain.data.examples import load_examples
from quatrain.data.preferences import load_judged, load_pairs

TRL = json.loads((GOLDEN / "prepared_by_trl.json").read_text("utf-8"))
TOKENIZER = tokenizer_of(Family(TRL["template"], "<|im_start|>", "<|im_end|>", "<|endoftext|>"))
NEWLINE = TOKENIZER.encode("\n")
END = TOKENIZER.eos_token_id
DATA = DataConfig(shuffle=False)


def without_newline(ids):
    """TRL trains what a template writes behind an answer's end token, too: in ChatML a newline."""
    return ids[:-1] if ids[-2:] == [END, *NEWLINE] else ids


def rows_of(form):
    rows = TRL["rows"][form]
    assert len(rows) == 12
    return {"rows": {"given": rows}, "seed": 0}


@pytest.mark.parametrize("case", TRL["expected"]["sft"])
def test_examples_are_those_of_trl(case):
    form, train_on = case.split("/")
    source = load_examples("given", DATA, TOKENIZER, train_on=train_on, **rows_of(form))
    for example, (ids, scored) in zip(source.head(), TRL["expected"]["sft"][case], strict=True):
        ids = without_newline(ids)
        assert example.input_ids.tolist() == ids
        behind_end = [at > 0 and ids[at - 1 : at + 1] == [END, *NEWLINE] for at in range(len(ids))]
        # The first token follows nothing, so that TRL's loss has no term of it either.
        trained = [
            bool(each) and at > 0 and (train_on == "all" or not behind_end[at])
            for at, each in enumerate(scored[: len(ids)])
        ]
        assert example.scored.tolist() == trained
    assert source.warnings == []


@pytest.mark.parametrize("form", TRL["expected"]["pairs"])
def test_pairs_are_those_of_trl(form):
    source = load_pairs("given", DATA, TOKENIZER, **rows_of(form))
    for number, (pair, parts) in enumerate(zip(source.head(), TRL["expected"]["pairs"][form], strict=True)):
        ours = [pair.prompt_ids.tolist(), pair.chosen_ids.tolist(), pair.rejected_ids.tolist()]
        assert ours == [parts[0], *map(without_newline, parts[1:])]
        assert (pair.margin, pair.number) == (None, number)
    assert source.warnings == []


@pytest.mark.parametrize("form", TRL["expected"]["judged"])
def test_judged_answers_are_those_of_trl(form):
    source = load_judged("given", DATA, TOKENIZER, **rows_of(form))
    ours = [[row.prompt_ids.tolist(), row.completion_ids.tolist(), row.label] for row in source.head()]
    theirs = [[prompt, without_newline(ids), label] for prompt, ids, label in TRL["expected"]["judged"][form]]
    if len(theirs) > 12:  # of pairs, TRL has the good answers first
        theirs = [each for pair in zip(theirs[:12], theirs[12:], strict=True) for each in pair]
    assert ours == theirs
    assert [row.number for row in source.head()] == list(range(len(theirs)))
