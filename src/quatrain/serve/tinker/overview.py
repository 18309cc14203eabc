"""The page of the training server, for people: who trains, who samples, and what the memory is used for.

Data flow: `Tenants`, `Promises`, `Samplers` -> `overview` -> `GET /`. Clients' texts are escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any
from urllib.parse import quote

from quatrain.serve.tinker.calls import Base
from quatrain.serve.tinker.promises import Promises
from quatrain.serve.tinker.tenants import Model, SamplerOf, Session, Tenants
from quatrain.serve.tinker.worker import Worker

REFRESH_S = 5
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="{refresh}">
<title>quatrain: training server</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 0 0 2rem; width: 100% }}
th, td {{ border-bottom: 1px solid #8884; padding: .3rem .8rem .3rem 0; text-align: left }}
.number {{ text-align: right; font-variant-numeric: tabular-nums }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111; color: #ddd }} a {{ color: #8bf }} }}
</style></head><body>
<h1>Training server</h1>
<p>{model}{error}</p>
<h2>Training clients</h2>{models}
<h2>Samplers</h2>{samplers}
<h2>Memory and requests</h2>{numbers}
</body></html>
"""


def overview(base: Base, tenants: Tenants, promises: Promises, worker: Worker) -> str:
    """The page as HTML; it is loaded again every REFRESH_S."""
    sessions = list(tenants)
    models = [_model_row(model) for session in sessions for model in session.models.values()]
    samplers = [
        [sampler.id, _weights(sampler), _state(sampler.opened), len(sampler.waiting)]
        for session in sessions
        for sampler in session.samplers.values()
    ]
    numbers: list[list[Any]] = [
        ["programs", len(sessions)],
        ["requests that wait", promises.num_running],
        ["bytes of adapters, gradients and moments", f"{tenants.used_bytes:,} of {tenants.room:,}"],
        ["bytes of results that are kept", f"{promises.num_bytes:,}"],
    ]
    return _PAGE.format(
        refresh=REFRESH_S,
        model=escape(base.name),
        error="" if worker.error is None else f"<br><strong>{escape(worker.error)}</strong>",
        models=_table(["training client", "rank", "steps", "waiting", "since"], models),
        samplers=_table(["sampler", "weights", "state", "waiting"], samplers),
        numbers=_table(["", ""], numbers),
    )


def _model_row(model: Model) -> list[Any]:
    if not model.made.done():
        steps: Any = "it is being made"
    else:
        steps = model.client.step if model.is_alive else "it could not be made"
    link = _Html(f'<a href="/training/{quote(model.id)}">{escape(model.id)}</a>')
    return [link, model.lora.rank, steps, model.lane.num_held, _age(model.session)]


def _weights(sampler: SamplerOf) -> str:
    return sampler.path or ("the base" if sampler.of_base else "a snapshot")


def _state(opened: Any) -> str:
    if opened is None:
        return "not loaded"
    return "loaded" if opened.done() and not opened.exception() else "loading"


def _age(session: Session) -> str:
    minutes = int((datetime.now(UTC) - session.began).total_seconds()) // 60
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"


class _Html(str):
    """Text that is HTML already."""


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    def cell(value: Any) -> str:
        number = ' class="number"' if isinstance(value, int) else ""
        return f"<td{number}>{value if isinstance(value, _Html) else escape(str(value))}</td>"

    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    if not body:
        return "<p>none</p>"
    return f"<table><tr>{''.join(f'<th>{escape(head)}</th>' for head in heads)}</tr>{body}</table>"
