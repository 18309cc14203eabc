"""The JSON requests of the Tinker API, checked.

Data flow: JSON -> `parsed` -> `CreateModel`, `OptimStep`, `ASample`, … -> what they ask for, by `calls.py`. A
field that is null counts as left out. A field that is not known here is refused by name, as what it asks for
would not be done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from pydantic import ValidationInfo as Info
from pydantic_core import from_json

from quatrain.engine.scoring import MOST_OF_PROMPT
from quatrain.serve.requests import LEAST_TOP_P, MOST_SEQUENCES, MOST_TOP_K, first_fault, no_tiny_temperature
from quatrain.serve.tinker.calls import AdamNumbers, LoraRequest, Refused, Sample
from quatrain.serve.tinker.messages import MOST_FIELDS
from quatrain.serve.tinker.wire import MOST_CELLS, Csr, Limits, check_tokens

MOST_JSON_BYTES = 16 * 2**20
"""Of the body of a request in JSON, whose objects take up to thirty times its bytes."""
MOST_METADATA_BYTES = 2**16
"""Of `user_metadata` as JSON, which is kept."""
MOST_STOPS = 64
TEN_YEARS_S = 10 * 365 * 24 * 3600
_LARGEST = float(np.finfo(np.float32).max)

_Kind = TypeVar("_Kind", bound="Ask")


def _small(value: Any) -> Any:
    if len(json.dumps(value)) > MOST_METADATA_BYTES:
        raise ValueError(f"must have at most {MOST_METADATA_BYTES} bytes as JSON")
    return value


Id = Annotated[str, Field(min_length=1, max_length=1024)]
_OF_SESSION, _OF_MODEL = range(2**63), range(1, 2**31)
SessionNumber = Annotated[int, Field(ge=_OF_SESSION.start, lt=_OF_SESSION.stop)]
"""The place of a request among those of its session."""
ModelNumber = Annotated[int, Field(ge=_OF_MODEL.start, lt=_OF_MODEL.stop)]
"""The place of a request among those of its model."""
Metadata = Annotated[dict[str, Any], BeforeValidator(_small)]
TextMetadata = Annotated[dict[str, str], BeforeValidator(_small)]
Seconds = Annotated[int, Field(ge=1, le=TEN_YEARS_S)]
Ints = Annotated[list[Annotated[int, Field(ge=-(2**63), lt=2**63)]], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Positive = Annotated[float, Field(ge=0, le=_LARGEST)]
# From 1 - 2^-25 on it is 1 in float32, and the moments are divided by its distance to 1.
Decay = Annotated[float, Field(ge=0, lt=1 - 2.0**-25)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class Ask(_Strict):
    """A request."""

    addresses: ClassVar[tuple[tuple[str, str, range], ...]] = ()
    """Fields that have the id and the number of the request, and which numbers there are; of several pairs a
    request has one."""
    type: str = ""
    """The name of the request, which the client gives to some."""

    @property
    def address(self) -> tuple[str, int]:
        """(id, number): a request that comes again has the same, and is not done again."""
        found = _address(type(self), self.__dict__)
        assert found is not None
        return found


def parsed(kind: type[_Kind], body: bytes) -> _Kind:
    """The request in `body`.

    Raises Refused, which names the field, with the request's address if that can be read.
    """
    given: dict[str, Any] = {}
    try:
        given = _object(body)
        return kind.model_validate(given)
    except (Refused, ValidationError) as error:
        refused = error if isinstance(error, Refused) else Refused(first_fault(error)[0])
        refused.address = _address(kind, given)
        raise refused from error


def _object(body: bytes) -> dict[str, Any]:
    if len(body) > MOST_JSON_BYTES or body.count(b":") > MOST_FIELDS:
        raise Refused(
            f"a request has at most {MOST_JSON_BYTES} bytes and {MOST_FIELDS} fields; this one has more"
        )
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body of a request must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise Refused(f"the body of a request must be a JSON object; got {type(value).__name__}")
    return {name: each for name, each in value.items() if each is not None}


def _address(kind: type[Ask], given: Mapping[str, Any]) -> tuple[str, int] | None:
    for name, number, numbers in kind.addresses:
        if isinstance(given.get(name), str) and type(given.get(number)) is int and given[number] in numbers:
            return given[name], given[number]
    return None


class ClientConfig(Ask):
    """`client/config` and `client/dynamic_config`."""

    sdk_version: str = ""


class CreateSession(Ask):
    """`create_session`."""

    tags: Texts = []
    user_metadata: Metadata = {}
    sdk_version: str = ""
    project_id: str = ""
    display_name: Annotated[str, Field(max_length=1024)] = ""


class Heartbeat(Ask):
    """`session_heartbeat`."""

    session_id: Id


class _Reason(_Strict):
    type: Literal["success", "errored", "interrupted"]


class FinishSession(Ask):
    """`sessions/{id}/finish`."""

    reason: _Reason
    detail: str = ""


class _LoraConfig(_Strict):
    rank: Annotated[int, Field(ge=1, lt=2**31)]
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


class _OptimizerConfig(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)
    type: str

    @field_validator("type")
    @classmethod
    def _is_adamw(cls, value: str) -> str:
        if value != "adamw":
            raise ValueError("must be adamw, the one optimizer of this server")
        return value


class CreateModel(Ask):
    """`create_model`."""

    addresses = (("session_id", "model_seq_id", _OF_SESSION),)
    session_id: Id
    model_seq_id: SessionNumber
    base_model: Id
    user_metadata: Metadata = {}
    lora_config: _LoraConfig
    optimizer_config: _OptimizerConfig | None = None

    def lora(self) -> LoraRequest:
        """The adapters; raises Refused if no part is trained."""
        given = self.lora_config
        if not (given.train_mlp or given.train_attn or given.train_unembed):
            raise Refused("lora_config must train a part: train_mlp, train_attn or train_unembed; got none")
        return LoraRequest(
            rank=given.rank,
            seed=None if given.seed is None else given.seed % 2**32,
            train_mlp=given.train_mlp,
            train_attn=given.train_attn,
            train_unembed=given.train_unembed,
        )


class GetInfo(Ask):
    """`get_info`."""

    model_id: Id


class _OfModel(Ask):
    addresses = (("model_id", "seq_id", _OF_MODEL),)
    model_id: Id
    seq_id: ModelNumber


class _AdamParams(_Strict):
    learning_rate: Positive = AdamNumbers.learning_rate
    beta1: Decay = AdamNumbers.beta1
    beta2: Decay = AdamNumbers.beta2
    # Parts that are not trained have a gradient of 0, and 0 / (0 + eps) must be a number in float32.
    eps: Annotated[float, Field(ge=1e-30, le=_LARGEST)] = AdamNumbers.eps
    weight_decay: Positive = AdamNumbers.weight_decay
    grad_clip_norm: Positive = AdamNumbers.grad_clip_norm


class OptimStep(_OfModel):
    """`optim_step`."""

    optimizer_params: Any = None
    adam_params: Annotated[_AdamParams | None, Field(validate_default=True)] = None

    @field_validator("adam_params")
    @classmethod
    def _is_adam(cls, value: _AdamParams | None, info: Info) -> _AdamParams | None:
        if value is None or info.data.get("optimizer_params") is not None:
            raise ValueError(
                "must be given, and no optimizer_params: AdamW is the one optimizer of this server"
            )
        return value

    def numbers(self) -> AdamNumbers:
        """What the step computes with."""
        assert self.adam_params is not None
        return AdamNumbers(**self.adam_params.model_dump())


class SaveWeights(_OfModel):
    """`save_weights`."""

    path: Id
    overwrite: bool = False
    ttl_seconds: Seconds | None = None
    user_metadata: TextMetadata = {}


class SaveWeightsForSampler(_OfModel):
    """`save_weights_for_sampler`: under a name, or for a sampling session of this number."""

    path: Id | None = None
    sampling_session_seq_id: Annotated[SessionNumber | None, Field(validate_default=True)] = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    """Either is a snapshot."""
    ttl_seconds: Seconds | None = None
    user_metadata: TextMetadata = {}

    @field_validator("sampling_session_seq_id")
    @classmethod
    def _instead_of_a_name(cls, value: int | None, info: Info) -> int | None:
        if "path" in info.data and (value is None) == (info.data["path"] is None):
            raise ValueError("must be given if path is not, and left out if it is")
        return value


class LoadWeights(Ask):
    """`load_weights`: into a new model of a session, or into a model."""

    addresses = (("model_id", "seq_id", _OF_MODEL), ("session_id", "model_seq_id", _OF_SESSION))
    path: Id
    optimizer: bool
    session_id: Id | None = None
    model_seq_id: SessionNumber | None = None
    model_id: Id | None = None
    seq_id: Annotated[ModelNumber | None, Field(validate_default=True)] = None
    base_model: Id | None = None
    user_metadata: Metadata = {}
    optimizer_config: _OptimizerConfig | None = None

    @field_validator("seq_id")
    @classmethod
    def _one_address(cls, value: int | None, info: Info) -> int | None:
        given = {
            name for name in ("session_id", "model_seq_id", "model_id") if info.data.get(name) is not None
        }
        if given != ({"session_id", "model_seq_id"} if value is None else {"model_id"}):
            raise ValueError(
                "must be given with model_id alone, or left out with session_id and model_seq_id"
            )
        return value


class CreateSamplingSession(Ask):
    """`create_sampling_session`: of weights, or of the base model."""

    addresses = (("session_id", "sampling_session_seq_id", _OF_SESSION),)
    session_id: Id
    sampling_session_seq_id: SessionNumber
    model_path: Id | None = None
    base_model: Annotated[Id | None, Field(validate_default=True)] = None

    @field_validator("base_model")
    @classmethod
    def _or_weights(cls, value: str | None, info: Info) -> str | None:
        if value is None and "model_path" in info.data and info.data["model_path"] is None:
            raise ValueError("must be given, or model_path")
        return value


class JoinSamplingSession(Ask):
    """`join_sampling_session`."""

    sampling_session_id: Id


class RetrieveFuture(Ask):
    """`retrieve_future`."""

    request_id: Id
    allow_metadata_only: bool = False


class CancelFuture(Ask):
    """`cancel_future`."""

    request_id: Id


class _Target(_Strict):
    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Id
    cloned_sampler_id: SessionNumber = 0


class RetrieveFutures(Ask):
    """`retrieve_futures`."""

    target: _Target
    prev_cursor: SessionNumber = 0
    timeout: Annotated[float, Field(ge=0)] | None = None
    """Seconds."""
    retrieved_request_ids: Texts = []


class WeightsInfo(Ask):
    """`weights_info`."""

    tinker_path: Id


class SetTtl(Ask):
    """`…/checkpoints/{kind}/{name}/ttl`."""

    ttl_seconds: Seconds | None = None
    """None: for ever."""


class _Chunk(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)  # those of images, which the type refuses
    type: str = "encoded_text"
    tokens: Annotated[Ints, Field(validate_default=True)] = []

    @field_validator("type")
    @classmethod
    def _is_text(cls, value: str) -> str:
        if value != "encoded_text":
            raise ValueError("must be encoded_text: this server takes text alone")
        return value


class _Prompt(_Strict):
    chunks: Annotated[list[_Chunk], Field(fail_fast=True)]


class _SamplingParams(_Strict):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: Any = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    _no_tiny_temperature = field_validator("temperature")(no_tiny_temperature)

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: Any) -> tuple[str, ...] | tuple[int, ...]:
        each = [value] if isinstance(value, str) else value
        if not (
            isinstance(each, list)
            and len(each) <= MOST_STOPS
            and (all(type(one) is int for one in each) or all(isinstance(one, str) and one for one in each))
        ):
            raise ValueError(
                f"must be a string, or at most {MOST_STOPS} strings or token ids, and no string empty"
            )
        return tuple(each)

    @field_validator("top_k")
    @classmethod
    def _all_or_some(cls, value: int) -> int:
        if value == 0:
            raise ValueError("must be -1, all tokens, or at least 1")
        return min(value, MOST_TOP_K)


class _TargetTokens(_Strict):
    dtype: Literal["int64"]
    shape: Annotated[Ints, Field(min_length=2, max_length=2)]
    data: Ints
    sparse_crow_indices: Ints | None = None
    sparse_col_indices: Ints | None = None


class ASample(Ask):
    """`asample`."""

    addresses = (("sampling_session_id", "seq_id", _OF_SESSION),)
    sampling_session_id: Id
    seq_id: SessionNumber
    num_samples: Annotated[int, Field(ge=1, le=MOST_SEQUENCES)] = 1
    prompt: _Prompt
    sampling_params: _SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_OF_PROMPT)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MOST_OF_PROMPT)] = 0
    target_prompt_logprobs: _TargetTokens | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: bool = False
    """What stable_reinforce reads: nothing is recorded, and that loss is refused or replaced."""

    @field_validator("prompt_alt_tokens_k")
    @classmethod
    def _draws_none(cls, value: int) -> int:
        if value:
            raise ValueError("must be 0: this server draws no alternatives to tokens of prompts")
        return value

    def csr(self) -> Csr | None:
        """Which cells of `target_prompt_logprobs` are listed, for `wire.write_sampled`; None: it is dense."""
        asked = self.target_prompt_logprobs
        if asked is None or asked.sparse_crow_indices is None or asked.sparse_col_indices is None:
            return None
        places = (
            np.asarray(each, np.int64) for each in (asked.sparse_crow_indices, asked.sparse_col_indices)
        )
        return Csr((asked.shape[0], asked.shape[1]), *places)

    def sample(self, limits: Limits) -> Sample:
        """What to sample; raises Refused for tokens that the model does not have, or has no room for."""
        ids = [each for chunk in self.prompt.chunks for each in chunk.tokens]
        tokens = np.asarray(ids, np.int64)
        check_tokens("prompt", tokens, limits.vocab_size)
        if not 1 <= len(tokens) <= limits.longest:
            raise Refused(
                f"prompt must have 1 to {limits.longest} tokens, the model's positions; got {len(tokens)}"
            )
        last = self.prompt_logprobs_last_n
        if last is not None and not (self.prompt_logprobs and last < len(tokens)):
            raise Refused(
                "prompt_logprobs_last_n needs prompt_logprobs, and must be less than the tokens of the "
                f"prompt, {len(tokens)}; got {last}"
            )
        how = self.sampling_params
        stops = [each for each in how.stop or () if not isinstance(each, str)]
        check_tokens("stop", np.asarray(stops, object), limits.vocab_size)  # of any size
        return Sample(
            tokens.astype(np.int32),
            n=self.num_samples,
            max_tokens=how.max_tokens,
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=max(how.top_p, LEAST_TOP_P),
            seed=None if how.seed is None else how.seed % 2**32,
            stop=how.stop,
            prompt_logprobs=self.prompt_logprobs,
            prompt_logprobs_last_n=last,
            topk_prompt_logprobs=self.topk_prompt_logprobs,
            topk_sample_logprobs=self.topk_sample_logprobs,
            target_prompt_logprobs=self._targets(len(tokens), limits.vocab_size),
        )

    def _targets(self, num_tokens: int, vocab_size: int) -> np.ndarray | None:
        """[P - 1, K] int32; of sparse ones the listed cells of each row, one after the other."""
        asked, name = self.target_prompt_logprobs, "target_prompt_logprobs"
        if asked is None:
            return None
        num_rows, width = asked.shape
        csr, values = self.csr(), np.asarray(asked.data, np.int64)
        sparse = asked.sparse_crow_indices is not None or asked.sparse_col_indices is not None
        if (
            num_rows != num_tokens - 1
            or width < 1
            or (csr is None and (sparse or len(values) != num_rows * width))
        ):
            raise Refused(
                f"{name} must have the shape [P - 1, K], with P = {num_tokens} as the prompt, and as many "
                "values, or sparse_crow_indices and sparse_col_indices for them; got the shape "
                f"{asked.shape} and {len(values)} values"
            )
        check_tokens(name, values[values != -1], vocab_size)
        if not (values != -1).any():
            raise Refused(f"{name} must have a token id; got none")
        if csr is None:
            return values.astype(np.int32).reshape(num_rows, width)
        csr.check(name, len(values))
        longest = int(np.diff(csr.ends).max())
        if num_rows * longest > MOST_CELLS:
            raise Refused(f"{name} must have at most {MOST_CELLS} cells, of rows as long as the longest")
        rows = np.full((num_rows, longest), -1, np.int32)
        rows[csr.rows, csr.ranks] = values
        return rows
