"""Judges behind a server: what is asked, how often, and what becomes of a server that fails."""

import contextlib
import json
import logging
import socket
import threading

import numpy as np
import pytest
from judge_server import REFUSES_SCHEMA, JudgeServer, said, slowly
from rollouts import make_rollouts

from quatrain.config.schema import RewardConfig
from quatrain.config.sections.judge import JudgeConfig
from quatrain.reward.judge import on_server
from quatrain.reward.judge.judge import FOLDER, SPENT, Judge
from quatrain.reward.judge.on_server import ServerJudge
from quatrain.reward.scorer import RewardScorer

GOOD = '{"reason": "it is right", "score": 0.75}'


async def no_pause(seconds):
    """In place of the pause before another attempt."""


@contextlib.contextmanager
def judging(server, folder=None, pause=no_pause, **keys):
    """A judge of `server`, which does not wait before another attempt."""
    with server.running() as address:
        config = JudgeConfig(base_url=address, **keys)
        judge = Judge(config, folder=folder)
        judge.connect(ServerJudge(config, judge.spending, pause=pause))
        try:
            yield judge
        finally:
            judge.close()


def score(judge, *completions):
    return judge.score(make_rollouts(completions, [f"question {text}" for text in completions]))


def test_completions_get_the_scores_of_the_server():
    """Catches scores in another order, lost reasons, and a request without schema or model."""
    server = JudgeServer(
        lambda _, body: said(f'{{"reason": "r", "score": {body["messages"][0]["content"][-1]}}}')
    )
    with judging(server, scale=(0, 9), rubric="Be right.", template=None, temperature=0.5) as judge:
        judge._questions.text = lambda columns, prompt, completion: f"grade {completion}"
        found = score(judge, "a1", "b5", "c3")
    assert found.values == [1.0, 5.0, 3.0]
    assert found.columns == {"reason": ["r", "r", "r"]}
    assert {**found.counts} == {
        "requests": 3, "tokens_in": 300, "tokens_out": 30, "cached": 0, "errors": 0, "failed": 0
    }  # fmt: skip
    body = server.requests[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("one", 0.5, 512)
    assert body["response_format"]["json_schema"]["schema"]["properties"]["score"]["maximum"] == 9


def test_a_server_without_schemas_is_found_out_once(caplog):
    """Catches a probe for each question, and answers in prose that are lost."""

    def answer(number, body):
        return REFUSES_SCHEMA if "response_format" in body else said("Well. Score: 0.5")

    server = JudgeServer(answer)
    with caplog.at_level(logging.INFO), judging(server) as judge:
        assert score(judge, *"abcdef").values == [0.5] * 6
    assert sum("response_format" in body for body in server.requests) == 1
    assert len(server.requests) == 7
    assert "takes no response_format" in caplog.text


def test_failures_that_pass_are_tried_again():
    """Catches a 429, a 500 or a lost connection that costs a sample its reward."""
    failures = [(429, {"Retry-After": "0.01"}, "slow down"), (500, {}, "oops"), (503, {}, "<html>")]
    server = JudgeServer(lambda number, _: failures[number] if number < 3 else said(GOOD))
    with judging(server) as judge:
        found = score(judge, "a")
    assert found.values == [0.75]
    assert found.counts["retries"] == 3
    assert found.counts["requests"] == 4


def test_retry_after_is_waited_for():
    """Catches a pause that the server's wish does not change."""
    waited = []

    async def pause(seconds):
        waited.append(seconds)

    answers = {0: (429, {"Retry-After": "0.02"}, "no"), 1: (500, {}, "no"), 2: (500, {}, "no")}
    server = JudgeServer(lambda number, _: answers.get(number, said(GOOD)))
    with judging(server, pause=pause) as judge:
        assert score(judge, "a").values == [0.75]
    assert waited[0] == 0.02
    assert 2 * 0.75 <= waited[1] <= 2 * 1.25
    assert 4 * 0.75 <= waited[2] <= 4 * 1.25


def test_a_long_pause_is_warned_of_once(caplog):
    """Catches a run that waits for hours, because its server wants that, without a word."""
    slow_down = (429, {"Retry-After": "7200"}, "come back later")
    server = JudgeServer(lambda number, _: slow_down if number < 2 else said(GOOD))
    with judging(server) as judge:
        judge._asked._limits.pause = lambda seconds: None
        assert score(judge, "a").values == [0.75]
    [warning] = [record.getMessage() for record in caplog.records if "Retry-After" in record.getMessage()]
    assert "is not asked for 7200 s" in warning
    assert "come back later" in warning


def test_the_tokens_that_the_body_asks_for_are_those_that_the_budget_reserves():
    """Catches a budget and a message that count `max_tokens` where `body` has another number in its place."""
    server = JudgeServer(lambda *_: said("{", finish_reason="length"))
    body = {"max_tokens": None, "max_completion_tokens": 4000}
    with judging(server, body=body, budget={"tokens": 4050}, on_budget="abstain") as judge:
        assert score(judge, "a").counts["failed/budget"] == 1
    assert server.requests == []
    with judging(server, body=body) as judge:
        [outcome], _ = judge._outcomes(["a"], 1)
    assert "it was cut at 4000 tokens" in outcome.detail
    assert "max_tokens" not in server.requests[0]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (said("no idea"), "unreadable"),
        (said('{"score": 7}'), "unreadable"),
        (said(GOOD[:20], finish_reason="length"), "unreadable"),
        (said('Form: {"score": 1}. Now', finish_reason="length"), "unreadable"),
        ((200, {}, "not json"), "unreadable"),
        ((200, {}, {"choices": []}), "unreadable"),
        ((200, {}, []), "unreadable"),
        (said("", message={"role": "assistant", "content": None, "refusal": "I cannot"}), "refused"),
        ((400, {}, {"error": {"message": "too long"}}), "refused"),
        ((500, {}, "broken"), "lost"),
    ],
)
def test_a_judge_that_fails_abstains(answer, kind, caplog):
    """Catches a failure that becomes a score, ends the run, or is not counted and told."""
    server = JudgeServer(lambda _, body: answer if "bad" in body["messages"][0]["content"] else said(GOOD))
    with caplog.at_level(logging.WARNING), judging(server, retries=1) as judge:
        found = score(judge, "good", "bad")
    np.testing.assert_array_equal(found.values, [0.75, np.nan])
    assert (found.counts["errors"], found.counts["failed"], found.counts[f"failed/{kind}"]) == (1, 1, 1)
    assert f"1 of 2 judgements failed ({kind}: 1)" in caplog.text


