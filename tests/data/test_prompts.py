import datetime
import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from quatrain.config.schema import DataConfig
from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.chat_template import with_chat_template
from quatrain.data.examples import load_examples
from quatrain.data.messages import checked_messages
from quatrain.data.prompts import load_prompts

GSM8K = Path(__file__).parents[2] / "../shared/data/gsm8k/train.jsonl"
USER = [{"role": "user", "content": "hi 1"}]


@pytest.fixture(scope="module")
def tokenizer():
    return builtin_tokenizer()


@pytest.fixture
def dataset(tmp_path):
    def write(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return str(path)

    return write


def load(spec, tokenizer, required_columns=(), by_pass_rate=False, **data):
    options = {"required_columns": required_columns, "by_pass_rate": by_pass_rate}
    return load_prompts(spec, DataConfig(**data), tokenizer, seed=0, **options)


def decoded(tokenizer, prompts):
    return [tokenizer.decode(prompt.input_ids) for prompt in prompts]


def test_a_string_is_tokenised_as_it_is(dataset, tokenizer):
    (prompt,) = load(dataset({"prompt": "3+4 é"}), tokenizer).head()
    assert prompt.text == "3+4 é"
    assert prompt.input_ids.dtype == np.int32
    assert not prompt.input_ids.flags.writeable
    assert decoded(tokenizer, [prompt]) == ["3+4 é"]


def test_rows_of_a_program_are_data_sets_by_their_names(dataset, tokenizer):
    shown = {"prompt": USER, "completion": "7"}
    rows = {"part-*": [{"prompt": "3+4", "answer": "7"}], "shown": [shown]}
    file = dataset({"prompt": "1+1", "answer": "2"})
    source = load_prompts(["part-*", file], DataConfig(), tokenizer, seed=0, rows=rows)
    assert [prompt.columns["answer"] for prompt in source.head()] == ["7", "2"]
    given = load_examples("shown", DataConfig(), tokenizer, train_on="assistant", seed=0, rows=rows).head()
    read = load_examples(dataset(shown), DataConfig(), tokenizer, train_on="assistant", seed=0).head()
    np.testing.assert_equal(given, read)
    with pytest.raises(ValueError, match="data set 'other' has none of the supported forms"):
        load_prompts("other", DataConfig(), tokenizer, seed=0, rows=rows)


def test_messages_are_rendered(dataset, tokenizer):
    (prompt,) = load(dataset({"prompt": USER}), tokenizer).head()
    assert prompt.text == ({"role": "user", "content": "hi 1"},)
    assert decoded(tokenizer, [prompt]) == ["<|user|>hi 1<|assistant|>"]


def test_a_prompt_that_rewards_cannot_score_is_named_by_its_row(dataset, tokenizer):
    def check(prompt):
        if prompt == "bad":
            raise ValueError("no")

    spec = dataset({"prompt": "good"}, {"prompt": "bad"})
    with pytest.raises(ValueError, match=r"rows.jsonl, row 2: no"):
        load_prompts(spec, DataConfig(), tokenizer, seed=0, check_prompt=check)


@pytest.mark.parametrize(
    ("row", "data", "text"),
    [
        ({"prompt": "hi"}, {"system_prompt": "S"}, "<|system|>S<|user|>hi<|assistant|>"),
        ({"prompt": USER}, {"system_prompt": "S"}, "<|system|>S<|user|>hi 1<|assistant|>"),
        ({"q": "hi"}, {"question_column": "q"}, "<|user|>hi<|assistant|>"),
        ({"q": "hi"}, {"question_column": "q", "system_prompt": "S"}, "<|system|>S<|user|>hi<|assistant|>"),
        ({"prompt": "hi"}, {"question_column": "prompt"}, "<|user|>hi<|assistant|>"),
    ],
)
def test_questions_and_system_prompts(dataset, tokenizer, row, data, text):
    assert decoded(tokenizer, load(dataset(row), tokenizer, **data).head()) == [text]


@pytest.mark.parametrize(
    ("text", "data"),
    [
        ('[{"role": "user", "content": "hi"}]', {}),
        ("[{'content': 'hi', 'role': 'user'}]", {}),
        (' {"messages": []}', {"system_prompt": "S"}),
        ('[ {"from": "human", "value": "hi"}]', {"question_column": "prompt"}),
    ],
)
def test_json_of_messages_as_text_is_said_once(dataset, tokenizer, text, data):
    source = load(dataset({"prompt": "hi"}, {"prompt": text}, {"prompt": text}), tokenizer, **data)
    (warning,) = source.warnings
    assert warning.startswith("2 of 3 prompts (the first is row 2) are the JSON of messages as a text")
    assert "give the list itself" in warning
    assert load(dataset({"prompt": '[1, 2] {"role"'}), tokenizer, **data).warnings == []


def test_messages_are_kept_in_one_form(dataset, tokenizer):
    call = {"function": {"name": "f", "arguments": {"a": 1, "b": None}}}
    parts = [{"type": "text", "text": "hi ", "image": None}, {"type": "text", "text": "1"}]
    (prompt,) = load(
        dataset({"prompt": [{"role": "user", "content": parts, "name": None}]}), tokenizer
    ).head()
    assert prompt.text == tuple(USER)
    assert (
        prompt.input_ids.tolist() == load(dataset({"prompt": USER}), tokenizer).head()[0].input_ids.tolist()
    )
    dialogue = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}, *USER]
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    row = dataset({"prompt": dialogue})
    (prompt,) = load(row, with_chat_template(builtin_tokenizer(), DataConfig(chat_template=template))).head()
    assert prompt.text[1]["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1}}}]


@pytest.mark.parametrize("none", [None, [], (), "", {}, False, 0])
def test_a_message_without_calls_has_no_field_of_them(none):
    """False and 0 were a TypeError, and what is empty in another way stayed for the template to ask for."""
    assert checked_messages([{**USER[0], "tool_calls": none}]) == USER


def test_every_other_column_goes_to_the_rewards(dataset, tokenizer):
    spec = dataset({"q": "hi", "answer": 7, "extra": {"a": [1]}}, {"q": "ho", "level": 2})
    first, second = load(spec, tokenizer, question_column="q").head()
    assert first.columns == {"q": "hi", "answer": 7, "extra": {"a": [1]}, "level": None}
    assert second.columns == {"q": "ho", "answer": None, "extra": None, "level": 2}
    (prompt,) = load(dataset({"prompt": "hi", "answer": 7}), tokenizer).head()
    assert prompt.columns == {"answer": 7}


@pytest.mark.parametrize(
    ("row", "data", "message"),
    [
        (
            {"question": "a", "answer": 1},
            {},
            r"no column `prompt`; the columns are question, answer.*data.question_column",
        ),
        ({"prompt": "a"}, {"question_column": "q"}, "no column `q`.*the columns are prompt"),
        ({"prompt": "a", "q": "b"}, {"question_column": "q"}, "two prompt columns, `prompt` and `q`"),
        ({"prompt": "a", "completions": "b"}, {}, "a column is called `completions`"),
        ({"prompt": "a", "finish_reasons": "b"}, {}, "a column is called `finish_reasons`"),
        ({"prompt": "a", "prompts": "b"}, {}, "a column is called `prompts`"),
        ({"prompt": ""}, {}, "row 1: .*at least one token"),
        ({"prompt": []}, {}, "row 1: .*non-empty list of messages"),
        (
            {"prompt": None},
            {},
            "row 1: the column `prompt` must be a string or a list of messages; it is NoneType",
        ),
        ({"prompt": 3}, {}, "row 1: the column `prompt` must be .* it is int 3"),
        ({"prompt": ["hi"]}, {}, "row 1: .*`role` and a `content`"),
        ({"prompt": [{"role": "user"}]}, {}, "row 1: .*`role` and a `content`"),
        ({"prompt": [{"role": "user", "content": ["x"]}]}, {}, "row 1: .*both strings"),
        ({"prompt": [*USER, {"role": "assistant", "content": "x"}]}, {}, "row 1: the last message"),
        (
            {"prompt": [{"role": "system", "content": "x"}, *USER]},
            {"system_prompt": "S"},
            "data.system_prompt adds another",
        ),
        ({"q": USER}, {"question_column": "q"}, "row 1: the column `q` must be a string; it is list"),
    ],
)
def test_data_that_does_not_fit(dataset, tokenizer, row, data, message):
    with pytest.raises(ValueError, match=message):
        load(dataset(row), tokenizer, **data)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "must have finite numbers; it has nan"),
        ({"deep": [float("inf")]}, "must have finite numbers; it has inf"),
        (datetime.date(2026, 1, 1), "must consist of text, numbers, lists and objects; it has a date"),
    ],
)
def test_a_message_that_cannot_be_kept_is_refused_when_it_is_loaded(tmp_path, tokenizer, value, reason):
    """It would fail in the first step, when the samples are written."""
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"prompt": [[{**USER[0], "seen": value}]]}), path)
    with pytest.raises(ValueError, match=f"row 1: .*a message {reason}"):
        load(str(path), tokenizer)


