"""Rollouts by agents: each sample is an episode that a user's program plays, asking the policy over HTTP.

Data flow: prompts -> `AgentPlayer.begin` -> a session (`serve/sessions.py`) and a call of an agent's process
(`agent_processes.py`) for each sample -> the trees of turns -> the rows of a `RolloutBatch`. One thread has
the HTTP server, the processes and the episodes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import uvicorn

from quatrain.data.messages import as_messages, is_picture, with_picture_parts
from quatrain.data.pictures import IMAGES, url_of, url_part
from quatrain.episodes.agent_processes import CLOSED, AgentProcesses, Played
from quatrain.episodes.child import Client
from quatrain.serve.api import Api
from quatrain.serve.sessions import MOST_ROLES, Session, SessionRules, Sessions, is_role
from quatrain.serve.turn_tree import Row
from quatrain.types.batches import AGENT_ROLE, AGENT_SEQUENCE, Prompt
from quatrain.types.kept import KEPT, all_words
from quatrain.types.metrics import Metric, Metrics, describe
from quatrain.types.pictures import Picture
from quatrain.types.piece import Piece
from quatrain.types.player import Player, Playing
from quatrain.types.rollouts import Completion, Sampling
from quatrain.types.sampler import Sampler
from quatrain.workers.faults import Fault as AgentFault
from quatrain.workers.loop_thread import LoopThread, settle

logger = logging.getLogger(__name__)

MOST_PLAYED = 2
"""How often an episode is begun whose process dies."""
ADDRESS = "127.0.0.1"
REFUSAL = "maximum context length"
"""What an agent's error says that met a limit of its requests."""
TAIL = 0.9
"""The share of the episodes after which the others hold up the batch."""


@dataclass(frozen=True)
class AgentRules:
    """How the agents of a run play.

    A sequence has at most `more_tokens` tokens beside those that may be sampled, and at most `longest`. At
    most `concurrency` episodes are played at a time; None: all.
    """

    agent: str
    args: Mapping[str, Any]
    num_workers: int
    concurrency: int | None
    timeout_s: float
    max_turns: int
    more_tokens: int
    longest: int
    seed: int
    python: str | None = None
    """The interpreter of the agents' processes; None: this one."""


@dataclass(frozen=True, eq=False)
class Part:
    """What one role played in an episode: its sequences, its reward, and the fault that ended the episode.

    Of `rows`, that with the path to the last request is the first.
    """

    session: Session
    rows: Sequence[Row]
    reward: float | None = None
    fault: AgentFault | None = None

    @property
    def finish_reason(self) -> str:
        """Why it ended: by a fault, by a limit of its requests, or as its last answer."""
        if self.fault is not None:
            return "timeout" if self.fault.kind == "timeout" else "error"
        if self.session.refused is not None:
            return self.session.refused
        return self.rows[0].path[-1].finish_reason if self.rows else "stop"

    def samples(self) -> list[tuple[Prompt, Completion]]:
        """Its sequences, in the order of `rows`, as samples of the prompt."""
        if not self.rows:  # it never asked
            return [(self._prompt(None), self._ended(Completion()))]
        return [(self._prompt(row), self._ended(_completion(row))) for row in self.rows]

    def _prompt(self, row: Row | None) -> Prompt:
        """The prompt of a sequence; None: of a role without an answer."""
        prompt, turns = self.session.prompt, self.session.tree.turns
        path = () if row is None else row.path
        columns = {
            **prompt.columns,
            "messages": list(path[-1].messages if path else ()) or as_messages(prompt.text),
            "turn_rewards": [],
            "environment_reward": self.reward,
            AGENT_ROLE: self.session.role,
            AGENT_SEQUENCE: {
                "answers": [
                    [len(turn.messages) - 1, turns.index(turn) + 1, row is not None and turn in row.owned]
                    for turn in path
                    if turn.messages
                ],
                "began": path[0].reason if path else None,
            },
        }
        if not path:
            return replace(prompt, columns=columns)
        ids, pictures = np.array(path[0].prompt_ids, np.int32), path[0].pictures
        return replace(prompt, input_ids=ids, columns=columns, pictures=pictures)

    def _ended(self, completion: Completion) -> Completion:
        completion.finish_reason = self.finish_reason
        return completion


