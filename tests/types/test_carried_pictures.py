"""Pictures beside tokens: what carries them from the prompt to the batch, and to other processes."""

import json
import pickle
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from quatrain.cluster.processes import _read, _written
from quatrain.forward.table import TokenTable
from quatrain.rollout.rollouts import _plain, _row
from quatrain.types.batches import Prompt, RolloutBatch
from quatrain.types.join import _join_rollouts
from quatrain.types.pictures import IN_JSON, TEXT, Picture, Pictures, PicturesInJson, joined
from quatrain.types.piece import Piece
from quatrain.types.rollouts import Completion, Sampling, rollout_batch, sequence_pictures
from quatrain.types.sampler import Request, Sampler, plain, request_of, sampled

RED, BLUE, GREEN = (Picture.of(name.encode(), (8 + number, 8)) for number, name in enumerate("rbg"))


def of(*tokens: Picture | None) -> Pictures | None:
    return Pictures.of(tokens)


def prompt(*tokens: Picture | None, group: int = 0) -> Prompt:
    return Prompt(group, np.arange(1, len(tokens) + 1, dtype=np.int32), "", pictures=of(*tokens))


def episode(first: Prompt) -> Completion:
    """Two sampled tokens, an answer whose middle token is GREEN, another, an answer of text, and another."""
    completion = Completion()
    completion.extend([5, 6], [-1.0] * 2, 0)
    before = sequence_pictures(first, completion), len(first.input_ids) + 2
    completion.begin_turn([7, 8, 9], joined(before, (of(None, GREEN, None), 3)))
    completion.append(Piece([5], [-1.0], [0]), 0)
    completion.begin_turn([7, 7])
    completion.append(Piece([6], [-1.0], [0]), 0)
    return completion


def names(ids: np.ndarray) -> str:
    return "".join({TEXT: ".", RED.id: "r", BLUE.id: "b", GREEN.id: "g"}[number] for number in ids.tolist())


def rows_of(pictures: Pictures | None) -> list[str]:
    assert pictures is not None
    return [names(row) for row in pictures.ids]


def test_a_batch_has_the_pictures_of_prompts_and_of_later_turns(tokenizer):
    """The faults: those of a prompt are lost once a turn brings one, or all stand a few tokens apart."""
    red, text = prompt(None, RED, RED), prompt(None, None, group=1)
    single = Completion([5, 6], [-1.0] * 2, [0, 0])
    samples = [(red, single), (red, episode(red)), (text, episode(text)), (text, single)]
    batch = rollout_batch(samples, tokenizer, {})
    assert rows_of(batch.pictures) == [".rr" + "." * 9, ".rr...g.....", ".....g......", "." * 12]
    assert {each.name for each in batch.pictures.used} == {RED.name, GREEN.name}
    assert rollout_batch([(text, single)], tokenizer, {}).pictures is None


def test_what_begins_a_turn_is_told_to_nobody_by_a_piece_of_the_sampler():
    with pytest.raises(AssertionError, match="before they are added"):
        episode(prompt(None)).cut(3)


def test_joined_batches_keep_their_pictures(tokenizer):
    """Of batches of other widths, one of which has none; the sequences of a group that is left out go."""
    pairs = [(prompt(RED, None), 1), (prompt(None, BLUE, BLUE, group=1), 4), (prompt(None, group=2), 2)]
    batches = [
        rollout_batch([(each, Completion([5] * new, [-1.0] * new, [0] * new))], tokenizer, {})
        for each, new in pairs
    ]
    assert rows_of(_join_rollouts(batches, [1, 0, 2]).pictures) == [".bb....", "r......", "......."]
    assert rows_of(_join_rollouts(batches, [0, 2]).pictures) == ["r..", "..."]
    assert _join_rollouts(batches, [2]).pictures is None


def test_a_table_has_the_pictures_of_its_rows_and_compares_them(tokenizer):
    """The fault: two prompts with the same ids and other pictures would share what they begin with."""
    answer = Completion([5], [-1.0], [0])
    prompts = [prompt(None, RED, None), prompt(None, BLUE, None), prompt(None, RED, None)]
    batch = rollout_batch([(each, answer) for each in prompts], tokenizer, {})
    table = TokenTable.of(batch)
    assert table.common_tokens(np.array([0, 1]), 3) == 1
    assert table.common_tokens(np.array([0, 2]), 3) == 3
    assert rows_of(table.take(np.array([1])).pictures) == [".b.."]
    assert table.take(np.array([1])).common_tokens(np.array([0]), 3) == 3


