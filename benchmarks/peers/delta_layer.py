"""The layer of `benchmarks/delta.py` in torch, by the chunked rule of transformers; it is run from there."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

REPEATS, TURNS = 5, 2


def config(layers: int) -> dict[str, Any]:
    """config.json of so many layers of Gated DeltaNet, and one of attention, which each model must have."""
    return {
        "model_type": "qwen3_5_text",
        "vocab_size": 64,
        "hidden_size": 1024,
        "intermediate_size": 8,
        "num_hidden_layers": layers + 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "layer_types": ["linear_attention"] * layers + ["full_attention"],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    }


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options of both scripts."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--tokens", type=int, default=1024, help="tokens of the sequence")
    return options


def layer_ms(passes: Callable[[int], Callable[[], Any]]) -> float:
    """Milliseconds of a pass through a layer: half of what three layers take longer than one."""
    best = []
    for layers in (3, 1):
        run, times = passes(layers), []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        best.append(min(times[1:]))
    return 1e3 * (best[0] - best[1]) / 2


def main() -> None:
    """Prints the time of a layer as JSON."""
    import torch
    from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

    tokens = parser(__doc__).parse_args().tokens

    def passes(layers: int) -> Callable[[], Any]:
        values = {name: value for name, value in config(layers).items() if name != "model_type"}
        model = Qwen3_5TextModel(Qwen3_5TextConfig(**values)).float()
        ids = torch.arange(tokens)[None] % 64

        def run() -> None:
            model.zero_grad()
            model(ids, use_cache=False).last_hidden_state.sin().sum().backward()

        return run

    print(json.dumps({"ms": layer_ms(passes)}))


if __name__ == "__main__":
    main()
