"""A stand-in for the command lines `docker` and `podman`, as far as their manuals say it.

A container is a folder below $FAKE_CONTAINERS; what `exec` runs, runs on this machine with that folder in
place of /tmp. Each call is a line of its file `calls`. Options that the manuals do not have are errors.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

STATE = Path(os.environ["FAKE_CONTAINERS"])
RUN = {"detach", "rm", "init", "pull", "name", "network", "read-only", "cap-drop", "security-opt", "user"}
RUN |= {"memory", "memory-swap", "pids-limit", "tmpfs", "shm-size", "ulimit", "log-driver", "entrypoint"}
EXEC = {"interactive", "workdir", "env"}
NO_CONTAINER = 1


def fail(code, text):
    print(f"Error: {text}", file=sys.stderr)
    sys.exit(code)


def options(words, known):
    """The leading options of `words`, and the rest."""
    found = {}
    while words and words[0].startswith("--"):
        name, _, value = words.pop(0)[2:].partition("=")
        if name not in known:
            fail(125, f"unknown flag: --{name}")
        found.setdefault(name, []).append(value)
    return found, words


def run(words):
    given, (image, seconds) = options(words, RUN)
    if given["pull"] == ["never"] and image != "python:slim":
        fail(125, f"No such image: {image}")
    container = STATE / given["name"][0]
    container.mkdir()
    (container / "options").write_text(json.dumps({**given, "seconds": seconds}))
    print("0123456789abcdef")


def execute(words):
    given, (name, *command) = options(words, EXEC)
    container = STATE / name
    if not container.is_dir():
        fail(NO_CONTAINER, f"No such container: {name}")
    command = [word.replace("/tmp", str(container)) for word in command]
    environment = {"PATH": os.environ["PATH"], **dict(each.split("=", 1) for each in given.get("env", ()))}
    place = given.get("workdir", ["/tmp"])[0].replace("/tmp", str(container))
    stdin = None if "interactive" in given else subprocess.DEVNULL
    try:
        with subprocess.Popen(command, cwd=place, env=environment, stdin=stdin) as process:
            (container / f"process-{process.pid}").touch()
            code = process.wait()
    except FileNotFoundError:
        fail(127, f'exec: "{command[0]}": executable file not found in $PATH')
    sys.exit(code if code >= 0 else 128 - code)


def inspect(words):
    _, (name,) = options(words[1:], {"format"})
    print("true" if (STATE / name / "work" / "out-of-memory").exists() else "false")


def remove(words):
    _, (name,) = options(words, {"force"})
    container = STATE / name
    if not container.is_dir():
        fail(NO_CONTAINER, f"No such container: {name}")
    for process in container.glob("process-*"):
        subprocess.run(["kill", "-KILL", process.name.removeprefix("process-")], stderr=subprocess.DEVNULL)
    shutil.copy(container / "options", STATE / "last-options")
    shutil.rmtree(container)


def main():
    words = sys.argv[1:]
    with open(STATE / "calls", "a") as calls:
        calls.write(json.dumps(words) + "\n")
    match words:
        case ["info", *_]:
            print((STATE / "info").read_text())
        case ["image", "inspect", image]:
            if image != "python:slim":
                fail(1, f"No such image: {image}")
        case ["run", *rest]:
            run(rest)
        case ["exec", *rest]:
            execute(rest)
        case ["inspect", *_]:
            inspect(words)
        case ["rm", *rest]:
            remove(rest)
        case _:
            fail(125, f"unknown command {words}")


if __name__ == "__main__":
    main()
