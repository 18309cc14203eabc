"""Whether programs can be run in bubblewrap on this machine, for tests of sandboxes."""

import functools

import pytest

from quatrain.sandbox.limits import SandboxUnavailable
from quatrain.sandbox.sandbox import Sandbox


@functools.cache
def _why_not() -> str | None:
    try:
        Sandbox("bubblewrap")
    except SandboxUnavailable as error:
        return str(error)
    return None


needs_bubblewrap = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))
