"""The start of a run with servers: each is compared with the trainer, whichever would get the groups."""

import pytest
from runs import small_run

from quatrain.loop import stages as stages_module
from quatrain.loop.stages import engine_worker
from quatrain.loop.train import train
from quatrain.rollout.fleet import Fleet
from quatrain.rollout.publish import InMemory

pytestmark = pytest.mark.usefixtures("narrow_model")
SERVERS = ("http://127.0.0.1:1", "http://127.0.0.1:2")


class Wrong:
    """A worker whose log-probabilities are those of another model."""

    def __init__(self, worker):
        self._worker = worker

    def __getattr__(self, name):
        return getattr(self._worker, name)

    def take(self, timeout_s):
        found = self._worker.take(timeout_s)
        for group in found:
            for _, completion in group.samples:
                completion.logprobs[:] = [value - 1 for value in completion.logprobs]
        return found


@pytest.fixture
def servers(monkeypatch, tmp_path):
    """Makes engines in this process take the place of the servers; those of the given numbers are wrong."""
    fleets = []

    def use(wrong):
        config = small_run(tmp_path, "x").config
        config = config.model_copy(
            update={"rollout": config.rollout.model_copy(update={"max_concurrency": 8})}
        )

        def worker(number):
            own = engine_worker(config, 1, f"server {number}")
            return Wrong(own) if number in wrong else own

        def start(config, loaded, make_worker):
            fleets.append(
                Fleet(
                    [lambda number=number: worker(number) for number in range(len(SERVERS))],
                    InMemory(),
                    dtype=config.model.dtype,
                    timeout_s=60,
                )
            )
            return fleets[-1]

        monkeypatch.setattr(stages_module, "start_fleet", start)

    yield use
    for fleet in fleets:
        fleet.close()


def config_of(folder, *settings):
    few = ("run.steps=1", "sft.steps=0", "data.eval=null", "rollout.n=2", "checkpoint.every_steps=0")
    return small_run(folder, "r", *few, f"rollout.servers=[{','.join(SERVERS)}]", *settings)


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_one_server_that_is_wrong_is_named(tmp_path, servers, number):
    servers({number})
    message = rf"{SERVERS[number]} differs by (1|1\.0.*|0\.99.*) nats on average on the first 4 prompts"
    with pytest.raises(ValueError, match=message) as error:
        train(config_of(tmp_path))
    assert SERVERS[1 - number] not in str(error.value)


@pytest.mark.parametrize(
    ("limit", "told"), [pytest.param("0.05", False, marks=pytest.mark.slow), ("null", True)]
)
def test_servers_that_agree_train_and_without_a_limit_it_is_told_that_nothing_is_compared(
    tmp_path, servers, limit, told
):
    servers({1} if told else ())
    summary = train(config_of(tmp_path, f"rollout.logprob_diff_warning={limit}"))
    assert summary.steps == 1
    assert ("servers and trainer are not compared" in (summary.run / "run.log").read_text()) == told
