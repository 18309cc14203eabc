"""Paths in the configuration: a local path, in which `~` is the home folder, or an id on the Hub.

Used wherever `model.path`, `model.tokenizer` or a data set is opened.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""A Hub id, `owner/name`. Other text that is not an existing file is reported as a missing file."""


def local_path(path: str | Path) -> Path:
    """`path` with a leading `~` or `~user` replaced by that user's home folder."""
    return Path(os.path.expanduser(path))
