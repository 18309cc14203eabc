"""The architecture of a model: sizes, normalisation, rotary embeddings, attention windows, special tokens.

Data flow: config.json, a GGUF header or a builtin name -> `Architecture` -> parameters, decoder and export.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quatrain.config.errors import shown

LAYER_TYPES = ("full_attention", "sliding_attention")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")

Head = Literal["vocabulary", "score"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are scaled, so that a model handles contexts longer than it was pre-trained on.

    `linear` divides every frequency by `factor`. `llama3` divides frequencies whose wavelength is longer than
    `original_max_position / low_freq_factor` tokens by `factor`, keeps frequencies whose wavelength is
    shorter than `original_max_position / high_freq_factor` tokens, and interpolates between the two.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class LoRA:
    """Adapters of low rank on matrices of every layer: W x becomes W x + (alpha / rank) B (A x).

    A is [rank, in], B [out, rank] (Hu et al. 2021, arXiv 2106.09685). `targets` are names of a layer's
    matrices (`models.params`).
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor of B (A x)."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Architecture:
    """The architecture of one model; hashable, so that it can be a static argument of jitted functions.

    Sizes are in elements; `max_position` and `sliding_window` are in tokens.
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
    """RoPE theta of sliding-window layers, without scaling; None: as in layers with full attention."""
    head: Head = "vocabulary"
    """What a hidden state becomes: logits of the vocabulary, or one number (critics, reward models)."""
    tie_embeddings: bool = False
    """Whether the output head of the vocabulary is the embedding matrix."""
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    norm_offset: float = 0.0
    """RMS norms multiply by `norm_offset + weight`; 1 for Gemma."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP are normalised too, before the residual sum (Gemma)."""
    scale_embeddings: bool = False
    """Whether token embeddings are multiplied by sqrt(hidden_size) (Gemma)."""
    query_pre_attn_scalar: float | None = None
    """Queries are divided by the square root of this value; None: by the square root of `head_dim`."""
    attention_softcap: float | None = None
    final_softcap: float | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] = ()
    """`full_attention` or `sliding_attention` for each layer; (): all layers have full attention."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    lora: LoRA | None = None
    """Adapters, which alone are trained; None: the model has none, and all its parameters are trained."""

    def __post_init__(self) -> None:
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
        typed = len(self.layer_types) in (0, self.num_layers) and set(self.layer_types) <= set(LAYER_TYPES)
        expected = f"{self.num_layers} entries out of {', '.join(LAYER_TYPES)}"
        _require(typed, "layer_types", expected, self.layer_types)
        if "sliding_attention" in self.layer_types:
            _require(
                (self.sliding_window or 0) > 0, "sliding_window", "a positive number", self.sliding_window
            )

    @property
    def lora_scale(self) -> float:
        """The factor of what adapters add; without adapters it has no effect."""
        return self.lora.scale if self.lora else 1.0

    @property
    def query_scale(self) -> float:
        """The factor that queries are multiplied by before the dot product with keys."""
        return float(self.query_pre_attn_scalar or self.head_dim) ** -0.5

    def layer_type(self, layer: int) -> str:
        """The attention type of layer number `layer`, counted from 0."""
        return self.layer_types[layer] if self.layer_types else LAYER_TYPES[0]


def _require(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"model architecture: {name} must be {expected}; got {shown(got)}")
