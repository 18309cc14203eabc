"""The page of a run of one's own in Chromium: `QUATRAIN_RUN=runs/NAME make test-browser`.

What the page shows is compared with the run's files. The page is written anew, into a folder of the test.
"""

import json
import os
from pathlib import Path

import pytest

from quatrain.report.page import Page
from quatrain.run.metrics import read_metrics

RUN = os.environ.get("QUATRAIN_RUN")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not RUN, reason="QUATRAIN_RUN has no folder of a run"),
]


@pytest.fixture(scope="module")
def run():
    return Path(RUN)


@pytest.fixture(scope="module")
def address(run, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    Page([run]).write(path)
    return path.as_uri()


@pytest.fixture
def page(browser, address):
    browser.open(address)
    browser.wait("return document.querySelectorAll('#group .card').length")
    return browser


def read(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_the_newest_step_is_shown_with_its_group(page, run):
    rows = read(max((run / "samples").glob("step_*.jsonl")))
    assert page.js("return Number(document.querySelector('#step').value)") == rows[0]["step"]
    groups = list(dict.fromkeys(row["group_id"] for row in rows))
    assert page.js("return document.querySelectorAll('#prompts button').length") == len(groups)
    page.click("#prompts button")
    bodies = page.texts("#group .card .body")
    assert bodies in [sorted_by_reward(rows, group) for group in groups]


def sorted_by_reward(rows, group):
    own = [row for row in rows if row["group_id"] == group]
    return [row["completion"] for row in sorted(own, key=lambda row: -row["reward"])]


def test_curves_reach_the_last_step_and_nothing_is_refused(page, run):
    steps = [row["step"] for row in read_metrics(run / "metrics.jsonl")]
    assert str(max(steps)) in page.text("#overview-content")
    titles = set(page.texts("#curves figcaption b"))
    assert {"Reward", "Reward by function", "Accuracy, evaluation", "Length", "Seconds by stage"} <= titles
    page.js("document.querySelector('#curves figure').scrollIntoView()")
    page.wait("return document.querySelector('#curves canvas')")
    assert page.complaints() == []


def test_evaluations_before_and_after_are_side_by_side(page, run):
    """Counted from the files: what became right, what became wrong, and what stayed as it was."""
    files = sorted((run / "samples").glob("eval_*.jsonl"))
    names = ("set", "prompt_index", "sample", "greedy")
    before, after = (
        {tuple(row[name] for name in names): row for row in read(path)} for path in (files[0], files[-1])
    )
    pairs = [(before[key]["correct"], after[key]["correct"]) for key in before.keys() & after.keys()]
    counted = {
        "became right": pairs.count((0.0, 1.0)),
        "became wrong": pairs.count((1.0, 0.0)),
        "stayed right": pairs.count((1.0, 1.0)),
        "stayed wrong": pairs.count((0.0, 0.0)),
    }
    page.wait("return document.querySelectorAll('#outcomes button').length")
    shown = page.texts("#outcomes button")
    assert [f"{name} {count}" for name, count in counted.items()] == shown[1:5]
    page.click("[data-outcome=fixed]")
    assert page.js("return document.querySelectorAll('#pairs .pair').length") == min(
        20, counted["became right"]
    )
