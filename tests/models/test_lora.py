"""Adapters as parameters: shapes, first values, shardings, and models that cannot have them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import ADAPTED, of_golden
from towers import rows_of, seeing

from quatrain.config.mesh import MeshShape
from quatrain.config.schema import LoraConfig
from quatrain.config.sections.model_on_devices import VISION_TARGETS
from quatrain.models.architecture import LoRA
from quatrain.models.decoder import logits
from quatrain.models.lora import (
    adapter_names,
    adapters_of,
    changed,
    check_lora,
    copies_if_aliased,
    frozen_part,
    has_adapters,
    merged,
    merged_architecture,
    trained_part,
    with_adapters,
    with_lora,
    with_trained,
    without_adapters,
)
from quatrain.models.params import init_params, num_params, param_specs, partition
from quatrain.models.tower import features


@pytest.fixture
def adapted(small_arch, small_params):
    arch = replace(small_arch, lora=LoRA(4, 8.0, ADAPTED))
    return arch, with_adapters(small_params, arch, jax.random.key(1))


def test_shapes_and_first_values(adapted, small_arch):
    arch, params = adapted
    layer = adapters_of(params)["layers"][0]
    assert {name: leaf.shape for name, leaf in layer.items()} == {
        "qkv_lora_a": (3, 4, 32),
        "qkv_lora_b": (2, 4, 8, 4),
        "o_lora_a": (4, 32),
        "o_lora_b": (32, 4),
        "gate_up_lora_a": (2, 4, 32),
        "gate_up_lora_b": (2, 48, 4),
        "down_lora_a": (4, 48),
        "down_lora_b": (32, 4),
    }
    for name, leaf in layer.items():
        largest = float(jnp.abs(leaf).max())
        bound = leaf.shape[-1] ** -0.5
        assert leaf.dtype == jnp.float32
        assert largest == 0 if name.endswith("_b") else 0.9 * bound < largest <= bound, name
    q, k, v = layer["qkv_lora_a"]
    assert not np.allclose(q, k)
    assert not np.allclose(k, v)
    # r times the sum of inputs and outputs of the seven matrices
    sides = (32 + 32) + 2 * (32 + 16) + (32 + 32) + 3 * (32 + 48)
    assert num_params(arch) - num_params(small_arch) == 2 * 4 * sides


def test_the_rank_is_never_sharded_and_the_rest_as_its_matrix(small_arch):
    arch = replace(small_arch, lora=LoRA(4, 8.0, ADAPTED))
    layer = partition(arch, MeshShape(1, 2, 2))["layers"][0]
    assert tuple(layer["qkv_lora_a"]) == (None, None, "fsdp")
    assert layer["qkv_lora_b"][0] == "tp"
    assert tuple(layer["o_lora_a"]) == (None, "tp")
    assert tuple(layer["o_lora_b"]) == ("fsdp", None)
    assert tuple(layer["gate_up_lora_b"]) == ("fsdp", "tp", None)
    assert tuple(layer["down_lora_a"]) == (None, "tp")


@pytest.fixture
def with_head(small_arch, small_params):
    """Adapters on one matrix of the layers and on the output head, which is the embeddings; B is not 0."""
    arch = replace(small_arch, lora=LoRA(4, 8.0, ("o", "lm_head")))
    params = with_adapters(small_params, arch, jax.random.key(1))
    return arch, with_trained(params, jax.tree.map(lambda x: x + 0.05, adapters_of(params)), arch)


def test_adapters_of_the_output_head_are_a_part_of_what_is_trained(with_head, small_arch, small_params):
    arch, params = with_head
    new = with_adapters(small_params, arch, jax.random.key(1))
    words, trained = small_arch.vocab_size, trained_part(new, arch)
    assert trained.keys() == {"layers", "lm_head_lora_a", "lm_head_lora_b"}
    a, b = new["lm_head_lora_a"], new["lm_head_lora_b"]
    assert (a.shape, b.shape) == ((4, 32), (words, 4))
    assert not b.any()
    assert 0.9 * 32**-0.5 < float(jnp.abs(a).max()) <= 32**-0.5
    of_layers = replace(arch, lora=LoRA(4, 8.0, ("o",)))
    assert num_params(arch) - num_params(of_layers) == 4 * (32 + words)
    drawn = adapters_of(with_adapters(small_params, of_layers, jax.random.key(1)))["layers"]
    jax.tree.map(np.testing.assert_array_equal, trained["layers"], drawn)
    places = partition(arch, MeshShape(1, 2, 2))
    assert tuple(places["lm_head_lora_a"]) == (None, "fsdp")
    assert tuple(places["lm_head_lora_b"]) == (places["embed"][0], None) == ("tp", None)
    assert jax.tree.structure(trained_part(places, arch)) == jax.tree.structure(trained)
    base = without_adapters(params)
    assert all(x is y for x, y in zip(jax.tree.leaves(base), jax.tree.leaves(small_params), strict=True))
    assert has_adapters(small_params | {"lm_head_lora_a": a})
    copies = copies_if_aliased(params, params, arch)
    assert copies["lm_head_lora_b"] is not params["lm_head_lora_b"]
    assert copies["embed"] is params["embed"]
    assert [name.name for name in adapter_names(arch)][:2] == [
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.lm_head.lora_B.weight",
    ]


def test_logits_of_an_adapted_head_are_those_of_the_merged_model_whose_embeddings_stay(with_head):
    """W h + (alpha / r) B A h, where the head was the embeddings: merged into these, inputs would change."""
    arch, params = with_head
    hidden = jax.random.normal(jax.random.key(2), (3, arch.hidden_size))
    whole = params["embed"] + 2 * params["lm_head_lora_b"] @ params["lm_head_lora_a"]
    np.testing.assert_allclose(logits(params, arch, hidden), hidden @ whole.T, rtol=1e-4, atol=1e-5)
    plain, into = merged_architecture(arch), merged(params, arch)
    assert not plain.tie_embeddings
    assert plain.lora is None
    assert not has_adapters(into)
    assert jax.tree.structure(into) == jax.tree.structure(partition(plain, MeshShape()))
    np.testing.assert_allclose(into["lm_head"], whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(into["embed"], params["embed"])
    assert merged_architecture(replace(arch, lora=LoRA(4, 8.0, ("o",)))).tie_embeddings
    apart = replace(arch, tie_embeddings=False)
    other = merged(params | {"lm_head": 3 * params["embed"]}, apart)
    np.testing.assert_allclose(other["lm_head"], whole + 2 * params["embed"], rtol=1e-5, atol=1e-5)


def test_base_and_adapters_are_parts_of_one_tree(adapted, small_params):
    arch, params = adapted
    base = without_adapters(params)
    assert all(x is y for x, y in zip(jax.tree.leaves(base), jax.tree.leaves(small_params), strict=True))
    again = with_trained(params, adapters_of(params), arch)
    assert all(x is y for x, y in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True))
    assert has_adapters(params)
    assert not has_adapters(base)
    assert merged(base, arch) is base


def test_a_score_head_is_trained_beside_the_adapters(adapted, small_params):
    """Its numbers are kept, in float32 whatever its base has; it is no part of what is frozen."""
    arch = replace(adapted[0], head="value_head")
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), small_params)
    row = jnp.linspace(-1, 1, arch.hidden_size, dtype=jnp.bfloat16)[None]
    params = with_adapters(base | {"score": row}, arch, jax.random.key(1))
    trained = trained_part(params, arch)
    assert trained.keys() == {"layers", "score"}
    assert {leaf.dtype for leaf in jax.tree.leaves(trained)} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(trained["score"], row.astype(jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, trained["layers"], adapters_of(adapted[1])["layers"])
    assert jax.tree.structure(trained) == jax.tree.structure(
        trained_part(partition(arch, MeshShape(1, 2, 2)), arch)
    )
    moved = with_trained(params, jax.tree.map(lambda x: x + 1, trained), arch)
    np.testing.assert_array_equal(moved["score"], params["score"] + 1)
    frozen = frozen_part(moved, arch)
    assert "score" not in frozen
    assert all(x is y for x, y in zip(jax.tree.leaves(frozen), jax.tree.leaves(base), strict=True))
    into = merged(moved, arch)
    assert into["score"].dtype == jnp.bfloat16  # a model of one dtype, as its config.json says
    np.testing.assert_array_equal(into["score"], moved["score"].astype(jnp.bfloat16))
    assert not has_adapters(into)


TOWER = {
    "patch": "p",
    "blocks": [{"qkv": "q0"}, {"qkv": "q1"}],
    "merger": {"norm": "n"},
    "deepstack": [{"norm": "d"}],
}
BEHIND = {"merger": {"norm": "n"}, "deepstack": [{"norm": "d"}]}


@pytest.mark.parametrize(
    ("trained", "moves", "stays"),
    [
        ("all", TOWER, None),
        ("projector", BEHIND, {"patch": "p", "blocks": TOWER["blocks"]}),
        ("frozen", None, TOWER),
    ],
)
def test_of_a_tower_is_trained_what_the_model_says(trained, moves, stays):
    """Trained and frozen part have every leaf once, and the text model is trained beside any tower."""
    arch, tree = seeing("qwen3_vl", trained), {"embed": "e", "layers": [{"o": "o"}], "vision": TOWER}
    part, frozen = trained_part(tree, arch), frozen_part(tree, arch)
    assert part == {"embed": "e", "layers": [{"o": "o"}]} | ({"vision": moves} if moves else {})
    assert frozen == {"layers": [{}]} | ({"vision": stays} if stays else {})
    assert arch.partly_frozen == (stays is not None)
    moved = with_trained(tree, jax.tree.map(str.upper, part), arch)
    assert trained_part(moved, arch) == jax.tree.map(str.upper, part)
    assert frozen_part(moved, arch) == frozen


def test_beside_adapters_the_whole_tower_is_frozen_but_for_adapters_of_its_own():
    arch = replace(seeing("qwen3_vl"), lora=LoRA(4, 8.0, ("o",)))
    tree = {"embed": "e", "layers": [{"o": "o", "o_lora_a": "a"}], "vision": TOWER}
    assert trained_part(tree, arch) == {"layers": [{"o_lora_a": "a"}]}
    own = [{"qkv": "q0", "qkv_lora_a": "v"}, {"qkv": "q1"}]
    tree = {**tree, "vision": {**TOWER, "blocks": own}}
    part = trained_part(tree, arch)
    assert part == {"layers": [{"o_lora_a": "a"}], "vision": {"blocks": [{"qkv_lora_a": "v"}, {}]}}
    assert without_adapters(tree) == {"embed": "e", "layers": [{"o": "o"}], "vision": TOWER}
    moved = with_trained(tree, jax.tree.map(str.upper, part), arch)
    assert moved["vision"]["blocks"] == [{"qkv": "q0", "qkv_lora_a": "V"}, {"qkv": "q1"}]
    assert has_adapters({"layers": [], "vision": {"blocks": own}})


def test_which_adapters_a_tower_may_have():
    """It has its own or is frozen; and its matrices have no adapters by the names of the text model's."""
    adapted = with_lora(seeing("qwen3_vl"), LoraConfig(rank=4, targets=("all-linear", "vision.qkv")))
    assert adapted.lora.targets == ("qkv", "o", "gate_up", "down")
    assert adapted.vision.lora == LoRA(4, 4.0, ("qkv",))
    specs = adapters_of(param_specs(adapted))
    assert {name for block in specs["vision"]["blocks"] for name in block} == {"qkv_lora_a", "qkv_lora_b"}
    assert merged_architecture(adapted) == adapted.without_lora == seeing("qwen3_vl")
    frozen = with_lora(seeing("qwen3_vl", "frozen"), LoraConfig(rank=4))
    assert frozen.vision == seeing("qwen3_vl", "frozen").vision
    for trained in ("projector", "all"):
        with pytest.raises(ValueError, match=f"must be frozen, or have adapters of its own; got .*{trained}"):
            with_lora(seeing("qwen3_vl", trained), LoraConfig(rank=4))
    with pytest.raises(ValueError, match=r"has no vision.qkv"):
        with_lora(seeing("qwen3_vl", "frozen"), LoraConfig(rank=4, targets=("vision.qkv",)))
    with pytest.raises(ValueError, match=r"visual|attn.qkv|lora.rank must be at most"):
        with_lora(seeing("qwen3_vl"), LoraConfig(rank=33, targets=("vision.qkv",)))


