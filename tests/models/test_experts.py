"""The block of experts: its products, the routes that are given and returned, and the sums of routers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import of_golden

from quatrain.backend import CPU
from quatrain.config.mesh import MeshShape
from quatrain.models.architecture import LoRA, Routes
from quatrain.models.blocks.experts import Experts
from quatrain.models.decoder import REMAT, forward, logits
from quatrain.models.expert_products import (
    add_expert_bias,
    expert_product,
    from_experts,
    group_pairs,
    rows_of_block,
    to_experts,
)
from quatrain.models.lora import check_lora
from quatrain.models.params import init_params, param_specs, partition

E, K, D, O = 5, 2, 6, 7


def _pairs(tokens, *, seed=0, foreign=()):
    """Experts [N, k] of tokens, of which some experts are another device's (-1) and one has none."""
    rng = np.random.default_rng(seed)
    chosen = np.array([rng.permutation([0, 1, 2, 4])[:K] for _ in range(tokens)])
    return np.where(np.isin(chosen, foreign), -1, chosen).astype(np.int32)


def _inputs(tokens):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(tokens, D))
    arrays = x, rng.normal(size=(E, O, D)), rng.normal(size=(E, O))
    return tuple(jnp.asarray(each, jnp.float32) for each in arrays)


def _by_groups(how, chosen):
    def run(x, w, bias):
        groups = group_pairs(jnp.asarray(chosen.reshape(-1)), E)
        y = add_expert_bias(expert_product(to_experts(x, groups), w, groups, how), bias, groups)
        return from_experts(y, groups, len(x))

    return run


def _one_by_one(chosen):
    def run(x, w, bias):
        pairs = jnp.repeat(x, K, axis=0)
        one_hot = jax.nn.one_hot(chosen.reshape(-1), E)  # -1 is none
        y = jnp.einsum("pe,eod,pd->po", one_hot, w, pairs, precision="highest") + one_hot @ bias
        return y.reshape(len(x), K, O).sum(axis=1)

    return run


@partial(jax.jit, static_argnums=0)
def _results(run, *inputs, dy):
    """What `run` returns, and the gradients of its inputs."""
    y, pull = jax.vjp(run, *inputs)
    return y, *pull(dy.astype(y.dtype))


@pytest.mark.parametrize("how", ["blocks", "ragged"])
@pytest.mark.parametrize(("tokens", "foreign"), [(1, ()), (331, ()), (331, (0, 4)), (9, (0, 1, 2, 4))])
def test_products_and_their_gradients_are_those_of_one_pair_after_another(how, tokens, foreign):
    chosen, inputs = _pairs(tokens, foreign=foreign), _inputs(tokens)
    dy = np.random.default_rng(2).normal(size=(tokens, O)).astype(np.float32)
    results = [_results(run, *inputs, dy=dy) for run in (_by_groups(how, chosen), _one_by_one(chosen))]
    for got, expected in zip(*results, strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-6 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("how", ["blocks", "ragged"])
def test_rows_in_bfloat16_have_results_and_gradients_in_bfloat16(how):
    """Of float32 matrices, which are cast; their gradients are float32."""
    chosen, (x, w, bias) = _pairs(60), _inputs(60)
    dy = np.random.default_rng(2).normal(size=(60, O)).astype(np.float32)
    run = _by_groups(how, chosen)
    got, expected = (_results(run, each, w, bias, dy=dy) for each in (x.astype(jnp.bfloat16), x))
    assert [each.dtype for each in got] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32]
    for a, b in zip(got, expected, strict=True):
        assert float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)) < 1e-2


def test_a_tokens_bits_do_not_depend_on_other_tokens_places():
    chosen, (x, w, bias) = _pairs(200), _inputs(200)
    order = np.random.default_rng(3).permutation(200)
    whole = jax.jit(_by_groups("blocks", chosen))(x, w, bias)
    moved = jax.jit(_by_groups("blocks", chosen[order]))(x[order], w, bias)
    np.testing.assert_array_equal(whole[order], moved)


