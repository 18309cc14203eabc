"""The experts that tokens went through: how recorded routes are stored, and their form in JSON.

Data flow: the engine, or an inference server, records routes with the tokens -> the column ROUTES of `Piece`
-> `RolloutBatch.routes` -> every pass of the update over the batch, which replays them.

A route is the k experts that a router chose for a token, in each of L MoE layers: [.., L, k].
"""

from __future__ import annotations

import base64
import binascii
import io
from typing import Any

import numpy as np

ROUTES = "routes"
"""The name of the column."""
ROUTE_DTYPES = (np.uint8, np.uint16)
"""Dtypes of recorded routes: uint8 for at most 256 experts (255 if a token has one), else uint16."""


def live_of(dtype: Any) -> int:
    """What all k entries of a token and layer are whose experts are chosen live: the largest of `dtype`."""
    return int(np.iinfo(dtype).max)


def routes_to_text(routes: np.ndarray) -> str:
    """Routes as base64 of NumPy's file format, the form of vLLM's `routed_experts`."""
    file = io.BytesIO()
    np.save(file, routes, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def routes_from_text(text: str) -> np.ndarray:
    """The inverse of `routes_to_text`. Raises ValueError for text that is no array of integers."""
    try:
        routes: np.ndarray = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
    except (binascii.Error, EOFError, OSError, ValueError) as error:
        raise ValueError(f"routes must be a NumPy file in base64: {error}") from error
    if not isinstance(routes, np.ndarray) or not np.issubdtype(routes.dtype, np.integer):
        raise ValueError("routes must be an array of integers")
    return routes
