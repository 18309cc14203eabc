import gc
import threading
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from architectures import family_cases, of_golden
from host_model import forward as host_forward
from host_model import use_host_model
from rollouts import local_rollouts
from scipy import stats

from quatrain.backend import CPU, this_backend
from quatrain.config.schema import RolloutConfig
from quatrain.engine.session import Session
from quatrain.models.decoder import forward, logits
from quatrain.models.params import init_params
from quatrain.ops.sampling import SamplingNumbers, sample, token_uniforms
from quatrain.parallel.compilations import num_compilations
from quatrain.parallel.mesh import to_memory
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling

PROMPTS = [[5, 9, 200], [17], [3, 3, 3, 3, 3, 8], [120, 7], [250, 1, 40, 6]]
STOP_IDS = tuple(range(0, 290, 13))
WIDTH = 32


def _prompts(ids=PROMPTS, first=0):
    return [Prompt(first + i, np.array(p, np.int32), f"prompt {i}", {"answer": i}) for i, p in enumerate(ids)]


@pytest.fixture
def make_engine(small_arch, small_params, tokenizer):
    def make(
        *,
        stop_ids=STOP_IDS,
        seed=11,
        arch=small_arch,
        params=small_params,
        cache_bytes=None,
        on_progress=None,
        usual_prompt=1,
        dtype="float32",
        thread=None,
        **config,
    ):
        settings = RolloutConfig(**{"n": 3, "max_new_tokens": 16, "temperature": 0.9, **config})
        engine = local_rollouts(
            arch,
            settings,
            tokenizer,
            stop_ids=stop_ids,
            seed=seed,
            cache_bytes=cache_bytes,
            on_progress=on_progress,
            usual_prompt=usual_prompt,
            dtype=dtype,
            thread=thread,
        )
        engine.sync_weights(params, 5)
        return engine

    return make


def _completion_ids(batch):
    return [row[mask].tolist() for row, mask in zip(batch.input_ids, batch.completion_mask)]


@partial(jax.jit, static_argnames="arch")
def _scores(params, arch, ids, real):
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    return logits(params, arch, forward(params, arch, ids, positions, real.astype(np.int32)).hidden)


def _forward_scores(params, arch, batch, width=WIDTH):
    """Logits [B, width, V] of the whole batch by the plain forward pass."""
    wide = [(0, 0), (0, width - batch.input_ids.shape[1])]
    return np.asarray(
        _scores(params, arch, np.pad(batch.input_ids, wide), np.pad(batch.attention_mask, wide))
    )


def _family(small_arch, case):
    """The architecture of a golden model with another vocabulary, and weights whose scores are far apart."""
    arch = of_golden(case, vocab_size=small_arch.vocab_size)
    params = init_params(arch, jax.random.key(3))
    return arch, jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, params)


COMMON_PREFIX = np.random.default_rng(0).integers(1, 290, 40).tolist()


@pytest.mark.parametrize(
    ("case", "common", "n"),
    [
        ("gpt_oss", False, 4),  # sinks, biases, experts
        pytest.param("gemma2", True, 2, marks=pytest.mark.slow),  # windows, soft caps, norms behind
        *(
            pytest.param(
                case.values[0] if hasattr(case, "values") else case, False, 2, marks=pytest.mark.slow
            )
            for case in family_cases()
        ),
    ],
)
def test_greedy_is_the_argmax_of_the_forward_pass(make_engine, small_arch, case, common, n):
    """With prompts shared, slots refilled, and a window that cuts into the prompt and the completion."""
    arch, params = _family(small_arch, case)
    engine = make_engine(arch=arch, params=params, temperature=0.0, n=n, max_concurrency=4)
    prompts = [COMMON_PREFIX * common + ids for ids in (PROMPTS if n == 2 else PROMPTS[:3])]
    batch = engine.generate(_prompts(prompts))
    scores = _forward_scores(params, arch, batch, width=64 if common else WIDTH)
    rows, columns = np.nonzero(batch.completion_mask)
    assert len(set(batch.completion_lengths)) > 1 or case != "llama"
    assert batch.input_ids[rows, columns].tolist() == scores[rows, columns - 1].argmax(-1).tolist()
    expected = np.asarray(jax.nn.log_softmax(scores[rows, columns - 1]))
    chosen = expected[np.arange(len(rows)), batch.input_ids[rows, columns]]
    np.testing.assert_allclose(batch.rollout_logprobs[rows, columns], chosen, atol=1e-4)
    computed = batch.metrics["rollout/prefill_tokens"].result()
    assert (computed < sum(map(len, prompts))) == common


