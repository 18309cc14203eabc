"""JSON schemas at random, of the kinds that llguidance takes and that random words come to the end of."""

import numpy as np

WORDS = ("name", "age", "tags", "where", "on", "more", "ü", "a b")


def random_schema(seed, depth=2):
    """A schema with properties, lists, alternatives, limits and references."""
    rng = np.random.default_rng(seed)
    schema = _object(rng, depth)
    if rng.random() < 0.3:
        schema["$defs"] = {"own": _value(rng, 0)}
        schema["properties"]["of_own"] = {"$ref": "#/$defs/own"}
    return schema


def _object(rng, depth):
    names = rng.choice(WORDS, size=rng.integers(1, 4), replace=False).tolist()
    schema = {"type": "object", "properties": {name: _value(rng, depth - 1) for name in names}}
    schema["required"] = [name for name in names if rng.random() < 0.7]
    if rng.random() < 0.8:  # else any further ones, which random words rarely end
        schema["additionalProperties"] = False
    return schema


def _value(rng, depth):
    low, high = int(rng.integers(-20, 5)), int(rng.integers(5, 200))
    simple = [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": low, "maximum": high},
        {"type": "number", "minimum": low, "exclusiveMaximum": high},
        {"type": "string", "maxLength": int(rng.integers(0, 9))},
        {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]$"},
        {"enum": ["one", 2, None, [True]]},
        {"const": "the only one"},
        {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "string", "enum": ["x", 'q"']}]},
        {"type": ["boolean", "null"]},
        {"type": "string", "format": "date"},
    ]
    kind = rng.integers(len(simple) + 3 * (depth > 0))
    if kind < len(simple):
        return simple[kind]
    if kind == len(simple):
        return _object(rng, depth)
    items = {"type": "array", "items": _value(rng, depth - 1), "maxItems": 3}
    return items if kind == len(simple) + 1 else {**items, "minItems": 1}
