"""One device and eight, however arranged, in one process or two: the same tokens, losses and weights."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "mesh_worker.py"
ONE = "placement.train=0"
APART = (
    "mesh=2,2,1 placement.train=0-3 placement.rollout=4-5 rollout.mesh=1,1,2 "
    "placement.reference=6,7 placement.critic=6,7"
)
OFFLOADED = "offload.reference=true offload.optimizer=true offload.critic=true"
QUICK = "mesh=1,2,2,2,2"
"""On 16 devices."""
LAYOUTS = (
    "mesh=8,1,1",
    "mesh=1,8,1",
    "mesh=1,2,4",
    "mesh=2,2,2",
    "mesh=1,2,2,2",
    "mesh=2,1,1,4",
    "mesh=1,2,1,1,4",
    "mesh=2,1,4 rollout.mesh=1,4,2",
    "mesh=1,4,2 rollout.mesh=2,1,4",
    f"mesh=1,8,1 {OFFLOADED} offload.policy=true",
    f"{APART} {OFFLOADED}",
)
IN_TWO_PROCESSES = (
    "mesh=1,8,1",
    "mesh=auto",
    "mesh=2,2,2 rollout.mesh=1,2,4",
    "mesh=1,-1,2 placement.train=0,1 placement.rollout=2,3 placement.reference=2,3 placement.critic=2,3",
)
MODES = ("rows", "tokens")
EXPERTS = (
    "mesh=1,2,1,2,2",
    "mesh=1,8,1",
    "mesh=2,1,4",
    "mesh=1,1,1,1,8",
    "mesh=2,1,2,1,2",
    "mesh=1,2,1,1,4 rollout.mesh=1,1,4,1,2",
    "mesh=1,2,2,1,2 rollout.mesh=8,1,1",
)
EXPERTS_IN_TWO_PROCESSES = ("mesh=1,1,1,1,8", "mesh=1,2,1,1,4", "mesh=2,1,2,1,2")
"""`ep` within and over processes."""


def _start(target: Path, layouts: tuple[str, ...], devices: int, **environment: str) -> subprocess.Popen:
    environment |= {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.Popen([sys.executable, WORKER, target, *layouts], env=os.environ | environment)


def _results(target: Path, *processes: subprocess.Popen) -> dict[str, np.ndarray]:
    assert [process.wait() for process in processes] == [0] * len(processes)
    with np.load(target) as results:
        return dict(results)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    target = tmp_path_factory.mktemp("meshes") / "quick.npz"
    return _results(target, _start(target, (ONE, QUICK), devices=16, MODES="both"))


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return _all_results(tmp_path_factory, LAYOUTS, IN_TWO_PROCESSES, MODES)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return _all_results(tmp_path_factory, EXPERTS, EXPERTS_IN_TWO_PROCESSES, ("experts",))


def _all_results(tmp_path_factory, layouts, in_two_processes, modes):
    """Those of layouts of one process, and beside them of two processes, which begin with `2 x 4`."""
    folder, modes = tmp_path_factory.mktemp("meshes"), {"MODES": " ".join(modes)}
    results = _results(folder / "one.npz", _start(folder / "one.npz", (ONE, *layouts), devices=8, **modes))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"COORDINATOR": f"127.0.0.1:{free.getsockname()[1]}", "NUM_PROCESSES": "2", **modes}
    two = [
        _start(folder / "two.npz", in_two_processes, devices=4, PROCESS_ID=str(i), **place) for i in range(2)
    ]
    return results | {f"2 x 4: {name}": value for name, value in _results(folder / "two.npz", *two).items()}


def _of(results, layout, mode):
    start = f"{layout} {mode} "
    return {name.removeprefix(start): results[name] for name in results if name.startswith(start)}


def _assert_same(results, layout, mode):
    expected, got = (_of(results, of, mode) for of in (ONE, layout))
    assert expected["steps"] == 6
    assert expected["moved"] > 3e-3
    for name, value in expected.items():
        kind = name.split()[0]
        if kind in ("tokens", "lengths"):
            np.testing.assert_array_equal(got[name], value, err_msg=name)
        elif kind not in ("held", "kept"):
            largest = np.abs(value).max()
            np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-5 * largest, err_msg=name)


def test_sixteen_devices_train_as_one_does(quick):
    """With a critic, and a layer that has experts before one that has none."""
    _assert_same(quick, QUICK, "both")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*EXPERTS, *(f"2 x 4: {layout}" for layout in EXPERTS_IN_TWO_PROCESSES)])
def test_every_layout_of_experts_trains_as_one_device_does(experts, layout):
    _assert_same(experts, layout, "experts")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", [*LAYOUTS, *(f"2 x 4: {layout}" for layout in IN_TWO_PROCESSES)])
def test_every_layout_of_eight_devices_trains_as_one_device_does(every, layout, mode):
    _assert_same(every, layout, mode)


def test_what_is_sampled_differs_by_step_and_has_ragged_lengths(quick):
    """So that equal tokens mean something."""
    found = _of(quick, ONE, "both")
    assert len({found[f"tokens {step}"].tobytes() for step in range(3)}) == 3
    assert {found[f"lengths {step}"].min() for step in range(3)} <= set(range(1, 5))
    assert {found[f"lengths {step}"].max() for step in range(3)} == {9}
    assert found["tokens 0 greedy"].tobytes() != found["tokens 2 greedy"].tobytes()


@pytest.mark.slow
def test_what_is_offloaded_waits_in_the_memory_of_the_host(every):
    for layout in LAYOUTS:
        memory = "pinned_host" if OFFLOADED in layout else "device"
        kept = {every[f"{layout} rows kept {name}"].item() for name in ("optimizer", "reference")}
        assert kept | {every[f"{layout} tokens kept critic"].item()} == {memory}, layout
        policy = "pinned_host" if "offload.policy" in layout else "device"
        assert every[f"{layout} rows kept policy"].item() == policy, layout


def test_no_device_holds_what_is_anothers(quick):
    """In two parts by `tp`, and each in eight by `fsdp`, `cp` and `ep`."""
    in_layers = "[0]['qkv']", "[0]['o']", "[0]['experts_gate_up']", "[0]['experts_down']", "[1]['gate_up']"
    for name in ("['embed']", *(f"['layers']{name}" for name in in_layers)):
        held = quick[f"{QUICK} both held {name}"]
        assert held * 16 == quick[f"{QUICK} both weights {name}"].size, name
