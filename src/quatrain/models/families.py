"""The model families: what a decoder needs to know about each, and how Hugging Face spells it.

Data flow: config.json -> `Architecture` -> parameter specs and the forward pass; and back for export.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Json = dict[str, Any]

ROPE_TYPES = ("default", "linear", "llama3")
LAYER_TYPES = ("full_attention", "sliding_attention")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the length a model was first trained at.

    `linear` divides each frequency by `factor`; `llama3` does so for wavelengths longer than
    `original_max_position / low_freq_factor` tokens, leaves those shorter than
    `original_max_position / high_freq_factor`, and interpolates between.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class Architecture:
    """Everything the decoder needs to know of a model; hashable, so a jitted function takes it as static.

    Sizes are in elements, `max_position` and `sliding_window` in tokens.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    """Theta of sliding layers, never scaled; None: as the other layers."""
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    norm_offset: float = 0.0
    """Norms multiply by `norm_offset + weight` (1 for Gemma)."""
    post_norms: bool = False
    """Norms after attention and MLP too, before the residual sum (Gemma)."""
    scale_embeddings: bool = False
    """Token embeddings are multiplied by sqrt(hidden_size) (Gemma)."""
    query_pre_attn_scalar: float | None = None
    """Queries are divided by the root of this; None: of `head_dim`."""
    attention_softcap: float | None = None
    final_softcap: float | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    """`full_attention` or `sliding_attention` for each layer; () is made all full."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", ("full_attention",) * self.num_layers)
        _require(self.family in FAMILIES, "family", f"one of {', '.join(FAMILIES)}", self.family)
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
        ):
            _require(getattr(self, name) > 0, name, "a positive number", getattr(self, name))
        _require(
            self.num_heads % self.num_kv_heads == 0,
            "num_heads",
            f"a multiple of num_kv_heads = {self.num_kv_heads}",
            self.num_heads,
        )
        even = self.head_dim > 0 and self.head_dim % 2 == 0
        _require(even, "head_dim", "a positive even number", self.head_dim)
        known = self.activation in ACTIVATIONS
        _require(known, "activation", f"one of {', '.join(ACTIVATIONS)}", self.activation)
        typed = len(self.layer_types) == self.num_layers and set(self.layer_types) <= set(LAYER_TYPES)
        expected = f"{self.num_layers} entries out of {', '.join(LAYER_TYPES)}"
        _require(typed, "layer_types", expected, self.layer_types)
        if "sliding_attention" in self.layer_types:
            _require(
                (self.sliding_window or 0) > 0, "sliding_window", "a positive number", self.sliding_window
            )

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by before the dot product with keys."""
        return float(self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def window(self, layer: int) -> int | None:
        """Sliding window of layer number `layer`, in tokens; None where it sees everything before."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None


class _Family(NamedTuple):
    """What sets a family apart; `defaults` fills keys that its config.json may leave out."""

    hf_class: str
    fixed: Json
    defaults: Json


_GEMMA = {
    "norm_offset": 1.0,
    "post_norms": True,
    "scale_embeddings": True,
}
_GEMMA_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES: dict[str, _Family] = {
    "llama": _Family(
        "LlamaForCausalLM", {}, {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
    ),
    "qwen2": _Family("Qwen2ForCausalLM", {"qkv_bias": True}, {"max_position_embeddings": 32768}),
    "qwen3": _Family(
        "Qwen3ForCausalLM", {"qk_norm": True}, {"max_position_embeddings": 32768, "head_dim": 128}
    ),
    "gemma2": _Family(
        "Gemma2ForCausalLM",
        _GEMMA,
        _GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": _Family(
        "Gemma3ForCausalLM",
        _GEMMA | {"qk_norm": True},
        _GEMMA_DEFAULTS
        | {"max_position_embeddings": 131072, "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
    ),
}
"""Supported `model_type`s of config.json."""


def builtin_architecture(name: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Architecture:
    """The architecture behind `builtin:NAME`, for a tokenizer of `vocab_size` tokens.

    `tiny` is a Llama of about 0.8 M parameters that learns on two CPU cores in minutes.
    Raises ValueError for another name.
    """
    expected = f"one of {', '.join(f'builtin:{known}' for known in _BUILTIN)}"
    _require(name in _BUILTIN, "model.path", expected, f"builtin:{name}")
    return Architecture(vocab_size=vocab_size, eos_token_ids=eos_token_ids, **_BUILTIN[name])


_BUILTIN: dict[str, Json] = {
    "tiny": {
        "family": "llama",
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_position": 2048,
        "norm_eps": 1e-5,
        "tie_embeddings": True,
    }
}


def _require(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"model architecture: {name} must be {expected}; got {got!r}")
