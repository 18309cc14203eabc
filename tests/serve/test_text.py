"""The text of a stream is that of the whole completion; the bytes of its tokens are those of the text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from quatrain.serve.text import BYTE_LEVEL, TextStream, ThoughtStream, TokenTexts, Vocabulary

EMOJI = "é 😀 x"


class Bytes:
    """A tokenizer whose tokens are bytes, of which several make a character; it counts those it decodes."""

    decoded = 0

    def decode(self, tokens, skip_special_tokens):
        self.decoded += len(tokens)
        return b"".join(tokens).decode(errors="replace")


def cut(data, width=1):
    return [data[i : i + width] for i in range(0, len(data), width)]


@pytest.fixture(scope="module")
def pieces():
    """Words with a space in front and bytes, as in Llama 2 and Gemma; decoding removes the first space."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "x", "▁a", "▁b", "é"]
    model = models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False
    )


def in_parts(stream, tokens, size):
    return [stream.push(part, finished=False) for part in cut(tokens, size)] + [
        stream.push([], finished=True)
    ]


@settings(max_examples=200, deadline=None)
@given(
    st.text(max_size=12) | st.binary(max_size=24) | st.text("😀é", max_size=12),
    st.lists(st.text(min_size=1, max_size=3), max_size=2),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_parts_make_the_whole(text, stop, size, width):
    data = text if isinstance(text, bytes) else text.encode(errors="ignore")
    whole = data.decode(errors="replace")
    stream = TextStream(Bytes(), stop)
    joined = "".join(in_parts(stream, cut(data, width), size))
    ends = [whole.index(each) for each in stop if each in whole]
    assert joined == whole[: min(ends, default=len(whole))]
    assert stream.length == len(joined)
    assert stream.stopped == bool(ends)


@pytest.mark.parametrize("parts", [["ab", "c"], ["a", "bc"], ["abc"]])
def test_the_begin_of_a_stop_string_is_held_back(parts):
    stream = TextStream(Bytes(), ["bcd"])
    said = [stream.push(cut(part.encode()), finished=False) for part in parts]
    assert "".join(said) == "a"
    assert stream.push([b"x"], finished=False) == "bcx"


@pytest.mark.parametrize("text", [b"a", "é".encode(), "😀".encode(), b"\xff", b"\xf0\x9f"])
def test_a_long_completion_takes_time_in_proportion_to_its_length(text):
    tokenizer = Bytes()
    tokens = cut(text * (8_000 // len(text)))
    said = in_parts(TextStream(tokenizer, ["stop"]), tokens, 8)
    assert "".join(said) == b"".join(tokens).decode(errors="replace")
    assert tokenizer.decoded < 20 * len(tokens)
    assert len("".join(said[:500])) > 0.45 * len("".join(said))  # the text does not wait for the end


def test_a_character_comes_once_it_is_whole():
    stream = TextStream(Bytes(), [])
    said = [stream.push([byte], finished=False) for byte in cut("a😀é".encode())]
    assert said == ["a", "", "", "", "😀", "", "é"]
    assert stream.push([b"\xf0\x9f"], finished=False) == ""
    assert stream.push([], finished=True) == "\ufffd"


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 263), max_size=20), size=st.integers(1, 5))
def test_words_with_spaces_and_special_tokens_in_parts(pieces, ids, size):
    # One byte that is no character makes all bytes beside it none, so bytes are whole characters here.
    ids = [token for each in ids for token in ([each] if not 1 <= each <= 256 else smiley(pieces))]
    assert "".join(in_parts(TextStream(pieces, []), ids, size)) == pieces.decode(
        ids, skip_special_tokens=True
    )


def smiley(pieces):
    return [pieces.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "😀".encode()]


def texts_of(tokenizer, ids):
    texts = TokenTexts(Vocabulary(tokenizer))
    return [texts.push(token) for token in ids]


