"""What the programs of this folder share: clients, rows, and comparisons."""

import os

import numpy as np
import tinker
from tinker import types

MODEL = os.environ["MODEL"]


def service():
    return tinker.ServiceClient()


def rows(seed, count, length=12, vocab=256):
    """Random token ids [count][length]."""
    return np.random.default_rng(seed).integers(0, vocab, (count, length)).tolist()


def datum(tokens, **inputs):
    """Predictions of the next token of `tokens`; `inputs` of `len(tokens) - 1` rows."""
    arrays = {name: np.asarray(value, np.float32) for name, value in inputs.items()}
    targets = np.asarray(tokens[1:], np.int64)
    return types.Datum(
        model_input=types.ModelInput.from_ints(list(tokens[:-1])),
        loss_fn_inputs={"target_tokens": targets, **arrays},
    )


def data_of(sequences, weight=1.0):
    return [datum(tokens, weights=np.full(len(tokens) - 1, weight)) for tokens in sequences]


def logprobs_of(passed):
    """[array] of a result of forward or forward_backward, each in the shape of its targets."""
    found = [output["logprobs"] for output in passed.loss_fn_outputs]
    return [np.asarray(each.data, np.float32).reshape(each.shape or [-1]) for each in found]


def step(training, data, loss="cross_entropy", config=None, **numbers):
    """A pass and a step, both sent before either is waited for: (what came of the pass, of the step)."""
    passed = training.forward_backward(data, loss, config)
    stepped = training.optim_step(types.AdamParams(**{"learning_rate": 1e-3, **numbers}))
    return passed.result(), stepped.result()


def apart(first, second):
    """The largest difference between two lists of arrays of the same shapes."""
    assert [a.shape for a in first] == [b.shape for b in second]
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second, strict=True))


def same(first, second):
    """Whether two lists of arrays are equal to the bit."""
    return len(first) == len(second) and all(
        a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True)
    )