@pytest.mark.parametrize("case", family_cases("gemma2"))
def test_what_all_prompts_begin_with_is_computed_once(make_engine, small_arch, computed_by, case):
    """Of those that are admitted together: all five, or two and those that follow."""
    arch, params = _family(small_arch, case)
    engine = make_engine(arch=arch, params=params, temperature=0.0, n=2, max_concurrency=4)
    batch = engine.generate(_prompts([COMMON_PREFIX + ids for ids in PROMPTS]))
    rows, columns = np.nonzero(batch.completion_mask)
    if computed_by == "host":
        likeliest = np.array([host_forward(arch, params, ids.tolist())[0] for ids in batch.input_ids])
    else:
        likeliest = _forward_scores(params, arch, batch, width=64).argmax(-1)
    assert batch.input_ids[rows, columns].tolist() == likeliest[rows, columns - 1].tolist()
    whole = sum(40 + len(ids) for ids in PROMPTS)
    computed = batch.metrics["rollout/prefill_tokens"].result()
    assert (whole - computed) % 40 == 0
    assert whole - 4 * 40 <= computed <= whole - 40
    together = make_engine(arch=arch, params=params, temperature=0.0, n=2)
    others = together.generate(_prompts([COMMON_PREFIX + ids for ids in PROMPTS]))
    assert _completion_ids(others) == _completion_ids(batch)
    assert others.metrics["rollout/prefill_tokens"].result() == whole - 4 * 40


@pytest.mark.usefixtures("computed_by")
def test_samples_of_a_prompt_stand_side_by_side(make_engine):
    batch = make_engine().generate(_prompts())
    assert batch.group_ids.tolist() == [g for g in range(5) for _ in range(3)]
    assert batch.columns["answer"] == tuple(g for g in range(5) for _ in range(3))
    for row, group in enumerate(batch.group_ids):
        prompt = PROMPTS[group]
        assert batch.input_ids[row, : len(prompt)].tolist() == prompt
        assert not batch.completion_mask[row, : len(prompt)].any()
    completions = _completion_ids(batch)
    assert completions[0] != completions[1]  # samples differ
    assert set(batch.policy_version[batch.completion_mask]) == {5}


@pytest.mark.usefixtures("computed_by")
def test_stop_token_is_kept_and_the_rest_is_cut(make_engine):
    batch = make_engine().generate(_prompts())
    _check_ends(batch)
    assert set(batch.finish_reason) == {"stop", "length"}
    truncated = batch.metrics["rollout/truncated_fraction"].result()
    assert truncated == pytest.approx(np.mean(batch.finish_reason == "length"))


def _check_ends(batch):
    for ids, reason in zip(_completion_ids(batch), batch.finish_reason):
        assert not set(ids[:-1]) & set(STOP_IDS)
        assert (ids[-1] in STOP_IDS) == (reason == "stop")
        assert len(ids) == 16 or reason == "stop"


@pytest.mark.usefixtures("computed_by")
def test_a_first_token_may_stop(make_engine):
    """Such samples never take a slot."""
    batch = make_engine(stop_ids=tuple(range(0, 290, 2)), n=8).generate(_prompts())
    assert batch.completion_lengths.min() == 1
    assert batch.completion_lengths.max() > 1
    always = make_engine(stop_ids=tuple(range(290))).generate(_prompts())
    assert always.completion_lengths.tolist() == [1] * 15
    assert always.metrics["rollout/wasted_decode_fraction"].count == 0


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("slots", [1, 4, 7])
def test_text_does_not_depend_on_the_slots(make_engine, slots):
    free = make_engine().generate(_prompts(), step=4)
    batch = make_engine(max_concurrency=slots).generate(_prompts(), step=4)
    assert _completion_ids(batch) == _completion_ids(free)
    np.testing.assert_allclose(batch.rollout_logprobs, free.rollout_logprobs, atol=1e-5)
    assert batch.finish_reason.tolist() == free.finish_reason.tolist()


