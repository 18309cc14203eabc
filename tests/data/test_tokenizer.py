"""Loading tokenizers of every kind, rendering prompts, stop tokens."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import pytest
import transformers

from quatrain.data import tokenizer as module
from quatrain.data.gguf_tokenizer import gguf_tokenizer
from quatrain.data.messages import checked_messages
from quatrain.data.tokenizer import (
    for_scoring,
    load_tokenizer,
    render,
    render_completed,
    save_tokenizer,
    stop_token_ids,
)

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
SMOLLM2 = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GSM8K = ROOT / ".." / "shared" / "data" / "gsm8k" / "test.jsonl"
needs_smollm2 = pytest.mark.skipif(not SMOLLM2.is_file(), reason="models/ has no SmolLM2: run `make smollm2`")

# GPT-2's alphabet for the printable ASCII bytes; space is Ġ and newline is Ċ.
ALPHABET = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ", "č"]
MERGES = ["Ġ 1", "1 2", "h i", "Ġ hi", "Ġ Ġ"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<tool>"]
HI = [{"role": "user", "content": "hi"}]


def byte_level(pre: str | None = "gpt-2", **more: Any) -> dict[str, Any]:
    """The metadata of a small byte-level tokenizer; `<tool>` is user-defined, the rest of SPECIAL control."""
    tokens = [*ALPHABET, *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]
    metadata = {
        "model": "gpt2",
        "tokens": tokens,
        "merges": MERGES,
        "token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "bos_token_id": tokens.index("<|im_start|>"),
        "eos_token_id": tokens.index("<|im_end|>"),
        **({"pre": pre} if pre else {}),
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def pieces(metadata: dict[str, Any], text: str) -> list[str]:
    tokenizer = gguf_tokenizer(metadata)
    return tokenizer.convert_ids_to_tokens(render(tokenizer, text).ids)


@needs_smollm2
def test_smollm2_ids_equal_those_of_transformers() -> None:
    golden = json.loads((GOLDEN / "tokenizer_smollm2.json").read_text("utf-8"))
    tokenizer = load_tokenizer(str(SMOLLM2))
    for case in golden["strange"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"]) == case["text"]
    if not GSM8K.is_file():
        pytest.skip("the GSM8K test file is not beside the repository")
    rows = [json.loads(line) for line in GSM8K.read_text("utf-8").splitlines()]
    texts = [row[column] for row in rows[:200] for column in ("question", "answer")]
    digests = [_digest(render(tokenizer, text).ids) for text in texts]
    assert len(digests) == 400
    assert digests == golden["gsm8k_test_sha256"]


def _digest(ids: list[int]) -> str:
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:16]


@needs_smollm2
def test_smollm2_special_tokens_and_template() -> None:
    tokenizer = load_tokenizer(str(SMOLLM2))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert len(tokenizer) == 49152
    assert stop_token_ids(tokenizer, (2,)) == (2,)
    text = tokenizer.decode(render(tokenizer, HI).ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@needs_smollm2
def test_smollm2_saved_folder_gives_the_same_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(SMOLLM2))
    save_tokenizer(tokenizer, tmp_path)
    again = load_tokenizer(str(tmp_path))
    text = "<|im_start|> cost  5 and 66 dollars\n\nnaïve <repo_name>"
    assert render(again, text).ids == render(tokenizer, text).ids
    assert render(again, HI).ids == render(tokenizer, HI).ids
    assert (again.eos_token_id, again.pad_token_id) == (2, 2)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        # Each digit alone, and taken off the space before it.
        ("smollm", ["hi", "ĠĠ", "1", "2", "3", "4", "(", "Ċ", "x"]),
        ("gpt-2", ["hi", "Ġ", "Ġ1", "2", "3", "4", "(", "Ċ", "x"]),
        ("default", ["hi", "Ġ", "Ġ1", "2", "3", "4", "(", "Ċ", "x"]),
        (None, ["hi", "Ġ", "Ġ1", "2", "3", "4", "(", "Ċ", "x"]),
        # Digits by threes (one by one in Qwen), no space with them: the last space is cut off alone.
        ("llama-bpe", ["hi", "Ġ", "Ġ", "12", "3", "4", "(", "Ċ", "x"]),
        ("qwen2", ["hi", "Ġ", "Ġ", "1", "2", "3", "4", "(", "Ċ", "x"]),
    ],
)
def test_splitting_rules(pre: str | None, expected: list[str]) -> None:
    metadata = byte_level(pre, add_bos_token=False)
    assert pieces(metadata, "hi  1234(\nx") == expected


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        # GPT-2's rule knows contractions in lower case only, and cuts before the last white space.
        ("smollm", ["I", "'", "LL", " (", "ok", ")", "\r\n", "\n", "x"]),
        ("llama-bpe", ["I", "'LL", " (", "ok", ")\r\n\n", "x"]),
        ("qwen2", ["I", "'LL", " (", "ok", ")\r\n\n", "x"]),
    ],
)
def test_splitting_rules_on_contractions_and_line_breaks(pre: str, expected: list[str]) -> None:
    splitter = gguf_tokenizer(byte_level(pre)).backend_tokenizer.pre_tokenizer
    text = "I'LL (ok)\r\n\nx"
    spans = [span for _, span in splitter.pre_tokenize_str(text)]
    split = [text[start:end] for start, end in spans]
    assert split == expected


def test_qwen2_composes_characters() -> None:
    normalizer = gguf_tokenizer(byte_level("qwen2")).backend_tokenizer.normalizer
    assert normalizer.normalize_str("e\u0301") == "é"


def test_llama3_takes_whole_tokens_before_merges() -> None:
    metadata = byte_level("llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "xyz"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    assert pieces(metadata, "xyz") == ["xyz"]
    assert pieces(metadata | {"tokenizer.ggml.pre": "qwen2"}, "xyz") == ["x", "y", "z"]


def test_bos_follows_the_file_or_the_rule() -> None:
    assert pieces(byte_level("llama-bpe"), "hi") == ["<|im_start|>", "hi"]
    assert pieces(byte_level("llama-bpe", add_bos_token=False), "hi") == ["hi"]
    assert pieces(byte_level("qwen2"), "hi") == ["hi"]
    assert pieces(byte_level("qwen2", add_bos_token=True), "hi") == ["<|im_start|>", "hi"]
    closing = byte_level("qwen2", add_bos_token=True, add_eos_token=True)
    bos, hi, end = gguf_tokenizer(closing).encode("hi")
    assert gguf_tokenizer(closing).convert_ids_to_tokens([bos, end]) == ["<|im_start|>", "<|im_end|>"]
    # The policy goes on after the prompt; a reward model reads the whole text.
    assert render(gguf_tokenizer(closing), "hi").ids == [bos, hi]
    assert render(gguf_tokenizer(closing), "").ids == [bos]
    assert render_completed(gguf_tokenizer(closing), "h", "i") == [bos, hi, end]


def test_a_text_that_a_template_rendered_gets_no_second_bos() -> None:
    tokenizer = gguf_tokenizer(byte_level("llama-bpe", add_eos_token=True))
    bos, hi, end = tokenizer.encode("hi")
    assert render(tokenizer, "<|im_start|>hi").ids == [bos, hi]
    assert render(tokenizer, "<|im_start|>hi<|im_end|>").ids == [bos, hi, end]
    assert render(tokenizer, "hi<|im_start|>").ids == [bos, hi, bos]
    assert render_completed(tokenizer, "<|im_start|>h", "i") == [bos, hi, end]


def test_control_tokens_are_special_and_user_defined_ones_are_text() -> None:
    tokenizer = gguf_tokenizer(byte_level())
    ids = render(tokenizer, "hi<|im_end|><tool>").ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["hi", "<|im_end|>", "<tool>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi<tool>"


def test_sentencepiece_ids_equal_those_of_sentencepiece() -> None:
    golden = json.loads((GOLDEN / "tokenizer_sentencepiece.json").read_text("utf-8"))
    tokenizer = gguf_tokenizer(golden["metadata"])
    assert len(golden["cases"]) == 48
    for case in golden["cases"]:
        assert render(tokenizer, case["text"]).ids == [1, *case["ids"]], case["text"]
        assert tokenizer.decode(case["ids"]) == case["text"]


def test_sentencepiece_without_space_prefix_or_bos() -> None:
    golden = json.loads((GOLDEN / "tokenizer_sentencepiece.json").read_text("utf-8"))
    more = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = gguf_tokenizer(golden["metadata"] | more)
    assert tokenizer.convert_ids_to_tokens(render(tokenizer, "1 2").ids) == ["1", "▁", "2"]
    assert tokenizer.decode(render(tokenizer, " 1 2").ids) == " 1 2"


def test_chat_template_from_the_file_or_chatml_where_the_vocabulary_has_it() -> None:
    own = byte_level() | {"tokenizer.chat_template": "{{ messages[0]['content'] }}1"}
    tokenizer = gguf_tokenizer(own)
    assert tokenizer.convert_ids_to_tokens(render(tokenizer, HI).ids) == ["hi", "1"]

    tokenizer = gguf_tokenizer(byte_level())
    assert tokenizer.decode(render(tokenizer, HI).ids) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )

    bare = byte_level()
    bare["tokenizer.ggml.tokens"] = [t.replace("im_start", "start") for t in bare["tokenizer.ggml.tokens"]]
    with pytest.raises(ValueError, match="messages need a chat template"):
        render(gguf_tokenizer(bare), HI)


def test_a_template_writes_its_own_bos() -> None:
    template = "{{ bos_token }}{{ messages[0]['content'] }}"
    tokenizer = gguf_tokenizer(byte_level("llama-bpe") | {"tokenizer.chat_template": template})
    assert tokenizer.convert_ids_to_tokens(render(tokenizer, HI).ids) == ["<|im_start|>", "hi"]


@pytest.mark.parametrize("none", [-1, 2**32 - 1])
def test_a_gguf_file_may_say_that_there_is_no_such_token(none: int) -> None:
    tokenizer = gguf_tokenizer(byte_level("qwen2", padding_token_id=none, bos_token_id=none))
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == (None, None, "<|im_end|>")
    with pytest.raises(ValueError, match=r"padding_token_id must be an id in the vocabulary .* has 9999"):
        gguf_tokenizer(byte_level("qwen2", padding_token_id=9999))


def test_load_from_a_gguf_file_and_from_the_folder_it_saves(tmp_path: Path) -> None:
    metadata = byte_level("smollm", padding_token_id=0)
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_merges(MERGES)
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    for name in ("bos", "eos", "padding"):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", metadata[f"tokenizer.ggml.{name}_token_id"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()

    tokenizer = load_tokenizer(str(tmp_path / "tiny.gguf"))
    save_tokenizer(tokenizer, tmp_path / "saved")
    again = load_tokenizer(str(tmp_path / "saved"))
    direct = gguf_tokenizer(metadata)
    for text in ("hi  12", "<|im_end|><tool> hi", " 1\n"):
        assert render(tokenizer, text).ids == render(again, text).ids == render(direct, text).ids
    assert render(tokenizer, HI).ids == render(again, HI).ids == render(direct, HI).ids
    assert tokenizer.pad_token_id == again.pad_token_id == 0
    assert stop_token_ids(again, ()) == stop_token_ids(tokenizer, ())


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_a_folder_of_a_model_keeps_the_tokenizers_own_rule(model_type: str, tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(byte_level("smollm"))
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    again = load_tokenizer(str(tmp_path))
    assert render(again, "hi  12(\nx").ids == render(tokenizer, "hi  12(\nx").ids


@pytest.mark.parametrize(
    ("pre", "model_type"), [("qwen2", "qwen2"), ("llama-bpe", "llama"), ("smollm", "llama")]
)
def test_transformers_loads_what_is_saved_to_the_same_ids(pre: str, model_type: str, tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(byte_level(pre))
    save_tokenizer(tokenizer, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("I'LL hi  1234(\nx", "<|im_end|><tool> hi\n\n", " 1\n"):
        assert again.encode(text) == tokenizer.encode(text)
    assert again.apply_chat_template(HI, tokenize=False) == tokenizer.apply_chat_template(HI, tokenize=False)


def test_the_template_of_a_processor_is_read_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    tokenizer = gguf_tokenizer(byte_level())
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert load_tokenizer(str(tmp_path)).chat_template == "{{ messages }}"
    tokenizer.chat_template = "{{ 1 }}"
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template == "{{ 1 }}"


@pytest.mark.parametrize(("pre", "model_type"), [("qwen2", "qwen2"), ("llama-bpe", "llama")])
def test_a_tokenizer_for_scoring_ends_texts_in_transformers_too(
    pre: str, model_type: str, tmp_path: Path
) -> None:
    """As where the rule of a family's class in transformers replaced that of the file."""
    tokenizer = gguf_tokenizer(byte_level(pre))
    plain, end = tokenizer.encode("hi 12"), tokenizer.eos_token_id
    for_scoring(tokenizer, (end,))
    assert tokenizer.encode("hi 12") == render_completed(tokenizer, "hi", " 12") == [*plain, end]
    assert render(tokenizer, "hi 12").ids == plain
    save_tokenizer(tokenizer, tmp_path, closed=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    for again in (transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(str(tmp_path))):
        assert again.encode("hi 12") == [*plain, end]
        assert again.encode("hi", "12") == tokenizer.encode("hi", "12")
    save_tokenizer(tokenizer, tmp_path / "policy")
    assert load_tokenizer(str(tmp_path / "policy")).encode("hi 12") == plain


def test_builtin() -> None:
    tokenizer = load_tokenizer("builtin:tiny")
    assert tokenizer.decode(render(tokenizer, HI).ids).startswith("<|user|>hi")


def test_stop_tokens_join_model_tokenizer_and_template() -> None:
    metadata = byte_level()
    tokens = metadata["tokenizer.ggml.tokens"]
    end = tokens.index("<|im_end|>")
    assert stop_token_ids(gguf_tokenizer(metadata), (7, 3)) == (3, 7, end)

    # The tokenizer names another end; ChatML's is still where a turn ends.
    other = metadata | {"tokenizer.ggml.eos_token_id": 5}
    assert stop_token_ids(gguf_tokenizer(other), (7,)) == (5, 7, end)

    # In the vocabulary but not in the template: an ordinary token.
    silent = other | {"tokenizer.chat_template": "{{ messages[0]['content'] }}"}
    assert stop_token_ids(gguf_tokenizer(silent), (7,)) == (5, 7)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "non-empty list of messages"),
        (7, "a prompt must be a string or a non-empty list"),
        ([{"role": "user"}], "a message must have a `role` and a `content`"),
        ([{"role": "user", "content": ["hi"]}], "both strings"),
        (["hi"], "a message must have a `role`"),
        ("", "at least one token"),
    ],
)
def test_malformed_prompts_are_refused(prompt: Any, message: str) -> None:
    tokenizer = gguf_tokenizer(byte_level())
    with pytest.raises(ValueError, match=message):
        render(tokenizer, prompt)


