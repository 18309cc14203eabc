"""The batch types passed between the four stages; each validates its fields when it is created.

Data flow: `Prompt` -> rollout -> `RolloutBatch` -> reward -> `RewardedBatch` -> advantage ->
`AdvantagedBatch` -> update. Each stage accepts only the type of the stage before it, so stages cannot be
called in the wrong order. All arrays are right-padded numpy arrays: B sequences, T positions, F reward
functions. Creating a batch makes its arrays read-only in place. Batches compare by identity.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from quatrain.types.kept import KeptSets
from quatrain.types.metrics import Metrics
from quatrain.types.pictures import TEXT, Pictures
from quatrain.types.routes import ROUTE_DTYPES, live_of

FINISH_REASONS = ("stop", "length", "environment", "turns", "error", "timeout")
"""Why a completion ended: a stop token or string, or its length; an episode also by its environment, by its
number of turns, or by a fault of its environment (an error or a timeout)."""
ENVIRONMENT = "environment"
"""The built-in reward function whose values are the rewards of environments."""
FAULTS = ("error", "timeout")
"""Finish reasons of episodes that a fault of the environment ended."""
EPISODE_COLUMNS = ("messages", "environment_reward", "turn_rewards")
"""Columns that episodes add: the whole dialogue, the environment's reward, and its parts for each turn."""
ENVIRONMENTS = "environments"
"""The column that episodes add for reward functions that get their environments."""
AGENT_SEQUENCE = "agent_sequence"
"""The column of a row of an agent's episode: {"answers": [message, number, trained] of each answer of the
policy (its place among the messages, its number in the episode, whether this row trains it), "began": why the
row continues no earlier answer, or None}."""
AGENT_ROLE = "agent_role"
"""The column with the role that an agent's episode played: "", or a name of `client.role`."""
DATA_SOURCE = "data_source"
"""Column with the name of the data set that a row comes from, as in verl."""
REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "finish_reasons")
"""Arguments of reward functions other than columns; a data column must not have one of these names."""
Message = Mapping[str, str]
PromptText = str | tuple[Message, ...]
Rates = tuple[float | None, ...]
"""The running pass rate of each prompt; None for one that has not been drawn."""


class _Brief(reprlib.Repr):
    """Texts and collections by their beginnings, arrays by dtype and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 2, 60, 60
        self.maxdict = self.maxlist = self.maxtuple = 4

    def repr_instance(self, x: Any, level: int) -> str:
        if hasattr(x, "dtype") and getattr(x, "shape", None):
            return f"{x.dtype}{list(x.shape)}"
        if isinstance(x, Mapping):
            return self.repr_dict(dict(x), level)
        if isinstance(x, tuple):
            return self.repr_tuple(x, level)
        return repr(x) if type(x).__repr__ is brief else super().repr_instance(x, level)


_BRIEF = _Brief()


def brief_array(value: Any) -> str:
    """Dtype and shape of an array, or the type of something else."""
    return _BRIEF.repr(value) if isinstance(value, np.ndarray) else type(value).__name__


def brief(self: Any) -> str:
    """A `__repr__` for dataclasses with arrays and texts, in a few lines."""
    shown = (f"{each.name}={_BRIEF.repr(getattr(self, each.name))}" for each in fields(self) if each.repr)
    return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, eq=False)
class Prompt:
    """One prompt, the input of the rollout: tokens, text, and the data columns passed to reward functions.

    Raises ValueError for `input_ids` that are not [P] int32 with P >= 1, and for pictures of other tokens.
    """

    group_id: int
    """Unique id: the position in the endless shuffled stream of prompts. All samples of a prompt share it."""
    input_ids: np.ndarray
    """[P] int32 token ids, at least one."""
    text: PromptText
    """The prompt before tokenisation: a string or chat messages."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    """Name of the data set that it comes from, where there are several."""
    pictures: Pictures | None = None
    """Which picture each of `input_ids` stands for; None: all are text."""

    __repr__ = brief

    def __post_init__(self) -> None:
        check = _Checker("data")
        check.array("input_ids", self.input_ids, np.shape(self.input_ids)[:1], np.int32)
        check.rule(self.input_ids.size > 0, "input_ids", "at least one token", "none")
        check.pictures(self.pictures, self.input_ids)


@dataclass(frozen=True)
class PromptPosition:
    """How far training has come in the endless shuffled stream of prompts; part of every checkpoint."""

    next_prompt: int = 0
    """The first position that no training step has used."""
    steps_without_signal: int = 0
    """Training steps in a row, up to the last one, in which dynamic sampling found no group with signal."""
    rates: Rates = ()
    """With `data.curriculum`, the running pass rate of each row of the training data; empty at the start."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", tuple(self.rates))  # JSON of a checkpoint gives a list


