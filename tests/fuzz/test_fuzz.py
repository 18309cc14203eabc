"""Hostile files: each is read, or refused with one clear error, within limits on time and memory.

The inputs come from `fuzz_inputs.py`; `fuzz_worker.py` reads them in a process with limits.
"""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz_inputs import NAMED, STRATEGIES, as_json, each_damaged, model_config, whole_cases
from fuzz_targets import TARGETS
from fuzz_worker import Case, Outcome, Worker

from quatrain.weights.hf import load_hf

SOURCE = Path(__file__).parents[2] / "src" / "quatrain"
QUICK_EXAMPLES, MANY_EXAMPLES = 25, 560
SLOW = (
    "chat template {% for a in",
    "chat template {{ 'a' * 10**8",
    "chat template {{ 'a' * 10**10",
    "chat template {{ lipsum",
    "chat template {% set ns",
    "a chat template of 1 MB",
    "a line of 100 MB",
    "a prompt of 30 MB",
    "a configuration of nested lists",
    "a Parquet file of 4 GB",
)
"""How the names of the inputs begin that take a second or more to be written, or until a limit ends them."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def check(worker: Worker, case: Case) -> None:
    outcome = worker.run(case)
    assert outcome.good, f"{outcome.kind}: {outcome.detail}"


@pytest.mark.parametrize("name", [name for name in NAMED if not name.startswith(SLOW)])
def test_a_named_input_is_read_or_refused(name: str, worker: Worker) -> None:
    check(worker, NAMED[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMED if name.startswith(SLOW)])
def test_a_named_input_that_takes_long_is_read_or_refused(name: str, worker: Worker) -> None:
    check(worker, NAMED[name]())


@pytest.mark.parametrize("target", STRATEGIES)
def test_damaged_inputs_are_read_or_refused(target: str, worker: Worker) -> None:
    each_damaged(target, QUICK_EXAMPLES, lambda case: check(worker, case))


@pytest.mark.slow
@pytest.mark.parametrize("target", STRATEGIES)
def test_many_damaged_inputs_are_read_or_refused(target: str, worker: Worker) -> None:
    each_damaged(target, MANY_EXAMPLES, lambda case: check(worker, case))


def test_whole_inputs_are_read(worker: Worker) -> None:
    """The inputs that the strategies damage are valid, so that the damage is what is refused."""
    outcomes = [(case.target, worker.run(case)) for case in whole_cases()]
    assert [outcome for outcome in outcomes if outcome[1].kind != "read"] == []
    assert {target for target, _ in outcomes} == set(STRATEGIES) == {target.__name__ for target in TARGETS}


def test_the_worker_notices_errors(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that ends in a traceback, or whose message is long, does not pass."""
    assert worker.run(Case("no such target", {})).kind == "traceback"
    empty = Case("saved_state", {"host.json": b"{}"})
    assert worker.run(empty).kind == "refused"
    monkeypatch.setattr("fuzz_worker.LONGEST_MESSAGE", 10)
    assert worker.run(empty).kind == "long message"


@pytest.mark.slow
def test_the_worker_notices_time_and_memory(worker: Worker) -> None:
    assert worker.run(Case("spin", {})) == Outcome("killed", "time limit")
    assert worker.run(Case("hoard", {})) == Outcome("traceback", "MemoryError: ")


class _Trap:
    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("a pickle was opened",))


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(as_json(model_config("llama_rope_linear")))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(_Trap()))
    with pytest.raises(
        ValueError, match=r"convert the model to safetensors .*may run code and are never opened"
    ):
        load_hf(tmp_path)


def test_nothing_that_loads_from_a_model_folder_trusts_its_code() -> None:
    nodes = _nodes("from_pretrained")
    calls = ((path, node) for path, node in nodes if isinstance(node, ast.Call))
    loading = [(path, call) for path, call in calls if getattr(call.func, "attr", "") == "from_pretrained"]
    assert loading
    for path, call in loading:
        trusted = {word.arg: ast.unparse(word.value) for word in call.keywords}.get("trust_remote_code")
        assert trusted == "False", f"{path}, line {call.lineno}: set trust_remote_code=False"


def test_no_module_reads_pickles() -> None:
    """But for worker processes, which get them from the run that started them."""
    own = {SOURCE / "workers" / f"{name}.py" for name in ("pool", "worker_process", "worker_script")}
    own |= {SOURCE / "reward" / "calls.py", SOURCE / "episodes" / "environment_workers.py"}
    own.add(SOURCE / "episodes" / "child.py")
    assert all(path.is_file() for path in own)
    readers = ("pickle", "torch", "dill", "joblib")
    for path, node in _nodes(*readers):
        if path in own:
            continue
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {name.split(".")[0] for name in names} & {*readers}, path


def _nodes(*words: str) -> Iterator[tuple[Path, ast.AST]]:
    """Every node of the modules of the source in which one of `words` stands, with its file."""
    for path in SOURCE.rglob("*.py"):
        text = path.read_text("utf-8")
        if any(re.search(rf"\b{word}\b", text) for word in words):
            yield from ((path, node) for node in ast.walk(ast.parse(text)))