def test_a_prompt_and_its_completion_are_rendered_as_one_conversation() -> None:
    tokenizer = gguf_tokenizer(byte_level())
    conversation = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n12<|im_end|>\n"
    assert tokenizer.decode(render_completed(tokenizer, HI, "12")) == conversation
    assert render_completed(tokenizer, "hi ", "12") == tokenizer.encode("hi 12")
    with pytest.raises(ValueError, match="a message must have"):
        render_completed(tokenizer, [{"role": "user"}], "12")


def test_content_in_parts_is_one_text() -> None:
    tokenizer = gguf_tokenizer(byte_level())
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i", "image_url": None}]
    assert render(tokenizer, [{"role": "user", "content": parts}]).ids == render(tokenizer, HI).ids
    assert checked_messages([{"role": "user", "content": parts}]) == HI
    for other in ([{"type": "image_url", "image_url": {"url": "x"}}], [*parts, "hi"], {"text": "hi"}, None):
        with pytest.raises(ValueError, match=r"both strings; got .* a list of parts that are texts"):
            render(tokenizer, [{"role": "user", "content": other}])


CALL = "{{ m.role }}:{% for c in m.tool_calls or [] %}{{ c.function.name }}"
CALLS = {  # what templates write of a past call, in the forms that Qwen's and DeepSeek's take
    "json": "{{ m.content }}" + CALL + "{{ c.function.arguments | tojson }}{% endfor %}",
    "text": "{{ '' + m.content }}" + CALL + "{{ '' + c.function.arguments }}{% endfor %}",
}


