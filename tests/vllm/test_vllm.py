"""A real vLLM samples for a run of SmolLM2-135M, with weights exchanged after each step, or is its teacher.

`make test-vllm` installs vLLM and runs this.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from quatrain.config.load import load_config
from quatrain.data.builtin import builtin_rows
from quatrain.loop.export import export_policy
from quatrain.loop.policy import load_policy
from quatrain.weights.hf import save_hf

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".vllm" / "bin" / "python"
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
QUATRAIN = Path(sys.executable).with_name("quatrain")
CONFIG = ROOT / "configs" / "gsm8k_smollm2_cpu.yaml"
RECIPE = ROOT / "configs" / "shapes.yaml"
SETTINGS = (
    "data.train=builtin:arithmetic",
    "data.eval=builtin:arithmetic",
    "data.question_column=null",
    "data.batch_size=4",
    "rollout.n=8",
    "rollout.max_new_tokens=48",
    "run.steps=20",
    "optimizer.learning_rate=2e-5",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    "eval.before=false",
    "eval.every_steps=0",
    "eval.final_num_prompts=4",
    "checkpoint.every_steps=0",
    "reward.functions={digits.py:digits: 1}",
)
REWARD = '''
def digits(completions, **_):
    """The fraction of digits."""
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]
'''
START_S = 300

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM, which `make test-vllm` installs"),
    pytest.mark.skipif(not MODEL.exists(), reason="needs SmolLM2, which `make smollm2` downloads"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model as safetensors, which vLLM reads."""
    settings = [f"model.path={MODEL}", "data.train=builtin:arithmetic"]
    return written(load_policy(load_config(CONFIG, settings).config), tmp_path_factory.mktemp("smollm2"))


