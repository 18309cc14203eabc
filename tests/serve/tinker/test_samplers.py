"""Samples from snapshots: what ends them, what their tokens derive from, and whose turn it is."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from architectures import changed

from quatrain.backend import this_backend
from quatrain.engine.engine import RolloutEngine
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.decoder import forward, logits
from quatrain.models.lora import adapters_of, with_adapters, with_trained
from quatrain.parallel.mesh import one_device
from quatrain.serve.tinker.calls import Base, LoraRequest, Refused, Sample, Sampled, Snapshot
from quatrain.serve.tinker.sampling import NO_LOGPROB, Samplers
from quatrain.serve.tinker.training import adapted

ALONE = Snapshot(None, None, -1, 0)
OF_STEP = {"model": 3, "step": 5}
FREE = {"stop": (), "max_tokens": 30}
"""Nothing ends a sequence but the number of its tokens."""


def base_of(arch, params, tokenizer, **values):
    where = one_device(), this_backend(), "xla", "float32", "none"
    return replace(Base("small", arch, params, tokenizer, (0, 7), *where, 11, 1024, ""), **values)


@pytest.fixture
def base(computed_by, small_arch, small_params, tokenizer):
    return base_of(small_arch, small_params, tokenizer)


class Asking:
    """Requests to samplers, whose results come by the numbers of the requests."""

    def __init__(self, base, *snapshots, most=2, cache_bytes=1 << 25, **options):
        self.samplers = Samplers(base, most=most, cache_bytes=cache_bytes, **options)
        self.keys = [
            self.samplers.open(snapshot, f"owner {i}") for i, snapshot in enumerate(snapshots or [ALONE])
        ]
        self.results, self.tickets, self.most_engines = {}, [], 0

    def start(self, tokens, key=None, **how):
        number = len(self.tickets)
        sample = Sample(np.array(tokens, np.int32), **how)
        self.tickets.append(
            self.samplers.start(key or self.keys[0], sample, lambda result: self._note(number, result))
        )
        return number

    def _note(self, number, result):
        assert number not in self.results, "a request got two results"
        self.results[number] = result

    def run(self, rounds=10**6):
        while rounds and (waiting := self.samplers.waiting):
            self.samplers.round(waiting[rounds % len(waiting)][1])
            engines = [sampler.engine for sampler in self.samplers._samplers.values()]
            self.most_engines = max(self.most_engines, sum(engine is not None for engine in engines))
            rounds -= 1

    def ask(self, tokens, key=None, **how):
        number = self.start(tokens, key, **how)
        self.run()
        assert isinstance(self.results[number], Sampled), self.results[number]
        return self.results[number]

    def tokens(self, number):
        return [each.tokens.tolist() for each in self.results[number].sequences]

    def engine(self, key=None):
        return self.samplers._samplers[key or self.keys[0]].engine


def words(seed, count):
    return np.random.default_rng(seed).integers(8, 280, count).tolist()


def tokens_of(sampled):
    return [each.tokens.tolist() for each in sampled.sequences]


PROMPT = words(1, 20)


def test_what_ends_a_sequence(base, tokenizer):
    """Faults: the model's own tokens do not end beside others, or end with `stop: []`; the last token is left
    out, or what was decoded in the round after it is kept; another sequence of the request is cut."""
    own = {"max_tokens": 30, "seed": 4, "n": 3}
    free = tokens_of(Asking(base).ask(PROMPT, **own, stop=()))
    assert [len(each) for each in free] == [30] * 3
    first, later, never = free[0][4], free[0][12], next(i for i in range(290) if i not in np.array(free))

    def expected(*ends):
        cut = [min([each.index(end) + 1 for end in ends if end in each], default=30) for each in free]
        return [each[:length] for each, length in zip(free, cut)]

    def found(stop_ids, stop):
        sampled = Asking(replace(base, stop_ids=stop_ids)).ask(PROMPT, **own, stop=stop)
        for each in sampled.sequences:
            assert len(each.tokens) == len(each.logprobs)
            assert each.stopped == (len(each.tokens) < 30)
        return tokens_of(sampled)

    assert found((first, never), None) == expected(first) != free
    assert found((first,), ()) == free
    assert found((later,), (first,)) == expected(first, later)
    assert found((first,), (later,)) == expected(first, later)
    assert found((never,), (later,)) == expected(later)
    text = tokenizer.decode(free[0][5:8])
    [stopped, *_] = found((never,), (text,))
    assert stopped == free[0][: len(stopped)]
    assert text in tokenizer.decode(stopped)
    assert text not in tokenizer.decode(stopped[:-1])
    assert found((first,), (text,))[0] == free[0][: free[0].index(first) + 1]


def test_an_end_in_the_last_place_is_a_stop(base):
    free = tokens_of(Asking(base).ask(PROMPT, **FREE, seed=4))[0]
    at = next(i for i in range(3, 30) if free[i] not in free[:i])
    sampled = Asking(base).ask(PROMPT, seed=4, max_tokens=at + 1, stop=(free[at],))
    assert (tokens_of(sampled), sampled.sequences[0].stopped) == ([free[: at + 1]], True)
    cut = Asking(base).ask(PROMPT, seed=4, max_tokens=at, stop=(free[at],))
    assert (tokens_of(cut), cut.sequences[0].stopped) == ([free[:at]], False)


def test_what_was_decoded_beyond_a_stop_is_in_no_kept_context(base):
    """The fault: the keys of tokens that were thrown away are found by the next turn of the dialogue."""
    asking = Asking(base)
    long = words(2, 100)
    free = tokens_of(asking.ask(long, **FREE, seed=4))[0]
    at = next(i for i in range(9, 14) if free[i] not in free[:i])
    asking = Asking(base)
    cut = tokens_of(asking.ask(long, max_tokens=30, seed=4, stop=(free[at],)))[0]
    turn = [*long, *cut, *words(3, 30)]
    again = asking.ask(turn, **FREE, seed=4)
    assert again.cached_tokens >= len(long)
    assert tokens_of(again) == tokens_of(Asking(base).ask(turn, **FREE, seed=4))


def test_tokens_derive_from_the_request_alone(base):
    """T14's core. Faults: a count of all requests, the slot or the order of arrival in the randomness."""
    prompts = [words(seed, 5 + 7 * seed) for seed in range(4)]
    one = Asking(base, Snapshot(None, None, **OF_STEP))
    for prompt in (*prompts, *prompts[:2]):
        one.start(prompt, n=2, **FREE)
    one.run()
    other = Asking(base, ALONE, Snapshot(None, None, **OF_STEP), most=1)
    ours, numbers = other.keys[1], []
    for prompt in (*reversed(prompts), *prompts[:2]):
        other.start(words(9, 12), n=3, **FREE)
        numbers.append(other.start(prompt, ours, n=2, **FREE))
        other.run(rounds=2)
    other.run()
    assert [one.tokens(i) for i in (3, 2, 1, 0, 4, 5)] == [other.tokens(i) for i in numbers]
    # The second request for a prompt, and the second sample of one, get tokens of their own.
    assert len({str(each) for i in (0, 4) for each in one.tokens(i)}) == 4


