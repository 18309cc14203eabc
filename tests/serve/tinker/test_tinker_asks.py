"""The JSON that the real client sends is read whole; what is not known or not possible is refused by name."""

import json
from pathlib import Path

import numpy as np
import pytest
from effort import within
from numpy.testing import assert_array_equal

from quatrain.serve.tinker import asks
from quatrain.serve.tinker.asks import (
    ASample,
    OptimStep,
    parsed,
)
from quatrain.serve.tinker.calls import AdamNumbers, LoraRequest, Refused, Sample
from quatrain.serve.tinker.wire import Limits

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "tinker.json").read_text())["asks"]
LIMITS = Limits(longest=16, vocab_size=10)
KINDS = {
    name: kind
    for name, kind in vars(asks).items()
    if isinstance(kind, type) and issubclass(kind, asks.Ask) and not name.startswith("_") and name != "Ask"
}


def kind_of(name):
    return KINDS[name.split()[0]]


def read(name, **changed):
    """The request of the client with some fields changed; None: left out."""
    return parsed(kind_of(name), json.dumps({**GOLDEN[name], **changed}).encode())


def refusal(name, **changed):
    with pytest.raises(Refused) as caught:
        read(name, **changed)
    return str(caught.value)


def sample(name="ASample", limits=LIMITS, **changed):
    return read(name, **changed).sample(limits)


def test_every_request_is_among_the_clients():
    """A request without an example of the client's own; three have bodies that it has no type for."""
    without = {"FinishSession", "CancelFuture", "WeightsInfo", "SetTtl"}
    assert {name.split()[0] for name in GOLDEN} == KINDS.keys() - without


@pytest.mark.parametrize("name", GOLDEN)
def test_a_request_of_the_client_is_read_whole(name):
    """A field that the client sends and the server does not know; a value that is changed or lost."""
    found = read(name).model_dump(mode="json", exclude_none=True)
    for field, value in GOLDEN[name].items():
        assert found[field] == value or isinstance(value, dict), field
    nulls = {field: None for field in KINDS[name.split()[0]].model_fields if field not in GOLDEN[name]}
    assert read(name, **nulls).model_dump() == read(name).model_dump()


@pytest.mark.parametrize("name", GOLDEN)
def test_an_unknown_field_is_refused(name):
    """A setting of a later client that would be ignored."""
    assert refusal(name, another=1) == "another is not supported; leave it out"


ADDRESSES = {
    "CreateModel": ("s", 0),
    "OptimStep": ("s:train:0", 4),
    "SaveWeights": ("s:train:0", 5),
    "SaveWeightsForSampler": ("s:train:0", 6),
    "LoadWeights": ("s:train:0", 1),
    "LoadWeights 1": ("s", 1),
    "CreateSamplingSession": ("s", 1),
    "ASample 1": ("s:sample:0", 10**9),
}


@pytest.mark.parametrize("name", ADDRESSES)
def test_a_request_that_is_refused_keeps_its_place(name):
    """An error that loses the request's number, for which all later ones of the client would wait."""
    assert read(name).address == ADDRESSES[name]
    with pytest.raises(Refused) as caught:
        read(name, another=1)
    assert caught.value.address == ADDRESSES[name]


def test_a_request_without_a_place_has_none():
    wrong = ({"seq_id": each} for each in (None, "4", True, 0, 2**31))
    for changed in (*wrong, {"model_id": 3}):
        with pytest.raises(Refused) as caught:
            read("OptimStep", **changed)
        assert caught.value.address is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "must be JSON"),
        (b"\xff", "must be JSON"),
        (b'{"model_id": "\\ud800"}', "must be JSON"),
        (b'{"seq_id": NaN}', "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"[]", "must be a JSON object; got list"),
        (b"{}", "model_id is missing"),
    ],
)
def test_other_bodies_are_refused(body, message):
    with pytest.raises(Refused, match=message):
        parsed(OptimStep, body)


