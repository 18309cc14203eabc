"""Settings that depend on the kind of device: one frozen `Backend`, selected once per process.

Data flow: `jax.default_backend()` -> `this_backend()` -> a static field of `forward.specs.PolicySpec` and
of `engine.decode.Program`, which pass its values to the model, the output head and the compiler.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import jax

from quatrain.ops.logprobs import Tile

LARGEST_TILE_BYTES = 2**29
"""Bytes of float32 logits in one tile on an accelerator, whose utilisation needs large products."""
LARGEST_TILE_WORDS = 2**15
"""Words in one tile on an accelerator: the more tokens then have their logits at one time, and the gradient
of the head is read and written once for so many."""
TILE_UNIT = 128
"""Rows of logits are aligned for the products that read them."""


@dataclass(frozen=True)
class BlockSizes:
    """Block sizes of `models/attention/blockwise.py`, and how many blocks it computes at once."""

    block: int
    """Tokens in a block."""
    queries: int | None
    """Query blocks computed at once; None: all."""
    keys: int
    """Key blocks that each of these query blocks attends to at once."""


@dataclass(frozen=True)
class Backend:
    """Settings that depend on the kind of device; a static argument of compiled functions.

    The defaults are those for accelerators, and correct on every device: other values change speed, memory
    use and rounding.
    """

    kind: str = "accelerator"
    """JAX's name of the kind of device: cpu, gpu or tpu."""
    attention_blocks: BlockSizes = BlockSizes(block=64, queries=None, keys=1)
    """Block sizes of attention; accelerators are fastest with all query blocks at once."""
    fixed_tile: Tile | None = None
    """The tile of logits for every vocabulary; None lets `tile` derive it from the size of the vocabulary."""
    few_rows: int = 0
    """A product of at most this many rows with a weight matrix has the matrix as its first factor; see
    `layers.matmul_transposed`."""
    line_tokens: int | None = None
    """Most tokens of a buffer of packed sequences, unless one sequence has more: this bounds the memory of
    their mask. A micro-batch has as many buffers on each data shard as it needs. None: one."""
    experts: str = "blocks"
    """How the products of experts are computed (`models.expert_products.PRODUCTS`)."""
    vocabulary_first: bool = False
    """Whether sampling works on logits [V, B], with the vocabulary along the first dimension."""
    decode_ends_early: bool = False
    """Whether a decode call ends with its last live slot. XLA then does not know how many steps a call has,
    and a GPU asks its host before each of them whether it is the last."""
    holds_residuals: bool = False
    """Whether a micro-batch's residuals take the memory of the one before (`update/residuals.py`)."""
    saves_in_background: bool = True
    """Whether training goes on while a checkpoint's files are written."""
    compiler_options: tuple[tuple[str, str], ...] = ()
    """XLA options, as (name, value), for the programs of the update and the sampler."""

    def tile(self, vocab_size: int) -> Tile:
        """Tokens and vocabulary entries of the output head whose logits exist at one time.

        Without a `fixed_tile`: up to 32,768 words, and as many tokens (a power of two) as have their logits
        in 512 MiB.
        """
        if self.fixed_tile is not None:
            return self.fixed_tile
        words = min(vocab_size, LARGEST_TILE_WORDS)
        unit = TILE_UNIT if words == LARGEST_TILE_WORDS else 1
        return Tile(2 ** int(math.log2(LARGEST_TILE_BYTES // (4 * words))), words, unit=unit)


ACCELERATOR = Backend()
"""The settings for any GPU, from which those for TPUs differ in few; `quatrain plan` assumes them."""

TPU = Backend(
    kind="tpu",
    # A kernel there; for GPUs and CPUs, XLA multiplies all rows by all matrices, most of them as zeros.
    experts="ragged",
    # The compiler copies logits [B, V] to other layouts, three times for each token.
    vocabulary_first=True,
    # The attention kernel takes the mask of a buffer, the square of its tokens: 16 MiB for 4,096.
    line_tokens=4096,
)

CPU = Backend(
    kind="cpu",
    # Small blocks fit in the caches of a CPU and contain fewer masked scores.
    attention_blocks=BlockSizes(block=32, queries=8, keys=2),
    # 2 MiB of logits fit in a cache; up to 256 MiB of logits are kept, because computing them again is slow.
    fixed_tile=Tile(256, 2048, kept_bytes=2**28),
    # XLA rearranges the second factor of a product, which for a matrix costs as much as multiplying few rows.
    few_rows=64,
    decode_ends_early=True,
    # Temporaries of a program are new pages at every call, which the system maps and clears one by one.
    holds_residuals=True,
    # The writer holds the saved arrays, so the next step would need memory for others of the same size.
    saves_in_background=False,
    # XLA for CPUs removes optimization barriers before it merges equal expressions and fuses: the backward
    # pass would keep what it is meant to recompute, and recompute what it is meant to keep.
    compiler_options=(("xla_disable_hlo_passes", "cse_barrier_expander"),),
)


def backend_of(kind: str) -> Backend:
    """The settings for a `kind` of device, as JAX names it; those of any accelerator for an unknown kind."""
    return {CPU.kind: CPU, TPU.kind: TPU}.get(kind, replace(ACCELERATOR, kind=kind))


@cache
def this_backend() -> Backend:
    """The settings for the devices of this process; the only place that asks JAX which kind they are."""
    return backend_of(jax.default_backend())
