import itertools
import json
import math
import os

import pytest
from page_runs import episode_sample, episode_tokens, sample, tokens, tool_turns, unpacked, write_rows

from quatrain.report import page_samples as module
from quatrain.report.page_samples import SampleFiles, by_group, pack, read_samples, sample_files
from quatrain.run.samples import _episode, transcript


def groups_of(tmp_path, rows):
    write_rows(tmp_path / "step_000001.jsonl", rows)
    return by_group(read_samples(tmp_path / "step_000001.jsonl").samples)


def test_a_group_is_sorted_by_reward_and_shares_its_prompt_once(tmp_path):
    abstained = sample(3, 0.0) | {"reward": None, "advantage": None}
    one, three = groups_of(tmp_path, [sample(3, 0.1), sample(3, 1.0), abstained, sample(1, 0.0)])
    assert (one["id"], three["id"]) == (1, 3)
    assert three["prompt"] == "question 3"
    assert three["columns"] == {"answer": "42", "level": {"deep": [1, None]}}
    assert [each["reward"] for each in three["samples"]] == [1.0, 0.1, None]
    assert "prompt" not in three["samples"][0]
    assert "columns" not in three["samples"][0]


def test_flags_say_what_the_filters_find(tmp_path):
    (group,) = groups_of(
        tmp_path,
        [
            sample(0, 0.6, advantage=0.1),  # the function `correct` gave 0
            sample(0, 0.6, advantage=-0.1, finish_reason="length"),
            sample(0, 1.0),
            sample(0, 0.7, correct=1),  # the row itself says that the answer is right
        ],
    )
    assert [each["flags"] for each in group["samples"]] == [
        [],
        [],
        ["wrong_rewarded", "wrong_pushed"],
        ["wrong_rewarded", "truncated"],
    ]


def test_eval_accuracy_decides_which_completions_of_a_training_step_are_right(tmp_path):
    path = tmp_path / "samples" / "step_000001.jsonl"
    rewards = {"correct": 1.0, "exact": 0.0, "b.py:score": 1.0, "a.py:score": 0.0}
    write_rows(path, [sample(0, 0.6, rewards=rewards)])
    config = tmp_path / "config.yaml"

    def right(accuracy, *functions):
        listed = dict.fromkeys(("correct", *functions), 1.0)
        config.write_text(json.dumps({"eval": {"accuracy": accuracy}, "reward": {"functions": listed}}))
        os.utime(config, ns=(0, next(clock)))
        return read_samples(path).samples[0]["correct"]

    clock = itertools.count()
    assert right(None) == 1
    assert right("my.py:exact", "my.py:exact") == 0
    assert right("b.py:score", "a.py:score", "b.py:score") == 1
    assert right("a.py:score", "a.py:score", "b.py:score") == 0
    assert (
        right("other.py:exact", "my.py:exact") is None
    )  # another function of this name, which was not called
    config.unlink()
    assert read_samples(path).samples[0]["correct"] == 1


def test_no_signal_is_advantages_of_zero_or_equal_rewards(tmp_path):
    rows = [sample(0, 1.0, advantage=0.0), sample(0, 0.0, advantage=0.0)]
    rows += [sample(1, 0.5, advantage=None), sample(1, 0.5, advantage=None)]
    rows += [sample(2, 0.5, advantage=None), sample(2, 0.6, advantage=None)]
    rows += [sample(3, 0.5, advantage=None)]
    assert [group["no_signal"] for group in groups_of(tmp_path, rows)] == [True, True, False, False]


def test_the_format_of_an_earlier_version_is_read(tmp_path):
    row = {"group_id": 0, "prompt": "p", "completion": "c", "rewards": {"nice": 1.0}, "reward": 1.0}
    (group,) = groups_of(tmp_path, [row])
    assert group["samples"] == [
        {
            "completion": "c",
            "reward": 1.0,
            "advantage": None,
            "rewards": {"nice": 1.0},
            "correct": None,
            "flags": [],
        }
    ]


