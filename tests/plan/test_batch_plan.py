import re
from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quatrain.config.load import load_config
from quatrain.data.stream import RowStream
from quatrain.ops.packing import plan_packing
from quatrain.plan.batch_plan import overview, plan, render

PROMPTS_60_SAMPLES_12 = {"data.batch_size": 60, "rollout.n": 12, "data.max_prompt_length": 512}
FIXED_8 = {"update.micro_batch_size": 8, "logprob.micro_batch_size": 8}
SIX = {"rollout.mesh": "-1,1,2"}
KEYS = [
    "prompts_per_step",
    "samples_per_prompt",
    "sequences_per_step",
    "max_sequence_tokens",
    "devices",
    "processes",
    "devices_per_process",
    "data_shards",
    "devices_per_shard",
    "rollout_replicas",
    "sequences_per_replica",
    "mini_batch_prompts",
    "optimizer_steps_per_train_step",
    "mini_batch_sequences",
    "sequences_per_shard",
    "micro_batch_sequences",
    "max_tokens_per_device",
    "micro_batches_per_optimizer_step",
    "logprob_passes",
    "logprob_micro_batch_sequences",
    "logprob_max_tokens_per_device",
    "logprob_forward_passes",
]


def planned(values=None, **layout):
    """The plan of the quickstart with `values` over it and no reference."""
    values = {"update.kl_coef": 0.0, **(values or {})}
    return plan(load_config(None, [f"{key}={value}" for key, value in values.items()], {}).config, **layout)


def worked_example(**values):
    return planned(
        {**PROMPTS_60_SAMPLES_12, "rollout.max_new_tokens": 256, **FIXED_8, **SIX, **values}, devices=6
    )


def test_the_worked_example():
    found = worked_example()
    assert {key: found[key] for key in KEYS} == {
        "prompts_per_step": 60,
        "samples_per_prompt": 12,
        "sequences_per_step": 720,
        "max_sequence_tokens": 768,
        "devices": 6,
        "processes": 1,
        "devices_per_process": 6,
        "data_shards": 6,
        "devices_per_shard": 1,
        "rollout_replicas": 3,
        "sequences_per_replica": 240,
        "mini_batch_prompts": 60,
        "optimizer_steps_per_train_step": 1,
        "mini_batch_sequences": 720,
        "sequences_per_shard": 120,
        "micro_batch_sequences": 8,
        "max_tokens_per_device": None,
        "micro_batches_per_optimizer_step": 15,
        "logprob_passes": 0,
        "logprob_micro_batch_sequences": 8,
        "logprob_max_tokens_per_device": None,
        "logprob_forward_passes": 15,
    }
    assert found.warnings == ()


def test_the_formulas_of_the_worked_example():
    assert worked_example().to_dict()["why"] == {
        "prompts_per_step": "P: data.batch_size",
        "samples_per_prompt": "G: rollout.n",
        "sequences_per_step": "P x G = 60 x 12",
        "max_sequence_tokens": "L: data.max_prompt_length + rollout.max_new_tokens = 512 + 256",
        "devices": "N: total over all processes",
        "processes": "K: each has the same number of devices",
        "devices_per_process": "N / K = 6 / 1",
        "data_shards": "D: dp x fsdp = 1 x 6",
        "devices_per_shard": "tp: N / D = 6 / 6; tensor parallel",
        "rollout_replicas": "dp x fsdp of rollout.mesh = 3 x 1",
        "sequences_per_replica": "P x G / replicas = 720 / 3; 20 prompts x 12",
        "mini_batch_prompts": "P / ceil(P / M) = 60 / ceil(60 / 60); M: update.mini_batch_size",
        "optimizer_steps_per_train_step": "update.epochs x ceil(P / M) = 1 x ceil(60 / 60)",
        "mini_batch_sequences": "B: mini_batch_prompts x G = 60 x 12",
        "sequences_per_shard": "B / D = 720 / 6",
        "micro_batch_sequences": "m: update.micro_batch_size",
        "max_tokens_per_device": "not used: update.micro_batch_size is set",
        "micro_batches_per_optimizer_step": "ceil(ceil(B / D) / m) = ceil(120 / 8)",
        "logprob_passes": "old + reference = 0 + 0; update.old_logprobs is auto, 1 optimizer step; "
        "update.kl_coef is 0",
        "logprob_micro_batch_sequences": "m: logprob.micro_batch_size",
        "logprob_max_tokens_per_device": "not used: logprob.micro_batch_size is set",
        "logprob_forward_passes": "ceil(ceil(P x G / D) / m) = ceil(120 / 8)",
    }