def test_all_that_names_a_request_changes_its_tokens(base):
    """The fault: one of the numbers of section 9 is left out of the key."""
    cases = [
        (base, ALONE, None),
        (replace(base, seed=12), ALONE, None),
        (base, replace(ALONE, model=3), None),
        (base, replace(ALONE, step=1), None),
        (base, ALONE, 0),
        (base, ALONE, 1),
    ]
    found = [tokens_of(Asking(b, snapshot).ask(PROMPT, **FREE, seed=seed)) for b, snapshot, seed in cases]
    assert len(set(map(str, found))) == len(cases)


def test_how_tokens_are_drawn_is_as_the_request_says(base):
    """The fault: one of temperature, top_k and top_p does not arrive."""
    asking = Asking(base)
    greedy = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}]
    found = [tokens_of(asking.ask(PROMPT, **FREE, **how)) for how in greedy]
    assert found[0] == found[1] == found[2]
    drawn = [{}, {"temperature": 0.5}, {"top_k": 5}, {"top_p": 0.5}]
    found = [tokens_of(asking.ask(PROMPT, **FREE, seed=1, **how)) for how in drawn]
    assert len(set(map(str, found))) == 4


def test_a_request_with_a_seed_repeats_itself_and_is_not_counted(base):
    asking = Asking(base)
    seeded = [tokens_of(asking.ask(PROMPT, **FREE, seed=5)) for _ in range(2)]
    assert seeded[0] == seeded[1]
    assert tokens_of(asking.ask(PROMPT, **FREE)) == tokens_of(Asking(base).ask(PROMPT, **FREE))


