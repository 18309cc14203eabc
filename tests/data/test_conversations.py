"""Conversations as examples: answers with calls, several answers, variables of rows, and what is refused."""

import json

import pytest
from chat_templates import CALLING, FAMILIES, tokenizer_of

from quatrain.config.schema import DataConfig
from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.examples import check_example_columns, load_examples
from quatrain.data.prompts import load_prompts
from quatrain.data.tokenizer import fill_template
from quatrain.data.turns import TurnTemplate

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALLS = [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 4}}}]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "4+1?"}
ANSWER = {"role": "assistant", "content": "It is 5."}
CALLED = {"role": "assistant", "content": "", "tool_calls": CALLS}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call00001", "content": "5"}
DIALOGUE = [SYSTEM, USER, CALLED, RESULT, ANSWER, USER, {"role": "assistant", "content": "Yes."}]
DATA = DataConfig(shuffle=False)
TOKENIZERS = {name: tokenizer_of(family) for name, family in {**FAMILIES, **CALLING}.items()}


def examples(*rows, name="qwen2.5", train_on="assistant", data=DATA, tokenizer=None):
    tokenizer = tokenizer or TOKENIZERS[name]
    source = load_examples("given", data, tokenizer, train_on=train_on, seed=0, rows={"given": list(rows)})
    return source.head()


def trained(example, name):
    """The text of each stretch of trained tokens."""
    starts = [at for at, each in enumerate(example.scored) if each and not example.scored[at - 1]]
    ends = [at for at, each in enumerate(example.scored, 1) if each and not any(example.scored[at : at + 1])]
    decode = TOKENIZERS[name].decode
    return [decode(example.input_ids[slice(*each)]) for each in zip(starts, ends, strict=True)]


CALL_TEXTS = {
    "qwen2.5": '<tool_call>\n{"name": "add", "arguments": {"a": 4}}\n</tool_call><|im_end|>',
    "llama3.1": '{"name": "add", "parameters": {"a": 4}}<|eot_id|>',
    "hermes": '<tool_call>\n{ "arguments": {"a": 4}, "name": "add"}\n</tool_call> <|im_end|>',
}


@pytest.mark.parametrize("name", CALL_TEXTS)
@pytest.mark.parametrize("train_on", ["assistant", "completion"])
def test_answers_with_calls_are_trained_to_their_ends(name, train_on):
    """The end token was left out, or the newline behind it, a result or a header trained."""
    (example,) = examples({"messages": DIALOGUE, "tools": [TOOL]}, name=name, train_on=train_on)
    end = FAMILIES[name].eos
    expected = [CALL_TEXTS[name], f"It is 5.{end}", f"Yes.{end}"]
    assert trained(example, name) == (expected if train_on == "assistant" else expected[-1:])
    whole = fill_template(TOKENIZERS[name], DIALOGUE, add_generation_prompt=False, tools=[TOOL])
    assert TOKENIZERS[name].decode(example.input_ids) == whole.removesuffix("\n")