@pytest.mark.usefixtures("computed_by")
def test_text_does_not_depend_on_the_company(make_engine):
    engine = make_engine()
    together = _completion_ids(engine.generate(_prompts(), step=4))
    alone = _completion_ids(engine.generate(_prompts()[2:3], step=4))
    assert alone == together[6:9]
    backwards = _completion_ids(engine.generate(_prompts()[::-1], step=4))
    assert backwards[:3] == together[12:]


@pytest.mark.usefixtures("computed_by")
def test_text_depends_on_seed_step_and_group(make_engine):
    engine = make_engine()
    base = _completion_ids(engine.generate(_prompts()))
    assert base == _completion_ids(make_engine().generate(_prompts()))
    assert base != _completion_ids(make_engine(seed=12).generate(_prompts()))
    assert base != _completion_ids(engine.generate(_prompts(), step=1))
    assert base != _completion_ids(engine.generate(_prompts(first=9)))


@pytest.mark.parametrize(
    "option",
    [
        {},
        {"top_k": 3},
        *(pytest.param(each, marks=pytest.mark.slow) for each in ({"top_p": 0.6}, {"min_p": 0.3})),
    ],
)
def test_logprobs_are_of_the_distribution_sampled_from(make_engine, small_arch, small_params, option):
    batch = make_engine(**option).generate(_prompts(first=2), step=4)
    logits = _forward_scores(small_params, small_arch, batch)
    scores = logits / 0.9
    _check_ends(batch)
    for row, column in np.argwhere(batch.completion_mask):
        p = _filtered(scores[row, column - 1], option)
        token = batch.input_ids[row, column]
        assert p[token] > 0
        assert batch.rollout_logprobs[row, column] == pytest.approx(np.log(p[token]), abs=1e-4)
    assert not batch.rollout_logprobs[~batch.completion_mask].any()
    _check_draws(batch, logits, option)


def _check_draws(batch, logits, option):
    """Each token is the one that seed, step, number of its sequence and place in it say; in a prompt's pass
    and in decode steps."""
    rows, columns = np.nonzero(batch.completion_mask)
    places = columns - np.argmax(batch.completion_mask, axis=1)[rows]
    sequences = batch.group_ids[rows] * 3 + rows % 3
    uniforms = token_uniforms(11, 4, sequences.astype(np.uint32), places.astype(np.uint32))
    numbers = SamplingNumbers.alike(len(rows), temperature=0.9, **option)
    tokens, _ = jax.jit(sample)(logits[rows, columns - 1], uniforms, numbers)
    assert batch.input_ids[rows, columns].tolist() == tokens.tolist()


def _filtered(scores, option):
    p = np.exp(scores - scores.max()).astype(np.float64)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    kept = np.ones(len(p), bool)
    if "top_k" in option:
        kept[order[option["top_k"] :]] = False
    if "top_p" in option:
        before = np.cumsum(p[order]) - p[order]
        kept[order[before >= option["top_p"]]] = False
    if "min_p" in option:
        kept = p >= option["min_p"] * p.max()
    return np.where(kept, p, 0) / p[kept].sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "option",
    [
        {"temperature": 0.5, "top_p": 0.9},
        *({"temperature": value} for value in (0.5, 1.6)),
        *({"top_p": 0.7}, {"top_k": 4}, {"min_p": 0.2}),
    ],
)
def test_chi_squared(make_engine, small_arch, option):
    """The first token, which the prompt's pass gives, and the second, from a decode step."""
    arch = replace(small_arch, vocab_size=10)
    params = init_params(arch, jax.random.key(1))
    params = {**params, "embed": params["embed"] * 0.8}
    option = {"temperature": 1.0, **option}
    engine = make_engine(arch=arch, params=params, stop_ids=(), n=3000, max_new_tokens=2, **option)
    batch = engine.generate(_prompts([[3, 1, 4]]))
    row = np.zeros((1, WIDTH), np.int32)
    row[0, :4] = 3, 1, 4, np.bincount(batch.input_ids[:, 3]).argmax()
    scores = np.asarray(_scores(params, arch, row, np.arange(WIDTH)[None] < 4))[0] / option["temperature"]
    likeliest_first = batch.input_ids[:, 3] == row[0, 3]
    for column, rows in ((3, slice(None)), (4, likeliest_first)):
        p = _filtered(scores[column - 1], option)
        counts = np.bincount(batch.input_ids[rows, column], minlength=10)
        assert not counts[p == 0].any()
        assert stats.chisquare(counts[p > 0], p[p > 0] * counts.sum()).pvalue > 1e-3


