"""Whether an inference server can serve a run, found by asking it, and the server that can.

Data flow: a `ServerClient` -> `Server.probed` -> a `Server`, whose answers are checked, for `HttpWorker`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from quatrain.config.secrets import SERVE_TOKEN
from quatrain.ops.logprobs import LOWEST
from quatrain.servers.client import (
    Refusal,
    ServerClient,
    ServerError,
    ServerLost,
    Unfit,
    all_of,
    shortened,
)
from quatrain.servers.expert_routes import RouteRules
from quatrain.servers.kinds import KINDS, RECEIVERS, Asked, ServerAnswer, ServerKind, version_of
from quatrain.servers.pieces import Pieces
from quatrain.types.kept import all_words
from quatrain.types.pictures import Tokens
from quatrain.types.rollouts import Sampling

PROBE_TEXT = "The quick brown fox jumps over the lazy dog. 12 + 34 = 46"
PROBE_TOKENS = 8
PROBE_TEMPERATURE = 0.01
"""Then the likeliest token is nearly certain, which unprocessed log-probabilities do not show."""
PROBE_GAP = 0.02
SAME_LOOK = 1e-4
"""Largest mean difference, in nats, of the log-probabilities of a text behind one picture and another, for a
server that ignores them; twice the difference of two answers to the same question is added."""
PIECES_AT_ONCE = 4
"""Pieces of weights that are on their way to a server at the same time."""
UNAUTHORIZED = (401, 403)
"""Statuses with which a server refuses a token."""

logger = logging.getLogger(__name__)


class Looks(NamedTuple):
    """Two prompts with the same ids, and other pictures: what follows these in both is a fixed text."""

    one: Tokens
    other: Tokens
    tiled: bool
    """Whether pictures are cut into tiles."""


NO_KEPT = "it must return the words that each token was drawn from, as rollout.top_p, top_k or min_p filter"
RECORD_NOTHING = "or set rollout.replay_mask to false"


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
    needs_receiver: bool = False
    """Whether one cannot that takes no weights over HTTP (`rollout.stream_weights`)."""
    looks: Looks | str = "this run has no pictures"
    """Prompts with pictures, by which it is found whether a server sees; or why none gets pictures."""
    warning: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
    """Held from the warning about the first server without routes on: a run has one, however many start."""


class Server:
    """A server that its probe found to suit a run by `rules`. Methods raise as `ServerClient.ask` does."""

    labels_versions = False
    """Whether its answers say which version of the weights sampled each token."""
    cannot_see: str | None = None
    """Why it gets no prompts with pictures; None: it sees them."""

    def __init__(self, client: ServerClient, kind: ServerKind, rules: ServerRules):
        self._client, self._kind, self._rules = client, kind, rules
        self._routes = rules.routes
        """Those of its answers; None if it has none."""

    @property
    def takes_adapters(self) -> bool:
        """As of its kind."""
        return self._kind.takes_adapters

    @classmethod
    async def probed(cls, client: ServerClient, rules: ServerRules) -> Server:
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
        if rules.needs_receiver and not isinstance(kind, RECEIVERS):
            raise Unfit(
                f"it must take weights over HTTP for rollout.stream_weights; {kind.name} loads them from "
                "folders alone; set rollout.stream_weights to false, and rollout.weights_dir to a folder "
                "that it can read"
            )
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
        server.cannot_see = await server._probe_pictures()
        return server

    async def load(self, weights: str | Pieces, version: int, timeout_s: float) -> int:
        """Has it load a folder, which it is sent if it is one of `Pieces`; the version that it says it has
        then. It goes on, whatever fails."""
        kind, ask = self._kind, self._client.ask
        # Sent before it is paused: it samples meanwhile.
        path = weights if isinstance(weights, str) else await self.send(weights, timeout_s)
        if kind.pause is not None:
            await ask(*kind.pause)
        try:
            for question in kind.loading(path, version, timeout_s):
                answer = await ask(*question, timeout_s=timeout_s)
                if isinstance(answer, dict) and answer.get("success") is False:
                    raise ServerLost(f"it could not load {path}: {answer.get('message')}")
        finally:  # a server that stays paused would hold the next run up too
            if kind.pause is not None:
                await self.resume()
        # Its own word: behind one address may be a proxy with several servers, of which one has loaded.
        return await self.version()

    async def send(self, pieces: Pieces, timeout_s: float) -> str:
        """Sends it the pieces that it has not; the path of the folder that it has then.

        Raises Unfit, with its own words, if it refuses them: it has no room, or they come out wrong.
        """
        try:
            return await self._sent(pieces, timeout_s)
        except Refusal as error:
            raise Unfit(f"it must take the weights of this run, and refused them: {error}") from error

    async def _sent(self, pieces: Pieces, timeout_s: float) -> str:
        kind, ask = self._kind, self._client.ask
        assert isinstance(kind, RECEIVERS)
        begun = await ask(*kind.begin(pieces), timeout_s=timeout_s)
        try:
            stream, path, digests = kind.read_begun(begun)
            known = dict(zip(range(len(pieces.each)), digests, strict=True))
        except (LookupError, TypeError, ValueError) as error:
            raise Unfit(
                f"it must answer what it has of the weights; it answered {shortened(begun)}"
            ) from error
        at_once = asyncio.Semaphore(PIECES_AT_ONCE)

        async def send(number: int) -> None:
            async with at_once:
                message = await asyncio.to_thread(pieces.message, stream, number, known[number])
                if message is None:
                    return
                try:
                    await ask(*kind.put(message), timeout_s=timeout_s)
                except (Refusal, ServerError):  # vLLM answers with status 500 where its worker refuses
                    if known[number] is None:
                        raise
                    # What it had was not what it said, as if its memory were damaged: once more, whole.
                    whole = await asyncio.to_thread(pieces.message, stream, number, None)
                    assert whole is not None
                    await ask(*kind.put(whole), timeout_s=timeout_s)

        await all_of(map(send, known))
        return path

    async def resume(self, timeout_s: float | None = None) -> None:
        """Lets it go on, if it is paused for a load."""
        await self._client.ask(*self._kind.resume, timeout_s=timeout_s)

    async def version(self) -> int:
        """The version of the weights that it has; raises ServerLost if they are of no run."""
        label = (await self._client.ask(self._kind.version_path))["weight_version"]
        if (version := version_of(label)) < 0:
            raise ServerLost(f"it has weights that this run did not load: their label is {label!r}")
        return version

    async def sample(self, asked: Asked, *, session: str = "") -> ServerAnswer:
        """One sequence, with the run's routes, if it has them; raises Unfit if it cannot be trained on."""
        if asked.pictures is not None and self.cannot_see is not None:
            raise Unfit(self.cannot_see)
        asked = asked._replace(routes=self._routes is not None)
        answer = await self._answer(asked, trained=True, session=session)
        return answer._replace(routes=self._read_routes(asked, answer))

    async def _answer(self, asked: Asked, *, trained: bool = False, session: str = "") -> ServerAnswer:
        """A checked answer; one of the probe, which is not `trained` on, may be of weights of no run."""
        question = self._kind.request(asked, self._rules.stop_ids if trained else ())
        # A sample may wait in the server's queue. The first answer of a server may compile.
        timeout_s = math.inf if trained else self._client.timeout_s
        value = await self._client.ask(*question, timeout_s=timeout_s, session=session)
        try:
            answer = self._kind.read(value)
        except (LookupError, TypeError, ValueError) as error:
            raise Unfit(f"its answer is no completion of {self._kind.name}: {shortened(value)}") from error
        if most := asked.sampling.num_kept:
            answer = answer._replace(kept=self._read_kept(answer, most))
        labelled = self.labels_versions or answer.versions is not None
        self._check(answer, asked.sampling.max_new_tokens, versions=trained and labelled)
        if asked.pictures is not None and answer.prompt_tokens not in (asked.prompt, len(asked.prompt)):
            theirs = answer.prompt_tokens
            raise Unfit(
                "a prompt with pictures must have the same tokens there as here, where it has "
                f"{len(asked.prompt)}; it has {len(theirs) if isinstance(theirs, list) else theirs} there; "
                + self._kind.sees_by
            )
        return answer

    async def _probe(self) -> None:
        rules = self._rules
        ids = rules.tokenizer.encode(PROBE_TEXT)
        # A vLLM that returns the words that tokens are drawn from takes no request that does not bound them.
        most = rules.sampling.num_kept
        sampling = Sampling(n=1, max_new_tokens=PROBE_TOKENS, top_k=most)
        # A text: ids that the run sends would be taken by a server with any tokenizer of that size.
        asked = Asked(PROBE_TEXT, sampling, rules.seed, 0, 0, 0, 0)
        answer = await self._answer(asked)
        seen = answer.prompt_tokens
        # SGLang tells their number alone, which may be the same for another tokenizer, but rarely is.
        if seen not in (ids, len(ids), None):
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
        if most:
            filtered = replace(rules.sampling, n=1, max_new_tokens=PROBE_TOKENS, stop=())
            try:  # raises Unfit if it returns none
                await self._answer(asked._replace(prompt=ids, sampling=filtered))
            except Refusal as refusal:
                raise Unfit(f"{NO_KEPT}: {refusal}; {self._kind.kept_by}, {RECORD_NOTHING}") from refusal
        if rules.sampling.temperature == 1:  # raw and processed ones are the same there
            return
        cold = replace(sampling, temperature=PROBE_TEMPERATURE)
        answer = await self._answer(asked._replace(prompt=ids, sampling=cold))
        # The median, because a nearly even choice among the likeliest may stand in one place.
        median = float(np.median(answer.logprobs))
        if median < -PROBE_GAP:
            raise Unfit(
                "its log-probabilities must be those of the distribution that tokens are drawn from, after "
                f"temperature and filters: at temperature {PROBE_TEMPERATURE:g} their median is "
                f"{median:.2f}, where about 0 is expected; start vLLM with --logprobs-mode "
                "processed_logprobs, or set rollout.temperature to 1"
            )

    async def _probe_pictures(self) -> str | None:
        """Why it gets no pictures (`cannot_see`); whether it computes what the trainer does comes later."""
        looks, kind = self._rules.looks, self._kind
        if isinstance(looks, str):
            return looks
        if looks.tiled and not kind.takes_tiles:
            return (
                f"{self._client.name} would expand placeholders itself, and those of tiles have "
                "words between them, which may become other tokens there; sample with `quatrain serve`, or "
                "on devices of this run"
            )
        try:
            one, again, other = [await self._look(each) for each in (looks.one, looks.one, looks.other)]
        except (Refusal, ServerError, AttributeError, LookupError, TypeError, ValueError) as error:
            why = f"it must take pictures: {shortened(f'{type(error).__name__}: {error}')}"
            return f"{self._client.name} does not see: {why}; {kind.sees_by}"
        noise, gap = (float(np.abs(np.subtract(each, one)).mean()) for each in (again, other))
        if not gap > SAME_LOOK + 2 * noise:
            return (
                f"{self._client.name} does not see: the log-probabilities of a text must depend on the "
                f"picture before it; with another one they differ by {gap:.2g} nats; {kind.sees_by}"
            )
        return None

    async def _look(self, prompt: Tokens) -> list[float]:
        """Log-probabilities of the text behind the picture of a prompt, whose length is compared."""
        sampling = Sampling(n=1, max_new_tokens=1)
        await self._answer(
            Asked(prompt.ids, sampling, self._rules.seed, 0, 0, 0, 0, pictures=prompt.pictures)
        )
        assert prompt.pictures is not None
        last = prompt.ids[int(np.flatnonzero(prompt.pictures.ids)[-1]) + 1 :]
        answer = await self._client.ask(*self._kind.look_request(prompt), timeout_s=self._client.timeout_s)
        found = self._kind.read_look(answer, last)
        if not _are(found, (float,), LOWEST, 1e-3) or len(found) != len(last):
            raise Unfit(f"a text of {len(last)} tokens must have as many log-probabilities; got {found}")
        return found

    async def _probe_routes(self, asked: Asked) -> None:
        """Warns, once in a run, if routes are to be recorded, and none come with the tokens of `asked`."""
        why = ""
        try:
            answer = await self._answer(asked)
        except Refusal as refusal:
            if not asked.routes:
                raise
            # `quatrain serve` refuses to return what it does not record; without routes it may serve.
            answer, why = await self._answer(asked._replace(routes=False)), f" ({refusal})"
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
        self._routes = None  # no longer asked for: each answer would be refused for its want of them

    def _read_kept(self, answer: ServerAnswer, most: int) -> np.ndarray:
        """[tokens] object: a row of the column KEPT for each token; raises Unfit for anything else."""
        sets, tokens, size = answer.kept, answer.tokens, self._rules.vocab_size
        if sets is None:
            raise Unfit(f"{NO_KEPT}; it returns none; {self._kind.kept_by}, {RECORD_NOTHING}")
        are_sets = isinstance(sets, list) and isinstance(tokens, list) and len(sets) == len(tokens)
        if not are_sets or not all(
            _are(words, (int,), 0, size - 1) and len({*words}) == len(words) <= most and token in words
            for words, token in zip(sets, tokens, strict=True)
        ):
            raise Unfit(
                f"it must return 1 to {most} different words below {size} for each token, with the token "
                f"among them; got {shortened(sets)}"
            )
        rows = all_words(len(sets))
        rows[:] = [np.array(words, np.int32) for words in sets]
        return rows

    def _read_routes(self, asked: Asked, answer: ServerAnswer) -> np.ndarray | None:
        if self._routes is None:
            return None
        return self._routes.read(answer.routes, len(asked.prompt) + len(answer.tokens) - 1)

    def _check(self, answer: ServerAnswer, most: int, *, versions: bool) -> None:
        """Raises Unfit for an answer that cannot be trained on, and ServerLost for one cut short."""
        tokens, logprobs, size = answer.tokens, answer.logprobs, self._rules.vocab_size
        if answer.finish_reason not in ("stop", "length"):
            raise ServerLost(f"a request ended with {answer.finish_reason!r}")
        if not _are(tokens, (int,), 0, size - 1) or not 1 <= len(tokens) <= most:
            raise Unfit(
                f"it must return 1 to {most} token ids, each below the vocabulary's size of {size}, because "
                f"text does not determine the ids that were sampled; got {shortened(tokens)}"
            )
        # Kept in float32, in which lower ones would be infinite; rounding may put one just above 0.
        if not _are(logprobs, (int, float), LOWEST, 1e-3) or len(logprobs) != len(tokens):
            raise Unfit(
                "it must return a log-probability for each token, each a number of at most 0 (vLLM: with "
                f"--max-logprobs of at least 1); got {len(tokens)} tokens and {shortened(logprobs)}"
            )
        if versions and (
            not _are(answer.versions, (int,), 0, math.inf) or len(answer.versions) != len(tokens)
        ):
            raise Unfit(
                f"it must return the version of each token's weights, a number from 0; got {len(tokens)} "
                f"tokens and {shortened(answer.versions)}"
            )


