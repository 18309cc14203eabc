import pytest

from quatrain.report import plot as module
from quatrain.report.plot import plot_run, plotted
from quatrain.run.metrics import MetricsFile


def test_reward_and_accuracy_become_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(0, {"eval/accuracy_strict": 0.4, "eval/accuracy_lenient": 0.5})
    for step in range(1, 21):
        file.write(step, {"reward/mean": step / 20 if step != 7 else float("nan")})
    file.write(20, {"eval/accuracy_strict": 0.9, "eval/accuracy_lenient": 0.95})
    plot_run(tmp_path, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_each_panel_has_the_lines_that_were_logged():
    rows = [
        {"step": 0, "eval/gsm8k/accuracy_lenient": 0.5, "eval/final/accuracy_lenient": None},
        {"step": 1, "reward/mean": 0.25, "reward/mine/mean": 0.75, "length/completion/mean": 9.0},
        {"step": 2, "reward/mean": None, "reward/greedy/mean": 1.0, "reward/mine/std": 0.1},
    ]
    assert plotted(rows) == {
        "Training reward, mean of a step": {"": ([1], [0.25])},
        "Reward of each function, unweighted": {"mine": ([1], [0.75])},
        "Held-out accuracy": {"gsm8k/lenient": ([0], [0.5])},
        "Tokens": {"completion, mean": ([1], [9.0])},
    }


def test_a_run_on_pairs_has_loss_accuracy_and_margin_and_a_warm_start_none():
    """A panel of the wrong metric, or one for the loss that a warm start logs at step 0."""
    rows = [
        {"step": 0, "eval/loss": 0.7, "eval/accuracy": 0.5},
        {"step": 1, "loss": 0.69, "dpo/loss": 0.69, "dpo/accuracy": 0.25, "dpo/margin": 0.1},
    ]
    panels = plotted(rows)
    assert panels["Loss on given data, nats"] == {"training": ([1], [0.69]), "held out": ([0], [0.7])}
    assert panels["Pairs whose better answer has the larger reward"] == {
        "training": ([1], [0.25]),
        "held out": ([0], [0.5]),
    }
    assert panels["Margin of rewards"] == {"training": ([1], [0.1])}
    warm = plotted([{"step": 0, "sft/loss": 2.0}, {"step": 1, "reward/mean": 0.5}])
    assert "Loss on given data, nats" not in warm


def test_steps_are_whole_and_the_run_is_named(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **options: figures.append(figure))
    file = MetricsFile(tmp_path / "short" / "metrics.jsonl")
    file.path.parent.mkdir()
    for step in range(1, 4):
        file.write(step, {"reward/mean": step / 3})
    plot_run(tmp_path / "short", tmp_path / "plot.png")
    (figure,) = figures
    assert figure.get_suptitle() == "short"
    assert all(tick == int(tick) for tick in figure.axes[0].get_xticks())


def test_a_run_without_either_is_an_error(tmp_path):
    pytest.importorskip("matplotlib")
    MetricsFile(tmp_path / "metrics.jsonl").write(1, {"loss": 1.0})
    with pytest.raises(ValueError, match="has none"):
        plot_run(tmp_path, tmp_path / "plot.png")


def test_without_matplotlib_the_remedy_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "can_plot", lambda: False)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[plot\]'"):
        plot_run(tmp_path, tmp_path / "plot.png")
