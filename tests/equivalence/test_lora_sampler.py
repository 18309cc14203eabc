"""Adapters in the sampler, merged or beside the base: its log-probabilities are the trainer's."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from architectures import ADAPTED, of_golden
from rollouts import local_rollouts

from quatrain.config.schema import RolloutConfig
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.architecture import LoRA
from quatrain.models.lora import adapters_of, with_adapters, with_trained
from quatrain.models.params import init_params
from quatrain.types.batches import Prompt


@pytest.fixture(scope="module")
def adapted(small_arch, small_params):
    """(architecture, parameters) of a model whose adapters move its logits by about their own size."""
    return _adapted(replace(small_arch, lora=LoRA(4, 8.0, (*ADAPTED, "lm_head"))), small_params)


def _adapted(arch, base):
    params = with_adapters(base, arch, jax.random.key(1))
    leaves, structure = jax.tree.flatten(adapters_of(params))
    keys = jax.random.split(jax.random.key(2), len(leaves))
    drawn = [x + 0.1 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves)]
    return arch, with_trained(params, jax.tree.unflatten(structure, drawn), arch)


@pytest.mark.parametrize("way", ["merged", pytest.param("adapter", marks=pytest.mark.slow)])
def test_sampler_and_trainer_agree_on_adapters(adapted, small_params, tokenizer, way):
    _check_agreement(*adapted, small_params, tokenizer, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["merged", "adapter"])
def test_sampler_and_trainer_agree_on_adapters_of_experts(tokenizer, way):
    """Its attention and its shared expert, an MLP, have adapters too. What is merged into experts is compared
    in `weights/test_expert_adapters.py`."""
    lora = LoRA(4, 8.0, (*ADAPTED, "experts_gate_up", "experts_down"))
    arch = replace(of_golden("qwen2_moe", vocab_size=300), lora=lora)
    base = init_params(replace(arch, lora=None), jax.random.key(0))
    _check_agreement(*_adapted(arch, base), base, tokenizer, way)


def _check_agreement(arch, params, base_params, tokenizer, way):
    config = RolloutConfig(n=4, max_new_tokens=12, temperature=0.8, max_concurrency=3, lora=way)
    engine = local_rollouts(arch, config, tokenizer, stop_ids=tuple(range(0, 290, 13)), seed=1)
    engine.sync_weights(params, 0)
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 290, rng.integers(1, 12)).astype(np.int32) for _ in range(5)]
    batch = engine.generate([Prompt(i, row, "") for i, row in enumerate(ids)])
    table = TokenTable(batch.input_ids, batch.attention_mask, batch.completion_mask, {})
    trained, base = (
        predict_tokens(p, table, model=PolicySpec(a, temperature=0.8), planner=MicroBatchPlanner(rows=6))
        for a, p in ((arch, params), (replace(arch, lora=None), base_params))
    )
    assert np.abs(trained - batch.rollout_logprobs).max() < 1e-4
    assert np.abs(trained - base).max() > 0.1


def test_a_sampler_with_adapters_has_no_copy_of_the_base(adapted, tokenizer):
    arch, params = adapted
    placed = {
        way: local_rollouts(arch, RolloutConfig(lora=way), tokenizer, stop_ids=(0,), seed=1).copy_weights(
            params
        )
        for way in ("merged", "adapter")
    }
    for name, leaf in placed["adapter"]["layers"][0].items():
        assert (leaf is params["layers"][0][name]) == ("_lora_" not in name), name  # adapters are trained
    assert placed["adapter"]["embed"] is params["embed"]
    assert set(placed["merged"]["layers"][0]) == {n for n in params["layers"][0] if "_lora_" not in n}
    for name, leaf in placed["merged"]["layers"][0].items():
        assert (leaf is params["layers"][0][name]) == (name not in ADAPTED), name
    assert placed["merged"]["embed"] is params["embed"]
    assert placed["adapter"]["lm_head_lora_b"] is not params["lm_head_lora_b"]
