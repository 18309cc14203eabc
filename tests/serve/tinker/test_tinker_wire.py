"""What the training server reads of the real client's bytes, refuses by name, and writes for it to read."""

import base64
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
from effort import within

from quatrain.serve.tinker import messages, wire
from quatrain.serve.tinker.calls import Likeliest, Passed, Refused, Sampled, Sequence
from quatrain.serve.tinker.wire import Csr, Limits, read_pass, write_passed, write_sampled

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "tinker.json").read_text())
LIMITS = Limits(longest=16, vocab_size=10)
ROW = {"target_tokens": [4, 0, 6], "logprobs": [-0.5, -1.0, -1.5], "advantages": [1.0, 0.0, -2.0]}


def golden(name, kind="passes"):
    return base64.b64decode(GOLDEN[kind][name])


def tensor(values, dtype=None, shape=None):
    values = np.asarray(values)
    if dtype is None:
        dtype = messages.INT64 if values.dtype.kind == "i" else messages.FLOAT32
    read_as = wire._DTYPES[dtype][1] if dtype in wire._DTYPES else np.dtype("<i8")
    return {
        "dense": values.astype(read_as).tobytes(),
        "dtype": dtype,
        "shape": values.shape if shape is None else shape,
    }


def sparse(shape, ends, columns, values, dtype=messages.INT64):
    places = {"crow_indices": ends, "col_indices": columns}
    return {
        "sparse_csr": {
            "values": np.asarray(values, wire._DTYPES[dtype][1]).tobytes(),
            **{name: np.asarray(each, "<i8").tobytes() for name, each in places.items()},
        },
        "dtype": dtype,
        "shape": shape,
    }


def datum(tokens=(1, 2, 3), **inputs):
    given = [
        {"key": name, "value": each if isinstance(each, dict) else tensor(each)}
        for name, each in inputs.items()
    ]
    text = {"encoded_text": {"tokens": np.asarray(tokens, "<i4").tobytes()}}
    return {"model_input": [text], "loss_fn_inputs": given}


def body(*data, loss="cross_entropy", **fields):
    given = {"model_id": "m", "seq_id": 7, "loss_fn": loss, "data": list(data), **fields}
    return messages.ForwardBackwardRequest(**given).SerializeToString()


def read(*data, limits=LIMITS, **fields):
    model_id, seq_id, call = read_pass(body(*data, **fields), limits)
    assert (model_id, seq_id) == ("m", 7)
    return call


def refusal(*data, limits=LIMITS, **fields):
    """The message, with the address, without which the client would wait for ever."""
    with pytest.raises(Refused) as caught:
        read_pass(body(*data, **fields), limits)
    assert caught.value.address == ("m", 7)
    return str(caught.value)


def numbers(**given):
    return [{"key": name, "value": value} for name, value in given.items()]


def test_the_schema_is_that_of_the_client():
    """A wrong number, type or label of a field: values would be read as others, or as absent."""
    unread = {"SampleResponse": {6}}  # prompt_alt_tokens, which is refused
    maps = {
        "Number": ("key", "value"),
        "Setting": ("key", "value"),
        "Input": ("key", "value"),
        "Field": ("key", "value"),
        "Address": ("model_id", "seq_id", "forward_only"),
    }
    for name, message in messages._CLASSES.items():
        mine = {each.number: each for each in message.DESCRIPTOR.fields}
        if name in maps:
            assert tuple(each.name for each in mine.values()) == maps[name]
            continue
        theirs = {number: rest for number, *rest in GOLDEN["fields"][name]}
        assert mine.keys() == theirs.keys() - unread.get(name, set()), name
        for number, field in mine.items():
            their_name, repeated, kind = theirs[number]
            assert (field.name, field.is_repeated) == (their_name, repeated)
            opaque = field.type == field.TYPE_BYTES and kind == field.TYPE_MESSAGE
            assert field.type == kind or opaque, (name, field.name)


