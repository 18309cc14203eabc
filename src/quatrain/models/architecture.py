"""The architecture of a model: its layers, and what is around them.

Data flow: config.json, a GGUF header or a builtin name -> `Architecture` -> parameters, decoder and export.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from quatrain.config.mesh import MeshShape
from quatrain.models.blocks.attention import Attention
from quatrain.models.blocks.delta import GatedDeltaNet
from quatrain.models.blocks.experts import Experts
from quatrain.models.blocks.layer_input import LayerInput
from quatrain.models.blocks.layer_run import OF_EXPERTS
from quatrain.models.blocks.mlp import Dense
from quatrain.models.layers import Norm
from quatrain.models.rope import Rope
from quatrain.models.spec import LoRA as LoRA
from quatrain.models.spec import ParamSpec, TensorName, require
from quatrain.models.vision import Vision

Head = Literal["lm_head", "value_head"]

Mixer = Attention | GatedDeltaNet
"""A block that mixes the tokens of a sequence."""
Norms = tuple[tuple[str, str], ...]
"""The norms of a layer, each with its name in a checkpoint. `attention_norm` and `mlp_norm` are of the inputs
of the blocks, `post_attention_norm` and `post_mlp_norm` of their outputs, before the residual sum."""
PRE: Norms = (("attention_norm", "input_layernorm"), ("mlp_norm", "post_attention_layernorm"))
POST: Norms = (
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_mlp_norm", "post_feedforward_layernorm"),
)
BOTH: Norms = (
    ("attention_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("mlp_norm", "pre_feedforward_layernorm"),
    ("post_mlp_norm", "post_feedforward_layernorm"),
)


@dataclass(frozen=True)
class LayerKind:
    """x + mixer(norm(x)), then x + mlp(norm(x)); layers of the same kind are compiled once."""

    mixer: Mixer
    mlp: Dense | Experts
    norms: Norms = PRE
    residual_scale: float = 1.0
    """The factor of what a block adds to the residual stream."""
    layer_input: LayerInput | None = None
    """What is added after the MLP of an embedding that the layer has of each token."""
    scaled: bool = False
    """Whether hidden states are at last multiplied by a number of the layer's, which is not trained."""

    @property
    def attention(self) -> Attention:
        """The mixer, in a family that has no other than attention."""
        assert isinstance(self.mixer, Attention), self.mixer
        return self.mixer

    @property
    def dense(self) -> Dense:
        """The MLP, in a family without experts."""
        assert isinstance(self.mlp, Dense), self.mlp
        return self.mlp

    @property
    def blocks(self) -> tuple[Mixer | Dense | Experts | LayerInput, ...]:
        """The blocks of a layer."""
        return (self.mixer, self.mlp, *([self.layer_input] if self.layer_input else []))

    def params(self, d: int, norm: Norm, residual: float, lora: LoRA | None) -> dict[str, ParamSpec]:
        """The parameters of a layer for hidden states of `d` elements, with adapters if there are any.

        The standard deviation of matrices that write to the residual stream is scaled by `residual`.
        """
        specs = self.mixer.params(d, norm, residual) | self.mlp.params(d, residual)
        specs |= {name: norm.spec(d) for name, _ in self.norms}
        if self.layer_input:
            specs |= self.layer_input.params(d, norm, residual)
        if self.scaled:
            specs["layer_scalar"] = ParamSpec((1,), ("norm",), "constant", 1.0)
        if lora:
            for name in [name for name in lora.targets if name in specs]:
                specs |= specs[name].adapters(name, lora.rank, len(self.matrices()[name]))
        return specs

    def tensors(self) -> list[TensorName]:
        """The tensors of a layer of a checkpoint: matrices, their biases, and norms."""
        norms = [TensorName(f"{module}.weight", (name,)) for name, module in self.norms]
        scalar = [TensorName("layer_scalar", ("layer_scalar",))] * self.scaled
        return [*(tensor for block in self.blocks for tensor in block.tensors()), *norms, *scalar]

    def matrices(self) -> dict[str, list[TensorName]]:
        """The matrices, which may have adapters, each with the tensors that are stored as one."""
        weights: dict[str, list[TensorName]] = {}
        for tensor in [*self.mixer.tensors(), *self.mlp.tensors()]:
            frozen = str(tensor.path[0]) in self.mlp.frozen
            if not (tensor.vector or tensor.kernel or frozen):
                weights.setdefault(str(tensor.path[0]), []).append(tensor)
        return weights

    def stacked(self, name: str) -> tuple[int, ...]:
        """`GatedDeltaNet.stacked` of a matrix, if it is one of such a block."""
        return self.mixer.stacked(name) if isinstance(self.mixer, GatedDeltaNet) else ()

    def low_parts(self, name: str, mesh: MeshShape) -> int:
        """How many times a token has the r columns of A x of the matrix `name`, on one device."""
        if name.startswith(OF_EXPERTS) and isinstance(self.mlp, Experts):
            return self.mlp.top_k * mesh.ep
        return len(self.matrices().get(name, ()))