@pytest.mark.usefixtures("computed_by")
def test_stop_string_ends_a_completion_where_it_is_complete(make_engine, tokenizer):
    free = make_engine(max_new_tokens=24, stop_ids=()).generate(_prompts())
    texts = [tokenizer.decode(ids) for ids in _completion_ids(free)]
    stop = texts[4][len(texts[4]) // 2 :][:2]
    cut = make_engine(max_new_tokens=24, stop_ids=(), stop=(stop, "never met"), max_concurrency=6)
    batch = cut.generate(_prompts())
    hits = 0
    for before, after, reason in zip(_completion_ids(free), _completion_ids(batch), batch.finish_reason):
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


@pytest.mark.usefixtures("computed_by")
def test_stop_string_never_met(make_engine):
    batch = make_engine(stop=("never met",), stop_ids=(), max_new_tokens=24).generate(_prompts())
    assert set(batch.finish_reason) == {"length"}
    assert set(batch.completion_lengths) == {24}


@pytest.mark.usefixtures("computed_by")
def test_evaluation_overrides_sampling(make_engine):
    engine = make_engine()
    greedy = engine.generate(_prompts(), sampling=replace(engine.sampling, n=1, temperature=0.0))
    assert len(greedy) == 5
    best = engine.generate(_prompts(), sampling=replace(engine.sampling, n=1, top_k=1))
    assert _completion_ids(best) == _completion_ids(greedy)


@pytest.mark.usefixtures("computed_by")
def test_one_token_completions(make_engine):
    batch = make_engine(max_new_tokens=1).generate(_prompts())
    assert batch.completion_lengths.tolist() == [1] * 15


@pytest.mark.usefixtures("computed_by")
def test_no_prompts_give_an_empty_batch(make_engine):
    engine = make_engine()
    assert len(engine.generate([])) == 0
    assert len(engine.wait(engine.submit([]))) == 0


def test_usual_prompts_do_not_change_the_size_of_the_cache(make_engine, monkeypatch):
    """Prompts of 20 and of 90 tokens are decoded by one program where 90 are usual, by two where 1 is."""
    seen = use_host_model(monkeypatch)

    def compiled(usual_prompt):
        seen.clear()
        engine = make_engine(usual_prompt=usual_prompt, n=2, stop_ids=())
        engine.generate(_prompts([[7] * 20, [9] * 20]))
        before = set(seen)
        engine.generate(_prompts([[7] * 90, [9] * 90]))
        assert before
        return sorted(name for name, *_ in seen - before)

    assert compiled(90) == ["prefill"]  # of more tokens
    assert "decode" in compiled(1)


@pytest.mark.slow
def test_usual_prompts_compile_one_program_for_longer_ones(make_engine):
    def compiled(usual_prompt):
        engine = make_engine(usual_prompt=usual_prompt, n=2, stop_ids=(usual_prompt,))  # programs of its own
        short, long = (
            engine.generate(_prompts([[7] * length, [9] * length])).metrics["rollout/compilations"].result()
            for length in (20, 90)
        )
        assert short > 0
        return long

    assert compiled(90) == 1
    assert compiled(1) > 1


@pytest.mark.usefixtures("computed_by")
def test_a_long_prompt_does_not_take_slots_from_later_batches(make_engine):
    engine = make_engine(n=2, max_new_tokens=1, stop_ids=(), cache_bytes=960 * 256)  # of 32 or 512, and 16

    def slots_and_compilations(length):
        ticket = engine.submit(_prompts([[7] * length, *[[9] * length]] * 6))
        compilations = engine.wait(ticket).metrics["rollout/compilations"].result()
        return engine.engine._session._scheduler.max_slots, compilations

    assert slots_and_compilations(20)[0] == 28  # two share a prompt
    assert slots_and_compilations(500)[0] == 2
    assert slots_and_compilations(20) == (28, 0)


def test_nothing_compiles_in_steady_state(make_engine, monkeypatch):
    seen, counts = use_host_model(monkeypatch), []
    sizes = {"n": 4, "max_concurrency": 8, "max_new_tokens": 40}
    engine = make_engine(stop_ids=tuple(range(0, 290, 40)), **sizes)
    for batch in _batches_of_any_length():
        engine.generate(batch, step=len(counts))
        counts.append(len(seen))
    assert counts[30] - counts[20] <= 1
    assert counts[20] < 40  # 8 or 4 slots, 2, 4 or 8 rows; 64, 96, 128 or 192 tokens of 1, 2, 4 or 8 prompts


def _batches_of_any_length():
    rng = np.random.default_rng(0)
    yield _prompts([[1] * 32] + [[step] for step in range(7)])
    for _ in range(30):
        ids = [rng.integers(0, 290, rng.integers(1, 30)).tolist() for _ in range(rng.integers(4, 9))]
        yield _prompts(ids)


@pytest.mark.slow
def test_nothing_compiles_in_steady_state_on_a_device(make_engine, small_arch, small_params):
    """A model of one layer, of which as many programs are compiled."""
    arch = replace(small_arch, layers=small_arch.layers[:1])
    params = {**small_params, "layers": small_params["layers"][:1]}
    sizes = {"n": 4, "max_concurrency": 8, "max_new_tokens": 40}
    engine = make_engine(arch=arch, params=params, stop_ids=tuple(range(0, 290, 40)), **sizes)
    compiled = [
        engine.generate(batch, step=step).metrics["rollout/compilations"].result()
        for step, batch in enumerate(_batches_of_any_length())
    ]
    assert sum(compiled[21:]) <= 1
    assert sum(compiled[1:21]) < 40


def test_compilations_are_counted(make_engine):
    """In the metrics of a batch."""
    batches = [make_engine(max_new_tokens=1, stop_ids=(289,)).generate(_prompts()[:1]) for _ in range(2)]
    first, second = (batch.metrics["rollout/compilations"].result() for batch in batches)
    assert first >= 1
    assert second == 0


@pytest.mark.usefixtures("computed_by")
def test_a_group_larger_than_the_slots(make_engine):
    whole = make_engine(n=9).generate(_prompts()[:2])
    parts = make_engine(n=9, max_concurrency=4).generate(_prompts()[:2])
    assert _completion_ids(parts) == _completion_ids(whole)


def test_a_prompt_with_no_tokens():
    with pytest.raises(ValueError, match="at least one token"):
        _prompts([[]])


@pytest.mark.parametrize("name", ["n", "max_new_tokens"])
def test_nothing_to_sample(name):
    with pytest.raises(ValueError, match=rf"rollout.{name} must be at least 1, got 0"):
        Sampling(**{"n": 1, "max_new_tokens": 1, name: 0})


@pytest.mark.usefixtures("computed_by")
def test_as_many_decode_at_once_as_fit_and_one_that_does_not_is_refused(make_engine, small_arch):
    mixer = small_arch.layers[0].mixer
    column = 2 * small_arch.num_layers * mixer.num_kv_heads * mixer.head_dim * 4
    small = 7 * (32 + 16) * column + 1
    asked = make_engine(cache_bytes=small, max_concurrency=12)
    fitting = make_engine(cache_bytes=small, max_concurrency=7).generate(_prompts())
    derived = make_engine(cache_bytes=small).generate(_prompts())
    assert _completion_ids(fitting) == _completion_ids(derived) == _completion_ids(asked.generate(_prompts()))
    too_long = r"a prompt of 6 tokens and a completion of up to 16 need .*; lower rollout.max_new_tokens"
    with pytest.raises(ValueError, match=too_long):
        make_engine(cache_bytes=column).generate(_prompts())


@pytest.mark.usefixtures("computed_by")
def test_a_ticket_gives_its_own_prompts_whatever_finishes_first(make_engine):
    engine = make_engine(max_concurrency=4)
    whole = engine.generate(_prompts(), step=2)
    tickets = [engine.submit(_prompts()[part], step=2) for part in (slice(2), slice(2, 4), slice(4, 5))]
    other = engine.submit(_prompts(), sampling=replace(engine.sampling, n=1))  # waits for these
    engine.generate(_prompts(first=50))
    assert len(engine.wait(other)) == 5
    last, *before = [engine.wait(ticket) for ticket in (tickets[2], *tickets[:2])]
    parts = [*before, last]
    assert [part.group_ids[::3].tolist() for part in parts] == [[0, 1], [2, 3], [4]]
    assert [row for part in parts for row in _completion_ids(part)] == _completion_ids(whole)
    with pytest.raises(ValueError, match="a ticket can be waited for once; this one was"):
        engine.wait(tickets[0])


@pytest.mark.usefixtures("computed_by")
def test_tokens_carry_the_version_that_produced_them(make_engine, small_params):
    plain = make_engine(stop_ids=(), max_new_tokens=24).generate(_prompts())
    calls = []

    def between_calls(progress):
        calls.append(progress)
        engine.sync_weights(small_params, 5 + len(calls))

    engine = make_engine(stop_ids=(), max_new_tokens=24, on_progress=between_calls)
    batch = engine.generate(_prompts())
    assert _completion_ids(batch) == _completion_ids(plain)
    versions = batch.policy_version[batch.completion_mask].reshape(15, 24)
    assert versions[0].tolist() == [5] * 9 + [6] * 8 + [7] * 7
    assert (versions == versions[0]).all()
    assert [progress.slots_in_use for progress in calls] == [15, 15, 0]
    assert (calls[-1].completions, calls[-1].total) == (15, 15)
    assert calls[-1].tokens_per_s > 0
    last = f"15/15 completions, {calls[-1].tokens_per_s:,.0f} tokens/s, 0 slots"
    assert str(calls[-1]) == last


@pytest.mark.usefixtures("computed_by")
def test_new_weights_are_used_from_the_next_call_on(make_engine, small_params):
    other = jax.tree.map(lambda x: x * 1.1, small_params)
    options = {"stop_ids": (), "max_new_tokens": 24}
    before = _completion_ids(make_engine(**options).generate(_prompts()))
    engine = make_engine(**options, on_progress=lambda _: engine.sync_weights(other, 6))
    changed = engine.generate(_prompts())
    for old, new in zip(before, _completion_ids(changed)):
        assert old[:9] == new[:9]
    assert before != _completion_ids(changed)


@pytest.mark.usefixtures("computed_by")
def test_pause_holds_the_next_round_and_close_ends_the_wait(make_engine):
    engine = make_engine(thread="engine")
    engine.sampler.pause()
    tickets = [engine.submit(_prompts()[:2]), engine.submit(_prompts()[2:])]
    batches, errors = [], []

    def wait():
        try:
            batches.extend(engine.wait(ticket) for ticket in tickets)
        except RuntimeError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    engine.sampler.resume()
    waiting.join()
    assert [len(batch) for batch in batches] == [6, 9]
    engine.sampler.pause()
    tickets = [engine.submit(_prompts())]
    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.2)
    engine.close()
    waiting.join()
    assert errors == ["the engine was closed while turns were in flight"]


