"""The reference policy of a run: kept at the start, moved after the policy, saved with it.

Used by `run.py` at the start and by `train.py` after each step; the `Learner` computes its log-probabilities.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import jax
import numpy as np

from quatrain.config.schema import Config
from quatrain.data.policy import Policy
from quatrain.models.lora import trained_part, with_trained, without_adapters
from quatrain.models.params import abstract_params
from quatrain.parallel.mesh import copy_if_aliased, to_memory
from quatrain.run.checkpoint import Checkpointer
from quatrain.update.learner import Learner, TrainState
from quatrain.update.moving_reference import followed
from quatrain.update.trainer import REFERENCE_STREAM


class Reference:
    """The reference policy of `learner`, of which a copy lies in `folder`, which may be in a bucket."""

    def __init__(self, config: Config, loaded: Policy, learner: Learner, folder: Path | str):
        self._config, self._learner, self._folder = config, learner, folder
        self._arch, self._mesh = loaded.arch, loaded.meshes.reference
        warm = config.lora.rank and config.sft.steps
        self.in_checkpoints = bool(config.update.reference_sync_steps or warm)
        """Whether checkpoints hold it: it follows the policy, or is the base after a warm start."""

    def begin(self, params: Any, *, resumed: bool) -> None:
        """Sets the reference, if the run needs one, from the policy `params` at the start of training.

        It is a frozen copy on the devices of its role, saved in the run's folder for resuming, and in the
        host's memory if `offload.reference`. With adapters it is the base without them, which is in memory
        and needs no copy; where they are trained by a warm start, or the reference follows the policy, it
        has copies of the adapters.
        """
        if self._config.needs_reference or self.in_checkpoints:
            self._learner.reference = self._first(params, resumed)

    def check(self, abstract: Any) -> None:
        """Raises ValueError if the copy in the run's folder is not of parameters like `abstract`."""
        if self._config.copies_reference:
            Checkpointer(self._folder).check({"params": abstract})

    def _first(self, params: Any, resumed: bool) -> Any:
        arch = self._arch
        if arch.lora:
            if not self.in_checkpoints:
                return without_adapters(params)
            adapters = trained_part(params, arch)
            copies = jax.tree.map(copy_if_aliased, to_memory("device", adapters), adapters)
            return with_trained(params, copies, arch)
        like = abstract_params(arch, self._config.model.param_dtype, self._mesh)
        with closing(Checkpointer(self._folder)) as store:
            if not resumed:
                store.save(0, {"params": params}, {})
            _, arrays, _ = store.restore({"params": like})
        return to_memory("host" if self._config.offload.reference else "device", arrays["params"])

    def move_when_due(self, state: TrainState) -> None:
        """Moves it to the policy every `update.reference_sync_steps` training steps."""
        update = self._config.update
        if update.reference_sync_steps and state.train_step % update.reference_sync_steps == 0:
            old, new = (
                trained_part(params, self._arch) for params in (self._learner.reference, state.params)
            )
            # Of the step alone, so that a resumed run has the same reference.
            place = [self._config.seed, REFERENCE_STREAM, state.train_step]
            draw = np.array(place, np.uint32) if self._config.optimizer.stochastic_rounding else None
            self.restore(followed(old, new, update.reference_mixup, draw))

    def arrays(self, params: Any = None) -> dict[str, Any]:
        """Its part of a checkpoint; that of `params` before it has begun."""
        reference = self._learner.reference if params is None else params
        return {"reference": trained_part(reference, self._arch)} if self.in_checkpoints else {}

    def restore(self, trained: Any) -> None:
        """Puts `trained`, as `arrays` has it, in the place of its trained part."""
        self._learner.reference = with_trained(self._learner.reference, trained, self._arch)
