"""Exports a policy as a Hugging Face folder: weights, configuration and tokenizer for transformers.

Used at the end of a run (for the folder `final/`) and by `quatrain export`, for any checkpoint of a run or of
the training server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from quatrain.cluster.processes import is_main_process
from quatrain.config.buckets import entries, upload
from quatrain.config.load import load_config
from quatrain.config.places import HUB_ID, is_bucket, local_path
from quatrain.config.schema import OffloadConfig, PlacementConfig
from quatrain.data.tokenizer import save_tokenizer, stop_token_ids
from quatrain.loop.policy import load_policy
from quatrain.models.families import Architecture
from quatrain.models.lora import (
    frozen_part,
    merged,
    merged_architecture,
    trained_part,
    with_host_adapters,
    with_trained,
    without_adapters,
)
from quatrain.models.params import SCORE
from quatrain.ops.fingerprint import tree_fingerprint
from quatrain.parallel.mesh import check_held, to_memory
from quatrain.run.best import best_step
from quatrain.run.checkpoint import Checkpointer
from quatrain.run.resume import check_frozen
from quatrain.run.run_dir import checkpoint_steps, checkpoints_of
from quatrain.serve.tinker.checkpoint import CONFIG, META, read_checkpoint
from quatrain.serve.tinker.training import adapted
from quatrain.weights.adapter import adapters_from, check_base, save_adapter
from quatrain.weights.hf import CONFIG as MODEL_CONFIG
from quatrain.weights.hf import save_hf
from quatrain.weights.whole import Whole

BEST = "best"
ADAPTER = "adapter"
"""The folder of an exported adapter, in the folder of the merged model."""
BASE = "base"
"""The folder of the adapter's base, in the folder of the merged model, if peft cannot load it elsewhere."""
ANY_DEVICES = (
    "mesh=auto",
    "model.attention=xla",
    "rollout.mesh=null",
    "rollout.max_concurrency=null",
    *(f"placement.{role}=null" for role in PlacementConfig.model_fields),
    *(f"offload.{what}=false" for what in OffloadConfig.model_fields),
)
"""Overrides of a run's configuration that allow exporting on other devices than those used for training."""
OF_MODEL = ("model.", "lora.", "data.chat_template")
"""How the keys begin that decide what is exported: other keys may have secrets, which are not needed."""


def export_policy(
    directory: Path,
    arch: Architecture,
    params: Any,
    tokenizer: Any,
    sampling: Mapping[str, Any] = MappingProxyType({}),
    *,
    base: str = "",
    whole: Whole | None = None,
) -> None:
    """Write weights, configuration, generation configuration and tokenizer into `directory`.

    The end tokens in both configurations are those that completions end with in training (`stop_token_ids`).
    `sampling` are settings of sampling for generation_config.json, such as those of the model's source. A
    policy with adapters is written with its adapters merged, and the adapters apart, in the folder `adapter`
    in `directory`, as those of the model `base`. If this is neither a folder nor a hub id (a GGUF file, a
    built-in model), peft cannot load it, and it is written into the folder `base` in `directory`.

    Of a model with a tower, the `whole` is written that it was loaded from, with what was trained in it.

    A model with a score head is written as a classifier of one label, which `model:` in `reward.functions`
    and transformers read; its tokenizer must have been made ready for that (`data.tokenizer.for_scoring`).
    """
    check_held(params, "the parameters to export", "give those of the newest state")
    params = to_memory("device", params)
    arch = replace(arch, eos_token_ids=stop_token_ids(tokenizer, arch.eos_token_ids))
    plain = merged_architecture(arch)
    save_hf(directory, plain, merged(params, arch), sampling=sampling, whole=whole if arch.vision else None)
    if arch.lora:
        own = local_path(base)
        if base and own.is_dir():
            base = str(own.resolve())
        elif base.endswith(".gguf") or not HUB_ID.fullmatch(base):
            unscored = {name: jnp.zeros_like(leaf) for name, leaf in params.items() if name == SCORE}
            plain, weights = arch.without_lora, without_adapters(params) | unscored
            save_hf(directory / BASE, plain, weights, sampling=sampling, whole=whole if arch.vision else None)
            base = str((directory / BASE).resolve())
        save_adapter(directory / ADAPTER, arch, params, base=base)
    if is_main_process():
        save_tokenizer(tokenizer, directory, closed=arch.head == "value_head")


