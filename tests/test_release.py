"""What strangers install: the release command, the wheel, the image, and files that services read."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RELEASE = ROOT / "scripts" / "release.py"
CHECKED = ["src/quatrain/__init__.py", "CHANGELOG.md"]


def tool(name: str) -> str:
    """A tool of the development environment; skips the test without it."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    return found or pytest.skip(f"needs {name}: make setup")


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [("github-workflows", ".github/workflows/*.yml"), ("citation-file-format", "CITATION.cff")],
)
def test_a_file_of_a_service_fits_its_schema(schema, pattern):
    files = list(ROOT.glob(pattern))
    assert files
    command = [tool("check-jsonschema"), "--builtin-schema", f"vendor.{schema}", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_workflow_calls_targets_of_the_makefile():
    """Catches a target that is gone, and tests that run without what they need."""
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    called = [line.split()[3:] for line in workflow.splitlines() if "run: make " in line]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    assert called == [["check", "test"], ["site"], ["test-dist"]]
    # Else the tests of sandboxes are skipped there.
    assert "bubblewrap" in workflow.partition("make check test")[0]
    assert all(f"\n{target}: " in makefile for targets in called for target in targets)


def test_the_dockerfile_passes_hadolint():
    done = subprocess.run([tool("hadolint"), ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_an_image_gets_what_the_installation_needs_and_no_secrets():
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert lines[1] == "*"
    taken = {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert {"LICENSE", "README.md", "constraints.txt", "pyproject.toml", "src"} <= taken
    assert all((ROOT / name).exists() for name in taken)


@pytest.fixture
def repository(tmp_path):
    """A repository of the files that a release changes, all committed."""
    for name in CHECKED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n### Added\n\n- All.\n", "utf-8")
    run("git", "init", "--quiet", folder=tmp_path)
    for key in ("user.name", "user.email"):
        run("git", "config", key, "tests", folder=tmp_path)
    run("git", "add", ".", folder=tmp_path)
    run("git", "commit", "--quiet", "--message", "all", folder=tmp_path)
    return tmp_path


def run(*command: object, folder: Path) -> str:
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def release(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, RELEASE, *words], cwd=folder, capture_output=True, text=True)


def test_a_release_is_checked_with_its_version_committed_and_tagged(repository):
    done = release(repository, "7.8.9", "grep", "-q", '^__version__ = "7.8.9"$', CHECKED[0])
    assert done.returncode == 0, done.stderr
    assert run("git", "status", "--porcelain", folder=repository) == ""
    assert run("git", "describe", folder=repository) == "v7.8.9\n"
    assert run("git", "diff", "--name-only", "HEAD~", folder=repository).split() == sorted(CHECKED)
    heading, added = (repository / "CHANGELOG.md").read_text("utf-8").split("## [7.8.9] - 20")
    assert heading == "# Changelog\n\n## [Unreleased]\n\n"
    assert added.endswith("\n\n### Added\n\n- All.\n")
    assert "describe what the release changes" in release(repository, "7.9.0", "true").stderr
    assert "the tag v7.8.9 exists" in release(repository, "7.8.9", "true").stderr


@pytest.mark.parametrize(
    ("version", "command", "file", "error"),
    [
        ("7.8.9", "false", None, "`false` failed; nothing was released"),
        ("v7.8", "true", None, "a version is like 0.1.0"),
        ("7.8.9", "true", "notes.txt", "commit or remove first:\n?? notes.txt"),
    ],
)
def test_a_release_that_cannot_be_made_changes_nothing(repository, version, command, file, error):
    if file:
        (repository / file).touch()
    before = run("git", "rev-parse", "HEAD", folder=repository)
    done = release(repository, version, command)
    assert (done.returncode, done.stdout) == (1, "")
    assert error in done.stderr
    assert run("git", "diff", folder=repository) == run("git", "tag", folder=repository) == ""
    assert run("git", "rev-parse", "HEAD", folder=repository) == before


@pytest.mark.parametrize("refused", ["commit", "tag"])
def test_a_release_that_git_refuses_changes_nothing(repository, refused):
    hook = repository / ".git" / "hooks" / {"commit": "pre-commit", "tag": "reference-transaction"}[refused]
    hook.parent.mkdir(exist_ok=True)
    refuses = {"commit": "true", "tag": '[ "$1" = prepared ] && grep -q refs/tags/'}[refused]
    hook.write_text(f"#!/bin/sh\nif {refuses}; then echo no thanks >&2; exit 1; fi\n")
    hook.chmod(0o755)
    before = run("git", "rev-parse", "HEAD", folder=repository)
    done = release(repository, "7.8.9", "true")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no thanks" in done.stderr
    assert f"`git {refused} " in done.stderr
    assert run("git", "status", "--porcelain", folder=repository) == ""
    assert run("git", "tag", folder=repository) == ""
    assert run("git", "rev-parse", "HEAD", folder=repository) == before


@pytest.mark.slow
@pytest.mark.parametrize("versions", ["oldest", "newest"])
def test_the_wheel_trains_with_nothing_else_installed(versions, tmp_path):
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, ROOT, folder=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    command = [sys.executable, ROOT / "scripts" / "try_wheel.py", wheel, versions]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_pinned_versions_allow_the_extras_together(tmp_path):
    extras = "dev,hub,ray,serve,site,tensorboard,tinker,trackio,wandb"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed")
    run(*pip, "-c", ROOT / "constraints.txt", f"{ROOT}[{extras}]", folder=tmp_path)
