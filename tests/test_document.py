"""The pages that `scripts/document.py` makes from the code."""

import importlib.util
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
