"""Environments: what answers the model in an episode of several turns, and the checks of what they return.

Data flow: an episode -> `InThreads` or `InWorkers` -> `CheckedEnvironment`, which `load_environment.py` makes
for each sample; users write the class inside it. Whatever an environment does wrong is a `Fault`, which costs
that episode and never the run.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from quatrain.config.errors import shown
from quatrain.data.messages import checked_messages, pictures_of
from quatrain.data.pictures import PictureReader, is_picture_part, opened
from quatrain.data.turns import conversation
from quatrain.types.pictures import Picture, PicturesInJson
from quatrain.workers.faults import LONGEST_ERROR, Fault, run_guarded

if TYPE_CHECKING:
    from quatrain.types.batches import Message, PromptText

logger = logging.getLogger(__name__)

MAX_TURN_CHARS = 1_000_000
"""Characters of the messages of one turn: far more than any context has room for."""
MAX_TURN_PICTURES, MAX_TURN_PICTURE_BYTES = 8, 2**25
"""Pictures of the messages of one turn, and their size when they are encoded."""
LARGEST_REWARD = 1e30
"""Sums of rewards of this size are finite in float32."""
COUNTS = ("tool_calls", "malformed_calls", "tool_errors")
"""What `Tools` counts."""
CLOSED = "the run has ended its environments"
InitialObservation = Sequence["Message"] | str | None


@dataclass(frozen=True)
class StepResult:
    """What an environment answers to a completion: messages, and a reward for the turn.

    The content of a message is a text, or a list of parts: texts, `{"type": "text", "text": …}`, and, where
    the model sees, pictures, `{"type": "image", "image": a PIL picture, bytes or a data URL}`. With `done`
    the episode ends, and the messages are not shown to the model.
    """

    messages: Sequence[Message]
    reward: float = 0.0
    done: bool = False


Turn = StepResult
"""The earlier name of `StepResult`, for environments that were written with it."""


class Ended(NamedTuple):
    """What an environment leaves when its episode ends."""

    reward: float
    """The reward of the episode (`get_reward`), which is added to those of its turns."""
    counts: Mapping[str, int]
    """What `Tools` counted, such as `tool_errors`."""


class KeptEnvironment:
    """An environment that is not closed when its episode ends, for reward functions that get it.

    `close` closes it in the background; it is called when nothing holds this object any more.
    """

    def __init__(self, environment: Any, close: Callable[[], None]):
        self.environment = environment
        """The object that the user's class made."""
        self.close = weakref.finalize(self, close)


class Environment(Protocol):
    """What answers the model in one episode; every sample has an environment of its own.

    `reset` and `close` may be left out. `get_reward`, without arguments, may be added: its number is added to
    the rewards of the turns when the episode has ended, whatever ended it.
    """

    def reset(self, **columns: Any) -> Sequence[Message] | str | None:
        """Begins the episode. `columns` are the columns of the prompt's row, and the prompt as `prompt`.

        `reset` gets those that it names, or all with `**columns`. It returns messages that follow the prompt,
        or text that is added to the prompt's last message, or None.
        """
        ...

    def step(self, completion: str) -> StepResult | None:
        """Answers the model's text of a turn, without its special tokens; None ends the episode."""
        ...

    def close(self) -> None:
        """Frees what the environment holds. Called once, after the episode."""
        ...


