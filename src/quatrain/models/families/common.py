"""What a file of a family has, and what the families read and write alike: attention, experts, GGUF keys.

Data flow: config.json -> `HFConfig` -> a family's `read` -> `Architecture`; its `write` goes the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from quatrain.models.architecture import PRE, Architecture, LayerKind, Mixer, Norms
from quatrain.models.blocks.attention import Attention
from quatrain.models.blocks.experts import Experts
from quatrain.models.blocks.mlp import Dense
from quatrain.models.families.ropes import FULL, SLIDING, write_rope
from quatrain.models.hf_config import GGUFKeys, HFConfig
from quatrain.models.layers import Norm
from quatrain.models.rope import Rope
from quatrain.models.spec import require

Json = dict[str, Any]


class GGUF(NamedTuple):
    """What is particular to a family's GGUF files."""

    name: str
    """llama.cpp's name of the architecture."""
    permuted: bool = False
    """Whether the rows of queries and keys are in llama.cpp's rotary order (0, H/2, 1, H/2 + 1, ...)."""
    keys: Mapping[str, Any] = {}
    """The metadata that only some families have, and what llama.cpp takes for a missing value."""
    config: Callable[[GGUFKeys], dict[str, Any]] = lambda keys: {}
    """The keys of config.json that these become."""
    names: Mapping[str, str] = {}
    """Names of parameters that differ from those of other families."""
    yarn: bool = False
    """Whether its rotary embeddings are `yarn`, with bounds that are no whole elements."""

    @property
    def experts(self) -> bool:
        """Whether the family has experts."""
        return "expert_count" in self.keys


class Family(NamedTuple):
    """One family of models: its names, and how its config.json is read and written."""

    model_type: str
    stem: str
    """How the names of its classes in transformers begin."""
    defaults: Json
    """Values of keys that may be missing in config.json."""
    read: Callable[[HFConfig], Architecture]
    write: Callable[[Architecture], Json]
    """The keys of config.json that not all families have, or that differ from `write_common`."""
    gguf: GGUF | None = None
    """None: its GGUF files are not read."""
    omitted: tuple[str, ...] = ()
    """Keys of `write_common` that its config.json must not have."""
    unread: tuple[str, ...] = ()
    """Parts of its folders that are not of the model, and that transformers does not read either: how the
    names of their tensors begin."""

    @property
    def hf_class(self) -> str:
        """The name of its class in transformers, which config.json gives under `architectures`."""
        return f"{self.stem}ForCausalLM"

    @property
    def classifier(self) -> str:
        """The class of a model with a score head."""
        return f"{self.stem}{'Text' * self.model_type.endswith('_text')}ForSequenceClassification"


def architecture(
    family: str,
    c: HFConfig,
    mixers: Sequence[Mixer],
    mlps: Sequence[Dense | Experts] = (),
    *,
    bias: bool = False,
    fused: bool = False,
    norms: Norms = PRE,
    residual_scale: float = 1.0,
    **fields: Any,
) -> Architecture:
    """The architecture with these mixers and MLPs, and what all families have in config.json.

    Without `mlps`, every layer has a dense one.
    """
    mlps = mlps or [Dense(c.intermediate_size, activation(c), bias, fused)] * len(mixers)
    values: Json = {"norm": Norm(c.rms_norm_eps), "tie_embeddings": bool(c.tie_word_embeddings)} | fields
    return Architecture(
        family,
        c.vocab_size,
        c.hidden_size,
        tuple(LayerKind(*blocks, norms, residual_scale) for blocks in zip(mixers, mlps, strict=True)),
        c.max_position_embeddings or 2048,
        eos_token_ids=c.eos_token_id,
        bos_token_id=c.bos_token_id,
        pad_token_id=None if c.pad_token_id == -1 else c.pad_token_id,
        **values,
    )


def activation(c: HFConfig) -> str:
    """The activation of MLPs."""
    return c.hidden_activation or c.hidden_act or "silu"


def read_attention(c: HFConfig, rope: Rope | None, window: int | None = None, **fields: Any) -> Attention:
    """The mixer with the sizes in config.json, and biases as `attention_bias` says unless `fields` do."""
    heads, bias = c.num_attention_heads, bool(c.attention_bias)
    sizes = heads, c.num_key_value_heads or heads, c.head_dim or c.hidden_size // heads
    return Attention(*sizes, rope, window, **{"qkv_bias": bias, "output_bias": bias} | fields)


def layer_types(c: HFConfig, is_full: Callable[[int], bool], other: str = SLIDING) -> list[str]:
    """The type of each layer: that in config.json, else `FULL` where `is_full(its number)`, else `other`."""
    types = c.layer_types or [FULL if is_full(i) else other for i in range(c.num_hidden_layers)]
    typed = len(types) == c.num_hidden_layers and set(types) <= {FULL, other}
    require(typed, "layer_types", f"{c.num_hidden_layers} entries out of {FULL}, {other}", tuple(types))
    return types


def attentions(
    c: HFConfig, types: Sequence[str], rope: Rope, sliding: Rope | None = None, **fields: Any
) -> list[Attention]:
    """The mixer of each layer by its type; those with a window rotate by `sliding`, if it is given."""
    settings = {FULL: (rope, None), SLIDING: (sliding or rope, c.sliding_window or 0)}
    # Only of the types that there are: config.json may lack a window that no layer has.
    made = {kind: read_attention(c, *settings[kind], **fields) for kind in dict.fromkeys(types)}
    return [made[kind] for kind in types]


