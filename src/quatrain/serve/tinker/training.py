"""A training client: adapters of its own on the served model, their gradient, and AdamW's state.

Data flow: `Pass` -> `losses.ForLoss` -> `update.trainer.Trainer`, in units of a micro-batch -> `Passed`, and
sums of gradients that stay here until `optim_step`. Everything runs in the device's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from quatrain.config.schema import LogprobConfig, LoraConfig, OptimizerConfig
from quatrain.config.sections.model_on_devices import ALL_LINEAR
from quatrain.forward.specs import ListedSpec, PolicySpec
from quatrain.models.architecture import Architecture
from quatrain.models.lora import adapter_names, trained_part, with_adapters, with_lora, with_trained
from quatrain.models.params import LM_HEAD, leaf_at, partition
from quatrain.models.spec import LORA_A
from quatrain.parallel.mesh import device_put, full, mesh_shape, shardings, to_host
from quatrain.serve.tinker.calls import (
    AdamNumbers,
    Base,
    LoraRequest,
    Pass,
    Passed,
    Refused,
    Snapshot,
    Trained,
    Units,
)
from quatrain.serve.tinker.losses import ForLoss
from quatrain.update.gradient import Accumulated, metrics_of_call
from quatrain.update.optimizer import OptimizerNumbers
from quatrain.update.trainer import StepTotals, Trainer
from quatrain.weights.adapter import adapters_from

ALPHA = 32.0
"""Of all adapters: their scale is 32 / rank, which the service's users assume."""
ADAMW = OptimizerConfig(learning_rate=0.0, stochastic_rounding=False)
"""Its form; the numbers come with each step."""
EXPLICIT, DERIVED = 0, 1
"""What a seed of adapters begins with: the client's own, or that of server and client."""


def adapted(arch: Architecture, rank: int) -> Architecture:
    """`arch` with adapters on all its linear matrices and the output head.

    All training clients of a rank have these, whatever they train, and so share their programs. Raises
    Refused for a rank that a matrix does not have.
    """
    assert rank >= 1, "only adapters are trained"
    try:
        return with_lora(arch, LoraConfig(rank=rank, alpha=ALPHA, targets=(ALL_LINEAR, LM_HEAD)))
    except ValueError as error:
        raise Refused(f"lora_config.rank {rank}: {error}") from error


@lru_cache(maxsize=16)
def _trainer(model: PolicySpec, max_tokens: int) -> Trainer:
    """One for all clients with these adapters: what changes is in their states."""
    planner = model.planner(LogprobConfig(max_tokens_per_device=max_tokens), share_prompts=True)
    return Trainer(model, planner, ADAMW, total_steps=1, seed=0)


