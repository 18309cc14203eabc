"""Pictures on inference servers: what each kind is asked, and how one that does not see is found."""

from __future__ import annotations

import base64
import hashlib
import itertools
from types import SimpleNamespace

import httpx2 as httpx
import numpy as np
import pytest
from seeing import Says, encoded, prompt_of, seeing_tokenizer, shades, square
from servers import MODEL, served
from test_http_worker import Fake, listening

from quatrain.data.expansion import BLIND
from quatrain.rollout.http_worker import HttpWorker
from quatrain.rollout.start_fleet import _looks_or_why
from quatrain.rollout.worker import GroupSpec
from quatrain.servers.client import Unfit
from quatrain.servers.kinds import Asked, Quatrain, contracted
from quatrain.servers.server import ServerRules
from quatrain.types.pictures import Picture, Tokens
from quatrain.types.rollouts import Sampling

RED, BLUE = (
    Picture.of(encoded(square(shade, size)), size) for shade, size in ((200, (24, 16)), (9, (16, 16)))
)
PARTS = [
    {"type": "image", "image": RED},
    {"type": "text", "text": "and"},
    {"type": "image", "image": BLUE},
    {"type": "text", "text": "?"},
]


@pytest.fixture(scope="module")
def tokenizer():
    return seeing_tokenizer()


@pytest.fixture(scope="module")
def prompt(tokenizer):
    """Of two pictures, of 6 and of 4 placeholders."""
    return prompt_of(tokenizer, [{"role": "user", "content": PARTS}])


@pytest.fixture(scope="module")
def rules(tokenizer):
    arch = SimpleNamespace(vision=tokenizer.expansion.vision)
    looks = _looks_or_why(SimpleNamespace(arch=arch, tokenizer=tokenizer))
    return ServerRules(tokenizer, (0,), len(tokenizer), 11, Sampling(1, 4), looks=looks)


def url(picture):
    return f"data:image/png;base64,{base64.b64encode(picture.encoded).decode()}"


class Seeing(Fake):
    """As Fake, with what vLLM and SGLang document of pictures: they expand each placeholder of the ids.

    `sees`: whether a text's log-probabilities depend on the pictures; `expands`: into how many more
    placeholders than here a picture is made.
    """

    sees, expands = True, 0

    def seen(self, ids, urls):
        """(the ids that the model reads, a log-probability of each)."""
        vision, urls, read = self.tokenizer.expansion.vision, list(urls), []
        assert ids.count(vision.placeholder_id) == len(urls), "each placeholder has a picture"
        digest = hashlib.sha256("".join(urls).encode()).digest()[0] if self.sees else 0
        for token in ids:
            size = (24, 16) if urls and urls[0] == url(RED) else (16, 16)
            if token == vision.placeholder_id and urls.pop(0) not in (url(RED), url(BLUE)):
                size = (64, 64)
            count = vision.num_placeholders(size) + self.expands if token == vision.placeholder_id else 1
            read += [token] * count
        return read, [-1.0 - digest / 100] * len(read)

    def vllm_answer(self, path, body):
        if path != "/inference/v1/generate":
            return super().vllm_answer(path, body)
        parts, asked = body["content_parts"], body["sampling_params"]
        assert {part["type"] for part in parts} == {"image_url"}
        ids, scores = self.seen(body["token_ids"], [part["url"] for part in parts])
        tokens, logprobs = self.sampled(asked.get("seed", 1), {**asked, "max": asked["max_tokens"]})
        content = [{"token_id": token, "logprob": value} for token, value in zip(tokens, logprobs)]
        choice = {"index": 0, "token_ids": tokens, "finish_reason": "length", "logprobs": None}
        answer = {"choices": [choice], "usage": {"prompt_tokens": len(ids)}, "prompt_token_ids": ids}
        if "logprobs" in asked:
            choice["logprobs"] = {"content": content}
        if "prompt_logprobs" in asked:
            each = [{str(token): {"logprob": value, "rank": 1}} for token, value in zip(ids, scores)]
            answer["prompt_logprobs"] = [None, *each[1:]]
        return 200, answer

    def sglang_answer(self, path, body):
        if path != "/generate" or "image_data" not in body:
            return super().sglang_answer(path, body)
        ids, scores = self.seen(body["input_ids"], body["image_data"])
        parameters = {"sampling_seed": 1, **body["sampling_params"]}
        status, answer = super().sglang_answer(
            path, {**body, "input_ids": ids, "sampling_params": parameters}
        )
        entries = [[value, token, None] for token, value in zip(ids, scores)]
        answer["meta_info"]["input_token_logprobs"] = [[None, ids[0], None], *entries[1:]]
        return status, answer