def test_mini_batches_that_do_not_divide_the_batch_are_evened_out():
    found = worked_example(**{"update.mini_batch_size": 40})
    assert found["mini_batch_prompts"] == 30
    assert found["optimizer_steps_per_train_step"] == 2
    assert (found["mini_batch_sequences"], found["sequences_per_shard"]) == (360, 60)
    assert found["micro_batches_per_optimizer_step"] == 8
    why = found.to_dict()["why"]
    assert why["mini_batch_prompts"] == "P / ceil(P / M) = 60 / ceil(60 / 40); M: update.mini_batch_size"
    assert why["micro_batches_per_optimizer_step"] == (
        "ceil(ceil(B / D) / m) = ceil(60 / 8); the last holds 4"
    )
    assert (found["logprob_passes"], found["logprob_forward_passes"]) == (1, 15)


def test_mini_batches_differ_by_one_prompt_at_most():
    found = planned(
        {"data.batch_size": 10, "rollout.n": 4, "update.mini_batch_size": 4, "update.micro_batch_size": 3},
        devices=2,
    )
    assert found["mini_batch_prompts"] == {"min": 3, "max": 4}
    assert found["mini_batch_sequences"] == {"min": 12, "max": 16}
    assert found["sequences_per_shard"] == {"min": 6, "max": 8}
    assert found["micro_batches_per_optimizer_step"] == {"min": 2, "max": 3}
    assert found["optimizer_steps_per_train_step"] == 3
    why = found.to_dict()["why"]
    assert why["mini_batch_sequences"] == "B: mini_batch_prompts x G = 3 x 4 to 4 x 4"
    assert why["micro_batches_per_optimizer_step"] == "ceil(ceil(B / D) / m) = ceil(6 / 3) to ceil(8 / 3)"


def test_every_epoch_goes_through_all_mini_batches():
    found = planned({"data.batch_size": 10, "update.mini_batch_size": 4, "update.epochs": 3})
    assert found["optimizer_steps_per_train_step"] == 9


def test_the_token_budget():
    separate = {"rollout.max_new_tokens": 256, "update.share_prompts": False}
    found = planned({**PROMPTS_60_SAMPLES_12, **SIX, **separate}, devices=6)
    assert found["max_tokens_per_device"] == 16384
    # All sequences of 768 tokens: 21 in a bin, so ceil(720 / 126). All of 2 tokens: one micro-batch.
    assert found["micro_batches_per_optimizer_step"] == {"min": 1, "max": 6}
    assert found["micro_batch_sequences"] == {"min": 0, "max": 720}
    assert found["sequences_per_shard"] == {"min": 0, "max": 720}
    assert found["logprob_max_tokens_per_device"] == 32768
    assert found["logprob_forward_passes"] == {"min": 1, "max": 3}
    assert found.to_dict()["why"]["micro_batches_per_optimizer_step"] == (
        "ceil(B / (D x floor(C / 2))) to ceil(B / (D x floor(C / L))) = "
        "ceil(720 / (6 x floor(16384 / 2))) to ceil(720 / (6 x floor(16384 / 768)))"
    )


def test_the_token_budget_of_one_sequence():
    longest = {"data.max_prompt_length": 7, "rollout.max_new_tokens": 5, "update.max_tokens_per_device": 12}
    found = planned({**longest, "data.batch_size": 5, "rollout.n": 4, "update.share_prompts": False})
    assert found["micro_batches_per_optimizer_step"] == {"min": 4, "max": 20}
    assert found["micro_batch_sequences"] == {"min": 0, "max": 6}
    assert found["sequences_per_shard"] == 20
    assert found["logprob_forward_passes"] == {"min": 2, "max": 10}


def test_a_budget_that_holds_all_is_one_micro_batch_of_all():
    found = planned({"data.batch_size": 32, "rollout.n": 8})
    assert (found["micro_batch_sequences"], found["micro_batches_per_optimizer_step"]) == (256, 1)


def test_each_stage_has_a_mode_of_its_own():
    found = planned({"update.micro_batch_size": 4, "logprob.max_tokens_per_device": 100, "rollout.n": 1})
    assert (found["micro_batch_sequences"], found["max_tokens_per_device"]) == (4, None)
    assert found["logprob_max_tokens_per_device"] == 100
    assert found["logprob_forward_passes"] == {"min": 1, "max": 16}
    assert found["logprob_micro_batch_sequences"] == {"min": 0, "max": 32}


