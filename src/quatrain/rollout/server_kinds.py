"""How each kind of inference server is asked: quatrain's own, vLLM and SGLang.

Data flow: `kind_of` finds the kind of a server; `HttpWorker` asks it by the paths and JSON that are made and
read here. Token ids go in and out, each with its log-probability; no text is encoded again.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from quatrain.config.secrets import SERVE_TOKEN
from quatrain.rollout.worker import WorkerLost, WorkerRefused
from quatrain.types.rollouts import Sampling
from quatrain.types.routes import routes_from_text

TOKEN = SERVE_TOKEN
UNAUTHORIZED = (401, 403)
"""Statuses with which a server refuses a token."""
DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
"""The environment in which vLLM has the paths that change weights."""
EXTENSION = "--worker-extension-cls quatrain.rollout.vllm_extension.Reload"
"""The option with which vLLM has the method that loads them."""
NO_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Leaves the distribution as it is. vLLM takes what is left out from the model's generation_config.json."""


class Answer(NamedTuple):
    """A sampled sequence: ids, a log-probability for each, and why it ended."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    prompt_tokens: list[int] | int | None = None
    """The ids of the prompt, or their number, if the server says so."""
    versions: list[int] | None = None
    """The version of each token's weights, if the server says so."""
    routes: Any = None
    """The experts of the tokens of prompt and completion but the last, if the server says so: an array of
    integers of any shape, token after token, or what could not be read."""


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


Call = Callable[..., Any]
"""`call(method, path, json, params=…, timeout_s=…)`: the JSON of an answer; raises WorkerLost, `Refusal`."""


class Refusal(Exception):
    """A server answered a request with a `status` of 400 to 499."""

    def __init__(self, status: int, message: str):
        super().__init__(f"status {status}, {message}")
        self.status = status


class ServerError(WorkerLost):
    """A server answered with status 500: it failed at what it was asked, or does not know it."""


