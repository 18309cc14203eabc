import re
from collections import Counter

import pytest

from quatrain.data.builtin import (
    DEMONSTRATED_RIGHT,
    HELDOUT_ROWS,
    MAX_OPERAND,
    builtin_rows,
    builtin_tokenizer,
)
from quatrain.data.tokenizer import save_tokenizer
from quatrain.reward.functions import has_format

TRAIN, HELDOUT = "arithmetic", "arithmetic-heldout"


def facts(rows):
    return {re.match(r"<think>(.*)=", row["completion"])[1] for row in rows}


def texts(rows):
    return [row["prompt"][0]["content"] for row in rows]


def test_the_rows():
    train, heldout = builtin_rows(TRAIN), builtin_rows(HELDOUT)
    assert len(train) == 1088
    assert len(heldout) == HELDOUT_ROWS == 200
    assert train[0] == {
        "prompt": [{"role": "user", "content": "Sam has 5 cards and gives away 3. How many now?"}],
        "answer": "2",
        "completion": "<think>5-3=3</think>\n<answer>3</answer>",
    }


def test_no_text_is_in_both_parts_and_every_held_out_fact_is_trained():
    train, heldout = builtin_rows(TRAIN), builtin_rows(HELDOUT)
    assert not set(texts(train)) & set(texts(heldout))
    assert len(set(texts(train + heldout))) == len(train) + len(heldout)
    assert facts(heldout) <= facts(train)
    assert len(facts(train)) == len(facts(heldout)) == 34


def test_demonstrations_have_the_right_form_and_a_careless_result():
    rows = builtin_rows(TRAIN) + builtin_rows(HELDOUT)
    off_by = Counter()
    for row in rows:
        a, op, b, c, answer = re.fullmatch(
            r"<think>(\d+)([+-])(\d+)=(\d+)</think>\n<answer>(\d+)</answer>", row["completion"]
        ).groups()
        assert int(row["answer"]) == (int(a) + int(b) if op == "+" else int(a) - int(b)) >= 0
        assert c == answer
        off_by[int(answer) - int(row["answer"])] += 1
        assert re.findall(r"\d+", row["prompt"][0]["content"]) == [a, b]
        assert max(int(a), int(b)) <= MAX_OPERAND
        assert has_format(row["completion"])
    assert set(off_by) == {-1, 0, 1}
    assert off_by[0] / len(rows) == pytest.approx(DEMONSTRATED_RIGHT, abs=0.03)
    assert min(off_by[1], off_by[-1]) > off_by[0]  # so the likeliest demonstrated result is a wrong one


def test_callers_cannot_change_the_rows():
    builtin_rows(TRAIN)[0]["answer"] = "changed"
    assert builtin_rows(TRAIN)[0]["answer"] == "2"


def test_another_name_is_an_error():
    with pytest.raises(ValueError, match="'poetry'; there are arithmetic, arithmetic-heldout"):
        builtin_rows("poetry")


@pytest.fixture(scope="module")
def tokenizer():
    return builtin_tokenizer()


def test_rows_are_short(tokenizer):
    rows = builtin_rows(TRAIN) + builtin_rows(HELDOUT)
    prompts = [
        tokenizer.apply_chat_template(r["prompt"], tokenize=False, add_generation_prompt=True) for r in rows
    ]
    assert max(len(ids) for ids in tokenizer(prompts)["input_ids"]) == 15
    assert max(len(ids) for ids in tokenizer([r["completion"] for r in rows])["input_ids"]) == 13
    assert len(tokenizer) == 294


def test_words_digits_and_tags_are_one_token_each(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tom has 12 eggs and loses 3."}],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert tokenizer.tokenize(text) == [
        "<|user|>", "Tom", "ĠhasĠ", "1", "2", "Ġeggs", "Ġand", "ĠlosesĠ", "3", ".", "<|assistant|>",
    ]  # fmt: skip
    assert tokenizer.tokenize("<think>1</think>\n<answer>2</answer>") == [
        "<think>", "1", "</think>", "Ċ", "<answer>", "2", "</answer>",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces ",
        "\t\n\r\n",
        "a , b . c 's n't",
        "héllo wörld 12 34",
        "日本語 🎉 \u200b",
        "x<think",
        "Ġhas",
    ],
)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_and_the_special_tokens(tokenizer):
    messages = [{"role": r, "content": r[0]} for r in ("system", "user", "assistant", "user")]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>s<|user|>u<|assistant|>a<|end|><|user|>u<|assistant|>"
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|end|>", "<|pad|>")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "suau"
    assert tokenizer.decode(tokenizer.encode("<think>"), skip_special_tokens=True) == "<think>"


def test_it_saves_and_loads(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    save_tokenizer(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "<|user|>Tom has 12 eggs. é<|assistant|><think>1</think>\n"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.chat_template == tokenizer.chat_template
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert len(loaded) == len(tokenizer)
