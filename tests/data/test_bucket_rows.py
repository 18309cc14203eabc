"""Data sets in buckets, in memory: single files, patterns, and what is wrong in them."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest
from object_store import buckets_in_memory

from quatrain.config.schema import DataConfig
from quatrain.data.prompts import with_pictures
from quatrain.data.rows import data_files, folder_of, read_rows


@pytest.fixture
def objects(tmp_path):
    with buckets_in_memory(tmp_path / "cache") as made:
        yield made


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_files_of_each_form_are_read(objects, tmp_path):
    """Catches a form that is read from local files alone."""
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    objects.put("gs://data/rows.jsonl", lines(*rows))
    objects.put("gs://data/rows.json", json.dumps(rows).encode())
    objects.put("s3://data/rows.csv", b"prompt,answer\na,1\nb,2\n")
    objects.put("s3://data/rows.parquet", (tmp_path / "rows.parquet").read_bytes())
    for url in (
        "gs://data/rows.jsonl",
        "gs://data/rows.json",
        "s3://data/rows.csv",
        "s3://data/rows.parquet",
    ):
        assert read_rows(url) == rows


def test_a_pattern_is_read_in_the_order_of_names(objects):
    """Catches files of a subfolder, and names without their bucket, of which processes read a share."""
    for name, value in (("part-2", 2), ("part-1", 1), ("part-1/deeper", 3), ("other", 4)):
        objects.put(f"s3://data/set/{name}.jsonl", lines({"prompt": value}))
    names = ["s3://data/set/part-1.jsonl", "s3://data/set/part-2.jsonl"]
    assert data_files("s3://data/set/part-*.jsonl") == names
    assert [row["prompt"] for row in read_rows("s3://data/set/part-*.jsonl")] == [1, 2]
    with pytest.raises(
        ValueError, match=r"'s3://data/gone-\*.jsonl' matches no file \(looked in s3://data\)"
    ):
        read_rows("s3://data/gone-*.jsonl")


def test_errors_name_the_object_and_not_its_copy(objects, tmp_path):
    """Catches a message about a file that the user has never seen."""
    objects.put("s3://data/rows.jsonl", b'{"prompt": "a"}\n{')
    with pytest.raises(ValueError, match=r"^s3://data/rows.jsonl, line 2: not valid JSON"):
        read_rows("s3://data/rows.jsonl")
    with pytest.raises(ValueError, match=r"has none of the supported forms.*each also in a bucket"):
        read_rows("s3://data/rows")


def test_pictures_beside_the_rows_of_a_bucket_are_refused(objects):
    """Catches paths of pictures that are looked for in the folder of the copy, or in a folder `s3:`."""
    assert folder_of("s3://data/rows.jsonl") is None
    assert folder_of("s3://data/part-*.jsonl") is None
    row = {"images": ["a.png"]}
    with pytest.raises(ValueError, match=r"s3://data/rows.jsonl, row 1: .*data\.image_root"):
        with_pictures("s3://data/rows.jsonl", {1: row}, DataConfig(), True, lambda row, number: row)
