"""The requests that the server takes, checked: OpenAI's fields, and some of vLLM's and quatrain's own.

Data flow: JSON -> `parsed`, which leaves out what changes nothing -> `CompletionRequest`, `ChatRequest` or
`GenerateRequest` -> `sequences` -> `PerRequestSampling` for each sequence. A field that is null counts as
left out. Every field of the request types of the openai package is a field of these classes, or in IGNORED or
UNCHANGING.
"""

from __future__ import annotations

import json
import secrets
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from quatrain.config.errors import listed, shown
from quatrain.config.sections.rollout import MOST_KEPT
from quatrain.data.grammars import JSON_OBJECT
from quatrain.data.messages import checked_tools
from quatrain.engine.scoring import MOST_LIKELIEST, MOST_OF_PROMPT
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import PerRequestSampling

MOST_SEQUENCES = 1024
"""Sequences of one request."""
DEFAULT_TOKENS = 16
"""Tokens of a completion, as in OpenAI's interface; an answer in a chat may fill the model's positions."""
MOST_TOP_K = 2**31 - 1
"""A larger `top_k` keeps all tokens, as this one does; the decoder counts in int32."""
NO_ROOM = "context_length_exceeded"
"""The code of an error by which agents know that they must shorten their history."""
LEAST_TOP_P = 1e-9
"""A smaller `top_p` keeps the likeliest token alone, as this one does, and in float32 it may be 0."""

IGNORED = frozenset(
    {
        *("user", "metadata", "safety_identifier"),  # who asks, and notes
        *("prompt_cache_options", "prompt_cache_retention", "prediction"),  # speed
        *("reasoning_effort", "verbosity"),  # wishes, which the weights and the template do not know
        *("parallel_tool_calls", "service_tier", "store"),  # nothing is stored; one tier
    }
)
"""Fields that are accepted with any value and ignored."""
UNCHANGING: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_tokens": (0,),
    "priority": (0,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "documents": ([],),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "include_reasoning": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "suffix": ("",),
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "response_format": ({"type": "text"},),
    "web_search_options": (),
}
"""Fields that a kind of request does not have: the values that change nothing, with which it accepts them."""

_FORMS = {
    "prompt": "must be a text, token ids (whole numbers from 0), or a list of either",
    "stop": "must be a text, or a list of texts",
}
"""Fields that may have values of several types, of which pydantic would name the first."""
OVERRIDDEN = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty", "length_penalty"),
    }
)
"""Fields that a session has of its own: the policy that is sampled is the one that is trained."""

_Parsed = TypeVar("_Parsed", bound=BaseModel)
TokenIds = list[Annotated[int, Field(ge=0, strict=True)]]
Uint32 = Annotated[int, Field(ge=0, lt=2**32)]


class BadRequest(ValueError):
    """A request that cannot be answered; `field` is the field at fault, `status` the HTTP status.

    `code` is a word that clients look at, if there is one. `too_long`: (tokens of the prompt, most that it
    may have), if it has too many.
    """

    def __init__(
        self,
        message: str,
        field: str | None = None,
        status: int = 400,
        code: str | None = None,
        too_long: tuple[int, int] | None = None,
    ):
        super().__init__(_writable(message))
        self.field = None if field is None else _writable(field)
        self.status, self.code, self.too_long = status, code, too_long


def _writable(text: str) -> str:
    """`text`, which may repeat what came, without halves of surrogate pairs: no answer can have them."""
    return text.encode(errors="backslashreplace").decode()


def no_tiny_temperature(value: float | None) -> float | None:
    """`value`; raises ValueError if a temperature is so near to 0 that logits become infinite."""
    if value is not None and 0 < value < 0.01:
        raise ValueError("must be 0, which takes the likeliest token, or at least 0.01")
    return value


def checked_format(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """A `response_format`, None for any text; raises ValueError if it is none."""
    kind = None if value is None else value.get("type")
    if value is None or kind == "text":
        return None
    schema = value["json_schema"].get("schema") if isinstance(value.get("json_schema"), dict) else None
    if kind == "json_object" or (kind == "json_schema" and isinstance(schema, dict | bool)):
        return value
    raise ValueError(
        'must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
        '{"name": …, "schema": a JSON schema}}'
    )


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False)


class Place(_Strict):
    """Where a sequence stands in training: its tokens are those that training on one machine would sample."""

    step: Uint32
    group_id: Annotated[int, Field(ge=0, lt=2**63)]
    sample: Uint32
    n: Annotated[int, Field(ge=1, lt=2**32)]
    offset: Uint32 = 0
    """Tokens after the sequence's first prompt, in a later turn: those it has sampled and was given since."""

    @property
    def sequence_id(self) -> int:
        """The id that the sequence's randomness derives from."""
        return (self.group_id * self.n + self.sample) % 2**32


