"""What `quatrain serve --train` adds: the served model as a base that programs train adapters of.

Data flow: `Config`, `LoadedPolicy` -> `Base`, the memory for each part -> `Worker`, `Samplers`, `Store` ->
`TinkerApi`, whose routes are beside those of OpenAI's interface.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from quatrain.config.derive import MICRO_BATCH_TOKENS, PREFIX_SHARE
from quatrain.config.places import local_path
from quatrain.config.schema import Config
from quatrain.config.secrets import TINKER_KEY
from quatrain.data.tokenizer import save_tokenizer
from quatrain.engine.engine import memory_for_cache
from quatrain.loop.journals import ClientRows
from quatrain.loop.policy import LoadedPolicy
from quatrain.models.kv_cache import bytes_per_position
from quatrain.ops.fingerprint import tree_fingerprint
from quatrain.parallel.mesh import mesh_shape
from quatrain.plan.activations import activations
from quatrain.report.page import Page
from quatrain.serve.tinker.api import KEY_START, TinkerApi
from quatrain.serve.tinker.calls import Base
from quatrain.serve.tinker.checkpoint import what_loads
from quatrain.serve.tinker.sampling import Samplers
from quatrain.serve.tinker.store import Store
from quatrain.serve.tinker.training import adapted
from quatrain.serve.tinker.worker import Worker

MOST_SAMPLERS, MOST_ON_CPU = 4, 2
"""Where `tinker.max_samplers` does not say it: each has its part of the memory for caches, whether there are
others or not, and they decode in turns, so that more of them hold contexts for longer and compute no more."""
ANY_RANK = 1
"""Of the adapters by which the memory of a micro-batch is planned, which is that of the base's activations:
each model can have it."""


class Memory(NamedTuple):
    """What is free on a device beside the model and a micro-batch, in bytes."""

    adapters: int
    """For training clients and the weights of samplers."""
    cache: int
    """For the KV cache of each sampler, of which one answers OpenAI's interface."""
    num_samplers: int

    @classmethod
    def of(cls, config: Config, loaded: LoadedPolicy) -> Memory:
        """One half for adapters, one for caches; raises ValueError if there is none."""
        shape, model = mesh_shape(loaded.meshes.train), config.model
        planned = activations(
            adapted(loaded.arch, ANY_RANK),
            tokens=_micro_batch_tokens(config),
            remat=model.remat,
            mesh=shape,
            dtype=model.dtype,
            param_dtype=model.param_dtype,
        )
        half = memory_for_cache(loaded.meshes.train, planned.total)
        tokens = max(_micro_batch_tokens(config), loaded.arch.longest)
        least = tokens * bytes_per_position(loaded.arch, model.dtype, shape.tp)
        most = MOST_ON_CPU if loaded.backend.kind == "cpu" else MOST_SAMPLERS
        number = config.tinker.max_samplers or min(max(half // least - 1, 1), most)
        memory = cls(half, half // (number + 1), number)
        if not memory.cache:
            raise ValueError(
                "a training server needs memory beside the model and a micro-batch, and this device has none "
                "left; lower update.max_tokens_per_device, or serve a smaller model"
            )
        return memory


def base_of(config: Config, loaded: LoadedPolicy, name: str) -> Base:
    """The model of `config` as the rooms of the training server have it."""
    return Base(
        name=name,
        arch=loaded.arch,
        params=loaded.params,
        tokenizer=loaded.tokenizer,
        stop_ids=loaded.stop_ids,
        mesh=loaded.meshes.train,
        backend=loaded.backend,
        attention=loaded.attention,
        dtype=config.model.dtype,
        remat=config.model.remat,
        seed=config.seed,
        max_tokens=_micro_batch_tokens(config),
        fingerprint=tree_fingerprint(loaded.params),
    )


@contextmanager
def training_server(
    config: Config, loaded: LoadedPolicy, memory: Memory, *, name: str | None = None
) -> Iterator[TinkerApi]:
    """The interface that trains, until the end of the block; `name` is a further name of the model.

    Raises ValueError for a key that no client sends, aliases of other models, and a folder that cannot be
    written or that another server uses.
    """
    key = os.environ.get(TINKER_KEY) or None
    if key is not None and not key.startswith(KEY_START):
        raise ValueError(
            f"{TINKER_KEY} must begin with `{KEY_START}`, as the client refuses other keys; set another"
        )
    state = Path(config.tinker.state).expanduser().absolute()
    folder = _tokenizer_folder(config, state)
    names = dict.fromkeys([str(folder), config.model.path, *([name] if name else []), *config.tinker.aliases])
    base = base_of(config, loaded, str(folder))
    store = Store(state, base, what_loads(config))
    try:
        if folder.is_relative_to(state):
            _write_tokenizer(loaded, folder)
        share = config.rollout.prefix_share
        samplers = Samplers(
            base,
            most=memory.num_samplers,
            cache_bytes=memory.cache * memory.num_samplers,
            prefix_share=PREFIX_SHARE if share is None else share,
        )
        api = TinkerApi(
            base,
            Worker(samplers),
            samplers,
            store,
            config.tinker,
            names=list(names),
            room=memory.adapters,
            key=key,
            rows=ClientRows,
            run_page=_run_page,
        )
        try:
            yield api
        finally:
            api.close()
    finally:
        store.close()


def _micro_batch_tokens(config: Config) -> int:
    return config.update.max_tokens_per_device or MICRO_BATCH_TOKENS


def _tokenizer_folder(config: Config, state: Path) -> Path:
    """The folder that programs give as the model's name, since they load its tokenizer by that.

    It is the model's own, unless that has none or the client would cut its name. Raises ValueError if it
    would cut that of the folder in `state` too.
    """
    model = local_path(config.model.path).absolute()
    own = model.is_dir() and config.model.tokenizer == config.model.path and config.data.chat_template is None
    if own and not _is_cut(model):
        return model
    last = re.sub(r"[^\w.-]+", "-", config.model.path.removesuffix(".gguf").rstrip("/").split("/")[-1])
    folder = state / "tokenizer" / last.strip(".-")
    if _is_cut(folder):
        raise ValueError(
            f"tinker.state must have no `:` in its path, behind which programs cut names off; got {state}"
        )
    return folder


def _is_cut(folder: Path) -> bool:
    """Whether the client takes a part of this name for a variant's: behind `:`, or the last of three."""
    return ":" in str(folder) or str(folder).count("/") == 2


def _write_tokenizer(loaded: LoadedPolicy, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_tokenizer(loaded.tokenizer, folder)
    except OSError as error:
        raise ValueError(
            f"the tokenizer for programs cannot be written to {folder} ({error}); free space, or set "
            "tinker.state to another folder"
        ) from error


def _run_page(folder: Path) -> str:
    """The page of the training client of a folder, as HTML; it is written there too."""
    output = folder / "report.html"
    Page([folder]).write(output)
    return output.read_text(encoding="utf-8", errors="replace")
