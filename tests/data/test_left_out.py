"""Nothing of a message is dropped in silence: what templates leave out is an error or a warning."""

import logging

import pytest
from chat_templates import FAMILIES, tokenizer_of

from quatrain.data.tokenizer import fill_template, render
from quatrain.types.pictures import Picture

# As Qwen3's: system, user, assistant and tool; nothing for other roles.
KNOWN = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'tool') %}<{{ m.role }}>{{ m.content|trim }}"
    "{% elif m.role == 'assistant' %}<assistant>{% if m.reasoning_content and loop.index0 > last %}"
    "({{ m.reasoning_content }}){% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments|tojson }}]{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LAST = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% set last = ns.last %}"
)
QUESTION = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": "Yes"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "tide", "arguments": {"at": "Hull"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "name": "tide", "tool_call_id": "call00000", "content": "7"}
TOOL = {"type": "function", "function": {"name": "tide", "description": 'A "tide".\nIn metres.'}}


def tokenizer_with(template=LAST + KNOWN):
    tokenizer = tokenizer_of(FAMILIES["qwen2.5"])
    tokenizer.chat_template = template
    return tokenizer


def filled(messages, template=LAST + KNOWN, **more):
    return fill_template(tokenizer_with(template), messages, add_generation_prompt=True, **more)


@pytest.mark.parametrize("role", ["function", "sytsem", "context"])
def test_a_role_that_the_template_does_not_know_is_an_error(role):
    """The role was accepted, and its instruction lost."""
    with pytest.raises(ValueError, match=rf"leaves out the text of message 1, of the role '{role}' \('H'\)"):
        filled([{"role": role, "name": "f", "content": "H"}, QUESTION])


PARTS = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}[P]{% else %}{{ p.text }}"
    "{% endif %}{% endfor %}{% endfor %}"
)


def test_each_text_beside_a_picture_is_looked_for_on_its_own():
    """The text behind the picture was taken for written, because the one before it was."""
    picture = {"type": "image", "image": Picture(5, (1, 1), b"")}
    texts = [{"type": "text", "text": text} for text in ("Hi", "you")]
    messages = [{"role": "user", "content": [texts[0], picture, texts[1]]}]
    assert filled(messages, PARTS) == "Hi[P]you"
    assert filled([QUESTION, SAID, *messages], PARTS) == "HiYesHi[P]you"  # it takes no plain texts
    with pytest.raises(ValueError, match=r"leaves out the text of message 1, of the role 'user' \('you'\)"):
        filled(messages, PARTS.replace("p.text", "p.text if loop.first"))
    as_text = (
        "{% for m in messages %}{{ m.content if m.content is string else m.content[1].type }}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"leaves out the text of message 1, of the role 'user' \('Hi'\)"):
        filled(messages, as_text)


def test_a_changed_text_beside_a_picture_is_a_warning(caplog):
    picture = {"type": "image", "image": Picture(5, (1, 1), b"")}
    messages = [{"role": "user", "content": [picture, {"type": "text", "text": "a-b"}]}]
    with caplog.at_level(logging.WARNING):
        assert filled(messages, PARTS.replace("p.text", "p.text|replace('-', '+')")) == "[P]a+b"
    assert "the chat template changes the text of message 1" in caplog.text


def test_a_short_text_is_not_found_by_chance():
    """`7` also stands in the question: looking for the text alone would find it there."""
    silent = KNOWN.replace(", 'tool'", "")
    with pytest.raises(ValueError, match="leaves out the text of message 3, of the role 'tool'"):
        filled([{"role": "user", "content": "Is it 7?"}, CALLED, RESULT], "{% set last = 0 %}" + silent)


def test_a_call_is_not_found_in_the_descriptions_of_tools():
    template = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="it leaves out the call of 'tide'"):
        filled([QUESTION, CALLED, RESULT], template, tools=[TOOL])
    with pytest.raises(ValueError, match="it leaves out the call of 'tide'"):
        filled([QUESTION, {**SAID, "function_call": {"name": "tide", "arguments": "{}"}}, QUESTION])


