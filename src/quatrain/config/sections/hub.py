"""The section `hub`: the trained model on the Hugging Face Hub."""

from __future__ import annotations

from typing import Annotated

from quatrain.config.fields import Section, Text, must
from quatrain.config.places import HUB_ID

Repository = Annotated[Text, must("be a repository on the Hugging Face Hub, as OWNER/NAME", HUB_ID.fullmatch)]


class HubConfig(Section):
    """The trained model on the Hugging Face Hub."""

    push: Repository | None = None
    """Repository `OWNER/NAME` that gets the trained model and its card at the end of the run; created at the
    start, so that a missing right is an error then. Needs `HF_TOKEN` or a login. In a run of several
    processes, process 0 uploads, which must end within `distributed.shutdown_timeout_s`. null: none."""
    private: bool = True
    """Whether a new repository is private; one that exists is not changed."""
