"""What is trained of an answer: thoughts, what a template has begun, flags, lengths, and no space."""

import json
from functools import partial

import pytest
from chat_templates import FAMILIES, tokenizer_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quatrain.config.schema import DataConfig
from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.examples import load_examples
from quatrain.data.prompts import load_prompts
from quatrain.data.tokenizer import encode_further, fill_template

CHATML = (
    "{% if tools %}{{ tools }}\n{% endif %}{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>BEGUN{% endif %}"
)
USER = {"role": "user", "content": "Max has 3"}
ANSWER = {"role": "assistant", "content": "3+4=7"}
TOOL = {"name": "tide_at", "description": "The tide.", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows):
        (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / "d.jsonl")

    return write_rows


def with_template(template, tokenizer=None):
    tokenizer = tokenizer or builtin_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def examples_of(spec, tokenizer, **more):
    """(the source, (prompt, completion) of each row as ids, of rows with one answer)."""
    more = {"train_on": "assistant", "seed": 0, "data": {}} | more
    source = load_examples(spec, DataConfig(shuffle=False, **more.pop("data")), tokenizer, **more)
    cut = [(row, int(row.scored.argmax())) for row in source.head()]
    assert all(row.scored[at:].all() for row, at in cut)
    return source, [(row.input_ids[:at], row.input_ids[at:]) for row, at in cut]


def answers_of(spec, tokenizer, **more):
    """(the source, (prompt, answer without its end) of each row as text)."""
    source, pairs = examples_of(spec, tokenizer, **more)
    return source, [(tokenizer.decode(p), tokenizer.decode(c[:-1])) for p, c in pairs]


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("begun", ["", "<think>\n"])
def test_a_thought_is_trained_as_the_template_writes_it(write, field, begun):
    """It was dropped, and the model trained to answer without thinking."""
    tokenizer = with_template(CHATML.replace("BEGUN", begun))
    answer = ANSWER | {field: "3 and 4"}
    source, [(prompt, completion)] = answers_of(write({"messages": [USER, answer]}), tokenizer)
    whole = fill_template(tokenizer, [USER, answer], add_generation_prompt=False)
    assert prompt + completion + "<end>\n" == whole
    assert source.warnings == []


def test_a_thought_that_a_template_like_r1s_begins_and_leaves_out_later_is_trained(write):
    template = CHATML.replace("m.reasoning_content", "none").replace("BEGUN", "<think>\n")
    spec = write({"messages": [USER, ANSWER | {"reasoning_content": "3 and 4"}]})
    _, [(prompt, completion)] = answers_of(spec, with_template(template))
    assert prompt.endswith("<assistant><think>\n")
    assert completion == "3 and 4\n</think>\n\n3+4=7"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            {"reasoning_content": "hm"},
            "row 1: the chat template must write the thought .* does not write 'hm'",
        ),
        ({"reasoning_content": "a", "thinking": "b"}, "row 1: a message must have one thought"),
        ({"thinking": "a", "content": "<think>a</think>b"}, "row 1: .* must have its thought once"),
        ({"weight": 2}, "row 1: .*must be 0 or false .*got {'weight': 2}"),
        ({"tool_calls": [{"function": {"name": "f"}}]}, "row 1: the chat template .* out the call of 'f'"),
        ({"function_call": {"name": "f"}}, "row 1: .* calls in `tool_calls`, not in `function_call`"),
    ],
)
def test_what_cannot_be_trained_is_an_error_with_its_row(write, answer, message):
    with pytest.raises(ValueError, match=message):
        answers_of(write({"messages": [USER, ANSWER | answer]}), builtin_tokenizer())


@pytest.mark.parametrize("begun", ["<think>\n", "<think>", "<think>\n\n</think>\n\n"])
@pytest.mark.parametrize("between", ["\n", "", "\n\n"])
def test_what_the_template_begins_stands_once(write, begun, between):
    """`<think>` was trained twice, which the reward `format` gives 0."""
    tokenizer = with_template(CHATML.replace("BEGUN", begun))
    answer = f"<think>{between}3 and 4\n</think>\n\n7" if "</think>" not in begun else begun + "7"
    source, [(prompt, completion)] = answers_of(
        write({"messages": [USER, ANSWER | {"content": answer}]}), tokenizer
    )
    assert prompt.endswith(f"<assistant>{begun}")
    assert (prompt + completion).count("<think>") == (prompt + completion).count("</think>") == 1
    assert "".join((prompt + completion).split()).endswith("".join(f"<assistant>{answer}".split()))
    assert [warning.partition(") ")[2][:6] for warning in source.warnings] == ["repeat"]


def test_a_text_that_begins_the_thought_too(write):
    row = {"prompt": "3+4?<think>\n", "completion": "<think>\n7</think>7"}
    _, [(prompt, completion)] = answers_of(write(row), builtin_tokenizer())
    assert (prompt, completion) == ("3+4?<think>\n", "7</think>7")
    row = {"prompt": "which <b>", "completion": "<b> it is"}  # no thought: as it is
    assert answers_of(write(row), builtin_tokenizer())[1] == [("which <b>", "<b> it is")]