@pytest.mark.parametrize("form", CALLS)
@pytest.mark.parametrize("content", ["", None])
@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}])
def test_past_tool_calls_are_rendered_in_the_form_that_the_template_takes(
    form: str, content: str | None, arguments: Any
) -> None:
    tokenizer = gguf_tokenizer(byte_level())
    tokenizer.chat_template = "{% for m in messages %}" + CALLS[form] + "{% endfor %}"
    call = {"id": "call00001", "type": "function", "function": {"name": "ten", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "7"}
    dialogue = [*HI, {"role": "assistant", "content": content, "tool_calls": [call]}, result]
    assert tokenizer.decode(render(tokenizer, dialogue).ids) == 'hiuser:assistant:ten{"a": 1}7tool:'


@pytest.mark.parametrize("arguments", ["", None])
def test_a_past_call_without_arguments_has_an_empty_object(arguments: str | None) -> None:
    function = {"name": "f", "arguments": arguments}
    (message,) = checked_messages([{"role": "assistant", "tool_calls": [{"function": function}]}])
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }


@pytest.mark.parametrize("calls", [None, []])
def test_no_past_calls_are_left_out(calls: Any) -> None:
    said = {"role": "assistant", "content": "x"}
    assert checked_messages([{**said, "tool_calls": calls}]) == [said]


