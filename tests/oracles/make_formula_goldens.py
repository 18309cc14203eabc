"""Writes tests/golden/formulas.json: losses, advantages and rewards by their papers' formulas, in torch.

    make oracles

Each is written from its paper, in float64 and in the plainest form: sums where quatrain has recursions, a
squared error where it has its expansion. Gradients are torch's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

GOLDEN = Path(__file__).parents[1] / "golden" / "formulas.json"
ROWS, TOKENS = 5, 14
STD_EPS = 1e-4
"""What quatrain adds to the standard deviation."""


def main() -> None:
    """Draws the inputs from a fixed seed, and computes every formula."""
    torch.manual_seed(62)
    torch.set_default_dtype(torch.float64)
    inputs = tokens()
    cases = {
        "dppo_kl": dppo_kl(inputs, 0.05, 0.08),
        "dro": dro(inputs, 0.3, by_sequence=False),
        "dro of sequences": dro(inputs, 0.1, by_sequence=True),
        "sampler_kl": sampler_kl(inputs, 0.4),
        "length_adaptive_gae": length_adaptive_gae(inputs, 0.15, 0.9, 1.0),
        "length_adaptive_gae of one lambda": length_adaptive_gae(inputs, 0.4, 1.0, 0.8),
        "stop_properly": stop_properly(),
    }
    given = {name: values.tolist() for name, values in inputs.items()}
    GOLDEN.write_text(json.dumps({"versions": {"torch": torch.__version__}, "inputs": given, **cases}) + "\n")
    print(f"{GOLDEN}: {len(cases)} cases")


def tokens() -> dict[str, torch.Tensor]:
    """[ROWS, TOKENS] of what losses and estimators read; the numbers are those of float32."""
    shape = (ROWS, TOKENS)
    first = torch.tensor([0, 2, 0, 5, 1])[:, None]
    last = torch.tensor([13, 4, 9, 5, 12])[:, None]
    places = torch.arange(TOKENS)[None]
    mask = (places >= first) & (places <= last)
    mask[4, 4:7] = False  # an environment wrote them
    # Some of the sampler's probabilities are near 1, and some tokens far from it on either side.
    sampler = -torch.distributions.Exponential(1.0).sample(shape) * torch.where(
        torch.rand(shape) < 0.4, 0.1, 1.5
    )
    logprobs = (sampler + 0.6 * torch.randn(shape)).clamp(max=-1e-3)
    old = (logprobs + 0.3 * torch.randn(shape)).clamp(max=-1e-3)
    of_row = torch.randn(ROWS, 1).expand(shape)
    drawn = {
        "logprobs": logprobs,
        "old_logprobs": old,
        "rollout_logprobs": sampler,
        "advantages": torch.where(torch.rand(shape) < 0.85, torch.randn(shape), 0.0),
        "advantages_of_rows": of_row,
        "values": torch.randn(shape),
        "token_rewards": 0.1 * torch.randn(shape),
    }
    found = {name: torch.where(mask, x, 0.0).float().double() for name, x in drawn.items()}
    return {**found, "mask": mask, "rewards": torch.tensor([1.0, 0.0, -0.5, 1.0, 0.25])}


def of(losses: torch.Tensor, logprobs: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """The losses and the gradient of their sum in the log-probabilities, both 0 outside the mask."""
    (gradient,) = torch.autograd.grad(losses[mask].sum(), logprobs)
    losses = torch.where(mask, losses, 0.0)
    return {"loss": losses.tolist(), "gradient": torch.where(mask, gradient, 0.0).tolist()}


def dppo_kl(inputs: dict[str, torch.Tensor], low: float, high: float) -> dict[str, Any]:
    """arXiv 2602.04879: the surrogate M r A, M = 0 where the binary KL leaves the region on A's side."""
    logprobs = inputs["logprobs"].clone().requires_grad_()
    A, mu, pi = inputs["advantages"], inputs["rollout_logprobs"].exp(), logprobs.detach().exp()
    divergence = mu * (mu / pi).log() + (1 - mu) * ((1 - mu) / (1 - pi)).log()
    out = ((A > 0) & (pi > mu) & (divergence > high)) | ((A < 0) & (pi < mu) & (divergence > low))
    ratio = (logprobs - inputs["old_logprobs"]).exp()
    found = of(-torch.where(out, 0.0, 1.0) * ratio * A, logprobs, inputs["mask"])
    kl = torch.where(inputs["mask"], divergence, 0.0).tolist()
    return {**found, "clip_low": low, "clip_high": high, "out": (out & inputs["mask"]).tolist(), "kl": kl}


