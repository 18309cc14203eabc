"""Log-probabilities of the sampler and the trainer for the same tokens at temperature 1, after some steps."""

import json

import numpy as np
from client import MODEL, data_of, datum, logprobs_of, rows, service, step
from tinker import types

training = service().create_lora_training_client(MODEL, rank=16, seed=2).result()
rng = np.random.default_rng(51)
for i in range(4):
    step(training, data_of(rows(50 + i, 16)), learning_rate=5e-3)
sampling = training.save_weights_and_get_sampling_client().result()
prompts = [rng.integers(0, 256, n).tolist() for n in rng.integers(1, 60, 24)]
asked = types.SamplingParams(max_tokens=48)
drawn = [sampling.sample(types.ModelInput.from_ints(prompt), 4, asked) for prompt in prompts]
pairs = [(p, s) for p, each in zip(prompts, drawn, strict=True) for s in each.result().sequences]
ell = logprobs_of(
    training.forward([datum([*prompt, *each.tokens]) for prompt, each in pairs], "cross_entropy").result()
)
differences = np.concatenate(
    [
        np.abs(row[len(prompt) - 1 :] - np.asarray(each.logprobs, np.float32))
        for row, (prompt, each) in zip(ell, pairs, strict=True)
    ]
)
scored = [sampling.compute_logprobs(types.ModelInput.from_ints([*p, *s.tokens])) for p, s in pairs[::7]]
scores = [np.asarray(each.result()[1:], np.float32) for each in scored]
print(
    json.dumps(
        {
            "tokens": len(differences),
            "max": float(differences.max()),
            "mean": float(differences.mean()),
            "scored_max": max(float(np.abs(a - b).max()) for a, b in zip(scores, ell[::7], strict=True)),
        }
    )
)
