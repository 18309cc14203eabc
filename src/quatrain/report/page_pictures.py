"""Chooses and shrinks the pictures that the run page shows beside completions.

Data flow: names of pictures in the messages of samples, and the folder `pictures/` of each run ->
`PagePictures` -> `page.py`, which puts them into the page; a served page asks for each file as it is.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from quatrain.run.pictures import kept_picture, smaller
from quatrain.run.run_dir import RunDir

SIDE = 256
"""Pixels of the longer side of a picture in the page, at most."""
CAP_BYTES = 8 * 2**20
"""Bytes of the pictures that a page holds."""


class PagePictures:
    """The pictures of the runs at `folders`; what was made smaller is kept for the next page."""

    def __init__(self, folders: Sequence[Path]):
        self._folders = [RunDir(folder).pictures for folder in folders]
        self._small: dict[str, bytes] = {}
        self.left_out = 0
        """Pictures that the last choice left out, because of the cap."""

    def file(self, name: str) -> bytes | None:
        """The file of a picture; None if no run has it."""
        found = (kept_picture(folder, name) for folder in self._folders)
        return next(filter(None, found), None)

    def choose(self, names: Iterable[str]) -> dict[str, bytes]:
        """The small pictures by name, the first ones first, as many as fit into `CAP_BYTES`.

        One that a run has not, or that is no picture, is left out; the page shows its mark.
        """
        chosen: dict[str, bytes] = {}
        left, wanted = CAP_BYTES, list(dict.fromkeys(names))
        for number, name in enumerate(wanted):
            small = self._small.get(name) or self._made(name)
            if small is None:
                continue
            left -= len(small)
            if left < 0:
                self.left_out = len(wanted) - number
                break
            chosen[name] = small
        else:
            self.left_out = 0
        self._small = chosen
        return chosen

    def _made(self, name: str) -> bytes | None:
        encoded = self.file(name)
        return None if encoded is None else smaller(encoded, SIDE)
