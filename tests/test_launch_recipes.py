"""The recipes under launch/: checked, and run with stand-ins for `gcloud` and `srun`."""

import json
import math
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

from quatrain.cli import main as cli
from quatrain.cli.arguments import given
from quatrain.cluster.detect import ClusterPlace, detect
from quatrain.config.load import load_config

REPOSITORY = Path(__file__).parents[1]
LAUNCH = REPOSITORY / "launch"
SCRIPTS = [*sorted(LAUNCH.glob("*.sh")), LAUNCH / "slurm.sbatch"]
RAYJOB = yaml.safe_load((LAUNCH / "kuberay.yaml").read_text(encoding="utf-8"))
JOBSET = yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text(encoding="utf-8"))
# Words that a shell would take apart or expand.
WORDS = ["train", "c.yaml", "--set", "data.system_prompt=a 'b' \"c\" $HOME; exit 5 # $(date)", "--set", "x=*"]

# Runs what it is asked to run on every worker here, with a home for each; `scp` copies into the homes.
GCLOUD = r"""#!/usr/bin/env python3
import os, pathlib, shutil, subprocess, sys
verb, *words = sys.argv[sys.argv.index("tpu-vm") + 1:]
options = dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))
names = [word for word in words if not word.startswith("--")]
assert (options["zone"], options["worker"]) == ("zone-a", "all"), options
root, failed = pathlib.Path(os.environ["WORKERS"]), 0
for home in sorted(root.iterdir()):
    if verb == "scp":
        pod, path = names[1].split(":")
        assert pod == "pod", names
        shutil.copyfile(names[0], home / path)
        (home / path).chmod(0o644)
    else:
        assert names == ["pod"], names
        environ = {**os.environ, "HOME": str(home), "PATH": f"{home}/bin:{os.environ['PATH']}"}
        failed |= subprocess.run(["bash", "-c", options["command"]], env=environ, cwd=home).returncode
sys.exit(failed)
"""
# Says what it was asked, and fails where a file says so.
QUATRAIN = """#!/usr/bin/env python3
import json, os, sys
print(json.dumps({"words": sys.argv[1:], "cwd": os.getcwd()}))
print("on stderr", file=sys.stderr)
sys.exit(4 if os.path.exists("fails") else 0)
"""


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def workers(tmp_path, monkeypatch):
    """The homes of two workers with quatrain, behind a stand-in for gcloud."""
    homes = [tmp_path / "workers" / f"w{i}" for i in range(2)]
    for i, home in enumerate(homes):
        executable(home / "quatrain" / ".venv" / "bin" / "quatrain", QUATRAIN)
        executable(home / "bin" / "hostname", f"#!/bin/sh\necho pod-w-{i}\n")
    executable(tmp_path / "bin" / "gcloud", GCLOUD)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("WORKERS", str(tmp_path / "workers"))
    monkeypatch.chdir(tmp_path)
    return homes


def run(script, *arguments, **environ):
    return subprocess.run(
        [LAUNCH / script, *arguments], capture_output=True, text=True, env={**os.environ, **environ}
    )


def parsed(words):
    """The configuration that a command line of quatrain names; fails where quatrain would refuse it."""
    command, *rest = words
    context = typer.main.get_command(cli.app).commands[command].make_context(command, list(rest))
    file, overrides, _ = given(context.params["words"], context.params["set_"])
    return load_config(REPOSITORY / file, overrides, {}).config


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script):
    beside_python = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside_python) if beside_python.is_file() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("needs shellcheck: make setup")
    done = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize(
    ("script", "arguments", "environ"),
    [
        ("tpu_pod.sh", (), {}),
        ("tpu_pod.sh", ("pod", "zone-a"), {}),
        ("tpu_pod.sh", ("pod", "zone-a", "rm"), {}),
        ("tpu_pod.sh", ("pod", "zone-a", "setup", "now"), {}),
        ("sync_env.sh", ("pod",), {}),
        ("sync_env.sh", ("pod", "zone-a", ".env", "more"), {}),
        ("slurm.sbatch", (), {"SLURM_SUBMIT_DIR": "."}),
    ],
)
def test_missing_arguments_are_a_users_error(workers, script, arguments, environ):
    done = run(script, *arguments, **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: ")


def test_every_worker_of_a_pod_gets_the_command_word_by_word(workers):
    done = run("tpu_pod.sh", "pod", "zone-a", *WORDS)
    assert done.returncode == 0
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert [who for who, _ in lines] == ["[pod-w-0]", "[pod-w-0]", "[pod-w-1]", "[pod-w-1]"]
    told = [json.loads(text) for _, text in lines if text != "on stderr"]
    assert told == [{"words": WORDS, "cwd": str(home / "quatrain")} for home in workers]


def test_a_worker_that_fails_is_the_exit_status(workers):
    (workers[1] / "quatrain" / "fails").touch()
    assert run("tpu_pod.sh", "pod", "zone-a", "eval").returncode == 4


def test_secrets_reach_every_worker_with_mode_600_and_no_screen(workers, tmp_path):
    secrets = "HF_TOKEN='very secret'\nWANDB_API_KEY=hidden\n"
    (tmp_path / ".env").write_text(secrets)
    for _ in range(2):  # a second time replaces the first
        done = run("sync_env.sh", "pod", "zone-a")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == ".env is ~/quatrain/.env on every worker of pod, with mode 600\n"
    for home in workers:
        written = home / "quatrain" / ".env"
        assert written.read_text() == secrets
        assert stat.S_IMODE(written.stat().st_mode) == 0o600
        assert not (home / ".quatrain-env").exists()


def test_a_missing_file_of_secrets_is_a_users_error(workers):
    done = run("sync_env.sh", "pod", "zone-a", "gone.env")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no file gone.env;")


def directives():
    text = (LAUNCH / "slurm.sbatch").read_text(encoding="utf-8")
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))


