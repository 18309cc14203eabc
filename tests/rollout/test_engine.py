from dataclasses import replace

import jax
import numpy as np
import pytest

from quatrain.config.schema import RolloutConfig
from quatrain.models.decoder import forward, logits
from quatrain.rollout.decode import Sampling
from quatrain.rollout.engine import RolloutEngine
from quatrain.types import Prompt

PROMPTS = [[5, 9, 200], [17], [3, 3, 3, 3, 3, 8], [120, 7], [250, 1, 40, 6]]


def _prompts(ids=PROMPTS, first=0):
    return [Prompt(first + i, np.array(p, np.int32), f"prompt {i}", {"answer": i}) for i, p in enumerate(ids)]


@pytest.fixture
def make_engine(small_arch, small_params, tokenizer):
    def make(*, stop_ids=(), seed=11, **config) -> RolloutEngine:
        settings = RolloutConfig(**{"n": 3, "max_new_tokens": 8, "temperature": 0.9, **config})
        engine = RolloutEngine(small_arch, settings, tokenizer, stop_ids=stop_ids, seed=seed)
        engine.sync_weights(small_params, 5)
        return engine

    return make


def _completion_ids(batch):
    return [row[mask].tolist() for row, mask in zip(batch.input_ids, batch.completion_mask)]


def _greedy_by_forward(params, arch, prompt, stop_ids, length):
    ids = list(prompt)
    while len(ids) < len(prompt) + length:
        row = np.array([ids], np.int32)
        hidden, _ = forward(params, arch, row, np.arange(len(ids))[None], np.ones_like(row))
        ids.append(int(np.argmax(logits(params, arch, hidden[0, -1]))))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt) :]


def test_greedy_is_the_argmax_of_the_forward_pass(make_engine, small_arch, small_params):
    stop_ids = tuple(range(0, 290, 7))
    batch = make_engine(stop_ids=stop_ids, temperature=0.0, n=1).generate(_prompts())
    expected = [_greedy_by_forward(small_params, small_arch, p, stop_ids, 8) for p in PROMPTS]
    assert _completion_ids(batch) == expected
    stopped = [ids[-1] in stop_ids for ids in expected]
    assert [reason == "stop" for reason in batch.finish_reason] == stopped
    assert len(set(stopped)) == 2 or all(stopped)


def test_samples_of_a_prompt_stand_side_by_side(make_engine):
    batch = make_engine(stop_ids=(1, 2)).generate(_prompts())
    assert batch.group_ids.tolist() == [g for g in range(5) for _ in range(3)]
    assert batch.columns["answer"] == tuple(g for g in range(5) for _ in range(3))
    for row, group in enumerate(batch.group_ids):
        prompt = PROMPTS[group]
        assert batch.input_ids[row, : len(prompt)].tolist() == prompt
        assert not batch.completion_mask[row, : len(prompt)].any()
    completions = _completion_ids(batch)
    assert completions[0] != completions[1]  # samples differ
    assert set(batch.policy_version[batch.completion_mask]) == {5}


def test_stop_token_is_kept_and_the_rest_is_cut(make_engine):
    stop_ids = tuple(range(0, 290, 5))
    batch = make_engine(stop_ids=stop_ids).generate(_prompts())
    for ids, reason in zip(_completion_ids(batch), batch.finish_reason):
        assert not set(ids[:-1]) & set(stop_ids)
        assert (ids[-1] in stop_ids) == (reason == "stop")
        assert len(ids) == 8 or reason == "stop"
    assert set(batch.finish_reason) == {"stop", "length"}
    truncated = batch.metrics["rollout/truncated_fraction"].result()
    assert truncated == pytest.approx(np.mean(batch.finish_reason == "length"))


def test_text_does_not_depend_on_the_company(make_engine):
    engine = make_engine(stop_ids=tuple(range(0, 290, 11)))
    together = _completion_ids(engine.generate(_prompts(), step=4))
    alone = _completion_ids(engine.generate(_prompts()[2:3], step=4))
    assert alone == together[6:9]
    backwards = _completion_ids(engine.generate(_prompts()[::-1], step=4))
    assert backwards[:3] == together[12:]


