"""Groups of samples, and the packing of their prompts into rows for the prefill.

Data flow: `Prompt` -> `Group` -> `Packed` -> `decode.prefill_program`; `session.py` appends the sampled
tokens. Contexts that are computed in parts, or after a kept beginning: `Group` -> `Continuation` ->
`Extended` -> `decode.extend_program`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, TypeVar, cast

import jax
import numpy as np

from quatrain.data.expansion import BLIND
from quatrain.engine.decode import Extended, Packed
from quatrain.engine.masks import Matcher
from quatrain.models.attention.unpacking import unpacking
from quatrain.models.decode_step import Continued, Restored
from quatrain.models.feature_store import FeatureStore, inserts_of
from quatrain.models.prefix_tree import RowForms, chunk_layout
from quatrain.models.rope_positions import rope_positions
from quatrain.models.vision import Inserts
from quatrain.ops.packing import common_tokens, useful_common_prefix
from quatrain.ops.sampling import KeptWords, SamplingNumbers
from quatrain.ops.shape_buckets import power_of_four, power_of_two, round_up_coarsely
from quatrain.types.batches import Prompt
from quatrain.types.kept import KEPT, all_words, listed_rows
from quatrain.types.pictures import TEXT, Pictures
from quatrain.types.rollouts import Completion, Sampling
from quatrain.types.routes import ROUTES, live_of
from quatrain.types.sampler import PerRequestSampling

PREFILL_TOKENS = 2048
"""Prompts are packed into rows of at most this many tokens; a longer one is computed in parts."""
VARYING_TOKENS = 128, 512, 1024, PREFILL_TOKENS
"""Tokens of a row of prompts of requests, which come one by one, in any number and length.

Each such row has room for a prompt in TOKENS_OF_A_PROMPT tokens."""
TOKENS_OF_A_PROMPT = 16
FEWEST_POSITIONS = 32
"""Least number of positions of a cache; the cache of generated tokens starts with it and grows by
doubling."""
FEWEST_CONTINUED = 4
"""Least number of continued sequences of one call; fewer take as long."""
EXTENDED_TOKENS = 1024
"""Most tokens of one call that computes what follows in prefix slots or slots."""
FEWEST_EXTENDED, MOST_EXTENDED = 16, 128
"""Tokens of one sequence in such a call, if no sequence has EXTENDED_TOKENS left."""
WIDTHS_AFTER_KEPT = {16: 64, 64: 16, 128: 8, 512: 1, EXTENDED_TOKENS: 1}
"""Where contexts are kept: tokens of one sequence in a call -> the most sequences of it.

