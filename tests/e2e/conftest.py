import pytest

from quatrain.data import builtin
from quatrain.report import writer


@pytest.fixture(scope="module", autouse=True)
def _without_plots():
    """Runs draw no plot.png, which costs as much as a step; `tests/report/` tests it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "can_plot", lambda: False)
        yield


@pytest.fixture(scope="module", autouse=True)
def _few_rows():
    """`builtin:arithmetic` has 68 rows and its held-out part 40, which render fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtin, "TRAIN_ROWS_PER_FACT", 2)
        patch.setattr(builtin, "HELDOUT_ROWS", 40)
        builtin._arithmetic.cache_clear()
        yield
    builtin._arithmetic.cache_clear()
