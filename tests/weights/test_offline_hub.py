import socket

import pytest
from huggingface_hub import constants

from quatrain.weights import offline_hub
from quatrain.weights.load_model import load_architecture


def _no_name(*args, **options):
    raise socket.gaierror(-2, "Name or service not known")


def test_a_host_name_that_does_not_resolve_is_an_error_at_once(monkeypatch):
    """Catches half a minute of retries before the error, and settings that stay changed after it."""
    monkeypatch.setattr(offline_hub, "getproxies", dict)
    monkeypatch.setattr(socket, "getaddrinfo", _no_name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(
        ValueError, match=r"\(the host name \S+ does not resolve: Name or service not known; "
    ):
        load_architecture("nobody/no-such-model")
    assert constants.HF_HUB_OFFLINE is False


def test_a_proxy_asks_in_our_place(monkeypatch):
    monkeypatch.setattr(offline_hub, "getproxies", lambda: {"https": "http://proxy"})
    monkeypatch.setattr(socket, "getaddrinfo", _no_name)
    with offline_hub.hub_without_retries() as unreachable:
        assert (unreachable, constants.HF_HUB_OFFLINE) == ("", constants.HF_HUB_OFFLINE)