def worker_of(fake, address, rules):
    return HttpWorker(address, rules, num_slots=None, timeout_s=20)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_gets_one_placeholder_for_each_picture_and_its_data_url(kind, tokenizer, rules, prompt):
    """The fault: ids with all placeholders, each of which the server would expand once more."""
    fake = Seeing(kind, tokenizer, len(tokenizer))
    with listening(fake) as address:
        worker = worker_of(fake, address, rules)
        assert worker.cannot_see is None
        fake.asked.clear()
        fake.label = "3"
        worker.submit([GroupSpec(0, prompt, 2, Sampling(2, 4))], 3)
        [group] = worker.take(20)
        worker.close()
    assert group.error is None
    assert [len(done.tokens) > 0 and done.versions[0] == 3 for _, done in group.samples] == [True] * 2
    bodies = [body for path, body in fake.asked if path in ("/generate", "/inference/v1/generate")]
    own, placeholder = prompt.input_ids.tolist(), tokenizer.expansion.vision.placeholder_id
    expected = [
        token for token, run in itertools.groupby(own) for _ in ([0] if token == placeholder else run)
    ]
    assert len(bodies) == 2
    for body in bodies:
        assert (body.get("input_ids") or body.get("token_ids")) == expected
        urls = body.get("image_data") or [part["url"] for part in body["content_parts"]]
        assert urls == [url(RED), url(BLUE)]
    seeds = [
        (body["sampling_params"].get("seed"), body["sampling_params"].get("sampling_seed")) for body in bodies
    ]
    assert len(set(seeds)) == 2
    if kind == "vllm":
        assert {body["cache_salt"] for body in bodies} == {"quatrain 3"}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("fault", ["ignores", "other sizes", "no field"])
def test_a_server_that_does_not_see_is_found_and_still_samples_texts(kind, fault, tokenizer, rules, prompt):
    fake = Seeing(kind, tokenizer, len(tokenizer))
    fake.sees, fake.expands = fault != "ignores", 1 if fault == "other sizes" else 0
    if fault == "no field":  # an older one, which takes what it does not know for nothing
        fake.seen = lambda ids, urls: (ids, [-1.0] * len(ids))
    remedy = {"vllm": "--enable-scale-out", "sglang": "SGLANG_MM_AVOID_RETOKENIZE"}[kind]
    reason = "must depend on the picture before it" if fault == "ignores" else "the same tokens there as here"
    with listening(fake) as address:
        worker = worker_of(fake, address, rules)
        fake.label = "3"
        asked = [prompt, prompt_of(tokenizer, [{"role": "user", "content": "?"}], 1)]
        worker.submit([GroupSpec(i, each, 2, Sampling(1, 4)) for i, each in enumerate(asked)], 3)
        done = []
        while len(done) < 2:
            done += worker.take(20)
        worker.close()
    assert reason in worker.cannot_see
    assert remedy in worker.cannot_see
    seen, text = sorted(done, key=lambda group: group.number)
    assert reason in seen.error
    assert text.error is None