Mostly a single request has something left, whose tokens several rows of 128 would compute in vain."""


@dataclass(frozen=True)
class UsualSampling:
    """The sampling of all sequences of a session that have none of their own; None: without filters."""

    sampling: Sampling | None = None
    seed: int = 0

    def numbers(self, count: int) -> SamplingNumbers:
        """Host arrays of so many sequences."""
        if self.sampling is None:
            return SamplingNumbers.alike(count, seed=self.seed)
        return _numbers(self.sampling, self.seed, count)


class Seen(NamedTuple):
    """The pictures of a context of P tokens, and what follows from them. Of the whole context: where a part
    of it begins within a picture, its tokens do not say where."""

    pictures: Pictures
    numbers: np.ndarray
    """[P] int32: of each placeholder, its number among those of its picture."""
    turns: np.ndarray | None = None
    """[3, P] int32: rotary positions; None: those of text."""
    shift: int = 0
    """What is added to the positions of the tokens behind the context."""


def seen_by(prompt: Prompt, features: FeatureStore | None) -> Seen | None:
    """What a sampler with these features sees of a prompt; None: it is text alone.

    Raises ValueError for a prompt with pictures without them.
    """
    pictures = prompt.pictures
    if pictures is None or not pictures.ids.any():
        return None
    if features is None:
        raise ValueError(BLIND)
    vision = features.vision
    numbers = vision.numbers_within(pictures)
    turned = rope_positions(vision, pictures, len(pictures)) if vision.has_grid else ()
    return Seen(pictures, numbers, *turned)


@dataclass
class Group:
    """Samples of one prompt, each of which is a turn of the policy.

    `step` is the training step that their randomness is derived from. `numbers` are the numbers of the
    samples among those of the prompt. `limit` is the most tokens that a completion may have. `own` is the
    sampling of its only sample, if it differs from group to group.
    """

    prompt: Prompt
    step: int
    completions: list[Completion]
    numbers: Sequence[int]
    limit: int
    own: PerRequestSampling | None = None
    seen: Seen | None = None
    """None: the prompt is text alone."""
    matcher: Matcher | None = None
    """How far its only sample has come in its grammar; None: it has none."""
    num_kept: int = 0
    """Of how many words at most its tokens are drawn, where these are recorded; else 0."""
    replays: bool = False
    """Whether what its tokens are drawn from is recorded, where it is not all words."""

    @classmethod
    def alone(cls, prompt: Prompt, own: PerRequestSampling) -> Group:
        """One sample with a sampling of its own; the prompt's `group_id` is 0."""
        group = cls.of(prompt, own.step, (own.sequence_id,), own.sampling.max_new_tokens)
        return replace(group, own=own)

    @classmethod
    def of(cls, prompt: Prompt, step: int, numbers: Sequence[int], limit: int) -> Group:
        """The samples with these numbers."""
        return cls(prompt, step, [Completion() for _ in numbers], numbers, limit)

    @property
    def context(self) -> np.ndarray:
        """[P] int32: the tokens of the prompt."""
        return self.prompt.input_ids

    @property
    def marks(self) -> np.ndarray:
        """[P] int64: what contexts are compared by: their tokens, and in the place of placeholders, which are
        all the same token, the pictures that they stand for."""
        ids = self.context.astype(np.int64)
        # Below 0, where no token is.
        return (
            ids
            if self.seen is None
            else np.where(self.seen.pictures.ids == TEXT, ids, -self.seen.pictures.ids)
        )

    @property
    def is_constrained(self) -> bool:
        """Whether its sample follows a grammar."""
        return self.own is not None and self.own.grammar is not None

    @property
    def failure(self) -> str | None:
        """Why its sample cannot go on; None: it can."""
        return None if self.matcher is None else self.matcher.error

    def consume(self, token: int, stop_ids: Sequence[int]) -> None:
        """Notes a further token of its sample for the mask of the next; one of `stop_ids` ends the sample."""
        if self.matcher is not None and token not in stop_ids:
            self.matcher.consume(token)

    def sequence_ids(self, n: int) -> list[int]:
        """The ids that the randomness of its samples derives from, `n` for each prompt."""
        return [(self.prompt.group_id * n + number) % 2**32 for number in self.numbers]

    @property
    def shift(self) -> int:
        """What is added to positions behind its context for rotary embeddings."""
        return 0 if self.seen is None else self.seen.shift

    @property
    def position(self) -> int:
        """The position of a turn's first token among those that its samples' randomness derives from."""
        return 0 if self.own is None else self.own.offset

    def record(self, first: int, *parts: np.ndarray) -> None:
        """Notes routes [tokens, L, k] of its context, from token `first` on, for all samples."""
        for completion in self.completions:
            completion.record(ROUTES, first, *parts)

    def record_kept(
        self, index: int, kept: KeptWords | None, place: Any, masks: np.ndarray | None = None
    ) -> None:
        """Notes the words that the next tokens of a sample are drawn from, if they are recorded.

        That are those at `place` of what a program has `kept`; or, where only a grammar leaves words out,
        those of the `masks` [tokens, ceil(V / 32)] of the steps.
        """
        if self.num_kept:
            assert kept is not None, "programs record what their groups ask for"
            sets = listed_rows(np.asarray(kept.words)[place], np.asarray(kept.counts)[place])
        elif self.replays and self.matcher is not None and masks is not None:
            sets = all_words(len(masks))
            sets[:] = [self.matcher.guide.shared(mask) for mask in masks]
        else:
            return
        completion, first = self.completions[index], len(self.context)
        if KEPT not in completion.columns:  # a column begins with the first token of the context
            completion.record(KEPT, 0, all_words(first))
        completion.record(KEPT, first + self.turn_length(index), sets)

    def known_routes(self, first: int, tokens: int, index: int = 0) -> np.ndarray | None:
        """[tokens, L, k]: recorded routes of a sample's tokens from `first` on, live where there are none.

        None if there are none at all. What is computed again takes the same ones.
        """
        parts = self.completions[index].rows(ROUTES, first, first + tokens)
        if not parts:
            return None
        routes = np.full((tokens, *parts[0].shape[1:]), live_of(parts[0].dtype), parts[0].dtype)
        known = np.concatenate(parts)
        routes[: len(known)] = known
        return routes

    def turn_length(self, index: int) -> int:
        """Tokens that a sample has."""
        return len(self.completions[index].tokens)

    def left(self, index: int) -> int:
        """Tokens that a sample may still have."""
        return self.limit - self.turn_length(index)