def _are(values: Any, kinds: tuple[type, ...], low: float, high: float) -> bool:
    """Whether `values` are a list of numbers of `kinds`, from `low` to `high`; no truth values, no NaN."""
    return isinstance(values, list) and all(type(x) in kinds and low <= x <= high for x in values)


async def described(ask: Callable[[str], Awaitable[Any]]) -> tuple[str, str, int]:
    """(who owns a server's first model, that one's name, its most tokens beside one that is sampled).

    Raises Unfit if the server that `ask` asks has not OpenAI's interface.
    """
    listed: Any = None
    try:
        listed = await ask("/v1/models")
        model = listed["data"][0]
        longest = int(model.get("max_model_len") or 2**31) - 1
        return str(model.get("owned_by", "")), str(model["id"]), longest
    except Refusal as refusal:
        if refusal.status in UNAUTHORIZED:
            raise Unfit(
                f"it asks for a token, and the one that it got is not that: {refusal}; set {SERVE_TOKEN} "
                "here to the value with which the server was started"
            ) from refusal
        why = str(refusal)
    except Unfit:
        raise  # the client's own: its host has no address
    except (AttributeError, LookupError, TypeError, ValueError):
        why = f"it answered {shortened(listed)}"
    raise Unfit(
        f"/v1/models must name its model: {why}; give the address of the server itself, up to /v1, as "
        "http://host:8000"
    )