class Example(NamedTuple):
    """One supervised example: a sequence, and which of its tokens are trained."""

    input_ids: np.ndarray
    """[T] int32 token ids, at least two."""
    scored: np.ndarray
    """[T] bool: True for tokens that are trained; at least one, and never the first."""
    source: str = ""
    """The data set that the row comes from."""
    pictures: Pictures | None = None
    """Which picture each of the tokens stands for; None: the example has none."""


class Pair(NamedTuple):
    """One preference: two different answers to a prompt, each with its end token; int32 token ids."""

    prompt_ids: np.ndarray
    """[P], at least one."""
    chosen_ids: np.ndarray
    rejected_ids: np.ndarray
    margin: float | None
    """By how much the chosen answer is better, as the row says; None if it does not."""
    number: int
    """Number of the pair in the data set, in file order, from 0."""
    source: str = ""


class Judged(NamedTuple):
    """One answer that was called good or bad, with its prompt; int32 token ids."""

    prompt_ids: np.ndarray
    """[P], at least one."""
    completion_ids: np.ndarray
    label: bool
    """Whether the answer is good."""
    number: int
    """Number of the answer in the data set, in file order, from 0; a pair is two answers."""
    source: str = ""


class Episodes(NamedTuple):
    """Which rows are sequences of one episode: B rows, E episodes."""

    of_row: np.ndarray
    """[B] int64: the number of each row's episode."""
    first_rows: np.ndarray
    """[E] int64: the first row of each episode."""

    def total(self, values: np.ndarray) -> np.ndarray:
        """[E] float64: the sum of `values` [B] over the rows of each episode."""
        return np.bincount(self.of_row, values, len(self.first_rows))


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """Completions sampled from the policy: the output of the rollout stage.

    `prompts`, `completions` and each entry of `columns` have one item per sequence. Rows with equal
    `group_ids` have the same prompt; they need not be adjacent, and groups may differ in size. A row starts
    with at least one prompt token. `completion_mask` is True for sampled tokens, the stop token included.
    `rollout_logprobs` are the log-probabilities (nats) of tokens in the sampled distribution, 0
    outside the mask. `policy_version` is the optimizer step of the weights that sampled a token, -1 outside
    the mask. `finish_reason` is one of FINISH_REASONS. In episodes of several turns, `completions` are the
    texts of the last turns, and `columns` has EPISODE_COLUMNS. `baseline` has one greedy completion per
    group, which is scored and not trained on; None if none were drawn.

    Rows with equal `episode_ids` are sequences of one episode, whose agent edited its history, or asked
    several times; None: each row is an episode. They have the same group and the same finish reason, and one
    reward, which is that of the text and the columns of the first of them: the path to the last request. A
    token that stands in several of them is in the completion mask of one, so that it is trained on once.

    `routes` are the k experts of each token in each of L MoE layers, in the pass in which the sampler had the
    token as its input; `live_of(dtype)` where no such pass was recorded, as on padding and on the last
    token of each row, which was never an input. None: nothing was recorded.

    `pictures` say which picture each token stands for; sampled tokens and padding never do, whatever their
    ids. None: there are no pictures.

    Raises ValueError, with stage, field, expected and actual value, if any of these conditions is violated.
    """

    input_ids: np.ndarray  # [B, T] int32
    attention_mask: np.ndarray  # [B, T] bool
    completion_mask: np.ndarray  # [B, T] bool
    rollout_logprobs: np.ndarray  # [B, T] float32
    policy_version: np.ndarray  # [B, T] int32
    finish_reason: np.ndarray  # [B] str
    group_ids: np.ndarray  # [B] int64
    prompts: tuple[PromptText, ...]
    completions: tuple[str, ...]
    columns: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    baseline: RolloutBatch | None = None
    episode_ids: np.ndarray | None = None  # [B] int64
    routes: np.ndarray | None = None  # [B, T, L, k] uint8 or uint16
    pictures: Pictures | None = None  # of [B, T]
    kept: KeptSets | None = None  # of [B, T]

    __repr__ = brief

    def __post_init__(self) -> None:
        check = _Checker("rollout")
        shape = check.matrix("input_ids", self.input_ids)
        rows = shape[0]
        check.array("input_ids", self.input_ids, shape, np.int32)
        check.array("attention_mask", self.attention_mask, shape, np.bool_)
        check.array("completion_mask", self.completion_mask, shape, np.bool_)
        check.array("rollout_logprobs", self.rollout_logprobs, shape, np.float32)
        check.array("policy_version", self.policy_version, shape, np.int32)
        check.array("group_ids", self.group_ids, (rows,), np.int64)
        check.length("prompts", self.prompts, rows)
        check.length("completions", self.completions, rows)
        for name, values in self.columns.items():
            check.length(f"columns[{name!r}]", values, rows)
        reasons = self.finish_reason
        check.rule(isinstance(reasons, np.ndarray), "finish_reason", "a numpy array", type(reasons).__name__)
        check.rule(reasons.shape == (rows,), "finish_reason", f"shape {(rows,)}", f"shape {reasons.shape}")
        strange = sorted({str(r) for r in reasons} - set(FINISH_REASONS))
        check.rule(not strange, "finish_reason", f"one of {FINISH_REASONS}", f"{strange}")
        reasons.setflags(write=False)
        self._check_masks(check)
        self._check_groups(check)
        self._check_episodes(check)
        self._check_routes(check)
        if self.kept is not None:
            problem = self.kept.problem(self.input_ids, self.completion_mask)
            check.rule(problem is None, "kept", *(problem or "; got ").split("; got ", 1))
        check.pictures(self.pictures, self.input_ids, ~self.attention_mask | self.completion_mask)
        if self.baseline is not None:
            greedy = self.baseline
            of_episodes = [greedy.compared[row] for row in greedy.episodes.first_rows]
            same = np.array_equal(np.unique(greedy.group_ids), np.unique(self.group_ids))
            once = len(set(of_episodes)) == len(of_episodes)
            rule, got = "one completion for each group and role", f"{len(of_episodes)} completions"
            check.rule(same and once, "baseline", rule, got)

    def _check_groups(self, check: _Checker) -> None:
        prompt_of_group: dict[int, PromptText] = {}
        for group, prompt in zip(self.group_ids.tolist(), self.prompts, strict=True):
            same = prompt_of_group.setdefault(group, prompt) == prompt
            check.rule(same, "group_ids", "one prompt per group", f"two different prompts in group {group}")

    def _check_episodes(self, check: _Checker) -> None:
        if self.episode_ids is None:
            return
        check.array("episode_ids", self.episode_ids, (len(self),), np.int64)
        for name in ("group_ids", "finish_reason"):
            values = getattr(self, name)
            differs = values != values[self.episodes.first_rows][self.episodes.of_row]
            got = "two in one episode"
            check.rule(not differs.any(), "episode_ids", f"one of {name} for the rows of an episode", got)

    def _check_routes(self, check: _Checker) -> None:
        if self.routes is None:
            return
        routes, shape = self.routes, self.input_ids.shape
        form = f"an array [{shape[0]}, {shape[1]}, L, k] of uint8 or uint16"
        is_routes = isinstance(routes, np.ndarray) and routes.ndim == 4 and routes.shape[:2] == shape
        got = brief_array(routes)
        check.rule(is_routes and routes.dtype in ROUTE_DTYPES, "routes", form, got)
        last = routes[np.arange(len(self)), self.lengths - 1] if len(self) else routes
        live = bool((last == live_of(routes.dtype)).all())
        check.rule(live, "routes", "no route of a row's last token, which was never an input", "one")
        routes.setflags(write=False)

    def _check_masks(self, check: _Checker) -> None:
        sampled, attention = self.completion_mask, self.attention_mask
        others, versions = "another value there", self.policy_version
        oldest = versions[sampled].min(initial=0)
        a_token = bool(attention[:, :1].all()) and (len(self) == 0 or attention.shape[1] > 0)
        rules = (
            ("attention_mask", attention[:, 1:] > attention[:, :-1], "right padding only", "a gap in a row"),
            (
                "attention_mask",
                not a_token,
                "a prompt of at least one token in each row",
                "a row without one",
            ),
            ("completion_mask", sampled & ~attention, "True only where attention_mask is", "True on padding"),
            ("completion_mask", sampled[:, :1], "False on the first token, of the prompt", "True there"),
            ("rollout_logprobs", self.rollout_logprobs[~sampled], "0 outside completion_mask", others),
            ("policy_version", versions[~sampled] != -1, "-1 outside completion_mask", others),
            ("policy_version", oldest < 0, ">= 0 on completions", f"{oldest}"),
        )
        for name, wrong, expected, got in rules:
            check.rule(not np.any(wrong), name, expected, got)

    def __len__(self) -> int:
        return len(self.input_ids)

    @cached_property
    def episodes(self) -> Episodes:
        """The episodes of the rows; without `episode_ids`, each row is one."""
        if self.episode_ids is None:
            return Episodes(np.arange(len(self)), np.arange(len(self)))
        _, first_rows, of_row = np.unique(self.episode_ids, return_index=True, return_inverse=True)
        return Episodes(of_row, first_rows)

    @cached_property
    def compared(self) -> list[tuple[int, str]]:
        """The group and the AGENT_ROLE of each row: rewards are compared where both are the same."""
        roles = self.columns.get(AGENT_ROLE, ("",) * len(self))
        return list(zip(self.group_ids.tolist(), map(str, roles), strict=True))

    @cached_property
    def compared_ids(self) -> np.ndarray:
        """[B] int64: numbers of `compared` in this batch; without roles, the groups."""
        if AGENT_ROLE not in self.columns:
            return self.group_ids
        numbers = {each: number for number, each in enumerate(sorted(set(self.compared)))}
        return np.array([numbers[each] for each in self.compared], np.int64)

    @property
    def ended_by_fault(self) -> np.ndarray:
        """[B] bool: the rows of episodes that one of FAULTS ended."""
        return np.isin(self.finish_reason, FAULTS)

    @property
    def completion_lengths(self) -> np.ndarray:
        """[B] int64: number of completion tokens of each sequence."""
        return self.completion_mask.sum(axis=1)

    @property
    def lengths(self) -> np.ndarray:
        """[B] int64: number of tokens of each sequence, without padding."""
        return self.attention_mask.sum(axis=1)


