"""Puts the parts of a run together. Every part makes itself, and checks what it is made of.

Data flow: `Inputs` -> `build_run` -> `Run`, for the loop of `train.py` and for `--dry-run`.
"""

from __future__ import annotations

from contextlib import closing

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.loop.asynchronous import AsyncRollouts
from quatrain.loop.checkpoints import Checkpoints
from quatrain.loop.evaluate import Evaluator
from quatrain.loop.evaluations import Evaluations, best_of
from quatrain.loop.inputs import Inputs
from quatrain.loop.policy import load_policy
from quatrain.loop.recorder import Recorder
from quatrain.loop.reference import Reference
from quatrain.loop.run import Run
from quatrain.loop.stages import Stages, build_engine
from quatrain.loop.stop_when import StopWhen
from quatrain.run.resume import Identity
from quatrain.update.learner import Learner
from quatrain.update.teacher import as_stage


def build_run(inputs: Inputs) -> Run:
    """The parts of a run; raises ValueError for invalid input.

    Two lines may change places unless one uses what the other makes: what must come before or be ended before
    something else is named by it. That cheap checks of what users write stand first only saves them time.
    """
    config, folder, stop, ended = inputs.config, inputs.folder, inputs.stop, inputs.parts.enter_context
    policy = load_policy(config, weights=inputs.weights)
    scorer = inputs.scorer(policy)
    evaluator = ended(closing(Evaluator(config, policy, scorer, inputs.rows)))
    best = best_of(config, folder, evaluator)
    stop_when = StopWhen(config, evaluator, scorer.function_names)
    prompts = inputs.prompts(policy, scorer, evaluator)
    identity = Identity.of(config, folder, prompts, policy, inputs.saved)
    examples = inputs.examples(policy)
    warnings = inputs.warnings(policy, scorer, prompts, evaluator, examples)
    steps = inputs.steps(prompts)
    recorder = Recorder(config, folder.path, stop, prompts)
    teacher = inputs.teacher(policy, prompts, evaluator)
    learner = Learner.of(config, policy, steps=steps, teacher=teacher)
    engine = ended(closing(build_engine(config, policy, scorer, prompts, recorder.show_decoding)))
    stages = Stages(engine, scorer, AdvantageEstimator.of(config), learner, as_stage(teacher))
    batches = AsyncRollouts(config, stages, prompts, steps, recorder.show_sampling)
    for each in (batches, inputs.imported, evaluator):  # the last first: the thread may wait for the others
        ended(closing(each))
    reference = Reference(config, policy, learner, folder.reference)
    evaluations = Evaluations(config, evaluator, best, stages, batches, recorder, stop, steps=steps)
    kept = (policy.arch, reference, evaluations, recorder)
    checkpoints = Checkpoints(config, folder, inputs.store, *kept, steps=steps, identity=identity)
    shown = (prompts, examples, evaluator, stages, batches, recorder, reference, evaluations)
    return Run(inputs, policy, *shown, checkpoints, stop_when, steps, warnings)