@pytest.mark.parametrize(
    ("update", "sweeps"),
    [
        ({}, 0),
        ({"kl_coef": 0.1}, 1),
        ({"epochs": 2}, 1),
        ({"mini_batch_size": 31, "kl_coef": 0.1}, 2),
        ({"old_logprobs": "recompute"}, 1),
        ({"old_logprobs": "recompute", "kl_coef": 0.1}, 2),
        ({"old_logprobs": "rollout", "epochs": 2}, 0),
        ({"old_logprobs": "rollout", "kl_coef": 0.1}, 1),
    ],
)
def test_sweeps_of_log_probabilities(update, sweeps):
    """Those that are none are not shown."""
    found = planned({f"update.{key}": value for key, value in update.items()})
    assert found["logprob_passes"] == sweeps
    assert ("logprob_passes" in render(found)) == (sweeps > 0)


def test_the_critic_has_rows_of_its_own():
    values = {
        "advantage": {"estimator": "gae"},
        "critic": {"mini_batch_size": 4, "epochs": 3, "micro_batch_size": 8},
        "data": {"batch_size": 8},
        "rollout": {"n": 4},
    }
    found = planned(values, devices=2)
    assert found["critic_optimizer_steps_per_train_step"] == 3 * 2
    assert found["critic_mini_batch_sequences"] == 4 * 4
    assert found["critic_micro_batch_sequences"] == 8
    assert found["critic_max_tokens_per_device"] is None
    assert found["critic_micro_batches_per_optimizer_step"] == 1
    assert found["critic_forward_micro_batch_sequences"] == 16
    assert found["critic_forward_passes"] == 1
    assert not any(row.key.startswith("critic") for row in planned().rows)


@pytest.mark.parametrize(
    ("update", "kl_coef", "sweeps"), [({}, 0.1, 2), ({"old_logprobs": "rollout"}, 0.1, 1), ({}, 0.0, 0)]
)
def test_kl_in_the_reward_needs_old_and_reference_log_probabilities(update, kl_coef, sweeps):
    found = planned({"update": {"kl_coef": 0.0, **update}, "reward": {"kl_coef": kl_coef}})
    assert found["logprob_passes"] == sweeps


def test_the_layout_of_the_devices():
    meshes = {"mesh": "2,-1,2", "rollout.mesh": "-1,1,4"}
    found = planned({"data.batch_size": 5, "rollout.n": 3, **meshes}, devices=8, processes=2)
    assert (found["devices_per_process"], found["data_shards"], found["rollout_replicas"]) == (4, 4, 2)
    assert found["devices_per_shard"] == 2
    assert found["sequences_per_replica"] == {"min": 7, "max": 8}
    assert found.to_dict()["why"]["sequences_per_replica"] == (
        "P x G / replicas = floor(15 / 2) to ceil(15 / 2)"
    )


