"""One of the processes of a test: `member.py MODE --coordinator HOST:PORT --num-processes N --process-id I`.

Prints one JSON object once it has met the others; what MODE asks then happens to the last process.
"""

import argparse
import json
import os
import resource
import signal
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np

from quatrain.cluster import processes as hosts

parser = argparse.ArgumentParser()
parser.add_argument("mode")
parser.add_argument("--directory", help="of what `cannot write` and `judges` save")
parser.add_argument("--coordinator")
parser.add_argument("--num-processes", type=int)
parser.add_argument("--process-id", type=int)
given = parser.parse_args()


def differing():
    try:
        hosts.assert_same("data set", {"prompts.jsonl": f"hash{given.process_id}", "other": 1})
    except ValueError as error:
        return str(error)


class Answers:
    """Answers a judge's questions by their length, and remembers them."""

    def __init__(self, is_everywhere):
        self.is_everywhere, self.asked = is_everywhere, []

    def identity(self):
        return ["weights", given.process_id]

    def ask(self, questions, keep):
        from quatrain.reward.judge.judgements import Judgement, NoJudgement

        self.asked += [question.text.strip() for question in questions]
        outcomes = []
        for question in questions:
            text = question.text.strip()
            outcome = Judgement(len(text) / 4, "é") if len(text) <= 4 else NoJudgement("lost", "no answer")
            keep(question, outcome)
            outcomes.append(outcome)
        return outcomes, Counter(requests=len(questions))


def judged(is_everywhere):
    """What a judge says of a batch, and then of another with the same questions, and what was asked here."""
    sys.path.append(str(Path(__file__).parents[1]))
    from rollouts import make_rollouts

    from quatrain.config.sections.judge import JudgeConfig
    from quatrain.reward.judge.judge import Judge

    folder = Path(given.directory) / f"{is_everywhere} {given.process_id}"
    folder.mkdir()
    (folder / "template").write_text("{completion}\n")
    config = JudgeConfig(self=True, template=str(folder / "template"))
    judge = Judge(config, folder=folder, decide=hosts.decided_by_main, writes=hosts.is_main_process())
    answers = Answers(is_everywhere)
    judge.connect(answers)
    scores = [judge.score(make_rollouts(said)) for said in (["one", "a", "three"], ["a", "one"])]
    return {
        "values": [repr(each.values) for each in scores],
        "counts": [sorted(each.counts.items()) for each in scores],
        "asked": answers.asked,
        "kept": len(list(folder.rglob("*.json"))),
    }


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
    "judged": [judged(is_everywhere) for is_everywhere in (False, True)] if given.mode == "judges" else None,
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
