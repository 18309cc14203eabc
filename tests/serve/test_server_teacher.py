"""A teacher behind `quatrain serve`: what it scores, as a model in this process does, and what is refused."""

import dataclasses
import itertools
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from runs import small_run
from servers import served, service_of
from tokenizers import normalizers

from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.tokenizer import encode, save_tokenizer
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.loop.train import train
from quatrain.run.metrics import read_metrics
from quatrain.update.server_teacher import ServerTeacher
from quatrain.update.teacher_scores import TopWords, model_scores
from quatrain.weights.hf import save_hf


@pytest.fixture(scope="module")
def address(small_arch, small_params, tokenizer):
    service = service_of(small_arch, small_params, tokenizer)
    with served(service, small_arch, tokenizer) as url:
        yield url


def test_its_scores_are_those_of_the_model_in_this_process(
    address, small_arch, small_params, tokenizer, make_batch
):
    table = TokenTable.of(make_batch(0, groups=6, holes=True).rollouts)
    own = predict_tokens(small_params, table, model=PolicySpec(small_arch), planner=MicroBatchPlanner(rows=4))
    found = ServerTeacher(address, tokenizer, timeout_s=60).scores(table).logprobs
    assert np.abs(own).max() > 1
    np.testing.assert_allclose(found, own, atol=1e-4)
    assert not found[~table.completion_mask].any()


@pytest.mark.parametrize(("count", "num_words"), [(8, None), (40, 50)])
def test_its_top_words_are_those_of_the_model_in_this_process(
    address, small_arch, small_params, tokenizer, make_batch, count, num_words
):
    """And the sampled word, which is one more where it is not among them. Not all words count in one case."""
    table = TokenTable.of(make_batch(0, groups=6, holes=True).rollouts)
    top = TopWords(count, num_words or small_arch.vocab_size)
    asked = {"model": PolicySpec(small_arch), "planner": MicroBatchPlanner(rows=4)}
    own = model_scores(small_params, table, top=TopWords(count, small_arch.vocab_size), **asked)
    found = ServerTeacher(address, tokenizer, timeout_s=60, num_words=count).scores(table, top=top)
    np.testing.assert_allclose(found.logprobs, own.logprobs, atol=1e-4)
    more = 0
    for row, place in zip(*np.nonzero(table.completion_mask), strict=True):
        words, logprobs = found.words[row, place].tolist(), found.word_logprobs[row, place]
        sampled, best = int(table.input_ids[row, place]), own.words[row, place].tolist()
        expected = dict(zip(best, own.word_logprobs[row, place], strict=False))
        expected.setdefault(sampled, own.logprobs[row, place])
        expected = {word: value for word, value in expected.items() if word < top.num_words}
        assert {word for word in words if word >= 0} == set(expected)
        values = [expected[word] for word in words if word >= 0]
        np.testing.assert_allclose(logprobs[: len(values)], values, atol=1e-4)
        assert np.exp(logprobs[-1]) == pytest.approx(1 - np.exp(values).sum(), abs=1e-4)
        assert (logprobs[len(values) : -1] < -1e29).all()
        more += sampled not in best
    assert more > 3


def test_another_tokenizer_is_refused(address):
    other = builtin_tokenizer()
    other.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match=r"must have the policy's tokenizer; it reads 'Hello, world!'"):
        ServerTeacher(address, other, timeout_s=60)


def test_a_server_that_is_gone_ends_the_run_after_a_while(tokenizer):
    with pytest.raises(ConnectionError, match=r"did not answer for 0.1 s \(rollout.timeout_s\)"):
        ServerTeacher("http://127.0.0.1:9", tokenizer, timeout_s=0.1)


