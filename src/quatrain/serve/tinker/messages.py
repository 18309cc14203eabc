"""The protobuf messages of the Tinker API, and a check of their number before they are parsed.

Data flow: bytes of a request -> `parsed` -> a message -> `wire.py`; and back. Nothing is generated: the
messages are declared from `_SCHEMA`, in a pool of descriptors of their own, so that the `tinker` package may
be imported in the same process.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from quatrain.serve.tinker.calls import Refused

FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
"""Values of `dtype`."""
STOPPED, FULL = 0, 1
"""Values of `stop_reason`."""
MOST_FIELDS = 2**18
"""Fields of all messages of a request. A message of two bytes takes sixty in memory, so that a body of the
largest size could take gigabytes. 4096 datums of four inputs have 100,000 fields."""

# Enumerations are int32 here, which has the same bytes.
_SCHEMA = """
ForwardBackwardRequest
  1 string model_id
  2 int32 seq_id
  3 repeated Datum data
  4 string loss_fn
  5 repeated Number loss_fn_config
  6 bool forward_only
  7 repeated Setting loss_fn_config_v2
Address
  1 string model_id
  2 int32 seq_id
  6 bool forward_only
Number
  1 string key | _key
  2 double value | _value
Setting
  1 string key
  2 LossConfigValue value
LossConfigValue
  1 double number | value
  2 string text | value
Datum
  1 repeated Chunk model_input
  2 repeated Input loss_fn_inputs
  3 repeated bytes model_input_spans
  4 repeated bytes loss_fn_input_spans
Input
  1 string key
  2 Tensor value
Chunk
  1 EncodedTextChunk encoded_text | chunk
  2 bytes image | chunk
  3 bytes dmel | chunk
EncodedTextChunk
  1 bytes tokens
Tensor
  1 bytes dense | encoding
  2 SparseCsr sparse_csr | encoding
  3 int32 dtype
  4 repeated int64 shape
SparseCsr
  1 bytes values
  2 bytes crow_indices
  3 bytes col_indices
ForwardBackwardOutput
  1 string loss_fn_output_type
  2 repeated ArrayRecord loss_fn_outputs
  3 repeated Number metrics
ArrayRecord
  1 string type_tag
  2 repeated Field fields
  3 int64 num_datums
Field
  1 string key
  2 BatchedTensor value
BatchedTensor
  1 bytes data
  2 bytes offsets
  3 int32 dtype
  4 repeated int64 trailing_shape
SampleResponse
  1 repeated SampledSequence sequences
  2 bytes prompt_logprobs | _prompt_logprobs
  3 TopkLogprobs topk_prompt_logprobs
  4 int32 prompt_cache_hit_tokens
  5 Tensor target_prompt_logprobs
SampledSequence
  1 int32 stop_reason
  2 bytes tokens
  3 bytes logprobs | _logprobs
  4 TopkLogprobs topk_sampled_logprobs
TopkLogprobs
  1 bytes token_ids
  2 bytes logprobs
  3 uint32 k
  4 uint32 length
"""
"""`number type name`, and after a bar the group of which one field is set at most; of a field alone in its
group the empty value is written too. A map is a list of pairs, which has the same bytes: a key that comes
twice is then seen. Spans, images and audio are not read, and stay bytes."""

_WIRE_TYPES = {"bool": 0, "int32": 0, "int64": 0, "uint32": 0, "double": 1}
"""How values are written: 0, numbers of variable length; 1, in 8 bytes; all others 2, after their length."""


class _Field(NamedTuple):
    """What a request's bytes may have under a number."""

    wire_types: tuple[int, ...]
    message: str | None
    """The message that it holds, if it does."""
    packed: bool
    """Whether its bytes hold numbers, of a byte or more each."""


