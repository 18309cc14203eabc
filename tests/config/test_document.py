from pathlib import Path

import pytest

from quatrain.config.document import page, type_text, write
from quatrain.config.errors import ConfigError
from quatrain.config.layers import valid_keys

REPOSITORY = Path(__file__).parents[2]


def test_the_page_is_up_to_date():
    written = (REPOSITORY / "docs" / "config.md").read_text(encoding="utf-8")
    assert written == page(), "run `python -m quatrain.config.document` in the repository's root"


def test_every_key_has_a_row():
    rows = [line for line in page().splitlines() if line.startswith("| `")]
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
def test_types_in_words(field, text):
    assert type_text(field) == text


def test_it_is_written_where_asked(tmp_path):
    write(tmp_path / "config.md")
    assert (tmp_path / "config.md").read_text(encoding="utf-8") == page()
    with pytest.raises(ConfigError, match="repository's root"):
        write(tmp_path / "docs" / "config.md")
