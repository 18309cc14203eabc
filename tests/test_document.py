"""The pages that `scripts/document.py` makes from the code, and those that are compared with it."""

import importlib.util
import inspect
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from quatrain.config.algorithms import ESTIMATORS, LOSSES
from quatrain.config.buckets import PACKAGES
from quatrain.config.mesh_axes import AXES
from quatrain.config.schema import sections
from quatrain.config.sections.given import PREFERENCE_LOSSES, SCORE_LOSSES
from quatrain.config.sections.judge import JudgeConfig
from quatrain.config.sections.rollout import RolloutConfig
from quatrain.config.sections.update import REJECTIONS
from quatrain.config.settings import valid_keys
from quatrain.config.tasks import SECTIONS
from quatrain.data.pictures import FORMATS
from quatrain.data.rows import _READERS
from quatrain.episodes import hubs
from quatrain.models.families import _BUILTIN, FAMILIES
from quatrain.models.families.multimodal import MODEL_TYPES
from quatrain.models.families.ropes import ROPE_TYPES
from quatrain.models.families.towers import _READ as TOWERS
from quatrain.ops.aggregation import LOSS_AGGREGATIONS
from quatrain.ops.kl import KL_ESTIMATORS
from quatrain.reward.functions import BUILTIN_FUNCTIONS, IN_WORKERS
from quatrain.sandbox.sandbox import Kind as SandboxKind
from quatrain.serve.tinker.losses import LOSSES as PROGRAM_LOSSES
from quatrain.servers.kinds import KINDS, RECEIVERS
from quatrain.types.call_forms import FORMS
from quatrain.types.rollouts import Sampling

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
    keys = [row.split("`")[1] for row in rows]
    assert [key for key in keys if not key.startswith("reward.judge.")] == valid_keys()
    inner = [f"reward.judge.{name}" for name in JudgeConfig.model_fields]
    assert [key for key in keys if key.startswith("reward.judge.")] == inner


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


def choices(section, key):
    """The texts that a key of the configuration may have as its value."""
    schema = sections()[section].model_json_schema()["properties"][key]
    texts = set()

    def look(part):
        if isinstance(part, dict):
            texts.update(part.get("enum", ()))
            part = list(part.values())
        for inner in part if isinstance(part, list) else ():
            look(inner)

    look(schema)
    return texts


def features():
    """The tables in the code behind each row of docs/features.md."""
    dialogue = inspect.getsource(RolloutConfig.has_episodes.fget)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    return {
        "families": set(FAMILIES),
        "text parts": MODEL_TYPES,
        "models that see": set(TOWERS),
        "training of the tower": choices("model", "vision"),
        "rope scaling": set(ROPE_TYPES),
        "models without": {f"builtin:{name}" for name in _BUILTIN},
        "attention kernels": choices("model", "attention"),
        "products of experts": choices("model", "experts"),
        "adapters": choices("lora", "targets"),
        "mesh axes": {axis.name for axis in AXES},
        "roles with": set(sections()["placement"].model_fields),
        "moved to host": set(sections()["offload"].model_fields),
        "sampling": {*Sampling.__dataclass_fields__} - {"n", "max_new_tokens", "replays"},
        "sandboxes": set(get_args(SandboxKind)) - {"auto"},
        "inference servers": {kind.name for kind in KINDS.values()},
        "weights over HTTP": {kind.name for kind in RECEIVERS},
        "dialogue": set(re.findall(r"self\.(\w+)", dialogue)),
        "agents of hubs": {hubs.VERIFIERS, hubs.OPENENV},
        "files": set(_READERS),
        "buckets": set(PACKAGES),
        "encodings of pictures": set(FORMATS),
        "built-in reward": {*BUILTIN_FUNCTIONS, *IN_WORKERS},
        "advantage estimators": set(ESTIMATORS),
        "training on": set(SECTIONS),
        "losses on": {*PREFERENCE_LOSSES, *SCORE_LOSSES},
        "policy losses": set(LOSSES),
        "aggregations": set(LOSS_AGGREGATIONS),
        "KL estimators": set(KL_ESTIMATORS),
        "corrections": choices("update", "correction"),
        "rules that": set(REJECTIONS),
        "losses of [programs": {"cross_entropy", *PROGRAM_LOSSES},
        "distillation": choices("distill", "loss"),
        "optimizers": choices("optimizer", "name"),
        "schedules": choices("optimizer", "schedule"),
        "services": extras & set(sections()["logging"].model_fields),
        "optional packages": extras,
    }


def test_the_features_are_those_of_the_code():
    """A family, axis, algorithm or kind that the page lacks or that does not exist, and an unknown row."""
    page = (REPOSITORY / "docs/features.md").read_text("utf-8")
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line[:1] == "|"]
    tables = features()
    named = {name: set() for name in tables}
    for _, label, names, *_ in rows:
        if label.strip("-"):
            (name,) = [name for name in tables if label.startswith(name)]
            named[name] |= set(re.findall(r"`([^`]+)`", names))
    assert named == tables


def test_the_families_of_the_page_on_models_are_those_of_the_code():
    """A family that docs/models.md lacks, and one whose GGUF files it says are read and are not."""
    page = (REPOSITORY / "docs/models.md").read_text("utf-8")
    table = page.partition("| `model_type` |")[2].partition("\n\n")[0].splitlines()[2:]
    of_gguf = {}
    for row in table:
        names, *_, gguf = (cell.strip() for cell in row.strip("| ").split("|"))
        for name in re.findall(r"`(\w+)`", names):
            of_gguf[name] = f"`{name}`" in gguf if "`" in gguf else gguf == "yes"
    assert of_gguf == {name: family.gguf is not None for name, family in FAMILIES.items()}


def test_the_page_on_episodes_lists_every_form_of_calls():
    """A form that is read and not listed, or listed and no longer read."""
    page = (REPOSITORY / "docs/episodes.md").read_text("utf-8")
    table = page.partition("| models | calls are written as |")[2].partition("\n\n")[0].splitlines()[2:]
    listed = [row.split("|")[1].strip().replace("`", "") for row in table]
    assert listed == [form.models for form in FORMS]


def test_the_order_of_imports_in_the_page_is_the_linters():
    """Contributors read CONTRIBUTING.md, the linter pyproject.toml: they cannot disagree."""
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        contract, *_ = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    order = " -> ".join(layer.replace(" | ", ", ") for layer in contract["layers"])
    page = (REPOSITORY / "CONTRIBUTING.md").read_text("utf-8")
    assert order in " ".join(page.split())
    rooms = {name for layer in contract["layers"] for name in layer.split(" | ")}
    assert {name for name in rooms if f"`{name}/`" not in page} <= {"backend", "__main__"}  # files
