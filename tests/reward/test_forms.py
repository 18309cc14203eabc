import asyncio
import dataclasses

import numpy as np
import pytest
from rollouts import make_rollouts

from quatrain.config.schema import RewardConfig
from quatrain.reward.forms import prepared
from quatrain.reward.scorer import RewardScorer
from quatrain.run.catalogue import unknown_metrics
from quatrain.types.batches import Prompt

SOURCE = """
import asyncio
import statistics

def bonus(completions, *, size: float = 1.0, words: list = (), **columns):
    return [size + len(words) + ("size" in columns) for _ in completions]

def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source in ("gsm8k", "math")
    return {"score": float(solution_str == ground_truth), "index": (extra_info or {}).get("index")}

def short(solution_str, ground_truth, scale=1.0):
    return scale * (solution_str == ground_truth)

def everything(solution_str, **given):
    return {"score": len(given), **given}

def wrong(solution_str):
    return {"reward": 1.0}

def raises(completions):
    raise KeyError("no such thing")

def too_many(completions):
    return [0.0] * (len(completions) + 1)

def of_messages(completions):
    return [float(len(completion[0]["content"])) for completion in completions]

def one_for_all(completions):
    return [1.0]

def compares(completions):
    return [statistics.stdev(map(len, completions))] * len(completions)

lock = asyncio.Lock()  # bound to the loop that first waits for it
together, most = 0, 0

async def later(completions, scale=1.0):
    async with lock:
        await asyncio.sleep(0.001)
    return [scale * len(completion) for completion in completions]

async def judge(solution_str, ground_truth):
    global together, most
    together += 1
    most = max(most, together)
    await asyncio.sleep(0.2)
    together -= 1
    if solution_str == "raise":
        raise KeyError("no such thing")
    return {"score": most}

class Judge:
    async def __call__(self, completions):
        await asyncio.sleep(0)
        return [3.0] * len(completions)

judge_of_class = Judge()

def logs(completions, log_metric, log_extra=None, trainer_state=None, **columns):
    assert set(columns) == {"prompts", "completion_ids", "finish_reasons", "answer"}
    for completion in completions:
        log_metric("length", len(completion))
    log_metric("acc/of_all", True)
    log_extra("said", [{"text": completion, "at": trainer_state.global_step} for completion in completions])
    return [0.0 if completion else 1 / 0 for completion in completions]

def logs_wrongly(completions, log_metric, log_extra):
    log_metric("a name", 1.0)
    log_metric("mean", 1.0)
    log_metric("fine", float("nan"))
    log_metric("fine", "7")
    log_extra("one", [1])
    return [0.0 for _ in completions]

def details(solution_str):
    return {"score": 1, "acc": len(solution_str) > 1, "pred": solution_str, "why not": None, "rank": None}

async def hangs(completions):
    await asyncio.sleep(60 * ("hang" in completions))
    return [1.0] * len(completions)
"""


@pytest.fixture(params=[0, 1], ids=["in process", "in a worker"])
def workers(request):
    return request.param


@pytest.fixture
def scorer(tmp_path, workers):
    path = tmp_path / "forms.py"
    path.write_text(SOURCE)
    made = []

    def make(per_call="batch", **functions):
        entries = {f"{path}:{name}": entry for name, entry in functions.items()}
        made.append(RewardScorer(RewardConfig(functions=entries, workers=workers, per_call=per_call)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def raw(scorer, completions, **columns):
    return scorer.score(make_rollouts(completions, **columns)).rewards_per_function[0].tolist()


def test_arguments_are_passed_and_hide_a_column_of_their_name(scorer):
    entry = {"weight": 0.5, "args": {"size": 2.0, "words": ["a", "b"]}}
    batch = scorer(bonus=entry).score(make_rollouts(["x", "y"], size=[9, 9]))
    np.testing.assert_array_equal(batch.rewards, np.float32([2.0, 2.0]))
    assert raw(scorer(bonus=1.0), ["x"]) == [1.0]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("short", {"sclae": 2.0}, "must be parameters of the function: .* has scale=1.0; got sclae; correct"),
        ("bonus", {"size": "big"}, "takes size as float; .*size is 'big'; change it"),
        ("bonus", {"completions": ["x"]}, "must not have completions, which each call of the function gets"),
        ("verl", {"ground_truth": "7"}, "must not have ground_truth"),
    ],
)
def test_wrong_arguments_are_errors_when_the_scorer_is_made(scorer, name, args, message):
    with pytest.raises(ValueError, match=message):
        scorer(**{name: {"args": args}})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tag_count", "'tag_count' is built in and has no arguments"),
        ("overlong", "set these keys instead"),
        ("format", "has one argument, pattern"),
    ],
)
def test_built_in_functions_have_no_other_arguments(name, message):
    functions = {name: {"args": {"limit": 3}}}
    with pytest.raises(ValueError, match=message):
        RewardScorer(RewardConfig(functions=functions, overlong_limit=9, overlong_buffer=2))


VERL = {
    "data_source": ["gsm8k", "math"],
    "reward_model": [{"ground_truth": "0"}, {"ground_truth": "0"}],
    "extra_info": [{"index": 1}, None],
    "answer": ["7", "8"],
}


