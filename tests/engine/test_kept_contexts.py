"""Contexts that are kept beside the cache: what was computed is not computed again, and gives the same."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import host_model
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from architectures import ADAPTED, changed, family_cases, of_golden
from routed_models import routed_model

from quatrain.config.schema import RolloutConfig
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.session import Session, SessionSettings
from quatrain.models.architecture import LoRA
from quatrain.models.kv_cache import bytes_per_position, bytes_per_state
from quatrain.models.lora import with_adapters
from quatrain.models.params import init_params
from quatrain.parallel.mesh import one_device
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling, rollout_batch
from quatrain.types.sampler import PerRequestSampling, Request

STOP_IDS = (0, 7)
MEMORY = 1 << 24


class Asking:
    """Requests to a session, as `quatrain serve` and agents make them, sampled by weights of a version."""

    def __init__(self, session, params, version=4):
        self.session, self.params, self.version, self.number = session, params, version, 0
        self.seen = 0

    @property
    def stats(self):
        return self.session.stats

    @property
    def kept(self):
        return self.session._kept

    def submit(self, contexts, name="", *, salt="", tokens=12, **how):
        prompts = [Prompt(0, np.array(ids, np.int32), "") for ids in contexts]
        sampling = Sampling(n=1, max_new_tokens=tokens, **how)
        owners = []
        for _ in contexts:
            owners.append(PerRequestSampling(sampling, 5, 1, self.number, session=name, salt=salt))
            self.number += 1
        return list(self.session.submit_own(prompts, owners))

    def advance(self):
        self.session.advance(self.params, self.version)

    def finished(self, ticket):
        return self.session.finished([ticket])

    def finish(self, tickets):
        while not self.session.finished(tickets):
            self.advance()
        return self.session.take(tickets)

    def ask(self, context, name="", **how):
        [completion] = self.finish(self.submit([context], name, **how))
        return completion

    def prefilled(self):
        """Tokens that were prefilled since this was last asked."""
        before, self.seen = self.seen, self.stats.prefilled_tokens
        return self.seen - before


@pytest.fixture
def asking(computed_by, small_arch, small_params, tokenizer):
    def make(share=0.5, *, arch=small_arch, params=small_params, memory=MEMORY, **more):
        return Asking(session_of(arch, tokenizer, share, memory=memory, **more), params)

    return make


def session_of(
    arch, tokenizer, share, *, memory=MEMORY, stop_ids=STOP_IDS, mesh=None, dtype="float32", **more
):
    """A session of requests that keeps contexts in a share of its memory."""
    where = "xla", mesh or one_device(), memory
    settings = SessionSettings(
        arch, tokenizer, stop_ids, 11, jnp.dtype(dtype), *where, prefix_share=share, **more
    )
    settings = replace(settings, records_routes=arch.routes is not None)
    return Session(settings, Sampling(n=1, max_new_tokens=500), None, per_request_sampling=True)


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
    stats = kept.stats
    assert again <= 0.01 * stats.context_tokens
    assert sum(each.cached for each in done) == stats.cached_tokens
    assert stats.context_tokens == without.stats.prefilled_tokens


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
    assert kept.stats.prefilled_tokens <= length + 7
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
    assert kept.stats.cached_tokens >= 2 * 89 + 3 * 90


@pytest.fixture(scope="module")
def models(small_arch, small_params):
    """Models of all kinds of caches, by name."""
    delta = of_golden("qwen3_5_text", vocab_size=290, longest=1024)
    delta = replace(delta, layers=delta.layers[:2])  # one of each kind
    return {
        "attention": (small_arch, small_params),
        "experts": routed_model(),
        "delta": (delta, init_params(delta, jax.random.key(3))),
    }


def request(rng, done, most=400):
    """A context that continues another, is a branch or an edit of one, or begins anew."""
    kind, parent = rng.integers(4), done[rng.integers(len(done))] if done else []
    own = words(int(rng.integers(1 << 30)), int(rng.integers(1, 120)))
    keep = {0: len(parent), 1: int(rng.integers(len(parent) + 1)), 2: len(parent) - 1, 3: 0}[int(kind)]
    return [*parent[: max(keep, 0)], *own][:most]


def pool_bytes(kept):
    """What is allocated for kept contexts."""
    [store] = kept._stores
    return store.num_blocks * kept._block_bytes + store.num_states * kept._state_bytes


def common(a, b):
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)


@pytest.mark.parametrize("model", ["attention", "experts", "delta"])
@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_a_hit_is_all_that_requests_have_in_common(asking, models, model):
    """P4: histories that were edited, sub-agents and branches; of states, up to where one was kept."""
    arch, params = models[model]
    kept, without = (asking(share, arch=arch, params=params) for share in (0.5, 0))
    rng, done, held = np.random.default_rng(5), [], {"": [], "other": []}
    for number in range(40):
        context, salt = request(rng, done, 250), str(rng.choice(["", "other"]))
        completion = kept.ask(context, salt=salt, tokens=int(rng.integers(2, 30)))
        if model == "delta":
            fits = [len(each) for each in held[salt] if common(each, context[:-1]) == len(each)]
        else:
            fits = [common(each, context[:-1]) for each in held[salt]]
        longest = max(fits, default=0)
        assert completion.cached == (longest if longest >= 16 else 0), number
        whole = [*context, *completion.tokens]
        held[salt] += [whole[:-1], *([context[:-1]] if not completion.cached else [])]
        done.append(whole)
        without.number = kept.number - 1
        check_alike([completion], [without.ask(context, tokens=len(completion.tokens))], atol=1e-6)


@pytest.mark.parametrize(
    ("model", "memory"),
    [
        *(("attention", 12), ("experts", 12), ("delta", 12)),
        *(
            pytest.param(m, size, marks=pytest.mark.slow)
            for m in ("experts", "delta")
            for size in (MEMORY, 60)
        ),
    ],
)
@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_many_at_once_with_little_memory_are_what_each_is_alone(asking, models, tokenizer, model, memory):
    """P4, P6, P8 and P9: rounds of requests, sequences that lose their slots, and a store that is full: a
    block that is given to another while somebody needs it gives other tokens, or routes of another pass."""
    arch, params = models[model]
    of_block = 64 * bytes_per_position(arch, np.float32) + bytes_per_state(arch, np.float32)
    bytes_ = memory if memory == MEMORY else memory * of_block
    kept, without = (asking(share, arch=arch, params=params, memory=bytes_) for share in (0.5, 0))
    rng, done, open_, rows = np.random.default_rng(8), [], {}, []
    for number in range(last := 45):
        context, session = request(rng, done, 120), str(rng.choice(["", "a", "b", "c", "d"]))
        size = int(rng.integers(1, 40))
        [ticket] = kept.submit([context], session, tokens=size)
        open_[ticket] = context, size, kept.number - 1
        if number % 4 == 0 and (placed := kept.session._scheduler.placed):
            kept.session._scheduler.preempt(*placed[0])
        kept.advance()
        cache = kept.session._cache
        live = 0 if cache is None else kept.session._room._bytes(cache.shape)
        assert live + pool_bytes(kept.kept) <= bytes_
        for each in [each for each in open_ if kept.finished(each) or number == last - 1]:
            context, size, own = open_.pop(each)
            [completion] = kept.finish([each])
            done.append([*context, *completion.tokens])
            without.number = own
            expected = without.ask(context, tokens=size)
            check_alike([completion], [expected], atol=1e-6)
            rows.append((Prompt(0, np.array(context, np.int32), ""), completion))
    assert kept.stats.cached_tokens
    assert bool(kept.stats.evicted_tokens) == (memory != MEMORY)
    if model == "experts":
        host_model.check_routes(params, arch, rollout_batch(rows, tokenizer, {}))


@pytest.mark.parametrize("model", ["attention", "delta"])
@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_equal_requests_for_which_nothing_can_be_kept_are_computed_together(
    asking, models, monkeypatch, model
):
    """Each would wait in vain for the one before it to keep something: live sequences wait for nothing."""
    waves, prefill = [], Session._prefill_wave

    def counted(session, found, *more):
        waves.append(len(found))
        prefill(session, found, *more)

    monkeypatch.setattr(Session, "_prefill_wave", counted)
    arch, params = models[model]
    kept = asking(2e-6, arch=arch, params=params)  # a share of less than a block
    kept.finish(kept.submit([words(1, 100)] * 8))
    assert waves == [1, 7]
    assert kept.stats.cached_tokens == 0


@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_the_longest_sequence_that_fits_alone_runs(asking, small_arch):
    """P6: half of the memory was for kept contexts, and requests that had run before were refused."""
    memory = 1024 * bytes_per_position(small_arch, np.float32)
    kept = asking(memory=memory)
    for number in range(8):
        kept.ask(words(number, 100), tokens=20)
    assert kept.session.num_kept_blocks > 4
    with pytest.raises(ValueError, match="KV cache"):
        kept.ask(words(9, 1100), tokens=20)
    assert kept.session.num_kept_blocks > 4  # one that can never run costs nothing
    live = kept.submit([words(10, 30)], tokens=20)
    kept.advance()
    long = kept.submit([words(9, 700)], tokens=60)
    assert all(completion.tokens for completion in kept.finish([*live, *long]))
    assert kept.ask([*words(10, 30), 9], tokens=2).tokens
    assert kept.ask([*words(9, 700), 9], tokens=2).tokens


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_keys_of_other_weights_are_read_in_flight_alone(asking, small_params, in_flight):
    """P7: a context computed by old weights under the name of the new ones is no sample of the policy."""
    kept, first = asking(in_flight=in_flight), words(1, 100)
    new = {**small_params, "embed": small_params["embed"] * 2}
    begun = kept.ask(first, "a")
    [live] = kept.submit([words(2, 50)], "live", tokens=60)
    kept.advance()
    kept.params, kept.version = new, 5
    kept.finish([live])
    then = [*first, *begun.tokens, *words(3, 20)]
    completion = kept.ask(then, "a")
    assert set(completion.versions) == {5}
    assert completion.cached == (len(first) + len(begun.tokens) - 1 if in_flight else 0)
    assert kept.ask([*words(2, 50), 9], "b").cached == 0
    assert kept.ask([*words(2, 50), 9], "live").cached == 50  # what `b` has computed, or its own in flight
    assert kept.ask(first, "b").cached == (0 if in_flight else 99)
    again = kept.ask([*then, *completion.tokens, 9], "a")
    assert again.cached == len(then) + len(completion.tokens) - 1
    kept.session.forget("a")
    kept.version = 6
    assert kept.ask(first, "a").cached == 0
    if not in_flight:
        without = asking(0, params=new)
        without.number = kept.number
        check_alike([kept.ask(first, "c")], [without.ask(first)], atol=1e-6)


@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
@pytest.mark.usefixtures("computed_by")
def test_weights_that_are_loaded_again_under_their_version_find_nothing(small_arch, small_params, tokenizer):
    """A client of `quatrain serve` may give other weights the same number; their keys are others."""
    settings = RolloutConfig(n=1, max_new_tokens=60, prefix_share=0.5)
    engine = RolloutEngine(
        small_arch, settings, tokenizer, stop_ids=(), seed=1, cache_bytes=MEMORY, per_request_sampling=True
    )
    engine.sync_weights(small_params, 1)
    prompt = Prompt(0, np.array(words(1, 100), np.int32), "")

    def asked(rounds):
        own = PerRequestSampling(Sampling(1, 30), 0, 0, 0)
        [ticket] = engine.submit([Request.alone(prompt, own)])
        for _ in range(rounds):
            engine.advance()
        return ticket

    def finished(ticket):
        while not engine.finished(ticket):
            engine.advance()
        return engine.take(ticket)[0].cached

    assert [finished(asked(1)), finished(asked(1))] == [0, 99]
    live = asked(2)
    engine.sync_weights({**small_params, "embed": small_params["embed"] * 2}, 1)
    assert finished(live) == 99
    assert [finished(asked(1)), finished(asked(1))] == [0, 99]


@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_a_preempted_sequence_computes_its_own_turn_alone(asking):
    """P8: it finds its context where it was kept, however often it loses its slot."""
    kept, without, context = asking(), asking(0), words(6, 200)
    [ticket] = kept.submit([context], "a", tokens=60)
    rounds = restored = 0
    while not kept.finished(ticket):
        kept.advance()
        scheduler = kept.session._scheduler
        for who in scheduler.placed:
            scheduler.preempt(*who)
            restored += len(kept.session.completions(ticket)[0].tokens) - 1
            rounds += 1
    [completion] = kept.finish([ticket])
    check_alike([completion], [without.ask(context, tokens=60)], atol=1e-6)
    assert rounds > 2
    assert kept.stats.prefilled_tokens == 200 + rounds
    assert kept.stats.recomputed_tokens == restored + rounds
    assert completion.cached == 0


@pytest.mark.parametrize("computed_by", ["host"], indirect=True)
def test_release_frees_what_is_kept(asking):
    """The update of a training step needs the memory."""
    kept = asking()
    kept.ask(words(1, 100), "a")
    kept.session.release()
    assert kept.session.num_kept_blocks == pool_bytes(kept.kept) == 0


@pytest.mark.parametrize("computed_by", ["jax"], indirect=True)
@pytest.mark.parametrize("case", family_cases())
def test_every_family_samples_what_it_samples_without(asking, case):
    """P3 for all kinds of layers: caches that layers share, sinks, windows, and the states of DeltaNet."""
    arch = of_golden(case, vocab_size=290, longest=512)
    arch = replace(arch, layers=arch.layers[:2]) if case == "qwen3_5_text" else arch
    params = jax.tree.map(lambda x: x * 1.5 if x.ndim > 1 else x, init_params(arch, jax.random.key(3)))
    kept, without = (asking(share, arch=arch, params=params) for share in (0.5, 0))
    check_alike(siblings_and_turns(kept), siblings_and_turns(without))
    assert kept.stats.cached_tokens >= 2 * 89 + 3 * 90


@pytest.mark.slow
@pytest.mark.parametrize("computed_by", ["jax"], indirect=True)
def test_adapters_beside_their_matrices_and_bfloat16_sample_what_they_sample_without(asking, small_arch):
    """P3: with `rollout.lora: adapter`, and in the dtype of accelerators, in which sums differ more."""
    arch = replace(small_arch, lora=LoRA(2, 3.0, ADAPTED))
    params = with_adapters(init_params(small_arch, jax.random.key(3)), arch, jax.random.key(1))
    params = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), params)
    kept, without = (asking(share, arch=arch, params=params) for share in (0.5, 0))
    check_alike(siblings_and_turns(kept), siblings_and_turns(without))
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, params)
    of = {"arch": arch, "params": rounded, "dtype": "bfloat16"}
    both = [siblings_and_turns(asking(share, **of))[:3] for share in (0.5, 0)]
    same = [common(a.tokens, b.tokens) for a, b in zip(*both, strict=True)]
    assert sum(same) > 6  # rounding may draw another token, after which all are others
    for count, a, b in zip(same, *both, strict=True):
        np.testing.assert_allclose(a.logprobs[:count], b.logprobs[:count], rtol=0, atol=5e-2)


REPLICAS = """
import sys, numpy as np, jax
sys.path[:0] = sys.argv[1:]
from test_kept_contexts import Asking, check_alike, session_of, words
from quatrain.config.mesh import MeshShape
from quatrain.data.builtin import builtin_tokenizer
from quatrain.models.families import builtin_architecture
from quatrain.models.params import init_params, partition
from quatrain.parallel.mesh import make_mesh, mesh_shape, shardings

tokenizer = builtin_tokenizer()
arch = builtin_architecture("tiny", len(tokenizer), (tokenizer.eos_token_id,))
params = init_params(arch, jax.random.key(7))
done = []
for shape, share in ((MeshShape(4, 1, 1), 0.5), (MeshShape(2, 1, 2), 0.5), (MeshShape(1, 1, 1), 0)):
    mesh = make_mesh(shape, jax.devices()[: shape.num_devices])
    placed = jax.device_put(params, shardings(mesh, partition(arch, mesh_shape(mesh))))
    asking = Asking(session_of(arch, tokenizer, share, mesh=mesh), placed)
    contexts, each = [words(i, 70) for i in range(8)], []
    for turn in range(4):
        # With all words, the uniform of one token is at a bound of two to 1e-7, by which sums round.
        how = {"tokens": 10, "top_k": 8}
        tickets = [asking.submit([ids], str(i), **how)[0] for i, ids in enumerate(contexts)]
        completions = asking.finish(tickets)
        each += completions
        contexts = [[*c, *d.tokens, *words(turn, 9)] for c, d in zip(contexts, completions)]
        if turn and share:
            assert np.mean([c.cached > 64 for c in completions]) >= 0.95
    done.append(each)
check_alike(done[0], done[2])
check_alike(done[1], done[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("computed_by", ["jax"], indirect=True)
@pytest.mark.usefixtures("computed_by")
def test_turns_stay_on_the_replica_that_has_their_contexts():
    """P10, on four devices, and with heads on two: blocks of another replica are other tokens' keys."""
    flags = "--xla_force_host_platform_device_count=4"
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    environment = {**os.environ, "XLA_FLAGS": flags}
    subprocess.run([sys.executable, "-c", REPLICAS, *folders], check=True, env=environment)


def test_after_the_third_step_of_an_agents_run_nearly_nothing_is_compiled(
    monkeypatch, small_arch, small_params, tokenizer
):
    """What is copied and computed after a hit has any number of tokens: each would be a program."""
    seen, counts, rng = host_model.use_host_model(monkeypatch), [], np.random.default_rng(0)
    kept = Asking(session_of(small_arch, tokenizer, 0.5, memory=1 << 30, stop_ids=()), small_params)
    for step in range(10):
        kept.version = step
        waiting = [(words((step, i // 4), 40), f"{i}", int(rng.integers(3))) for i in range(12)]
        live = {}
        while waiting or live:
            now = rng.random(len(waiting)) < 0.5
            for context, name, turns in [each for each, comes in zip(waiting, now, strict=True) if comes]:
                [ticket] = kept.submit([context], name, tokens=int(rng.integers(4, 12)))
                live[ticket] = context, name, turns
            waiting = [each for each, comes in zip(waiting, now, strict=True) if not comes]
            if live:
                kept.advance()
            for ticket in [each for each in live if kept.finished(each)]:
                context, name, turns = live.pop(ticket)
                [completion] = kept.finish([ticket])
                if turns:
                    then = [*context, *completion.tokens, *words((step, turns), int(rng.integers(3, 40)))]
                    waiting.append((then, name, turns - 1))
        kept.session.release()
        counts.append(len(seen))
    late = np.diff(counts)[3:]
    assert counts[-1] <= 45, counts
    assert (late > 0).sum() <= 1, counts