@pytest.mark.usefixtures("computed_by")
def test_work_is_measured(make_engine):
    metrics = make_engine(max_concurrency=4).generate(_prompts()).metrics
    used, wasted = metrics["rollout/slot_utilisation"], metrics["rollout/wasted_decode_fraction"]
    assert used.value == wasted.count - wasted.value
    assert used.count >= wasted.count > 0
    assert 0 < used.result() < 1
    assert 0 < wasted.result() < 0.5
    assert metrics["rollout/tokens_per_s"].result() > 0
    assert metrics["rollout/prefill_s"].result() > 0
    assert metrics["rollout/prefill_tokens"].result() == sum(map(len, PROMPTS))
    assert metrics["rollout/decode_s"].result() > 0


def test_sampling_is_hashable():
    assert hash(Sampling(2, 8)) == hash(Sampling(2, 8))


def test_after_a_batch_nothing_of_the_sampler_is_in_memory_but_its_weights(make_engine, small_params):
    """The KV cache is given back with the last completion, the copy of the weights by `release`."""
    engine = make_engine(dtype="bfloat16")
    before = _live_bytes()
    first = engine.generate(_prompts())
    assert _live_bytes() - before < 1024  # of counters and seeds
    engine.release()
    copied = sum(x.nbytes // 2 for x in jax.tree.leaves(small_params) if x.ndim > 1)
    assert before - _live_bytes() == pytest.approx(copied, abs=1024)
    with pytest.raises(ValueError, match="has no weights to sample from; call sync_weights"):
        engine.generate(_prompts())
    engine.sync_weights(small_params, 5)
    np.testing.assert_array_equal(engine.generate(_prompts()).input_ids, first.input_ids)


def test_weights_in_the_hosts_memory_are_sampled_from(make_engine, small_params):
    on_device, from_host = make_engine(), make_engine(params=to_memory("host", small_params))
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(from_host.engine._params)}
    assert kinds == {"device"}
    batches = [engine.generate(_prompts()) for engine in (on_device, from_host)]
    np.testing.assert_array_equal(batches[0].input_ids, batches[1].input_ids)
    np.testing.assert_array_equal(batches[0].rollout_logprobs, batches[1].rollout_logprobs)


