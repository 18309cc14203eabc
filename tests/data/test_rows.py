import json
import sys
import types

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

from quatrain.data.rows import read_rows

ROWS = [{"prompt": "What is 3+4?\nThink.", "answer": 7}, {"prompt": 'Say "1,2"', "answer": 12}]


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_all_file_formats_read_alike(tmp_path):
    jsonl = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, ROWS)) + "\n\n")
    array = write(tmp_path / "a.json", json.dumps(ROWS))
    lines = write(tmp_path / "lines.json", "\ufeff" + "\n".join(map(json.dumps, ROWS)) + "\n\n")
    assert read_rows(write(tmp_path / "one.json", json.dumps(ROWS[0]))) == ROWS[:1]
    table = write(tmp_path / "a.csv", 'prompt,answer\n"What is 3+4?\nThink.",7\n"Say ""1,2""",12\n')
    pa.parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for spec in (jsonl, array, lines, table, str(tmp_path / "a.parquet")):
        assert read_rows(spec) == ROWS


def test_rows_have_the_same_columns_and_line_separators_stay_inside_strings(tmp_path):
    text = '\ufeff{"prompt": "a\u2028b"}\r\n  \n{"prompt": "c", "level": 1}'
    assert read_rows(write(tmp_path / "a.jsonl", text)) == [
        {"prompt": "a\u2028b", "level": None},
        {"prompt": "c", "level": 1},
    ]


def test_verl_layout(tmp_path):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "3+4?"}],
        "reward_model": {"ground_truth": "7", "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }
    pa.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert read_rows(str(tmp_path / "a.parquet")) == [row | {"answer": "7"}]
    pa.parquet.write_table(pa.Table.from_pylist([row | {"answer": "8"}]), tmp_path / "b.parquet")
    assert read_rows(str(tmp_path / "b.parquet"))[0]["answer"] == "8"


def test_rows_of_a_program_read_like_those_of_a_file(tmp_path):
    rows = [{"prompt": "a", "reward_model": {"ground_truth": "7"}}, {"prompt": "b", "level": 1}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    kept = json.dumps(rows)
    assert read_rows("mine", {"mine": rows}) == read_rows(path)
    assert read_rows(path, {path: tuple(rows[1:])}) == rows[1:]
    assert json.dumps(rows) == kept


def test_tables_of_a_program_read_like_lists():
    messages = [{"role": "user", "content": "3+4?"}]
    rows = [
        {"prompt": messages, "answer": "7", "rate": 0.5},
        {"prompt": messages, "answer": None, "rate": 0.25},
    ]
    frame = pd.DataFrame(rows)
    for table in (
        datasets.Dataset.from_list(rows),
        datasets.Dataset.from_list([rows[1], rows[0]]).select([1, 0]).with_format("numpy"),
        frame,
        frame[frame.rate > 0],
        pa.Table.from_pylist(rows),
    ):
        assert read_rows("mine", {"mine": table}) == rows
    short = pa.table({"prompt": ["a"], "rate": pa.array([0.1], pa.float32())})
    assert read_rows("mine", {"mine": short}) == [{"prompt": "a", "rate": 0.1}]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (datasets.DatasetDict(train=datasets.Dataset.from_list([{"a": 1}])), "give such rows, of one split"),
        (datasets.Dataset.from_list([{"a": 1}]).to_iterable_dataset(), "a datasets.Dataset or a table as of"),
        (datasets.Dataset.from_list([]), "must be a non-empty list of dicts"),
        (pd.DataFrame({"prompt": []}), "must be a non-empty list of dicts"),
        (
            pd.DataFrame({"prompt": ["a", ["b"]]}),
            "the rows of 'mine' cannot be read as a table: .*; give a list",
        ),
        (pd.DataFrame([["a", "b"]], columns=["x", "x"]), "two columns|cannot be read as a table: Dupl"),
        (pd.Series(["a"]), "cannot be read as a table"),
    ],
)
def test_tables_that_are_none(table, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        read_rows("mine", {"mine": table})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"the rows of 'mine' must be a non-empty list of dicts, a dict for each row, .*; they are \[\]"),
        (iter([{"prompt": "a"}]), "must be a non-empty list of dicts.*iterator"),
        ({"prompt": ["a"]}, "must be a non-empty list of dicts"),
        ("rows.jsonl", "must be a non-empty list of dicts"),
        (
            [{"prompt": "a"}, "b"],
            "mine, row 2: a row must be a dict from names of columns to values; it is 'b'",
        ),
        ([{1: "a"}], "mine, row 1: a row must be a dict from names of columns"),
    ],
)
def test_rows_of_a_program_that_are_none(rows, message):
    with pytest.raises(ValueError, match=message):
        read_rows("mine", {"mine": rows})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", "\n \n", "is empty"),
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt": ', "line 3: not valid JSON"),
        ("a.jsonl", '{"prompt": "a"', "line 1: not valid JSON: Expecting ',' delimiter at character 15"),
        ("a.jsonl", '{"prompt": "a"}\n["b"]', "line 2: expected a JSON object, got list"),
        (
            "a.jsonl",
            '{"prompt": "a", "prompt": "b"}',
            "line 1: not valid JSON: an object has two columns called 'prompt'",
        ),
        ("a.jsonl", "[" * 100_000, "line 1: not valid JSON"),
        ("a.json", "", "is empty"),
        ("a.json", "[]", "is empty"),
        ("a.json", '{\n"data": [{"prompt": "a"}]\n}', "expected a list of objects, got dict"),
        ("a.json", '{"prompt": "a"}\n{"prompt": ', "line 2: not valid JSON"),
        ("a.json", '[{"prompt": "a"}, 3]', "item 2: expected a JSON object, got int"),
        ("a.json", "[{", "not valid JSON"),
        ("a.csv", "", "is empty"),
        ("a.csv", "prompt,answer\n", "is empty"),
        ("a.csv", "prompt,answer\na,1\nb\n", "cannot be read as .csv.*Row #3"),
        ("a.csv", "prompt,prompt\na,b\n", "two columns called 'prompt'"),
        ("a.parquet", "", "cannot be read as .parquet"),
        ("a.parquet", "not parquet at all", "cannot be read as .parquet"),
        ("a.txt", "hello", "has none of the supported forms"),
    ],
)
def test_bad_files(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=rf"(?s){name}.*{message}"):
        read_rows(write(tmp_path / name, text))


