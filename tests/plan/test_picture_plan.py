"""The plan counts what pictures need: a tower, its features, and its activations where it is trained."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import DEFAULT_FUSION
from jax.sharding import PartitionSpec
from test_placement import SMALL, final
from towers import seeing

from quatrain.backend import this_backend
from quatrain.data.prompts import PromptSource
from quatrain.data.token_table import Table, TokenRow
from quatrain.loop.prompts import picture_tokens
from quatrain.models.families import architecture_from_hf
from quatrain.models.params import abstract_params, init_params
from quatrain.models.tower import features, patches_of
from quatrain.ops.shape_buckets import round_up_coarsely
from quatrain.parallel.collectives import shard_mapped
from quatrain.parallel.mesh import one_device
from quatrain.plan.batch_plan import PictureTokens
from quatrain.plan.batch_plan import plan as batch_plan
from quatrain.plan.device_memory import render
from quatrain.plan.pictures import update_parts
from quatrain.plan.placement import placement
from quatrain.types.pictures import Picture, Pictures

__all__ = ["final"]  # the fixture

SIZES = (
    *("data.batch_size=2", "rollout.n=2", "data.max_prompt_length=20", "rollout.max_new_tokens=10"),
    *("update.max_tokens_per_device=50", "update.kl_coef=0"),
)


def trained(kind, what):
    arch = seeing(kind)
    return replace(arch, vision=replace(arch.vision, trained=what))


def parts(config, arch, **options):
    return {part.key: part.num_bytes for part in placement(config, arch=arch, **options).parts}


def size_of(tree):
    return sum(array.size * 4 for array in jax.tree.leaves(tree))


@pytest.mark.parametrize("what", ["frozen", "projector", "all"])
def test_parameters_moments_and_gradients_are_those_that_are_made(final, what):
    arch = trained("qwen3_vl", what)
    found = parts(final(SMALL, *SIZES), arch)
    made = init_params(arch.with_tower, jax.random.key(0))
    tower = made.pop("vision")
    projector = size_of([tower["merger"], tower["deepstack"]])
    learned = size_of(made) + {"frozen": 0, "projector": projector, "all": size_of(tower)}[what]
    assert (found["weights"], found["tower"]) == (size_of(made), size_of(tower))
    assert found["gradients"] == learned
    assert found["optimizer_state"] == pytest.approx(2 * learned, abs=32), "and counters"
    assert found.get("tower_copy", 0) == (0 if what == "frozen" else size_of(tower))


def test_features_are_as_many_as_tokens_at_most(final):
    """50 tokens of a micro-batch, rounded up to 64; deepstack has 2 further levels."""
    assert round_up_coarsely(50) == 64
    config = final(SMALL, *SIZES, "data.batch_size=3")
    assert parts(config, trained("qwen3_vl", "frozen"))["features"] == 3 * 64 * 32 * 4
    assert parts(config, trained("qwen3_vl", "all"))["features"] == 2 * 3 * 64 * 32 * 4, "with their gradient"
    # Two prompts of 20 tokens: a group has their pictures once.
    assert parts(final(SMALL, *SIZES), trained("qwen2_5_vl", "frozen"))["features"] == 48 * 32 * 4
    apart = final(SMALL, *SIZES, "update.micro_batch_size=3", "update.max_tokens_per_device=null")
    # Two samples of each, of which 3 with at most 30 tokens, rounded up to 32, are in a micro-batch.
    assert parts(apart, trained("qwen2_5_vl", "frozen"))["features"] == round_up_coarsely(80) * 32 * 4
    on_two = final(SMALL, *SIZES, "data.batch_size=5", "mesh={cp: 2}")
    # Each device of cp has the features of all columns of its data shard.
    tokens = min(2 * 50, 5 * 20)
    assert parts(on_two, trained("qwen2_5_vl", "frozen"), devices=2)["features"] == (
        round_up_coarsely(tokens) * 32 * 4
    )


def test_a_trained_tower_keeps_a_state_per_block_and_a_projector_one_per_level(final):
    config = final(SMALL, *SIZES, "data.batch_size=3", "model.remat=layer")
    patches, w = 64 * 4, 32
    kept = patches * (96 + (4 + 1) * w)
    of_block, work = 18 * w + 2 * 40, 3 * w + 3 * 40
    one = patches * (of_block + work)
    assert parts(config, trained("qwen3_vl", "all"))["tower_activations"] == 4 * (kept + one)
    assert parts(config, trained("qwen3_vl", "projector"))["tower_activations"] == 4 * patches * w * (3 + 5)
    assert "tower_activations" not in parts(config, trained("qwen3_vl", "frozen"))
    whole = patches * (96 + 4 * of_block + w + work)
    kept_whole = final(SMALL, *SIZES, "data.batch_size=3", "model.remat=none")
    assert parts(kept_whole, trained("qwen3_vl", "all"))["tower_activations"] == 4 * whole


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "layer"])
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_what_a_trained_tower_keeps_is_what_the_compiler_counts(kind, remat):
    """On a CPU, with the options of a run: without them XLA merges what is recomputed with the first."""
    arch = trained(kind, "all")
    block = replace(arch.vision.block, size=256, num_heads=4, width=512)
    vision = replace(
        arch.vision, block=block, depth=3, deepstack=(), whole=(0,) if arch.vision.window else ()
    )
    arch = replace(arch, vision=vision)
    size, number = (64, 64), 8
    pixels = [np.zeros((vision.num_patches(size), vision.patch_values), np.float32)] * number
    rows = jax.tree.map(lambda x: x[None], patches_of(vision, pixels, [size] * number))

    def gradient(tower, rows):
        made = partial(features, vision=vision, patches=rows, remat=remat != "none")
        return jax.grad(lambda tower: jnp.square(made(tower)).sum())(tower)

    program = jax.jit(shard_mapped(gradient, one_device(), (PartitionSpec(),) * 2, PartitionSpec()))
    compiled = program.lower(abstract_params(arch)["vision"], rows).compile(
        DEFAULT_FUSION | dict(this_backend().compiler_options)
    )
    most = rows.rows.shape[1]
    found = {part.key: part.num_bytes for part in update_parts(vision, most, "float32", remat, "gradient")}
    arguments = 4 * rows.pixels.size
    assert compiled.memory_analysis().temp_size_in_bytes == pytest.approx(
        found["tower_activations"] - arguments, rel=0.1
    )


@pytest.mark.parametrize(("kind", "most"), [("qwen3_vl", 256), ("idefics3", 180)])
def test_the_tower_works_on_one_picture_which_a_prompt_can_hold(final, kind, most):
    """256: longest_edge of the processor, in patches; 180: 2 x 2 tiles and the whole, of 36 patches each."""
    arch = trained(kind, "frozen")
    sides = range(1, 200, 7)
    found = [(w, h) for w in sides for h in sides if max(w, h) <= 200 * min(w, h)]
    assert max(map(arch.vision.num_patches, found)) == most
    values = arch.vision.patch_values
    columns = 4 * (values + max(7 * 32, 2 * 32 + 2 * 40))
    short, long = (
        parts(final(SMALL, *SIZES, f"data.max_prompt_length={longest}", *more), arch)["tower_at_work"]
        for longest, more in ((20, ()), (1000, ("update.max_tokens_per_device=1010",)))
    )
    assert short == round_up_coarsely(20 * 4) * columns
    assert long == round_up_coarsely(most) * columns


def test_the_sampler_has_no_copy_of_a_tower(final):
    config = final(SMALL, *SIZES, "model.dtype=bfloat16")
    arch = trained("qwen3_vl", "all")
    assert (
        parts(config, arch)["rollout_weights"] == parts(config, replace(arch, vision=None))["rollout_weights"]
    )


def test_the_host_keeps_what_the_configuration_allows(final):
    host = placement(
        final(SMALL, *SIZES, "model.vision_cache_bytes=5000"), arch=trained("qwen3_vl", "frozen")
    ).host
    assert [(part.key, part.num_bytes) for part in host] == [("vision_store", 5000)]


def test_the_batch_plan_has_the_tokens_of_pictures_where_data_were_read(final):
    config = final(SMALL, *SIZES)
    plan = batch_plan(config, pictures=PictureTokens(prompts=3, mean=12.6, most=40))
    assert (plan["mean_picture_tokens_per_prompt"], plan["max_picture_tokens_per_prompt"]) == (13, 40)
    assert "3 prompts have some" in plan.to_dict()["why"]["max_picture_tokens_per_prompt"]
    assert not any("picture" in row.key for row in batch_plan(config).rows)


def test_placeholders_are_counted_by_place_in_the_prompts_that_have_some():
    """Two rows with 5 placeholders, one with 2; text does not count, nor does a row without pictures."""
    one = Picture(7, (4, 4), b"")

    def row(number, placeholders):
        ids = np.array([9] * (placeholders + 2), np.int32)  # also text has the id of placeholders
        tokens = [None, *[one] * placeholders, None]
        return TokenRow(number, "", ids, {}, pictures=Pictures.of(tokens))

    rows = [row(1, 5), row(2, 5), row(3, 2), TokenRow(4, "", np.array([9], np.int32), {})]
    source = PromptSource(Table(dict(enumerate(rows)), 4), seed=0)
    assert picture_tokens(source) == PictureTokens(3, 4.0, 5)
    text = PromptSource(Table({0: rows[3]}, 1), seed=0)
    assert picture_tokens(text) is None


def test_without_a_tower_nothing_is_added(final):
    """Also not for a reader of text whose folder has a tower that is not used."""
    result = placement(final(SMALL, *SIZES), arch=architecture_from_hf(SMALL))
    assert not {"tower", "features", "tower_at_work", "tower_copy"} & {part.key for part in result.parts}
    assert "picture" not in render(result)


def test_the_table_names_parts_of_a_tower_once(final):
    text = render(placement(final(SMALL, *SIZES), arch=trained("qwen3_vl", "frozen")))
    assert "vision.blocks.qkv x 4 " in text
    assert "vision.deepstack.up x 2 " in text
    assert (
        text.index("embed ") < text.index("layers.qkv x 3") < text.index("final_norm") < text.index("vision.")
    )
    assert "none without pictures in the data" in " ".join(text.split())
