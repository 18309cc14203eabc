import pytest

from quatrain.config.errors import ConfigError
from quatrain.config.load import load_config
from quatrain.config.mesh import MAX_DEVICES, MeshShape, device_numbers, resolve_mesh
from quatrain.config.mesh_axes import AXES
from quatrain.config.schema import Config


@pytest.mark.parametrize(
    ("spec", "devices", "processes", "shape"),
    [
        ("1,-1,1", 8, 2, (1, 8, 1)),
        ("auto", 8, 2, (2, 4, 1)),
        ("auto", 8, 1, (1, 8, 1)),
        ("auto", 1, 1, (1, 1, 1)),
        ("2,2,2", 8, 1, (2, 2, 2)),
        (" 2, -1 ,2", 12, 3, (2, 3, 2)),
        ("-1,1,4", 4, 1, (1, 1, 4)),
        ({"tp": 2, "fsdp": -1}, 8, 1, (1, 4, 2)),
        ({}, 1, 1, (1, 1, 1)),
    ],
)
def test_what_a_mesh_comes_to(spec, devices, processes, shape):
    found = resolve_mesh(spec, devices, processes)
    assert found == MeshShape(*shape)
    assert found.num_devices == devices
    assert found.num_data_shards == shape[0] * shape[1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "2,2,1",
            "mesh must be the number of devices; got dp 2, fsdp 2, tp 1 for 8 devices; change a",
        ),
        ("3,-1,1", "dp 3, fsdp -1, tp 1 for 8 devices; change a number, or change the number of devices"),
        ("-1,-1,1", "-1 for at most one axis; got dp -1, fsdp -1, tp 1"),
        ("0,-1,1", "at least 1, or -1 for at most one axis; got dp 0, fsdp -1, tp 1"),
        ("1,-2,1", "must be at least 1"),
        ("1,8", r'mesh must be "auto" or sizes "dp,fsdp,tp\[,cp\[,ep\]\]" such as "1,-1,1"; got \'1,8\''),
        ("eight", "or sizes .* got 'eight'"),
        ("", "or sizes .* got ''"),
        ({"dp": 2, "pp": 4}, "the axes of mesh are dp, fsdp, tp, cp, ep; got pp"),
        ({"tp": 4}, "dp 1, fsdp 1, tp 4 for 8 devices; change a number or set one axis to -1, or change"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        resolve_mesh(spec, 8)


def test_devices_that_processes_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="got 8 devices and 3 processes"):
        resolve_mesh("auto", 8, 3)


@pytest.mark.parametrize(
    ("spec", "numbers"),
    [(3, (3,)), ("3", (3,)), ("0-3", (0, 1, 2, 3)), ("5,0-2", (0, 1, 2, 5)), ("4-4", (4,)), ("01", (1,))],
)
def test_the_devices_that_numbers_and_ranges_name(spec, numbers):
    assert device_numbers(spec) == numbers


@pytest.mark.parametrize(
    "spec",
    [
        *("0,5-2", "5-2", "1,1", "0-3,2", "2,0-3", "-1", -1, "0,-1", "1--3", "-2-3", "0-", "0-1-2"),
        *("", " ", ",", "0,", ",0", "0,,1", "0, 1", " 0", "0 - 3", "a", "0-b", "1_0", "+1", "1.0", True, "٣"),
        *(str(MAX_DEVICES), f"0-{MAX_DEVICES}", "9" * 5000, ",".join(["0-999999"] * 1000)),
    ],
)
def test_devices_of_another_form_are_refused(spec):
    message = "numbers, from 0 to 1048575, each number once, a range from its lower to its higher number"
    with pytest.raises(ValueError, match=message) as error:
        device_numbers(spec)
    assert "write e.g. 0-3 or 0,2,5" in str(error.value)
    assert len(str(error.value)) < 400


def test_what_is_said_of_a_mesh_names_every_axis():
    """A form with three of the five axes, in the description of the key or in its errors, is caught."""
    said = {"key": Config.model_fields["mesh"].description}
    for name, spec in (("form", "1,8"), ("numbers", "a,b,c"), ("mapping", {"pp": 2})):
        with pytest.raises(ValueError, match="mesh") as error:
            resolve_mesh(spec, 8)
        said[name] = str(error.value)
    with pytest.raises(ConfigError) as error:
        load_config(None, ["mesh=1,8"], environ={})
    said["configuration"] = str(error.value)
    assert {name: [axis.name for axis in AXES if axis.name not in text] for name, text in said.items()} == {
        name: [] for name in said
    }