class FirstTokens(NamedTuple):
    """What a program has drawn after contexts, on the host."""

    tokens: list[list[int]]  # [N][n]
    logprobs: list[list[float]]
    kept: KeptWords | None  # [N, n, K]
    routes: np.ndarray | None
    masks: np.ndarray | None  # [N, ceil(V / 32)] uint32


class Admitted(NamedTuple):
    """A group whose prompt is to be prefilled, its ticket, and its prefix slot on its replica."""

    group: Group
    ticket: int
    prefix_slot: int


Pack = list[Admitted]


def split_into_packs(admitted: list[Admitted], *, slots_of_requests: int = 0) -> list[Pack]:
    """Splits the groups, in order, into packs of at most PREFILL_TOKENS prompt tokens.

    A prompt with more tokens is a pack of its own. The common prefix of all prompts counts once per pack.
    Of requests in so many slots, packs have few sizes (`VARYING_TOKENS`), the larger ones where there are
    many slots or a longer prompt.
    """
    num_common = _common_prefix(admitted)
    packs: list[Pack] = []
    room, most = 0, PREFILL_TOKENS
    if slots_of_requests and admitted:
        least = min(max(len(item.group.context) for item in admitted), PREFILL_TOKENS)
        least = max(least, min(8 * slots_of_requests, PREFILL_TOKENS))
        most = next(tokens for tokens in VARYING_TOKENS if tokens >= least)
    for item in admitted:
        length = len(item.group.context) - num_common
        if not packs or length > room or (slots_of_requests and len(packs[-1]) == most // TOKENS_OF_A_PROMPT):
            packs.append([])
            room = most - num_common
        packs[-1].append(item)
        room -= length
    return packs


def pack_prompts(
    packs: list[Pack],
    n: int,
    num_prefix_slots: int,
    forms: RowForms,
    usual: UsualSampling,
    *,
    varying: bool = False,
    features: FeatureStore | None = None,
) -> Packed:
    """The prompts of each pack (one pack per replica), concatenated and padded to the same shape.

    The shape is that of the largest pack, with the numbers of prompts and of tokens rounded up, so that few
    programs are compiled. A common prefix of all prompts of a pack is stored once. The rows come in `forms`.
    `usual` is the sampling of groups that have none of their own. `varying`: for requests, in
    the sizes of `split_into_packs`. `features` are those of pictures.
    """
    count = power_of_two(max(map(len, packs)))
    num_common = [_common_prefix(pack) for pack in packs]
    most = max(map(_num_tokens, packs, num_common))
    tokens = prompt_positions(most)
    if varying:
        least = max(most, TOKENS_OF_A_PROMPT * count)
        tokens = next(tokens for tokens in VARYING_TOKENS if tokens >= least)
        count = tokens // TOKENS_OF_A_PROMPT
    each = [
        _packed_row(pack, n, num_prefix_slots, count, tokens, common)
        for pack, common in zip(packs, num_common, strict=True)
    ]
    arrays = list(map(np.concatenate, zip(*each, strict=True)))
    _, positions, segment_ids, branch_ids, *_ = (array.reshape(len(packs), -1) for array in arrays)
    layout = unpacking(segment_ids, branch_ids) if forms.unpacks(tokens) else None
    chunks = chunk_layout(segment_ids, branch_ids, ends=True) if forms.chunked else None
    owners = [[item.group.own for item in pack] + [None] * (count - len(pack)) for pack in packs]
    sampling = sampling_numbers([own for row in owners for own in row], usual)
    routes = _packed_routes(packs, num_common, tokens)
    spans = list(map(_spans, packs, num_common))
    turns, inserts = _pictured(spans, positions, features)
    masks = masks_of([[item.group for item in pack] for pack in packs], count)
    return Packed._make([*as_jit_arguments(*arrays), sampling, layout, chunks, routes, turns, inserts, masks])


class _Span(NamedTuple):
    """Tokens of a context in a row of tokens."""

    group: Group
    tokens: slice
    place: int
    """Where in the row the first of them is."""


def _spans(pack: Pack, num_common: int) -> list[_Span]:
    """What a packed row has of each context, the common prefix of all first."""
    spans = [_Span(pack[0].group, slice(0, num_common), 0)] if num_common else []
    place = num_common
    for group, *_ in pack:
        spans.append(_Span(group, slice(num_common, len(group.context)), place))
        place += len(group.context) - num_common
    return spans


def _pictured(
    rows: Sequence[Sequence[_Span]], positions: np.ndarray, features: FeatureStore | None
) -> tuple[Any, Inserts | None]:
    """(rotary positions [R, 3, T], inserts) of R rows of contexts whose tokens are at `positions` [R, T].

    None where pictures change nothing: among rows of text alone, and before and behind them."""
    seen = [span.group.seen for row in rows for span in row if span.group.seen is not None]
    if features is None or not seen:
        return None, None
    turns = np.repeat(positions[:, None], 3, axis=1)
    ids, numbers = np.full(positions.shape, TEXT, np.int64), np.zeros(positions.shape, np.int32)
    for row, spans in enumerate(rows):
        for group, tokens, first in spans:
            if group.seen is not None:
                here = slice(first, first + tokens.stop - tokens.start)
                ids[row, here] = group.seen.pictures.ids[tokens]
                numbers[row, here] = group.seen.numbers[tokens]
                if group.seen.turns is not None:
                    turns[row, :, here] = group.seen.turns[:, tokens]
    by_id = {number: picture for each in seen for number, picture in each.pictures.by_id.items()}
    inserts = None
    if ids.any():
        rows_of_pictures = [Pictures(row, by_id) for row in ids]
        inserts = inserts_of(rows_of_pictures, positions.shape[1], features, list(numbers))
    return turns if features.vision.has_grid else None, inserts


def _packed_routes(packs: list[Pack], num_common: list[int], tokens: int) -> Any:
    """[replicas x T, L, k]: known routes of prompts that are computed again; None if there are none."""
    rows: dict[tuple[int, int], np.ndarray] = {}
    for replica, (pack, common) in enumerate(zip(packs, num_common, strict=True)):
        first = replica * tokens + common
        for i, (group, *_) in enumerate(pack):
            size = len(group.context)
            routes = group.known_routes(0, size)
            if routes is not None and common and not i:
                rows[replica * tokens, common] = routes[:common]
            if routes is not None:
                rows[first, size - common] = routes[common:]
            first += size - common
    if not rows:
        return None
    some = next(iter(rows.values()))
    table = np.full((len(packs) * tokens, *some.shape[1:]), live_of(some.dtype), some.dtype)
    for (first, count), routes in rows.items():
        table[first : first + count] = routes
    return table


def prompt_routes(packed: Packed, routes: np.ndarray, number: int, replica: int) -> list[np.ndarray]:
    """The parts of a prompt's routes, of those of all tokens [replicas x T, L, k]; `number` counts all
    prompts."""
    common, start, length = (
        int(np.asarray(array)[place])
        for array, place in ((packed.num_common, replica), (packed.starts, number), (packed.lengths, number))
    )
    size = len(routes) // len(packed.num_common)
    row = routes[replica * size : (replica + 1) * size]
    return [row[:common], row[start : start + length - common]]


def _common_prefix(pack: Pack) -> int:
    """Tokens of the common prefix of all prompts of `pack`; 0 if it is too short to be worth sharing."""
    if len(pack) < 2:
        return 0
    prompts = [item.group.marks for item in pack]
    lengths = np.array([len(prompt) for prompt in prompts])
    common = common_tokens(np.array([prompt[: lengths.min()] for prompt in prompts]))
    known = [item.group.known_routes(0, common) for item in pack]
    recorded = [routes for routes in known if routes is not None]
    if recorded:  # of prompts that are computed again
        same = len(recorded) == len(known) and all(np.array_equal(recorded[0], each) for each in recorded)
        common = common if same else 0
    return useful_common_prefix(common, lengths)


def _num_tokens(pack: Pack, num_common: int) -> int:
    return num_common + sum(len(item.group.context) - num_common for item in pack)


def _packed_row(
    pack: Pack, n: int, num_prefix_slots: int, count: int, tokens: int, num_common: int
) -> tuple[np.ndarray, ...]:
    """The fields of `Packed` for one replica, padded to `count` prompts and `tokens` tokens."""
    input_ids, positions, segment_ids, branch_ids = (np.zeros(tokens, np.int32) for _ in range(4))
    starts, lengths = np.zeros(count, np.int32), np.ones(count, np.int32)
    prefix_slots = np.full(count, num_prefix_slots, np.int32)
    sequence_ids = np.zeros((count, n), np.uint32)
    steps, offsets = np.zeros(count, np.uint32), np.zeros(count, np.uint32)
    first = num_common
    if num_common:
        input_ids[:first], positions[:first] = pack[0].group.context[:first], np.arange(first)
        segment_ids[:first] = 1
    for i, (group, _, prefix_slot) in enumerate(pack):
        prompt = group.context
        size = len(prompt)
        span = slice(first, first + size - num_common)
        input_ids[span], positions[span] = prompt[num_common:], np.arange(num_common, size)
        segment_ids[span], branch_ids[span] = (1, i + 1) if num_common else (i + 1, 0)
        starts[i], lengths[i], prefix_slots[i] = first, size, prefix_slot
        steps[i], offsets[i] = group.step, group.position
        sequence_ids[i, : len(group.numbers)] = group.sequence_ids(n)
        first += size - num_common
    common = np.array([num_common], np.int32)
    ids = sequence_ids, steps, offsets
    return input_ids, positions, segment_ids, branch_ids, common, starts, lengths, prefix_slots, *ids


@dataclass
class Continuation:
    """A group whose context is in a prefix slot up to its first `done` tokens.

    `pause`: the token before which the computation stops, so that the state there can be kept.
    """

    group: Group
    ticket: int
    prefix_slot: int
    done: int
    pause: int | None = None

    @property
    def left(self) -> int:
        """Tokens of the context that are not computed yet, up to the pause."""
        return (len(self.group.context) if self.pause is None else self.pause) - self.done

    def known_routes(self, tokens: int) -> np.ndarray | None:
        """As `Group.known_routes`, of the next tokens to compute."""
        return self.group.known_routes(self.done, tokens)


@dataclass
class Restoration:
    """A preempted sample that has a slot again, with the first `done` tokens of its turn.

    All but the last of these are computed again, which is the next input.
    """

    group: Group
    index: int
    slot: int
    prefix_slot: int
    begin: int
    """Ring position of the turn's first token."""
    done: int = 0

    @property
    def left(self) -> int:
        """Tokens of the turn that are not computed yet."""
        return self.group.turn_length(self.index) - 1 - self.done

    def known_routes(self, tokens: int) -> np.ndarray | None:
        """As `Group.known_routes`, of the next tokens to compute."""
        return self.group.known_routes(len(self.group.context) + self.done, tokens, self.index)


_Item = TypeVar("_Item", Continuation, Restoration)


def calls(
    left: list[list[_Item]], *, varying: bool = False, kept: bool = False
) -> Iterator[tuple[list[list[_Item]], int, int]]:
    """(items of one call, tokens of each, most items) until nothing is left; one list for each replica.

    `varying`: of requests, with one width below EXTENDED_TOKENS; `kept`: after kept contexts, with those of
    WIDTHS_AFTER_KEPT.
    """
    while any(left):
        longest = max(item.left for items in left for item in items)
        width = min(power_of_two(max(longest, FEWEST_EXTENDED)), MOST_EXTENDED)
        width = MOST_EXTENDED if varying else width
        width = EXTENDED_TOKENS if longest >= EXTENDED_TOKENS else width
        most = EXTENDED_TOKENS // width
        if kept:
            # The longest first, alone: with shorter ones behind it, these would be padded to its width.
            left = [sorted(items, key=lambda item: -item.left) for items in left]
            width = next((width for width in WIDTHS_AFTER_KEPT if longest <= width), EXTENDED_TOKENS)
            most = WIDTHS_AFTER_KEPT[width]
        batch = [items[:most] for items in left]
        yield batch, width, most
        for item in chain.from_iterable(batch):
            item.done += min(width, item.left)
        left = [[item for item in items if item.left] for items in left]


def _table(batch: Sequence[Sequence[Any]], most: int, fills: Sequence[int], dtype: Any) -> np.ndarray:
    """[fields, replicas, N] for N items of each replica, padded to a power of four so that few programs are
    compiled."""
    count = min(power_of_four(max(FEWEST_CONTINUED, *map(len, batch))), most)
    return np.full((count, len(batch), len(fills)), fills, dtype).T.copy()


def _continued(
    batch: Sequence[Sequence[Continuation | Restoration]],
    tokens: Sequence[Sequence[Any]],
    width: int,
    most: int,
    num_prefix_slots: int,
) -> Continued:
    """The next `width` of the `tokens` of each item."""
    starts, counts, prefix_slots = _table(batch, most, (0, 0, num_prefix_slots), np.int32)
    input_ids = np.zeros((*starts.shape, width), np.int32)
    known: dict[tuple[int, int], np.ndarray] = {}
    for replica, items in enumerate(batch):
        for i, item in enumerate(items):
            part = tokens[replica][i][item.done : item.done + min(width, item.left)]
            input_ids[replica, i, : len(part)] = part
            starts[replica, i], counts[replica, i] = item.done, len(part)
            prefix_slots[replica, i] = item.prefix_slot
            routes = item.known_routes(len(part))
            if routes is not None:
                known[replica, i] = routes
    arrays = (input_ids, starts, counts, prefix_slots)
    table: Any = None
    if known:
        some = next(iter(known.values()))
        table = np.full((*input_ids.shape, *some.shape[1:]), live_of(some.dtype), some.dtype)
        for place, routes in known.items():
            table[*place, : len(routes)] = routes
        table = np.concatenate(table)
    ids, start, count, row = as_jit_arguments(*(np.concatenate(array) for array in arrays))
    return Continued(ids, start, count, row, table)


def extension(
    batch: list[list[Continuation]],
    n: int,
    width: int,
    most: int,
    num_prefix_slots: int,
    usual: UsualSampling,
    features: FeatureStore | None = None,
) -> Extended:
    """The next `width` tokens of each continuation; one list for each replica, of at most `most`.

    `n` is the number of samples of a prompt.
    `usual` is the sampling of groups that have none of their own, `features` are those of pictures.
    """
    contexts = [[item.group.context for item in items] for items in batch]
    *ids, steps, offsets = _table(batch, most, (0,) * (n + 2), np.uint32)
    owners = [[item.group.own for item in items] + [None] * (len(steps[0]) - len(items)) for items in batch]
    for replica, items in enumerate(batch):
        for i, item in enumerate(items):
            for row, number in zip(ids, item.group.sequence_ids(n)):
                row[replica, i] = number
            steps[replica, i], offsets[replica, i] = item.group.step, item.group.position
    arrays = (np.concatenate(array) for array in (np.stack(ids, axis=-1), steps, offsets))
    numbers, step, offset = as_jit_arguments(*arrays)
    own = sampling_numbers(list(chain.from_iterable(owners)), usual)
    continued = _continued(batch, contexts, width, most, num_prefix_slots)
    masks = masks_of([[item.group for item in items] for items in batch], len(steps[0]))
    return Extended(_with_pictures(continued, batch, features), numbers, step, offset, own, masks)


def _with_pictures(
    continued: Continued, batch: list[list[Continuation]], features: FeatureStore | None
) -> Continued:
    """`continued` with what pictures change in these parts of contexts."""
    count, width = len(continued.input_ids) // len(batch), continued.input_ids.shape[1]
    # The sequences of a replica are one row, so that a picture which several have stands in its table once.
    positions = np.asarray(continued.starts)[:, None] + np.arange(width, dtype=np.int32)
    spans = [
        [
            _Span(item.group, slice(item.done, item.done + min(width, item.left)), i * width)
            for i, item in enumerate(items)
        ]
        for items in batch
    ]
    turns, inserts = _pictured(spans, positions.reshape(len(batch), -1), features)
    if turns is not None:
        turns = turns.reshape(-1, 3, count, width).swapaxes(1, 2).reshape(-1, 3, width)
    if inserts is not None:
        inserts = inserts._replace(rows=inserts.rows.reshape(-1, width))
    return replace(continued, turns=turns, inserts=inserts)


def restoration(
    batch: list[list[Restoration]],
    width: int,
    most: int,
    num_slots: int,
    num_prefix_slots: int,
    *,
    shifted: bool = False,
) -> Restored:
    """The next `width` tokens of the turn of each item; one list for each replica, of at most `most`.

    `shifted`: some may be behind pictures.
    """
    turns = [[item.group.completions[item.index].tokens for item in items] for items in batch]
    lengths, slots, begins, shifts = _table(batch, most, (0, num_slots, 0, 0), np.int32)
    for replica, items in enumerate(batch):
        for i, item in enumerate(items):
            lengths[replica, i], slots[replica, i] = len(item.group.context), item.slot
            begins[replica, i], shifts[replica, i] = item.begin, item.group.shift
    continued = _continued(batch, turns, width, most, num_prefix_slots)
    given = (lengths, slots, begins, shifts) if shifted else (lengths, slots, begins)
    return Restored(continued, *as_jit_arguments(*map(np.concatenate, given)))


def sampling_numbers(owners: Sequence[PerRequestSampling | None], usual: UsualSampling) -> SamplingNumbers:
    """The numbers of each sequence: its owner's, or the usual ones."""
    numbers = usual.numbers(len(owners))
    for i, own in enumerate(owners):
        if own is not None:
            numbers = numbers.put(i, _numbers_of_one(own.sampling, own.seed))
    return numbers


def masks_of(rows: Sequence[Sequence[Group | None]], count: int) -> jax.Array | None:
    """[replicas x count, ceil(V / 32)] uint32: the words that may follow in each group's sample.

    The groups of each replica are padded to `count`. None where no group has a grammar.
    """
    padded = [group for row in rows for group in (*row, *[None] * (count - len(row)))]
    matchers = [None if group is None else group.matcher for group in padded]
    first = next((matcher for matcher in matchers if matcher is not None), None)
    return None if first is None else as_jit_arguments(first.guide.masks(matchers))[0]


def _numbers(sampling: Sampling, seed: int, count: int) -> SamplingNumbers:
    names = "temperature", "top_k", "top_p", "min_p"
    return SamplingNumbers.alike(count, seed=seed, **{name: getattr(sampling, name) for name in names})


@lru_cache(maxsize=1024)
def _numbers_of_one(sampling: Sampling, seed: int) -> SamplingNumbers:
    """Host arrays [1], which are only read; kept, as each decode call asks for those of all its slots."""
    return _numbers(sampling, seed, 1)


def as_jit_arguments(*arrays: np.ndarray) -> list[jax.Array]:
    """Host arrays, typed as arguments of a jitted function; putting them on a device would compile more."""
    return cast(list[jax.Array], list(arrays))


def prompt_positions(tokens: int) -> int:
    """Positions for prompts of `tokens` tokens: the next 2 or 3 times a power of two, at least
    FEWEST_POSITIONS.

    There are few such sizes, for the positions of the prompt cache and for packed rows of prompts, because
    each compiles a program. The size depends only on the prompts, not on earlier calls, so that a resumed run
    sums floating-point numbers in the same order."""
    return round_up_coarsely(tokens, FEWEST_POSITIONS)