def test_a_request_and_its_pictures_are_the_same_in_another_process(tmp_path):
    """As JSON with arrays, between the processes of a run: a file of this one is not read there."""
    (tmp_path / "b").write_bytes(b"b")
    there = Picture.of(tmp_path / "b", BLUE.size)
    first = Prompt(3, np.ones(4, np.int32), "", pictures=of(RED, None, there, RED))
    told = json.dumps(plain(Request(first, 2, Sampling(1, 4))), default=_written(PicturesInJson()))
    (tmp_path / "b").unlink()
    again = request_of(json.loads(told, object_hook=_read(PicturesInJson()))).prompt.pictures
    assert names(again.ids) == "r.br"
    assert {each.id: (each.size, each.encoded) for each in again.used} == {
        RED.id: (RED.size, b"r"),
        BLUE.id: (BLUE.size, b"b"),
    }


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        (of(RED), r"pictures.ids: expected shape \(2,\); got shape \(1,\)"),
        (Pictures(np.array([RED.id, 0]), {}), "pictures.by_id: expected every picture of pictures.ids"),
        (Pictures(np.zeros(2, np.int32), {}), "expected dtype int64; got dtype int32"),
    ],
)
def test_a_prompt_refuses_pictures_of_other_tokens(pictures, message):
    with pytest.raises(ValueError, match=message):
        Prompt(0, np.ones(2, np.int32), "", pictures=pictures)


@pytest.mark.parametrize("place", [1, 2])
def test_what_was_sampled_and_padding_are_text(place, tokenizer):
    """A sampled token may have the id of a placeholder; it stands for no picture."""
    batch = rollout_batch([(prompt(None), Completion([5], [-1.0], [0]))], tokenizer, {})
    fields = {name: getattr(batch, name) for name in RolloutBatch.__dataclass_fields__}
    for name, padding in (("input_ids", 0), ("attention_mask", False), ("completion_mask", False)):
        fields[name] = np.pad(fields[name], [(0, 0), (0, 1)], constant_values=padding)
    fields["rollout_logprobs"] = np.pad(fields["rollout_logprobs"], [(0, 0), (0, 1)])
    fields["policy_version"] = np.pad(fields["policy_version"], [(0, 0), (0, 1)], constant_values=-1)
    ids = np.zeros((1, 3), np.int64)
    ids[0, 0] = RED.id
    assert RolloutBatch(**fields | {"pictures": Pictures(ids, {RED.id: RED})}).pictures is not None
    ids = ids.copy()
    ids[0, place] = RED.id
    with pytest.raises(ValueError, match="no picture on sampled tokens and padding; got one there"):
        RolloutBatch(**fields | {"pictures": Pictures(ids, {RED.id: RED})})


def test_a_picture_compares_by_its_bytes():
    assert pickle.loads(pickle.dumps(RED)) == RED != BLUE
    assert Picture.of(b"r", (1, 1)) == RED


def test_a_text_has_the_bytes_of_a_picture_once():
    """As messages of an episode have them too, in any order and depth."""
    value = [{"content": [RED, "r"]}, BLUE, {"again": RED}, Picture.of(b"b", BLUE.size)]
    text = json.dumps(value, default=PicturesInJson().written)
    assert text.count("null") == text.count(IN_JSON) - 2 == 2
    again = json.loads(text, object_hook=PicturesInJson().read)
    assert again == value
    assert [again[1].encoded, again[2]["again"].encoded, again[3].size] == [b"b", b"r", BLUE.size]
    with pytest.raises(TypeError, match="object is not a value that JSON has"):
        json.dumps([object()], default=PicturesInJson().written)


class Sees(Sampler):
    """Keeps what it is asked for, and samples nothing."""

    cannot_see = None

    def load(self, weights, version):
        """Nothing to load."""

    def start(self, requests, listener):
        self.asked = requests
        return Future()


class IsBlind(Sees):
    cannot_see = Sampler.cannot_see


def test_a_sampler_that_cannot_see_is_given_no_pictures():
    """The fault: it would sample after the placeholders alone."""
    sampling, blind = Sampling(1, 4), IsBlind()
    [turn] = sampled(blind, [Request(prompt(None, RED), 0, sampling)])
    with pytest.raises(ValueError, match=r"pictures would be lost: rollout\.sampler must see"):
        turn.result(0)
    assert not hasattr(blind, "asked")
    assert not sampled(blind, [Request(prompt(None), 0, sampling)])[0].done()
    assert not sampled(Sees(), [Request(prompt(None, RED), 0, sampling)])[0].done()


def test_rows_of_the_main_process_have_their_pictures_in_all():
    """Those that an environment brought with its opening, or in a later turn; others are there."""
    red, text = prompt(None, RED), prompt(None, None)
    opened = replace(red, input_ids=np.arange(3, dtype=np.int32), pictures=of(None, BLUE, None))
    single = Completion([5], [-1.0], [0])
    for given, returned, completion, num_told in (
        (red, red, single, 0),
        (red, opened, single, 1),
        (text, text, episode(text), 1),
        (red, red, episode(red), 2),
        (red, replace(red, pictures=of(None, RED)), single, 0),
        (red, text, single, 0),
    ):
        told = json.dumps(_plain(given, returned, completion), default=_written(PicturesInJson()))
        assert told.count(IN_JSON) == num_told
        again = _row(given, json.loads(told, object_hook=_read(PicturesInJson())))
        assert again[1] == completion
        there, here = sequence_pictures(*again), sequence_pictures(returned, completion)
        assert (there is None) == (here is None)
        if here is not None:
            assert names(there.ids) == names(here.ids)
            assert set(there.used) == set(here.used)
