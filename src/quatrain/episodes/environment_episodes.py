"""Episodes of several turns: the policy and an environment answer each other, token in and token out.

Data flow: prompts -> `EnvironmentPlayer.begin` -> `_play` for each episode: its environment
(`EnvironmentCalls`) and the sampler's turns in alternation -> the rows of a `RolloutBatch`. While an
environment works, turns of other episodes decode.

The order of the work must not depend on how long environments take, or a run and its repetition would differ
by rounding. So before each round, the sampler waits for answers that are on their way (`Pause`); together for
at most PATIENCE_S. Once that time is used up, answers are taken as they come: the same text for the same
seed, up to rounding.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from quatrain.cluster.processes import is_main_process
from quatrain.data.expansion import BLIND, sees
from quatrain.data.messages import pictures_of, text_of
from quatrain.data.turns import TurnsOfRow, TurnTemplate
from quatrain.episodes.environment import InitialObservation, StepResult, with_opening
from quatrain.episodes.environment_workers import EnvironmentCalls
from quatrain.types.answer_text import AnswerTokens
from quatrain.types.batches import ENVIRONMENTS, Message, Prompt, PromptText
from quatrain.types.metrics import Metric, Metrics, describe
from quatrain.types.pictures import Pictures, joined
from quatrain.types.player import Player, Playing, Row
from quatrain.types.rollouts import Completion, Sampling, context_of, sequence_pictures
from quatrain.types.sampler import Pause, PerRequestSampling, Request, Sampler, TurnFailed, sampled
from quatrain.workers.faults import Fault as EnvironmentFault
from quatrain.workers.loop_thread import LoopThread, settle

logger = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""Seconds in which the rounds of a batch wait for answers that are on their way."""
CLOSED = "the episodes were ended"
FAULT = "error"
TIMEOUT = "timeout"


@dataclass(frozen=True)
class EpisodeRules:
    """What the episodes of a run have in common.

    An episode has at most `max_turns` turns of the policy. It gets at most `max_environment_tokens` tokens
    from its environment and the chat template, and has at most `max_tokens` tokens in all. `calls` runs
    environments; it is there in the main process only. `seed` is that of the run. `kind` is what tells the
    environment of a row from others in metrics, given the columns; None where there are no others.
    """

    tokenizer: Any
    turns: TurnsOfRow
    calls: EnvironmentCalls | None
    max_turns: int
    max_environment_tokens: int
    max_tokens: int
    seed: int
    kind: Callable[[Mapping[str, Any]], str | None] = lambda columns: None
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of episodes, of all batches."""
    answers: AnswerTokens = field(init=False)
    most_characters: int = field(init=False)
    """Texts with more characters have more than `max_environment_tokens` tokens."""

    def __post_init__(self) -> None:
        longest = max(map(len, self.tokenizer.get_vocab()))
        object.__setattr__(self, "answers", AnswerTokens(self.tokenizer))
        object.__setattr__(self, "most_characters", self.max_environment_tokens * longest)

    def is_too_long(self, messages: InitialObservation) -> bool:
        """Whether text cannot fit, so that encoding it would be in vain."""
        texts = [messages] if isinstance(messages, str) else [text_of(m) for m in messages or ()]
        return sum(map(len, texts)) > self.most_characters

    def check_seen(self, messages: InitialObservation) -> None:
        """Raises ValueError for pictures that the model does not see: every episode would have them."""
        if not sees(self.tokenizer) and pictures_of(messages or ()):
            raise ValueError(f"an environment returned a picture: {BLIND}")


@dataclass
class Episode:
    """One sample of a prompt and its environment."""

    number: int
    prompt: Prompt
    sample: int
    step: int
    sampling: Sampling
    text: PromptText
    """The prompt with what the environment's `reset` returned."""
    input_ids: np.ndarray
    turns: TurnTemplate
    kind: str | None
    pictures: Pictures | None = None
    """Those of `input_ids`."""
    completion: Completion = field(default_factory=Completion)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Of each turn that the environment answered."""
    final_reward: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    reason: str | None = None
    """Why it ends; None as long as it goes on."""
    fault: EnvironmentFault | None = None

    @property
    def num_turns(self) -> int:
        """Turns of the policy; none if `reset` failed."""
        return len(self.completion.turns) if self.completion.tokens else 0

    @property
    def num_written(self) -> int:
        """Tokens of the environment and of the chat template between turns."""
        return len(self.input_ids) - len(self.prompt.input_ids) + self.completion.num_given

    @property
    def reward(self) -> float:
        """The environment's rewards for the turns, and at the end."""
        return sum(self.rewards) + self.final_reward

    @property
    def opened(self) -> Prompt:
        """The prompt with what the environment's `reset` returned, as tokens."""
        return replace(self.prompt, input_ids=self.input_ids, pictures=self.pictures)

    @property
    def session(self) -> str:
        """Its name for the sampler, which keeps its context from turn to turn."""
        return f"episode {self.number}"

    @property
    def room(self) -> int:
        """Tokens that the policy may still sample."""
        return self.sampling.max_new_tokens - self.completion.num_sampled

    def request(self, seed: int, max_tokens: int) -> Request:
        """What asks for its next turn."""
        ids = np.array([*self.input_ids, *self.completion.tokens], np.int32)
        sampling = replace(self.sampling, n=1, max_new_tokens=min(self.room, max_tokens - len(ids)))
        sequence_id = (self.prompt.group_id * self.sampling.n + self.sample) % 2**32
        offset = len(self.completion.tokens)
        own = PerRequestSampling(sampling, seed, self.step, sequence_id, offset, self.session)
        pictures = sequence_pictures(self.opened, self.completion)
        return Request.alone(Prompt(self.prompt.group_id, ids, self.prompt.text, pictures=pictures), own)

    def row(self, calls: EnvironmentCalls) -> tuple[Prompt, Completion]:
        """The sample; its columns have the dialogue and the environment's rewards, and what `calls` keeps."""
        assert self.reason is not None
        self.completion.finish_reason = self.reason
        unanswered = self.num_turns - len(self.rewards)
        columns = {
            **self.prompt.columns,
            "messages": [*_listed(self.text), *self.messages],
            "turn_rewards": [*self.rewards, *[0.0] * unanswered],
            "environment_reward": self.reward,
        }
        if calls.keeps:
            columns[ENVIRONMENTS] = calls.kept(self.number)
        return replace(self.opened, columns=columns), self.completion


