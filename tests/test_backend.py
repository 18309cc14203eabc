"""The settings that depend on the kind of device."""

from dataclasses import replace

from quatrain.backend import ACCELERATOR, CPU, backend_of, this_backend
from quatrain.ops.logprobs import Tile


def test_a_tile_of_logits_is_small_on_a_cpu_and_at_most_512_mib_elsewhere():
    assert CPU.tile(151936) == CPU.tile(256) == Tile(256, 2048, kept_bytes=2**28)
    tiles = [backend_of("gpu").tile(size) for size in (256, 30000, 151936)]
    assert tiles == [Tile(524288, 256), Tile(4096, 30000), Tile(4096, 32768, unit=128)]


def test_every_kind_but_cpu_has_the_settings_of_accelerators_under_its_own_name():
    assert backend_of("cpu") is CPU
    for kind in ("gpu", "metal"):
        assert backend_of(kind) == replace(ACCELERATOR, kind=kind)
    tpu = {"vocabulary_first": True, "line_tokens": 4096, "experts": "ragged"}
    assert backend_of("tpu") == replace(ACCELERATOR, kind="tpu", **tpu)


def test_jax_is_asked_once_which_kind_of_device_there_is(monkeypatch):
    calls = []
    monkeypatch.setattr("jax.default_backend", lambda: calls.append(1) or "tpu")
    this_backend.cache_clear()
    try:
        assert this_backend() == this_backend() == backend_of("tpu")
        assert calls == [1]
    finally:
        this_backend.cache_clear()
