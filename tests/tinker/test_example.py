"""The example of the page, with the real client (`make test-tinker`)."""

import re
import time

import pytest
from tinker_server import ROOT, finished, served, start_program

pytestmark = pytest.mark.tinker


def test_the_example_teaches_the_built_in_model(tmp_path):
    """Catches a loss, an advantage or a snapshot that the loop of the page does not learn from."""
    place = tmp_path / "example"
    place.mkdir()
    with served(place) as server:
        began = time.monotonic()
        words = [ROOT / "examples" / "tinker_rl.py", server.url]
        finished(start_program(server, words, tmp_path), tmp_path)
        rewards = [
            float(found) for found in re.findall(r"reward ([\d.]+)", (tmp_path / "out.log").read_text())
        ]
        first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
        print(f"\n{len(rewards)} steps in {time.monotonic() - began:.1f} s, reward {first:.3f} to {last:.3f}")
        assert first < 0.5
        assert last > 0.75
