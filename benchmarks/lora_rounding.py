"""What of an adapter's change arrives in a sampler with bfloat16 matrices, by the way of rounding.

    python benchmarks/lora_rounding.py configs/gsm8k_smollm2_cpu.yaml --set data.train=train.jsonl \
        --set sft.data=demonstrations.jsonl

Trains adapters on a few demonstrations. Then it merges them, and again with B times 8 and 64 in place of
longer training, rounds to the nearest bfloat16 and as `merged` does, and compares the log-probabilities of
other demonstrations, computed in float32, with those of adapters that are not merged.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

import quatrain
from quatrain.loop.build import build_policy_spec
from quatrain.loop.sft import warm_start, warm_start_data
from quatrain.models.lora import adapters_of, changed, merged, with_trained, without_adapters
from quatrain.models.spec import LORA_A, LORA_B
from quatrain.update.gradient import predict_tokens
from quatrain.update.sft import _table

SETTINGS = (
    *("model.dtype=float32", "model.param_dtype=bfloat16", "lora.rank=32"),
    *("sft.steps=4", "sft.batch_size=2", "sft.warmup_steps=0", "sft.learning_rate=2e-5"),
)
SCALES = (1, 8, 64)
HELD_OUT = 500
"""The batch of demonstrations on which log-probabilities are compared."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    config = quatrain.load_config(given.config, [*SETTINGS, *given.set]).config
    loaded = quatrain.load_policy(config)
    arch, plain = loaded.arch, replace(loaded.arch, lora=None)
    data = warm_start_data(config, loaded.tokenizer)
    params = warm_start(config, loaded, data)
    spec, table = build_policy_spec(config, loaded, temperature=1.0), _table(data.batch(HELD_OUT, 4))

    def logprobs(tree, arch):
        model, cutting = replace(spec, arch=arch), spec.cutting(config.update)
        return predict_tokens(tree, table, model=model, cutting=cutting)[table.completion_mask]

    base = logprobs(without_adapters(params), plain)
    for scale in SCALES:
        tree = scaled(params, arch, scale)
        exact = logprobs(tree, arch)
        change = exact - base
        print(f"B x {scale}: {len(change)} tokens change by {np.abs(change).mean():.4f} nats on average")
        for way, found in {"nearest": nearest(tree, arch), "merged": merged(tree, arch)}.items():
            got = logprobs(found, plain)
            told, gap = np.dot(got - base, change) / np.dot(change, change), np.abs(got - exact)
            print(
                f"  {way}: {arrived(found, tree, arch):.3f} of the change of the matrices arrives, and "
                f"{told:.3f} of that of the log-probabilities; gap {gap.mean():.4f} nats on average, "
                f"{gap.max():.3f} at most"
            )


def scaled(params, arch, scale):
    """`params` with `scale` times B."""
    layers = [
        {name: leaf * scale if name.endswith(LORA_B) else leaf for name, leaf in layer.items()}
        for layer in adapters_of(params)["layers"]
    ]
    return with_trained(params, {"layers": layers}, arch)


def nearest(params, arch):
    """As `merged`, but each sum is rounded to the nearest number."""
    base = without_adapters(params)
    layers = [
        layer | {name: summed(whole, name, arch).astype(jnp.bfloat16) for name in arch.lora.targets}
        for layer, whole in zip(base["layers"], params["layers"], strict=True)
    ]
    return {**base, "layers": layers}


def summed(layer, name, arch):
    return changed(layer[name], layer[name + LORA_A], layer[name + LORA_B], arch.lora.scale)


def arrived(found, params, arch):
    """The change of the matrices of `found`, projected onto that which the adapters of `params` describe."""
    product = square = 0.0
    for layer, whole in zip(found["layers"], params["layers"], strict=True):
        for name in arch.lora.targets:
            before = whole[name].astype(jnp.float32)
            change = summed(whole, name, arch) - before
            product += float(jnp.vdot(layer[name].astype(jnp.float32) - before, change))
            square += float(jnp.vdot(change, change))
    return product / square


if __name__ == "__main__":
    main()
