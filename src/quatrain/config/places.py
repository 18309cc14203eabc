"""What a path in the configuration may be: a local one, where `~` is the home folder, or a hub id.

Used wherever `model.path`, `model.tokenizer` or a data set is opened.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""`owner/name`; anything else that is not there is a missing file."""


def local_path(path: str | Path) -> Path:
    """`path` with a leading `~` or `~user` replaced by that home folder; unchanged where there is none."""
    return Path(os.path.expanduser(path))
