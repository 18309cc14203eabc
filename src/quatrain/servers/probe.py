"""Whether an inference server can serve a run, found by asking it, and the server that can.

Data flow: a `Client` -> `Server.probed` -> a `Server`, whose answers are checked, for `HttpWorker`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quatrain.config.secrets import SERVE_TOKEN
from quatrain.ops.logprobs import LOWEST
from quatrain.servers.client import Client, Refusal, ServerError, ServerLost, Unfit, shortened
from quatrain.servers.kinds import KINDS, Answer, Asked, ServerKind, version_of
from quatrain.servers.routes import RouteRules
from quatrain.types.rollouts import Sampling

PROBE_TEXT = "The quick brown fox jumps over the lazy dog. 12 + 34 = 46"
PROBE_TOKENS = 8
PROBE_TEMPERATURE = 0.01
"""Then the likeliest token is nearly certain, which unprocessed log-probabilities do not show."""
PROBE_GAP = 0.02
UNAUTHORIZED = (401, 403)
"""Statuses with which a server refuses a token."""

UP_TO_V1 = "give the address of the server itself, up to /v1, as http://host:8000"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerRules:
    """What the servers of a run have in common: tokenizer, stop tokens, seed, and training's sampling."""

    tokenizer: Any
    stop_ids: Sequence[int]
    vocab_size: int
    seed: int
    sampling: Sampling
    routes: RouteRules | None = None
    """The routes of experts that are to be recorded, if any are."""
    needs_routes: bool = False
    """Whether a server that returns none cannot serve the run (`update.router_aux_coef`)."""
    needs_versions: bool = False
    """Whether one cannot that does not say which version sampled each token (`rollout.in_flight`)."""
    warning: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
    """Held from the warning about the first server without routes on: a run has one, however many start."""


