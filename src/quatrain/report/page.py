"""Writes the run page: one HTML file with the curves, completions and configuration of one run or several.

Data flow: `page_data.py`, `page_samples.py` and `page_pictures.py` read the runs' folders -> `Page` ->
`report.html`.
`report.writer` refreshes the page of a run while it trains; `quatrain report` writes it for any run, and
`page_server.py` serves it live.

The page needs no network: style, scripts and the chart library uPlot are part of it. Texts of a run are data,
compressed in script elements that no browser runs, and the page shows them as text only. Pictures are
encoded anew, and shown as `data:` addresses.
"""

import base64
import hashlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import jinja2

from quatrain import __version__
from quatrain.report.page_data import described, differing, distinct_names, run_data, run_stamp
from quatrain.report.page_pictures import PagePictures
from quatrain.report.page_samples import CAP_BYTES, SampleFiles, pack

ASSETS = Path(__file__).with_name("assets")
_ORDER = ("data", "charts", "curves", "text", "episodes", "completions", "evaluation", "tables", "main")
SCRIPTS = tuple(f"{name}.js" for name in _ORDER)
SHARE = 20
"""`due` waits for this many times the seconds that the last writing took, which bounds its share of a run."""
_CHUNKS = "<!--chunks-->"


class Page:
    """The page of the runs at `folders`; what was read and compressed is kept for the next `write`.

    `capped`: leave samples out beyond `CAP_BYTES` of each run. `keep_packed=False`: compress samples when
    `chunk` asks for them, as a server does.
    """

    def __init__(self, folders: Sequence[Path], *, capped: bool = True, keep_packed: bool = True):
        self._folders = list(folders)
        self._names = distinct_names(self._folders)
        self.title = ", ".join(self._names)
        caps = {kind: cap if capped else math.inf for kind, cap in CAP_BYTES.items()}
        self._samples = [
            {
                kind: SampleFiles(folder, kind, cap_bytes=cap, keep_packed=keep_packed)
                for kind, cap in caps.items()
            }
            for folder in self._folders
        ]
        self.pictures = PagePictures(self._folders)
        self._cost_s = 0.0
        self._written_at = -math.inf

    def due(self) -> bool:
        """Whether enough time has passed since the last `write` for its cost not to matter."""
        return time.monotonic() - self._written_at >= SHARE * self._cost_s

    def write(self, output: Path, *, ended: bool = False) -> None:
        """Write the page to `output`, which is replaced at once; `ended` as in `run_data`."""
        begin = time.monotonic()
        try:
            head, tail = shell(self.title).split(_CHUNKS)
            draft = output.with_name(f".{output.name}.{os.getpid()}.draft")
            try:
                with draft.open("wb") as file:
                    file.write(head.encode(errors="replace"))
                    data = self.data(ended=ended)
                    pictures = self.pictures.choose(self._shown())
                    data["left_out_pictures"] = self.pictures.left_out
                    file.write(_element("chunk-data", pack(data)))
                    for i, samples in enumerate(self._samples):
                        for kind, files in samples.items():
                            for step, packed in files.packed():
                                file.write(_element(f"chunk-{i}-{kind}-{step}", packed))
                    for name, small in pictures.items():
                        file.write(_element(f"picture-{name}", base64.b64encode(small)))
                    file.write(tail.encode())
                os.replace(draft, output)
            finally:
                draft.unlink(missing_ok=True)
        finally:
            self._written_at = time.monotonic()
            self._cost_s = self._written_at - begin

    def data(self, *, ended: bool = False, live: bool = False) -> dict[str, Any]:
        """All that the page shows, without samples but with the list of them."""
        runs = []
        for folder, name, samples in zip(self._folders, self._names, self._samples):
            for files in samples.values():
                files.refresh()
            index = {kind: files.index() for kind, files in samples.items()}
            runs.append({**run_data(folder, ended=ended), "name": name, "samples": index})
        metrics = list(dict.fromkeys(name for run in runs for name in run["metrics"]))
        return {
            "live": live,
            "version": __version__,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "runs": runs,
            "described": described(metrics),
            "differing": differing([run["config"] for run in runs]) if len(runs) > 1 else [],
        }

    def _shown(self) -> Iterator[str]:
        """The names of the pictures in samples, those of the last step first: the page opens there."""
        files = (files for samples in self._samples for files in samples.values())
        steps = sorted(chain.from_iterable(each.pictures() for each in files), reverse=True)
        return chain.from_iterable(names for _, names in steps)

    def chunk(self, run: int, kind: str, step: int) -> bytes | None:
        """The compressed samples of one step; None if there are none."""
        return self._samples[run][kind].packed_step(step) if run < len(self._samples) else None

    def stamp(self) -> str:
        """A text that changes when a file that the page shows does."""
        return repr([run_stamp(folder) for folder in self._folders])


def shell(title: str, *, live: bool = False) -> str:
    """The page without data. A live page may fetch data from where it came from, others may not fetch."""
    parts = _assets()
    source, pictures = ("'self'", " 'self'") if live else ("'none'", "")
    policy = (
        f"default-src 'none'; script-src {_source(parts['uplot_js'])} {_source(parts['script'])}; "
        f"style-src {_source(parts['style'])}; img-src data:{pictures}; connect-src {source}; "
        "base-uri 'none'; form-action 'none'"
    )
    return _template().render(title=title, policy=policy, live=live, chunks=_CHUNKS, **parts)


@cache
def _assets() -> dict[str, str]:
    def read(name: str) -> str:
        return (ASSETS / name).read_text(encoding="utf-8")

    script = "\n".join(read(name) for name in SCRIPTS)
    return {
        "uplot_js": read("uplot/uPlot.iife.min.js"),
        "uplot_license": read("uplot/LICENSE"),
        "uplot_version": read("uplot/VERSION").strip(),
        "style": read("uplot/uPlot.min.css") + read("page.css"),
        "script": f'(() => {{\n"use strict";\n{script}\n}})();\n',
    }


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("page.html.j2")


def _source(text: str) -> str:
    """How a content security policy names an inline script or style: by its digest."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _element(name: str, packed: bytes) -> bytes:
    # Base64 has no `<`, so nothing that a model wrote can end the element.
    return b'<script type="text/plain" id="%s">%s</script>\n' % (name.encode(), packed)