def test_a_result_gets_the_name_of_the_last_call_with_its_id() -> None:
    def called(name: str, identity: str | None) -> dict[str, Any]:
        return {"role": "assistant", "tool_calls": [{"id": identity, "function": {"name": name}}]}

    result = {"role": "tool", "content": "7"}
    dialogue = [
        *(called("f", "a"), {**result, "tool_call_id": "a"}, {**result, "tool_call_id": "b"}),
        *(called("g", "a"), {**result, "tool_call_id": "a", "name": None}),
        *(called("h", None), result, {**result, "tool_call_id": "a", "name": "own"}),
    ]
    results = [message for message in checked_messages(dialogue) if message["role"] == "tool"]
    assert [message.get("name") for message in results] == ["f", None, "g", None, "own"]


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([{"function": {"name": "f", "arguments": "{"}}], "must be an object, or its JSON text; got '{'"),
        ([{"function": {"name": "f", "arguments": "[1]"}}], r"must be an object, .*; got '\[1\]'"),
        ([{"function": {"arguments": "{}"}}], "a list of objects with the `name`"),
        ("f()", r"a list of objects with the `name`.*got 'f\(\)'"),
        ([{"name": "unwritten", "arguments": {}}], "it leaves out the call of 'unwritten'"),
    ],
)
def test_past_calls_that_cannot_be_rendered_are_an_error(calls: Any, message: str) -> None:
    dialogue = [*HI, {"role": "assistant", "content": "x", "tool_calls": calls}, *HI]
    with pytest.raises(ValueError, match=message):
        render(gguf_tokenizer(byte_level()), dialogue)