def test_what_a_text_beside_pictures_must_not_have_and_who_gets_no_tiles(tokenizer, rules, prompt):
    placeholder = tokenizer.expansion.vision.placeholder_id
    forged = Tokens([*prompt.input_ids.tolist(), placeholder], prompt.pictures)
    with pytest.raises(Unfit, match="would take for another picture"):
        contracted(forged)
    fake = Seeing("sglang", tokenizer, len(tokenizer))
    tiled = ServerRules(
        tokenizer, (0,), len(tokenizer), 11, Sampling(1, 4), looks=rules.looks._replace(tiled=True)
    )
    with listening(fake) as address:
        worker = worker_of(fake, address, tiled)
        worker.close()
    assert "those of tiles have words between them" in worker.cannot_see
    blind = SimpleNamespace(arch=SimpleNamespace(vision=None), tokenizer=tokenizer)
    assert _looks_or_why(blind) == BLIND


def test_the_two_looks_differ_in_their_pictures_alone(rules):
    one, other, tiled = rules.looks
    assert one.ids == other.ids
    assert not tiled
    [first], [second] = one.pictures.used, other.pictures.used
    assert first != second
    assert first.size == second.size


def test_quatrain_serve_takes_ids_and_the_places_of_their_pictures(tokenizer, prompt):
    """And refuses places that would leave a placeholder without its feature, or a picture unseen."""
    service = Says(tokenizer, "Red")
    arch = SimpleNamespace(vocab_size=len(tokenizer), max_position=10_000)
    ids = prompt.input_ids.tolist()
    starts = [int(np.flatnonzero(prompt.pictures.ids == picture.id)[0]) for picture in (RED, BLUE)]
    red, blue = ({"url": url(each), "places": [[at, n]]} for each, at, n in zip((RED, BLUE), starts, (6, 4)))
    with served(service, arch, tokenizer) as address, httpx.Client(base_url=address, timeout=60) as http:

        def answer(pictures, **fields):
            body = {"model": MODEL, "prompt": ids, "max_tokens": 4, "pictures": pictures, **fields}
            return http.post("/v1/completions", json=body)

        said = answer([red, blue]).json()
        assert said["usage"]["prompt_tokens"] == len(ids)
        [asked] = service.asked
        assert shades(asked.pictures, len(ids)) == shades(prompt.pictures, len(ids))
        assert asked.input_ids.tolist() == ids
        for pictures, fields, message in (
            ([{**red, "places": [[starts[0], 5]]}], {}, "stands for 6 tokens here; got 5"),
            ([{**red, "places": [[len(ids) - 5, 6]]}], {}, "must lie within the"),
            ([{**red, "places": [[-1, 6]]}], {}, "must lie within the"),
            ([red, {**blue, "places": [[starts[0] + 4, 4]]}], {}, "apart from one another"),
            ([{**red, "url": "/etc/passwd"}], {}, "should match pattern"),
            ([{**red, "url": "data:image/png;base64,bm8="}], {}, "must be a whole picture"),
            ([red], {"prompt": "a text"}, "one prompt of token ids"),
            ([red], {"prompt": [ids, ids]}, "one prompt of token ids"),
        ):
            refused = answer(pictures, **fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "pictures")
            assert message in refused.json()["error"]["message"]
        service.cannot_see = "it has no tower"
        assert "it has no tower" in answer([red]).text
        assert len(service.asked) == 1


def test_a_picture_that_stands_twice_is_sent_to_quatrain_serve_once(tokenizer, rules):
    twice = prompt_of(tokenizer, [{"role": "user", "content": [*PARTS[1:], PARTS[2]]}])
    asked = Asked(twice.input_ids.tolist(), Sampling(1, 4), 1, 2, 3, 4, 5, pictures=twice.pictures)
    _, body = Quatrain("m").request(asked, ())
    [given] = body["pictures"]
    seen = np.zeros(len(twice.input_ids), bool)
    for start, count in given["places"]:
        seen[start : start + count] = True
    np.testing.assert_array_equal(seen, twice.pictures.ids != 0)
    assert len(given["places"]) == 2
    _, plain = Quatrain("m").request(asked._replace(pictures=None), ())
    assert "pictures" not in plain