def test_blocks_have_the_rows_of_an_expert():
    assert [rows_of_block(pairs, 32) for pairs in (32, 8 * 32, 17 * 32, 100 * 32, 10**6)] == [
        8,
        8,
        16,
        64,
        64,
    ]


def test_the_dtype_of_routes_has_a_number_for_live():
    """256 experts fit in a byte where no token has only expert 255: it is `live` in all entries."""
    kinds = {(e, k): Routes(1, k, e).dtype for e, k in ((255, 1), (256, 1), (256, 2), (257, 2))}
    expected = {(255, 1): np.uint8, (256, 1): np.uint16, (256, 2): np.uint8, (257, 2): np.uint16}
    assert kinds == expected
    assert (Routes(1, 2, 8).live, Routes(1, 2, 300).live) == (255, 65535)


@pytest.fixture(scope="module")
def model():
    """Qwen3-MoE of 3 layers, of which 0 and 2 have 8 experts, 3 of them for a token."""
    arch = of_golden("qwen3_moe")
    ids = np.random.default_rng(0).integers(1, 72, (2, 12)).astype(np.int32)
    positions = np.broadcast_to(np.arange(12, dtype=np.int32), ids.shape)
    segments = np.ones_like(ids)
    segments[1, 9:] = 0
    return arch, init_params(arch, jax.random.key(0)), (ids, positions * segments, segments)


def _run(model, routes=None, counted=None, **settings):
    arch, params, inputs = model
    return _compiled(params, arch, *inputs, routes=routes, counted=counted, **{"backend": CPU} | settings)


_compiled = jax.jit(forward, static_argnames=("arch", "backend"))


def test_routes_that_are_given_back_change_nothing_and_others_do(model):
    arch, *_ = model
    live = _run(model)
    assert live.routes.shape == (2, 12, 2, 3)
    assert live.routes.dtype == np.uint8
    again = _run(model, live.routes)
    np.testing.assert_array_equal(again.hidden, live.hidden)
    np.testing.assert_array_equal(again.routes, live.routes)
    shifted = np.roll(np.asarray(live.routes), 1, axis=1)
    other = _run(model, shifted)
    np.testing.assert_array_equal(other.routes, shifted)
    assert np.abs(other.hidden - live.hidden).max() > 0.01
    chosen = np.where(np.arange(12)[None, :, None, None] < 6, live.routes, arch.routes.live)
    np.testing.assert_array_equal(_run(model, chosen.astype(np.uint8)).hidden, live.hidden)


@pytest.mark.parametrize("others", [(), pytest.param(tuple(REMAT), marks=pytest.mark.slow)])
def test_the_router_of_given_routes_has_its_gradient(model, others):
    """With `remat` too, which `equivalence/test_routing_replay.py` has for whole micro-batches."""
    arch, params, inputs = model
    routes = np.roll(np.asarray(_run(model).routes), 1, axis=1)

    def loss(params, remat):
        hidden = forward(params, arch, *inputs, routes=routes, remat=remat, backend=CPU).hidden
        return jnp.sum(jnp.square(logits(params, arch, hidden)))

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    none, *others = (gradient(params, remat) for remat in ("none", *others))
    assert all(np.abs(none["layers"][i]["router"]).max() > 1e-3 for i in (0, 2))
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), none, other)


@pytest.mark.slow
def test_sums_count_each_token_as_often_as_asked(model):
    """The sums of two parts are those of the whole; a token that counts twice is two."""
    *_, segments = model[2]
    live = _run(model).routes
    whole = _run(model, counted=segments).sums
    assert whole.tokens.shape == (2, 8)
    np.testing.assert_array_equal(whole.tokens.sum(axis=1), [21 * 3] * 2)
    np.testing.assert_allclose(whole.probabilities.sum(axis=1), [21, 21], rtol=1e-6)
    assert np.all(whole.entropy < 21 * np.log(8))
    np.testing.assert_array_equal(whole.changed, 0)
    counts = np.bincount(np.asarray(live)[segments > 0][:, 1].reshape(-1), minlength=8)
    np.testing.assert_array_equal(whole.tokens[1], counts)
    doubled = _run(model, counted=2 * segments).sums
    jax.tree.map(lambda a, b: np.testing.assert_allclose(2 * a, b, rtol=1e-6), whole, doubled)
    shifted = np.roll(np.asarray(live), 1, axis=1)
    changed = _run(model, shifted, segments).sums.changed
    sets = np.sort(shifted, axis=-1) != np.sort(np.asarray(_run(model, shifted).routes), axis=-1)
    assert not sets.any()
    assert np.all(changed > 5)


