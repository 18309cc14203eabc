"""What the engines of servers compute with."""

from host_model import all_computed_by, computed_by

__all__ = ["all_computed_by", "computed_by"]