def test_odd_rows_become_what_the_page_relies_on(tmp_path):
    odd = {"completion": ["x"], "rewards": 3, "reward": math.nan, "columns": 1, "group_id": "a", "turns": [1]}
    odd |= {"tokens": {"texts": ["a"], "ids": [1, 2], "sampler_logprobs": [math.inf]}}
    (group,) = groups_of(tmp_path, [odd])
    (only,) = group["samples"]
    assert only["completion"] == '["x"]'
    assert (only["reward"], only["rewards"], group["columns"], group["id"]) == (None, {}, {}, -1)
    assert only["turns"] == [{"role": "", "text": "1"}]
    assert only["tokens"] == {"texts": ["a"], "sampler_logprobs": [None]}


def test_damaged_lines_are_counted(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    whole = json.dumps(sample(0, 1.0))
    # Too deep for every Python: 3.11 takes two frames per level, and 3.12 and later one.
    deep = '{"completion": "x", "columns": {"a": ' + "[" * 2000 + "]" * 2000 + "}}"
    path.write_text(f'{whole}\n[1]\n{{"a": 1}}\n\n{"[" * 100_000}\n{deep}\n{whole}')
    rows = read_samples(path)
    assert (len(rows.samples), rows.num_damaged) == (1, 5)


def test_half_a_surrogate_pair_survives(tmp_path):
    path = tmp_path / "samples" / "step_000001.jsonl"
    write_rows(path, [sample(0, 1.0, completion="\ud83d é")])
    files = SampleFiles(tmp_path, "step", cap_bytes=math.inf)
    files.refresh()
    ((_, packed),) = files.packed()
    assert unpacked(packed)[0]["samples"][0]["completion"] == "\ud83d é"


def test_files_are_in_the_order_of_steps_and_others_are_ignored(tmp_path):
    for name in ("step_1000000", "step_000009", "eval_000001", "step_x"):
        write_rows(tmp_path / "samples" / f"{name}.jsonl", [sample(0, 1.0)])
    assert [file.step for file in sample_files(tmp_path, "step")] == [9, 1000000]
    assert [file.step for file in sample_files(tmp_path, "eval")] == [1]
    assert sample_files(tmp_path / "none", "step") == []


@pytest.fixture
def ten_steps(tmp_path):
    for step in range(1, 11):
        write_rows(tmp_path / "samples" / f"step_{step:06d}.jsonl", [sample(0, 1.0), sample(0, 0.0)])
    return tmp_path


def test_beyond_the_cap_first_last_and_evenly_spaced_steps_stay(ten_steps):
    one = (ten_steps / "samples" / "step_000001.jsonl").stat().st_size
    files = SampleFiles(ten_steps, "step", cap_bytes=4.5 * one)
    files.refresh()
    assert [step for step, _ in files.packed()] == [1, 5, 9, 10]
    index = files.index()
    assert [each["step"] for each in index["steps"]] == [1, 5, 9, 10]
    assert (index["num_steps"], index["left_out_steps"], index["left_out_samples"]) == (10, 6, 12)
    assert index["num_bytes"] == 10 * one


def test_a_file_beyond_its_cap_is_cut_and_counted(ten_steps, monkeypatch):
    monkeypatch.setattr(module, "FILE_CAP_BYTES", 10)
    files = SampleFiles(ten_steps, "step", cap_bytes=math.inf)
    files.refresh()
    assert files.index()["left_out_samples"] == 10
    assert [each["num_samples"] for each in files.index()["steps"]] == [1] * 10


def test_a_refresh_reads_only_what_is_new(ten_steps, monkeypatch):
    files = SampleFiles(ten_steps, "step", cap_bytes=math.inf)
    files.refresh()
    read = []
    monkeypatch.setattr(
        module, "read_samples", lambda path, cap: read.append(path.name) or read_samples(path, cap)
    )
    files.refresh()
    assert read == []
    write_rows(ten_steps / "samples" / "step_000003.jsonl", [sample(0, 1.0)])
    write_rows(ten_steps / "samples" / "step_000011.jsonl", [sample(0, 1.0)])
    files.refresh()
    assert read == ["step_000003.jsonl", "step_000011.jsonl"]
    assert len(files.index()["steps"]) == 11


def test_a_server_compresses_what_it_is_asked_for(ten_steps):
    files = SampleFiles(ten_steps, "step", cap_bytes=math.inf, keep_packed=False)
    files.refresh()
    assert list(files.packed()) == []
    assert len(files.index()["steps"]) == 10
    assert len(unpacked(files.packed_step(4))[0]["samples"]) == 2
    assert files.packed_step(99) is None


def test_token_data_is_kept(tmp_path):
    (group,) = groups_of(tmp_path, [sample(0, 1.0, tokens=tokens(["a", "b"]))])
    assert group["samples"][0]["tokens"]["sampler_logprobs"] == [0.0, -1.0]
    assert b"<" not in pack(group)


def test_an_episode_keeps_turns_rewards_and_the_tokens_between(tmp_path):
    rows = [episode_sample(0, 1.25, tool_turns(), tokens=episode_tokens()), episode_sample(0, 0.0, [])]
    (group,) = groups_of(tmp_path, rows)
    first, second = group["samples"]
    assert first["turns"] == [
        {"role": "assistant", "text": "Let me multiply.\n<call>mul(6, 7)</call>", "reward": 0.25},
        {"role": "tool", "text": "42", "name": "mul"},
        {"role": "assistant", "text": "It is 42.", "reward": 1.0},
    ]
    assert first["environment_reward"] == 1.25
    assert first["tokens"]["sampled"] == [1, 1, 1, 0, 0, 0, 1, 1]
    assert first["tokens"]["advantages"][2:4] == [0.25, None]
    assert (second["turns"], second["environment_reward"]) == ([], 0)
    assert group["columns"]["answer"] == "42", "columns of a group are shared"


def test_calls_and_thoughts_of_an_agents_answers_are_shown(tmp_path):
    """The fault: an answer that calls a tool was an empty turn in samples, page, terminal and services."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é"}}}
    asked = {"role": "user", "content": "q"}
    said = {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [call]}
    result = {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"}
    columns = {"messages": [asked, said, result], "turn_rewards": [], "environment_reward": 1.0}
    record = _episode([asked], columns, {"answers": [[1, 1, True]], "began": None})
    shown = '<think>\nI add.\n</think>\n\n\n[call] add {"a": 1, "b": "é"}'
    assert transcript(record["turns"]) == f"[assistant]\n{shown}\n\n[tool add]\n3"
    (group,) = groups_of(tmp_path, [sample(0, 1.0, prompt=[asked, said], **record)])
    assert [turn["text"] for turn in group["samples"][0]["turns"]] == [shown, "3"]
    assert [turn["text"] for turn in group["prompt"]] == ["q", shown]


@pytest.mark.parametrize("calls", [5, [None], [{"function": 3}], [{"name": ["f"]}], {"name": "f"}, ["f"]])
def test_odd_calls_are_no_error(tmp_path, calls):
    """Catches a file of another program's that ends the page."""
    (group,) = groups_of(tmp_path, [sample(0, 1.0, turns=[{"role": "assistant", "tool_calls": calls}])])
    assert group["samples"][0]["turns"][0]["role"] == "assistant"


def test_odd_turns_become_what_the_page_relies_on(tmp_path):
    turns = [{"role": 1, "content": None, "name": ["f"], "reward": "much"}, {}, None]
    (group,) = groups_of(tmp_path, [sample(0, 1.0, turns=turns, environment_reward=math.inf)])
    (only,) = group["samples"]
    assert only["turns"] == [
        {"role": "1", "text": "null", "name": '["f"]'},
        {"role": "", "text": ""},
        {"role": "", "text": "null"},
    ]
    assert "environment_reward" not in only


def test_faults_of_an_environment_are_counted_where_there_are_any(tmp_path):
    reasons = ("error", "timeout", "turns", "environment")
    rows = [episode_sample(0, 0.0, tool_turns(), finish_reason=reason) for reason in reasons]
    write_rows(tmp_path / "samples" / "step_000001.jsonl", rows)
    write_rows(tmp_path / "samples" / "step_000002.jsonl", [sample(0, 1.0)])
    files = SampleFiles(tmp_path, "step", cap_bytes=math.inf)
    files.refresh()
    first, second = files.index()["steps"]
    assert (first["failed"], first["truncated"]) == (2, 0)
    assert "failed" not in second