def test_limits_on_sizes():
    """Objects that take thirty times the memory of their bytes; one message for each of a million errors."""
    with pytest.raises(Refused, match="at most 16777216 bytes and 262144 fields"):
        parsed(OptimStep, b" " * (asks.MOST_JSON_BYTES + 1))
    with pytest.raises(Refused, match="at most 16777216 bytes and 262144 fields"):
        parsed(OptimStep, b"{" + b'"a":1,' * 270_000 + b'"b":1}')
    assert "user_metadata: must have at most 65536 bytes" in refusal(
        "CreateModel", user_metadata={"a": "b" * 70_000}
    )
    prompt = {"chunks": [{"type": "encoded_text", "tokens": ["a"] * 300_000}]}
    said = within(0.75, lambda: refusal("ASample", prompt=prompt))
    assert said.startswith("prompt.chunks.0.tokens.0: ")


def test_adapters_of_a_model():
    """A part that is trained although it was switched off; a seed that no generator takes."""
    assert read("CreateModel").lora() == LoraRequest(8, 2**32 - 1, train_mlp=False)
    assert read("CreateModel 1").lora() == LoraRequest(32)
    for name in ("train_mlp", "train_attn", "train_unembed"):
        assert read("CreateModel", lora_config={"rank": 4, name: False}).lora() == LoraRequest(
            4, **{name: False}
        )
    none = {"rank": 4, "train_mlp": False, "train_attn": False, "train_unembed": False}
    with pytest.raises(Refused, match="lora_config must train a part"):
        read("CreateModel", lora_config=none).lora()
    assert "lora_config.rank" in refusal("CreateModel", lora_config={"rank": 0})
    assert refusal("CreateModel", lora_config=None) == "lora_config is missing"
    dimuon = {"type": "dimuon", "version": 1}
    for name in ("CreateModel", "LoadWeights"):
        assert "optimizer_config.type: must be adamw, the one optimizer of this" in refusal(
            name, optimizer_config=dimuon
        )


def test_numbers_of_a_step():
    """Numbers that are exchanged, and defaults that differ from the client's."""
    assert read("OptimStep").numbers() == AdamNumbers(
        learning_rate=1, beta1=0.9, beta2=0.99, eps=1e-12, weight_decay=0.1, grad_clip_norm=1
    )
    assert read("OptimStep", adam_params={}).numbers() == AdamNumbers()
    for changed in (
        {"adam_params": None},
        {"adam_params": None, "optimizer_params": {"type": "dimuon"}},
        {"optimizer_params": {}},
    ):
        assert "adam_params: must be given, and no optimizer_params" in refusal("OptimStep", **changed)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-4),
        ("learning_rate", 1e39),
        ("learning_rate", "1"),
        ("learning_rate", True),
        ("beta1", 1),
        ("beta2", 1 - 1e-9),
        ("beta1", -0.1),
        ("eps", 0),
        ("eps", 1e-46),
        ("weight_decay", -1),
        ("grad_clip_norm", -1),
        ("momentum", 0.9),
    ],
)
def test_a_number_that_makes_weights_infinite_is_refused(name, value):
    """In float32 1 - 1e-9 is 1, 1e39 infinite and 1e-46 zero: a step would divide by 0."""
    assert f"adam_params.{name}" in refusal("OptimStep", adam_params={name: value})


def test_a_checkpoint_for_a_sampler_has_a_name_or_a_number():
    assert read("SaveWeightsForSampler").path == "a"
    assert read("SaveWeightsForSampler 1").sampling_session_seq_id == 0
    for changed in ({"path": None}, {"sampling_session_seq_id": 0}):
        assert "sampling_session_seq_id: must be given if path is not" in refusal(
            "SaveWeightsForSampler", **changed
        )
    assert "ttl_seconds" in refusal("SaveWeights", ttl_seconds=0)
    assert "ttl_seconds" in refusal("SaveWeights", ttl_seconds=10**10)
    assert parsed(asks.SetTtl, b'{"ttl_seconds": null}').ttl_seconds is None


def test_weights_are_loaded_into_a_new_model_or_into_one():
    """A request with both places, or none, that is done in either."""
    for changed in ({"seq_id": None}, {"model_id": None}, {"session_id": "s"}, {"model_seq_id": 1}):
        assert refusal("LoadWeights", **changed).startswith("seq_id: must be given with model_id alone")
    assert refusal("LoadWeights 1", model_seq_id=None).startswith("seq_id: must be given")
    assert refusal("LoadWeights 1", weights_access_token="x").startswith(
        "weights_access_token is not supported"
    )