@pytest.mark.parametrize(
    ("values", "layout", "message"),
    [
        (
            {},
            {"devices": 8, "processes": 3},
            "got 8 devices and 3 processes; use a number of devices",
        ),
        (
            {"mesh": "1,-1,4"},
            {"devices": 6},
            "mesh must be the number of devices; got dp 1, fsdp -1",
        ),
        (
            {"rollout.mesh": "1,1,2"},
            {},
            "rollout.mesh must be the number of devices; got dp 1",
        ),
        ({}, {"devices": 0}, "got 0 devices and 1 processes"),
    ],
)
def test_a_layout_that_does_not_come_out_even_is_refused(values, layout, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        planned(values, **layout)


def test_more_shards_than_sequences():
    found = planned({"data.batch_size": 2, "rollout.n": 3, "update.micro_batch_size": 1}, devices=8)
    assert found["sequences_per_shard"] == {"min": 0, "max": 1}
    assert found["micro_batches_per_optimizer_step"] == 1
    assert found["sequences_per_replica"] == {"min": 0, "max": 1}
    assert found.warnings == (
        "there are more data shards (8) than sequences of an optimizer step (6): 2 of 8 shards compute "
        "only padding; raise update.mini_batch_size, data.batch_size or rollout.n, or use fewer devices",
        "there are more rollout replicas (8) than sequences of a training step (6): 2 of 8 replicas are "
        "idle; raise data.batch_size or rollout.n, or use fewer devices",
    )


def test_a_micro_batch_larger_than_a_share():
    found = planned({"data.batch_size": 4, "rollout.n": 8, "update.micro_batch_size": 9}, devices=4)
    assert found["micro_batch_sequences"] == 8
    assert found["micro_batches_per_optimizer_step"] == 1
    assert found.warnings == (
        "update.micro_batch_size (9) is larger than the number of sequences per shard (8): a "
        "micro-batch has 8 sequences",
    )
    exact = {"data.batch_size": 4, "rollout.n": 8, "update.micro_batch_size": 8}
    assert planned(exact, devices=4).warnings == ()


SETTINGS = st.fixed_dictionaries(
    {
        "data.batch_size": st.integers(1, 40),
        "rollout.n": st.integers(1, 9),
        "update.epochs": st.integers(1, 3),
        "data.max_prompt_length": st.integers(1, 30),
        "rollout.max_new_tokens": st.integers(1, 30),
    },
    optional={"update.micro_batch_size": st.integers(1, 20), "logprob.micro_batch_size": st.integers(1, 20)},
)


def value_of(why):
    """What the numbers of a formula come to; None where there are none."""
    _, equals, numbers = why.split("; ")[0].partition(" = ")
    if not equals:
        return None
    known = {"ceil": ceil, "floor": floor, "min": min, "__builtins__": {}}
    ends = [eval(text.replace(" x ", " * "), known) for text in numbers.split(" to ")]
    return ends[0] if ends[0] == ends[-1] else {"min": ends[0], "max": ends[-1]}


@settings(max_examples=60, deadline=None)
@given(values=SETTINGS, mini=st.integers(1, 40), room=st.integers(0, 90), devices=st.integers(1, 12))
def test_the_formulas_come_to_the_values(values, mini, room, devices):
    values = {**values, "update.mini_batch_size": min(mini, values["data.batch_size"])}
    if "update.micro_batch_size" not in values:
        longest = values["data.max_prompt_length"] + values["rollout.max_new_tokens"]
        values["update.max_tokens_per_device"] = longest + room
    found = planned(values, devices=devices)
    results = {row.key: value_of(row.why) for row in found.rows}
    computed = {key: value for key, value in results.items() if value is not None}
    assert {key: found[key] for key in computed} == computed
    as_set = {"prompts_per_step", "samples_per_prompt", "devices", "processes"}
    sizes = {key for key in KEYS if "micro_batch_sequences" in key or key.endswith("tokens_per_device")}
    assert computed.keys() >= set(KEYS) - as_set - sizes
    assert all(len(line) <= 80 for line in render(found).splitlines())


def bounds(value):
    return (value["min"], value["max"]) if isinstance(value, dict) else (value, value)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), devices=st.integers(1, 4), longest=st.integers(2, 30), room=st.integers(0, 40))
def test_the_packer_keeps_within_the_ranges(data, devices, longest, room):
    lengths = data.draw(st.lists(st.integers(2, longest), min_size=1, max_size=40))
    packed = plan_packing(lengths, longest + room, devices)
    found = planned(
        {
            "data.batch_size": len(lengths),
            "rollout.n": 1,
            "advantage.estimator": "reinforce",
            "data.max_prompt_length": 1,
            "rollout.max_new_tokens": longest - 1,
            "update.max_tokens_per_device": longest + room,
        },
        devices=devices,
    )
    least, most = bounds(found["micro_batches_per_optimizer_step"])
    assert least <= len(packed.bins) <= most
    least, most = bounds(found["micro_batch_sequences"])
    assert all(least <= len(rows) <= most for bins in packed.bins for rows in bins)
    least, most = bounds(found["sequences_per_shard"])
    shards = [sum(map(len, bins)) for bins in zip(*packed.bins, strict=True)]
    assert all(least <= number <= most for number in shards)


@pytest.mark.parametrize("end", ["min", "max"])
def test_the_range_of_micro_batches_is_met_at_both_ends(end):
    found = planned(
        {
            "data.batch_size": 25,
            "rollout.n": 4,
            "update.max_tokens_per_device": 25,
            "data.max_prompt_length": 6,
            "rollout.max_new_tokens": 4,
            "update.share_prompts": False,
        },
        devices=3,
    )
    length = {"min": 2, "max": 10}[end]
    assert found["micro_batches_per_optimizer_step"] == {"min": 3, "max": 17}
    assert len(plan_packing([length] * 100, 25, 3).bins) == {"min": 3, "max": 17}[end]


