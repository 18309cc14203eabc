"""The processes of a run: how they are started, find each other, and learn that one has failed."""
