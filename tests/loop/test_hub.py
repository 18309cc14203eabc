"""A model on the Hugging Face Hub: huggingface_hub itself, against a server that stands in for the Hub."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub.constants
import pytest
import yaml

from quatrain.cli import main as cli
from quatrain.config.dump import dump_yaml
from quatrain.config.load import load_config
from quatrain.loop.hub import make_repository, push
from quatrain.loop.train import train
from quatrain.models import families
from quatrain.report.card import model_card

REPOSITORY = "someone/counting"


class Hub(ThreadingHTTPServer):
    """Takes repositories and commits of `hf_someone`; `files` has what was committed, by repository."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.files, self.private, self.requests = {}, {}, []

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self):
        hub, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        hub.requests.append(self.path)
        if self.headers.get("Authorization") != "Bearer hf_someone":
            return self.answer(401, {"error": "Invalid credentials"})
        _, api, kind, *rest = self.path.split("/")
        if (api, kind, rest) == ("api", "repos", ["create"]):
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            hub.files.setdefault(name, {})
            hub.private[name] = asked.get("private", asked.get("visibility") == "private")
            return self.answer(200, {"url": f"{hub.address}/{name}", "id": name})
        if kind == "validate-yaml":  # of the card
            return self.answer(200, {"errors": [], "warnings": []})
        name, verb = "/".join(rest[:2]), rest[2]
        if verb == "preupload":
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": file["path"], **plain} for file in json.loads(body)["files"]]
            return self.answer(200, {"files": files})
        assert verb == "commit", self.path
        for line in body.decode().splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                hub.files[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        done = {"commitUrl": f"{hub.address}/{name}/commit/abc", "commitOid": "abc", "success": True}
        return self.answer(200, done)

    def do_GET(self):
        self.server.requests.append(self.path)
        self.answer(404, {"error": "not found"})

    def answer(self, status, content):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", "hf_someone")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def exported(tmp_path):
    """A folder as `quatrain export` writes it, with adapters of a model that is nowhere else."""
    folder = tmp_path / "exported"
    for name in ("model.safetensors", "base/model.safetensors", "adapter/adapter_model.safetensors"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"weights")
    adapter = {"base_model_name_or_path": str(folder / "base")}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    return folder


@pytest.fixture
def run(tmp_path):
    """The folder of a run of two steps, as far as a card needs it."""
    settings = [
        "model.path=/home/me/models/Base-1B",
        "data.train=[openai/gsm8k:main, /home/me/more.jsonl]",
        "data.eval=/home/me/test.jsonl",
    ]
    rewards = {"correct": 1.0, "/home/me/nearness.py:nearness": 0.5}
    resolved = load_config(None, [*settings, f"reward.functions={json.dumps(rewards)}"], environ={})
    folder = tmp_path / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(resolved))
    values = {
        0: {"eval/accuracy": 0.25},
        1: {"loss": 1.0},
        2: {"eval/accuracy": 0.5},
        3: {"eval/accuracy": 1.0},
    }
    lines = [json.dumps({"step": step, **row}) for step, row in values.items()]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    return folder


def test_a_card_says_what_the_model_was_trained_from_on_and_by(run):
    card = model_card(run, 2, REPOSITORY)
    _, about, text = card.split("---\n", 2)
    assert yaml.safe_load(about) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "datasets": ["openai/gsm8k"],
        "tags": ["quatrain", "reinforcement-learning"],
    }
    assert text.startswith("# counting\n\nBase-1B after 2 steps of reinforcement learning (`grpo`)")
    assert "| data | `data.train`: openai/gsm8k:main, more.jsonl<br>`data.eval`: test.jsonl |" in text
    assert "| rewards | `reward.functions`: correct: 1.0, nearness.py:nearness: 0.5 |" in text
    assert "| metric | step 0 | step 2 |\n|---|---|---|\n| `eval/accuracy` | 0.25 | 0.5 |\n" in text
    assert 'AutoModelForCausalLM.from_pretrained("someone/counting")' in text
    assert "`quatrain serve model.path=someone/counting`" in text
    assert "/home/me" not in card


