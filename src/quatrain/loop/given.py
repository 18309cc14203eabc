"""Training on data that exist: `quatrain sft`, `dpo` and `rm`, and the warm start of `quatrain train`.

Data flow: rows (`data/examples.py`, `data/preferences.py`) -> `Course.batch` -> `TokenTable` ->
`GivenLearner` (`update/supervised.py`). For preferences the log-probabilities of the reference are computed
once, before the first step. `run.py` takes the steps, `evaluations.py` asks for the loss on rows that are not
trained on.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import jax
import numpy as np

from quatrain.cluster.processes import decided_by_main, is_main_process
from quatrain.config.data_sets import data_set_list, shown_data_sets
from quatrain.config.derive import longest_of_run
from quatrain.config.errors import listed
from quatrain.config.schema import Config, OptimizerConfig
from quatrain.config.sections.given import BY_LENGTH, passes
from quatrain.data.examples import ExampleSource, check_example_columns, load_examples
from quatrain.data.preferences import (
    JudgedSource,
    PairSource,
    check_judged_columns,
    check_pair_columns,
    load_judged,
    load_pairs,
)
from quatrain.data.rows import NO_ROWS, GivenRows
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import CriticSpec, ModelSpec, PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.loop.policy import LoadedPolicy
from quatrain.models.lora import without_adapters
from quatrain.ops.fingerprint import fingerprint, tree_fingerprint
from quatrain.parallel.mesh import mesh_shape, to_memory
from quatrain.run.resume import differing
from quatrain.types.metrics import Metric, Metrics, combine
from quatrain.update.coupled import Coupled
from quatrain.update.learner import TooManyBadSteps
from quatrain.update.preferences import coupled_of, judged_table, other_answers, pair_table, reads_reference
from quatrain.update.supervised import (
    OF_RUNS,
    GivenBatch,
    GivenLearner,
    example_table,
    log_likelihoods,
    negative_log_likelihood,
    perplexity,
)
from quatrain.update.teacher import MOST_SOURCES, load_frozen
from quatrain.update.trainer import POLICY_STREAM, WARM_START_STREAM

Source = ExampleSource | PairSource | JudgedSource
Rows = Sequence[Any]
"""`Example`s, `Pair`s or `Judged` of one source."""
INITIAL = "initial"
"""`dpo.reference`: the model at the start of the run."""
EVALUATED_ROWS = 64
"""Rows that are evaluated at once, at least; as many as a batch has, if it has more."""


@dataclass(frozen=True)
class GivenData:
    """The rows of a run on given data: those that are trained on, and those that are evaluated."""

    train: Source
    evaluation: Source | None = None

    @classmethod
    def of(cls, config: Config, policy: LoadedPolicy, rows: GivenRows = NO_ROWS) -> Self:
        """Those of the run's section; in `quatrain train` those of its warm start.

        `rows` has data sets by their names there. Raises ValueError for rows that cannot be used, and for
        those longer than a micro-batch, than `max_length` or than the model has positions, unless `on_long`
        says what to do with them.
        """
        held_out = config.given.eval if config.run.on_given_data else None
        train = _load(config, policy, config.given.data, rows)
        return cls(train, None if held_out is None else _load(config, policy, held_out, rows))


def _load(config: Config, policy: LoadedPolicy, spec: Any, rows: GivenRows) -> Source:
    section, task = config.given, config.run.task
    settings: dict[str, Any] = {
        "seed": config.seed,
        "rows": rows,
        "most_tokens": _limits(config, policy),
        "on_long": section.on_long,
        "stop_ids": policy.stop_ids,
    }
    if task in ("rl", "sft"):
        return load_examples(spec, config.data, policy.tokenizer, train_on=config.sft.train_on, **settings)
    settings["section"] = task
    if task == "dpo" and config.dpo.loss == "kto":
        return load_judged(spec, config.data, policy.tokenizer, **settings)
    rm, cut_counts = task == "rm", task == "dpo" and config.dpo.loss in BY_LENGTH
    return load_pairs(
        spec, config.data, policy.tokenizer, margins=rm, scored=rm, cut_counts=cut_counts, **settings
    )


def check_columns_of_given(config: Config, spec: Any, rows: GivenRows) -> None:
    """Raises the ValueError of `GivenData.of` for the columns of `spec`, without a tokenizer."""
    if config.run.task in ("rl", "sft"):
        check_example_columns(spec, config.data, config.sft.train_on, rows)
    elif config.run.task == "dpo" and config.dpo.loss == "kto":
        check_judged_columns(spec, config.data, rows)
    else:
        check_pair_columns(spec, config.data, rows, section=config.run.task)


def _limits(config: Config, policy: LoadedPolicy) -> dict[str, int]:
    """The most tokens of a row, by what messages call each limit."""
    positions, budget = policy.arch.longest, config.update.max_tokens_per_device
    limits = {f"the {positions} positions of {config.model.path}, in": positions}
    if budget is not None:
        budget *= mesh_shape(policy.meshes.train).cp  # a sequence is shared by these devices
        limits[f"a micro-batch may be (update.max_tokens_per_device), {budget}"] = budget
    if longest := config.given.max_length:
        section = config.run.task if config.run.on_given_data else "sft"
        limits[f"a row may be ({section}.max_length), {longest}"] = longest
    return limits


class Course:
    """What `steps` optimizer steps on given data are made of: batches, objective, optimizer and evaluation.

    In `quatrain train` it is that of the warm start. `reference_file` keeps the log-probabilities of the
    reference, for losses that read them.
    """

    def __init__(
        self,
        config: Config,
        policy: LoadedPolicy,
        data: GivenData,
        *,
        steps: int,
        reference_file: Path | None = None,
    ):
        # Without the weights: the learner gives them away, and may keep them in the host's memory.
        self._config, self._policy, self._steps = config, replace(policy, params=None), steps
        self.section, self.train, self.evaluation = config.given, data.train, data.evaluation
        warm = not config.run.on_given_data
        self.task = "sft" if warm else config.run.task
        self.spec: ModelSpec = (
            CriticSpec.of(config.model, policy.arch, policy.meshes.train)
            if self.task == "rm"
            # At temperature 1, whatever rollouts are sampled at.
            else PolicySpec.of(config.model, policy, temperature=1.0)
        )
        objective = negative_log_likelihood if self.task == "sft" else coupled_of(config)
        self._coupled = objective if isinstance(objective, Coupled) else None
        specs = {"train": self.section.data, "eval": self.section.eval}
        sizes = {part: len({*data_set_list(spec)}) for part, spec in specs.items() if spec is not None}
        self._by_source = {part: 1 < size <= MOST_SOURCES for part, size in sizes.items()}
        """By part, whether each of its data sets has metrics of its own."""
        shared = self._coupled is not None and config.update.shares_prompts
        planned: dict[str, Any] = {"share_prompts": shared, "store": policy.store}
        self._forward_planner = self.spec.planner(config.logprob, **planned)
        self.learner = GivenLearner(
            self.spec,
            self.spec.planner(config.update, **planned),
            objective,
            _optimizer(config),
            total_steps=steps,
            seed=config.seed,
            max_bad_steps=1 if warm else config.update.max_bad_steps,
            rate_key=f"{self.task}.learning_rate",
            stream=WARM_START_STREAM if warm else POLICY_STREAM,
            optimizer_memory="host" if config.offload.optimizer else "device",
            policy_memory="host" if config.offload.policy and not warm else "device",
            by_source=not warm and self._by_source["train"],
        )
        self._reference: ReferenceLogprobs | None = None
        if self._coupled is not None and reads_reference(config):
            assert reference_file is not None
            self._reference = ReferenceLogprobs(reference_file)
            if config.dpo.reference != INITIAL:  # what is wrong with it is said before anything is computed
                _other_reference(config, policy, weights=False)

    @classmethod
    def warm_start(cls, config: Config, policy: LoadedPolicy, rows: GivenRows = NO_ROWS) -> Self:
        """The `sft.steps` steps before the rollouts of `quatrain train`."""
        return cls(config, policy, GivenData.of(config, policy, rows), steps=config.sft.steps)

    @property
    def unit(self) -> str:
        """What a row is called."""
        if self.task == "sft":
            return "examples"
        return "answers" if self._judges else "pairs"

    @property
    def warnings(self) -> list[str]:
        """Of rows that are probably not what is meant."""
        return [
            f"{self.unit} of {shown_data_sets(spec)}: {warning}"
            for spec, source in self._sources
            for warning in source.warnings
        ]

    @property
    def _parts(self) -> list[tuple[str, Source]]:
        """What is trained on, and what is evaluated, by name."""
        sets = [("train", self.train), ("eval", self.evaluation)]
        return [(part, source) for part, source in sets if source is not None]

    @property
    def _sources(self) -> list[tuple[Any, Source]]:
        sets = [(self.section.data, self.train), (self.section.eval, self.evaluation)]
        return [(spec, source) for spec, source in sets if source is not None]

    @property
    def evaluated_as(self) -> dict[str, Any]:
        """What decides whether two evaluations can be compared, as JSON values."""
        if self.evaluation is None:
            return {}
        key = f"{self.task}.eval"
        assert self.section.eval is not None
        return {key: shown_data_sets(self.section.eval), f"the rows of {key}": self.evaluation.digests()}

    def batch(self, step: int) -> GivenBatch:
        """What is trained on in the step after `step` finished ones.

        Batch k is the positions from k x batch_size on of the shuffled, endless stream of rows. The last has
        what is missing to `epochs` passes, so that every row is seen as often.
        """
        size = self.section.batch_size
        rows = self.train.batch(step, size)
        if not self.section.steps:
            rows = rows[: max(1, passes(self.section.epochs, len(self.train)) - step * size)]
        return GivenBatch(rows, self._table(rows, "train"))

    def epoch(self, step: int) -> dict[str, Metric]:
        """How often the rows have been seen after `step` steps."""
        seen = step * self.section.batch_size / len(self.train)
        return {"data/epoch": Metric(seen if self.section.steps else min(seen, self.section.epochs))}

    @property
    def _judges(self) -> bool:
        """Whether rows are single answers that were judged, not pairs."""
        return self.task == "dpo" and self._config.dpo.loss == "kto"

    def _table(self, rows: Rows, part: str, *, with_reference: bool = True) -> TokenTable:
        """The table of rows of `part`, `train` or `eval`, with what the reference says of them.

        It has the names of data sets that have metrics of their own.
        """
        if self.task == "sft":
            table = example_table(rows)
        elif self._judges:
            table = judged_table(rows, self._others[part])
        else:
            padding = self._policy.tokenizer.pad_token_id
            table = pair_table(rows, scored_at_end=self.task == "rm", pad_token_id=padding)
        of_rows = dict(table.of_rows)
        if not self._by_source[part]:
            of_rows["source"] = np.full(len(table), "")
        if self._reference is not None and with_reference:
            found = self._reference.of(part, [row.number for row in rows])
            of_rows["reference"] = found.T.reshape(-1)
        return replace(table, of_rows=of_rows)

    @cached_property
    def _others(self) -> dict[str, Mapping[int, np.ndarray]]:
        """By part, the answers to other prompts by which judged ones are compared."""
        return {part: other_answers(cast("JudgedSource", source).head()) for part, source in self._parts}

    def evaluate(self, params: Any) -> dict[str, Metric]:
        """The metrics of `params` over all rows of the section's `eval`, without gradient; none without it.

        They have the names of training's under `eval/`.
        """
        if self.evaluation is None:
            return {}
        params, found = to_memory("device", params), dict[str, Metric]()
        for rows in self._chunks(self.evaluation):
            table = self._table(rows, "eval")
            predicted = predict_tokens(params, table, model=self.spec, planner=self._forward_planner)
            found = combine(found, self._measured(predicted.astype(np.float64), table))
        named = {f"eval/{name.partition('/')[2]}": metric for name, metric in found.items()}
        if self._coupled is None:
            named["eval/perplexity"] = Metric(perplexity(named["eval/loss"]))
        return named

    def _measured(self, predicted: np.ndarray, table: TokenTable) -> Metrics:
        """The loss of predictions [B, T] float64, and what else there is to say of them."""
        if self._coupled is not None:
            with np.errstate(invalid="ignore"):  # of weights that gave no numbers, whose loss is none either
                return self._coupled(predicted, table).metrics
        return log_likelihoods(predicted, table)

    def metric_names(self) -> list[str]:
        """The names of the metrics of every evaluation."""
        if self.evaluation is None:
            return []
        one_of_each = {row.source: row for row in self.evaluation.head()}
        table = self._table([*one_of_each.values()], "eval", with_reference=False)
        measured = self._measured(np.zeros(table.completion_mask.shape), table)
        names = [f"eval/{name.partition('/')[2]}" for name in measured]
        return names if self._coupled is not None else [*names, "eval/perplexity"]

    def _chunks(self, source: Source) -> Iterator[Rows]:
        """All rows in file order, some at a time."""
        rows, size = source.head(), max(self.section.batch_size, EVALUATED_ROWS)
        return (rows[at : at + size] for at in range(0, len(rows), size))

    def keep_reference(self, params: Any, *, resumed: bool = True) -> None:
        """Reads the log-probabilities of the reference, or computes and keeps them, if the loss reads some.

        `params`: the policy's at the start of the run. Raises ValueError for those of another run; unless it
        is `resumed`, they are of an attempt without a checkpoint, and computed again.
        """
        if self._reference is None:
            return
        made_of = self._made_of(params)
        if self._reference.read(made_of, resumed=resumed):
            return
        weights, spec = self._reference_model(params)
        store = self._policy.store
        if self._config.dpo.reference != INITIAL:
            store = self._policy.store_beside(spec.arch, self._config.dpo.reference, spec.mesh)
        shared: dict[str, Any] = {"share_prompts": self._config.update.shares_prompts, "store": store}
        planner = spec.planner(self._config.logprob, **shared)
        found: dict[str, tuple[list[int], np.ndarray]] = {}
        for part, source in self._parts:
            keys, sums = list[int](), list[np.ndarray]()
            for rows in self._chunks(source):
                table = self._table(rows, part, with_reference=False)
                logprobs = predict_tokens(weights, table, model=spec, planner=planner)
                # In float64: what is subtracted from it later leaves far smaller numbers.
                sums.append(logprobs.sum(axis=1, dtype=np.float64).reshape(2, -1).T)
                keys += [row.number for row in rows]
            found[part] = keys, np.concatenate(sums)
        self._reference.keep(made_of, found)

    def _made_of(self, params: Any) -> dict[str, Any]:
        """What decides the log-probabilities of the reference, by its name in messages."""
        names = {"train": "data", "eval": "eval"}
        config, named = self._config, self._config.dpo.reference
        weights = {"dpo.reference": named}
        if named == INITIAL:
            weights["the weights of model.path"] = tree_fingerprint(without_adapters(params))
        return {
            **{f"the rows of dpo.{names[part]}": source.digests() for part, source in self._parts},
            **weights,
            "model.dtype": config.model.dtype,
            "dpo.max_length": self.section.max_length,
            "answers of pairs or judged ones": self.unit,
        }

    def _reference_model(self, params: Any) -> tuple[Any, ModelSpec]:
        """The weights of the reference, and how its log-probabilities are computed."""
        if self._config.dpo.reference == INITIAL:
            return without_adapters(params), replace(self.spec, arch=self.spec.arch.without_lora)
        weights, spec = _other_reference(self._config, self._policy)
        if self._longest > spec.arch.longest:
            raise ValueError(
                f"the reference must have a position for each token of a row; dpo.reference "
                f"{self._config.dpo.reference} has {spec.arch.longest}, and a row has {self._longest}; lower "
                "dpo.max_length, with dpo.on_long skip, or name another model"
            )
        return weights, spec

    @property
    def _longest(self) -> int:
        """Tokens of the longest sequence of all rows."""
        chunks = ((rows, part) for part, source in self._parts for rows in self._chunks(source))
        return max(int(self._table(*each, with_reference=False).lengths.max()) for each in chunks)

    def samples(self, batch: GivenBatch, count: int) -> list[dict[str, Any]]:
        """Records of both answers of the pairs with the largest loss, about `count` in all, for readers."""
        coupled, predicted, table = self._coupled, batch.predictions, batch.table
        if coupled is None or predicted is None or self._judges or not np.isfinite(predicted).all():
            return []
        pairs, records = len(batch.rows), list[dict[str, Any]]()
        own = [np.array([pair, pairs + pair]) for pair in range(pairs)]
        found = [coupled(predicted[rows].astype(np.float64), table.take(rows)) for rows in own]
        for pair in sorted(range(pairs), key=lambda pair: -found[pair].loss)[: -(-count // 2)]:
            row, metrics, decode = batch.rows[pair], found[pair].metrics, self._policy.tokenizer.decode
            for at, answer in enumerate(("chosen", "rejected")):
                ids, reward = getattr(row, f"{answer}_ids"), metrics.get(f"{self.task}/reward_{answer}")
                score = float(predicted[own[pair][at]].sum()) if reward is None else reward.result()
                records.append(
                    {
                        "group_id": row.number,
                        "prompt": decode(row.prompt_ids),
                        "completion": decode(ids),
                        "columns": {"answer": answer, "loss": found[pair].loss, "data": row.source},
                        "rewards": {answer: score},  # which tells readers the two apart
                        "reward": score,
                        "completion_tokens": len(ids),
                    }
                )
        return records


class ReferenceLogprobs:
    """Log-probabilities of a reference, of each answer the sum over its tokens, kept in a file of a run."""

    def __init__(self, path: Path):
        self._path = path
        self._found: dict[str, np.ndarray] = {}
        """By part, [rows, 2] float64."""
        self._places: dict[str, dict[int, int]] = {}
        """By part, the place of each row by its key."""

    def of(self, part: str, keys: Sequence[int]) -> np.ndarray:
        """[n, 2] float64: of both sequences of each of these rows of a part, by number."""
        places = self._places[part]
        return self._found[part][[places[key] for key in keys]]

    def read(self, made_of: Mapping[str, Any], *, resumed: bool = True) -> bool:
        """Whether there is a file, which the main process reads for all: others need not see it.

        One of something else raises ValueError in a `resumed` run, and is no file for another.
        """
        content = decided_by_main(self._content)
        if content is None:
            return False
        before, arrays = content
        parts = {part: (keys.tolist(), sums) for part, (keys, sums) in arrays.items()}
        if changed := differing(before, json.loads(json.dumps(made_of))):
            if not resumed:
                return False
            raise ValueError(
                "the log-probabilities of the reference must be of this run's rows and weights; those in "
                f"{self._path} are of another {listed(changed)}; set these back, or remove the file, so that "
                "they are computed again"
            )
        self._hold(parts)
        return True

    def _content(self) -> tuple[Any, dict[str, tuple[np.ndarray, np.ndarray]]] | None:
        """What the file is made of, and by part the keys of rows and [rows, 2]; None if there is no file."""
        if not self._path.is_file():
            return None
        with np.load(self._path) as file:
            parts = {part: (file[f"{part}_keys"], file[part]) for part in file["parts"].tolist()}
            return json.loads(str(file["made_of"])), parts

    def keep(self, made_of: Mapping[str, Any], found: Mapping[str, tuple[list[int], np.ndarray]]) -> None:
        """Holds what was found, by part: keys of rows, and [rows, 2]; writes it to the file."""
        self._hold(found)
        if is_main_process():
            arrays: dict[str, Any] = {f"{part}_keys": np.array(keys) for part, (keys, _) in found.items()}
            arrays |= {part: sums for part, (_, sums) in found.items()}
            content = io.BytesIO()
            np.savez(content, made_of=np.array(json.dumps(made_of)), parts=np.array([*found]), **arrays)
            draft = self._path.with_suffix(".draft")  # replaced at once: nobody reads a part of it
            draft.write_bytes(content.getvalue())
            draft.replace(self._path)

    def _hold(self, parts: Mapping[str, tuple[list[int], np.ndarray]]) -> None:
        self._found = {part: sums for part, (_, sums) in parts.items()}
        self._places = {
            part: {key: place for place, key in enumerate(keys)} for part, (keys, _) in parts.items()
        }


def warm_start(
    course: Course, params: Any, on_step: Callable[[int, Metrics], None] = lambda step, metrics: None
) -> Any:
    """The parameters after the steps of `course`; donates `params`.

    `on_step` is called after each step with its number, from 1, and its metrics. Raises ValueError where loss
    or gradient are not finite, from which a warm start does not recover, and for such weights afterwards.
    """
    state, steps = course.learner.init(params), course.section.steps
    del params
    for step in range(steps):
        try:
            state, _ = course.learner.step(state, course.batch(step))
        except TooManyBadSteps:
            raise ValueError(
                "the supervised warm start met a non-finite loss or gradient; lower sft.learning_rate"
            ) from None
        on_step(step + 1, {name: each for name, each in state.metrics.items() if name not in OF_RUNS})
    if not all(fingerprint(leaf)[1] for leaf in jax.tree.leaves(course.spec.trained(state.params))):
        raise ValueError(
            f"supervised training must leave weights that are finite; after {steps} steps with "
            f"sft.learning_rate {course.section.learning_rate:g} they are not; lower it"
        )
    return state.params


def _other_reference(config: Config, policy: LoadedPolicy, *, weights: bool = True) -> tuple[Any, PolicySpec]:
    """The weights of `dpo.reference`, None without `weights`, and how its log-probabilities are computed."""
    return load_frozen(
        config,
        policy,
        config.dpo.reference,
        key="dpo.reference",
        mesh=policy.meshes.train,
        longest=longest_of_run(config),
        weights=weights,
    )


def _optimizer(config: Config) -> OptimizerConfig:
    """The optimizer with rate and schedule of what is trained on."""
    section, optimizer = config.given, config.optimizer
    if not config.run.on_given_data:
        # Of a warm start: `optimizer` is set for the rewards, whose gradients are of another kind.
        kept = ("state_dtype", "stochastic_rounding")
        optimizer = OptimizerConfig().model_copy(update={name: getattr(optimizer, name) for name in kept})
    own = {name: getattr(section, name) for name in ("learning_rate", "schedule", "warmup_steps")}
    return optimizer.model_copy(update={**own, "final_fraction": 0.0})
