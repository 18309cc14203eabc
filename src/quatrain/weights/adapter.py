"""Writes adapters as a folder that peft loads, reads them, and checks which base adapters belong to.

Data flow: parameters with adapters -> adapter_config.json and adapter_model.safetensors, at the end of a run,
by `quatrain export`, and in the checkpoints of the training server, which reads them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from quatrain.cluster.processes import is_main_process
from quatrain.config.errors import listed
from quatrain.config.files import read_json
from quatrain.models.architecture import Architecture, LoRA
from quatrain.models.blocks.experts import APART
from quatrain.models.lora import EXPERT_PARAMETERS, adapter_names, adapters_of, check_lora, frozen_part
from quatrain.models.params import LM_HEAD, SCORE, Params, is_spec, leaf_at, param_specs
from quatrain.models.spec import LORA_A, LORA_B, TensorName
from quatrain.ops.fingerprint import tree_fingerprint
from quatrain.parallel.mesh import to_host

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TAKEN_FOR_EXPERTS = ("qwen3_moe", "qwen3_next")
"""Families in which peft takes the modules of a dense MLP for those of experts, but not their parameters."""
BASE = "base.json"
"""A file of quatrain's own, which peft does not read: the base's fingerprint, and TARGETS."""
TARGETS = "targets"
"""`LoRA.targets`, of which peft has other names."""


def save_adapter(directory: Path, arch: Architecture, params: Params, *, base: str) -> None:
    """Writes the adapters of `params` as a folder that peft loads onto the model `base`.

    The weights are float32, with peft's names. The score head of a reward model is among them, as a module
    that peft saves whole; peft loads them onto a classifier of one label. The fingerprint of the base is in a
    file beside them: of several entries in its metadata, safetensors writes now one and now another first. In
    a run of several processes, all must call this, and the main process writes.
    """
    assert arch.lora is not None, "a model without adapters has none to write"
    # Adapters of one base give plausible nonsense on another: the reader compares this before it merges them.
    fingerprint = tree_fingerprint(frozen_part(params, arch))
    tensors = adapter_tensors(arch, params)
    if not is_main_process():
        return
    write_adapter(directory, arch, tensors, base=base, fingerprint=fingerprint)


def write_adapter(
    directory: Path, arch: Architecture, tensors: Mapping[str, np.ndarray], *, base: str, fingerprint: str
) -> None:
    """Write the files of `adapter_files` into a folder, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    for file, content in adapter_files(arch, tensors, base=base, fingerprint=fingerprint).items():
        (directory / file).write_bytes(content)


def adapter_tensors(arch: Architecture, params: Any) -> dict[str, np.ndarray]:
    """The adapters in `params`, whose other leaves are not read, by peft's names; all processes call this."""
    names = adapter_names(arch)
    whole = {path: to_host(leaf_at(params, path)) for path in dict.fromkeys(name.path for name in names)}
    return {name.name: _of_peft(name, whole[name.path]) for name in names}


