import json

import pytest

from quatrain.config.schema import DataConfig
from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.examples import load_examples
from quatrain.data.prompts import load_prompts

USER = {"role": "user", "content": "Max has 3"}
SYSTEM = {"role": "system", "content": "How many"}
ASSISTANT = {"role": "assistant", "content": "3+4=7"}


@pytest.fixture(scope="module")
def tokenizer():
    return builtin_tokenizer()


@pytest.fixture
def write(tmp_path):
    def write_rows(name, *rows):
        path = tmp_path / name
        path.write_text("\n".join(map(json.dumps, rows)))
        return str(path)

    return write_rows


def load(specs, tokenizer, required_columns=(), **data):
    return load_prompts(specs, DataConfig(**data), tokenizer, seed=0, required_columns=required_columns)


def test_a_list_of_data_sets_is_read_as_one_in_its_order(write, tokenizer):
    one = write("a.jsonl", {"prompt": "1", "answer": 1}, {"prompt": "2", "answer": 2})
    two = write("b.jsonl", {"prompt": "3", "answer": 3, "level": "hard"})
    prompts = load([two, one], tokenizer).head()
    assert [prompt.text for prompt in prompts] == ["3", "1", "2"]
    assert [prompt.columns for prompt in prompts] == [
        {"answer": 3, "level": "hard"},
        {"answer": 1, "level": None},
        {"answer": 2, "level": None},
    ]
    alone, listed = load(one, tokenizer), load([one], tokenizer)
    assert [p.text for p in alone.take(0, 5)] == [p.text for p in listed.take(0, 5)]


@pytest.mark.parametrize(
    ("rows", "data", "message"),
    [
        (
            {"prompt": "a"},
            {},
            r"b\.jsonl: a reward function needs the column `answer`; the columns beside the prompt are none",
        ),
        ({"answer": 1}, {}, r"b\.jsonl: no column `prompt`"),
        ({"prompt": "a", "answer": " "}, {}, r"b\.jsonl, row 1: the column `answer` must have text"),
        ({"prompt": 5, "answer": 1}, {}, r"b\.jsonl, row 1: the column `prompt` must be"),
        ({"prompt": "a" * 600, "answer": 1}, {}, r"b\.jsonl: 1 of 1 prompts are longer"),
        (
            {"prompt": "a", "answer": 1},
            {"answer_column": "gold"},
            r"b\.jsonl: no column `gold`, which data\.answer_column names; the columns are prompt, answer",
        ),
    ],
)
def test_an_error_names_the_file_of_a_list(write, tokenizer, rows, data, message):
    good = write("a.jsonl", {"prompt": "1", "answer": 1, "gold": 2})
    with pytest.raises(ValueError, match=message):
        load([good, write("b.jsonl", rows)], tokenizer, ["answer"], **data)


def answer_of(example, tokenizer):
    return tokenizer.decode(example.input_ids[example.scored])


def test_examples_come_from_several_files_in_several_forms(write, tokenizer):
    one = write("b.jsonl", {"prompt": "a", "completion": "b"})
    two = write("c.jsonl", {"messages": [USER, ASSISTANT | {"content": "c"}]})
    data = DataConfig(shuffle=False)
    source = load_examples([one, two], data, tokenizer, train_on="assistant", seed=0)
    texts = [answer_of(example, tokenizer) for example in source.batch(0, 4)]
    assert texts == ["b<|end|>", "c<|end|>"] * 2


def test_the_answer_column_becomes_answer_and_stays(write, tokenizer):
    spec = write("a.jsonl", {"prompt": "1", "solution": "7", "answer": "long text"})
    (prompt,) = load(spec, tokenizer, ["answer"], answer_column="solution").head()
    assert prompt.columns == {"solution": "7", "answer": "7"}


def test_without_shuffling_every_epoch_has_the_order_of_the_file(write, tokenizer):
    spec = write("a.jsonl", *({"prompt": str(n)} for n in range(5)))
    source = load(spec, tokenizer, shuffle=False)
    assert [prompt.text for prompt in source.take(3, 9)] == list("340123401")
    assert [prompt.group_id for prompt in source.take(3, 2)] == [3, 4]
    shuffled = load(spec, tokenizer)
    assert [p.text for p in shuffled.take(0, 5)] != [p.text for p in shuffled.take(5, 5)]


def test_messages_without_the_last_answer_are_the_prompt(write, tokenizer):
    answered, open_ = [SYSTEM, USER, ASSISTANT], [SYSTEM, USER]
    source = load(write("a.jsonl", {"messages": answered}, {"messages": open_}), tokenizer)
    first, second = source.head()
    assert first.text == second.text == (SYSTEM, USER)
    assert first.columns == {"messages": answered}


def test_the_last_answer_of_messages_is_trained_behind_the_prompt(write, tokenizer):
    spec = write("a.jsonl", {"messages": [SYSTEM, USER, ASSISTANT]})
    (example,) = load_examples(spec, DataConfig(), tokenizer, train_on="assistant", seed=0).head()
    (same,) = load(spec, tokenizer).head()
    assert example.input_ids[~example.scored].tolist() == same.input_ids.tolist()
    assert answer_of(example, tokenizer) == "3+4=7<|end|>"
    assert example.input_ids[-1] == tokenizer.eos_token_id


def test_an_answer_in_parts_is_one_text(write, tokenizer):
    parts = [{"type": "text", "text": "3+4"}, {"type": "text", "text": "=7"}]
    spec = write("a.jsonl", {"messages": [USER, {"role": "assistant", "content": parts}]})
    (example,) = load_examples(spec, DataConfig(), tokenizer, train_on="assistant", seed=0).head()
    assert answer_of(example, tokenizer) == "3+4=7<|end|>"


def test_a_prompt_column_comes_before_messages(write, tokenizer):
    spec = write("a.jsonl", {"prompt": "1", "messages": [USER, ASSISTANT]})
    assert load(spec, tokenizer).head()[0].text == "1"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hello", "row 2: the column `messages` must be a non-empty list of messages; it is 'hello'"),
        ([], "row 2: the column `messages` must be a non-empty list"),
        (None, "row 2: the column `messages` must be a non-empty list"),
        ([ASSISTANT], "row 2: the column `messages` must have a message before the assistant's"),
        ([SYSTEM, USER], "row 2: .*must end with the assistant's message.*ends with the role 'user'"),
        (
            [USER, {"role": "assistant", "content": ""}],
            "row 2: the column `messages` must be .* answers have text",
        ),
        (
            [USER, ASSISTANT | {"tool_calls": [{"function": {"name": "f"}}]}],
            "row 2: the chat template rejects .*: it leaves out the call of 'f'",
        ),
        (
            [USER, ASSISTANT, ASSISTANT],
            "row 2: the message before an answer .* must be another than the assist",
        ),
    ],
)
def test_bad_messages_name_the_row(write, tokenizer, messages, message):
    spec = write("a.jsonl", {"messages": [USER, ASSISTANT]}, {"messages": messages})
    with pytest.raises(ValueError, match=message):
        load_examples(spec, DataConfig(), tokenizer, train_on="assistant", seed=0)