def test_developer_is_system_where_the_template_has_no_branch_for_it():
    developer = {"role": "developer", "content": "Rhyme."}
    assert filled([developer, QUESTION]) == "<system>Rhyme.<user>Hi<assistant>"
    generic = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    assert filled([developer, QUESTION], generic) == "<system>Rhyme.<user>Hi"
    own = generic + "{% if messages[0].role == 'developer' %}!{% endif %}"
    assert filled([developer, QUESTION], own) == "<developer>Rhyme.<user>Hi!"
    refusing = LAST + "{# developer #}" + KNOWN  # names it, and writes nothing
    assert filled([developer, QUESTION], refusing) == "<system>Rhyme.<user>Hi<assistant>"


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_a_thought_has_the_field_that_the_template_reads(field, caplog):
    thought = CALLED | {field: "Let me look."}
    assert "(Let me look.)[tide" in filled([QUESTION, thought, RESULT])
    assert filled([QUESTION, SAID | {field: "Old."}, QUESTION]).count("Old") == 0  # of an earlier turn
    both = CALLED | {"reasoning": "Let me look.", field: "Let me look."}
    assert "(Let me look.)[tide" in filled([QUESTION, both, RESULT])
    assert caplog.text == ""


def test_fields_that_are_not_written_are_warned_of_once(caplog):
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = tokenizer_with(plain)
    dialogue = [QUESTION | {"name": "Bob"}, SAID | {"thinking": "Hm.", "weight": 0, "id": "x"}, QUESTION]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            fill_template(tokenizer, dialogue, add_generation_prompt=True, tools=[TOOL])
    assert len(caplog.records) == 3
    for said in ("the field `name` of messages of the role 'user' ('Bob')", "thoughts (`thinking`)", "tools"):
        assert caplog.text.count(f"does not write {said}") + caplog.text.count(f"descriptions of {said}") == 1
    tool_refused = {"text", "call", "tool"}
    with pytest.raises(ValueError, match=r"does not write the descriptions of tools.*column `tools`"):
        render(tokenizer, [QUESTION], [TOOL], refused=tool_refused)


@pytest.mark.parametrize(
    ("content", "template"),
    [
        (" Hi \n", LAST + KNOWN),  # trimmed
        ("a\n\"b\" 'c' <é>", "{% for m in messages %}{{ m.content|tojson }}{% endfor %}"),
        ("a & 'b' <c>", "{% for m in messages %}{{ m.content|e }}{% endfor %}"),
        ("a  b\n\nc", "{% for m in messages %}{{ m.content.split()|join(' ') }}{% endfor %}"),
        ("  \n", "{% for m in messages %}{% endfor %}x"),  # empty
    ],
)
def test_what_templates_do_with_texts_is_no_false_alarm(content, template, caplog):
    filled([{"role": "user", "content": content}], template)
    assert caplog.text == ""


@pytest.mark.parametrize("name", FAMILIES)
def test_known_templates_raise_no_false_alarm(name, caplog):
    """Thoughts of earlier turns, which Qwen3 takes out of the content, and tools as each writes them."""
    family = FAMILIES[name]
    system = {"role": "system", "content": "Be brief."}
    thought = {"role": "assistant", "content": "<think>\nlong\n</think>\n\nYes."}
    tools = [TOOL | {"function": TOOL["function"] | {"parameters": {"type": "object", "properties": {}}}}]
    tools = tools if name not in ("smollm2", "gemma3") else []
    tokenizer = tokenizer_of(family)
    fill_template(tokenizer, [system, QUESTION, thought, QUESTION], add_generation_prompt=True, tools=tools)
    assert caplog.text == ""


def test_a_text_that_is_left_out_for_what_it_says_is_an_error_and_one_that_is_changed_a_warning(caplog):
    some = "{% for m in messages if 'x' not in m.content %}{{ m.content }}{% endfor %}"
    assert filled([QUESTION], some) == "Hi"
    with pytest.raises(ValueError, match=r"leaves out the text of message 1, of the role 'user' \('x'\)"):
        filled([{"role": "user", "content": "x"}, QUESTION], some)
    assert filled([QUESTION], "{% for m in messages %}{{ m.content|upper }}{% endfor %}") == "HI"
    assert "changes the text of message 1" in caplog.text


def test_a_system_message_that_mistral_writes_at_the_end_only_is_warned_of(caplog):
    tokenizer = tokenizer_of(FAMILIES["mistral"])
    said = "{{- ' ' + message.content"
    template = tokenizer.chat_template.replace(said, "{{- message.tool_calls|default }}" + said)
    tokenizer.chat_template = template
    dialogue = [{"role": "system", "content": "Brief."}, QUESTION, CALLED, RESULT]
    assert "Brief" not in fill_template(tokenizer, dialogue, add_generation_prompt=True)
    assert "the text of message 1, of the role 'system' ('Brief.') only in dialogues that end" in caplog.text
