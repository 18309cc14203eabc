"""Reads and writes Hugging Face model directories (config.json and safetensors).

Data flow: a directory or hub id -> `Architecture` and parameters; at the end of a run these are exported.
"""

from __future__ import annotations

import json
import logging
import math
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from quatrain.cluster.processes import is_main_process
from quatrain.config.buckets import local_copy
from quatrain.config.errors import shown
from quatrain.config.files import Description, checked, read_json
from quatrain.config.places import HUB_ID, MODEL_FILES, is_bucket, local_path
from quatrain.models.architecture import Architecture, Head
from quatrain.models.blocks.experts import APART, FUSED, Experts
from quatrain.models.families import FAMILIES, architecture_from_hf, architecture_to_hf
from quatrain.models.families.multimodal import MODEL_TYPES, text_config, text_tensors
from quatrain.models.families.towers import has_tower
from quatrain.models.hf_config import ClassifierConfig, GenerationConfig
from quatrain.models.params import VISION, Params, assemble, leaf_at, tensor_names, tensor_shapes
from quatrain.models.spec import TensorName
from quatrain.models.vision import TrainedVision
from quatrain.parallel.mesh import to_host
from quatrain.weights.mxfp4 import Stored, check_packed, read_packed, with_packed
from quatrain.weights.offline_hub import hub_without_retries
from quatrain.weights.whole import (
    BLOCK_BYTES,
    EMBEDDINGS,
    IMAGE_PROCESSOR,
    PROCESSOR,
    Raw,
    Whole,
    write_raw,
)

logger = logging.getLogger(__name__)

CONFIG, GENERATION = "config.json", "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
HUB_FILES = (*MODEL_FILES, "*.safetensors")
LM_HEAD = "lm_head.weight"
SCORE = "score.weight"
"""The only tensor of a model that its directory may lack."""
CLASSIFIER = "ForSequenceClassification"
"""How the names of sequence-classification classes in transformers end."""
DEFAULT_LABELS = 2
"""Labels of a classifier whose config.json names none: transformers does not write this number."""
MAX_NAME_BYTES = 255
"""Length of the longest file name in the index of a checkpoint."""
FLOATS = ("F64", "F32", "F16", "BF16")
VisionChoice = Literal["none"] | TrainedVision | None
"""`model.vision`."""


def load_hf(
    directory: str | Path,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    head: Head = "lm_head",
    *,
    vision: VisionChoice = "none",
) -> tuple[Architecture, Params]:
    """The model in a local Hugging Face directory, its parameters in `dtype` on `mesh` (see `assemble`).

    With the head `value_head`, the head is zero if the directory has no `score.weight`, and an output head of
    the vocabulary is not read. `vision`: as in `read_architecture`; of a frozen tower, which `load_tower`
    loads, names and shapes are checked.

    Weights are read from model.safetensors or the shards of its index, block by block. Stop tokens are those
    in config.json and generation_config.json. Raises ValueError for a missing, empty or unsupported
    directory, and for tensors that are missing, unknown, damaged or of the wrong shape.
    """
    directory = local_path(directory)
    arch = replace(read_architecture(directory, vision), head=head)
    files = with_packed(_read_tensors(directory, tower=arch.vision is not None))
    stored = _as_stored(arch.with_tower, files)
    _check_names(directory, arch, tensor_names(stored), files)
    _check_shapes(stored, files)
    if arch.head == "lm_head" and arch.tie_embeddings and LM_HEAD in files:
        _check_tied(files[LM_HEAD], files[EMBEDDINGS])
    return arch, assemble(_as_stored(arch, files), dtype, _reader(files), mesh)


def load_tower(
    directory: str | Path, arch: Architecture, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None
) -> Params:
    """The tower of the model in a directory that `load_hf` has read as `arch`: the tree of its parameters."""
    reader = _reader(_read_tensors(local_path(directory), tower=True))
    tower: Params = assemble(arch.with_tower, dtype, reader, mesh, only=VISION)[VISION]
    return tower


def _reader(files: Mapping[str, Stored]) -> Callable[[TensorName, np.ndarray], None]:
    """What copies a tensor of `files` into its parameter; one that they lack is zero."""

    def read(name: TensorName, parameter: np.ndarray) -> None:
        tensor = files.get(name.name)
        if tensor is None:
            parameter[...] = 0.0
        elif tensor.scales:
            read_packed(tensor, name, parameter)
        else:
            for start, block in _blocks(tensor):
                name.put(parameter, block, start)

    return read


