"""What calls take: 200 of `forward` on a short row, one after the other, and 64 samples at once."""

import json
import statistics
import time

from client import MODEL, data_of, rows, service
from tinker import types

training = service().create_lora_training_client(MODEL, rank=8, seed=0).result()
data = data_of(rows(0, 1))


def forward():
    began = time.perf_counter()
    training.forward(data, "cross_entropy").result()
    return time.perf_counter() - began


forward()
passes = [forward() for _ in range(200)]
sampling = training.save_weights_and_get_sampling_client().result()
asked = types.SamplingParams(max_tokens=1, stop=[])
prompts = [types.ModelInput.from_ints(each) for each in rows(1, 64)]


def samples():
    began = time.perf_counter()
    for each in [sampling.sample(prompt, 1, asked) for prompt in prompts]:
        each.result()
    return (time.perf_counter() - began) / len(prompts)


for _ in range(3):
    samples()
print(
    json.dumps(
        {
            "forward_ms": round(1e3 * statistics.median(passes), 2),
            "sample_ms": round(1e3 * statistics.median(samples() for _ in range(10)), 2),
        }
    )
)