def test_a_sampling_session_has_weights_or_a_base():
    assert refusal("CreateSamplingSession", base_model=None).startswith(
        "base_model: must be given, or model_path"
    )
    read("CreateSamplingSession", base_model=None, model_path="tinker://a/weights/b")


def test_what_to_sample():
    """Fields that are exchanged, or do not arrive."""
    found = sample()
    assert_array_equal(found.tokens, [1, 2, 3])
    assert found.tokens.dtype == np.int32
    assert_array_equal(found.target_prompt_logprobs, [[-1], [8]])
    assert (
        found.n,
        found.max_tokens,
        found.temperature,
        found.top_k,
        found.top_p,
        found.seed,
        found.stop,
    ) == (
        *(4, 5, 0.5, 7, 0.25, 3),
        ("a", "b"),
    )
    assert (found.prompt_logprobs, found.prompt_logprobs_last_n) == (True, 1)
    assert (found.topk_prompt_logprobs, found.topk_sample_logprobs) == (2, 3)
    assert sample("ASample 1").stop == (7, 9)
    assert sample("ASample 2").stop == ()


def test_what_is_kept_of_a_session_is_small():
    """Catches sessions, of which there may be 10,000, whose names fill the memory."""
    for fields in ({"display_name": "x" * 1025}, {"user_metadata": {"a": "x" * 2**16}}):
        with pytest.raises(Refused, match=next(iter(fields))):
            parsed(asks.CreateSession, json.dumps(fields).encode())


def test_what_is_left_out_is_sampled_by_the_interfaces_defaults():
    plain = {
        "sampling_session_id": "s",
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {},
    }
    found = parsed(ASample, json.dumps(plain).encode()).sample(LIMITS)
    default = Sample(np.asarray([1]))
    for name in vars(default).keys() - {"tokens"}:
        assert getattr(found, name) == getattr(default, name), name


def how(**changed):
    return {"sampling_params": {**GOLDEN["ASample"]["sampling_params"], **changed}}


def test_values_at_the_ends():
    assert sample(**how(stop="x")).stop == ("x",)
    assert sample(**how(top_k=2**40)).top_k == 2**31 - 1
    assert sample(**how(top_p=1e-30)).top_p == 1e-9
    assert sample(**how(temperature=0)).temperature == 0
    assert sample(**how(seed=-1)).seed == 2**32 - 1
    whole = {"chunks": [{"type": "encoded_text", "tokens": [1] * 16}]}
    rest = {"target_prompt_logprobs": None, "prompt_logprobs_last_n": 15}
    assert len(sample(prompt=whole, **rest).tokens) == 16


def chunk(*tokens, **fields):
    return {"prompt": {"chunks": [{"tokens": tokens, **fields}]}, "target_prompt_logprobs": None}


def targets(**changed):
    return {"target_prompt_logprobs": {**GOLDEN["ASample"]["target_prompt_logprobs"], **changed}}


