"""Prints the completions of a run in a terminal: each prompt, then its group, the largest reward first.

`quatrain samples` calls it; it reads the same files as the run page.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from quatrain.report.page_samples import EVAL, STEP, by_group, read_samples, sample_files
from quatrain.run.samples import ASSISTANT, ENDINGS, num_turns, turn_heading

# Control characters of a completion could move the cursor, or rename the terminal: they are shown as symbols.
_VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
_C1, _SURROGATES = range(0x80, 0xA0), range(0xD800, 0xE000)
_BIDIRECTIONAL = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # they reverse the text around them
_VISIBLE |= dict.fromkeys((*_C1, *_SURROGATES, *_BIDIRECTIONAL), 0xFFFD)
_BAR = "│ "


def print_samples(
    folder: Path, console: Console, *, step: int | None = None, evaluation: bool = False
) -> None:
    """Print the samples of training step `step` (None: the last), or of the evaluation after it.

    Raises ValueError if there are none of that step.
    """
    kind, what = (EVAL, "evaluation completions") if evaluation else (STEP, "samples")
    files = {file.step: file for file in sample_files(folder, kind)}
    if not files:
        raise ValueError(
            f"there are no {what} in {folder / 'samples'}; a run writes samples of training steps if "
            "logging.samples_per_step is above 0, and evaluation completions when it evaluates"
        )
    chosen = max(files) if step is None else step
    if chosen not in files:
        near = sorted(sorted(files, key=lambda known: abs(known - chosen))[:4])
        raise ValueError(
            f"--step must be a step with {what}: got {chosen}; {len(files)} steps from {min(files)} to "
            f"{max(files)} have them, the nearest are {', '.join(map(str, near))}"
        )
    rows = read_samples(files[chosen].path)
    groups = by_group(rows.samples)
    for group in groups:
        _print_group(console, chosen, group)
    damaged = f", {rows.num_damaged} damaged lines skipped" if rows.num_damaged else ""
    counted = f"{len(rows.samples)} completions of {len(groups)} prompts{damaged}"
    _line(console, f"step {chosen} of {folder.resolve().name}: {counted}", "dim")


def _print_group(console: Console, step: int, group: dict[str, Any]) -> None:
    signal = "  no signal" if group["no_signal"] else ""
    name = f"{_visible(group['samples'][0].get('set', ''))} " if group["samples"][0].get("set") else ""
    console.print(Rule(Text(f"step {step}  {name}prompt {group['id']}{signal}"), align="left", style="dim"))
    if "prompt" in group:
        _print_text(console, group["prompt"])
    for name, value in group.get("columns", {}).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        _line(console, f"{name}: {text}", "cyan")
    for sample in group["samples"]:
        console.print()
        style = {1: "bold green", 0: "bold red"}.get(sample["correct"], "bold")
        _line(console, "  ".join(_facts(sample)), style)
        if "prompt" not in group:
            _print_text(console, sample["prompt"])
        if "turns" in sample:
            _print_turns(console, sample["turns"])
        else:
            _print_text(console, sample["completion"])
    console.print()


def _facts(sample: dict[str, Any]) -> Iterator[str]:
    rewards = [("reward", sample["reward"]), *sample["rewards"].items()]
    if "environment_reward" in sample and "environment" not in sample["rewards"]:
        rewards.append(("environment", sample["environment_reward"]))
    for name, value in rewards:
        yield f"{name} none" if value is None else f"{name} {value:.3g}"
    if sample["advantage"] is not None:
        yield f"advantage {sample['advantage']:+.3g}"
    if sample["correct"] is not None:
        yield "right" if sample["correct"] else "wrong"
    if "finish_reason" in sample:
        yield ENDINGS.get(str(sample["finish_reason"]), str(sample["finish_reason"]))
    if "turns" in sample:
        turns = num_turns(sample["turns"])
        yield f"{turns} turn" if turns == 1 else f"{turns} turns"
    if "completion_tokens" in sample:
        yield f"{sample['completion_tokens']} tokens"
    match sample.get("episode"):
        case {"role": str(role)}:
            yield f"role {role}"
    match sample.get("episode"):
        case {"sequence": int(number), "sequences": int(count), "sample": int(of)} if count > 1:
            yield f"sequence {number + 1} of {count}, sample {of}"


def _print_text(console: Console, text: str | list[dict[str, str]]) -> None:
    if isinstance(text, str):
        _line(console, text)
        return
    for turn in text:
        _line(console, turn["role"], "magenta")
        _line(console, turn["text"])


def _print_turns(console: Console, turns: list[dict[str, Any]]) -> None:
    """The messages of an episode; a bar before each line of their texts, which so cannot forge a turn."""
    for turn in turns:
        _line(console, turn_heading(turn), "bold magenta" if turn["role"] == ASSISTANT else "magenta")
        lines = _visible(turn["text"]).expandtabs().split("\n")
        if console.is_terminal:
            lines = [part for line in lines for part in _wrapped(console, line)]
        _line(console, "\n".join(f"{_BAR}{line}" for line in lines))


def _wrapped(console: Console, line: str) -> list[str]:
    width = console.width - len(_BAR)
    if cell_len(line) <= width:
        return [line]
    return [part.plain for part in Text(line).wrap(console, width)]


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(Text(_visible(text), style=style), soft_wrap=not console.is_terminal)


def _visible(text: str) -> str:
    return text.translate(_VISIBLE)
