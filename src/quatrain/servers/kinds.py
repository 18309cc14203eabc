"""The kinds of inference servers, and how each is asked: quatrain's own, vLLM and SGLang.

Data flow: `owned_by` in the answer to `/v1/models` -> KINDS -> path and JSON of each request, and what its
answer says, for `server.py` and for teachers behind servers. Token ids go in and out, each with its
log-probability; no text is encoded again. All stop decoding what was asked for by a connection that closes.

Pictures go beside the ids as data URLs. quatrain's own server gets all placeholders, and where those of each
picture stand. vLLM and SGLang expand placeholders themselves, also those among ids, so they get one for each
picture (`contracted`); how many they made of it, the length of the prompt in their answer says.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from quatrain.config.secrets import SERVE_TOKEN
from quatrain.data.pictures import url_of
from quatrain.servers.client import Unfit
from quatrain.servers.pieces import PIECE_BYTES, Pieces
from quatrain.types.pictures import TEXT, Picture, Pictures, Tokens
from quatrain.types.rollouts import Sampling

NO_DEV_MODE = (
    "it has no way to change its weights",
    "start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment, vLLM 0.32 or newer",
)
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Leaves the distribution as it is. vLLM takes what is left out from the model's generation_config.json."""

Question = tuple[str, Any]
"""A path, and the JSON, or bytes, that are sent there; None: nothing is sent."""
Check = tuple[Question, str, str]
"""What a server must answer to be given weights; what it lacks if it does not; the remedy."""
Pairs = list[tuple[int, float]]
"""(word, log-probability) each."""
PromptScores = tuple[list[float], list[Pairs]]
"""Of a prompt's tokens: log-probabilities, NaN for the first, and the likeliest words there, if any."""


class ServerAnswer(NamedTuple):
    """A sampled sequence, as a server says: ids, a log-probability for each, and why it ended."""

    tokens: Any
    logprobs: Any
    finish_reason: str
    prompt_tokens: list[int] | int | None = None
    """The ids of the prompt, or their number, if the server says so."""
    versions: Any = None
    """The version of the weights that sampled each token, if the server says so; -1: those of no run."""
    routes: Any = None
    """The experts of the tokens of prompt and completion but the last, if the server says so: for
    `RouteRules.read`, and then what that returns."""
    cached: int = 0
    """Tokens of the prompt that were not computed, if the server says so."""
    kept: Any = None
    """The words that each token was drawn from, if the server says so."""


class Asked(NamedTuple):
    """One sequence to sample: `prompt` is a list of ids, or a text for the probe alone."""

    prompt: list[int] | str
    sampling: Sampling
    seed: int
    step: int
    group_id: int
    sample: int
    version: int
    offset: int = 0
    """The position of its first token among those that derive from the same sequence."""
    routes: bool = False
    """Whether the experts of its tokens are wanted."""
    pictures: Pictures | None = None
    """Which picture each token of the prompt stands for; it may end before the prompt does."""

    @property
    def tokens(self) -> Tokens:
        """The prompt, which has ids, with its pictures."""
        assert isinstance(self.prompt, list)
        return Tokens(self.prompt, self.pictures)


