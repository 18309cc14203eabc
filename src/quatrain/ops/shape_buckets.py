"""The few sizes that shapes are rounded up to, so that data never causes new compilations for long."""


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()


def power_of_four(size: int) -> int:
    """The smallest power of four that is at least `size`."""
    return 1 << -(-max(size - 1, 0).bit_length() // 2) * 2


def round_up(size: int, minimum: int = 16) -> int:
    """The smallest of 4, 5, 6 and 7 times a power of two, or 1, 2 and 3, that is at least both arguments.

    At most a fifth of the result is padding, and an octave has four rungs.
    """
    target, unit = max(size, minimum, 1), 1
    while 7 * unit < target:
        unit *= 2
    return -(-target // unit) * unit


def round_down(size: int) -> int:
    """The largest of 4, 5, 6 and 7 times a power of two, or 1, 2 and 3, that is at most `size`; or 0."""
    unit = 1
    while 8 * unit <= size:
        unit *= 2
    return size // unit * unit


def round_up_coarsely(size: int, minimum: int = 1) -> int:
    """The smallest of 2 and 3 times a power of two, or 1, that is at least both arguments.

    For sizes of which each compiles a program beside those of `round_up`: an octave has two rungs.
    """
    target = max(size, minimum, 1)
    power = power_of_two(target)
    smaller = power * 3 // 4
    return smaller if power >= 4 and target <= smaller else power
