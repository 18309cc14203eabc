"""Prompts drawn by their running pass rates, and the metrics of each data set."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest

from quatrain.config.data_sets import MixedSet
from quatrain.config.load import load_config
from quatrain.config.schema import DataConfig
from quatrain.config.sections.data import CurriculumValues
from quatrain.data.prompts import load_prompts
from quatrain.data.tokenizer import load_tokenizer
from quatrain.loop.curriculum import Curriculum
from quatrain.loop.prompts import PromptSampler, source_metrics
from quatrain.run.catalogue import pattern_of
from quatrain.types.batches import Prompt, PromptPosition, RewardedBatch
from quatrain.types.rollouts import Completion, rollout_batch

NAN = float("nan")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("builtin:tiny")


def prompts_of(tokenizer, **sizes):
    """A source of prompts `name number`; of several sizes a mixture of equal weights."""
    rows = {name: [{"prompt": f"{name} {i}"} for i in range(size)] for name, size in sizes.items()}
    spec = tuple(MixedSet(name, 1.0) for name in sizes) if len(sizes) > 1 else next(iter(sizes))
    return load_prompts(spec, DataConfig(), tokenizer, seed=0, rows=rows)


def made(tokenizer, seed=5, values=None, **sizes):
    return Curriculum(CurriculumValues(**(values or {})), prompts_of(tokenizer, **sizes), seed=seed)


def scored(tokenizer, prompts, values, lengths=None):
    """A batch in which the function `correct` gives `values[i]` to the samples of prompt i."""
    samples = [(prompt, value) for prompt, own in zip(prompts, values, strict=True) for value in own]
    completions = []
    for number, (prompt, _) in enumerate(samples):
        completion = Completion(finish_reason="stop")
        count = lengths[number] if lengths else 1
        completion.extend([1] * count, [-1.0] * count, version=0)
        completions.append((prompt, completion))
    raw = np.array([value for _, value in samples], np.float32)
    other = np.arange(len(samples), dtype=np.float32)
    return RewardedBatch(
        rollout_batch(completions, tokenizer, {}), other, np.stack([other, raw]), ("format", "correct")
    )


def test_rates_are_running_means_of_the_groups(tokenizer):
    """By hand: the first mean as it is, then half of the way to the newest; abstentions do not count."""
    curriculum = made(tokenizer, a=4)
    rows = [2, 0, 3]
    first = scored(tokenizer, curriculum._prompts.rows(rows, 8), [[1, 0], [NAN, 1, 1], [NAN, NAN]])
    rates = curriculum.learned((), 8, rows, first)
    assert rates == (1.0, None, 0.5, None)
    again = scored(tokenizer, curriculum._prompts.rows([2, 0], 11), [[0, 0, 1], [0]])
    assert curriculum.learned(rates, 11, [2, 0], again) == (0.5, None, 0.5 + (1 / 3 - 0.5) / 2, None)
    slow = made(tokenizer, values={"newest": 0.25}, a=4)
    assert slow.learned(rates, 11, [2, 0], again)[0] == 0.75
    other = made(tokenizer, values={"reward": "format"}, a=4)
    assert other.learned((), 8, rows, first) == (3.0, None, 0.5, 5.5)


def test_failures_of_the_function_say_nothing_of_a_prompt(tokenizer):
    """The reward of a failure is -1: a prompt that is always right came below the band by a timeout."""
    curriculum = made(tokenizer, a=4)
    batch = scored(tokenizer, curriculum._prompts.rows([2, 0], 8), [[1, -1, -1], [-1]])
    failed = np.zeros((2, 4), bool)
    failed[1, 1:] = True
    assert curriculum.learned((), 8, [2, 0], replace(batch, failed=failed)) == (None, None, 1.0, None)
    found = curriculum.learned((), 8, [2, 0], batch)  # values of its own
    assert found == (-1.0, None, pytest.approx(-1 / 3), None)


def test_faults_of_episodes_say_nothing_of_a_prompt(tokenizer):
    """Every function has -1 for them: an environment that fails once put an easy prompt below the band."""
    curriculum = made(tokenizer, a=4)
    batch = scored(tokenizer, curriculum._prompts.rows([2, 0], 8), [[1, -1, -1], [-1]])
    reasons = np.array(["environment", "error", "timeout", "error"])
    batch = replace(batch, rollouts=replace(batch.rollouts, finish_reason=reasons))
    assert curriculum.learned((), 8, [2, 0], batch) == (None, None, 1.0, None)


RATES = (0.0, 0.1, 0.9, 0.91, None, 0.05)


def test_prompts_are_drawn_by_their_weights(tokenizer):
    """Those in the band, whose ends are part of it, and those not yet drawn ten times as often as others."""
    curriculum = made(tokenizer, a=6)
    drawn = [curriculum.draw(at, 1, RATES)[0] for at in range(1500)]
    shares = np.bincount(drawn, minlength=6) / 1500
    weights = np.array([0.1, 1, 1, 0.1, 1, 0.1])
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.04)
    prior = made(tokenizer, values={"prior": 0.0, "outside": 0.5}, a=6)
    drawn = [prior.draw(at, 1, RATES)[0] for at in range(1500)]
    weights = np.array([0.5, 1, 1, 0.5, 0.5, 0.5])
    np.testing.assert_allclose(np.bincount(drawn) / 1500, weights / weights.sum(), atol=0.04)


def test_a_draw_is_as_computed_by_hand(tokenizer):
    uniform = np.random.default_rng((5, 40)).random(6)
    weights = [0.1, 1, 1, 0.1, 1, 0.1]
    keys = {row: -np.log(1 - u) / w for row, (u, w) in enumerate(zip(uniform, weights, strict=True))}
    by_hand = sorted(keys, key=keys.get)
    curriculum = made(tokenizer, a=6)
    assert curriculum.draw(40, 4, RATES) == by_hand[:4]
    # More places than rows: every row once, and those that come first again.
    assert curriculum.draw(40, 8, RATES) == by_hand + by_hand[:2]
    assert curriculum.draw(40, 4, RATES) == by_hand[:4]
    assert curriculum.draw(44, 6, RATES) != by_hand
    assert made(tokenizer, seed=6, a=6).draw(40, 6, RATES) != by_hand


def test_a_mixture_keeps_its_proportions(tokenizer):
    """The stream says of which data set each prompt is, the rates which of its prompts."""
    curriculum = made(tokenizer, a=64, b=64)
    rates = [0.0] * 128
    rates[3] = rates[7] = rates[64] = rates[65] = 0.5
    stream = curriculum._prompts.take(0, 400)
    drawn = [row for first in range(0, 400, 2) for row in curriculum.draw(first, 2, tuple(rates))]
    assert [row >= 64 for row in drawn] == [prompt.source == "b" for prompt in stream]
    shares = np.isin(drawn, [3, 7]).mean(), np.isin(drawn, [64, 65]).mean()
    np.testing.assert_allclose(shares, 0.5 * 2 / (2 + 6.2), atol=0.07)


def test_a_step_draws_scores_and_remembers(tokenizer):
    """And a checkpoint's JSON gives the same rates, to the bit, and with them the same draws."""
    curriculum = made(tokenizer, a=5)
    sampler = PromptSampler(curriculum._prompts, batch_size=3, rounds=1, curriculum=curriculum)

    def sample(prompts):
        return scored(tokenizer, prompts, [[int(prompt.text[-1]) / 7, 0.2] for prompt in prompts])

    position, states, drawn = PromptPosition(), [], []
    for _ in range(4):
        batch, position = sampler.take(position, sample)
        states.append(position)
        unseen = sum(rate is None for rate in position.rates)
        assert batch.metrics["curriculum/unseen"].result() == unseen, "after the step"
        assert unseen <= 2
        drawn.append(list(dict.fromkeys(batch.rollouts.prompts)))
        assert sorted(set(batch.rollouts.group_ids)) == list(
            range(position.next_prompt - 3, position.next_prompt)
        )
    assert position.next_prompt == 12
    for row, rate in enumerate(position.rates):
        value = (float(np.float32(row / 7)) + float(np.float32(0.2))) / 2
        assert rate == pytest.approx(value, rel=1e-12)  # each mean of a prompt is the same
    found = {name: metric.result() for name, metric in batch.metrics.items()}
    assert found["curriculum/rate"] == pytest.approx(np.mean(position.rates))
    bands = [found[f"curriculum/{name}"] for name in ("below", "within", "above", "unseen")]
    assert bands == [0, 5, 0, 0]
    restored = PromptPosition(**json.loads(json.dumps(asdict(states[1]))))
    assert restored == states[1]
    batch, after = sampler.take(restored, sample)
    assert (list(dict.fromkeys(batch.rollouts.prompts)), after) == (drawn[2], states[2])