def check_export(run: Path, output: Path, *, step: int | str | None) -> int | None:
    """The step of the checkpoint that `export` reads, None for the latest; raises ValueError as `export`."""
    if isinstance(step, str) and step != BEST and not step.isdecimal():
        raise ValueError(
            f"a checkpoint is named by its step, or as {BEST}; got {step}; give --step N or {BEST}"
        )
    if not (run / "config.yaml").is_file():
        raise ValueError(f"{run} is not a run's folder (no config.yaml in it); give one such as runs/NAME")
    check_output(output)
    number = best_step(run) if step == BEST else None if step is None else int(step)
    if number is not None or not checkpoint_steps(run):
        Checkpointer(checkpoints_of(run)).read_host(number)
    return number


def check_output(output: Path | str) -> None:
    """Raises ValueError unless `output` is an empty folder or nothing, on this machine or in a bucket."""
    if is_bucket(output):
        taken = bool(entries(str(output)))
    else:
        output = Path(output)
        taken = output.exists() and (not output.is_dir() or any(output.iterdir()))
    if taken:
        raise ValueError(f"{output} exists and is not an empty folder; export into a new one")


def send(folder: Path, url: str) -> None:
    """Send the exported model in `folder` to a bucket; config.json last, so who finds it finds a whole."""
    base = str((folder / BASE).resolve())
    for file in (folder / ADAPTER).glob("*.json"):  # a base that was written beside the adapters moves too
        text = file.read_text("utf-8").replace(json.dumps(base), json.dumps(f"{url.rstrip('/')}/{BASE}"))
        file.write_text(text, "utf-8")
    upload(folder, url, last=MODEL_CONFIG)


def _export_checkpoint(folder: Path, output: Path) -> int:
    """Writes a checkpoint of the training server; returns its optimizer steps."""
    check_output(output)
    meta, trained = read_checkpoint(folder)
    config = load_config(folder / CONFIG, ANY_DEVICES, environ={}).config
    loaded = load_policy(config, critic=False, adapters=False, environments=False)
    arch, mesh = adapted(loaded.arch, trained.lora.rank), loaded.meshes.train
    found = tree_fingerprint(frozen_part(loaded.params, arch))
    check_base(meta.fingerprint, found, config.model.path, folder)
    params = with_host_adapters(loaded.params, adapters_from(arch, trained.adapters, folder), arch, mesh)
    export_policy(
        output, arch, params, loaded.tokenizer, loaded.sampling, base=config.model.path, whole=loaded.whole
    )
    return trained.step


def export(run: Path, output: Path, *, step: int | str | None = None) -> int:
    """`quatrain export`: writes checkpoint `step` (default: the latest) of the run at `run` to `output`.

    `step` may be `best`, the checkpoint with the best `checkpoint.best_metric`. `run` may also be the folder
    of one checkpoint of the training server. Returns the step. Raises ValueError if `run` has no
    configuration or no such checkpoint, if the base of adapters is not the one they were trained on, or if
    `output` exists and is not an empty folder.
    """
    if (run / META).is_file():
        return _export_checkpoint(run, output)
    number = check_export(run, output, step=step)
    config = load_config(run / "config.yaml", ANY_DEVICES, environ={}, reads=OF_MODEL).config
    loaded = load_policy(config, critic=False, environments=False)
    checkpointer = Checkpointer(checkpoints_of(run))
    arch, wanted = loaded.arch, trained_part(loaded.params, loaded.arch)
    found, arrays, host = checkpointer.restore({"params": wanted}, number, partial=True)
    checkpointer.close()
    check_frozen(loaded.frozen_fingerprints, host, config.model.path, run)
    params = with_trained(loaded.params, arrays["params"], arch)
    export_policy(
        output, arch, params, loaded.tokenizer, loaded.sampling, base=config.model.path, whole=loaded.whole
    )
    return found
