"""The section `distributed`: how long processes wait for each other."""

from __future__ import annotations

from quatrain.config.fields import Count, Section


class DistributedConfig(Section):
    """How long the processes of a run with several processes wait for each other."""

    start_timeout_s: Count = 300
    """Maximum time, in seconds, that a process waits at the start for the coordinator and for all other
    processes."""
    heartbeat_timeout_s: Count = 60
    """Time without a sign of life, in seconds, after which a process counts as dead and the others end."""
    shutdown_timeout_s: Count = 600
    """Maximum time, in seconds, that a process waits at the end for the other processes, mainly for process 0
    to write its files."""