def test_half_a_surrogate_pair_in_a_message_is_refused_when_it_is_loaded(dataset, tokenizer):
    message = "row 1: .*a message must be valid Unicode; the character at position 0 is half a surrogate pair"
    with pytest.raises(ValueError, match=message):
        load(dataset({"prompt": [{"role": "user", "content": "\ud800"}]}), tokenizer)


def test_the_row_at_fault_is_named(dataset, tokenizer):
    with pytest.raises(ValueError, match=r"rows.jsonl, row 2: "):
        load(dataset({"prompt": "a"}, {"prompt": ""}), tokenizer)


@pytest.mark.parametrize("blank", ["", " \n", "it is ####"])
def test_a_blank_answer_names_its_row(dataset, tokenizer, blank):
    rows = dataset({"prompt": "a", "answer": "7"}, {"prompt": "b", "answer": blank})
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 2: the column `answer` must have text"):
        load(rows, tokenizer)
    unjudged = load(dataset({"prompt": "a", "answer": None}, {"prompt": "b", "answer": 7}), tokenizer).head()
    assert [prompt.columns["answer"] for prompt in unjudged] == [None, 7]


def test_messages_without_a_chat_template(dataset):
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = None
    assert len(load(dataset({"prompt": "hi"}), tokenizer)) == 1
    with pytest.raises(ValueError, match="row 1: messages need a chat template"):
        load(dataset({"prompt": USER}), tokenizer)


