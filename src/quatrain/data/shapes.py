"""The built-in task with pictures: what colour a shape has, which of two is larger, how many there are.

`builtin.py` has its rows under the names of `SPLITS`. Needs no file and no network.
"""

from __future__ import annotations

import functools
import io
import itertools
from typing import Any

import numpy as np

SIDE = 32
"""Pixels of a picture's sides. It has 2 by 2 cells, and a cell has at most one shape, which it holds: a
placeholder of `builtin:tiny_vl` sees one cell, so that a count is a sum over placeholders."""
COLOURS = {"red": (230, 25, 25), "green": (20, 200, 40), "blue": (30, 60, 235), "yellow": (250, 230, 30)}
MOST = 4
"""Shapes of a picture that are counted, at most: one in each cell."""
QUESTIONS = {
    "colour": "What colour is the shape?",
    "larger": "What colour is the larger shape?",
    "count": "How many shapes are there?",
}
"""Kind of a question -> its text. Which answers it has does not depend on the picture: four."""
ANSWERS = {"colour": (*COLOURS,), "larger": (*COLOURS,), "count": tuple(map(str, range(1, MOST + 1)))}
TRAIN_ROWS, HELDOUT_ROWS = 4096, 128
"""Rows for training, and held-out ones of each kind of question."""
DEMONSTRATED_RIGHT = 0.5
"""Share of demonstrations with the right answer; others have any of the wrong ones."""
SHUFFLED = "shuffled"
_CELL = SIDE / 2
_RADIUS, _SMALL, _RATIO = (0.24 * _CELL, 0.45 * _CELL), (0.16 * _CELL, 0.24 * _CELL), (1.6, 2.0)
_GROUND, _NOISE = 127, 8.0
# The tower reads this grey as about 0; of a darker ground most of what it sees is the ground.

SPLITS = ("shapes", "shapes-heldout", *(f"shapes-{name}-heldout" for name in (*QUESTIONS, SHUFFLED)))


def shapes_rows(name: str) -> list[dict[str, Any]]:
    """The rows of one of `SPLITS`, with columns `prompt` (messages with a picture), `answer`, `completion`.

    `shapes-heldout` has all held-out rows, those of one kind of question follow by its name, and
    `shapes-shuffled-heldout` has all of them with each other's pictures, within a kind: a model that looks
    is at chance there.
    """
    if name == SPLITS[0]:
        return _drawn(TRAIN_ROWS, seed=0)
    heldout = _drawn(HELDOUT_ROWS * len(QUESTIONS), seed=1)
    kind = name.removeprefix("shapes-").removesuffix("heldout").removesuffix("-")
    if kind == SHUFFLED:
        # Questions take turns: the next row of the same kind is as many rows further as there are kinds.
        contents = [row["prompt"][0]["content"] for row in heldout]
        shown = [content[0] for content in contents[len(QUESTIONS) :] + contents[: len(QUESTIONS)]]
        return [
            row | {"prompt": [{"role": "user", "content": [other, row["prompt"][0]["content"][1]]}]}
            for row, other in zip(heldout, shown, strict=True)
        ]
    return heldout if not kind else heldout[list(QUESTIONS).index(kind) :: len(QUESTIONS)]


@functools.cache
def _drawn(count: int, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [_row(kind, rng) for kind in itertools.islice(itertools.cycle(QUESTIONS), count)]


def _row(kind: str, rng: np.random.Generator) -> dict[str, Any]:
    names = [*COLOURS]
    if kind == "larger":
        small = rng.uniform(*_SMALL)
        radii = [small * rng.uniform(*_RATIO), small]
        colours = [names[i] for i in rng.permutation(len(names))[:2]]  # two colours, so that one is larger
    else:
        count = 1 if kind == "colour" else int(rng.integers(1, MOST + 1))
        radii = [*rng.uniform(*_RADIUS, count)]
        colours = [names[i] for i in rng.integers(len(names), size=count)]
    answer = str(len(radii)) if kind == "count" else colours[0]
    wrong = [other for other in ANSWERS[kind] if other != answer]
    shown = answer if rng.random() < DEMONSTRATED_RIGHT else wrong[rng.integers(len(wrong))]
    content = [
        {"type": "image", "image": _png(_painted(radii, colours, rng))},
        {"type": "text", "text": QUESTIONS[kind]},
    ]
    return {
        "prompt": [{"role": "user", "content": content}],
        "answer": answer,
        "completion": f"<think></think>\n<answer>{shown}</answer>",
    }


def _painted(radii: list[float], colours: list[str], rng: np.random.Generator) -> np.ndarray:
    """[SIDE, SIDE, 3] uint8: a disc or a square of each radius, in a cell of its own, on a grey ground."""
    pixels = np.full((SIDE, SIDE, 3), float(_GROUND))
    down, right = np.mgrid[:SIDE, :SIDE] + 0.5
    cells = rng.permutation(MOST)[: len(radii)]
    for cell, radius, colour in zip(cells, radii, colours, strict=True):
        room = _CELL / 2 - radius
        centre = (np.array(divmod(int(cell), 2)) + 0.5) * _CELL + rng.uniform(-room, room, 2)
        y, x = abs(down - centre[0]), abs(right - centre[1])
        # A square of the same area as the disc is a little narrower.
        inside = y**2 + x**2 <= radius**2 if rng.random() < 0.5 else np.maximum(y, x) <= 0.89 * radius
        pixels[inside] = COLOURS[colour]
    noisy = pixels + rng.normal(0, _NOISE, pixels.shape)
    return np.clip(noisy.round(), 0, 255).astype(np.uint8)


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()
