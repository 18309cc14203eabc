"""What `import quatrain` gives: every name, and neither JAX nor numpy before one is used."""

import json
import subprocess
import sys

import pytest

import quatrain

LOOK = """
import json, sys
import quatrain
light = not {"jax", "numpy", "transformers", "pydantic"} & set(sys.modules)
quatrain.load_config
without_jax = "jax" not in sys.modules
print(json.dumps([light, without_jax, all(callable(getattr(quatrain, name)) for name in quatrain.__all__)]))
import quatrain.loop.train
assert callable(quatrain.train)
"""


def test_importing_brings_nothing_and_each_name_its_own():
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, True, True]


def test_a_name_that_is_not_there():
    assert set(quatrain.__all__) <= set(dir(quatrain))
    with pytest.raises(AttributeError, match="'optimize'; it has AdvantagedBatch"):
        _ = quatrain.optimize


def test_what_load_config_returns_says_where_the_configuration_is():
    """Catches an AttributeError of an inner function, for one who gives the result and not its `.config`."""
    with pytest.raises(AttributeError, match=r"no 'placement'; the configuration is its .config: give"):
        quatrain.load_policy(quatrain.load_config())