def test_required_columns(dataset, tokenizer):
    spec = dataset({"prompt": "a", "answer": 1})
    assert len(load(spec, tokenizer, {"answer": "the reward `correct`"})) == 1
    with pytest.raises(
        ValueError, match="`f` needs the column `level`; the columns beside the prompt are answer"
    ):
        load(spec, tokenizer, {"level": "the reward `f`"})
    with pytest.raises(ValueError, match="a reward function needs the column `level`"):
        load(spec, tokenizer, ["level"])
    with pytest.raises(ValueError, match=r"the column `prompt`.*functions get the prompts as `prompts`"):
        load(spec, tokenizer, {"prompt": "the reward `f`"})


LENGTHS = ({"prompt": "1234"}, {"prompt": "12"}, {"prompt": "123456"})


def test_long_prompts_are_an_error(dataset, tokenizer):
    message = (
        r"2 of 3 prompts are longer than data.max_prompt_length=3 tokens \(row 1 has 4; the longest has 6\)"
    )
    with pytest.raises(ValueError, match=message):
        load(dataset(*LENGTHS), tokenizer, max_prompt_length=3)


def test_long_prompts_are_skipped(dataset, tokenizer):
    source = load(dataset(*LENGTHS), tokenizer, max_prompt_length=4, on_long_prompt="skip")
    assert decoded(tokenizer, source.head()) == ["1234", "12"]
    assert (len(source), source.skipped, source.truncated) == (2, 1, 0)
    with pytest.raises(ValueError, match="on_long_prompt=skip leaves none"):
        load(dataset(*LENGTHS), tokenizer, max_prompt_length=1, on_long_prompt="skip")


def test_long_prompts_are_truncated_on_the_left(dataset, tokenizer):
    source = load(dataset(*LENGTHS), tokenizer, max_prompt_length=3, on_long_prompt="truncate_left")
    assert decoded(tokenizer, source.head()) == ["234", "12", "456"]
    assert (len(source), source.skipped, source.truncated) == (3, 0, 2)
    assert source.head()[0].text == "1234"