class EnvironmentPlayer(Player):
    """Plays episodes with the environments of `rules`, in the main process, in a thread of its own."""

    def __init__(self, rules: EpisodeRules):
        self.pause = self._pause = Pause()
        self.rules = rules
        self._thread = LoopThread("quatrain-episodes", CLOSED, self._end)

    def begin(self, prompts: Sequence[Prompt], step: int, sampling: Sampling, sampler: Sampler) -> Playing:
        """Begins the environments; each episode then asks for its turns one after another."""
        assert self.rules.calls is not None, "the main process alone plays"
        episodes = [self._episode(p, i, step, sampling) for p in prompts for i in range(sampling.n)]
        self._pause.left_s = PATIENCE_S
        self._pause.owe(len(episodes))
        futures: list[Future[None]] = [Future() for _ in episodes]
        for episode, future in zip(episodes, futures, strict=True):
            self._thread.do(self._begin, episode, sampler, future)
        return _Episodes(episodes, futures, self.rules.calls, self._pause)

    def close(self) -> None:
        """Ends the episodes and the environments."""
        self._thread.close()
        if self.rules.calls is not None:
            self.rules.calls.close()

    def _episode(self, prompt: Prompt, sample: int, step: int, sampling: Sampling) -> Episode:
        number, turns = next(self.rules.numbers), self.rules.turns(prompt.columns)
        kind = self.rules.kind(prompt.columns)
        start = prompt.text, prompt.input_ids
        return Episode(number, prompt, sample, step, sampling, *start, turns, kind, prompt.pictures)

    # In the thread:

    def _begin(self, episode: Episode, sampler: Sampler, future: Future[None]) -> None:
        task = self._thread.loop.create_task(self._play(episode, sampler))
        task.add_done_callback(partial(settle, future, CLOSED))

    async def _play(self, episode: Episode, sampler: Sampler) -> None:
        """The whole of an episode; while it is not asking for a turn, it is to (`Pause`)."""
        calls, number, owes = self.rules.calls, episode.number, True
        assert calls is not None
        try:
            columns = {**episode.prompt.columns, "prompt": _listed(episode.prompt.text)}
            self._open(episode, await asyncio.wrap_future(calls.begin(number, columns)))
            while episode.reason is None:
                turn = self._ask(episode.request(self.rules.seed, self.rules.max_tokens), sampler)
                owes = False
                self._pause.pay()
                try:
                    done = await asyncio.wrap_future(turn)
                except TurnFailed as error:
                    raise TurnFailed(f"a turn of an episode was not sampled: {error}") from None
                owes = True
                text = self._said(episode, done)
                if done.finish_reason == "length":
                    episode.reason = "length"
                    break
                answer = await asyncio.wrap_future(calls.step(number, text))
                self._answered(episode, answer)
            owes = False
            sampler.forget(episode.session)
            self._pause.pay()
            ended = await asyncio.wrap_future(calls.end(number))
            episode.final_reward = ended.reward
            episode.counts.update(ended.counts)
        except EnvironmentFault as fault:
            episode.fault = fault
            episode.reason = TIMEOUT if fault.kind == "timeout" else FAULT
            calls.abandon(number)
        except BaseException:
            calls.abandon(number)
            raise
        finally:
            if owes:
                sampler.forget(episode.session)
                self._pause.pay()

    def _ask(self, request: Request, sampler: Sampler) -> Future[Completion]:
        """The next turn. Once it has ended, its episode owes what comes next, before the sampler goes on."""
        [turn] = sampled(sampler, [request])
        turn.add_done_callback(lambda turn: self._pause.owe())
        return turn

    def _open(self, episode: Episode, opening: InitialObservation) -> None:
        """The environment's `reset` has returned: the prompt of the first turn, or the end of the episode."""
        rules, before, ids = self.rules, len(episode.prompt.input_ids), episode.input_ids
        if opening is not None:
            rules.check_seen(opening)
            if rules.is_too_long(opening):
                episode.reason = "length"
                return
            text = with_opening(episode.prompt.text, opening)
            opened = _checked(lambda: episode.turns.prompt(text))
            ids = np.array(opened.ids, np.int32)
        if len(ids) - before > rules.max_environment_tokens or len(ids) >= rules.max_tokens:
            episode.reason = "length"
            return
        if opening is not None:
            episode.text, episode.input_ids, episode.pictures = text, ids, opened.pictures

    def _said(self, episode: Episode, turn: Completion) -> str:
        """The text of a turn of the policy, which is added to the episode."""
        # A column has rows from the first token of the prompt on: those that are known stay as they are.
        episode.completion.append(turn, 0)
        context = context_of(episode.input_ids, episode.completion)
        text = self.rules.answers.text(turn.tokens, context)
        episode.messages.append({"role": "assistant", "content": text})
        return text

    def _answered(self, episode: Episode, turn: StepResult | None) -> None:
        """The environment has answered a turn: what the next begins after, or the end of the episode."""
        rules, completion = self.rules, episode.completion
        if turn is None:
            episode.reason = "stop"
            return
        episode.rewards.append(turn.reward)
        episode.messages += turn.messages
        rules.check_seen(turn.messages)
        if turn.done:
            episode.reason = "environment"
        elif len(completion.turns) >= rules.max_turns:
            episode.reason = "turns"
        elif episode.room < 1 or rules.is_too_long(turn.messages):
            episode.reason = "length"
        else:
            suffix = _checked(lambda: episode.turns.suffix(episode.text, completion.last_turn, turn.messages))
            written = episode.num_written + len(suffix.ids)
            before = len(episode.input_ids) + len(completion.tokens)
            size = before + len(suffix.ids)
            if written > rules.max_environment_tokens or size >= rules.max_tokens:
                episode.reason = "length"
                return
            so_far = None
            if suffix.pictures is not None:
                known = sequence_pictures(episode.opened, completion)
                so_far = joined((known, before), (suffix.pictures, len(suffix.ids)))
            completion.begin_turn(suffix.ids, so_far)

    def _end(self) -> None:
        """Ends the episodes that are being played, as the last work of the thread."""
        loop = self._thread.loop
        if tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks))


