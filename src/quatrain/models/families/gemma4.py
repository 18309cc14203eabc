"""The dense text models of Gemma 4: heads of another size in full layers, keys and values that later layers
reuse or that are one, norms of values, and an embedding of each token for each layer."""

from __future__ import annotations

from dataclasses import replace

from quatrain.models.architecture import BOTH, Architecture, LayerKind
from quatrain.models.blocks.attention import Attention
from quatrain.models.blocks.layer_input import LayerInput
from quatrain.models.families import common
from quatrain.models.families.common import Family, Json
from quatrain.models.families.ropes import FULL, SLIDING, read_rope, read_sliding_rope, write_rope
from quatrain.models.hf_config import HFConfig
from quatrain.models.spec import require


def _read(c: HFConfig) -> Architecture:
    require(not c.enable_moe_block, "enable_moe_block", "false (experts are not supported)", True)
    same = not c.hidden_size_per_layer_input or c.vocab_size_per_layer_input in (None, c.vocab_size)
    require(same, "vocab_size_per_layer_input", f"vocab_size, {c.vocab_size}", c.vocab_size_per_layer_input)
    types = [*common.layer_types(c, lambda i: (i + 1) % 6 == 0)[:-1], FULL]
    # transformers writes numbers of as many digits as the last: 05, 11.
    given = {number.lstrip("0") or "0": each for number, each in (c.per_layer_config or {}).items()}
    full_layers = {str(i) for i, kind in enumerate(types) if kind == FULL}
    own = next(iter(given.values()), None)
    alike = not given or (given.keys() == full_layers and all(other == own for other in given.values()))
    require(alike, "per_layer_config", f"the same for all layers of {FULL}, and for no other", [*given])
    full_heads = (
        own.num_key_value_heads if own else c.num_global_key_value_heads if c.attention_k_eq_v else None
    )
    full = c.model_copy(
        update={
            "head_dim": (own.head_dim if own else c.global_head_dim) or c.head_dim,
            "num_key_value_heads": full_heads or c.num_key_value_heads,
        }
    )
    ropes = read_rope(c, by_type=True, partial=True), read_sliding_rope(c, 1e4)
    traits: Json = {"qk_norm": True, "value_norm": True, "scale": 1.0}

    def mixer(kind: str) -> Attention:
        if kind == FULL:
            return common.read_attention(full, ropes[0], keys_are_values=bool(c.attention_k_eq_v), **traits)
        return common.read_attention(c, ropes[1], c.sliding_window or 0, **traits)

    arch = common.architecture(
        "gemma4_text",
        c,
        [mixer(kind) for kind in types],
        norms=BOTH,
        embedding_scale=c.hidden_size**0.5,
        final_softcap=c.final_logit_softcapping,
    )
    width = c.hidden_size_per_layer_input
    block = LayerInput(width, arch.layers[0].mlp.activation) if width else None
    layers = [replace(kind, layer_input=block, scaled=True) for kind in arch.layers]
    return replace(arch, layers=tuple(_sharing(layers, c.num_kv_shared_layers, bool(c.use_double_wide_mlp))))


def _sharing(layers: list[LayerKind], reusing: int, wide: bool) -> list[LayerKind]:
    """The layers, of which the last `reusing` take keys and values of the last before them of their type."""
    most = f"less than num_hidden_layers, {len(layers)}"
    require(reusing < len(layers), "num_kv_shared_layers", most, reusing)
    first = len(layers) - reusing
    windows = [kind.mixer.window for kind in layers[:first]]
    for i in range(first, len(layers)):
        kind = layers[i]
        require(kind.mixer.window in windows, "layer_types", "a type of layer that has keys and values", FULL)
        lender = first - 1 - windows[::-1].index(kind.mixer.window)
        lending = replace(layers[lender].attention, sharing="lends")
        layers[lender] = replace(layers[lender], mixer=lending)
        mlp = replace(kind.mlp, width=2 * kind.mlp.width) if wide else kind.mlp
        layers[i] = replace(kind, mixer=replace(kind.attention, sharing="reuses"), mlp=mlp)
    return layers


def _write(arch: Architecture) -> Json:
    full, sliding = common.by_window(arch)
    reusing = sum(kind.mixer.sharing == "reuses" for kind in arch.layers)
    block, first, last = arch.layers[0].layer_input, arch.layers[0].mlp, arch.layers[-1].mlp
    return {
        **common.write_windows(arch, always=True),
        **write_rope(full.rope, sliding.rope),
        "attention_bias": sliding.qkv_bias,
        "head_dim": sliding.head_dim,
        "global_head_dim": full.head_dim,
        "num_key_value_heads": sliding.num_kv_heads,
        "num_global_key_value_heads": full.num_kv_heads if full.keys_are_values else None,
        "attention_k_eq_v": full.keys_are_values,
        "num_kv_shared_layers": reusing,
        "use_double_wide_mlp": last.width > first.width,
        "hidden_size_per_layer_input": block.width if block else 0,
        "vocab_size_per_layer_input": arch.vocab_size,
        "hidden_activation": first.activation,
        "final_logit_softcapping": arch.final_softcap,
    }


GEMMA4 = Family(
    "gemma4_text",
    "Gemma4",
    {
        "head_dim": 256,
        "global_head_dim": 512,
        "num_key_value_heads": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "max_position_embeddings": 131072,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "pad_token_id": 0,
    },
    _read,
    _write,
    omitted=("hidden_act", "rope_theta", "rope_scaling", "partial_rotary_factor"),
)
