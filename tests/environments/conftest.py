"""What the engines that episodes run on compute with."""

from host_model import computed_by

__all__ = ["computed_by"]
