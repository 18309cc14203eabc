"""Plans of runs on given data: sizes of a step, and memory without rollouts and without a second model."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from test_placement import SMALL

from quatrain.config.load import load_config
from quatrain.models.families import architecture_from_hf
from quatrain.models.lora import trained_part, with_adapters, with_lora, without_adapters
from quatrain.models.params import init_params
from quatrain.plan.batch_plan import overview, plan, render
from quatrain.plan.device_memory import render as render_memory
from quatrain.plan.fit import fit
from quatrain.plan.fit import render as render_fit
from quatrain.plan.placement import placement
from quatrain.update.gradient import init_optimizer
from quatrain.update.optimizer import OptimizerForm

GIVEN = {"sft": ("sft.steps=7", "sft.data=x.jsonl"), "dpo": ("dpo.data=x.jsonl",), "rm": ("rm.data=x.jsonl",)}


@pytest.fixture
def final(tmp_path):
    """final(task, "key=value", ...): the final configuration of a small model's run of `task`."""
    (tmp_path / "config.json").write_text(json.dumps(SMALL))

    def make(task, *overrides):
        settings = (f"run.task={task}", f"model.path={tmp_path}", "model.tokenizer=builtin:tiny")
        return load_config(None, (*settings, *GIVEN[task], *overrides), {}).config

    return make


def parts(config, **layout):
    return {part.key: part for part in placement(config, **layout).parts}


def size(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def test_the_reference_is_swept_once_where_the_loss_reads_one(final):
    swept = {"dpo": 1, "rm": None, "sft": None}
    for task, count in swept.items():
        found = plan(final(task))
        assert {row.key: row.value for row in found.rows}.get("reference_passes") == count
        lines = overview(found)
        assert any(line.startswith("reference") for line in lines) == bool(count)
        assert any("pass without gradient" in line for line in lines) == (task != "sft")
        assert all(len(line) < 80 for line in lines)
    alone = plan(final("dpo", "dpo.loss=orpo"))
    assert "reference" not in render(alone) + "".join(overview(alone))


@pytest.mark.parametrize("task", GIVEN)
def test_what_samples_nothing_has_no_cache_and_no_phase_of_a_rollout(final, task):
    placed = placement(final(task))
    assert not {"kv_cache", "rollout_weights", "reference", "prefix_store"} & {p.key for p in placed.parts}
    assert [key for key in placed.totals() if "rollout" in key] == []
    assert "rollout" not in render_memory(placed)


def test_evaluations_that_sample_need_what_a_rollout_needs(final):
    found = placement(final("dpo", "data.eval=builtin:arithmetic-heldout"))
    assert "kv_cache" in {part.key for part in found.parts}
    assert "total_in_rollout" in found.totals()


@pytest.mark.parametrize("rank", [0, 4])
def test_bytes_of_a_reward_model_are_those_of_its_arrays(final, rank):
    config = final("rm", f"lora.rank={rank}", "model.dtype=bfloat16", "model.param_dtype=bfloat16")
    arch = replace(architecture_from_hf(SMALL), head="value_head")
    params = init_params(arch, jax.random.key(0), jnp.bfloat16)
    found = {key: part.num_bytes for key, part in parts(config).items()}
    if rank:
        arch = with_lora(arch, config.lora)
        params = with_adapters(params, arch, jax.random.key(0))
        trained = trained_part(params, arch)
        assert found["adapters"] == found["gradients"] == size(trained)
        assert found["weights"] == size(params) - size(trained)
    else:
        trained = params
        assert found["weights"] == size(params)
        assert found["gradients"] == 2 * size(params)
    assert found["optimizer_state"] == size(init_optimizer(OptimizerForm.of(config.optimizer), trained))
    assert size(without_adapters(params)) < size(
        init_params(replace(arch, lora=None, head="lm_head"), jax.random.key(0), jnp.bfloat16)
    )


def test_another_model_as_reference_is_in_memory_before_the_first_step_alone(final):
    with_other = placement(final("dpo", "dpo.reference=builtin:tiny", "lora.rank=4"))
    other = {part.key: part for part in with_other.parts}["reference"]
    alone = placement(final("dpo", "lora.rank=4"))
    weights = sum(part.num_bytes for part in alone.parts if part.key in ("weights", "adapters"))
    totals = {phase: total for phase, _, total in with_other.totals().values()}
    assert other.num_bytes > 0
    assert totals.pop("reference_pass") == weights + other.num_bytes
    assert totals == {phase: total for phase, _, total in alone.totals().values()}
    assert not [key for key in alone.totals() if "reference" in key]
    orpo = placement(final("dpo", "dpo.loss=orpo"))
    assert "reference" not in {part.key for part in orpo.parts}


def test_what_does_not_fit_is_told_with_the_key_of_its_lengths(final):
    result = fit(lambda more: final("rm", *more), devices=1, processes=1, device_memory=10**6)
    assert "or lower rm.max_length" in " ".join(render_fit(result).split())
    assert fit(
        lambda more: final("rm", "rm.max_length=64", *more), devices=1, processes=1, device_memory=2**30
    ).found


def test_a_judged_answer_is_two_sequences_with_that_to_another_prompt(final):
    """Catches a plan of half the micro-batches that `kto` has, whose table has 2B sequences."""
    found = plan(final("dpo", "dpo.loss=kto", "dpo.batch_size=24", "update.micro_batch_size=8"))
    assert (found["rows_per_step"], found.to_dict()["unit"]["rows_per_step"]) == (24, "rows")
    assert (found["sequences_per_step"], found["micro_batches_per_optimizer_step"]) == (48, 6)