def column(tmp_path, cells):
    table = "".join(f"q,{cell}\n" for cell in cells)
    return [row["answer"] for row in read_rows(write(tmp_path / "a.csv", "prompt,answer\n" + table))]


def test_prompts_and_answers_of_a_csv_file_are_texts(tmp_path):
    """The fault: answers that are all numbers, as of arithmetic, could not be given in a .csv file: they were
    read as numbers, which were refused row by row as no texts."""
    names = "prompt,completion,text,chosen,rejected,answer"
    [row] = read_rows(write(tmp_path / "a.csv", f"{names}\n3,7,1,2,,0.5\n"))
    assert [row[name] for name in names.split(",")] == ["3", "7", "1", "2", None, 0.5]


def test_a_cell_of_a_csv_file_may_be_long(tmp_path):
    """The fault: a row of some MiB, as one with a picture, was refused with `try to increase block size`,
    which no setting does."""
    long = '"' + "one line\n" * 300_000 + '"'
    assert column(tmp_path, ["a", long, "c"]) == ["a", long[1:-1], "c"]


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["12:30", "11:45"], ["12:30", "11:45"]),
        (["2021-01-02", "2021-01-02 10:00"], ["2021-01-02", "2021-01-02 10:00"]),
        (["12345678901234567891", "7"], [12345678901234567891, 7]),
        (["007", "12"], ["007", "12"]),
        (["0.50", "0.5"], ["0.50", "0.5"]),
        (["1e3", "2"], ["1e3", "2"]),
        (["0.5", "12", "-3"], [0.5, 12, -3]),
        (["true", "False"], ["true", "False"]),
        (["nan", "1"], ["nan", "1"]),
        (["NA", "null"], ["NA", "null"]),
        (["5", ""], [5, None]),
        (["five", '""', ""], ["five", "", None]),
        (["+5", "1_000"], ["+5", "1_000"]),
    ],
)
def test_a_cell_of_a_csv_file_is_a_number_only_if_it_reads_the_same(tmp_path, cells, values):
    got = column(tmp_path, cells)
    assert got == values
    assert list(map(type, got)) == list(map(type, values))


