"""Reads a data set as rows (one dict each) from a file, the Hub, a built-in task or a Python program.

First step of the data flow: `data.train` / `data.eval` / `sft.data` -> rows -> `prompts.py`.
"""

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from quatrain.config.buckets import entries, local_copy
from quatrain.config.data_sets import REASONING_GYM
from quatrain.config.errors import installation, shown
from quatrain.config.places import HUB_ID, is_bucket, local_path
from quatrain.data.builtin import builtin_rows
from quatrain.data.gym_rows import gym_rows
from quatrain.weights.offline_hub import hub_without_retries

Row = dict[str, Any]
GivenRows = Mapping[str, Any]
"""Rows that a Python program gives, by the names that stand for them in the configuration.

A list of dicts, a `datasets.Dataset`, or a table that Arrow can read, as those of pandas, polars and pyarrow.
"""
NO_ROWS: GivenRows = MappingProxyType({})

MAX_LINE_BYTES = 2**26
"""Length of the longest line of a .jsonl file."""
MANY_VALUES = 4_000_000
"""Values that any Parquet file may have; a larger file may have one for each of its bytes."""
MANY_BYTES = 2**28
"""Bytes of memory that the rows of any Parquet file may take; a larger file may take MOST_TIMES its size."""
MOST_TIMES = 100
BATCH_ROWS = 64
TEXTS = frozenset({"prompt", "completion", "text", "chosen", "rejected"})
"""Columns of a .csv file that are never numbers, as prompts and answers are texts: `7` answers `3+4=`."""

_HUB = re.compile(rf"(?P<path>{HUB_ID.pattern})(?::(?P<config>[\w.-]*))?(?::(?P<split>.+))?")
_FORMS = (
    "`builtin:arithmetic`, `reasoning_gym:NAME?size=500`, a .jsonl, .json, .parquet or .csv file, a pattern "
    "of some (`part-*.jsonl`), each also in a bucket (`gs://bucket/rows.jsonl`, `s3://…`), or a hub id "
    "`owner/name:config[:split]`"
)


def read_rows(spec: str, given: GivenRows = NO_ROWS) -> list[Row]:
    """All rows of the data set `spec`, in file order, each with the same columns (None if a row lacks it).

    `spec` is a name in `given`, `builtin:<name>`, `reasoning_gym:<name>?<configuration>`, a file (.jsonl: an
    object per line; .json: a list of objects, or as .jsonl; .parquet; .csv, see `_read_csv`), a file pattern
    (`data/part-*.jsonl`, read in the order of file names), either of these in a bucket, or
    `owner/name:config[:split]` on the Hub (needs the extra `hub`; the default split is `train`). If there is
    no column `answer`, the field `ground_truth` of a struct column `reward_model`, as
    in verl's data format, becomes that column. Raises ValueError for missing, empty or malformed data.
    """
    if spec in given:
        return _with_answer(_aligned(_checked_rows(spec, given[spec])))
    path = local_path(spec)
    files = data_files(spec)
    if files:
        return _aligned([row for file in files for row in read_rows(file)])
    if spec.startswith("builtin:"):
        rows = builtin_rows(spec.removeprefix("builtin:"))
    elif spec.startswith(REASONING_GYM):
        rows = gym_rows(spec)
    elif path.suffix in _READERS and is_bucket(spec):
        rows = _read_bucket(spec)
    elif path.suffix in _READERS:
        if not path.is_file():
            raise ValueError(f"data set {spec!r}: no such file (looked in {path.parent.absolute()})")
        try:
            rows = _READERS[path.suffix](path)
        except OSError as error:
            raise ValueError(_unreadable(path, error)) from error
    elif not path.exists() and (match := _HUB.fullmatch(spec)):
        rows = _read_hub(spec, match["path"], match["config"] or None, match["split"] or "train")
    else:
        raise ValueError(f"data set {spec!r} has none of the supported forms; give {_FORMS}")
    if not rows:
        raise ValueError(f"data set {spec!r} is empty: at least one row is needed")
    return _with_answer(_aligned(rows))


def _read_bucket(url: str) -> list[Row]:
    copy = local_copy(url)
    try:
        return _READERS[copy.suffix](copy)
    except ValueError as error:
        raise ValueError(str(error).replace(str(copy), url)) from error


def _checked_rows(name: str, given: Any) -> list[Row]:
    rows = _of_table(name, given)
    if not isinstance(rows, Collection) or isinstance(rows, str | bytes | Mapping) or not rows:
        splits = ", of one split" if isinstance(given, Mapping) else ""
        raise ValueError(
            f"the rows of {name!r} must be a non-empty list of dicts, a dict for each row, a "
            f"datasets.Dataset or a table as of pandas; they are {shown(given)}; give such rows{splits}"
        )
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping) or not all(isinstance(column, str) for column in row):
            raise ValueError(
                f"{name}, row {number}: a row must be a dict from names of columns to values; it is "
                f"{shown(row)}; correct the row or remove it"
            )
    return [dict(row) for row in rows]


