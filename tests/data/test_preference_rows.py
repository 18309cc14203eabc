"""Pairs and judged answers of rows: what is refused, cut, left out and counted."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from chat_templates import FAMILIES, tokenizer_of

from quatrain.config.schema import Config, DataConfig
from quatrain.config.sections.given import PREFERENCE_LOSSES
from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.preferences import check_judged_columns, check_pair_columns, load_judged, load_pairs
from quatrain.loop.given import GivenData

DATA = DataConfig(shuffle=False)
TOKENIZER = builtin_tokenizer()
USER = {"role": "user", "content": "4+1?"}
GOOD = {"role": "assistant", "content": "5"}
BAD = {"role": "assistant", "content": "6"}
ROW = {"prompt": "4+1=", "chosen": "5", "rejected": "6"}
FINE = {"chosen": "4+1=5", "rejected": "4+1=6"}


def pairs(*rows, data=DATA, tokenizer=TOKENIZER, **more):
    return load_pairs("given", data, tokenizer, rows={"given": list(rows)}, **{"seed": 0} | more)


def judged(*rows, data=DATA, tokenizer=TOKENIZER, **more):
    return load_judged("given", data, tokenizer, rows={"given": list(rows)}, **{"seed": 0} | more)


def texts(row, tokenizer=TOKENIZER):
    return tuple(tokenizer.decode(part) for part in row if isinstance(part, np.ndarray))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "5", "rejected": "5"}, "must be two different answers; both are '5'"),
        ({"prompt": "a", "chosen": "5", "rejected": "5<|end|>"}, "must be two different answers"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "must be two different answers"),
        ({"prompt": "a", "chosen": " ", "rejected": "5"}, "the column `chosen` must be a string with text"),
        ({"prompt": "a", "chosen": "5", "rejected": ""}, "the column `rejected` must be a string with text"),
        ({"prompt": "a", "chosen": None, "rejected": "5"}, "the column `chosen` must be one answer"),
        (
            {"prompt": "a", "chosen": ["5", "7"], "rejected": "6"},
            "several answers are not ranked: make a row",
        ),
        ({"prompt": "a", "chosen": "5", "rejected": [BAD]}, "must both be texts or both be messages"),
        (
            {"prompt": "a", "chosen": [GOOD], "rejected": [BAD]},
            "the column `prompt` must be a list of messages",
        ),
        ({"prompt": 3, "chosen": "5", "rejected": "6"}, "the column `prompt` must be a string or a list"),
        (
            {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, BAD, USER, GOOD]},
            "the same up to the last answer; they differ from message 2 on",
        ),
        (
            {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, BAD]},
            "the same up to the last answer; they differ from message 2 on",
        ),
        ({"chosen": [USER, GOOD], "rejected": [USER]}, "the column `rejected` must end with the assistant's"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "the message before an answer .* there is none"),
        (
            {"prompt": "5+1?", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "the prompt '5[+]1[?]', which is not",
        ),
        ({"prompt": [BAD], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "prompt must not be the assist"),
        ({"chosen": "4+1=5", "rejected": "4+1=5 7"}, "which would have an empty answer; '4[+]1=5' begins"),
        (
            {"chosen": "4+1=5", "rejected": "3+1=5"},
            "must begin with the same prompt; they differ from the first",
        ),
        (ROW | {"margin": "large"}, "the column `margin` must be a finite number, .* it is str 'large'"),
        (ROW | {"margin": float("nan")}, "the column `margin` must be a finite number"),
        (ROW | {"margin": True}, "the column `margin` must be a finite number"),
    ],
)
def test_rows_that_are_no_pairs_are_refused(row, message):
    with pytest.raises(ValueError, match=f"given, row 2: .*{message}"):
        pairs(FINE, row, margins=True)


@pytest.mark.parametrize(
    ("load", "row", "message"),
    [
        (
            pairs,
            {"prompt": "a", "chosen": "5"},
            "given: pairs need .* there is no `rejected`, the columns are",
        ),
        (
            pairs,
            {"prompt": "a", "completion": "5", "label": True},
            "given: pairs need .*dpo.loss=kto, or make",
        ),
        (judged, {"prompt": "a", "completion": "5"}, "given: judged answers need .* there is no `label`"),
        (judged, {"prompt": "a", "chosen": "5"}, "given: pairs need .* there is no `rejected`"),
        (judged, {"completion": "5", "label": 1}, "given: no column `prompt`"),
        (
            judged,
            {"prompt": "a", "completion": "5", "label": 2},
            "given, row 1: the column `label` must be true",
        ),
        (
            judged,
            {"prompt": "a", "completion": "5", "label": "1"},
            "row 1: the column `label` must be .* str '1'",
        ),
        (
            judged,
            {"prompt": "a", "completion": "5", "label": 1.0},
            "row 1: the column `label` must be .* float",
        ),
        (
            judged,
            {"prompt": "a", "completion": "", "label": 1},
            "row 1: the column `completion` must be a string",
        ),
        (
            judged,
            {"prompt": "a", "completion": ["5"], "label": 1},
            "row 1: the column `completion` must be one",
        ),
    ],
)
def test_columns_and_labels_that_do_not_fit_are_refused(load, row, message):
    with pytest.raises(ValueError, match=re.sub(r"(?<=dpo)\.", r"\\.", message)):
        load(row)


def test_columns_are_checked_without_a_tokenizer():
    rows = {"a": [ROW], "b": [{"prompt": "a", "completion": "b", "label": True}]}
    check_pair_columns("a", DATA, rows)
    check_judged_columns(["a", "b"], DATA, rows)
    with pytest.raises(ValueError, match="b: pairs need the columns"):
        check_pair_columns(["a", "b"], DATA, rows)
    with pytest.raises(ValueError, match="c: judged answers need the columns"):
        check_judged_columns("c", DATA, {"c": [{"prompt": "a"}]})
    named = DataConfig(question_column="question")
    with pytest.raises(ValueError, match="a: no column `question`"):
        check_pair_columns("a", named, rows)


def test_forms_of_pairs_in_one_list():
    """A text answers messages too; a whole conversation may stand beside its prompt, as in UltraFeedback."""
    rows = {
        "a": [ROW, {"prompt": [USER], "chosen": "5", "rejected": "6"}],
        "b": [{"chosen": [USER, GOOD], "rejected": [USER, BAD]}],
        "c": [{"prompt": "4+1?", "chosen": [USER, GOOD], "rejected": [USER, BAD]}],
        "d": [{"prompt": [USER], "chosen": GOOD, "rejected": BAD}],
        "e": [{"chosen": "4+1=5", "rejected": "4+1=6<|end|>"}],
    }
    source = load_pairs(list(rows), DATA, TOKENIZER, seed=0, rows=rows)
    plain = ("4+1=", "5<|end|>", "6<|end|>")
    chat = ("<|user|>4+1?<|assistant|>", "5<|end|>", "6<|end|>")
    assert [texts(pair) for pair in source.head()] == [plain, chat, chat, chat, chat, plain]
    assert [pair.number for pair in source.batch(1, 4)] == [4, 5, 0, 1]
    assert texts(source.batch(1, 4)[0]) == chat
    assert source.warnings == []


def test_the_run_s_system_message_and_question_stand_before_pairs():
    data = DataConfig(shuffle=False, system_prompt="Be brief.", question_column="q")
    rows = {"q": "4+1?", "chosen": GOOD, "rejected": BAD}, {"q": "4+1?", "chosen": "5", "rejected": "6"}
    source = pairs(*rows, data=data)
    assert {texts(pair)[0] for pair in source.head()} == {"<|system|>Be brief.<|user|>4+1?<|assistant|>"}
    with pytest.raises(ValueError, match=r"row 1: data\.system_prompt makes messages of a prompt, and whole"):
        pairs(FINE, data=DataConfig(system_prompt="Be brief."))


def test_pairs_with_calls_and_tools_differ_in_the_last_answer():
    tokenizer = tokenizer_of(FAMILIES["qwen2.5"])
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 4}}}]
    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    row = {"prompt": [USER], "chosen": [called], "rejected": [BAD], "tools": [tool]}
    ((prompt, chosen, rejected),) = [
        texts(pair, tokenizer) for pair in pairs(row, tokenizer=tokenizer).head()
    ]
    assert '"name": "add"' in prompt
    assert chosen == '<tool_call>\n{"name": "add", "arguments": {"a": 4}}\n</tool_call><|im_end|>'
    assert rejected == "6<|im_end|>"


def test_margins_are_read_or_warned_of():
    rows = [ROW | {"margin": 2}, ROW | {"margin": None}]
    source = pairs(*rows, margins=True)
    assert [pair.margin for pair in source.head()] == [2.0, None]
    source = pairs(*rows)
    assert [pair.margin for pair in source.head()] == [None, None]
    assert (
        "1 of 2 pairs (the first is row 1) have a `margin`, which only `quatrain rm` reads" in source.warnings
    )


def test_the_cut_of_whole_texts_is_warned_of_where_it_changes_the_loss():
    """It does where lengths count, and where each answer is judged alone: there nothing cancels."""
    assert pairs(FINE).warnings == []
    for found in (pairs(FINE, cut_counts=True), judged(FINE)):
        assert "ends where the tokens of both texts differ first" in found.warnings[0]
    assert pairs(ROW, cut_counts=True).warnings == judged(ROW).warnings == []


@pytest.mark.parametrize("loss", PREFERENCE_LOSSES)
def test_which_losses_the_cut_of_whole_texts_changes(loss):
    config = Config(run={"task": "dpo"}, dpo={"data": "given", "loss": loss})
    policy = SimpleNamespace(arch=SimpleNamespace(longest=99), tokenizer=TOKENIZER, stop_ids=None)
    found = GivenData.of(config, policy, {"given": [FINE]}).train.warnings
    assert bool(found) == (loss in ("ipo", "orpo", "simpo", "kto"))


def test_flags_leave_out_pairs_and_answers():
    rows = [{"prompt": [USER], "chosen": [GOOD], "rejected": [BAD | {"weight": 0}]}, ROW | {"prompt": [USER]}]
    source = pairs(*rows)
    assert (len(source), source.filtered) == (1, 1)
    assert "1 rows are left out, because their flag (weight, train) is 0" in source.warnings
    row = {"prompt": [USER], "completion": [GOOD | {"train": False}], "label": True}
    assert (len(source := judged(row, row | {"completion": "5"})), source.filtered) == (1, 1)


def test_long_pairs_are_refused_left_out_or_cut():
    rows = [
        ROW,
        ROW | {"rejected": "6" * 9},
        ROW | {"prompt": "4" * 20},
        ROW | {"chosen": "77", "rejected": "78"},
    ]
    limits = {"dpo.max_length, 6": 6, "other": 100}
    with pytest.raises(
        ValueError, match=r"given: 3 of 4 pairs are longer than dpo\.max_length, 6 tokens \(row 2 has 14;"
    ):
        pairs(*rows, most_tokens=limits)
    source = pairs(*rows, most_tokens=limits, on_long="skip", section="rm")
    assert (len(source), source.longer, source.truncated) == (1, 3, 0)
    assert (
        "3 pairs are left out (rm.on_long=skip), because they are longer than dpo.max_le"
        in source.warnings[0]
    )
    source = pairs(*rows, most_tokens=limits, on_long="truncate")
    kept = [texts(pair) for pair in source.head()]
    assert kept == [("4+1=", "5<|end|>", "6<|end|>"), ("4+1=", "5<|end|>", "66"), ("4+1=", "77", "78")]
    assert (source.longer, source.truncated) == (1, 2)
    # Cut to one token each, both answers of the last row would be equal.
    source = pairs(*rows, most_tokens={"dpo.max_length, 5": 5}, on_long="truncate")
    assert [texts(pair)[1:] for pair in source.head()] == [("5", "6"), ("5", "6")]
    assert (source.longer, source.truncated) == (2, 2)


def test_paired_data_are_two_judged_answers():
    rows = {
        "pairs": [ROW, {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}],
        "judged": [{"prompt": "4+1=", "completion": "7", "label": 0}],
    }
    source = load_judged(["pairs", "judged"], DATA, TOKENIZER, seed=0, rows=rows)
    chat = "<|user|>4+1?<|assistant|>"
    assert [(*texts(row), row.label, row.number) for row in source.head()] == [
        ("4+1=", "5<|end|>", True, 0),
        ("4+1=", "6<|end|>", False, 1),
        (chat, "5<|end|>", True, 2),
        (chat, "6<|end|>", False, 3),
        ("4+1=", "7<|end|>", False, 4),
    ]
    assert (len(source), source.batch(0, 2)[1].number) == (5, 1)


def test_pairs_with_a_label_of_something_else_are_two_judged_answers():
    assert [row.label for row in judged(ROW | {"label": "good"}).head()] == [True, False]


def test_answers_that_are_the_json_of_messages_are_warned_of():
    """As in a .csv file: trained as they stand, brackets and all. Other JSON is an answer like any."""
    source = pairs(ROW | {"chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])})
    assert "1 of 1 pairs (the first is row 1) have the JSON of messages as an answer" in source.warnings[0]
    assert pairs(ROW | {"chosen": '{"value": 5}'}).warnings == []


def test_long_judged_answers_are_cut_one_by_one():
    source = judged(ROW | {"rejected": "6" * 9}, most_tokens={"dpo.max_length": 6}, on_long="truncate")
    assert [texts(row)[1] for row in source.head()] == ["5<|end|>", "66"]
    assert (len(source), source.truncated) == (2, 1)


def test_what_is_not_trained_of_an_answer_is_warned_of():
    source = pairs({"prompt": [USER], "chosen": [GOOD | {"cot": "hm"}], "rejected": [BAD]})
    assert (
        "1 of 1 pairs (the first is row 1) have the fields cot, which are not trained" in source.warnings[0]
    )
