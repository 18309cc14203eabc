"""Requests as the real `tinker` client writes them, and answers as it reads them: tests/golden/tinker.json.

Run with the Python of an environment that has `tinker` and torch, after another version of the client:
`python tests/oracles/make_tinker_wire_goldens.py`. Bytes are base64.
"""

from __future__ import annotations

import base64
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest
from tinker.types.future_retrieve_request import FutureRetrieveRequest
from tinker.types.futures_retrieve_request import FuturesRetrieveRequest, SamplingSessionFuturesTarget
from tinker.types.join_sampling_session_request import JoinSamplingSessionRequest
from tinker.types.session_heartbeat_request import SessionHeartbeatRequest

OUT = Path(__file__).parents[1] / "golden" / "tinker.json"
MODEL = "s:train:0"


def main() -> None:
    golden = {
        "tinker": version("tinker"),
        "passes": {name: text(made) for name, made in passes().items()},
        "asks": asks(),
        "answers": {name: text(made) for name, made in answers().items()},
        "fields": {message.name: fields(message) for message in pb.DESCRIPTOR.message_types_by_name.values()},
    }
    OUT.write_text(json.dumps(golden, indent=1) + "\n")


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def fields(message: Any) -> list[list[Any]]:
    """[number, name, whether repeated, type] of each field, with messages as bytes and enumerations as int32,
    as they are written."""
    return [
        [
            each.number,
            each.name,
            each.is_repeated,
            each.TYPE_INT32 if each.type == each.TYPE_ENUM else each.type,
        ]
        for each in message.fields
    ]


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def passes() -> dict[str, bytes]:
    """Requests of forward_backward."""
    row = {"target_tokens": [4, 0, 6], "logprobs": [-0.5, -1.0, -1.5], "advantages": [1.0, 0.0, -2.0]}
    two_chunks = types.Datum(
        types.ModelInput(chunks=[types.EncodedTextChunk(tokens=[1]), types.EncodedTextChunk(tokens=[2, 3])]),
        {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 0.5]},
    )
    spans = [types.PromptProvenanceSpan(sequence_id="a", length=3)]
    sampled = [types.SampledProvenanceSpan(sequence_id="a", length=3)]
    # Token 0 is a target of weight 2, which the client leaves out of the sparse targets.
    sparse = {
        "target_tokens": torch.tensor([[0] * 8, [5, 9] + [0] * 6, [0] * 8]),
        "weights": torch.tensor([[0.0] * 8, [0.25, 0.75] + [0.0] * 6, [0.0, 2.0] + [0.0] * 6]),
    }
    pair = {
        "target_tokens": torch.tensor([[5, 9], [6, 8]]),
        "weights": torch.tensor([[0.25, 0.75], [1.0, 0.5]]),
    }
    image = types.Datum(
        types.ModelInput(chunks=[types.ImageChunk(data=b"png", format="png", expected_tokens=3)]),
        {"target_tokens": [1, 2, 3]},
    )
    clip = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    rows = {name: [value] * 3 for name, value in clip.items()}
    plain = datum([1, 2, 3], **row)
    return {
        "cross_entropy": request([two_chunks.with_provenance(spans, sampled), datum([7], target_tokens=[8])]),
        "forward": request([two_chunks], forward_only=True),
        "pairs": request([datum([1, 2], **pair), datum([3], target_tokens=[4])]),
        "sparse": request([datum([1, 2, 3], **sparse)]),
        "importance_sampling": request([plain], "importance_sampling"),
        "ppo": request([plain], "ppo", clip),
        "ppo_rows": request([datum([1, 2, 3], **row, **rows)], "ppo"),
        "dro": request([plain], "dro", {"beta": 0.5}),
        "gspo": request([datum([1, 2, 3], **row, sequence_ratio_mask=[0.0, 1.0, 1.0])], "gspo"),
        "stable_reinforce": request([plain], "stable_reinforce", {"kl_coeff": 0.25}),
        "custom": request([plain], "custom", {"loss_id": "x"}),
        "image": request([image]),
    }


