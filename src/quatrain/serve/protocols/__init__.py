"""The protocols in which programs ask for an answer: one file each, and what they share in `protocol.py`."""