class Quatrain:
    """`quatrain serve`, which calls its model `model`; its tokens are those of an engine in process."""

    name = "quatrain"
    routes_by = "rollout.record_routes auto, and a model with experts"
    """What lets it return the experts of tokens."""
    kept_by = "use this version of `quatrain serve`"
    """What lets it return the words that tokens were drawn from."""
    version_path = "/version"
    """Where it says `weight_version`, the label of its weights."""
    pause: Question | None = None
    """What stops it for a load; None: it exchanges weights between two rounds of decoding."""
    resume: Question = ("/resume", {})
    """What lets it go on; it may be asked although it is not paused."""
    takes_adapters = True
    """Whether it loads a folder with adapters alone, of the base that it was started with."""
    takes_tiles = True
    """Whether it gets pictures that are cut into tiles, whose placeholders have words between them."""
    sees_by = "start this version of `quatrain serve` with the model that is trained, and its tower"
    """What lets it see."""
    checks: tuple[Check, ...] = (
        (
            ("/resume", {}),  # also if it was left paused
            "it does not let this run change its weights",
            f"start it with {SERVE_TOKEN} set, and this run with the same value",
        ),
    )

    def __init__(self, model: str):
        self.model = model

    def request(self, asked: Asked, stop_ids: Sequence[int]) -> Question:
        """(path, JSON) that ask for one sequence: a completion of ids, in OpenAI's form."""
        return "/v1/completions", {
            "model": self.model,
            "prompt": asked.prompt,
            "max_tokens": asked.sampling.max_new_tokens,
            "top_k": asked.sampling.top_k,
            **_common(asked.sampling),
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
            **self._fields(asked, stop_ids),
            **_routes_wanted(asked),
            **_kept_wanted(asked),
            **_placed(asked.pictures),
        }

    def read(self, value: Any) -> ServerAnswer:
        """The answer to such a request; raises LookupError, TypeError or ValueError if `value` is none."""
        choice = dict(value["choices"][0])
        return ServerAnswer(
            choice.get("token_ids"),
            dict(choice.get("logprobs") or {}).get("token_logprobs"),
            str(choice["finish_reason"]),
            choice.get("prompt_token_ids"),
            choice.get("weight_versions"),
            choice.get("routed_experts"),
            _cached(value.get("usage")),
            choice.get("sampling_mask"),
        )

    def score_request(self, prompt: Sequence[Any], num_words: int) -> Question:
        """(path, JSON) that ask for the log-probability of each token of a prompt, a text or ids.

        With `num_words`, for so many of the likeliest words in its place too. `max_tokens` is 1, because
        servers must sample something.
        """
        wanted = {"prompt_logprobs": num_words} if num_words else {"echo": True, "logprobs": 0}
        body = {"model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 1.0, **wanted}
        return "/v1/completions", body

    def look_request(self, prompt: Tokens) -> Question:
        """(path, JSON) that ask for the log-probabilities of the tokens of a prompt with pictures."""
        path, body = self.score_request(prompt.ids, 0)
        return path, {**body, **_placed(prompt.pictures)}

    def read_look(self, answer: Any, last: Sequence[int]) -> list[float]:
        """Those of the `last` tokens of the prompt; raises as `read` without them."""
        values = answer["choices"][0]["logprobs"]["token_logprobs"][:-1]  # without the sampled token
        return [float(value) for value in values[-len(last) :]]

    def read_scores(self, answer: Any, prompt: Sequence[Any], num_words: int) -> PromptScores:
        """The scores in an answer; raises as `read` without them."""
        choice = answer["choices"][0]
        if not num_words:
            values = choice["logprobs"]["token_logprobs"][1:-1]  # without the sampled token
            return [math.nan, *map(float, values)], []
        words: list[Pairs] = [
            [(int(word), float(found["logprob"])) for word, found in (place or {}).items()]
            for place in choice["prompt_logprobs"]
        ]
        own = [dict(pairs)[token] for pairs, token in zip(words[1:], prompt[1:], strict=True)]
        return [math.nan, *own], words

    def begin(self, pieces: Pieces) -> Question:
        """What has it take the files of `pieces`."""
        return "/weights/begin", {"files": pieces.files, "piece_bytes": PIECE_BYTES}

    def read_begun(self, answer: Any) -> tuple[str, str, list[str | None]]:
        """(stream, path, digests) as `Receiver.begin` has them."""
        return answer["stream"], answer["path"], answer["digests"]

    def put(self, message: bytes) -> Question:
        """What gives it a piece."""
        return "/weights/put", message

    def loading(self, path: str, version: int, timeout_s: float) -> list[Question]:
        """What has it load the safetensors in the folder `path`, and label them."""
        return [("/weights", {"path": path, "version": version})]

    def _fields(self, asked: Asked, stop_ids: Sequence[int]) -> dict[str, Any]:
        """The place in training, from which the randomness derives; its model knows the stop tokens."""
        place = {name: getattr(asked, name) for name in ("step", "group_id", "sample", "offset")}
        return {"seed": asked.seed, "quatrain": {**place, "n": asked.sampling.n}}


class Vllm(Quatrain):
    """vLLM, in its development mode, which has the paths that change weights."""

    name = "vLLM"
    routes_by = "--enable-return-routed-experts"
    kept_by = "start a vLLM of August 2026 or newer with --enable-scale-out and --return-sampling-mask"
    version_path = "/weight_info"
    pause = ("/pause?mode=keep", {})
    takes_adapters = False
    takes_tiles = False
    sees_by = (
        "start a vLLM of August 2026 or newer (`content_parts`) with --enable-scale-out, with the model that "
        "is trained, and with sizes of pictures as here (--mm-processor-kwargs, data.image_max_pixels)"
    )
    checks = (
        (("/weight_info", None), *NO_DEV_MODE),
        (("/resume", {}), *NO_DEV_MODE),
        (
            ("/collective_rpc", {"method": "quatrain_extension"}),
            "it has no worker extension that loads weights",
            "start vLLM with --worker-extension-cls quatrain.servers.vllm_extension.Reload and with "
            "quatrain's package in its PYTHONPATH",
        ),
    )

    def request(self, asked: Asked, stop_ids: Sequence[int]) -> Question:
        """As `Quatrain.request`; by its interface of ids with pictures, as completions take none, and for
        the words that tokens are drawn from, which they do not return."""
        if asked.pictures is None and (isinstance(asked.prompt, str) or not asked.sampling.num_kept):
            return super().request(asked, stop_ids)
        fields = self._fields(asked, stop_ids)
        salt = {"cache_salt": fields.pop("cache_salt")}
        parameters = {
            "max_tokens": asked.sampling.max_new_tokens,
            "top_k": asked.sampling.top_k,
            **_common(asked.sampling),
            "logprobs": 0,
            **fields,
        }
        return self._with_content(asked.tokens, parameters, **salt)

    def read(self, value: Any) -> ServerAnswer:
        """As `Quatrain.read`; of both interfaces."""
        choice = dict(value["choices"][0])
        content = dict(choice.get("logprobs") or {}).get("content")
        if content is None:
            return super().read(value)
        ids, usage = value.get("prompt_token_ids"), value.get("usage")
        return ServerAnswer(
            choice["token_ids"],
            [entry["logprob"] for entry in content],
            str(choice["finish_reason"]),
            int(usage["prompt_tokens"]) if ids is None else ids,
            routes=choice.get("routed_experts"),
            cached=_cached(usage),
            kept=choice.get("sampling_mask"),
        )

    def look_request(self, prompt: Tokens) -> Question:
        """As `Quatrain.look_request`."""
        return self._with_content(prompt, {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0})

    def read_look(self, answer: Any, last: Sequence[int]) -> list[float]:
        """As `Quatrain.read_look`, from an object by token id for each token."""
        places = answer["prompt_logprobs"][-len(last) :]
        return [float(place[str(token)]["logprob"]) for place, token in zip(places, last, strict=True)]

    def _with_content(self, prompt: Tokens, parameters: dict[str, Any], **fields: Any) -> Question:
        ids, urls = (prompt.ids, []) if prompt.pictures is None else contracted(prompt)
        return "/inference/v1/generate", {
            "model": self.model,
            "token_ids": ids,
            "content_parts": [{"type": "image_url", "url": url} for url in urls],
            "sampling_params": parameters,
            "return_token_ids": True,
            **fields,
        }

    def _fields(self, asked: Asked, stop_ids: Sequence[int]) -> dict[str, Any]:
        """A seed for each sequence; and no block of the prefix cache of another version is used."""
        return {
            "seed": seed_of(asked),
            # The run's own: the folder that vLLM serves may name others, or none.
            "stop_token_ids": list(stop_ids),
            "cache_salt": f"quatrain {asked.version}",
            "skip_special_tokens": True,
        }

    def begin(self, pieces: Pieces) -> Question:
        """As `Quatrain.begin`, of its workers."""
        _, body = super().begin(pieces)
        return "/collective_rpc", {"method": "begin_quatrain_weights", "kwargs": body}

    def read_begun(self, answer: Any) -> tuple[str, str, list[str | None]]:
        """As `Quatrain.read_begun`, of its first worker: others of its machine have none."""
        return super().read_begun(answer["results"][0])

    def put(self, message: bytes) -> Question:
        """As `Quatrain.put`, in JSON."""
        body = {"message": base64.b64encode(message).decode()}
        return "/collective_rpc", {"method": "put_quatrain_weights", "kwargs": body}

    def loading(self, path: str, version: int, timeout_s: float) -> list[Question]:
        """The label comes last: after a load that fails half way, the old one says to load again."""
        body = {"method": "load_quatrain_weights", "kwargs": {"path": path}, "timeout": timeout_s}
        label = {"new_version": str(version)}
        # Without the resets, prompts that it had computed would go on with keys and values of old weights,
        # and pictures that it had seen with features of an old tower.
        resets: list[Question] = [("/reset_prefix_cache", {}), ("/reset_encoder_cache", {})]
        return [("/collective_rpc", body), *resets, ("/update_weight_version", label)]


class Sglang:
    """SGLang, by its own interface of ids."""

    name = "SGLang"
    routes_by = "--enable-return-routed-experts"
    kept_by = "install an SGLang of July 2026 or newer"
    version_path = "/get_model_info"
    # Sequences in flight wait and go on with the new weights. By its default they would end, and with
    # `in_place` their cached keys and values, which are of the old weights, could not be forgotten.
    pause: Question = ("/pause_generation", {"mode": "retract"})
    resume: Question = ("/continue_generation", {})
    takes_adapters = False
    takes_tiles = False
    sees_by = (
        "start an SGLang of June 2026 or newer, without SGLANG_MM_AVOID_RETOKENIZE=0, with the model that is "
        "trained, and with sizes of pictures as here (data.image_max_pixels)"
    )
    checks: tuple[Check, ...] = (
        (
            (version_path, None),
            "it does not label its weights with a version (weight_version in /get_model_info)",
            "install a newer SGLang",
        ),
        (resume, "it cannot pause and go on, which new weights need", "install a newer SGLang"),
    )

    def __init__(self, model: str):
        """Its requests name no model."""

    def request(self, asked: Asked, stop_ids: Sequence[int]) -> Question:
        """As `Quatrain.request`; for the probe a text."""
        parameters = {
            "max_new_tokens": asked.sampling.max_new_tokens,
            "top_k": asked.sampling.top_k or -1,  # 0 is refused there
            **_common(asked.sampling),
            "stop_token_ids": list(stop_ids),
            "sampling_seed": seed_of(asked),
            "no_stop_trim": True,  # the token that ends a completion is trained on too
        }
        prompt = asked.prompt if asked.pictures is None else asked.tokens
        body = _generate(prompt, parameters)
        return "/generate", {**body, **_routes_wanted(asked), **_kept_wanted(asked)}

    def read(self, value: Any) -> ServerAnswer:
        """As `Quatrain.read`."""
        meta = value["meta_info"]
        pairs = [(entry[1], entry[0]) for entry in meta["output_token_logprobs"]]
        return ServerAnswer(
            [token for token, _ in pairs],
            [logprob for _, logprob in pairs],
            str(meta["finish_reason"]["type"]),
            int(meta["prompt_tokens"]),
            _of_spans(meta.get("weight_versions"), len(pairs)),
            meta.get("routed_experts"),
            int(meta.get("cached_tokens") or 0),
            meta.get("output_token_sampling_mask"),
        )

    def score_request(self, prompt: Sequence[Any], num_words: int) -> Question:
        """As `Quatrain.score_request`."""
        flags = {"logprob_start_len": 0, "top_logprobs_num": num_words}
        return "/generate", {**_generate(prompt, {"max_new_tokens": 1, "temperature": 1.0}), **flags}

    def look_request(self, prompt: Tokens) -> Question:
        """As `Quatrain.look_request`."""
        return self.score_request(prompt, 0)

    def read_look(self, answer: Any, last: Sequence[int]) -> list[float]:
        """As `Quatrain.read_look`; in the places of pictures are ids of its own."""
        return [float(entry[0]) for entry in answer["meta_info"]["input_token_logprobs"][-len(last) :]]

    def read_scores(self, answer: Any, prompt: Sequence[Any], num_words: int) -> PromptScores:
        """As `Quatrain.read_scores`, from lists of [log-probability, token id, text]."""
        meta = answer["meta_info"]
        logprobs = [math.nan, *(float(entry[0]) for entry in meta["input_token_logprobs"][1:])]
        if not num_words:
            return logprobs, []
        words: list[Pairs] = [
            [(int(entry[1]), float(entry[0])) for entry in place or ()]
            for place in meta["input_top_logprobs"]
        ]
        # vLLM lists the token itself among the words; here it is added, so that both mean the same.
        for pairs, token, value in zip(words[1:], prompt[1:], logprobs[1:], strict=True):
            if token not in (word for word, _ in pairs):
                pairs.append((token, value))
        return logprobs, words

    def loading(self, path: str, version: int, timeout_s: float) -> list[Question]:
        """As `Quatrain.loading`; cached keys and values are forgotten."""
        # Labelled with the load, in one question: no answer can come between them.
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
        return [("/update_weights_from_disk", body)]


RECEIVERS = (Quatrain, Vllm)
"""The kinds that take weights over HTTP."""
ServerKind = Quatrain | Vllm | Sglang
KINDS: dict[str, type[ServerKind]] = {"quatrain": Quatrain, "vllm": Vllm, "sglang": Sglang}
"""By `owned_by` of the models in `/v1/models`, which each server fills with its own name."""


def seed_of(asked: Asked) -> int:
    """A seed that derives from the run's seed, the training step and the sequence alone."""
    # Without an offset of 0: the seeds of turns came later, and those of whole completions stay as they were.
    place = [asked.seed, asked.step, asked.group_id, asked.sample, *([asked.offset] if asked.offset else ())]
    digest = hashlib.sha256(json.dumps(place).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1  # SGLang keeps seeds in signed 32 bits


def contracted(prompt: Tokens) -> tuple[list[int], list[str]]:
    """(ids with one placeholder for each picture, the data URL of each) of a prompt with pictures.

    Raises Unfit if a token that stands for no picture has the id of placeholders, as a model may sample it:
    the server would expand it too.
    """
    ids, urls, end = list[int](), list[str](), 0
    assert prompt.pictures is not None
    runs = _runs(prompt.pictures)
    placeholders = {prompt.ids[start] for _, start, _ in runs}
    for picture, start, count in [*runs, (None, len(prompt.ids), 0)]:
        between = prompt.ids[end:start]
        if not placeholders.isdisjoint(between):
            raise Unfit(
                "a text beside pictures must not have the token that stands for one, which this server would "
                "take for another picture; a model seldom samples it; `quatrain serve` takes it as a text"
            )
        ids += between
        if picture is not None:
            ids.append(prompt.ids[start])
            urls.append(url_of(picture))
        end = start + count
    return ids, urls


def _runs(pictures: Pictures) -> list[tuple[Picture, int, int]]:
    """(a picture, the place of a first token, how many follow one another) in their order."""
    found, start = list[tuple[Picture, int, int]](), 0
    for number, run in groupby(pictures.ids.tolist()):
        count = len([*run])
        if number != TEXT:
            found.append((pictures.by_id[number], start, count))
        start += count
    return found


def _placed(pictures: Pictures | None) -> dict[str, Any]:
    """The field of quatrain's own requests: each picture once, and where its placeholders stand."""
    places = dict[Picture, list[list[int]]]()
    for picture, *place in () if pictures is None else _runs(pictures):
        places.setdefault(picture, []).append(place)
    return (
        {"pictures": [{"url": url_of(each), "places": at} for each, at in places.items()]} if places else {}
    )


def version_of(label: Any) -> int:
    """The version that a run has set as the label of weights; -1 for another label, as that of the start."""
    return int(label) if str(label).isdecimal() else -1


def _common(sampling: Sampling) -> dict[str, Any]:
    """The sampling parameters that all kinds of servers name alike."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        **NO_PENALTIES,
        "stop": list(sampling.stop),
    }


def _kept_wanted(asked: Asked) -> dict[str, bool]:
    """Asks for the words that tokens are drawn from, where these are recorded."""
    return {"return_sampling_mask": True} if asked.sampling.num_kept else {}


def _routes_wanted(asked: Asked) -> dict[str, bool]:
    # Only if they are: `quatrain serve` refuses to return what it does not record.
    return {"return_routed_experts": True} if asked.routes else {}


def _generate(prompt: Sequence[Any], parameters: dict[str, Any]) -> dict[str, Any]:
    """The JSON of SGLang's `/generate`, for a text, ids, or `Tokens` with pictures."""
    given: dict[str, Any] = {"text" if isinstance(prompt, str) else "input_ids": prompt}
    if isinstance(prompt, Tokens):
        given = dict(zip(("input_ids", "image_data"), contracted(prompt), strict=True))
    return {**given, "sampling_params": parameters, "return_logprob": True, "stream": False}


def _cached(usage: Any) -> int:
    details = dict(usage or {}).get("prompt_tokens_details")
    return int(dict(details or {}).get("cached_tokens") or 0)


def _of_spans(spans: Any, num_tokens: int) -> list[int] | None:
    """The version of each token by SGLang's `weight_versions`, a list of {version, start, end}.

    None before SGLang of August 2026 (its pull request 35926), whose only label is that of the last token.
    """
    if spans is None:
        return None
    parts = [(version_of(each["version"]), each["start"], min(each["end"], num_tokens)) for each in spans]
    return [version for version, start, end in parts for _ in range(start, end)]