def read_mlps(c: HFConfig, default: int) -> list[Dense | Experts]:
    """The MLP of each layer: experts in every `decoder_sparse_step`-th that is not in `mlp_only_layers`.

    There are `default` experts if config.json does not say how many.
    """
    dense = Dense(c.intermediate_size, activation(c))
    experts = read_experts(c, default) if num_experts(c, default) else dense
    step, without = c.decoder_sparse_step or 1, frozenset(c.mlp_only_layers or ())
    layers = range(c.num_hidden_layers)
    return [dense if i in without or (i + 1) % step else experts for i in layers]


def num_experts(c: HFConfig, default: int) -> int:
    """The number of experts, which transformers 4 and 5 write under other keys."""
    given = {each for each in (c.num_experts, c.num_local_experts) if each is not None}
    require(len(given) < 2, "num_experts", "equal to num_local_experts", tuple(given))
    return given.pop() if given else default


def read_experts(c: HFConfig, default: int, **fields: Any) -> Experts:
    """The experts of a layer, `default` of them unless config.json says how many; `fields` are further ones.

    All tokens share one more expert if config.json gives it columns.
    """
    shared = c.shared_expert_intermediate_size or 0
    values: Json = {
        "renormalise": bool(c.norm_topk_prob),
        "shared": Dense(shared, activation(c), module="mlp.shared_expert") if shared else None,
        "shared_gate": shared > 0,
    }
    width = c.moe_intermediate_size or c.intermediate_size
    return Experts(num_experts(c, default), c.num_experts_per_tok, width, activation(c), **values | fields)


def write_common(arch: Architecture) -> Json:
    """The keys of config.json that all families have, with the rotary embeddings of the first layer."""
    layer, mixer, eos = arch.layers[0], arch.attentions[0], list(arch.eos_token_ids)
    return {
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": layer.mlp.width,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "max_position_embeddings": arch.max_position,
        "rms_norm_eps": arch.norm.eps,
        "hidden_act": layer.mlp.activation,
        "tie_word_embeddings": arch.tie_embeddings,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "bos_token_id": arch.bos_token_id,
        "pad_token_id": arch.pad_token_id,
        **write_rope(_first_rope(arch)),
    }


def _first_rope(arch: Architecture) -> Rope | None:
    return next(filter(None, (kind.mixer.rope for kind in arch.kinds)), None)


def write_share(arch: Architecture) -> Json:
    """Rotary embeddings with the share of a head that is rotated, also where it is 1.

    In families that rotate a part of each head where config.json does not say which.
    """
    return write_rope(_first_rope(arch), share=True)


def by_window(arch: Architecture) -> tuple[Attention, Attention]:
    """The first mixer with full attention and the first with a window, or twice the same if all are alike."""
    found = {kind.mixer.window is None: kind.attention for kind in reversed(arch.layers)}
    [one] = [*found.values()][:1]
    return found.get(True, one), found.get(False, one)


def write_attention(arch: Architecture, *, always: bool = True) -> Json:
    """`attention_bias` and the size of a head; unless `always`, only where this is not hidden size /
    heads."""
    mixer = arch.attentions[0]
    return {**write_head_dim(arch, always=always), "attention_bias": mixer.qkv_bias}


def write_head_dim(arch: Architecture, *, always: bool = False) -> Json:
    """The size of a head, which the configurations of some families have only if it is unusual."""
    mixer = arch.attentions[0]
    usual = mixer.head_dim * mixer.num_heads == arch.hidden_size
    return {} if usual and not always else {"head_dim": mixer.head_dim}


def write_windows(arch: Architecture, *, always: bool = False) -> Json:
    """The type of each layer, and the sliding window of those that have one.

    `always`: a size also where none has; transformers makes the mask of such windows for some families
    anyway.
    """
    windows = [kind.mixer.window for kind in arch.layers]
    types = [SLIDING if window else FULL for window in windows]
    size = next(filter(None, windows), arch.max_position if always else None)
    return {"layer_types": types, "sliding_window": size}


EXPERT_KEYS = {"expert_count": 0, "expert_used_count": 8, "expert_feed_forward_length": 1}
"""The metadata of a GGUF file with experts."""


def experts_of_gguf(keys: GGUFKeys) -> Json:
    """The keys of config.json that these become, whose weights do not sum to 1."""
    return {
        "num_experts": keys.experts,
        "num_experts_per_tok": keys.experts_per_token,
        "moe_intermediate_size": keys.expert_width,
        "norm_topk_prob": False,
    }


def write_experts(arch: Architecture) -> Json:
    """The keys of config.json that `read_mlps` reads."""
    mlps = [kind.mlp for kind in arch.layers]
    dense = [mlp for mlp in mlps if isinstance(mlp, Dense)]
    experts = next((mlp for mlp in mlps if isinstance(mlp, Experts)), None)
    written: Json = {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, mlp in enumerate(mlps) if isinstance(mlp, Dense)],
    }
    if dense:
        written["intermediate_size"] = dense[0].width
    if experts is None:
        return {**written, "num_experts": 0, "mlp_only_layers": []}
    return {
        **written,
        "num_experts": experts.num,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.renormalise,
        **({"shared_expert_intermediate_size": experts.shared.width} if experts.shared else {}),
    }


def write_local_experts(arch: Architecture) -> Json:
    """The keys of families that have experts in all layers, under transformers' older names."""
    given = write_experts(arch)
    return {"num_local_experts": given["num_experts"], "num_experts_per_tok": given["num_experts_per_tok"]}
