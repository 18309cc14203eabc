"""Writes adapters as a folder that peft loads, and checks which base adapters belong to.

Data flow: parameters with adapters -> adapter_config.json and adapter_model.safetensors, at the end of a run
and by `quatrain export`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from quatrain.cluster.processes import is_main_process
from quatrain.models.architecture import Architecture
from quatrain.models.blocks.experts import APART
from quatrain.models.lora import EXPERT_PARAMETERS, adapter_names, frozen_part
from quatrain.models.params import LM_HEAD, SCORE, Params, leaf_at
from quatrain.models.spec import LORA_A, LORA_B, TensorName
from quatrain.ops.fingerprint import tree_fingerprint
from quatrain.parallel.mesh import to_host

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TAKEN_FOR_EXPERTS = ("qwen3_moe", "qwen3_next")
"""Families in which peft takes the modules of a dense MLP for those of experts, but not their parameters."""
BASE = "base.json"
"""A file of quatrain's own, which peft does not read: the base's fingerprint."""


def save_adapter(directory: Path, arch: Architecture, params: Params, *, base: str) -> None:
    """Writes the adapters of `params` as a folder that peft loads onto the model `base`.

    The weights are float32, with peft's names. The score head of a reward model is among them, as a module
    that peft saves whole; peft loads them onto a classifier of one label. The fingerprint of the base is in a
    file beside them: of several entries in its metadata, safetensors writes now one and now another first. In
    a run of several processes, all must call this, and the main process writes.
    """
    assert arch.lora is not None, "a model without adapters has none to write"
    # Adapters of one base give plausible nonsense on another: the reader compares this before it merges them.
    fingerprint = tree_fingerprint(frozen_part(params))
    names = adapter_names(arch)
    whole = {path: to_host(leaf_at(params, path)) for path in dict.fromkeys(name.path for name in names)}
    if not is_main_process():
        return
    directory.mkdir(parents=True, exist_ok=True)
    modules, parameters = _targets(arch, names)
    alpha = arch.lora.alpha
    task: dict[str, Any] = {"task_type": "CAUSAL_LM"}
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
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    tensors: dict[str, np.ndarray] = {name.name: _of_peft(name, whole[name.path]) for name in names}
    (directory / BASE).write_text(json.dumps({"model": base, "fingerprint": fingerprint}, indent=2) + "\n")
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / WEIGHTS).chmod((directory / CONFIG).stat().st_mode & 0o777)


def _targets(arch: Architecture, names: Sequence[TensorName]) -> tuple[list[str], list[str]]:
    """(names of modules, names of parameters) that have adapters, for peft."""
    assert arch.lora is not None
    tops = [(SCORE,), (LM_HEAD + LORA_A,), (LM_HEAD + LORA_B,)]
    paths = [name.name.split(".")[5:-2] for name in names if name.path not in tops and not name.stacked]
    as_parameters = [path[-1] in APART and arch.family in TAKEN_FOR_EXPERTS for path in paths]
    modules = [path[-1] for path, whole in zip(paths, as_parameters, strict=True) if not whole]
    modules += [LM_HEAD] * (LM_HEAD in arch.lora.targets)
    parameters = [".".join([*path, "weight"]) for path in compress(paths, as_parameters)]
    parameters += [EXPERT_PARAMETERS[name] for name in arch.lora.targets if name in EXPERT_PARAMETERS]
    return list(dict.fromkeys(modules)), list(dict.fromkeys(parameters))


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
    """Raises ValueError unless the adapters in `where` belong to `model`.

    `saved` and `found` are the fingerprints of the base they were trained on and of `model`.
    """
    if saved != found:
        raise ValueError(
            "adapters must be used with the base that they were trained on, to the bit: those in "
            f"{where} belong to a base with fingerprint {saved or 'unknown'}, and {model} has {found}; set "
            "model.path and model.param_dtype back to those of the run"
        )
