"""Routes of experts in completions and batches: each stays with its token, and the last token has none."""

import json
from dataclasses import replace

import numpy as np
import pytest

from quatrain.cluster.processes import _read, _written
from quatrain.types.batches import Prompt, RewardedBatch
from quatrain.types.join import join_groups
from quatrain.types.pictures import PicturesInJson
from quatrain.types.piece import rows_between
from quatrain.types.rollouts import Completion, rollout_batch
from quatrain.types.routes import ROUTES, live_of, routes_from_text, routes_to_text

LIVE = live_of(np.uint8)


def _of(*tokens: int) -> np.ndarray:
    """[tokens, 2, 3] routes that name the token they are of."""
    return np.array([[[t, t, t], [t, t, 100 + t]] for t in tokens], np.uint8).reshape(-1, 2, 3)


def _completion(prompt: list[int], tokens: list[int]) -> Completion:
    completion = Completion(tokens, [-0.5] * len(tokens), [0] * len(tokens), finish_reason="stop")
    completion.record(ROUTES, 0, _of(*prompt), _of(*tokens[:-1]))
    return completion


def _batch(tokenizer, *rows: tuple[int, list[int], list[int]]):
    samples = [
        (Prompt(group, np.array(prompt, np.int32), f"{group}"), _completion(prompt, tokens))
        for group, prompt, tokens in rows
    ]
    return rollout_batch(samples, tokenizer, {})


def _tokens(routes: np.ndarray) -> list[list[int]]:
    """The tokens that the routes [B, T, 2, 3] of a batch name; 0: live."""
    named = routes[:, :, 0, 0]
    assert ((routes == LIVE).all(axis=(2, 3)) == (named == LIVE)).all()
    return np.where(named == LIVE, 0, named).tolist()


def test_a_batch_has_the_routes_of_every_token_but_the_last(tokenizer):
    batch = _batch(tokenizer, (7, [4, 5, 6], [10, 11]), (8, [4], [12, 13, 14, 15, 16]), (9, [3, 2], [9]))
    assert batch.routes.shape == (3, 6, 2, 3)
    assert batch.routes.dtype == np.uint8
    assert _tokens(batch.routes) == [[4, 5, 6, 10, 0, 0], [4, 12, 13, 14, 15, 0], [3, 2, 0, 0, 0, 0]]
    assert batch.routes[0, 3, 1].tolist() == [10, 10, 110]
    assert not batch.routes.flags.writeable


def test_a_route_of_the_last_token_is_refused(tokenizer):
    """As it is where routes are stored one token too late."""
    batch = _batch(tokenizer, (7, [4, 5, 6], [10, 11]))
    shifted = np.roll(batch.routes, 1, axis=1)
    with pytest.raises(ValueError, match="field routes: expected no route of a row's last token"):
        replace(batch, routes=shifted)


@pytest.mark.parametrize(
    "routes",
    [np.zeros((1, 4, 2, 3), np.uint8), np.zeros((1, 5, 2, 3), np.int32), np.zeros((1, 5), np.uint8), 3],
)
def test_routes_of_another_length_or_dtype_are_refused(tokenizer, routes):
    batch = _batch(tokenizer, (7, [4, 5, 6], [10, 11]))
    with pytest.raises(
        ValueError, match=r"field routes: expected an array \[1, 5, L, k\] of uint8 or uint16"
    ):
        replace(batch, routes=routes)


def test_rows_without_routes_are_live(tokenizer):
    prompt = Prompt(7, np.array([4, 5], np.int32), "7")
    without = Completion([8, 9], [-0.5] * 2, [0] * 2, finish_reason="stop")
    samples = [(prompt, without), (prompt, _completion([4, 5], [6]))]
    assert _tokens(rollout_batch(samples, tokenizer, {}).routes) == [[0, 0, 0, 0], [4, 5, 0, 0]]
    assert rollout_batch(samples[:1], tokenizer, {}).routes is None


def test_a_token_keeps_the_first_route_that_was_recorded():
    completion = Completion([10, 11, 12], [0.0] * 3, [0] * 3)
    completion.record(ROUTES, 0, _of(4, 5))
    completion.record(ROUTES, 1, _of(90, 10), _of(11))  # what was computed again, and what is new
    assert np.concatenate(completion.columns[ROUTES])[:, 0, 0].tolist() == [4, 5, 10, 11]
    completion.record(ROUTES, 0, _of(91, 92))
    assert completion.known(ROUTES) == 4
    with pytest.raises(AssertionError, match="gap"):
        completion.record(ROUTES, 5, _of(13))


@pytest.mark.parametrize("length", [4, 3, 2, 1])
def test_a_completion_that_is_cut_has_the_routes_of_what_is_left(length):
    completion = Completion([10, 11, 12, 13], [0.0] * 4, [0] * 4)
    completion.record(ROUTES, 0, _of(4, 5))
    completion.record(ROUTES, 2, _of(10, 11))
    completion.record(ROUTES, 4, _of(12))
    completion.cut(length)
    assert np.concatenate(completion.columns[ROUTES])[:, 0, 0].tolist() == [4, 5, 10, 11, 12][: length + 1]


def test_samples_of_a_group_share_the_routes_of_their_prompt():
    prompt, completions = _of(4, 5, 6), [Completion(), Completion()]
    for completion in completions:
        completion.record(ROUTES, 0, prompt)
    assert np.shares_memory(*(each.columns[ROUTES][0] for each in completions))


def test_joined_batches_keep_routes_with_their_rows(tokenizer):
    first = _batch(tokenizer, (7, [4, 5, 6], [10, 11]), (8, [4], [12, 13, 14, 15, 16]))
    second = _batch(tokenizer, (9, [3, 2], [9, 8]))
    without = replace(_batch(tokenizer, (5, [1], [2])), routes=None)

    def rewarded(batch):
        zeros = np.zeros(len(batch), np.float32)
        return RewardedBatch(batch, zeros, zeros[None], ("r",))

    joined = join_groups(list(map(rewarded, (first, second, without))), [9, 7, 5]).rollouts
    assert _tokens(joined.routes) == [[3, 2, 9, 0, 0], [4, 5, 6, 10, 0], [0] * 5]
    assert joined.input_ids.tolist() == [[3, 2, 9, 8, 0], [4, 5, 6, 10, 11], [1, 2, 0, 0, 0]]
    assert join_groups([rewarded(without)], [5]).rollouts.routes is None


def test_parts_of_routes_by_tokens():
    parts = [_of(1, 2, 3), _of(4), _of(5, 6)]
    found = [[int(t[0, 0]) for part in rows_between(parts, *ends) for t in part] for ends in ((0, 9), (2, 5))]
    assert found == [[1, 2, 3, 4, 5, 6], [3, 4, 5]]
    assert rows_between(parts, 4, 4) == []


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_routes_go_through_json(dtype):
    routes = _of(1, 2).astype(dtype)
    for value in (routes_from_text(routes_to_text(routes)), _through_processes({"a": [routes]})["a"][0]):
        assert value.dtype == dtype
        np.testing.assert_array_equal(value, routes)


def _through_processes(value):
    return json.loads(
        json.dumps(value, default=_written(PicturesInJson())), object_hook=_read(PicturesInJson())
    )


@pytest.mark.parametrize("text", ["", "AAAA", "not base64!", routes_to_text(np.zeros(3))])
def test_text_that_is_no_array_of_integers_is_refused(text):
    with pytest.raises(ValueError, match="routes must be"):
        routes_from_text(text)
