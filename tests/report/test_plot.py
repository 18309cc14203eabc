import pytest

from quatrain.report import plot as module
from quatrain.report.metrics import MetricsFile
from quatrain.report.plot import plot_run


def test_reward_and_accuracy_become_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(0, {"eval/accuracy_strict": 0.4, "eval/accuracy_lenient": 0.5})
    for step in range(1, 21):
        file.write(step, {"reward/mean": step / 20 if step != 7 else float("nan")})
    file.write(20, {"eval/accuracy_strict": 0.9, "eval/accuracy_lenient": 0.95})
    plot_run(tmp_path, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_either_is_an_error(tmp_path):
    pytest.importorskip("matplotlib")
    MetricsFile(tmp_path / "metrics.jsonl").write(1, {"loss": 1.0})
    with pytest.raises(ValueError, match="has neither"):
        plot_run(tmp_path, tmp_path / "plot.png")


def test_without_matplotlib_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "can_plot", lambda: False)
    with pytest.raises(ValueError, match=r"pip install 'quatrain\[plot\]'"):
        plot_run(tmp_path, tmp_path / "plot.png")
