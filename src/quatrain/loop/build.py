"""Puts the parts of a run together. Every part makes itself, and checks what it is made of.

Data flow: `Inputs` -> `build_run` -> `Run`, for the loop of `train.py` and for `--dry-run`.
"""

from __future__ import annotations

from contextlib import closing

from quatrain.advantage.estimate import AdvantageEstimator
from quatrain.loop.asynchronous import AsyncRollouts
from quatrain.loop.checkpoints import Checkpoints
from quatrain.loop.evaluate import Evaluator
from quatrain.loop.evaluations import Evaluations, Generation, best_of
from quatrain.loop.given import Course, GivenData
from quatrain.loop.inputs import Inputs
from quatrain.loop.policy import load_policy
from quatrain.loop.recorder import Recorder, left_out
from quatrain.loop.reference import Reference
from quatrain.loop.run import GivenRun, RolloutRun, Run
from quatrain.loop.stages import Stages, build_engine
from quatrain.loop.stop_when import StopWhen
from quatrain.run.resume import Identity
from quatrain.update.learner import Learner
from quatrain.update.teacher import as_stage


def build_run(inputs: Inputs) -> Run:
    """The parts of a run, by its `run.task`; raises ValueError for invalid input."""
    return given_run(inputs) if inputs.config.run.on_given_data else rollout_run(inputs)


def rollout_run(inputs: Inputs) -> RolloutRun:
    """The parts of a run that trains on what it samples; raises ValueError for invalid input.

    Two lines may change places unless one uses what the other makes: what must come before or be ended before
    something else is named by it. That cheap checks of what users write stand first only saves them time.
    """
    config, folder, stop, ended = inputs.config, inputs.folder, inputs.stop, inputs.parts.enter_context
    policy = load_policy(config, weights=inputs.weights)
    scorer = inputs.scorer(policy)
    evaluator = ended(closing(Evaluator(config, policy, scorer, inputs.rows)))
    names = evaluator.metric_names()
    best = best_of(config, folder, names)
    stop_when = StopWhen(config, names, scorer.function_names)
    prompts = inputs.prompts(policy, scorer, evaluator)
    identity = Identity.of(config, folder, prompts, policy, inputs.saved)
    demonstrations = inputs.demonstrations(policy)
    warnings = inputs.warnings(policy, scorer, prompts, evaluator, demonstrations)
    steps = inputs.steps(len(prompts))
    recorder = Recorder(config, folder.path, stop, left_out(prompts, "prompts"))
    teacher = inputs.teacher(policy, prompts, evaluator)
    learner = Learner.of(config, policy, steps=steps, teacher=teacher)
    engine = ended(closing(build_engine(config, policy, scorer, prompts, recorder.show_decoding)))
    stages = Stages(engine, scorer, AdvantageEstimator.of(config), learner, as_stage(teacher))
    batches = AsyncRollouts(config, stages, prompts, steps, recorder.show_sampling)
    assert inputs.imported is not None
    for each in (batches, inputs.imported, evaluator):  # the last first: the thread may wait for the others
        ended(closing(each))
    reference = Reference(config, policy, learner, folder.reference)
    generation = Generation(evaluator, engine, batches.run, stages.teacher_kl)
    evaluations = Evaluations(
        config, best, recorder, stop, steps=steps, generation=generation, store=policy.store
    )
    kept = (policy.arch, reference, evaluations, recorder)
    checkpoints = Checkpoints(
        config, folder, inputs.store, *kept, steps=steps, identity=identity, stop_when=stop_when
    )
    return RolloutRun(
        inputs=inputs,
        loaded=policy,
        prompts=prompts,
        demonstrations=demonstrations,
        evaluator=evaluator,
        stages=stages,
        batches=batches,
        recorder=recorder,
        reference=reference,
        evaluations=evaluations,
        checkpoints=checkpoints,
        stop_when=stop_when,
        steps=steps,
        warnings=warnings,
    )


def given_run(inputs: Inputs) -> GivenRun:
    """The parts of a run that trains on data that exist; raises ValueError for invalid input."""
    config, folder, stop, ended = inputs.config, inputs.folder, inputs.stop, inputs.parts.enter_context
    policy = load_policy(config, critic=False, weights=inputs.weights, environments=config.generates)
    data = GivenData.of(config, policy, inputs.rows)
    # Before the steps: how many there are changes with the rows, which are named where they have changed.
    identity = Identity.of(config, folder, data.train, policy, inputs.saved)
    steps = inputs.steps(len(data.train))
    course = Course(config, policy, data, steps=steps, reference_file=folder.reference_logprobs)
    recorder = Recorder(config, folder.path, stop, left_out(data.train, "rows"))
    names, warnings, generation = course.metric_names(), course.warnings, None
    functions: tuple[str, ...] = ()
    if config.generates:
        scorer = inputs.scorer(policy)
        evaluator = ended(closing(Evaluator(config, policy, scorer, inputs.rows)))
        names, functions = [*names, *evaluator.metric_names()], scorer.function_names
        warnings = inputs.warnings(policy, scorer, None, evaluator, course)
        engine = ended(closing(build_engine(config, policy, scorer, None, recorder.show_decoding)))
        generation = Generation.beside(evaluator, engine)
    best = best_of(config, folder, names)
    stop_when = StopWhen(config, names, functions)
    evaluations = Evaluations(
        config,
        best,
        recorder,
        stop,
        steps=steps,
        generation=generation,
        course=course,
        store=policy.store,
    )
    kept = (policy.arch, None, evaluations, recorder)
    checkpoints = Checkpoints(
        config, folder, inputs.store, *kept, steps=steps, identity=identity, stop_when=stop_when
    )
    return GivenRun(
        inputs=inputs,
        loaded=policy,
        course=course,
        recorder=recorder,
        evaluations=evaluations,
        checkpoints=checkpoints,
        stop_when=stop_when,
        steps=steps,
        warnings=warnings,
    )