def test_messages_that_the_template_refuses_are_an_error() -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = gguf_tokenizer(byte_level() | {"tokenizer.chat_template": template})
    with pytest.raises(ValueError, match=r"rejects messages with the roles \['user'\]: roles must alternate"):
        render(tokenizer, HI)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "t5"}, "kinds gpt2 and llama.*'t5'"),
        ({"pre": "tekken"}, "smollm, gpt-2.*'tekken'"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["Q Qx"]}, "merges must consist of tokens"),
        ({"token_type": [1]}, "one entry per token .105.; the file has 1"),
        ({"eos_token_id": 1000}, "vocabulary of 105 tokens; the file has 1000"),
        ({"tokens": ["a", "b", "a"], "token_type": [1, 1, 1]}, "'a' occurs twice"),
    ],
)
def test_bad_gguf_metadata_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gguf_tokenizer(byte_level(**change))


def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="has none of them"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="is none of these"):
        load_tokenizer("./not/here")
    with pytest.raises(ValueError, match="there is no GGUF file"):
        load_tokenizer(str(tmp_path / "a.gguf"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path))

    def unreachable(*_: Any) -> None:
        raise OSError("We couldn't connect\nand a long story")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    monkeypatch.setattr("quatrain.weights.offline_hub._unresolved", lambda host: "")
    with pytest.raises(ValueError, match=r"no folder 'org/name'.*\(We couldn't connect\); check the name"):
        load_tokenizer("org/name")


# A file that asks for code, and the beginning of the error.
OWN_CODE = {
    "tokenizer_config.json": (
        {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}},
        "code in a model's folder or repository is never run; the tokenizer of {} needs custom code "
        "(auto_map in its configuration); convert it to a tokenizer.json, or ",
    ),
    "config.json": (
        {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}},
        "the tokenizer in {} cannot be loaded",
    ),
}


