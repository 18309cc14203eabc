"""What the README and the pages say is done: code runs, commands parse, links lead somewhere."""

import inspect
import re
import shlex
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rollouts import make_rollouts

from quatrain.config.load import load_config
from quatrain.config.schema import RewardConfig
from quatrain.reward.scorer import RewardScorer

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [path for folder in (".", "configs", "docs") for path in sorted((ROOT / folder).glob("*.md"))]
WITH_CONFIG = ("train", "eval", "sft", "config", "plan", "bench")


def blocks(page, language):
    """The fenced blocks of `page` in `language` ("": without one)."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [text for name, text in fences if name == language]


def commands(page):
    """The `quatrain …` lines of the blocks of `page`, as words."""
    lines = [
        line for language in ("", "bash") for text in blocks(page, language) for line in text.split("\n")
    ]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("quatrain ")]


def test_the_reward_function_in_the_readme_scores(tmp_path):
    (source,) = [block for block in blocks(README, "python") if "def " in block]
    assert len(source.splitlines()) == 8
    path = tmp_path / "nearness.py"
    path.write_text(source, "utf-8")
    scorer = RewardScorer(RewardConfig(functions={f"{path}:nearness": 1.0}))
    assert scorer.required_columns == {"answer"}

    completions = ["<think>3+4=7</think>\n<answer>7</answer>", "It is 6.", "1,004 apples", "-1", "No idea."]
    answers = ["7", "2 + 5 = 7\n#### 7", "1,000", "2", "7"]
    batch = scorer.score(make_rollouts(completions, ["How many?"] * 5, answer=answers))
    np.testing.assert_array_equal(batch.rewards, np.float32([1, 0.5, 0.2, 0.25, np.nan]))
    assert batch.metrics["reward/nearness/errors"].result() == 0


def test_the_four_lines_in_the_readme_are_those_of_the_training_step():
    from quatrain.loop.step import collect, learn

    (stanza,) = [block for block in blocks(README, "python") if "def " not in block]
    shown = [line.split("#")[0].strip() for line in stanza.splitlines()]
    source = inspect.getsource(collect) + inspect.getsource(learn)
    done = [
        line.strip().removesuffix(" if ticket is None else rollout.wait(ticket)")
        for line in source.splitlines()
    ]
    assert len(shown) == 4
    assert [line for line in done if line in shown] == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_have_valid_settings(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in commands(page):
        if words[1] not in WITH_CONFIG:
            continue
        settings = [value for flag, value in pairwise(words) if flag == "--set"]
        config = words[2] if words[2:] and words[2].startswith("configs/") else None
        load_config(config and Path(config), settings, environ={})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_each_page_is_in_the_navigation_of_the_site():
    shown = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(shown) == sorted(str(page.relative_to(ROOT)) for page in PAGES)


def anchors(page):
    """What a page's headings are linked by."""
    headings = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