def test_requests_for_a_prompt_are_counted_by_session_model_and_step(base):
    """Faults: a sampler that made room and came back, or a second one of the same weights, repeats tokens;
    a step or a session counts those of another; the counts of sessions that have ended stay."""
    asking = Asking(base)
    samplers = asking.samplers

    def drawn(owner, model, step, count=1):
        key = samplers.open(Snapshot(None, None, model, step), owner)
        found = [tokens_of(asking.ask(PROMPT, key, **FREE)) for _ in range(count)]
        samplers.close(key)
        return found

    [first, second] = drawn("a", 3, 5, 2)
    assert drawn("b", 3, 5) == [first] != [second]
    assert drawn("b", 3, 5) == [second]
    third = drawn("a", 3, 5)
    assert third not in ([first], [second])
    others = drawn("a", 3, 6) + drawn("a", 4, 5)
    assert drawn("c", 3, 6) + drawn("d", 4, 5) == others
    left = samplers.open(Snapshot(None, None, 3, 5), "a")
    waiting = asking.start(PROMPT, left, **FREE)
    samplers.forget("a")
    assert isinstance(asking.results[waiting], Refused)
    assert left not in samplers._samplers
    assert asking.keys[0] in samplers._samplers
    assert drawn("a", 3, 5) == [first]
    samplers.forget("nobody")
    samplers.close(left)


def test_samples_share_one_prefill_and_contexts_are_kept(base):
    """Faults: each sample computes the prompt; the second turn of a dialogue computes the first again."""
    asking, prompt = Asking(base), words(5, 100)
    first = asking.ask(prompt, n=6, **FREE)
    assert first.cached_tokens == 0
    assert asking.engine().stats.prefilled_tokens <= 100 + 5
    turn = [*prompt, *tokens_of(first)[0], *words(6, 40)]
    second = asking.ask(turn, **FREE)
    assert second.cached_tokens >= 128
    assert asking.engine().stats.prefilled_tokens <= 105 + len(turn) - 128


def test_no_contexts_are_kept_where_the_setting_says_so(base):
    """Catches samplers that keep contexts with `rollout.prefix_share: 0`."""
    asking, prompt = Asking(base, prefix_share=0.0), words(5, 100)
    assert [asking.ask(prompt, **FREE).cached_tokens for _ in range(2)] == [0, 0]


def test_a_cancelled_request_frees_its_slots_and_leaves_the_others(base):
    """Faults: slots stay in use; a cancelled one is answered; a neighbour's tokens change."""
    expected = Asking(base)
    expected.ask(words(7, 9), **FREE)
    asking = Asking(base)
    running = asking.start(PROMPT, n=8, max_tokens=1000, stop=())
    left = asking.start(words(7, 9), **FREE)
    asking.run(rounds=1)
    assert asking.engine().num_live == 9
    later = asking.start(PROMPT, n=8, max_tokens=1000, stop=())
    for number in (running, later):
        asking.samplers.cancel(asking.tickets[number])
        asking.samplers.cancel(asking.tickets[number])
    assert asking.engine().num_live == 1
    asking.run(rounds=20)
    assert asking.samplers.waiting == []
    assert asking.results.keys() == {left}
    assert asking.tokens(left) == expected.tokens(0)
    asking.samplers.cancel(asking.tickets[left])  # which has finished