def test_a_request_of_the_client_is_read():
    """Chunks out of order, spans that end the request, a default that is lost."""
    model_id, seq_id, call = read_pass(golden("cross_entropy"), LIMITS)
    assert (model_id, seq_id, call.loss, call.numbers, call.forward_only) == (
        "s:train:0",
        3,
        "cross_entropy",
        {},
        False,
    )
    first, second = call.data
    assert first.tokens.tolist() == [1, 2, 3]
    assert first.tokens.dtype == first.targets.dtype == np.int32
    assert first.targets.tolist() == [2, 3, 4]
    assert first.columns["weights"].tolist() == [0, 1, 0.5]
    assert first.columns["weights"].dtype == np.float32
    assert (second.tokens.tolist(), second.targets.tolist(), dict(second.columns)) == ([7], [8], {})
    assert read_pass(golden("forward"), LIMITS)[2].forward_only


def test_targets_of_several_tokens_keep_their_places():
    """[T, K] read as [K, T], or flat."""
    pair, single = read_pass(golden("pairs"), LIMITS)[2].data
    assert pair.targets.tolist() == [[5, 9], [6, 8]]
    assert pair.columns["weights"].tolist() == [[0.25, 0.75], [1, 0.5]]
    assert single.targets.tolist() == [4]


def test_sparse_targets_are_in_their_cells():
    """A cell that is not listed counts; token 0, which the client leaves out of its sparse targets, does not
    although it has a weight; weights that are listed elsewhere than targets move."""
    (found,) = read_pass(golden("sparse"), LIMITS)[2].data
    assert found.targets.tolist() == [[-1] * 8, [5, 9, *[-1] * 6], [-1, 0, *[-1] * 6]]
    weights = np.zeros((3, 8))
    weights[1, :2], weights[2, 1] = (0.25, 0.75), 2
    assert (found.columns["weights"] == weights).all()


def test_sparse_targets_without_weights_are_those_listed():
    call = read(datum((1, 2), target_tokens=sparse((2, 4), [0, 2, 3], [0, 3, 1], [0, 9, 5])))
    assert call.data[0].targets.tolist() == [[0, -1, -1, 9], [-1, 5, -1, -1]]


def test_each_loss_reads_its_inputs_and_numbers():
    """An input or a number that a loss does not get: it would compute with its default."""
    for name in ("importance_sampling", "ppo", "ppo_rows", "dro", "gspo"):
        call = read_pass(golden(name), LIMITS)[2]
        assert call.loss == name.removesuffix("_rows")
        assert call.data[0].columns["logprobs"].tolist() == [-0.5, -1, -1.5]
        assert call.data[0].columns["advantages"].tolist() == [1, 0, -2]
    clip = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    assert read_pass(golden("ppo"), LIMITS)[2].numbers == clip
    assert read_pass(golden("dro"), LIMITS)[2].numbers == {"beta": 0.5}
    rows = read_pass(golden("ppo_rows"), LIMITS)[2]
    assert rows.numbers == {}
    assert {name: rows.data[0].columns[name].tolist() for name in clip} == {
        name: [value] * 3 for name, value in clip.items()
    }
    assert read_pass(golden("gspo"), LIMITS)[2].data[0].columns["sequence_ratio_mask"].tolist() == [0, 1, 1]


def test_thresholds_belong_to_the_losses_that_clip():
    """A loss that takes no thresholds, or not from the configuration; equal ones, which are fine."""
    clip = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}
    for loss in ("ppo", "cispo", "gspo"):
        assert read(datum(**ROW), loss=loss, loss_fn_config=numbers(**clip)).numbers == clip
        rows = read(datum(**ROW, **{name: [1.0] * 3 for name in clip}), loss=loss).data[0].columns
        assert rows.keys() == {"logprobs", "advantages", *clip}
    for loss in ("importance_sampling", "dro", "cross_entropy"):
        assert "loss_fn_config 'clip_" in refusal(datum(**ROW), loss=loss, loss_fn_config=numbers(**clip))


def test_the_second_form_of_the_numbers_counts_where_it_is_given():
    """The older form read, which an entry of the newer contradicts."""
    first, second = numbers(beta=1.0), [{"key": "beta", "value": {"number": 2.0}}]
    given = datum(**ROW)
    assert read(given, loss="dro", loss_fn_config=first, loss_fn_config_v2=second).numbers == {"beta": 2}
    assert read(given, loss="dro", loss_fn_config=first).numbers == {"beta": 1}
    assert "must be a number; got 'x'" in refusal(
        given, loss="dro", loss_fn_config_v2=[{"key": "beta", "value": {"text": "x"}}]
    )
    assert "must be a number" in refusal(given, loss="dro", loss_fn_config_v2=[{"key": "beta"}])