def test_what_is_no_such_server_is_refused(address, tokenizer):
    with pytest.raises(ValueError, match="/v1/models must name its model: status 404"):
        ServerTeacher(f"{address}/nowhere", tokenizer, timeout_s=5)
    with pytest.raises(ValueError, match=r"status 404.*; give the address of the server itself, up to /v1"):
        ServerTeacher(f"{address}/v1", tokenizer, timeout_s=5)
    with pytest.raises(ValueError, match=r"the teacher at http://h:abc: its address must be one such as"):
        ServerTeacher("http://h:abc", tokenizer, timeout_s=5)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (200, r"/v1/models must name its model: it answered <html>hello</html>; give the address of"),
        (307, r"/v1/models must name its model: status 307, to http://elsewhere; give the address of the"),
        (401, r"it asks for a token.*: status 401, <html>hello</html>; set QUATRAIN_SERVE_TOKEN"),
    ],
)
def test_pages_and_redirections_are_refused(status, message, tokenizer):
    with (
        answering(Table("vllm", tokenizer), pages=[status]) as url,
        pytest.raises(ValueError, match=f"the teacher at http://127.0.0.1:.* {message}"),
    ):
        ServerTeacher(url, tokenizer, timeout_s=5)


def test_a_server_with_too_many_requests_is_asked_again(tokenizer, monkeypatch):
    monkeypatch.setattr("quatrain.servers.client.PAUSE_S", 0.01)
    with answering(Table("vllm", tokenizer), pages=[429, 408, 503]) as url:
        assert ServerTeacher(url, tokenizer, timeout_s=60).longest == 63
    with (
        answering(Table("vllm", tokenizer), pages=[429] * 1000) as url,
        pytest.raises(ConnectionError, match=r"did not answer for 0.1 s .*: status 429"),
    ):
        ServerTeacher(url, tokenizer, timeout_s=0.1)


def test_a_run_with_the_served_model_is_at_its_teacher(
    address, small_arch, small_params, tokenizer, tmp_path
):
    save_hf(tmp_path / "policy", small_arch, small_params)
    save_tokenizer(tokenizer, tmp_path / "policy")
    same = (f"model.path={tmp_path / 'policy'}", f"distill.teacher={address}", "reward.functions={}")
    plain = ("sft.steps=0", "update.kl_coef=0", "run.steps=1", "eval.every_steps=0", "eval.before=false")
    run = train(small_run(tmp_path, "served", *same, *plain)).run
    (step,) = [row for row in read_metrics(run / "metrics.jsonl") if "distill/kl" in row]
    assert abs(step["distill/kl"]) < 1e-4
    assert step["distill/teacher_logprob"] < -1


@pytest.mark.slow
def test_a_run_learns_from_the_words_of_a_served_model(
    address, small_arch, small_params, tokenizer, tmp_path
):
    """The policy is the served model, so that it is at its teacher before the first step."""
    save_hf(tmp_path / "policy", small_arch, small_params)
    save_tokenizer(tokenizer, tmp_path / "policy")
    same = (f"model.path={tmp_path / 'policy'}", f"distill.teacher={address}", "reward.functions={}")
    words = ("distill.loss=forward_kl", "distill.top_k=16")
    plain = ("sft.steps=0", "update.kl_coef=0", "run.steps=1", "eval.every_steps=0", "eval.before=false")
    run = train(small_run(tmp_path, "served", *same, *words, *plain)).run
    (step,) = [row for row in read_metrics(run / "metrics.jsonl") if "distill/kl" in row]
    assert abs(step["distill/loss"]) < 1e-4
    assert step["distill/topk_mass"] == pytest.approx(step["distill/topk_mass_policy"], abs=1e-4)
    assert 0.1 < step["distill/topk_mass"] < 1


class Table:
    """What answers as vLLM or SGLang do, with the distribution after each token from a table of logits."""

    def __init__(self, kind, tokenizer, *, most=20):
        self.kind, self.tokenizer, self.most, self.bodies = kind, tokenizer, most, []
        size = len(tokenizer)
        scores = np.random.default_rng(0).normal(0, 2, (size, size))
        self.logprobs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))

    def models(self):
        return {"data": [{"id": "m", "owned_by": self.kind, "max_model_len": 64}]}

    def _best(self, before, count):
        row = self.logprobs[before]
        return [(int(word), float(row[word])) for word in np.argsort(-row)[:count]]

    def completions(self, body):
        ids = body["prompt"] if isinstance(body["prompt"], list) else encode(self.tokenizer, body["prompt"])
        own = [float(self.logprobs[a, b]) for a, b in itertools.pairwise(ids)]
        choice = {"text": "x", "logprobs": {"token_logprobs": [None, *own, -1.0]}}
        count = body.get("prompt_logprobs")
        if count is not None:
            if count > self.most:
                raise ValueError(f"Requested prompt logprobs of {count}, greater than max allowed")
            named = [
                {word: {"logprob": value, "rank": 1, "decoded_token": "?"} for word, value in best}
                for best in (
                    dict([*self._best(a, count), (b, x)]).items() for a, b, x in zip(ids, ids[1:], own)
                )
            ]
            choice["prompt_logprobs"] = [None, *named]
        return {"choices": [choice]}

    def generate(self, body):
        assert (body["return_logprob"], body["logprob_start_len"]) == (True, 0)
        ids = body["input_ids"] if "input_ids" in body else encode(self.tokenizer, body["text"])
        own = [[float(self.logprobs[a, b]), b, None] for a, b in itertools.pairwise(ids)]
        meta = {"input_token_logprobs": [[None, ids[0], None], *own]}
        if count := body["top_logprobs_num"]:
            lists = [[[value, word, None] for word, value in self._best(a, count)] for a in ids[:-1]]
            meta["input_top_logprobs"] = [None, *lists]
        return {"text": "x", "meta_info": meta}