class Routes(NamedTuple):
    """The experts that a model chooses for each token: arrays [..., layers, experts_per_token]."""

    layers: int
    """L: layers of experts, in the order of layers."""
    experts_per_token: int
    """k."""
    num_experts: int

    @property
    def dtype(self) -> np.dtype:
        """The smallest dtype that has a number for each expert and one for `live`."""
        # All k entries are the largest value: with k > 1 no token's experts are.
        byte = self.num_experts < 2**8 or (self.num_experts == 2**8 and self.experts_per_token > 1)
        return np.dtype(np.uint8 if byte else np.uint16)

    @property
    def live(self) -> int:
        """What all k entries of a token and layer are whose experts are not given, but chosen anew."""
        return int(np.iinfo(self.dtype).max)


@dataclass(frozen=True)
class Architecture:
    """The architecture of one model; hashable, so that it can be a static argument of jitted functions."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerKind, ...]
    max_position: int
    """In tokens."""
    norm: Norm
    head: Head = "lm_head"
    """What a hidden state becomes: logits of the vocabulary, or one number (critics, reward models)."""
    tie_embeddings: bool = False
    """Whether the output head of the vocabulary is the embedding matrix."""
    embedding_scale: float = 1.0
    """The factor of token embeddings."""
    logits_scale: float = 1.0
    """The factor of logits, before the soft cap."""
    final_softcap: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    lora: LoRA | None = None
    """Adapters, which alone are trained; None: the model has none (`lora.trained_part`)."""
    vision: Vision | None = None
    """The tower that makes features of pictures; None: the model has none, or it is not used."""

    def __post_init__(self) -> None:
        require(len(self.attentions) > 0, "layer_types", "of at least one layer of full attention", "none")
        plain = self.logits_scale == 1.0 or self.norm.offset == 0.0
        require(plain, "logits_scale", "1 in a model whose norms have an offset", self.logits_scale)
        if self.vision is not None:
            most, levels = len(self.layers), self.vision.levels
            require(levels <= most, "deepstack_visual_indexes", f"at most {most}, one a text layer", levels)
        if self.vision is not None and self.vision.has_grid:
            for mixer in self.attentions:
                if mixer.rope:
                    mixer.rope.axes(mixer.head_dim)  # raises an error now, not where the first picture comes

    def __hash__(self) -> int:
        # Computed in every call of a compiled program: of the layers, the first is enough.
        return hash((self.family, self.vocab_size, self.hidden_size, self.layers[0], self.head, self.lora))

    @property
    def partly_frozen(self) -> bool:
        """Whether a part of its parameters is not trained: the base of adapters, or a tower."""
        return self.lora is not None or (self.vision is not None and self.vision.trained != "all")

    @property
    def with_tower(self) -> Architecture:
        """This model with its tower among its parameters, where a frozen one is not (`param_specs`)."""
        return replace(self, vision=self.vision and replace(self.vision, trained="all"))

    @property
    def text(self) -> Architecture:
        """The text model, as it is without a tower."""
        return replace(self, vision=None).with_ropes(
            lambda rope: replace(rope, sections=(), alternating=False)
        )

    @property
    def without_lora(self) -> Architecture:
        """This model without adapters: its base."""
        return replace(self, lora=None, vision=self.vision and replace(self.vision, lora=None))

    def for_length(self, tokens: int) -> Architecture:
        """This model for a run whose sequences have at most so many tokens (`Rope.for_length`)."""
        return self.with_ropes(lambda rope: rope.for_length(tokens))

    def with_ropes(self, change: Callable[[Rope], Rope]) -> Architecture:
        """This model with `change` made to the rotary embeddings of each layer that has some."""
        new: dict[Mixer, Mixer] = {
            mixer: replace(mixer, rope=mixer.rope and change(mixer.rope)) for mixer in self.attentions
        }
        layers = tuple(replace(kind, mixer=new.get(kind.mixer, kind.mixer)) for kind in self.layers)
        return self if layers == self.layers else replace(self, layers=layers)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; with longrope's short factors, those of their training."""
        ropes = (mixer.rope for mixer in self.attentions if mixer.rope)
        short = [rope.original_max_position for rope in ropes if rope.kind == "longrope" and not rope.long]
        return min([self.max_position, *short])

    @property
    def cached(self) -> tuple[int, ...]:
        """Of each layer, the number of its cache among those of all layers that have one.

        A layer that reuses keys and values has that of the last layer that lends them with its window.
        """
        numbers, lent, count = [], dict[int | None, int](), 0
        for kind in self.layers:
            mixer = kind.mixer
            if mixer.sharing == "reuses":
                numbers.append(lent[mixer.window])
                continue
            numbers.append(count)
            if mixer.sharing == "lends":
                lent[mixer.window] = count
            count += 1
        return tuple(numbers)

    @property
    def num_caches(self) -> int:
        """The number of layers that have a cache."""
        return max(self.cached) + 1

    @property
    def routes(self) -> Routes | None:
        """The experts that it chooses for each token; None: it has none."""
        experts = [kind.mlp for kind in self.layers if isinstance(kind.mlp, Experts)]
        return Routes(len(experts), experts[0].top_k, experts[0].num) if experts else None

    def with_experts(self, change: Callable[[Experts], Experts]) -> Architecture:
        """This model with `change` made to the experts of each layer that has some."""
        experts = (isinstance(kind.mlp, Experts) and change(kind.mlp) for kind in self.layers)
        layers = zip(self.layers, experts, strict=True)
        return replace(self, layers=tuple(replace(kind, mlp=new) if new else kind for kind, new in layers))

    def check_routes(self, recorded: np.ndarray) -> None:
        """Raises ValueError if the routes [B, T, layers, experts_per_token] are not of this model."""
        remedy = (
            "train on batches that this model sampled, or without their routes (RolloutBatch.routes None)"
        )
        if self.routes is None:
            raise ValueError(
                "recorded routes must be those of the model that is trained; it has no experts (family "
                f"{self.family}), got routes {list(recorded.shape)}; {remedy}"
            )
        layers, k, num = self.routes
        dtype, live = self.routes.dtype, self.routes.live
        rule = f"recorded routes must be those of the model that is trained, {dtype} [B, T, {layers}, {k}]"
        if recorded.shape[2:] != (layers, k) or recorded.dtype != dtype:
            raise ValueError(f"{rule}; got {recorded.dtype} {list(recorded.shape)}; {remedy}")
        greatest = (row.max(axis=-1)[(row != live).any(axis=-1)].max(initial=0) for row in recorded)
        if (found := max(greatest, default=0)) >= num:
            raise ValueError(f"{rule}, of experts from 0 to {num - 1}; got expert {found}; {remedy}")

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The different kinds of layers, in the order of their first layers."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The different mixers, in the order of their first layers."""
        return tuple(dict.fromkeys(kind.mixer for kind in self.layers))

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """Those of them that are attention; at least one."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, Attention))

    @property
    def deltas(self) -> tuple[GatedDeltaNet, ...]:
        """Those that are Gated DeltaNets, in whose layers a sequence has a state."""
        return tuple(mixer for mixer in self.mixers if isinstance(mixer, GatedDeltaNet))