class CheckedEnvironment:
    """A user's environment that keeps to its protocol: each method checks what came, or raises the fault.

    `name` is its name in messages. `accepts` are the columns that its `reset` takes; None: all.
    """

    def __init__(self, name: str, environment: Any, accepts: Collection[str] | None = None):
        self._name, self._environment, self._accepts = name, environment, accepts

    def reset(self, columns: Mapping[str, Any]) -> InitialObservation:
        """What follows the prompt; the environment gets a copy of `columns`, which it may change.

        Pictures in it, also in the messages of `prompt`, are PIL pictures.
        """

        def work() -> InitialObservation:
            reset = getattr(self._environment, "reset", None) or (lambda **columns: None)
            taken = {n: v for n, v in columns.items() if self._accepts is None or n in self._accepts}
            # The samples of a prompt share its columns.
            opening = reset(**{name: _as_pil(value) for name, value in copy.deepcopy(taken).items()})
            if opening is None or opening == "":
                return None
            if isinstance(opening, str):
                self._messages("reset", [{"role": "user", "content": opening}])
                return opening
            if not isinstance(opening, list | tuple):
                self._refuse("reset must return a list of messages, a text or None", opening)
            return self._messages("reset", opening) or None

        return run_guarded(f"{self._name}: reset", work)

    def step(self, completion: str) -> StepResult | None:
        """The answer to a completion: messages as dictionaries, and a finite reward."""

        def work() -> StepResult | None:
            turn = self._environment.step(completion)
            if turn is None:
                return None
            if not isinstance(turn, StepResult):
                self._refuse("step must return a quatrain.StepResult(messages, reward, done) or None", turn)
            messages = self._messages("step", turn.messages)
            if not messages and not turn.done:
                self._refuse("a turn must have messages, or done=True", turn.messages)
            return StepResult(messages, self._number("the reward of a turn", turn.reward), bool(turn.done))

        return run_guarded(f"{self._name}: step", work)

    def final_reward(self) -> float:
        """The reward that the environment adds to those of its turns, at the end; 0 if it has none."""
        get_reward = getattr(self._environment, "get_reward", None) or (lambda: 0.0)
        return run_guarded(f"{self._name}: get_reward", lambda: self._number("get_reward", get_reward()))

    def close(self) -> None:
        """Closes the environment; an error is a warning, because the episode has ended."""
        try:
            run_guarded(f"{self._name}: close", getattr(self._environment, "close", None) or (lambda: None))
        except Fault as fault:
            logger.warning("%s", fault)

    @property
    def users(self) -> Any:
        """The object that the user's class made."""
        return getattr(self._environment, "made", self._environment)

    @property
    def counts(self) -> Counter[str]:
        """What `Tools` counted in this episode (COUNTS); empty for other environments."""
        counts = getattr(self._environment, "counts", None)
        if not isinstance(counts, Counter) or set(counts) != set(COUNTS):
            return Counter()
        return Counter({name: count for name, count in counts.items() if isinstance(count, int)})

    def _messages(self, method: str, messages: Any) -> tuple[Message, ...]:
        if not isinstance(messages, list | tuple):
            self._refuse("messages must be a list of dictionaries with `role` and `content`", messages)
        if not messages:
            return ()
        # Before anything reads all of it: rendering or tokenising a flood takes minutes and gigabytes.
        if _is_longer(messages, MAX_TURN_CHARS):
            rule = f"the messages of a turn must have at most {MAX_TURN_CHARS} characters"
            text = f"{self._name}: {rule}; {method} returned more; cut the text in the environment"
            raise Fault(text, "too_long")
        try:
            checked = checked_messages(self._seen(method, messages))
            # As JSON, so that nothing of the user's objects is kept, and threads and processes give the same.
            # Pictures are ours, and stay.
            by_name = PicturesInJson(pictures_of(checked))
            text = json.dumps(checked, allow_nan=False, default=by_name.written)
            plain = json.loads(text, object_hook=by_name.read)
        except (TypeError, ValueError, RecursionError) as error:
            raise Fault(f"{self._name}: {method}: {error}", "invalid") from error
        if checked[-1]["role"] == "assistant":
            self._refuse("the last message must not be the assistant's, which the model writes", checked[-1])
        return tuple(plain)

    def _seen(self, method: str, messages: Any) -> Any:
        """The messages of a turn with its pictures read, as encoded bytes; raises the fault of too many."""
        contents = [each.get("content") for each in messages if isinstance(each, Mapping)]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        count = sum(map(is_picture_part, parts))
        if not count:
            return messages
        rule, got = f"at most {MAX_TURN_PICTURES} pictures", f"{count}"
        if count <= MAX_TURN_PICTURES:
            messages = PictureReader().placed(messages)
            size = sum(len(picture.encoded) for picture in pictures_of(messages))
            if size <= MAX_TURN_PICTURE_BYTES:
                return messages
            rule = f"pictures of at most {MAX_TURN_PICTURE_BYTES >> 20} MiB"
            got = f"{size >> 20} MiB"
        text = f"{self._name}: the messages of a turn must have {rule}; {method} returned {got}"
        raise Fault(f"{text}; return fewer or smaller ones", "too_long")

    def _number(self, what: str, value: Any) -> float:
        try:
            number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= LARGEST_REWARD:
            self._refuse(f"{what} must be a finite number, at most {LARGEST_REWARD:g} in size", value)
        return number

    def _refuse(self, rule: str, came: Any) -> NoReturn:
        """Raises the fault of a value that breaks a rule."""
        text = f"a value of type {type(came).__name__}"
        if not _is_longer(came, LONGEST_ERROR):
            with suppress(Exception):  # of the value's own __repr__
                text = shown(came)
        raise Fault(f"{self._name}: {rule}; got {text}; correct the environment", "invalid")


def _as_pil(value: Any) -> Any:
    """A column with PIL pictures, decoded when they are first used, in the place of its pictures."""
    if isinstance(value, Picture):
        return opened(value.encoded)
    if isinstance(value, list):
        return [_as_pil(each) for each in value]
    return {name: _as_pil(each) for name, each in value.items()} if isinstance(value, dict) else value


def with_opening(prompt: PromptText, opening: InitialObservation) -> PromptText:
    """The prompt of an episode: the row's prompt with what `reset` returned.

    Messages follow it; a text is added to the content of its last message. Raises ValueError if the prompt is
    a text.
    """
    if opening is None:
        return prompt
    messages = conversation(prompt)
    if isinstance(opening, str):
        *before, last = messages
        content = last["content"]
        if isinstance(content, list):  # parts, with pictures
            return (*before, {**last, "content": [*content, {"type": "text", "text": opening}]})
        return (*before, {**last, "content": content + opening})
    return (*messages, *opening)


def _is_longer(value: Any, limit: int) -> bool:
    """Whether a value has more than `limit` characters and parts; looks at no more of it than that.

    A picture is one part.
    """
    size, left = 0, [value]
    while left and size <= limit:
        part = left.pop()
        if is_picture_part(part):
            size += 1
            continue
        size += len(part) if isinstance(part, str | bytes | bytearray) else 1
        if isinstance(part, Mapping | list | tuple):
            size += len(part)
            if size <= limit:
                left += [*part.keys(), *part.values()] if isinstance(part, Mapping) else part
    return size > limit
