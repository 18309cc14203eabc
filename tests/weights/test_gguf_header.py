"""The header of a GGUF file: metadata of every kind, the tensor table, damage."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from object_store import buckets_in_memory

from quatrain.weights.gguf_header import read_header


def write_small(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.count", 7)
    writer.add_int32("a.negative", -7)
    writer.add_uint64("a.large", 2**40)
    writer.add_float32("a.half", 0.5)
    writer.add_bool("a.flag", True)
    writer.add_string("a.text", "naïve")
    writer.add_array("a.words", ["x", "", "yz"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("first", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("second", np.arange(4, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors(tmp_path: Path) -> None:
    path = write_small(tmp_path / "small.gguf")
    header = read_header(path)
    assert header.metadata == {
        "general.architecture": "llama",
        "a.count": 7,
        "a.negative": -7,
        "a.large": 2**40,
        "a.half": 0.5,
        "a.flag": True,
        "a.text": "naïve",
        "a.words": ["x", "", "yz"],
        "a.numbers": [1, 2, 3],
    }
    first, second = header.tensors
    assert (first.name, first.shape, first.type_id) == ("first", (2, 3), 0)
    assert (second.name, second.shape, second.type_id) == ("second", (4,), 1)
    assert first.path == second.path == path
    raw = path.read_bytes()
    assert np.frombuffer(raw, np.float32, 6, first.offset).tolist() == [0, 1, 2, 3, 4, 5]
    assert np.frombuffer(raw, np.float16, 4, second.offset).tolist() == [0, 1, 2, 3]


def test_a_file_cut_anywhere_in_its_header_is_an_error(tmp_path: Path) -> None:
    path = write_small(tmp_path / "small.gguf")
    raw = path.read_bytes()
    table_end = raw.index(b"second") + len(b"second") + 4 + 8 + 4 + 8
    cut = tmp_path / "cut.gguf"
    for size in range(4, table_end):
        cut.write_bytes(raw[:size])
        with pytest.raises(ValueError, match=r"truncated: fetch it again"):
            read_header(cut)
    cut.write_bytes(raw[:table_end])
    assert len(read_header(cut).tensors) == 2


def test_what_is_not_gguf_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    with pytest.raises(ValueError, match=r"there is no GGUF file"):
        read_header(path)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"must start with the bytes b'GGUF'"):
        read_header(path)
    path.write_bytes(b"PK\x03\x04 a zip file, in fact")
    with pytest.raises(ValueError, match=r"starts with b'PK"):
        read_header(path)


def test_other_versions_and_damage_are_errors(tmp_path: Path) -> None:
    path = write_small(tmp_path / "small.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw[:4] + (1).to_bytes(4, "little") + raw[8:])
    with pytest.raises(ValueError, match=r"has version 1"):
        read_header(path)
    kind = raw.index(b"a.count") + len(b"a.count")
    path.write_bytes(raw[:kind] + (99).to_bytes(4, "little") + raw[kind + 4 :])
    with pytest.raises(ValueError, match=r"value types must be 0 to 12.*has 99"):
        read_header(path)
    text = raw.index("naïve".encode())
    path.write_bytes(raw[:text] + b"\xff" + raw[text + 1 :])
    with pytest.raises(ValueError, match=r"UTF-8"):
        read_header(path)


def write_split(path: Path) -> list[Path]:
    """A model of 3 tensors in 3 files, as llama.cpp's tools write it."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=1)
    writer.add_uint32("a.count", 7)
    for i in range(3):
        writer.add_tensor(f"t{i}", np.full(4, i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-*.gguf"))


def test_a_split_model_is_read_like_one_file(tmp_path: Path) -> None:
    parts = write_split(tmp_path / "m.gguf")
    assert [part.name for part in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    header = read_header(parts[0])
    assert header.metadata["a.count"] == 7
    assert [(t.name, t.path) for t in header.tensors] == [(f"t{i}", parts[i]) for i in range(3)]
    for i, tensor in enumerate(header.tensors):
        values = np.frombuffer(tensor.path.read_bytes(), np.float32, 4, tensor.offset)
        assert values.tolist() == [i] * 4


def test_parts_of_a_split_model_that_are_missing_or_of_another_are_named(tmp_path: Path) -> None:
    parts = write_split(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=r"must be given by the first, .*-00001-of-00003.gguf; .* is part 2"):
        read_header(parts[1])
    whole = parts[2].read_bytes()
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(
        ValueError, match=r"-00003-of-00003.gguf must be part 3 of 3; it is part 2 of 3; fetch it again"
    ):
        read_header(parts[0])
    parts[2].write_bytes(whole.replace(b"t2", b"t1"))
    with pytest.raises(ValueError, match=r"first of 3 parts of 3 tensors; they have 2; fetch all parts"):
        read_header(parts[0])
    parts[2].unlink()
    with pytest.raises(ValueError, match=r"first of 3 parts.* missing: m-00003-of-00003.gguf; fetch"):
        read_header(parts[0])
    parts[2].write_bytes(whole)
    renamed = parts[0].rename(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"is called NAME-00001-of-00003.gguf; .*model.gguf is part 1"):
        read_header(renamed)


def test_a_missing_file_that_a_configuration_names_comes_with_its_download(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no GGUF file .*; `make smollm2` .* downloads it"):
        read_header(tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf")
    with pytest.raises(ValueError, match=r"there is no GGUF file .*other.gguf; check the path"):
        read_header(tmp_path / "other.gguf")


def test_a_file_in_a_bucket_is_read_with_the_other_parts_of_its_model(tmp_path: Path) -> None:
    """Catches the first part of a split model that is copied alone, and files of another model beside it."""
    with buckets_in_memory(tmp_path / "cache") as objects:
        for file in (write_small(tmp_path / "small.gguf"), *write_split(tmp_path / "m.gguf")):
            objects.put(f"gs://models/{file.name}", file.read_bytes())
        assert read_header("gs://models/small.gguf").metadata["a.count"] == 7
        header = read_header("gs://models/m-00001-of-00003.gguf")
        assert [tensor.name for tensor in header.tensors] == ["t0", "t1", "t2"]
        assert sorted(file.name for file in header.path.parent.iterdir()) == sorted(
            f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)
        )
