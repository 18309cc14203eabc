"""Writes metrics, samples and log messages of a run to its files, the console and logging services.

At the end of a step, `Run.record` passes the metrics of all stages and the finished batch to `Report`. Only
the main process writes anything.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from quatrain.cluster.processes import is_main_process
from quatrain.cluster.stop import Stopped
from quatrain.config.schema import LoggingConfig
from quatrain.config.secrets import texts_changed
from quatrain.report.hints import Hints
from quatrain.report.page import Page
from quatrain.report.plot import can_plot, plot_run
from quatrain.run.metrics import MetricsFile, reduce_metrics
from quatrain.run.pictures import OF_RECORD, write_picture
from quatrain.run.run_dir import RunDir, write_whole
from quatrain.run.samples import TokenText, training_sample
from quatrain.run.services import start_services
from quatrain.run.streams import ConsoleHandler, Redact, Redacting
from quatrain.types.batches import AdvantagedBatch
from quatrain.types.metrics import Metric

_root_log = logging.getLogger("quatrain")
_log = logging.getLogger(__name__)
_run_of_thread: ContextVar[object | None] = ContextVar("_run_of_thread", default=None)
_opening = threading.Lock()
_open_reports: list[Report] = []


@contextmanager
def own_messages() -> Iterator[None]:
    """What is logged in the block, and by threads that take over its context, belongs to one run.

    The reports of other runs of this process do not write it. Messages of threads that belong to no run are
    written by all.
    """
    token = _run_of_thread.set(object())
    try:
        yield
    finally:
        _run_of_thread.reset(token)


class Report:
    """Writes everything that a run logs. Must be closed at the end, also after an error.

    Metrics are written to `metrics.jsonl` first, then to the services enabled in `LoggingConfig`. A service
    that fails causes one warning, is not used again, and never stops the run. What `redactor` returns removes
    secrets from every message, sample and metric name before it is written; it is asked anew for each batch
    of texts. `run_config`: the resolved configuration,
    shown in W&B; it must not contain secrets. `token_text` returns the text of a token id, for
    `logging.sample_tokens`. `hints` finds what is probably wrong in a step.
    """

    def __init__(
        self,
        run_dir: RunDir,
        config: LoggingConfig,
        *,
        redactor: Callable[[], Redact],
        run_config: Mapping[str, Any] | None = None,
        token_text: TokenText | None = None,
        hints: Hints | None = None,
    ):
        self._run, self._config, self._redactor = run_dir, config, redactor
        self._token_text, self._hints = token_text, hints
        self._main = is_main_process()
        self._metrics = MetricsFile(run_dir.metrics)
        self._unwritten: list[tuple[int, Mapping[str, float]]] = []
        """Rows of metrics that are not on disk: the disk was full."""
        self._failing: set[str] = set()
        self._page = Page([run_dir.path])

        def redact(text: str) -> str:
            return redactor()(text)

        self._handlers = [_file_handler(run_dir.log, redact), ConsoleHandler(redact)] if self._main else []
        run = _run_of_thread.get()
        for handler in self._handlers:
            handler.addFilter(lambda record: run is None or _run_of_thread.get() in (None, run))
            _root_log.addHandler(handler)
        self._open_root_log()
        if run_dir.note:
            self.event(run_dir.note)
        self._services = start_services(run_dir, config, run_config or {}) if self._main else []

    def _open_root_log(self) -> None:
        with _opening:
            self._level_before: int = _open_reports[0]._level_before if _open_reports else _root_log.level
            _open_reports.append(self)
            # In other processes, because the main process gives the same warnings.
            _root_log.setLevel(logging.INFO if self._main else logging.ERROR)
            # Some libraries install a handler on the root logger, which would print every message twice.
            _root_log.propagate = not self._main

    def _close_root_log(self) -> None:
        with _opening:
            _open_reports.remove(self)
            if not _open_reports:
                _root_log.setLevel(self._level_before)
                _root_log.propagate = True

    def log(self, step: int, metrics: Mapping[str, Metric | float]) -> None:
        """Write the metrics of `step`, each reduced to one number.

        A second call for the same step adds its metrics to the first. Raises ValueError for a step before the
        last one logged.
        """
        if not self._main:
            return
        numbers = reduce_metrics(metrics)
        numbers = dict(zip(self._redactor()("\n".join(numbers)).split("\n"), numbers.values(), strict=True))
        self._unwritten.append((step, numbers))
        self._guard("metrics", self._write_metrics)
        finite = {name: value for name, value in numbers.items() if math.isfinite(value)}
        for service in self._services:
            service.log(step, finite)

    def hint(self, step: int, metrics: Mapping[str, Metric | float]) -> None:
        """Log the hints that the metrics of training step `step` give, and write them to `hints.jsonl`."""
        if not self._main or self._hints is None:
            return
        for hint in self._hints.found(step, reduce_metrics(metrics)):
            _log.warning("step %d: %s", step, hint.text)
            row = texts_changed({"step": step, **hint._asdict()}, self._redactor())
            self._guard("hints", partial(_append_line, self._run.hints, json.dumps(row)))

    def samples(self, step: int, advantaged: AdvantagedBatch) -> None:
        """Write the first `logging.samples_per_step` sequences of `step` to `samples/step_000010.jsonl`."""
        count = min(self._config.samples_per_step, len(advantaged.rollouts))
        if self._main and count:
            text = self._token_text if self._config.sample_tokens else None
            records = [training_sample(advantaged, i, step=step, token_text=text) for i in range(count)]
            self._leave_out_secret_tokens(step, records)
            self._write_samples(f"step_{step:06d}.jsonl", records)

    def rows(self, step: int, of: Callable[[int], Sequence[Mapping[str, Any]]]) -> None:
        """Write as many records of the rows that `step` trained on, which `of` makes, as `samples` does."""
        if self._main and self._config.samples_per_step and (records := of(self._config.samples_per_step)):
            self._write_samples(f"step_{step:06d}.jsonl", [{"step": step, **record} for record in records])

    def _leave_out_secret_tokens(self, step: int, records: Sequence[dict[str, Any]]) -> None:
        """Removes the tokens of samples whose text has a secret, which no single token's text shows."""
        count, redact = 0, self._redactor()
        for record in records:
            text = "".join(record.get("tokens", {}).get("texts", ()))
            if redact(text) != text:
                del record["tokens"]
                count += 1
        if count:
            _log.warning(
                "step %d: the tokens of %d samples are not written: they spell a secret", step, count
            )

    def evaluation(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the completions of an evaluation at `step` to `samples/eval_000010.jsonl`."""
        if self._main and samples:
            self._write_samples(f"eval_{step:06d}.jsonl", [{"step": step, **sample} for sample in samples])

    def _write_samples(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        for picture in dict.fromkeys(each for record in records for each in record.get(OF_RECORD, ())):
            self._guard("pictures", partial(write_picture, self._run.pictures, picture), Exception)
        records = [{key: record[key] for key in record if key != OF_RECORD} for record in records]
        records = texts_changed(records, self._redactor())  # before JSON escapes them
        lines = [json.dumps(record, ensure_ascii=False, allow_nan=False) for record in records]
        # A completion may contain half a surrogate pair, which is escaped to keep the JSON valid.
        text, path = "\n".join(lines) + "\n", self._run.samples / name
        self._guard("samples", lambda: write_whole(path, text))
        table = "evaluation" if name.startswith("eval") else "samples"
        for service in self._services:
            service.samples(records[0]["step"], table, records)

    def _write_metrics(self) -> None:
        while self._unwritten:
            self._metrics.write(*self._unwritten[0])
            del self._unwritten[0]

    def _guard(self, what: str, write: Callable[[], Any], errors: type[Exception] = OSError) -> None:
        """Calls `write`; one of `errors` is reported once, until writing succeeds again."""
        try:
            write()
        except errors as error:
            if what not in self._failing:
                reason = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
                then = "and writes them later" if what == "metrics" else "without"
                _log.warning("%s cannot be written (%s); the run goes on %s", what, reason, then)
            self._failing.add(what)
        else:
            self._failing.discard(what)

    def event(self, text: str) -> None:
        """Write `text` to the console and to `run.log`."""
        if self._main:
            _root_log.info(text)

    def failed(self, error: BaseException) -> None:
        """Write what ended the run, an error with its traceback, to `run.log`; the caller must print it."""
        if not self._main:
            return
        if isinstance(error, Stopped):
            _log.info("stopped: %s", error, extra={"only_in_file": True})
        else:
            _log.error("the run ended early", exc_info=error, extra={"only_in_file": True})

    def close(self) -> None:
        """Draw `plot.png` if matplotlib is installed, write `report.html`, close services and `run.log`."""
        if self._main:
            self._guard("metrics", self._write_metrics)
            if self._unwritten:
                _log.error("metrics of %d steps were lost: they could not be written", len(self._unwritten))
            if can_plot() and self._run.metrics.exists():
                self._guard("plot.png", lambda: plot_run(self._run.path, self._run.plot), Exception)
            self._write_page(ended=True)
        for service in self._services:
            service.close()
        for handler in self._handlers:
            _root_log.removeHandler(handler)
            handler.close()
        self._services, self._handlers = [], []
        self._close_root_log()

    def page(self) -> None:
        """Write `report.html` anew, unless that was done so recently that it would slow the run down."""
        if self._main and self._page.due():
            self._write_page()

    def _write_page(self, *, ended: bool = False) -> None:
        if self._run.metrics.exists():
            self._guard("report.html", lambda: self._page.write(self._run.page, ended=ended), Exception)


def _append_line(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


class _FileHandler(logging.FileHandler):
    """Does not print an error for every message that a full disk refuses: checkpoints report it."""

    _ended = False

    def emit(self, record: logging.LogRecord) -> None:
        # A thread that found the handler before it was removed comes later: the base class then opens
        # the file anew, which nobody else would close, or raises where the folder is no more.
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)
        if self._ended:
            super().close()

    def close(self) -> None:
        self._ended = True
        super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _file_handler(path: Path, redact: Redact) -> logging.Handler:
    handler = _FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(Redacting("%(asctime)s %(levelname)s %(name)s: %(message)s", redact))
    return handler
