"""The routes of experts that inference servers return with their samples, as those that training replays.

Data flow: `kinds.py` reads `routed_experts` of an answer -> `RouteRules.read` -> the column of `Piece`.
"""

from __future__ import annotations

import base64
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from quatrain.models.architecture import Architecture
from quatrain.models.blocks.experts import Experts
from quatrain.servers.client import Unfit
from quatrain.types.routes import routes_from_text

CHANGED = 0.005, 0.023
"""Parts of the tokens for which rounding to bfloat16 changes the experts of one layer: 4 of 32 experts, and
10 of 512."""


class RouteRules(NamedTuple):
    """What the routes of a model are: `layers` of its `num_layers` have experts."""

    layers: tuple[int, ...]
    num_layers: int
    experts_per_token: int
    num_experts: int
    dtype: np.dtype

    @classmethod
    def of(cls, arch: Architecture) -> RouteRules | None:
        """Those of a model with experts; None for another."""
        if arch.routes is None:
            return None
        layers = tuple(i for i, kind in enumerate(arch.layers) if isinstance(kind.mlp, Experts))
        _, k, num_experts = arch.routes
        return cls(layers, arch.num_layers, k, num_experts, arch.routes.dtype)

    def read(self, routes: Any, tokens: int) -> np.ndarray:
        """[tokens, L, k] of the first `tokens` tokens of a sequence, all but its last, from base64.

        Servers have them for all layers, or for those with experts. Raises Unfit for routes of
        another model or length, and for those in which a token has an expert twice.
        """
        k, all_layers, own = self.experts_per_token, self.num_layers, len(self.layers)
        form = f"[{tokens}, {own} or {all_layers}, {k}]"
        rule = f"it must return the experts of all tokens of a sequence but the last, as integers {form}"
        remedy = "let it serve the model that is trained, or set rollout.record_routes to false"
        if isinstance(routes, str):
            with suppress(ValueError):  # what cannot be read is refused below, as all that is no array
                content = base64.b64decode(routes, validate=True)
                is_file = content.startswith(b"\x93NUMPY")  # of quatrain and vLLM; SGLang: int32 numbers
                routes = routes_from_text(routes) if is_file else np.frombuffer(content, "<i4")
        if not isinstance(routes, np.ndarray) or not np.issubdtype(routes.dtype, np.integer):
            got = "none" if routes is None else f"a value of type {type(routes).__name__}"
            raise Unfit(f"{rule}; got {got}; {remedy}")
        layers = {tokens * own * k: own, tokens * all_layers * k: all_layers}.get(routes.size)
        shaped = routes.ndim == 1 or routes.shape == (tokens, layers, k)
        if layers is None or not shaped:
            raise Unfit(f"{rule}; got an array {list(routes.shape)}; {remedy}")
        routes = routes.reshape(tokens, layers, k)
        routes = routes if layers == own else routes[:, list(self.layers)]
        if routes.size and not 0 <= routes.min() <= routes.max() < self.num_experts:
            raise Unfit(
                f"{rule}, from 0 to {self.num_experts - 1}; got {routes.min()} to {routes.max()}; {remedy}"
            )
        ordered = np.sort(routes, axis=-1)
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise Unfit(f"{rule}, {k} different ones in a layer; got one twice; {remedy}")
        return routes.astype(self.dtype)

    @property
    def gap(self) -> str:
        """What to expect without routes."""
        layers = len(self.layers)
        low, high = (100 * (1 - (1 - part) ** layers) for part in CHANGED)
        return (
            f"between a sampler and a trainer that differ by the rounding of bfloat16, {low:.0f} to "
            f"{high:.0f} % of tokens go through another expert in at least one of the {layers} layers that "
            "have them, which changes their log-probabilities by far more than rounding "
            "(rollout/logprob_diff_max)"
        )
