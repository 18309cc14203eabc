"""Agents play with a small model: what was sampled is what is trained, whatever they do."""

import json
import socket
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from rollouts import local_rollouts

from quatrain.config.schema import RewardConfig, RolloutConfig
from quatrain.data.turns import TurnTemplate
from quatrain.engine.engine import RolloutEngine
from quatrain.engine.service import EngineService
from quatrain.episodes.agent_episodes import AgentPlayer, AgentRules
from quatrain.reward.scorer import RewardScorer
from quatrain.rollout.rollouts import Rollouts
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling
from quatrain.types.sampler import ServiceFailed

AGENTS = Path(__file__).with_name("some_agents.py")
TOKENS = 24


@pytest.fixture
def playing(small_arch, small_params, tokenizer):
    """playing(name, n, **rules): a context with the rollouts of an agent of `some_agents.py`."""

    @contextmanager
    def played(
        name,
        n=4,
        seed=11,
        max_new_tokens=TOKENS,
        temperature=0.9,
        greedy_baseline=False,
        thread=None,
        kept=0.5,
        **options,
    ):
        settings = RolloutConfig(n=1, max_new_tokens=small_arch.max_position, prefix_share=kept)
        engine = RolloutEngine(
            small_arch,
            settings,
            tokenizer,
            stop_ids=(tokenizer.eos_token_id,),
            seed=seed,
            cache_bytes=1 << 26,
            per_request_sampling=True,
        )
        fields = {
            "args": {},
            "num_workers": 1,
            "concurrency": None,
            "timeout_s": 60.0,
            "max_turns": 8,
            "more_tokens": 200,
            "longest": small_arch.max_position,
            **options,
        }
        service = EngineService(engine, thread=thread)
        player = AgentPlayer(
            service,
            AgentRules(agent=name if " " in name else f"{AGENTS}:{name}", seed=seed, **fields),
            tokenizer=tokenizer,
            stop_ids=engine.stop_ids,
            model="small",
            vocab_size=small_arch.vocab_size,
        )
        sampling = Sampling(n, max_new_tokens, temperature)
        rollouts = Rollouts(service, tokenizer, sampling, player, greedy_baseline)
        try:
            rollouts.sync_weights(small_params, 3)
            yield rollouts
        finally:
            rollouts.close()

    return played


def prompts(tokenizer, count=2):
    turns = TurnTemplate(tokenizer, ())
    messages = [({"role": "user", "content": f"{i} + 2"},) for i in range(count)]
    return [
        Prompt(10 * i, np.array(turns.prompt(m).ids, np.int32), m, {"id": i}) for i, m in enumerate(messages)
    ]


def turns_of(batch, row):
    """(context, sampled) of each run of sampled tokens of a row."""
    ids, mask = batch.input_ids[row], batch.completion_mask[row]
    edges = np.flatnonzero(np.diff(np.pad(mask, 1).astype(int)))
    return [(tuple(ids[:a].tolist()), tuple(ids[a:b].tolist())) for a, b in edges.reshape(-1, 2)]


def logged(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["place"], (tuple(line["prompt_ids"]), tuple(line["token_ids"]))) for line in lines]


@pytest.mark.usefixtures("computed_by")
def test_every_sampled_token_is_trained_once_with_the_ids_that_were_sent(
    playing, tokenizer, tmp_path, caplog
):
    batches = []
    for attempt in range(2):
        log = tmp_path / f"log{attempt}.jsonl"
        with playing("edits", args={"log": str(log)}, num_workers=2 - attempt) as rollouts:
            batch = rollouts.generate(prompts(tokenizer), step=5)
        of_row = batch.episodes.of_row
        found = [
            ([int(batch.columns["id"][row]), int(of_row[row] % 4)], turn)
            for row in range(len(batch))
            for turn in turns_of(batch, row)
        ]
        assert sorted(found) == sorted(logged(log))
        assert len(found) == 2 * (3 + 3 + 3 + 2)
        batches.append(batch)
    # Encoded again, many turns would be other tokens: the check above would fail.
    turns = [list(sampled) for _, (_, sampled) in found]
    again = [tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) for ids in turns]
    assert np.mean([ids != encoded for ids, encoded in zip(turns, again)]) > 0.05
    # Samples 1 began anew, so that they have two rows; the others one. Time changes nothing.
    assert np.bincount(batch.episodes.of_row).tolist() == [1, 2, 1, 1] * 2
    assert batches[0].completions == batches[1].completions
    np.testing.assert_array_equal(batches[0].input_ids, batches[1].input_ids)
    assert (batch.policy_version[batch.completion_mask] == 3).all()
    rewards = [batch.columns["environment_reward"][row] for row in batch.episodes.first_rows]
    assert rewards == [0.0, 1.0, 2.0, None] * 2
    assert batch.finish_reason[batch.episodes.first_rows].tolist()[3::4] == ["error"] * 2
    assert (
        "2 of 8 episodes ended by a fault of their agent; the first: the agent raised KeyError" in caplog.text
    )
    numbers = {name: metric.result() for name, metric in batch.metrics.items()}
    assert numbers["agent/errors"] == 2
    assert numbers["agent/roots"] == 8 + 2
    assert numbers["agent/turns/mean"] == 22 / 8


