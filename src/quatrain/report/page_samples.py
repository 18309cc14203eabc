"""Reads the files in `samples/` of a run and compresses them, one chunk per step, for the run page.

Data flow: `samples/step_000010.jsonl` and `samples/eval_000010.jsonl` -> `SampleFiles` -> `page.py`, which
puts the chunks into the page or serves them. `print_samples.py` prints the same rows in a terminal.
"""

import base64
import gzip
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

from quatrain.config.files import too_deep
from quatrain.config.settings import parse_yaml
from quatrain.run.metrics import is_finite
from quatrain.run.pictures import PICTURE, content_text, mark_of
from quatrain.run.samples import beside_content
from quatrain.types.batches import FAULTS

STEP, EVAL = "step", "eval"
CAP_BYTES = {STEP: 96 * 2**20, EVAL: 32 * 2**20}
"""Bytes of the files, before compression, that a page holds."""
FILE_CAP_BYTES = 16 * 2**20
"""Bytes of one file, before compression, that a page holds."""
GZIP_LEVEL = 5
RIGHT = 0.5
"""A function that judges answers gives 1 for right and 0 for wrong; a value between counts as the nearer."""
_FLAT = 1e-9
"""Advantages and rewards that differ by less are taken as equal."""
_JUDGES = re.compile("correct|accura", re.IGNORECASE)
"""Reward functions that decide what is right in a run without `eval.accuracy`."""
_FILE = re.compile(r"(step|eval)_(\d{1,18})\.jsonl")
_LOGPROBS = ("sampler_logprobs", "trainer_logprobs", "teacher_logprobs")
_TOKEN_KEYS = ("texts", "ids", *_LOGPROBS, "advantages", "sampled")
_SAMPLE_KEYS = (
    *("finish_reason", "completion_tokens", "strict", "greedy", "set", "sample", "prompt_index"),
    "episode",
)


class SampleFile(NamedTuple):
    """One file of samples; `time_ns` is when it was last written."""

    step: int
    path: Path
    time_ns: int
    num_bytes: int


class Rows(NamedTuple):
    """The sequences in a file, the number of lines that hold none, and of lines beyond a limit of bytes."""

    samples: list[dict[str, Any]]
    num_damaged: int = 0
    num_left_out: int = 0


class Chunk(NamedTuple):
    """The content of one file: `summary` for the list of steps, and the compressed groups.

    `packed` is None if the file is left out of the page, or is compressed when it is asked for. `pictures`
    are the names of those that its messages show.
    """

    summary: dict[str, Any]
    packed: bytes | None
    pictures: tuple[str, ...] = ()


def sample_files(folder: Path, kind: str) -> list[SampleFile]:
    """The files of `kind` in the folder `samples/` of the run at `folder`, in the order of steps."""
    files = []
    for path in (folder / "samples").glob(f"{kind}_*.jsonl"):
        if match := _FILE.fullmatch(path.name):
            with suppress(OSError):  # the file was removed since the folder was listed
                status = path.stat()
                files.append(SampleFile(int(match[2]), path, status.st_mtime_ns, status.st_size))
    return sorted(files)


def read_samples(path: Path, max_bytes: float = math.inf) -> Rows:
    """The rows of a file in the folder `samples/` of a run, each with the keys that this version knows.

    A damaged line is counted.
    """
    config = path.parent.parent / "config.yaml"
    judges = _judges(config, config.stat().st_mtime_ns if config.exists() else 0)
    samples: list[dict[str, Any]] = []
    num_damaged = num_left_out = num_bytes = 0
    with path.open("rb") as file:
        for line in file:
            num_bytes += len(line)
            if num_bytes > max_bytes and samples:
                num_left_out += 1
            elif (sample := _parse(line, judges)) is not None:
                samples.append(sample)
            elif line.strip():
                num_damaged += 1
    return Rows(samples, num_damaged, num_left_out)