def test_losses_of_the_service_are_refused_or_replaced():
    """An asked formula computed as another without a setting, or with the settings of the other."""
    with pytest.raises(Refused) as caught:
        read_pass(golden("stable_reinforce"), LIMITS)
    assert str(caught.value) == (
        "loss_fn stable_reinforce is computed only by Tinker's service; use importance_sampling, ppo, cispo, "
        "dro or gspo (in the cookbook: loss_fn=ppo)"
    )
    assert caught.value.address == ("s:train:0", 3)
    replaced = read_pass(golden("stable_reinforce"), Limits(16, 10, "cispo"))[2]
    assert (replaced.loss, replaced.numbers) == ("cispo", {})
    assert read_pass(golden("ppo"), Limits(16, 10, "cispo"))[2].loss == "ppo"
    with pytest.raises(
        Refused, match="custom is not computed by this server; give forward_backward_custom a"
    ):
        read_pass(golden("custom"), LIMITS)
    assert "one of cross_entropy, importance_sampling, ppo, cispo, dro, gspo; got 'x'" in refusal(
        datum(**ROW), loss="x"
    )


def test_images_are_refused():
    with pytest.raises(
        Refused, match="datum 0: this server takes text alone; got a chunk of image in model_in"
    ):
        read_pass(golden("image"), LIMITS)
    assert "got a chunk of no kind" in refusal({**datum(**ROW), "model_input": [{}]})


def test_bfloat16_and_int32_are_widened():
    """Halves of a float read as whole ones, or swapped."""
    half = {"dense": b"\x80\xbf\x40\x40\x00\x00", "dtype": messages.BFLOAT16, "shape": [3]}
    call = read(datum(target_tokens=tensor([4, 0, 6], messages.INT32), weights=half))
    assert call.data[0].columns["weights"].tolist() == [-1, 3, 0]
    assert call.data[0].columns["weights"].dtype == np.float32
    assert call.data[0].targets.tolist() == [4, 0, 6]


def test_a_tensor_without_a_shape_has_one_dimension():
    assert read(datum(target_tokens=tensor([4, 0, 6], shape=[]))).data[0].targets.shape == (3,)


