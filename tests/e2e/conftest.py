"""What runs in these tests leave out."""

from runs import few_rows, without_plots

__all__ = ["few_rows", "without_plots"]
