"""What the engines of these tests compute with."""

from host_model import computed_by

__all__ = ["computed_by"]