def test_a_bin_holds_more_sequences_that_share_a_prompt():
    """One token of the prompt and one of each completion: C - 1 sequences of a group in a bin."""
    sizes = {"data.max_prompt_length": 6, "rollout.max_new_tokens": 4, "update.max_tokens_per_device": 25}
    found = planned({**sizes, "data.batch_size": 4, "rollout.n": 25}, devices=2)
    assert found["micro_batches_per_optimizer_step"] == {"min": 3, "max": 25}
    assert found["micro_batch_sequences"] == {"min": 0, "max": 24}
    assert found.to_dict()["why"]["micro_batches_per_optimizer_step"] == (
        "ceil(B / (D x (C - 1))) to ceil(B / (D x floor(C / L))) = "
        "ceil(100 / (2 x (25 - 1))) to ceil(100 / (2 x floor(25 / 10)))"
    )


def test_the_table_is_aligned_and_keeps_formulas_whole():
    found = worked_example(**{"update.mini_batch_size": 40})
    lines = render(found).splitlines()
    assert lines[0] == "prompts_per_step                   60  prompts    P: data.batch_size"
    assert lines[2] == "sequences_per_step                720  sequences  P x G = 60 x 12"
    unused = lines.index("max_tokens_per_device               -  tokens")
    assert lines[unused + 1] == "    not used: update.micro_batch_size is set"
    begins = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert begins == KEYS
    wrapped = [line for line in lines if line.startswith(" ")]
    assert wrapped
    assert all(len(line) - len(line.lstrip()) == 4 for line in wrapped)
    assert render(found) == render(worked_example(**{"update.mini_batch_size": 40}))


def test_warnings_follow_the_table():
    text = render(planned({"data.batch_size": 1, "rollout.n": 2}, devices=4))
    assert "\nwarning: there are more data shards (4) than sequences of an optimizer step (2)" in text
    assert "0 to 1" in text


@pytest.mark.parametrize(
    ("weights", "batch", "prompts"),
    [
        ((3, 1), 16, [12, 4]),
        ((2, 1), 16, [{"min": 10, "max": 11}, {"min": 5, "max": 6}]),
        ((30, 1, 1), 2, [{"min": 0, "max": 2}, {"min": 0, "max": 2}, {"min": 0, "max": 2}]),
        ((6, 1, 1), 12, [{"min": 8, "max": 10}, {"min": 0, "max": 3}, {"min": 0, "max": 3}]),
    ],
)
def test_a_mixture_says_how_many_prompts_are_of_each_data_set(weights, batch, prompts):
    """The bounds hold for every step of the stream, and are met exactly where the weights divide a batch."""
    sets = [f"{{path: {name}, weight: {weight}}}" for name, weight in zip("abc", weights, strict=False)]
    found = planned({"data.train": f"[{', '.join(sets)}]", "data.batch_size": batch, "data.eval": "e.jsonl"})
    named = [found[f"prompts_per_step_of_{name}"] for name in "abc"[: len(weights)]]
    assert named == prompts
    stream = RowStream([5] * len(weights), weights, seed=0)
    drawn = [stream.source(at) for at in range(batch * sum(weights))]
    for source, each in enumerate(named):
        least, most = (each["min"], each["max"]) if isinstance(each, dict) else (each, each)
        counts = [drawn[at : at + batch].count(source) for at in range(0, len(drawn), batch)]
        assert least <= min(counts)
        assert max(counts) <= most


def test_dynamic_sampling_draws_more_prompts_than_a_step_has():
    rounds = {"rollout": {"dynamic_sampling_rounds": 10}, "data": {"batch_size": 64}}
    assert planned(rounds)["drawn_prompts_per_step"] == {"min": 64, "max": 640}
    assert "drawn_prompts_per_step" not in planned()


def test_the_overview_has_the_numbers_of_the_plan_in_narrow_lines():
    lines = overview(plan(load_config(None, (), environ={}).config))
    assert lines == [
        "batch: 32 prompts x 8 samples = 256 sequences of at most 48 tokens",
        "devices: 1 device in 1 process; 1 data shard of 1 device",
        "rollout: 1 replica of 256 sequences",
        "update: 1 optimizer step of 256 sequences,",
        "  on each data shard in 1 micro-batch of at most 16384 tokens",
        "log-probabilities before it: 1 sweep of the batch,",
        "  on each data shard in 1 micro-batch of at most 32768 tokens",
        "every number with its formula: plan.json, or quatrain plan",
    ]
    rows = overview(plan(load_config(None, ["update.micro_batch_size=8"], environ={}).config))
    assert rows[4] == "  on each data shard in 32 micro-batches of at most 8 sequences"