def check_texts(tokenizer, ids):
    """The bytes of the tokens are those of the text, and each starts at its character."""
    texts, text = texts_of(tokenizer, ids), tokenizer.decode(ids, skip_special_tokens=True)
    said = b"".join(each.bytes for each in texts)
    assert said.decode(errors="replace") == text
    before = 0
    for each in texts:
        assert each.start == len(said[:before].decode(errors="ignore"))
        before += len(each.bytes)
        assert each.end == len(said[:before].decode(errors="ignore"))
    return texts


def test_bytes_and_offsets_of_byte_level_tokens(tokenizer):
    ids = [*tokenizer.encode(f"Max {EMOJI}"), tokenizer.eos_token_id]
    texts = check_texts(tokenizer, ids)
    assert b"".join(each.bytes for each in texts).decode() == f"Max {EMOJI}"
    assert [each.bytes for each in texts if each.name.startswith("bytes:")] == [
        bytes([byte]) for byte in "é😀".encode()
    ]
    assert [each.name for each in texts if each.start == 6] == [
        *("bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80")
    ]
    assert texts[-1] == (tokenizer.eos_token, b"", len(f"Max {EMOJI}"), len(f"Max {EMOJI}"))
    broken = [tokenizer.convert_tokens_to_ids(bytes_to_unicode()[byte]) for byte in b"\xff\xc3"]
    texts = texts_of(tokenizer, [*broken, *tokenizer.encode("x"), *broken])
    assert [each.bytes for each in texts] == [b"\xff", b"\xc3", b"x", b"\xff", b"\xc3"]
    assert [each.start for each in texts] == [0, 1, 2, 3, 4]
    assert {char: byte for byte, char in bytes_to_unicode().items()} == BYTE_LEVEL


def test_bytes_and_offsets_of_words_with_spaces(pieces):
    ids = pieces.convert_tokens_to_ids(
        ["▁a", "</s>", "▁b", "é", *(f"<0x{byte:02X}>" for byte in "😀".encode())]
    )
    texts = check_texts(pieces, ids)
    assert [each.name for each in texts[:4]] == ["a", "</s>", " b", "é"]
    assert [each.bytes for each in texts[4:]] == [bytes([byte]) for byte in "😀".encode()]
    assert [each.start for each in texts] == [0, 1, 1, 3, 4, 4, 4, 4]


def split(parts, begun):
    stream = ThoughtStream(begun=begun)
    said = [*map(stream.push, parts), stream.end()]
    return "".join(each.thoughts for each in said), "".join(each.text for each in said)


@pytest.mark.parametrize(
    ("text", "begun", "thoughts", "said"),
    [
        ("<think>\na b\n</think>\n\nc </think> d\n", False, "a b", "c </think> d\n"),
        ("\n<think>a", False, "a", ""),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
        ("a</think>b", False, "", "a</think>b"),
        ("a</think>b", True, "a", "b"),
        ("<think>a</think>b", True, "a", "b"),
        ("a", True, "a", ""),
        (" <thin", False, "", " <thin"),
        ("<think>a </thin", False, "a </thin", ""),
        ("<think> </think> ", False, "", ""),
        ("", True, "", ""),
    ],
)
def test_thoughts_before_an_answer(text, begun, thoughts, said):
    """The same however the text is cut; the faults: a tag in two pieces was text, or white space was sent."""
    assert split([text], begun) == split(list(text), begun) == (thoughts, said)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</thi", "think>", "a", " ", "\n"])), st.booleans()
)
def test_thoughts_do_not_depend_on_how_a_text_comes(parts, begun):
    assert split(parts, begun) == split(["".join(parts)], begun)


def test_which_stop_string_came():
    """The first in the text; of two at one place, the first that was asked for."""
    for stops, found in ((("c", "b"), "b"), (("bc", "b"), "bc"), (("b", "bc"), "b"), (("x",), None)):
        stream = TextStream(Bytes(), stops)
        stream.push([b"abc"], finished=True)
        assert (stream.ended_by, stream.stopped) == (found, found is not None)