def test_text_depends_on_seed_step_and_group(make_engine):
    base = _completion_ids(make_engine().generate(_prompts()))
    assert base == _completion_ids(make_engine().generate(_prompts()))
    assert base != _completion_ids(make_engine(seed=12).generate(_prompts()))
    assert base != _completion_ids(make_engine().generate(_prompts(), step=1))
    assert base != _completion_ids(make_engine().generate(_prompts(first=9)))


@pytest.mark.parametrize("option", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}])
def test_logprobs_are_of_the_distribution_sampled_from(make_engine, small_arch, small_params, option):
    batch = make_engine(stop_ids=(4,), **option).generate(_prompts())
    positions = np.broadcast_to(np.arange(batch.input_ids.shape[1]), batch.input_ids.shape)
    hidden, _ = forward(
        small_params, small_arch, batch.input_ids, positions, batch.attention_mask.astype(np.int32)
    )
    scores = np.asarray(logits(small_params, small_arch, hidden)) / 0.9
    for row, column in np.argwhere(batch.completion_mask):
        p = np.asarray(jax.nn.softmax(scores[row, column - 1]))
        order = np.argsort(-p)
        kept = np.ones(len(p), bool)
        if "top_k" in option:
            kept[order[3:]] = False
        if "top_p" in option:
            before = np.cumsum(p[order]) - p[order]
            kept[order[before >= 0.6]] = False
        if "min_p" in option:
            kept = p >= 0.3 * p.max()
        token = batch.input_ids[row, column]
        assert kept[token]
        expected = np.log(p[token] / p[kept].sum())
        assert batch.rollout_logprobs[row, column] == pytest.approx(expected, abs=1e-4)
    assert not batch.rollout_logprobs[~batch.completion_mask].any()


def test_stop_string_ends_a_completion_where_it_is_complete(make_engine, tokenizer):
    free = make_engine(max_new_tokens=40).generate(_prompts())
    texts = [tokenizer.decode(ids) for ids in _completion_ids(free)]
    stop = texts[4][len(texts[4]) // 2 :][:2]
    cut = make_engine(max_new_tokens=40, stop=(stop,)).generate(_prompts())
    hits = 0
    for before, after, reason in zip(_completion_ids(free), _completion_ids(cut), cut.finish_reason):
        assert after == before[: len(after)]
        text = tokenizer.decode(after)
        if reason == "stop":
            hits += 1
            assert stop in text
            assert stop not in tokenizer.decode(after[:-1])
        else:
            assert after == before
            assert stop not in text
    assert hits >= 1


def test_evaluation_overrides_sampling(make_engine):
    engine = make_engine(stop_ids=(2,))
    greedy = engine.generate(_prompts(), sampling=replace(engine.sampling, n=1, temperature=0.0))
    assert len(greedy) == 5
    best = engine.generate(_prompts(), sampling=replace(engine.sampling, n=1, top_k=1))
    assert _completion_ids(best) == _completion_ids(greedy)


def test_one_token_completions(make_engine):
    batch = make_engine(max_new_tokens=1).generate(_prompts())
    assert batch.completion_lengths.tolist() == [1] * 15


def test_no_prompts_give_an_empty_batch(make_engine):
    assert len(make_engine().generate([])) == 0


def test_nothing_compiles_in_steady_state(make_engine):
    engine = make_engine(stop_ids=(9,))
    engine.generate(_prompts(), step=0)
    again = engine.generate(_prompts([[8, 8], [1, 2, 3, 4], [6], [5], [7, 7, 7]]), step=1)
    assert again.metrics["rollout/compilations"].result() == 0


def test_sampling_is_hashable():
    assert hash(Sampling(2, 8)) == hash(Sampling(2, 8))