@pytest.mark.parametrize("model_type", ["idefics3", "qwen2_5_vl"])
def test_adapters_of_a_tower_are_merged_where_they_are(model_type):
    """Queries, keys and values apart or as one tensor; in peft's names within the whole model."""
    names = VISION_TARGETS
    arch = with_lora(seeing(model_type), LoraConfig(rank=4, alpha=8, targets=("o", *names)))
    base = init_params(seeing(model_type), jax.random.key(0))
    params = with_adapters(base, arch, jax.random.key(1))
    params = with_trained(params, jax.tree.map(lambda x: x + 0.05, trained_part(params, arch)), arch)
    into = merged(params, arch)
    assert jax.tree.structure(into) == jax.tree.structure(base)
    block, before = params["vision"]["blocks"][1], base["vision"]["blocks"][1]
    for name in ("qkv", "gate_up", "o", "down"):
        a, b = np.asarray(block[f"{name}_lora_a"]), np.asarray(block[f"{name}_lora_b"])
        parts = [b @ a] if a.ndim == 2 else [one @ other for one, other in zip(b, a, strict=True)]
        change = 2 * (parts[0] if a.ndim == 2 else np.stack(parts))
        np.testing.assert_allclose(into["vision"]["blocks"][1][name], before[name] + change, atol=1e-5)
    np.testing.assert_array_equal(into["vision"]["patch"], base["vision"]["patch"])
    np.testing.assert_array_equal(into["layers"][0]["qkv"], base["layers"][0]["qkv"])
    found = {name.name for name in adapter_names(arch)}
    start = "base_model.model.model."
    own = {
        "idefics3": ("text_model.layers.0", "vision_model.encoder.layers.1.self_attn.k_proj"),
        "qwen2_5_vl": ("language_model.layers.0", "visual.blocks.1.attn.qkv"),
    }[model_type]
    assert {f"{start}{own[0]}.self_attn.o_proj.lora_A.weight", f"{start}{own[1]}.lora_B.weight"} <= found