RATES = [{"prompt": str(i), "pass_rate": rate} for i, rate in enumerate((0, 0.25, 0.5, 1.0))]


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({}, "0123"),
        ({"min_pass_rate": 0.25}, "123"),
        ({"max_pass_rate": 0.5}, "012"),
        ({"min_pass_rate": 0.1, "max_pass_rate": 0.9}, "12"),
    ],
)
def test_prompts_are_filtered_by_pass_rate(dataset, tokenizer, limits, kept):
    source = load(dataset(*RATES), tokenizer, by_pass_rate=True, **limits)
    assert "".join(decoded(tokenizer, source.head())) == kept
    assert (len(source), source.filtered) == (len(kept), 4 - len(kept))
    assert len(load(dataset(*RATES), tokenizer, **limits)) == 4  # evaluation and demonstrations


def test_pass_rates_in_a_csv_file_may_have_any_number_of_digits(tmp_path, tokenizer):
    (tmp_path / "a.csv").write_text("prompt,pass_rate\na,0.50\nb,1\n")
    source = load(str(tmp_path / "a.csv"), tokenizer, by_pass_rate=True, max_pass_rate=0.5)
    assert decoded(tokenizer, source.head()) == ["a"]


def test_a_row_left_out_is_not_counted_as_long_too(dataset, tokenizer):
    rows = (
        {"prompt": "123456", "rate": 0.0},
        {"prompt": "12", "rate": 0.5},
        {"prompt": "12345", "rate": 0.5},
    )
    source = load(
        dataset(*rows), tokenizer, by_pass_rate=True, min_pass_rate=0.1, pass_rate_column="rate",
        max_prompt_length=4, on_long_prompt="skip",
    )  # fmt: skip
    assert (len(source), source.skipped, source.filtered) == (1, 1, 1)


def test_pass_rates_that_cannot_filter(dataset, tokenizer):
    def attempt(*rows, **limits):
        load(dataset(*rows), tokenizer, by_pass_rate=True, **limits)

    with pytest.raises(ValueError, match=r"need the column `pass_rate` \(data\.pass_rate_column\); .* unset"):
        attempt({"prompt": "1"}, min_pass_rate=0.1)
    for value in (None, "high", "1.5", True, 1.5, -0.1, float("nan")):
        with pytest.raises(
            ValueError, match=r"row 2: the column `pass_rate` must be a pass rate from 0 to 1"
        ):
            attempt({"prompt": "1", "pass_rate": 0.5}, {"prompt": "1", "pass_rate": value}, max_pass_rate=0.5)
    with pytest.raises(
        ValueError, match=r"no prompt is left: 4 have a pass rate below data\.min_pass_rate=None"
    ):
        attempt(*RATES[1:], *RATES[3:], max_pass_rate=0.1)
    long = {"prompt": "123", "pass_rate": 0.9}
    with pytest.raises(ValueError, match=r"and 1 are longer than .*, or raise data\.max_prompt_length"):
        attempt(RATES[0], long, min_pass_rate=0.1, max_prompt_length=2, on_long_prompt="skip")


@pytest.fixture(scope="module")
def stream(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "seven.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": str(i)}) for i in range(7)))
    return lambda seed: load_prompts(str(path), DataConfig(), tokenizer, seed=seed)


def texts(prompts):
    return [prompt.text for prompt in prompts]


def test_each_pass_holds_every_row_once_in_another_order(stream):
    source = stream(3)
    drawn = texts(source.batch(0, 28))
    passes = [drawn[i : i + 7] for i in range(0, 28, 7)]
    assert all(sorted(one) == list("0123456") for one in passes)
    assert len({tuple(one) for one in passes}) > 1
    assert texts(stream(4).batch(0, 28)) != drawn


def test_a_draw_depends_on_its_position_alone(stream):
    drawn = stream(3).batch(0, 30)
    assert [prompt.group_id for prompt in drawn] == list(range(30))
    assert texts(stream(3).take(11, 4)) == texts(drawn)[11:15]
    later = stream(3).batch(4, 5)
    assert texts(later) == texts(drawn)[20:25]
    assert [prompt.group_id for prompt in later] == [20, 21, 22, 23, 24]
    assert texts(stream(3 + 2**32).batch(0, 30)) == texts(drawn)
    assert stream(3).batch(10**9, 2)[0].group_id == 2 * 10**9


def test_head_is_in_file_order(stream):
    assert texts(stream(3).head(3)) == ["0", "1", "2"]
    assert texts(stream(5).head()) == list("0123456")
    assert [prompt.group_id for prompt in stream(3).head(3)] == [0, 1, 2]
    assert len(stream(3).head(100)) == 7


