"""The text of a stream is that of the whole completion, cut before a stop string."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quatrain.serve.text import TextStream


class Bytes:
    """A tokenizer of bytes, of which several make a character."""

    @staticmethod
    def decode(tokens, skip_special_tokens):
        return bytes(tokens).decode(errors="replace")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=12), st.lists(st.text(min_size=1, max_size=3), max_size=2), st.integers(1, 5))
def test_parts_make_the_whole(text, stop, size):
    tokens = text.encode(errors="ignore")
    whole = tokens.decode()
    stream = TextStream(Bytes, stop)
    parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    joined = "".join(stream.push(part, finished=False) for part in parts) + stream.push([], finished=True)
    ends = [whole.index(each) for each in stop if each in whole]
    assert joined == whole[: min(ends, default=len(whole))]


@pytest.mark.parametrize("parts", [["ab", "c"], ["a", "bc"], ["abc"]])
def test_the_begin_of_a_stop_string_is_held_back(parts):
    stream = TextStream(Bytes, ["bcd"])
    said = [stream.push(part.encode(), finished=False) for part in parts]
    assert "".join(said) == "a"
    assert stream.push(b"x", finished=False) == "bcx"
