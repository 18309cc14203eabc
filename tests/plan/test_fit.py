import json
import sys

import pytest

from quatrain import cli
from quatrain.config.load import load_config
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
    assert render(tight).splitlines()[-1] == tight.found[0].command


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


@pytest.mark.parametrize(
    "options", [["--fit"], ["--fit", "--params", "--device-memory", "1GB"], ["--device-memory", "1GB"]]
)
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