@dataclass(frozen=True, eq=False)
class TeacherWords:
    """What a teacher finds likeliest in the place of each completion token: k words, and all others as one.

    Fewer words have `NO_WORD` (-1) in place of others, with a log-probability of -1e30. Values outside the
    completion mask, and of sequences without a teacher, are any. The arrays are checked by `RewardedBatch`.
    """

    words: np.ndarray  # [B, T, k] int32
    logprobs: np.ndarray  # [B, T, k + 1] float32, the last of the other words

    __repr__ = brief


@dataclass(frozen=True, eq=False)
class RewardedBatch:
    """A rollout batch with its rewards: the output of the reward stage.

    `rewards` is the weighted sum over the functions that did not abstain on a sequence, NaN if all abstained.
    `rewards_per_function` has the raw values, NaN if a function abstained (returned None), and
    `function_weights` the weights of the sum; None: not known. `failed` says on which sequences a function
    failed; None: not known. `token_rewards` are rewards of single tokens, beside the reward of the sequence;
    None if there are none. `values` are a critic's estimates of the return at each completion token; None
    without a critic. `token_logprobs` are the log-probabilities that the token
    rewards were computed from, `old_logprobs` and `ref_logprobs`, which the update uses again, and those of a
    teacher, `teacher_logprobs`; empty if there are none. `teacher_words` are its likeliest words, for losses
    over them; None if there are none. `baseline_rewards` are the rewards of the greedy
    completion of each sequence's prompt, NaN where all functions abstained; None if none were drawn.
    `environment_weight` is the weight of the rewards of turns in `rewards`; 0 if they are no part of it.

    The rows of an episode have its rewards. Raises ValueError for arrays of the wrong shape or dtype,
    infinite rewards, if `rewards` is NaN for other sequences than those on which all functions abstained, or
    not one for all rows of an episode, and for token rewards or values that are not finite, or not 0 outside
    the completion mask.
    """

    rollouts: RolloutBatch
    rewards: np.ndarray  # [B] float32
    rewards_per_function: np.ndarray  # [F, B] float32
    function_names: tuple[str, ...]
    metrics: Metrics = field(default_factory=dict)
    token_rewards: np.ndarray | None = None  # [B, T] float32
    values: np.ndarray | None = None  # [B, T] float32
    token_logprobs: Mapping[str, np.ndarray] = field(default_factory=dict)  # [B, T] float32 each
    baseline_rewards: np.ndarray | None = None  # [B] float32
    environment_weight: float = 0.0
    function_weights: np.ndarray | None = None  # [F] float32
    teacher_words: TeacherWords | None = None
    failed: np.ndarray | None = None  # [F, B] bool

    __repr__ = brief

    def __post_init__(self) -> None:
        check = _Checker("reward")
        if self.teacher_words is not None:
            of_tokens, k = self.rollouts.input_ids.shape, self.teacher_words.words.shape[-1]
            check.array("teacher_words.words", self.teacher_words.words, (*of_tokens, k), np.int32)
            logprobs = self.teacher_words.logprobs
            check.array("teacher_words.logprobs", logprobs, (*of_tokens, k + 1), np.float32)
        rows, episodes = len(self.rollouts), self.rollouts.episodes
        check.array("rewards", self.rewards, (rows,), np.float32, allow_nan=True)
        shape = (len(self.function_names), rows)
        check.array("rewards_per_function", self.rewards_per_function, shape, np.float32, allow_nan=True)
        if self.function_weights is not None:
            check.array("function_weights", self.function_weights, shape[:1], np.float32)
        if self.failed is not None:
            check.array("failed", self.failed, shape, np.bool_)
        abstained = np.isnan(self.rewards_per_function).all(axis=0)
        check.rule(
            bool((np.isnan(self.rewards) == abstained).all()),
            "rewards",
            "NaN exactly where every function abstained",
            f"NaN in {int(np.isnan(self.rewards).sum())} rows, {int(abstained.sum())} rows of abstentions",
        )
        of_episode = self.rewards[episodes.first_rows][episodes.of_row]
        one = np.array_equal(self.rewards, of_episode, equal_nan=True)
        check.rule(one, "rewards", "one reward for the rows of an episode", "two in one episode")
        if self.baseline_rewards is not None:
            check.array("baseline_rewards", self.baseline_rewards, (rows,), np.float32, allow_nan=True)
        for name, values in (("token_rewards", self.token_rewards), ("values", self.values)):
            if values is not None:
                check.on_completions(name, values, self.rollouts.completion_mask)

    def judged_by(self, name: str) -> np.ndarray:
        """[B] float32: what the function `name` said of each sequence; NaN where it abstained or failed.

        In the raw rewards a failure has -1, which a function may also give.
        """
        function = self.function_names.index(name)
        values = self.rewards_per_function[function]
        return values if self.failed is None else np.where(self.failed[function], np.nan, values)


