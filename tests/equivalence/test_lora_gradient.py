"""Adapters: their gradient is that of the merged matrices, however a batch is cut and on whatever mesh."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import ADAPTED
from goldens import SCORE_CASES, read_golden

from quatrain.config.schema import UpdateConfig
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import CriticSpec, PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.architecture import LoRA
from quatrain.models.families import architecture_from_hf
from quatrain.models.lora import (
    adapters_of,
    changed,
    merged,
    merged_architecture,
    trained_part,
    with_adapters,
    with_trained,
    without_adapters,
)
from quatrain.models.params import init_params, output_head_name
from quatrain.models.spec import LORA_A, LORA_B
from quatrain.parallel.mesh import one_device
from quatrain.update import residuals
from quatrain.update.coupled import LINEAR
from quatrain.update.gradient import sum_gradients, weighted_loss
from quatrain.update.objective import PolicyObjective
from quatrain.update.residuals import ResidualMemory

LORA = LoRA(rank=3, alpha=4.5, targets=ADAPTED)
OBJECTIVE = PolicyObjective.of(UpdateConfig(entropy_coef=0.2), on_policy=True)
ALL_ROWS = MicroBatchPlanner(rows=1000)
LONGEST = 9


def _arch(case: str, targets: tuple[str, ...] = ADAPTED):
    arch = architecture_from_hf(read_golden(case).config)
    return replace(arch, vocab_size=300, lora=replace(LORA, targets=targets))


def _params(arch):
    """A base and adapters, of which neither A nor B is zero."""
    base = init_params(replace(arch, lora=None), jax.random.key(3))
    params = with_adapters(base, arch, jax.random.key(3))
    leaves, structure = jax.tree.flatten(adapters_of(params))
    keys = jax.random.split(jax.random.key(4), len(leaves))
    drawn = [x + 0.1 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves)]
    return with_trained(params, jax.tree.unflatten(structure, drawn), arch)


def _table(make_batch) -> TokenTable:
    batch = make_batch(20)
    r = batch.rollouts
    columns = {"advantages": batch.advantages, "rollout_logprobs": r.rollout_logprobs}
    table = TokenTable(r.input_ids, r.attention_mask, r.completion_mask, columns, r.group_ids)
    return table.weighted("token_mean", LONGEST)


def _model(arch, remat="layer"):
    return PolicySpec(arch, temperature=0.9, remat=remat)


def _gradient(arch, params, table, planner, remat="layer"):
    model = _model(arch, remat)
    batches = (batch for _, batch in micro_batches(table, planner, one_device(), model.forms))
    return sum_gradients(params, batches, model=model, objective=OBJECTIVE)


def _of_merged(arch, params, table):
    """The gradient of A and B by autodiff through the merged matrices of a model without adapters."""
    plain = _model(merged_architecture(arch))
    ((_, batch),) = micro_batches(table, ALL_ROWS, one_device())

    def loss(adapters):
        base = without_adapters(params)
        layers = []
        for kind, layer, own in zip(arch.layers, base["layers"], adapters["layers"], strict=True):
            change = {}
            for name in [name for name in arch.lora.targets if name + LORA_A in own]:
                both = own[name + LORA_A], own[name + LORA_B]
                how = {"stacked": kind.stacked(name), "experts": name.startswith("experts_")}
                change[name] = changed(layer[name], *both, arch.lora.scale, **how)
            layers.append({**layer, **change})
        head = {}
        if "lm_head" in arch.lora.targets:
            both = adapters["lm_head" + LORA_A], adapters["lm_head" + LORA_B]
            head["lm_head"] = changed(base[output_head_name(arch)], *both, arch.lora.scale)
        predictions = plain.predict({**base, **head, "layers": layers}, batch)
        return weighted_loss(predictions, batch, plain, OBJECTIVE)[0]

    return jax.jit(jax.grad(loss))(adapters_of(params))


def _assert_same(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
        np.testing.assert_allclose(np.asarray(a)[0], b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))
        assert np.abs(b).max() > 1e-6


PADDED, PACKED = MicroBatchPlanner(rows=5), MicroBatchPlanner(max_tokens=32, num_shards=3, share_prompts=True)


@pytest.mark.parametrize(
    ("case", "cuttings"),
    [
        pytest.param("qwen2", (PACKED,), marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", (PACKED,), marks=pytest.mark.slow),
        pytest.param("qwen3_next", (PADDED, PACKED), marks=pytest.mark.slow),
        *(pytest.param(case, (PADDED, PACKED), marks=pytest.mark.slow) for case in SCORE_CASES),
    ],
)
def test_the_gradient_of_adapters_is_that_of_merged_matrices(case, cuttings, make_batch):
    arch = _arch(case)
    params, table = _params(arch), _table(make_batch)
    expected = _of_merged(arch, params, table)
    for planner in cuttings:
        grads, *_ = _gradient(arch, params, table, planner)
        _assert_same(grads, expected)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "dots", "layer"])
@pytest.mark.parametrize("targets", [("qkv",), ("o", "down"), ("gate_up",), ADAPTED])
@pytest.mark.parametrize("case", [*SCORE_CASES, "llama_biases"])
def test_the_gradient_of_some_adapters(case, targets, remat, make_batch):
    arch = _arch(case, targets)
    params, table = _params(arch), _table(make_batch)
    expected = _of_merged(arch, params, table)
    for planner in (
        MicroBatchPlanner(rows=1),
        MicroBatchPlanner(max_tokens=15),
        MicroBatchPlanner(max_tokens=500, share_prompts=True),
    ):
        _assert_same(_gradient(arch, params, table, planner, remat)[0], expected)


HEAD = ("o", "lm_head")


@pytest.mark.parametrize(
    ("case", "tied", "planner"),
    [
        ("llama", True, PADDED),
        *(
            pytest.param(case, tied, planner, marks=pytest.mark.slow)
            for case in ("llama", "gemma2", "granite")
            for tied in (False, True)
            for planner in (PADDED, PACKED)
            if (case, tied, planner) != ("llama", True, PADDED)
        ),
    ],
)
def test_the_gradient_of_adapters_of_the_output_head(case, tied, planner, make_batch):
    """Tied or not, with a soft cap of the logits (Gemma 2) or a scale of them (Granite)."""
    arch = replace(_arch(case, HEAD), tie_embeddings=tied)
    params, table = _params(arch), _table(make_batch)
    _assert_same(_gradient(arch, params, table, planner)[0], _of_merged(arch, params, table))


EXPERTS = ("experts_gate_up", "experts_down")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "targets", "remat", "cuttings"),
    [
        ("qwen2_moe", (*ADAPTED, *EXPERTS), "dots", (PACKED,)),
        *(
            (case, targets, remat, (MicroBatchPlanner(rows=2), PACKED))
            for case, targets, remat in (
                ("qwen3_moe", EXPERTS, "dots"),
                ("qwen3_moe", ("qkv", "experts_down"), "none"),
                ("qwen2_moe", (*ADAPTED, *EXPERTS), "layer"),
                ("gpt_oss", ("o", *EXPERTS), "dots"),
                ("mixtral", ("experts_gate_up",), "layer"),
            )
        ),
    ],
)
def test_the_gradient_of_adapters_of_experts(case, targets, remat, cuttings, make_batch):
    """Every expert has adapters of its own, also where gate and up stand in turns.

    A Qwen2-MoE has all matrices that may have adapters: its shared expert is an MLP.
    """
    arch = _arch(case, targets)
    params, table = _params(arch), _table(make_batch)
    expected = _of_merged(arch, params, table)
    for planner in cuttings:
        for got, wanted in zip(
            jax.tree.leaves(_gradient(arch, params, table, planner, remat)[0]),
            jax.tree.leaves(expected),
            strict=True,
        ):
            largest = float(jnp.abs(wanted).max())
            np.testing.assert_allclose(np.asarray(got)[0], wanted, rtol=1e-5, atol=1e-5 * largest)
            assert largest > 1e-6


@pytest.mark.parametrize("planner", [PADDED, pytest.param(PACKED, marks=pytest.mark.slow)])
def test_a_score_head_beside_adapters_has_the_gradient_of_the_merged_model(planner, make_batch):
    """As where the head was frozen with the base: then a reward model with adapters learns nothing."""
    arch = replace(_arch("llama"), head="value_head")
    base = init_params(replace(arch, lora=None), jax.random.key(3))
    row = jax.random.normal(jax.random.key(6), base["score"].shape)
    params = with_adapters(base | {"score": row}, arch, jax.random.key(3))
    params = with_trained(params, jax.tree.map(lambda x: x + 0.02, trained_part(params, arch)), arch)
    table = replace(_table(make_batch), columns={"weights": _table(make_batch).columns["weights"]})

    def gradient(arch, params):
        model = CriticSpec(arch)
        batches = (batch for _, batch in micro_batches(table, planner, one_device(), model.forms))
        return sum_gradients(params, batches, model=model, objective=LINEAR)[0]

    found = gradient(arch, params)
    expected = gradient(replace(arch, lora=None), merged(params, arch))["score"]
    assert found.keys() == {"layers", "score"}
    assert float(jnp.abs(expected).max()) > 0.1
    np.testing.assert_allclose(found["score"], expected, rtol=1e-4, atol=1e-5)
    assert float(jnp.abs(found["layers"][0]["qkv_lora_b"]).max()) > 1e-6


def test_only_adapters_have_a_gradient_and_nothing_of_the_base_is_held(make_batch, monkeypatch):
    """Memory that is held from one micro-batch to the next, as on a CPU, has neither weights nor a head."""
    monkeypatch.setattr(residuals, "LEAST_BYTES", 0)
    arch = _arch("llama", ("qkv", "down"))
    params, memory = _params(arch), ResidualMemory()
    batches = (batch for _, batch in micro_batches(_table(make_batch), ALL_ROWS, one_device()))
    grads, *_ = sum_gradients(params, batches, model=_model(arch), objective=OBJECTIVE, residuals=memory)
    (held,) = memory._held.values()
    weights = {x.shape for x in jax.tree.leaves(params) if x.ndim > 1}
    assert held
    assert not weights & {x.shape[1:] for x in held}
    assert set(grads) == {"layers"}
    names = {"qkv_lora_a", "qkv_lora_b", "down_lora_a", "down_lora_b"}
    assert [set(layer) for layer in grads["layers"]] == [names, names]


def test_new_adapters_change_nothing(make_batch):
    arch = _arch("qwen3")
    base = init_params(replace(arch, lora=None), jax.random.key(3))
    params = with_adapters(base, arch, jax.random.key(3))
    table = replace(_table(make_batch), columns={})
    plain = _model(replace(arch, lora=None))
    before = predict_tokens(base, table, model=plain, planner=ALL_ROWS)
    after = predict_tokens(params, table, model=_model(arch), planner=ALL_ROWS)
    np.testing.assert_array_equal(after, before)
    off = predict_tokens(without_adapters(_params(arch)), table, model=plain, planner=ALL_ROWS)
    np.testing.assert_array_equal(off, before)
