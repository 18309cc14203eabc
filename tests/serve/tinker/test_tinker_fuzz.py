"""Damaged requests: each is read, or refused in one sentence, within limits on time and memory."""

import base64
import copy
import json
import random
import resource
from pathlib import Path

import numpy as np
import pytest
from effort import within

from quatrain.serve.tinker import asks, messages
from quatrain.serve.tinker.calls import Refused
from quatrain.serve.tinker.wire import LOSSES, Limits, read_pass

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "tinker.json").read_text())
PASSES = [base64.b64decode(each) for each in GOLDEN["passes"].values()]
LIMITS = Limits(longest=16, vocab_size=10)
QUICK, MANY = 600, 20_000
LONGEST_S = 2.0
"""Seconds of one request."""
MOST_MEMORY = 2**29
"""Bytes that all requests together take."""
LONGEST_MESSAGE = 1000

NUMBERS = (0, 1, 3, -1, 9, 10, 2**31 - 1, -(2**31), 2**62, -(2**63))
HOSTILE = (
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        3,
        0.5,
        -0.0,
        1e308,
        1e-320,
        2**31,
        2**63,
        10**30,
        "",
        "x",
        "3",
        "\x00",
        "é" * 999,
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [1, "a"],
        {"a": {}},
        {"type": "image"},
        {"chunks": []},
        ["a"] * 999,
        [-1] * 999,
        "tinker://../x",
    ),
)


def damaged(body, rng):
    """Bytes changed, cut, repeated or put between others."""
    body = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(body) + 1)
        size = rng.choice((1, 1, 2, 4, 8, 40))
        match rng.randrange(5):
            case 0:
                body[at : at + size] = rng.randbytes(size)
            case 1:
                del body[at : at + size]
            case 2:
                body[at:at] = body[at : at + size]
            case 3:
                body[at:at] = rng.choice((b"\xff" * size, b"\x80" * size, b"\x00" * size, b"\x1a\x00" * size))
            case 4:
                body = body[:at]
        if not body:
            return b""
    return bytes(body)


