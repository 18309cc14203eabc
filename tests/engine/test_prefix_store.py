"""What is kept of contexts: found to the token, in blocks that hold one thing each, given up by owner."""

import numpy as np
import pytest

from quatrain.engine.prefix_store import BLOCK, PrefixStore


class Pool:
    """The tokens of each block, with all before them, in place of keys and values."""

    def __init__(self, store):
        self.store, self.blocks, self.states = store, {}, {}

    def keep(self, root, marks, owner="", **more):
        kept = self.store.keep(root, marks, owner, lambda a, b: marks[a:b, None, None], **more)
        for block, first in kept.copies:
            self.blocks[block] = root, marks[: first + BLOCK].tolist()
        if kept.state is not None:
            self.states[kept.state] = root, marks.tolist()
        return kept

    def find(self, root, marks, owner=""):
        hit = self.store.find(root, marks, owner)
        for i, block in enumerate(hit.blocks):
            end = min((i + 1) * BLOCK, hit.length)
            of, tokens = self.blocks[block]
            assert (of, tokens[:end]) == (root, marks[:end].tolist())
        if hit.state is not None:
            assert self.states[hit.state] == (root, marks[: hit.length].tolist())
        routes = np.concatenate([marks[:0, None, None], *hit.routes])
        assert routes[:, 0, 0].tolist() == marks[: hit.length].tolist()
        return hit

    def check(self):
        store, nodes = self.store, []
        left = list(store._roots.values())
        while left:
            node = left.pop()
            left += node.children.values()
            nodes += [] if node.parent is None else [node]
        blocks = [node.block for node in nodes] + store._free
        assert sorted(blocks) == list(range(store.num_blocks))
        assert store.num_blocks <= store.most_blocks
        states = [node.state for node in nodes if node.state is not None] + store._free_states
        assert sorted(states) == list(range(store.num_states))
        assert {node for node in nodes if not node.children} == set(store._leaves)
        assert all(nodes_of <= set(nodes) for nodes_of in store._nodes_of.values())


def longest_common(marks, sequences):
    def common(a, b):
        size = min(len(a), len(b))
        return size if (a[:size] == b[:size]).all() else int(np.argmin(a[:size] == b[:size]))

    return max((common(marks, each) for each in sequences), default=0)


@pytest.mark.parametrize("most_states", [None, 0, 6])
@pytest.mark.parametrize("most_blocks", [10**6, 70, 5, 0])
def test_the_store_is_a_list_of_sequences_of_which_some_were_given_up(most_blocks, most_states):
    """A block that two nodes own, or that is overwritten while a context still needs it, gives other tokens
    the keys of somebody else; a hit that is too short computes again what is there."""
    rng, store = np.random.default_rng(3), PrefixStore(most_blocks, most_states)
    pool, sequences, kept, owners = Pool(store), [np.zeros(0, np.int64)], {0: [], 1: []}, ["", "a", "b", "c"]
    for number in range(1200):
        parent = sequences[rng.integers(len(sequences))]
        more = rng.integers(0, 2, rng.integers(1, 100)) * rng.integers(1, 3)
        marks = np.concatenate([parent[: rng.integers(len(parent) + 1)], more])[:700]
        root, owner = int(rng.integers(2)), str(rng.choice(owners))
        match rng.integers(8):
            case 0:
                store.forget(owner)
            case 1:
                store.end(int(rng.integers(20)))
            case 2 | 3 | 4:
                live = int(rng.integers(20)) if rng.integers(2) else None
                pool.keep(root, marks, owner, live=live, ends_turn=bool(rng.integers(2)))
                sequences.append(marks)
                kept[root].append(marks)
            case _:
                found = longest_common(marks, kept[root])
                hit = pool.find(root, marks, owner)
                assert hit.length <= found
                if most_blocks == 10**6 and most_states is None:
                    assert hit.length == found == store.match(root, marks)
        if number % 10 == 0:
            pool.check()
        if number == 1000:
            store.keep_roots(lambda root: root == 1)
            kept[0] = []
            pool.check()
    store.clear()
    assert store.find(0, sequences[-1]).length == 0


