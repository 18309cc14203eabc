"""What the README and the pages say is done: code runs, commands parse, links lead somewhere."""

import inspect
import json
import re
import shlex
import tomllib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import yaml
from architectures import QWEN_7B
from rollouts import make_rollouts

from quatrain.config.convert import convert
from quatrain.config.load import load_config
from quatrain.data.rows import read_rows
from quatrain.plan.device_memory import in_units, parse_bytes
from quatrain.plan.placement import placement
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


def task():
    """The files of the task in the README, by name."""
    [row, *_], [function], [config] = (blocks(README, language) for language in ("json", "python", "yaml"))
    return {"sums.jsonl": row, "nearness.py": function, "sums.yaml": config}


def translations():
    """(name, devices, their file, ours) of each pair of files in docs/coming_from.md."""
    page = (ROOT / "docs" / "coming_from.md").read_text("utf-8")
    pattern = r"quatrain convert (\S+) --devices (\d+)</code>.*?<pre>\n(.*?)</pre>.*?<pre>\n(.*?)</pre>"
    return [
        (name, int(devices), *files) for name, devices, *files in re.findall(pattern, page, flags=re.DOTALL)
    ]


def test_the_task_of_the_readme_has_twelve_lines_that_load_and_score(tmp_path, monkeypatch):
    """A key, a column or a reward of the first thing that a newcomer copies that does not work."""
    files = task()
    assert sum(bool(line.strip()) for text in files.values() for line in text.splitlines()) + 1 <= 12
    assert ["quatrain", "train", "sums.yaml"] in commands(README)
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    config = load_config(Path("sums.yaml"), environ={}).config
    [row] = read_rows(config.data.train)
    assert {"answer", config.data.question_column} <= set(row)
    scorer = RewardScorer(config.reward)
    assert scorer.required_columns == {"answer"}

    completions = ["<think>3+4=7</think>\n<answer>7</answer>", "It is 6.", "1,004 apples", "-1", "No idea."]
    batch = scorer.score(make_rollouts(completions, ["How many?"] * 5, answer=[7, 7, 1000, 2, row["answer"]]))
    np.testing.assert_array_equal(batch.rewards, np.float32([1, 0.5, 0.2, 0.25, np.nan]))
    assert batch.metrics["reward/nearness/errors"].result() == 0


def test_the_plan_in_the_readme_has_the_bytes_of_the_plan(tmp_path):
    """A row of what fits whose peak is not that of its settings, after a change of the plan."""
    [shown] = [block for block in blocks(README, "") if "--fit" in block]
    command, memory, _, *rows = [line for line in shown.splitlines() if line]
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B), "utf-8")
    assert memory == f"fits 8 devices of {in_units(parse_bytes('80GB'))}, the cheapest first"
    for mesh, remat, budget, _, _, *peak, share, _ in map(str.split, rows):
        sizes = (f"mesh={mesh}", f"model.remat={remat}", f"update.max_tokens_per_device={budget}")
        config = load_config(ROOT / command.split()[2], [f"model.path={tmp_path}", *sizes], environ={}).config
        planned = placement(config, devices=8, device_memory=parse_bytes("80GB")).peak
        assert (" ".join(peak), share) == (in_units(planned), f"{planned / parse_bytes('80GB'):.0%}")


def test_each_file_beside_one_of_ours_is_what_convert_makes_of_it(tmp_path):
    """A translation that `quatrain convert` no longer makes, or a configuration that does not load."""
    assert [name for name, *_ in translations()] == ["grpo_trl.yaml", "grpo_verl.yaml"]
    for name, devices, theirs, ours in translations():
        (tmp_path / name).write_text(ours, "utf-8")
        load_config(tmp_path / name, environ={})
        assert yaml.safe_load(convert(theirs, name, [], devices=devices).text) == yaml.safe_load(ours)


def test_what_is_installed_is_an_extra_of_this_repository():
    """`pip install 'quatrain[…]'` while nothing is published, or an extra that does not exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    folders = ("benchmarks", "configs", "docs", "examples", "launch", "src")
    files = [README, *(file for folder in folders for file in (ROOT / folder).rglob("*"))]
    for file in files:
        if file.suffix in (".py", ".md", ".yaml", ".sh", ".ipynb", ".sbatch"):
            text = file.read_text("utf-8")
            assert "quatrain[" not in text, file
            for names in re.findall(r"pip install[^`\n]*['\"]\.\[([\w,-]+)\]", text):
                assert set(names.split(",")) <= set(extras), file


def test_the_four_lines_of_the_index_are_those_of_the_training_step():
    from quatrain.loop.step import collect, learn

    [stanza] = blocks(ROOT / "docs" / "index.md", "python")
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