def test_a_waiting_snapshot_gets_its_turn_before_requests_that_came_later(base):
    """The fault: a snapshot with work again and again keeps its engine, and another never gets one."""
    asking = Asking(base, ALONE, replace(ALONE, step=1), most=1)
    busy, other = asking.keys
    order = [asking.start(PROMPT, busy, **FREE), asking.start(PROMPT, other, **FREE)]
    while len(asking.results) < 2:
        asking.start(words(len(asking.tickets), 5), busy, **FREE)
        assert asking.samplers.waiting[0][1] == (other if order[0] in asking.results else busy)
        asking.run(rounds=1)
        assert len(asking.tickets) < 40
    assert list(asking.results) == order
    asking.run()
    assert list(asking.results) == list(range(len(asking.tickets)))
    assert asking.most_engines == 1


def test_the_engine_used_least_recently_goes_first(base):
    """Faults: an engine that is wanted again goes; more engines than `most`; one with work goes."""
    asking = Asking(base, *(replace(ALONE, step=i) for i in range(3)), most=2)
    a, b, c = asking.keys
    long = words(8, 100)
    for key in (a, b, a, c):  # so that b is the one to go
        asking.ask(long, key, **FREE)
    assert asking.ask(long, a, **FREE).cached_tokens == 99
    assert asking.ask(long, c, **FREE).cached_tokens == 99
    assert asking.ask(long, b, **FREE).cached_tokens == 0
    assert asking.ask(long, a, **FREE).cached_tokens == 0
    asking.start(long, a, **FREE)
    asking.run(rounds=1)
    asking.ask(long, c, **FREE)
    assert asking.engine(a) is not None
    assert asking.most_engines == 2
    assert {asking.engine(a)._cache_bytes, asking.engine(c)._cache_bytes} == {1 << 24}


def test_an_engine_that_is_wanted_next_does_not_go(base):
    """The fault: it would be made anew at once, without its contexts, and another stays for nothing."""
    asking = Asking(base, *(replace(ALONE, step=i) for i in range(3)), most=2)
    a, b, c = asking.keys
    long = words(8, 100)
    for key in (a, b):
        asking.ask(long, key, **FREE)
    asking.start(long, c, **FREE)
    number = asking.start(long, a, **FREE)
    asking.run()
    assert asking.results[number].cached_tokens == 99


def test_a_sequence_ends_in_the_last_position(base):
    """Faults: a prompt that fills all positions, whose log-probabilities are wanted, is refused; a sequence
    grows beyond the positions."""
    asking = Asking(replace(base, arch=replace(base.arch, max_position=48)))
    for size, wanted, expected in ((40, None, 8), (40, 100, 8), (40, 3, 3), (47, None, 1), (48, 5, 1)):
        sampled = asking.ask(words(size, size), max_tokens=wanted, stop=())
        assert ([len(each.tokens) for each in sampled.sequences]) == [expected]
        assert not sampled.sequences[0].stopped
    for size in (0, 49):
        with pytest.raises(Refused, match=f"1 to 48 tokens.*got {size}"):
            asking.start(words(0, size))
    assert asking.samplers.waiting == []


def test_a_request_without_room_is_refused_and_the_next_is_not(base):
    asking = Asking(base, cache_bytes=1 << 17)
    long, short = asking.start(PROMPT, max_tokens=2000), asking.start(PROMPT, **FREE)
    asking.run()
    assert isinstance(asking.results[long], Refused)
    assert "KV cache" in str(asking.results[long])
    assert [len(each) for each in asking.tokens(short)] == [30]


def test_closing_a_sampler_fails_its_requests_alone(base):
    asking = Asking(base, ALONE, replace(ALONE, step=1))
    for key in asking.keys:
        asking.start(PROMPT, key, **FREE)
        asking.run(rounds=1)
    queued = asking.start(PROMPT, asking.keys[0], **FREE)
    asking.samplers.close(asking.keys[0])
    assert asking.results.keys() == {0, queued}
    assert all(isinstance(each, Refused) for each in asking.results.values())
    asking.run()
    assert [len(each) for each in asking.tokens(1)] == [30]


