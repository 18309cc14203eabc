"""One of the processes of a test: `member.py MODE --coordinator HOST:PORT --num-processes N --process-id I`.

Prints one JSON object once it has met the others; what MODE asks then happens to the last process.
"""

import argparse
import json
import os
import resource
import signal
import sys

import jax
import numpy as np

from quatrain.cluster import processes as hosts

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("--directory", help="of the checkpoints that `cannot write` saves")
parser.add_argument("--coordinator")
parser.add_argument("--num-processes", type=int)
parser.add_argument("--process-id", type=int)
given = parser.parse_args()


def differing():
    try:
        hosts.assert_same("data set", {"prompts.jsonl": f"hash{given.process_id}", "other": 1})
    except ValueError as error:
        return str(error)


def save_twice():
    """Checkpoints of an array on all devices; the last process cannot write its part of the second."""
    from quatrain.run.checkpoint import Checkpointer, SaveFailed

    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    numbers = np.random.default_rng(0).random(800_000, np.float32)
    arrays = {"w": jax.make_array_from_callback(numbers.shape, sharding, lambda index: numbers[index])}
    checkpoints = Checkpointer(given.directory)
    checkpoints.save(1, arrays, {})
    checkpoints.wait()
    if last:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        checkpoints.save(2, arrays, {})
        checkpoints.wait()
    except SaveFailed as error:
        hosts.abandon(str(error), 5)


hosts.initialize(
    given.coordinator,
    given.num_processes,
    given.process_id,
    start_timeout_s=60,
    heartbeat_timeout_s=3 if given.mode == "hangs" else 60,
)
last = given.process_id == given.num_processes - 1
if given.mode == "killed at once":
    # No device is used before: what the others say then may not wait for one.
    os.kill(os.getpid(), signal.SIGKILL) if last else signal.pause()
hosts.MOST_BYTES = 1024
met = {
    "decided": hosts.decided_by_main(
        lambda: ["é" * 2000, -0.0, 0.1 + 0.2, float("nan"), float("-inf"), 5e-324, 2**70, True, None, ""]
    ),
    "gathered": hosts.gather_objects({"id": given.process_id, "text": "é" * 500 * given.process_id}),
    "differing": differing(),
    "devices": [jax.local_device_count(), jax.device_count(), hosts.num_processes()],
    "main": hosts.is_main_process(),
}
print(json.dumps(met), flush=True)
if last and given.mode == "dies":
    os._exit(9)
if last and given.mode == "hangs":
    os.kill(os.getpid(), signal.SIGSTOP)
if last and given.mode == "fails":
    hosts.abandon("out of luck", 5)
if given.mode == "cannot write":
    save_twice()
if not last and given.mode in ("dies", "fails"):
    try:
        hosts.gather_objects("waits in a collective")
    except Exception as error:
        hosts.wait_for_failure_message()
        sys.exit(f"no news of the process that broke it: {error}")
if not last and given.mode == "hangs":
    signal.pause()
hosts.shutdown()
print("left", flush=True)
