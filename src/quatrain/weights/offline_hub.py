"""The Hugging Face Hub where its name does not resolve, as on machines without a network.

Used around every download: `huggingface_hub` and `datasets` would try five times, for half a minute.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies


@contextmanager
def hub_without_retries() -> Iterator[str]:
    """Within the block, only what is cached is read if the Hub's host name does not resolve.

    Yields why the Hub cannot be reached, empty if its name resolves (or a proxy asks in our place).
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname or constants.ENDPOINT
    unreachable = "" if constants.HF_HUB_OFFLINE or getproxies() else _unresolved(host)
    if not unreachable:
        yield ""
        return
    settings = [constants, *filter(None, [sys.modules.get("datasets.config")])]
    before = [module.HF_HUB_OFFLINE for module in settings]
    for module in settings:
        module.HF_HUB_OFFLINE = True
    try:
        yield unreachable
    finally:
        for module, offline in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = offline


def _unresolved(host: str) -> str:
    try:
        socket.getaddrinfo(host, 443)
    except OSError as error:
        return f"the host name {host} does not resolve: {error.strerror or error}"
    return ""
