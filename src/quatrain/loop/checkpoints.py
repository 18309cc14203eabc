"""When a run saves a checkpoint, what is in it, and how the run goes on from one.

Used by `train.py` after each step and by `run.py` at the start and the end. Data flow: `TrainState` ->
`Checkpointer`, and back; what must agree is checked in `run/resume.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import jax

from quatrain.cluster.processes import decided_by_main, num_processes
from quatrain.config.schema import Config
from quatrain.loop.evaluations import Evaluations
from quatrain.loop.recorder import Recorder
from quatrain.loop.reference import Reference
from quatrain.loop.stop_when import StopWhen
from quatrain.models.architecture import Architecture
from quatrain.models.lora import trained_part, with_trained
from quatrain.run.checkpoint import Checkpointer, NonFiniteState, SaveFailed, abstract
from quatrain.run.resume import Identity, check_saved_state
from quatrain.run.run_dir import RunDir
from quatrain.types.batches import PromptPosition
from quatrain.update.learner import TrainState
from quatrain.update.trainer import ModelState

logger = logging.getLogger(__name__)


class Checkpoints:
    """Saves the state of a run of `steps` training steps, with a reference of its own and its evaluations.

    `identity` is what must agree when the run is resumed.
    """

    def __init__(
        self,
        config: Config,
        folder: RunDir,
        store: Checkpointer,
        arch: Architecture,
        reference: Reference | None,
        evaluations: Evaluations,
        recorder: Recorder,
        *,
        steps: int,
        identity: Identity,
        stop_when: StopWhen,
    ):
        self._every, self._folder, self._store = config.checkpoint.every_steps, folder, store
        self._arch, self._reference, self._evaluations = arch, reference, evaluations
        self._recorder, self._steps, self._identity = recorder, steps, identity
        self._stop_when, self._rate = stop_when, config.key_of("learning_rate")
        self._ahead, self._reward = config.rollout.max_staleness > 0, config.reward
        self.ended: str | None = None
        """Why the run ends with the newest checkpoint, before the number of its steps; None: it does not."""
        self._failure: SaveFailed | None = None
        """Why the last checkpoint could not be written."""

    @property
    def _best_step(self) -> int | None:
        best = self._evaluations.best
        return None if best is None or best.found is None else int(best.found["step"])

    def end_at(self, step: int, why: str) -> None:
        """`step` is the last of the run, whatever their number was to be."""
        self._steps, self.ended = step, why

    def save_when_due(self, state: TrainState) -> None:
        """Save every `checkpoint.every_steps` training steps, at a new best, and after the last.

        After optimizer steps that were not applied, weights may not be finite; until one is applied again,
        the checkpoints before them are not displaced by others.
        """
        step, best = state.train_step, self._best_step
        self._pin_best()
        due = (bool(self._every) and step % self._every == 0) or step in self._store.pinned
        bad_steps = max(model.bad_steps for model in (state, state.critic) if model is not None)
        if step == self._steps or (due and not bad_steps):
            self.save(state)
            self._recorder.log(step)
            self._recorder.report.page()
        elif due:
            logger.warning(
                "no checkpoint of step %d: the last %d optimizer steps were not applied", step, bad_steps
            )
        if best == step:
            self._confirm_best(step)

    def _pin_best(self) -> None:
        """The checkpoint of the best evaluation is kept beside the newest, also if a later one is saved."""
        best = self._best_step
        if best is not None and best not in self._store.pinned:
            self._store.pinned.append(best)

    def _confirm_best(self, step: int) -> None:
        """Forget the best evaluation, that of `step`, if its checkpoint could not be written."""
        with self._reported_if_failed():
            self._store.wait()
        if step not in decided_by_main(self._store.steps):
            self._store.pinned.remove(step)
            assert self._evaluations.best is not None
            self._evaluations.best.withdraw()

    def save(self, state: TrainState) -> None:
        """Save a checkpoint of `state`, unless one of the same or a later step exists.

        If a checkpoint cannot be written, a run of one process reports it and goes on, one of several raises
        SaveFailed. Raises NonFiniteState if parameters or optimizer state have numbers that are not finite.
        """
        self._pin_best()
        latest = None
        with self._reported_if_failed():
            self._store.wait()
        with self._reported_if_failed():
            latest = decided_by_main(self._store.latest_step)
        if latest is not None and state.train_step <= latest:
            return
        with self._recorder.timed("checkpoint"), self._reported_if_failed():
            try:
                self._store.save(state.train_step, self._arrays(state), self._host(state))
            except NonFiniteState as error:
                before = "there is no checkpoint before it"
                if latest is not None:
                    before = f"continue from step {latest} with `--resume {self._folder.name}`"
                raise NonFiniteState(f"{error}; lower {self._rate}; {before}") from error

    def holds(self, state: TrainState) -> bool:
        """Whether a checkpoint of `state` can be saved: no array of it was given away to an update."""
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self._arrays(state)))

    def save_before_end(self, state: TrainState) -> None:
        """Save a checkpoint of `state` in a run that ends early; what prevents it is logged."""
        try:
            self.save(state)
        except NonFiniteState as error:
            logger.error("%s", error)
        with self._reported_if_failed():
            self._store.wait()

    def check_last(self) -> None:
        """Wait for the last checkpoint; raises SaveFailed if it is not that of the last step."""
        self._store.wait()
        newest = decided_by_main(self._store.latest_step)
        if newest != self._steps:
            raise SaveFailed(
                f"the model is exported to {self._folder.final}, but the newest checkpoint is of step "
                f"{newest}, not {self._steps}: {self._failure}; then resume the run"
            )

    def check(self, state: TrainState) -> None:
        """Raises ValueError if the newest checkpoint has other arrays than the abstract `state`."""
        arrays = self._trained(state)
        if self._reference is not None:
            self._reference.check(state.params)
            arrays |= self._reference.arrays(state.params)
        self._store.check(arrays)

    def restore(self, state: TrainState) -> TrainState:
        """The state of the newest checkpoint that is not damaged; `state` is given up for it."""
        wanted = jax.tree.map(abstract, self._arrays(state))
        for leaf in jax.tree.leaves(self._arrays(state)):
            leaf.delete()  # there may not be memory for the state that a run begins with beside the restored
        step, arrays, host = self._store.restore(wanted)
        check_saved_state(host, self._folder.checkpoints)
        self._identity.check(host)  # an earlier checkpoint's, if the latest is damaged
        arrays["params"] = with_trained(state.params, arrays["params"], self._arch)
        self._store.set_aside()
        self._folder.rewind(step)
        self._evaluations.restore(host, step, self._store.steps())
        best = self._best_step
        self._store.pinned = [] if best is None else [best]
        if self._ahead and (not self._every or step % self._every):
            self._recorder.report.event(
                f"the checkpoint of step {step} is not one of checkpoint.every_steps: the next batches are "
                "sampled by newer weights than in a run that was not stopped there"
            )
        if "stop_when" in host:  # a checkpoint of an earlier version has none
            self._stop_when.restore(host["stop_when"], same_evaluations=not self._evaluations.changed)
        self.ended = host.get("ended")  # as above
        if "reference" in arrays:
            assert self._reference is not None
            self._reference.restore(arrays.pop("reference"))
        critic = state.critic and replace(state.critic, **arrays.pop("critic"), **host["critic"])
        counters = {name: host[name] for name in ("step", "bad_steps", "train_step")}
        counters["reward_kl_coef"] = self._reward_kl_coef(host)
        return replace(state, **arrays, critic=critic, position=PromptPosition(**host["place"]), **counters)

    def _reward_kl_coef(self, host: dict[str, Any]) -> float:
        """The coefficient of the KL in the reward: as it has adapted, if it does and began from this one."""
        own, adapted = self._reward.kl_coef, float(host["reward_kl_coef"])
        # A checkpoint of an earlier version does not say from which it began, but whether there was one.
        began = host.get("reward_kl_began", own if adapted else 0.0)
        return adapted if self._reward.kl_target is not None and began == own else own

    def _arrays(self, state: TrainState) -> dict[str, Any]:
        """The arrays of a checkpoint."""
        return self._trained(state) | ({} if self._reference is None else self._reference.arrays())

    def _trained(self, state: TrainState) -> dict[str, Any]:
        """The arrays of a checkpoint that are of `state`: what is trained, not a frozen base."""
        arrays = {"params": trained_part(state.params, self._arch), "opt_state": state.opt_state}
        if state.critic is not None:
            arrays["critic"] = {"params": state.critic.params, "opt_state": state.critic.opt_state}
        return arrays

    def _host(self, state: TrainState) -> dict[str, Any]:
        """What a checkpoint holds besides arrays."""
        return {
            **_counts(state),
            "train_step": state.train_step,
            "place": asdict(state.position),
            "reward_kl_coef": state.reward_kl_coef,
            "reward_kl_began": self._reward.kl_coef,
            "critic": None if state.critic is None else _counts(state.critic),
            **self._identity.to_save(),
            **self._evaluations.to_save(state.train_step),
            "stop_when": self._stop_when.to_save(),
            "ended": self.ended if state.train_step == self._steps else None,
        }

    @contextmanager
    def _reported_if_failed(self) -> Iterator[None]:
        try:
            yield
        except SaveFailed as error:
            if num_processes() > 1:  # the others wait for this one's files
                raise
            self._failure = error
            newest: int | str | None = "unknown"  # of a bucket that cannot be read
            with suppress(SaveFailed):
                newest = self._store.latest_step()
            logger.warning("%s; the run goes on; its newest checkpoint is of step %s", error, newest)


def _counts(state: ModelState) -> dict[str, int]:
    return {"step": state.step, "bad_steps": state.bad_steps}
