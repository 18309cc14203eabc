"""The batch plan: all batch sizes of a run, each with its unit and formula.

Data flow: `Config` and the number of devices -> `plan` -> `render` (a table) or `BatchPlan.to_dict` (JSON),
for `quatrain plan` and the log at the start of a run. Numbers that depend on the lengths of sampled
completions are given as a range over all possible lengths. This module does not import JAX.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from quatrain.config.data_sets import source_names, whole_weights
from quatrain.config.derive import environment_tokens, longest_sequence
from quatrain.config.mesh import MeshShape
from quatrain.config.mesh_axes import AXES, CP, DATA_AXES, NUM_IN_TEXT, TP
from quatrain.config.roles import devices_of_worker, resolve_roles
from quatrain.config.schema import Config, CriticConfig, LogprobConfig, UpdateConfig
from quatrain.plan.tables import table, warning_lines

SHORTEST = 2
"""Tokens of the shortest possible sequence: one prompt token and one completion token."""
TIMES = " x "
PASSES = {"logprob.": "forward_passes", "distill.": "forward_passes", "critic.forward_": "passes"}
"""What the micro-batches of stages without an optimizer are called in the plan."""


@dataclass(frozen=True)
class PlanRow:
    """One number of the plan. `value` is None if it does not apply, and {"min", "max"} for a range.

    `why` explains the number: `formula in symbols = formula in numbers; remark`, or only words.
    """

    key: str
    value: int | dict[str, int] | None
    unit: str
    why: str


@dataclass(frozen=True)
class BatchPlan:
    """The numbers in the order of a training step, and warnings about probably unintended numbers."""

    rows: tuple[PlanRow, ...]
    warnings: tuple[str, ...] = ()

    def __getitem__(self, key: str) -> int | dict[str, int] | None:
        return next(row.value for row in self.rows if row.key == key)

    def to_dict(self) -> dict[str, Any]:
        """Values by key; `unit` and `why` are mappings by the same keys, `warnings` is a list."""
        return {
            **{row.key: row.value for row in self.rows},
            "unit": {row.key: row.unit for row in self.rows},
            "why": {row.key: row.why for row in self.rows},
            "warnings": list(self.warnings),
        }


class PictureTokens(NamedTuple):
    """The placeholders in the prompts of a run's training data."""

    prompts: int
    """Prompts with pictures; the others do not count."""
    mean: float
    most: int


class _Span(NamedTuple):
    """The smallest and the largest possible value of a number."""

    low: int
    high: int

    @property
    def value(self) -> int | dict[str, int]:
        return self.low if self.low == self.high else {"min": self.low, "max": self.high}

    def times(self, n: int) -> _Span:
        return _Span(self.low * n, self.high * n)

    def written(self, form: str = "{}") -> str:
        """`form` of the number, or of both ends."""
        return _either(form.format(self.low), form.format(self.high))

    def shared(self, parts: int, written: str | None = None) -> str:
        """The formula of a share of `parts`, with floor and ceil if it does not divide evenly."""
        text = written or str(parts)
        if self.low == self.high and self.low % parts == 0:
            return f"{self.low} / {text}"
        return f"floor({self.low} / {text}) to ceil({self.high} / {text})"


def plan(
    config: Config, *, devices: int = 1, processes: int = 1, pictures: PictureTokens | None = None
) -> BatchPlan:
    """The batch plan of a final configuration, in which all derived values are set.

    `devices` and `processes` are the total numbers of the run. `pictures` is what the data say, where they
    were read and have some. Raises ValueError if they do not match the
    meshes (`roles.resolve_roles`).
    """
    roles = resolve_roles(config, devices, processes)
    shards = roles.train.mesh.num_data_shards
    if config.run.on_given_data:
        rows = chain(
            _given_rows(config),
            _device_rows(roles.train.mesh, devices, processes),
            _pass_rows(config, roles.train.mesh),
            _reward_model_rows(config),
        )
        remedy = f"raise {config.run.task}.batch_size, or use fewer devices"
        return BatchPlan(tuple(rows), tuple(_shard_warnings(config, shards, given_sequences(config), remedy)))
    rows = chain(
        _step_rows(config),
        _picture_rows(pictures),
        _device_rows(roles.train.mesh, devices, processes),
        _fleet_rows(config) if config.rollout.has_fleet else _replica_rows(config, roles.rollout.mesh),
        _update_rows(config, roles.train.mesh),
        _logprob_rows(config, roles.train.mesh),
        _critic_rows(config, roles.critic.mesh) if config.critic.enabled else (),
        _reward_model_rows(config),
        _judge_rows(config),
        _teacher_rows(config, roles.teacher.mesh) if config.distill.teacher else (),
    )
    return BatchPlan(tuple(rows), tuple(_warnings(config, shards, roles.rollout.mesh.num_data_shards)))


