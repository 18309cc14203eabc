import pytest

from quatrain.config.schema import DataConfig
from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.chat_template import begun_answer, with_chat_template
from quatrain.data.tokenizer import load_tokenizer, render, save_tokenizer

OWN = "{% for m in messages %}{{ m.content }}{% endfor %}{% if count is defined %}{{ count }}{% endif %}"
ASK = [{"role": "user", "content": "pens"}]


def rendered(**data):
    tokenizer = with_chat_template(builtin_tokenizer(), DataConfig(**data))
    return tokenizer.decode(render(tokenizer, ASK).ids)


def test_a_template_is_text_or_a_file_and_takes_variables(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(OWN)
    assert rendered(chat_template=OWN) == "pens"
    assert rendered(chat_template=str(path), chat_template_kwargs={"count": 3}) == "pens3"
    assert rendered() == "<|user|>pens<|assistant|>"


def test_the_template_is_exported_without_the_variables(tmp_path):
    data = DataConfig(chat_template=OWN, chat_template_kwargs={"count": 3})
    save_tokenizer(with_chat_template(builtin_tokenizer(), data), tmp_path)
    again = load_tokenizer(str(tmp_path))
    assert again.chat_template == OWN
    assert again.decode(render(again, ASK).ids) == "pens"


def test_tags_that_only_transformers_knows_are_accepted():
    marked = OWN + "{%- generation -%}{% endgeneration %}"
    assert with_chat_template(builtin_tokenizer(), DataConfig(chat_template=marked)).chat_template == marked


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"chat_template": "no.jinja"}, "data.chat_template must be .* the path of a file; got 'no.jinja'"),
        ({"chat_template": "{% for %}"}, "data.chat_template must be a valid template: .*line 1; correct it"),
        ({"chat_template": "{% if a %}" * 2000}, "data.chat_template must be a valid template"),
        (
            {"chat_template": OWN, "chat_template_kwargs": {"cout": 3}},
            "must name variables that the chat template reads, which are count; got cout",
        ),
        ({"chat_template_kwargs": {"messages": 3}}, "must not have messages, which rendering sets itself"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "reads, which are none|got enable_thinking"),
    ],
)
def test_a_bad_template_or_variable_is_one_error(data, message):
    with pytest.raises(ValueError, match=message):
        rendered(**data)


@pytest.mark.parametrize(
    ("end", "begun"),
    [
        ("assistant\n", ""),
        ("assistant\n<think>\n", "<think>\n"),
        ("assistant\n<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n"),
    ],
)
def test_what_a_template_begins_of_an_answer(end, begun):
    chat = "<think>{{ messages[0].content }}</think>{% if add_generation_prompt %}" + end + "{% endif %}"
    tokenizer = with_chat_template(builtin_tokenizer(), DataConfig(chat_template=chat))
    assert begun_answer(tokenizer) == begun
    tokenizer.chat_template = None
    assert begun_answer(tokenizer) == ""


def test_a_file_that_is_no_template_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"a\.txt must be a chat template in Jinja"):
        rendered(chat_template=str(tmp_path / "a.txt"))
    (tmp_path / "b.txt").write_bytes(b"\xff{{")
    with pytest.raises(ValueError, match=r"b\.txt must be a text file in UTF-8"):
        rendered(chat_template=str(tmp_path / "b.txt"))


def test_variables_need_a_template():
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="the tokenizer has no chat template"):
        with_chat_template(tokenizer, DataConfig(chat_template_kwargs={"a": 1}))