def test_features_of_an_adapted_tower_are_those_of_the_merged_one():
    """Catches adapters of a tower without their scale, or of other matrices than they are merged into."""
    plain = seeing("idefics3")
    arch = with_lora(plain, LoraConfig(rank=4, alpha=8, targets=("o", *VISION_TARGETS)))
    params = with_adapters(init_params(plain, jax.random.key(0)), arch, jax.random.key(1))
    params = with_trained(params, jax.tree.map(lambda x: x + 0.02, trained_part(params, arch)), arch)
    patches, count = rows_of(arch.vision)

    def seen(tower, vision):
        return np.asarray(jax.jit(features, static_argnums=1)(tower, vision, patches))[0, :, :count]

    found = seen(params["vision"], arch.vision)
    np.testing.assert_allclose(found, seen(merged(params, arch)["vision"], plain.vision), atol=1e-4)
    base = seen(without_adapters(params)["vision"], plain.vision)
    assert np.abs(found - base).max() > 1e-2


def test_a_frozen_tower_is_not_copied_for_the_sampler(small_params):
    arch = seeing("qwen3_vl", "frozen")
    params = small_params | {"vision": {"patch": small_params["embed"]}}
    copies = copies_if_aliased(params, params, arch)
    assert copies["vision"]["patch"] is params["vision"]["patch"]
    assert copies["embed"] is not params["embed"]


