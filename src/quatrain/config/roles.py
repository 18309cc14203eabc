"""Who computes where: the devices of training, rollout and reference policy, and their meshes.

Data flow: `Config` and the number of devices -> `Roles` -> the plan, and the meshes of a run. No JAX.
"""

from __future__ import annotations

from dataclasses import dataclass

from quatrain.config.mesh import MeshShape, device_numbers, devices_of_process, resolve_mesh
from quatrain.config.schema import Config


@dataclass(frozen=True)
class Role:
    """The numbers of its devices, the same in every process, and their arrangement."""

    devices: tuple[int, ...]
    mesh: MeshShape


@dataclass(frozen=True)
class Roles:
    """All roles of a run; the reference policy is there where KL is taken to it."""

    train: Role
    rollout: Role
    reference: Role


def resolve_roles(config: Config, num_devices: int, num_processes: int = 1) -> Roles:
    """The roles of a run on `num_devices` devices of `num_processes` processes.

    Raises ValueError where a mesh does not multiply to its devices, a role names a device that is not there,
    two have some devices in common, but not all, and where there is not a sequence for each replica.
    """
    devices = _devices(config, devices_of_process(num_devices, num_processes))
    train = resolve_mesh(config.mesh, len(devices["train"]) * num_processes, num_processes)
    spec, name = config.rollout.mesh, "rollout.mesh"
    if spec is None:
        name = "rollout.mesh, which takes tp of mesh where it is null,"
        same = devices["rollout"] == devices["train"]
        spec = f"{train.num_data_shards if same else -1},1,{train.tp}"
    rollout = resolve_mesh(spec, len(devices["rollout"]) * num_processes, num_processes, name=name)
    concurrency = config.rollout.max_concurrency
    if concurrency is not None and concurrency < rollout.num_data_shards:
        raise ValueError(
            f"each replica of the sampler decodes a sequence at least; got rollout.max_concurrency "
            f"{concurrency} and {rollout.num_data_shards} replicas (dp x fsdp of rollout.mesh); raise the "
            "former, or tp of rollout.mesh"
        )
    reference = train
    if devices["reference"] != devices["train"]:
        reference = resolve_mesh("auto", len(devices["reference"]) * num_processes, num_processes)
    return Roles(
        Role(devices["train"], train),
        Role(devices["rollout"], rollout),
        Role(devices["reference"], reference),
    )


def _devices(config: Config, in_process: int) -> dict[str, tuple[int, ...]]:
    """The devices of each role in a process that has `in_process`."""
    asked = config.placement.model_dump()
    everything = tuple(range(in_process))
    devices = {"train": everything}
    for role, spec in asked.items():
        devices[role] = devices["train"] if spec is None else device_numbers(spec)
        missing = set(devices[role]) - set(everything)
        if missing:
            raise ValueError(
                f"placement.{role} names devices of a process, which has {in_process}; got {spec}, and "
                f"{min(missing)} is not among 0 to {in_process - 1}; name others"
            )
    for one, other in (("train", "rollout"), ("train", "reference"), ("rollout", "reference")):
        both = set(devices[one]) & set(devices[other])
        if both and devices[one] != devices[other]:
            raise ValueError(
                f"two roles have the same devices or none in common; {one} has {_written(devices[one])}, "
                f"{other} {_written(devices[other])}, and both have {_written(tuple(sorted(both)))}; change "
                f"placement.{one} or placement.{other}"
            )
    return devices


def _written(devices: tuple[int, ...]) -> str:
    return ",".join(map(str, devices))
