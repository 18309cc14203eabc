"""Episodes: the policy and environments in turn, token in and token out, whatever environments do."""

from __future__ import annotations

import gc
import random
import threading
import time
from contextlib import closing
from typing import ClassVar

import numpy as np
import pytest
from rollouts import local_rollouts

from quatrain import StepResult
from quatrain.config.schema import RewardConfig, RolloutConfig
from quatrain.data.tokenizer import render
from quatrain.episodes import environment_episodes as module
from quatrain.episodes.environment_episodes import EnvironmentPlayer, EpisodeRules
from quatrain.episodes.environment_threads import InThreads
from quatrain.episodes.load_environment import load_environments
from quatrain.reward.scorer import RewardScorer
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling

STOP_IDS = tuple(range(0, 290, 5))


class Count:
    """Answers with the numbers of its turn and its prompt, and ends after `last` turns."""

    def __init__(self):
        self.turn = 0

    def reset(self, number, last=99):
        self.number, self.last = number, last

    def step(self, completion):
        self.turn += 1
        message = {"role": "user", "content": f"{self.number} and {self.turn}"}
        return StepResult([message], reward=0.5, done=self.turn == self.last)

    def get_reward(self):
        return 0.25


class Sleepy(Count):
    def step(self, completion):
        time.sleep(random.random() / 10)
        return super().step(completion)


class Opens(Count):
    """The odd prompts begin with another message."""

    def reset(self, number, prompt):
        super().reset(number)
        assert prompt[0]["content"] == f"How many {number}?"
        return [{"role": "user", "content": "Tom has 3 eggs."}] if number % 2 else None


class Faulty(Count):
    """Fails in another way for each prompt."""

    def reset(self, number):
        super().reset(number)
        if number == 0:
            raise RuntimeError("no luck")
        if number == 1:
            return 7

    def step(self, completion):
        if self.number == 2:
            return "yes"
        if self.number == 3:
            return StepResult([{"role": "user", "content": "x" * 10_000_000}])
        if self.number == 4:
            raise SystemExit
        return super().step(completion)

    def get_reward(self):
        return float("nan") if self.number == 5 else 0.0


@pytest.fixture
def make_engine(computed_by, small_arch, small_params, tokenizer):
    made = []

    def make(
        environment,
        *,
        timeout_s=20.0,
        stop_ids=STOP_IDS,
        max_turns=3,
        added=100,
        longest=300,
        kept=False,
        **config,
    ):
        settings = RolloutConfig(**{"n": 3, "max_new_tokens": 24, "temperature": 0.9, **config})
        environments = load_environments(environment)
        environments = environments.keeping() if kept else environments
        rules = EpisodeRules(
            tokenizer,
            environments.turns(tokenizer, stop_ids),
            InThreads(environments, timeout_s),
            max_turns=max_turns,
            max_environment_tokens=added,
            max_tokens=longest,
            kind=environments.kind,
            seed=11,
        )
        engine = local_rollouts(
            small_arch,
            settings,
            tokenizer,
            player=EnvironmentPlayer(rules),
            stop_ids=stop_ids,
            seed=11,
            cache_bytes=1 << 28,
        )
        engine.sync_weights(small_params, 5)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def prompts_of(tokenizer, count=6, **columns):
    texts = [({"role": "user", "content": f"How many {i}?"},) for i in range(count)]
    return [
        Prompt(i, np.array(render(tokenizer, text).ids, np.int32), text, {"number": i, **columns})
        for i, text in enumerate(texts)
    ]


def columns_of(batch):
    return {name: list(batch.columns[name]) for name in ("messages", "environment_reward", "turn_rewards")}


