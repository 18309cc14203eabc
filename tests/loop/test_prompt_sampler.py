"""The prompts of each training step, and dynamic sampling, with a rollout and rewards that are given."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.config.schema import AdvantageConfig, DataConfig
from quatrain.data.prompts import load_prompts
from quatrain.data.tokenizer import load_tokenizer
from quatrain.loop.prompts import NoSignal, PromptSampler, groups_with_signal
from quatrain.types.batches import PromptPosition, RewardedBatch
from quatrain.types.join import join_groups
from quatrain.types.metrics import Metric
from quatrain.types.rollouts import Completion, rollout_batch

SAMPLES = 3


@dataclass
class Given:
    """Rollout and reward in one: the prompt at a position has signal if `signal(position)`."""

    signal: object
    tokenizer: object
    greedy: bool = False

    def __post_init__(self):
        self.calls = []

    def sample(self, prompts):
        return self.score(self.generate(prompts))

    def generate(self, prompts):
        self.calls.append([prompt.group_id for prompt in prompts])
        batch = self._completed(prompts, SAMPLES)
        return replace(batch, baseline=self._completed(prompts, 1)) if self.greedy else batch

    def _completed(self, prompts, samples):
        def completion(prompt, sample):
            # Lengths that differ from round to round, so that batches differ in width.
            count = 1 + (prompt.group_id + sample) % 4
            made = Completion(finish_reason="stop")
            made.extend([prompt.group_id] * count, [-1.0 - sample] * count, version=7)
            return made

        made = [(prompt, completion(prompt, k)) for prompt in prompts for k in range(samples)]
        return rollout_batch(made, self.tokenizer, {"rollout/made": Metric(len(made), reduction="sum")})

    def score(self, rollouts):
        seen = dict.fromkeys(rollouts.group_ids.tolist(), -1)
        rewards = np.zeros(len(rollouts), np.float32)
        for row, group in enumerate(rollouts.group_ids.tolist()):
            seen[group] += 1
            rewards[row] = seen[group] if self.signal(group) else group
        baseline = None if rollouts.baseline is None else rollouts.group_ids.astype(np.float32)
        mean = Metric(float(rewards.sum()), len(rewards))
        return RewardedBatch(
            rollouts, rewards, rewards[None], ("r",), {"reward/mean": mean}, baseline_rewards=baseline
        )


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("builtin:tiny")


@pytest.fixture
def source(tokenizer):
    return load_prompts("builtin:arithmetic", DataConfig(), tokenizer, seed=3)


def make_training(source, tokenizer, signal, *, batch_size=4, rounds=5, greedy=False):
    given = Given(signal, tokenizer, greedy)
    return Training(PromptSampler(source, batch_size=batch_size, rounds=rounds), given), given


class Training:
    """Takes one batch after the other."""

    def __init__(self, draws, given):
        self.draws, self.given, self.position = draws, given, PromptPosition()

    def take(self):
        batch, self.position = self.draws.take(self.position, self.given.sample)
        return batch


def groups(batch):
    return list(dict.fromkeys(batch.rollouts.group_ids.tolist()))


def counts(batch):
    found = {name: metric.result() for name, metric in batch.metrics.items()}
    return [found[f"dynamic_sampling/{name}_groups"] for name in ("drawn", "dropped", "returned", "filled")]


def test_without_dynamic_sampling_a_step_takes_the_next_prompts(source, tokenizer):
    training, given = make_training(source, tokenizer, lambda group: False, rounds=1)
    batches = [training.take() for _ in range(7)]
    assert [groups(batch) for batch in batches[:2]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert given.calls[1] == [4, 5, 6, 7]
    assert training.position == PromptPosition(28)
    assert not any(name.startswith("dynamic") for name in batches[0].metrics)


def test_further_prompts_are_drawn_until_enough_have_signal(source, tokenizer):
    training, given = make_training(source, tokenizer, lambda group: group in (1, 4, 6, 7, 9, 10, 11, 12))
    first = training.take()
    # One of the first four; for the missing three, 3 x 4 / 1 prompts are expected, and four are drawn.
    assert given.calls == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(first) == [1, 4, 6, 7]
    assert counts(first) == [8, 4, 0, 0]
    assert first.metrics["dynamic_sampling/rounds"].result() == 2
    assert training.position == PromptPosition(8)
    # Three of four: for the missing one, ceil(4 / 3) are drawn, and the second of them is not needed.
    second = training.take()
    assert given.calls[2:] == [[8, 9, 10, 11], [12, 13]]
    assert groups(second) == [9, 10, 11, 12]
    assert counts(second) == [6, 1, 1, 0]
    assert training.position == PromptPosition(13)
    # Metrics are those of all groups that were drawn.
    assert second.rollouts.metrics["rollout/made"].result() == 6 * SAMPLES
    drawn = np.array([8 * 3, 3, 3, 3, 3, 13 * 3])  # sums of rewards, 0 + 1 + 2 with signal
    assert second.metrics["reward/mean"].result() == pytest.approx(drawn.sum() / 18)


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_is_the_next_groups_with_signal_whatever_the_rounds(source, tokenizer, seed):
    rng = np.random.default_rng(seed)
    wanted = int(rng.integers(1, 8))
    signal = (rng.random(400) < rng.uniform(0.2, 1)).tolist()
    training, given = make_training(
        source, tokenizer, lambda g: signal[g], batch_size=wanted, rounds=50, greedy=True
    )
    first = 0
    for _ in range(5):
        batch = training.take()
        expected = [g for g in range(first, 400) if signal[g]][:wanted]
        assert groups(batch) == expected
        first = expected[-1] + 1
        assert training.position == PromptPosition(first)
        drawn, dropped, returned, filled = counts(batch)
        assert drawn == wanted + dropped + returned
        assert filled == 0
        # As if exactly these prompts had been drawn at once.
        prompts = [source.take(group, 1)[0] for group in expected]
        alone = given.sample(prompts)
        for one, other in (
            (batch.rollouts, alone.rollouts),
            (batch.rollouts.baseline, alone.rollouts.baseline),
        ):
            for name in (
                "input_ids", "attention_mask", "completion_mask", "rollout_logprobs", "policy_version",
                "finish_reason", "group_ids",
            ):  # fmt: skip
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name), name)
            assert (one.prompts, one.completions, one.columns) == (
                other.prompts,
                other.completions,
                other.columns,
            )
        for name in ("rewards", "rewards_per_function", "baseline_rewards"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(alone, name), name)


def test_rounds_that_do_not_suffice_are_filled(source, tokenizer):
    training, given = make_training(source, tokenizer, lambda group: group in (5, 6), rounds=2)
    batch = training.take()
    assert len(given.calls) == 2
    assert groups(batch) == [0, 1, 5, 6]
    assert counts(batch) == [8, 4, 0, 2]
    assert training.position == PromptPosition(8)


def test_five_steps_without_signal_end_the_run(source, tokenizer):
    training, _given = make_training(source, tokenizer, lambda group: group == 8 * 2, rounds=2)
    for step in range(2):
        assert groups(training.take()) == [8 * step + k for k in range(4)]
    assert training.position == PromptPosition(16, 2)
    training.take()
    assert training.position == PromptPosition(24, 0)  # signal begins the count again
    for _ in range(3, 7):
        training.take()
    assert training.position == PromptPosition(56, 4)
    with pytest.raises(NoSignal, match="the last of these steps drew 8 prompts in 2 rounds"):
        training.take()
    assert training.position == PromptPosition(56, 4)  # a resumed run takes this step again


def test_samples_without_a_reward_are_no_signal(source, tokenizer):
    given = Given(lambda group: True, tokenizer)
    nan = float("nan")
    rewards = np.array([1, 1, 1, nan, nan, nan, nan, 2, nan, nan, 2, 3], np.float32)
    rollouts = given.generate(source.take(0, 4))
    assert groups_with_signal(RewardedBatch(rollouts, rewards, rewards[None], ("r",))) == [3]


def test_a_group_has_a_signal_if_one_of_its_roles_has(source, tokenizer):
    given = Given(lambda group: True, tokenizer)
    rewards = np.array([1, 2, 2, 1, 2, 3, 1, 1, 1, 1, 2, 1], np.float32)
    rollouts = given.generate(source.take(0, 4))
    roles = replace(rollouts, columns={**rollouts.columns, "agent_role": ("a", "b", "b") * 4})
    assert groups_with_signal(RewardedBatch(roles, rewards, rewards[None], ("r",))) == [1, 3]


def test_values_of_functions_are_a_signal_where_their_sums_are_none(source, tokenizer):
    """`gdpo` learns from equal sums of different values: such groups were dropped as without a signal."""
    given = Given(lambda group: True, tokenizer)
    rollouts = given.generate(source.take(0, 4))
    nan = float("nan")
    each = np.float32(
        [
            [1, 0, 0, 1, 1, 1, nan, 0, 0, 1, 0, 1],
            [0, 1, 0, 0, 0, 0, nan, 0, 0, 0, 1, 0],
            [0, 0, 1, 0, 0, 0, nan, 0, 0, 0, 0, 0],
            [0, 0, 0, 1, 2, 3, nan, 0, 0, 0, 0, 0],
        ]
    )
    weights = np.float32([1, 1, 0.5, 0])
    each[2] *= 2
    rewards = np.float32(weights @ each)
    batch = RewardedBatch(rollouts, rewards, each, ("a", "b", "c", "log"), function_weights=weights)
    assert groups_with_signal(batch) == []
    assert groups_with_signal(batch, by_function=True) == [0]
    advantages = AdvantageEstimator(AdvantageConfig(estimator="gdpo")).estimate(batch).advantages
    assert np.unique(rollouts.group_ids[advantages.any(axis=1)]).tolist() == [0]


def test_a_greedy_completion_of_another_reward_is_a_signal(source, tokenizer):
    given = Given(lambda group: False, tokenizer, greedy=True)
    batch = given.sample(source.take(0, 3))  # the samples' rewards are 0, 1, 2 in groups 0, 1, 2
    greedy = np.float32([0, 0, 0, 1, 1, 1, 0, 0, 0])
    assert groups_with_signal(replace(batch, baseline_rewards=greedy)) == [2]


def test_episodes_of_several_batches_stay_apart(source, tokenizer):
    given = Given(lambda group: True, tokenizer)
    first, second = given.sample(source.take(0, 2)), given.sample(source.take(2, 2))
    of_two_rows = replace(first.rollouts, episode_ids=np.array([7, 7, 7, 1, 1, 2]))
    first = replace(first, rollouts=of_two_rows, rewards=np.float32([0, 0, 0, 1, 1, 2]))
    joined = join_groups([first, second], [1, 3, 0]).rollouts
    assert joined.group_ids.tolist() == [1, 1, 1, 3, 3, 3, 0, 0, 0]
    assert len(joined.episodes.first_rows) == 6
    assert [len(set(part)) for part in np.split(joined.episodes.of_row, 3)] == [2, 3, 1]


def test_episodes_of_two_batches_with_one_number_stay_apart(source, tokenizer):
    """Each batch numbers its episodes from 0; joined, those of rows side by side must not become one."""
    given = Given(lambda group: True, tokenizer)
    first, second = given.sample(source.take(0, 2)), given.sample(source.take(2, 2))
    one_each = np.float32([0, 0, 0, 1, 1, 1])
    rollouts = [
        replace(batch.rollouts, episode_ids=np.array([0, 0, 0, 1, 1, 1])) for batch in (first, second)
    ]
    whole = [
        replace(batch, rollouts=of, rewards=one_each, rewards_per_function=one_each[None])
        for batch, of in zip((first, second), rollouts, strict=True)
    ]
    joined = join_groups(whole, [0, 2, 1, 3]).rollouts
    assert len(joined.episodes.first_rows) == 4
    assert len(set(joined.episode_ids.tolist())) == 4
    assert [len(set(part)) for part in np.split(joined.episode_ids, 4)] == [1, 1, 1, 1]


def test_batches_are_joined_before_their_tokens_are_scored(source, tokenizer):
    given = Given(lambda group: True, tokenizer)
    batch = given.sample(source.take(0, 2))
    valued = replace(batch, values=np.zeros(batch.rollouts.input_ids.shape, np.float32))
    with pytest.raises(ValueError, match="joined before their tokens are scored"):
        join_groups([batch, valued], [0])
