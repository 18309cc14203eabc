"""Valid inputs of every kind that quatrain reads, and strategies that damage them.

Most of a damaged input is still valid, so that the damage gets past the first check. `NAMED` holds inputs
that once ended in a traceback, took minutes, or took all memory.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fuzz_worker import Case
from goldens import read_golden
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.tokenizer import save_tokenizer

ROOT = Path(__file__).parents[2]
CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
FAMILIES = ("llama_rope_llama3", "llama_rope_linear", "qwen2_sliding", "qwen3", "gemma2", "gemma3_text")

HOSTILE_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    7,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    10**9,
    2**31,
    2**32 - 1,
    2**63,
    -(2**63),
    10**30,
    "",
    "x",
    "32",
    "\x00",
    "\ud800",
    "../../x",
    "a" * 3000,
    [],
    [1, 2],
    ["a", None],
    [[[[]]]],
    {},
    {"a": {"b": 1}},
    {"": None},
)


def as_json(value: Any) -> bytes:
    """`value` as JSON, with NaN and infinity as Python writes them, and lone surrogates escaped."""
    return json.dumps(value).encode()


def paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in a JSON value, of at most a few entries of each list."""
    yield prefix
    if isinstance(value, dict):
        for key in value:
            yield from paths(value[key], (*prefix, key))
    if isinstance(value, list):
        for at in range(min(len(value), 3)):
            yield from paths(value[at], (*prefix, at))


def changed(value: Any, path: tuple[Any, ...], new: Any = ..., *, delete: bool = False) -> Any:
    """A copy of `value` with `new` at `path`, or without what is there."""
    if not path:
        return new
    value = copy.deepcopy(value)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    if delete:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return value


@st.composite
def damaged_json(draw: st.DrawFn, value: Any) -> Any:
    """`value` with one to three entries replaced, retyped or removed."""
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(paths(value))))
        if path and draw(st.integers(0, 4)) == 0:
            value = changed(value, path, delete=True)
        else:
            value = changed(value, path, draw(st.sampled_from(HOSTILE_VALUES)))
    return value


@st.composite
def damaged_bytes(draw: st.DrawFn, content: bytes, head: int | None = None) -> bytes:
    """`content` with bits flipped, numbers replaced, a piece cut out, or its end missing.

    The damage is in the first `head` bytes.
    """
    damaged = bytearray(content)
    size = min(len(content), head or len(content))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(size - 9, 0)))
        match draw(st.sampled_from(("flip", "number", "cut", "end", "insert"))):
            case "flip":
                damaged[at : at + 1] = bytes(b ^ 1 << draw(st.integers(0, 7)) for b in damaged[at : at + 1])
            case "number":
                number = draw(st.sampled_from((0, 1, 2**31, 2**32 - 1, 2**62, 2**64 - 1)))
                width = draw(st.sampled_from((1, 4, 8)))
                damaged[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, "little")
            case "cut":
                del damaged[at : at + draw(st.integers(1, 8))]
            case "end":
                del damaged[at:]
            case "insert":
                damaged[at:at] = draw(st.binary(min_size=1, max_size=8))
    return bytes(damaged)


# Model folders ------------------------------------------------------------------------------------------


@functools.cache
def model_config(family: str) -> dict[str, Any]:
    """A valid config.json."""
    return read_golden(family).config


GENERATION_CONFIG = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "temperature": 0.7}


def architecture_case(config: Any, generation: Any = GENERATION_CONFIG) -> Case:
    """A folder with config.json and generation_config.json."""
    return Case("architecture", {CONFIG: as_json(config), GENERATION: as_json(generation)})


@st.composite
def architectures(draw: st.DrawFn) -> Case:
    """Damaged config.json, sometimes that of a classifier, or generation_config.json."""
    config = dict(model_config(draw(st.sampled_from(FAMILIES))))
    if draw(st.integers(0, 4)) == 0:
        config |= {
            "architectures": ["LlamaForSequenceClassification"],
            "id2label": {"0": "x"},
            "num_labels": 1,
        }
    if draw(st.integers(0, 4)) == 0:
        config = config | {"rope_theta": 1e4, "rope_scaling": config.pop("rope_parameters")}
    if draw(st.integers(0, 9)) == 0:
        content = draw(damaged_bytes(as_json(config)))
        return Case("architecture", {CONFIG: content, GENERATION: as_json(GENERATION_CONFIG)})
    if draw(st.integers(0, 4)) == 0:
        return architecture_case(config, draw(damaged_json(GENERATION_CONFIG)))
    return architecture_case(draw(damaged_json(config)))


