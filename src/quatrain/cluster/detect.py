"""Detects the cluster (SLURM, GKE or TPU pod) that started this process, and the process's rank in it.

Data flow: environment variables set by SLURM or GKE, or the metadata of a TPU VM -> `ClusterPlace` ->
`processes.initialize`. The detection follows JAX's (same ports, same process order), but outside of a cluster
it neither waits nor raises an error, and a cluster of one process is treated as a single machine.
"""

from __future__ import annotations

import importlib.util
import re
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

TPU_PORT = 8482
# SLURM jobs may share hosts: the job id selects a port between 61440 and 65535.
SLURM_FIRST_PORT, SLURM_NUM_PORTS = 61440, 4096
METADATA_TIMEOUT_S = 5.0

Metadata = Callable[[str], str | None]


@dataclass(frozen=True)
class ClusterPlace:
    """Rank of a process, coordinator and number of processes; `local_device_ids` None: all local devices."""

    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None


def detect(environ: Mapping[str, str], metadata: Metadata | None = None) -> ClusterPlace | None:
    """The place of this process given by SLURM, GKE (TPU) or a TPU pod; None if this is the only process.

    `metadata` reads an attribute of this TPU VM. The default queries the metadata server, and only on a
    machine with a TPU.
    """
    place = _slurm(environ) or _tpu(environ, metadata)
    return place if place is not None and place.num_processes > 1 else None


def _slurm(environ: Mapping[str, str]) -> ClusterPlace | None:
    names = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if any(name not in environ for name in names):
        return None
    job, nodes, _, process, local = (environ[name] for name in names)
    # A shell inside an allocation is a job step with one task, even if the job has more.
    num_tasks = int(environ.get("SLURM_STEP_NUM_TASKS", environ["SLURM_NTASKS"]))
    port = environ.get("JAX_COORDINATOR_PORT") or SLURM_FIRST_PORT + int(job) % SLURM_NUM_PORTS
    # One GPU if several tasks share a host; all visible GPUs else, or if SLURM binds one to each task.
    alone = int(environ.get("SLURM_STEP_NUM_NODES", 1)) == num_tasks
    bound = "," not in environ.get("CUDA_VISIBLE_DEVICES", ",")
    devices = None if alone or bound else (int(local),)
    return ClusterPlace(f"{first_host(nodes)}:{port}", num_tasks, int(process), devices)


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list, such as `a`, `a,b` or `a[001-003,7],b`."""
    match = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    if match is None:
        raise ValueError(
            f"SLURM_STEP_NODELIST must name hosts, such as node[1-2]; got {nodes!r}; give --coordinator"
        )
    return match[1] + (match[2] or "")


def _tpu(environ: Mapping[str, str], metadata: Metadata | None) -> ClusterPlace | None:
    hosts = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    worker = environ.get("TPU_WORKER_ID")
    if "tpu" not in (environ.get("JAX_PLATFORMS") or "tpu"):
        return None
    slices: Mapping[str, str] = environ
    if not (hosts and worker) and (metadata is not None or _has_tpu(environ)):
        read = metadata or (lambda key: _read_metadata(key, environ))
        hosts, worker = read("worker-network-endpoints"), read("agent-worker-number")
        # lines NAME: 'value'
        variables = re.findall(r"^\s*(\w+)\s*:\s*'?([^'\n]*?)'?\s*$", read("tpu-env") or "", re.MULTILINE)
        slices = {**dict(variables), **environ}
    if not (hosts and worker):
        return None
    # HOST, HOST:PORT, or NAME:ID:IP as on older TPU VMs
    endpoints = [endpoint.strip().split(":") for endpoint in hosts.split(",")]
    workers = [parts[2] if len(parts) == 3 else parts[0] for parts in endpoints]
    main = slices.get("MEGASCALE_COORDINATOR_ADDRESS", workers[0]).split(":")[0]
    before = int(slices.get("MEGASCALE_SLICE_ID", 0)) * len(workers)
    return ClusterPlace(
        f"{main}:{environ.get('JAX_COORDINATOR_PORT') or TPU_PORT}",
        int(slices.get("MEGASCALE_NUM_SLICES", 1)) * len(workers),
        before + int(worker),
    )


def _has_tpu(environ: Mapping[str, str]) -> bool:
    """Whether this machine has a TPU that JAX could use, and TPU_SKIP_MDS_QUERY does not forbid the query."""
    devices = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev/vfio").glob("[0-9]*")]
    installed = importlib.util.find_spec("libtpu") is not None
    return installed and bool(devices) and "TPU_SKIP_MDS_QUERY" not in environ


def _read_metadata(key: str, environ: Mapping[str, str]) -> str | None:
    server = environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with without_proxy.open(request, timeout=METADATA_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except OSError:
        return None
