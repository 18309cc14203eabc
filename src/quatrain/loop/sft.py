"""Supervised training on examples: the warm start before reinforcement learning, and `quatrain sft`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from quatrain.config.schema import Config
from quatrain.data.examples import ExampleSource, load_examples
from quatrain.data.rows import NO_ROWS, GivenRows
from quatrain.forward.specs import PolicySpec
from quatrain.loop.policy import LoadedPolicy
from quatrain.ops.fingerprint import fingerprint
from quatrain.parallel.mesh import mesh_shape
from quatrain.types.metrics import Metric
from quatrain.update.supervised import SupervisedLearner


def warm_start_data(config: Config, loaded: LoadedPolicy, rows: GivenRows = NO_ROWS) -> ExampleSource:
    """The examples of `sft.data` (default: `data.train`), a file or a name in `rows`.

    Raises ValueError for data without answers, and for examples that have more tokens than a micro-batch, or
    than the model has positions.
    """
    spec, budget = config.sft.data, config.update.max_tokens_per_device
    positions = loaded.arch.longest
    limits = {f"the {positions} positions of {config.model.path}, in": positions}
    if budget is not None:
        budget *= mesh_shape(loaded.meshes.train).cp  # a sequence is shared by these devices
        limits[f"a micro-batch may be (update.max_tokens_per_device), {budget}"] = budget
    return load_examples(
        spec,
        config.data,
        loaded.tokenizer,
        train_on="assistant",
        seed=config.seed,
        rows=rows,
        most_tokens=limits,
        on_long="skip" if config.data.on_long_prompt == "skip" else "error",
        stop_ids=loaded.stop_ids,
    )


def warm_start(
    config: Config,
    loaded: LoadedPolicy,
    examples: ExampleSource,
    *,
    on_step: Callable[[int, dict[str, Metric]], None] = lambda step, metrics: None,
) -> Any:
    """The parameters after `sft.steps` optimizer steps on `examples`.

    Donates the parameters of `loaded`. The likelihood is computed at temperature 1, independently of
    `rollout.temperature`. `on_step` is called after each step with its number, from 1, and its metrics.
    Raises ValueError if the weights are not finite afterwards.
    """
    policy = PolicySpec.of(config.model, loaded, temperature=1.0)
    learner = SupervisedLearner(
        policy,
        config.sft,
        policy.planner(config.update),
        seed=config.seed,
        optimizer=config.optimizer,
        optimizer_memory="host" if config.offload.optimizer else "device",
    )
    state = learner.init(loaded.params)
    for step in range(config.sft.steps):
        state, metrics = learner.step(state, examples.batch(step, config.sft.batch_size))
        on_step(step + 1, metrics)
    if not all(fingerprint(leaf)[1] for leaf in jax.tree.leaves(policy.trained(state.params))):
        raise ValueError(
            f"supervised training must leave weights that are finite; after {config.sft.steps} steps with "
            f"sft.learning_rate {config.sft.learning_rate:g} they are not; lower it"
        )
    return state.params