def _of_table(name: str, rows: Any) -> Any:
    """The rows of a `datasets.Dataset`, or of a table that Arrow can read, as dicts; others as they are."""
    if hasattr(rows, "features") and hasattr(rows, "with_format") and hasattr(rows, "__len__"):
        return _of_dataset(rows.with_format(None))
    if not hasattr(rows, "__arrow_c_stream__"):
        return rows
    import pyarrow

    try:
        table = pyarrow.table(rows)
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise ValueError(
            f"the rows of {name!r} cannot be read as a table: {error!s:.300}; give a list of dicts"
        ) from error
    _check_names(table.column_names, f"the table {name!r}")
    return _as_written(table.to_pylist(), table.schema)


def data_files(spec: str) -> list[str]:
    """The files that match the pattern `spec`, sorted by name; empty if `spec` has no `*` in the file name.

    Raises ValueError if no file matches a pattern.
    """
    path = local_path(spec)
    if "*" not in path.name or spec.startswith(("builtin:", REASONING_GYM)):
        return []
    if is_bucket(spec):
        where = spec.rpartition("/")[0]
        files = [f"{where}/{name}" for name in entries(where, path.name)]
    else:
        where = str(path.parent.absolute())
        files = [str(file) for file in sorted(path.parent.glob(path.name))]
    if not files:
        raise ValueError(f"data set {spec!r} matches no file (looked in {where})")
    return files


def folder_of(spec: str) -> Path | None:
    """The folder of the files of a data set; None if it is no file on this machine."""
    path = local_path(spec)
    if is_bucket(spec):
        return None
    return path.parent if path.suffix in _READERS and (path.is_file() or "*" in path.name) else None


def _aligned(rows: list[Row]) -> list[Row]:
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def _with_answer(rows: list[Row]) -> list[Row]:
    structs = [struct if isinstance(struct := row.get("reward_model"), dict) else {} for row in rows]
    answers = [struct.get("ground_truth") for struct in structs]
    if "answer" in rows[0] or all(answer is None for answer in answers):
        return rows
    return [row | {"answer": answer} for row, answer in zip(rows, answers, strict=True)]


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open("rb") as file:
        # Of a line longer than MAX_LINE_BYTES, the beginning is read, which is longer too.
        for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
            where = f"{path}, line {number}"
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"{where}: a line must have at most {MAX_LINE_BYTES} bytes; shorten or remove it"
                )
            if (text := _text(line, where, "utf-8-sig" if number == 1 else "utf-8")).strip():
                rows.append(_checked_object(_parsed(text, where), where))
    return rows


def _read_json(path: Path) -> list[Row]:
    text = _text(path.read_bytes(), str(path), "utf-8-sig")
    # Many a .json file has an object per line; one in a single line is a file of one row.
    if text.lstrip().startswith("{") and ("\n" not in text.strip() or not _is_json(text)):
        return _read_jsonl(path)
    rows = _parsed(text, str(path)) if text.strip() else []
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of objects, got {type(rows).__name__}")
    return [_checked_object(row, f"{path}, item {number}") for number, row in enumerate(rows, start=1)]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _text(content: bytes, where: str, encoding: str) -> str:
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: expected UTF-8 text; {error}") from error


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> Row:
    _check_names((name for name, _ in pairs), "an object")
    return dict(pairs)


def _checked_object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow
    import pyarrow.parquet

    size = path.stat().st_size
    rows: list[Row] = []
    held = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_names(file.schema_arrow.names, str(path))
            groups = [file.metadata.row_group(group) for group in range(file.metadata.num_row_groups)]
            values = sum(group.column(at).num_values for group in groups for at in range(group.num_columns))
            _check_unpacked(path, "values", values, max(MANY_VALUES, size))
            # A few rows at a time: a small file can name one long text in millions of rows.
            for batch in file.iter_batches(BATCH_ROWS):
                some = _as_written(batch.to_pylist(), batch.schema)
                held += _num_bytes(some)
                _check_unpacked(path, "bytes of memory", held, max(MANY_BYTES, MOST_TIMES * size))
                rows += some
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(_unreadable(path, error)) from error
    return rows


def _as_written(rows: list[Row], schema: Any) -> list[Row]:
    """The rows with numbers of single and half precision as they were written: 0.1, not 0.10000000149."""
    short = [column for column in schema if "float" in str(column.type)]  # 64 bits are called double
    for row in rows if short else ():
        row |= {column.name: _shortest(row[column.name], column.type) for column in short}
    return rows


