"""Writes tests/golden/rope_positions.json: rotary positions of sequences with pictures, by transformers.

    make oracles

Each case has runs of tokens in order: a number of text tokens, or the grid of a picture [rows, columns] in
merged cells. `get_rope_index` is told which tokens are of pictures: without `mm_token_type_ids` it gives all
of them the positions of text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText

GOLDEN = Path(__file__).parents[1] / "golden" / "rope_positions.json"
MERGE = 2
CASES: dict[str, list[int | list[int]]] = {
    "one": [3, [2, 3], 4],
    "first": [[4, 2], 2],
    "last": [5, [1, 7]],
    "several": [2, [3, 3], 1, [1, 1], 1, [2, 5], 6, [6, 2], 2],
    "twice": [1, [2, 2], 3, [2, 2], 2],
    "large": [4, [12, 9], 3],
}


def main() -> None:
    """Computes the positions of every case with each family, which must agree."""
    cases = {name: {"runs": runs, **positions(runs)} for name, runs in CASES.items()}
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    GOLDEN.write_text(json.dumps({"versions": versions, "cases": cases}) + "\n")
    print(f"{GOLDEN}: {len(cases)} cases")


def positions(runs: list[int | list[int]]) -> dict[str, Any]:
    """`turns` [3, T], and `shift`: the position of the next token less T."""
    kinds, grids = list[int](), list[list[int]]()
    for run in runs:
        if isinstance(run, list):
            grids.append([1, MERGE * run[0], MERGE * run[1]])
        kinds += [0] * run if isinstance(run, int) else [1] * (run[0] * run[1])
    given = torch.tensor([kinds]), torch.tensor(grids)
    found = [
        model(family).get_rope_index(given[0], mm_token_type_ids=given[0], image_grid_thw=given[1])
        for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
    ]
    turns, shift = found[0]
    assert all(torch.equal(turns, each) and torch.equal(shift, other) for each, other in found)
    assert turns.shape == (3, 1, len(kinds))
    return {"turns": turns[:, 0].tolist(), "shift": int(shift)}


def model(family: str) -> Any:
    """A model of the family without weights."""
    config = AutoConfig.for_model(family)
    config.text_config.num_hidden_layers = config.vision_config.depth = 1
    config.vision_config.fullatt_block_indexes = [0]
    config.vision_config.deepstack_visual_indexes = [0]
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config).model


if __name__ == "__main__":
    main()
