"""Makes a release of this repository, all but the upload (`make release VERSION=0.1.0`).

    python scripts/release.py VERSION COMMAND …

Writes VERSION into `quatrain.__version__` and as a heading into the changelog, runs COMMAND (the checks and
the build), commits and tags. If one of these fails, both files and the branch are as before.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

PACKAGE, CHANGELOG = Path("src/quatrain/__init__.py"), Path("CHANGELOG.md")
UNRELEASED = "## [Unreleased]\n"


def git(*words: str) -> str:
    """What `git words` prints; its errors go to standard error."""
    return subprocess.run(["git", *words], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def check(version: str) -> None:
    """Raises SystemExit if `version` cannot be released from this folder."""
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        raise SystemExit(f"a version is like 0.1.0 or 0.1.0rc1, got {version!r}; make release VERSION=0.1.0")
    if changed := git("status", "--porcelain"):
        raise SystemExit(f"a release is made of what is committed; commit or remove first:\n{changed}")
    if git("tag", "--list", f"v{version}"):
        raise SystemExit(f"the tag v{version} exists; choose another version")
    _, _, after = CHANGELOG.read_text("utf-8").partition(UNRELEASED)
    if not after.partition("\n## ")[0].strip():
        raise SystemExit(f"{CHANGELOG} has nothing below [Unreleased]; describe what the release changes")


def write(version: str) -> None:
    """Write `version` where it stands."""
    source, count = re.subn(
        r'^__version__ = ".*"$', f'__version__ = "{version}"', PACKAGE.read_text("utf-8"), flags=re.MULTILINE
    )
    assert count == 1, PACKAGE
    PACKAGE.write_text(source, "utf-8")
    heading = f"{UNRELEASED}\n## [{version}] - {datetime.now(UTC):%Y-%m-%d}\n"
    CHANGELOG.write_text(CHANGELOG.read_text("utf-8").replace(UNRELEASED, heading, 1), "utf-8")


def main(version: str, *command: str) -> None:
    """Check, write, run `command`, commit and tag."""
    check(version)
    before = {path: path.read_text("utf-8") for path in (PACKAGE, CHANGELOG)}
    committed = False
    try:
        write(version)
        subprocess.run(command, check=True)
        git("commit", "--quiet", "--message", f"Release {version}", "--", *map(str, before))
        committed = True
        git("tag", "--annotate", f"v{version}", "--message", f"quatrain {version}")
    except BaseException as error:
        for path, text in before.items():
            path.write_text(text, "utf-8")
        if committed:
            git("reset", "--quiet", "HEAD~")
        if isinstance(error, subprocess.CalledProcessError):
            failed = " ".join(map(str, error.cmd))
            raise SystemExit(f"`{failed}` failed; nothing was released") from error
        raise
    print(f"v{version} is tagged; its wheel and sdist are in dist/; next: push both, and upload")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
