"""Ids of episodes of several turns: what was sampled stays, and the text is the template's."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from chat_templates import FAMILIES, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from quatrain.config.schema import DataConfig
from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.chat_template import with_chat_template
from quatrain.data.tokenizer import fill_template, load_tokenizer, render
from quatrain.data.turns import STAND_IN, TurnTemplate

SMOLLM2 = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
TOOL = {
    "type": "function",
    "function": {
        "name": "add_numbers",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A"}}},
    },
}
ASK = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"})
TOKENIZERS = {name: tokenizer_of(family) for name, family in FAMILIES.items()}
# Those that write a turn in the same way whatever stands before and after it.
APPEND_ONLY = ("qwen2.5", "llama3.1", "smollm2", "gemma3")

odd_text = st.text(st.sampled_from("aZ9 \n\t.{}<|>\"'\\é¿ß中🙂\u200d\u0301\x00\ufeff"), max_size=12).map(
    str.strip
)


def of(name, tools=()):
    """(tokenizer, turns, the id that ends a turn, another stop id) of a family."""
    family, tokenizer = FAMILIES[name], TOKENIZERS[name]
    ends = tokenizer.convert_tokens_to_ids([family.eos, family.other_end])
    return tokenizer, TurnTemplate(tokenizer, ends, tools), *ends


def answers(name, texts):
    """What an environment writes in a turn: results of tools, or a user's message."""
    if FAMILIES[name].takes_results:
        return [
            {"role": "tool", "name": "add", "tool_call_id": f"call{n:05}", "content": text}
            for n, text in enumerate(texts)
        ]
    return [{"role": "user", "content": " ".join(texts)}]


def plain_ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("name", APPEND_ONLY)
@settings(max_examples=30, deadline=None)
@given(turns=st.lists(st.tuples(odd_text, st.lists(odd_text, min_size=1, max_size=3)), max_size=4))
def test_ids_of_turns_are_those_of_the_whole_dialogue(name, turns):
    tokenizer, template, end, _ = of(name)
    ids, dialogue = template.prompt(ASK).ids, list(ASK)
    assert ids == render(tokenizer, ASK).ids
    for text, results in turns:
        sampled = [*sampled_ids(tokenizer, text), end]
        new = answers(name, results)
        ids += sampled + template.suffix(ASK, sampled, new).ids
        dialogue += [{"role": "assistant", "content": text}, *new]
    # Each byte or letter is a token of its own, so the whole text has these ids and no others.
    assert ids == plain_ids(tokenizer, fill_template(tokenizer, dialogue, add_generation_prompt=True))


def sampled_ids(tokenizer, text):
    """The ids of a text after other text: without the space in front that SentencePiece adds."""
    before = plain_ids(tokenizer, "a")
    return plain_ids(tokenizer, "a" + text)[len(before) :]


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_nothing_sampled_changes_nor_changes_what_follows(name, data):
    tokenizer, template, end, other = of(name)
    size = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    ids, sampled_turns = template.prompt(ASK).ids, []
    starts = []
    for _ in range(data.draw(st.integers(1, 3))):
        # Any ids, which need not be valid UTF-8, nor what encoding their text would give; also none.
        sampled = data.draw(st.lists(st.integers(0, size - 1), max_size=6))
        sampled += data.draw(st.sampled_from([[end], [other], []]))
        new = answers(name, data.draw(st.lists(odd_text, min_size=1, max_size=3)))
        suffix = template.suffix(ASK, sampled, new).ids
        cut = not sampled or sampled[-1] not in (end, other)
        # The turn is ended once: by what was sampled, or by the template.
        assert (suffix[0] == end) == cut
        assert suffix == template.suffix(ASK, [] if cut else [end], new).ids
        starts.append(len(ids))
        ids += sampled + suffix
        sampled_turns.append(sampled)
    for start, sampled in zip(starts, sampled_turns, strict=True):
        assert ids[start : start + len(sampled)] == sampled


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen2.5",
            "\n<|im_start|>user\n<tool_response>\n4\n</tool_response>\n<tool_response>\n5\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama3.1",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|><|start_header_id|>ipython'
            '<|end_header_id|>\n\n"5"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
        ),
        (
            "smollm2",
            "\n<|im_start|>tool\n4<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("gemma3", "\n<start_of_turn> user\n4 5<end_of_turn> \n<start_of_turn> model\n"),
        (
            "mistral",
            '[TOOL_RESULTS]  {"content": 4, "call_id": "call00000"}[/TOOL_RESULTS]'
            '[TOOL_RESULTS]  {"content": 5, "call_id": "call00001"}[/TOOL_RESULTS]',
        ),
    ],
)
def test_suffixes_written_out(name, expected):
    tokenizer, template, end, _ = of(name)
    assert tokenizer.decode(template.suffix(ASK, [1, end], answers(name, ["4", "5"])).ids) == expected


