"""`quatrain serve` of a model with experts: answers have the experts of their tokens, where asked for."""

import host_model
import httpx2 as httpx
import numpy as np
import pytest
import routed_models
from fleets import closing
from rollouts import fleet_rollouts, local_rollouts
from routed_models import routed_model
from servers import served, service_of

from quatrain.config.schema import RolloutConfig
from quatrain.rollout.http_worker import workers
from quatrain.rollout.publish import Folder
from quatrain.servers.expert_routes import RouteRules
from quatrain.servers.server import ServerRules
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.routes import routes_from_text

TRUTH = {"host": host_model, "jax": routed_models}
pytestmark = pytest.mark.usefixtures("all_computed_by")


PROMPTS = [
    Prompt(20 + i, np.arange(3, 3 + size, dtype=np.int32), f"{i}") for i, size in enumerate((5, 2, 17))
]


@pytest.fixture(scope="module")
def model():
    return routed_model(eos_token_id=7)


@pytest.fixture(scope="module")
def url(all_computed_by, model, tokenizer):
    with served(service_of(*model, tokenizer), model[0], tokenizer) as url:
        yield url


def _post(url, path, **body):
    asked = {"model": "any", "max_tokens": 9, "return_token_ids": True, **body}
    return httpx.post(f"{url}{path}", json=asked, timeout=120)  # the first answer compiles


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
def test_an_answer_has_the_experts_of_prompt_and_completion_but_the_last_token(
    all_computed_by, url, model, path
):
    prompt = [5, 9, 200, 17, 3]
    body = {"prompt": prompt} if path == "/v1/completions" else {"token_ids": prompt}
    answer = _post(url, path, n=2, return_routed_experts=True, **body).json()
    for choice in answer["choices"]:
        ids = np.array([[*prompt, *choice["token_ids"]]], np.int32)
        routes = routes_from_text(choice["routed_experts"])
        assert routes.shape == (ids.size - 1, 2, 2)
        truth = TRUTH[all_computed_by].routes_of_rows(model[1], model[0], ids, np.array([ids.size]))
        np.testing.assert_array_equal(np.sort(routes, axis=-1), np.sort(truth[0, :-1], axis=-1))
    assert "routed_experts" not in _post(url, path, **body).json()["choices"][0]


def test_experts_are_not_streamed(url):
    answer = _post(url, "/v1/completions", prompt=[5], stream=True, return_routed_experts=True)
    assert answer.status_code == 400
    assert "cannot be streamed; leave out stream" in answer.json()["error"]["message"]


def test_a_model_without_experts_has_none_to_return(small_arch, small_params, tokenizer):
    with served(service_of(small_arch, small_params, tokenizer), small_arch, tokenizer) as url:
        answer = _post(url, "/v1/completions", prompt=[5], return_routed_experts=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "return_routed_experts"
    assert "routes are those of a model with experts" in answer.json()["error"]["message"]


@pytest.fixture
def fleet_of(model, tokenizer, tmp_path, monkeypatch):
    """fleet_of(url): a fleet of this server, which records routes."""
    monkeypatch.setenv("QUATRAIN_SERVE_TOKEN", "token")
    arch = model[0]
    sampling = Sampling(n=3, max_new_tokens=12, temperature=0.9)
    rules = ServerRules(tokenizer, (0, 7), arch.vocab_size, 11, sampling, RouteRules.of(arch))

    def make(url):
        factories = workers([url], rules, max_concurrency=None, timeout_s=60.0)
        options = {"sampling": sampling, "tokenizer": tokenizer, "dtype": "float32", "timeout_s": 60.0}
        return closing(fleet_rollouts(factories, Folder(tmp_path / "weights", arch), **options), 120)

    return make


def test_a_server_that_records_no_routes_is_used_after_a_warning(model, tokenizer, fleet_of, caplog):
    arch, params = model
    service = service_of(arch, params, tokenizer, record_routes=False)
    with served(service, arch, tokenizer, token="token") as url, fleet_of(url) as fleet:
        fleet.sync_weights(params, 5)
        assert fleet.generate(PROMPTS[:1], step=3).routes is None
    (warning,) = [each.getMessage() for each in caplog.records if "returns no routes" in each.getMessage()]
    assert "(status 400, routes are those of a model with experts" in warning
    assert "start it with rollout.record_routes auto" in warning


def test_routes_of_a_server_are_those_of_an_engine_in_process(all_computed_by, model, tokenizer, fleet_of):
    arch, params = model
    config = RolloutConfig(n=3, max_new_tokens=12, temperature=0.9)
    engine = local_rollouts(arch, config, tokenizer, stop_ids=(0, 7), seed=11, cache_bytes=1 << 26)
    engine.sync_weights(params, 5)
    service = service_of(arch, params, tokenizer, seed=99)
    with served(service, arch, tokenizer, token="token") as url, fleet_of(url) as fleet:
        fleet.sync_weights(params, 5)
        batch = fleet.generate(PROMPTS, step=3)
    expected = engine.generate(PROMPTS, step=3)
    np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
    np.testing.assert_array_equal(batch.routes, expected.routes)
    TRUTH[all_computed_by].check_routes(params, arch, batch)
