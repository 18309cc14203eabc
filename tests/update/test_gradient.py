from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiling import DEFAULT_FUSION

from quatrain.config.schema import UpdateConfig
from quatrain.forward.micro_batch import fill
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.params import abstract_params
from quatrain.ops.tokens import TokenLoss
from quatrain.parallel.mesh import one_device
from quatrain.update.gradient import gradient_program


def _surprise(tokens):
    return TokenLoss(-tokens.logprobs)


def _temporary_bytes(arch, batch, remat: str) -> int:
    """What the gradient of one micro-batch needs beside its inputs and outputs, by the compiler's account."""
    params = abstract_params(arch)
    total = jax.tree.map(lambda p: jax.ShapeDtypeStruct((1, *p.shape), p.dtype), params)
    stats = {"sum": {"loss": jnp.float32(0), "tokens": jnp.float32(0)}, "max": {}, "routers": {}}
    policy = PolicySpec(arch, remat=remat)
    lowered = gradient_program(policy.backend).lower(
        params, (total, stats), batch, model=policy, objective=_surprise
    )
    return lowered.compile(DEFAULT_FUSION).memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "made_again"), [("none", "layer"), ("none", "dots"), ("dots", "layer")])
def test_remat_saves_memory(small_arch, kept, made_again):
    """On a CPU too, where the compiler by itself would merge what is computed twice."""
    arch = replace(small_arch, layers=small_arch.layers[:1] * 3)
    ids = np.arange(4 * 256, dtype=np.int32).reshape(4, 256) % arch.vocab_size
    real = np.ones(ids.shape, bool)
    completion = real & (np.arange(256) > 200)
    columns = {
        "advantages": completion.astype(np.float32),
        "rollout_logprobs": -completion.astype(np.float32),
    }
    table = TokenTable(ids, real, completion, columns, np.arange(4)).weighted("token_mean", 55)
    config = UpdateConfig(mini_batch_size=4, max_tokens_per_device=1024)
    (cut,) = PolicySpec(arch).planner(config).plans(table)
    more, less = (
        _temporary_bytes(arch, fill(cut, table, one_device()), remat) for remat in (kept, made_again)
    )
    inputs = arch.num_layers * 1024 * 4 * arch.hidden_size  # the input of each layer
    assert inputs < less < (0.64 if (kept, made_again) == ("none", "layer") else 0.8) * more
