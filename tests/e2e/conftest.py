import pytest

from quatrain.report import writer


@pytest.fixture(scope="module", autouse=True)
def _without_plots():
    """Runs draw no plot.png, which costs as much as a step; `tests/report/` tests it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "can_plot", lambda: False)
        yield
