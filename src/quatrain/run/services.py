"""Services that show the metrics and samples of a run: Weights & Biases, Trackio and TensorBoard.

Data flow: `report.writer.Report`, in the main process -> `Service` -> the package of the service. What comes
here is already redacted.
"""

import json
import logging
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

from quatrain.config.errors import installation
from quatrain.config.files import read_json
from quatrain.config.schema import LoggingConfig
from quatrain.run.metrics import row_of
from quatrain.run.run_dir import RunDir, write_whole
from quatrain.run.samples import transcript

Records = Sequence[Mapping[str, Any]]
LEFT_OUT = "tokens"
"""The key of a sample that tables do not show."""
_log = logging.getLogger(__name__)
_KEPT = "%s keeps the values that it has up to step %d, which were logged before the run was resumed"
_redirecting = threading.Lock()
"""Standard output is the whole process's, which may have several runs."""


class _Sink(Protocol):
    def log(self, step: int, values: Mapping[str, float], /) -> None: ...
    def samples(self, step: int, name: str, records: Records) -> None: ...
    def close(self) -> None: ...


class Service:
    """A service created by `make`; after its first failure, it causes one warning and is not used again."""

    def __init__(self, name: str, make: Callable[[], _Sink]):
        self._name = name
        self._sink: _Sink | None = None
        self._guard("start", lambda: setattr(self, "_sink", make()))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log the finite `numbers` of `step`."""
        if sink := self._sink:
            self._guard("log", lambda: sink.log(step, numbers))

    def samples(self, step: int, name: str, records: Records) -> None:
        """Log the completions of `step` as a table `name`, if the service has tables."""
        if sink := self._sink:
            self._guard("log", lambda: sink.samples(step, name, records))

    def close(self) -> None:
        """Finish the run in the service."""
        if sink := self._sink:
            self._guard("finish", sink.close)

    def _guard(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._sink = None
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, ImportError):
                reason = f"{error}; install it with {installation('wandb', 'trackio', 'tensorboard')}"
            text = "%s failed to %s and is not used any more; the run continues (%s)"
            _log.warning(text, self._name, what, reason)


def start_services(run_dir: RunDir, config: LoggingConfig, run_config: Mapping[str, Any]) -> list[Service]:
    """The services that `config` asks for. `run_config`: the configuration that they show."""
    services = []
    if config.wandb in ("online", "offline"):
        services.append(Service("W&B", lambda: _WandB(run_dir, config, run_config)))
    if config.trackio:
        services.append(Service("Trackio", lambda: _Trackio(run_dir, config, run_config)))
    if config.tensorboard:
        services.append(Service("TensorBoard", lambda: _TensorBoard(run_dir)))
    return services


def missing_services(config: LoggingConfig) -> list[str]:
    """A warning for each service that `config` asks for and whose package is not installed."""
    asked = {
        "wandb": ("wandb", config.wandb in ("online", "offline")),
        "trackio": ("trackio", config.trackio),
        "tensorboard": ("tensorboardX", config.tensorboard),
    }
    return [
        f"logging.{name} needs the package {package}, which is not installed: the run would go on without "
        f"it; install it with {installation(name)}"
        for name, (package, wanted) in asked.items()
        if wanted and find_spec(package) is None
    ]


class _WithTables:
    """A run of a package with W&B's interface: `_run` has `log`, and `_table` is its class of tables.

    Such a service cannot take back the steps after the checkpoint that a run was resumed from: Trackio and an
    offline W&B would show each twice, and an online W&B drops the second. So nothing is logged twice: a file
    in the run's folder has the last step that the service was told, and the names of its values.
    """

    _run: Any
    _table: Any

    def __init__(self, name: str, run_dir: RunDir):
        self._name, self._file = name, run_dir.path / f"{name.lower()}_logged.json"
        if not run_dir.resumed:
            self._file.unlink(missing_ok=True)
        told: dict[str, Any] = read_json(self._file) if self._file.exists() else {"step": -1, "names": []}
        self._step, self._names = int(told["step"]), set(told["names"])
        self._told_before = self._step

    def samples(self, step: int, name: str, records: Records) -> None:
        columns, data = table(records)
        self.log(step, {name: self._table(columns=columns, data=data)})

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        if step <= self._step:
            known = values.keys() if step < self._step else self._names
            values = {name: value for name, value in values.items() if name not in known}
        if not values:
            if self._told_before >= 0:
                _log.info(_KEPT, self._name, self._told_before)
            self._told_before = -1
            return
        self._run.log(dict(values), step=step)
        self._names = {*values, *(self._names if step == self._step else ())}
        self._step = step
        with suppress(OSError):  # of a full disk: at worst, a resumed run logs this step twice
            write_whole(self._file, json.dumps({"step": step, "names": sorted(self._names)}))


class _WandB(_WithTables):
    """A Weights & Biases run; a resumed run keeps its id."""

    def __init__(self, run_dir: RunDir, config: LoggingConfig, run_config: Mapping[str, Any]):
        import wandb

        super().__init__("wandb", run_dir)
        kept_id = run_dir.path / "wandb_id"
        if run_dir.restarted:  # W&B rejects steps that were logged before, so a restarted run gets a new id
            kept_id.unlink(missing_ok=True)
        if not kept_id.exists():
            kept_id.write_text(uuid.uuid4().hex[:12], encoding="utf-8")
        self._table = wandb.Table
        settings = {"console": "off", "x_disable_meta": True}
        if getattr(wandb, "run", None) is not None:  # of another run of this process, which W&B would return
            settings["reinit"] = "create_new"
        self._run = wandb.init(
            project=config.wandb_project,
            name=run_dir.name,
            id=kept_id.read_text(encoding="utf-8"),
            resume="allow",
            mode=config.wandb,
            dir=str(run_dir.path),
            config=dict(run_config),
            # W&B would upload what is printed, and the command line with all its --set, before redaction.
            settings=settings,
        )

    def close(self) -> None:
        self._run.finish()


class _Trackio(_WithTables):
    """A Trackio run, in the project `logging.trackio`; a resumed run is continued."""

    def __init__(self, run_dir: RunDir, config: LoggingConfig, run_config: Mapping[str, Any]):
        import trackio

        super().__init__("Trackio", run_dir)
        self._table = trackio.Table
        with _redirecting, redirect_stdout(sys.stderr):
            self._run = trackio.init(
                project=config.trackio,
                name=run_dir.name,
                config=dict(run_config),
                resume="allow" if run_dir.resumed else "never",
            )

    def close(self) -> None:
        with _redirecting, redirect_stdout(sys.stderr):
            self._run.finish()


class _TensorBoard:
    """TensorBoard event files in `tensorboard/`."""

    def __init__(self, run_dir: RunDir):
        from tensorboardX import SummaryWriter

        self._new_writer = partial(SummaryWriter, str(run_dir.path / "tensorboard"))
        self._again, self._metrics = run_dir.resumed or run_dir.restarted, run_dir.metrics
        self._writer: Any = None

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if self._writer is None:
            # A run that goes on logs the steps after its checkpoint again: earlier values are removed. One
            # that was stopped in an evaluation begins with it, and keeps what its step has logged before.
            first = step + self._has_more(step, numbers) if self._again else None
            self._writer = self._new_writer(purge_step=first)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def _has_more(self, step: int, numbers: Mapping[str, float]) -> bool:
        """Whether `metrics.jsonl`, which has `numbers` already, has other values of the step."""
        left_out, row = {"step", "non_finite", *numbers}, row_of(self._metrics, step)
        return any(value is not None for name, value in row.items() if name not in left_out)

    def samples(self, step: int, name: str, records: Records) -> None:
        """TensorBoard has no tables; the samples are in the run's folder."""

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def table(records: Records) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows) of a table: a column for each reward, turns as a text, other nested values as JSON."""
    rows = [dict(_cells(record)) for record in records]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]


def _cells(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in record.items():
        if name == "rewards":
            yield from ((f"reward/{function}", reward) for function, reward in value.items())
        elif name == "turns":
            yield name, transcript(value)
        elif name != LEFT_OUT:
            nested = isinstance(value, Mapping | list | tuple)
            yield name, json.dumps(value, ensure_ascii=False) if nested else value