@pytest.mark.slow
def test_log_probabilities_are_those_of_the_model(playing, tokenizer, small_arch, small_params, tmp_path):
    from quatrain.forward.planner import MicroBatchPlanner
    from quatrain.forward.predict import predict_tokens
    from quatrain.forward.specs import PolicySpec
    from quatrain.forward.table import TokenTable

    with playing("branches", args={"log": str(tmp_path / "log")}) as rollouts:
        batch = rollouts.generate(prompts(tokenizer))
    spec, planner = PolicySpec(small_arch, temperature=0.9, remat="none"), MicroBatchPlanner(rows=4)
    expected = predict_tokens(small_params, TokenTable.of(batch), model=spec, planner=planner)
    np.testing.assert_allclose(batch.rollout_logprobs, expected, rtol=0, atol=1e-4)
    # Three answers after the first; the first is trained in one of the three rows.
    assert np.bincount(batch.episodes.of_row).tolist() == [3] * 8
    found = sorted(turn for row in range(len(batch)) for turn in turns_of(batch, row))
    assert found == sorted(turn for _, turn in logged(tmp_path / "log"))
    assert batch.metrics["agent/branches"].result() == 16
    assert batch.metrics["agent/context_fraction"].result() > 0


@pytest.mark.usefixtures("computed_by")
def test_an_agent_that_asks_once_samples_what_the_engine_samples(
    playing, tokenizer, small_arch, small_params
):
    given = prompts(tokenizer, 3)
    with playing("once") as rollouts:
        batch = rollouts.generate(given, step=2)
        greedy = rollouts.generate(given, sampling=Sampling(1, TOKENS, 0.0))
    settings = RolloutConfig(n=4, max_new_tokens=TOKENS, temperature=0.9)
    engine = local_rollouts(
        small_arch, settings, tokenizer, stop_ids=(tokenizer.eos_token_id,), seed=11, cache_bytes=1 << 26
    )
    engine.sync_weights(small_params, 3)
    expected = engine.generate(given, step=2)
    np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
    np.testing.assert_array_equal(batch.completion_mask, expected.completion_mask)
    np.testing.assert_allclose(batch.rollout_logprobs, expected.rollout_logprobs, atol=1e-5)
    assert batch.finish_reason.tolist() == expected.finish_reason.tolist()
    assert batch.completions == expected.completions
    assert greedy.completions == engine.generate(given, sampling=Sampling(1, TOKENS, 0.0)).completions
    engine.close()


@pytest.mark.usefixtures("computed_by")
def test_answers_of_a_simulated_user_are_context(playing, tokenizer):
    with playing("untrained") as rollouts:
        batch = rollouts.generate(prompts(tokenizer))
    assert batch.metrics["agent/turns/mean"].result() == 2
    assert all(len(turns_of(batch, row)) == 2 for row in range(len(batch)))


@pytest.mark.usefixtures("computed_by")
def test_limits_end_an_episode_without_a_fault(playing, tokenizer):
    with playing("many_turns", max_turns=3) as rollouts:
        turns = rollouts.generate(prompts(tokenizer))
    assert set(turns.finish_reason) == {"turns"}
    assert turns.metrics["agent/turns/max"].result() == 3
    with playing("many_turns", max_new_tokens=5, max_turns=100) as rollouts:
        length = rollouts.generate(prompts(tokenizer))
    assert set(length.finish_reason) == {"length"}
    assert length.completion_lengths.max() == 5
    assert length.columns["environment_reward"][0] == 0.0