def test_empty_lines_before_the_header_and_quoted_names(tmp_path):
    path = write(tmp_path / "a.csv", '\ufeff\n\n"prompt","the\nanswer"\nq,12:30\n')
    assert read_rows(path) == [{"prompt": "q", "the\nanswer": "12:30"}]


def test_numbers_of_less_than_64_bits_are_the_decimals_that_they_were_written_as(tmp_path):
    single = pa.float32()
    struct = pa.struct([("ground_truth", single), ("style", pa.string())])
    table = pa.table(
        {
            "answer": pa.array([0.1, 2.68, None], single),
            "half": pa.array([0.1, 2.5, 2049], pa.float16()),
            "list": pa.array([[0.1, 2.68], [], None], pa.list_(single)),
            "reward_model": pa.array([{"ground_truth": 0.1, "style": "rule"}, None, None], struct),
            "large": pa.array([2.0**27 + 16, 1e20, float("inf")], single),
            "double": [0.1, 0.30000000000000004, 2.5],
        }
    )
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    rows = read_rows(str(tmp_path / "a.parquet"))
    assert [row["answer"] for row in rows] == [0.1, 2.68, None]
    assert [row["half"] for row in rows] == [0.1, 2.5, 2048.0]
    assert [row["list"] for row in rows] == [[0.1, 2.68], [], None]
    assert rows[0]["reward_model"] == {"ground_truth": 0.1, "style": "rule"}
    assert [row["large"] for row in rows] == [2.0**27 + 16, 100000002004087734272.0, float("inf")]
    assert [row["double"] for row in rows] == [0.1, 0.30000000000000004, 2.5]


def test_numbers_of_less_than_64_bits_from_the_hub(monkeypatch):
    schema = pa.schema([("answer", pa.float32())])
    found = type("Dataset", (list,), {"features": types.SimpleNamespace(arrow_schema=schema)})
    fake_datasets(monkeypatch, lambda *_, **__: found([{"answer": 0.10000000149011612}]))
    assert read_rows("a/b") == [{"answer": 0.1}]


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(ValueError, match="expected UTF-8"):
        read_rows(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no/such.jsonl", "no such file"),
        ("builtin:poetry", "there are arithmetic"),
        ("just words", "has none of the supported forms"),
        (".", "has none of the supported forms"),
    ],
)
def test_what_is_no_data_set(spec, message):
    with pytest.raises(ValueError, match=message):
        read_rows(spec)


def test_the_hub_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[hub\]'"):
        read_rows("openai/gsm8k:main")


def fake_datasets(monkeypatch, load_dataset, version="4.0.0"):
    monkeypatch.setitem(
        sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset, __version__=version)
    )


@pytest.mark.parametrize(
    ("spec", "called"),
    [
        ("openai/gsm8k", ("openai/gsm8k", None, "train")),
        ("openai/gsm8k:main", ("openai/gsm8k", "main", "train")),
        ("openai/gsm8k:main:test", ("openai/gsm8k", "main", "test")),
        ("openai/gsm8k:main:train[:10%]", ("openai/gsm8k", "main", "train[:10%]")),
        ("a/b::test", ("a/b", None, "test")),
    ],
)
def test_the_hub(monkeypatch, spec, called):
    fake_datasets(
        monkeypatch, lambda path, config, split: [{"prompt": f"{path}", "args": (path, config, split)}]
    )
    assert read_rows(spec)[0]["args"] == called


def test_a_library_that_runs_scripts_of_the_hub_is_refused(monkeypatch):
    fake_datasets(monkeypatch, lambda *_, **__: pytest.fail("a data set was asked for"), version="3.6.0")
    with pytest.raises(ValueError, match=r"`datasets` 4.0 or later.*3\.6\.0 is installed.*pip install"):
        read_rows("openai/gsm8k:main")


def test_the_hub_without_a_network(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ConnectionError("no route")

    fake_datasets(monkeypatch, load_dataset)
    with pytest.raises(ValueError, match=r"ConnectionError: no route.*or give a local file"):
        read_rows("openai/gsm8k:main")