CASES = {
    "mask": (
        datum(**ROW, mask=[1.0, 1, 1]),
        {},
        "datum 0: the input 'mask' is unknown: loss_fn ppo has target_",
    ),
    "input of another loss": (datum(**ROW, weights=[1.0] * 3), {}, "the input 'weights' is unknown"),
    "no advantages": (
        datum(target_tokens=[1, 2, 3], logprobs=[0.0] * 3),
        {},
        "loss_fn ppo needs the input advantages; the datum has target_tokens, logprobs",
    ),
    "no targets": (datum(), {"loss": "cross_entropy"}, "needs the input target_tokens; the datum has none"),
    "not finite": (
        datum(**{**ROW, "logprobs": [0.0, float("-inf"), 0]}),
        {},
        "logprobs must be finite; got -inf",
    ),
    "nan": (datum(**{**ROW, "advantages": [0.0, float("nan"), 0]}), {}, "advantages must be finite; got nan"),
    "other length": (datum(**{**ROW, "logprobs": [0.0] * 4}), {}, "shape of target_tokens, [3]; got [4]"),
    "targets too short": (
        datum((1, 2, 3, 4), **ROW),
        {},
        "shape [T] for loss_fn ppo, with T = 4 as model_input; g",
    ),
    "two targets": (
        datum((1,), target_tokens=[[1, 2]], logprobs=[[0.0, 0]], advantages=[[0.0, 0]]),
        {},
        "shape [T] for loss_fn ppo, with T = 1 as model_input; got [1, 2]",
    ),
    "three dimensions": (
        datum((1,), target_tokens=[[[1, 2]]]),
        {"loss": "cross_entropy"},
        "[T] or [T, K], with T = 1 as model_input; got [1, 1, 2]",
    ),
    "no targets in a row": (
        datum((1,), target_tokens=tensor(np.zeros((1, 0), int))),
        {"loss": "cross_entropy"},
        "got [1, 0]",
    ),
    "wrong target": (datum(**{**ROW, "target_tokens": [1, 10, 2]}), {}, "ids from 0 to 9; got 10"),
    "negative target": (datum(**{**ROW, "target_tokens": [1, -1, 2]}), {}, "target_tokens must be token ids"),
    "huge target": (datum(**{**ROW, "target_tokens": [1, 2**32, 2]}), {}, "got 4294967296"),
    "wrong token": (datum((1, 2, 10), **ROW), {}, "model_input must be token ids from 0 to 9; got 10"),
    "negative token": (datum((1, 2, -1), **ROW), {}, "model_input must be token ids from 0 to 9; got -1"),
    "no token": (datum((), **ROW), {}, "model_input must have 1 to 16 tokens, the model's positions; got 0"),
    "too long": (datum((1,) * 17, target_tokens=[1] * 17), {"loss": "cross_entropy"}, "positions; got 17"),
    "floats for targets": (
        datum(**{**ROW, "target_tokens": [1.0, 2, 3]}),
        {},
        "target_tokens must be int64; got float32; convert it",
    ),
    "integers for numbers": (
        datum(**{**ROW, "logprobs": [0, 1, 2]}),
        {},
        "logprobs must be float32; got int64",
    ),
    "no dtype": (datum(**{**ROW, "logprobs": tensor([0.0] * 3, dtype=9)}), {}, "float32; got dtype 9"),
    "wrong size": (datum(**{**ROW, "logprobs": tensor([0.0] * 4, shape=[3])}), {}, "as its shape [3]; got 4"),
    "negative size": (
        datum(**{**ROW, "logprobs": tensor([0.0] * 4, shape=[-2, -2])}),
        {},
        "as its shape [-2, -2]; got 4",
    ),
    "part of a number": (
        datum(**{**ROW, "logprobs": {"dense": b"123456789", "dtype": 1, "shape": [3]}}),
        {},
        "logprobs must have whole numbers of 4 bytes; got 9 bytes",
    ),
    "neither": (
        datum(**{**ROW, "logprobs": {"dtype": 1, "shape": [3]}}),
        {},
        "dense or sparse_csr; got neither",
    ),
    "sparse advantages": (
        datum(**{**ROW, "advantages": sparse((1, 3), [0, 1], [0], [1], messages.FLOAT32)}),
        {},
        "advantages must be dense: only target_tokens and weights of shape [T, K] may be sparse; got",
    ),
    "sparse of one dimension": (
        datum(target_tokens=sparse((3,), [0, 1], [0], [1])),
        {"loss": "cross_entropy"},
        "target_tokens must be dense",
    ),
    "unknown number": (
        datum(**ROW),
        {"loss_fn_config": numbers(beta=1.0)},
        "loss_fn_config 'beta' is unknown: loss_fn ppo has clip_low_threshold, clip_high_threshold; leave",
    ),
    "no number": (
        datum(**ROW),
        {"loss": "dro"},
        "loss_fn dro needs beta, which has no default; give loss_fn_con",
    ),
    "number not finite": (
        datum(**ROW),
        {"loss": "dro", "loss_fn_config": numbers(beta=float("inf"))},
        "'beta' must be finite; got inf",
    ),
    "number twice": (
        datum(**ROW),
        {"loss": "dro", "loss_fn_config": numbers(beta=1.0) * 2},
        "loss_fn_config 'beta' is given twice",
    ),
    "input twice": (
        {**datum(**ROW), "loss_fn_inputs": datum(**ROW)["loss_fn_inputs"] * 2},
        {},
        "loss_fn_inputs 'target_tokens' is given twice",
    ),
    "threshold in both": (
        datum(**ROW, clip_low_threshold=[0.5] * 3),
        {"loss_fn_config": numbers(clip_low_threshold=0.5)},
        "clip_low_threshold is in loss_fn_config and in loss_fn_inputs; give it in one of them",
    ),
    "thresholds swapped": (
        datum(**ROW),
        {"loss_fn_config": numbers(clip_low_threshold=2.0, clip_high_threshold=1.0)},
        "loss_fn_config: clip_low_threshold must be at most clip_high_threshold",
    ),
    "thresholds of a row swapped": (
        datum(**ROW, clip_low_threshold=[0.5, 2, 0.5], clip_high_threshold=[1.0] * 3),
        {},
        "loss_fn_inputs: clip_low_threshold must be at most clip_high_threshold",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_datum_is_refused_by_name(name):
    """What is dropped, cut, or taken for something else, and what ends in another exception."""
    given, fields, message = CASES[name]
    assert message in refusal(given, **{"loss": "ppo", **fields})


BAD_CSR = {
    "pointers too few": ([0, 2], [0, 1], [1, 2]),
    "begins late": ([1, 1, 2], [0, 1], [1, 2]),
    "ends early": ([0, 1, 1], [0, 1], [1, 2]),
    "goes back": ([0, 3, 2], [0, 1], [1, 2]),
    "column too high": ([0, 1, 2], [0, 4], [1, 2]),
    "column negative": ([0, 1, 2], [-1, 0], [1, 2]),
    "column twice": ([0, 2, 2], [1, 1], [1, 2]),
    "columns go back": ([0, 2, 2], [2, 1], [1, 2]),
    "columns too few": ([0, 1, 2], [0], [1, 2]),
}


@pytest.mark.parametrize("name", BAD_CSR)
def test_a_bad_sparse_layout_is_refused(name):
    """Values in the cells of others, of targets and of weights."""
    ends, columns, values = BAD_CSR[name]
    assert "must be sparse by compressed rows (CSR)" in refusal(
        datum((1, 2), target_tokens=sparse((2, 4), ends, columns, values))
    )
    weights = sparse((2, 4), ends, columns, values, messages.FLOAT32)
    assert "weights must be sparse by" in refusal(datum((1, 2), target_tokens=[[1] * 4] * 2, weights=weights))


def test_columns_may_go_back_where_a_row_begins():
    call = read(datum((1, 2), target_tokens=sparse((2, 4), [0, 2, 3], [2, 3, 0], [1, 2, 3])))
    assert call.data[0].targets.tolist() == [[-1, -1, 1, 2], [3, -1, -1, -1]]


def test_limits_on_sizes(monkeypatch):
    """A request of any size is taken, or one of the largest size is not."""
    one = datum(target_tokens=[1, 2, 3])
    assert len(read(datum((1,) * 16, target_tokens=[1] * 16)).data[0].tokens) == LIMITS.longest
    assert len(read(*[one] * wire.MOST_DATUMS).data) == wire.MOST_DATUMS
    assert (
        refusal(*[one] * (wire.MOST_DATUMS + 1))
        == "a request has 1 to 4096 datums; got 4097; send them in several"
    )
    assert "datums; got 0" in refusal()
    monkeypatch.setattr(wire, "MOST_CELLS", 6)
    assert len(read(one, one).data) == 2
    assert "datum 2: a request has at most 6 targets, T x K of all its datums" in refusal(one, one, one)
    monkeypatch.setattr(wire, "MOST_BYTES", 100)
    assert "a request has at most 100 bytes; got" in refusal(one, one)


def test_a_sparse_matrix_of_any_width_takes_no_memory():
    wide = sparse((1, 2**62), [0, 1], [2**61], [1])
    assert "a request has at most 8388608 targets" in refusal(datum((1,), target_tokens=wide))


def test_fields_are_counted_before_they_are_parsed():
    """Messages of two bytes each, which take sixty in memory; numbers of one byte, which take eight."""
    head = body()
    for many in (
        b"\x1a\x00" * 300_000,
        body({"model_input": [{}] * 300_000}),
        body(datum(target_tokens={"dense": b"", "dtype": 2, "shape": [0] * 300_000})),
    ):
        with pytest.raises(Refused, match="at most 262144 fields in all its messages") as caught:
            read_pass(head + many, LIMITS)
        assert caught.value.address == ("m", 7)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (b"\x40\x01", "ForwardBackwardRequest has a field 8 of wire type 0 that this server does not know"),
        (b"\x18\x01", "ForwardBackwardRequest has a field 3 of wire type 0"),
        (b"\x1a\x02\x28\x01", "Datum has a field 5 of wire type 0"),
        (b"\x1a\x06\x12\x04\x12\x02\x28\x01", "Tensor has a field 5"),
    ],
)
def test_fields_of_other_versions_are_refused(more, message):
    """A field that a later client adds would be skipped, and what it asks for not done."""
    with pytest.raises(Refused, match=re.escape(message)) as caught:
        read_pass(body(datum(target_tokens=[1, 2, 3])) + more, LIMITS)
    assert caught.value.address == ("m", 7)