class StreamOptions(_Strict):
    """`include_usage`: a last event with the numbers of tokens. `include_obfuscation` is ignored."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Request(_Strict):
    """What all kinds of requests have."""

    model: str
    """Any name: the server has one model, which its answers name."""
    n: Annotated[int, Field(ge=1, le=MOST_SEQUENCES)] = 1
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_routed_experts: bool = False
    """Whether an answer has the experts of each token, as vLLM's `routed_experts`."""
    return_sampling_mask: bool = False
    """Whether an answer has the words that each token was drawn from, as vLLM's `sampling_mask`."""
    quatrain: Place | None = None
    prompt_cache_key: str = ""
    """The name of a dialogue: its contexts are kept before those of requests without one."""
    cache_salt: str = ""
    """Kept contexts are shared with requests of the same salt alone: who measures how long an answer takes
    learns nothing of others' prompts."""
    logit_bias: dict[str, float] | None = None

    _no_tiny_temperature = field_validator("temperature")(no_tiny_temperature)

    @field_validator("return_routed_experts", "return_sampling_mask")
    @classmethod
    def _whole_answers(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("stream"):
            raise ValueError("this cannot be streamed; leave out stream")
        return value

    @field_validator("return_sampling_mask")
    @classmethod
    def _bounded_sets(cls, value: bool, info: ValidationInfo) -> bool:
        if value and not (
            0 < (info.data.get("top_k") or 0) <= MOST_KEPT and info.data.get("temperature") != 0
        ):
            raise ValueError(f"needs a top_k of 1 to {MOST_KEPT} and a temperature above 0; set these")
        return value

    @field_validator("stop")
    @classmethod
    def _stop_strings(cls, value: str | list[str] | None) -> str | list[str] | None:
        each = [value] if isinstance(value, str) else value or []
        if len(each) > 16 or not all(each):
            raise ValueError("must be at most 16 strings, none of them empty")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _no_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if any((value or {}).values()):
            raise ValueError("must be 0 for each token, as no other bias is supported; leave it out")
        return value

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The strings that end a completion."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def num_likeliest(self) -> int | None:
        """Alternatives to return for each token, from a pass that scores the tokens; None: no such pass."""
        return None

    @property
    def num_scored(self) -> int | None:
        """The most alternatives that are asked for in any place; None: no token is scored."""
        return self.num_likeliest

    prompt_field: ClassVar[str] = "prompt"
    """The field that has the prompt."""

    @property
    @abstractmethod
    def wanted_tokens(self) -> int | None:
        """The most tokens of a completion, if the request says so."""

    def sequences(self, lengths: Sequence[int], max_positions: int) -> list[PerRequestSampling]:
        """The sampling of each completion, of prompts of these `lengths`: those of a prompt adjacent.

        A completion has at most as many tokens as the prompt leaves of the model's `max_positions`, also if
        the request asks for more. Raises BadRequest if the prompt leaves none. None are sampled for a request
        that asks for 0 tokens.
        """
        count = self.n * len(lengths)
        if count > MOST_SEQUENCES:
            raise BadRequest(f"a request has at most {MOST_SEQUENCES} completions; got {count}", "n")
        if self.quatrain is not None and (count > 1 or self.seed is None):
            raise BadRequest(
                f"with `quatrain`, a request has a seed and one completion; got seed {self.seed} and "
                f"{count} completions",
                "quatrain",
            )
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**32
        for length in lengths:
            self._check_room(max_positions - length, length)
        if self.wanted_tokens == 0:
            return []
        return [
            PerRequestSampling(
                self._sampling(max_positions - lengths[number // self.n]),
                seed,
                0 if self.quatrain is None else self.quatrain.step,
                number if self.quatrain is None else self.quatrain.sequence_id,
                0 if self.quatrain is None else self.quatrain.offset,
                salt=self.cache_salt,
            )
            for number in range(count)
        ]

    def _check_room(self, room: int, length: int) -> None:
        if room < (self.wanted_tokens != 0):
            raise BadRequest(
                "maximum context length: a prompt must leave room for a token in the model's "
                f"{length + room} positions; it has {length} tokens; shorten it",
                self.prompt_field,
                code=NO_ROOM,
                too_long=(length, max(length + room - 1, 0)),
            )

    def _sampling(self, room: int) -> Sampling:
        wanted = self.wanted_tokens
        return Sampling(
            n=1,
            max_new_tokens=room if wanted is None else min(room, wanted),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=max(self.top_p or 1.0, LEAST_TOP_P),
            top_k=min(max(self.top_k or 0, 0), MOST_TOP_K),
            min_p=self.min_p or 0.0,
            stop=self.stop_strings,
            replays=self.return_sampling_mask,
        )


class PlacedPicture(_Strict):
    """A picture of a prompt of ids, and which of these stand for it."""

    url: Annotated[str, Field(pattern="^data:")]
    places: Annotated[list[tuple[int, int]], Field(min_length=1)]
    """(place of the first, how many) of tokens that follow one another, in ascending order."""


class CompletionRequest(_Request):
    """`POST /v1/completions`: prompts as texts or token ids."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    pictures: list[PlacedPicture] = []
    """quatrain's own: those of the one prompt, of ids in which each placeholder stands."""
    max_tokens: Annotated[int, Field(ge=0)] | None = DEFAULT_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=MOST_LIKELIEST)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_OF_PROMPT)] | None = None
    best_of: int | None = None
    echo: Annotated[bool | None, Field(validate_default=True)] = None
    add_special_tokens: Literal[True] | None = None

    @field_validator("echo")
    @classmethod
    def _fits_the_other_fields(cls, value: bool | None, info: ValidationInfo) -> bool | None:
        given = info.data
        if given.get("stream") and (
            value or given.get("logprobs") or given.get("prompt_logprobs") is not None
        ):
            raise ValueError(
                "neither echo, nor logprobs above 0, nor prompt_logprobs can be streamed; leave out stream"
            )
        if info.data.get("max_tokens") == 0 and not value:
            raise ValueError("max_tokens 0 returns the prompt alone, with echo; set echo to true")
        return value

    @field_validator("best_of")
    @classmethod
    def _all_are_returned(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value not in (None, 1, info.data.get("n")):
            raise ValueError("must be n, because every sample is returned; leave it out")
        return value

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one by one."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)  # type: ignore[arg-type]

    @property
    def wanted_tokens(self) -> int | None:
        """`max_tokens`; null: as in OpenAI's interface."""
        return DEFAULT_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether `logprobs` is given; 0 asks for those of the tokens alone."""
        return self.logprobs is not None

    @property
    def num_likeliest(self) -> int | None:
        """`logprobs`, if the prompt is echoed or there are alternatives."""
        return self.logprobs if self.echo or self.logprobs else None

    @property
    def num_scored(self) -> int | None:
        """As in every request; those of the prompt count too."""
        asked = [count for count in (self.num_likeliest, self.prompt_logprobs) if count is not None]
        return max(asked, default=None)


class ChatRequest(_Request):
    """`POST /v1/chat/completions`: messages and tools, which the chat template renders."""

    prompt_field: ClassVar[str] = "messages"
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Literal[0] | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: Annotated[Any, Field(validate_default=True)] = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    response_format: dict[str, Any] | None = None
    """`json_object`, or `json_schema` with a schema; None: any text."""
    _hints: frozenset[str] = PrivateAttr(frozenset())

    @field_validator("response_format")
    @classmethod
    def _is_a_format(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        return checked_format(value)

    def with_hints(self, hints: Iterable[str]) -> ChatRequest:
        """This request, with signatures of answers (`Turn.signature`) that came with its messages."""
        self._hints = frozenset(hints)
        return self

    @property
    def hints(self) -> frozenset[str]:
        """Signatures of answers, which choose among those with equal messages."""
        return self._hints

    @field_validator("tools")
    @classmethod
    def _describe_functions(cls, value: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return checked_tools(value)

    @field_validator("tool_choice")
    @classmethod
    def _is_a_choice(cls, value: Any, info: ValidationInfo) -> Any:
        tools = info.data.get("tools", [])
        if value in ("none", "auto") or (value == "required" and tools):
            return value
        names = [tool["function"]["name"] for tool in tools]
        if value not in [{"type": "function", "function": {"name": name}} for name in names]:
            raise ValueError(
                'must be "none", "auto" or, with tools, "required" or {"type": "function", "function": '
                f'{{"name": one of the tools}}}}; the tools are {listed(names)}'
            )
        return value

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Whether the answer begins with a call: of `called`, or of any tool."""
        return self.tool_choice not in ("none", "auto")

    @property
    def json_schema(self) -> Mapping[str, Any] | bool | None:
        """The schema of an answer, where `response_format` says one; None: any text, or a call."""
        if self.response_format is None or self.must_call:
            return None
        if self.response_format["type"] == "json_object":
            return JSON_OBJECT
        return self.response_format["json_schema"]["schema"]

    @property
    def called(self) -> str | None:
        """The name of the tool that `tool_choice` names, if it does."""
        return self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None

    @property
    def wanted_tokens(self) -> int | None:
        """`max_completion_tokens`, or `max_tokens`, its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wants_logprobs(self) -> bool:
        """`logprobs`."""
        return bool(self.logprobs)


class GenerateRequest(_Request):
    """`POST /inference/v1/generate`: token ids to token ids, as vLLM's; `sampling_params` are fields here."""

    prompt_field: ClassVar[str] = "token_ids"
    model: str = ""
    token_ids: TokenIds
    request_id: Annotated[str, Field(min_length=1)] = Field(default_factory=lambda: uuid.uuid4().hex)
    max_tokens: Annotated[int, Field(ge=1)] = DEFAULT_TOKENS
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None
    stop_token_ids: TokenIds = []
    stream: Literal[False] = False
    return_token_ids: Literal[True] = True
    return_tokens_as_token_ids: Literal[True] = True
    # An answer has no text, which these are about.
    detokenize: bool = False
    skip_special_tokens: bool = False
    spaces_between_special_tokens: bool = False
    include_stop_str_in_output: bool = True

    @property
    def wanted_tokens(self) -> int | None:
        """`max_tokens`."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether `logprobs` is given: those of the tokens alone, in the distribution they are drawn from."""
        return self.logprobs is not None


AnyRequest = CompletionRequest | ChatRequest | GenerateRequest


class WeightsRequest(_Strict):
    """`POST /weights`: the folder of a model, and the version that its weights get."""

    path: Annotated[str, Field(min_length=1)]
    version: Annotated[int, Field(ge=0, lt=2**31)]


class FilesRequest(_Strict):
    """`POST /weights/begin`: the sizes of the files that come in pieces."""

    files: dict[str, Annotated[int, Field(ge=0)]]
    piece_bytes: int


def parsed(kind: type[_Parsed], body: bytes, overridden: Counter[str] | None = None) -> _Parsed:
    """The request in `body`; raises BadRequest, which names the field, if it is not one of this kind.

    With `overridden`, those of a session, fields in OVERRIDDEN are left out, and counted there.
    """
    return checked(kind, fields_of(body), overridden)


def fields_of(body: bytes) -> dict[str, Any]:
    """The fields of a body that are not null; raises BadRequest if it is no JSON object."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body of a request must be JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest(f"the body of a request must be a JSON object; got {type(value).__name__}")
    return {name: given for name, given in value.items() if given is not None}


def checked(
    kind: type[_Parsed],
    value: dict[str, Any],
    overridden: Counter[str] | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
) -> _Parsed:
    """The request with these fields, as `parsed` has it; `names` are those that errors have for fields."""
    if kind is GenerateRequest:
        value = _flat(value)
    if overridden is not None:
        overridden["overridden_fields"] += len(value.keys() & OVERRIDDEN)
        value = {name: given for name, given in value.items() if name not in OVERRIDDEN}
    if issubclass(kind, _Request):
        value = {name: given for name, given in value.items() if _changes_something(kind, name, given, names)}
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise BadRequest(*first_fault(error, names)) from error


def _flat(value: dict[str, Any]) -> dict[str, Any]:
    """A request with its `sampling_params` as fields; raises BadRequest for a field in both places."""
    sampling = value.pop("sampling_params", {})
    if not isinstance(sampling, dict) or (twice := sorted(sampling.keys() & value.keys())):
        got = f"{listed(twice)} beside it too" if isinstance(sampling, dict) else shown(sampling)
        raise BadRequest(
            f"sampling_params must be an object, whose fields are in it alone; got {got}", "sampling_params"
        )
    return {**value, **{name: given for name, given in sampling.items() if given is not None}}


def _changes_something(kind: type[_Request], name: str, given: Any, names: Mapping[str, str]) -> bool:
    """Whether a field matters; raises BadRequest if it would, but is not supported."""
    if name in kind.model_fields:
        return True
    if name not in UNCHANGING or given in UNCHANGING[name]:
        return name not in UNCHANGING and name not in IGNORED
    allowed = " or ".join(map(json.dumps, UNCHANGING[name]))
    what = f"must be {allowed}, as no other value is supported" if allowed else "is not supported"
    name = names.get(name, name)
    raise BadRequest(f"{name} {what}; got {shown(given)}; leave it out", name)


def first_fault(error: ValidationError, names: Mapping[str, str] = MappingProxyType({})) -> tuple[str, str]:
    """(message, field) of the first fault."""
    fault = error.errors(include_url=False, include_context=False)[0]
    first, *inner = fault["loc"] or ("",)
    field = names.get(str(first), str(first))
    place = ".".join(map(str, [field, *inner]))
    what = fault["msg"].removeprefix("Value error, ")
    if first in _FORMS and inner == ["str"]:
        return f"{field}: {_FORMS[first]}; got {shown(fault['input'])}", field
    if fault["type"] == "extra_forbidden":
        return f"{place} is not supported; leave it out", field
    if fault["type"] == "missing":
        return f"{place} is missing", field
    return f"{place}: {what}; got {str(fault['input'])[:100]!r}", field
