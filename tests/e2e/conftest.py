import pytest

from quatrain.models import families


@pytest.fixture(scope="module")
def narrow_model():
    """`builtin:tiny` has two narrow layers in these tests, which compile faster than its four."""
    narrow = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families._BUILTIN, "tiny", families._BUILTIN["tiny"] | narrow)
        yield