def test_other_bytes_are_refused():
    for other in (
        b"\x0a",
        b"\x0a\x05abc",
        b"\x0a\x02\xff\xff",
        b"\xff" * 11,
        b"\x10" + b"\x80" * 11,
        b"\x1a\x03\x0a\x05a",
    ):
        with pytest.raises(Refused, match="ForwardBackwardRequest") as caught:
            read_pass(other, LIMITS)
        assert caught.value.address is None
    endless = b"\x10" + b"\x80" * 2**20  # a number of any length, which takes the square of it

    def refused():
        with pytest.raises(Refused, match="these bytes are not"):
            read_pass(endless, LIMITS)

    within(1, refused)
    for given in (
        {"model_id": "", "seq_id": 1},
        {"model_id": "m", "seq_id": 0},
        {"model_id": "m", "seq_id": -1},
    ):
        with pytest.raises(Refused, match="must have a model_id and a seq_id from 1 on") as caught:
            read_pass(body(datum(target_tokens=[1, 2, 3]), **given), LIMITS)
        assert caught.value.address is None


def test_an_answer_has_the_bytes_that_the_client_reads():
    """Offsets that count numbers or begin at others' ends; datums of different K in one record; names of
    metrics out of order, so that the same call answers other bytes."""
    logprobs = [np.asarray(each, np.float64) for each in ([-1, -2], [-3], [[-4, -5], [0, -6]])]
    answer = write_passed(Passed(logprobs, {"tokens:sum": 0.0, "loss:sum": 2.5}))
    assert answer == golden("passed", "answers")


