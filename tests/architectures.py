"""Architectures that differ from others in some values."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from goldens import CASES, read_golden

from quatrain.config.sections.model_on_devices import MODULES
from quatrain.models.architecture import Architecture, LayerKind
from quatrain.models.blocks.attention import Attention
from quatrain.models.families import architecture_from_hf
from quatrain.models.rope import Rope

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
"""What config.json of Qwen2.5-7B says of its shape."""
ADAPTED = tuple(MODULES)
"""All matrices of a layer that may have adapters."""


def family_cases(*quick: str) -> list[Any]:
    """All golden models as parameters of a test, of which those that are not `quick` run with `slow`
    alone."""
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in CASES]


def of_golden(case: str, *, longest: int = 32, **values: Any) -> Architecture:
    """The architecture of a golden model, for sequences of up to `longest` tokens, with other `values`."""
    return changed(architecture_from_hf(read_golden(case).config).for_length(longest), **values)


def changed(
    arch: Architecture,
    *,
    num_layers: int | None = None,
    windows: Sequence[int | None] | None = None,
    sliding_rope: Rope | None = None,
    **values: Any,
) -> Architecture:
    """`arch` with other `values`, which may be fields of it, its norms and every layer's kind, mixer and MLP.

    `windows` are the sliding windows of its layers, and `sliding_rope` the rotary embeddings of layers that
    have one.
    """
    layers = arch.layers[:1] * num_layers if num_layers else arch.layers
    if windows:
        layers = (layers * len(windows))[: len(windows)]
    used = set[str]()

    def picked(of: Any, **more: Any) -> Any:
        names = {field.name for field in fields(of)} & values.keys()
        used.update(names)
        return replace(of, **{name: values[name] for name in names} | more)

    def layer(kind: LayerKind, window: int | None) -> LayerKind:
        has_window = isinstance(kind.mixer, Attention)
        mixer = picked(kind.mixer, window=window) if has_window else picked(kind.mixer)
        mixer = replace(mixer, rope=sliding_rope) if window and sliding_rope else mixer
        return picked(kind, mixer=mixer, mlp=picked(kind.mlp))

    windows = windows or [kind.mixer.window for kind in layers]
    arch = picked(arch, layers=tuple(map(layer, layers, windows)), norm=picked(arch.norm))
    assert used == values.keys(), values.keys() - used
    return arch
