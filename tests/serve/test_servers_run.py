"""Whole runs with a server as sampler: the weights are those of a run that samples in its own process."""

import hashlib
import os
import re
import signal
import subprocess
import sys

import pytest

from quatrain.config.load import load_config
from quatrain.loop.build import load_policy
from quatrain.weights.hf import save_hf

QUATRAIN = (sys.executable, "-m", "quatrain.cli")
SETTINGS = (
    "run.steps=3",
    "sft.steps=0",
    "optimizer.learning_rate=5e-4",
    "data.batch_size=4",
    "rollout.n=4",
    "eval.before=false",
    "eval.every_steps=0",
    "eval.final_num_prompts=4",
    "checkpoint.every_steps=0",
    "run.compilation_cache=null",
    "reward.functions={length.py:length: 1}",
)
REWARD = '''
def length(completions, **_):
    """Another reward for every completion."""
    return [len(text) / 100 for text in completions]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The quickstart's model as safetensors."""
    loaded = load_policy(load_config(None, []).config)
    path = tmp_path_factory.mktemp("models") / "tiny"
    save_hf(path, loaded.arch, loaded.params)
    loaded.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def environment():
    return {**os.environ, "QUATRAIN_SERVE_TOKEN": "the-token-of-the-tests"}


@pytest.fixture(scope="module")
def server(folder, environment, tmp_path_factory):
    command = [*QUATRAIN, "serve", "--set", f"model.path={folder}", "--port", "0"]
    place = tmp_path_factory.mktemp("server")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=place, env=environment) as process:
        try:
            yield re.search(r"is served at (\S+)/v1;", process.stdout.readline())[1]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0


def train(place, folder, environment, name, *settings):
    (place / "length.py").write_text(REWARD)
    each = (*SETTINGS, f"model.path={folder}", f"run.name={name}", *settings)
    command = [*QUATRAIN, "train", *(f"--set={setting}" for setting in each)]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    run = place / "runs" / name
    return run, hashlib.sha256((run / "final" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("more", [(), ("lora.rank=4",)], ids=["all weights", "adapters"])
def test_weights_are_those_of_a_run_in_one_process(server, folder, environment, tmp_path, more):
    exact = ("update.correction=none", *more)
    run, by_server = train(tmp_path, folder, environment, "by_server", *exact, f"rollout.servers=[{server}]")
    _, alone = train(tmp_path, folder, environment, "alone", *exact)
    assert by_server == alone
    assert not (run / "weights").exists()
    assert "the-token-of-the-tests" not in "".join(
        path.read_text(errors="replace") for path in run.rglob("*") if path.is_file()
    )