def test_a_state_is_kept_for_the_next_turn_and_for_those_that_share_it():
    """Without the second, siblings of a group compute its prompt each; without the first's end, one owner
    would fill the memory with states of turns that nobody goes on from."""
    pool = Pool(PrefixStore(100, 3))
    turns = np.arange(200)
    for end in (30, 90, 150):
        pool.keep(0, turns[:end], "a", ends_turn=True)
        assert pool.find(0, turns, "a").length == end
    assert pool.store.num_states - len(pool.store._free_states) == 1
    for owner in ("b", "c"):  # both go on from the state at 150, and so do others later
        assert pool.find(0, turns, owner).length == 150
    pool.keep(0, turns[:170], "a", ends_turn=True)
    assert pool.find(0, turns[:160]).length == 150
    pool.check()


def test_routes_of_what_is_computed_again_must_be_those_of_the_keys():
    """A preempted sequence whose keys came from another pass would train on routes that it did not take."""
    store, marks = PrefixStore(10), np.arange(150)
    store.keep(0, marks, routes=lambda first, end: np.arange(first, end)[:, None, None])
    known = np.arange(150)[:, None, None].copy()
    assert store.find(0, marks, known=known).length == 150
    assert store.find(0, marks, known=known[:100]).length == 150
    known[70] += 1
    hit = store.find(0, marks, known=known)
    assert (hit.length, len(hit.blocks)) == (70, 2)


def test_the_order_of_victims():
    """Of nobody, then live ones, which come back, then of the youngest owner; never for a younger one."""
    pool = Pool(PrefixStore(4))

    def block(number):
        return np.full(BLOCK, number)

    def held():
        return [number for number in range(9) if pool.store.match(0, block(number))]

    for number, owner in enumerate(["old", "", "young", "live"]):
        pool.keep(0, block(number), owner, live=number if owner == "live" else None)
    pool.keep(0, block(4), "old")
    assert held() == [0, 2, 3, 4]
    pool.keep(0, block(5), "old")
    assert held() == [0, 2, 4, 5]
    pool.keep(0, block(6), "youngest")
    assert held() == [0, 2, 4, 5]
    pool.keep(0, block(7), "old")
    assert held() == [0, 4, 5, 7]
    pool.store.forget("old")
    pool.keep(0, block(8))
    assert held() == [4, 5, 7, 8]


def recomputed(share, *, episodes=64, groups=8, turns=20):
    """The share of context tokens computed again, of a store with `share` of what the last contexts need."""
    rng = np.random.default_rng(0)
    final = 100 * turns + 40
    store = PrefixStore(int(share * episodes * -(-final // BLOCK)))
    texts = [rng.integers(0, 50_000, final) for _ in range(episodes)]
    for number, text in enumerate(texts):
        text[:100] = texts[number % groups][:100]
    again = context = 0
    for turn in range(turns):
        for number in rng.permutation(episodes):
            marks, owner = texts[number][: 100 + 100 * turn], str(number)
            hit = store.find(0, marks[:-1], owner)
            known = 0 if not turn else len(marks) - 61
            again += max(known - hit.length, 0)
            context += len(marks)
            store.keep(0, marks, owner)
            store.keep(0, texts[number][: len(marks) + 39], owner)
    return 100 * again / context


@pytest.mark.parametrize("share", [1.1, 0.75, 0.5, 0.25])
def test_a_small_store_keeps_as_much_as_it_can_hold(share):
    """In rounds of requests, a store that gave up what was used least recently would keep nothing of use:
    10, 33 and 56 per cent of the context tokens would be computed again in the last three cases."""
    turns = 20
    overflow = sum(max(turn - share * turns, 0) for turn in range(turns))
    assert recomputed(share, turns=turns) <= 100 * overflow / sum(range(1, turns + 1)) + 0.5