def test_workers_and_servers_take_the_place_of_replicas():
    values = {"data.batch_size": 10, "rollout.n": 3}
    found = planned({**values, "rollout.workers": 4, "rollout.mesh": "1,1,2"}, devices=8)
    assert (found["rollout_workers"], found["devices_per_worker"]) == (4, 2)
    assert found["sequences_per_worker"] == {"min": 0, "max": 30}
    assert "floor(30 / 4) to ceil(30 / 4) on average" in found.to_dict()["why"]["sequences_per_worker"]
    assert not [row.key for row in found.rows if "replica" in row.key]
    assert overview(found)[2] == "rollout: 4 workers of 0 to 30 sequences"
    assert found.warnings == ()
    one = planned({**values, "rollout.servers": "[http://a:1]"})
    assert (one["rollout_servers"], one["sequences_per_server"]) == (1, 30)
    assert overview(one)[2] == "rollout: 1 server of 30 sequences"
    assert "devices are not planned" in one.to_dict()["why"]["rollout_servers"]


def test_more_workers_than_prompts():
    (warning,) = planned({"data.batch_size": 2, "rollout.workers": 3}).warnings
    assert warning.startswith("there are more rollout workers or servers (3) than prompts of a training step")
    assert "1 of 3 are idle" in warning


@pytest.mark.parametrize(
    ("rule", "bounds", "kept"),
    [
        ("geometric", [0.999, 1.001], "mean of d is -0.001 to 0.001 nats"),
        ("product", [0.5, 2.0], "sum of d is -0.693 to 0.693 nats"),
        ("k3", 0.02, "mean of d^2 / 2 is about 0.02 or less, as of |d| 0.2"),
        ("negative_kl", 0.5, "tokens with A >= 0, and sequences whose mean of -d is 0.5 nats or less"),
    ],
)
def test_a_rule_of_rejection_is_said_in_the_nats_of_a_metric(rule, bounds, kept):
    found = plan(load_config(None, [f"update.reject={{{rule}: {bounds}}}"], environ={}).config)
    [row] = [row for row in found.rows if row.key == f"reject_{rule}"]
    assert row.value is None
    assert kept in row.why
    assert "rollout/logprob_diff_mean" in row.why
    assert f"reject_{rule}" in render(found)


@pytest.mark.parametrize(
    ("overrides", "passes", "words"),
    [
        ((), 1, "log-probabilities of distill.teacher, of the batch, once"),
        (("distill.loss=jsd", "update.epochs=3"), 3, "hidden states of distill.teacher in micro-batches"),
        (("distill.loss=jsd", "distill.top_k=8", "update.epochs=3"), 1, "with 8 words each (distill.top_k)"),
    ],
)
def test_the_passes_of_a_teacher(overrides, passes, words):
    found = plan(load_config(None, ["distill.teacher=x", *overrides], environ={}).config)
    [row] = [row for row in found.rows if row.key == "teacher_passes"]
    assert row.value == passes
    assert words in row.why


@pytest.mark.parametrize(
    ("overrides", "judgements", "why"),
    [
        ([], 24, "P x G x reward.judge.n = 3 x 4 x 2; less"),
        (
            ["advantage.estimator=remax"],
            30,
            "P x (G + 1) x reward.judge.n = 3 x (4 + 1) x 2; + 1: of the greedy",
        ),
        (
            ["rollout.dynamic_sampling_rounds=3"],
            {"min": 24, "max": 72},
            "up to rollout.dynamic_sampling_rounds = 3 times as many",
        ),
    ],
)
def test_the_judgements_of_a_step_are_all_that_is_asked(overrides, judgements, why):
    """The fault: those of the greedy baseline and of further rounds were left out, and a budget too low."""
    judge = ["reward.functions={judge: 1.0}", "reward.judge={base_url: http://localhost:1/v1, n: 2}"]
    sizes = ["data.batch_size=3", "rollout.n=4", "update.mini_batch_size=3"]
    made = plan(load_config(None, [*judge, *sizes, *overrides], environ={}).config)
    assert made["judgements"] == judgements
    assert why in next(row.why for row in made.rows if row.key == "judgements")