def request(
    data: list[types.Datum],
    loss: Any = "cross_entropy",
    config: dict[str, Any] | None = None,
    forward_only: bool = False,
) -> bytes:
    given = ForwardBackwardRequest(ForwardBackwardInput(data, loss, config), MODEL, 3)
    message = forward_backward_request_to_proto(given)
    message.forward_only = forward_only
    return bytes(message.SerializeToString(deterministic=True))


def asks() -> dict[str, dict[str, Any]]:
    """The JSON of each request, by the classes of `serve/tinker/asks.py`; a number distinguishes several."""
    prompt = types.ModelInput(
        chunks=[types.EncodedTextChunk(tokens=[1]), types.EncodedTextChunk(tokens=[2, 3])]
    )
    listed = torch.full((2, 6), -1)
    listed[1, 2:4] = torch.tensor([0, 8])
    sparse = types.TensorData.from_torch_sparse(listed, pad_value=-1)
    dense = types.TensorData.from_torch(torch.tensor([[-1], [8]]))
    to_model = tinker.lib.public_interfaces.sampling_client._tensor_data_to_model
    asked = {
        "ClientConfig": types.ClientConfigRequest(sdk_version="0.38.0"),
        "CreateSession": types.CreateSessionRequest(tags=["a"], user_metadata=None, sdk_version="0.38.0"),
        "Heartbeat": SessionHeartbeatRequest(session_id="s"),
        "CreateModel": types.CreateModelRequest(
            session_id="s",
            model_seq_id=0,
            base_model="/m",
            user_metadata={"a": "b"},
            lora_config=types.LoraConfig(rank=8, seed=-1, train_mlp=False),
        ),
        "CreateModel 1": types.CreateModelRequest(
            session_id="s", model_seq_id=1, base_model="/m", lora_config=types.LoraConfig(rank=32)
        ),
        "GetInfo": types.GetInfoRequest(model_id=MODEL),
        "OptimStep": types.OptimStepRequest(
            model_id=MODEL,
            seq_id=4,
            optim_params=types.AdamParams(learning_rate=1, beta2=0.99, weight_decay=0.1, grad_clip_norm=1),
        ),
        "SaveWeights": types.SaveWeightsRequest(
            model_id=MODEL, seq_id=5, path="a", ttl_seconds=3600, overwrite=True, user_metadata={"a": "b"}
        ),
        "SaveWeightsForSampler": types.SaveWeightsForSamplerRequest(model_id=MODEL, seq_id=6, path="a"),
        "SaveWeightsForSampler 1": types.SaveWeightsForSamplerRequest(
            model_id=MODEL, seq_id=7, sampling_session_seq_id=0, kind="inflight"
        ),
        "LoadWeights": types.LoadWeightsRequest(
            model_id=MODEL, seq_id=1, path="tinker://a/weights/b", optimizer=True
        ),
        "LoadWeights 1": types.LoadWeightsRequest(
            session_id="s", model_seq_id=1, path="tinker://a/weights/b", optimizer=False
        ),
        "CreateSamplingSession": types.CreateSamplingSessionRequest(
            session_id="s", sampling_session_seq_id=1, base_model="/m"
        ),
        "JoinSamplingSession": JoinSamplingSessionRequest(sampling_session_id="s:sample:0"),
        "RetrieveFuture": FutureRetrieveRequest(request_id="r", allow_metadata_only=True),
        "RetrieveFutures": FuturesRetrieveRequest(
            target=SamplingSessionFuturesTarget(sampling_session_id="s:sample:0"),
            prev_cursor=3,
            timeout=0,
            retrieved_request_ids=["r"],
        ),
        "ASample": types.SampleRequest(
            sampling_session_id="s:sample:0",
            seq_id=0,
            num_samples=4,
            prompt=prompt,
            sampling_params=types.SamplingParams(
                max_tokens=5, seed=3, stop=["a", "b"], temperature=0.5, top_k=7, top_p=0.25
            ),
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
            prompt_logprobs_last_n=1,
            target_prompt_logprobs=to_model(dense),
            record_stability_info=True,
        ),
        "ASample 1": types.SampleRequest(
            sampling_session_id="s:sample:0",
            seq_id=10**9,
            prompt=prompt,
            sampling_params=types.SamplingParams(stop=[7, 9]),
            target_prompt_logprobs=to_model(sparse),
        ),
        "ASample 2": types.SampleRequest(
            sampling_session_id="s:sample:0",
            seq_id=2,
            prompt=prompt,
            sampling_params=types.SamplingParams(stop=[]),
        ),
    }
    return {name: each.model_dump(exclude_none=True, mode="json") for name, each in asked.items()}


