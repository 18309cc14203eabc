"""The pages that `scripts/document.py` makes from the code."""

import importlib.util
import re
from pathlib import Path

import pytest

from quatrain.config.layers import valid_keys

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def document():
    spec = importlib.util.spec_from_file_location("document", REPOSITORY / "scripts" / "document.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["config", "metrics"])
def test_the_pages_are_up_to_date(document, name):
    written = (REPOSITORY / "docs" / f"{name}.md").read_text(encoding="utf-8")
    assert written == getattr(document, f"{name}_page")(), "run `make docs`"


def test_every_key_has_a_row(document):
    rows = [line for line in document.config_page().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == valid_keys()


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ({"type": "integer", "minimum": 1}, "integer ≥ 1"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, "number > 0, ≤ 1"),
        ({"anyOf": [{"enum": ["a", "b"], "type": "string"}, {"type": "null"}]}, "`a`, `b` or null"),
        ({"const": "a", "type": "string"}, "`a`"),
        ({"enum": ["auto", True, False]}, "`auto`, `true`, `false`"),
        ({"type": "integer", "maximum": 2**32 - 1}, "integer ≤ 4294967295"),
        ({"type": "array", "items": {"type": "string"}}, "list of text"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "mapping of name to number"),
        ({"type": "boolean"}, "true or false"),
    ],
)
def test_types_in_words(document, field, text):
    assert document.type_text(field) == text


def test_both_pages_are_written(document, tmp_path, monkeypatch):
    monkeypatch.setattr(document, "DOCS", tmp_path)
    document.main()
    assert (tmp_path / "config.md").read_text(encoding="utf-8") == document.config_page()
    assert (tmp_path / "metrics.md").read_text(encoding="utf-8") == document.metrics_page()


def test_the_page_for_other_libraries_names_keys_that_exist():
    page = (REPOSITORY / "docs" / "coming_from.md").read_text(encoding="utf-8")
    keys, header = set(), ""
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells:
            header = ""
        header = header or (cells[0] if cells else "")
        if header.startswith("quatrain"):
            keys |= set(re.findall(r"`([a-z_]+\.[a-z_0-9.]+)[`:]", cells[0] if line != header else ""))
    files = {key for key in keys if key.endswith(".py")}
    sections = {key.split(".")[0] for key in valid_keys()}
    assert len(keys) > 50
    assert {key for key in keys - files if key.split(".")[0] in sections} <= {*valid_keys()}
    assert {key.split(".")[0] for key in keys - files} <= sections
