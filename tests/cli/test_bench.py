import pytest
from classifiers import save_classifier

from quatrain.cli.bench import _bare, _stages
from quatrain.config.load import load_config
from quatrain.models.flops import forward_flops

MEDIANS = {
    "length/prompt/mean": 10.0,
    "length/completion/mean": 4.0,
    "batch/tokens": 100.0,
    "batch/shared_fraction": 0.2,
    "rollout/prefill_s": 1.0,
    "rollout/prefill_tokens": 30.0,
    "rollout/decode_s": 2.0,
    "time/update_logprobs_s": 0.5,
    "time/update_s": 3.0,
    "update/optimizer_steps": 1.0,
}


@pytest.fixture
def config():
    return load_config(None, environ={}).config


def test_the_work_of_a_gradient_is_three_forward_passes(config, small_arch):
    seconds, flops = _stages(config, small_arch, MEDIANS)["gradient"]
    sampled = config.data.batch_size * config.rollout.n * 4.0
    assert seconds == 2.5
    assert flops == 3 * forward_flops(small_arch, tokens=80.0, keys=7.0, scored=sampled)


def test_the_work_of_a_prefill_is_that_of_the_tokens_it_computed(config, small_arch):
    """Of prompts of 10 tokens, the first 4 once: seen by none before them, and by all after."""
    prompts = config.data.batch_size
    tokens = 4.0 + prompts * 6
    seconds, flops = _stages(config, small_arch, {**MEDIANS, "rollout/prefill_tokens": tokens})["prefill"]
    assert seconds == 1.0
    keys = 4 * 2 + prompts * 6 * 7  # the mean is 2 of the first 4 tokens, and 7 of the other 6
    expected = forward_flops(small_arch, tokens=tokens, keys=keys / tokens, scored=prompts)
    assert flops == pytest.approx(expected)


def test_the_work_of_reward_models_is_one_forward_pass_without_logits(tmp_path, small_arch, tokenizer):
    judge = save_classifier(tmp_path / "judge", small_arch, tokenizer)
    config = load_config(None, [f"reward.functions={{'model:{judge}': 1.0}}"], environ={}).config
    medians = {**MEDIANS, "time/reward_models_s": 0.25, "reward/judge/tokens": 1280.0}
    seconds, flops = _stages(config, small_arch, medians)["reward_models"]
    sequences = config.data.batch_size * config.rollout.n
    assert seconds == 0.25
    assert flops == forward_flops(small_arch, tokens=1280.0, keys=1280 / sequences / 2, scored=0)


def test_steps_without_a_signal_have_no_gradient_to_time(config, small_arch):
    stages = _stages(config, small_arch, {**MEDIANS, "update/optimizer_steps": 0.0})
    assert list(stages) == ["prefill", "decode"]


def test_engines_elsewhere_do_not_say_what_their_work_was(config, small_arch):
    """Servers and samplers of one's own have no times of prefill and decoding: a KeyError after the run."""
    theirs = {name: value for name, value in MEDIANS.items() if not name.startswith("rollout/")}
    assert list(_stages(config, small_arch, theirs)) == ["gradient"]


def test_what_a_bench_leaves_out():
    """With `checkpoint.dir`, checkpoints lay elsewhere, and were in the way of the next bench."""
    settings = ["checkpoint.best_metric=eval/reward", "run.profile_steps=[9]", "checkpoint.dir=s3://b/runs"]
    bare = _bare(load_config(None, [*settings, "hub.push=me/model"], {}).config, "folder", steps=2)
    assert bare.hub.push is None  # a bench publishes nothing
    assert bare.checkpoint.dir is None
    assert (bare.data.eval, bare.checkpoint.best_metric, bare.run.profile_steps) == (None, None, ())
