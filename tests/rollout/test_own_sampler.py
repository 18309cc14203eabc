"""A sampler of the user's: that of the example samples what the engine does; what it may not is refused."""

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from rollouts import local_rollouts

from quatrain import Piece, Progress, Sampler
from quatrain.config.schema import RolloutConfig
from quatrain.rollout.own_sampler import own_sampler
from quatrain.rollout.rollouts import Rollouts
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import TurnFailed

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_sampler.py"
PROMPTS = [Prompt(i, np.arange(3, 8 + i, dtype=np.int32), f"prompt {i}") for i in range(2)]
GREEDY = Sampling(n=1, max_new_tokens=5, temperature=0.0)


def test_the_example_samples_as_the_engine_does(small_arch, small_params, tokenizer):
    """The fault: a sampler of one's own whose turns come to the batch in another order, or with another
    version; its log-probabilities are those of the distribution that it drew from."""
    own = own_sampler(f"{EXAMPLE}:AskFunction", {"arch": small_arch, "stop_ids": (0, 7), "config": None}, 294)
    rollouts = Rollouts(own, tokenizer, Sampling(n=2, max_new_tokens=4))
    engine = local_rollouts(small_arch, RolloutConfig(n=2), tokenizer, stop_ids=(0, 7), seed=1)
    for each in (rollouts, engine):
        each.sync_weights(small_params, 5)
    batch, expected = (each.generate(PROMPTS, sampling=GREEDY) for each in (rollouts, engine))
    np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
    np.testing.assert_array_equal(batch.policy_version, expected.policy_version)
    sampled = rollouts.generate(PROMPTS, step=1)
    assert sampled.group_ids.tolist() == [0, 0, 1, 1]
    assert (sampled.rollout_logprobs[sampled.completion_mask] < 0).all()
    assert rollouts.generate(PROMPTS, step=1).completions == sampled.completions


class Says(Sampler):
    """Answers each turn with the progress that it is told to."""

    said = Progress()

    def load(self, weights, version):
        """Nothing to load."""

    def start(self, requests, listener):
        for number in range(len(requests)):
            listener(number, self.said)
        keys = Future()
        keys.set_result([0] * len(requests))
        return keys


@pytest.mark.parametrize(
    ("piece", "reason", "message"),
    [
        (Piece([1, 2], [-1.0], [0, 0]), "stop", "each token needs a log-probability and a version; got 2"),
        (Piece([1, 294], [-1.0] * 2, [0, 0]), "stop", "must be ids from 0 to 293; got 294"),
        (Piece([1], [float("nan")], [0]), "stop", "log-probabilities must be finite, in nats, .* got nan"),
        (Piece([1], [0.5], [0]), "stop", "log-probabilities must be finite, in nats, and at most 0; got 0.5"),
        (Piece([1] * 6, [-1.0] * 6, [0] * 6), "length", "at most sampling.max_new_tokens tokens; got 1 more"),
        # Of a turn without tokens, and of tokens that nobody sampled, a run would learn nothing, in silence.
        (Piece(), "stop", "a turn has at least one token, .* got none at its end; give the stop token too"),
        (Piece([1], [0.0], [-1]), "stop", "the version of the weights that it was sampled from, .* got -1"),
        (Piece([1], [-1.0], [0]), "done", "finish_reason must be None, stop or length; got 'done'"),
    ],
)
def test_what_no_trainer_may_get_is_refused(tokenizer, monkeypatch, piece, reason, message):
    monkeypatch.setattr(Says, "said", Progress(piece, reason))
    rollouts = Rollouts(own_sampler(f"{__file__}:Says", {}, 294), tokenizer, GREEDY)
    monkeypatch.setattr(rollouts.sampler._own, "said", Progress(piece, reason), raising=False)
    with pytest.raises(TurnFailed, match=f"Says: .*{message}"):
        rollouts.generate(PROMPTS[:1])


class Forgets(Says):
    """Returns nothing, and will answer some time."""

    def start(self, requests, listener):
        pass


def test_a_start_that_returns_no_future_is_named(tokenizer):
    """The fault: the run ended with an AttributeError of NoneType, which names neither sampler nor rule."""
    rollouts = Rollouts(own_sampler(f"{__file__}:Forgets", {}, 294), tokenizer, GREEDY)
    with pytest.raises(ValueError, match=r"Forgets: start must return a .*Future .*; got None"):
        rollouts.generate(PROMPTS[:1])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("class A:\n    pass", "must be a class derived from quatrain.Sampler; got"),
        ("class A(Sampler):\n    def load(self, weights, version): ...", "must define start"),
        (
            "class A(Sampler):\n    def __init__(self, url): ...\n"
            "    def load(self, weights, version): ...\n    def start(self, requests, listener): ...",
            "may need the arguments arch; it needs url too",
        ),
    ],
)
def test_a_class_that_is_no_sampler_is_refused(tmp_path, body, message):
    (tmp_path / "mine.py").write_text(f"from quatrain import Sampler\n\n\n{body}\n", "utf-8")
    with pytest.raises(ValueError, match=message):
        own_sampler(f"{tmp_path}/mine.py:A", {"arch": None}, 294)