@pytest.mark.usefixtures("computed_by")
def test_a_limit_of_one_role_ends_an_episode_without_a_fault(playing, tokenizer):
    """The fault: only a limit that the agent without a role met was seen, and a role's was an error."""
    with playing("a_role_asks_until_it_is_refused", n=2, max_turns=3) as rollouts:
        batch = rollouts.generate(prompts(tokenizer, 1))
    assert batch.columns["agent_role"] == ("other", "player") * 2
    assert batch.finish_reason.tolist()[1::2] == ["turns"] * 2
    assert "error" not in batch.finish_reason.tolist()
    assert set(batch.columns["environment_reward"]) == {0.0}
    assert batch.metrics["agent/errors"].result() == 0


@pytest.mark.usefixtures("computed_by")
def test_rewards_of_too_many_roles_cost_one_episode(playing, tokenizer):
    """The fault: they ended the run, with an error of the server's for a request that nobody made."""
    with playing("rewards_too_many_roles", n=2) as rollouts:
        batch = rollouts.generate(prompts(tokenizer, 1))
    assert batch.finish_reason[0] == "error"
    assert batch.columns["environment_reward"] == (None, 1.0)


@pytest.mark.usefixtures("computed_by")
def test_an_agent_may_be_a_function_and_a_program(playing, tokenizer, tmp_path):
    with playing("in_a_thread", n=2, args={"reward": 0.25}) as rollouts:
        batch = rollouts.generate(prompts(tokenizer))
    assert set(batch.columns["environment_reward"]) == {0.25}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with playing(f"command: {sys.executable} {program}", n=2) as rollouts:
        batch = rollouts.generate(prompts(tokenizer))
    assert set(batch.columns["environment_reward"]) == {1.0}


PROGRAM = """
import json, os, urllib.request
row = json.load(open(os.environ["QUATRAIN_ROW"]))
body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": row["prompt"]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
said = json.load(urllib.request.urlopen(request))
print(json.dumps({"reward": len(said["choices"])}))
"""


@pytest.mark.usefixtures("computed_by")
def test_a_fault_costs_one_episode(playing, tokenizer, tmp_path, caplog):
    with playing("faulty", n=6, num_workers=1, timeout_s=8.0, args={"folder": str(tmp_path)}) as rollouts:
        batch = rollouts.generate(prompts(tokenizer, 1))
    assert batch.finish_reason.tolist() == ["timeout", "error", "error", "length", "error", "length"]
    assert batch.metrics["agent/retried_episodes"].result() >= 2  # samples 3 and 4, and who was with them
    assert [bool(turns_of(batch, row)) for row in range(6)] == [True] * 6
    with playing("once", n=6) as rollouts:
        unharmed = rollouts.generate(prompts(tokenizer, 1))
    assert batch.completions == unharmed.completions


@pytest.mark.slow
@pytest.mark.usefixtures("computed_by")
def test_a_loop_that_hangs_costs_its_own_episode(playing, tokenizer):
    with playing("hangs_its_thread", n=3, num_workers=1, timeout_s=3.0) as rollouts:
        batch = rollouts.generate(prompts(tokenizer, 1))
    reasons = batch.finish_reason.tolist()
    assert reasons[0] == "timeout"
    assert set(reasons[1:]) <= {"stop", "length", "timeout"}


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("nothing", {}, "nothing"),
        ("once", {"colour": 1}, r"rollout.agent_args must be parameters of the function"),
        ("edits", {}, r"must take \(client, row\).*missing a required argument: 'log'"),
    ],
)
def test_an_agent_that_cannot_be_played_ends_the_run(playing, tokenizer, name, args, message):
    with playing(name, args=args) as rollouts, pytest.raises(ValueError, match=message):
        rollouts.generate(prompts(tokenizer))


@pytest.mark.usefixtures("computed_by")
def test_a_first_batch_of_faults_ends_the_run(playing, tokenizer, tmp_path):
    with (
        playing("edits", args={"log": str(tmp_path / "no" / "folder")}) as rollouts,
        pytest.raises(ValueError, match=r"every episode of .* has a fault; the first: .*FileNotFoundError"),
    ):
        rollouts.generate(prompts(tokenizer))


@pytest.mark.usefixtures("computed_by")
def test_requests_that_an_agent_leaves_behind_end_with_its_episode(playing, tokenizer, small_params):
    with playing("leaves_requests_behind", n=2) as rollouts:
        for version in (3, 4):
            batch = rollouts.generate(prompts(tokenizer))
            assert rollouts.sampler.num_running == 0
            rollouts.release()
            rollouts.sync_weights(small_params, version)
    assert set(batch.columns["environment_reward"]) == {4.0}


