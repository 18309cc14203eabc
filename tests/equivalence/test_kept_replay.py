"""Sampling-mask replay: with filters, the update's log-probabilities are the sampler's, however it is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kept_mesh_worker import WORDS, model, sampled, table

from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_columns
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.parallel.mesh import one_device
from quatrain.types.kept import KeptRow, KeptSets

WORKER = Path(__file__).parent / "kept_mesh_worker.py"
CUTTINGS = (
    MicroBatchPlanner(rows=100),
    MicroBatchPlanner(rows=2),
    MicroBatchPlanner(max_tokens=60, share_prompts=True),
)


def passed(batch, planner=CUTTINGS[0], **how):
    """(log-probabilities, entropies) of the sampled tokens."""
    arch, params = model()
    spec = PolicySpec(arch, remat="none", **how)
    columns = predict_columns(params, TokenTable.of_policy(batch, arch), model=spec, planner=planner, count=2)
    return [each[batch.completion_mask] for each in columns]


@pytest.mark.parametrize(
    ("options", "temperature"),
    [({"top_p": 0.9}, 1.0), ({"top_k": 5}, 1.3), ({"min_p": 0.05, "top_p": 0.95}, 0.7)],
)
def test_the_sampler_is_the_trainer(options, temperature):
    """Would fail if a set were that of another token, or of the distribution before the temperature."""
    batch = sampled(temperature=temperature, **options)
    sampler = batch.rollout_logprobs[batch.completion_mask]
    counts = batch.kept.counts[batch.completion_mask]
    assert counts.min() >= 1
    assert counts.mean() < WORDS / 2
    for planner in CUTTINGS:
        logprobs, entropy = passed(batch, planner, temperature=temperature)
        # Steep logits: the same two differ by 1e-4 without filters too.
        np.testing.assert_allclose(logprobs, sampler, atol=5e-4)
        assert (entropy <= np.log(counts) + 1e-5).all()
    whole = passed(replace(batch, kept=None), temperature=temperature)[0]
    assert np.abs(whole - sampler).max() > 1e-2


def test_without_filters_nothing_is_recorded_and_with_them_the_same_tokens_are_drawn():
    assert sampled().kept is None
    recorded = sampled(top_p=0.9)
    unrecorded = sampled(top_p=0.9, top_k=512, replay_mask=False)
    assert unrecorded.kept is None
    np.testing.assert_array_equal(recorded.input_ids, unrecorded.input_ids)
    np.testing.assert_array_equal(recorded.rollout_logprobs, unrecorded.rollout_logprobs)


def test_masks_are_as_good_as_lists():
    """The sets of every second sequence as bits, as grammars have them: the same numbers."""
    batch = sampled(top_p=0.9)
    rows = [batch.kept.row(number) for number in range(len(batch))]
    for number in range(0, len(rows), 2):
        sets = rows[number].column
        for place, words in enumerate(sets):
            if words is not None:
                bits = np.zeros(32 * -(-WORDS // 32), np.uint8)
                bits[words] = 1
                sets[place] = np.packbits(bits, bitorder="little").view(np.uint32)
        rows[number] = KeptRow.of([sets])
    kept = KeptSets.stacked(rows, batch.input_ids.shape[1])
    assert len(kept.masks) > 10
    assert kept.counts.any()
    as_masks = replace(batch, kept=kept)
    for planner in CUTTINGS[1:]:
        for ours, theirs in zip(passed(as_masks, planner), passed(batch, planner), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_micro_batches_have_the_sets_of_their_targets():
    """Would fail if a taken table, or a cut one, had the sets of other rows."""
    batch = sampled(top_p=0.9)
    for rows in (np.arange(len(batch)), np.array([7, 2, 5])):
        for sequences, each in micro_batches(table(batch).take(rows), CUTTINGS[2], one_device()):
            lists, mask = np.asarray(each.kept_words), np.asarray(each.mask)
            wanted = []
            for row in rows[sequences]:
                places = np.flatnonzero(batch.completion_mask[row])
                wanted.append(batch.kept.listed(row, places, lists.shape[-1]))
            np.testing.assert_array_equal(lists[mask], np.concatenate(wanted))
            targets = np.asarray(each.targets)[mask]
            assert (lists[mask] == targets[:, None]).sum(axis=1).tolist() == [1] * len(targets)


@pytest.mark.parametrize(
    "meshes", [["1,1,2,2"], pytest.param(["1,2,2,1", "2,1,1,2"], marks=pytest.mark.slow)]
)
def test_meshes_give_the_numbers_of_one_device(tmp_path, meshes):
    """`tp` devices have parts of the vocabulary that begin within 32 words, `cp` devices parts of the tokens:
    each must take the bits of its own."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    path = os.pathsep.join([str(WORKER.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    target, one = tmp_path / "results.npz", "1,1,1,1"
    subprocess.run([sys.executable, WORKER, target, one, *meshes], env=environment, check=True)
    with np.load(target) as results:
        for name in results.files:
            key = name.split(" ")[1]
            got, wanted = results[name], results[f"{one} {key}"]
            if got.dtype.kind in "iu":
                np.testing.assert_array_equal(got, wanted, err_msg=name)
            else:
                atol = 1e-5 * np.abs(wanted).max()
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=atol, err_msg=name)
        assert np.abs(results[f"{one} gradient"]).max() > 1e-4
