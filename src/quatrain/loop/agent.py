"""`quatrain agent`: plays an agent on a few rows of the data, and shows the tree of its turns.

Data flow: configuration -> `Rollouts` with the model as it is -> episodes -> text, for people.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from quatrain.config.load import Resolved
from quatrain.data.messages import pictures_of, text_of
from quatrain.data.prompts import load_prompts
from quatrain.data.rows import NO_ROWS
from quatrain.episodes.agent_episodes import AgentEpisodes, Episode, Part
from quatrain.episodes.hubs import hub_rows
from quatrain.loop.policy import load_policy
from quatrain.loop.stages import build_engine
from quatrain.report.progress import waiting
from quatrain.report.start_up import stage, starting
from quatrain.serve.turn_tree import Turn

LONGEST = 2000
"""Characters of a message that are shown."""


def play_rows(resolved: Resolved, count: int) -> Iterator[str]:
    """The episodes of the first `count` rows of the training data, a paragraph for each sequence.

    Raises ValueError if the agent cannot be loaded, or every episode has a fault.
    """
    config = resolved.config
    own: dict[str, Any] = {"workers": 0, "servers": ()}  # the policy is played as it is here
    if config.rollout.has_fleet:  # whose these are
        own |= {"mesh": None, "max_concurrency": None}
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update=own)})
    with starting(), waiting():
        loaded = load_policy(config, critic=False, adapters=False, environments=False)
    rows = hub_rows(config, config.data.train, NO_ROWS)
    source = load_prompts(config.data.train, config.data, loaded.tokenizer, seed=config.seed, rows=rows)
    with closing(build_engine(config, loaded)) as rollouts:
        rollouts.sync_weights(loaded.params, 0)
        ticket = rollouts.submit(source.head(count), sampling=replace(rollouts.sampling, n=1))
        assert isinstance(ticket.playing, AgentEpisodes)
        problem: ValueError | None = None
        try:
            with starting(), waiting():
                stage("the agent plays")
                rollouts.wait(ticket)
        except ValueError as error:  # that all have faults, which the trees explain
            problem = error
        for number, episode in enumerate(ticket.playing.episodes):
            if episode.fault or any(part.rows for part in episode.parts):
                for part in episode.parts:
                    yield f"row {number}{_role(part)}: {_outcome(episode, part)}"
                    yield from _sequences(part, loaded.tokenizer)
        if problem is not None:
            raise problem


def _role(part: Part) -> str:
    return f", role {part.session.role}" if part.session.role else ""


def _outcome(episode: Episode, part: Part) -> str:
    counts = {name: count for name, count in part.session.counts.items() if count}
    parts = [
        "no reward" if part.reward is None else f"reward {part.reward:g}",
        *(f"{name} {value:g}" for name, value in episode.played.metrics.items()),
        f"ended as {part.finish_reason}",
        *(f"{count} {name.replace('_', ' ')}" for name, count in counts.items()),
    ]
    if episode.fault is not None:
        parts.append(f"{episode.fault}\n{episode.fault.detail}".rstrip())
    return ", ".join(parts)


def _sequences(part: Part, tokenizer: Any) -> Iterator[str]:
    """The paths of the tree; what stands in one before is not shown again."""
    numbers: dict[Turn, int] = {}
    for row in reversed(part.rows):
        lines = []
        for turn in row.path:
            if turn in numbers:
                lines = [f"  after answer {numbers[turn]}:"]
                continue
            if turn.parent is None and turn.reason is not None:
                lines.append(f"  began anew ({turn.reason}):")
            before = 0 if turn.parent is None else len(turn.parent.messages)
            lines += [_message(message) for message in turn.messages[before:-1]]
            if not turn.messages:
                lines.append(f"  given: {tokenizer.decode(turn.given)!r}")
            numbers[turn] = len(numbers) + 1
            said = _message(turn.messages[-1]) if turn.messages else repr(tokenizer.decode(turn.tokens))
            lines.append(
                f"  answer {numbers[turn]}, {len(turn.tokens)} tokens, {turn.finish_reason}: {said.strip()}"
            )
        yield "\n".join(lines)


def _message(message: Any) -> str:
    """A message in a line, with its calls."""
    text = text_of(message)
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text)} characters)"
    calls = [call["function"] for call in message.get("tool_calls", ())]
    made = "".join(f" {call['name']}({call['arguments']})" for call in calls)
    shown = "".join(f" [image {p.size[0]}x{p.size[1]} {p.name[:6]}]" for p in pictures_of([message]))
    return f"  {message['role']}:{shown} {text}{made}"
