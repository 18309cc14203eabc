"""Residuals held from one micro-batch to the next: the same gradient, in the same memory."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import DEFAULT_FUSION

from quatrain.backend import CPU, backend_of
from quatrain.forward.micro_batch import micro_batches
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.params import abstract_params, output_head_name
from quatrain.ops.tokens import TokenLoss
from quatrain.parallel.compilations import num_compilations
from quatrain.parallel.mesh import one_device
from quatrain.update import residuals
from quatrain.update.gradient import gradient_program, sum_gradients
from quatrain.update.residuals import HeldGradient, ResidualMemory, residual_memory


def _surprise(tokens):
    return TokenLoss(-tokens.logprobs)


def _micro_batches(arch, rows: int, length: int):
    """Micro-batches of `rows` sequences, of which there are three times as many."""
    ids = np.random.default_rng(0).integers(1, arch.vocab_size, (3 * rows, length), dtype=np.int32)
    completion = np.broadcast_to(np.arange(length) >= length // 2, ids.shape)
    table = TokenTable(ids, np.ones(ids.shape, bool), completion, {}).weighted("token_mean", length)
    return [batch for _, batch in micro_batches(table, MicroBatchPlanner(rows=rows), one_device())]


class Watched(ResidualMemory):
    """Notes where what is lent lies, and where what comes back does."""

    def __init__(self):
        super().__init__()
        self.lent, self.returned = [], []

    def lend(self, *args):
        arrays = super().lend(*args)
        self.lent.append(sorted(x.unsafe_buffer_pointer() for x in arrays))
        return arrays

    def take_back(self, kind, arrays):
        self.returned.append(sorted(x.unsafe_buffer_pointer() for x in arrays))
        super().take_back(kind, arrays)


@pytest.mark.parametrize("remat", ["dots", pytest.param("layer", marks=pytest.mark.slow)])
def test_the_gradient_is_the_same_in_memory_used_again(small_arch, small_params, monkeypatch, remat):
    monkeypatch.setattr(residuals, "LEAST_BYTES", 2**12)
    policy = PolicySpec(small_arch, remat=remat)
    batches = _micro_batches(small_arch, 4, 32)
    static = {"model": policy, "objective": _surprise}
    expected = sum_gradients(small_params, batches, **static)
    memory = Watched()
    got = sum_gradients(small_params, batches, **static, residuals=memory)
    compiled = num_compilations()
    sum_gradients(small_params, batches, **static, residuals=memory)
    assert num_compilations() == compiled
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    assert len(memory.lent[0]) >= small_arch.num_layers
    assert memory.lent == memory.returned == [memory.lent[0]] * 6


@pytest.mark.slow
def test_another_kind_of_micro_batch_has_memory_of_its_own(small_arch, small_params, monkeypatch):
    """The gradient of both kinds is the sum of those of each, in memory of another `ResidualMemory`."""
    monkeypatch.setattr(residuals, "LEAST_BYTES", 2**12)
    static = {"model": PolicySpec(small_arch), "objective": _surprise}
    memory, params = Watched(), small_params
    kinds = _micro_batches(small_arch, 4, 32)[:2], _micro_batches(small_arch, 2, 48)[:2]
    got, *_ = sum_gradients(params, kinds[0] + kinds[1], **static, residuals=memory)
    one, other = (sum_gradients(params, kind, **static, residuals=ResidualMemory())[0] for kind in kinds)
    for a, b, c in zip(*map(jax.tree.leaves, (got, one, other)), strict=True):
        np.testing.assert_allclose(a, b + c, rtol=1e-5, atol=1e-5)
    assert memory.lent[0] == memory.lent[1]
    assert memory.lent[2] == memory.lent[3]
    assert all(memory.lent)


@pytest.fixture
def holding(small_arch, monkeypatch):
    """(arch, the program of a gradient, its arguments, its static ones, those of one that holds, what it
    holds), of shapes alone."""
    monkeypatch.setattr(residuals, "LEAST_BYTES", 2**14)
    arch = replace(small_arch, layers=small_arch.layers[:1] * 3)
    params = abstract_params(arch)
    batch = _micro_batches(arch, 8, 64)[0]
    total = jax.tree.map(lambda p: jax.ShapeDtypeStruct((1, *p.shape), p.dtype), params)
    stats = {"sum": {"loss": jnp.float32(0), "tokens": jnp.float32(0)}, "max": {}, "routers": {}}
    static = {"model": PolicySpec(arch, remat="dots"), "objective": _surprise}
    program = gradient_program(CPU)
    holding = static | {"gradient": HeldGradient(output_head_name(arch))}
    args = params, (total, stats), batch
    _, held = program.eval_shape(*args, **holding)
    return arch, program, args, static, holding, held


def _num_bytes(held) -> int:
    return sum(x.size * x.dtype.itemsize for x in held)


def test_what_is_held_is_what_the_backward_pass_reads(holding):
    arch, *_, held = holding
    mixer, mlp = arch.layers[0].mixer, arch.layers[0].mlp
    heads = (2 * mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim  # turned, and attention's result
    layer = 8 * 64 * 4 * (2 * arch.hidden_size + heads + 2 * mlp.width)
    last = 2 * 8 * 64 * 4 * arch.hidden_size  # into the final norm and out of it
    head = 4 * arch.vocab_size * (arch.hidden_size + 8 * 64)  # its gradient, and logits
    assert _num_bytes(held) == arch.num_layers * layer + last + head


@pytest.mark.slow
def test_what_is_held_lies_once_and_is_not_needed_beside(holding):
    """By the compiler's account; the quick tests look at where the arrays lie."""
    _, program, args, static, holding, held = holding

    def temporary(*held, **static):
        compiled = program.lower(*args, *held, **static).compile(DEFAULT_FUSION)
        return compiled.memory_analysis().temp_size_in_bytes

    num_bytes = _num_bytes(held)
    assert 0.6 * num_bytes < temporary(**static) - temporary(held, **holding) <= num_bytes


def test_what_did_not_come_back_is_made_anew(small_arch, small_params, monkeypatch):
    monkeypatch.setattr(residuals, "LEAST_BYTES", 2**12)
    batches = _micro_batches(small_arch, 4, 32)
    static = {"model": PolicySpec(small_arch), "objective": _surprise}
    memory = Watched()
    monkeypatch.setattr(memory, "take_back", lambda kind, arrays: None)
    sum_gradients(small_params, batches, **static, residuals=memory)
    assert [len(each) for each in memory.lent] == [len(memory.lent[0])] * 3
    assert memory.lent[0]


def test_only_a_cpu_that_recomputes_holds_residuals():
    assert isinstance(residual_memory(CPU, "layer"), ResidualMemory)
    assert isinstance(residual_memory(CPU, "dots"), ResidualMemory)
    assert residual_memory(CPU, "none") is None
    assert residual_memory(backend_of("tpu"), "layer") is None