class _Episodes(Playing):
    def __init__(
        self,
        episodes: Sequence[Episode],
        futures: Sequence[Future[None]],
        calls: EnvironmentCalls,
        pause: Pause,
    ):
        self.futures, self._episodes, self._calls, self._pause = futures, episodes, calls, pause
        self._waited_s = pause.waited_s

    def rows(self) -> Sequence[Sequence[Row]]:
        _warn_of_faults(self._episodes)
        return [[episode.row(self._calls)] for episode in self._episodes]

    def metrics(self) -> Metrics:
        waited = Metric(self._pause.waited_s - self._waited_s, reduction="sum")
        return {**_metrics(self._episodes), "time/environment_wait_s": waited}


def _listed(prompt: PromptText) -> Any:
    return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]


def _checked(work: Callable[[], Any]) -> Any:
    """What `work` makes of an environment's messages; a template that refuses them is the episode's fault."""
    try:
        return work()
    except ValueError as error:
        raise EnvironmentFault(str(error), "invalid") from None


def _warn_of_faults(episodes: Sequence[Episode]) -> None:
    faults = [episode.fault for episode in episodes if episode.fault is not None]
    if faults and is_main_process():
        rule = "ended by a fault of their environment, and get the reward of an error"
        first = f"{faults[0]}\n{faults[0].detail}".rstrip()
        logger.warning("%d of %d episodes %s; the first: %s", len(faults), len(episodes), rule, first)


def _metrics(episodes: Sequence[Episode]) -> dict[str, Metric]:
    """Numbers of turns, tokens of environments, rewards, and what went wrong."""
    counts: Counter[str] = Counter()
    for episode in episodes:
        counts.update(episode.counts)
    counts["errors"] = sum(episode.reason == FAULT for episode in episodes)
    counts["timeouts"] = sum(episode.reason == TIMEOUT for episode in episodes)
    alike: dict[str, list[Episode]] = {"episode": list(episodes)}
    for episode in episodes:
        if episode.kind is not None:
            alike.setdefault(f"episode/{episode.kind}", []).append(episode)
    by_kind: dict[str, Metric] = {}
    for name, some in alike.items():
        by_kind.update(describe(f"{name}/turns", np.array([e.num_turns for e in some]), ("mean", "max")))
        by_kind.update(describe(f"{name}/reward", np.array([e.reward for e in some]), ("mean",)))
    return {
        **by_kind,
        **describe("length/environment", np.array([e.num_written for e in episodes]), ("mean", "max")),
        **{f"episode/{name}": Metric(count, reduction="sum") for name, count in counts.items()},
    }