def test_routers_stay_float32_in_a_model_of_another_dtype(model):
    arch, *_ = model
    half = init_params(arch, jax.random.key(0), jnp.bfloat16)
    assert half["layers"][0]["router"].dtype == np.float32
    assert half["layers"][0]["experts_down"].dtype == jnp.bfloat16


def test_wrong_numbers_of_experts_are_errors():
    mlp = of_golden("qwen3_moe").layers[0].mlp
    with pytest.raises(ValueError, match="num_experts_per_tok must be from 1 to num_experts = 8; got 9"):
        replace(mlp, top_k=9)
    assert [mlp.splits(tp) for tp in (1, 2, 3, 4, 8)] == [True, True, False, True, True]


@pytest.mark.parametrize("name", ["router", "shared_gate"])
def test_routers_have_no_adapters(name):
    arch = of_golden("qwen2_moe")
    choices = "choose from qkv, o, gate_up, down, experts_gate_up, experts_down"
    with pytest.raises(ValueError, match=f"a qwen2_moe model has no {name}; {choices}"):
        check_lora(arch, LoRA(2, 2.0, ("qkv", name)))
    check_lora(arch, LoRA(2, 2.0, ("qkv", "gate_up", "down")))  # of shared experts and dense layers


def test_each_expert_has_adapters_of_its_own():
    arch = replace(of_golden("gpt_oss"), lora=LoRA(2, 2.0, ("experts_gate_up", "experts_down")))
    mlp, d = arch.layers[0].mlp, arch.hidden_size
    layer = param_specs(arch)["layers"][0]
    shapes = {name: spec.shape for name, spec in layer.items() if "_lora_" in name}
    E, F = mlp.num, mlp.width
    assert shapes == {
        "experts_gate_up_lora_a": (E, 2, d),
        "experts_gate_up_lora_b": (E, 2, F, 2),
        "experts_down_lora_a": (E, 2, F),
        "experts_down_lora_b": (E, d, 2),
    }
    split = partition(arch, MeshShape(1, 1, 2))["layers"][0]
    assert [split[name][0] for name in shapes] == ["tp"] * 4
    with pytest.raises(ValueError, match=r"lower lora\.rank, or leave experts_gate_up out of lora\.targets"):
        check_lora(arch, LoRA(min(F, d) + 100, 2.0, ("experts_gate_up",)))


def test_tp_that_does_not_divide_the_experts_is_an_error():
    arch = of_golden("gpt_oss")
    with pytest.raises(ValueError, match="divides the 6 experts; got tp 4; choose one of 1, 2"):
        partition(arch, MeshShape(1, 1, 4))
    split = partition(arch, MeshShape(1, 1, 2))["layers"][0]
    assert [split[name][0] for name in ("experts_gate_up", "experts_down_bias", "sinks")] == ["tp"] * 3


def test_costs_are_of_the_chosen_experts():
    experts = Experts(num=32, top_k=4, width=10)
    costs = experts.costs(100, MeshShape(1, 1, 1))
    assert (costs.weights, costs.kept, costs.inputs) == (32 * 100 + 4 * 3 * 100 * 10, 4 * 2 * 10, 4 * 110)
    assert experts.costs(100, MeshShape(1, 1, 1, 1, 2)).kept == 2 * costs.kept  # rows of two devices
    assert experts.costs(100, MeshShape(1, 1, 2)).weights == 32 * 100 + 2 * 3 * 100 * 10
