"""Arrays of the Tinker API: calls of forward and forward_backward from bytes, checked, and answers as bytes.

Data flow: bytes -> `read_pass` -> `Pass` -> the device's thread -> `Passed`, `Sampled` -> `write_passed`,
`write_sampled` -> bytes. Shapes: T tokens of a datum, K targets in the place of one token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np

from quatrain.config.errors import listed, shown
from quatrain.serve.tinker import messages
from quatrain.serve.tinker.calls import Datum, Likeliest, Pass, Passed, Refused, Sampled

MOST_BYTES = 64 * 2**20
"""Of the body of a request."""
MOST_DATUMS = 4096
MOST_CELLS = 2**23
"""Targets of all datums of a request, T x K each: as many as dense int64 targets in the largest body. Sparse
ones could ask for any number in a few bytes."""
TARGETS, WEIGHTS = "target_tokens", "weights"
THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
REDUCTIONS = frozenset({"sum", "mean", "min", "max", "slack", "hash2", "unique"})
"""How the client joins the metrics of several requests."""

_DTYPES: dict[int, tuple[str, np.dtype[Any]]] = {
    messages.FLOAT32: ("float32", np.dtype("<f4")),
    messages.INT64: ("int64", np.dtype("<i8")),
    messages.INT32: ("int32", np.dtype("<i4")),
    messages.BFLOAT16: ("bfloat16", np.dtype("<u2")),
}
"""Names of dtypes, and what their bytes are read as."""


class _Loss(NamedTuple):
    """What a loss reads."""

    needs: tuple[str, ...] = ("logprobs", "advantages")
    """Inputs beside the targets."""
    takes: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()
    """Of `loss_fn_config`."""
    needs_numbers: tuple[str, ...] = ()


LOSSES = {
    "cross_entropy": _Loss(needs=(), takes=(WEIGHTS,)),
    "importance_sampling": _Loss(),
    "ppo": _Loss(takes=THRESHOLDS, numbers=THRESHOLDS),
    "cispo": _Loss(takes=THRESHOLDS, numbers=THRESHOLDS),
    "dro": _Loss(numbers=("beta",), needs_numbers=("beta",)),
    "gspo": _Loss(takes=(*THRESHOLDS, "sequence_ratio_mask"), numbers=THRESHOLDS),
}
STABLE_REINFORCE = "stable_reinforce"
_ELSEWHERE = {
    STABLE_REINFORCE: "loss_fn stable_reinforce is computed only by Tinker's service; use "
    "importance_sampling, ppo, cispo, dro or gspo (in the cookbook: loss_fn=ppo)",
    "custom": "loss_fn custom is not computed by this server; give forward_backward_custom a function, which "
    "the client computes itself",
}
"""What is said of losses that the client knows and this server does not compute."""


@dataclass(frozen=True)
class Limits:
    """What requests are checked against."""

    longest: int
    """Positions of a sequence."""
    vocab_size: int
    replace_stable_reinforce: str | None = None
    """The loss that is computed in the place of stable_reinforce, whose `loss_fn_config` then counts for
    nothing; None: it is refused."""


def read_pass(body: bytes, limits: Limits) -> tuple[str, int, Pass]:
    """(model_id, seq_id, call) of the protobuf in `body`.

    Raises Refused, with the request's address if that can be read.
    """
    try:
        if len(body) > MOST_BYTES:
            raise Refused(
                f"a request has at most {MOST_BYTES} bytes; got {len(body)}; send fewer datums at once"
            )
        request = messages.parsed(body)
        if not request.model_id or request.seq_id < 1:
            raise Refused(
                f"a request must have a model_id and a seq_id from 1 on; got {shown(request.model_id)} and "
                f"{request.seq_id}"
            )
        return request.model_id, request.seq_id, _read_pass(request, limits)
    except Refused as error:
        error.address = messages.address(body)
        raise


def _read_pass(request: Any, limits: Limits) -> Pass:
    loss, replaced = request.loss_fn, limits.replace_stable_reinforce
    if loss == STABLE_REINFORCE and replaced is not None:
        loss = replaced
    if loss not in LOSSES:
        known = f"loss_fn must be one of {', '.join(LOSSES)}; got {shown(loss)}"
        raise Refused(_ELSEWHERE.get(loss, known))
    # The settings of another formula mean nothing to the one in its place.
    numbers = _numbers(request, loss) if loss == request.loss_fn else {}
    count = len(request.data)
    if not 1 <= count <= MOST_DATUMS:
        raise Refused(f"a request has 1 to {MOST_DATUMS} datums; got {count}; send them in several")
    data, cells = [], 0
    for number, datum in enumerate(request.data):
        try:
            data.append(_read_datum(datum, loss, numbers, limits, MOST_CELLS - cells))
        except Refused as error:
            raise Refused(f"datum {number}: {error}") from error
        cells += data[-1].targets.size
    return Pass(tuple(data), loss, numbers, request.forward_only)


def _numbers(request: Any, loss: str) -> dict[str, float]:
    """`loss_fn_config`, as its second form has it if that is given, which may have texts too."""
    given: dict[str, float] = {}
    for each in request.loss_fn_config_v2 or request.loss_fn_config:
        place, value = f"loss_fn_config {shown(each.key)}", each.value
        if each.key not in LOSSES[loss].numbers:
            raise Refused(
                f"{place} is unknown: loss_fn {loss} has {listed(LOSSES[loss].numbers)}; leave it out"
            )
        if each.key in given:
            raise Refused(f"{place} is given twice")
        if not isinstance(value, float):
            if value.WhichOneof("value") != "number":
                raise Refused(f"{place} must be a number; got {shown(value.text)}")
            value = value.number
        if not isfinite(value):
            raise Refused(f"{place} must be finite; got {value}")
        given[each.key] = value
    for name in LOSSES[loss].needs_numbers:
        if name not in given:
            raise Refused(
                f"loss_fn {loss} needs {name}, which has no default; give loss_fn_config={{'{name}': …}}"
            )
    _check_thresholds("loss_fn_config", given)
    return given


def _read_datum(
    datum: Any, loss: str, numbers: Mapping[str, float], limits: Limits, most_cells: int
) -> Datum:
    tokens = _tokens(datum.model_input, limits)
    known = (TARGETS, *LOSSES[loss].needs, *LOSSES[loss].takes)
    tensors: dict[str, _Tensor] = {}
    for each in datum.loss_fn_inputs:
        if each.key not in known:
            raise Refused(
                f"the input {shown(each.key)} is unknown: loss_fn {loss} has {listed(known)}; leave it out"
            )
        if each.key in tensors:
            raise Refused(f"loss_fn_inputs {each.key!r} is given twice")
        tensors[each.key] = _Tensor.of(each.key, each.value)
    for name in (TARGETS, *LOSSES[loss].needs):
        if name not in tensors:
            raise Refused(f"loss_fn {loss} needs the input {name}; the datum has {listed(tensors)}")
    for name in numbers:
        if name in tensors:
            raise Refused(f"{name} is in loss_fn_config and in loss_fn_inputs; give it in one of them")
    shape = _checked_shape(tensors[TARGETS], len(tokens), loss, most_cells)
    columns = {name: _column(tensor, shape) for name, tensor in tensors.items() if name != TARGETS}
    _check_thresholds("loss_fn_inputs", columns)
    return Datum(tokens, _targets(tensors, columns.get(WEIGHTS), shape, limits.vocab_size), columns)


def _tokens(chunks: Iterable[Any], limits: Limits) -> np.ndarray:
    """[T] int32 of the chunks of text."""
    parts = []
    for chunk in chunks:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise Refused(f"this server takes text alone; got a chunk of {kind or 'no kind'} in model_input")
        parts.append(_array("model_input", chunk.encoded_text.tokens, np.dtype("<i4")))
    tokens = np.concatenate([*parts, np.empty(0, np.int32)])
    check_tokens("model_input", tokens, limits.vocab_size)
    if not 1 <= len(tokens) <= limits.longest:
        raise Refused(
            f"model_input must have 1 to {limits.longest} tokens, the model's positions; got {len(tokens)}"
        )
    return tokens


def check_tokens(name: str, tokens: np.ndarray, vocab_size: int) -> None:
    """Raises Refused unless all `tokens` are ids of a vocabulary of this size."""
    wrong = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if wrong.size:
        raise Refused(f"{name} must be token ids from 0 to {vocab_size - 1}; got {wrong[0]}")


class Csr(NamedTuple):
    """Which cells of a matrix are listed, by compressed rows: increasing columns in each."""

    shape: tuple[int, int]
    ends: np.ndarray
    """[rows + 1] int64; row i has the listed cells from `ends[i]` to `ends[i + 1]`."""
    columns: np.ndarray
    """[cells] int64."""

    @property
    def rows(self) -> np.ndarray:
        """[cells] the row of each listed cell."""
        return np.repeat(np.arange(self.shape[0]), np.diff(self.ends))

    @property
    def ranks(self) -> np.ndarray:
        """[cells] the number of listed cells before each in its row."""
        return np.arange(len(self.columns)) - self.ends[self.rows]

    def check(self, name: str, count: int) -> None:
        """Raises Refused unless these are the places of `count` values."""
        ends, columns = self.ends, self.columns
        good = (
            len(ends) == self.shape[0] + 1
            and len(columns) == count
            and ends[0] == 0
            and ends[-1] == count
            and bool((ends[1:] >= ends[:-1]).all())
            and not ((columns < 0) | (columns >= self.shape[1])).any()
        )
        if not good or (np.diff(columns)[np.diff(self.rows) == 0] <= 0).any():
            raise Refused(
                f"{name} must be sparse by compressed rows (CSR): pointers from 0 to the number of values, "
                f"one more than rows, and increasing columns in each row; got the shape {list(self.shape)}, "
                f"{count} values, {len(ends)} pointers and {len(columns)} columns"
            )


class _Tensor(NamedTuple):
    """An input, whose shape is not yet checked against others."""

    name: str
    values: np.ndarray
    """[N] float32, or int64 of `target_tokens`."""
    shape: tuple[int, ...]
    csr: Csr | None

    @classmethod
    def of(cls, name: str, tensor: Any) -> _Tensor:
        """The tensor of a message; raises Refused for other dtypes than `name` has."""
        found = _DTYPES.get(tensor.dtype)
        wanted = ("int64", "int32") if name == TARGETS else ("float32", "bfloat16")
        if found is None or found[0] not in wanted:
            got = f"dtype {tensor.dtype}" if found is None else found[0]
            raise Refused(f"{name} must be {wanted[0]}; got {got}; convert it")
        dtype, read_as = found
        encoding, csr = tensor.WhichOneof("encoding"), None
        if encoding is None:
            raise Refused(f"{name} must be dense or sparse_csr; got neither")
        sparse = tensor.sparse_csr
        values = _array(name, tensor.dense if encoding == "dense" else sparse.values, read_as)
        shape = tuple(tensor.shape) or (len(values),)
        if encoding == "sparse_csr":
            if name not in (TARGETS, WEIGHTS) or len(shape) != 2:
                raise Refused(
                    f"{name} must be dense: only {TARGETS} and {WEIGHTS} of shape [T, K] may be sparse; got "
                    f"the shape {list(shape)}"
                )
            pointers = (
                _array(name, each, np.dtype("<i8")) for each in (sparse.crow_indices, sparse.col_indices)
            )
            csr = Csr((shape[0], shape[1]), *pointers)
        elif min(shape) < 0 or prod(shape) != len(values):
            raise Refused(f"{name} must have as many values as its shape {list(shape)}; got {len(values)}")
        if dtype == "bfloat16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return cls(name, values, shape, csr)

    def dense(self, unlisted: float) -> np.ndarray:
        """The values in their shape, `unlisted` in cells that are not listed."""
        if self.csr is None:
            return self.values.reshape(self.shape)
        whole = np.full(self.shape, unlisted, self.values.dtype)
        whole[self.csr.rows, self.csr.columns] = self.values
        return whole


def _array(name: str, data: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    if len(data) % dtype.itemsize:
        raise Refused(f"{name} must have whole numbers of {dtype.itemsize} bytes; got {len(data)} bytes")
    return np.frombuffer(data, dtype)


def _checked_shape(targets: _Tensor, num_tokens: int, loss: str, most_cells: int) -> tuple[int, ...]:
    """The shape of the targets, which all inputs have."""
    shape = targets.shape
    if loss == "cross_entropy":
        good = len(shape) in (1, 2) and shape[0] == num_tokens and shape[-1] >= 1
        rule = f"[T] or [T, K], with T = {num_tokens} as model_input"
    else:
        good, rule = shape == (num_tokens,), f"[T] for loss_fn {loss}, with T = {num_tokens} as model_input"
    if not good:
        raise Refused(f"{TARGETS} must have the shape {rule}; got {list(shape)}")
    if prod(shape) > most_cells:
        raise Refused(
            f"a request has at most {MOST_CELLS} targets, T x K of all its datums; this one has more with "
            f"{TARGETS} of shape {list(shape)}; send fewer datums at once, or a smaller K"
        )
    return shape


def _column(tensor: _Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """float32 of `shape`; 0 in cells that are not listed."""
    name = tensor.name
    if tensor.shape != shape:
        raise Refused(f"{name} must have the shape of {TARGETS}, {list(shape)}; got {list(tensor.shape)}")
    if tensor.csr is not None:
        tensor.csr.check(name, len(tensor.values))
    if not np.isfinite(tensor.values).all():
        wrong = tensor.values[~np.isfinite(tensor.values)][0]
        raise Refused(f"{name} must be finite; got {wrong}")
    return tensor.dense(0)


def _targets(
    tensors: Mapping[str, _Tensor], weights: np.ndarray | None, shape: tuple[int, ...], vocab_size: int
) -> np.ndarray:
    """int32 of `shape`; -1 in cells that are not listed."""
    tensor = tensors[TARGETS]
    if tensor.csr is not None:
        tensor.csr.check(TARGETS, len(tensor.values))
    check_tokens(TARGETS, tensor.values, vocab_size)
    targets = tensor.dense(-1).astype(np.int32)
    if tensor.csr is not None and weights is not None:
        # The client makes dense targets sparse by leaving out zeros: where a weight shows that the cell
        # counts, its target is token 0.
        targets[(targets == -1) & (weights != 0)] = 0
    return targets


def _check_thresholds(place: str, given: Mapping[str, Any]) -> None:
    """Raises Refused for a lower threshold above the higher one."""
    low, high = (given.get(name) for name in THRESHOLDS)
    if low is not None and high is not None and np.any(low > high):
        raise Refused(f"{place}: {THRESHOLDS[0]} must be at most {THRESHOLDS[1]}")


def write_passed(passed: Passed) -> bytes:
    """`ForwardBackwardOutput` of protobuf: the log-probabilities of each datum, in order, and the metrics."""
    assert "loss:sum" in passed.metrics, "the client takes it out of the metrics of its own losses"
    assert all(name.partition(":")[2] in REDUCTIONS for name in passed.metrics), sorted(passed.metrics)
    output = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    # A record has one shape but for the first dimension.
    for trailing, group in groupby(passed.logprobs, key=lambda each: each.shape[1:]):
        arrays = list(group)
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(arrays))
        field = record.fields.add(key="logprobs").value
        field.data = b"".join(_bytes(each, "<f4") for each in arrays)
        field.offsets = _bytes(np.cumsum([0, *(4 * each.size for each in arrays)]), "<i8")
        field.dtype = messages.FLOAT32
        field.trailing_shape.extend(trailing)
    for name in sorted(passed.metrics):
        output.metrics.add(key=name, value=passed.metrics[name])
    return output.SerializeToString()


def write_sampled(sampled: Sampled, csr: Csr | None = None) -> bytes:
    """`SampleResponse` of protobuf.

    `csr`: which targets the request listed, if it had them sparse: `sampled.target_logprobs` are then those
    of the listed cells, in each row one after the other, and are answered in the layout of the request.
    """
    response = messages.SampleResponse(prompt_cache_hit_tokens=sampled.cached_tokens)
    for each in sampled.sequences:
        sequence = response.sequences.add(stop_reason=messages.STOPPED if each.stopped else messages.FULL)
        sequence.tokens = _bytes(each.tokens, "<i4")
        sequence.logprobs = _bytes(each.logprobs, "<f4")
        if each.likeliest is not None:
            _write_likeliest(sequence.topk_sampled_logprobs, each.likeliest)
    if sampled.prompt_logprobs is not None:
        response.prompt_logprobs = _bytes(sampled.prompt_logprobs, "<f4")
    if sampled.likeliest is not None:
        _write_likeliest(response.topk_prompt_logprobs, sampled.likeliest)
    if sampled.target_logprobs is not None:
        _write_targets(response.target_prompt_logprobs, sampled.target_logprobs, csr)
    return response.SerializeToString()


def _write_likeliest(message: Any, likeliest: Likeliest) -> None:
    message.token_ids = _bytes(likeliest.ids, "<i4")
    message.logprobs = _bytes(likeliest.logprobs, "<f4")
    message.length, message.k = likeliest.ids.shape


def _write_targets(message: Any, logprobs: np.ndarray, csr: Csr | None) -> None:
    # Nothing was asked for where there is none, and the client has 0 there.
    values = np.where(np.isnan(logprobs), 0, logprobs)
    message.dtype = messages.FLOAT32
    if csr is None:
        message.shape.extend(values.shape)
        message.dense = _bytes(values, "<f4")
        return
    message.shape.extend(csr.shape)
    message.sparse_csr.values = _bytes(values[csr.rows, csr.ranks], "<f4")
    message.sparse_csr.crow_indices = _bytes(csr.ends, "<i8")
    message.sparse_csr.col_indices = _bytes(csr.columns, "<i8")


def _bytes(array: np.ndarray, dtype: str) -> bytes:
    return np.asarray(array).astype(dtype, copy=False).tobytes()