def test_an_episode_is_its_turns_and_answers(make_engine, tokenizer):
    batch = make_engine(Count).generate(prompts_of(tokenizer), step=4)
    assert len(batch) == 18
    assert set(batch.finish_reason.tolist()) == {"turns", "length"}
    for i in range(len(batch)):
        ids = batch.input_ids[i, : batch.lengths[i]]
        prompt = render(tokenizer, batch.prompts[i]).ids
        assert ids[: len(prompt)].tolist() == prompt
        messages = batch.columns["messages"][i]
        assert messages[:1] == [dict(message) for message in batch.prompts[i]]
        roles = [message["role"] for message in messages]
        cut = batch.finish_reason[i] == "length"
        turns = roles.count("assistant")
        assert roles == ["user", "assistant"] * turns + ["user"] * (not cut)
        mask = batch.completion_mask[i, : batch.lengths[i]]
        starts = np.flatnonzero(mask & ~np.roll(mask, 1))
        ends = (
            [*(np.flatnonzero(~mask & np.roll(mask, 1))[1:]), len(mask)] if len(starts) > 1 else [len(mask)]
        )
        assert len(starts) == turns
        said = [tokenizer.decode(ids[a:b], skip_special_tokens=True) for a, b in zip(starts, ends)]
        assert said == [message["content"] for message in messages if message["role"] == "assistant"]
        assert batch.completions[i] == said[-1]
        for turn, (end, start) in enumerate(zip(ends[:-1], starts[1:]), start=1):
            number = batch.columns["number"][i]
            written = tokenizer.decode(ids[end:start])
            assert written.endswith(f"<|user|>{number} and {turn}<|assistant|>")
        answered = turns - cut
        assert batch.columns["turn_rewards"][i] == [0.5] * answered + [0.0] * cut
        assert batch.columns["environment_reward"][i] == 0.5 * answered + 0.25
    metrics = {name: metric.result() for name, metric in batch.metrics.items()}
    assert metrics["episode/turns/max"] == 3
    assert metrics["episode/errors"] == metrics["episode/timeouts"] == 0
    assert metrics["length/environment/max"] > 5


def test_the_environment_and_its_answer_end_episodes(make_engine, tokenizer):
    class Stops(Count):
        def step(self, completion):
            return None if self.number else super().step(completion)

    batch = make_engine(Stops).generate(prompts_of(tokenizer, 2, last=1))
    ended = {reason for i, reason in enumerate(batch.finish_reason) if batch.columns["number"][i]}
    assert ended <= {"stop", "length"}
    assert "environment" in set(batch.finish_reason)


def test_what_reset_returns_follows_the_prompt(make_engine, tokenizer):
    batch = make_engine(Opens).generate(prompts_of(tokenizer, 2))
    for i, number in enumerate(batch.columns["number"]):
        first = batch.columns["messages"][i][:2]
        assert (first[1]["content"] == "Tom has 3 eggs.") == bool(number)
        start = tokenizer.decode(batch.input_ids[i])
        assert ("Tom has 3 eggs.<|assistant|>" in start) == bool(number)
        assert batch.prompts[i] == ({"role": "user", "content": f"How many {number}?"},)


def test_text_does_not_depend_on_when_environments_answer(make_engine, tokenizer, monkeypatch):
    usual = make_engine(Count).generate(prompts_of(tokenizer), step=4)
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    for most in (None, 4):
        batch = make_engine(Sleepy, max_concurrency=most).generate(prompts_of(tokenizer), step=4)
        assert (batch.input_ids == usual.input_ids).all()
        assert (batch.completion_mask == usual.completion_mask).all()
        np.testing.assert_allclose(batch.rollout_logprobs, usual.rollout_logprobs, atol=2e-5)
        assert columns_of(batch) == columns_of(usual)


def test_quick_environments_make_the_same_bits(make_engine, tokenizer):
    one, two = (make_engine(Count, max_concurrency=5).generate(prompts_of(tokenizer)) for _ in range(2))
    assert (one.rollout_logprobs == two.rollout_logprobs).all()


