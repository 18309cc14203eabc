import pytest

from quatrain.models import families
from quatrain.report import writer


@pytest.fixture(scope="module", autouse=True)
def _without_plots():
    """Runs draw no plot.png, which costs as much as a step; `tests/report/` tests it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "can_plot", lambda: False)
        yield


@pytest.fixture(scope="module")
def narrow_model():
    """`builtin:tiny` has two narrow layers in these tests, which compile faster than its four."""
    narrow = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families._BUILTIN, "tiny", families._BUILTIN["tiny"] | narrow)
        yield
