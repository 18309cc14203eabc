import pytest

from quatrain.data import builtin


@pytest.fixture(scope="module", autouse=True)
def _few_rows():
    """`builtin:arithmetic` has 68 rows and its held-out part 40, which render fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtin, "TRAIN_ROWS_PER_FACT", 2)
        patch.setattr(builtin, "HELDOUT_ROWS", 40)
        builtin._arithmetic.cache_clear()
        yield
    builtin._arithmetic.cache_clear()