@pytest.mark.usefixtures("computed_by")
def test_who_keeps_a_connection_finds_it_closed(playing, tokenizer):
    """Whether or not it asks for something at the moment; the fault: sockets left open after each run."""
    with playing("once", n=1) as rollouts:
        rollouts.generate(prompts(tokenizer, 1))
        address = urlsplit(rollouts.player._url)
        kept = [socket.create_connection((address.hostname, address.port), timeout=20) for _ in range(2)]
        kept[0].sendall(b"GET /v1/models HTTP/1.1\r\n")
        time.sleep(0.3)  # until both are accepted
    for each in kept:
        with each, suppress(ConnectionResetError):
            assert each.recv(1) == b""


@pytest.mark.usefixtures("computed_by")
def test_a_cancelled_task_is_a_fault_at_once(playing, tokenizer):
    with playing("is_cancelled", n=2) as rollouts:
        batch = rollouts.generate(prompts(tokenizer, 1))
    assert batch.finish_reason.tolist() == ["error", "stop"]
    assert batch.metrics["agent/retried_episodes"].result() == 0


@pytest.mark.usefixtures("computed_by")
def test_who_shortens_its_history_has_met_no_limit(playing, tokenizer):
    with playing("shortens_its_history", n=2, more_tokens=60, max_turns=100) as rollouts:
        batch = rollouts.generate(prompts(tokenizer, 1))
    first = batch.episodes.first_rows
    assert batch.finish_reason[first].tolist() == ["length", "error"]  # its last answer had one token
    assert [batch.columns["environment_reward"][row] for row in first] == [1.0, None]
    assert batch.metrics["agent/refused_requests"].result() == 2
    assert batch.metrics["agent/errors"].result() == 1
    assert np.bincount(batch.episodes.of_row).tolist() == [2, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("computed_by", ["host"], indirect=True)  # which compiles nothing within the 8 s
def test_a_function_that_hangs_in_its_thread_costs_its_own_episode(playing, tokenizer):
    with playing("hangs_in_a_thread", n=3, num_workers=1, timeout_s=8.0) as rollouts:
        batch = rollouts.generate(prompts(tokenizer, 1))
        [host] = rollouts.player._processes._hosts.all
        assert host.is_retired
    assert batch.finish_reason.tolist()[0] == "timeout"
    assert "timeout" not in batch.finish_reason.tolist()[1:]


@pytest.mark.usefixtures("computed_by")
def test_what_a_judge_says_is_the_same_in_a_repetition(playing, tokenizer):
    found = []
    for _ in range(2):
        with playing("asks_a_judge", n=2) as rollouts:
            metrics = rollouts.generate(prompts(tokenizer, 1)).metrics
        found.append([metrics[f"agent/own/{n}"].value for n in (0, 1)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


@pytest.mark.usefixtures("computed_by")
def test_a_failure_of_the_engine_is_not_the_agents(playing, tokenizer, monkeypatch):
    def fails(self):
        raise MemoryError("no room")

    monkeypatch.setattr(RolloutEngine, "advance", fails)
    with playing("once") as rollouts, pytest.raises(MemoryError):
        rollouts.generate(prompts(tokenizer))
    with playing("once", thread="engine") as rollouts, pytest.raises(ServiceFailed, match="MemoryError"):
        rollouts.generate(prompts(tokenizer))


@pytest.mark.usefixtures("computed_by")
def test_a_server_that_cannot_be_had_is_an_error(playing, tokenizer, monkeypatch):
    def fails(self):
        raise OSError("no port")

    monkeypatch.setattr(AgentPlayer, "_serve", fails)
    with playing("once") as rollouts, pytest.raises(OSError, match="no port"):
        rollouts.generate(prompts(tokenizer))


@pytest.mark.usefixtures("computed_by")
def test_each_role_of_an_episode_has_its_own_turns_and_reward(playing, tokenizer, tmp_path):
    log = tmp_path / "log"
    with playing("two_players", args={"log": str(log)}) as rollouts:
        batch = rollouts.generate(prompts(tokenizer), step=5)
    roles = batch.columns["agent_role"]
    assert roles == ("first", "second") * 8
    assert batch.columns["environment_reward"] == (-1.5, 1.5, -0.5, 0.5, 0.5, -0.5, 1.5, -1.5) * 2
    for role in ("first", "second"):
        rows = [row for row in range(len(batch)) if roles[row] == role]
        found = [
            ([int(batch.columns["id"][row]), place % 4], turn)
            for place, row in enumerate(rows)
            for turn in turns_of(batch, row)
        ]
        assert sorted(found) == sorted(logged(Path(f"{log}.{role}")))
    numbers = {name: metric.result() for name, metric in batch.metrics.items()}
    assert numbers["agent/turns/max"] == 2
    assert numbers["agent/roots"] == 16
    assert numbers["agent/reward_of/first"] == numbers["agent/reward/mean"] == 0
    assert numbers["agent/own/won"] == 0
    # Rewards are compared with those of the same prompt and role; a prompt's rows stay together.
    assert batch.compared_ids.tolist() == [0, 1] * 4 + [2, 3] * 4
    assert batch.group_ids.tolist() == [0] * 8 + [10] * 8


@pytest.mark.usefixtures("computed_by")
def test_the_greedy_baseline_is_an_episode_of_each_prompt_with_the_roles_of_the_others(
    playing, tokenizer, tmp_path
):
    batches = []
    for attempt, seed in enumerate((11, 12)):  # what is greedy does not depend on the seed
        args = {"log": str(tmp_path / f"log{attempt}")}
        with playing("two_players", n=2, seed=seed, greedy_baseline=True, args=args) as rollouts:
            batches.append(rollouts.generate(prompts(tokenizer), step=5))
            assert rollouts.generate(prompts(tokenizer), sampling=Sampling(1, TOKENS)).baseline is None
    first, second = (batch.baseline for batch in batches)
    assert first.group_ids.tolist() == [0, 0, 10, 10]
    assert first.columns["agent_role"] == ("first", "second") * 2
    np.testing.assert_array_equal(first.input_ids, second.input_ids)
    assert first.completions != batches[0].completions[::2]
    rewarded = RewardScorer(RewardConfig(functions={"environment": 1.0})).score(batches[0])
    assert rewarded.baseline_rewards.tolist() == [-1.5, 1.5] * 4  # of sample 0, and of each role its own


@pytest.mark.usefixtures("computed_by")
def test_a_role_without_a_reward_is_not_trained(playing, tokenizer, tmp_path):
    args = {"log": str(tmp_path / "log"), "leave_out": "second"}
    with playing("two_players", args=args) as rollouts:
        batch = rollouts.generate(prompts(tokenizer))
    assert batch.columns["agent_role"] == ("first",) * 8
    assert batch.metrics["agent/untrained_roles"].result() == 8
    assert "agent/reward_of/second" not in batch.metrics


@pytest.mark.usefixtures("computed_by")
@pytest.mark.parametrize("rename", ["scnd", "no name"])
def test_rewards_of_other_roles_than_asked_are_a_fault(playing, tokenizer, tmp_path, rename):
    args = {"log": str(tmp_path / "log"), "rename": rename}
    message = rf"rewards of the roles that asked, \['first', 'second'\].*\['first', '{rename}'\]"
    with playing("two_players", args=args) as rollouts, pytest.raises(ValueError, match=message):
        rollouts.generate(prompts(tokenizer))


@pytest.mark.usefixtures("computed_by")
def test_an_agent_pays_for_its_context_once(playing, tokenizer):
    """P1: each of its eight turns computed all before it; what was kept of episodes that have ended is the
    first to go, or the store would be full of them."""
    prefilled, batches = [], []
    for kept in (0.5, 0.0):
        with playing("talks", kept=kept, max_new_tokens=80, more_tokens=800, max_turns=8) as rollouts:
            batches.append(rollouts.generate(prompts(tokenizer), step=1))
            if kept:
                [store] = rollouts.sampler.engine._session._kept._stores
                assert not store._owners
            numbers = {name: metric.result() for name, metric in batches[-1].metrics.items()}
            prefilled.append(numbers["rollout/prefill_tokens"])
            if kept:
                assert numbers["agent/recomputed_fraction"] == 0
                assert numbers["rollout/prefix_hit_fraction"] > 0.7
                assert numbers["rollout/prefix_evicted_tokens"] == 0
            else:
                assert numbers["agent/recomputed_fraction"] > 0.7
                assert "rollout/prefix_hit_fraction" not in numbers
    assert prefilled[0] < 0.3 * prefilled[1]
    np.testing.assert_array_equal(batches[0].input_ids, batches[1].input_ids)
    np.testing.assert_allclose(batches[0].rollout_logprobs, batches[1].rollout_logprobs, atol=1e-4)
