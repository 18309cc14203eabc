"""V5: what is sampled greedily after a text with pictures is what transformers generates."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from towers import CASES, PLACEHOLDER, SIZES, read_seeing, token_ids

from quatrain.config.schema import RolloutConfig
from quatrain.engine.engine import RolloutEngine
from quatrain.types.batches import Prompt
from quatrain.types.pictures import Picture, Pictures
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import Request

GREEDY = json.loads((Path(__file__).parents[1] / "golden" / "seen_greedy.json").read_text())
PICTURES = [Picture.of(bytes([number]), size) for number, size in enumerate(SIZES)]


@pytest.mark.parametrize(
    "case", [case if case == "qwen3_vl" else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_greedy_tokens_are_those_that_transformers_generates(case):
    """With the positions of its prefill and those that it adds to in each step."""
    golden = read_seeing(case)
    arch, params = golden.model()
    vision = arch.vision
    counts = [vision.num_placeholders(picture.size) for picture in PICTURES]
    parts = np.split(golden.features, np.cumsum(counts)[:-1], axis=1)
    store = SimpleNamespace(
        vision=vision,
        arch=arch,
        dtype=np.dtype(np.float32),
        load=lambda params, version: None,
        of=lambda pictures: [parts[PICTURES.index(picture)] for picture in pictures],
    )
    ids = token_ids(vision)[0].astype(np.int32)
    shown = iter(np.repeat(np.array(PICTURES, object), counts))
    pictures = Pictures.of(next(shown) if token == PLACEHOLDER else None for token in ids)
    config = RolloutConfig(n=1, max_new_tokens=10, temperature=0.0)
    engine = RolloutEngine(arch, config, None, stop_ids=(), seed=1, features=store)
    engine.sync_weights(params, 0)
    [ticket] = engine.submit([Request(Prompt(0, ids, "", pictures=pictures), 0, Sampling.of(config))])
    while not engine.finished(ticket):
        engine.advance()
    [completion] = engine.take(ticket)
    assert completion.tokens == GREEDY[case]["tokens"]
    # In float32; DeltaNet layers sum over all tokens before.
    close = 2e-3 if arch.deltas else 1e-4
    np.testing.assert_allclose(completion.logprobs, GREEDY[case]["logprobs"], atol=close)
