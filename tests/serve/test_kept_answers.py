"""`quatrain serve` with filters: answers have the words that each token was drawn from, where asked for."""

import httpx2 as httpx
import numpy as np
import pytest
from fleets import closing
from rollouts import fleet_rollouts, local_rollouts
from servers import served, service_of

from quatrain.config.schema import RolloutConfig
from quatrain.rollout.http_worker import workers
from quatrain.rollout.publish import Folder
from quatrain.servers.server import ServerRules
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling

PROMPTS = [
    Prompt(20 + i, np.arange(3, 3 + size, dtype=np.int32), f"{i}") for i, size in enumerate((5, 2, 17))
]


@pytest.fixture(scope="module")
def url(small_arch, small_params, tokenizer):
    with served(service_of(small_arch, small_params, tokenizer), small_arch, tokenizer) as url:
        yield url


def _post(url, path="/v1/completions", **body):
    asked = {"model": "any", "max_tokens": 9, "return_token_ids": True, **body}
    return httpx.post(f"{url}{path}", json=asked, timeout=120)  # the first answer compiles


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
def test_an_answer_has_the_words_that_its_tokens_were_drawn_from(url, path):
    body = {"prompt": [5, 9]} if path == "/v1/completions" else {"token_ids": [5, 9]}
    [choice] = _post(url, path, top_k=7, seed=1, return_sampling_mask=True, **body).json()["choices"]
    assert [len(words) for words in choice["sampling_mask"]] == [7] * len(choice["token_ids"])
    assert all(
        token in words for token, words in zip(choice["token_ids"], choice["sampling_mask"], strict=True)
    )
    assert "sampling_mask" not in _post(url, path, top_k=7, **body).json()["choices"][0]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"top_k": 7, "stream": True}, "cannot be streamed; leave out stream"),
        ({"top_p": 0.9}, "needs a top_k of 1 to 512 and a temperature above 0"),
        ({"top_k": 513}, "needs a top_k of 1 to 512"),
        ({"top_k": 7, "temperature": 0}, "a temperature above 0"),
    ],
)
def test_what_cannot_be_recorded_is_refused(url, body, message):
    answer = _post(url, prompt=[5], return_sampling_mask=True, **body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_kept_words_of_a_server_are_those_of_an_engine_in_process(
    small_arch, small_params, tokenizer, tmp_path, monkeypatch
):
    """P18: a run with a server trains on the same sets."""
    monkeypatch.setenv("QUATRAIN_SERVE_TOKEN", "token")
    config = RolloutConfig(n=3, max_new_tokens=12, temperature=0.9, top_p=0.8)
    engine = local_rollouts(small_arch, config, tokenizer, stop_ids=(0, 7), seed=11, cache_bytes=1 << 26)
    engine.sync_weights(small_params, 5)
    sampling = Sampling.of(config)
    rules = ServerRules(tokenizer, (0, 7), small_arch.vocab_size, 11, sampling)
    service = service_of(small_arch, small_params, tokenizer, seed=99)
    with served(service, small_arch, tokenizer, token="token") as url:
        factories = workers([url], rules, max_concurrency=None, timeout_s=60.0)
        options = {"sampling": sampling, "tokenizer": tokenizer, "dtype": "float32", "timeout_s": 60.0}
        folder = Folder(tmp_path / "weights", small_arch)
        with closing(fleet_rollouts(factories, folder, **options), 120) as fleet:
            fleet.sync_weights(small_params, 5)
            batch = fleet.generate(PROMPTS, step=3)
    expected = engine.generate(PROMPTS, step=3)
    np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
    np.testing.assert_array_equal(batch.kept.counts, expected.kept.counts)
    for row in range(len(batch)):
        sets = [each.kept.row(row).column[each.completion_mask[row]] for each in (batch, expected)]
        assert [set(words) for words in sets[0].tolist()] == [set(words) for words in sets[1].tolist()]