def test_weights_for_the_sampler_share_no_buffer_that_is_donated(adapted):
    arch, params = adapted
    copies = copies_if_aliased(params, params, arch)
    for name, leaf in copies["layers"][0].items():
        assert (leaf is params["layers"][0][name]) == ("_lora_" not in name), name
    assert copies["embed"] is params["embed"]


def moved(adapted, scale):
    """`adapted` with B drawn, times `scale`, and the change of each matrix in float32."""
    arch, params = adapted
    key = jax.random.key(5)
    layers = [
        {
            name: scale * jax.random.normal(jax.random.fold_in(key, i), leaf.shape)
            if name.endswith("_b")
            else leaf
            for name, leaf in layer.items()
        }
        for i, layer in enumerate(adapters_of(params)["layers"])
    ]
    return with_trained(params, {"layers": layers}, arch)


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_merged_into_bfloat16_small_changes_arrive_in_the_mean(adapted, param_dtype):
    """Rounded to the nearest number, of changes of 1e-3 of the weights a small part would arrive, or none."""
    arch, params = adapted
    base = jax.tree.map(lambda x: x.astype(param_dtype), without_adapters(params))
    params = with_trained(base, adapters_of(params), arch)
    nothing = merged(params, arch, jnp.bfloat16)
    tree = moved((arch, params), 2e-5)
    found, again = merged(tree, arch, jnp.bfloat16), merged(tree, arch, jnp.bfloat16)
    arrived = nearest = whole = 0.0
    for before, after, same, parts in zip(
        *(each["layers"] for each in (nothing, found, again, tree)), strict=True
    ):
        for name in ADAPTED:
            np.testing.assert_array_equal(after[name], same[name])
            np.testing.assert_array_equal(before[name], parts[name].astype(jnp.bfloat16))
            start = before[name].astype(jnp.float32)
            a, b = parts[f"{name}_lora_a"], parts[f"{name}_lora_b"]
            change = changed(before[name], a, b, arch.lora.scale) - start
            arrived += float(((after[name].astype(jnp.float32) - start) * change).sum())
            rounded = (start + change).astype(jnp.bfloat16).astype(jnp.float32)
            nearest += float(((rounded - start) * change).sum())
            whole += float((change**2).sum())
    assert arrived / whole == pytest.approx(1, abs=0.1)
    assert nearest / whole < 0.5