def test_thoughts_that_do_not_fit_what_the_template_begins(write):
    open_ = with_template(CHATML.replace("BEGUN", "<think>\n"))
    source, _ = answers_of(write({"messages": [USER, ANSWER]}), open_)
    assert "do not end the thought that their prompt has begun" in source.warnings[0]
    closed = with_template(CHATML.replace("BEGUN", "<think>\n\n</think>\n\n"))
    with pytest.raises(ValueError, match=r"row 1: .* must not begin with <think> where .* an empty thought"):
        answers_of(write({"messages": [USER, ANSWER | {"content": "<think>a</think>b"}]}), closed)


@pytest.mark.parametrize("flag", [{"weight": 0}, {"train": False}, {"loss_mask": 0}, {"training": False}])
def test_a_message_that_is_not_to_be_trained_is_not(write, flag):
    before, last = {"role": "assistant", "content": "5"}, ANSWER | flag
    spec = write(
        {"messages": [USER, last]}, {"messages": [USER, before, USER, last]}, {"messages": [USER, ANSWER]}
    )
    source, pairs = answers_of(spec, builtin_tokenizer())
    assert [completion for _, completion in pairs] == ["5", "3+4=7"]
    assert "1 rows are left out, because their flag" in source.warnings[-1]
    with pytest.raises(
        ValueError, match=r"no row is left: the flags \(weight, train\) of 1 rows .* not trained"
    ):
        answers_of(write({"messages": [USER, last]}), builtin_tokenizer())


def test_flags_decide_for_each_answer(write):
    """Under `assistant`, an answer with a flag of 0 stands between the others without being trained."""
    said = [{"role": "assistant", "content": text} for text in "1234"]
    said = [said[0] | {"weight": 0}, said[1], said[2] | {"train": False}, said[3] | {"weight": 1}]
    spec = write({"messages": [each for answer in said for each in (USER, answer)]})
    tokenizer = builtin_tokenizer()
    (row,) = load_examples(spec, DataConfig(), tokenizer, train_on="assistant", seed=0).head()
    assert tokenizer.decode(row.input_ids[row.scored]) == "2<|end|>4<|end|>"
    whole = fill_template(
        tokenizer, [m for answer in said for m in (USER, answer)], add_generation_prompt=False
    )
    assert tokenizer.decode(row.input_ids) == whole
    assert answers_of(spec, tokenizer, train_on="completion")[1][0][1] == "4"
    with pytest.raises(ValueError, match=r"row 1: sft\.train_on=all trains every token, and a message has a"):
        answers_of(spec, tokenizer, train_on="all")


def test_flags_and_fields_that_are_not_trained_are_warned_of(write):
    rows = [{"messages": [USER, ANSWER | {"weight": 1, "cot": "hm"}, USER, ANSWER | {"cot": "hm"}]}]
    fields, flags = answers_of(write(*rows), builtin_tokenizer(), train_on="completion")[0].warnings
    assert "(the first is row 1) have the fields cot, which are not trained" in fields
    assert "(the first is row 1) have further messages with a weight or a flag" in flags


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        [{"type": "function", "function": TOOL}],
        [{"function": TOOL, "strict": None}],
        [json.dumps(TOOL)],
    ],
)
@pytest.mark.parametrize("as_text", [False, True])
def test_the_tools_of_a_row_are_in_its_prompt(write, tools, as_text):
    """In rows of RL and of examples, in the forms in which data sets have them."""
    tokenizer = with_template(CHATML.replace("BEGUN", ""))
    spec = write({"messages": [USER, ANSWER], "tools": json.dumps(tools) if as_text else tools})
    source, [(prompt, _)] = answers_of(spec, tokenizer)
    (same,) = load_prompts(spec, DataConfig(max_prompt_length=300), tokenizer, seed=0).head()
    assert prompt == tokenizer.decode(same.input_ids)
    assert "{'type': 'function', 'function': {'name': 'tide_at', 'description': 'The tide.'" in prompt
    assert source.warnings == []
    for load in (load_prompts, partial(load_examples, train_on="assistant")):
        with pytest.raises(
            ValueError, match=r"row 1: the chat template does not write the descriptions of tools"
        ):
            load(spec, DataConfig(), builtin_tokenizer(), seed=0)


def test_a_column_tools_that_is_something_else_is_warned_of(write):
    source, _ = answers_of(write({"messages": [USER, ANSWER], "tools": ["tide"]}), builtin_tokenizer())
    assert "the column `tools` of 1 of 1 rows (the first is row 1) is no descriptions" in source.warnings[0]
    row = {"prompt": "3+4?", "completion": "7", "tools": [TOOL]}
    source, _ = answers_of(write(row), builtin_tokenizer())
    assert "(the first is row 1) is not written, because the prompt is a text" in source.warnings[0]
    with pytest.raises(
        ValueError, match="row 1: the column `tools`, which the chat template gets: a tool must"
    ):
        answers_of(write({"messages": [USER, ANSWER], "tools": [{"type": "function"}]}), builtin_tokenizer())