@dataclass(frozen=True, eq=False)
class AdvantagedBatch:
    """A rewarded batch with per-token advantages, 0 outside the completion mask: output of the third stage.

    `returns` are what a critic is trained to predict at each completion token; None if the estimator returns
    none.

    Raises ValueError for advantages or returns that are not [B, T] float32, finite, and 0 outside the mask.
    """

    rewarded: RewardedBatch
    advantages: np.ndarray  # [B, T] float32
    metrics: Metrics = field(default_factory=dict)
    returns: np.ndarray | None = None  # [B, T] float32

    __repr__ = brief

    def __post_init__(self) -> None:
        check = _Checker("advantage")
        check.on_completions("advantages", self.advantages, self.rollouts.completion_mask)
        if self.returns is not None:
            check.on_completions("returns", self.returns, self.rollouts.completion_mask)

    @property
    def rollouts(self) -> RolloutBatch:
        """The rollout batch that the rewards belong to."""
        return self.rewarded.rollouts


class _Checker:
    """Raises ValueErrors that name stage, field, expected value and actual value."""

    def __init__(self, stage: str):
        self.stage = stage

    def rule(self, holds: bool, name: str, expected: str, got: str) -> None:
        if not holds:
            raise ValueError(f"{self.stage} stage, field {name}: expected {expected}; got {got}")

    def matrix(self, name: str, value: np.ndarray) -> tuple[int, int]:
        self.rule(isinstance(value, np.ndarray), name, "a numpy array", type(value).__name__)
        self.rule(value.ndim == 2, name, "rank 2 [B, T]", f"shape {value.shape}")
        return value.shape

    def array(
        self, name: str, value: np.ndarray, shape: tuple, dtype: type, *, allow_nan: bool = False
    ) -> None:
        self.rule(isinstance(value, np.ndarray), name, "a numpy array", type(value).__name__)
        self.rule(value.shape == shape, name, f"shape {shape}", f"shape {value.shape}")
        self.rule(value.dtype == dtype, name, f"dtype {np.dtype(dtype).name}", f"dtype {value.dtype.name}")
        if np.issubdtype(value.dtype, np.floating):
            bad = np.isinf(value) if allow_nan else ~np.isfinite(value)
            expected = "no infinite value" if allow_nan else "finite values"
            self.rule(not bad.any(), name, expected, f"{int(bad.sum())} of {value.size} not so")
        value.setflags(write=False)

    def on_completions(self, name: str, value: np.ndarray, mask: np.ndarray) -> None:
        self.array(name, value, mask.shape, np.float32)
        self.rule(not value[~mask].any(), name, "0 outside completion_mask", "another value there")

    def pictures(self, value: Pictures | None, ids: np.ndarray, text: np.ndarray | bool = False) -> None:
        if value is None:
            return
        self.array("pictures.ids", value.ids, ids.shape, np.int64)
        unknown = set(np.unique(value.ids).tolist()) - {TEXT, *value.by_id}
        self.rule(not unknown, "pictures.by_id", "every picture of pictures.ids", f"none of {len(unknown)}")
        placed = bool(((value.ids != TEXT) & text).any())
        self.rule(not placed, "pictures", "no picture on sampled tokens and padding", "one there")

    def length(self, name: str, value: Sequence | np.ndarray, rows: int) -> None:
        self.rule(len(value) == rows, name, f"{rows} items, one per sequence", f"{len(value)}")