def test_slurm_starts_one_process_on_each_node_which_finds_its_place(tmp_path, monkeypatch):
    asked = directives()
    assert asked["ntasks-per-node"] == "1"
    executable(
        tmp_path / "bin" / "srun",
        '#!/bin/sh\ntest "${#QUATRAIN_CLUSTER_TOKEN}" -eq 64 || exit 3\n'
        'for word; do printf "%s\\n" "$word"; done\npwd\n',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    done = run("slurm.sbatch", *WORDS, SLURM_SUBMIT_DIR=str(tmp_path), SLURM_CPUS_PER_TASK="3")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        *("--label", "--kill-on-bad-exit=1", "--cpus-per-task=3", ".venv/bin/quatrain"),
        *WORDS,
        str(tmp_path),
    ]
    # What srun tells the second of those tasks.
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "gpu[3-4]",
        "SLURM_STEP_NUM_NODES": asked["nodes"],
        "SLURM_NTASKS": str(int(asked["nodes"]) * int(asked["ntasks-per-node"])),
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
    }
    assert detect(environ) == ClusterPlace("gpu3:61447", 2, 1)


def test_the_jobset_is_one():
    assert (JOBSET["apiVersion"], JOBSET["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", JOBSET["metadata"]["name"])
    assert JOBSET["spec"].keys() == {"failurePolicy", "replicatedJobs"}
    (rule,) = JOBSET["spec"]["failurePolicy"]["rules"]
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"])
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    for job in JOBSET["spec"]["replicatedJobs"]:
        assert job.keys() == {"name", "replicas", "template"}


def test_the_jobset_has_a_pod_for_each_host_with_all_its_chips():
    (job,) = JOBSET["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    chips = int(container["resources"]["limits"]["google.com/tpu"])
    topology = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    hosts = math.prod(int(side) for side in topology.split("x")) // chips
    assert spec["parallelism"] == spec["completions"] == hosts == 4
    assert spec["completionMode"] == "Indexed"
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert pod["restartPolicy"] == "Never"  # asked for by podFailurePolicy
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [cli.USER_ERROR],
    }
    assert {mount["name"] for mount in container["volumeMounts"]} == {"runs"}
    assert {volume["name"] for volume in pod["volumes"]} == {"runs"}


def test_the_jobset_runs_a_command_of_quatrain_that_resumes():
    (job,) = JOBSET["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["quatrain"]
    assert container["args"][2:4] == ["--resume", "auto"]
    config = parsed(container["args"])
    (mount,) = container["volumeMounts"]
    assert config.run.dir.startswith(mount["mountPath"])
    assert config.distributed.start_timeout_s == 3600


def test_the_rayjob_has_a_worker_for_each_pod_and_keeps_the_heads_gpus_for_training():
    assert (RAYJOB["apiVersion"], RAYJOB["kind"]) == ("ray.io/v1", "RayJob")
    command, *words = shlex.split(RAYJOB["spec"]["entrypoint"])
    config = parsed(words)
    assert command == "quatrain"
    assert words[2:4] == ["--resume", "auto"]
    cluster = RAYJOB["spec"]["rayClusterSpec"]
    head, (group,) = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    assert head["rayStartParams"] == {"num-gpus": "0"}
    assert config.rollout.workers == group["replicas"] == group["maxReplicas"]
    for pod in (head["template"]["spec"], group["template"]["spec"]):
        (container,) = pod["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        mounts = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", ())}
        assert mounts.keys() == {volume["name"] for volume in pod.get("volumes", ())}
        assert all(config.run.dir.startswith(path) for path in mounts.values())


def commands(page):
    """The command lines of quatrain in a page's blocks of code, whatever starts them."""
    text = page.read_text(encoding="utf-8")
    lines = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    starts = (
        r"(?:sbatch(?: --\S+)* launch/slurm\.sbatch|launch/tpu_pod\.sh \S+ \S+|quatrain(?: launch .*? --)?)"
    )
    return re.findall(rf"^{starts} ((?:train|eval|sft)\b.*)$", lines.replace("\\\n", " "), re.MULTILINE)


@pytest.mark.parametrize("page", ["launch.md", "launch_tpu_pod.md", "launch_slurm.md"], ids=str)
def test_the_commands_of_the_pages_are_understood(page):
    found = commands(REPOSITORY / "docs" / page)
    assert len(found) >= 2
    for line in found:
        words = shlex.split(line.replace("CONFIG.yaml", "configs/quickstart.yaml"), comments=True)
        words = ["0" if word == "$I" else word for word in words]
        assert parsed(words).distributed.heartbeat_timeout_s >= 1