def test_an_answer_in_parts_is_read_without_its_thoughts():
    """Servers of thinking models send a list of parts, which was an answer without any text."""
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": '{"score": 0.1}'}]}
    message = {"role": "assistant", "content": [thought, {"type": "text", "text": GOOD}]}
    with judging(JudgeServer(lambda *_: said("", message=message))) as judge:
        assert score(judge, "a").values == [0.75]


def test_a_slow_answer_is_given_up():
    """Catches an answer that is waited for longer than timeout_s, and a try that is not made."""
    server = JudgeServer(lambda number, _: said(GOOD) if number else slowly(1.0, said(GOOD)))
    with judging(server, timeout_s=0.2, retries=1) as judge:
        assert score(judge, "a").values == [0.75]
    server = JudgeServer(lambda *_: slowly(0.5, said(GOOD)))
    with judging(server, timeout_s=0.1, retries=0) as judge:
        found = score(judge, "a")
    assert found.counts["failed/timeout"] == 1


def test_a_server_that_is_down_does_not_hold_a_step():
    """Catches a batch of which each sample waits for its own retries."""
    server = JudgeServer(lambda *_: (503, {}, "down"))
    with judging(server, retries=1, concurrency=2) as judge:
        found = score(judge, *map(str, range(20)))
        assert found.counts["failed/lost"] == 20
        assert len(server.requests) <= 8
        server.answer = lambda *_: said(GOOD)
        assert score(judge, "later").values == [0.75]


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "key_variable"), (403, "key_variable"), (404, "mostly ends in /v1")]
)
def test_a_wrong_key_or_model_ends_the_run(status, remedy):
    """Catches a run that goes on without any reward, and an error that does not say what to set."""
    server = JudgeServer(lambda *_: (status, {}, {"error": {"message": "wrong"}}))
    with (
        judging(server) as judge,
        pytest.raises(ValueError, match=rf"the judge at .*: status {status}, wrong; .*{remedy}"),
    ):
        score(judge, "a", "b")


def test_the_key_is_sent_and_never_shown(monkeypatch, caplog):
    """Catches a key that is not sent, or that a message shows."""
    monkeypatch.setenv("MY_API_KEY", "very-secret-value")
    server = JudgeServer(lambda *_: (400, {}, {"error": {"message": "no"}}))
    with caplog.at_level(logging.DEBUG), judging(server, key_variable="MY_API_KEY") as judge:
        score(judge, "a")
    assert server.headers[0]["Authorization"] == "Bearer very-secret-value"
    assert "very-secret-value" not in caplog.text
    monkeypatch.delenv("MY_API_KEY")
    with (
        pytest.raises(ValueError, match="MY_API_KEY is not set; set it"),
        judging(server, key_variable="MY_API_KEY"),
    ):
        pass