def test_a_failure_of_one_sampler_is_its_own(base, monkeypatch):
    """The fault: requests of a failed engine wait for ever, or the failure ends all tenants' work; one of the
    device itself does not, and the server says that it is well."""
    asking = Asking(base, ALONE, replace(ALONE, step=1))
    failed, other = (asking.start(PROMPT, key, **FREE) for key in asking.keys)
    asking.run(rounds=2)

    def fail_with(error):
        def fail():
            raise error

        monkeypatch.setattr(asking.engine(asking.keys[0]), "advance", fail)

    fail_with(jax.errors.JaxRuntimeError("INTERNAL: CUDA_ERROR_ILLEGAL_ADDRESS"))
    with pytest.raises(jax.errors.JaxRuntimeError, match="ILLEGAL"):
        asking.samplers.round(asking.keys[0])
    fail_with(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"))
    asking.run()
    assert str(asking.results[failed]) == "RESOURCE_EXHAUSTED: out of memory"
    assert [len(each) for each in asking.tokens(other)] == [30]
    assert asking.ask(PROMPT, asking.keys[0], **FREE).sequences


# What a device computes: adapters of two snapshots, whose numbers are those of the trainer.


@pytest.fixture(scope="module")
def trained(small_arch, small_params, tokenizer):
    """(base of one layer, its architecture with adapters, parameters of two of its steps)."""
    arch = changed(small_arch, num_layers=1)
    params = {**small_params, "layers": small_params["layers"][:1]}
    with_lora = adapted(arch, 4)
    whole = with_adapters(params, with_lora, jax.random.key(1))

    def step(number):
        leaves, structure = jax.tree.flatten(adapters_of(whole))
        keys = jax.random.split(jax.random.key(number), len(leaves))
        drawn = [x + 0.05 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves)]
        return with_trained(whole, jax.tree.unflatten(structure, drawn), with_lora)

    return base_of(arch, params, tokenizer), with_lora, [step(2), step(3)]


def test_the_sampler_has_the_numbers_of_the_trainer(trained):
    """T6's core: of tokens, prompts, the likeliest and listed tokens; a later step changes no snapshot.

    Faults: adapters or their scale left out, those of another snapshot; places shifted by one; the first
    token, or those before the last n, get numbers.
    """
    base, arch, steps = trained
    snapshots = [Snapshot(adapters_of(each), LoraRequest(4), 0, i) for i, each in enumerate(steps)]
    asking = Asking(base, *snapshots)
    prompts = [words(4, 6), words(5, 11)]
    listed = [np.random.default_rng(0).integers(0, 290, (len(p) - 1, 3)).astype(np.int32) for p in prompts]
    listed[0][2, 1] = -1
    asked = []
    for key in (*asking.keys, asking.keys[0]):
        for i, prompt in enumerate(prompts):
            how = {"prompt_logprobs_last_n": 4} if i else {}
            how |= {"prompt_logprobs": True, "target_prompt_logprobs": listed[i], "topk_prompt_logprobs": 2}
            number = asking.start(prompt, key, n=2, topk_sample_logprobs=3, max_tokens=9, stop=(), **how)
            asked.append((number, asking.keys.index(key), i))
    asking.run()
    rows = [
        (asking.results[number].sequences[j].tokens.tolist(), step, i, number, j)
        for number, step, i in asked
        for j in range(2)
    ]
    for step, params in enumerate(steps):
        here = [row for row in rows if row[1] == step]
        sequences = [[*prompts[i], *tokens] for tokens, _, i, *_ in here]
        logprobs, trained_logprobs = _reference(arch, params, sequences)
        for row, (tokens, _, i, number, j) in enumerate(here):
            result, own, size = asking.results[number], logprobs[row], len(prompts[i])
            sequence, end = result.sequences[j], size + len(tokens)
            gap = np.abs(sequence.logprobs - trained_logprobs[row, size:end])
            assert gap.max() < 1e-4
            of_prompt = result.prompt_logprobs
            first = size - 4 if i else 1
            assert np.isnan(of_prompt[:first]).all()
            np.testing.assert_allclose(of_prompt[first:], trained_logprobs[row, first:size], atol=1e-4)
            _check_likeliest(result.likeliest, own[: size - 1], first, 2)
            _check_likeliest(sequence.likeliest, own[size - 1 : end - 1], 0, 3)
            wanted = np.where(
                listed[i] < 0,
                np.nan,
                np.take_along_axis(own[: size - 1], np.maximum(listed[i], 0), axis=1),
            )
            np.testing.assert_allclose(result.target_logprobs, wanted, atol=1e-4)
    other = _reference(arch, steps[1], [[*prompts[0], *rows[0][0]]])[1]
    assert np.abs(other[0, 6:15] - asking.results[0].sequences[0].logprobs).max() > 0.1