@functools.cache
def safetensors_file() -> bytes:
    """The weights of the smallest llama of the golden files."""
    return save(read_golden("llama_rope_linear").weights(), metadata={"format": "pt"})


def index() -> dict[str, Any]:
    """An index that names one file for all tensors."""
    names = read_golden("llama_rope_linear").shapes
    return {"metadata": {"total_size": 71296}, "weight_map": dict.fromkeys(names, "model-1.safetensors")}


def model_case(config: Any, index: Any, weights: bytes | None = None) -> Case:
    """A model folder with an index and one file of weights."""
    weights = safetensors_file() if weights is None else weights
    return Case("model", {CONFIG: as_json(config), INDEX: as_json(index), "model-1.safetensors": weights})


@st.composite
def models(draw: st.DrawFn) -> Case:
    """A damaged config.json, index or header of a safetensors file, beside weights that are whole."""
    config = model_config("llama_rope_linear")
    match draw(st.sampled_from(("config", "index", "index", "weights", "weights"))):
        case "config":
            return model_case(draw(damaged_json(config)), index())
        case "index":
            return model_case(config, draw(damaged_json(index())))
    (size,) = struct.unpack("<Q", safetensors_file()[:8])
    return model_case(config, index(), draw(damaged_bytes(safetensors_file(), 8 + size)))


# Tokenizers ---------------------------------------------------------------------------------------------