def test_the_ids_between_answers_are_those_of_a_rollout():
    """gpt-oss ends a call and an answer with tokens of their own, which it writes otherwise later on."""
    tokenizer = TOKENIZERS["gpt-oss"]
    (example,) = examples({"messages": DIALOGUE}, name="gpt-oss")
    call, answer, last = trained(example, "gpt-oss")
    assert call == ' to=functions.add<|channel|>commentary json<|message|>{"a": 4}<|call|>'
    assert answer == "<|channel|>final<|message|>It is 5.<|return|>"
    turns = TurnTemplate(tokenizer, tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"]))
    sampled = [tokenizer.encode(text) for text in (call, answer, last)]
    ids = [
        *turns.prompt((SYSTEM, USER)).ids,
        *sampled[0],
        *turns.suffix((SYSTEM, USER), sampled[0], [RESULT]).ids,
    ]
    ids += [*sampled[1], *turns.suffix((SYSTEM, USER), sampled[1], [USER]).ids, *sampled[2]]
    assert example.input_ids.tolist() == ids


def test_the_end_token_is_the_one_that_the_template_writes():
    """A chat model whose tokenizer names another end was trained to end with that one."""
    tokenizer = tokenizer_of(FAMILIES["qwen2.5"])
    tokenizer.eos_token = "<|endoftext|>"
    chat, text = examples(
        {"messages": [USER, ANSWER], "prompt": None, "completion": None},
        {"messages": None, "prompt": "4+1=", "completion": "5"},
        tokenizer=tokenizer,
    )
    assert tokenizer.decode(chat.input_ids[chat.scored]) == "It is 5.<|im_end|>"
    assert tokenizer.decode(text.input_ids[text.scored]) == "5<|endoftext|>"


THOUGHT = {"reasoning_content": "four and one"}


def test_thoughts_that_stay_while_tools_are_called_are_trained():
    """Qwen3's keeps the thoughts behind the last question, and removes them with the next."""
    tokenizer = tokenizer_of(FAMILIES["qwen3"])
    template = FAMILIES["qwen3"].template.replace(
        "{%- set content, thought = message.content, '' %}",
        "{%- set content, thought = message.content, message.reasoning_content or '' %}",
    )
    tokenizer.chat_template = template
    looped = [USER, CALLED | THOUGHT, RESULT, ANSWER | THOUGHT]
    (example,) = examples({"messages": looped}, tokenizer=tokenizer)
    thought = "<think>\nfour and one\n</think>\n\n"
    call = thought + '\n<tool_call>\n{"name": "add", "arguments": {"a": 4}}\n</tool_call><|im_end|>'
    assert tokenizer.decode(example.input_ids[example.scored]) == call + thought + "It is 5.<|im_end|>"
    asked = [*looped, USER, ANSWER]
    with pytest.raises(ValueError, match=r"given, row 2: where several .*<think>fourandone.*train_on=comp"):
        examples({"messages": [USER, ANSWER]}, {"messages": asked}, tokenizer=tokenizer)
    (example,) = examples({"messages": asked}, tokenizer=tokenizer, train_on="completion")
    assert tokenizer.decode(example.input_ids[example.scored]) == "It is 5.<|im_end|>"
    assert "four" not in tokenizer.decode(example.input_ids)


def test_an_empty_thought_is_not_trained_before_a_call_nor_before_a_text():
    """Qwen3's writes one in the last answer alone, so that it would stand in no rollout."""
    (example,) = examples({"messages": DIALOGUE}, name="qwen3")
    assert trained(example, "qwen3")[0].startswith("<tool_call>")
    assert "<think>" not in TOKENIZERS["qwen3"].decode(example.input_ids)


@pytest.mark.parametrize(
    ("name", "messages", "message"),
    [
        ("hermes", [USER, CALLED | {"content": "I add."}], "does not write 'I add.'"),
        ("smollm2", [USER, CALLED], "leaves out the call of 'add'"),
        ("qwen3", [USER, CALLED | THOUGHT], "does not write 'four and one'"),
        ("qwen2.5", [USER, ANSWER, ANSWER], "must be another than the assistant's; it is the assistant's"),
        (
            "qwen2.5",
            [USER, {"role": "assistant", "content": " \n"}],
            "must be a string with text, or messages",
        ),
        ("qwen2.5", [USER, ANSWER | {"content": [{"type": "image", "image": "x"}]}], "does not see pictures"),
    ],
)
def test_answers_that_are_not_written_are_refused(name, messages, message):
    with pytest.raises(ValueError, match=f"given, row 2: .*{message}"):
        examples({"messages": [USER, ANSWER]}, {"messages": messages}, name=name)


def test_an_answer_before_the_first_question_is_not_trained():
    source = load_examples(
        "given",
        DATA,
        TOKENIZERS["qwen2.5"],
        train_on="assistant",
        seed=0,
        rows={"given": [{"messages": [ANSWER, USER, ANSWER]}]},
    )
    assert len(trained(source.head()[0], "qwen2.5")) == 1
    assert "begin with the assistant's message, which is not trained" in source.warnings[0]


def test_the_answers_of_a_prompt_are_not_trained():
    row = {"prompt": [USER, ANSWER, USER], "completion": [CALLED, RESULT, ANSWER]}
    (example,) = examples(row)
    assert trained(example, "qwen2.5") == [CALL_TEXTS["qwen2.5"], "It is 5.<|im_end|>"]


@pytest.mark.parametrize("given", [{"brief": True}, '{"brief": true, "none": null}'])
def test_variables_of_a_row_reach_its_prompt_and_its_answers(given):
    """The form of an answer depends on them, as its begun thought does; that of another row was used."""
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% if brief %}<think></think>{% endif %}{% endif %}"
    )
    plain = {"messages": [USER, ANSWER], "chat_template_kwargs": None}
    rows = [plain, plain | {"chat_template_kwargs": given}, plain]
    texts = [tokenizer.decode(each.input_ids) for each in examples(*rows, tokenizer=tokenizer)]
    opening = "<user>4+1?<|end|><assistant>"
    assert texts == [opening + end + "It is 5.<|end|>" for end in ("", "<think></think>", "")]
    thinking = ANSWER | {"content": "<think>a</think>b"}
    with pytest.raises(ValueError, match="row 1: an answer must not begin with <think> where"):
        examples({"messages": [USER, thinking], "chat_template_kwargs": given}, tokenizer=tokenizer)
    prompts = load_prompts("given", DATA, tokenizer, seed=0, rows={"given": rows[:2]})
    assert [tokenizer.decode(prompt.input_ids) for prompt in prompts.head()] == [
        opening,
        opening + "<think></think>",
    ]
    turns = TurnTemplate(tokenizer, [tokenizer.eos_token_id])
    assert tokenizer.decode(turns.of_row(rows[1]).prompt((USER,)).ids).endswith("<think></think>")
    for wrong, message in (
        ({"briefly": True}, r"row 1: the column `chat_template_kwargs` must name variables .* got briefly"),
        ("brief", "row 1: the column `chat_template_kwargs` must be a mapping .* it is 'brief'"),
        ({"messages": []}, "row 1: the column `chat_template_kwargs` must not have messages"),
    ):
        with pytest.raises(ValueError, match=message):
            examples({"messages": [USER, ANSWER], "chat_template_kwargs": wrong}, tokenizer=tokenizer)