def altered(body, rng):
    """A request with other values in some of its fields, which is still well formed."""
    request = messages.ForwardBackwardRequest.FromString(body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        message = request
        while True:
            field = rng.choice(message.DESCRIPTOR.fields)
            value = getattr(message, field.name)
            inner = field.type == field.TYPE_MESSAGE
            if inner and (not field.is_repeated or (len(value) and rng.random() < 0.8)):
                message = rng.choice(value) if field.is_repeated else value
                continue
            break
        if field.is_repeated:
            if inner and len(value):
                value.extend([rng.choice(value)] * rng.choice((1, 5)))
            elif inner or rng.random() < 0.3:
                del value[:]
            elif field.type == field.TYPE_BYTES:
                value.append(rng.randbytes(3))
            elif len(value) and rng.random() < 0.7:
                value[rng.randrange(len(value))] = rng.choice(NUMBERS)
            else:
                value.append(rng.choice(NUMBERS))
        elif field.type == field.TYPE_BYTES:
            setattr(message, field.name, other_numbers(value, rng))
        elif field.type == field.TYPE_STRING:
            names = (*LOSSES, "target_tokens", "weights", "logprobs", "clip_low_threshold", "beta", "", "x\0")
            setattr(message, field.name, rng.choice(names))
        elif field.type == field.TYPE_DOUBLE:
            setattr(message, field.name, rng.choice((0.0, -1.0, 0.5, float("nan"), float("-inf"), 1e308)))
        elif field.type == field.TYPE_BOOL:
            setattr(message, field.name, not value)
        else:
            setattr(message, field.name, rng.choice((0, 1, 2, 3, 4, 5, -1, 2**31 - 1)))
    return request.SerializeToString()


def other_numbers(data, rng):
    dtype = rng.choice(("<i4", "<i8", "<f4"))
    numbers = np.frombuffer(data[: len(data) // 8 * 8], dtype).copy()
    if not len(numbers) or rng.random() < 0.2:
        return rng.randbytes(rng.choice((0, 1, 7, 8, 12, 64)))
    with np.errstate(over="ignore", invalid="ignore"):
        numbers[rng.randrange(len(numbers))] = np.asarray(rng.choice((*NUMBERS, 2.5)), "<f8").astype(dtype)
    return numbers.tobytes()


def places(value, path=()):
    """Every place in nested lists and mappings."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def altered_json(given, rng):
    """Values replaced by others, left out, or put under other names."""
    given = copy.deepcopy(given)
    for _ in range(rng.choice((1, 1, 2))):
        *path, last = rng.choice([path for path in places(given) if path])
        holder = given
        for key in path:
            holder = holder[key]
        match rng.randrange(6):
            case 0 if isinstance(holder, dict):
                del holder[last]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(("another", "seq_id", "type", ""))] = copy.deepcopy(rng.choice(HOSTILE))
            case 2 if isinstance(holder[last], list):
                holder[last] *= rng.choice((2, 20))
            case _:
                holder[last] = copy.deepcopy(rng.choice(HOSTILE))
        if not given:
            break
    body = json.dumps(given).encode()
    return damaged(body, rng) if rng.random() < 0.3 else body


def check_pass(body):
    """What is read can be computed with."""
    model_id, seq_id, call = read_pass(body, LIMITS)
    assert model_id
    assert seq_id >= 1
    assert call.loss in LOSSES
    assert call.data
    assert set(call.numbers) <= set(LOSSES[call.loss].numbers)
    assert np.isfinite(list(call.numbers.values())).all()
    for datum in call.data:
        assert datum.tokens.dtype == datum.targets.dtype == np.int32
        assert 1 <= len(datum.tokens) == len(datum.targets) <= LIMITS.longest
        assert ((datum.tokens >= 0) & (datum.tokens < LIMITS.vocab_size)).all()
        assert ((datum.targets >= -1) & (datum.targets < LIMITS.vocab_size)).all()
        assert set(LOSSES[call.loss].needs) <= datum.columns.keys()
        for column in datum.columns.values():
            assert column.dtype == np.float32
            assert column.shape == datum.targets.shape
            assert np.isfinite(column).all()


def check_ask(name, body):
    """What is read can be asked for what it asks."""
    found = asks.parsed(getattr(asks, name.split()[0]), body)
    if found.addresses:
        assert found.address[1] >= 0
    match found:
        case asks.CreateModel():
            assert found.lora().rank >= 1
        case asks.OptimStep():
            assert np.isfinite(np.asarray(list(vars(found.numbers()).values()), np.float32)).all()
        case asks.ASample():
            call = found.sample(LIMITS)
            assert 1 <= len(call.tokens) <= LIMITS.longest
            if call.target_prompt_logprobs is not None:
                assert len(call.target_prompt_logprobs) == len(call.tokens) - 1
    assert json.dumps(found.model_dump(mode="json"))


def outcome(check, *given):
    """Whether the request was read; in either case within limits."""

    def refusal():
        try:
            check(*given)
        except Refused as error:
            return error
        return None

    refused = within(LONGEST_S, refusal)
    if refused is None:
        return True
    assert 1 < len(str(refused)) <= LONGEST_MESSAGE
    assert refused.address is None or refused.address[1] >= 0
    return False


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("count", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_damaged_pass_is_read_or_refused(count):
    """Another exception, which would be answered with 500 and asked again for five minutes; a number that the
    device is given unchecked; memory for messages that are then refused."""
    rng, before, read = random.Random(count), memory(), 0
    for _ in range(count):
        body = rng.choice(PASSES)
        if rng.random() < 0.6:
            body = altered(body, rng)
        if rng.random() < 0.6:
            body = damaged(body, rng)
        read += outcome(check_pass, body)
    assert memory() - before < MOST_MEMORY
    assert count / 50 < read < count / 2, "the damage should be seen by some checks, and pass others"


@pytest.mark.parametrize("count", [QUICK, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_damaged_ask_is_read_or_refused(count):
    """As for passes, of JSON."""
    rng, before, read = random.Random(count), memory(), 0
    for _ in range(count):
        name = rng.choice(list(GOLDEN["asks"]))
        read += outcome(check_ask, name, altered_json(GOLDEN["asks"][name], rng))
    assert memory() - before < MOST_MEMORY
    assert count / 50 < read < count / 2, "the damage should be seen by some checks, and pass others"