def test_thoughts_stay_where_the_template_would_strip_them():
    tokenizer, template, end, _ = of("qwen3")
    sampled = [*plain_ids(tokenizer, "<think>\nmore\n</think>\n\n4?"), end]
    new = [{"role": "user", "content": "No."}]
    ids = template.prompt(ASK).ids + sampled + template.suffix(ASK, sampled, new).ids
    dialogue = [*ASK, {"role": "assistant", "content": "<think>\nmore\n</think>\n\n4?"}, *new]
    stripped = fill_template(tokenizer, dialogue, add_generation_prompt=True)
    assert "more" not in stripped
    assert tokenizer.decode(ids) == stripped.replace("4?", "<think>\nmore\n</think>\n\n4?")


def test_variables_of_the_template_hold_in_every_turn():
    data = DataConfig(chat_template_kwargs={"enable_thinking": False})
    tokenizer = with_chat_template(tokenizer_of(FAMILIES["qwen3"]), data)
    template = TurnTemplate(tokenizer, [tokenizer.eos_token_id])
    suffix = template.suffix(ASK, [tokenizer.eos_token_id], [{"role": "user", "content": "No."}]).ids
    assert tokenizer.decode(suffix).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_stop_id_that_starts_the_next_message_is_kept():
    """GLM-4's turns have no end token: the model stops at the token of the next role."""
    tokenizer = TOKENIZERS["qwen2.5"]
    glm = with_template(
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<|im_end|>' }}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_end|>' }}{% endif %}"
    )
    user, assistant, other = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    template = TurnTemplate(glm, [user, other])
    new = [{"role": "user", "content": "a"}]
    letter = plain_ids(tokenizer, "a")
    assert template.suffix(ASK, [user], new).ids == [*letter, assistant]
    assert template.suffix(ASK, [other], new).ids == [user, *letter, assistant]


def test_white_space_before_the_end_token_goes_with_it():
    """Llama 2's template writes a space between the text and the end token, which a model does not sample."""
    template = with_template(
        "{% for m in messages %}{{ '<|im_start|>' + m.content + ' <|im_end|>' }}{% endfor %}"
    )
    start, end = template.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    suffix = TurnTemplate(template, [end]).suffix(ASK, [end], [{"role": "user", "content": "a"}]).ids
    assert suffix == [start, *plain_ids(template, "a "), end]


def test_no_space_is_written_that_stands_at_the_start_of_a_text_only():
    """Newer conversions of SentencePiece put a space before a text, and none after a special token."""
    tokenizer = tokenizer_of(FAMILIES["mistral"])
    tokenizer.chat_template = FAMILIES["smollm2"].template.replace("<|im_end|>", "</s>")
    backend = tokenizer.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    end = tokenizer.eos_token_id
    suffix = TurnTemplate(tokenizer, [end]).suffix(ASK, [end], [{"role": "user", "content": "a"}]).ids
    assert tokenizer.convert_ids_to_tokens(suffix[:3]) == ["<0x0A>", "<", "|"]