class TrainingClient:
    """The state of one client that trains: adapters, moments, and the gradient of calls not yet stepped.

    `model` is its number in its session. Without a seed in `lora` the adapters are drawn from the server's
    seed and `model`. What it does not train is 0 in both A and B, whose gradients are then exactly 0. Raises
    Refused for adapters that the base cannot have.
    """

    def __init__(self, base: Base, lora: LoraRequest, model: int):
        self.base, self.lora, self.model = base, lora, model
        self.arch = adapted(base.arch, lora.rank)
        settings = base.dtype, base.remat, base.attention, base.mesh, base.backend
        spec = PolicySpec(self.arch, *settings)
        self._trainers = [_trainer(each, base.max_tokens) for each in (spec, spec.extended(ListedSpec))]
        self._state = self._trainers[0].init(self._drawn())
        self._accumulated: Accumulated | None = None
        self._void: str | None = None
        self._lent = False

    @property
    def step(self) -> int:
        """Optimizer steps that were applied."""
        return self._state.step

    @property
    def num_bytes(self) -> int:
        """Of device memory: weights, gradient and two moments, all float32."""
        return 4 * sum(leaf.nbytes for leaf in jax.tree.leaves(self._adapters))

    def run(self, asked: Pass) -> Units[Passed]:
        """Log-probabilities and metrics of `asked`; unless it is forward only, its gradient is added.

        Raises Refused for what `asked` cannot have. After any error, or if the units are left before their
        end, the gradient is void (`void`).
        """
        if asked.forward_only:
            passed, _ = yield from self._passed(asked, None)
            return passed
        # Donated from the first pass on: what an unfinished call leaves is no gradient.
        before, self._accumulated = self._accumulated, None
        try:
            passed, self._accumulated = yield from self._passed(asked, before)
        except BaseException as error:
            self.void(str(error) or f"a forward_backward was not finished ({type(error).__name__})")
            raise
        return passed

    def _passed(self, asked: Pass, before: Accumulated | None) -> Units[tuple[Passed, Accumulated]]:
        most = self._trainers[0].planner.max_tokens
        assert most is not None
        given = ForLoss.of(asked, min(most, self.base.longest))
        trainer, state = self._trainers[given.lists], self._state
        backward = not asked.forward_only
        found = yield from trainer.passes(
            state, given.table, given.objective, StepTotals(), before, want=True, backward=backward
        )
        assert found.predictions is not None
        return Passed(given.logprobs(found.predictions, asked), given.metrics(metrics_of_call(found))), found

    def void(self, why: str) -> None:
        """Clears the gradient; the next optimizer step is not taken, for the reason `why`."""
        self._accumulated, self._void = None, why

    def optim_step(self, adam: AdamNumbers) -> Units[dict[str, float]]:
        """One step of AdamW with all gradients since the last, or with a gradient of 0; a single unit.

        w ← w (1 - lr wd) - lr m̂ / (√v̂ + eps), for gradients times min(1, grad_clip_norm / their norm).
        Raises Refused, with nothing changed but the gradient cleared, where it is void or not finite.
        """
        accumulated, self._accumulated = self._accumulated, None
        void, self._void = self._void, None
        if void is not None:
            raise Refused(f"step not taken: {void}; its gradient is cleared, so send it again")
        numbers = OptimizerNumbers.of(
            self.step,
            learning_rate=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            max_grad_norm=adam.grad_clip_norm or None,
        )
        trainer = self._trainers[0]
        if self._lent:
            # The step takes the memory of what it changes, which a snapshot still reads.
            adapters = jax.tree.map(jnp.copy, self._adapters)
            self._state = replace(self._state, params=self._with(adapters))
            self._lent = False
        totals, before = StepTotals(), self.step
        accumulated = accumulated or trainer.nothing(self._state)
        self._state = trainer.optim_step(self._state, accumulated, totals, before, numbers=numbers)
        if self.step == before:
            raise Refused(
                "step not applied: the loss or the gradient is not finite; weights and moments are as they "
                "were and the gradient is cleared; look at the data, or lower the learning rate"
            )
        return {"grad_norm:mean": totals.metrics["update/grad_norm"].result()}
        yield

    def snapshot(self) -> Snapshot:
        """The present weights, which later steps leave as they are."""
        self._lent = True
        return Snapshot(self._adapters, self.lora, self.model, self.step)

    def trained(self, moments: bool) -> Trained:
        """A copy on the host: the adapters, and with `moments` the optimizer's state."""
        state: dict[str, np.ndarray] | None = None
        if moments:
            adam = self._adam
            state = {"count": np.array(adam.count)}
            state |= self._named(adam.mu, "mu.") | self._named(adam.nu, "nu.")
        return Trained(self.lora, self.model, self.step, self._named(self._adapters), state)

    def load(self, trained: Trained, moments: bool) -> None:
        """Take the weights of `trained`, and with `moments` its optimizer state; else that begins anew.

        A gradient that was not stepped is cleared. Raises Refused, with nothing changed, for adapters that
        are not like those of this client, and for moments that `trained` does not have.
        """
        own, other = (replace(lora, seed=None) for lora in (self.lora, trained.lora))
        if own != other:
            raise Refused(
                "a checkpoint is loaded into a model with the same rank and trained parts; it has "
                f"{_parts(other)}, the model {_parts(own)}; create a model from the checkpoint"
            )
        if moments and trained.moments is None:
            raise Refused(
                "optimizer state must be in the checkpoint that it is loaded from; this one has weights "
                "alone; load it without the optimizer"
            )
        adapters = self._tree(trained.adapters)
        state = self._trainers[0].init(self._with(adapters))
        if moments:
            assert trained.moments is not None
            mu, nu = (self._tree(trained.moments, f"{key}.") for key in ("mu", "nu"))
            clip, (adam, *rest) = state.opt_state
            count = device_put(np.asarray(trained.moments["count"], np.int32), adam.count.sharding)
            state = replace(state, opt_state=(clip, (adam._replace(count=count, mu=mu, nu=nu), *rest)))
        self._state = replace(state, step=trained.step)
        self._accumulated, self._void, self._lent = None, None, False

    @property
    def _adapters(self) -> Any:
        return trained_part(self._state.params, self.arch)

    @property
    def _adam(self) -> Any:
        """optax's state with `count`, `mu` and `nu`."""
        _, (adam, *_) = self._state.opt_state
        return adam

    def _with(self, adapters: Any) -> Any:
        return with_trained(self.base.params, adapters, self.arch)

    def _drawn(self) -> Any:
        """The base's parameters with the adapters of the first step."""
        seed = self.lora.seed
        words = [DERIVED, self.base.seed, self.model] if seed is None else [EXPLICIT, seed]
        # As unsigned words: a seed may be any int64.
        sequence = np.random.SeedSequence([word % 2**64 for word in words])
        key = jax.random.wrap_key_data(jnp.asarray(sequence.generate_state(2)), impl="threefry2x32")
        params = with_adapters(self.base.params, self.arch, key, self.base.mesh)
        adapters = trained_part(params, self.arch)
        for kind, layer in zip(self.arch.layers, adapters["layers"], strict=True):
            for block, is_trained in ((kind.mixer, self.lora.train_attn), (kind.mlp, self.lora.train_mlp)):
                for name in {f"{tensor.path[0]}{LORA_A}" for tensor in block.tensors()} & {*layer}:
                    layer[name] = layer[name] if is_trained else _zeros_like(layer[name])
        if not self.lora.train_unembed:
            adapters[LM_HEAD + LORA_A] = _zeros_like(adapters[LM_HEAD + LORA_A])
        return self._with(adapters)

    def _named(self, tree: Any, start: str = "") -> dict[str, np.ndarray]:
        """Copies of the arrays of a tree like the adapters, by `start` and peft's names."""
        names = adapter_names(self.arch)
        whole = {name.path: to_host(leaf_at(tree, name.path)) for name in names}
        # A copy, since a host array of a CPU is the memory that the next step takes.
        return {start + name.name: np.array(name.of(whole[name.path])) for name in names}

    def _tree(self, arrays: Mapping[str, np.ndarray], start: str = "") -> Any:
        """A tree like the adapters of `arrays`, whose names begin with `start`; raises Refused if it has
        others."""
        own = {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
        places = jax.tree.map(lambda leaf: leaf.sharding, self._adapters)
        return _placed(self.arch, own, places, f"the checkpoint's {start or 'adapters'}")


def snapshot_of(base: Base, trained: Trained) -> Snapshot:
    """The weights of a checkpoint for a sampler, with nothing that only training needs.

    Raises Refused if they are not of `base`.
    """
    arch = adapted(base.arch, trained.lora.rank)
    places = shardings(base.mesh, trained_part(partition(arch, mesh_shape(base.mesh)), arch))
    adapters = _placed(arch, trained.adapters, places, "the checkpoint's adapters")
    return Snapshot(adapters, trained.lora, trained.model, trained.step)


def _placed(arch: Architecture, arrays: Mapping[str, np.ndarray], places: Any, where: str) -> Any:
    """The adapters of `arch` in `arrays`, which are from `where`, with the shardings of `places`."""
    try:
        whole = adapters_from(arch, arrays, where)
    except ValueError as error:
        raise Refused(str(error)) from error
    return jax.tree.map(device_put, whole, places)


def _zeros_like(array: jax.Array) -> jax.Array:
    return full(array.shape, 0.0, array.dtype, array.sharding)


def _parts(lora: LoraRequest) -> str:
    parts = {"attention": lora.train_attn, "mlp": lora.train_mlp, "unembed": lora.train_unembed}
    return f"rank {lora.rank} on {', '.join(name for name, of in parts.items() if of) or 'nothing'}"
