"""Every file in examples/ runs as its own docstring says."""

import ast
import asyncio
import inspect
import json
import re
import runpy
import shlex
import subprocess
import sys
import types
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from rollouts import make_rollouts
from sandboxes import needs_bubblewrap
from typer.main import get_command

from quatrain.cli.main import app
from quatrain.config.load import load_config
from quatrain.data.builtin import EOS
from quatrain.data.tokenizer import render
from quatrain.data.turns import TurnTemplate
from quatrain.episodes.load_environment import load_environment, load_tools
from quatrain.parallel.mesh import one_device
from quatrain.reward.functions import has_format
from quatrain.reward.reward_model import load_reward_models
from quatrain.reward.scorer import RewardScorer
from quatrain.rollout.own_sampler import own_sampler
from quatrain.types.batches import RolloutBatch
from quatrain.workers.user_code import find_function

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


def test_the_command_of_the_own_sampler_names_it(monkeypatch):
    """What it samples: tests/rollout/test_own_sampler.py."""
    monkeypatch.chdir(ROOT)
    options = command_of(EXAMPLES / "own_sampler.py", "quatrain ")
    settings = [value for flag, value in pairwise(options) if flag == "--set"]
    config = load_config(None, settings, environ={}).config
    own_sampler(config.rollout.sampler, {"arch": None, "stop_ids": ()}, 294).close()


def test_the_command_of_the_tinker_example_has_options_of_serve():
    """What it teaches a model: tests/tinker/test_example.py."""
    words = command_of(EXAMPLES / "tinker_rl.py", "quatrain ")
    known = {name for parameter in get_command(app).commands[words[1]].params for name in parameter.opts}
    assert {"--train", "--port"} == {word for word in words if word.startswith("--")} <= known


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


PROGRAMS = {
    "right": ("Sum:\n```python\nprint(sum(map(int, input().split())))\n```", 1.0),
    "the last block decides": (
        "```\nprint(3)\n```\nNo:\n```py\nprint(sum(map(int, input().split())))\n```",
        1.0,
    ),
    "right once": ("```python\nprint(3)\n```", 0.0),
    "no code": ("print(3)", 0.0),
    "wrong exit code": ("```python\nprint(sum(map(int, input().split())))\nraise SystemExit(1)\n```", 0.0),
    "ends its parents": (
        "```python\nimport os\nfor p in range(1, 99):\n  os.kill(os.getppid(), 9)\n```",
        0.0,
    ),
    "never ends": ("```python\nwhile True: pass\n```", 0.0),
}


@needs_bubblewrap
def test_the_code_reward_runs_programs_in_sandboxes(monkeypatch):
    """Catches a program that changes the reward of another sample, or that is not run as the row says."""
    monkeypatch.chdir(ROOT)
    options = command_of(EXAMPLES / "code_reward.py", "quatrain ")
    settings = [value for flag, value in pairwise(options) if flag == "--set"]
    config = load_config(None, [*settings, "reward.workers=4"], environ={}).config
    assert config.reward.per_call == "sample"
    texts, expected = zip(*PROGRAMS.values())
    tests = [{"input": "1 2\n", "output": "3"}, {"input": "4 5\n", "output": "9\n"}]
    rollouts = make_rollouts(list(texts), ["Add."] * len(texts), tests=(tests,) * len(texts))
    scorer = RewardScorer(config.reward)
    scored = scorer.score(rollouts)
    scorer.close()
    np.testing.assert_array_equal(scored.rewards, expected)
    assert scored.metrics["reward/passes/errors"].value == 0
    call = json.dumps({"name": "python", "arguments": {"code": "print(6 * 7)"}})
    (message,) = load_tools(["examples/code_reward.py:python"])({}).step(call).messages
    assert message["content"] == "42"


@needs_bubblewrap
def test_the_code_reward_takes_the_last_python_block_and_needs_tests():
    """Catches a reward of 1 for a row without tests, and text between two blocks that counts as a program."""
    module = runpy.run_path(str(EXAMPLES / "code_reward.py"))
    text = "```cpp\nint x;\n```\nor\n```python\nprint(3)\n```\nprints\n```text\n3\n```\n"
    tests = [{"input": "", "output": "3"}]
    assert module["passes"](["", ""], [text, text], [tests, []]) == [1.0, None]