@pytest.mark.parametrize("asks", OWN_CODE)
def test_code_of_a_folder_is_neither_run_nor_asked_about(asks: str, tmp_path: Path) -> None:
    folder, marker = tmp_path / "model", tmp_path / "was_run"
    folder.mkdir()
    (folder / "mine.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Mine: pass\n")
    (folder / "vocab.json").write_text("{}")
    (folder / asks).write_text(json.dumps(OWN_CODE[asks][0]))
    code = f"from quatrain.data.tokenizer import load_tokenizer; load_tokenizer({str(folder)!r})"
    environ = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        input="y\n" * 9,
        timeout=120,
        env=environ,
    )
    assert not marker.exists()
    assert "[y/N]" not in done.stdout + done.stderr
    assert f"ValueError: {OWN_CODE[asks][1].format(folder)}" in done.stderr


def test_code_of_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Loader:
        @staticmethod
        def from_pretrained(name: str, **options: Any) -> None:
            asked.append((name, options))
            raise ValueError(
                "Please pass the argument `trust_remote_code=True` to allow custom code to be run."
            )

    monkeypatch.setattr(module, "_hub_file", lambda model_id, name: None)
    monkeypatch.setattr("transformers.AutoTokenizer", Loader)
    with pytest.raises(ValueError, match=r"is never run; the tokenizer of org/name needs"):
        load_tokenizer("org/name")
    assert asked == [("org/name", {"trust_remote_code": False})]


# What the source's tokenizer_config.json says.
SOURCES: list[dict[str, Any]] = [
    {"tokenizer_class": "Qwen2Tokenizer"},
    # Transformers 4 gives this class a BOS of its own in front, whatever tokenizer.json says.
    {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "legacy": True},
    {"tokenizer_class": "GemmaTokenizer", "add_eos_token": True, "padding_side": "right"},
    {"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]},
    {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}},
    {},
]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("pre", "bos", "eos"), [("qwen2", False, False), ("llama-bpe", True, True)])
def test_what_is_saved_makes_both_versions_of_transformers_use_the_file_of_rules_as_it_is(
    source: dict[str, Any], pre: str, bos: bool, eos: bool, tmp_path: Path
) -> None:
    made = gguf_tokenizer(byte_level(pre, add_bos_token=bos, add_eos_token=eos))
    made.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "tokenizer_config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k != "tokenizer_class"}
    path.write_text(json.dumps(config | source))
    tokenizer = load_tokenizer(str(tmp_path / "source"))
    save_tokenizer(tokenizer, tmp_path / "saved")
    written = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert (written["add_bos_token"], written["add_eos_token"]) == (bos, False)
    assert written["model_input_names"] == ["input_ids", "attention_mask"]
    assert written["padding_side"] == source.get("padding_side", "left")
    assert not {"auto_map", "is_local", "local_files_only"} & set(written)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved", trust_remote_code=False)
    ids = tokenizer.encode("I'LL hi  12<|im_end|>")
    # A policy continues what it reads: an EOS that the source adds behind every text is left out.
    assert again.encode("I'LL hi  12<|im_end|>") == (ids[:-1] if eos else ids)
    assert list(again("hi")) == ["input_ids", "attention_mask"]


def test_the_space_in_front_of_a_text_is_that_of_the_file_of_rules(tmp_path: Path) -> None:
    from tokenizers import pre_tokenizers

    tokenizer = gguf_tokenizer(byte_level("gpt-2"))
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    save_tokenizer(tokenizer, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_prefix_space"] is True
    assert load_tokenizer(str(tmp_path)).encode("hi") == tokenizer.encode(" hi")


def test_what_transformers_4_reads_of_a_tokenizer_made_here(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("builtin:tiny")
    save_tokenizer(tokenizer, tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    # A list under the newer name, extra_special_tokens, ends transformers 4.57 with an AttributeError.
    assert written["additional_special_tokens"] == ["<|system|>", "<|user|>", "<|assistant|>"]
    assert "extra_special_tokens" not in written
    again = load_tokenizer(str(tmp_path))
    assert render(again, HI).ids == render(tokenizer, HI).ids
    assert again.all_special_tokens == tokenizer.all_special_tokens


def test_nothing_is_said_about_torch() -> None:
    code = "from quatrain.data.tokenizer import load_tokenizer; load_tokenizer('builtin:tiny')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "PyTorch" not in done.stdout + done.stderr


def test_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save_tokenizer(load_tokenizer("builtin:tiny"), tmp_path / "saved")
    assert load_tokenizer("~/saved").encode("3+4") == load_tokenizer("builtin:tiny").encode("3+4")
    with pytest.raises(ValueError, match=f"there is no GGUF file {tmp_path}/a.gguf"):
        load_tokenizer("~/a.gguf")
