"""Stop strings found in the tail of a turn are those that its whole text has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from quatrain.data.gguf_tokenizer import gguf_tokenizer
from quatrain.engine.stop_strings import cut_at_stop_strings
from quatrain.types.rollouts import Completion

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer_sentencepiece.json"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["the", "##ing", "##s", ".", "don", "'", "t", "n't", ",", "a", "##é", "中", "!"]


def made(decoder, vocabulary, **options):
    model = models.WordLevel({word: i for i, word in enumerate(vocabulary)}, vocabulary[0])
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


BYTE_LEVEL = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
TOKENIZERS = {
    # A character of several bytes is several tokens.
    "bytes": made(decoders.ByteLevel(), [*BYTE_LEVEL, "Ġthe", "ĠðŁĻĤ"]),
    # The first token of a text has no space in front; a run of bytes is decoded as a whole.
    "sentencepiece": gguf_tokenizer(json.loads(GOLDEN.read_text("utf-8"))["metadata"]),
    # Tokens join the one before, and punctuation takes the space away that stands there.
    "pieces": made(decoders.WordPiece(cleanup=True), PIECES, clean_up_tokenization_spaces=True),
    # A token that repeats the one before is dropped.
    "repeats": made(decoders.CTC(pad_token="#", word_delimiter_token="|"), ["#", "|", *"abcd"]),
}


def whole_text_cut(tokenizer, tokens, stops):
    """The length after which a stop string is complete; None where the whole text has none."""

    def has(length):
        return any(stop in tokenizer.decode(tokens[:length]) for stop in stops)

    if not has(len(tokens)):
        return None
    length = len(tokens)
    while length > 1 and has(length - 1):
        length -= 1
    return length


@st.composite
def cases(draw, name):
    tokenizer = TOKENIZERS[name]
    token = st.integers(0, len(tokenizer) - 1)
    few = st.sampled_from(draw(st.lists(token, min_size=1, max_size=6)))
    characters = st.text("é中🙂\nab", max_size=70).map(
        lambda text: [i for i in tokenizer.convert_tokens_to_ids(_bytes(name, text)) if i is not None]
    )
    repeated = st.tuples(few, st.integers(1, 150)).map(lambda pair: [pair[0]] * pair[1])
    part = st.one_of(st.lists(few, max_size=40), repeated, characters)
    tokens = [i for ids in draw(st.lists(part, min_size=1, max_size=9)) for i in ids] or [1]
    text = tokenizer.decode(tokens)
    begin = draw(st.integers(0, max(len(text) - 1, 0)))
    stop = text[begin : begin + draw(st.integers(1, 5))] or "x"
    other = draw(st.sampled_from([".", "\n", "é", "never met at all", "中", "##", "bc"]))
    return tokens, (stop, other) if draw(st.booleans()) else (other,)


def _bytes(name, text):
    data = text.encode()
    if name == "sentencepiece":
        return [BYTES[byte] for byte in data]
    level = {byte: i for i, byte in enumerate([*range(33, 127), *range(161, 173), *range(174, 256)])}
    others = [byte for byte in range(256) if byte not in level]
    level |= {byte: 188 + i for i, byte in enumerate(others)}
    return [BYTE_LEVEL[level[byte]] for byte in data] if name == "bytes" else list(text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_cut_is_that_of_the_whole_text(name):
    tokenizer = TOKENIZERS[name]

    @settings(max_examples=60, deadline=None)
    @given(case=cases(name), given_before=st.integers(0, 3), call=st.integers(1, 9))
    def check(case, given_before, call):
        tokens, stops = case
        completion = Completion()
        if given_before:
            completion.extend([0], [0.0], 0)
            completion.begin_turn([1] * given_before)
        for first in range(0, len(tokens), call):
            new = tokens[first : first + call]
            completion.extend(new, [0.0] * len(new), 0)
            expected = whole_text_cut(tokenizer, tokens[: first + len(new)], stops)
            cut = cut_at_stop_strings(tokenizer, [(completion, stops)])
            assert bool(cut) == (expected is not None)
            if cut:
                assert completion.last_turn == tokens[:expected]
                return

    check()


def one_by_one(name, tokens, stops):
    """The tokens up to the stop string, if they come one at a time."""
    completion = Completion()
    for token in tokens:
        completion.extend([token], [0.0], 0)
        if cut_at_stop_strings(TOKENIZERS[name], [(completion, stops)]):
            return completion.tokens
    return None


@pytest.mark.parametrize(
    ("name", "before", "end", "stop"),
    [
        ("bytes", "中" * 101, "文", "文"),
        ("sentencepiece", "中" * 101, "文", "文"),
        ("sentencepiece", "\n🙂" * 50, "é", "🙂é"),
        ("repeats", "ab" * 37 + "#" * 500, "cd", "bcd"),
        ("repeats", "abc" + "##" * 500 + "ab" * 300, "b|d", "b d"),
    ],
)
def test_a_stop_string_after_long_runs(name, before, end, stop):
    ids = TOKENIZERS[name].convert_tokens_to_ids(_bytes(name, before + end))
    stops = (stop, "never met")
    assert one_by_one(name, ids, stops) == ids[: whole_text_cut(TOKENIZERS[name], ids, stops)]


def test_what_a_tail_has_and_the_whole_text_has_not_is_no_stop_string():
    ids = TOKENIZERS["pieces"].convert_tokens_to_ids(["the", *["##ing", "##s"] * 300])
    assert one_by_one("pieces", ids, ("##",)) is None


@pytest.mark.parametrize("text", ["The answer is 42. ", "中文é🙂", "\n"])
def test_the_work_grows_with_the_tokens_and_not_with_their_square(text):
    class Counting:
        decoded = 0

        def decode(self, tokens):
            self.decoded += len(tokens)
            return TOKENIZERS["bytes"].decode(tokens)

        def batch_decode(self, rows):
            return [self.decode(row) for row in rows]

    ids = TOKENIZERS["bytes"].convert_tokens_to_ids(_bytes("bytes", text))
    tokens = (ids * 4000)[:4000]
    tokenizer, completion = Counting(), Completion()
    for first in range(0, len(tokens), 8):
        completion.extend(tokens[first : first + 8], [0.0] * 8, 0)
        assert not cut_at_stop_strings(tokenizer, [(completion, ("</answer>", "never met"))])
    assert tokenizer.decoded < 60 * len(tokens)  # whole texts would be 250 times as many
