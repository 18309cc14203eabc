import pytest

from quatrain.cluster import detect as clusters
from quatrain.cluster.detect import ClusterPlace, detect, first_host

SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[007-009,12],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "4",
}
GKE = {"TPU_WORKER_HOSTNAMES": "job-0-0.set,job-0-1.set", "TPU_WORKER_ID": "1"}
POD = {"worker-network-endpoints": "10.0.0.5,10.0.0.6,10.0.0.7", "agent-worker-number": "2"}


def test_a_plain_machine_is_in_no_cluster():
    assert detect({}) is None


def test_a_machine_without_a_tpu_asks_nobody(monkeypatch):
    monkeypatch.setattr(clusters, "_read_metadata", lambda key, environ: pytest.fail(f"asked for {key}"))
    monkeypatch.setattr(clusters, "_has_tpu", lambda environ: False)
    assert detect({}) is None
    monkeypatch.setattr(clusters, "_has_tpu", lambda environ: True)
    assert detect({"JAX_PLATFORMS": "cpu"}) is None


def test_slurm():
    assert detect(SLURM) == ClusterPlace("node007:61441", 4, 2)
    assert detect({**SLURM, "JAX_COORDINATOR_PORT": "7000"}) == ClusterPlace("node007:7000", 4, 2)


@pytest.mark.parametrize(
    "alone",
    [
        {"SLURM_NTASKS": "1"},
        {"SLURM_STEP_NUM_TASKS": "1"},  # a shell in an allocation of several tasks
    ],
)
def test_one_task_of_slurm_is_alone(alone):
    assert detect({**SLURM, "SLURM_PROCID": "0", **alone}) is None


def test_a_batch_script_outside_srun_is_no_task():
    assert detect({k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}) is None


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({"SLURM_STEP_NUM_NODES": "2"}, (3,)),
        ({"SLURM_STEP_NUM_NODES": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (3,)),
        ({"SLURM_STEP_NUM_NODES": "2", "CUDA_VISIBLE_DEVICES": "3"}, None),
        ({"SLURM_STEP_NUM_NODES": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, None),
    ],
)
def test_tasks_that_share_a_host_share_its_gpus(variables, devices):
    place = detect({**SLURM, "SLURM_LOCALID": "3", **variables})
    assert place == ClusterPlace("node007:61441", 4, 2, devices)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("node[1-2]", "node1"),
        ("node[001,007-015],host2", "node001"),
        ("n-1.local", "n-1.local"),
    ],
)
def test_the_first_host_of_a_list(nodes, first):
    assert first_host(nodes) == first


def test_an_empty_list_of_hosts_is_refused():
    with pytest.raises(ValueError, match="SLURM_STEP_NODELIST must name hosts"):
        first_host("")


def test_gke():
    assert detect(GKE) == ClusterPlace("job-0-0.set:8482", 2, 1)
    assert detect({**GKE, "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}) is None
    addresses = {"TPU_PROCESS_ADDRESSES": "10.0.0.1:8476,10.0.0.2:8476", "TPU_WORKER_ID": "0"}
    assert detect(addresses) == ClusterPlace("10.0.0.1:8482", 2, 0)


def test_several_slices():
    slices = {
        "MEGASCALE_NUM_SLICES": "3",
        "MEGASCALE_SLICE_ID": "2",
        "MEGASCALE_COORDINATOR_ADDRESS": "set-0-0.set:8080",
    }
    assert detect({**GKE, **slices}) == ClusterPlace("set-0-0.set:8482", 6, 5)


def test_a_tpu_pod():
    assert detect({}, POD.get) == ClusterPlace("10.0.0.5:8482", 3, 2)
    old = {**POD, "worker-network-endpoints": "a:0:10.0.0.8,b:1:10.0.0.9,c:2:10.0.0.10"}
    assert detect({}, old.get) == ClusterPlace("10.0.0.8:8482", 3, 2)


def test_slices_of_tpu_pods():
    attributes = {
        **POD,
        "tpu-env": "ACCELERATOR_TYPE: 'v5litepod-16'\nMEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\n"
        "MEGASCALE_COORDINATOR_ADDRESS: '10.0.0.2'\n",
    }
    assert detect({}, attributes.get) == ClusterPlace("10.0.0.2:8482", 6, 5)


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"worker-network-endpoints": "10.0.0.5", "agent-worker-number": "0"},
        {"worker-network-endpoints": "10.0.0.5,10.0.0.6"},
    ],
)
def test_a_tpu_vm_that_is_alone(attributes):
    assert detect({}, attributes.get) is None


def test_metadata_that_does_not_answer_is_none():
    assert clusters._read_metadata("tpu-env", {"GCE_METADATA_IP": "127.0.0.1:1"}) is None
