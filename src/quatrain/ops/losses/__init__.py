"""Policy losses per token, one file each, and the token weights that aggregate them.

Data flow: log-probabilities and advantages -> token losses on the device; the completion mask -> token
weights on the host. The loss of a mini-batch is sum(weights * token_loss), however it is cut into pieces.

In the formulas A is the advantage of a token, d = clamp(logprobs - old_logprobs, -20, 20) its log-ratio and
r = exp(d) its probability ratio; sg stops the gradient. A token whose log-ratio is clamped has gradient 0
wherever the gradient of a loss flows through r.

A file whose name does not begin with `_` is a loss: a function of the file's name, and `AGGREGATION` where
its paper does not take the mean over all tokens. Nothing else lists the losses.
"""

from collections.abc import Callable

from quatrain.ops import functions_of
from quatrain.ops.aggregation import LOSS_AGGREGATIONS as LOSS_AGGREGATIONS
from quatrain.ops.aggregation import token_weights as token_weights
from quatrain.ops.tokens import TokenLoss

POLICY_LOSSES: dict[str, Callable[..., TokenLoss]] = functions_of(__name__, __path__)
"""(tokens, **arguments of its own) -> token loss; arguments without a default are keys of `update`."""
