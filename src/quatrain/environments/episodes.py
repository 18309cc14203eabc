"""Episodes of several turns: the policy and an environment answer each other, token in and token out.

Data flow: prompts -> `EpisodeSession.submit` -> environments (`EnvironmentCalls`) and turns of the policy
(`session.py`), in turn -> `EpisodeSession.take` -> the engine's `RolloutBatch`. While an environment works,
turns of other episodes decode.

The order of the work must not depend on how long environments take, or a run and its repetition would differ
by rounding. So before each decode call, answers that are on their way are waited for, and taken in the order
of the episodes; together for at most PATIENCE_S. Once that time is used up, answers are taken as they come:
the same text for the same seed, up to rounding.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from quatrain.cluster.processes import decided_by_main, is_main_process
from quatrain.data.demonstration import ENVIRONMENTS
from quatrain.data.turns import TurnsOfRow, TurnTemplate
from quatrain.engine.groups import Group
from quatrain.engine.session import EngineStats, TurnEnd
from quatrain.environments.environment import (
    Ended,
    EnvironmentCalls,
    EnvironmentFault,
    InitialObservation,
    StepResult,
    with_opening,
)
from quatrain.types.answer_text import AnswerTokens
from quatrain.types.batches import Message, Prompt, PromptText
from quatrain.types.metrics import Metric, Metrics, describe
from quatrain.types.rollouts import Completion, Sampling, context_of

logger = logging.getLogger(__name__)

PATIENCE_S = 2.0
"""Seconds in which a session waits, between decode calls, for answers that are on their way."""
LOOK_S = 0.05
"""Seconds between two looks at the engine's other callers while every episode waits for its environment."""
MakeSession = Callable[[Callable[[Completion], bool]], "Turns"]
"""Makes the session of turns, given whether a sample may go on after one."""
FAULT = "error"
TIMEOUT = "timeout"


class Turns(Protocol):
    """What samples the turns of a session of episodes: methods of `Session`, where they are described."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def num_live(self) -> int: ...

    @property
    def idle(self) -> bool: ...

    def check_memory(self, prompts: Sequence[Prompt]) -> None: ...

    def submit_groups(self, groups: Sequence[Group]) -> tuple[int, ...]: ...

    def resume(self, suspended: int, tokens: Sequence[int], limit: int) -> None: ...

    def drop(self, suspended: int) -> None: ...

    def take_ends(self) -> list[TurnEnd]: ...

    def advance(self, params: Any, version: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class EpisodeRules:
    """What the episodes of a run have in common.

    An episode has at most `max_turns` turns of the policy. It gets at most `max_environment_tokens` tokens
    from its environment and the chat template, and has at most `max_tokens` tokens in all. `calls` runs
    environments; it is there in the main process only. `kind` is what tells the environment of a row from
    others in metrics, given the columns; None where there are no others.
    """

    tokenizer: Any
    turns: TurnsOfRow
    calls: EnvironmentCalls | None
    max_turns: int
    max_environment_tokens: int
    max_tokens: int
    kind: Callable[[Mapping[str, Any]], str | None] = lambda columns: None
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Numbers of episodes, of all sessions."""
    answers: AnswerTokens = field(init=False)
    most_characters: int = field(init=False)
    """Texts with more characters have more than `max_environment_tokens` tokens."""

    def __post_init__(self) -> None:
        longest = max(map(len, self.tokenizer.get_vocab()))
        object.__setattr__(self, "answers", AnswerTokens(self.tokenizer))
        object.__setattr__(self, "most_characters", self.max_environment_tokens * longest)

    def session(self, make_session: MakeSession) -> EpisodeSession:
        """A session of episodes; `make_session` makes the session of their turns."""
        return EpisodeSession(self, make_session)

    def close(self) -> None:
        """Ends the environments; the rules must not be used afterwards."""
        if self.calls is not None:
            self.calls.close()


Question = Literal["begin", "step", "end"]


class _Answer(NamedTuple):
    """The answer of an environment, as values that JSON has: what the method returned, or its fault.

    `ids` are the tokens of the prompt, or between two turns, that follow from it.
    """

    number: int
    question: Question
    value: Any
    ids: Sequence[int] | None
    fault: Any


