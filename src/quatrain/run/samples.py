"""Records of completions for the files in `samples/`: JSON objects with texts, rewards and data columns.

Data flow: `AdvantagedBatch` of a training step, or the `RewardedBatch` of an evaluation -> records ->
`report.writer.Report`, which removes secrets and writes them -> the run page and `quatrain samples`.

The record of an episode has two further keys: `turns`, the messages after the prompt in the order of the
dialogue, and `environment_reward`, the sum of the rewards that the environment gave. A turn has `role`,
`content`, `name`, `tool_call_id`, thoughts and `tool_calls` if the message has them, and `reward` if the
policy wrote it.

A content with pictures is a list of parts (`run.pictures`); the `Picture`s of a record are in its `pictures`,
which the writer takes out.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from quatrain.data.messages import THOUGHTS, as_messages, call_of
from quatrain.data.pictures import IMAGES
from quatrain.reward.forms import plain_json
from quatrain.run.pictures import OF_RECORD, content_text, named
from quatrain.types.batches import (
    AGENT_ROLE,
    AGENT_SEQUENCE,
    EPISODE_COLUMNS,
    AdvantagedBatch,
    PromptText,
    RewardedBatch,
    RolloutBatch,
)
from quatrain.types.pictures import Picture

TRAINER_LOGPROBS = "trainer_logprobs"
"""Entry of `RewardedBatch.token_logprobs` with the policy's log-probabilities before the update."""
TEACHER_LOGPROBS = "teacher_logprobs"
"""Entry of `RewardedBatch.token_logprobs` with those of a teacher; NaN for sequences without one."""
ASSISTANT, CALLS = "assistant", "tool_calls"
ENDINGS = {
    "environment": "ended by the environment",
    "turns": "out of turns",
    "error": "environment error",
    "timeout": "environment timeout",
}
"""How an episode ended, for readers, by its finish reason; the run page has the same words."""
_TURN_KEYS = ("role", "name", "tool_call_id", *THOUGHTS, "content", CALLS)
TokenText = Callable[[int], str]


def training_sample(
    batch: AdvantagedBatch, index: int, *, step: int, token_text: TokenText | None = None
) -> dict[str, Any]:
    """Sequence `index` of a training step; `advantage` is the mean over its completion tokens.

    With `token_text`, which returns the text of a token id, the record has `tokens`: of each completion token
    its text, id, advantage, and log-probability by the sampler and, where they were computed, by the trainer
    and the teacher.
    Tokens that the environment or the template wrote between two turns are among them, with None for these
    numbers; `sampled` then says of each token whether the policy sampled it.
    """
    advantages = batch.advantages[index][batch.rollouts.completion_mask[index]]
    record = {
        "step": step,
        "group_id": int(batch.rollouts.group_ids[index]),
        **_completion(batch.rewarded, index),
        "advantage": _number(advantages.mean(dtype=np.float64)) if advantages.size else None,
    }
    if token_text is not None:
        record["tokens"] = _tokens(batch, index, token_text)
    return record


def _tokens(batch: AdvantagedBatch, index: int, token_text: TokenText) -> dict[str, list[Any]]:
    """Lists of equal length over the tokens from the first to the last that was sampled."""
    where = np.flatnonzero(batch.rollouts.completion_mask[index])
    span = slice(where[0], where[-1] + 1) if where.size else slice(0)
    sampled = batch.rollouts.completion_mask[index, span]
    ids = batch.rollouts.input_ids[index, span].tolist()
    known = batch.rewarded.token_logprobs
    others = {name: known[name] for name in (TRAINER_LOGPROBS, TEACHER_LOGPROBS) if name in known}

    def of_sampled(values: np.ndarray) -> list[float | None]:
        return _numbers(np.where(sampled, values[index, span], np.nan))

    return {
        "texts": [token_text(token) for token in ids],
        "ids": ids,
        "sampler_logprobs": of_sampled(batch.rollouts.rollout_logprobs),
        **{name: of_sampled(values) for name, values in others.items()},
        "advantages": of_sampled(batch.advantages),
        **({} if sampled.all() else {"sampled": sampled.tolist()}),
    }


def evaluation_sample(
    rewarded: RewardedBatch, index: int, *, greedy: bool, right: np.ndarray | None, strict: np.ndarray | None
) -> dict[str, Any]:
    """Sequence `index` of an evaluation, whose group ids are the numbers of the prompts in their set.

    `right`, `strict`: [B] whether completions are right, and also in the required format; NaN for those that
    cannot be judged.
    """
    groups = rewarded.rollouts.group_ids
    return {
        "prompt_index": int(groups[index]),
        "sample": _place(rewarded.rollouts, index)["sample"],
        "greedy": greedy,
        **_completion(rewarded, index),
        "correct": None if right is None else _number(right[index]),
        "strict": None if strict is None else _number(strict[index]),
    }


