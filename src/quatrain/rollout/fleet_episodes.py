"""Episodes with environments whose turns the workers of a fleet sample, for inference servers.

Data flow: prompts -> `FleetEpisodes.generate` -> a session of episodes (`environments/episodes.py`) over
`FleetTurns` -> a group of one sample for each turn -> `Fleet` -> the engine's `RolloutBatch`. Environments
are in this run's main process. Each turn computes its whole context, unless a server caches prefixes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from quatrain.cluster.processes import decided_by_main
from quatrain.engine.engine import Episodes
from quatrain.engine.groups import Group, PerRequestSampling
from quatrain.engine.session import EngineStats, TurnEnd
from quatrain.rollout.fleet import Fleet
from quatrain.rollout.group_table import GroupFailed
from quatrain.types.batches import Prompt, RolloutBatch
from quatrain.types.metrics import Metric
from quatrain.types.rollouts import (
    Completion,
    OnProgress,
    RolloutProgress,
    Rollouts,
    Sampling,
    rollout_batch,
)

LOOK_S = 0.05
"""Seconds that a session waits for the end of a turn before it looks for answers of environments."""


class FleetTurns:
    """The turns of a session of episodes, with the methods of `Session` that it calls.

    `goes_on` says whether the episode of a completion whose turn has ended may have another.
    """

    def __init__(self, fleet: Fleet, sampling: Sampling, seed: int, goes_on: Callable[[Completion], bool]):
        self.sampling, self.stats = sampling, EngineStats()
        self._fleet, self._seed, self._goes_on = fleet, seed, goes_on
        self._running: dict[int, tuple[int, int, Group]] = {}  # ticket, sample and group, by their numbers
        self._suspended: dict[int, Group] = {}
        self._ends: list[TurnEnd] = []
        self._tickets = 0

    @property
    def num_live(self) -> int:
        """Turns that are being sampled."""
        return len(self._running)

    @property
    def idle(self) -> bool:
        """Whether no turn is being sampled."""
        return not self._running

    def check_memory(self, prompts: Sequence[Prompt]) -> None:
        """Workers have caches of their own."""

    def submit_groups(self, groups: Sequence[Group]) -> tuple[int, ...]:
        """Begins the first turns of the samples of each group; a ticket for each group."""
        tickets = tuple(self._ticket() for _ in groups)
        for ticket, group in zip(tickets, groups, strict=True):
            self._begin(ticket, group)
        return tickets

    def resume(self, suspended: int, tokens: Sequence[int], limit: int) -> None:
        """The suspended sample goes on after `tokens`; its completion may have `limit` sampled tokens."""
        group = self._suspended.pop(suspended)
        group.begin_turn(tokens, limit)
        self._begin(suspended, group)

    def drop(self, suspended: int) -> None:
        """Forget a suspended sample, whose episode has ended."""
        del self._suspended[suspended]

    def take_ends(self) -> list[TurnEnd]:
        """The turns that have ended since this was last called."""
        ends, self._ends = self._ends, []
        return ends

    def advance(self, params: Any, version: int) -> None:
        """Takes the turns that have ended; waits a little for one."""
        for number, turn in decided_by_main(partial(self._finished, list(self._running))):
            ticket, sample, group = self._running.pop(number)
            completion, done = group.completions[sample], Completion(**turn)
            completion.append(done, 0)
            completion.finish_reason = done.finish_reason
            sampled = self.stats.decoded_tokens + len(done.tokens)
            self.stats = replace(self.stats, decoded_tokens=sampled)
            suspended = None
            if self._goes_on(completion):
                suspended = self._ticket()
                self._suspended[suspended] = group.suspended(sample)
            self._ends.append(TurnEnd(ticket, sample, completion, suspended))

    def close(self) -> None:
        """Forget the turns that are being sampled."""
        self._fleet.cancel_own(list(self._running))
        self._running.clear()

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _begin(self, ticket: int, group: Group) -> None:
        """Asks for the next turn of each sample of a group."""
        prompts, owners = [], []
        for index, sequence_id in enumerate(group.sequence_ids(self.sampling.n)):
            sampling = replace(self.sampling, n=1, max_new_tokens=group.left(index))
            owners.append(PerRequestSampling(sampling, self._seed, group.step, sequence_id, group.position))
            prompts.append(Prompt(0, group.context, group.prompt.text))
        for sample, number in enumerate(self._fleet.submit_own(prompts, owners)):
            self._running[number] = ticket, sample, group

    def _finished(self, numbers: Sequence[int]) -> list[tuple[int, Any]]:
        """The turns that have ended, as values that JSON has."""
        finished = self._fleet.take_own(numbers, LOOK_S)
        if failed := next((group.error for _, group in finished if group.error is not None), None):
            raise GroupFailed(f"a turn of an episode was not sampled: {failed}")
        return [(number, vars(group.samples[0][1])) for number, group in finished]


class FleetEpisodes(Rollouts):
    """A rollout engine whose samples are episodes by `rules`, with turns sampled on `fleet`.

    Both belong to this from here on. `seed` is the seed of the run.
    """

    def __init__(
        self,
        fleet: Fleet,
        rules: Episodes,
        *,
        seed: int,
        tokenizer: Any,
        greedy_baseline: bool = False,
        on_progress: OnProgress | None = None,
    ):
        self.fleet, self.sampling = fleet, fleet.sampling
        self._rules, self._seed, self._tokenizer = rules, seed, tokenizer
        self.greedy_baseline, self._on_progress = greedy_baseline, on_progress

    def copy_weights(self, params: Any) -> Any:
        """As `Fleet.copy_weights`."""
        return self.fleet.copy_weights(params)

    def sync_weights(self, params: Any, version: int) -> None:
        """As `Fleet.sync_weights`, once the turns of a batch that an error has ended are over."""
        self.fleet.wait_until_idle()
        self.fleet.sync_weights(params, version)

    def submit(self, prompts: Sequence[Prompt], *, step: int = 0, sampling: Sampling | None = None) -> Any:
        """Remembers `prompts` for `wait`."""
        return partial(self._played, prompts, step, sampling or self.sampling)

    def wait(self, ticket: Any) -> RolloutBatch:
        """The batch of the episodes of `ticket`."""
        batch: RolloutBatch = ticket()
        return batch

    def release(self) -> None:
        """Nothing to free: the workers' memory is their own."""

    def close(self) -> None:
        """Ends the environments and the workers."""
        self._rules.close()
        self.fleet.close()

    def _played(self, prompts: Sequence[Prompt], step: int, sampling: Sampling) -> RolloutBatch:
        began = time.perf_counter()
        turns: list[FleetTurns] = []

        def make_turns(goes_on: Callable[[Completion], bool]) -> FleetTurns:
            turns.append(FleetTurns(self.fleet, sampling, self._seed, goes_on))
            return turns[0]

        with closing(self._rules.session(make_turns)) as session:
            tickets = session.submit(prompts, step)
            while not session.finished(tickets):
                session.advance(None, 0)
                self._report(session.stats, len(prompts) * sampling.n, session.num_live, began)
            samples, metrics = session.take(tickets)
        seconds = time.perf_counter() - began
        tokens = sum(completion.num_sampled for _, completion in samples)
        timings = {
            "rollout/tokens_per_s": Metric(tokens, seconds),
            "time/rollout_generate_s": Metric(seconds, reduction="sum"),
        }
        return rollout_batch(samples, self._tokenizer, {**self.fleet.work_metrics(), **metrics, **timings})

    def _report(self, stats: EngineStats, total: int, running: int, began: float) -> None:
        if self._on_progress is not None:
            rate = stats.decoded_tokens / max(time.perf_counter() - began, 1e-9)
            self._on_progress(RolloutProgress(stats.completions, total, rate, running))