def test_the_model_of_a_server_is_named():
    """Catches a judge that is any of a server's models."""
    server = JudgeServer(models=("one", "two"))
    with judging(server) as judge, pytest.raises(ValueError, match=r"2 models \(one, two.*served_model"):
        score(judge, "a")
    with judging(server, served_model="two", body={"max_tokens": None, "effort": "low"}) as judge:
        score(judge, "a")
    body = server.requests[0]
    assert (body["model"], body["effort"]) == ("two", "low")
    assert "max_tokens" not in body


# --------------------------------------------------------------------------- each question once, and its cost


def test_a_question_is_asked_once(tmp_path):
    """Catches equal questions of a batch, of a later one or of a resumed run that are asked again."""
    server = JudgeServer(lambda number, _: said(f'{{"score": 0.{number}}}'))
    with judging(server, tmp_path) as judge:
        first = score(judge, "a", "b", "a")
        assert first.values[0] == first.values[2]
        assert score(judge, "b", "a").values == [first.values[1], first.values[0]]
        address = judge.config.base_url
        resumed = Judge(JudgeConfig(base_url=address), folder=tmp_path)
        resumed.connect(ServerJudge(resumed.config, resumed.spending))
        again = score(resumed, "a", "b")
        resumed.close()
    assert again.values == first.values[:2]
    assert (again.counts["requests"], again.counts["cached"]) == (0, 2)
    assert len(server.requests) == 2


def test_what_changes_a_judgement_changes_the_question(tmp_path):
    """Catches a judgement by another rubric, scale or model that is taken from the cache."""
    server = JudgeServer(lambda *_: said(GOOD), models=("one",))
    changes = [{}, {"rubric": "Other."}, {"scale": (0, 2)}, {"temperature": 0.5}, {"served_model": "x"},
               {"body": {"effort": "low"}}, {"max_tokens": 100}, {}]  # fmt: skip
    with server.running() as address:
        for keys in changes:
            config = JudgeConfig(base_url=address, **keys)
            judge = Judge(config, folder=tmp_path)
            judge.connect(ServerJudge(config, judge.spending))
            score(judge, "a")
            judge.close()
    assert len(server.requests) == len(changes) - 1


def test_a_folder_is_shared_and_nothing_is_kept_without_a_cache(tmp_path):
    """Catches a folder of the user's that is not used, and a cache that was turned off and is not."""
    server = JudgeServer(lambda *_: said(GOOD))
    with judging(server, tmp_path / "run", cache=str(tmp_path / "shared")) as judge:
        score(judge, "a")
    assert len([*(tmp_path / "shared").rglob("*.json")]) == 1
    assert not (tmp_path / "run" / FOLDER).exists()
    assert (tmp_path / "run" / SPENT).is_file()
    with judging(server, tmp_path, cache=False) as judge:
        score(judge, "a")
        score(judge, "a")
    assert len(server.requests) == 3


def test_judgements_before_an_interruption_are_kept(tmp_path):
    """Catches judgements that are written at the end of a batch alone, which a kill loses."""
    kept = threading.Event()

    def answer(number, body):
        if number == 0:
            return said(GOOD)
        kept.wait(10)
        return (401, {}, "revoked")  # ends the batch as a kill does, with the first judgement on the disk

    server = JudgeServer(answer)
    with judging(server, tmp_path, concurrency=1) as judge:
        keep = judge.cache.put

        def put(*entry):
            keep(*entry)
            kept.set()

        judge.cache.put = put
        with pytest.raises(ValueError, match="status 401"):
            score(judge, "a", "b")
    assert len([*(tmp_path / FOLDER).rglob("*.json")]) == 1


def test_several_judgements_are_averaged(tmp_path):
    """Catches copies of one judgement, a failed one that counts as 0, and more that are asked than lack."""
    scores = iter([0.0, 1.0, None, 0.6])

    def answer(number, body):
        value = next(scores)
        return said("nothing") if value is None else said(f'{{"score": {value}}}')

    server = JudgeServer(answer)
    with judging(server, tmp_path, n=3, concurrency=1) as judge:
        found = score(judge, "a")
        assert found.values == [0.5]
        assert (found.counts["failed"], found.counts["errors"]) == (1, 0)
        assert server.requests[0]["temperature"] == 1.0
        again = score(judge, "a")  # the third alone is asked for again
    assert again.values[0] == pytest.approx((0 + 1 + 0.6) / 3)
    assert (again.counts["requests"], again.counts["cached"]) == (1, 2)


