"""A sampler of the user's: the class `rollout.sampler`, made and checked.

Data flow: `path.py:Class` -> `own_sampler` -> `Rollouts`, which ask it as they ask the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from quatrain.config.errors import listed
from quatrain.config.schema import Config
from quatrain.data.policy import Policy
from quatrain.types.metrics import Metric, Metrics
from quatrain.types.sampler import Listener, Progress, Request, Sampler, Work
from quatrain.workers.user_code import find_function, parameters_of


def users_sampler(config: Config, policy: Policy, spec: str) -> Sampler:
    """The sampler `spec` of this run; raises ValueError as `own_sampler`."""
    given = {
        "config": config,
        "tokenizer": policy.tokenizer,
        "stop_ids": policy.stop_ids,
        "arch": policy.arch,
    }
    return own_sampler(spec, given, policy.arch.vocab_size)


def own_sampler(spec: str, given: Mapping[str, Any], vocab_size: int) -> Sampler:
    """The sampler `spec`, made with those of the arguments `given` that it names.

    Raises ValueError if it cannot be imported, is no `quatrain.Sampler` with `start` and `load`, or needs
    other arguments.
    """
    name = f"rollout.sampler {spec}"
    form = find_function(spec, {}, "sampler")
    if not (isinstance(form, type) and issubclass(form, Sampler)):
        raise ValueError(f"{name} must be a class derived from quatrain.Sampler; got {form!r}; derive it")
    if missing := sorted(form.__abstractmethods__):
        raise ValueError(f"{name} must define {listed(missing)}; add the method")
    parameters = parameters_of(form) or []
    if others := [each for each, _, required in parameters if required and each not in given]:
        raise ValueError(
            f"{name} may need the arguments {listed(sorted(given))}; it needs {listed(others)} too; give "
            "them default values"
        )
    takes_all = any(kind == "VAR_KEYWORD" for _, kind, _ in parameters)
    named = {each for each, _, _ in parameters}
    return _Checked(form(**{k: v for k, v in given.items() if takes_all or k in named}), name, vocab_size)


class _Checked(Sampler):
    """`own`, whose turns are checked before they come to a batch: the trainer would train on anything."""

    def __init__(self, own: Sampler, name: str, vocab_size: int):
        self._own, self._name, self._vocab_size = own, name, vocab_size
        self._completions = self._tokens = 0

    @property
    def error(self) -> str | None:  # type: ignore[override]
        """As the user's."""
        return self._own.error

    @property
    def failure(self) -> Exception | None:  # type: ignore[override]
        """As the user's."""
        return self._own.failure

    @property
    def cannot_see(self) -> str | None:  # type: ignore[override]
        """As the user's."""
        return self._own.cannot_see

    @property
    def cannot_constrain(self) -> str | None:  # type: ignore[override]
        """As the user's."""
        return self._own.cannot_constrain

    def check_grammar(self, grammar: str) -> None:
        """As the user's."""
        self._own.check_grammar(grammar)

    @property
    def exchanges_in_flight(self) -> bool:
        """As the user's."""
        return self._own.exchanges_in_flight

    def start(self, requests: Sequence[Request], listener: Listener) -> Future[list[int]]:
        """As the user's; a turn that breaks a rule has an error."""
        rooms = [each.sampling.max_new_tokens for each in requests for _ in range(each.sampling.n)]
        limits, refused = [*rooms], set[int]()

        def listen(number: int, progress: Progress) -> None:
            if number in refused:
                return
            problem = self._problem(progress, limits[number])
            limits[number] -= len(progress.piece.tokens)
            if limits[number] == rooms[number] and progress.finish_reason is not None:
                problem = problem or (
                    "a turn has at least one token, that which ends it if there is no other; got none at its "
                    "end; give the stop token too, or an `error`"
                )
            if problem is not None:
                refused.add(number)
            self._tokens += len(progress.piece.tokens)
            self._completions += progress.finish_reason is not None
            listener(number, progress if problem is None else Progress(error=f"{self._name}: {problem}"))

        keys = self._own.start(requests, listen)
        if not isinstance(keys, Future):
            raise ValueError(
                f"{self._name}: start must return a concurrent.futures.Future with a key for each request; "
                f"got {keys!r}; return one"
            )
        return keys

    def copy_weights(self, params: Any) -> Any:
        """As the user's."""
        return self._own.copy_weights(params)

    def load(self, weights: Any, version: int) -> None:
        """As the user's; the version is noted."""
        self._own.load(weights, version)
        self.version = version

    def drop(self, keys: Sequence[int]) -> None:
        """As the user's."""
        self._own.drop(keys)

    def forget(self, session: str) -> None:
        """As the user's."""
        self._own.forget(session)

    def work(self) -> Work:
        """What it has sampled so far."""
        return Work(self._completions, self._tokens)

    def work_since(self, before: Work, seconds: float) -> Metrics:
        """Tokens in a second, and what the user's measures."""
        rate = Metric(self._tokens - before.tokens, seconds)
        return {"rollout/tokens_per_s": rate, **self._own.work_since(before, seconds)}

    def release(self) -> None:
        """As the user's."""
        self._own.release()

    def close(self, timeout_s: float | None = None) -> Any:
        """As the user's."""
        return self._own.close(timeout_s)

    def _problem(self, progress: Progress, room: int) -> str | None:
        """What is wrong with the progress of a turn that has room for so many tokens; None: nothing."""
        tokens, logprobs, versions = progress.piece.tokens, progress.piece.logprobs, progress.piece.versions
        if not len(tokens) == len(logprobs) == len(versions):
            return (
                "each token needs a log-probability and a version; got "
                f"{len(tokens)} tokens, {len(logprobs)} and {len(versions)}"
            )
        if outside := [t for t in tokens if not 0 <= t < self._vocab_size]:
            return f"tokens must be ids from 0 to {self._vocab_size - 1}; got {outside[0]}"
        if given := [version for version in versions if version < 0]:
            return (
                "each token has the version of the weights that it was sampled from, as `load` got it, 0 or "
                f"more; got {given[0]}"
            )
        if wrong := [p for p in logprobs if not -math.inf < p <= 1e-3]:
            return f"log-probabilities must be finite, in nats, and at most 0; got {wrong[0]}"
        if len(tokens) > room:
            return f"a turn has at most sampling.max_new_tokens tokens; got {len(tokens) - room} more"
        if progress.finish_reason not in (None, "stop", "length"):
            return f"finish_reason must be None, stop or length; got {progress.finish_reason!r}"
        return None