class Server:
    """A server that its probe found to suit a run by `rules`. Methods raise as `Client.ask` does."""

    labels_versions = False
    """Whether its answers say which version of the weights sampled each token."""

    def __init__(self, client: Client, kind: ServerKind, rules: ServerRules):
        self._client, self._kind, self._rules = client, kind, rules
        self._routes = rules.routes
        """Those of its answers; None if it has none."""

    @classmethod
    async def probed(cls, client: Client, rules: ServerRules) -> Server:
        """The server that `client` asks.

        Raises Unfit, with the remedy, if it is of no known kind, takes no weights, has another vocabulary,
        log-probabilities of another kind, or not the versions or routes that the run needs.
        """
        owner, model, _ = await described(client.ask)
        if owner not in KINDS:
            raise Unfit(
                "it is no server of `quatrain serve`, vLLM or SGLang: by /v1/models its model is owned by "
                f"{owner!r}; give the address of such a server"
            )
        kind = KINDS[owner](model)
        client.name = f"{kind.name} at {client.address}"
        for (path, body), lacks, remedy in kind.checks:
            try:
                answer = await client.ask(path, body)
                if path != kind.version_path or "weight_version" in answer:
                    continue
                why = ""
            except (Refusal, ServerError) as error:  # of another status, it may be starting
                why = f" ({error})"
            raise Unfit(f"{lacks}{why}; {remedy}")
        server = cls(client, kind, rules)
        await server._probe()
        return server

    async def load(self, path: str, version: int, timeout_s: float) -> int:
        """Has it load the folder `path`; the version that it says it has then. It goes on, whatever fails."""
        kind, ask = self._kind, self._client.ask
        if kind.pause is not None:
            await ask(*kind.pause)
        try:
            for question in kind.loading(path, version, timeout_s):
                answer = await ask(*question, timeout_s=timeout_s)
                if isinstance(answer, dict) and answer.get("success") is False:
                    raise ServerLost(f"it could not load {path}: {answer.get('message')}")
        finally:
            if kind.pause is not None:
                await self.resume()
        return await self.version()

    async def resume(self, timeout_s: float | None = None) -> None:
        """Lets it go on, if it is paused for a load."""
        await self._client.ask(*self._kind.resume, timeout_s=timeout_s)

    async def version(self) -> int:
        """The version of the weights that it has; raises ServerLost if they are of no run."""
        label = (await self._client.ask(self._kind.version_path))["weight_version"]
        if (version := version_of(label)) < 0:
            raise ServerLost(f"it has weights that this run did not load: their label is {label!r}")
        return version

    async def sample(self, asked: Asked, *, session: str = "") -> Answer:
        """One sequence, with the run's routes, if it has them; raises Unfit if it cannot be trained on."""
        asked = asked._replace(routes=self._routes is not None)
        answer = await self._answer(asked, self._rules.stop_ids, math.inf, session)
        if self.labels_versions or answer.versions is not None:
            self._check_versions(answer)
        if self._routes is None:
            return answer._replace(routes=None)
        return answer._replace(routes=self._read_routes(asked, answer))

    async def _answer(self, asked: Asked, stop_ids: Sequence[int], timeout_s: float, session: str) -> Answer:
        question = self._kind.request(asked, stop_ids)
        value = await self._client.ask(*question, timeout_s=timeout_s, session=session)
        try:
            answer = self._kind.read(value)
        except (LookupError, TypeError, ValueError) as error:
            raise Unfit(f"its answer is no completion of {self._kind.name}: {shortened(value)}") from error
        self._check(answer, asked.sampling)
        return answer

    async def _probe(self) -> None:
        rules = self._rules
        ids = rules.tokenizer.encode(PROBE_TEXT)
        sampling = Sampling(n=1, max_new_tokens=PROBE_TOKENS)
        asked = Asked(PROBE_TEXT, sampling, rules.seed, 0, 0, 0, 0)
        answer = await self._probed(asked)
        seen = answer.prompt_tokens
        # Some kinds tell the number of ids alone: by chance equal for two tokenizers, but rarely.
        same = seen == ids if isinstance(seen, list) else seen in (None, len(ids))
        if not same:
            raise Unfit(
                f"its tokenizer must be that of training: the text {PROBE_TEXT!r} has the ids "
                f"{shortened(ids)} here and {shortened(seen)} there; serve the model that is trained"
            )
        # By its own answer, not by its kind: a server of an older release may not label them yet.
        self.labels_versions = answer.versions is not None
        if rules.needs_versions and not self.labels_versions:
            raise Unfit(
                "it must say which version of the weights sampled each token, for rollout.in_flight, and its "
                "answers do not; use `quatrain serve`, or an SGLang whose answers have weight_versions, or "
                "set rollout.in_flight to false"
            )
        await self._probe_routes(asked._replace(prompt=ids, routes=rules.routes is not None))
        if rules.sampling.temperature == 1:  # raw and processed ones are the same there
            return
        cold = Sampling(n=1, max_new_tokens=PROBE_TOKENS, temperature=PROBE_TEMPERATURE)
        answer = await self._probed(asked._replace(prompt=ids, sampling=cold))
        median = float(np.median(answer.logprobs))
        if median < -PROBE_GAP:
            raise Unfit(
                "its log-probabilities must be those of the distribution that tokens are drawn from, after "
                f"temperature and filters: at temperature {PROBE_TEMPERATURE:g} their median is "
                f"{median:.2f}, where about 0 is expected; start vLLM with --logprobs-mode "
                "processed_logprobs, or set rollout.temperature to 1"
            )

    async def _probe_routes(self, asked: Asked) -> None:
        """Warns, once in a run, if routes are to be recorded, and none come with the tokens of `asked`."""
        why = ""
        try:
            answer = await self._probed(asked)
        except Refusal as refusal:
            if not asked.routes:
                raise
            # `quatrain serve` refuses to return what it does not record; without routes it may serve.
            answer, why = await self._probed(asked._replace(routes=False)), f" ({refusal})"
        if self._routes is None:
            return
        if answer.routes is not None:
            self._read_routes(asked, answer)
            return
        if self._rules.needs_routes:
            raise Unfit(
                f"it must return the experts of each token for update.router_aux_coef; got none{why}; start "
                f"it with {self._kind.routes_by}, or set update.router_aux_coef to 0"
            )
        if self._rules.warning.acquire(blocking=False):
            logger.warning(
                "%s returns no routes of experts%s, so that the update chooses them anew: %s; start it with "
                "%s, or set rollout.record_routes to false (said once, of the first such server)",
                *(self._client.name, why, self._routes.gap, self._kind.routes_by),
            )
        self._routes = None

    async def _probed(self, asked: Asked) -> Answer:
        # As long as a load may take: the first answer of a server may compile.
        return await self._answer(asked, (), self._client.timeout_s, "")

    def _read_routes(self, asked: Asked, answer: Answer) -> np.ndarray:
        assert self._routes is not None, "asked for"
        return self._routes.read(answer.routes, len(asked.prompt) + len(answer.tokens) - 1)

    def _check(self, answer: Answer, sampling: Sampling) -> None:
        """Raises Unfit for an answer that cannot be trained on, and ServerLost for one cut short."""
        tokens, logprobs = answer.tokens, answer.logprobs
        if answer.finish_reason not in ("stop", "length"):
            raise ServerLost(f"a request ended with {answer.finish_reason!r}")
        if not isinstance(tokens, list):
            raise Unfit(
                "it returns text without token ids; text does not determine the ids that were sampled. "
                "Serve with `quatrain serve`, or vLLM 0.10.2 or newer, which return them"
            )
        if not isinstance(logprobs, list):
            raise Unfit(
                "it returns no log-probabilities, which were asked for; let it return them (vLLM: "
                "--max-logprobs of at least 1)"
            )
        # Kept in float32, in which lower ones would be infinite; rounding may put one just above 0.
        numbers = all(type(value) in (int, float) and LOWEST <= value <= 1e-3 for value in logprobs)
        if len(logprobs) != len(tokens) or not numbers:
            raise Unfit(
                f"it must return a log-probability for each token, each a number of at most 0; got "
                f"{len(tokens)} tokens and {shortened(logprobs)}"
            )
        ids = all(type(token) is int and 0 <= token < self._rules.vocab_size for token in tokens)
        if not ids or not 1 <= len(tokens) <= sampling.max_new_tokens:
            raise Unfit(
                f"it must return 1 to {sampling.max_new_tokens} token ids, each below the vocabulary's size "
                f"of {self._rules.vocab_size}; got {shortened(tokens)}"
            )

    def _check_versions(self, answer: Answer) -> None:
        """Raises Unfit unless each token has the version of a run's weights; not of those of the probe."""
        versions, tokens = answer.versions, answer.tokens
        if (
            not isinstance(versions, list)
            or not all(type(each) is int and each >= 0 for each in versions)
            or len(versions) != len(tokens)
        ):
            raise Unfit(
                f"it must return the version of each token's weights, a number from 0; got {len(tokens)} "
                f"tokens and {shortened(versions)}"
            )


async def described(ask: Callable[[str], Awaitable[Any]]) -> tuple[str, str, int]:
    """(who owns a server's first model, that one's name, tokens of its longest sequence).

    Raises Unfit if the server that `ask` asks has not OpenAI's interface.
    """
    try:
        listed = await ask("/v1/models")
    except Refusal as refusal:
        if refusal.status in UNAUTHORIZED:
            raise Unfit(
                f"it asks for a token, and the one that it got is not that: {refusal}; set {SERVE_TOKEN} "
                "here to the value with which the server was started"
            ) from refusal
        raise Unfit(f"/v1/models must name its model: {refusal}; {UP_TO_V1}") from refusal
    try:
        model = listed["data"][0]
        longest = int(model.get("max_model_len") or 2**31) - 1
        return str(model.get("owned_by", "")), str(model["id"]), longest
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise Unfit(f"/v1/models must name its model: it answered {shortened(listed)}; {UP_TO_V1}") from error
