"""Which contexts are kept beside the live cache, and in which blocks: a trie of BLOCK tokens a node.

Host only: `contexts.py` calls it, and copies what it names on the device. A replica of the sampler has one.
Data flow: the tokens of a context -> `find` -> blocks with the keys and values of its beginning; the tokens
of a sequence -> `keep` -> the blocks into which to copy what the trie lacks.

All decisions derive from the calls and their order, never from time: the same calls give the same decisions.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

BLOCK = 64
"""Tokens of a block. A hit is found to the token, so that smaller ones would only cost copies."""
FIRST_BLOCKS, FIRST_STATES = 64, 4
"""A pool begins with so many, and has four times as many when it is full: few sizes, each a program."""


@dataclass(eq=False)
class Node:
    """Up to BLOCK tokens after those of its parent, and the block that has their keys and values."""

    marks: np.ndarray
    block: int
    parent: Node | None
    number: int
    """In the order in which nodes were made; decides where all else is equal."""
    children: dict[bytes, Node] = field(default_factory=dict)
    owners: set[int] = field(default_factory=set)
    """The open owners that used it."""
    used: int = 0
    """The number of the last call that used it."""
    live: int = 0
    """Sequences that have it in their rows of the live cache."""
    routes: np.ndarray | None = None
    """[tokens, L, k]: those of the pass that wrote the block, if they are recorded."""
    state: int | None = None
    """The state of DeltaNet layers after its last token, if that is kept."""
    begun: int = 0
    """How often a context went on from its state."""


class Hit(NamedTuple):
    """The beginning of a context that is kept: `length` tokens, the last block perhaps in part."""

    length: int = 0
    blocks: Sequence[int] = ()
    routes: Sequence[np.ndarray] = ()
    state: int | None = None


class Copy(NamedTuple):
    """A block to fill with the keys and values of a sequence's tokens from number `first` on."""

    block: int
    first: int


class Kept(NamedTuple):
    """What to copy of a sequence; `state`: where to, if that of its last token is to be kept."""

    copies: Sequence[Copy] = ()
    state: int | None = None


RoutesOf = Callable[[int, int], np.ndarray | None]
"""The routes of a sequence's tokens from one number to another."""