def test_a_function_of_one_sample_in_the_form_of_verl(scorer):
    assert raw(scorer(verl=1.0), ["7", "7"], **VERL) == [1.0, 0.0]
    assert raw(scorer(verl=1.0), ["7"], data_source=["math"], answer=["7"]) == [1.0]
    assert raw(scorer(short={"args": {"scale": 3.0}}), ["7", "8"], answer=["7", "7"]) == [3.0, 0.0]
    assert raw(scorer(everything=1.0), ["7", "7"], **VERL) == [3.0, 3.0]
    assert raw(scorer(everything=1.0), ["7"]) == [0.0]


def test_columns_that_a_function_of_verl_needs(scorer):
    with pytest.raises(ValueError, match="needs the column `data_source`"):
        raw(scorer(verl=1.0), ["7"], answer=["7"])
    with pytest.raises(ValueError, match="needs the column `answer`"):
        raw(scorer(short=1.0), ["7"])


def test_a_mapping_without_a_score_is_an_error(scorer):
    with pytest.raises(ValueError, match="must return numbers, or None to abstain; it returned a value dict"):
        raw(scorer(wrong=1.0), ["7"])


def test_a_function_that_takes_completions_is_not_of_verl():
    def plain(completions, solution_str=None):
        return []

    assert prepared(plain, "plain", {}) is plain


def test_asynchronous_functions_are_awaited(scorer):
    rewards = scorer(later={"args": {"scale": 2.0}}, judge_of_class=1.0)
    for _ in range(2):
        batch = rewards.score(make_rollouts(["a", "bcd"]))
        assert batch.rewards_per_function.tolist() == [[2, 6], [3, 3]]
    assert rewards.try_on(prompts("math"), [1]) == []


def test_the_samples_of_an_asynchronous_function_of_verl_are_awaited_together(scorer):
    assert raw(scorer(judge=1.0), ["7"] * 8, answer=["7"] * 8) == [8.0] * 8


def test_a_sample_that_an_asynchronous_function_raises_on_costs_itself_alone(scorer):
    batch = scorer(judge=1.0).score(make_rollouts(["7", "raise", "8"], answer=["7"] * 3))
    assert batch.rewards[1] == -1
    assert (batch.rewards[[0, 2]] >= 1).all()
    assert batch.metrics["reward/judge/errors/error"].value == 1


def test_an_asynchronous_function_that_hangs_is_ended(tmp_path):
    path = tmp_path / "forms.py"
    path.write_text(SOURCE)
    config = RewardConfig(functions={f"{path}:hangs": 1.0}, workers=1, timeout_s=0.5)
    rewards = RewardScorer(config)
    batch = rewards.score(make_rollouts(["a", "hang"], group_ids=[0, 1]))
    rewards.close()
    assert batch.rewards.tolist() == [1, -1]
    assert batch.metrics["reward/hangs/errors/timeout"].value == 1


def test_an_asynchronous_python_function_in_a_running_loop_as_of_a_notebook():
    async def mine(completions):
        await asyncio.sleep(0)
        return [1.0] * len(completions)

    rewards = RewardScorer(RewardConfig(functions={"mine": 1.0}), functions={"mine": mine})

    async def cell():
        return rewards.score(make_rollouts(["a"])).rewards.tolist()

    assert asyncio.run(cell()) == [1.0]


def of_version(version, rollouts):
    versions = np.where(rollouts.completion_mask, version, -1).astype(np.int32)
    return dataclasses.replace(rollouts, policy_version=versions)


def test_the_arguments_of_trl_log_metrics_and_columns_of_samples(scorer):
    made = scorer(logs=1.0)
    assert made.required_columns == frozenset()
    batch = made.score(of_version(5, make_rollouts(["a", "bcd"], answer=["7", "8"])))
    numbers = {name: metric.result() for name, metric in batch.metrics.items()}
    assert (numbers["reward/logs/length"], numbers["reward/logs/acc/of_all"]) == (2.0, 1.0)
    assert "reward/logs/unlogged" not in numbers
    assert batch.rollouts.columns["logs/said"] == ({"text": "a", "at": 5}, {"text": "bcd", "at": 5})
    assert not unknown_metrics(numbers)
    # What a call logged that failed does not count; the samples of it are called again.
    batch = made.score(make_rollouts(["a", "", "bcd"], answer=["7"] * 3))
    assert batch.metrics["reward/logs/length"].result() == 2.0
    assert [said and said["text"] for said in batch.rollouts.columns["logs/said"]] == ["a", None, "bcd"]
    batch = scorer(per_call="sample", logs=1.0).score(make_rollouts(["a", "bcd"], answer=["7", "8"]))
    assert batch.metrics["reward/logs/length"].result() == 2.0
    assert [said["text"] for said in batch.rollouts.columns["logs/said"]] == ["a", "bcd"]


