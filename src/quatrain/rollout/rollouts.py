"""Line 1 of a training step: prompts in, a batch of finished episodes out, whoever plays and samples them.

Data flow: list of `Prompt` -> `Rollouts.submit` -> a `Player` (one turn, an environment, an agent) asks the
`Sampler` (the engine, workers, servers) for turns -> `Rollouts.wait` -> `RolloutBatch`.

With several processes, all call the same methods in the same order and get the same batches. Where a sampler
or a player is in the main process alone, that plays, and the others get what came of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quatrain.cluster.processes import decided_by_main, is_main_process, num_processes
from quatrain.parallel.compilations import num_compilations
from quatrain.types.batches import ENVIRONMENTS, EPISODE_COLUMNS, Prompt, RolloutBatch
from quatrain.types.kept import KEPT, KeptRow, kept_of_plain, plain_kept
from quatrain.types.metrics import Metric, Metrics
from quatrain.types.pictures import PICTURES, Pictures, pictures_of_plain, plain_pictures
from quatrain.types.player import Player, Playing, Row
from quatrain.types.rollouts import Completion, OnProgress, RolloutProgress, Sampling, rollout_batch
from quatrain.types.sampler import AtOnce, Request, Sampler, ServiceFailed, Work, sampled


@dataclass(frozen=True)
class SingleTurns(Player):
    """Each episode is one turn of the policy after the prompt; `at_once` bounds how many are sampled.

    With a `grammar`, which the sampler must follow, each turn has a sampling of its own, of the run's `seed`.
    """

    at_once: AtOnce | None = None
    grammar: str | None = None
    seed: int = 0
    is_everywhere: bool = True

    def begin(self, prompts: Sequence[Prompt], step: int, sampling: Sampling, sampler: Sampler) -> Playing:
        """Asks for all samples of each prompt together, which then share its keys and values."""
        requests = [Request(prompt, step, sampling) for prompt in prompts]
        if self.grammar is not None:
            requests = [self._grammatical(one) for each in requests for one in each.singly(self.seed)]
        turns = sampled(sampler, requests) if self.at_once is None else self.at_once.sampled(requests)
        return _Turns([prompt for prompt in prompts for _ in range(sampling.n)], turns)

    def _grammatical(self, request: Request) -> Request:
        assert request.own is not None
        return replace(request, own=replace(request.own, grammar=self.grammar))


@dataclass
class _Turns(Playing):
    prompts: Sequence[Prompt]
    futures: Sequence[Future[Completion]]

    def rows(self) -> Sequence[Sequence[Row]]:
        pairs = zip(self.prompts, self.futures, strict=True)
        return [[(prompt, future.result())] for prompt, future in pairs]


@dataclass(eq=False)
class Ticket:
    """Prompts that were submitted together: their episodes, and when they began."""

    prompts: Sequence[Prompt]
    playing: Playing | None
    """None where the main process plays, in the others."""
    total: int
    began: float
    work: Work
    """What the sampler had done before."""
    compilations: int
    """Programs that had been compiled before."""
    taken: bool = False

    @property
    def futures(self) -> Sequence[Future[Any]]:
        """Those of the episodes that this process plays."""
        return () if self.playing is None else self.playing.futures


@dataclass(eq=False)
class Rollouts:
    """Samples the batches of training and evaluation: `player` plays their episodes on `sampler`.

    Both belong to this from here on. `sampling` are the parameters of training, the default of `generate` and
    `submit`. With `greedy_baseline`, `generate` plays a greedy episode of each prompt of training beside its
    samples. `on_progress` is called with the progress of a call, in its thread.
    """

    sampler: Sampler
    tokenizer: Any
    sampling: Sampling
    player: Player = field(default_factory=SingleTurns)
    greedy_baseline: bool = False
    on_progress: OnProgress | None = None
    on_weights: Callable[[Any], None] = lambda params: None
    """Called with the parameters that are sampled from, each time that they change."""

    def __post_init__(self) -> None:
        self._last = 0.0, self.sampler.work()
        """When the last batch ended, and what the sampler had done then."""
        if self.player.pause is not None:
            self.sampler.wait_before_rounds(self.player.pause)

    @property
    def _plays(self) -> bool:
        """Whether this process plays, and gets rows of its own."""
        return self._everywhere or is_main_process()

    @property
    def _everywhere(self) -> bool:
        return num_processes() == 1 or (self.sampler.is_everywhere and self.player.is_everywhere)

    def copy_weights(self, params: Any) -> Any:
        """`params` as the sampler takes them, as a copy that training does not overwrite.

        `sync_weights` takes the result without another copy.
        """
        return self.sampler.copy_weights(params)

    def sync_weights(self, params: Any, version: int) -> None:
        """Sample from `params` from now on; tokens sampled from them are recorded with `version`.

        Other parameters have another version.
        """
        self.sampler.load(params, version)
        self.on_weights(params)

    def generate(
        self, prompts: Sequence[Prompt], *, step: int = 0, sampling: Sampling | None = None
    ) -> RolloutBatch:
        """A batch of `sampling.n` episodes per prompt: prompts in order, samples of a prompt adjacent.

        `step` is the training step that the randomness is derived from. Without `sampling`, and with
        `greedy_baseline`, the batch has a greedy episode of each prompt as its `baseline`. An empty list
        of prompts returns an empty batch.
        """
        batch = self.wait(self.submit(prompts, step=step, sampling=sampling))
        if sampling is None and self.greedy_baseline:
            greedy = replace(self.sampling, n=1, temperature=0.0)
            batch = replace(batch, baseline=self.wait(self.submit(prompts, step=step, sampling=greedy)))
        return batch

    def generate_each(
        self, batches: Sequence[Sequence[Prompt]], *, sampling: Sampling, at_once: int
    ) -> Iterator[RolloutBatch]:
        """What `generate` returns for each of `batches`, in order.

        At most `at_once` completions are sampled at the same time, of whatever batch. Episodes of several
        turns begin when those of the batch before have ended.
        """
        if not isinstance(self.player, SingleTurns):
            # Their episodes hold environments or programs, of which few are to exist at a time.
            yield from (self.wait(self.submit(prompts, sampling=sampling)) for prompts in batches)
            return
        few = replace(self.player, at_once=AtOnce(self.sampler, at_once))
        tickets = [self._submit(prompts, 0, sampling, few) for prompts in batches]
        yield from map(self.wait, tickets)

    def submit(self, prompts: Sequence[Prompt], *, step: int = 0, sampling: Sampling | None = None) -> Ticket:
        """Begin the episodes of `prompts`; `wait` returns their batch for the ticket that this returns."""
        return self._submit(prompts, step, sampling or self.sampling, self.player)

    def _submit(self, prompts: Sequence[Prompt], step: int, sampling: Sampling, player: Player) -> Ticket:
        now, work, compilations = time.perf_counter(), self.sampler.work(), num_compilations()
        playing = player.begin(prompts, step, sampling, self.sampler) if self._plays else None
        return Ticket(prompts, playing, len(prompts) * sampling.n, now, work, compilations)

    def wait(self, ticket: Ticket) -> RolloutBatch:
        """The batch of the episodes of `ticket`, once all have ended; what is in flight goes on meanwhile.

        Raises ValueError for a ticket that was waited for before, and for one whose prompts do not fit, and
        RuntimeError if the sampler fails or is closed.
        """
        if ticket.taken:
            raise ValueError("a ticket can be waited for once; this one was; submit its prompts again")
        ticket.taken = True
        if self._plays or self.sampler.is_everywhere:
            self.sampler.advance_until(ticket.futures, lambda: self._report(ticket))
        rows, metrics = self._finished(ticket) if self._everywhere else self._shared(ticket)
        assembling = time.perf_counter()
        several = self.player.has_rows
        batch = rollout_batch(
            [row for each in rows for row in each],
            self.tokenizer,
            metrics,
            episodes=[number for number, each in enumerate(rows) for _ in each] if several else None,
        )
        flushed = Metric(time.perf_counter() - assembling, reduction="sum")
        return replace(batch, metrics={**batch.metrics, "time/rollout_flush_s": flushed})

    def release(self) -> None:
        """Free the memory of the weights until the next `sync_weights`; nothing may be in flight."""
        self.sampler.release()

    def close(self) -> None:
        """End the player and the sampler; what is in flight gets an error."""
        self.player.close()
        self.sampler.close()

    def _finished(self, ticket: Ticket) -> tuple[Sequence[Sequence[Row]], Metrics]:
        """The rows of each episode, all of which have ended, and metrics of the batch."""
        playing = ticket.playing
        assert playing is not None
        if self.sampler.error is not None:  # which players may take for a fault of their own
            raise self.sampler.failure or ServiceFailed(self.sampler.error)
        for future in ticket.futures:
            future.result()
        rows, now = playing.rows(), time.perf_counter()
        began, before = max(self._last, (ticket.began, ticket.work), key=lambda each: each[0])
        worked = self.sampler.work_since(before, now - began)
        self._last = now, self.sampler.work()
        compiled = Metric(num_compilations() - ticket.compilations, reduction="sum")
        generated = Metric(now - began, reduction="sum")
        timings = {"time/rollout_generate_s": generated, "rollout/compilations": compiled}
        return rows, {**worked, **timings, **playing.metrics()}

    def _shared(self, ticket: Ticket) -> tuple[Sequence[Sequence[Row]], Metrics]:
        """`_finished` of the main process, in all."""

        own: tuple[Sequence[Sequence[Row]], Metrics] = (), {}
        given = {prompt.group_id: prompt for prompt in ticket.prompts}

        def of_main() -> dict[str, Any]:
            nonlocal own
            own = rows, metrics = self._finished(ticket)
            return {
                "rows": [[_plain(given[row[0].group_id], *row) for row in each] for each in rows],
                "metrics": {name: [m.value, m.count, m.reduction] for name, m in metrics.items()},
            }

        told = decided_by_main(of_main)
        if is_main_process():  # whose rows may have objects of this process: environments
            return own
        rows = [[_row(given[row["group"]], row) for row in each] for each in told["rows"]]
        return rows, {name: Metric(*each) for name, each in told["metrics"].items()}

    def _report(self, ticket: Ticket) -> None:
        if self.on_progress is None or ticket.playing is None:
            return
        began, before = max(self._last, (ticket.began, ticket.work), key=lambda each: each[0])
        work = self.sampler.work()
        rate = (work.tokens - before.tokens) / max(time.perf_counter() - began, 1e-9)
        ended = ticket.playing.num_ended
        self.on_progress(RolloutProgress(ended, ticket.total, rate, work.running))


def _plain(prompt: Prompt, returned: Prompt, completion: Completion) -> dict[str, Any]:
    """A row as values that JSON has, and arrays; of its prompt, what the episode changed."""
    before = prompt.columns
    columns = {
        name: value
        for name, value in returned.columns.items()
        if name != ENVIRONMENTS
        and (name not in before or (name in EPISODE_COLUMNS and value != before[name]))
    }
    others = {name: parts for name, parts in completion.columns.items() if name not in (PICTURES, KEPT)}
    later, opening = completion.columns.get(PICTURES), returned.pictures
    return {
        "ids": returned.input_ids.tolist(),
        "columns": columns,
        "completion": {**vars(completion), "columns": others},
        "group": returned.group_id,
        # Those of the data every process has; those that an environment or an agent brought none has yet.
        "opening": None if _alike(opening, prompt.pictures) else [plain_pictures(opening)],
        "kept": plain_kept(KeptRow.of(completion.columns[KEPT])) if KEPT in completion.columns else None,
        "later": None if later is None else plain_pictures(Pictures.of(np.concatenate(later))),
    }


def _row(prompt: Prompt, plain: dict[str, Any]) -> Row:
    """The inverse of `_plain`."""
    ids, columns = np.array(plain["ids"], np.int32), {**prompt.columns, **plain["columns"]}
    opening, later = plain["opening"], pictures_of_plain(plain["later"])
    pictures = prompt.pictures if opening is None else pictures_of_plain(opening[0])
    completion = Completion(**plain["completion"])
    if later is not None:
        completion.columns[PICTURES] = [later.per_token()]
    if plain["kept"] is not None:
        completion.columns[KEPT] = [kept_of_plain(plain["kept"]).column]
    return replace(prompt, input_ids=ids, columns=columns, pictures=pictures), completion


def _alike(some: Pictures | None, others: Pictures | None) -> bool:
    """Whether both say the same of each token."""
    if some is None or others is None:
        return some is others
    return np.array_equal(some.ids, others.ids)
