"""Every file in examples/ runs as its own docstring says."""

import ast
import inspect
import json
import re
import shlex
import subprocess
import sys
import types
from itertools import pairwise
from pathlib import Path

import numpy as np
from rollouts import make_rollouts

from quatrain.config.load import load_config
from quatrain.parallel.mesh import one_device
from quatrain.reward.functions import has_format
from quatrain.reward.model import load_reward_models
from quatrain.reward.scorer import RewardScorer
from quatrain.types import RolloutBatch

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
GOOD = "<think>3+4=7</think>\n<answer>7</answer>"  # 39 characters


def command_of(path, start):
    """The words of the one command in the docstring of `path` that begins with `start`."""
    lines = [line.strip() for line in ast.get_docstring(ast.parse(path.read_text("utf-8"))).splitlines()]
    (command,) = [line for line in lines if line.startswith(start)]
    return shlex.split(command)


def test_every_example_has_a_test():
    tested = inspect.getsource(sys.modules[__name__])
    assert all(f'"{path.name}"' in tested for path in EXAMPLES.glob("*.py"))


def test_the_custom_reward_is_added_to_the_built_in_one(monkeypatch):
    monkeypatch.chdir(ROOT)
    options = command_of(EXAMPLES / "custom_reward.py", "quatrain ")
    settings = [value for flag, value in pairwise(options) if flag == "--set"]
    config = load_config(None, settings, environ={}).config

    mask = np.tile([False, True], (2, 1))
    rollouts = RolloutBatch(
        input_ids=np.ones((2, 2), np.int32),
        attention_mask=np.ones((2, 2), np.bool_),
        completion_mask=mask,
        rollout_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        policy_version=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=np.full(2, "stop"),
        group_ids=np.arange(2, dtype=np.int64),
        prompts=("How many?",) * 2,
        completions=(GOOD, ""),
        columns={"answer": ("7", "7")},
    )
    rewards = RewardScorer(config.reward).score(rollouts).rewards
    np.testing.assert_allclose(rewards, [1 + 0.2 * (1 - 39 / 200), 0.2], rtol=1e-6)


def test_the_loop_by_hand_is_that_of_the_page_and_trains(monkeypatch, capsys):
    """In the process of the test, as in a notebook: the functions are those of `__main__`."""
    path = EXAMPLES / "by_hand.py"
    source = path.read_text("utf-8")
    assert len(source.splitlines()) < 40
    page = (ROOT / "docs" / "library.md").read_text("utf-8")
    assert source[source.index("def centred") :] in page
    small = source.replace('"update.kl_coef=0"', '"update.kl_coef=0", "data.batch_size=2", "rollout.n=2"')
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    exec(compile(small, path, "exec"), vars(module))
    assert re.findall(r"step (\d): reward \d", capsys.readouterr().out) == list("01234")
    assert vars(module)["state"].metrics["update/completion_loss"].count > 0


def test_gsm8k_demonstrations_show_the_calculations_in_the_format(tmp_path):
    rows = [
        {"question": "How many?", "answer": "She sold 48/2 = <<48/2=24>>24, in all <<48+24=72>>72.\n#### 72"},
        {"question": "How many?", "answer": "One, of course.\n#### 1"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    script = EXAMPLES / "gsm8k_demonstrations.py"
    _, _, *arguments = command_of(script, "python ")
    done = subprocess.run(
        [sys.executable, script, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "1 demonstrations written, 1 rows without an annotation left out\n"
    (line,) = (tmp_path / arguments[1]).read_text("utf-8").splitlines()
    completion = "<think>48/2=24, 48+24=72</think>\n<answer>72</answer>"
    assert json.loads(line) == rows[0] | {"completion": completion}
    assert has_format(completion)


def test_the_reward_model_that_the_example_writes_can_be_used(tmp_path):
    path = EXAMPLES / "reward_model.py"
    _, _, *arguments = command_of(path, "python ")
    small = path.read_text("utf-8").replace("STEPS, PAIRS, WIDTH = 200, 32,", "STEPS, PAIRS, WIDTH = 50, 2,")
    (tmp_path / "small.py").write_text(small, "utf-8")
    done = subprocess.run(
        [sys.executable, "small.py", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert re.fullmatch(r"step 50: loss \d\.\d{3}\n", done.stdout)
    options = command_of(path, "quatrain ")
    settings = [
        value.replace("model:", f"model:{tmp_path}/") for flag, value in pairwise(options) if flag == "--set"
    ]
    config = load_config(None, settings, environ={}).config
    (entry,) = config.reward.models
    model = load_reward_models(config.reward, config.model, mesh=one_device())[entry]
    prompt = ({"role": "user", "content": "Tom has 3 eggs and finds 4 more. How many now?"},)
    model.check_prompt(prompt)
    one, other = model.score(make_rollouts([GOOD, GOOD.replace("7", "8")], [prompt, prompt])).values
    assert one != other
