"""Runs a recipe of the cookbook and writes the tokens of each answer of a sampler into tokens.jsonl.

python recorded.py tinker_cookbook.recipes.math_rl.train env=arithmetic ...
"""

import json
import runpy
import sys
from pathlib import Path

from tinker import SamplingClient

sample = SamplingClient._sample_async_impl


async def recorded(self, prompt, *args, **kwargs):
    answer = await sample(self, prompt, *args, **kwargs)
    with Path("tokens.jsonl").open("a") as tokens:
        tokens.write(json.dumps([prompt.to_ints(), [each.tokens for each in answer.sequences]]) + "\n")
    return answer


SamplingClient._sample_async_impl = recorded
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
