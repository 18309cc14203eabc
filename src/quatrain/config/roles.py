"""Devices and mesh shapes of a run's roles: training, rollout, reference, critic, reward models, teacher.

Data flow: `Config` and the number of devices -> `Roles`, and for rollout workers on Ray `worker_config` ->
the plan, the meshes of a run and the workers' processes. This module does not import JAX.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from quatrain.config.mesh import MeshShape, axis_sizes, device_numbers, devices_of_process, resolve_mesh
from quatrain.config.mesh_axes import CP, DATA_AXES, DP, EP, TP
from quatrain.config.schema import Config


@dataclass(frozen=True)
class Role:
    """Device numbers within a process, the same in every process, and the mesh shape over all processes."""

    devices: tuple[int, ...]
    mesh: MeshShape


@dataclass(frozen=True)
class Roles:
    """All roles of a run; those without a model in this run are ignored."""

    train: Role
    rollout: Role
    """That of training where workers or servers sample, with devices of their own."""
    reference: Role
    critic: Role
    """Only used with a critic."""
    reward: Role
    """Only used with reward models."""
    teacher: Role
    """Only used with a teacher."""


def resolve_roles(config: Config, num_devices: int, num_processes: int = 1) -> Roles:
    """The roles of a run on `num_devices` devices of `num_processes` processes in total.

    Devices of rollout workers are not among them, and their `rollout.mesh` is not resolved here.

    Raises ValueError if a mesh does not match its number of devices, a role uses a device that does not
    exist, two roles share some but not all of their devices, `rollout.max_concurrency` is smaller than the
    number of rollout replicas, or `offload.policy` would give the rollout no room.
    """
    devices = _devices(config, devices_of_process(num_devices, num_processes))
    train = resolve_mesh(config.mesh, len(devices["train"]) * num_processes, num_processes)

    def like_training(numbers: tuple[int, ...]) -> Role:
        if numbers == devices["train"]:
            return Role(numbers, train)
        return Role(numbers, resolve_mesh("auto", len(numbers) * num_processes, num_processes))

    by_name = {name: like_training(numbers) for name, numbers in devices.items()}
    by_name["rollout"] = by_name["train"]
    if not config.rollout.has_fleet:
        by_name["rollout"] = _rollout(config, devices["rollout"], by_name["train"], num_processes)
    if config.distill.mesh is not None:
        numbers, spec = devices["teacher"], config.distill.mesh
        mesh = resolve_mesh(spec, len(numbers) * num_processes, num_processes, name="distill.mesh")
        by_name["teacher"] = Role(numbers, mesh)
    roles = Roles(**by_name)
    if config.offload.policy:
        _check_room_for_rollout(config, roles)
    return roles


def _rollout(config: Config, devices: tuple[int, ...], train: Role, num_processes: int) -> Role:
    """The role of a rollout on `devices` of this run, with a check of `rollout.max_concurrency`."""
    spec: str | Mapping[str, int] | None = config.rollout.mesh
    name = "rollout.mesh"
    if spec is None:
        name = "rollout.mesh (null: tp and ep are those of mesh)"
        copy = train.mesh.tp * train.mesh.ep
        replicas = train.mesh.num_devices // copy if devices == train.devices else -1
        spec = {DP: replicas, TP: train.mesh.tp, EP: train.mesh.ep}
    mesh = resolve_mesh(spec, len(devices) * num_processes, num_processes, name=name)
    if mesh.cp > 1:
        raise ValueError(
            f"{CP} of {name} must be 1: the sampler computes one token of a sequence at a time, which "
            f"devices cannot split; got {mesh.cp}; leave {CP} out, or take {TP}"
        )
    concurrency = config.rollout.max_concurrency
    if concurrency is not None and concurrency < mesh.num_data_shards:
        raise ValueError(
            f"rollout.max_concurrency must be at least 1 for each replica of the sampler; got {concurrency} "
            f"and {mesh.num_data_shards} replicas ({' x '.join(DATA_AXES)} of rollout.mesh); raise "
            f"rollout.max_concurrency, or {TP} of rollout.mesh"
        )
    return Role(devices, mesh)


def _check_room_for_rollout(config: Config, roles: Roles) -> None:
    """Raises ValueError if the rollout gains no memory from parameters that wait in the host's memory."""
    rollout, model = config.rollout, config.model
    copied = model.dtype != model.param_dtype or roles.rollout.mesh != roles.train.mesh
    copied |= config.lora.rank > 0 and rollout.lora == "merged"
    if rollout.has_fleet:
        problem = "rollout.workers and rollout.servers sample on devices of their own"
    elif rollout.max_staleness:
        problem = f"with rollout.max_staleness {rollout.max_staleness} the rollout never stops"
    elif roles.rollout.devices != roles.train.devices:
        problem = "the rollout has devices of its own, and those of training wait for it"
    elif copied:
        return
    else:
        problem = (
            f"the rollout computes with these very parameters, as model.dtype and model.param_dtype are "
            f"{model.dtype} and both meshes {roles.train.mesh}"
        )
    raise ValueError(
        "offload.policy must be false unless it gives the rollout the room of the policy's parameters; "
        f"{problem}; set it to false, or remove that reason"
    )


def _devices(config: Config, in_process: int) -> dict[str, tuple[int, ...]]:
    """The device numbers of each role, in a process with `in_process` devices."""
    devices = {"train": tuple(range(in_process))}
    for role, spec in config.placement.model_dump().items():
        devices[role] = devices["train"] if spec is None else device_numbers(spec)
        if missing := set(devices[role]) - set(range(in_process)):
            raise ValueError(
                f"placement.{role} must name devices 0 to {in_process - 1}, as each process has "
                f"{in_process}; got {spec}, with {min(missing)}; name other devices"
            )
    for one, other in combinations(devices, 2):
        both = sorted(set(devices[one]) & set(devices[other]))
        if both and devices[one] != devices[other]:
            first, second, common = (",".join(map(str, n)) for n in (devices[one], devices[other], both))
            raise ValueError(
                f"two roles must have the same devices or none in common; {one} has {first}, {other} "
                f"{second}, and both have {common}; change placement.{one} or placement.{other}"
            )
    return devices


def worker_config(config: Config) -> Config:
    """The configuration of a rollout worker, which has all devices of its own process and only samples."""
    rollout, spec = config.rollout, _mesh(config)
    most = rollout.max_concurrency
    own = {
        "workers": 0,
        "weights_dir": None,
        "stream_weights": False,
        "mesh": spec,
        "max_staleness": 0,
        "greedy_baseline": False,
        "max_concurrency": most and -(-most // max(rollout.workers, 1)),
    }
    return config.model_copy(
        update={
            "mesh": spec,
            "rollout": rollout.model_copy(update=own),
            "placement": type(config.placement)(),
            "offload": type(config.offload)(),
            "critic": type(config.critic)(enabled=False),
        }
    )


def devices_of_worker(config: Config) -> int:
    """The accelerators that a worker gets: those that its mesh names, one for an axis of -1."""
    return math.prod(max(size, 1) for size in axis_sizes(_mesh(config), "rollout.mesh").values())


def _mesh(config: Config) -> Any:
    """The mesh of each worker: `rollout.mesh`, or replicas of the sampler with `tp` of `mesh`."""
    if config.rollout.mesh is not None:
        return config.rollout.mesh
    tp = 1 if config.mesh == "auto" else axis_sizes(config.mesh)[TP]
    return f"-1,1,{tp}" if tp > 0 else "1,1,-1"