def test_the_built_in_task(tokenizer):
    source = load("builtin:arithmetic", tokenizer, {"answer": "the reward `correct`"})
    assert len(source) == 1088
    (prompt,) = source.batch(0, 1)
    assert decoded(tokenizer, [prompt])[0] == f"<|user|>{prompt.text[0]['content']}<|assistant|>"
    assert set(prompt.columns) == {"answer", "completion"}


def test_examples(tokenizer):
    data = DataConfig()
    source = load_examples("builtin:arithmetic", data, tokenizer, train_on="assistant", seed=1)
    prompts = load_prompts("builtin:arithmetic", data, tokenizer, seed=1)
    for example, prompt in zip(source.batch(7, 4), prompts.batch(7, 4), strict=True):
        np.testing.assert_array_equal(example.input_ids[~example.scored], prompt.input_ids)
        assert example.input_ids.dtype == np.int32
        answer = tokenizer.decode(example.input_ids[len(prompt.input_ids) :])
        assert answer == prompt.columns["completion"] + "<|end|>"
    assert len(source) == 1088


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"prompt": "a", "answer": 1},
            "needs the columns `prompt` and `completion`, .*; the columns are prompt, answer",
        ),
        ({"prompt": "a", "completion": ""}, "row 1: the column `completion` must be a string with text"),
        ({"prompt": "a", "completion": 3}, "row 1: the column `completion` must be .* it is int 3"),
    ],
)
def test_bad_examples(dataset, tokenizer, row, message):
    with pytest.raises(ValueError, match=message):
        load_examples(dataset(row), DataConfig(), tokenizer, train_on="assistant", seed=0)


def test_an_answer_that_a_template_ended_gets_no_second_end(dataset, tokenizer):
    spec = dataset(
        {"prompt": "1", "completion": f"2{tokenizer.eos_token}"}, {"prompt": "1", "completion": "2"}
    )
    source = load_examples(spec, DataConfig(shuffle=False), tokenizer, train_on="assistant", seed=0)
    ended, plain = source.batch(0, 2)
    assert ended.input_ids.tolist() == plain.input_ids.tolist()


def test_examples_need_an_end_token(dataset):
    tokenizer = builtin_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos_token"):
        load_examples(
            dataset({"prompt": "a", "completion": "b"}), DataConfig(), tokenizer, train_on="assistant", seed=0
        )


def test_the_limit_of_prompts_is_none_of_examples(dataset, tokenizer):
    """`data.max_prompt_length` is for what a rollout continues; the default refused long examples."""
    spec = dataset({"prompt": "1234", "completion": "a"})
    data = DataConfig(max_prompt_length=3)
    assert len(load_examples(spec, data, tokenizer, train_on="assistant", seed=0)) == 1


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K files are not beside the repository")
@pytest.mark.parametrize("count", [100, pytest.param(7473, marks=pytest.mark.slow)])
def test_gsm8k(tokenizer, tmp_path, count):
    """Its first problems, and all of them."""
    lines = GSM8K.read_text("utf-8").splitlines(keepends=True)
    assert len(lines) == 7473
    file = tmp_path / "train.jsonl"
    file.write_text("".join(lines[:count]), "utf-8")
    data = DataConfig(question_column="question", system_prompt="Think.", max_prompt_length=1200)
    source = load_prompts(str(file), data, tokenizer, seed=0, required_columns=["answer"])
    assert len(source) == count
    first = source.head(1)[0]
    assert first.columns["answer"].endswith("#### 72")
    assert tokenizer.decode(first.input_ids).startswith(
        "<|system|>Think.<|user|>Natalia sold clips to 48 of her"
    )


def test_the_usual_longest_prompt_is_that_of_most_batches(dataset, tokenizer):
    lengths = [*range(1, 100), 500]
    source = load(dataset(*({"prompt": "1" * n} for n in lengths)), tokenizer, max_prompt_length=500)
    assert sorted(len(prompt.input_ids) for prompt in source.head()) == lengths
    rng = np.random.default_rng(0)
    for batch_size in (1, 4, 16):
        usual = source.usual_longest(batch_size)
        longest = rng.choice(lengths, (20_000, batch_size)).max(axis=1)
        assert np.mean(longest <= usual) >= 0.94, batch_size
        assert np.mean(longest < usual) <= 0.96, batch_size
    assert source.usual_longest(64) == 500