@dataclass(eq=False)
class Episode:
    """A sample of a prompt that an agent plays."""

    prompt: Prompt
    sample: int
    rules: SessionRules
    session: Session | None = None
    played: Played = field(default_factory=Played)
    fault: AgentFault | None = None
    is_retried: bool = False
    parts: Sequence[Part] = ()
    """What is trained of it, once it has ended: by role, that without a name first."""
    num_untrained_roles: int = 0
    ended: float = 0.0
    """When it ended, by `time.perf_counter`."""

    def end(self) -> None:
        """Makes its parts; it has a fault if the rewards are those of other roles than asked."""
        assert self.session is not None
        asked = {each.role: each for each in self.session.every_role() if each.tree.turns}
        try:
            rewards = {} if self.fault is not None else self._rewards(asked)
        except AgentFault as fault:
            self.fault, rewards = fault, {}
        trained = {role: self.session.of_role(role) for role in rewards} or asked or {"": self.session}
        self.num_untrained_roles = len(asked.keys() - trained.keys())
        self.parts = [
            Part(trained[role], trained[role].tree.rows(), rewards.get(role), self.fault)
            for role in sorted(trained)
        ]
        self.ended = time.perf_counter()

    def _rewards(self, asked: Mapping[str, Session]) -> Mapping[str, float | None]:
        """The reward of each role that is trained."""
        assert self.session is not None
        returned = self.played.reward
        if not isinstance(returned, Mapping):
            return dict.fromkeys(asked or [""], returned)
        forgotten, silent = sorted(asked.keys() - returned.keys()), sorted(returned.keys() - asked.keys())
        wrong = [role for role in returned if role and not is_role(role)]
        if len({*self.session.roles, *returned} - {""}) > MOST_ROLES:
            raise AgentFault(
                f"an agent must return rewards of at most {MOST_ROLES} roles, those that asked among them; "
                f"it returned those of {len(returned)}; use fewer",
                "invalid",
            )
        if wrong or (forgotten and silent):
            raise AgentFault(
                f"an agent must return rewards of the roles that asked, {sorted(asked)} ('' is the client "
                f"itself); it returned those of {sorted(returned)}; one that it leaves out is not trained",
                "invalid",
            )
        return returned