class Quatrain:
    """`quatrain serve`; its tokens are those of an engine in process. `call` of each method blocks."""

    name = "quatrain"
    model_name = ""
    routes_by = "rollout.record_routes auto, and a model with experts"
    """What lets it return the experts of tokens."""

    def prepare(self, call: Call) -> None:
        """Checks that the server can be given weights, and lets it go on if it was left paused.

        Raises WorkerRefused, which says how to start it.
        """
        self._name_model(call)
        try:
            self.resume(call)
        except Refusal as refusal:
            raise WorkerRefused(
                f"it does not let this run change its weights: {refusal}; start it with {TOKEN} "
                "set, and this run with the same value"
            ) from refusal

    def request(self, asked: Asked, stop_ids: Sequence[int]) -> tuple[str, dict[str, Any]]:
        """(path, JSON) that ask for one sequence: a completion of ids, in OpenAI's form."""
        return "/v1/completions", {
            "model": self.model_name,
            "prompt": asked.prompt,
            "max_tokens": asked.sampling.max_new_tokens,
            "top_k": asked.sampling.top_k,
            **_common(asked.sampling),
            "logprobs": 0,
            "return_token_ids": True,
            **self._fields(asked, stop_ids),
        }

    def read(self, value: Any) -> Answer:
        """The answer to such a request; raises WorkerRefused if ids or log-probabilities are missing."""
        try:
            choice = dict(value["choices"][0])
            reason = str(choice["finish_reason"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise WorkerRefused(f"its answer is no completion: {shortened(value)}") from error
        tokens, named = choice.get("token_ids"), choice.get("logprobs")
        if not isinstance(tokens, list):
            raise WorkerRefused(
                "it returns text without token ids; text does not determine the ids that were sampled. "
                "Serve with `quatrain serve`, or vLLM 0.10.2 or newer, which return them"
            )
        logprobs = named.get("token_logprobs") if isinstance(named, dict) else None
        if not isinstance(logprobs, list):
            raise WorkerRefused(
                "it returns no log-probabilities, which were asked for with logprobs=0; let it return them "
                "(vLLM: --max-logprobs of at least 1)"
            )
        prompt_ids, routes = choice.get("prompt_token_ids"), choice.get("routed_experts")
        if isinstance(routes, str):
            with suppress(ValueError):
                routes = routes_from_text(routes)
        return Answer(tokens, logprobs, reason, prompt_ids, choice.get("weight_versions"), routes)

    def load(self, call: Call, path: str, version: int, timeout_s: float) -> None:
        """Has it load the safetensors in `path`; it goes on afterwards, also if this fails."""
        call("POST", "/weights", {"path": path, "version": version}, timeout_s=timeout_s)

    def version(self, call: Call) -> str:
        """The label of the weights that it has."""
        return str(call("GET", "/version")["weight_version"])

    def resume(self, call: Call) -> None:
        """Lets it go on; it may be asked although it is not paused."""
        call("POST", "/resume", {})

    def _name_model(self, call: Call) -> None:
        """Requests name the first model that the server lists."""
        self.model_name = str(call("GET", "/v1/models")["data"][0]["id"])

    def _fields(self, asked: Asked, stop_ids: Sequence[int]) -> dict[str, Any]:
        """The place in training, from which the randomness derives."""
        place = {
            "step": asked.step,
            "group_id": asked.group_id,
            "sample": asked.sample,
            "n": asked.sampling.n,
        }
        place |= {"offset": asked.offset} if asked.offset else {}
        routes = {"return_routed_experts": True} if asked.routes else {}
        return {"seed": asked.seed, "quatrain": place, **routes}


class Vllm(Quatrain):
    """vLLM, in its development mode, which has the paths that change weights."""

    name = "vLLM"
    routes_by = "--enable-return-routed-experts"

    def _fields(self, asked: Asked, stop_ids: Sequence[int]) -> dict[str, Any]:
        """A seed for each sequence; and no block of the prefix cache of another version is used."""
        return {
            "seed": seed_of(asked),
            "stop_token_ids": list(stop_ids),
            "cache_salt": f"quatrain {asked.version}",
            "skip_special_tokens": True,
        }

    def prepare(self, call: Call) -> None:
        """The development mode is on, and the server has the worker extension."""
        self._name_model(call)
        try:
            call("GET", "/weight_info")
            self.resume(call)
        except Refusal as refusal:
            raise WorkerRefused(
                f"it has no way to change its weights ({refusal}); start vLLM with {DEV_MODE} in its "
                "environment, vLLM 0.32 or newer"
            ) from refusal
        try:
            call("POST", "/collective_rpc", {"method": "quatrain_extension"})
        except (Refusal, ServerError) as error:
            raise WorkerRefused(
                f"it has no worker extension that loads weights ({error}); start vLLM with {EXTENSION} and "
                "with quatrain's package in its PYTHONPATH"
            ) from error

    def load(self, call: Call, path: str, version: int, timeout_s: float) -> None:
        """Pauses, loads in place, forgets cached keys and values, labels, and goes on."""
        with _paused(call, "/pause", self.resume, params={"mode": "keep"}):
            body = {"method": "load_quatrain_weights", "kwargs": {"path": path}, "timeout": timeout_s}
            call("POST", "/collective_rpc", body, timeout_s=timeout_s)
            call("POST", "/reset_prefix_cache", {}, timeout_s=timeout_s)
            call("POST", "/update_weight_version", {"new_version": str(version)})

    def version(self, call: Call) -> str:
        """The label that `load` set."""
        return str(call("GET", "/weight_info")["weight_version"])


class Sglang:
    """SGLang, by its own interface of ids."""

    name = "SGLang"
    routes_by = "--enable-return-routed-experts"
    _info = "/get_model_info"

    def request(self, asked: Asked, stop_ids: Sequence[int]) -> tuple[str, dict[str, Any]]:
        """Ids, or for the probe a text."""
        prompt = {"text" if isinstance(asked.prompt, str) else "input_ids": asked.prompt}
        parameters = {
            "max_new_tokens": asked.sampling.max_new_tokens,
            "top_k": asked.sampling.top_k or -1,
            **_common(asked.sampling),
            "stop_token_ids": list(stop_ids),
            "sampling_seed": seed_of(asked),
            "no_stop_trim": True,
        }
        wanted = {"return_routed_experts": True} if asked.routes else {}
        flags = {"return_logprob": True, "stream": False, **wanted}
        return "/generate", {**prompt, "sampling_params": parameters, **flags}

    def read(self, value: Any) -> Answer:
        """Ids and log-probabilities are pairs."""
        try:
            meta = value["meta_info"]
            reason = str(meta["finish_reason"]["type"])
            prompt_tokens = int(meta["prompt_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise WorkerRefused(f"its answer is none of SGLang's: {shortened(value)}") from error
        pairs = meta.get("output_token_logprobs")
        if not isinstance(pairs, list) or not all(isinstance(p, list) and len(p) > 1 for p in pairs):
            raise WorkerRefused(
                "it returns no log-probabilities with token ids, which were asked for with return_logprob"
            )
        logprobs, tokens = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        label = str(meta.get("weight_version", ""))
        versions = [int(label)] * len(tokens) if label.isdecimal() else None
        routes = meta.get("routed_experts")
        if isinstance(routes, str):  # int32 numbers, token after token
            with suppress(ValueError):
                routes = np.frombuffer(base64.b64decode(routes, validate=True), "<i4")
        return Answer(tokens, logprobs, reason, prompt_tokens, versions, routes)

    def resume(self, call: Call) -> None:
        """It has another path for it than the others."""
        call("POST", "/continue_generation", {})

    def prepare(self, call: Call) -> None:
        """It labels its weights, and goes on if it was left paused."""
        if "weight_version" not in call("GET", self._info):
            raise WorkerRefused(
                "it does not label its weights with a version (weight_version in /get_model_info); install a "
                "newer SGLang"
            )
        try:
            self.resume(call)
        except Refusal as refusal:
            raise WorkerRefused(
                f"it cannot pause and go on ({refusal}), which new weights need; install a newer SGLang"
            ) from refusal

    def load(self, call: Call, path: str, version: int, timeout_s: float) -> None:
        """Pauses, loads, forgets cached keys and values, and goes on."""
        with _paused(call, "/pause_generation", self.resume):
            body = {"model_path": path, "weight_version": str(version), "flush_cache": True}
            answer = call("POST", "/update_weights_from_disk", body, timeout_s=timeout_s)
            if not answer.get("success"):
                raise WorkerLost(f"it could not load {path}: {answer.get('message')}")

    def version(self, call: Call) -> str:
        """The label that `load` set."""
        return str(call("GET", self._info)["weight_version"])


ServerKind = Quatrain | Vllm | Sglang


def kind_of(call: Call) -> ServerKind:
    """The kind of the server that `call` asks; raises WorkerRefused if it is none of the three."""
    version = _asked(call, "/version")
    if isinstance(version, dict) and version.get("engine") == "quatrain":
        return Quatrain()
    if isinstance(version, dict) and "version" in version:
        return Vllm()
    info = _asked(call, "/get_model_info")
    if isinstance(info, dict) and "model_path" in info:
        return Sglang()
    raise WorkerRefused(
        "it is no server of `quatrain serve`, vLLM or SGLang: it answers neither /version nor "
        "/get_model_info as these do; correct the address in rollout.servers, which ends before /v1"
    )


def _common(sampling: Sampling) -> dict[str, Any]:
    """The sampling parameters that all kinds of servers name alike."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        **NO_PENALTIES,
        "stop": list(sampling.stop),
    }


def seed_of(asked: Asked) -> int:
    """A seed that derives from the run's seed, the training step and the sequence alone."""
    place = [asked.seed, asked.step, asked.group_id, asked.sample, *([asked.offset] if asked.offset else ())]
    digest = hashlib.sha256(json.dumps(place).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def shortened(value: Any) -> str:
    """The beginning of an answer, for a message."""
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 200 else f"{text[:200]}…"


def _asked(call: Call, path: str) -> Any:
    """The answer of a path that a server need not have; None if it does not.

    Raises WorkerRefused if the server asks for another token.
    """
    try:
        return call("GET", path)
    except Refusal as refusal:
        if refusal.status in UNAUTHORIZED:
            raise WorkerRefused(
                f"it asks for a token, and the one that it got is not that: {refusal}; set {TOKEN} here to "
                "the value with which the server was started"
            ) from refusal
        return None


@contextmanager
def _paused(
    call: Call, pause: str, resume: Callable[[Call], None], params: Mapping[str, str] | None = None
) -> Iterator[None]:
    """The server samples nothing within the block, and goes on after it, also after an error."""
    call("POST", pause, {}, params=params)
    try:
        yield
    finally:
        resume(call)