def _whole(config: Config) -> _Span:
    """Sequences of a training step."""
    whole = config.data.batch_size * config.rollout.n
    return _Span(whole, whole)


def _mini_batches(config: Config, sizes: UpdateConfig | CriticConfig) -> tuple[int, _Span]:
    """(number of mini-batches per epoch, prompts of a mini-batch) of the policy or the critic."""
    whole = config.data.batch_size
    count = _ceil(whole, sizes.mini_batch_size)
    return count, _Span(whole // count, _ceil(whole, count))


def _step_rows(config: Config) -> Iterator[PlanRow]:
    whole, n, rounds = config.data.batch_size, config.rollout.n, config.rollout.dynamic_sampling_rounds
    yield PlanRow("prompts_per_step", whole, "prompts", "P: data.batch_size")
    yield from _mixture_rows(config)
    yield PlanRow("samples_per_prompt", n, "sequences", "G: rollout.n")
    yield PlanRow("sequences_per_step", whole * n, "sequences", f"P x G = {whole} x {n}")
    if rounds > 1:
        why = f"P to rollout.dynamic_sampling_rounds x P = {whole} to {rounds} x {whole}"
        yield PlanRow("drawn_prompts_per_step", _Span(whole, rounds * whole).value, "prompts", why)
    parts = {
        "data.max_prompt_length": config.data.max_prompt_length,
        "rollout.max_new_tokens": config.rollout.max_new_tokens,
    }
    if added := environment_tokens(config):
        parts["rollout.max_environment_tokens"] = added
    why = f"L: {' + '.join(parts)} = {' + '.join(map(str, parts.values()))}"
    yield PlanRow("max_sequence_tokens", longest_sequence(config), "tokens", why)


def _picture_rows(pictures: PictureTokens | None) -> Iterator[PlanRow]:
    if pictures is not None:
        why = f"placeholders of its pictures; {pictures.prompts} prompts have some"
        yield PlanRow("mean_picture_tokens_per_prompt", round(pictures.mean), "tokens", f"mean of the {why}")
        yield PlanRow("max_picture_tokens_per_prompt", pictures.most, "tokens", f"the most {why}")


def given_sequences(config: Config) -> _Span:
    """Sequences of an optimizer step on given data: two of a pair, and in `kto` two of an answer.

    The second is an answer to another prompt, by which the KL is estimated (`update.preferences`).
    """
    whole = config.given.batch_size * (1 if config.run.task == "sft" else 2)
    return _Span(whole, whole)


def _given_rows(config: Config) -> Iterator[PlanRow]:
    """The optimizer step of a run on given data."""
    task, given, (whole, _) = config.run.task, config.given, given_sequences(config)
    unit = "rows" if task == "sft" or (task == "dpo" and config.dpo.loss == "kto") else "pairs"
    formula = "P" if task == "sft" else f"2 x P = 2 x {given.batch_size}"
    yield PlanRow("rows_per_step", given.batch_size, unit, f"P: {task}.batch_size")
    yield PlanRow("sequences_per_step", whole, "sequences", f"S: {formula}")
    why = f"{task}.steps" if given.steps else f"ceil({task}.epochs x rows / P); the data say how many rows"
    yield PlanRow("optimizer_steps", given.steps or None, "steps", why)
    why = f"{task}.max_length" if given.max_length else f"what a micro-batch holds; {task}.max_length is null"
    yield PlanRow("max_sequence_tokens", longest_sequence(config), "tokens", f"L: {why}")


def _pass_rows(config: Config, mesh: MeshShape) -> Iterator[PlanRow]:
    """The passes of an optimizer step on given data, and the sizes of those of evaluations."""
    yield from _stage_rows(config, "update.", config.update, "S", given_sequences(config), mesh)
    if config.run.task != "sft":
        why = "a loss of pairs or of the batch reads predictions first; the same micro-batches"
        yield PlanRow("forward_passes_per_micro_batch", 1, "passes", why)
    sizes, of = config.logprob, "evaluations"
    if config.run.task == "dpo" and config.dpo.reads_reference:
        why = f"log-probabilities of dpo.reference {config.dpo.reference}, of all rows, before the first step"
        yield PlanRow("reference_passes", 1, "sweeps", why)
        of += " and the reference"
    key = "max_tokens_per_device" if sizes.micro_batch_size is None else "micro_batch_size"
    unit = "tokens" if sizes.micro_batch_size is None else "sequences"
    yield PlanRow(f"logprob_{key}", getattr(sizes, key), unit, f"logprob.{key}, of {of}")


def _mixture_rows(config: Config) -> Iterator[PlanRow]:
    """Of a mixture, the prompts of a step from each data set: its share, to less than `off` prompts."""
    whole, weights = config.data.batch_size, whole_weights(config.data.train)
    total, off = sum(weights), 1 if len(weights) == 2 else 2
    for name, weight in zip(source_names(config.data.train).values(), weights, strict=False):
        share = whole * weight
        span = _Span(max(share // total - off + 1, 0), min(_ceil(share, total) + off - 1, whole))
        exact = _Span(share // total, share // total)
        value = (exact if whole % total == 0 else span).value
        why = f"P x weight / weights of all = {whole} x {weight} / {total}"
        yield PlanRow(f"prompts_per_step_of_{name}", value, "prompts", why)


def _device_rows(mesh: MeshShape, devices: int, processes: int) -> Iterator[PlanRow]:
    in_process, shards = devices // processes, mesh.num_data_shards
    yield PlanRow("devices", devices, "devices", "N: total over all processes")
    yield PlanRow("processes", processes, "processes", "K: each has the same number of devices")
    yield PlanRow("devices_per_process", in_process, "devices", f"N / K = {devices} / {processes}")
    yield PlanRow("data_shards", shards, "shards", f"D: {_shards_of(mesh)}")
    trained = "N" if mesh.num_devices == devices else "devices of training"
    axes = f"{TP}{TIMES}{CP}" if mesh.cp > 1 else TP
    kinds = "tensor and sequence parallel" if mesh.cp > 1 else "tensor parallel"
    why = f"{axes}: {trained} / D = {mesh.num_devices} / {shards}; {kinds}"
    yield PlanRow("devices_per_shard", mesh.num_devices // shards, "devices", why)


def _shards_of(mesh: MeshShape, of: str = "") -> str:
    """The axes that split a batch and their sizes, without further axes of size 1."""
    sizes = {axis.name: mesh[n] for n, axis in enumerate(AXES) if n < NUM_IN_TEXT or mesh[n] > 1}
    names = [name for name in sizes if name in DATA_AXES]
    return f"{TIMES.join(names)}{of} = {TIMES.join(str(sizes[name]) for name in names)}"


def _replica_rows(config: Config, mesh: MeshShape) -> Iterator[PlanRow]:
    whole, prompts, replicas = _whole(config), config.data.batch_size, mesh.num_data_shards
    yield PlanRow("rollout_replicas", replicas, "replicas", _shards_of(mesh, " of rollout.mesh"))
    remark = f"; {prompts // replicas} prompts x {config.rollout.n}" if prompts % replicas == 0 else ""
    share = _Span(whole.low // replicas, _ceil(whole.high, replicas)).value
    why = f"P x G / replicas = {whole.shared(replicas)}{remark}"
    yield PlanRow("sequences_per_replica", share, "sequences", why)


def _fleet_rows(config: Config) -> Iterator[PlanRow]:
    """The rows of workers or servers, which take the groups of a training step as they become free."""
    rollout, whole = config.rollout, _whole(config)
    if rollout.servers:
        name, count, why = "server", len(rollout.servers), "W: rollout.servers; their devices are not planned"
    elif rollout.sampler is not None:
        name, count, why = "sampler", 1, "W: rollout.sampler; its devices are not planned"
    else:
        name, count, why = "worker", rollout.workers, "W: rollout.workers, with devices of their own"
    yield PlanRow(f"rollout_{name}s", count, f"{name}s", why)
    if rollout.workers:
        why = "those of its rollout.mesh, with 1 for an axis of -1"
        yield PlanRow("devices_per_worker", devices_of_worker(config), "devices", why)
    value, why = whole.value, f"P x G / W = {whole.shared(count)}"
    if count > 1:
        value = _Span(0, whole.high).value
        why = f"0 to P x G = 0 to {whole.high}; {why} on average: groups go to the {name} that has room"
    yield PlanRow(f"sequences_per_{name}", value, "sequences", why)


def _update_rows(config: Config, mesh: MeshShape) -> Iterator[PlanRow]:
    update, whole = config.update, config.data.batch_size
    count, prompts = _mini_batches(config, update)
    parts = f"ceil({whole} / {update.mini_batch_size})"
    why = f"P / ceil(P / M) = {_Span(whole, whole).shared(count, parts)}; M: update.mini_batch_size"
    yield PlanRow("mini_batch_prompts", prompts.value, "prompts", why)
    why = f"update.epochs x ceil(P / M) = {update.epochs} x {parts}"
    yield PlanRow("optimizer_steps_per_train_step", update.epochs * count, "steps", why)
    sequences = prompts.times(config.rollout.n)
    why = f"B: mini_batch_prompts x G = {prompts.written(f'{{}} x {config.rollout.n}')}"
    yield PlanRow("mini_batch_sequences", sequences.value, "sequences", why)
    yield from _stage_rows(config, "update.", update, "B", sequences, mesh)
    for name, bounds in sorted(update.reject.items()):
        yield PlanRow(f"reject_{name}", None, "", f"update.reject {_kept(name, bounds)}; {PRECISION}")


PRECISION = "rollout/logprob_diff_mean, the mean of |d|, is 1e-6 in float32 and may be 0.01 in bfloat16"


def _kept(name: str, bounds: Any) -> str:
    """What a rule of `update.reject` keeps, in the nats that `rollout/logprob_diff_mean` is in."""
    if name in ("geometric", "product"):
        low, high = (f"{math.log(bound):.3g}" for bound in bounds)
        return (
            f"keeps sequences whose {'mean' if name == 'geometric' else 'sum'} of d is {low} to {high} nats"
        )
    [bound] = bounds if isinstance(bounds, list | tuple) else [bounds]
    if name == "k3":
        size = f"{math.sqrt(2 * bound):.2g}"
        return f"keeps sequences whose mean of d^2 / 2 is about {bound:g} or less, as of |d| {size}"
    return f"keeps tokens with A >= 0, and sequences whose mean of -d is {bound:g} nats or less"


def _logprob_rows(config: Config, mesh: MeshShape) -> Iterator[PlanRow]:
    update, reward_coef = config.update, config.reward.kl_coef
    reference = update.kl_coef > 0 or reward_coef > 0
    steps = config.optimizer_steps(update)
    several = update.old_logprobs == "auto" and (steps > 1 or reward_coef > 0)
    old = update.old_logprobs == "recompute" or several
    why = f"old + reference = {old:d} + {reference:d}; update.old_logprobs is {update.old_logprobs}"
    if update.old_logprobs == "auto":
        why += f", {steps} optimizer step{'s' if steps > 1 else ''}"
    why += f"; update.kl_coef is {update.kl_coef:g}"
    why += f"; reward.kl_coef is {reward_coef:g}" if reward_coef > 0 else ""
    yield PlanRow("logprob_passes", old + reference, "sweeps", why)
    yield from _stage_rows(config, "logprob.", config.logprob, "P x G", _whole(config), mesh)


def _critic_rows(config: Config, mesh: MeshShape) -> Iterator[PlanRow]:
    """The critic's optimizer steps and values."""
    critic, n = config.critic, config.rollout.n
    count, prompts = _mini_batches(config, critic)
    parts = f"ceil({config.data.batch_size} / {critic.mini_batch_size})"
    why = f"critic.epochs x ceil(P / M) = {critic.epochs} x {parts}; M: critic.mini_batch_size"
    yield PlanRow("critic_optimizer_steps_per_train_step", critic.epochs * count, "steps", why)
    sequences = prompts.times(n)
    why = f"B of the critic: prompts of an optimizer step x G = {prompts.written(f'{{}} x {n}')}"
    yield PlanRow("critic_mini_batch_sequences", sequences.value, "sequences", why)
    yield from _stage_rows(config, "critic.", critic, "B", sequences, mesh)
    forward = critic.forward_sizes
    yield from _stage_rows(config, "critic.forward_", forward, "P x G", _whole(config), mesh)


def _reward_model_rows(config: Config) -> Iterator[PlanRow]:
    """The token budget of reward models; nothing without one."""
    key, budget = "model_max_tokens_per_device", config.reward.model_max_tokens_per_device
    if config.reward.models and budget is not None:
        why = f"reward.{key}: tokens of the reward model's own tokenizer in a micro-batch"
        yield PlanRow(f"reward_{key}", budget, "tokens", why)


def _judge_rows(config: Config) -> Iterator[PlanRow]:
    """How many judgements a training step asks for; nothing without a judge."""
    judge, rollout = config.reward.judge, config.rollout
    if config.reward.judges and judge is not None:
        prompts, samples, rounds = config.data.batch_size, rollout.n, rollout.dynamic_sampling_rounds
        greedy = " + 1" if rollout.greedy_baseline else ""
        of_group = f"({samples}{greedy})" if greedy else f"{samples}"
        why = f"P x {f'(G{greedy})' if greedy else 'G'} x reward.judge.n = {prompts} x {of_group} x {judge.n}"
        why += "; + 1: of the greedy completion" if greedy else ""
        why += f"; up to rollout.dynamic_sampling_rounds = {rounds} times as many" if rounds > 1 else ""
        why += "; less what the cache has; further attempts are more requests"
        asked = prompts * (samples + bool(greedy)) * judge.n
        yield PlanRow("judgements", _Span(asked, rounds * asked).value, "judgements", why)


def _teacher_rows(config: Config, mesh: MeshShape) -> Iterator[PlanRow]:
    """The forward passes of the teacher."""
    distill, update = config.distill, config.update
    if distill.loss != "sampled" and not distill.top_k:
        why = (
            f"hidden states of distill.teacher in micro-batches of the update; update.epochs {update.epochs}"
        )
        yield PlanRow("teacher_passes", update.epochs, "sweeps", why)
        return
    words = f", with {distill.top_k} words each (distill.top_k)" if distill.loss != "sampled" else ""
    why = f"log-probabilities of distill.teacher, of the batch, once{words}"
    yield PlanRow("teacher_passes", 1, "sweeps", why)
    if not config.distill.models:
        return  # in the micro-batches of log-probabilities
    sizes = LogprobConfig(max_tokens_per_device=config.distill.max_tokens_per_device)
    yield from _stage_rows(config, "distill.", sizes, "P x G", _whole(config), mesh)


def _stage_rows(
    config: Config,
    keys: str,
    sizes: UpdateConfig | LogprobConfig | CriticConfig,
    total: str,
    sequences: _Span,
    mesh: MeshShape,
) -> Iterator[PlanRow]:
    """How `sequences` are divided over the data shards of `mesh` into micro-batches, in one of two modes.

    Fixed mode: each shard gets the same number of sequences, and a micro-batch has m of them per shard.
    Token-budget mode: a bin (one shard's part of one micro-batch) has at most C tokens for each device of
    `cp`, in all C from here on. It holds at most
    floor(C / 2) sequences, or C - 1 if prompts are shared: one token of the prompt, and one of each
    completion. The packer puts at least floor(C / L) sequences of at most L tokens into every bin but the
    last, so at most ceil(sequences / (D x floor(C / L))) micro-batches are needed. Both bounds are tight: the
    lower one if all sequences have the shortest possible length (with shared prompts, only if they are one
    group), the upper one if all have the longest.

    `keys`: the beginning of the keys of `sizes` in the configuration. `total`: symbol of `sequences`.
    """
    (low, high), shards = sequences, mesh.num_data_shards
    size, budget, longest = sizes.micro_batch_size, sizes.max_tokens_per_device, longest_sequence(config)
    share = _Span(low // shards, _ceil(high, shards))
    shares = PlanRow(
        "sequences_per_shard", share.value, "sequences", f"{total} / D = {sequences.shared(shards)}"
    )
    prefix = "" if keys == "update." else keys.replace(".", "_")
    passes = f"{prefix}{PASSES.get(keys, 'micro_batches_per_optimizer_step')}"
    of_one: int | dict[str, int]
    if size is not None:
        of_one, why = size, f"m: {keys}micro_batch_size"
        if share.high < size:
            of_one = share.high
            why = f"min(m, ceil({total} / D)) = min({size}, ceil({high} / {shards})); {why}"
        budget_why = f"not used: {keys}micro_batch_size is set"
        counts = _Span(*(_ceil(_ceil(n, shards), size) for n in sequences))
        numbers = _either(*(f"ceil({_ceil(n, shards)} / {size})" for n in sequences))
        left, even = share.high % size, low == high and high % shards == 0
        remainder = f"; the last holds {left}" if even and left and share.high > size else ""
        counts_why = f"ceil(ceil({total} / D) / m) = {numbers}{remainder}"
    else:
        assert budget is not None, "a micro-batch has one of two limits"
        budget_why = f"C: {keys}max_tokens_per_device"
        if mesh.cp > 1:
            budget *= mesh.cp
            budget_why = f"{keys}max_tokens_per_device; C: {CP} times as many, {budget}, on a data shard"
        if shards > 1:
            average = f"{sequences.written(f'{{}} / {shards}')} on average"
            why = f"0 to {total} = 0 to {high}; {average}: shards are balanced by cost, not by number"
            shares = replace(shares, value=_Span(0, high).value, why=why)
        held, symbol, number = budget // SHORTEST, f"floor(C / {SHORTEST})", f"floor({budget} / {SHORTEST})"
        if config.update.shares_prompts and config.run.task != "sft":
            held, symbol, number = budget - 1, "(C - 1)", f"({budget} - 1)"
        fewest, fewest_number = budget // longest, f"floor({budget} / {longest})"
        counts = _Span(_ceil(low, shards * held), _ceil(high, shards * fewest))
        symbols = f"ceil({total} / (D x {symbol})) to ceil({total} / (D x floor(C / L)))"
        numbers = f"ceil({low} / ({shards} x {number})) to ceil({high} / ({shards} x {fewest_number}))"
        counts_why = f"{symbols} = {numbers}"
        of_one, why = sequences.value, f"{total} = {sequences.written()}"
        if counts.high * shards > 1:
            of_one = _Span(0, min(high, held)).value
            why = f"0 to min({total}, {symbol}) = 0 to min({high}, {number})"
            why += f"; {fewest_number} if all have the maximum length"
    if keys == "update.":
        yield shares
    yield PlanRow(f"{prefix}micro_batch_sequences", of_one, "sequences", why)
    yield PlanRow(f"{prefix}max_tokens_per_device", sizes.max_tokens_per_device, "tokens", budget_why)
    yield PlanRow(passes, counts.value, "passes", counts_why)


def _too_many(count: int, name: str, least: int, than: str, idle: str, remedy: str) -> Iterator[str]:
    if least < count:
        idle = f"{count - least} of {count} {idle}"
        yield f"there are more {name} ({count}) than {than} ({least}): {idle}; {remedy}"


def _shard_warnings(config: Config, shards: int, sequences: _Span, remedy: str) -> Iterator[str]:
    size, step = config.update.micro_batch_size, "sequences of an optimizer step"
    yield from _too_many(shards, "data shards", sequences.low, step, "shards compute only padding", remedy)
    share = _ceil(sequences.high, shards)
    if size is not None and size > share:
        yield (
            f"update.micro_batch_size ({size}) is larger than the number of sequences per shard ({share}): a "
            f"micro-batch has {share} sequences"
        )


def _warnings(config: Config, shards: int, replicas: int) -> Iterator[str]:
    sequences = _mini_batches(config, config.update)[1].times(config.rollout.n)
    fleet = config.rollout.workers or len(config.rollout.servers)
    n, prompts = config.rollout.n, config.data.batch_size
    remedy = "raise update.mini_batch_size, data.batch_size or rollout.n, or use fewer devices"
    yield from _shard_warnings(config, shards, sequences, remedy)
    name, remedy = "rollout workers or servers", "raise data.batch_size, or use fewer of them"
    yield from _too_many(fleet, name, prompts, "prompts of a training step", "are idle", remedy)
    if not fleet:
        name, remedy = "rollout replicas", "raise data.batch_size or rollout.n, or use fewer devices"
        step = "sequences of a training step"
        yield from _too_many(replicas, name, prompts * n, step, "replicas are idle", remedy)


def _ceil(number: int, parts: int) -> int:
    return -(-number // parts)


def _either(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def overview(result: BatchPlan) -> list[str]:
    """The plan in sentences of less than 80 columns; `render` has every number with its formula."""

    keys = {row.key: row.unit for row in result.rows}

    def some(key: str, noun: str, plural: str = "s") -> str:
        return f"{_format_value(result[key])} {noun}{plural * (result[key] != 1)}"

    def micro_batches(passes: str, prefix: str = "") -> str:
        budget, size = f"{prefix}max_tokens_per_device", f"{prefix}micro_batch_sequences"
        of = some(size, "sequence") if result[budget] is None else some(budget, "token")
        return f"  on each data shard in {some(passes, 'micro-batch', 'es')} of at most {of}"

    devices = (
        f"devices: {some('devices', 'device')} in {some('processes', 'process', 'es')}; "
        f"{some('data_shards', 'data shard')} of {some('devices_per_shard', 'device')}"
    )
    every = "every number with its formula: plan.json, or quatrain plan"
    if "rows_per_step" in keys:
        return [
            f"batch: {some('rows_per_step', keys['rows_per_step'][:-1])}, "
            f"{some('sequences_per_step', 'sequence')} of at most {some('max_sequence_tokens', 'token')}",
            devices,
            "update: 1 optimizer step of a batch,",
            micro_batches("micro_batches_per_optimizer_step"),
            *["  after a pass without gradient in the same ones"]
            * ("forward_passes_per_micro_batch" in keys),
            *["reference: log-probabilities of all rows, once before the first step"]
            * ("reference_passes" in keys),
            every,
        ]
    sampler = next(name for name in ("replica", "worker", "server", "sampler") if f"rollout_{name}s" in keys)
    before = [
        f"log-probabilities before it: {some('logprob_passes', 'sweep')} of the batch,",
        micro_batches("logprob_forward_passes", "logprob_"),
    ] * bool(result["logprob_passes"])
    return [
        f"batch: {some('prompts_per_step', 'prompt')} x {some('samples_per_prompt', 'sample')} = "
        f"{some('sequences_per_step', 'sequence')} of at most {some('max_sequence_tokens', 'token')}",
        devices,
        f"rollout: {some(f'rollout_{sampler}s', sampler)} of {some(f'sequences_per_{sampler}', 'sequence')}",
        f"update: {some('optimizer_steps_per_train_step', 'optimizer step')} of "
        f"{some('mini_batch_sequences', 'sequence')},",
        micro_batches("micro_batches_per_optimizer_step"),
        *before,
        every,
    ]


def render(batch_plan: BatchPlan) -> str:
    """A table of name, value, unit and formula, at most 80 columns wide; warnings follow it.

    What is swept no times is not in it.
    """
    rows = [
        (row.key, _format_value(row.value), row.unit, row.why)
        for row in batch_plan.rows
        if row.value or row.unit != "sweeps"
    ]
    return "\n".join((*table(rows, right=(1,)), *warning_lines(batch_plan.warnings)))


def _format_value(value: int | dict[str, int] | None) -> str:
    if value is None:
        return "-"
    return f"{value['min']} to {value['max']}" if isinstance(value, dict) else str(value)