def test_a_card_tells_local_paths_from_names_on_the_hub(run):
    functions = {"model:org/rm": 1.0, "model:judges/mine": 1.0, "model:/home/John Doe/rm": 1.0}
    settings = ["model.path=/home/John Doe/models/base", "data.train=[data/train.jsonl, org/rows:main]"]
    settings += ["data.eval=mine/rows", f"reward.functions={json.dumps(functions)}"]
    resolved = load_config(None, settings, environ={})
    (run / "config.yaml").write_text(dump_yaml(resolved))
    paths = {name: f"/elsewhere/{name}" for name in ("judges/mine", "mine/rows")}
    (run / "run.json").write_text(json.dumps({"starts": [{"paths": paths}]}))
    card = model_card(run, 2, REPOSITORY)
    assert "\n\nbase after 2 steps" in card
    assert yaml.safe_load(card.split("---\n")[1])["datasets"] == ["org/rows"]
    assert "| data | `data.train`: train.jsonl, org/rows:main<br>`data.eval`: rows |" in card
    assert "model:org/rm: 1.0, model:mine: 1.0, model:rm: 1.0 |" in card


def test_a_push_sends_the_model_and_its_card_without_what_only_this_machine_can_load(hub, exported, run):
    make_repository(REPOSITORY, private=True)
    assert push(exported, REPOSITORY, run=run, step=2) == f"{hub.address}/{REPOSITORY}/commit/abc"
    assert hub.private == {REPOSITORY: True}
    card = model_card(run, 2, REPOSITORY).encode()
    assert hub.files[REPOSITORY] == {"README.md": card, "model.safetensors": b"weights"}


def test_adapters_of_a_model_on_the_hub_are_sent(hub, exported, run):
    adapter = {"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"}
    (exported / "adapter" / "adapter_config.json").write_text(json.dumps(adapter))
    make_repository(REPOSITORY, private=False)
    push(exported, REPOSITORY, run=run, step=2)
    assert hub.private == {REPOSITORY: False}
    assert "adapter/adapter_model.safetensors" in hub.files[REPOSITORY]
    assert "base/model.safetensors" not in hub.files[REPOSITORY]


def test_a_run_without_a_right_to_push_ends_before_it_trains(hub, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    resolved = load_config(None, [f"run.dir={tmp_path / 'runs'}", f"hub.push={REPOSITORY}"], environ={})
    with pytest.raises(ValueError, match=r"refused someone/counting .*set HF_TOKEN"):
        train(resolved)
    assert not list((tmp_path / "runs").glob("*"))


def test_a_run_and_an_export_push_their_model(hub, monkeypatch, tmp_path, capsys):
    narrow = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    monkeypatch.setitem(families._BUILTIN, "tiny", families._BUILTIN["tiny"] | narrow)
    monkeypatch.chdir(tmp_path)
    small = ["run.steps=1", "run.name=a", "sft.steps=0", "data.batch_size=2", "rollout.n=2"]
    small += ["eval.num_prompts=2", "eval.final_num_prompts=2", "update.kl_coef=0", f"hub.push={REPOSITORY}"]
    train(load_config(None, small, environ={}))
    sent = hub.files[REPOSITORY]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(sent)
    assert sent["model.safetensors"] == (tmp_path / "runs" / "a" / "final" / "model.safetensors").read_bytes()
    assert b"| metric | step 0 | step 1 |" in sent["README.md"]
    assert f"on the Hub: {hub.address}/{REPOSITORY}/commit/abc" in (tmp_path / "runs/a/run.log").read_text()

    monkeypatch.setattr("sys.argv", ["quatrain", "export", "runs/a", "--push", "someone/again", "--public"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    said = f"step 1 of runs/a, with its card: {hub.address}/someone/again/commit/abc"
    assert said in capsys.readouterr().out
    assert hub.files["someone/again"]["model.safetensors"] == sent["model.safetensors"]
    assert hub.private == {REPOSITORY: True, "someone/again": False}
