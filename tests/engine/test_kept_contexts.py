"""Contexts that are kept beside the cache: what was computed is not computed again, and gives the same."""

from dataclasses import replace

import numpy as np
import pytest
from architectures import changed
from host_model import forward as host_forward

from quatrain.config.schema import RolloutConfig
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.groups import PerRequestSampling
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling

STOP_IDS = (0, 7)
MEMORY = 1 << 24


class Asking:
    """Requests to an engine, as `quatrain serve` and agents make them."""

    def __init__(self, engine):
        self.engine, self.number = engine, 0

    def submit(self, contexts, session="", *, salt="", tokens=12, **how):
        prompts = [Prompt(0, np.array(ids, np.int32), "") for ids in contexts]
        sampling = Sampling(n=1, max_new_tokens=tokens, **how)
        owners = []
        for _ in contexts:
            owners.append(PerRequestSampling(sampling, 5, 1, self.number, session=session, salt=salt))
            self.number += 1
        return self.engine.submit_own(prompts, owners)

    def finish(self, tickets):
        while not all(map(self.engine.finished, tickets)):
            self.engine.advance()
        return [self.engine.take(ticket)[0][0][1] for ticket in tickets]

    def ask(self, context, session="", **how):
        [completion] = self.finish(self.submit([context], session, **how))
        return completion

    def prefilled(self):
        """Tokens that were prefilled since this was last asked."""
        before, self._before = getattr(self, "_before", 0), self.engine.stats.prefilled_tokens
        return self._before - before


@pytest.fixture
def asking(computed_by, small_arch, small_params, tokenizer):
    def make(share=0.5, *, arch=small_arch, params=small_params, memory=MEMORY, **config):
        settings = RolloutConfig(**{"n": 1, "max_new_tokens": 500, "prefix_share": share, **config})
        engine = RolloutEngine(
            arch,
            settings,
            tokenizer,
            stop_ids=STOP_IDS,
            seed=11,
            cache_bytes=memory,
            per_request_sampling=True,
        )
        engine.sync_weights(params, 4)
        return Asking(engine)

    return make


def words(seed, count):
    return np.random.default_rng(seed).integers(8, 280, count).tolist()


def dialogue(asking, session, turns, *, first, said=60, tokens=40, on_turn=lambda turn, done: None):
    """The completions of a dialogue; the user says `said` tokens before each turn but the first."""
    context, done = list(first), []
    for turn in range(turns):
        done.append(asking.ask(context, session, tokens=tokens))
        on_turn(turn, done[-1])
        context += done[-1].tokens + words((len(session), turn), said)
    return done


@pytest.mark.parametrize("turns", [8, 20])
@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_a_turn_computes_what_is_new_to_it_alone(asking, turns):
    """P1: the context of an agent of 20 turns was computed twenty times."""
    kept, without = asking(), asking(0)
    again = 0

    def count(turn, completion):
        nonlocal again
        again += kept.prefilled() - (100 if turn == 0 else 61)

    done = dialogue(kept, "a", turns, first=words(1, 100), on_turn=count)
    expected = dialogue(without, "a", turns, first=words(1, 100))
    assert [each.tokens for each in done] == [each.tokens for each in expected]
    np.testing.assert_allclose(
        np.concatenate([each.logprobs for each in done]),
        np.concatenate([each.logprobs for each in expected]),
        atol=1e-6,
    )
    stats = kept.engine.stats
    assert again <= 0.01 * stats.context_tokens
    assert sum(each.cached for each in done) == stats.cached_tokens
    assert stats.context_tokens == without.engine.stats.prefilled_tokens


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("length", [30, 64, 200])
@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_equal_first_requests_are_computed_once(asking, together, length):
    """P2: the samples of a group, in one round or one a round, computed its prompt each."""
    kept, prompt = asking(), words(2, length)
    if together:
        done = kept.finish(kept.submit([prompt] * 8, "x", temperature=1.0))
    else:
        done = [kept.ask(prompt, str(i), temperature=1.0) for i in range(8)]
    assert kept.engine.stats.prefilled_tokens <= length + 7
    assert [each.cached for each in done] == [0] + [length - 1] * 7
    without = asking(0)
    expected = without.finish(without.submit([prompt] * 8, temperature=1.0))
    assert [each.tokens for each in done] == [each.tokens for each in expected]


def check_alike(kept, without, *, atol=1e-4):
    """Equal tokens, and log-probabilities that differ by rounding alone."""
    assert [each.tokens for each in kept] == [each.tokens for each in without]
    for a, b in zip(kept, without, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=atol)


def siblings_and_turns(asking, params_of=None):
    """A group's first requests at once, then a turn of each: programs of all kinds, and few shapes."""
    prompt = words(3, 90)
    first = asking.finish(asking.submit([prompt] * 3, "a", tokens=12))
    contexts = [[*prompt, *each.tokens, *words(n, 20)] for n, each in enumerate(first)]
    then = asking.finish([asking.submit([ids], f"a{n}", tokens=12)[0] for n, ids in enumerate(contexts)])
    return [*first, *then]


@pytest.mark.parametrize("computed_by", ["jax"], indirect=True)
@pytest.mark.parametrize("windows", [None, pytest.param((5, None), marks=pytest.mark.slow)])
def test_tokens_are_those_without_kept_contexts(asking, small_arch, windows):
    """P3, by the programs of a device: a block copied to another place, or a position too much."""
    arch = changed(small_arch, family="qwen2", windows=windows) if windows else small_arch
    kept, without = asking(arch=arch), asking(0, arch=arch)
    check_alike(siblings_and_turns(kept), siblings_and_turns(without))
    assert kept.engine.stats.cached_tokens >= 2 * 89 + 3 * 90