def answers() -> dict[str, bytes]:
    """Answers whose content the tests know; the client reads each."""
    passed = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for shapes, values in (([], [[-1.0, -2.0], [-3.0]]), ([2], [[-4.0, -5.0, 0.0, -6.0]])):
        record = passed.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(values))
        field = record.fields["logprobs"]
        field.data = np.concatenate([np.asarray(each, np.float32) for each in values]).tobytes()
        field.offsets = np.cumsum([0, *(4 * len(each) for each in values)]).astype(np.int64).tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(shapes)
    passed.metrics.update({"tokens:sum": 0.0, "loss:sum": 2.5})
    read = deserialize_forward_backward_output(passed.SerializeToString())
    assert [each["logprobs"].shape for each in read.loss_fn_outputs] == [[2], [1], [2, 2]]

    def likeliest(message: Any, ids: list[list[int]], logprobs: list[list[float]]) -> None:
        message.token_ids = np.asarray(ids, np.int32).tobytes()
        message.logprobs = np.asarray(logprobs, np.float32).tobytes()
        message.length, message.k = np.asarray(ids).shape

    sampled = pb.SampleResponse(prompt_cache_hit_tokens=2)
    for tokens, logprobs, reason in (([5, 6], [-0.5, -1.0], 0), ([7], [-2.0], 1)):
        each = sampled.sequences.add(stop_reason=reason)
        each.tokens = np.asarray(tokens, np.int32).tobytes()
        each.logprobs = np.asarray(logprobs, np.float32).tobytes()
    likeliest(sampled.sequences[0].topk_sampled_logprobs, [[5], [6]], [[-0.5], [-1.0]])
    sampled.prompt_logprobs = np.asarray([np.nan, -1.5], np.float32).tobytes()
    likeliest(sampled.topk_prompt_logprobs, [[0, 0], [3, 4]], [[-99999.0] * 2, [-0.25, -1.5]])
    targets = sampled.target_prompt_logprobs
    targets.dense = np.asarray([[0.0, -1.25]], np.float32).tobytes()
    targets.dtype = pb.DTYPE_FLOAT32
    targets.shape.extend([1, 2])
    response = deserialize_sample_response(sampled.SerializeToString())
    assert response.prompt_logprobs == [None, -1.5]
    assert response.topk_prompt_logprobs == [None, [(3, -0.25), (4, -1.5)]]
    plain = pb.SampleResponse()
    plain.sequences.add(stop_reason=1, tokens=np.asarray([7], np.int32).tobytes(), logprobs=b"\0\0\0\0")
    sparse = plain.target_prompt_logprobs
    sparse.dtype = pb.DTYPE_FLOAT32
    sparse.shape.extend([3, 9])
    sparse.sparse_csr.values = np.asarray([-1.0, -2.0, -3.0], np.float32).tobytes()
    sparse.sparse_csr.crow_indices = np.asarray([0, 2, 2, 3], np.int64).tobytes()
    sparse.sparse_csr.col_indices = np.asarray([1, 8, 4], np.int64).tobytes()
    read_back = deserialize_sample_response(plain.SerializeToString()).target_prompt_logprobs
    assert read_back is not None
    assert read_back.to_numpy()[0, 8] == -2
    return {
        name: message.SerializeToString(deterministic=True)
        for name, message in {"passed": passed, "sampled": sampled, "sampled_sparse": plain}.items()
    }


if __name__ == "__main__":
    main()