def _as_stored(arch: Architecture, files: Iterable[str]) -> Architecture:
    """`arch` with experts named as in the files: apart, or those of a layer as one tensor."""
    stacked = any(name.endswith(f".experts.{FUSED[0]}") for name in files)

    def renamed(mlp: Experts) -> Experts:
        if mlp.transposed or stacked == mlp.stacked:
            return mlp
        return replace(mlp, names=FUSED if stacked else APART, stacked=stacked)

    return arch.with_experts(renamed)


def read_architecture(directory: str | Path, vision: VisionChoice = "none") -> Architecture:
    """The architecture in a local Hugging Face directory; no weights are read.

    `vision`: what of its tower is trained, `none` for its text part alone (`model.vision`); None: `frozen` if
    it has a tower that is supported, else `none`. Raises ValueError for a missing or unreadable config.json
    and for an unsupported model or tower.
    """
    directory = local_path(directory)
    source = str(directory / CONFIG)
    config = _read_json(directory, CONFIG)
    ends = _generation_config(directory)
    if ends is not None:
        # Those of the text model, which a folder with a tower may name in its own part alone.
        ids = checked(GenerationConfig, text_config(config), source).eos_token_id + ends.eos_token_id
        # Chat models often name the end of a turn in generation_config.json alone: without it they never
        # stop.
        config["eos_token_id"] = list(dict.fromkeys(ids))
    if vision is None:
        vision = "frozen" if has_tower(config) else "none"
    if vision == "none":
        return architecture_from_hf(config, source)
    arch = architecture_from_hf(config, source, vision=image_processor(directory))
    assert arch.vision is not None
    return replace(arch, vision=replace(arch.vision, trained=vision))


def image_processor(directory: Path) -> dict[str, Any]:
    """The settings of the image processor in a local directory, from the file that transformers takes."""
    for name in (PROCESSOR, IMAGE_PROCESSOR):
        found = read_json(directory / name) if (directory / name).is_file() else {}
        if found := found if name == IMAGE_PROCESSOR else found.get("image_processor", {}):
            return found
    return {}


def read_whole(directory: Path) -> Whole:
    """What the parameters of a model in a local directory are a part of."""
    processor = image_processor(directory)
    return Whole(_read_json(directory, CONFIG), directory, _tensor_files(directory), processor)


def read_sampling(directory: str | Path) -> dict[str, Any]:
    """The settings of sampling in the generation_config.json of a local directory; {} without that file."""
    config = _generation_config(local_path(directory))
    return config.model_dump(exclude={"eos_token_id"}, exclude_none=True) if config else {}


def _generation_config(directory: Path) -> GenerationConfig | None:
    path = directory / GENERATION
    return checked(GenerationConfig, read_json(path), str(path)) if path.is_file() else None