class AgentPlayer(Player):
    """Plays episodes by agents, as `rules` say, who ask over HTTP for turns, which `sampler` samples.

    Of a prompt's episodes, each role is one of the batch, whose rows are adjacent. A batch has a ValueError
    if the agent cannot be loaded, and if the first episodes of all have faults only. `model` is what agents
    call the policy.
    """

    has_rows = True

    def __init__(
        self,
        sampler: Sampler,
        rules: AgentRules,
        *,
        tokenizer: Any,
        stop_ids: Sequence[int],
        model: str,
        vocab_size: int,
    ):
        self.rules, self._model, self._sampler = rules, model, sampler
        self._sessions = Sessions()
        self._thread = LoopThread("quatrain-agents", CLOSED, self._end)
        self._processes = AgentProcesses(
            rules.agent,
            rules.args,
            num_workers=rules.num_workers,
            timeout_s=rules.timeout_s,
            thread=self._thread,
            python=rules.python,
        )
        self._slots = None if rules.concurrency is None else asyncio.Semaphore(rules.concurrency)
        self._api = Api(
            sampler,
            tokenizer,
            model=model,
            vocab_size=vocab_size,
            max_positions=rules.longest,
            token=secrets.token_hex(16),  # none is told it: every request has the key of a session
            stop_ids=stop_ids,
            sessions=self._sessions,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._url: str | None = None
        self._listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self.has_played = False
        """Whether an episode has ended without a fault, or the run was told that none did."""

    def begin(
        self, prompts: Sequence[Prompt], step: int, sampling: Sampling, sampler: Sampler
    ) -> AgentEpisodes:
        """Begins the episodes, as many at a time as `rules` allow."""
        rules = self.rules
        max_tokens = min(rules.longest, rules.more_tokens + sampling.max_new_tokens)
        of_session = SessionRules(sampling, rules.seed, step, rules.max_turns, max_tokens)
        episodes = [Episode(prompt, i, of_session) for prompt in prompts for i in range(sampling.n)]
        futures: list[Future[None]] = [Future() for _ in episodes]
        for episode, future in zip(episodes, futures, strict=True):
            self._thread.do(self._begin, episode, future)
        return AgentEpisodes(self, episodes, futures)

    def close(self) -> None:
        """Ends the agents' processes and the server."""
        self._thread.close()
        self._listening.close()

    # In the thread:

    def _begin(self, episode: Episode, future: Future[None]) -> None:
        try:
            if self._url is None:
                self._url = self._serve()
        except OSError as error:
            return future.set_exception(error)
        task = self._thread.loop.create_task(self._play(episode))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task.add_done_callback(partial(settle, future, CLOSED))

    def _serve(self) -> str:
        """Begins to serve the policy on a free port of this machine; its address."""
        self._listening.bind((ADDRESS, 0))
        self._listening.listen(1024)
        settings = uvicorn.Config(
            self._api.app((ADDRESS, "localhost")), log_level="error", access_log=False, lifespan="off"
        )
        self._server = uvicorn.Server(settings)
        self._serving = self._thread.loop.create_task(self._server.serve(sockets=[self._listening]))
        return f"http://{ADDRESS}:{self._listening.getsockname()[1]}"

    async def _play(self, episode: Episode) -> None:
        """Plays an episode, when there is room for it."""
        if self._slots is None:
            return await self._played(episode)
        async with self._slots:
            return await self._played(episode)

    async def _played(self, episode: Episode) -> None:
        """Plays an episode; once more, in a process of its own, if its process dies."""
        for count in range(1, MOST_PLAYED + 1):
            session = episode.session = self._sessions.open(episode.rules, episode.prompt, episode.sample)
            episode.fault, episode.is_retried = None, count > 1
            try:
                episode.played = await self._processes.play(
                    self._client(session), _row(episode.prompt), alone=episode.is_retried
                )
            except AgentFault as fault:
                episode.fault = fault
                if fault.kind == "crash" and count < MOST_PLAYED:
                    continue
                limited = any(each.refused is not None for each in session.every_role())
                if limited and REFUSAL in f"{fault}\n{fault.detail}":
                    episode.fault, episode.played = None, Played(0.0)  # it left because a limit was met
            finally:
                await self._sessions.close(session)
                self._sampler.forget(session.id)
            break
        episode.end()

    def _client(self, session: Session) -> Client:
        rules, url = session.rules, f"{self._url}/s/{session.id}"
        place = f"{rules.seed}/{rules.step}/{session.prompt.group_id}/{session.sample}"
        return Client(
            base_url=f"{url}/v1",
            api_key=session.key,
            model=self._model,
            untrained_base_url=f"{url}/untrained/v1",
            seed=int.from_bytes(hashlib.blake2b(place.encode(), digest_size=4).digest()) >> 1,
            step=rules.step,
            sample=session.sample,
            greedy=rules.sampling.temperature == 0,
        )

    def _end(self) -> None:
        """Ends everything that lives in the thread, as its last work."""
        self._processes.end()
        loop, server = self._thread.loop, self._server
        for task in self._tasks:
            task.cancel()
        # What takes over a connection must have begun before its server is closed and it is cancelled: it
        # would leave the socket open.
        loop.run_until_complete(asyncio.sleep(0))
        for listening in getattr(server, "servers", ()):
            listening.close()
        for tasks in (lambda: self._tasks, lambda: asyncio.all_tasks(loop)):  # episodes first
            if left := set(tasks()):
                for task in left:
                    task.cancel()
                loop.run_until_complete(asyncio.wait(left))
            loop.run_until_complete(asyncio.sleep(0))
        # A connection is none of the tasks: who keeps one open would find it open after the server has ended.
        for connection in list(server.server_state.connections) if server else ():
            connection.transport.abort()
        loop.run_until_complete(asyncio.sleep(0))


class AgentEpisodes(Playing):
    """The episodes of a batch."""

    def __init__(self, player: AgentPlayer, episodes: Sequence[Episode], futures: Sequence[Future[None]]):
        self.player, self.episodes, self.futures = player, episodes, futures

    def rows(self) -> Sequence[Sequence[tuple[Prompt, Completion]]]:
        """Those of each part of an episode, which is one of the batch; warns of faults."""
        self._check_faults()
        return [part.samples() for episode in self.episodes for part in episode.parts]

    def metrics(self) -> Metrics:
        """Those of the episodes, and how long the last of them held up the batch."""
        ended = sorted(episode.ended for episode in self.episodes)
        tail = ended[-1] - ended[int(TAIL * (len(ended) - 1))] if ended else 0.0
        return {**_metrics(self.episodes), "time/agent_tail_s": Metric(tail, reduction="sum")}

    def _check_faults(self) -> None:
        """Warns of faults; raises ValueError if the first batch of the run has nothing else."""
        player, episodes = self.player, self.episodes
        faults = [episode.fault for episode in episodes if episode.fault is not None]
        if not faults:
            player.has_played |= bool(episodes)
            return
        first = f"{faults[0]}\n{faults[0].detail}".rstrip()
        if len(faults) == len(episodes) and not player.has_played:
            raise ValueError(f"every episode of {player.rules.agent} has a fault; the first: {first}")
        player.has_played = True
        text = "%d of %d episodes ended by a fault of their agent; the first: %s"
        logger.warning(text, len(faults), len(episodes), first)


def _completion(row: Row) -> Completion:
    """The tokens after the root's prompt; those of turns that another row owns count as given."""
    completion = Completion(turns=[])
    for turn in row.path:
        if turn.parent is None:
            completion.begin_turn([])
        else:
            completion.begin_turn(turn.given, turn.pictures)
        said = turn.sampled if turn in row.owned else Piece.given(turn.tokens, turn.sampled.columns)
        known = completion.known(KEPT)
        if KEPT in said.columns and known < turn.first_of_columns:
            # Answers before it without sets were drawn from all words; a gap would cost this one its own.
            completion.record(KEPT, known, all_words(turn.first_of_columns - known))
        completion.append(said, turn.first_of_columns)  # without routes where an answer before it has none
    return completion


def _row(prompt: Prompt) -> dict[str, Any]:
    """The data row of a prompt, as an agent gets it; a text is a message of the user.

    Pictures are data URLs, which it may ask the policy with.
    """
    row = dict(prompt.columns)
    if row.get(IMAGES):  # then the row may have them in other columns too
        row = {name: _as_urls(value) for name, value in row.items()}
    return {**row, "prompt": with_picture_parts(as_messages(prompt.text), url_part)}


def _as_urls(value: Any) -> Any:
    """A column with data URLs in the place of its pictures."""
    if isinstance(value, Picture):
        return url_of(value)
    if is_picture(value):
        return url_part(value["image"])
    if isinstance(value, list):
        return [_as_urls(each) for each in value]
    return {name: _as_urls(each) for name, each in value.items()} if isinstance(value, dict) else value


def _metrics(episodes: Sequence[Episode]) -> Metrics:
    """Numbers of turns and sequences, rewards, what agents returned, and what went wrong."""
    names = (
        *("tool_calls", "malformed_calls", "replayed", "overridden_fields", "refused_requests"),
        *("untrained_requests", "branches", "roots", "abandoned_turns"),
    )
    counts: Counter[str] = Counter(dict.fromkeys(names, 0))
    rows, turns, context, tokens = [], [], 0, 0
    again = asked = 0
    own: dict[str, list[float]] = {}
    rewards: dict[str, list[float]] = {"": []}
    for part in (part for episode in episodes for part in episode.parts):
        trained = {turn for row in part.rows for turn in row.path}
        rows.append(len(part.rows))
        turns.append(len(trained))
        counts["roots"] += sum(turn.parent is None for turn in trained)
        parents = Counter(turn.parent for turn in trained if turn.parent is not None)
        counts["branches"] += sum(count - 1 for count in parents.values())
        counts["abandoned_turns"] += len(part.session.tree.turns) - len(trained)
        tokens += sum(len(row.path[-1].ids) for row in part.rows)
        again += sum(turn.recomputed for turn in part.session.tree.turns if turn.tokens)
        asked += sum(len(turn.prompt_ids) for turn in part.session.tree.turns if turn.tokens)
        context += sum(len(turn.tokens) for row in part.rows for turn in row.path if turn not in row.owned)
        if part.reward is not None:
            rewards.setdefault(part.session.role, []).append(part.reward)
    for episode in episodes:
        assert episode.session is not None
        for session in episode.session.every_role():
            counts.update(session.counts)
        for name, value in episode.played.metrics.items():
            own.setdefault(name, []).append(value)
    faults = [episode.fault.kind for episode in episodes if episode.fault is not None]
    counts["timeouts"] = faults.count("timeout")
    counts["errors"] = len(faults) - counts["timeouts"]
    counts["retried_episodes"] = sum(episode.is_retried for episode in episodes)
    counts["untrained_roles"] = sum(episode.num_untrained_roles for episode in episodes)
    every = np.array([value for values in rewards.values() for value in values], np.float64)
    return {
        **describe("agent/turns", np.array(turns), ("mean", "max")),
        **describe("agent/sequences", np.array(rows), ("mean", "max")),
        **describe("agent/reward", every, ("mean",)),
        **{f"agent/reward_of/{role}": Metric(sum(v), len(v)) for role, v in rewards.items() if role},
        "agent/context_fraction": Metric(context, tokens),
        "agent/recomputed_fraction": Metric(again, asked),
        **{f"agent/{name}": Metric(float(count), reduction="sum") for name, count in counts.items()},
        **{f"agent/own/{name}": Metric(sum(values), len(values)) for name, values in own.items()},
    }
