"""A training loop of one's own, with the mistakes that are easily made in it."""

import jax.numpy as jnp
import pytest

import quatrain
from quatrain.types.batches import brief

pytestmark = pytest.mark.usefixtures("narrow_model")


@pytest.fixture(scope="module")
def updated(tmp_path_factory):
    """A loop after its first update: what it was made of, its batch, and the states before and after."""
    settings = ("update.kl_coef=0.1", "data.batch_size=2", "rollout.n=2", "rollout.max_new_tokens=4")
    config = quatrain.load_config(overrides=settings, environ={}).config
    policy = quatrain.load_policy(config)
    prompts = quatrain.load_prompts(config.data.train, config.data, policy.tokenizer, seed=config.seed)
    reference = {name: jnp.copy(leaf) if name == "embed" else leaf for name, leaf in policy.params.items()}
    stages = quatrain.build_stages(config, policy, steps=2, reference=reference)
    state = stages.update.init(policy.params)
    stages.rollout.sync_weights(state.params, state.step)
    rollouts = stages.rollout.generate(prompts.batch(0, 2))
    rewarded = stages.reward.score(rollouts)
    advantaged = stages.advantage.estimate(rewarded)
    return config, policy, stages, prompts, advantaged, state, stages.update.step(state, advantaged)


def test_the_reference_is_asked_for_where_the_loss_needs_it(updated, monkeypatch):
    """Catches an AssertionError of an inner function, for a loop with the quickstart's `update.kl_coef`."""
    _, _, stages, _, advantaged, _, state = updated
    monkeypatch.setattr(stages.update, "reference", None)
    with pytest.raises(
        ValueError, match="needs its parameters, and build_stages got none; give it a copy of"
    ):
        stages.update._reference_logprobs(state.params, advantaged.rewarded.rollouts)


CALL = r"call sync_weights\(state\.params, state\.step\) before generate, wait and an evaluation, after each"


def test_sampling_after_an_update_needs_the_new_weights(updated):
    config, policy, stages, prompts, _, _, state = updated
    evaluator = quatrain.Evaluator(config, policy, stages.reward)
    message = f"the weights that the rollout samples from were taken over by .*; {CALL}"
    with pytest.raises(ValueError, match=message):
        stages.rollout.generate(prompts.batch(1, 2))
    with pytest.raises(ValueError, match=message):
        evaluator.evaluate(stages.rollout, count=2)
    stages.rollout.sync_weights(state.params, state.step)
    assert evaluator.evaluate(stages.rollout, count=2).metrics["eval/num_prompts"].value == 2
    stages.rollout.release()
    with pytest.raises(ValueError, match="the rollout has no weights to sample from; call sync_weights"):
        stages.rollout.generate(prompts.batch(1, 2))


def test_arrays_that_an_update_has_taken_over_are_refused_with_the_remedy(updated, tmp_path):
    _, policy, stages, _, advantaged, old, new = updated
    for message, call in {
        "the arrays of this state .*; go on with the state that": lambda: stages.update.step(old, advantaged),
        "the parameters for sync_weights .* newest state": lambda: stages.rollout.sync_weights(old.params, 0),
        "the parameters for update.init .*; load them again": lambda: stages.update.init(policy.params),
        "the parameters to export .*; give those of the newest": lambda: quatrain.export_policy(
            tmp_path / "out", policy.arch, old.params, policy.tokenizer
        ),
        "the parameters of the reference .*; give build_stages a copy": lambda: (
            stages.update._reference_logprobs(new.params, advantaged.rollouts)
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert not (tmp_path / "out").exists()


def test_what_a_loop_holds_is_shown_in_a_few_lines(updated):
    config, policy, stages, prompts, advantaged, old, state = updated
    stages.rollout.sync_weights(state.params, state.step)
    evaluation = quatrain.Evaluator(config, policy, stages.reward).evaluate(stages.rollout, count=2)
    batches = (advantaged, advantaged.rewarded, advantaged.rollouts, prompts.batch(0, 1)[0])
    for each in (*batches, old, state, policy, evaluation):
        assert type(each).__repr__ is brief
        assert len(repr(each)) < 3000
    size = list(advantaged.advantages.shape)
    assert f"AdvantagedBatch(rewarded=RewardedBatch(rollouts=RolloutBatch(input_ids=int32{size}, " in repr(
        advantaged
    )
    assert f"advantages=float32{size}" in repr(advantaged)
    assert repr(state).startswith("TrainState(params={'embed': float32[294, 32], ")
    assert "step=1, bad_steps=0, train_step=1" in repr(state)
