"""How often pictures go through the tower in a training step, and what a step says of its pictures."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from picture_tables import picture_table, store_of, whole_params, without_tower
from towers import seeing

from quatrain.config.schema import LogprobConfig, OptimizerConfig, UpdateConfig
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import CriticSpec, PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.params import VISION
from quatrain.types.batches import AdvantagedBatch, RewardedBatch, RolloutBatch
from quatrain.types.metrics import Metric
from quatrain.update.learner import Learner

DISTINCT = 4
"""Pictures of `picture_table`."""
EPOCHS = 2


def _arch(trained):
    arch = seeing("qwen3_vl", trained)
    vision = replace(arch.vision, depth=1, deepstack=())
    return replace(arch, layers=arch.layers[:1], vision=vision)


def _batch(table: TokenTable) -> AdvantagedBatch:
    count, shape = len(table), table.input_ids.shape
    rollouts = RolloutBatch(
        table.input_ids,
        table.attention_mask,
        table.completion_mask,
        np.zeros(shape, np.float32),
        np.where(table.completion_mask, 0, -1).astype(np.int32),
        np.array(["stop"] * count),
        table.group_ids,
        ("",) * count,
        ("",) * count,
        {},
        {},
        pictures=table.pictures,
    )
    rewards = table.columns["advantages"].sum(axis=1)
    rewarded = RewardedBatch(rollouts, rewards, rewards[None], ("drawn",))
    return AdvantagedBatch(rewarded, table.columns["advantages"], {"advantage/mean": Metric(0.0)})


@pytest.fixture(scope="module")
def steps():
    """By what is trained: the metrics of a step whose sampler asked for each picture, and its state."""

    def run(trained):
        arch = _arch(trained)
        whole = jax.tree.map(np.asarray, whole_params(arch))
        store = store_of(arch, whole_params(arch), num_bytes=1)
        learner = Learner(
            PolicySpec(arch),
            UpdateConfig(
                epochs=EPOCHS,
                mini_batch_size=6,
                max_tokens_per_device=500,
                kl_coef=0.1,
                loss_aggregation="token_mean",
            ),
            LogprobConfig(max_tokens_per_device=500),
            OptimizerConfig(learning_rate=1e-2, vision_learning_rate=1e-4),
            max_new_tokens=5,
            total_steps=4,
            seed=0,
            reference=without_tower(whole_params(arch), arch),
            store=store,
        )
        table = picture_table(arch)
        state = learner.init(without_tower(whole_params(arch), arch))
        for group in np.unique(table.group_ids):  # the sampler prefills one prompt after another
            store.of(replace(table.pictures, ids=table.pictures.ids[table.group_ids == group][0]).used)
        moved = learner.step(state, _batch(table))
        return moved, whole, store

    return {trained: run(trained) for trained in ("frozen", "all")}


def test_a_frozen_tower_runs_once_for_each_picture_of_a_step(steps):
    """Sampling, old log-probabilities, the reference and two epochs read one store."""
    state, _, store = steps["frozen"]
    metrics = {name: metric.result() for name, metric in state.metrics.items()}
    assert metrics["vision/pictures"] == metrics["vision/tower_pictures"] == DISTINCT
    assert metrics["vision/patches"] == 16 + 24 + 48 + 16
    assert metrics["vision/padding_fraction"] == 12 / 104
    assert metrics["vision/store_bytes"] == store.num_bytes == 32 * 4 * (4 + 6 + 9 + 4)
    assert 0 < metrics["time/vision_s"] < 1000
    assert store.end_step() == {}, "the metrics of a step without pictures are those of texts"


def test_a_trained_tower_runs_for_the_sampler_and_in_each_buffer(steps):
    """One buffer each: of two passes that measure blindness, old and reference ones, and each epoch."""
    state, _, _ = steps["all"]
    assert state.metrics["vision/pictures"].result() == DISTINCT
    assert state.metrics["vision/tower_pictures"].result() == DISTINCT * (1 + 2 + EPOCHS) + 4


def test_grey_pictures_change_log_probabilities(steps):
    for state, _, _ in steps.values():
        assert state.metrics["vision/blind_gap"].result() > 1e-3


def test_a_tower_has_a_learning_rate_of_its_own(steps):
    """AdamW moves each number by the learning rate in its first steps."""
    state, whole, _ = steps["all"]
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params, whole)
    assert max(jax.tree.leaves(moved[VISION])) < 4e-4
    assert max(jax.tree.leaves(moved["layers"])) > 1e-2
    state, whole, _ = steps["frozen"]
    assert VISION not in state.params


def test_a_critic_sees():
    """Values of pictures of one size, in equal texts, differ."""
    arch = replace(_arch("frozen"), head="value_head")
    whole = whole_params(arch)
    whole["score"] = jax.random.normal(jax.random.key(0), whole["score"].shape)
    table = picture_table(arch)
    spec = CriticSpec(arch)
    planner = spec.planner(LogprobConfig(max_tokens_per_device=500), store=store_of(arch, whole))
    values = predict_tokens(without_tower(whole, arch), table, model=spec, planner=planner)
    first = [values[row][table.completion_mask[row]][0] for row in range(len(table))]
    assert abs(first[8] - first[10]) > 1e-3, "the two last groups"
    assert abs(first[8] - first[9]) < 1e-5, "samples of one prompt"