def with_template(text):
    tokenizer = tokenizer_of(FAMILIES["qwen2.5"])
    tokenizer.chat_template = text
    return tokenizer


def test_an_environment_may_write_the_stand_in():
    tokenizer, template, end, _ = of("smollm2")
    suffix = template.suffix(ASK, [end], [{"role": "user", "content": f"a{STAND_IN}b"}]).ids
    assert tokenizer.decode(suffix) == f"\n<|im_start|>user\na{STAND_IN}b<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.takes_results])
def test_schemas_are_in_the_prompt_of_templates_that_write_them(name, caplog):
    with caplog.at_level(logging.WARNING, "quatrain"):
        tokenizer, template, *_ = of(name, [TOOL])
    writes = "add_numbers" in tokenizer.decode(template.prompt(ASK).ids)
    assert writes == (name != "smollm2")
    assert ("the chat template does not write the descriptions of tools" in caplog.text) != writes
    assert "add_numbers" not in tokenizer.decode(of(name)[1].prompt(ASK).ids)


def test_a_template_without_messages_of_tools_is_one_error():
    with pytest.raises(
        ValueError, match=r"must take messages of the role `tool`.*roles must alternate.*such as"
    ):
        of("gemma3", [TOOL])
    silent = with_template("{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}")
    with pytest.raises(
        ValueError,
        match=r"must take messages of the role `tool`.*this one does not: the chat template must write",
    ):
        TurnTemplate(silent, [1], [TOOL])


def test_bad_input_is_one_error():
    _, template, end, _ = of("gemma3")
    with pytest.raises(
        ValueError, match=r"must be a list of messages.*got the text 'Why'.*data.system_prompt"
    ):
        template.prompt("Why")
    with pytest.raises(ValueError, match="must be a list of messages"):
        template.suffix("Why", [end], [{"role": "user", "content": "a"}])
    with pytest.raises(
        ValueError, match=r"the chat template rejects messages with the roles.*must alternate"
    ):
        template.suffix(ASK, [end], [{"role": "tool", "content": "a"}])
    with pytest.raises(ValueError, match="half a surrogate pair"):
        template.suffix(ASK, [end], [{"role": "user", "content": "\ud800"}])
    forgetful = with_template("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="must write the assistant's messages"):
        TurnTemplate(forgetful, [end]).suffix(ASK, [end], [{"role": "user", "content": "a"}])
    none = tokenizer_of(FAMILIES["qwen2.5"])
    none.chat_template = None
    with pytest.raises(ValueError, match="messages need a chat template"):
        TurnTemplate(none, [end]).prompt(ASK)


def test_the_built_in_tokenizer():
    tokenizer = builtin_tokenizer()
    template = TurnTemplate(tokenizer, [tokenizer.eos_token_id], [TOOL])
    sampled = [*tokenizer.encode("3"), tokenizer.eos_token_id]
    suffix = template.suffix(ASK, sampled, [{"role": "user", "content": "How many now?"}]).ids
    assert tokenizer.decode(suffix) == "<|user|>How many now?<|assistant|>"


@pytest.mark.skipif(not SMOLLM2.is_file(), reason="models/ has no SmolLM2: run `make smollm2`")
def test_smollm2_with_a_real_vocabulary():
    tokenizer = load_tokenizer(str(SMOLLM2))
    template = TurnTemplate(tokenizer, [tokenizer.eos_token_id])
    letters = [index for letter in "The pens" for index in tokenizer.encode(letter)]
    assert letters != tokenizer.encode("The pens")  # no encoding of its text, as models sample now and then
    sampled = [*letters, tokenizer.eos_token_id]
    ids = template.prompt(ASK).ids + sampled
    ids += template.suffix(ASK, sampled, [{"role": "user", "content": "Naïve 🙂"}]).ids
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n"
        "<|im_start|>assistant\nThe pens<|im_end|>\n<|im_start|>user\nNaïve 🙂<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