@pytest.mark.parametrize(
    ("case", "targets"),
    [
        *((case, ("qkv", "o")) for case in ("mixtral", "olmoe", "gpt_oss")),
        *((case, ADAPTED) for case in ("llama", "qwen2_moe", "qwen3_5_text")),
    ],
)
def test_by_default_the_linear_matrices_that_a_model_has_are_adapted(case, targets):
    arch = of_golden(case)
    assert with_lora(arch, LoraConfig(rank=2)).lora == LoRA(2, 2.0, targets)
    if arch.routes:
        more = with_lora(arch, LoraConfig(rank=2, targets=("all-linear", "experts_down"))).lora.targets
        assert more == (*targets, "experts_down")
    if "down" not in targets:
        with pytest.raises(
            ValueError, match="has no down; choose from qkv, o, experts_gate_up, experts_down"
        ):
            with_lora(arch, LoraConfig(rank=2, targets=("qkv", "down")))


def test_models_that_cannot_have_the_adapters(small_arch):
    with pytest.raises(ValueError, match="a llama model has no experts; choose from qkv, o, gate_up, down"):
        check_lora(small_arch, LoRA(4, 4.0, ("experts",)))
    with pytest.raises(
        ValueError, match=r"k_proj of this llama model is 16 x 32, got rank 17; lower lora\.rank"
    ):
        with_lora(small_arch, LoraConfig(rank=17))
    assert with_lora(small_arch, LoraConfig(rank=17, targets=("down",))).lora == LoRA(17, 17.0, ("down",))
    with pytest.raises(ValueError, match="down_proj of this llama model is 32 x 48, got rank 33"):
        with_lora(small_arch, LoraConfig(rank=33, targets=("down",)))
    assert with_lora(small_arch, LoraConfig()) is small_arch
    with pytest.raises(ValueError, match=r"lm_head of this llama model is \d+ x 32, got rank 33"):
        with_lora(small_arch, LoraConfig(rank=33, targets=("lm_head",)))
    with pytest.raises(ValueError, match="a llama model has no lm_head; choose from qkv, o, "):
        with_lora(replace(small_arch, head="value_head"), LoraConfig(rank=4, targets=("qkv", "lm_head")))