@dataclass
class Episode:
    """One sample of a prompt and its environment."""

    number: int
    prompt: Prompt
    sample: int
    step: int
    text: PromptText
    """The prompt with what the environment's `reset` returned."""
    input_ids: np.ndarray
    turns: TurnTemplate
    kind: str | None
    completion: Completion = field(default_factory=Completion)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Of each turn that the environment answered."""
    final_reward: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    suspended: int | None = None
    """The ticket of the sample between two turns, if it may go on."""
    reason: str | None = None
    """Why it ends; None as long as it goes on."""
    fault: EnvironmentFault | None = None
    finished: bool = False

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

    def result(self, calls: EnvironmentCalls | None) -> tuple[Prompt, Completion]:
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
        if calls is not None and calls.keeps:
            columns[ENVIRONMENTS] = calls.kept(self.number)
        return replace(self.prompt, input_ids=self.input_ids, columns=columns), self.completion


class EpisodeSession:
    """A session of episodes, with the methods of `Session` that the engine calls.

    `make_session` makes the session of their turns.
    """

    def __init__(self, rules: EpisodeRules, make_session: MakeSession):
        self._rules = rules
        self._session = make_session(self._may_go_on)
        self._tickets: dict[int, list[Episode]] = {}
        self._next_ticket = 0
        self._episodes: dict[int, Episode] = {}  # unfinished ones, by their numbers
        self._turns: dict[tuple[int, int], Episode] = {}  # by ticket and index in the session
        self._begun: list[Episode] = []  # whose first turn can be submitted
        self._asked: dict[int, tuple[Question, Future[Any] | None]] = {}
        self._patience_s = PATIENCE_S
        self._waited_s = 0.0
        self._num_completed = 0

    @property
    def sampling(self) -> Sampling:
        """The sampling parameters of every turn."""
        return self._session.sampling

    @property
    def stats(self) -> EngineStats:
        """Totals so far; a completion is a whole episode."""
        return replace(self._session.stats, completions=self._num_completed)

    @property
    def num_groups(self) -> int:
        """Groups of episodes that were not taken yet."""
        return len(self._tickets)

    @property
    def num_live(self) -> int:
        """Slots in use."""
        return self._session.num_live

    def submit(self, prompts: Sequence[Prompt], step: int) -> tuple[int, ...]:
        """Begin the episodes of each prompt; their tickets. Raises ValueError if the cache does not fit."""
        self._session.check_memory(prompts)
        self._patience_s = PATIENCE_S
        first = self._next_ticket
        self._next_ticket += len(prompts)
        for ticket, prompt in enumerate(prompts, first):
            self._tickets[ticket] = [self._begin(prompt, i, step) for i in range(self.sampling.n)]
        return tuple(range(first, self._next_ticket))

    def holds(self, tickets: Sequence[int]) -> bool:
        """Whether all these groups were submitted, and not taken yet."""
        return all(ticket in self._tickets for ticket in tickets)

    def finished(self, tickets: Sequence[int]) -> bool:
        """Whether all episodes of these groups have ended."""
        return all(episode.finished for ticket in tickets for episode in self._tickets[ticket])

    def take(self, tickets: Sequence[int]) -> tuple[list[tuple[Prompt, Completion]], Metrics]:
        """Removes these finished groups: (their samples, metrics of the episodes)."""
        episodes = [episode for ticket in tickets for episode in self._tickets.pop(ticket)]
        _warn_of_faults(episodes)
        waited, self._waited_s = self._waited_s, 0.0
        metrics = {**_metrics(episodes), "time/environment_wait_s": Metric(waited, reduction="sum")}
        return [episode.result(self._rules.calls) for episode in episodes], metrics

    def advance(self, params: Any, version: int) -> None:
        """Takes the answers of environments, then runs a round of the session of turns."""
        for answer in self._answers():
            del self._asked[answer.number]
            self._take_answer(self._episodes[answer.number], answer)
        self._submit_begun()
        if not self._session.idle:
            self._session.advance(params, version)
        for end in self._session.take_ends():
            self._end_turn(end)

    def close(self) -> None:
        """Abandons the environments of unfinished episodes, and those that nobody took."""
        left = itertools.chain(
            self._episodes, (episode.number for each in self._tickets.values() for episode in each)
        )
        for number in dict.fromkeys(left):
            if self._rules.calls is not None:
                self._rules.calls.abandon(number)
        self._episodes = {}
        self._session.close()

    def _begin(self, prompt: Prompt, sample: int, step: int) -> Episode:
        number = next(self._rules.numbers)
        turns, kind = self._rules.turns(prompt.columns), self._rules.kind(prompt.columns)
        episode = Episode(number, prompt, sample, step, prompt.text, prompt.input_ids, turns, kind)
        self._episodes[number] = episode
        columns = {**prompt.columns, "prompt": _listed(prompt.text)}
        self._ask(episode, "begin", columns)
        return episode

    def _ask(self, episode: Episode, question: Question, *arguments: Any) -> None:
        """Calls the environment, in the main process."""
        calls = self._rules.calls
        future = None if calls is None else getattr(calls, question)(episode.number, *arguments)
        self._asked[episode.number] = question, future

    def _answers(self) -> list[_Answer]:
        """The answers that have come, in the order of the episodes."""
        if not self._asked:
            return []
        began = time.perf_counter()
        answers = decided_by_main(partial(self._arrived, self._session.idle and not self._begun))
        self._waited_s += time.perf_counter() - began
        return [_Answer(*answer) for answer in answers]

    def _arrived(self, nothing_else: bool) -> list[_Answer]:
        """Waits as long as it may, in the main process; `nothing_else`: no turn can be decoded meanwhile."""
        futures = [future for _, future in self._asked.values() if future is not None]
        began = time.perf_counter()
        if self._patience_s > 0:
            wait(futures, self._patience_s)
            self._patience_s -= time.perf_counter() - began
        elif nothing_else:
            wait(futures, LOOK_S, return_when=FIRST_COMPLETED)
        return [
            self._answer(self._episodes[number], question, future)
            for number, (question, future) in sorted(self._asked.items())
            if future is not None and future.done()
        ]

    def _answer(self, episode: Episode, question: Question, future: Future[Any]) -> _Answer:
        """What an environment has answered, and the tokens that follow from it, for all processes alike."""
        value: Any = None
        ids = fault = None
        try:
            match future.result():
                case StepResult() as turn:
                    value = list(turn.messages), turn.reward, turn.done
                    ids = self._suffix_ids(episode, turn)
                case Ended() as ended:
                    value = ended.reward, dict(ended.counts)
                case opening:
                    value, ids = opening, self._opening_ids(episode, opening)
        except EnvironmentFault as error:
            value, ids, fault = None, None, error.args
        return _Answer(episode.number, question, value, ids, fault)

    def _opening_ids(self, episode: Episode, opening: InitialObservation) -> list[int] | None:
        """The tokens of the prompt with what `reset` returned; None without that, or if it is too long."""
        if opening is None or self._is_too_long(opening):
            return None
        return _checked(lambda: episode.turns.prompt(with_opening(episode.prompt.text, opening)))

    def _suffix_ids(self, episode: Episode, turn: StepResult) -> list[int] | None:
        """The tokens between this turn and the next; None if there is no next, or if there are too many."""
        last, messages = episode.completion.last_turn, turn.messages
        if turn.done or episode.suspended is None or self._is_too_long(messages):
            return None
        return _checked(lambda: episode.turns.suffix(episode.text, last, messages))

    def _is_too_long(self, messages: InitialObservation) -> bool:
        """Whether text cannot fit, so that encoding it, while nothing is decoded, would be in vain."""
        texts = [messages] if isinstance(messages, str) else [str(m["content"]) for m in messages or ()]
        return sum(map(len, texts)) > self._rules.most_characters

    def _take_answer(self, episode: Episode, answer: _Answer) -> None:
        """Goes on with an episode whose environment has answered."""
        value = answer.value
        try:
            if answer.fault is not None:
                raise EnvironmentFault(*answer.fault)
            if answer.question == "begin":
                self._open(episode, value, answer.ids)
            elif answer.question == "step":
                self._answered(episode, None if value is None else StepResult(*value), answer.ids)
            else:
                episode.final_reward, counts = value
                episode.counts.update(counts)
                self._finish(episode)
        except EnvironmentFault as fault:
            self._fail(episode, fault)

    def _open(self, episode: Episode, opening: InitialObservation, ids: Sequence[int] | None) -> None:
        """The environment's `reset` has returned: the first turn can begin; its prompt is `ids` if given."""
        rules, before = self._rules, len(episode.prompt.input_ids)
        size = before if ids is None else len(ids)
        too_long = opening is not None and ids is None
        if too_long or size - before > rules.max_environment_tokens or size >= rules.max_tokens:
            return self._end(episode, "length")
        if ids is not None:
            episode.text = with_opening(episode.prompt.text, opening)
            episode.input_ids = np.array(ids, np.int32)
        self._begun.append(episode)

    def _submit_begun(self) -> None:
        """Submits first turns; samples of a prompt with the same tokens share them."""
        begun, self._begun = self._begun, []
        alike: dict[Any, list[Episode]] = {}
        for episode in begun:
            key = id(episode.prompt), episode.step, episode.input_ids.tobytes()
            alike.setdefault(key, []).append(episode)
        groups = []
        for episodes in alike.values():
            first = episodes[0]
            limit = min(self.sampling.max_new_tokens, self._rules.max_tokens - len(first.input_ids))
            prompt = replace(first.prompt, input_ids=first.input_ids)
            group = Group.of(prompt, first.step, [episode.sample for episode in episodes], limit)
            for episode, completion in zip(episodes, group.completions, strict=True):
                episode.completion = completion
            groups.append(group)
        for ticket, episodes in zip(self._session.submit_groups(groups), alike.values(), strict=True):
            self._turns |= {(ticket, i): episode for i, episode in enumerate(episodes)}

    def _may_go_on(self, completion: Completion) -> bool:
        """Whether there may be another turn after this one, if the environment wants it."""
        return (
            completion.finish_reason == "stop"
            and completion.num_sampled < self.sampling.max_new_tokens
            and len(completion.turns) < self._rules.max_turns
        )

    def _end_turn(self, end: TurnEnd) -> None:
        """A turn of the policy has ended: the environment answers it, unless it was cut."""
        episode = self._turns.pop((end.ticket, end.sample))
        episode.suspended = end.suspended
        context = context_of(episode.input_ids, end.completion)
        text = self._rules.answers.text(end.completion.last_turn, context)
        episode.messages.append({"role": "assistant", "content": text})
        if end.completion.finish_reason == "length":
            self._end(episode, "length")
        else:
            self._ask(episode, "step", text)

    def _answered(self, episode: Episode, turn: StepResult | None, suffix: Sequence[int] | None) -> None:
        """The environment has answered a turn: the next begins after `suffix`, or the episode ends."""
        if turn is None:
            return self._end(episode, "stop")
        episode.rewards.append(turn.reward)
        episode.messages += turn.messages
        if turn.done:
            return self._end(episode, "environment")
        if len(episode.completion.turns) >= self._rules.max_turns:
            return self._end(episode, "turns")
        if episode.suspended is None or suffix is None:
            return self._end(episode, "length")
        completion, rules = episode.completion, self._rules
        room = rules.max_tokens - len(episode.input_ids) - len(completion.tokens) - len(suffix)
        if episode.num_written + len(suffix) > rules.max_environment_tokens or room < 1:
            return self._end(episode, "length")
        limit = min(self.sampling.max_new_tokens, completion.num_sampled + room)
        self._session.resume(episode.suspended, suffix, limit)
        self._turns[episode.suspended, 0] = episode
        episode.suspended = None

    def _end(self, episode: Episode, reason: str) -> None:
        """The episode ends; its environment gives its last reward."""
        self._drop(episode)
        episode.reason = reason
        self._ask(episode, "end")

    def _fail(self, episode: Episode, fault: EnvironmentFault) -> None:
        """The episode ends by a fault of its environment."""
        self._drop(episode)
        episode.fault = fault
        episode.reason = TIMEOUT if fault.kind == "timeout" else FAULT
        if self._rules.calls is not None:
            self._rules.calls.abandon(episode.number)
        self._finish(episode)

    def _drop(self, episode: Episode) -> None:
        if episode.suspended is not None:
            self._session.drop(episode.suspended)
            episode.suspended = None

    def _finish(self, episode: Episode) -> None:
        episode.finished = True
        del self._episodes[episode.number]
        self._num_completed += 1


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