@contextmanager
def answering(table, pages=()):
    """The address of `table`, which first answers with a page of each status of `pages`."""
    pages = list(pages)

    class Handler(BaseHTTPRequestHandler):
        def _send(self, status, value):
            data = json.dumps(value).encode()
            if pages:
                status, data = pages.pop(0), b"<html>hello</html>"
            self.send_response(status)
            self.send_header("Location", "http://elsewhere")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self._send(200, table.models())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            table.bodies.append((self.path, body))
            answer = {"/v1/completions": table.completions, "/generate": table.generate}[self.path]
            try:
                self._send(200, answer(body))
            except ValueError as error:
                self._send(400, {"error": {"message": str(error)}})

        def log_message(self, *_):
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("count", [0, 5])
def test_servers_in_the_forms_of_others(kind, count, tokenizer, make_batch):
    rollouts = make_batch(1, groups=3, holes=True).rollouts
    ids = np.where(rollouts.attention_mask, rollouts.input_ids % len(tokenizer), 0).astype(np.int32)
    table, server = dataclasses.replace(TokenTable.of(rollouts), input_ids=ids), Table(kind, tokenizer)
    top = TopWords(count, len(tokenizer)) if count else None
    with answering(server) as url:
        teacher = ServerTeacher(url, tokenizer, timeout_s=60, num_words=count)
        assert teacher.longest == 63
        found = teacher.scores(table, top=top)
    path = "/generate" if kind == "sglang" else "/v1/completions"
    assert {asked for asked, _ in server.bodies} == {path}
    for row, place in zip(*np.nonzero(table.completion_mask), strict=True):
        before, sampled = ids[row, place - 1], ids[row, place]
        assert found.logprobs[row, place] == pytest.approx(server.logprobs[before, sampled], abs=1e-5)
        if count:
            best = {*np.argsort(-server.logprobs[before])[:count].tolist(), int(sampled)}
            words = [word for word in found.words[row, place].tolist() if word >= 0]
            assert set(words) == best
            values = found.word_logprobs[row, place]
            np.testing.assert_allclose(values[: len(words)], server.logprobs[before, words], atol=1e-5)
            rest = 1 - np.exp(server.logprobs[before, words]).sum()
            assert np.exp(values[-1]) == pytest.approx(rest, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"most": 3}, "refused a question: status 400.*greater than max allowed"),
        ({"drop": 2}, r"the 5 likeliest words .* it gave [34] words .*; set a smaller distill\.top_k"),
        ({"shift": 0.5}, "probabilities that are at most 1 together; it gave 5 words and 1.6"),
    ],
)
def test_words_that_cannot_be_right_are_refused(change, message, tokenizer):
    table = Table("vllm", tokenizer, most=change.get("most", 20))
    best = table._best

    def changed(before, count):
        found = best(before, count - change.get("drop", 0))
        return [(word, value + change["shift"]) for word, value in found] if "shift" in change else found

    table._best = changed
    if "shift" in change:
        table.logprobs[:] = np.log(1e-6)
        table.logprobs[:, :5] = np.log(0.2)
    with answering(table) as url, pytest.raises(ValueError, match=message):
        ServerTeacher(url, tokenizer, timeout_s=5, num_words=5)
