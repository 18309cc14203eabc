import json
import re

import pytest
from page_runs import SCRIPT, make_run, step_samples, unpacked, write_rows

from quatrain.report import page as module
from quatrain.report.page import ASSETS, SCRIPTS, Page, shell


def written(folders, tmp_path):
    """The page of `folders` as text, and its data."""
    output = tmp_path / "out.html"
    Page(folders).write(output)
    html = output.read_text(encoding="utf-8")
    return html, chunks(html)


def chunks(html):
    found = re.findall(r'<script type="text/plain" id="chunk-([^"]+)">([^<]*)</script>', html)
    return {name: unpacked(text) for name, text in found}


def test_the_page_holds_the_run(tmp_path):
    _, found = written([make_run(tmp_path)], tmp_path)
    (run,) = found["data"]["runs"]
    assert (run["name"], run["state"], run["step"], run["total_steps"]) == ("first", "finished", 3, 3)
    assert run["metrics"]["brand/new"] == [None, 5.0, 5.0, 5.0]
    assert run["non_finite"] == {"update/entropy": [1, 2, 3]}
    assert run["hints"] == [{"step": 2, "hint": "truncated", "text": "Raise it."}]
    steps = run["samples"]["step"]["steps"]
    assert [each["step"] for each in steps] == [1, 2, 3]
    assert (steps[0]["no_signal"], steps[0]["wrong_rewarded"], steps[0]["truncated"]) == (1, 3, 1)
    assert sorted(found) == ["0-eval-0", "0-eval-3", "0-step-1", "0-step-2", "0-step-3", "data"]
    assert found["0-step-1"][0]["samples"][0]["completion"] == SCRIPT
    assert not list(tmp_path.glob(".*draft"))


def test_nothing_that_a_model_wrote_is_in_the_page_as_it_was_written(tmp_path):
    folder = make_run(tmp_path, "a<b>&")
    html, _ = written([folder], tmp_path)
    assert "window.broken" not in html
    assert "<b>" not in html.split("<script", 1)[0]
    assert html.count("<script") == 5 + 1 + 2  # steps, data, uPlot and the page's own


def test_the_page_needs_no_network_and_runs_only_its_own_scripts():
    html = shell("title")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)[1]
    assert "default-src &#39;none&#39;" in policy
    assert "connect-src &#39;none&#39;" in policy
    assert "unsafe" not in policy
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", html)
    assert "connect-src &#39;self&#39;" in shell("title", live=True)


def test_the_chart_library_travels_with_its_license():
    version = (ASSETS / "uplot" / "VERSION").read_text().strip()
    assert f"(v{version})" in (ASSETS / "uplot" / "uPlot.iife.min.js").read_text(encoding="utf-8")[:100]
    html = shell("title")
    assert f"uPlot {version}, MIT license" in html
    assert "Copyright (c) 2022 Leon Sorokin" in html


def test_the_scripts_build_no_html_from_text():
    for name in SCRIPTS:
        source = (ASSETS / name).read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", source
        )
        assert "</script" not in source


def test_several_runs_have_the_keys_that_differ(tmp_path):
    _, found = written([make_run(tmp_path, "one"), make_run(tmp_path, "two", weight=0.25)], tmp_path)
    assert found["data"]["differing"] == [
        {"key": "run.name", "values": ["one", "two"]},
        {"key": "reward.functions.mine.py:f # g", "values": [0.5, 0.25]},
    ]
    assert {"0-step-1", "1-step-1"} <= set(found)


def test_what_the_cap_leaves_out_is_said(tmp_path, monkeypatch):
    folder = make_run(tmp_path, steps=8)
    size = (folder / "samples" / "step_000001.jsonl").stat().st_size
    monkeypatch.setitem(module.CAP_BYTES, "step", 3 * size)
    _, found = written([folder], tmp_path)
    index = found["data"]["runs"][0]["samples"]["step"]
    assert [each["step"] for each in index["steps"]] == [1, 5, 8]
    assert (index["left_out_steps"], index["left_out_samples"]) == (5, 30)
    assert [name for name in found if name.startswith("0-step")] == ["0-step-1", "0-step-5", "0-step-8"]


def test_a_run_without_samples_plan_hints_and_configuration_has_a_page(tmp_path):
    write_rows(tmp_path / "bare" / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    _, found = written([tmp_path / "bare"], tmp_path)
    (run,) = found["data"]["runs"]
    assert run["samples"]["step"]["steps"] == []
    assert run["plan"] is None
    assert list(found) == ["data"]


def test_a_refresh_takes_up_what_is_new(tmp_path):
    folder = make_run(tmp_path)
    output = tmp_path / "out.html"
    page = Page([folder])
    page.write(output)
    write_rows(folder / "samples" / "step_000004.jsonl", step_samples(4))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward/mean": 0.9}) + "\n")
    page.write(output)
    found = chunks(output.read_text(encoding="utf-8"))
    assert found["data"]["runs"][0]["step"] == 4
    assert "0-step-4" in found


def test_a_page_that_was_just_written_is_not_due(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    page = Page([make_run(tmp_path)])
    assert page.due()
    monkeypatch.setattr(page, "data", lambda ended: now.__setitem__(0, now[0] + 2.0) or {})
    page.write(tmp_path / "out.html")
    now[0] += 39.0
    assert not page.due()
    now[0] += 1.0
    assert page.due()


def test_a_page_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    page = Page([make_run(tmp_path)])
    output = tmp_path / "out.html"
    output.write_text("before")
    monkeypatch.setattr(module.os, "replace", lambda *paths: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        page.write(output)
    assert output.read_text() == "before"
    assert not list(tmp_path.glob(".*draft"))