def test_variables_that_no_template_gets_are_warned_of():
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template += "{{ brief }}"
    row = {"prompt": "1", "completion": "2", "chat_template_kwargs": {"brief": True}}
    source = load_examples("given", DATA, tokenizer, train_on="assistant", seed=0, rows={"given": [row]})
    assert "have `chat_template_kwargs`, which no chat template gets" in source.warnings[0]


def test_the_system_prompt_stands_before_conversations():
    data = DataConfig(shuffle=False, system_prompt="Think.")
    rows = [{"messages": [USER, ANSWER, USER, ANSWER], "prompt": None, "completion": None}]
    rows += [{"messages": None, "prompt": "4+1?", "completion": [ANSWER]}]
    tokenizer = builtin_tokenizer()
    first, second = [
        tokenizer.decode(each.input_ids) for each in examples(*rows, data=data, tokenizer=tokenizer)
    ]
    turn = "<|user|>4+1?<|assistant|>It is 5.<|end|>"
    assert (first, second) == (f"<|system|>Think.{turn}{turn}", f"<|system|>Think.{turn}")
    rows = [{"messages": [ANSWER, USER, ANSWER], "prompt": None, "completion": None}]
    rows += [{"messages": None, "prompt": [USER, ANSWER], "completion": [USER, ANSWER]}]
    opening, given = examples(*rows, data=data, tokenizer=tokenizer)
    # An answer behind the system message is trained; one of a prompt is not, though it is one place later.
    assert tokenizer.decode(opening.input_ids[opening.scored]) == "It is 5.<|end|>" * 2
    assert tokenizer.decode(given.input_ids[given.scored]) == "It is 5.<|end|>"
    with pytest.raises(ValueError, match=r"row 1: the prompt has a system message and data\.system_prompt"):
        examples({"messages": [SYSTEM, USER, ANSWER]}, data=data)


def test_a_question_is_answered_by_messages():
    data = DataConfig(shuffle=False, question_column="asked")
    (example,) = examples({"asked": "4+1?", "completion": [ANSWER]}, data=data, tokenizer=builtin_tokenizer())
    assert builtin_tokenizer().decode(example.input_ids) == "<|user|>4+1?<|assistant|>It is 5.<|end|>"