def _shortest(value: Any, kind: Any) -> Any:
    """`value` of the Arrow type `kind` with the shortest decimals that are stored as its numbers."""
    from pyarrow import types

    if isinstance(value, dict):
        return {name: _shortest(each, kind.field(name).type) for name, each in value.items()}
    if isinstance(value, list) and not types.is_map(kind):
        return [_shortest(each, kind.value_type) for each in value]
    for is_kind, number, exact in (
        (types.is_float32, np.float32, 2**24),
        (types.is_float16, np.float16, 2**11),
    ):
        # Whole numbers beyond `exact` have more digits than the shortest decimal.
        if isinstance(value, float) and is_kind(kind) and abs(value) < exact:
            return float(str(number(value)))
    return value


def _check_unpacked(path: Path, what: str, number: int, limit: int) -> None:
    if number > limit:
        raise ValueError(
            f"{path}: a Parquet file of its size may have at most {limit} {what}; this one has {number} or "
            "more, most of them repeated; use another file"
        )


def _num_bytes(value: Any) -> int:
    """About the number of bytes that a value takes in memory."""
    if isinstance(value, dict):
        return 250 + sum(map(_num_bytes, value.values()))
    if isinstance(value, list):
        return 50 + sum(map(_num_bytes, value))
    return 50 + (len(value) if isinstance(value, str | bytes) else 0)


def _read_csv(path: Path) -> list[Row]:
    """The rows of a table with a header: text, numbers in columns of numbers, None for an empty cell.

    A column has numbers if each is written as Python writes it, so that no text changes: 0.5 and 12, but not
    0.50, 007, 1e3 or 12:30, and it is none of TEXTS. An empty cell in quotation marks is a text.
    """
    import pyarrow
    import pyarrow.csv

    if not path.stat().st_size:
        return []
    parse = pyarrow.csv.ParseOptions(newlines_in_values=True)
    # One thread, so that errors name the row; one block, as pyarrow refuses rows that begin in one and end in
    # the next but one.
    block = min(max(path.stat().st_size, 1), 2**31 - 1)
    read = pyarrow.csv.ReadOptions(use_threads=False, block_size=block)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            names = next(filter(None, csv.reader(file)), [])  # without empty lines, as pyarrow does
        convert = pyarrow.csv.ConvertOptions(
            column_types=dict.fromkeys(names, pyarrow.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        table = pyarrow.csv.read_csv(path, read_options=read, parse_options=parse, convert_options=convert)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(_unreadable(path, error)) from error
    _check_names(table.column_names, str(path))
    cells = {name: table[name].to_pylist() for name in table.column_names}
    columns = {name: each if name in TEXTS else _numbers_or_texts(each) for name, each in cells.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _numbers_or_texts(texts: list[str | None]) -> list[Any]:
    try:
        return [None if text is None else _number(text) for text in texts]
    except ValueError:
        return list(texts)


def _number(text: str) -> int | float:
    """The number that Python writes as `text`; raises ValueError if there is none."""
    number = int(text) if re.fullmatch("-?[0-9]+", text) else float(text)
    if str(number) != text or not math.isfinite(number):
        raise ValueError
    return number


def _unreadable(path: Path, error: Exception) -> str:
    return f"{path}: cannot be read as {path.suffix}: {error!s:.300}"


def _check_names(names: Iterable[str], where: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{where} has two columns called {shown(twice[0])}; rename one")


def _read_hub(spec: str, path: str, config: str | None, split: str) -> list[Row]:
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"data set {spec!r} is on the Hub, which needs `datasets`: {installation('hub')}, or "
            "give a local file"
        ) from error
    if int(datasets.__version__.split(".")[0]) < 4:
        raise ValueError(
            f"data sets on the Hub need `datasets` 4.0 or later, which runs no code from a repository; "
            f"{datasets.__version__} is installed; {installation('hub')}"
        )
    unreachable = ""
    try:
        with hub_without_retries() as unreachable:
            return _of_dataset(datasets.load_dataset(path, config, split=split))
    except Exception as error:  # whatever the library, the file system or the network raises
        raise ValueError(
            f"data set {spec!r} cannot be loaded from the Hub (config {config!r}, split {split!r}): "
            f"{unreachable and f'{unreachable}; '}{type(error).__name__}: {error!s:.500}. Check the name and "
            "the network, or give a local file"
        ) from error


def _of_dataset(found: Any) -> list[Row]:
    """The rows of a `datasets.Dataset`, with pictures as they are encoded."""
    features: Any = getattr(found, "features", None)
    encoded = _encoded(features)
    if encoded != features:
        found = found.cast(type(features)(encoded))
    rows = list(found)
    return _as_written(rows, found.features.arrow_schema) if hasattr(found, "features") else rows


def _encoded(feature: Any) -> Any:
    """A feature of a `datasets.Dataset` whose pictures stay encoded: decoded, they would be encoded again."""
    if isinstance(feature, dict):
        return {name: _encoded(each) for name, each in feature.items()}
    if type(feature).__name__ == "Image":
        return type(feature)(decode=False)
    if type(feature).__name__ in ("List", "LargeList", "Sequence") and hasattr(feature, "feature"):
        return replace(feature, feature=_encoded(feature.feature))
    return feature


_READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".csv": _read_csv,
}