@needs_bubblewrap
@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\nprint(3)\n```\nIt prints:\n```\n3\n```", "print(3)\n"),
        ("```Python3\nprint(3)\n```", "print(3)\n"),
        ("```python \nprint(3)\n```\nand\n```text\n3\n```", "print(3)\n"),
        ("```\nprint(2)\n```\nor\n```\nprint(3)\n```", "print(3)\n"),
        ("```cpp\nint x;\n```", None),
        ("print(3)", None),
    ],
)
def test_the_program_of_the_code_reward_is_no_output_beside_it(completion, program):
    """A block with what the program prints was run in its place, and a space behind `python` lost it."""
    assert runpy.run_path(str(EXAMPLES / "code_reward.py"))["program_of"](completion) == program


def test_the_loop_by_hand_is_that_of_the_page_and_trains(narrow_model, monkeypatch, capsys):
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
    rows[0]["question"] += "\u2028Two?"  # as JSON may have it, and no end of a line there
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "train.jsonl").write_text("".join(line + "\n" for line in lines), "utf-8")
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


@pytest.mark.slow
def test_the_reward_model_that_the_example_writes_can_be_used(tmp_path):
    path = EXAMPLES / "reward_model.py"
    _, _, *arguments = command_of(path, "python ")
    small = path.read_text("utf-8").replace("STEPS, PAIRS, WIDTH = 200, 32,", "STEPS, PAIRS, WIDTH = 50, 2,")
    small = small.replace('head="value_head"', 'head="value_head", layers=arch.layers[:1]')
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


def configured(path):
    """The configuration that the command in the docstring of `path` names, checked."""
    options = command_of(path, "quatrain ")
    assert options[:2] == ["quatrain", "train"]
    return load_config(ROOT / options[2], environ={}).config


def rows_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def check_demonstrations(rows, tokenizer, config):
    """Those of a second turn have the tokens that an episode has there; all have room in an episode."""
    turns = TurnTemplate(tokenizer, (tokenizer.eos_token_id,))
    longest = {"prompt": 0, "sampled": 0, "given": 0}
    for row in rows:
        *first, last = row["prompt"]
        sampled = tokenizer.encode(row["completion"] + EOS)
        given = []
        if first:
            [question, turn] = first
            before = tokenizer.encode(turn["content"] + EOS)
            given = turns.suffix([question], before, [last]).ids
            assert render(tokenizer, row["prompt"]).ids == [*turns.prompt([question]).ids, *before, *given]
            sampled = [*before, *sampled]
        sizes = {
            "prompt": len(render(tokenizer, row["prompt"]).ids),
            "sampled": len(sampled),
            "given": len(given),
        }
        longest = {name: max(longest[name], size) for name, size in sizes.items()}
    assert 0 < longest["given"] <= config.rollout.max_environment_tokens
    assert longest["sampled"] <= config.rollout.max_new_tokens
    assert longest["prompt"] <= config.data.max_prompt_length


def test_who_follows_the_hints_of_the_guessing_game_wins(monkeypatch, tokenizer):
    monkeypatch.chdir(ROOT)
    config = configured(EXAMPLES / "guessing_game.py")
    environments = load_environment(config.rollout.environment)
    numbers = rows_of(Path(config.data.train))
    assert [row["number"] for row in numbers] == [1, 2, 3]

    def won(number, first, second):
        """The reward of a game; `second` is the second guess by the hint."""
        play = environments({})
        play.reset({"number": number})
        turn = play.step(f"<answer>{first}</answer>")
        if not turn.done:
            (message,) = turn.messages
            turn = play.step(f"<answer>{second[message['content']]}</answer>")
        assert turn.done
        return turn.reward

    def share(first, more, less):
        return np.mean([won(number, first, {"more": more, "less": less}) for number in (1, 2, 3)])

    guesses = (1, 2, 3)
    assert share(2, more=3, less=1) == 1
    assert max(share(a, b, b) for a in guesses for b in guesses) == pytest.approx(2 / 3)
    assert np.mean([share(a, b, b) for a in guesses for b in guesses]) == pytest.approx(5 / 9)
    play = environments({})
    play.reset({"number": 2})
    assert play.step("two").messages[0]["content"] == "1, 2 or 3"
    rows = rows_of(Path(config.sft.data))
    shown = [(tuple(message["content"] for message in row["prompt"][1:]), row["completion"]) for row in rows]
    counts = {hint: [shown.count((hint, f"<answer>{n}</answer>")) for n in guesses] for hint, _ in shown}
    assert len(counts) == 5
    assert all(len(set(each)) == 1 for each in counts.values())
    check_demonstrations(rows, tokenizer, config)


def test_the_calculator_calculates_and_nothing_else(monkeypatch):
    monkeypatch.chdir(ROOT)
    config = configured(EXAMPLES / "calculator.py")

    def result(expression):
        call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
        (message,) = load_tools(config.rollout.tools)({}).step(call).messages
        return message["content"]

    assert [result(text) for text in ("47+38", "12*(3+4)", "-7/2", "90 - 12")] == ["85", "84", "-3.5", "78"]
    # Six digits, as `:g` has, made 1.23457e+06 of the first, in silence.
    assert [result(text) for text in ("1234567+1", "0.1+0.2")] == ["1234568", "0.3"]
    for text in ("__import__('os').getcwd()", "9**9**9", "a+1", "1/0", "1+", "1" * 101, "'a'*3", "(" * 99):
        assert result(text).startswith("Error: "), text


@pytest.mark.slow
def test_the_data_of_the_calculator(monkeypatch, tmp_path, tokenizer):
    config = configured(EXAMPLES / "calculator.py")
    script, *_ = command_of(EXAMPLES / "calculator.py", "python ")[1:]
    subprocess.run([sys.executable, ROOT / script], cwd=tmp_path, check=True)
    folder = tmp_path / "calculator"
    train, heldout = rows_of(folder / "train.jsonl"), rows_of(folder / "heldout.jsonl")
    assert tmp_path / config.data.train == folder / "train.jsonl"
    assert (len(train), len(heldout)) == (2000, 200)
    assert not {row["expression"] for row in train} & {row["expression"] for row in heldout}
    shown = rows_of(folder / "demonstrations.jsonl")
    check_demonstrations(shown, tokenizer, config)
    calls = [row["completion"] for row in shown if row["called"] and len(row["prompt"]) == 1]
    assert len(calls) == len(train)
    tools = load_tools([f"{ROOT / 'examples/calculator.py'}:calculate"])({})
    answers = [tools.step(call).messages[0]["content"] for call in calls]
    assert answers == [row["answer"] for row in train]
    guesses = rows_of(folder / "guesses.jsonl")
    right = [row["completion"] == f"<answer>{told['answer']}</answer>" for row, told in zip(guesses, train)]
    assert 0.02 < np.mean(right) < 0.09


def test_the_agent_of_the_guessing_game_is_its_environment(monkeypatch, tokenizer):
    """The same messages and rewards, whatever is guessed; the configurations differ in these keys alone."""
    monkeypatch.chdir(ROOT)
    config, other = configured(EXAMPLES / "guessing_agent.py"), configured(EXAMPLES / "guessing_game.py")
    assert replace_keys(config) == replace_keys(other)
    agent = find_function(config.rollout.agent, {}, "agent")
    environments = load_environment(other.rollout.environment)
    numbers = rows_of(Path(config.data.train))
    guesses = [f"<answer>{n}</answer>" for n in (1, 2, 3)] + ["two"]
    for row, first, second in product(numbers, guesses, guesses):
        said, asked = [first, second], []

        async def chat(messages, said=said, asked=asked):
            asked.append([dict(message) for message in messages])
            return {"role": "assistant", "content": said.pop(0)}

        reward = asyncio.run(agent(types.SimpleNamespace(chat=chat), row))
        play = environments({})
        play.reset({"number": row["number"]})
        turn = play.step(first)
        expected = turn.reward if turn.done else play.step(second).reward
        assert reward == expected
        assert len(asked) == (1 if turn.done else 2)
        if not turn.done:
            assert asked[1] == [*row["prompt"], {"role": "assistant", "content": first}, *turn.messages]


def replace_keys(config):
    """The configuration without the name of the run, and what differs between environments and agents."""
    values = config.model_dump()
    del values["run"], values["rollout"]["agent"], values["rollout"]["environment"]
    return values