@pytest.mark.parametrize(
    ("row", "train_on", "message"),
    [
        ({"text": "a"}, "assistant", "given: rows with a `text` have no answers; set sft.train_on=all"),
        ({"text": " "}, "all", "given, row 1: the column `text` must be a string with text"),
        ({"text": 3}, "all", "given, row 1: the column `text` must be a string with text; it is int 3"),
        ({"chosen": "a", "rejected": "b"}, "all", "given: supervised training needs .*`quatrain dpo` or"),
        ({"prompt": "a", "answer": "b"}, "all", "needs the columns `prompt` and `completion`, .*answer"),
        ({"completion": "a"}, "assistant", "given: no column `prompt`"),
        ({"prompt": "a", "completion": [ANSWER]}, "assistant", "row 1: .*must be a list of messages where"),
        (
            {"prompt": [USER], "completion": []},
            "assistant",
            "row 1: the column `completion` must be a string",
        ),
        ({"prompt": [], "completion": [ANSWER]}, "assistant", "row 1: the message before .* there is none"),
        ({"prompt": "a", "completion": [[[[[[[[]]]]]]]] * 9}, "all", "row 1: "),
    ],
)
def test_rows_that_are_no_examples_are_refused(row, train_on, message):
    with pytest.raises(ValueError, match=message):
        examples(row, train_on=train_on, tokenizer=builtin_tokenizer())


def test_columns_are_checked_without_a_tokenizer():
    rows = {"a": [{"messages": [USER, ANSWER]}], "b": [{"text": "a"}]}
    check_example_columns("a", DATA, "assistant", rows)
    check_example_columns(["a", "b"], DATA, "all", rows)
    with pytest.raises(ValueError, match="b: rows with a `text` have no answers"):
        check_example_columns(["a", "b"], DATA, "assistant", rows)
    named = DataConfig(question_column="q")
    with pytest.raises(ValueError, match=r"columns are messages; unset data\.question_column, beside which"):
        check_example_columns("a", named, "assistant", rows)


def test_an_end_within_an_answer_is_warned_of():
    """As in texts that a template has rendered before: a newline behind the end, or a further turn."""
    for content, early in (("5<|im_end|>", False), ("5<|im_end|>\n", True), ("5<|im_end|>6<|im_end|>", True)):
        for row in (
            {"prompt": "4+1=", "completion": content},
            {"messages": [USER, ANSWER | {"content": content}]},
        ):
            source = load_examples(
                "g", DATA, TOKENIZERS["qwen2.5"], train_on="assistant", seed=0, rows={"g": [row]}
            )
            assert [
                "with a token that ends completions before its last" in said for said in source.warnings
            ] == [True] * early


def test_a_text_among_conversations_is_not_trained_as_an_answer():
    """Its every token was, under `assistant` and `completion`, where only other rows have answers."""
    rows = {"messages": [USER, ANSWER]}, {"text": "4+1=5"}
    for train_on in ("assistant", "completion"):
        with pytest.raises(ValueError, match="given, row 2: rows with a `text` have no answers; set sft"):
            examples(*rows, train_on=train_on)
    assert len(examples(*rows, train_on="all")) == 2


def test_all_of_an_answer_without_a_question_is_trained():
    """The fault: an empty prompt, beside an answer of which all is trained, ended with an IndexError."""
    rows = [{"prompt": [], "completion": [ANSWER]}, {"prompt": [USER], "completion": [ANSWER]}]
    alone, asked = examples(*rows, train_on="all", tokenizer=builtin_tokenizer())
    assert asked.input_ids.tolist()[-len(alone.input_ids) :] == alone.input_ids.tolist()
    assert alone.scored.tolist() == [False] + [True] * (len(alone.input_ids) - 1)


def test_all_tokens_of_several_forms_in_one_list(tmp_path):
    """Each row in its own form, where a list of data sets gives all rows the columns of all."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "4+1=5"}))
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": [USER, ANSWER]}))
    tokenizer = builtin_tokenizer()
    specs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    source = load_examples(specs, DATA, tokenizer, train_on="all", seed=0)
    texts = [tokenizer.decode(each.input_ids) for each in source.head()]
    assert texts == ["4+1=5<|end|>", "<|user|>4+1?<|assistant|>It is 5.<|end|>"]
    assert all(each.scored[1:].all() and not each.scored[0] for each in source.head())
    assert source.batch(1, 2)[1].input_ids.tolist() == source.head()[1].input_ids.tolist()
    assert set(source.digests()) >= {"the tokens of the prompts", "the tokens of the answers"}


def test_the_last_thought_is_trained_with_all_tokens():
    """It was dropped in silence where the template does not write thoughts."""
    with pytest.raises(
        ValueError, match=r"row 1: the chat template must write the last answer; .*'four and one'"
    ):
        examples({"messages": [USER, ANSWER | THOUGHT]}, train_on="all")