def test_bands_are_counted(tokenizer):
    found = {name: each.result() for name, each in made(tokenizer, a=6).metrics(RATES).items()}
    assert found == {
        "curriculum/below": 2, "curriculum/within": 2, "curriculum/above": 1, "curriculum/unseen": 1,
        "curriculum/rate": pytest.approx((0.1 + 0.9 + 0.91 + 0.05) / 5),
    }  # fmt: skip
    empty = made(tokenizer, a=6).metrics(())
    assert empty["curriculum/unseen"].result() == 6
    assert all(pattern_of(name) == name for name in found)


def test_a_curriculum_needs_its_reward_function(tokenizer):
    prompts, reward = prompts_of(tokenizer, a=3), SimpleNamespace(function_names=("format", "mine"))
    config = load_config(None, ["data.curriculum={reward: mine}"], {}).config
    assert Curriculum.of(config, prompts, reward) is not None
    config = load_config(None, ["data.curriculum={low: 0.3}"], {}).config
    with pytest.raises(ValueError, match=r"one of the run's reward functions, format, mine; got correct"):
        Curriculum.of(config, prompts, reward)
    assert Curriculum.of(load_config(None, [], {}).config, prompts, None) is None


def test_metrics_of_each_data_set_are_of_its_samples(tokenizer):
    ids = np.array([1], np.int32)
    prompts = [Prompt(number, ids, f"{number}", source=name) for number, name in enumerate("aba")]
    batch = scored(tokenizer, prompts, [[1, 0], [1, NAN], [0, 0]], lengths=[1, 2, 3, 5, 7, 2])
    found = {name: metric.result() for name, metric in source_metrics(prompts, batch).items()}
    assert found == {
        "source/a/samples": 4, "source/a/reward": (0 + 1 + 4 + 5) / 4, "source/a/reward/correct": 0.25,
        "source/a/reward/format": 2.5, "source/a/completion_length": (1 + 2 + 7 + 2) / 4,
        "source/b/samples": 2, "source/b/reward": 2.5, "source/b/reward/correct": 1.0,
        "source/b/reward/format": 2.5, "source/b/completion_length": 4,
    }  # fmt: skip
    known = {pattern_of(name) for name in found}
    assert {name.replace("<source>", "a").replace("<name>", "correct") for name in known} == {
        f"source/a/{name}" for name in ("samples", "reward", "reward/correct", "completion_length")
    }
    plain = [Prompt(number, ids, f"{number}") for number in range(3)]
    assert source_metrics(plain, batch) == {}
