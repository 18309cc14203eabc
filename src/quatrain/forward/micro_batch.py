"""One micro-batch as arrays of static shape on the devices.

Data flow: `MicroBatchPlan` and the `TokenTable` it was made of -> `fill` -> `MicroBatch` -> `specs`.

A micro-batch has R buffers of T positions (`planner.py`). Where prompts are shared, the sequences of a group
are neighbours in a buffer, which holds their shared prompt once; a common prefix of all sequences is at the
start of each buffer, once. Scored tokens are listed per buffer in K = T entries: unused entries cost nothing,
and with K = T there is one array shape less to compile for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from quatrain.forward.planner import MicroBatchPlan, MicroBatchPlanner, Segment
from quatrain.forward.table import TokenTable
from quatrain.models.attention.unpacking import Unpacking, unpacking
from quatrain.models.delta_rule import Chunks
from quatrain.models.feature_store import FeatureStore, feature_rows, features_in_rows, patches_in_rows
from quatrain.models.layers import BRANCHES_PER_GROUP
from quatrain.models.prefix_tree import NO_FORMS, RowForms, chunk_layout
from quatrain.models.rope_positions import rope_positions
from quatrain.models.tower import Patches
from quatrain.models.vision import Vision
from quatrain.ops.kept_words import NO_WORD, list_width
from quatrain.ops.shape_buckets import power_of_two
from quatrain.parallel.mesh import data_sharding, device_put, mesh_shape
from quatrain.types.kept import NO_MASK, KeptSets
from quatrain.types.pictures import TEXT, Pictures
from quatrain.types.routes import live_of

INTEGERS = "input_ids", "positions", "segment_ids", "branch_ids", "predictors", "targets", "sequence_ids"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward and backward pass.

    Scored tokens are listed per buffer, so that the output head computes only their logits.
    `predictors[r, k]` is the position in buffer r whose hidden state predicts `targets[r, k]`. `mask` is
    False on the padding at the end of each list, where all columns are 0. `sequence_ids` number the sequences
    of a buffer from 0. `columns` are the columns of the token table.

    Segments are numbered from 1 in each buffer, and positions from 0 in each segment. A segment is one
    sequence, or the shared prefix of several sequences of a group (branch 0) followed by the rest of each
    sequence (branches 1, 2, ...), whose positions continue those of the prefix.
    Where all sequences begin with a common prefix, each buffer is one segment: the common prefix is branch 0,
    the rest of the g-th group's shared prompt is branch b = g * BRANCHES_PER_GROUP, and the completions of
    that group are branches b + 1, b + 2, ...

    `counts` are the numbers of sequences that each token stands for, 0 on padding and on the last token of a
    sequence, from which nothing is predicted: sums over tokens with these weights do not depend on the cut.

    A target was drawn from the words of its mask, or those of its list, which is filled up with NO_WORD, or
    from all words if it has neither.

    Where a token stands for a picture, `rows` has its place among the F features of its buffer, in which each
    picture stands once. What these are made of depends on what is trained (`FeatureStore.of_update`).
    """

    input_ids: jax.Array  # [R, T] int32
    positions: jax.Array  # [R, T] int32
    segment_ids: jax.Array  # [R, T] int32, 0 on padding
    branch_ids: jax.Array  # [R, T] int32, see `layers.attention_mask`
    predictors: jax.Array  # [R, K] int32
    targets: jax.Array  # [R, K] int32
    mask: jax.Array  # [R, K] bool
    sequence_ids: jax.Array  # [R, K] int32
    columns: dict[str, jax.Array]  # [R, K] float32 each, and a teacher's words
    layout: Unpacking | None = None  # the sequences of each buffer in rows of their own, for attention
    teacher_hidden: jax.Array | None = None  # [R, K, D_t], a teacher's states before the scored tokens
    chunks: Chunks | None = None  # [R, N] each, of each buffer, for DeltaNet layers
    routes: jax.Array | None = None  # [R, T, L, k], the recorded experts of each token, or live
    counts: jax.Array | None = None  # [R, T] float32, see below; for models with experts
    balance: jax.Array | None = None  # [R, L, E] `TokenTable.balance`, the same in all rows
    turns: jax.Array | None = None  # [R, 3, T] int32, rotary positions, where they are not `positions`
    rows: jax.Array | None = None  # [R, T] int32, -1 for text; None: the micro-batch has no picture
    features: jax.Array | None = None  # [R, 1 + L, F, D], or what a trained projector makes them of
    patches: Patches | None = None  # [R, P, ...] each, of a tower that is trained
    kept_words: jax.Array | None = None  # [R, K, W] int32, the words a target was drawn from; see below
    mask_ids: jax.Array | None = None  # [R, K] int32, the mask of a target's words; NO_MASK: none
    masks: jax.Array | None = None  # [R, U, ceil(V / 32)] uint32, the same in all rows
    packed: bool = field(default=False, metadata={"static": True})
    """Buffers may hold several segments."""
    shared: bool = field(default=False, metadata={"static": True})
    """Segments may have branches."""