def test_a_fault_costs_its_episode_only(make_engine, tokenizer, caplog):
    usual = make_engine(Count).generate(prompts_of(tokenizer, 7))
    batch = make_engine(Faulty).generate(prompts_of(tokenizer, 7))
    for i, number in enumerate(batch.columns["number"]):
        if number < 6:
            cut = usual.finish_reason[i] == "length" and len(usual.columns["turn_rewards"][i]) == 1
            assert batch.finish_reason[i] == "error" or (cut and number in (2, 3, 4))
        else:
            assert batch.completions[i] == usual.completions[i]
    assert batch.metrics["episode/errors"].value == (batch.finish_reason == "error").sum()
    assert "no luck" in caplog.text
    assert "episodes ended by a fault of their environment" in caplog.text
    assert len(batch.completions[0]) == 0  # whose reset failed


def test_an_environment_that_hangs_holds_up_nobody(make_engine, tokenizer, monkeypatch):
    release = threading.Event()

    class Hangs(Count):
        def step(self, completion):
            if self.number == 1:
                release.wait(30)
            return super().step(completion)

    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    engine = make_engine(Hangs, timeout_s=1.0)
    batch = engine.generate(prompts_of(tokenizer, 3))
    release.set()
    hung = np.array(batch.columns["number"]) == 1
    assert set(batch.finish_reason[hung]) <= {"timeout", "length"}
    assert (batch.finish_reason == "timeout").sum() == batch.metrics["episode/timeouts"].value > 0
    assert "timeout" not in batch.finish_reason[~hung]


def test_others_finish_while_one_waits(make_engine, tokenizer, monkeypatch):
    """The slow environment goes on only once all episodes of the others have ended."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    ended, others = threading.Event(), []

    class Waits(Count):
        def step(self, completion):
            if self.number == 0:
                assert ended.wait(60)
            return super().step(completion)

        def close(self):
            if self.number:
                others.append(self.number)
            if len(others) == 6:
                ended.set()

    batch = make_engine(Waits, timeout_s=90.0).generate(prompts_of(tokenizer, 3))
    assert not np.isin(batch.finish_reason, ["timeout", "error"]).any()


@pytest.mark.parametrize(("limits", "reached"), [({"added": 12}, 12), ({"longest": 30}, 30)])
def test_what_has_no_room_ends_the_episode_as_length(make_engine, tokenizer, limits, reached):
    batch = make_engine(Count, **limits).generate(prompts_of(tokenizer))
    assert "length" in set(batch.finish_reason)
    if "added" in limits:
        assert 0 < batch.metrics["length/environment/max"].value <= reached
    else:
        assert batch.lengths.max() <= reached


def test_columns_that_an_environment_changes_are_its_own(make_engine, tokenizer):
    class Changes(Count):
        def reset(self, number, tags):
            super().reset(number)
            tags.append("changed")
            assert tags == ["given", "changed"]

    batch = make_engine(Changes).generate(prompts_of(tokenizer, 2, tags=["given"]))
    assert not (batch.finish_reason == "error").any()
    assert all(tags == ["given"] for tags in batch.columns["tags"])


def test_in_flight_groups_are_waited_for_in_any_order(make_engine, tokenizer):
    engine = make_engine(Count)
    prompts = prompts_of(tokenizer)
    whole = engine.generate(prompts, step=4)
    tickets = [engine.submit(prompts[i : i + 2], step=4) for i in (0, 2, 4)]
    parts = [engine.wait(ticket) for ticket in reversed(tickets)][::-1]
    assert [text for part in parts for text in part.completions] == list(whole.completions)
    with pytest.raises(ValueError, match="can be waited for once"):
        engine.wait(tickets[0])


def test_closing_ends_environments(make_engine, tokenizer):
    closed = []

    class Closes(Count):
        def close(self):
            closed.append(self.number)

    engine = make_engine(Closes)
    with closing(engine):
        engine.generate(prompts_of(tokenizer, 2))
    assert sorted(closed) == [0, 0, 0, 1, 1, 1]


def all_closed():
    """Whether the environments are closed soon that did not fail."""
    deadline = time.monotonic() + 10
    while (left := {each for each in Found.open if hasattr(each, "number")}) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not left


class Found:
    """In the form of TRL's `environment_factory`; it keeps account of the objects that are open."""

    open: ClassVar[set] = set()

    def reset(self, number, **columns):
        self.open.add(self)
        if number == 0:
            raise RuntimeError("no luck")
        self.number, self.reward = number, number + 0.5

    def look(self, place: str) -> str:
        """Looks.

        Args:
            place: Where to look.
        """
        return "nothing"

    def close(self):
        self.open.discard(self)