@pytest.mark.parametrize(
    "metrics", [{"ratio:mean": 1.0}, {"loss:sum": 1.0, "loss": 1.0}, {"loss:sum": 1.0, "a:b": 1.0}]
)
def test_metrics_must_be_such_as_the_client_joins(metrics):
    with pytest.raises(AssertionError):
        write_passed(Passed([], metrics))


def test_samples_have_the_bytes_that_the_client_reads():
    """Fields of the wrong width or in the place of others; none and 0 confused."""
    sampled = Sampled(
        [
            Sequence(
                np.asarray([5, 6]),
                np.asarray([-0.5, -1]),
                True,
                Likeliest(np.asarray([[5], [6]]), np.asarray([[-0.5], [-1]])),
            ),
            Sequence(np.asarray([7]), np.asarray([-2.0]), False),
        ],
        np.asarray([np.nan, -1.5]),
        Likeliest(np.asarray([[0, 0], [3, 4]]), np.asarray([[-99999.0] * 2, [-0.25, -1.5]])),
        np.asarray([[np.nan, -1.25]]),
        2,
    )
    assert write_sampled(sampled) == golden("sampled", "answers")


def test_sparse_targets_are_answered_in_their_layout():
    listed = Csr((3, 9), np.asarray([0, 2, 2, 3]), np.asarray([1, 8, 4]))
    rows = np.asarray([[-1, -2], [np.nan, np.nan], [-3, np.nan]])
    sampled = Sampled([Sequence(np.asarray([7]), np.asarray([0.0]), False)], target_logprobs=rows)
    assert write_sampled(sampled, listed) == golden("sampled_sparse", "answers")


def test_no_datum_is_copied_more_than_the_arrays_it_has():
    """float32 of the request is read where it lies."""
    (found,) = read(datum(**ROW), loss="ppo").data
    assert not found.columns["logprobs"].flags.owndata
    assert struct.unpack("<3f", found.columns["logprobs"].tobytes()) == (-0.5, -1, -1.5)
