"""Whether this machine has bubblewrap, for tests of sandboxes."""

import functools

import pytest

from quatrain.sandbox.limits import SandboxUnavailable
from quatrain.sandbox.sandbox import Sandbox


@functools.cache
def _why_not() -> str | None:
    try:
        ran = Sandbox("bubblewrap").run_python("print(1)")
    except SandboxUnavailable as error:
        return str(error)
    return None if ran.stdout == "1\n" else f"another user cannot run this Python: {ran.stderr[-200:]}"


needs_bubblewrap = pytest.mark.skipif(_why_not() is not None, reason=str(_why_not()))