def _live_bytes():
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays())


@pytest.mark.slow
def test_a_decode_call_that_does_not_end_early_gives_the_same_tokens(make_engine, monkeypatch):
    """As on accelerators: slots compute on after their sequences have ended, and nothing of that is kept."""
    config = {"n": 4, "max_concurrency": 4, "max_new_tokens": 13}
    expected = make_engine(**config).generate(_prompts())
    monkeypatch.setattr("quatrain.backend.CPU", replace(CPU, decode_ends_early=False))
    this_backend.cache_clear()
    try:
        batch = make_engine(**config).generate(_prompts())
    finally:
        monkeypatch.undo()
        this_backend.cache_clear()
    assert (
        len(set(batch.completion_lengths)) > 3
    )  # sequences end in the middle of calls, some at a stop token
    assert _completion_ids(batch) == _completion_ids(expected)
    np.testing.assert_allclose(batch.rollout_logprobs, expected.rollout_logprobs, atol=5e-6)
    wasted, least = (x.metrics["rollout/wasted_decode_fraction"].result() for x in (batch, expected))
    assert wasted > least


@pytest.mark.usefixtures("computed_by")
def test_batches_that_share_slots_are_those_that_are_generated_one_by_one(make_engine, monkeypatch):
    engine, live = make_engine(max_new_tokens=24), []
    advance = Session.advance
    monkeypatch.setattr(Session, "advance", lambda self, *args: (advance(self, *args), live.append(self)))
    parts, sampling = (
        [_prompts([ids] * 2, 2 * i) for i, ids in enumerate(PROMPTS)],
        replace(engine.sampling, n=2),
    )
    expected = [engine.generate(part, sampling=sampling) for part in parts]
    alone = len(live)
    together = list(engine.generate_each(parts, sampling=sampling, at_once=4))
    for one, other in zip(together, expected, strict=True):
        assert _completion_ids(one) == _completion_ids(other)
        np.testing.assert_allclose(one.rollout_logprobs, other.rollout_logprobs, atol=1e-6)
    assert len(live) - alone < alone
    assert live[-1].stats.slot_steps <= live[-1].stats.widest_slot_steps
    assert live[-1]._most_slots == 4


def test_one_program_samples_with_all_numbers(make_engine):
    """Temperatures, greedy decoding, seeds and limits are data: none of them is compiled anew; and the
    numbers of filters are, once there is one."""
    make_engine().generate(_prompts())
    make_engine(top_p=0.7).generate(_prompts())
    before = num_compilations()
    greedy = make_engine(temperature=0.0, seed=5, top_k=2).generate(_prompts())
    filtered = make_engine(temperature=0.5, top_k=7, top_p=0.9, min_p=0.01).generate(_prompts())
    shorter = make_engine(max_new_tokens=12).generate(_prompts())
    assert num_compilations() == before
    assert _completion_ids(greedy)[0::3] == _completion_ids(greedy)[1::3]
    assert len({tuple(ids) for ids in _completion_ids(filtered)}) > len(PROMPTS)
    assert shorter.completion_lengths.max() == 12