def test_an_example_that_is_too_long_is_found_with_its_row(write):
    """The warm start ended in mid-run, or trained beyond the model's positions."""
    rows = [{"prompt": "12", "completion": "3" * size} for size in (1, 7, 9)]
    spec, limits = write(*rows), {"positions": 20, "the budget, 10": 10}
    assert len(answers_of(spec, builtin_tokenizer(), most_tokens={"positions": 12})[0]) == 3
    said = r"d\.jsonl: 1 of 3 examples are longer than the budget, 10 tokens \(row 3 has 12; the longest has"
    with pytest.raises(ValueError, match=said):
        answers_of(spec, builtin_tokenizer(), most_tokens=limits)
    source, pairs = answers_of(spec, builtin_tokenizer(), on_long="skip", most_tokens=limits)
    assert (len(pairs), source.longer, source.truncated) == (2, 1, 0)
    assert (
        "1 examples are left out (sft.on_long=skip), because they are longer than the b" in source.warnings[0]
    )
    said = r"no row is left: with sft\.on_long=skip, nothing is left of 3 examples .* longer than a tokens;"
    with pytest.raises(ValueError, match=said):
        answers_of(spec, builtin_tokenizer(), on_long="skip", most_tokens={"a": 1})
    source, pairs = examples_of(spec, builtin_tokenizer(), on_long="truncate", most_tokens={"a": 10})
    assert [len(prompt) + len(answer) for prompt, answer in pairs] == [4, 10, 10]
    assert (len(source), source.longer, source.truncated) == (3, 0, 1)
    assert "1 examples are cut to 10 tokens (sft.on_long=truncate)" in source.warnings[0]


def test_an_example_is_cut_behind_its_last_trained_token(write):
    """What is between two answers trains nothing, and a prompt without an answer has nothing to train."""
    tokenizer = builtin_tokenizer()
    spec = write(
        {"prompt": "12", "completion": "3"},
        {"messages": [USER, ANSWER, USER, ANSWER]},
        {"prompt": "1" * 40, "completion": "3"},
    )
    whole = examples_of(spec, tokenizer, train_on="completion")[1][1]
    data = DataConfig(shuffle=False)
    cut = {"train_on": "assistant", "seed": 0, "on_long": "truncate", "most_tokens": {"a": len(whole[0]) - 1}}
    source = load_examples(spec, data, tokenizer, **cut)
    first, second = source.head()
    assert tokenizer.decode(first.input_ids) == "123<|end|>"
    assert tokenizer.decode(second.input_ids) == "<|user|>Max has 3<|assistant|>3+4=7<|end|>"
    assert second.scored[-1]
    assert (source.longer, source.truncated) == (1, 1)
    assert "1 examples are left out (sft.on_long=truncate)" in source.warnings[-1]
    assert source.warnings[-1].endswith("and nothing trained would be left of them")


def metaspace(scheme):
    """A small tokenizer as newer conversions of SentencePiece models have it."""
    words = ["▁", "▁7", "7", "▁is", "▁it", "it", "\n", *"abcdefghijklmnopqrstuvwxyz?:.0<>/"]
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in words)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    return tokenizer


@pytest.mark.parametrize("scheme", ["always", "first", "prepend"])
def test_a_completion_has_no_space_that_the_data_do_not_have(write, scheme):
    """Tokenizers like SentencePiece write a space before each text that they get."""
    tokenizer = tokenizer_of(FAMILIES["mistral"]) if scheme == "prepend" else metaspace(scheme)
    rows = [{"prompt": "is it?", "completion": text} for text in ("7", " 7", "\nit", "it is 7")]
    for (_, ids), row in zip(examples_of(write(*rows), tokenizer)[1], rows, strict=True):
        pieces = tokenizer.convert_ids_to_tokens(ids[:-1])
        assert "".join(pieces).replace("▁", " ").replace("<0x0A>", "\n") == row["completion"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("7", add_special_tokens=False))[0][0] == "▁"


def test_the_space_that_a_template_writes_before_answers_is_trained(write):
    """Llama 2's and Mistral's: without it, a model learns answers that its template never writes."""
    tokenizer = tokenizer_of(FAMILIES["mistral"])
    spec = write({"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]})
    [(_, ids)] = examples_of(spec, tokenizer)[1]
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁", "S", "o", ".", "</s>"]


def test_the_channel_that_a_template_writes_before_answers_is_trained(write):
    """gpt-oss' writes it with the message, and not with the prompt: the answer had none."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ '<final>' if m.role == 'assistant' }}{{ m.content }}<end>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    own = ANSWER | {"content": "<final>7"}
    spec = write({"messages": [USER, ANSWER]}, {"messages": [USER, own]})
    _, pairs = answers_of(spec, with_template(template))
    assert [completion for _, completion in pairs] == ["<final>3+4=7", "<final>7"]


def test_other_tokenizers_encode_a_text_as_before():
    tokenizer = builtin_tokenizer()
    for text in ("3+4=7", " 7", "\n7", "How many"):
        assert encode_further(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)
