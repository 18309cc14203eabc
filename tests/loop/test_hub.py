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
from quatrain.report.card import model_card

REPOSITORY = "someone/counting"


class Hub(ThreadingHTTPServer):
    """Takes repositories and commits of `hf_someone`; `files` has what was committed, by repository.

    A repository in `full` takes no files.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.files, self.private, self.full, self.requests = {}, {}, set(), []

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
        if name in hub.full:
            return self.answer(507, {"error": "Insufficient storage"})
        if verb == "preupload":
            plain = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": file["path"], **plain} for file in json.loads(body)["files"]]
            return self.answer(200, {"files": files})
        assert verb == "commit", self.path
        for line in body.decode().splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                hub.files[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            if entry["key"] == "deletedFile":
                del hub.files[name][entry["value"]["path"]]
        done = {"commitUrl": f"{hub.address}/{name}/commit/abc", "commitOid": "abc", "success": True}
        return self.answer(200, done)

    def do_GET(self):
        self.server.requests.append(self.path)
        path, _, _ = self.path.partition("?")
        name = path.removeprefix("/api/models/").removesuffix("/tree/main")
        if name not in self.server.files:
            return self.answer(404, {"error": "not found"})
        files = self.server.files[name].items()
        self.answer(200, [{"type": "file", "path": f, "size": len(c), "oid": "a"} for f, c in files])

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


def test_a_card_names_the_data_sets_of_a_mixture(run):
    mixture = "data.train=[{path: openai/gsm8k:main, weight: 3}, {path: /home/me/more.jsonl, weight: 1}]"
    resolved = load_config(None, [mixture, "data.eval=test.jsonl"], environ={})
    (run / "config.yaml").write_text(dump_yaml(resolved))
    card = model_card(run, 2, REPOSITORY)
    assert yaml.safe_load(card.split("---\n")[1])["datasets"] == ["openai/gsm8k"]
    assert "`data.train`: path: openai/gsm8k:main, weight: 3.0, path: more.jsonl, weight: 1.0<br>" in card


def test_a_card_tells_local_paths_from_names_on_the_hub(run):
    functions = {"model:org/rm": 1.0, "model:judges/mine": 1.0, "model:/home/John Doe/rm": 1.0}
    functions["mine.py:judge"] = {"weight": 1.0, "args": {"key": "sk-" + "aB3" * 8}}
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
    assert "model:org/rm: 1.0, model:mine: 1.0, model:rm: 1.0, mine.py:judge: " in card
    assert "key: [redacted]" in card


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


def test_no_weights_of_an_earlier_push_stay(hub, exported, run):
    kept = {".gitattributes": b"", "notes.md": b"mine", "old/model.safetensors": b"mine"}
    stale = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "model.safetensors")
    adapter = ("adapter/adapter_config.json", "adapter/adapter_model.safetensors")
    hub.files[REPOSITORY] = kept | dict.fromkeys([*stale, *adapter], b"stale")
    push(exported, REPOSITORY, run=run, step=2)
    sent = {"README.md": model_card(run, 2, REPOSITORY).encode(), "model.safetensors": b"weights"}
    assert hub.files[REPOSITORY] == kept | sent


def test_a_run_with_invalid_input_leaves_no_repository(hub, tmp_path):
    settings = [f"run.dir={tmp_path / 'runs'}", f"hub.push={REPOSITORY}", "data.train=misspelt.jsonl"]
    with pytest.raises(ValueError, match="no such file"):
        train(load_config(None, settings, environ={}))
    assert hub.requests == []


def test_a_run_without_a_right_to_push_ends_before_it_trains(hub, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    resolved = load_config(None, [f"run.dir={tmp_path / 'runs'}", f"hub.push={REPOSITORY}"], environ={})
    with pytest.raises(ValueError, match=r"refused someone/counting .*set HF_TOKEN"):
        train(resolved)
    assert not list((tmp_path / "runs").glob("*"))


@pytest.fixture
def small(narrow_model, monkeypatch, tmp_path):
    """Settings of a run of one step, `runs/a` in the working folder."""
    monkeypatch.chdir(tmp_path)
    settings = ["run.steps=1", "run.name=a", "sft.steps=0", "data.batch_size=4", "rollout.n=4"]
    settings += ["eval.num_prompts=8", "eval.final_num_prompts=8"]
    return [*settings, f"hub.push={REPOSITORY}"]


@pytest.mark.parametrize("failure", ["Hub", "disk"])
def test_a_run_whose_push_fails_ends_and_says_how_to_push_again(hub, small, monkeypatch, tmp_path, failure):
    if failure == "Hub":
        hub.full.add(REPOSITORY)
    else:
        monkeypatch.setattr("quatrain.loop.hub.CARD", "no such folder/README.md")
    train(load_config(None, small, environ={}))
    again = f"push it with:\n  quatrain export {tmp_path / 'runs' / 'a'} --push {REPOSITORY}\n"
    assert again in (tmp_path / "runs" / "a" / "run.log").read_text()


def test_a_run_and_an_export_push_their_model(hub, small, monkeypatch, tmp_path, capsys):
    train(load_config(None, small, environ={}))
    sent = hub.files[REPOSITORY]
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(sent)
    assert sent["model.safetensors"] == (tmp_path / "runs" / "a" / "final" / "model.safetensors").read_bytes()
    assert b"| metric | step 0 | step 1 |" in sent["README.md"]
    assert f"on the Hub: {hub.address}/{REPOSITORY}/commit/abc" in (tmp_path / "runs/a/run.log").read_text()

    def export(*words):
        monkeypatch.setattr("sys.argv", ["quatrain", "export", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    capsys.readouterr()
    said = f"step 1 of runs/a, with its card: {hub.address}/someone/again/commit/abc\n"
    assert export("runs/a", "--push", "someone/again", "--public") == (0, said, "")
    assert hub.files["someone/again"]["model.safetensors"] == sent["model.safetensors"]
    assert hub.private == {REPOSITORY: True, "someone/again": False}

    hub.full.add("someone/full")
    code, out, error = export("runs/a", "out", "--push", "someone/full")
    assert (code, out) == (2, "step 1 of runs/a is in out\n")
    assert "leave OUTPUT out:\n  quatrain export runs/a --step 1 --push someone/full\n" in error
    again = (["runs/gone"], ["runs/a", "out"], ["runs/a", "--step", "7"])
    assert [export(*words, "--push", "someone/new")[0] for words in again] == [2, 2, 2]
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    assert "set HF_TOKEN" in export("runs/a", "new", "--push", "someone/new")[2]
    assert not (tmp_path / "new").exists()
    assert "someone/new" not in hub.files
