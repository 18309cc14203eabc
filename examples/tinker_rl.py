"""Reinforcement learning with the client of the Tinker API: the same lines teach a model here and there.

quatrain serve --train --port 8001
TINKER_API_KEY=tml-local python examples/tinker_rl.py http://127.0.0.1:8001

On the service, leave the address away and name a base model: python examples/tinker_rl.py "" Qwen/Qwen3.5-4B
"""

import random
import sys

import tinker
from tinker import types

url, base = [*sys.argv[1:], "", ""][:2]
served = tinker.RestClient(base_url=url).get_server_capabilities().result().supported_models
service = tinker.ServiceClient(base_url=url)
model = service.create_lora_training_client(base or served[0].model_name, rank=32, seed=0).result()
tokenizer, rng = model.get_tokenizer(), random.Random(0)


def problem(error=0):
    """Ids of a sum and of its result, which is off by one at most."""
    a, b = rng.randint(0, 4), rng.randint(0, 4)
    return [tokenizer.encode(text) for text in (f"{a}+{b}=", str(max(0, a + b + rng.randint(-error, error))))]


def datum(prompt, tokens, **columns):
    """The rows that predict `tokens` after `prompt`; in those before, all columns are 0."""
    before = [0] * (len(prompt) - 1)
    inputs = {name: before + column for name, column in {"target_tokens": tokens, **columns}.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(prompt + tokens[:-1]), loss_fn_inputs=inputs)


def train(data, loss, learning_rate):
    """A gradient and a step, both sent before either is waited for."""
    passed = model.forward_backward(data, loss)
    model.optim_step(types.AdamParams(learning_rate=learning_rate))
    return passed.result()


for _ in range(80):  # a warm start: of these answers about four in ten are right
    shown = [problem(error=1) for _ in range(64)]
    train([datum(*both, weights=[1 / 64] * len(both[1])) for both in shown], "cross_entropy", 3e-3)

for step in range(100):
    sampler = model.save_weights_and_get_sampling_client().result()
    once = types.SamplingParams(max_tokens=1, stop=[])
    problems = [problem() for _ in range(16)]
    answers = [sampler.sample(types.ModelInput.from_ints(prompt), 16, once) for prompt, _ in problems]
    data, total = [], 0.0
    for (prompt, result), answer in zip(problems, answers, strict=True):
        sequences = answer.result().sequences
        rewards = [float(each.tokens == result) for each in sequences]
        mean = sum(rewards) / len(rewards)
        total += mean
        for each, reward in zip(sequences, rewards, strict=True):
            advantages = [(reward - mean) / 256] * len(each.tokens)
            data.append(datum(prompt, each.tokens, logprobs=each.logprobs, advantages=advantages))
    train(data, "importance_sampling", 2e-3)
    print(f"step {step}: reward {total / len(problems):.3f}")
print(model.save_state("final").result().path)
