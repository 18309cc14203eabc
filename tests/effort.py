"""How long a call takes, where a slower one would be a fault."""

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

ATTEMPTS = 3


def within(
    seconds: float, call: Callable[[], Result], clock: Callable[[], float] = time.process_time
) -> Result:
    """What ``call`` returns; one of three attempts must take less than ``seconds``.

    An algorithm of a higher order takes too long each time; a collection of garbage, or a
    neighbour on the same core, delays one attempt.
    """
    took = []
    for _ in range(ATTEMPTS):
        began = clock()
        result = call()
        took.append(clock() - began)
        if took[-1] < seconds:
            return result
    raise AssertionError(
        f"took {', '.join(f'{each:.2f}' for each in took)} s; at most {seconds} s are allowed"
    )