def _completion(rewarded: RewardedBatch, index: int) -> dict[str, Any]:
    rollouts = rewarded.rollouts
    raw = rewarded.rewards_per_function[:, index]
    prompt = named(rollouts.prompts[index])
    columns = {
        name: named(values[index])
        for name, values in rollouts.columns.items()
        if name != IMAGES or not _are_pictures(values[index])  # the prompt shows them where they stand
    }
    sequence, role = columns.pop(AGENT_SEQUENCE, None), columns.pop(AGENT_ROLE, "")
    episode = _episode(prompt, columns, sequence) if columns.keys() >= set(EPISODE_COLUMNS) else {}
    if episode:
        columns = {name: value for name, value in columns.items() if name not in EPISODE_COLUMNS}
    if rollouts.episode_ids is not None:
        began = sequence and sequence["began"]
        episode["episode"] = {
            **_place(rollouts, index),
            **({"role": role} if role else {}),
            **({"began": began} if began else {}),
        }
    seen = () if rollouts.pictures is None else rollouts.pictures[index].used
    return {
        "prompt": prompt,
        "completion": rollouts.completions[index],
        **episode,
        "columns": {name: plain_json(value) for name, value in columns.items()},
        "rewards": {name: _number(value) for name, value in zip(rewarded.function_names, raw, strict=True)},
        "reward": _number(rewarded.rewards[index]),
        "finish_reason": str(rollouts.finish_reason[index]),
        "completion_tokens": int(rollouts.completion_lengths[index]),
        **({OF_RECORD: seen} if seen else {}),
    }


def _are_pictures(value: Any) -> bool:
    several = isinstance(value, list | tuple) and len(value) > 0
    return several and all(isinstance(each, Picture) for each in value)


def _place(rollouts: RolloutBatch, index: int) -> dict[str, int]:
    """Which episode of its group, and role, a sequence belongs to; its number among those of the episode."""
    of_row, first_rows = rollouts.episodes
    same = np.flatnonzero(of_row == of_row[index])
    of_group = rollouts.compared_ids[first_rows] == rollouts.compared_ids[index]
    return {
        "sample": int(of_group[: of_row[index]].sum()),
        "sequence": int((same < index).sum()),
        "sequences": len(same),
    }


def _episode(
    prompt: PromptText, columns: Mapping[str, Any], sequence: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The turns after `prompt`, each reward with its turn, and the reward of the environment.

    In a sequence of an agent's episode, each answer of the policy has its number in the episode (`answer`),
    and one that another sequence trains has `trained` false.
    """
    messages = list(columns["messages"])
    for message in as_messages(prompt):
        if not messages or messages[0] != message:
            break
        del messages[0]
    turns = [{key: plain_json(each[key]) for key in _TURN_KEYS if key in each} for each in messages]
    own = [turn for turn in turns if turn["role"] == ASSISTANT]
    # Examples of the assistant's turns that the environment put before the dialogue have no reward.
    for turn, reward in zip(reversed(own), reversed(columns["turn_rewards"]), strict=False):
        turn["reward"] = _number(reward)
    before = len(columns["messages"]) - len(turns)
    for place, number, trained in () if sequence is None else sequence["answers"]:
        if place >= before:
            turns[place - before] |= {"answer": number} if trained else {"answer": number, "trained": False}
    return {"turns": turns, "environment_reward": _number(columns["environment_reward"])}


def turn_heading(turn: Mapping[str, Any]) -> str:
    """Who wrote a turn of a record, and the reward that the environment gave for it: `tool add`."""
    reward = turn.get("reward")
    words = [turn["role"], turn.get("name"), None if reward is None else f"(reward {reward:.3g})"]
    return " ".join(str(word) for word in words if word)


def num_turns(turns: Iterable[Mapping[str, Any]]) -> int:
    """How many of the turns are the assistant's."""
    return sum(turn["role"] == ASSISTANT for turn in turns)


def transcript(turns: Iterable[Mapping[str, Any]]) -> str:
    """The turns of a record as one text for readers, each under its heading in brackets."""
    return "\n\n".join(f"[{turn_heading(turn)}]\n{_said(turn)}" for turn in turns)


def _said(turn: Mapping[str, Any]) -> str:
    before, after = beside_content(turn)
    return before + content_text(turn["content"]) + after


def beside_content(message: Mapping[str, Any]) -> tuple[str, str]:
    """What readers see before and after the content of a message: its thoughts, and its calls of tools.

    An answer to an agent has them in fields of their own. The message may have been read from a file.
    """
    thought = next((said for name in THOUGHTS if isinstance(said := message.get(name), str) and said), "")
    calls = message.get(CALLS)
    said = [_call(call) for call in calls] if isinstance(calls, list | tuple) else []
    return f"<think>\n{thought}\n</think>\n\n" if thought else "", "".join(
        f"\n[call] {call}" for call in said
    )


def _call(call: Any) -> str:
    inner = call_of(call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping):
        return json.dumps(call, ensure_ascii=False)
    arguments = inner.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{inner.get('name')} {text}"


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float | None) -> float | None:
    """The value in its shortest decimal form that gives the same float32; None if it is not finite."""
    return None if value is None or not np.isfinite(value) else float(str(np.float32(value)))
