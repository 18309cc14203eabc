import pytest

from quatrain.config.load import load_config
from quatrain.config.mesh import MeshShape
from quatrain.config.roles import Role, resolve_roles


def _roles(*overrides, devices=8, processes=1):
    return resolve_roles(load_config(None, overrides, environ={}).config, devices, processes)


@pytest.mark.parametrize(
    ("overrides", "train", "rollout", "reference"),
    [
        ((), (1, 8, 1), (8, 1, 1), (1, 8, 1)),
        (("mesh=2,2,2",), (2, 2, 2), (4, 1, 2), (2, 2, 2)),
        (("mesh=1,4,2", "rollout.mesh=1,1,8"), (1, 4, 2), (1, 1, 8), (1, 4, 2)),
        (("mesh={tp: 2, cp: 4}",), (1, 1, 2, 4), (4, 1, 2), (1, 1, 2, 4)),
        (("mesh={fsdp: 2, ep: 4}",), (1, 2, 1, 1, 4), (2, 1, 1, 1, 4), (1, 2, 1, 1, 4)),
        (("placement.train=0-3", "mesh=1,-1,1"), (1, 4, 1), (4, 1, 1), (1, 4, 1)),
        (("placement.train=0-3", "placement.rollout=4,5"), (1, 4, 1), (2, 1, 1), (1, 4, 1)),
        (
            ("placement.train=0-3", "placement.rollout=4-7", "placement.reference=4-7", "mesh=1,2,2"),
            (1, 2, 2),
            (2, 1, 2),
            (1, 4, 1),
        ),
    ],
)
def test_the_meshes_of_the_roles(overrides, train, rollout, reference):
    roles = _roles(*overrides)
    expected = tuple(MeshShape(*sizes) for sizes in (train, rollout, reference))
    assert (roles.train.mesh, roles.rollout.mesh, roles.reference.mesh) == expected


def test_devices_are_numbered_in_each_process():
    roles = _roles("placement.train=0,1", "placement.rollout=3", processes=2)
    assert (roles.train.devices, roles.train.mesh) == ((0, 1), MeshShape(*(2, 2, 1)))
    assert (roles.rollout.devices, roles.rollout.mesh) == ((3,), MeshShape(*(2, 1, 1)))
    assert roles.reference == roles.critic == roles.reward == roles.train


def test_critic_and_reward_models_have_devices_of_their_own():
    judged = "reward.functions={'model:judge': 1.0}"
    places = ("placement.train=0-3", "placement.critic=4,5", "placement.reward=4,5", "mesh=2,2,2")
    roles = _roles("advantage.estimator=gae", judged, *places, processes=2, devices=16)
    assert roles.critic == roles.reward == Role((4, 5), MeshShape(2, 2))
    with pytest.raises(
        ValueError, match=r"critic has 4,5, reward 5,6, and both have 5; change placement\.critic"
    ):
        _roles("advantage.estimator=gae", judged, *places[:2], "placement.reward=5,6")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("placement.train=0-3", "placement.rollout=3-7"),
            "train has 0,1,2,3, rollout 3,4,5,6,7, and both have 3; change placement.train or",
        ),
        (
            ("placement.train=0", "placement.rollout=1,2", "placement.reference=2"),
            "rollout has 1,2, reference 2, and both have 2; change placement.rollout or placement.reference",
        ),
        (
            ("placement.rollout=6-8",),
            "placement.rollout must name devices 0 to 7, as each process has 8; got 6-8",
        ),
        (("rollout.max_concurrency=7",), "got 7 and 8 replicas"),
        (("rollout.mesh={dp: 4, cp: 2}",), "cp of rollout.mesh must be 1: the sampler computes one token"),
        (("placement.train=0-5", "mesh=4,-1,1"), "dp 4, fsdp -1, tp 1 for 6 devices"),
        (("placement.train=0-5", "rollout.mesh=8,1,1"), "axis sizes of rollout.mesh must be the number"),
        (
            ("placement.train=0-3", "placement.rollout=4", "mesh=1,2,2"),
            r"rollout.mesh \(null: tp and ep are those of mesh\) must be the number of devices",
        ),
    ],
)
def test_roles_that_do_not_come_out_even_are_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        _roles(*overrides)


@pytest.mark.parametrize("fleet", ["rollout.workers=2", "rollout.servers=[http://a:1]"])
def test_with_workers_or_servers_no_device_of_the_run_samples(fleet):
    """The mesh of a worker is not one of the training devices, nor are its sequences at a time."""
    mesh = ("rollout.mesh=1,1,4",) if "workers" in fleet else ()
    roles = _roles(fleet, *mesh, "rollout.max_concurrency=7", "mesh=2,2,2")
    assert roles.rollout == roles.train


def test_devices_that_processes_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="got 8 devices and 3 processes"):
        _roles(processes=3)


@pytest.mark.parametrize(
    ("overrides", "devices", "message"),
    [
        ((), 1, r"computes with these very parameters, .* are float32 and both meshes 1,1,1; set it to"),
        (("mesh=4,1,2",), 8, "both meshes 4,1,2"),
        (("lora.rank=2", "rollout.lora=adapter"), 1, "these very parameters"),
        (
            ("rollout.max_staleness=1", "model.dtype=bfloat16"),
            1,
            "with rollout.max_staleness 1 the rollout never stops",
        ),
        (("placement.train=0", "placement.rollout=1"), 2, "the rollout has devices of its own"),
        (("rollout.workers=1", "model.dtype=bfloat16"), 1, "rollout.workers and rollout.servers sample on"),
    ],
)
def test_a_policy_that_waits_in_the_hosts_memory_must_give_the_rollout_room(overrides, devices, message):
    with pytest.raises(ValueError, match=f"offload.policy must be false unless .*{message}"):
        _roles(*overrides, "offload.policy=true", devices=devices)


@pytest.mark.parametrize(
    ("overrides", "devices"), [((), 8), (("model.dtype=bfloat16",), 1), (("lora.rank=2",), 1)]
)
def test_a_policy_may_wait_where_the_rollout_has_a_copy(overrides, devices):
    assert _roles(*overrides, "offload.policy=true", devices=devices).train.devices