def test_reward_functions_get_the_environments_of_their_samples(make_engine, tokenizer, caplog):
    seen = []

    def reward_func(environments, **kwargs):
        seen.append((environments, kwargs))
        return [environment.reward for environment in environments]

    def other(completions, **columns):
        assert "environments" not in columns
        return [0.0] * len(completions)

    def scorer(accuracy_beside=None, **functions):
        config = RewardConfig(functions=dict.fromkeys(functions, 1.0))
        made = {"functions": functions, "accuracy_beside": accuracy_beside}
        return RewardScorer(config, episodes=True, **made)

    rewards = scorer(reward_func=reward_func, other=other)
    assert rewards.asks_for_environments
    assert not rewards.required_columns
    assert not scorer(other=other).asks_for_environments
    with pytest.raises(
        ValueError, match=r"eval\.accuracy reward_func gets the environments of episodes, which"
    ):
        scorer(reward_func=reward_func, accuracy_beside=rewards)
    engine = make_engine(Found, kept=True)
    batch = engine.generate(prompts_of(tokenizer, 3), step=4)
    assert {each.number for each in Found.open if hasattr(each, "number")} == {1, 2}
    rewarded = rewards.score(batch)
    np.testing.assert_array_equal(rewarded.rewards, [-1, -1, -1, 1.5, 1.5, 1.5, 2.5, 2.5, 2.5])
    ((environments, others),) = seen
    assert all(isinstance(each, Found) for each in environments)
    assert len(set(environments)) == 6
    assert [each.number for each in environments] == others["number"] == [1, 1, 1, 2, 2, 2]
    assert "environments" not in rewarded.rollouts.columns
    assert all_closed()


def test_environments_that_no_reward_function_got_are_closed_with_the_batch(make_engine, tokenizer):
    engine = make_engine(Found, kept=True)
    batch = engine.generate(prompts_of(tokenizer, 3)[1:], step=4)
    assert Found.open
    del batch
    gc.collect()
    assert all_closed()


def test_a_turn_asks_for_what_is_left_of_its_sample():
    """Its context is all before it; its limit counts sampled tokens alone, and ends with the sequence's."""
    sampling = Sampling(n=4, max_new_tokens=50)
    prompt = Prompt(3, np.array([1, 2], np.int32), "", {})
    episode = module.Episode(0, prompt, 2, 6, sampling, "", np.array([1, 2, 7], np.int32), None, None)
    first = episode.request(seed=11, max_tokens=60).own
    assert (first.sampling.n, first.sampling.max_new_tokens, first.offset) == (1, 50, 0)
    assert (first.seed, first.step, first.sequence_id) == (11, 6, 3 * 4 + 2)
    episode.completion.extend([5, 6], [-1.0, -1.0], 0)
    episode.completion.begin_turn([8])
    second = episode.request(seed=11, max_tokens=60)
    assert second.prompt.input_ids.tolist() == [1, 2, 7, 5, 6, 8]
    assert (second.own.sampling.max_new_tokens, second.own.offset) == (48, 3)
    assert episode.request(seed=11, max_tokens=16).own.sampling.max_new_tokens == 10