def test_no_more_are_asked_at_once():
    """Catches a concurrency that is exceeded, or not used."""
    server = JudgeServer(lambda number, _: slowly(0.05 * (number > 0), said(GOOD)))
    with judging(server, concurrency=3) as judge:
        score(judge, *map(str, range(12)))
    assert server.most_at_once == 3


def test_a_budget_that_is_used_up_ends_the_run_or_abstains(tmp_path):
    """Catches a budget that is exceeded, also by a resumed run, and one that is used up in silence."""
    server = JudgeServer(lambda *_: said(GOOD))
    with judging(server, tmp_path, budget={"requests": 3}, concurrency=2) as judge:
        assert score(judge, "a", "b").values == [0.75, 0.75]
        with pytest.raises(
            ValueError, match=r"has used 3 of 3 requests, and 1 judgements .* raise the budget"
        ):
            score(judge, "c", "d")
    assert len(server.requests) == 3
    budget = {"budget": {"requests": 4}, "on_budget": "abstain"}
    with server.running() as address:
        config = JudgeConfig(base_url=address, **budget)
        resumed = Judge(config, folder=tmp_path)
        resumed.connect(ServerJudge(config, resumed.spending))
        found = score(resumed, "e", "f")
        resumed.close()
    assert sorted(map(str, found.values)) == ["0.75", "nan"]
    assert found.counts["failed/budget"] == 1
    assert len(server.requests) == 4


def test_what_was_not_sent_is_not_counted(tmp_path):
    """Catches a budget that counts attempts without a connection, or requests that waited for their turn."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        config = JudgeConfig(base_url=address, served_model="one", retries=2, budget={"requests": 1})
        judge = Judge(config, folder=tmp_path)
        judge.connect(ServerJudge(config, judge.spending, pause=no_pause))
        found = score(judge, "a")
        judge.close()
    assert (found.counts["requests"], found.counts["retries"], found.counts["failed/lost"]) == (0, 2, 1)
    server = JudgeServer(lambda number, _: (401, {}, "wrong key") if number else said(GOOD))
    with judging(server, tmp_path, rpm=2, budget={"requests": 9}) as judge:
        score(judge, "b")
        with pytest.raises(ValueError, match="status 401"):
            score(judge, "c", "d", "e")
        assert len(server.requests) == 2
        assert str(judge.spending) == "2 of 9 requests"
    assert json.loads((tmp_path / SPENT).read_text()) == {"requests": 2, "tokens": 110}


def test_a_damaged_judgement_is_counted_and_asked_again(tmp_path):
    """Catches damage that is not in the metrics."""
    server = JudgeServer(lambda *_: said(GOOD))
    with judging(server, tmp_path) as judge:
        score(judge, "a")
        (path,) = (tmp_path / FOLDER).rglob("*.json")
        path.write_text("")
        found = score(judge, "a")
    assert (found.counts["damaged"], found.counts["requests"]) == (1, 1)
    assert found.values == [0.75]


# ------------------------------------------------------------------------------------------- in the scorer


def test_the_scorer_weighs_the_judge_and_leaves_abstentions_out():
    """Catches a judge whose weight, data sources, abstentions or metrics the scorer does not read."""
    server = JudgeServer(lambda _, body: said("?") if "odd" in body["messages"][0]["content"] else said(GOOD))
    functions = {"judge": {"weight": 2.0, "data_source": ["a"]}, "tag_count": 1.0}
    with judging(server) as judge:
        config = RewardConfig(judge=judge.config, functions=functions)
        scorer = RewardScorer(config, judge=judge)
        rollouts = make_rollouts(["one", "odd", "two"], ["p"] * 3, data_source=["a", "a", "b"])
        rewarded = scorer.score(rollouts)
    np.testing.assert_array_equal(rewarded.rewards, [1.5, 0, 0])
    np.testing.assert_array_equal(rewarded.rewards_per_function[0], [0.75, np.nan, np.nan])
    assert rewarded.rollouts.columns["judge/reason"] == ("it is right", None, None)
    metrics = {name: metric.result() for name, metric in rewarded.metrics.items()}
    assert metrics["reward/judge/mean"] == 0.75
    assert metrics["reward/judge/abstained"] == 2
    assert metrics["reward/judge/errors"] == 1
    assert len(server.requests) == 2


def test_columns_of_the_question_are_required():
    """Catches a column that is missed at the first batch, and not before the run."""
    config = RewardConfig(judge=JudgeConfig(self=True, rubric="It is {gold}."), functions={"judge": 1.0})
    scorer = RewardScorer(config, models=None)
    assert dict(scorer.required_by) == {"gold": "the question of reward.judge"}


def test_first_pause_doubles():
    """Catches pauses that grow without end."""
    assert on_server.FIRST_PAUSE_S * 2**10 > on_server.LONGEST_PAUSE_S