def adapter_files(
    arch: Architecture, tensors: Mapping[str, np.ndarray], *, base: str, fingerprint: str
) -> dict[str, bytes]:
    """The files of a folder that peft loads: `tensors` by peft's names, all those of `adapter_names(arch)`.

    `fingerprint`: of the base, which peft finds at `base`.
    """
    assert arch.lora is not None, "a model without adapters has none to write"
    modules, parameters = _targets(arch, adapter_names(arch))
    alpha = arch.lora.alpha
    # peft's class of that task is for texts alone.
    task: dict[str, Any] = {"task_type": None if arch.vision else "CAUSAL_LM"}
    if arch.head == "value_head":
        task = {"task_type": "SEQ_CLS", "modules_to_save": [SCORE]}
    config = {
        "peft_type": "LORA",
        **task,
        "base_model_name_or_path": base,
        "r": arch.lora.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        **({"target_parameters": parameters} if parameters else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    known = {"model": base, "fingerprint": fingerprint, TARGETS: arch.lora.targets}
    described = {CONFIG: config, BASE: known}
    texts = {file: (json.dumps(content, indent=2) + "\n").encode() for file, content in described.items()}
    return {**texts, WEIGHTS: save(dict(tensors), metadata={"format": "pt"})}


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder has adapters, and not a whole model."""
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path, arch: Architecture) -> tuple[Architecture, Any, str]:
    """(`arch` with adapters, their tree as of `adapters_from`, the fingerprint of their base) of a folder.

    Raises ValueError if it has not the files of `adapter_files`, for a model of `arch`, and for adapters of
    experts' matrices.
    """
    try:
        config, known = read_json(folder / CONFIG), read_json(folder / BASE)
        lora = LoRA(int(config["r"]), float(config["lora_alpha"]), tuple(known[TARGETS]))
        tensors, fingerprint = load_file(folder / WEIGHTS), str(known["fingerprint"])
    except (KeyError, TypeError, OSError, SafetensorError) as error:
        raise ValueError(
            f"adapters must be in a folder that quatrain has written, with {CONFIG}, {BASE} and {WEIGHTS}; "
            f"{folder} is none: {type(error).__name__}: {error}; write it with `quatrain export`"
        ) from error
    check_lora(arch, lora)
    if experts := [name for name in lora.targets if name in EXPERT_PARAMETERS]:
        raise ValueError(
            f"adapters that are merged onto a model in use must be of other matrices than those of experts; "
            f"{folder} has some of {', '.join(experts)}; give the folder of the merged model"
        )
    adapted = replace(arch, lora=lora)
    return adapted, adapters_from(adapted, tensors, folder), fingerprint


def adapters_from(arch: Architecture, tensors: Mapping[str, np.ndarray], where: object) -> Any:
    """A tree of the adapters of `arch`, as `models.lora.adapters_of` gives it, of host arrays in float32.

    `tensors`: by peft's names, read from `where`. Raises ValueError if they are not those of `arch`. Adapters
    of experts' matrices are not read.
    """
    specs = adapters_of(param_specs(arch))
    tree = jax.tree.map(lambda spec: np.zeros(spec.shape, np.float32), specs, is_leaf=is_spec)
    names = {name.name: name for name in adapter_names(arch)}
    shapes = {each: name.shape_in(leaf_at(tree, name.path).shape) for each, name in names.items()}
    wrong = [
        name for name in shapes.keys() | tensors if getattr(tensors.get(name), "shape", 0) != shapes.get(name)
    ]
    if wrong:
        raise ValueError(
            f"adapters must have the tensors of their {arch.family} model, no other and in its shapes; in "
            f"{where} these are missing, unknown or of another shape: {listed(sorted(wrong))}; use adapters "
            "of this model and rank"
        )
    for each, name in names.items():
        assert not name.stacked, "adapters of experts have no place here"
        name.put(leaf_at(tree, name.path), tensors[each])
    return tree


def _targets(arch: Architecture, names: Sequence[TensorName]) -> tuple[list[str], list[str]]:
    """(names of modules, names of parameters) that have adapters, for peft."""
    assert arch.lora is not None
    experts = [EXPERT_PARAMETERS[name] for name in arch.lora.targets if name in EXPERT_PARAMETERS]
    if arch.vision:
        # Whole names: the last parts of some are those of modules of the tower too.
        whole = [name.name.removeprefix("base_model.model.") for name in names if not name.stacked]
        return list(dict.fromkeys(name.rpartition(".lora_")[0] for name in whole)), experts
    tops = [(SCORE,), (LM_HEAD + LORA_A,), (LM_HEAD + LORA_B,)]
    paths = [name.name.split(".")[5:-2] for name in names if name.path not in tops and not name.stacked]
    as_parameters = [path[-1] in APART and arch.family in TAKEN_FOR_EXPERTS for path in paths]
    modules = [path[-1] for path, whole in zip(paths, as_parameters, strict=True) if not whole]
    modules += [LM_HEAD] * (LM_HEAD in arch.lora.targets)
    parameters = [".".join([*path, "weight"]) for path in compress(paths, as_parameters)]
    return list(dict.fromkeys(modules)), list(dict.fromkeys([*parameters, *experts]))


def _of_peft(name: TensorName, parameter: np.ndarray) -> np.ndarray:
    """A or B as peft has it; of experts, A is [E r, in], and the columns of B [out, r E] of an expert are E
    apart.
    """
    tensor = name.of(parameter)
    if not name.stacked:
        return tensor
    if name.name.endswith("lora_A.weight"):
        return tensor.reshape(-1, tensor.shape[-1])
    return np.ascontiguousarray(tensor.transpose(1, 2, 0).reshape(tensor.shape[1], -1))


def check_base(saved: object, found: str, model: str, where: Path) -> None:
    """Raises ValueError unless what was trained in `where`, such as adapters, belongs to `model`.

    `saved` and `found` are the fingerprints of the frozen part beside it and of that of `model`.
    """
    if saved != found:
        raise ValueError(
            "adapters (or weights beside a frozen tower) must be used with the base that they were trained "
            f"on, to the bit: those in {where} belong to a base with fingerprint {saved or 'unknown'}, and "
            f"{model} has {found}; set model.path and model.param_dtype back to those of the run"
        )
