"""On-policy distillation: the sampled-token KL to a teacher, as an advantage of each token.

Data flow: log-probabilities of the sampled tokens under teacher and policy -> here -> the policy loss
(`update/objective.py`), in place of the advantages that come from rewards alone.
"""

import jax
import jax.numpy as jnp

from quatrain.ops.tokens import ScoredTokens


def sampled_advantages(
    tokens: ScoredTokens, *, rl_weight: float, clip: float, discount: float
) -> tuple[jax.Array, jax.Array]:
    """A'_t = rl_weight A_t + w_t sum_l discount^l c_{t+l}, with c = clip(log q - log p_old, -clip, clip).

    q is the teacher and p_old the policy before the optimizer step. Over the policy's samples the
    expectation of c grad log p is, where nothing is clipped, that of -grad KL(p || q) in each state
    (Thinking Machines, "On-policy distillation", 2025; MiniLLM, arXiv 2306.08543). The sum runs over the
    scored tokens of the sequence from t on; given tokens between them do not count.

    Reads `advantages`, `old_logprobs`, and the columns `teacher_logprobs` and `teacher_weights` (w), which is
    0 on tokens without a teacher. Returns [R, K] float32 advantages, and 1.0 where c was clipped, else 0.0.
    No gradient flows through either.
    """
    weights = tokens.column("teacher_weights")
    gap = tokens.column("teacher_logprobs") - tokens.old_logprobs
    clipped = (jnp.abs(gap) > clip) & (weights > 0)
    signal = weights * jnp.clip(gap, -clip, clip)
    if discount:
        signal = sums_from_here_on(signal, tokens.mask, tokens.sequence_ids, discount)
    advantages = rl_weight * tokens.advantages + signal
    return jax.lax.stop_gradient((advantages, clipped.astype(jnp.float32)))


def sums_from_here_on(
    values: jax.Array, mask: jax.Array, sequence_ids: jax.Array, discount: float
) -> jax.Array:
    """y_t = values_t + discount y_{t'} with t' the next token of the sequence in `mask`; all arrays [R, K].

    Tokens of a sequence are in their order; between them there may be others. Those outside of the mask,
    given tokens of a whole sequence or padding of a micro-batch, count for nothing: y does not depend on
    whether they are there.
    """

    def of_row(row: jax.Array, scored: jax.Array, ids: jax.Array) -> jax.Array:
        order = jnp.argsort(ids, stable=True)
        row, scored, ids = row[order], scored[order], ids[order]
        row = jnp.where(scored, row, 0.0)
        decay = jnp.where(scored, jnp.float32(discount), jnp.float32(1))
        carried = jnp.where(jnp.append(ids[:-1] == ids[1:], False), decay, jnp.float32(0))

        def later_then_earlier(
            later: tuple[jax.Array, jax.Array], earlier: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array]:
            return later[0] * earlier[0], earlier[1] + earlier[0] * later[1]

        _, summed = jax.lax.associative_scan(later_then_earlier, (carried, row), reverse=True)
        return summed[jnp.argsort(order)]

    return jax.vmap(of_row)(values, mask, sequence_ids)