def dro(inputs: dict[str, torch.Tensor], beta: float, *, by_sequence: bool) -> dict[str, Any]:
    """arXiv 2405.19107: the mean squared error (A - beta g)^2 / 2, of a token or of a sequence, over beta.

    A constant of each, A^2 / (2 beta), and what logprobs of the sampler add are no part of the gradient. The
    error of a sequence is divided evenly among its tokens.
    """
    logprobs, mask = inputs["logprobs"].clone().requires_grad_(), inputs["mask"]
    gap = torch.where(mask, logprobs - inputs["rollout_logprobs"], 0.0)
    A = inputs["advantages_of_rows"] if by_sequence else inputs["advantages"]
    if by_sequence:
        counts = mask.sum(dim=1, keepdim=True)
        of_rows = A.sum(dim=1, keepdim=True) / counts
        errors = ((of_rows - beta * gap.sum(dim=1, keepdim=True)) ** 2 / 2 / counts).expand(mask.shape)
    else:
        errors = (A - beta * gap) ** 2 / 2
    found = of(errors / beta, logprobs, mask)
    return {"gradient": found["gradient"], "beta": beta}


def sampler_kl(inputs: dict[str, torch.Tensor], coef: float) -> dict[str, Any]:
    """coef g^2 / 2 beside REINFORCE, -A logprobs; prime-rl's `kl_tau` is coef / 2."""
    logprobs = inputs["logprobs"].clone().requires_grad_()
    gap = logprobs - inputs["rollout_logprobs"]
    losses = -inputs["advantages"] * logprobs + coef / 2 * gap**2
    return {**of(losses, logprobs, inputs["mask"]), "coef": coef}


def length_adaptive_gae(
    inputs: dict[str, torch.Tensor], alpha: float, gamma: float, critic_lam: float
) -> dict[str, Any]:
    """arXiv 2504.05118: sums of temporal differences with the length's lambda; returns of another."""
    mask, advantages, returns = inputs["mask"], torch.zeros(ROWS, TOKENS), torch.zeros(ROWS, TOKENS)
    for row in range(ROWS):
        places = mask[row].nonzero()[:, 0]
        length = len(places)
        v = torch.cat([inputs["values"][row, places], torch.zeros(1)])
        rho = inputs["token_rewards"][row, places].clone()
        rho[-1] += inputs["rewards"][row]
        delta = rho + gamma * v[1:] - v[:-1]
        lam = max(0.0, 1 - 1 / (alpha * length))

        def sums(lam: float, delta: torch.Tensor = delta) -> torch.Tensor:
            powers = (gamma * lam) ** torch.arange(len(delta)).double()
            return torch.stack([(powers[: len(delta) - t] * delta[t:]).sum() for t in range(len(delta))])

        advantages[row, places] = sums(lam)
        returns[row, places] = sums(critic_lam) + v[:-1]
    counted = advantages[mask]
    white = torch.where(mask, (advantages - counted.mean()) / (counted.std(correction=0) + STD_EPS), 0.0)
    return {
        "advantages": advantages.tolist(),
        "whitened": white.tolist(),
        "returns": returns.tolist(),
        "arguments": {"alpha": alpha, "gamma": gamma, "critic_lam": critic_lam},
    }


def stop_properly() -> dict[str, Any]:
    """ProRL v2, as OpenRLHF and NeMo-RL have it: rewards of cut samples times c, or c; beside DAPO's penalty.

    Rewards are not negative, where both have the same formula as quatrain.
    """
    correct = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0])
    style = torch.tensor([0.5, 0.25, 0.0, 1.0, 1.0, 0.75])
    overlong = torch.tensor([0.0, -0.25, -1.0, -1.0, -0.5, -1.0])
    cut = torch.tensor([False, False, True, True, False, True])
    rewards = 1.0 * correct + 0.5 * style
    multiplied = torch.where(cut, rewards * 0.3, rewards) + 0.8 * overlong
    replaced = torch.where(cut, -0.5, rewards) + 0.8 * overlong
    return {
        "functions": {"correct": correct.tolist(), "style": style.tolist(), "overlong": overlong.tolist()},
        "weights": {"correct": 1.0, "style": 0.5, "overlong": 0.8},
        "cut": cut.tolist(),
        "factor 0.3": multiplied.tolist(),
        "reward -0.5": replaced.tolist(),
    }


if __name__ == "__main__":
    main()
