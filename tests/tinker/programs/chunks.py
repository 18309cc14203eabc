"""2,500 data in chunks, whatever the order in which they come, and in one request: the same step.

python chunks.py CHUNK
"""

import json
import sys
import time

import numpy as np
from client import MODEL, data_of, logprobs_of, rows, service
from tinker import types

ones, chunk = service(), int(sys.argv[1])
config = ones.holder._client_config
ones.holder._client_config = config.model_copy(update={"fwdbwd_max_chunk_len": chunk})
training = ones.create_lora_training_client(MODEL, rank=8, seed=5).result()
few = data_of(rows(41, 16))
began = time.monotonic()
for step in range(2):
    many = data_of(rows(42 + step, 2500, length=8), weight=1e-2)
    passed = training.forward_backward(many, "cross_entropy")
    # eps is far above the rounding of a sum of 2,500 gradients, which differs with its order: AdamW divides
    # by an entry's own size, and would make a step of what is rounding alone in an entry near 0.
    training.optim_step(types.AdamParams(learning_rate=1e-2, eps=0.1))
ell = logprobs_of(passed.result())
after = logprobs_of(training.forward(few, "cross_entropy").result())
sampling = training.save_weights_and_get_sampling_client().result()
asked = types.SamplingParams(max_tokens=6, stop=[])
drawn = [sampling.sample(each.model_input, 2, asked) for each in few]
tokens = [[sequence.tokens for sequence in each.result().sequences] for each in drawn]
print(
    json.dumps(
        {
            "losses": passed.result().metrics["loss:sum"],
            "logprobs": np.concatenate(ell).astype(float).tolist(),
            "after": np.concatenate(after).astype(float).tolist(),
            "tokens": tokens,
            "seconds": time.monotonic() - began,
        }
    )
)
