"""A program of one of several tenants: SFT steps and samples, its numbers and the seconds that calls took.

python tenant.py SEED STEPS [READY GO]     with a file to write when ready, and one to wait for
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np
from client import MODEL, data_of, logprobs_of, rows, service
from tinker import types

seed, steps = map(int, sys.argv[1:3])
session = service()
training = session.create_lora_training_client(MODEL, rank=8, seed=seed).result()
asked = types.SamplingParams(max_tokens=8, stop=[])


def turn(number):
    """A step and samples of what came of it."""
    data = data_of(rows(1000 * seed + number, 24, length=24), weight=0.1)
    passed = training.forward_backward(data, "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=5e-3))
    ell = logprobs_of(passed.result())
    sampling = training.save_weights_and_get_sampling_client().result()
    drawn = [sampling.sample(each.model_input, 4, asked) for each in data[:6]]
    return ell, [sequence.tokens for each in drawn for sequence in each.result().sequences]


if len(sys.argv) > 3:  # all have compiled, and begin at the same moment
    warming = service()
    other = warming.create_lora_training_client(MODEL, rank=8, seed=seed).result()
    turned, training = training, other
    turn(0)
    training = turned
    warming.close("success").result()
    Path(sys.argv[3]).touch()
    while not Path(sys.argv[4]).exists():
        time.sleep(0.05)
began, digest, tokens, waits = time.monotonic(), hashlib.sha256(), [], []
for number in range(steps):
    started = time.monotonic()
    ell, drawn = turn(number)
    waits.append(time.monotonic() - started)
    digest.update(np.concatenate(ell).tobytes())
    tokens += drawn
session.close("success").result()
print(
    json.dumps(
        {
            "digest": digest.hexdigest(),
            "tokens": tokens,
            "seconds": time.monotonic() - began,
            "longest": max(waits),
        }
    )
)
