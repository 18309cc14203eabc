"""The plan counts the routes of a step's batches, in the memory of the host."""

import json

import jax
import jax.numpy as jnp
import pytest
from test_placement import SMALL, final

from quatrain.engine.engine import RolloutEngine
from quatrain.models.families import architecture_from_hf
from quatrain.models.lora import adapters_of, with_adapters, with_lora
from quatrain.models.params import init_params, num_params
from quatrain.plan.device_memory import render
from quatrain.plan.placement import placement

__all__ = ["final"]  # the fixture

MOE = {
    **SMALL,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "mlp_only_layers": [0],
}
SIZES = ("data.batch_size=6", "rollout.n=5", "data.max_prompt_length=100", "rollout.max_new_tokens=28")


def _routes(config) -> int | None:
    return placement(config).to_dict()["bytes_on_host"].get("routes")


def test_the_bits_of_kept_words_are_counted(final):
    """A bit for each token and word, and the longest list: only where a filter's words are recorded."""
    sizes = (*SIZES, "update.max_tokens_per_device=1000", "rollout.top_p=0.9")

    def counted(*settings):
        return placement(final(SMALL, *sizes, *settings)).to_dict()["bytes_per_device"].get("sampling_mask")

    words = -(-SMALL["vocab_size"] // 32)
    assert counted() == 4 * 1000 * (words + 512)
    assert counted("rollout.top_k=10") == 4 * 1000 * (words + 16)
    assert counted("rollout.replay_mask=false") is None
    assert counted("rollout.top_p=1.0") is None


def test_routes_of_a_step_are_counted(final):
    config = final(MOE, *SIZES)
    assert _routes(config) == 6 * 5 * 128 * 3 * 2
    text = render(placement(config))
    assert "estimate, error -10 % to +10 % on a CPU" in " ".join(text.split())
    assert "bytes on the host of each process\nroutes  22.50 KiB" in text
    assert "30 sequences x 128 tokens x 6 B" in " ".join(text.split())


def test_more_than_256_experts_take_two_bytes_and_batches_ahead_count_each(final):
    assert _routes(final({**MOE, "num_experts": 300}, *SIZES)) == 6 * 5 * 128 * 3 * 2 * 2
    assert _routes(final(MOE, *SIZES, "rollout.max_staleness=2")) == 3 * 6 * 5 * 128 * 3 * 2


def test_nothing_is_counted_that_is_not_recorded(final):
    assert _routes(final(MOE, *SIZES, "rollout.record_routes=false")) is None
    dense = placement(final(SMALL, *SIZES))
    assert dense.host == ()
    assert "bytes on the host" not in render(dense)


def _rollout_weights(config) -> int:
    return {part.key: part.num_bytes for part in placement(config).parts}["rollout_weights"]


def _num_bytes(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_routers_are_not_copied_for_the_sampler(final):
    config = final(MOE, "model.dtype=bfloat16", "lora.rank=0")
    params = init_params(architecture_from_hf(MOE), jax.random.key(0))
    copies = {
        jax.tree_util.keystr(path): x.astype(jnp.bfloat16)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if x.ndim > 1 and path[-1].key != "router"
    }
    assert _rollout_weights(config) == _num_bytes(copies)


@pytest.mark.parametrize("lag", [0, 1])
def test_beside_adapters_routers_are_frozen(final, lag):
    """They are float32, as adapters are, but no batch ahead needs a copy of them."""
    settings = ("lora.rank=4", "sft.steps=0", "lora.targets=[qkv]", "rollout.lora=adapter")
    config = final(MOE, *settings, f"rollout.max_staleness={lag}")
    arch = with_lora(architecture_from_hf(MOE), config.lora)
    params = with_adapters(init_params(architecture_from_hf(MOE), jax.random.key(0)), arch, jax.random.key(0))
    engine = RolloutEngine(arch, config.rollout, None, stop_ids=(0,), seed=0, dtype="float32")
    placed = engine.copy_weights(params)
    assert placed["layers"][1]["router"].unsafe_buffer_pointer() == (
        params["layers"][1]["router"].unsafe_buffer_pointer()
    )
    assert _rollout_weights(config) == lag * 2 * _num_bytes(adapters_of(placed))


def test_dense_models_beside_a_policy_with_experts_share_its_mesh(final, tmp_path):
    """To them `ep` is what `fsdp` is."""
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(SMALL))
    critic = ("advantage.estimator=gae", f"critic.path={dense}")
    sizes = []
    for mesh in ("mesh={ep: 2}", "mesh={fsdp: 2}"):
        parts = placement(final(MOE, mesh, *critic), devices=2).parts
        sizes.append({part.key: part.num_bytes for part in parts})
    for key in ("critic_weights", "critic_optimizer_state", "critic_gradients"):
        assert sizes[0][key] == sizes[1][key] > 0
    with pytest.raises(ValueError, match="ep must be 1 in a model without experts"):
        placement(final(SMALL, "mesh={ep: 2}"), devices=2)


def test_the_plan_says_what_a_decode_step_reads(final):
    """3 layers with 8 experts of 3 x 64 x 64 parameters, of which a token chooses 2; 2 sequences."""
    whole = num_params(architecture_from_hf(MOE))
    experts = 3 * 8 * 3 * 64 * 64
    read = whole - experts * (1 - 2 / 8) ** 2
    sizes = (*SIZES[2:], "data.batch_size=2", "rollout.n=1", "rollout.max_concurrency=2")

    def why(config):
        return {part.key: part.why for part in placement(config).parts}["rollout_weights"]

    assert (
        f"; a decode step of 2 sequences reads about {4 * read / 2**20:.2f} MiB of a device's "
        f"{4 * whole / 2**20:.2f} MiB"
    ) in why(final(MOE, *sizes))
    assert "decode step" not in why(final(SMALL, *sizes))
