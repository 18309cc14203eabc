"""Which layers have experts, as the Qwen families say it in config.json."""

from __future__ import annotations

from quatrain.models.architecture import Architecture
from quatrain.models.blocks.experts import Experts
from quatrain.models.blocks.mlp import Dense
from quatrain.models.families.common import Json, activation
from quatrain.models.families.gguf import GGUFKeys
from quatrain.models.hf_config import HFConfig
from quatrain.models.spec import require

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


def read_mlps(c: HFConfig, default: int) -> list[Dense | Experts]:
    """The MLP of each layer: experts in every `decoder_sparse_step`-th that is not in `mlp_only_layers`.

    There are `default` experts if config.json does not say how many.
    """
    dense = Dense(c.intermediate_size, activation(c))
    num = num_experts(c, default)
    experts = read_experts(c, num) if num else dense
    step, without = c.decoder_sparse_step or 1, frozenset(c.mlp_only_layers or ())
    layers = range(c.num_hidden_layers)
    return [dense if i in without or (i + 1) % step else experts for i in layers]


def num_experts(c: HFConfig, default: int) -> int:
    """The number of experts, which transformers 4 and 5 write under other keys."""
    given = {each for each in (c.num_experts, c.num_local_experts) if each is not None}
    require(len(given) < 2, "num_experts", "equal to num_local_experts", tuple(given))
    return given.pop() if given else default


def read_experts(c: HFConfig, num: int) -> Experts:
    """The experts of those layers, and the expert that all tokens share if it has columns."""
    shared = c.shared_expert_intermediate_size or 0
    return Experts(
        num,
        c.num_experts_per_tok,
        c.moe_intermediate_size or c.intermediate_size,
        activation(c),
        renormalise=bool(c.norm_topk_prob),
        shared=Dense(shared, activation(c), module="mlp.shared_expert") if shared else None,
        shared_gate=shared > 0,
    )


def write_experts(arch: Architecture) -> Json:
    """The keys of config.json that `read_mlps` reads."""
    mlps = [kind.mlp for kind in arch.layers]
    dense = [mlp for mlp in mlps if isinstance(mlp, Dense)]
    experts = next((mlp for mlp in mlps if isinstance(mlp, Experts)), None)
    written: Json = {
        "hidden_act": mlps[0].activation,
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