def written(loaded, folder):
    """A folder that vLLM reads."""
    save_hf(folder, loaded.arch, loaded.params, sampling=loaded.sampling)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def vllm(folder, tmp_path):
    """Starts a server with further arguments and environment; its URL."""
    started = []

    def start(*arguments, model=folder, **environment):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
        command += ["--max-model-len", "2048", "--max-num-seqs", "32", "--enforce-eager", *arguments]
        # On a CPU, vLLM 0.32 fails if a prompt of a request with a seed is computed in chunks.
        command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"]
        command += ["--worker-extension-cls", "quatrain.servers.vllm_extension.Reload"]
        own = {
            "PYTHONPATH": str(ROOT / "src"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PYTHONPATH")}
        with (tmp_path / "vllm.log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**kept, **own, **environment}, start_new_session=True
            )
        started.append(process)
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "vllm.log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=2).close()
                return url
            except OSError:
                time.sleep(1)
        raise AssertionError((tmp_path / "vllm.log").read_text()[-3000:])

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def train(place, folder, name, *settings, config=CONFIG):
    """(exit status, metrics of each step, output) of a run."""
    (place / "digits.py").write_text(REWARD)
    each = (*SETTINGS, f"model.path={folder}", f"run.name={name}", *settings)
    command = [str(QUATRAIN), "train", str(config), *(f"--set={setting}" for setting in each)]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=1500)
    file = place / "runs" / name / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    steps = [row for row in map(json.loads, lines) if "reward/mean" in row]
    return done.returncode, steps, done.stderr


def test_twenty_steps_with_new_weights_after_each(vllm, folder, tmp_path):
    url = vllm("--logprobs-mode", "processed_logprobs", VLLM_SERVER_DEV_MODE="1")
    status, steps, said = train(tmp_path, folder, "vllm", f"rollout.servers=[{url}]", "rollout.timeout_s=60")
    assert status == 0, said[-3000:]
    own, expected, said = train(tmp_path, folder, "own")
    assert own == 0, said[-3000:]
    assert len(steps) == len(expected) == 20
    gaps = [step["rollout/logprob_diff_mean"] for step in steps]
    rewards, others = ([step["reward/mean"] for step in run] for run in (steps, expected))
    print(f"gap of log-probabilities by step: {[float(f'{gap:.2g}') for gap in gaps]}")
    print(f"reward with vLLM: {[round(x, 3) for x in rewards]}")
    print(f"reward with quatrain's engine: {[round(x, 3) for x in others]}")
    assert max(gaps) < 0.02
    for run in (rewards, others):
        assert sum(run[-5:]) > sum(run[:5])
    assert all(step["fleet/restarts"] == 0 and step["fleet/stale_groups"] == 0 for step in steps)
    assert steps[-1]["time/weights_load_s"] > 0
    assert not (tmp_path / "runs" / "vllm" / "weights").exists()
    with urllib.request.urlopen(f"{url}/is_paused") as answer:
        assert json.load(answer) == {"is_paused": False}


def test_unprocessed_log_probabilities_are_refused(vllm, folder, tmp_path):
    url = vllm(VLLM_SERVER_DEV_MODE="1")
    settings = (f"rollout.servers=[{url}]", "rollout.temperature=0.7", "rollout.timeout_s=60")
    status, steps, said = train(tmp_path, folder, "raw", *settings)
    assert (status, steps) == (2, [])
    assert "--logprobs-mode processed_logprobs" in said.splitlines()[-1]


def test_a_server_that_takes_no_weights_is_refused(vllm, folder, tmp_path):
    url = vllm("--logprobs-mode", "processed_logprobs")
    status, steps, said = train(tmp_path, folder, "fixed", f"rollout.servers=[{url}]")
    assert (status, steps) == (2, [])
    assert "VLLM_SERVER_DEV_MODE=1" in said.splitlines()[-1]


def test_a_teacher_that_is_the_policy_is_at_its_policy(vllm, folder, tmp_path):
    """In float32, per token and over the words of `distill.top_k`."""
    url = vllm("--max-logprobs", "16")
    one = (f"distill.teacher={url}", "run.steps=1", "optimizer.learning_rate=0", "update.kl_coef=0")
    status, (sampled,), said = train(tmp_path, folder, "sampled", *one)
    assert status == 0, said[-3000:]
    words = ("distill.loss=forward_kl", "distill.top_k=8")
    status, (step,), said = train(tmp_path, folder, "words", *one, *words)
    assert status == 0, said[-3000:]
    print(f"mean difference {sampled['distill/kl']:.2g}; loss over 8 words {step['distill/loss']:.2g}")
    assert abs(sampled["distill/kl"]) < 1e-4
    assert sampled["distill/teacher_logprob"] < -0.1
    assert abs(step["distill/loss"]) < 1e-4
    assert step["distill/topk_mass"] == pytest.approx(step["distill/topk_mass_policy"], abs=1e-4)
    assert 0.3 < step["distill/topk_mass"] < 1


def test_experts_whose_routes_are_not_returned(vllm, tmp_path):
    """In float32, sampler and trainer choose the same ones, with weights of a folder and over HTTP.

    vLLM 0.32 returns routes on GPUs only: it needs its model runner V2 for that, which needs Triton.
    """
    loaded = load_policy(load_config(None, ["model.path=builtin:tiny_moe"]).config)
    model = written(loaded, tmp_path / "model")
    url = vllm("--logprobs-mode", "processed_logprobs", model=model, VLLM_SERVER_DEV_MODE="1")
    settings = (f"rollout.servers=[{url}]", "run.steps=3", "optimizer.learning_rate=1e-3")
    for way in ("folder", "http"):
        over_http = [f"rollout.stream_weights={way == 'http'}"]
        status, steps, said = train(tmp_path, model, way, *settings, *over_http)
        assert status == 0, said[-3000:]
        gaps = [step["rollout/logprob_diff_max"] for step in steps]
        print(f"weights by {way}: largest gap by step {[float(f'{gap:.2g}') for gap in gaps]}")
        assert max(gaps) < 1e-3
        assert said.count("returns no routes of experts") == 1
        assert not (tmp_path / "runs" / way / "weights").exists()


def test_a_model_that_sees_with_new_weights_after_each_step(vllm, tmp_path):
    """A random Qwen3-VL, whose pictures vLLM resizes and reads with its own programs, in float32.

    The faults: an output head or a tower that stays that of old weights, or features of pictures that were
    seen before; other placeholders or positions there than here. Each step has the same four pictures.
    """
    model = tmp_path / "model"
    loaded = load_policy(load_config(RECIPE, ["model.path=builtin:tiny_vl"]).config)
    export_policy(model, loaded.arch, loaded.params, loaded.tokenizer, whole=loaded.whole)
    rows = builtin_rows("shapes")[:4]
    for number, row in enumerate(rows):
        [picture, text] = row["prompt"][0]["content"]
        (tmp_path / f"{number}.png").write_bytes(picture["image"])
        shown = {"type": "image", "path": f"{number}.png"}
        row["prompt"] = [{"role": "user", "content": [shown, text]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    url = vllm(
        *("--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
        model=model,
        VLLM_SERVER_DEV_MODE="1",
    )
    sees = (
        f"rollout.servers=[{url}]", "data.train=rows.jsonl", "data.eval=null", "data.max_prompt_length=32",
        "rollout.max_new_tokens=8", "run.steps=3", "sft.steps=0", "optimizer.learning_rate=1e-3",
        "update.kl_coef=0",
    )  # fmt: skip
    for trained in ("frozen", "all"):
        status, steps, said = train(tmp_path, model, trained, *sees, f"model.vision={trained}", config=RECIPE)
        assert status == 0, said[-3000:]
        assert [step["vision/pictures"] for step in steps] == [5, 4, 4]  # first also that of the probe
        gaps = [step["rollout/logprob_diff_max"] for step in steps]
        print(f"tower {trained}: largest gap by step {[float(f'{gap:.2g}') for gap in gaps]}")
        assert max(gaps) < 1e-3
        assert all(step["fleet/restarts"] == 0 and step["fleet/stale_groups"] == 0 for step in steps)
        assert steps[-1]["time/weights_load_s"] > 0
