import io

import numpy as np
import pytest
from PIL import Image

from quatrain.data import shapes
from quatrain.data.builtin import builtin_rows, builtin_tokenizer
from quatrain.data.shapes import (
    ANSWERS,
    COLOURS,
    DEMONSTRATED_RIGHT,
    QUESTIONS,
    SIDE,
    SPLITS,
)
from quatrain.models.families import builtin_architecture
from quatrain.reward.functions import correct, has_format

HELDOUT, SHUFFLED = "shapes-heldout", "shapes-shuffled-heldout"
CELL = SIDE // 2


@pytest.fixture(scope="module", autouse=True)
def few_rows():
    """The first 900 rows for training, which are drawn and judged fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "TRAIN_ROWS", 900)
        yield


@pytest.fixture(scope="module")
def heldout():
    return builtin_rows(HELDOUT)


def picture(row):
    return row["prompt"][0]["content"][0]["image"]


def question(row):
    return row["prompt"][0]["content"][1]["text"]


def areas(row):
    """Pixels of each colour in each of the four cells of a picture, by the nearest of colours and ground."""
    pixels = np.asarray(Image.open(io.BytesIO(picture(row))).convert("RGB")).astype(int)
    assert pixels.shape == (SIDE, SIDE, 3)
    known = np.array([*COLOURS.values(), np.median(pixels, axis=(0, 1))])
    nearest = ((pixels[:, :, None] - known) ** 2).sum(-1).argmin(-1)
    cells = nearest.reshape(2, CELL, 2, CELL).swapaxes(1, 2).reshape(4, -1)
    return np.stack([(cells == number).sum(1) for number in range(len(COLOURS))])


def seen(row):
    """The answer, from the pixels."""
    found, names = areas(row), [*COLOURS]
    if question(row) == QUESTIONS["count"]:
        return str(int((found.sum(0) > 0).sum()))
    return names[int(found.sum(1).argmax())]


def test_answers_are_what_the_pixels_show(heldout):
    """An answer of another shape, a shape over the edge of its cell, or colours that look alike."""
    for row in heldout:
        assert seen(row) == row["answer"], question(row)
        shown = areas(row)
        assert (shown > 0).sum(0).max() == 1  # at most one shape in a cell
        count = {QUESTIONS["colour"]: 1, QUESTIONS["larger"]: 2}.get(question(row))
        assert count in (None, int((shown > 0).sum()))


def test_every_answer_is_as_likely_and_half_of_the_demonstrations_are_right():
    """A task that is won without looking, or a warm start that teaches the answers."""
    rows = builtin_rows(SPLITS[0])
    for kind, text in QUESTIONS.items():
        of_kind = [row for row in rows if question(row) == text]
        assert abs(len(of_kind) - len(rows) / len(QUESTIONS)) < 1
        answers = [row["answer"] for row in of_kind]
        assert set(answers) == {*ANSWERS[kind]}
        assert all(0.18 < answers.count(answer) / len(answers) < 0.32 for answer in ANSWERS[kind])
    right = correct([], [row["completion"] for row in rows], [row["answer"] for row in rows])
    assert np.mean(right) == pytest.approx(DEMONSTRATED_RIGHT, abs=0.05)
    assert all(has_format(row["completion"]) for row in rows)


def test_the_parts(heldout):
    """Held-out pictures that are trained on, rows that change from run to run, or parts of other kinds."""
    train = builtin_rows(SPLITS[0])
    assert not {*map(picture, train)} & {*map(picture, heldout)}
    assert len({*map(picture, train)}) == len(train)
    for kind, text in QUESTIONS.items():
        assert builtin_rows(f"shapes-{kind}-heldout") == [row for row in heldout if question(row) == text]


def test_shuffled_pictures_are_others_of_the_same_kind(heldout):
    """A control in which a model that looks would be right: pictures that stay, or answers that go along."""
    shuffled = builtin_rows(SHUFFLED)
    assert [(question(row), row["answer"]) for row in shuffled] == [
        (question(row), row["answer"]) for row in heldout
    ]
    own = dict(zip(map(picture, heldout), heldout, strict=True))
    assert {*map(picture, shuffled)} == {*own}
    assert all(picture(row) != picture(other) for row, other in zip(shuffled, heldout, strict=True))
    assert all(question(own[picture(row)]) == question(row) for row in shuffled)
    agree = np.mean([own[picture(row)]["answer"] == row["answer"] for row in shuffled])
    assert agree == pytest.approx(0.25, abs=0.05)


def test_the_tokenizer_of_a_model_that_sees(heldout):
    """Words that fall apart into bytes, a template without the picture, or another placeholder's id."""
    tokenizer = builtin_tokenizer("tiny_vl")
    for row in heldout[:3]:
        prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
        assert prompt == (f"<|user|><|vision_start|><|image_pad|><|vision_end|>{question(row)}<|assistant|>")
        assert len(tokenizer.tokenize(prompt)) < 16
        assert len(tokenizer.tokenize(row["completion"])) == 6
    text = [{"role": "user", "content": "How many shapes are there?"}, {"role": "assistant", "content": "2"}]
    assert tokenizer.apply_chat_template(text, tokenize=False) == (
        "<|user|>How many shapes are there?<|assistant|>2<|end|>"
    )
    arch = builtin_architecture("tiny_vl", len(tokenizer), (tokenizer.eos_token_id,))
    assert tokenizer.convert_ids_to_tokens(arch.vision.placeholder_id) == "<|image_pad|>"
    assert arch.vision.num_placeholders((SIDE, SIDE)) == 4