class PrefixStore:
    """Contexts in at most `most_blocks` blocks; with `most_states`, hits end where a state is kept.

    Contexts of different roots (salt, version of the weights) share nothing. An owner is who asks again and
    again with contexts that grow; it ends with `forget`.
    """

    def __init__(self, most_blocks: int, most_states: int | None = None):
        self.most_blocks, self.most_states = most_blocks, most_states
        self.evicted_tokens = self.num_blocks = self.num_states = 0
        self.clear()

    def clear(self) -> None:
        """Forget all, the pools too; the next ones begin with the sizes that these had."""
        self._least_blocks = max(FIRST_BLOCKS, self.num_blocks)
        self._least_states = max(FIRST_STATES, self.num_states)
        self._roots: dict[Hashable, Node] = {}
        self._owners: dict[str, int] = {}
        self._nodes_of: dict[int, set[Node]] = {}
        self._last_of: dict[int, Node] = {}
        self._leaves: dict[Node, None] = {}
        self._live: dict[int, list[Node]] = {}
        self._with_state: dict[int, Node] = {}
        self._free: list[int] = []
        self._free_states: list[int] = []
        self.num_blocks = self.num_states = 0
        self._calls = self._made = self._num_owners = 0

    @property
    def num_used(self) -> int:
        """Blocks that hold something."""
        return self.num_blocks - len(self._free)

    def match(self, root: Hashable, marks: np.ndarray) -> int:
        """How many of these tokens are kept; nothing counts as used by this."""
        return self._find(root, marks)[1]

    def find(
        self, root: Hashable, marks: np.ndarray, owner: str = "", known: np.ndarray | None = None
    ) -> Hit:
        """The longest beginning of `marks` that is kept.

        `known` are routes that the first tokens must have had: those recorded of a sequence that is computed
        again, whose keys must be of the same pass.
        """
        path, length = self._find(root, marks)
        self._calls += 1
        if known is not None:
            path, length = self._with_routes(path, length, known)
        self._use(path, owner)
        sizes = [min(len(node.marks), length - i * BLOCK) for i, node in enumerate(path)]
        routes = [node.routes[:n] for node, n in zip(path, sizes, strict=True) if node.routes is not None]
        state = None
        if self.most_states is not None and path:
            state = path[-1].state
            path[-1].begun += 1
        return Hit(length, [node.block for node in path], routes, state)

    def keep(
        self,
        root: Hashable,
        marks: np.ndarray,
        owner: str = "",
        routes: RoutesOf = lambda first, end: None,
        *,
        live: int | None = None,
        ends_turn: bool = False,
    ) -> Kept:
        """What to copy so that all of `marks` is kept, or as much of its beginning as there is room for.

        `live`: the ticket of a sequence that has it in its row until `end`. `ends_turn`: of the owner's
        states at ends of turns, the one before is given up, unless several contexts went on from it.
        """
        self._calls += 1
        number, with_state = self._number(owner), self.most_states is not None
        if root not in self._roots:  # salts of clients come and go
            self._roots = {key: node for key, node in self._roots.items() if node.children}
            self._roots[root] = Node(marks[:0], -1, None, -1)
        node = self._roots[root]
        path, copies, first = list[Node](), list[Copy](), 0
        while first < len(marks):
            rest = marks[first : first + BLOCK]
            # A state is that of one token: its node must end there, though another may go on from it.
            child = _covering(node, rest, exact=with_state and first + len(rest) == len(marks))
            if child is None:
                child = self._grown(node, rest)
                if child is None:
                    blocks = -(-(len(marks) - first) // BLOCK)
                    child = self._added(node, rest, number, {*path}, blocks)
                if child is None:
                    break
                child.routes = routes(first, first + len(rest))
                copies.append(Copy(child.block, first))
            self._use([child], owner)
            path.append(child)
            node, first = child, first + len(rest)
        if live is not None:
            self.end(live)
            self._live[live] = path
            for node in path:
                node.live += 1
        state = None
        if with_state and path and first >= len(marks):
            state = self._kept_state(path, number)
            if ends_turn and number is not None and path[-1].state is not None:
                self._replace_last(number, path[-1])
        return Kept(copies, state)

    def end(self, live: int) -> None:
        """The sequence with this ticket has its row no longer."""
        for node in self._live.pop(live, ()):
            node.live -= 1

    def forget(self, owner: str) -> None:
        """The owner has ended; what it alone used is the first to go."""
        number = self._owners.pop(owner, None)
        if number is not None:
            self._last_of.pop(number, None)
            for node in self._nodes_of.pop(number):
                node.owners.discard(number)

    def keep_roots(self, wanted: Callable[[Any], bool]) -> None:
        """Forget the contexts of all other roots."""
        for root in [root for root in self._roots if not wanted(root)]:
            left = [*self._roots.pop(root).children.values()]
            while left:
                node = left.pop()
                left += node.children.values()
                node.children = {}
                self._free_node(node)

    def _find(self, root: Hashable, marks: np.ndarray) -> tuple[list[Node], int]:
        """(the nodes of the longest beginning that is kept, its tokens)."""
        node, path, length = self._roots.get(root), list[Node](), 0
        found = list[Node](), 0
        while node is not None and length < len(marks):
            rest = marks[length : length + BLOCK]
            if self.most_states is None:
                child = node.children.get(rest.tobytes())
                if child is None:
                    child = max(node.children.values(), key=lambda c: _common(c.marks, rest), default=None)
                common = 0 if child is None else _common(child.marks, rest)
                if child is None or not common:
                    break
                found = [*path, child], length + common
            else:
                for each in node.children.values():
                    size = len(each.marks)
                    whole = each.state is not None and _common(each.marks, rest) == size
                    if whole and length + size > found[1]:
                        found = [*path, each], length + size
                child = node.children.get(rest.tobytes())
                common = 0 if child is None else len(rest)
            if child is None or common < BLOCK:
                break
            path.append(child)
            node, length = child, length + common
        return found

    def _with_routes(self, path: list[Node], length: int, known: np.ndarray) -> tuple[list[Node], int]:
        """As much of a hit as has the known routes; of states all or nothing."""
        for i, node in enumerate(path):
            if node.routes is None:
                continue
            size = min(len(node.marks), length - i * BLOCK)
            own = known[i * BLOCK : i * BLOCK + size]
            differ = (node.routes[: len(own)] != own).any(axis=(1, 2))
            if differ.any():
                length = i * BLOCK + int(np.argmax(differ)) if self.most_states is None else 0
                return path[: -(-length // BLOCK)], length
        return path, length

    def _number(self, owner: str) -> int | None:
        if not owner:
            return None
        if owner not in self._owners:
            self._owners[owner] = self._num_owners
            self._nodes_of[self._num_owners] = set()
            self._num_owners += 1
        return self._owners[owner]

    def _use(self, path: Sequence[Node], owner: str) -> None:
        number = self._number(owner)
        for node in path:
            node.used = self._calls
            if number is not None:
                node.owners.add(number)
                self._nodes_of[number].add(node)

    def _grown(self, parent: Node, rest: np.ndarray) -> Node | None:
        """The leaf with the first of these tokens, which has all of them now, in the same block."""
        for child in parent.children.values():
            size = len(child.marks)
            # One with a state stays as it is: the state is that of its last token.
            if child.state is None and size < len(rest) and _common(child.marks, rest) == size:
                del parent.children[child.marks.tobytes()]
                child.marks = rest.copy()
                parent.children[rest.tobytes()] = child
                return child
        return None

    def _added(
        self, parent: Node, rest: np.ndarray, owner: int | None, path: set[Node], wanted: int
    ) -> Node | None:
        """A new leaf; None if there is no room for it."""
        if not self._free and self.num_blocks < self.most_blocks:
            size = min(max(self._least_blocks, 4 * self.num_blocks), self.most_blocks)
            self._free += range(size - 1, self.num_blocks - 1, -1)
            self.num_blocks = size
        if not self._free:
            self._evict(wanted, owner, path)
        if not self._free:
            return None
        node = Node(rest.copy(), self._free.pop(), parent, self._made)
        self._made += 1
        parent.children[rest.tobytes()] = node
        self._leaves.pop(parent, None)
        self._leaves[node] = None
        return node

    def _evict(self, wanted: int, owner: int | None, path: set[Node]) -> None:
        """Frees up to so many blocks for an owner, none of its `path`: leaves first, by `_rank`."""
        heap = [(*self._rank(node), node) for node in self._leaves if node not in path]
        heapq.heapify(heap)
        while heap and len(self._free) < wanted:
            kind, order, _, node = heapq.heappop(heap)
            # Rounds are the worst case of "least recently used": all contexts would be given up, each just
            # before it is asked for. So the youngest owner gives way, and what is older stays whole.
            if kind == _OF_OWNERS and (owner is None or -order < owner):
                return
            self.evicted_tokens += len(node.marks)
            parent = node.parent
            assert parent is not None
            self._remove(node)
            if parent in self._leaves and parent not in path:
                heapq.heappush(heap, (*self._rank(parent), parent))

    def _rank(self, node: Node) -> tuple[int, int, int]:
        """The order of victims: those of no open owner, least recently used first; those that a live sequence
        has in its row, and keeps again at its end; those of the youngest owner."""
        if not node.owners:
            return _OF_NOBODY, node.used, node.number
        if node.live and len(node.owners) == 1:
            return _LIVE, node.used, node.number
        return _OF_OWNERS, -min(node.owners), node.number

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.marks.tobytes()]
        self._free_node(node)
        if not parent.children and parent.parent is not None:
            self._leaves[parent] = None

    def _free_node(self, node: Node) -> None:
        self._leaves.pop(node, None)
        self._free.append(node.block)
        self._free_state(node)
        for owner in node.owners:
            self._nodes_of[owner].discard(node)
        node.owners = set()

    def _kept_state(self, path: Sequence[Node], owner: int | None) -> int | None:
        """Where to copy the state after the last of these nodes; None: it is kept already, or has no room."""
        assert self.most_states is not None
        node = path[-1]
        if node.state is not None:
            return None
        if not self._free_states and self.num_states < self.most_states:
            size = min(max(self._least_states, 4 * self.num_states), self.most_states)
            self._free_states += range(size - 1, self.num_states - 1, -1)
            self.num_states = size
        if not self._free_states:
            others = [each for each in self._with_state.values() if each not in path]
            victim = min(others, key=self._rank, default=None)
            if victim is None:
                return None
            kind, order, _ = self._rank(victim)
            if kind == _OF_OWNERS and (owner is None or -order < owner):
                return None
            self._give_state_up(victim)
        state = self._free_states.pop()
        node.state, self._with_state[state] = state, node
        return state

    def _replace_last(self, owner: int, node: Node) -> None:
        before, self._last_of[owner] = self._last_of.get(owner), node
        if before is None or before is node or before.state is None:
            return
        if before.begun < 2 and before.owners <= {owner}:
            self._give_state_up(before)

    def _give_state_up(self, node: Node) -> None:
        """Frees a state, and the block of a part of BLOCK tokens, which nothing goes on from without it."""
        self._free_state(node)
        if not node.children and len(node.marks) < BLOCK and node.parent is not None:
            self._remove(node)

    def _free_state(self, node: Node) -> None:
        if node.state is not None:
            del self._with_state[node.state]
            self._free_states.append(node.state)
            node.state, node.begun = None, 0


_OF_NOBODY, _LIVE, _OF_OWNERS = range(3)


def _covering(parent: Node, rest: np.ndarray, *, exact: bool) -> Node | None:
    """The child that has these tokens, and with `exact` no others."""
    child = parent.children.get(rest.tobytes())
    if child is not None or exact or len(rest) == BLOCK:
        return child
    return next((c for c in parent.children.values() if _common(c.marks, rest) == len(rest)), None)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens two sequences have in common at their beginning."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    return int(np.argmax(differ)) if differ.any() else size