@functools.cache
def tokenizer_files() -> dict[str, bytes]:
    """A tokenizer folder as transformers saves it."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(builtin_tokenizer(), folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def tokenizer_case(**changes: bytes | None) -> Case:
    """The tokenizer folder with files changed (None: removed); `__` in a name stands for a dot."""
    files = dict(tokenizer_files())
    for name, content in changes.items():
        name = name.replace("__", ".")
        files.pop(name, None)
        if content is not None:
            files[name] = content
    return Case("tokenizer", files)


TEMPLATES = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a' * 10**8 }}",
    "{{ 'a' * 10**6 }}",
    "{{ 'a'.center(10**11) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ 10 ** 10 ** 8 }}",
    "{{ lipsum(n=10**8) }}",
    "{{ messages[0].x.y }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{% for m in messages %}{{ m['role'] + m }}{% endfor %}",
    "{{ raise_exception('x' * 100000) }}",
    "{% set ns = namespace(a='a') %}{% for i in range(64) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include 'x' %}",
    "{% for m in messages %}",
    "{{ 1 / 0 }}",
    "{{ range(10**9) | list }}",
    "{{ none.x() }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ '\\ud800' }}",
    "{% generation %}x{% endgeneration %}",
    "{% break %}",
    "{{ strftime_now('%' * 100000) }}",
)
"""Chat templates that take all time or memory, end in an error, or write nothing."""


@st.composite
def tokenizers(draw: st.DrawFn) -> Case:
    """A damaged tokenizer.json, tokenizer_config.json or chat template."""
    files = tokenizer_files()
    match draw(st.sampled_from(("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "template"))):
        case "template":
            template = draw(damaged_bytes(files["chat_template.jinja"]))
            return tokenizer_case(chat_template__jinja=template)
        case "tokenizer.json" as name if draw(st.integers(0, 5)) == 0:
            return Case("tokenizer", files | {name: draw(damaged_bytes(files[name]))})
        case name:
            changed = draw(damaged_json(json.loads(files[name])))
            without = draw(st.integers(0, 9)) == 0
            return Case(
                "tokenizer",
                {n: c for n, c in files.items() if not without or n != "tokenizer.json"}
                | {name: as_json(changed)},
            )


# GGUF ---------------------------------------------------------------------------------------------------

ALPHABET = [chr(i) for i in range(33, 127)] + ["Ġ", "Ċ", "č"]
GGUF_TOKENS = [*ALPHABET, "hi", "Ġhi", "<|im_start|>", "<|im_end|>", "<tool>"]
GGUF_METADATA: dict[str, tuple[str, Any]] = {
    "llama.block_count": ("uint32", 1),
    "llama.context_length": ("uint32", 64),
    "llama.embedding_length": ("uint32", 8),
    "llama.feed_forward_length": ("uint32", 16),
    "llama.attention.head_count": ("uint32", 2),
    "llama.attention.head_count_kv": ("uint32", 1),
    "llama.attention.layer_norm_rms_epsilon": ("float32", 1e-5),
    "llama.rope.freq_base": ("float32", 10000.0),
    "llama.rope.dimension_count": ("uint32", 4),
    "tokenizer.ggml.model": ("string", "gpt2"),
    "tokenizer.ggml.pre": ("string", "smollm"),
    "tokenizer.ggml.tokens": ("array", GGUF_TOKENS),
    "tokenizer.ggml.token_type": ("array", [1] * (len(GGUF_TOKENS) - 3) + [3, 3, 4]),
    "tokenizer.ggml.merges": ("array", ["h i", "Ġ hi"]),
    "tokenizer.ggml.scores": ("array", [-float(i) for i in range(len(GGUF_TOKENS))]),
    "tokenizer.ggml.bos_token_id": ("uint32", len(GGUF_TOKENS) - 3),
    "tokenizer.ggml.eos_token_id": ("uint32", len(GGUF_TOKENS) - 2),
    "tokenizer.ggml.add_bos_token": ("bool", False),
}


def gguf_case(**changes: Any) -> Case:
    """A small llama in a GGUF file with a tokenizer; `changes` of metadata (`__`: a dot; None: removed)."""
    metadata = dict(GGUF_METADATA)
    for name, value in changes.items():
        metadata.pop(name.replace("__", "."), None)
        if value is not None:
            metadata[name.replace("__", ".")] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name, (kind, value) in metadata.items():
            getattr(writer, f"add_{kind}")(name, value)
        shapes = {
            "token_embd.weight": (len(GGUF_TOKENS), 8),
            "output_norm.weight": (8,),
            "blk.0.attn_norm.weight": (8,),
            "blk.0.attn_q.weight": (8, 8),
            "blk.0.attn_k.weight": (4, 8),
            "blk.0.attn_v.weight": (4, 8),
            "blk.0.attn_output.weight": (8, 8),
            "blk.0.ffn_norm.weight": (8,),
            "blk.0.ffn_gate.weight": (16, 8),
            "blk.0.ffn_up.weight": (16, 8),
            "blk.0.ffn_down.weight": (8, 16),
        }
        for name, shape in shapes.items():
            writer.add_tensor(name, np.ones(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Case("gguf", {"model.gguf": path.read_bytes()})


@functools.cache
def gguf_file(kind: str) -> bytes:
    """A whole GGUF file with a tokenizer of this kind."""
    return gguf_case(tokenizer__ggml__model=("string", kind)).files["model.gguf"]


@st.composite
def ggufs(draw: st.DrawFn) -> Case:
    """A GGUF file whose header is damaged, or whose metadata have other values."""
    if draw(st.booleans()):
        content = gguf_file(draw(st.sampled_from(("gpt2", "llama"))))
        header = content.rindex(b"blk.0.ffn_down.weight") + 64
        return Case("gguf", {"model.gguf": draw(damaged_bytes(content, header))})
    values = st.sampled_from(
        (
            None,
            ("uint32", 0),
            ("uint32", 1),
            ("uint32", 2**32 - 1),
            ("uint64", 2**63),
            ("int32", -1),
            ("float32", float("nan")),
            ("float32", 1e30),
            ("string", ""),
            ("string", "linear"),
            ("bool", True),
            ("array", [1, 2]),
            ("array", ["a", "a"]),
        )
    )
    more = ("general.alignment", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.expert_count")
    names = st.sampled_from((*GGUF_METADATA, *more, "tokenizer.chat_template"))
    return gguf_case(**draw(st.dictionaries(names, values, min_size=1, max_size=2)))


# Data ---------------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"prompt": "2 + 3?", "answer": "5", "completion": "5"},
    {
        "prompt": [{"role": "system", "content": "Count."}, {"role": "user", "content": "2 + 3?"}],
        "answer": "5",
        "completion": "5",
        "tags": [{"deep": {"er": [1, 2.5]}}],
        "reward_model": {"ground_truth": "5"},
    },
]


def jsonl(rows: list[Any]) -> bytes:
    """A line for each row."""
    return b"\n".join(map(as_json, rows)) + b"\n"


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """A Parquet file."""
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), buffer)
    return buffer.getvalue()


CSV = b'prompt,answer,completion\n2 + 3?,5,five\n"1, 2 or 3?",2,two\n'


@st.composite
def data_files(draw: st.DrawFn) -> Case:
    """A damaged data file of any kind."""
    kind = draw(st.sampled_from(("jsonl", "jsonl", "json", "csv", "parquet")))
    if kind == "csv":
        content = draw(damaged_bytes(CSV))
    elif kind == "parquet":
        content = draw(damaged_bytes(parquet(ROWS[1:] * 3)))
    elif draw(st.integers(0, 3)) == 0:
        content = draw(damaged_bytes(jsonl(ROWS) if kind == "jsonl" else as_json(ROWS)))
    else:
        rows = draw(damaged_json(ROWS))
        lines = rows if isinstance(rows, list) else [rows]
        content = jsonl(lines) if kind == "jsonl" else as_json(rows)
    return Case("data", {f"rows.{kind}": content})


# Configurations, variables, runs --------------------------------------------------------------------------

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
YAML_VALUES = (
    "null",
    "-1",
    "0",
    "1e400",
    ".nan",
    "99999999999999999999",
    "[]",
    "[1, 2, 3]",
    "{}",
    "{dp: x}",
    "{dp: [], tp: -1}",
    "0-999999999999",
    "1,1,99999999999999",
    "-1,-1,-1",
    "''",
    "'\\x00'",
    '"\\ud800"',
    "*x",
    "&x [*x]",
    "!!python/object/apply:os.system [ls]",
    "!!int x",
    "!!binary =",
    "2001-01-01",
    "<<",
    "? a",
    "0x" + "f" * 50,
    "9" * 5000,
)


@st.composite
def configs(draw: st.DrawFn) -> Case:
    """A configuration with other values, keys or bytes."""
    text = draw(st.sampled_from(CONFIGS)).read_text("utf-8")
    lines = text.split("\n")
    if draw(st.integers(0, 3)) == 0:
        return Case("config", {"config.yaml": draw(damaged_bytes(text.encode()))})
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from([i for i, line in enumerate(lines) if ":" in line]))
        key = lines[at].split(":")[0]
        match draw(st.sampled_from(("value", "value", "value", "key", "indent", "delete"))):
            case "value":
                lines[at] = f"{key}: {draw(st.sampled_from(YAML_VALUES))}"
            case "key":
                lines[at] = f"{key}x: 1"
            case "indent":
                lines[at] = "  " + lines[at]
            case "delete":
                lines[at] = "# : removed"
    more = draw(st.sampled_from(("", "mesh: VALUE", "placement: {train: VALUE}", "rollout: {mesh: VALUE}")))
    lines.append(more.replace("VALUE", draw(st.sampled_from(YAML_VALUES))))
    return Case("config", {"config.yaml": "\n".join(lines).encode("utf-8", "surrogatepass")})


DOTENV = b"A=1\nexport B='two'\n# c\nC=\"multi\nline\"\nHF_TOKEN=hf_abc\n"


@st.composite
def dotenvs(draw: st.DrawFn) -> Case:
    """A damaged .env file."""
    return Case("dotenv", {".env": draw(damaged_bytes(DOTENV))})


METRICS = [{"step": step, "reward/mean": 0.1 * step, "time/step_s": 2.0} for step in range(5)]


@st.composite
def metrics_files(draw: st.DrawFn) -> Case:
    """A damaged metrics.jsonl."""
    if draw(st.booleans()):
        return Case("metrics", {"metrics.jsonl": draw(damaged_bytes(jsonl(METRICS)))})
    rows = draw(damaged_json(METRICS))
    return Case("metrics", {"metrics.jsonl": jsonl(rows if isinstance(rows, list) else [rows])})


HOST = {
    "step": 8,
    "bad_steps": 0,
    "train_step": 4,
    "place": {"next_prompt": 64, "steps_without_signal": 0},
    "reward_kl_coef": 0.0,
    "critic": None,
    "config": {"seed": 0, "data.train": "builtin:arithmetic"},
    "num_prompts": 100,
    "before": {"eval/reward": 0.5},
    "accuracy": 0.25,
    "evaluation_due": False,
}


@st.composite
def saved_states(draw: st.DrawFn) -> Case:
    """Damaged host data of a checkpoint."""
    return Case("saved_state", {"host.json": as_json(draw(damaged_json(HOST)))})


STRATEGIES = {
    "architecture": architectures(),
    "model": models(),
    "tokenizer": tokenizers(),
    "gguf": ggufs(),
    "data": data_files(),
    "config": configs(),
    "dotenv": dotenvs(),
    "metrics": metrics_files(),
    "saved_state": saved_states(),
}
"""What damages the inputs of each target of `fuzz_targets.py`."""


def whole_cases() -> list[Case]:
    """The inputs that the strategies damage."""
    return [
        *(architecture_case(model_config(family)) for family in FAMILIES),
        model_case(model_config("llama_rope_linear"), index()),
        tokenizer_case(),
        *(Case("gguf", {"model.gguf": gguf_file(kind)}) for kind in ("gpt2", "llama")),
        Case("data", {"rows.jsonl": jsonl(ROWS)}),
        Case("data", {"rows.json": as_json(ROWS)}),
        Case("data", {"rows.parquet": parquet(ROWS[1:])}),
        Case("data", {"rows.csv": CSV}),
        *(Case("config", {"config.yaml": path.read_bytes()}) for path in CONFIGS),
        Case("dotenv", {".env": DOTENV}),
        Case("metrics", {"metrics.jsonl": jsonl(METRICS)}),
        Case("saved_state", {"host.json": as_json(HOST)}),
    ]


def each_damaged(target: str, examples: int, use: Callable[[Case], None]) -> None:
    """Calls `use` with this many damaged inputs of `target`, the same every time."""

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(STRATEGIES[target])
    def call(case: Case) -> None:
        use(case)

    call()


# Named inputs -------------------------------------------------------------------------------------------


def _llama(**changes: Any) -> Case:
    return architecture_case(model_config("llama_rope_llama3") | changes)


def _gemma(**changes: Any) -> Case:
    return architecture_case(model_config("gemma3_text") | changes)


def _rope(**changes: Any) -> Case:
    return _llama(rope_parameters=model_config("llama_rope_llama3")["rope_parameters"] | changes)


def _yaml(text: str) -> Case:
    return Case("config", {"config.yaml": text.encode()})


def _data(name: str, content: bytes) -> Case:
    return Case("data", {name: content})


def _row(prompt: Any) -> Case:
    return _data("rows.jsonl", jsonl([{"prompt": prompt, "answer": "1"}]))


def _gguf_with_array_of_arrays() -> Case:
    # One key, whose value is an array of an array of an array and so on.
    nested = struct.pack("<IQ", 9, 1) * 20_000
    header = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    return Case("gguf", {"model.gguf": header + nested})


def _parquet_bomb() -> bytes:
    buffer = io.BytesIO()
    rows = pa.array(["a" * 1_000_000] * 2_000)
    pq.write_table(
        pa.table({"prompt": rows.dictionary_encode(), "answer": rows.dictionary_encode()}),
        buffer,
        compression="zstd",
    )
    return buffer.getvalue()


def _message_with_a_time() -> bytes:
    import datetime

    message = {"role": "user", "content": "2 + 3?", "time": datetime.datetime(2020, 1, 1)}
    return parquet([{"prompt": [message], "answer": "5"}])


_LENGTHEN = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}


def _tokenizer(**changes: Any) -> bytes:
    return as_json(json.loads(tokenizer_files()["tokenizer.json"]) | changes)


_LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
)
_MERGES = "\n".join(
    ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 12)]
)

NAMED: dict[str, Callable[[], Case]] = {
    "a size that is a string": lambda: _llama(hidden_size="32"),
    "a size that is a list": lambda: _llama(intermediate_size=[48]),
    "a size that is a float": lambda: _llama(vocab_size=72.5),
    "1e9 layers": lambda: _llama(num_hidden_layers=10**9),
    "1e9 layers of gemma": lambda: _gemma(num_hidden_layers=10**9, layer_types=None),
    "negative layers": lambda: _llama(num_hidden_layers=-1),
    "no heads": lambda: _llama(num_attention_heads=0, head_dim=None),
    "a vocabulary of 1e30": lambda: _llama(vocab_size=10**30),
    "head_dim as text": lambda: _llama(head_dim="16"),
    "eps as text": lambda: _llama(rms_norm_eps="small"),
    "activation as a list": lambda: _llama(hidden_act=["silu"]),
    "labels as a number": lambda: _llama(architectures=["LlamaForSequenceClassification"], id2label=3),
    "1e30 labels": lambda: _llama(architectures=["LlamaForSequenceClassification"], num_labels=10**30),
    "architectures as a number": lambda: _llama(architectures=3, id2label="ForSequenceClassification"),
    "rope as a list": lambda: _llama(rope_parameters=["llama3"]),
    "rope as text": lambda: _llama(rope_scaling="linear"),
    "rope type as a list": lambda: _rope(rope_type=[1]),
    "rope without a factor": lambda: _llama(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
    "rope factor as text": lambda: _rope(factor="8"),
    "rope factor 0": lambda: _rope(factor=0),
    "rope theta as a list": lambda: _rope(rope_theta=[1e4]),
    "rope with equal frequencies": lambda: _rope(low_freq_factor=4.0),
    "rope partial factor as text": lambda: _rope(partial_rotary_factor="1.0"),
    "gemma's pattern as text": lambda: _gemma(layer_types=None, sliding_window_pattern="6"),
    "gemma's window as text": lambda: _gemma(sliding_window="6"),
    "layer types as numbers": lambda: _gemma(layer_types=[1, 2]),
    "layer types as lists": lambda: _gemma(layer_types=[["full_attention"], []]),
    "local rope as text": lambda: _gemma(rope_parameters={"sliding_attention": "x"}),
    "quantization with much text": lambda: _llama(quantization_config={"x": "y" * 100_000}),
    "model_type with much text": lambda: _llama(model_type="y" * 100_000),
    "generation_config with text": lambda: architecture_case(model_config("qwen3"), {"eos_token_id": "2"}),
    "generation_config with an object": lambda: architecture_case(
        model_config("qwen3"), {"eos_token_id": {"a": 1}}
    ),
    "generation_config with nested lists": lambda: architecture_case(
        model_config("qwen3"), {"eos_token_id": [[2]]}
    ),
    "generation_config that is a list": lambda: architecture_case(model_config("qwen3"), [1]),
    "config of nested lists": lambda: Case("architecture", {CONFIG: b"[" * 100_000}),
    "config with a number of 5,000 digits": lambda: Case(
        "architecture", {CONFIG: b'{"a": ' + b"9" * 5000 + b"}"}
    ),
    "config in UTF-16": lambda: Case("architecture", {CONFIG: '{"model_type": "llama"}'.encode("utf-16")}),
    "index with a list": lambda: model_case(model_config("llama_rope_linear"), {"weight_map": []}),
    "index with numbers": lambda: model_case(model_config("llama_rope_linear"), {"weight_map": {"a": 1}}),
    "index without a map": lambda: model_case(model_config("llama_rope_linear"), {}),
    "index with much text": lambda: model_case(
        model_config("llama_rope_linear"), {"weight_map": {"a": "x" * 100_000}}
    ),
    "index with 10,000 files": lambda: model_case(
        model_config("llama_rope_linear"), {"weight_map": {str(i): f"{i}.safetensors" for i in range(10_000)}}
    ),
    "index with a zero byte": lambda: model_case(
        model_config("llama_rope_linear"), {"weight_map": {"a": "\0"}}
    ),
    "a vocabulary larger than the file": lambda: model_case(
        model_config("llama_rope_linear") | {"vocab_size": 2**24, "hidden_size": 2**16}, index()
    ),
    **{
        f"chat template {text[:60]}": lambda text=text: tokenizer_case(
            chat_template__jinja=text.encode("utf-8", "surrogatepass")
        )
        for text in TEMPLATES
    },
    "a chat template of 1 MB": lambda: tokenizer_case(chat_template__jinja=b"{{ 1 }}" * 150_000),
    **{
        f"normalizer {json.dumps(part)[:50]}": lambda part=part: tokenizer_case(
            tokenizer__json=_tokenizer(normalizer=part)
        )
        for part in (
            {"type": "Replace", "pattern": {"String": ""}, "content": "aaaa"},
            {"type": "Prepend", "prepend": ""},
            {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
            {"type": "Sequence", "normalizers": [_LENGTHEN] * 8},
        )
    },
    "a decoder that lengthens": lambda: tokenizer_case(
        tokenizer__json=_tokenizer(decoder={"type": "Sequence", "decoders": [_LENGTHEN] * 8})
    ),
    "a post-processor of an unknown token": lambda: tokenizer_case(
        tokenizer__json=_tokenizer(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
                "pair": [],
                "special_tokens": {},
            }
        )
    ),
    "padding to 1e12 tokens": lambda: tokenizer_case(
        tokenizer__json=_tokenizer(
            padding={
                "strategy": {"Fixed": 10**12},
                "direction": "Right",
                "pad_to_multiple_of": None,
                "pad_id": 0,
                "pad_type_id": 0,
                "pad_token": "x",
            }
        )
    ),
    "model_max_length as text": lambda: tokenizer_case(tokenizer_config__json=b'{"model_max_length": "x"}'),
    "1e9 layers beside a tokenizer without tokenizer.json": lambda: tokenizer_case(
        tokenizer__json=None,
        tokenizer_config__json=b"{}",
        vocab__json=b'{"a": 0}',
        config__json=as_json({"model_type": "qwen2", "num_hidden_layers": 10**9}),
    ),
    "tokenizer_config that is a list": lambda: tokenizer_case(tokenizer_config__json=b"[]"),
    "tokenizer_class that is a number": lambda: tokenizer_case(
        tokenizer_config__json=b'{"tokenizer_class": 3}'
    ),
    "block_count 2^32-1": lambda: gguf_case(llama__block_count=("uint32", 2**32 - 1)),
    "block_count 1e6": lambda: gguf_case(llama__block_count=("uint32", 10**6)),
    "head_count 0": lambda: gguf_case(llama__attention__head_count=("uint32", 0)),
    "alignment 0": lambda: gguf_case(general__alignment=("uint32", 0)),
    "alignment as text": lambda: gguf_case(general__alignment=("string", "x")),
    "context_length as text": lambda: gguf_case(llama__context_length=("string", "x")),
    "eps as text in GGUF": lambda: gguf_case(llama__attention__layer_norm_rms_epsilon=("string", "x")),
    "theta as text in GGUF": lambda: gguf_case(llama__rope__freq_base=("string", "x")),
    "no tokens": lambda: gguf_case(tokenizer__ggml__tokens=None),
    "tokens as numbers": lambda: gguf_case(tokenizer__ggml__tokens=("array", list(range(102)))),
    "merges as numbers": lambda: gguf_case(tokenizer__ggml__merges=("array", [1, 2])),
    "token id as text": lambda: gguf_case(tokenizer__ggml__bos_token_id=("string", "x")),
    "template as a number": lambda: gguf_case(tokenizer__chat_template=("uint32", 3)),
    "a token of 1 MB": lambda: gguf_case(
        tokenizer__ggml__model=("string", "llama"),
        tokenizer__ggml__tokens=("array", ["a" * 1_000_000, *GGUF_TOKENS[1:]]),
    ),
    "arrays of arrays": lambda: _gguf_with_array_of_arrays(),
    "mesh: []": lambda: _yaml("mesh: []"),
    "mesh of lists": lambda: _yaml("mesh: {dp: []}"),
    "mesh of huge numbers": lambda: _yaml(f"mesh: 1,1,{'9' * 4000}"),
    "placement.train: 0-999999999999": lambda: _yaml("placement: {train: 0-999999999999}"),
    "3,000 unknown keys": lambda: _yaml("\n".join(f"key_{i}: {i}" for i in range(3000))),
    "3,000 unknown keys of a section": lambda: _yaml(
        "run:\n" + "\n".join(f"  key_{i}: {i}" for i in range(3000))
    ),
    "nested aliases": lambda: _yaml(_LAUGHS),
    "nested aliases in a key": lambda: _yaml(_LAUGHS.replace("a11:", "seed:")),
    "nested merges": lambda: _yaml(_MERGES),
    "an alias of itself": lambda: _yaml("seed: &a [*a]"),
    "a configuration of nested lists": lambda: _yaml("seed: " + "[" * 100_000),
    "a configuration of 20 MB": lambda: _yaml("seed: 1 # " + "x" * 20_000_000),
    "a configuration of 200,000 lists": lambda: _yaml("seed: [" + "[], " * 200_000 + "]"),
    "a number of 5,000 digits": lambda: _yaml("seed: " + "9" * 5000),
    "a hexadecimal number of 100,000 digits": lambda: _yaml("seed: 0x" + "f" * 100_000),
    "a batch size of 1e30": lambda: _yaml("data: {batch_size: " + "1" + "0" * 30 + "}"),
    "a batch size of 1e12": lambda: _yaml("data: {batch_size: 1000000000000}"),
    "a line of 100 MB": lambda: _data("rows.jsonl", b'{"prompt": "' + b"a" * 10**8 + b'"}\n'),
    "a prompt of 30 MB": lambda: _row("a" * 30_000_000),
    "nested rows": lambda: _data("rows.jsonl", b'{"prompt": "a", "x": ' + b"[" * 900 + b"]" * 900 + b"}\n"),
    "deeply nested rows": lambda: _data("rows.jsonl", b'{"prompt": "a", "x": ' + b"[" * 100_000),
    "NaN in a message": lambda: _row([{"role": "user", "content": "a", "weight": float("nan")}]),
    "a lone surrogate in a message": lambda: _row([{"role": "user", "content": "\ud800"}]),
    "a lone surrogate beside the content": lambda: _row([{"role": "user", "content": "a", "name": "\ud800"}]),
    "a lone surrogate in a key": lambda: _row([{"role": "user", "content": "a", "\ud800": "b"}]),
    "a lone surrogate in a prompt": lambda: _row("\ud800"),
    "a lone surrogate in a completion": lambda: _data(
        "rows.jsonl", jsonl([{"prompt": "a", "completion": "\ud800", "answer": "1"}])
    ),
    "a timestamp in a message": lambda: _data("rows.parquet", _message_with_a_time()),
    "a message with much text in its role": lambda: _row([{"role": ["a" * 100_000], "content": "a"}]),
    "a Parquet file of 4 GB when read": lambda: _data("rows.parquet", _parquet_bomb()),
    "a CSV file with a column of 1 MB": lambda: _data("rows.csv", b"a" * 1_000_000 + b"\n1\n"),
    "metrics with a step that is text": lambda: Case("metrics", {"metrics.jsonl": b'{"step": "1"}\n'}),
    "metrics of nested lists": lambda: Case(
        "metrics", {"metrics.jsonl": b'{"step": ' + b"[" * 100_000 + b"\n"}
    ),
    "metrics that are not UTF-8": lambda: Case("metrics", {"metrics.jsonl": b"\xff\xfe\n"}),
    "a step that is text": lambda: Case("saved_state", {"host.json": as_json(HOST | {"train_step": "4"})}),
    "a state without its configuration": lambda: Case("saved_state", {"host.json": as_json({"step": 1})}),
}
"""Inputs that ended in a traceback, took minutes or took all memory; each is made when it is called."""
