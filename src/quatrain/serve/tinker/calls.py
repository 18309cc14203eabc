"""What the rooms of the training server say to each other: a call as plain values, and what comes of it.

Data flow: bytes of a request (`wire.py`, `api.py`) -> a call of this module, checked -> work of the device's
thread (`worker.py`) -> its outcome -> bytes of the answer.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax.sharding import Mesh

from quatrain.backend import Backend
from quatrain.models.architecture import Architecture

T = TypeVar("T")
Units = Generator[Any, None, T]
"""Work of the device in units: it yields between two, so that other clients' units come there, and returns
its result. A unit is a micro-batch, an optimizer step, or the files of a checkpoint. What it yields are
arrays of the unit, or None: JAX returns before they are computed, the next client's unit begins after."""


class Refused(ValueError):
    """What a client asked for cannot be done, for a reason that it can change: the error of its promise."""

    address: tuple[str, int] | None = None
    """(id, number) of the request, if it has a place among others and this could be read: it must fail there,
    because the client sends its next request as the one after it."""


@dataclass(frozen=True)
class Base:
    """The served model: frozen, one for all clients."""

    name: str
    """What clients call it: an absolute path of a folder with its tokenizer."""
    arch: Architecture
    """Without adapters."""
    params: Any
    tokenizer: Any
    stop_ids: tuple[int, ...]
    mesh: Mesh
    backend: Backend
    attention: str
    dtype: str
    remat: str
    seed: int
    max_tokens: int
    """Of a micro-batch on a device."""
    fingerprint: str
    """Of the frozen parameters."""

    @property
    def longest(self) -> int:
        """Positions of a sequence."""
        return self.arch.longest


@dataclass(frozen=True)
class LoraRequest:
    """The adapters of a new training client."""

    rank: int
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


@dataclass(frozen=True)
class Datum:
    """T input tokens; row i of what goes with them is of the prediction made after token i."""

    tokens: np.ndarray
    """[T] int32."""
    targets: np.ndarray
    """[T] or [T, K] int32; -1 stands for no target, of sparse rows."""
    columns: Mapping[str, np.ndarray]
    """float32 of the shape of `targets` by the names of the interface, without `target_tokens`: `weights`,
    `logprobs`, `advantages`, thresholds, `sequence_ratio_mask`."""


@dataclass(frozen=True)
class Pass:
    """A call of forward or forward_backward."""

    data: tuple[Datum, ...]
    loss: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    """`loss_fn_config`."""
    forward_only: bool = False


class Passed(NamedTuple):
    """What comes of a `Pass`."""

    logprobs: list[np.ndarray]
    """float32 of the shape of each datum's targets, in the order of the data; 0 where there is no target."""
    metrics: dict[str, float]
    """By names of the form `name:reduction`; `loss:sum` is among them."""


@dataclass(frozen=True)
class AdamNumbers:
    """What an optimizer step computes with."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """0: none."""


@dataclass(frozen=True)
class Snapshot:
    """The weights that a sampler reads; its arrays are never donated and never change."""

    adapters: Any
    """A tree as `models.lora.trained_part` gives it; None: the base alone."""
    lora: LoraRequest | None
    model: int
    """`model_seq_id` of the training client; -1: the base."""
    step: int
    """Optimizer steps before it: with `model` what the randomness of its tokens derives from."""


@dataclass(frozen=True)
class Trained:
    """All that a checkpoint of a training client holds, as host arrays by name."""

    lora: LoraRequest
    model: int
    step: int
    adapters: Mapping[str, np.ndarray]
    """float32 by peft's names."""
    moments: Mapping[str, np.ndarray] | None
    """`mu.NAME`, `nu.NAME` and `count`; None: weights for a sampler alone."""


@dataclass(frozen=True)
class Sample:
    """A call of asample."""

    tokens: np.ndarray
    """[P] int32, P >= 1."""
    n: int = 1
    max_tokens: int | None = None
    """None: as many as positions are left."""
    temperature: float = 1.0
    top_k: int = -1
    """-1: all."""
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    """Strings or token ids beside the model's own; None: its own alone; (): nothing ends a sequence."""
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: np.ndarray | None = None
    """[P - 1, K] int32 tokens in the place after each token but the last, whose log-probabilities are asked
    for; -1: none."""


class Likeliest(NamedTuple):
    """[T, K] the likeliest tokens in the place of each; id 0 and -99999.0 where there are none."""

    ids: np.ndarray
    logprobs: np.ndarray


class Sequence(NamedTuple):
    """A sampled sequence, with its stop token or the token that completes a stop string."""

    tokens: np.ndarray
    """[T] int32."""
    logprobs: np.ndarray
    """[T] float32, of the distribution drawn from."""
    stopped: bool
    """False: it has `max_tokens`, or no position is left."""
    likeliest: Likeliest | None = None


class Sampled(NamedTuple):
    """What comes of a `Sample`."""

    sequences: list[Sequence]
    prompt_logprobs: np.ndarray | None = None
    """[P] float32; NaN: none, as for the first."""
    likeliest: Likeliest | None = None
    """Of the prompt's tokens, [P, K]."""
    target_logprobs: np.ndarray | None = None
    """[P - 1, K] float32; NaN: none."""
    cached_tokens: int = 0
    """Of the prompt, those that a kept context had."""
