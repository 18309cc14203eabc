"""Workers without an engine, whose tokens derive from the group alone, and which fail as a test says."""

import threading
import time
import zlib

import numpy as np

from quatrain.rollout.worker import FinishedGroup, WorkerLost
from quatrain.types.rollouts import Completion


def sample(spec, index, version):
    """The completion that every good worker returns for a sample of this group."""
    seed = zlib.crc32(f"{spec.step} {spec.prompt.group_id} {index} {spec.sampling.temperature}".encode())
    tokens = np.random.default_rng(seed).integers(0, 50, 1 + seed % spec.sampling.max_new_tokens).tolist()
    completion = Completion()
    completion.extend(tokens, [-0.5] * len(tokens), version)
    return spec.prompt, completion


class FakeWorker:
    """Finishes one group a call of `take`. `faults` are called with (worker, what it does, groups)."""

    labels_versions = False

    def __init__(self, name, num_slots=4, fault=None):
        self.name, self.num_slots = name, num_slots
        self.fault = fault or (lambda worker, doing: None)
        self.groups, self.most, self.closed = [], 0, threading.Event()
        self.loaded, self.version, self.taken = [], None, 0

    def load(self, weights, version, timeout_s):
        self.fault(self, "load")
        self.loaded.append((weights, version))
        self.version = version
        return version

    def submit(self, groups, version):
        assert version == self.version
        self.fault(self, "submit")
        self.groups += groups
        self.most = max(self.most, len(self.groups))

    def take(self, timeout_s):
        result = self.fault(self, "take")
        if result is not None:
            return result
        if not self.groups:
            return []
        spec = self.groups.pop(0)
        self.taken += 1
        time.sleep(0.002)
        return [self.finished(spec)]

    def finished(self, spec, version=None):
        at = self.version if version is None else version
        return FinishedGroup(spec.number, [sample(spec, i, at) for i in range(spec.sampling.n)])

    def state(self):
        return "busy" if self.groups else "idle"

    def close(self):
        self.closed.set()


class Workers:
    """Factories of fake workers, with all that they have made; `faults` by number of the worker made."""

    def __init__(self, count, faults=None, num_slots=4):
        self.made, self._faults, self._num_slots = [], faults or {}, num_slots
        self._lock = threading.Lock()
        self.factories = [self._make] * count

    def _make(self):
        with self._lock:
            number = len(self.made)
            fault = self._faults.get(number, self._faults.get("all"))
            worker = FakeWorker(f"fake {number}", self._num_slots, fault)
            self.made.append(worker)
        worker.fault(worker, "start")
        return worker


def lost(message="the process has ended"):
    raise WorkerLost(message)