def test_what_cannot_be_logged_is_counted_and_reported_once(scorer, caplog):
    made = scorer(logs_wrongly=1.0)
    for _ in range(2):
        batch = made.score(make_rollouts(["a", "bcd"]))
        assert batch.metrics["reward/logs_wrongly/unlogged"].result() == 5
    assert not {"reward/logs_wrongly/fine", "reward/logs_wrongly/a name"} & set(batch.metrics)
    assert caplog.text.count("logs what is no finite number") == 1
    assert "log_metric(str 'a name', float 1.0)" in caplog.text


def test_other_entries_of_verls_mapping_are_metrics_or_columns_of_samples(scorer):
    made = scorer(details=1.0, short=1.0)
    batch = made.score(make_rollouts(["7", "88"], answer=["7", "7"]))
    assert batch.metrics["reward/details/acc"].result() == 0.5
    assert batch.rollouts.columns["details/pred"] == ("7", "88")
    assert set(batch.rollouts.columns) == {"answer", "details/pred"}
    assert batch.metrics["reward/short/mean"].result() == 0.5


def test_rows_of_other_sources_are_abstentions(scorer):
    rewards = scorer(bonus={"weight": 2.0, "data_source": ["math", "code"]}, short=1.0)
    sources = ["math", "gsm8k", "code", None]
    batch = rewards.score(make_rollouts(["7"] * 4, data_source=sources, answer=["7"] * 4))
    np.testing.assert_array_equal(batch.rewards_per_function, [[1, np.nan, 1, np.nan], [1, 1, 1, 1]])
    np.testing.assert_array_equal(batch.rewards, np.float32([3, 1, 3, 1]))
    assert batch.metrics["reward/bonus/abstained"].result() == 2
    none = rewards.score(make_rollouts(["7"], data_source=["gsm8k"], answer=["7"]))
    assert np.isnan(none.rewards_per_function[0]).all()


def test_a_source_that_no_row_has_is_an_error():
    rewards = RewardScorer(RewardConfig(functions={"format": {"data_source": "gsm"}}))
    assert rewards.routes
    assert "data_source" in rewards.required_columns
    with pytest.raises(ValueError, match="which are gsm8k, math; got gsm; correct the name"):
        rewards.check_sources(["gsm8k", "math"])
    rewards.check_sources(["gsm", None])


def prompts(*sources):
    rows = enumerate(sources)
    return {s: Prompt(n, np.ones(1, np.int32), "q", {"answer": "7", "data_source": s}) for n, s in rows}


def test_functions_are_tried_on_a_made_up_completion(scorer):
    assert scorer(short=1.0).try_on(prompts("math"), [1]) == []
    (warning,) = scorer(raises=1.0).try_on(prompts("math"), [1])
    assert "`raises` fails on a made-up completion" in warning
    assert "error: KeyError: 'no such thing'" in warning
    assert "texts here" not in warning
    (warning,) = scorer(of_messages=1.0).try_on(prompts("math"), [1])
    assert warning.endswith("; completions are texts here, not lists of messages as TRL may give")
    assert scorer(compares=1.0).try_on(prompts("math"), [1]) == []
    with pytest.raises(ValueError, match=r"expected 2, got 3 \(it was tried on 2 made-up completions"):
        scorer(too_many=1.0).try_on(prompts("math"), [1])
    with pytest.raises(ValueError, match=r"expected 2, got 1 \(it was tried on 2 made-up completions"):
        scorer(one_for_all=1.0).try_on(prompts("math"), [1])
    each = scorer(one_for_all=1.0, per_call="sample")
    assert each.try_on(prompts("math"), [1]) == []


def test_a_function_is_tried_on_a_row_of_its_source(scorer):
    only = scorer(too_many={"data_source": "code"})
    assert only.try_on(prompts("math"), [1]) == []
    with pytest.raises(ValueError, match="expected 2, got 3"):
        only.try_on(prompts("math", "code"), [1])


def test_python_functions_are_called_in_this_process():
    calls = []

    def mine(completions, *, bonus=0.0):
        calls.append(completions)
        return [len(text) + bonus for text in completions]

    config = RewardConfig(functions={"mine": {"weight": 2.0, "args": {"bonus": 1.0}}, "correct": 1.0})
    rewards = RewardScorer(config, functions={"mine": mine, "correct": lambda completions: [0.5, None]})
    batch = rewards.score(make_rollouts(["a", "bcd"]))
    np.testing.assert_array_equal(batch.rewards, np.float32([4.5, 8.0]))
    assert calls == [["a", "bcd"]]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"other": len}, "the entries are mine, and reward_functions has 'other'; add it"),
        ({"mine": 3}, "must be callable; 'mine' in reward_functions is a int"),
    ],
)
def test_python_functions_must_be_entries_of_the_configuration(functions, message):
    with pytest.raises(ValueError, match=message):
        RewardScorer(RewardConfig(functions={"mine": 1.0}), functions=functions)


def test_the_failure_of_a_python_function_costs_its_samples():
    def fails(completions):
        return [1 / len(text) for text in completions]

    rewards = RewardScorer(RewardConfig(functions={"fails": 1.0}), functions={"fails": fails})
    np.testing.assert_array_equal(rewards.score(make_rollouts(["a", ""])).rewards, np.float32([1.0, -1.0]))