def save_hf(
    directory: str | Path,
    arch: Architecture,
    params: Params,
    *,
    sampling: Mapping[str, Any] = MappingProxyType({}),
    whole: Whole | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes config.json, generation_config.json and safetensors files that transformers can load.

    generation_config.json has the tokens that end a completion, and `sampling` (see `read_sampling`); a model
    with a score head, which is written as a classifier of one label, generates nothing and has none. Weights
    keep the dtype of the parameters; above `max_shard_bytes` they are split into shards with an index.
    Weights of an earlier save in `directory` are replaced. Of a model with a tower, the `whole` is written
    that the parameters are a part of; what is frozen and what nobody reads is carried over to the bit. In a
    run of several processes, all must call this, and the main process writes. It needs memory for one file,
    the others for one parameter; if parameters are sharded over devices, a file has at most the size of the
    largest tensor.
    """
    directory = Path(directory)
    if is_main_process():
        directory.mkdir(parents=True, exist_ok=True)
        # A shard of an earlier save beside a single file would make the folder ambiguous for every reader.
        for stale in (*directory.glob("model*.safetensors"), directory / INDEX):
            stale.unlink(missing_ok=True)
        dtype = params["embed"].dtype.name
        described = {**architecture_to_hf(arch), "dtype": dtype, "torch_dtype": dtype}
        config = described if whole is None else whole.config_of(arch, dtype)
        _write_json(directory / CONFIG, config)
        if arch.head == "lm_head":
            ids = {key: described[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
            ids = {key: value for key, value in ids.items() if value is not None}
            _write_json(directory / GENERATION, {**sampling, **ids})
        if whole is not None:
            whole.copy_files(directory)
    if whole is None:
        _write_tensors(directory, tensor_names(arch), params, max_shard_bytes, {})
        return
    stored = _as_stored(arch.with_tower, text_tensors(whole.files)[0])
    names = whole.names(tensor_names(stored), arch)
    _write_tensors(directory, names, params, max_shard_bytes, whole.carried(names))


def model_directory(path: str, *, weights: bool = True) -> Path:
    """The local directory of a model: `path` itself, or what was downloaded from the Hub or a bucket.

    The configurations of a model on the Hub are downloaded first, so that `weights` of an unsupported
    model are not. Raises ValueError if a download fails. A local directory is not checked here.
    """
    if is_bucket(path):
        return local_copy(path, HUB_FILES if weights else MODEL_FILES)
    local = local_path(path)
    if local.exists() or not HUB_ID.fullmatch(path):
        return local
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError

    with _downloading(path):
        # First, by itself: a model of an unsupported family is refused before gigabytes are fetched.
        config = Path(hf_hub_download(path, CONFIG))
    sees = has_tower(_read_json(config.parent, CONFIG))
    for name in (GENERATION, *(PROCESSOR, IMAGE_PROCESSOR) * sees):
        with _downloading(path), suppress(EntryNotFoundError):  # not every model has it
            hf_hub_download(path, name)
    if not weights:
        return config.parent
    read_architecture(config.parent)
    with _downloading(path):
        return Path(snapshot_download(path, allow_patterns=list(HUB_FILES)))


@contextmanager
def _downloading(model_id: str) -> Iterator[None]:
    """Raises ValueError for the exceptions of huggingface_hub and its HTTP libraries, of many classes."""
    with hub_without_retries() as unreachable:
        try:
            yield
        except Exception as error:
            said = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            reason = "; ".join(filter(None, (unreachable, said)))
            raise ValueError(
                f"{model_id!r} is not a local directory, and downloading it from the Hugging Face Hub failed "
                f"({reason}): check the name and the network, log in if the model is gated, or give the path "
                "of a local directory or .gguf file"
            ) from error


def check_classifier(path: str) -> None:
    """Raises ValueError unless config.json describes a sequence-classification model with one label.

    `path` is a local directory or a hub id, of which only config.json is downloaded. The model's class must
    be called `…ForSequenceClassification`. As in transformers, a config.json without `id2label` has 2 labels.
    """
    if path.startswith("builtin:") or path.endswith(".gguf"):
        raise ValueError(
            "a reward model must be a Hugging Face folder or a hub id of a sequence-classification model; "
            f"{path} is neither; convert the model to such a folder"
        )
    config = _read_json(model_directory(path, weights=False), CONFIG)
    described = checked(ClassifierConfig, config, f"{path}, {CONFIG}")
    classes = described.architectures or ["none"]
    if not any(name.endswith(CLASSIFIER) for name in classes):
        raise ValueError(
            f"a reward model must be a sequence-classification model: architectures in config.json must name "
            f"a class …{CLASSIFIER}; it names {', '.join(classes):.80}; give the path of another model"
        )
    labels = len(described.id2label or range(described.num_labels or DEFAULT_LABELS))
    if labels != 1:
        missing = "" if described.id2label else " (id2label is missing, which means 2)"
        raise ValueError(
            f"a reward model must have one label, whose logit is the reward; config.json has {labels} "
            f"labels{missing}; give a model trained with num_labels=1"
        )


def check_score_head(directory: Path) -> None:
    """Raises ValueError if the weights in `directory` lack `score.weight`, the head of a reward model."""
    if SCORE not in _tensor_files(directory):
        raise ValueError(
            f"a reward model must have the tensor {SCORE}, its output head; the weights in {directory} lack "
            "it; save the trained classifier with save_pretrained, including its head"
        )


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    if not directory.is_dir():
        raise ValueError(f"the model must be a directory; {directory} does not exist or is not a directory")
    if not (directory / name).is_file():
        held = ", ".join(sorted(p.name for p in directory.iterdir())[:8]) or "nothing"
        raise ValueError(f"a model directory must contain {name}; {directory} contains {held}")
    return read_json(directory / name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


class _Index(Description):
    """The index of a checkpoint in several files."""

    weight_map: dict[str, str]


def _weight_map(directory: Path) -> dict[str, str]:
    """The shard of each tensor in the index; raises ValueError for a file outside of `directory`."""
    index = checked(_Index, _read_json(directory, INDEX), str(directory / INDEX))
    files = sorted(set(index.weight_map.values()))
    root = directory.resolve()
    for file in files:
        if not file.isprintable() or len(file.encode()) > MAX_NAME_BYTES:
            rule = f"must be printable and have at most {MAX_NAME_BYTES} bytes"
            raise ValueError(f"a file name in {directory / INDEX} {rule}; got {shown(file)}; fetch it again")
        # Symbolic links to files are allowed, because in the Hub's cache each file is a link to ../../blobs.
        # Links to folders are not; the cache does not contain any.
        folder = (directory / file).parent.resolve()
        if Path(file).is_absolute() or ".." in Path(file).parts or not folder.is_relative_to(root):
            raise ValueError(
                f"files of a checkpoint must be in the folder of the index; {directory / INDEX} names "
                f"{file!r}; do not use this model unless you trust its source, or correct the name"
            )
    return index.weight_map


def _read_tensors(directory: Path, *, tower: bool) -> dict[str, Stored]:
    """The tensors of the language model, and of its `tower`; what is not read is said."""
    files, kind = _tensor_files(directory), _read_json(directory, CONFIG).get("model_type")
    if kind in MODEL_TYPES:
        ours, others = text_tensors(files, tower=tower)
    else:
        unread = FAMILIES[str(kind)].unread
        ours = {name: name for name in files if not name.startswith(unread)}
        others = [*(files.keys() - ours.keys())]
    if others:
        parts = sorted({name.removeprefix("model.").split(".")[0] for name in others})
        used = "carried over to the export" if tower else "not read"
        logger.info(
            f"%s: of this model the text part {'and the tower are' if tower else 'is'} used, and exported; "
            f"%d tensors of %s are {used}",
            directory,
            len(others),
            ", ".join(parts),
        )
    return {name: Stored(files[stored], stored) for name, stored in ours.items()}


def _tensor_files(directory: Path) -> dict[str, Path]:
    """The file of each tensor."""
    if (directory / INDEX).is_file():
        weight_map = _weight_map(directory)
        shards = sorted(set(weight_map.values()))
        if (directory / SINGLE).is_file() and SINGLE not in shards:
            raise ValueError(
                f"a model directory must contain {SINGLE} or {INDEX} with its files; {directory} has both; "
                "remove the one that is left from another model"
            )
        missing = {shard for shard in shards if not (directory / shard).is_file()}
        if missing or not shards:
            lacks = _some(missing) if missing else "any file"
            raise ValueError(f"{INDEX} names files that {directory} lacks: {lacks}; fetch them again")
        stored = ((name, shard) for shard in shards for name in _names_in(directory / shard))
        # A tensor that is in several files is that of the file in the index.
        return {name: directory / file for name, file in stored if weight_map.get(name, file) == file}
    if not (directory / SINGLE).is_file():
        held = ", ".join(sorted(p.name for p in directory.iterdir())[:8])
        raise ValueError(
            f"a model directory must contain {SINGLE} or the files of {INDEX}; {directory} has neither (it "
            f"contains {held}): convert the model to safetensors (.bin and .pt files may run code and are "
            "never opened)"
        )
    return dict.fromkeys(_names_in(directory / SINGLE), directory / SINGLE)


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, "np") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is damaged or incomplete ({error}); fetch it again") from error


def _check_names(
    directory: Path, arch: Architecture, names: Sequence[TensorName], files: Mapping[str, Stored]
) -> None:
    wanted = {name.name for name in names}
    missing = wanted - set(files) - {SCORE}
    extra = {name for name in set(files) - wanted if not _ignorable(arch, name)}
    if missing or extra:
        raise ValueError(
            f"{directory} must contain exactly the tensors of the model in its config.json ({arch.family}, "
            f"{arch.num_layers} layers): missing {_some(missing)}; unknown {_some(extra)}"
        )


def _check_shapes(arch: Architecture, files: Mapping[str, Stored]) -> None:
    """Raises ValueError for tensors of the wrong shape or type, before there is memory for any parameter."""
    expected = tensor_shapes(arch)
    if arch.head == "lm_head":
        expected.setdefault(LM_HEAD, expected[EMBEDDINGS])  # a copy of tied embeddings, compared to them
    for path in sorted({stored.path for stored in files.values()}):
        with safe_open(path, "np") as file:
            for name, stored in files.items():
                if name not in expected or stored.path != path:
                    continue
                if stored.scales:
                    check_packed(stored, expected[name])
                    continue
                view = file.get_slice(stored.name)
                shape, kind = tuple(view.get_shape()), view.get_dtype()
                if name == SCORE and len(shape) == 2 and shape[0] != 1:
                    raise ValueError(
                        f"a score head must have one output; {path} is of a classifier with {shape[0]} "
                        f"labels ({SCORE} has shape {shape}, not {expected[name]}); give the language model "
                        "that it was made of, whose score head begins at zero, or one trained with "
                        "num_labels=1"
                    )
                if shape != expected[name] or kind not in FLOATS:
                    raise ValueError(
                        f"{stored.name} in {path} must be floats of shape {expected[name]} (config.json); it "
                        f"is {kind} {shape}"
                    )


def _ignorable(arch: Architecture, name: str) -> bool:
    """Whether a tensor is ignored: rotary frequencies (in old checkpoints), an unused lm_head, and what makes
    keys and values in a layer that reuses those of another."""
    unused_head = arch.tie_embeddings or arch.head == "value_head"
    if match := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.weight", name):
        return int(match[1]) < arch.num_layers and arch.layers[int(match[1])].mixer.sharing == "reuses"
    return name.endswith("rotary_emb.inv_freq") or (unused_head and name == LM_HEAD)


def _some(names: set[str]) -> str:
    first = sorted(names)[:5]
    return ", ".join(first) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"


def _check_tied(head: Stored, embed: Stored) -> None:
    blocks = zip(_blocks(head), _blocks(embed), strict=False)
    if not all(np.array_equal(one, other) for (_, one), (_, other) in blocks):
        raise ValueError(
            f"config.json says tie_word_embeddings, but {head.name} in {head.path} differs from the "
            "embeddings: set tie_word_embeddings to false"
        )


def _blocks(tensor: Stored) -> Iterator[tuple[int, np.ndarray]]:
    """Yields (first row, rows) of a tensor; the file is reopened per block, so that no pages stay mapped."""
    start, rows = 0, 1
    while start < rows:
        with safe_open(tensor.path, "np") as file:
            view = file.get_slice(tensor.name)
            shape = view.get_shape()
            rows = shape[0] if shape else 1
            step = max(1, BLOCK_BYTES // (4 * int(np.prod(shape[1:]))))
            block = view[start : min(start + step, rows)]
        yield start, block
        start += step


def _write_tensors(
    directory: Path,
    names: Sequence[TensorName],
    params: Params,
    max_shard_bytes: int,
    carried: Mapping[str, Raw],
) -> None:
    """Writes one file at a time, so that at most one shard is in host memory; last, those `carried`."""
    sizes = {}
    for name in names:
        parameter = leaf_at(params, name.path)
        sizes[name.name] = math.prod(name.shape_in(parameter.shape)) * parameter.dtype.itemsize
    # Sharded parameters are gathered to the host: a file then needs memory beside them, and is kept small.
    if isinstance(params["embed"], jax.Array) and len(params["embed"].sharding.device_set) > 1:
        max_shard_bytes = min(max_shard_bytes, max(sizes.values()))
    shards: list[list[TensorName]] = [[]]
    for name in names:
        if shards[-1] and sum(sizes[other.name] for other in shards[-1]) + sizes[name.name] > max_shard_bytes:
            shards.append([])
        shards[-1].append(name)
    count = len(shards) + bool(carried)
    files = (
        [SINGLE] if count == 1 else [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    )
    weight_map: dict[str, str] = {}
    gathered, whole = None, np.empty(0)
    for file, shard in zip(files, shards, strict=False):
        tensors: dict[str, np.ndarray] = {}
        for name in shard:
            if name.path != gathered:  # several tensors are parts of one parameter
                gathered, whole = name.path, to_host(leaf_at(params, name.path))
            if is_main_process():
                tensors[name.name] = name.of(whole)
        weight_map |= dict.fromkeys(tensors, file)
        if is_main_process():
            save_file(tensors, directory / file, metadata={"format": "pt"})
            # safetensors creates files that only their owner can read; they get the mode of config.json.
            (directory / file).chmod(stat.S_IMODE((directory / CONFIG).stat().st_mode))
    if carried and is_main_process():
        write_raw(directory / files[-1], carried)
        weight_map |= dict.fromkeys(carried, files[-1])
    if count > 1 and is_main_process():
        metadata = {"total_size": sum([*sizes.values(), *(raw.num_bytes for raw in carried.values())])}
        _write_json(directory / INDEX, {"metadata": metadata, "weight_map": weight_map})
