"""What environments return, and what they get wrong: one fault, which says so."""

import logging
import pickle
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quatrain.episodes.environment import (
    MAX_TURN_CHARS,
    CheckedEnvironment,
    StepResult,
    with_opening,
)
from quatrain.workers.faults import Fault

ANSWER = {"role": "user", "content": "higher"}
FLOOD = "x" * 10_000_000


class Returning:
    """An environment whose methods return what it is given, or raise it."""

    def __init__(self, value):
        self.value = value

    def _come(self):
        if isinstance(self.value, BaseException):
            raise self.value
        return self.value

    def reset(self, **columns):
        return self._come()

    def step(self, completion):
        return self._come()

    def get_reward(self):
        return self._come()

    def close(self):
        self._come()


def checked(value):
    return CheckedEnvironment("environment game.py:Game", Returning(value))


def step_fault(value):
    with pytest.raises(Fault) as caught:
        checked(value).step("4")
    assert str(caught.value).startswith("environment game.py:Game: ")
    assert len(str(caught.value)) < 1000
    return caught.value


def test_a_good_turn():
    turn = checked(StepResult([ANSWER], np.float32(0.5))).step("4")
    assert turn == StepResult((ANSWER,), 0.5)
    assert type(turn.reward) is float
    assert turn.messages[0] is not ANSWER  # which the environment may change afterwards
    assert checked(None).step("4") is None
    assert checked(StepResult([], 1, done=True)).step("4") == StepResult((), 1.0, True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "higher",
            "step must return a quatrain.StepResult(messages, reward, done) or None; got 'higher'; correct",
        ),
        (([ANSWER], 1.0), "step must return a quatrain.StepResult"),
        ({"messages": [ANSWER]}, "step must return a quatrain.StepResult"),
        (
            StepResult("higher"),
            "messages must be a list of dictionaries with `role` and `content`; got 'higher'",
        ),
        (StepResult(ANSWER), "messages must be a list of dictionaries"),
        (StepResult(None), "messages must be a list of dictionaries with `role` and `content`; got None"),
        (
            StepResult(["higher"]),
            "step: a message must have a `role` and a `content`, both strings; got 'higher'",
        ),
        (StepResult([{"role": "user"}]), "a message must have a `role` and a `content`"),
        (StepResult([{"role": "user", "content": 3}]), "a message must have a `role` and a `content`"),
        (StepResult([{"role": "user", "content": "\ud800"}]), "half a surrogate pair"),
        (StepResult([{**ANSWER, "more": object()}]), "must consist of text, numbers, lists and objects"),
        (StepResult([{"role": "assistant", "content": "4"}]), "the last message must not be the assistant's"),
        (StepResult([]), "a turn must have messages, or done=True; got []"),
        (
            StepResult([ANSWER], float("nan")),
            "the reward of a turn must be a finite number, at most 1e+30 in size; got nan",
        ),
        (StepResult([ANSWER], float("inf")), "the reward of a turn must be a finite number"),
        (
            StepResult([ANSWER], "1"),
            "the reward of a turn must be a finite number, at most 1e+30 in size; got '1'",
        ),
        (
            StepResult([ANSWER], None),
            "the reward of a turn must be a finite number, at most 1e+30 in size; got None",
        ),
        (StepResult([ANSWER], np.zeros(2)), "the reward of a turn must be a finite number"),
        (
            FLOOD,
            "step must return a quatrain.StepResult(messages, reward, done) or None; got a value of type str",
        ),
    ],
)
def test_nonsense_is_one_fault(value, message):
    fault = step_fault(value)
    assert message in str(fault)
    assert fault.kind == "invalid"


def circle():
    inner = []
    inner.append(inner)
    return inner


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": FLOOD}],
        [{"role": "user", "content": "x" * (MAX_TURN_CHARS // 2)}] * 2,
        [ANSWER] * MAX_TURN_CHARS,
        [{**ANSWER, "more": [["x"] * 1000] * 1000}],
        [{**ANSWER, "more": circle()}],
    ],
)
def test_a_flood_costs_the_episode(messages):
    fault = step_fault(StepResult(messages))
    assert "the messages of a turn must have at most 1000000 characters; step returned more; cut" in str(
        fault
    )
    assert fault.kind == "too_long"


class Strange:
    """A value that raises whatever is done with it."""

    def __getattr__(self, name):
        raise ZeroDivisionError(name)

    def __bool__(self):
        raise ZeroDivisionError("bool")

    def __repr__(self):
        raise ZeroDivisionError("repr")

    def __float__(self):
        raise ZeroDivisionError("float")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            ValueError("no such word"),
            "step raised ValueError: no such word (test_checked_environment.py, line ",
        ),
        (SystemExit(3), "step raised SystemExit: 3"),
        (ValueError(), "step raised ValueError (test_checked_environment.py"),
        (ValueError(FLOOD), "step raised ValueError: a text of 10000000 characters"),
        (MemoryError(), "step raised MemoryError"),
        (StepResult([ANSWER], Strange()), "step raised ZeroDivisionError: float"),
        (StepResult([ANSWER], 0.0, Strange()), "step raised ZeroDivisionError: bool"),
    ],
)
def test_an_exception_is_a_fault(value, message):
    fault = step_fault(value)
    assert message in str(fault)
    assert fault.kind == "error"
    assert len(fault.detail) < 5000
    again = pickle.loads(pickle.dumps(fault))
    assert (str(again), again.kind, again.detail) == (str(fault), fault.kind, fault.detail)


