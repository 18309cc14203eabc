"""What the engines that agents ask compute with."""

from host_model import computed_by

__all__ = ["computed_by"]
