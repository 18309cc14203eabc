"""The settings that depend on the kind of device."""

from dataclasses import replace

from quatrain.backend import ACCELERATOR, CPU, backend_of, this_backend
from quatrain.ops.logprobs import Tile


def test_a_tile_of_logits_is_small_on_a_cpu_and_at_most_512_mib_elsewhere():
    assert CPU.tile(151936) == CPU.tile(256) == Tile(256, 2048, kept_bytes=2**28)
    tiles = [backend_of("gpu").tile(size) for size in (256, 49152, 151936, 2**30)]
    assert tiles == [Tile(524288, 256), Tile(2048, 49152), Tile(512, 151936), Tile(1, 2**30)]


def test_every_kind_but_cpu_has_the_settings_of_accelerators_under_its_own_name():
    """TPUs differ in the length of buffers alone."""
    assert backend_of("cpu") is CPU
    assert [backend_of(kind).kind for kind in ("gpu", "tpu", "metal")] == ["gpu", "tpu", "metal"]
    for kind in ("gpu", "tpu", "metal"):
        line = 4096 if kind == "tpu" else None
        assert backend_of(kind) == replace(ACCELERATOR, kind=kind, line_tokens=line)


def test_jax_is_asked_once_which_kind_of_device_there_is(monkeypatch):
    calls = []
    monkeypatch.setattr("jax.default_backend", lambda: calls.append(1) or "tpu")
    this_backend.cache_clear()
    try:
        assert this_backend() == this_backend() == backend_of("tpu")
        assert calls == [1]
    finally:
        this_backend.cache_clear()