class Flooding:
    def step(self, completion):
        turn = StepResult([{"role": "user", "content": "x" * 2_000_000}])
        self.turn = weakref.ref(turn)
        if completion == "raise":
            raise LookupError("no such word")
        return turn


def test_a_fault_shows_the_code_and_keeps_no_values():
    fault = step_fault(ValueError("no such word"))
    assert "in _come" in fault.detail
    assert "raise self.value" in fault.detail
    environment = Flooding()
    for completion, kind in (("return", "too_long"), ("raise", "error")):
        with pytest.raises(Fault) as caught:
            CheckedEnvironment("f", environment).step(completion)
        assert caught.value.kind == kind
        assert environment.turn() is None


def test_a_value_that_cannot_be_shown():
    assert "got a value of type Strange" in str(step_fault(Strange()))


def test_an_interrupt_is_no_fault():
    with pytest.raises(KeyboardInterrupt):
        checked(KeyboardInterrupt()).step("4")


def test_an_interrupt_that_is_raised_in_another_thread_is_a_fault():
    # Python interrupts the main thread alone: elsewhere the environment has raised it.
    with ThreadPoolExecutor(1) as threads:
        fault = threads.submit(step_fault, KeyboardInterrupt()).result()
    assert fault.kind == "error"
    assert "step raised KeyboardInterrupt" in str(fault)


def test_a_secret_in_an_exception_is_redacted(monkeypatch):
    monkeypatch.setenv("SERVICE_API_KEY", "s3cr3t-of-the-service")
    assert "401 for [redacted]" in str(step_fault(OSError("401 for s3cr3t-of-the-service")))


@pytest.mark.parametrize("opening", [None, "", []])
def test_reset_may_have_nothing_to_say(opening):
    assert checked(opening).reset({}) is None


def test_what_reset_returns_follows_the_prompt():
    prompt = ({"role": "system", "content": "Play."}, {"role": "user", "content": "Guess."})
    assert with_opening(prompt, checked([ANSWER]).reset({})) == (*prompt, ANSWER)
    assert with_opening(prompt, checked(" 1 to 9.").reset({})) == (
        prompt[0],
        {"role": "user", "content": "Guess. 1 to 9."},
    )
    assert prompt[1]["content"] == "Guess."
    assert with_opening(prompt, None) is prompt
    with pytest.raises(ValueError, match="must be a list of messages"):
        with_opening("Guess.", [ANSWER])


@pytest.mark.parametrize(
    ("value", "message", "kind"),
    [
        (3, "reset must return a list of messages, a text or None; got 3", "invalid"),
        (ANSWER, "reset must return a list of messages, a text or None", "invalid"),
        ([{"role": "user"}], "reset: a message must have a `role` and a `content`", "invalid"),
        ("\ud800", "half a surrogate pair", "invalid"),
        (FLOOD, "must have at most 1000000 characters; reset returned more", "too_long"),
        (RuntimeError("no server"), "reset raised RuntimeError: no server", "error"),
    ],
)
def test_nonsense_of_reset(value, message, kind):
    with pytest.raises(Fault) as caught:
        checked(value).reset({})
    assert message in str(caught.value)
    assert caught.value.kind == kind


class Changing:
    def reset(self, words, **columns):
        words.append("changed")
        columns["inner"]["deep"].clear()

    def step(self, completion):
        return None


def test_an_environment_that_changes_its_columns_changes_copies():
    columns = {"words": ["a"], "inner": {"deep": [1]}, "self": 1}
    with pytest.raises(Fault, match="reset raised TypeError"):  # it cannot take a column `self`
        CheckedEnvironment("g", Changing()).reset(columns)
    del columns["self"]
    assert CheckedEnvironment("g", Changing()).reset(columns) is None
    assert columns == {"words": ["a"], "inner": {"deep": [1]}}


class Silent:
    counts = "many"

    def step(self, completion):
        return None


def test_reset_close_and_get_reward_may_be_left_out():
    environment = CheckedEnvironment("s", Silent())
    assert environment.reset({"a": 1}) is None
    assert environment.final_reward() == 0.0
    assert environment.counts == Counter()
    environment.close()


def test_the_reward_of_the_episode():
    assert checked(1).final_reward() == 1.0
    with pytest.raises(Fault, match=r"get_reward must be a finite number, at most 1e\+30 in size; got None"):
        checked(None).final_reward()


def test_an_error_in_close_is_a_warning(caplog):
    with caplog.at_level(logging.WARNING, "quatrain"):
        checked(OSError("gone")).close()
    assert "environment game.py:Game: close raised OSError: gone" in caplog.text
