"""The policy from its configuration: tokenizer, architecture, parameters, and the engine to sample from it.

Stands under training, evaluation, warm start and export, which all begin here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from quatrain.config.schema import Config
from quatrain.data.tokenizer import load_tokenizer, stop_token_ids
from quatrain.models.families import Architecture
from quatrain.models.kernels import choose_attention
from quatrain.models.load import load_model
from quatrain.parallel.hosts import num_processes
from quatrain.rollout.engine import OnProgress, RolloutEngine
from quatrain.update.gradient import Policy


@dataclass(frozen=True)
class LoadedPolicy:
    """Tokenizer, architecture and freshly loaded parameters; `stop_ids` end a completion."""

    tokenizer: Any
    arch: Architecture
    params: Any
    stop_ids: tuple[int, ...]


def load_policy(config: Config) -> LoadedPolicy:
    """Load what `model.path` and `model.tokenizer` name; a builtin model is drawn from the run's seed.

    Raises ValueError where the tokenizer has more tokens than the model's vocabulary, the longest sequence
    more than the model has positions, where `model.attention` names a kernel that cannot run the model, and
    in one of several processes: the rollout has no mesh yet, so each would sample and train alone.
    """
    if num_processes() > 1:
        raise ValueError(
            "training, evaluation and warm start run in one process, on one device, until the rollout runs "
            f"on a mesh too; got {num_processes()} processes; start the command by itself, without `launch` "
            "and --num-processes"
        )
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.path)
    own_eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    model = load_model(
        config.model.path,
        dtype=config.model.param_dtype,
        seed=config.seed,
        vocab_size=len(tokenizer),
        eos_token_ids=own_eos,
    )
    if len(tokenizer) > model.arch.vocab_size:
        raise ValueError(
            f"a tokenizer fits its model's vocabulary: {config.model.tokenizer} has {len(tokenizer)} tokens, "
            f"{config.model.path} {model.arch.vocab_size}; set model.tokenizer to the one it was trained with"
        )
    longest = config.data.max_prompt_length + config.rollout.max_new_tokens
    if longest > model.arch.max_position:
        raise ValueError(
            f"a sequence fits the positions its model knows: data.max_prompt_length + rollout.max_new_tokens "
            f"is {longest} tokens, {config.model.path} knows {model.arch.max_position}; lower one of the two"
        )
    for section in (config.update, config.logprob):
        _attention(config, model.arch, packed=section.max_tokens_per_device is not None)
    return LoadedPolicy(
        tokenizer, model.arch, model.params, stop_token_ids(tokenizer, model.arch.eos_token_ids)
    )


def build_engine(
    config: Config, loaded: LoadedPolicy, *, on_progress: OnProgress | None = None
) -> RolloutEngine:
    """The rollout engine of `loaded`, without weights until `sync_weights`.

    `on_progress` is told how far it is, after each of its decode calls.
    """
    return RolloutEngine(
        loaded.arch,
        config.rollout,
        loaded.tokenizer,
        stop_ids=loaded.stop_ids,
        seed=config.seed,
        dtype=config.model.dtype,
        attention=_attention(config, loaded.arch, prompts=True),
        on_progress=on_progress,
    )


def _attention(config: Config, arch: Architecture, *, packed: bool = True, prompts: bool = False) -> str:
    """The attention of `model.attention` on this platform; raises ValueError for one that cannot be had."""
    name, platform, dtype = config.model.attention, jax.default_backend(), config.model.dtype
    if prompts and name == "cudnn":
        name = "auto"  # the engine packs prompts, which cuDNN cannot keep apart
    return choose_attention(name, arch, platform=platform, dtype=dtype, packed=packed)


def build_policy(config: Config, loaded: LoadedPolicy, *, temperature: float) -> Policy:
    """How micro-batches become log-probabilities, at `temperature`."""
    return Policy(
        loaded.arch,
        temperature=temperature,
        dtype=config.model.dtype,
        remat=config.model.remat,
        attention=config.model.attention,
    )