def _check_likeliest(found, logprobs, first, count):
    """`logprobs` [T, V] are of the last T places of what was found; there are none before place `first`."""
    ids, values = found
    places = len(ids)
    assert ids.shape == values.shape == (places, count)
    assert (ids[:first] == 0).all()
    assert (values[:first] == np.float32(NO_LOGPROB)).all()
    own = logprobs[first - places :]
    np.testing.assert_allclose(values[first:], np.take_along_axis(own, ids[first:], axis=1), atol=1e-4)
    np.testing.assert_allclose(values[first:], -np.sort(-own)[:, :count], atol=1e-4)


@partial(jax.jit, static_argnames="arch")
def _logprobs(params, arch, ids, real):
    hidden = forward(params, arch, ids, np.broadcast_to(np.arange(ids.shape[1]), ids.shape), real).hidden
    return jax.nn.log_softmax(logits(params, arch, hidden))


def _reference(arch, params, sequences):
    """(log-probabilities [B, T - 1, V] after each token, the trainer's [B, T] of each token)."""
    ids, real = np.zeros((2, 8, 24), np.int32)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], real[row, : len(sequence)] = sequence, 1
    every = np.asarray(_logprobs(params, arch, ids, real))
    scored = real.astype(bool) & (np.arange(24) > 0)
    table = TokenTable(ids, real.astype(bool), scored, {})
    model, planner = PolicySpec(arch, temperature=1.0), MicroBatchPlanner(rows=8)
    return every, predict_tokens(params, table, model=model, planner=planner)


def test_scoring_and_decoding_take_turns(trained):
    """The fault: log-probabilities wait until all that decodes has ended, or the other way round."""
    asking = Asking(trained[0])
    long = asking.start(words(4, 6), max_tokens=40, stop=())
    short = [asking.start(words(i, 5), max_tokens=1, prompt_logprobs=True) for i in range(3)]
    asking.run(rounds=6)
    assert list(asking.results) == short
    running = asking.samplers._samplers[asking.keys[0]].running[asking.tickets[long]]
    assert len(asking.engine().completions(running.turns[0])[0].tokens) == 1 + 3 * 8


def test_weights_that_diverged_are_an_error(trained):
    """The fault: NaN, which stands for "none" in an answer, is taken for that."""
    base, _, [params, _] = trained
    adapters = jax.tree.map(lambda x: np.nan * x, adapters_of(params))
    asking = Asking(base, Snapshot(adapters, LoraRequest(4), 0, 0))
    number = asking.start(words(4, 6), max_tokens=1)
    asking.run()
    assert isinstance(asking.results[number], Refused)
    assert "not finite" in str(asking.results[number])


def test_the_memory_of_snapshots_counts_each_array_once(trained):
    base, _, steps = trained
    adapters = adapters_of(steps[0])
    snapshots = [Snapshot(adapters, LoraRequest(4), 0, 0)] * 2
    asking = Asking(base, ALONE, *snapshots)
    once = sum(leaf.nbytes for leaf in jax.tree.leaves(adapters))
    assert asking.samplers.num_bytes == once > 0
    asking.samplers.close(asking.keys[1])
    assert asking.samplers.num_bytes == once
    asking.samplers.close(asking.keys[2])
    assert asking.samplers.num_bytes == 0


def test_engines_share_the_base(trained):
    """The fault: each engine has a copy of the model."""
    base, _, steps = trained
    asking = Asking(base, ALONE, *(Snapshot(adapters_of(each), LoraRequest(4), 0, 0) for each in steps))
    engines = [asking.samplers._new_engine(asking.samplers._samplers[key], []) for key in asking.keys]
    for engine in engines:
        assert isinstance(engine, RolloutEngine)
        assert engine._params["embed"] is base.params["embed"]
        assert engine._params["layers"][0]["qkv"] is base.params["layers"][0]["qkv"]