def fill(
    cut: MicroBatchPlan,
    table: TokenTable,
    mesh: Mesh,
    forms: RowForms = NO_FORMS,
    store: FeatureStore | None = None,
) -> MicroBatch:
    """The micro-batch of `cut`, made of rows of `table`; its buffers lie on the data shards of `mesh`.

    Packed buffers come in `forms`, with their `layout` and `chunks`; all buffers with their `counts`. Their
    pictures are those of `store`. Raises ValueError for pictures without a store: the model sees nothing.
    """
    parts = mesh_shape(mesh).cp  # of equal width, one for each device
    # `cp` devices take equal columns; the rest is padding, which no token attends to.
    shape = len(cut.buffers), -(-cut.width // parts) * parts
    arrays: dict[str, Any] = {name: np.zeros(shape, np.int32) for name in INTEGERS}
    arrays["mask"] = np.zeros(shape, bool)
    if table.routes is not None:
        form = *shape, *table.routes.shape[2:]
        arrays["routes"] = np.full(form, live_of(table.routes.dtype), table.routes.dtype)
    if forms.counted:
        arrays["counts"] = np.zeros(shape, np.float32)
    kept, masks = table.kept, None
    if kept is not None:
        most = int(kept.counts[cut.sequences].max(initial=0))
        width = list_width(most)
        arrays["kept_words"] = np.full((*shape, width), NO_WORD, np.int32)
        if len(kept.masks):
            used, masks = _masks(kept, cut.sequences, len(cut.buffers))
            arrays["mask_ids"] = np.full(shape, NO_MASK, np.int32)
            kept = replace(kept, mask_ids=np.where(kept.mask_ids == NO_MASK, NO_MASK, used[kept.mask_ids]))
        table = replace(table, kept=kept)
    balance = table.balance
    if balance is not None:
        balance = np.broadcast_to(balance, (len(cut.buffers), *balance.shape))
    columns: dict[str, Any] = {
        name: np.zeros((*shape, *values.shape[2:]), values.dtype) for name, values in table.columns.items()
    }
    pictures = _pictures(cut, table, store)
    if pictures is not None:
        arrays["numbers"], arrays["picture_ids"] = np.zeros(shape, np.int32), np.full(shape, TEXT, np.int64)
        if pictures.turns is not None:
            arrays["turns"] = np.zeros((shape[0], 3, shape[1]), np.int32)
    for buffer, segments in enumerate(cut.buffers):
        of_buffer, columns_of_buffer = (
            {name: array[buffer] for name, array in named.items()} for named in (arrays, columns)
        )
        _fill_buffer(of_buffer, columns_of_buffer, segments, cut.num_common, table, pictures)
    if pictures is not None:
        numbers, ids = arrays.pop("numbers"), arrays.pop("picture_ids")
        arrays |= _inserts(numbers, Pictures(ids, pictures.all.by_id), pictures.store)
    ids = arrays["segment_ids"], arrays["branch_ids"]
    layout = unpacking(*ids) if cut.packed and forms.unpacks(shape[1]) else None
    chunks = chunk_layout(*ids) if cut.packed and forms.chunked else None
    more: dict[str, Any] = {"layout": layout, "chunks": chunks, "balance": balance, "masks": masks}
    on_host = MicroBatch(**arrays, columns=columns, **more, packed=cut.packed, shared=cut.shared)
    sharding = data_sharding(mesh)
    return jax.tree.map(lambda x: device_put(x, sharding), on_host)


def _fill_buffer(
    arrays: dict[str, np.ndarray],
    columns: dict[str, np.ndarray],
    segments: tuple[Segment, ...],
    num_common: int,
    table: TokenTable,
    pictures: _OfTable | None,
) -> None:
    """Writes `segments` into the row of one buffer in `arrays` and `columns`."""
    used = num_scored = num_sequences = 0

    def write(number: int, branch: int, row: int, first: int, end: int, sequences: int = 1) -> None:
        """The tokens `first` to `end` of a row of the table, which so many sequences share."""
        nonlocal used
        here = slice(used, used + end - first)
        arrays["input_ids"][here] = table.input_ids[row, first:end]
        arrays["positions"][here] = np.arange(first, end)
        arrays["segment_ids"][here] = number
        arrays["branch_ids"][here] = branch
        if table.routes is not None:
            arrays["routes"][here] = table.routes[row, first:end]
        if "counts" in arrays:
            arrays["counts"][here] = sequences
        if pictures is not None:
            arrays["picture_ids"][here] = pictures.all.ids[row, first:end]
            arrays["numbers"][here] = pictures.numbers[row][first:end]
            if pictures.turns is not None:
                arrays["turns"][:, here] = pictures.turns[row][:, first:end]
        used += end - first

    for number, segment in enumerate(segments, start=1):
        shared, first = segment.num_shared, segment.rows[0]
        prompt_branch = 0
        if num_common:  # all of the buffer is one segment
            number, prompt_branch = 1, number * BRANCHES_PER_GROUP
            if not used:
                write(number, 0, first, 0, num_common, sum(len(each.rows) for each in segments))
        prompt_start = used
        write(number, prompt_branch, first, num_common, shared, len(segment.rows))
        prompt_end = used
        for branch, row in enumerate(segment.rows, start=prompt_branch + (1 if shared else 0)):
            start = used - shared
            # Tokens of a row are at its front: a table has no padding on the left.
            length = int(table.attention_mask[row].sum())
            write(number, branch, row, shared, length)
            if "counts" in arrays:
                arrays["counts"][(used if length > shared else prompt_end) - 1] -= 1
            places = np.flatnonzero(table.completion_mask[row])
            before = places - 1
            # Another predictor would be of another sequence, without an error.
            assert ((before >= 0) & (before < length)).all(), (
                "targets are predicted from the tokens of their sequence"
            )
            # The state before a token may lie in the common prefix, the group's prompt or the sequence's own
            # part.
            ahead = np.select([before < num_common, before < shared], [0, prompt_start - num_common], start)
            here = slice(num_scored, num_scored + len(places))
            arrays["predictors"][here] = before + ahead
            targets = table.input_ids if table.targets is None else table.targets
            arrays["targets"][here] = targets[row, places]
            arrays["mask"][here] = True
            if table.kept is not None:
                lists = arrays["kept_words"]
                lists[here] = table.kept.listed(row, places, lists.shape[-1])
                if "mask_ids" in arrays:
                    arrays["mask_ids"][here] = table.kept.mask_ids[row, places]
            arrays["sequence_ids"][here] = num_sequences
            for name, values in table.columns.items():
                columns[name][here] = values[row, places]
            num_scored += len(places)
            num_sequences += len(places) > 0


def _masks(kept: KeptSets, sequences: np.ndarray, num_buffers: int) -> tuple[np.ndarray, np.ndarray]:
    """(the number of each mask of `kept` among those of the `sequences`, these for each buffer)."""
    used = np.unique(kept.mask_ids[sequences])
    used = used[used != NO_MASK]
    numbers = np.zeros(len(kept.masks), np.int32)
    numbers[used] = np.arange(len(used))
    masks = np.zeros((power_of_two(max(len(used), 1)), kept.masks.shape[1]), np.uint32)
    masks[: len(used)] = kept.masks[used]
    return numbers, np.broadcast_to(masks, (num_buffers, *masks.shape))


class _OfTable(NamedTuple):
    """The pictures of a table, with what buffers have of each sequence of one micro-batch, by its row."""

    all: Pictures
    store: FeatureStore
    numbers: dict[int, np.ndarray]
    """[T] each: the numbers of placeholders within their pictures (`Vision.numbers_within`)."""
    turns: dict[int, np.ndarray] | None
    """[3, T] each, where pictures have rows and columns."""


def _pictures(cut: MicroBatchPlan, table: TokenTable, store: FeatureStore | None) -> _OfTable | None:
    """The pictures of the sequences of `cut`; None if there are none."""
    sequences = cut.sequences
    if table.pictures is None or not table.pictures.ids[sequences].any():
        return None
    if store is None:
        raise ValueError(
            "sequences with pictures must be read by models with a tower; one of this run (policy, critic, "
            "teacher or reward model) has none, or does not use it; take one that sees, set model.vision to "
            "frozen, or leave the pictures out of the data"
        )
    numbers, turns, vision = dict[int, np.ndarray](), dict[int, np.ndarray](), store.vision
    for row in sequences.tolist():
        here = Pictures(table.pictures.ids[row], table.pictures.by_id)
        _check_placeholders(here, vision)
        numbers[row] = vision.numbers_within(here)
        if vision.has_grid:
            turns[row], _ = rope_positions(vision, here, len(here))
    return _OfTable(table.pictures, store, numbers, turns if vision.has_grid else None)


def _check_placeholders(pictures: Pictures, vision: Vision) -> None:
    """Raises ValueError if pictures of a sequence have other numbers of placeholders than features."""
    for picture in pictures.used:
        found, count = int((pictures.ids == picture.id).sum()), vision.num_placeholders(picture.size)
        if found % count:
            raise ValueError(
                "a model must make as many features of a picture as the policy has placeholders for it; of "
                f"a picture of {picture.size[0]} x {picture.size[1]} pixels with {found} placeholders it "
                f"makes {count}; take a critic or teacher with the policy's kind and sizes of pictures"
            )


def _inserts(numbers: np.ndarray, pictures: Pictures, store: FeatureStore) -> dict[str, Any]:
    """What micro-batches have of the `pictures` of their buffers [R, T], with `numbers` within each."""
    buffers = (Pictures(ids, pictures.by_id) for ids in pictures.ids)
    each = [feature_rows(row, store.vision, of) for row, of in zip(buffers, numbers, strict=True)]
    used = [of_buffer for of_buffer, _ in each]
    rows = np.stack([rows for _, rows in each])
    if store.kept == "pixels":
        return {"rows": rows, "patches": patches_in_rows(used, store)}
    return {"rows": rows, "features": features_in_rows(used, store.of_update, store)}


def micro_batches(
    table: TokenTable, planner: MicroBatchPlanner, mesh: Mesh, forms: RowForms = NO_FORMS
) -> Iterator[tuple[np.ndarray, MicroBatch]]:
    """For each cut of `table`: row numbers in the order of their scored tokens, and the micro-batch."""
    for cut in planner.plans(table):
        yield cut.sequences, fill(cut, table, mesh, forms, planner.store)
