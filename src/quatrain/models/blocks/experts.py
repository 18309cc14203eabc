"""Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538): each token is computed by k of E gated MLPs.

y = sum over the k experts of weight * down(activation(gate(x)) * up(x)), and a shared expert's output if
there is one. There is no capacity and no token is dropped, so that a token's result does not depend on
others.

On a mesh with `ep`, a device has a part of the experts, and computes it for the tokens of all these devices:
tokens are all-gathered before the experts, and their results reduce-scattered.

Shapes: B rows, T tokens, N = B T, D hidden, E experts, k experts of a token, P = N k pairs of both, F columns
of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from quatrain.config.mesh import MeshShape
from quatrain.models.blocks.layer_run import ROUTER, ROUTES, Costs, Enter, LayerRun
from quatrain.models.blocks.mlp import ACTIVATIONS, Dense, activated
from quatrain.models.expert_products import (
    Groups,
    add_expert_bias,
    expert_product,
    from_experts,
    group_pairs,
    to_experts,
)
from quatrain.models.layers import Layer
from quatrain.models.spec import LORA_A, LORA_B, ParamSpec, TensorName, linear_tensors, part_tensors, require
from quatrain.parallel.axes import EP, TP
from quatrain.parallel.collectives import (
    all_gather,
    axis_index,
    axis_size,
    gather_rows,
    psum_backward,
    psum_forward,
    reduce_scatter_rows,
)

OVER_EP = (((EP,), 0),)
"""Rows of all devices of `ep`, for `all_gather`."""

APART = ("gate_proj", "up_proj", "down_proj")
"""The names of the matrices of an expert."""
FUSED = ("gate_up_proj", "down_proj")
"""Those names where gate and up are one."""


class RouterSums(NamedTuple):
    """Sums over tokens, float32; of several layers, each has a first dimension L."""

    tokens: jax.Array
    """[E]: tokens that each expert computed."""
    probabilities: jax.Array
    """[E]: of the softmax over all experts; a loss of them has a gradient."""
    entropy: jax.Array
    """[]: of this softmax, in nats."""
    changed: jax.Array
    """[]: tokens whose experts were given and are not those that would have been chosen."""


class Routed(NamedTuple):
    """What a layer of experts says of its choices."""

    experts: jax.Array
    """[B, T, k] int32: the experts of each token."""
    sums: RouterSums | None


@dataclass(frozen=True)
class Experts:
    """`num` gated MLPs of `width` columns, of which the router chooses `top_k` for each token."""

    num: int
    top_k: int
    width: int
    activation: str = "silu"
    clamp: tuple[float, float] | None = None
    """(limit, a): the product of gate and up is g sigmoid(a g) (u + 1), with g up to the limit and u within
    +-limit (gpt-oss); None: activation(gate) * up."""
    bias: bool = False
    """Whether the router and the experts have biases."""
    renormalise: bool = True
    """Whether the weights of the chosen experts sum to 1; else they are parts of a softmax over all."""
    shared: Dense | None = None
    """A gated MLP of every token."""
    shared_gate: bool = False
    """Whether its output is multiplied by the sigmoid of a gate."""
    module: str = "mlp"
    """The name of the block in a checkpoint."""
    names: tuple[str, ...] = APART
    """The names of an expert's matrices there; if they are two, the first is both gate and up."""
    stacked: bool = False
    """Whether each of these tensors has the matrices of all experts."""
    transposed: bool = False
    """Whether they are then [experts, in, out], with gate and up in turns, and the router is `router`."""

    frozen: ClassVar[frozenset[str]] = frozenset({ROUTER, "shared_gate"})
    """Matrices that cannot have adapters."""

    def __post_init__(self) -> None:
        known = self.activation in ACTIVATIONS
        require(known, "activation", f"one of {', '.join(ACTIVATIONS)}", self.activation)
        some = 1 <= self.top_k <= self.num
        require(some, "num_experts_per_tok", f"from 1 to num_experts = {self.num}", self.top_k)

    def params(self, d: int, residual: float) -> dict[str, ParamSpec]:
        """`router` [E, D] float32, `experts_gate_up` [E, 2, F, D], `experts_down` [E, D, F], and those of the
        shared expert; the standard deviation of `down` is scaled by `residual`.
        """
        E, F = self.num, self.width
        specs = {
            ROUTER: ParamSpec((E, d), ("group", "embed"), "normal", d**-0.5, "float32"),
            "experts_gate_up": ParamSpec.matrix((E, 2, F, d), ("experts", "group", "group", "embed")),
            "experts_down": ParamSpec.matrix((E, d, F), ("experts", "embed", "group"), residual),
        }
        if self.shared:
            specs |= self.shared.params(d, residual)
        if self.shared_gate:
            specs["shared_gate"] = ParamSpec.matrix((1, d), ("group", "embed"))
        if self.bias:
            specs |= {f"{name}_bias": specs[name].bias() for name in ("experts_gate_up", "experts_down")}
            specs[f"{ROUTER}_bias"] = ParamSpec((E,), ("group",), "constant", 0.0, "float32")
        return specs

    def tensors(self) -> list[TensorName]:
        """Its tensors in a layer of a checkpoint."""
        router = "router" if self.transposed else "gate"
        names = linear_tensors(f"{self.module}.{router}", ROUTER, bias=self.bias)
        names += self._stacked_tensors() if self.stacked else self._tensors_apart()
        if self.shared:
            names += self.shared.tensors()
        if self.shared_gate:
            names += linear_tensors(f"{self.module}.shared_expert_gate", "shared_gate", bias=False)
        return names

    @property
    def rows(self) -> Any:
        """The index of `experts_gate_up` [E, 2, F, D] that gives the rows of gate and up as one matrix."""
        if not self.transposed:
            return ...
        turns = ((half, column) for column in range(self.width) for half in (0, 1))
        return (slice(None), *zip(*turns, strict=True))

    def _tensors_apart(self) -> list[TensorName]:
        """A tensor for each matrix of each expert."""
        gate, up, down = self.names
        names: list[TensorName] = []
        for e in range(self.num):
            module, parts = f"{self.module}.experts.{e}", {gate: np.s_[e, 0], up: np.s_[e, 1]}
            names += part_tensors(module, "experts_gate_up", parts, bias=False)
            names += linear_tensors(f"{module}.{down}", "experts_down", np.s_[e], bias=False)
        return names

    def _stacked_tensors(self) -> list[TensorName]:
        """A tensor for all experts, and one for their biases."""
        gate_up = [self.rows] if self.names == FUSED else [np.s_[:, 0], np.s_[:, 1]]
        parts = [*(("experts_gate_up", part) for part in gate_up), ("experts_down", ...)]
        names: list[TensorName] = []
        for name, (param, part) in zip(self.names, parts, strict=True):
            matrix = TensorName(f"{self.module}.experts.{name}", (param,), part, vector=False, stacked=True)
            bias = TensorName(f"{matrix.name}_bias", (f"{param}_bias",), part, stacked=True)
            names += [matrix._replace(transposed=self.transposed), bias][: 1 + self.bias]
        return names

    def run(
        self,
        x_BTD: jax.Array,
        enter: Enter,
        run: LayerRun,
        routes_BTk: jax.Array | None = None,
        counted_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Routed]:
        """([B, T, D], summed over the experts of all `tp` and `ep` devices; what was chosen).

        `routes` are the experts to take, and -1 where the router chooses. Each token counts `counted` times
        in the sums; None: there are none.
        """
        shape = x_BTD.shape

        def up(
            inputs: tuple[jax.Array, jax.Array | None, jax.Array | None], layer: Layer
        ) -> tuple[jax.Array, jax.Array, Groups, jax.Array, RouterSums | None]:
            x_ND, routes, counted = inputs
            x_ND = enter(x_ND, layer)
            # In float32 at full precision: rounding would choose other experts than the sampler did.
            logits_NE = jnp.matmul(x_ND.astype(jnp.float32), layer[ROUTER].T, precision="highest")
            if self.bias:
                logits_NE += layer[f"{ROUTER}_bias"]
            # Given routes take the place of the choice but not of the weights, so that the router keeps its
            # gradient.
            chosen_Nk = self._chosen(logits_NE, routes)
            weights_Nk = psum_backward(self._weights(logits_NE, chosen_Nk), TP)
            # All tokens go to all devices of `ep`: an exchange by destination needs a capacity, or shapes
            # that vary.
            weights_Nk, all_ND = (all_gather(each, OVER_EP) for each in (weights_Nk, psum_backward(x_ND, TP)))
            groups = self._groups(gather_rows(chosen_Nk, EP))
            rows_PD = to_experts(all_ND, groups)
            hidden_PF = self._product(rows_PD, layer, "experts_gate_up", groups, run)
            if self.bias:
                bias = layer["experts_gate_up_bias"]
                hidden_PF = add_expert_bias(hidden_PF, bias.reshape(len(bias), -1), groups)
            sums = None if counted is None else self._sums(logits_NE, chosen_Nk, routes, counted)
            return hidden_PF, weights_Nk, groups, chosen_Nk, sums

        def down(inputs: tuple[jax.Array, jax.Array, Groups], layer: Layer) -> jax.Array:
            hidden_PF, weights_Nk, groups = inputs
            gate, up = jnp.split(hidden_PF, 2, axis=-1)
            weights_P1 = to_experts(weights_Nk.reshape(-1, 1), groups)
            # Weighted before the product, whose result no gradient then needs.
            weighted_PF = (self._gated(gate, up).astype(jnp.float32) * weights_P1).astype(hidden_PF.dtype)
            y_PD = self._product(weighted_PF, layer, "experts_down", groups, run)
            if self.bias:
                y_PD = add_expert_bias(y_PD, layer["experts_down_bias"], groups, weights_P1)
            # In the order of a token's experts, so that a sum does not depend on how other tokens were
            # routed.
            return from_experts(y_PD, groups, len(weights_Nk))

        routes_Nk = None if routes_BTk is None else routes_BTk.reshape(-1, self.top_k)
        counted_N = None if counted_BT is None else counted_BT.reshape(-1)
        inputs = x_BTD.reshape(-1, shape[-1]), routes_Nk, counted_N
        hidden_PF, weights_Nk, groups, chosen_Nk, sums = run.part(up, inputs)
        y_ND = run.part(down, (hidden_PF, weights_Nk, groups))
        # One sum over all devices that have experts: each holds the results of its own, 0 for the others.
        y_BTD = psum_forward(reduce_scatter_rows(y_ND, EP), TP).reshape(shape)
        if self.shared:
            y_BTD = y_BTD + self._shared(x_BTD, enter, run)
        return y_BTD, Routed(chosen_Nk.reshape(*shape[:2], -1), sums)

    def _product(self, x_PI: jax.Array, layer: Layer, name: str, groups: Groups, run: LayerRun) -> jax.Array:
        """[P, O]: the product of sorted rows with the matrices `name` [E, *out, I] and their adapters."""

        def times(x: jax.Array, name: str) -> jax.Array:
            matrix = layer[name]
            matrix = matrix.reshape(len(matrix), -1, matrix.shape[-1])
            return expert_product(x, matrix, groups, run.experts)

        y_PO = times(x_PI, name)
        if name + LORA_A not in layer:
            return y_PO
        return y_PO + run.lora_scale * times(times(x_PI, name + LORA_A), name + LORA_B)

    def _shared(self, x_BTD: jax.Array, enter: Enter, run: LayerRun) -> jax.Array:
        """The output of the shared expert, times its gate if it has one."""
        assert self.shared
        y_BTD = self.shared.run(x_BTD, enter, run)

        def gated(inputs: tuple[jax.Array, jax.Array], layer: Layer) -> jax.Array:
            x_BTD, y_BTD = inputs
            return jax.nn.sigmoid(run.linear(enter(x_BTD, layer), layer, "shared_gate")) * y_BTD

        return run.part(gated, (x_BTD, y_BTD)) if self.shared_gate else y_BTD

    def _gated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        if self.clamp is None:
            return activated(gate, self.activation) * up
        limit, slope = self.clamp
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * gate * jax.nn.sigmoid(slope * gate)

    def _chosen(self, logits_NE: jax.Array, routes_Nk: jax.Array | None) -> jax.Array:
        """[N, k]: the experts of `routes`, or where there are none those with the greatest logits."""
        chosen_Nk = lax.top_k(logits_NE, self.top_k)[1]
        if routes_Nk is not None:
            chosen_Nk = jnp.where(routes_Nk >= 0, routes_Nk, chosen_Nk)
        # Saved by name: a backward pass that chose again could take others, and the gradient would be of
        # another model.
        return checkpoint_name(chosen_Nk, ROUTES)

    def _weights(self, logits_NE: jax.Array, chosen_Nk: jax.Array) -> jax.Array:
        """[N, k] float32: the weights of the chosen experts."""
        logits_Nk = jnp.take_along_axis(logits_NE, chosen_Nk, axis=1)
        if self.renormalise:
            return jax.nn.softmax(logits_Nk, axis=1)
        return jnp.exp(logits_Nk - jax.nn.logsumexp(logits_NE, axis=1, keepdims=True))

    def _groups(self, chosen_Nk: jax.Array) -> Groups:
        """The pairs by expert: first those of this device's experts."""
        own = self.num // (axis_size(TP) * axis_size(EP))
        number = axis_index(TP) * axis_size(EP) + axis_index(EP)
        return group_pairs(chosen_Nk.reshape(-1) - number * own, own)

    def _sums(
        self, logits_NE: jax.Array, chosen_Nk: jax.Array, routes_Nk: jax.Array | None, counted_N: jax.Array
    ) -> RouterSums:
        probabilities_NE = jax.nn.softmax(logits_NE, axis=1)
        log_NE = jax.nn.log_softmax(logits_NE, axis=1)
        changed_N = jnp.zeros(len(logits_NE), bool)
        if routes_Nk is not None:
            live_Nk = lax.top_k(logits_NE, self.top_k)[1]
            # Sets, not lists: two experts of nearly equal logits may change places, which changes nothing.
            changed_N = (jnp.sort(live_Nk) != jnp.sort(chosen_Nk)).any(axis=1)
        counted_N = counted_N.astype(jnp.float32)
        each_NE = jax.nn.one_hot(chosen_Nk, self.num, dtype=jnp.float32).sum(axis=1)
        total = partial(jnp.einsum, "n,n...->...", counted_N, precision="highest")
        entropy_N = -(probabilities_NE * log_NE).sum(axis=1)
        return RouterSums(total(each_NE), total(probabilities_NE), total(entropy_N), total(changed_N))

    def spreads(self, tp: int, ep: int) -> bool:
        """Whether `tp` x `ep` devices can share its experts."""
        return self.num % (tp * ep) == 0

    def splits(self, tp: int) -> bool:
        """Whether `tp` devices can share its experts."""
        return self.num % tp == 0 and (self.shared is None or self.shared.splits(tp))

    @property
    def split_rule(self) -> str:
        """What a valid `tp` does, for an error."""
        shared = f", {self.shared.split_rule} of every token" if self.shared else ""
        return f"divides the {self.num} experts{shared}"

    def costs(self, d: int, mesh: MeshShape) -> Costs:
        """Of a block for hidden states of `d` elements; a device has rows for all pairs of `ep`."""
        k, f, rows = self.top_k, self.width, self.top_k * mesh.ep
        own = Costs(
            weights=d * self.num + 3 * d * f * k // mesh.tp,
            per_key=0,
            outputs={"experts_gate_up": rows * 2 * f, "experts_down": rows * d},
            kept=rows * 2 * f,
            normed=0,
            working=rows * (2 * d + 7 * f) + 2 * self.num,
            statistics=4 * k,
            inputs=rows * (d + f),
        )
        if not self.shared:
            return own
        shared = self.shared.costs(d, mesh)
        return own._replace(
            weights=own.weights + shared.weights + d * self.shared_gate,
            outputs={**own.outputs, **shared.outputs},
            kept=own.kept + shared.kept + d * self.shared_gate,
            working=own.working + shared.working,
        )
