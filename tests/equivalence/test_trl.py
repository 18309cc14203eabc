"""Losses, gradients and steps of training on given data are those of TRL, from the same weights and ids."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from goldens import read_golden, read_score_golden
from trainer_goldens import (
    BETA,
    CENTER,
    EPSILON,
    GAMMA,
    LEARNING_RATE,
    STEPS,
    TRAINED,
    UNDESIRABLE,
    read_trainer_golden,
    reference_of,
)

from quatrain.config.schema import OptimizerConfig
from quatrain.config.sections.given import DPOConfig, RMConfig
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import CriticSpec, PolicySpec
from quatrain.types.batches import Judged, Pair
from quatrain.update.preferences import (
    Judgement,
    Preference,
    RewardPairs,
    judged_table,
    other_answers,
    pair_table,
)
from quatrain.update.supervised import negative_log_likelihood
from quatrain.update.trainer import StepTotals, Trainer
from quatrain.weights.hf import load_hf

PLANNER = MicroBatchPlanner(rows=8)
ADAMW = OptimizerConfig(learning_rate=LEARNING_RATE, max_grad_norm=None)
DPO = {
    "sigmoid": {},
    "ipo": {},
    "hinge": {},
    "robust": {"label_smoothing": EPSILON},
    "smoothed": {"loss": "sigmoid", "label_smoothing": EPSILON},
    "orpo": {},
    "simpo": {"gamma": GAMMA},
    "kto": {"undesirable_weight": UNDESIRABLE},
}
FAMILIES = [TRAINED[0], *(pytest.param(case, marks=pytest.mark.slow) for case in TRAINED[1:])]


@pytest.fixture(scope="module", params=FAMILIES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def policy(case):
    """Spec and parameters of the policy, and its data."""
    arch, params = read_golden(case).model()
    return PolicySpec(arch), params, read_trainer_golden(case)


def pairs_of(rows):
    ids = ("prompt_ids", "chosen_ids", "rejected_ids")
    return [
        Pair(*(np.array(row[name], np.int32) for name in ids), row["margin"], number)
        for number, row in enumerate(rows)
    ]


def objective_and_table(name, spec, params, data):
    """What is trained, on what, with the log-probabilities of the reference."""
    pairs = pairs_of(data["one_token_prompts" if name == "orpo" else "pairs"])
    if name == "sft":
        table = pair_table(pairs).take(np.arange(len(pairs)))
        table = dataclasses.replace(table, of_rows={}).weighted("token_mean", max_new_tokens=1)
        return negative_log_likelihood, table
    config = DPOConfig(**{"loss": name, "beta": BETA, **DPO[name]})
    table = pair_table(pairs)
    if name == "kto":
        judged = [
            Judged(pair.prompt_ids, pair.chosen_ids, label, pair.number)
            for pair, label in zip(pairs, data["labels"], strict=True)
        ]
        table = judged_table(judged, other_answers(judged))
    predicted = predict_tokens(reference_of(params), table, model=spec, planner=PLANNER)
    of_rows = {**table.of_rows, "reference": predicted.sum(axis=1, dtype=np.float64)}
    table = dataclasses.replace(table, of_rows=of_rows)
    return Judgement.of(config) if name == "kto" else Preference.of(config), table


def trained(spec, params, objective, table):
    """Losses and norms of the gradients of the steps of AdamW."""
    trainer = Trainer(spec, PLANNER, ADAMW, total_steps=STEPS, seed=0)
    state, found = trainer.init(jax.tree.map(jnp.array, params)), []
    for step in range(STEPS):
        totals = StepTotals()
        state = trainer.step(state, table, objective, totals, step)
        found.append([totals.metrics[name].result() for name in ("loss", "update/grad_norm")])
    return np.array(found).T


def assert_as_trl(run, found):
    """The first step is exact but for rounding; those after it have what Adam makes of small gradients."""
    for ours, theirs in zip(found, (run["losses"], run["norms"]), strict=True):
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
        # Losses of `hinge` end at 0, and those of `robust` are of both signs.
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * theirs[0])


@pytest.mark.parametrize("name", ["sft", *DPO])
def test_ten_steps_are_those_of_trl(policy, name):
    """Loss and norm of the gradient: a factor, a length, a mask or a row of another pair would show."""
    spec, params, golden = policy
    objective, table = objective_and_table(name, spec, params, golden["data"])
    assert_as_trl(golden["runs"][name], trained(spec, params, objective, table))


def test_a_reward_model_is_trained_as_by_trl(case, tmp_path):
    """With margins and centring; a score of another place than the last would show."""
    arch, params = load_hf(read_score_golden(case).write_model(tmp_path / "scores"), head="value_head")
    golden, spec = read_trainer_golden(case), CriticSpec(arch.for_length(32))
    table = pair_table(pairs_of(golden["data"]["pairs"]), scored_at_end=True, pad_token_id=arch.pad_token_id)
    assert_as_trl(golden["runs"]["rm"], trained(spec, params, RewardPairs.of(RMConfig(center=CENTER)), table))
