from quatrain.ops.shape_buckets import power_of_four, round_up


def test_rungs():
    rungs = sorted({round_up(size, 1) for size in range(1, 129)})
    assert rungs == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128]


def test_never_below_and_little_above():
    for size in range(1, 5000):
        rung = round_up(size, 1)
        assert size <= rung <= size * 1.25
        assert round_up(rung, 1) == rung


def test_minimum():
    assert round_up(3) == 16
    assert round_up(0, 1) == 1


def test_powers_of_four():
    assert [power_of_four(size) for size in (0, 1, 2, 4, 5, 16, 17, 64, 65)] == [
        1,
        1,
        4,
        4,
        16,
        16,
        64,
        64,
        256,
    ]