BAD = {
    "no prompt": (
        chunk(),
        "prompt must have 1 to 16 tokens, the model's positions; got 0",
    ),
    "long prompt": (chunk(*[1] * 17), "positions; got 17"),
    "token too high": (chunk(1, 10), "prompt must be token ids from 0 to 9; got 10"),
    "negative token": (chunk(-1), "prompt must be token ids from 0 to 9; got -1"),
    "huge token": (chunk(2**70), "prompt.chunks.0.tokens.0"),
    "token as text": (chunk("1"), "prompt.chunks.0.tokens.0"),
    "truth as token": (chunk(True), "prompt.chunks.0.tokens.0"),
    "image": (
        chunk(type="image", data="", format="png"),
        "type: must be encoded_text: this server takes text alone",
    ),
    "audio": (chunk(type="dmel", dmel=""), "this server takes text alone"),
    "asset": (chunk(type="image_asset_pointer", location="x"), "this server takes text alone"),
    "alternatives": ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k: must be 0: this server draws no"),
    "no samples": ({"num_samples": 0}, "num_samples"),
    "many samples": ({"num_samples": 1025}, "num_samples"),
    "no tokens": (how(max_tokens=0), "sampling_params.max_tokens"),
    "cold": (
        how(temperature=0.001),
        "temperature: must be 0, which takes the likeliest token, or at least 0.01",
    ),
    "negative temperature": (how(temperature=-1), "sampling_params.temperature"),
    "top_k of none": (how(top_k=0), "sampling_params.top_k: must be -1, all tokens, or at least 1"),
    "top_k too low": (how(top_k=-2), "sampling_params.top_k"),
    "top_p of none": (how(top_p=0), "sampling_params.top_p"),
    "top_p too high": (how(top_p=1.5), "sampling_params.top_p"),
    "penalty": (how(frequency_penalty=0), "sampling_params.frequency_penalty is not supported; leave it out"),
    "empty stop": (
        how(stop=""),
        "stop: must be a string, or at most 64 strings or token ids, and no string empty",
    ),
    "mixed stops": (how(stop=["a", 1]), "stop: must be a string"),
    "stop of truth": (how(stop=[True]), "stop: must be a string"),
    "stop of a mapping": (how(stop={}), "stop: must be a string"),
    "many stops": (how(stop=[1] * 65), "stop: must be a string"),
    "stop too high": (how(stop=[3, 10]), "stop must be token ids from 0 to 9; got 10"),
    "huge stop": (how(stop=[3, 2**70]), "stop must be token ids from 0 to 9; got 1180591620717411303424"),
    "last without all": (
        {"prompt_logprobs": False},
        "prompt_logprobs_last_n needs prompt_logprobs, and must",
    ),
    "last is all": ({"prompt_logprobs_last_n": 3}, "less than the tokens of the prompt, 3; got 3"),
    "many alternatives": ({"topk_prompt_logprobs": 65}, "topk_prompt_logprobs"),
    "many alternatives of samples": ({"topk_sample_logprobs": 65}, "topk_sample_logprobs"),
    "targets of other rows": (targets(shape=[3, 1]), "shape [P - 1, K], with P = 3 as the prompt"),
    "targets too few": (targets(data=[8]), "got the shape [2, 1] and 1 values"),
    "targets of one dimension": (targets(shape=[2]), "target_prompt_logprobs.shape"),
    "targets of no width": (targets(shape=[2, 0], data=[]), "got the shape [2, 0] and 0 values"),
    "target too high": (
        targets(data=[-1, 10]),
        "target_prompt_logprobs must be token ids from 0 to 9; got 10",
    ),
    "target too low": (targets(data=[-2, 8]), "target_prompt_logprobs must be token ids from 0 to 9; got -2"),
    "no target": (targets(data=[-1, -1]), "target_prompt_logprobs must have a token id; got none"),
    "targets as numbers": (targets(dtype="float32"), "target_prompt_logprobs.dtype"),
    "half sparse": (
        targets(sparse_crow_indices=[0, 1, 2]),
        "sparse_crow_indices and sparse_col_indices for them",
    ),
    "badly sparse": (
        targets(sparse_crow_indices=[0, 1, 3], sparse_col_indices=[0, 0]),
        "target_prompt_logprobs must be sparse by compressed rows (CSR)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_sampled_is_refused(name):
    """What is dropped, cut or taken for something else, and what ends in another exception."""
    changed, message = BAD[name]
    with pytest.raises(Refused) as caught:
        sample(**changed)
    assert message in str(caught.value)


def test_sparse_targets_are_put_together_in_their_rows():
    """Targets in the rows of others; a width of the request's matrix, which may be any."""
    found = read("ASample 1")
    assert found.csr().shape == (2, 6)
    assert_array_equal(found.csr().columns, [2, 3])
    assert_array_equal(found.sample(LIMITS).target_prompt_logprobs, [[-1, -1], [0, 8]])
    assert read("ASample").csr() is None
    wide = {
        **GOLDEN["ASample 1"]["target_prompt_logprobs"],
        "shape": [2, 2**60],
        "sparse_col_indices": [5, 2**59],
    }
    assert sample("ASample 1", target_prompt_logprobs=wide).target_prompt_logprobs.shape == (2, 2)


def test_sparse_targets_of_one_long_row_are_limited(monkeypatch):
    monkeypatch.setattr(asks, "MOST_CELLS", 3)
    with pytest.raises(Refused, match="target_prompt_logprobs must have at most 3 cells"):
        sample("ASample 1")