def _declared() -> tuple[dict[str, Any], dict[str, dict[int, _Field]]]:
    """(class of each message, fields of each message by number)."""
    Proto = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="tinker", package="tinker_public", syntax="proto3")
    fields: dict[str, dict[int, _Field]] = {}
    for line in _SCHEMA.strip().splitlines():
        if not line.startswith(" "):
            message = file.message_type.add(name=line)
            fields[line] = {}
            continue
        declaration, _, group = line.partition(" | ")
        number, *label, kind, name = declaration.split()
        field = message.field.add(name=name, number=int(number))
        field.label = Proto.LABEL_REPEATED if label else Proto.LABEL_OPTIONAL
        scalar = getattr(Proto, f"TYPE_{kind.upper()}", None)
        field.type = scalar or Proto.TYPE_MESSAGE
        if scalar is None:
            field.type_name = f".tinker_public.{kind}"
        if group:
            if group not in (each.name for each in message.oneof_decl):
                message.oneof_decl.add(name=group)
            field.oneof_index = len(message.oneof_decl) - 1
        packed = bool(label) and kind in _WIRE_TYPES
        wire_types = (_WIRE_TYPES.get(kind, 2), *((2,) if packed else ()))
        fields[message.name][field.number] = _Field(wire_types, kind if scalar is None else None, packed)
    pool = DescriptorPool()
    pool.Add(file)
    classes = {name: GetMessageClass(pool.FindMessageTypeByName(f"tinker_public.{name}")) for name in fields}
    return classes, fields


_CLASSES, _FIELDS = _declared()
ForwardBackwardRequest = _CLASSES["ForwardBackwardRequest"]
Address = _CLASSES["Address"]
"""The plain fields of a `ForwardBackwardRequest`; what else its bytes have is skipped."""
ForwardBackwardOutput = _CLASSES["ForwardBackwardOutput"]
SampleResponse = _CLASSES["SampleResponse"]


def parsed(body: bytes) -> Any:
    """The `ForwardBackwardRequest` in `body`; raises Refused for other bytes, and for fields unknown here."""
    try:
        _check_fields(body)
        return ForwardBackwardRequest.FromString(body)
    except (DecodeError, IndexError) as error:
        raise Refused("the body must be a ForwardBackwardRequest of protobuf; these bytes are not") from error


def address(body: bytes) -> tuple[str, int] | None:
    """(model_id, seq_id) of a request that cannot be parsed whole; None if these cannot be read either."""
    try:
        found = Address.FromString(body)
    except DecodeError:
        return None
    return (found.model_id, found.seq_id) if found.model_id and found.seq_id > 0 else None


def is_forward_only(body: bytes) -> bool:
    """Whether a request that has an `address` asks for no gradient."""
    return bool(Address.FromString(body).forward_only)


def _check_fields(body: bytes) -> None:
    """Raises Refused for more than MOST_FIELDS fields, and for one that is not in the schema."""
    left, parts = MOST_FIELDS, [(0, len(body), "ForwardBackwardRequest")]
    while parts:
        at, end, message = parts.pop()
        known = _FIELDS[message]
        while at < end:
            tag, at = _varint(body, at)
            field = known.get(tag >> 3)
            if field is None or tag & 7 not in field.wire_types:
                raise Refused(
                    f"{message} has a field {tag >> 3} of wire type {tag & 7} that this server does not "
                    "know, and would not follow; use the version of the client that docs/tinker.md names"
                )
            left -= 1
            size = 8
            if tag & 7 != 1:
                size, at = _varint(body, at)
            if tag & 7 == 0:
                size = 0
            elif field.message is not None:
                parts.append((at, at + size, field.message))
            elif field.packed:
                left -= size
            at += size
            if at > end:
                raise IndexError
            if left < 0:
                raise Refused(
                    f"a request has at most {MOST_FIELDS} fields in all its messages; this one has more; "
                    "send fewer datums at once"
                )


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """(value, place after it) of the number at `at`; raises IndexError past the end."""
    value = body[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    shift = 7
    while True:
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError
