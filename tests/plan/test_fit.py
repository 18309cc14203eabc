import json
import shlex
import sys
from bisect import bisect

import pytest

from quatrain.cli import main as cli
from quatrain.config.load import load_config
from quatrain.parallel.axes import partition_spec
from quatrain.plan.fit import ROOM, fit, render
from quatrain.plan.placement import placement


def fits(memory, *overrides, devices=4):
    def resolve(further):
        return load_config(None, [*overrides, *further], {}).config

    return fit(resolve, devices=devices, processes=1, device_memory=memory)


@pytest.fixture(scope="module")
def tight():
    """The quickstart on four devices that its configuration does not fit."""
    return fits(60 * 10**6)


def test_what_fits_fits_as_the_plan_of_its_options_says(tight):
    assert tight.found
    for combination in tight.found:
        config = load_config(None, combination.overrides, {}).config
        placed = placement(config, devices=4, device_memory=int(ROOM * 60 * 10**6))
        assert placed.peak == combination.peak <= ROOM * 60 * 10**6
        assert placed.warnings == ()


def test_the_cheapest_comes_first_and_none_costs_more_in_everything(tight):
    assert tight.found[0].param_dtype == "float32"
    rows = [(c.mesh, c.remat, c.budget, c.offloaded, c.param_dtype) for c in tight.found]
    assert len(set(rows)) == len(rows)
    assert render(tight).splitlines()[0] == "fits 4 devices of 57.22 MiB, the cheapest first"
    _, options = render(tight).split("\n\n")
    assert shlex.split(options.replace("\\\n", "")) == shlex.split(tight.found[0].command)
    assert all(len(line) <= 80 for line in render(tight).splitlines())


def test_with_memory_to_spare_nothing_is_changed_but_the_mesh():
    first, *others = fits(10**12, devices=1).found
    assert first.overrides == ("mesh=1,1,1",)
    assert others == []


def test_when_nothing_fits_the_smallest_is_named():
    result = fits(10**6)
    assert result.found == ()
    text = " ".join(render(result).split())
    assert text.startswith("nothing fits 4 devices of 976.56 KiB: the smallest combination needs")
    assert result.smallest.command in text


def test_micro_batches_in_sequences_are_halved_too():
    found = fits(40 * 10**6, "update.micro_batch_size=64").found
    assert any(o.startswith("update.micro_batch_size=") for o in found[0].overrides)


@pytest.mark.parametrize("options", [["--fit"], ["--fit", "--params", "--device-memory", "1GB"]])
def test_options_that_do_not_go_together(options, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quatrain", "plan", *options])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "--device-memory" in capsys.readouterr().err


def test_the_command_prints_json(monkeypatch, capsys):
    arguments = ["plan", "--fit", "--device-memory", "100GB", "--devices", "2", "--json"]
    monkeypatch.setattr(sys, "argv", ["quatrain", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["devices"], result["usable_bytes"]) == (2, 9 * 10**10)
    assert result["fitting"][0]["set"][0] == "mesh=2,1,1"


SMALL = (
    "data.batch_size=4", "rollout.n=2", "data.max_prompt_length=16", "rollout.max_new_tokens=16",
    "update.max_tokens_per_device=32", "rollout.max_concurrency=2", "model.remat=layer", "update.kl_coef=0",
)  # fmt: skip
"""The quickstart with so few tokens that parameters and optimizer state need most of the memory."""


def needs(*overrides):
    return placement(load_config(None, (*SMALL, *overrides), {}).config).peak


def enough(*overrides):
    """The least memory, in steps of 0.25 MB, for which nothing warns; the engine's rule for its cache too."""
    config = load_config(None, (*SMALL, *overrides), {}).config
    steps = range(0, 2**27, 250_000)
    return steps[bisect(steps, False, key=lambda m: not placement(config, device_memory=m).warnings)]


def test_switches_are_tried_in_the_order_of_their_costs():
    """As memory shrinks: offloading and a smaller moment first, parameters in bfloat16 at last."""
    steps = [("offload.optimizer=true",), ("offload.optimizer=true", "optimizer.state_dtype=bfloat16")]
    steps += [(*steps[-1], "model.param_dtype=bfloat16")]
    for switches in steps:
        needed = needs(*switches)
        found = fits(int(needed / ROOM) + 1, *SMALL, devices=1)
        assert found.found[0].peak <= needed
        chosen = set(found.found[0].overrides)
        assert ("model.param_dtype=bfloat16" in chosen) == (switches is steps[-1])
        assert chosen >= set(switches) or switches is not steps[-1]
    assert found.smallest is None


def test_the_policy_waits_where_the_rollout_has_a_copy():
    """In bfloat16 beside a rollout of merged weights in float32, and not if the rollout runs ahead."""
    options = ("model.dtype=float32", "model.param_dtype=bfloat16", "lora.rank=2")
    memory = enough(*options, "offload.policy=true")
    assert memory < enough(*options)
    found = fits(int(memory / ROOM) + 1, *SMALL, *options, devices=1).found
    assert found[0].overrides[-1] == "offload.policy=true"
    ahead = fits(int(memory / ROOM) + 1, *SMALL, *options, "rollout.max_staleness=1", devices=1)
    every = [*ahead.found, *filter(None, [ahead.smallest])]
    assert not any("offload.policy" in override for each in every for override in each.overrides)


def test_with_workers_their_devices_must_fit_too_and_the_policy_never_waits():
    many = ("rollout.workers=1", "rollout.mesh=1,1,1", "lora.rank=2")
    found = fits(2 * 10**6, *SMALL, *many, devices=4)
    assert not found.found
    options = [*SMALL, *many, *found.smallest.overrides]
    memory = int(ROOM * 2 * 10**6)
    placed = placement(load_config(None, options, {}).config, devices=4, device_memory=memory)
    assert found.smallest.peak == placed.worker.peak > placed.peak
    assert not any("offload.policy" in override for override in found.smallest.overrides)


def test_an_optimizer_without_a_first_moment_has_none_in_bfloat16():
    found = fits(10**6, *SMALL, "optimizer.name=sgd", "optimizer.beta1=0.0", devices=1)
    assert found.smallest.state_dtype == "float32"


WIDE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 4, "num_attention_heads": 64, "eos_token_id": 128009,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
"""Four layers of a model of 70B parameters."""


def test_on_64_devices_few_combinations_are_planned_and_equal_layers_are_sharded_once(tmp_path):
    """Catches a search that plans all 450 smallest combinations, each layer anew: minutes for 80 layers."""
    (tmp_path / "config.json").write_text(json.dumps(WIDE))
    told = []
    options = (f"model.path={tmp_path}", "data.batch_size=128", "rollout.max_new_tokens=4096")

    def resolve(further):
        return load_config(None, (*options, *further), {}).config

    partition_spec.cache_clear()
    sizes = {"devices": 64, "processes": 8, "device_memory": 14 * 10**9}
    found = fit(resolve, **sizes, most_rows=1, progress=told.append)
    assert found.found[0].peak <= ROOM * sizes["device_memory"]
    assert told == list(range(1, len(told) + 1))
    assert len(told) < 100
    assert partition_spec.cache_info().misses < 10 * 28  # shapes of a layer x meshes


def run_plan(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["quatrain", "plan", "--params", *arguments])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_a_plan_that_does_not_fit_says_with_what_it_does(monkeypatch, capsys):
    memory = str(int(needs() * 0.8))
    sizes = [word for each in SMALL for word in ("--set", each)]
    out = run_plan(monkeypatch, capsys, *sizes, "--device-memory", memory)
    assert all(len(line) <= 80 for line in out.splitlines())
    _, options = out.split("it fits with:\n")
    options = shlex.split(options.replace("\\\n", ""))
    assert options[0] == "--set"
    assert not any(option.startswith("mesh=") for option in options)
    again = run_plan(monkeypatch, capsys, *sizes, *options, "--device-memory", memory)
    assert "warning" not in again
    assert "it fits with" not in again


def test_a_plan_that_nothing_makes_fit_says_so(monkeypatch, capsys):
    found = json.loads(run_plan(monkeypatch, capsys, "--device-memory", "1MB", "--json"))
    assert " ".join(found["remedy"].split()).startswith("nothing fits 1 device of 976.56 KiB: the smallest")