def by_group(samples: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples of each prompt, those of the largest reward first; what a group shares is written once."""
    ordered = sorted(samples, key=_place)  # stable: keeps the order in the file
    return [_group(list(members)) for _, members in groupby(ordered, key=_place)]


def _place(sample: Mapping[str, Any]) -> tuple[str, int]:
    """The evaluation set and the prompt that a sample belongs to."""
    return str(sample.get("set", "")), sample["group_id"]


class SampleFiles:
    """The files of one kind of a run, compressed; what was compressed is kept for the next `refresh`.

    Of files that together exceed `cap_bytes` the first, the last and evenly spaced ones are kept: every
    second, or fourth, eighth and so on, so that what is kept now was kept before. With `keep_packed=False`
    no compressed content is kept in memory, and `packed_step` compresses what it is asked for.
    """

    def __init__(self, folder: Path, kind: str, *, cap_bytes: float, keep_packed: bool = True):
        self._folder, self._kind, self._cap, self._keep = folder, kind, cap_bytes, keep_packed
        self._chunks: dict[SampleFile, Chunk] = {}

    def refresh(self) -> None:
        """Read and compress the files that are new, have changed, or are no longer left out."""
        files = sample_files(self._folder, self._kind)
        kept = kept_files(files, self._cap)
        chunks = {}
        for file in files:
            with suppress(OSError):  # the file was removed, or is not readable, and is looked for again
                chunks[file] = (self._read if file in kept else self._left_out)(file)
        self._chunks = chunks

    def _read(self, file: SampleFile) -> Chunk:
        known = self._chunks.get(file)
        if known is not None and "groups" in known.summary:
            return known
        rows = read_samples(file.path, FILE_CAP_BYTES)
        groups = by_group(rows.samples)
        counts = {"damaged": rows.num_damaged, "left_out": rows.num_left_out}
        summary = {"step": file.step, **_summary(groups), **counts}
        return Chunk(summary, pack(groups) if self._keep else None, _pictures(rows.samples))

    def _left_out(self, file: SampleFile) -> Chunk:
        known = self._chunks.get(file)
        if known is None:
            with file.path.open("rb") as lines:
                count = sum(1 for _ in lines)
        else:
            count = known.summary["num_samples"] + known.summary.get("left_out", 0)
        return Chunk({"step": file.step, "num_samples": count}, None)

    def index(self) -> dict[str, Any]:
        """What the page says of these files: a summary of each kept step, and what was left out."""
        summaries = [chunk.summary for chunk in self._chunks.values()]
        kept = [summary for summary in summaries if "groups" in summary]
        gone = [summary for summary in summaries if "groups" not in summary]
        return {
            "steps": kept,
            "num_steps": len(summaries),
            "left_out_steps": len(gone),
            "left_out_samples": sum(s["num_samples"] for s in gone) + sum(s["left_out"] for s in kept),
            "num_bytes": sum(file.num_bytes for file in self._chunks),
            "cap_bytes": None if math.isinf(self._cap) else self._cap,
            "damaged": sum(summary["damaged"] for summary in kept),
        }

    def pictures(self) -> Iterator[tuple[int, tuple[str, ...]]]:
        """(step, names of the pictures that its messages show) of the kept files."""
        yield from ((file.step, chunk.pictures) for file, chunk in self._chunks.items())

    def packed(self) -> Iterator[tuple[int, bytes]]:
        """(step, compressed groups) of the kept files."""
        for file, chunk in self._chunks.items():
            if chunk.packed is not None:
                yield file.step, chunk.packed

    def packed_step(self, step: int) -> bytes | None:
        """The compressed groups of `step`, read now if they are not kept; None if there is no such file."""
        for file, chunk in self._chunks.items():
            if file.step == step:
                with suppress(OSError):
                    return chunk.packed or pack(by_group(read_samples(file.path, FILE_CAP_BYTES).samples))
        return None


def kept_files(files: Sequence[SampleFile], cap_bytes: float) -> set[SampleFile]:
    """The files of a page: all, or the first, the last and every 2nd, 4th, 8th …, as few as the cap asks."""
    stride = 1
    while True:
        kept = {file for i, file in enumerate(files) if i % stride == 0 or i == len(files) - 1}
        size = sum(min(file.num_bytes, FILE_CAP_BYTES) for file in kept)
        if size <= cap_bytes or stride >= len(files):
            return kept
        stride *= 2


def pack(value: Any) -> bytes:
    """JSON, compressed, in base64: characters that need no escape in HTML."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A completion may contain half a surrogate pair, which is escaped to keep the JSON valid.
    raw = text.encode("utf-8", errors="backslashreplace")
    return base64.b64encode(gzip.compress(raw, GZIP_LEVEL, mtime=0))


def number(value: Any) -> float | int | None:
    """The value if it is a finite number, with at most 6 digits; else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
        return int(value) if isinstance(value, bool) else None
    return value if isinstance(value, int) else float(f"{value:.6g}")


@lru_cache(maxsize=64)
def _judges(config: Path, time_ns: int) -> tuple[str, ...] | None:
    """The names that `eval.accuracy` may have among the rewards; None if a run has not set it.

    A function has its whole name there if another has the same name in another file. `time_ns`: when the
    run's `config.yaml` was written.
    """
    try:
        content = parse_yaml(config.read_text("utf-8", errors="replace"), config.name)
        accuracy, functions = content["eval"]["accuracy"], content["reward"]["functions"]
    except (OSError, ValueError, LookupError, TypeError):  # `page_data.py` says so
        return None
    if not isinstance(accuracy, str):
        return None
    return (accuracy, accuracy.rpartition(":")[2]) if accuracy in functions else ()


def _parse(line: bytes, judges: tuple[str, ...] | None) -> dict[str, Any] | None:
    """The sample on a line; None if the line is not whole, or holds none."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    usable = isinstance(row, dict) and "completion" in row and not too_deep(row)
    return _sample(row, judges) if usable else None


def _finite(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


def _sample(row: Mapping[str, Any], judges: tuple[str, ...] | None) -> dict[str, Any]:
    """The row with the types that the page relies on."""
    rewards, columns = row.get("rewards"), row.get("columns")
    group_id = row.get("group_id", row.get("prompt_index"))
    environment_reward, tokens = number(row.get("environment_reward")), _tokens(row.get("tokens"))
    return {
        "group_id": group_id if isinstance(group_id, int) else -1,
        "prompt": _prompt(row.get("prompt")),
        "completion": _text(row["completion"]),
        "reward": number(row.get("reward")),
        "advantage": number(row.get("advantage")),
        "rewards": {k: number(v) for k, v in rewards.items()} if isinstance(rewards, dict) else {},
        "columns": columns if isinstance(columns, dict) else {},
        "correct": _correct(row, judges),
        **{key: row[key] for key in _SAMPLE_KEYS if row.get(key) is not None},
        **({"turns": list(map(_turn, row["turns"]))} if isinstance(row.get("turns"), list) else {}),
        **({} if environment_reward is None else {"environment_reward": environment_reward}),
        **({} if tokens is None else {"tokens": tokens}),
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _prompt(value: Any) -> str | list[dict[str, Any]]:
    """The prompt as text, or as messages with `role` and `text`."""
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        return list(map(_turn, value))
    return "" if value is None else _text(value)


def _turn(turn: Any) -> dict[str, Any]:
    """The message with `role` and `text`, and what else the row has of it: `name` (of a tool), `reward`, ….

    The text has its thoughts and calls of tools too. If it has pictures, the text has a mark for each, and
    `parts` are the texts and pictures in their order.
    `answer` is its number among the answers of an agent's episode, `trained` false if another sequence of the
    episode trains it.
    """
    if not isinstance(turn, dict):
        return {"role": "", "text": _text(turn)}
    name, reward = turn.get("name"), number(turn.get("reward"))
    content = turn.get("text", turn.get("content", ""))
    before, after = beside_content(turn)
    parts = content if isinstance(content, list) and any(map(mark_of, content)) else []
    parts = [*filter(None, [before]), *parts, *filter(None, [after])] if parts else []
    return {
        "role": _text(turn.get("role", "")),
        "text": content_text(parts) if parts else before + _text(content) + after,
        **({"parts": list(map(_part, parts))} if parts else {}),
        **({} if name is None else {"name": _text(name)}),
        **({} if reward is None else {"reward": reward}),
        **{key: turn[key] for key in ("answer", "trained") if isinstance(turn.get(key), int)},
    }


def _part(part: Any) -> str | dict[str, Any]:
    """A part of a content: a text, or a picture."""
    return {key: part[key] for key in (PICTURE, "size")} if mark_of(part) else content_text([part])


def _pictures(samples: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of the pictures in prompts and turns, each once."""
    said = (each for sample in samples for each in (sample["prompt"], sample.get("turns")))
    turns = chain.from_iterable(each for each in said if isinstance(each, list))
    parts = chain.from_iterable(turn.get("parts", ()) for turn in turns)
    return tuple(dict.fromkeys(part[PICTURE] for part in parts if isinstance(part, dict)))


def _tokens(tokens: Any) -> dict[str, list[Any]] | None:
    """The lists of equal length of a sample's tokens; None without texts."""
    if not isinstance(tokens, dict) or not isinstance(tokens.get("texts"), list) or not tokens["texts"]:
        return None
    texts = tokens["texts"]
    lists = {key: tokens[key] for key in _TOKEN_KEYS if isinstance(tokens.get(key), list)}
    kept = {key: [number(v) for v in values] for key, values in lists.items() if len(values) == len(texts)}
    return {**kept, "texts": [_text(text) for text in texts]}


def _correct(row: Mapping[str, Any], judges: tuple[str, ...] | None) -> int | None:
    """1 or 0 if the row says whether the answer is right: itself, or by one of the reward functions `judges`.

    Without `judges`, a function decides that is named so.
    """
    values, rewards = [row.get("correct")], row.get("rewards")
    if isinstance(rewards, dict):
        names = filter(_JUDGES.search, rewards) if judges is None else judges
        values += map(rewards.get, names)
    said = next((value for value in map(number, values) if value is not None), None)
    return None if said is None else int(said >= RIGHT)


def _group(samples: list[dict[str, Any]]) -> dict[str, Any]:
    first = samples[0]
    shared = [key for key in ("prompt", "columns") if all(each[key] == first[key] for each in samples)]
    ranked = sorted(samples, key=lambda sample: (sample["reward"] is None, -(sample["reward"] or 0)))
    left_out = {*shared, "group_id"}
    members = [
        {key: value for key, value in sample.items() if key not in left_out} | {"flags": _flags(sample)}
        for sample in ranked
    ]
    return {
        "id": first["group_id"],
        **{key: first[key] for key in shared},
        "no_signal": _no_signal(samples),
        "samples": members,
    }


def _flags(sample: Mapping[str, Any]) -> list[str]:
    wrong, reason = sample["correct"] == 0, sample.get("finish_reason")
    flags = {
        "wrong_rewarded": wrong and (sample["reward"] or 0) > 0,
        "wrong_pushed": wrong and (sample["advantage"] or 0) > 0,
        "truncated": reason == "length",
        "failed": reason in FAULTS,
    }
    return [name for name, holds in flags.items() if holds]


def _no_signal(samples: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every advantage of the group is 0; without advantages, whether all rewards are equal."""
    advantages = [each["advantage"] for each in samples if each["advantage"] is not None]
    if advantages:
        return all(abs(value) < _FLAT for value in advantages)
    rewards = [each["reward"] for each in samples if each["reward"] is not None]
    return len(rewards) > 1 and max(rewards) - min(rewards) < _FLAT


def _summary(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts by which the page finds the steps that a filter leaves, without unpacking them."""
    samples = [sample for group in groups for sample in group["samples"]]
    flagged = Counter(name for sample in samples for name in sample["flags"])
    # Accuracy counts greedy samples; those of training have no such mark.
    judged = [sample["correct"] for sample in samples if sample.get("greedy", True)]
    return {
        "groups": len(groups),
        "num_samples": len(samples),
        "no_signal": sum(group["no_signal"] for group in groups),
        **{name: flagged[name] for name in ("wrong_rewarded", "wrong_pushed", "truncated")},
        "judged": sum(correct is not None for correct in judged),
        "correct": judged.count(1),
        "tokens": any("tokens" in sample for sample in samples),
        **({"failed": flagged["failed"]} if flagged["failed"] else {}),
    }
