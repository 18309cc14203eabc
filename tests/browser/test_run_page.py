"""The run page in Chromium: `make test-browser`."""

import io
import json
import random
import threading
import time

import pytest
from page_runs import (
    SCRIPT,
    episode_sample,
    episode_tokens,
    eval_sample,
    make_run,
    sample,
    step_samples,
    tool_turns,
    turn,
    write_rows,
)
from PIL import Image

from quatrain.data.messages import named_picture
from quatrain.report.page import Page
from quatrain.report.page_server import address, server
from quatrain.run.pictures import write_picture
from quatrain.types.pictures import Picture

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore")]


ESCAPE, ENTER = "\ue00c", "\ue007"
SHIFT_ENTER = "new KeyboardEvent('keydown', {key: 'Enter', shiftKey: true, bubbles: true})"
TITLE = "f.querySelector('b').textContent"
STATUS = "(document.querySelector('#results p') ?? {}).textContent"


OUTSIDE = """return [...document.querySelectorAll('td, th, li, p, dd')].filter((e) => {
  const box = e.getBoundingClientRect();
  return box.width && (box.left < 0 || box.right > innerWidth);
}).map((e) => e.textContent)"""
"""The texts that a phone does not show without scrolling to the side."""
BROKEN = r"""const found = [], range = document.createRange();
function look(node, start, end, text) {
  range.setStart(node, start);
  range.setEnd(node, end);
  const boxes = [...range.getClientRects()].filter((r) => r.width);
  const isBelow = Math.max(...boxes.map((r) => r.top)) > Math.min(...boxes.map((r) => r.bottom)) - 2;
  const width = boxes.reduce((sum, r) => sum + r.width, 0);
  if (isBelow && (width < 280 || /^[a-z0-9]+$/i.test(text))) found.push(text);
  if (boxes.some((r) => r.right > innerWidth)) found.push(`${text} is cut`);
}
for (const name of document.querySelectorAll('main .whole')) {
  look(name, 0, name.childNodes.length, name.textContent);
}
const walk = document.createTreeWalker(document.querySelector('main'), NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const node = walk.currentNode;
  if (node.parentElement.closest('.text, option')) continue; // what a model wrote may have no place to break
  for (const { index, 0: word } of node.data.matchAll(/[\w./:]*\w/g)) {
    look(node, index, index + word.length, word);
  }
}
return found"""
"""The words and names of the page itself that go over two lines although one holds them, or over the edge."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Addresses of the page of one run and of two."""
    root = tmp_path_factory.mktemp("runs")
    first, second = make_run(root, "first"), make_run(root, "second", weight=0.25)
    (root / "second" / "plan.json").unlink()
    Page([first]).write(root / "one.html")
    Page([first, second]).write(root / "two.html")
    return {"one": (root / "one.html").as_uri(), "two": (root / "two.html").as_uri()}


@pytest.fixture
def one(browser, pages):
    browser.open(pages["one"])
    browser.wait("return document.querySelectorAll('#group .card').length")
    return browser


def test_what_a_model_wrote_stays_text(one):
    one.choose("#step", 1)
    one.wait("return document.querySelector('#step-count').textContent === '1 of 3'")
    one.wait("return document.querySelector('#prompts button').textContent.includes('question 0')")
    one.click("#prompts button")
    assert one.text("#group .card .body") == SCRIPT
    assert one.js("return window.broken") is None
    assert one.js("return document.querySelectorAll('main img, main script').length") == 0
    one.click("#prompts li:nth-child(3) button")
    assert "chat <b>question</b>" in one.text("#group .prompt")


def test_a_group_is_shown_with_all_its_numbers(one):
    card = one.text("#group .card:nth-child(1)")
    for expected in ("reward1", "advantage+0.5", "correct1", "formatnone", "right", "stop", "7 tokens"):
        assert expected in card
    assert one.texts("#group .columns dt")[0] == "gold answer"


def test_keys_move_between_steps_and_prompts(one):
    step = "return document.querySelector('#step').value"
    assert one.js(step) == "3"
    one.keys("\ue012")  # arrow left
    one.wait("return document.querySelector('#step').value === '2'")
    one.keys("\ue014")  # arrow right
    one.wait("return document.querySelector('#step').value === '3'")
    one.keys("j")
    assert one.text("#group h3") == "Prompt 1"
    one.keys("jjj")
    assert one.text("#group h3") == "Prompt 2"
    one.keys("k")
    assert one.text("#group h3") == "Prompt 1"
    one.keys("/")
    assert one.js("return document.activeElement.id") == "search"
    one.keys("jk")  # typed, not obeyed
    assert one.js("return document.querySelector('#search').value") == "jk"
    assert one.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    one.keys("\ue00c")  # escape
    one.keys("?")
    assert one.js("return document.querySelector('#help').open")


def test_search_finds_completions_of_all_steps(one):
    one.type("#search", "NEEDLE2")
    one.wait(f"return {STATUS} === '1 completion in 1 step'")
    one.click("#results li button")
    one.wait("return document.querySelector('#step').value === '2'")
    assert one.texts("#group mark") == ["needle2"]
    assert "1 hidden by the search or filter" in one.text("#group .group-head")


def test_enter_goes_through_the_results_and_escape_empties_the_search(one):
    one.keys("/")
    one.keys("needle" + ENTER)  # before the results are there
    one.wait(f"return {STATUS} === '3 completions in 3 steps'")
    one.wait("return document.querySelectorAll('#results [aria-current]').length")
    one.wait("return document.querySelector('#step').value === '1'")
    one.keys(ENTER)
    one.wait("return document.querySelector('#step').value === '2'")
    assert one.texts("#group mark") == ["needle"]
    one.js(f"document.activeElement.dispatchEvent({SHIFT_ENTER})")
    one.wait("return document.querySelector('#step').value === '1'")
    one.js(f"document.activeElement.dispatchEvent({SHIFT_ENTER})")
    one.wait("return document.querySelector('#step').value === '3'")
    one.click("[data-filter=truncated]")  # the results are those of the filter
    one.wait(f"return {STATUS} === '0 completions in 0 steps'")
    one.click("[data-filter=all]")
    one.js("document.querySelector('#search').focus()")
    one.keys(ESCAPE)
    one.wait("return document.querySelectorAll('#group mark').length === 0")
    assert one.js("return document.querySelector('#results').hidden") is True
    assert one.js("return document.querySelector('#search').value") == ""
    assert one.js("return document.activeElement === document.body") is True
    assert one.js("return document.querySelector('#step').value") == "3"
    one.type("#config-search", "rollout")
    one.js("document.querySelector('#config-search').focus()")
    one.keys(ESCAPE)
    assert len(one.texts("#config-content tbody tr")) > 3


def test_what_only_the_prompt_says_is_one_result_of_its_group(one):
    one.type("#search", "question 1")
    one.wait(f"return {STATUS} === '6 completions in 3 steps'")
    assert [text[:6] for text in one.texts("#results li")] == ["step 1", "step 2", "step 3"]
    one.js("document.querySelector('#search').focus()")
    one.keys(ENTER)
    colour = "return getComputedStyle(document.querySelectorAll('#results button')[%d]).backgroundColor"
    assert one.js(colour % 0) != one.js(colour % 1)


def test_a_result_scrolls_to_the_place_that_was_searched_for(browser, tmp_path):
    text = "line\n" * 200 + "here it is"
    write_rows(tmp_path / "run" / "samples" / "step_000001.jsonl", [sample(0, 1.0, completion=text)])
    Page([tmp_path / "run"]).write(tmp_path / "run.html")
    browser.open((tmp_path / "run.html").as_uri())
    browser.type("#search", "here it")
    browser.wait("return document.querySelector('#group mark')")
    box, mark = (
        browser.js(
            f"const r = document.querySelector('{each}').getBoundingClientRect(); return [r.top, r.bottom]"
        )
        for each in ("#group .body", "#group mark")
    )
    assert box[0] <= mark[0] < mark[1] <= box[1]


def test_filters_leave_what_they_say(one):
    assert one.texts("#filters button") == [
        "all",
        "wrong but rewarded 9",
        "wrong but pushed up 3",
        "truncated 3",
        "no signal 3 groups",
    ]
    one.click("[data-filter=truncated]")
    assert len(one.texts("#prompts li")) == 1
    assert one.texts("#group .badge.warn") == ["truncated"]
    one.click("[data-filter=no_signal]")
    assert one.text("#group h3") == "Prompt 2"
    one.click("[data-filter=wrong_rewarded]")
    assert [text[:9] for text in one.texts("#group .card")] == ["reward0.6"]


def test_tokens_are_coloured_with_the_number_under_the_pointer(one):
    one.choose("#colour", "gap")
    tokens = "#group .card:nth-child(1) [data-token]"
    assert one.texts(tokens) == [SCRIPT, " world", "\n"]
    over = "new PointerEvent('pointerover', {bubbles: true})"
    one.js(f"document.querySelectorAll('{tokens}')[1].dispatchEvent({over})")
    tip = one.text("#tip")
    assert '" world"' in tip
    assert "gap, trainer − sampler−0.5" in tip
    assert "id 1" in tip
    colours = one.js(f"return [...document.querySelectorAll('{tokens}')].map((e) => e.style.backgroundColor)")
    assert colours[0] == ""
    assert "--low" in colours[2]
    one.choose("#colour", "taught")
    colours = one.js(f"return [...document.querySelectorAll('{tokens}')].map((e) => e.style.backgroundColor)")
    assert colours[0] == ""
    assert "--high" in colours[2]
    assert "gap, teacher − sampler+0.75" in tip


def test_samples_of_a_prompt_share_its_head_and_what_has_no_partner_is_counted(browser, tmp_path):
    for step, prompts in ((0, 1), (5, 2)):
        rows = [eval_sample(i, 1, sample=k, greedy=False) for i in range(prompts) for k in range(3)]
        write_rows(tmp_path / "run" / "samples" / f"eval_{step:06d}.jsonl", rows)
    Page([tmp_path / "run"]).write(tmp_path / "run.html")
    page = browser.open((tmp_path / "run.html").as_uri())
    page.wait("return document.querySelectorAll('#outcomes button').length")
    assert page.texts("#outcomes button")[3] == "stayed right 3"
    assert page.texts("#outcomes button")[-1] == "not in both 3"
    assert page.texts("#pairs h3") == ["Prompt 0", "Prompt 1"]
    assert len(page.texts("#pairs .pair")) == 6
    page.js("document.querySelector('#eval-search').focus()")
    page.keys("question" + ENTER + "j")
    assert page.js("return [...document.querySelectorAll('.pair')].indexOf(document.activeElement)") == 1
    page.click("[data-outcome=alone]")
    assert page.texts("#pairs h3") == ["Prompt 1"]


def test_evaluation_before_and_after(one):
    assert one.texts("#outcomes button") == [
        "all 4",
        "became right 2",
        "became wrong 0",
        "stayed right 0",
        "stayed wrong 1",
        "truncated after 0",
        "not in both 1",
    ]
    one.click("[data-outcome=fixed]")
    assert one.texts("#pairs h3") == ["Prompt 0", "Prompt 2"]
    assert "wrong" in one.text("#pairs .card:nth-child(1)")
    assert "right" in one.text("#pairs .card:nth-child(2)")


def test_every_metric_is_listed_and_opens_its_curve(one):
    one.type("#metric-filter", "brand")
    assert one.texts("#metrics-content tbody code") == ["brand/new"]
    one.click("#metrics-content tbody button")
    assert one.js("return document.querySelectorAll('#metrics-content figure').length") == 1
    one.js("document.querySelector('#metrics-content figure').scrollIntoView()")
    one.wait("return document.querySelector('#metrics-content canvas')")


def test_curves_name_what_is_not_finite_and_lead_to_completions(one):
    assert "update/entropy is not finite at step 1, 2, 3" in " ".join(one.texts("#curves .remark"))
    titles = one.texts("#curves figcaption b")
    assert {"Reward", "Reward by function", "Accuracy, evaluation", "Length", "Seconds by stage"} <= set(
        titles
    )
    one.click(".hints button")
    one.wait("return document.querySelector('#step').value === '2'")


@pytest.mark.parametrize("dark", [False, True])
def test_dark_mode_follows_the_system_and_the_button(browser, pages, dark):
    page = browser.open(pages["one"], dark=dark)
    light = "return getComputedStyle(document.body).backgroundColor === 'rgb(255, 255, 255)'"
    assert page.js(light) is not dark
    page.click("#theme")
    assert page.js(light) is True
    page.click("#theme")
    assert page.js(light) is False
    page.click("#theme")
    assert page.js(light) is not dark


def test_a_phone_needs_no_horizontal_scroll(browser, pages):
    for name in ("one", "two"):
        page = browser.open(pages[name], size=browser.PHONE)
        page.wait("return document.querySelectorAll('#group .card').length")
        assert page.js("return innerWidth") == browser.PHONE[0]
        assert page.js("return document.documentElement.scrollWidth") == browser.PHONE[0]


@pytest.mark.parametrize("size", ["DESKTOP", "PHONE"])
def test_what_made_a_run_is_opened_by_a_click(browser, pages, size):
    page = browser.open(pages["one"], size=getattr(browser, size))
    height = "return document.querySelector('.made').offsetHeight"
    closed = page.js(height)
    page.click(".made summary")
    assert page.js(height) > closed + 100
    rows = page.js("return [...document.querySelectorAll('.made tr')].map((r) => r.textContent)")
    assert "commandquatrain train first.yaml" in rows
    assert "changed: run.steps2 before, 3 now" in rows
    assert page.js("return document.documentElement.scrollWidth") <= getattr(browser, size)[0]
    assert page.js(OUTSIDE) == []


def test_several_runs_share_charts_and_list_the_keys_that_differ(browser, pages):
    page = browser.open(pages["two"])
    assert page.texts("#differing tbody code") == ["run.name", "reward.functions.mine.py:f # g"]
    legend = page.texts("#curves figure:nth-child(1) .legend .label")
    assert legend == ["first", "second"]
    page.choose("#run", 1)
    page.wait("return document.querySelectorAll('#group .card').length")


def test_a_chart_of_several_runs_has_their_final_evaluation_too(browser, tmp_path):
    names = ("eval/accuracy_lenient", "eval/accuracy_strict", "eval/final/accuracy_lenient")
    folders = [tmp_path / "one" / "run", tmp_path / "two" / "run"]
    for folder in folders:
        write_rows(folder / "metrics.jsonl", [{"step": 1} | dict.fromkeys(names, 0.5)])
    Page(folders).write(tmp_path / "page.html")
    assert legends(browser.open((tmp_path / "page.html").as_uri())) == {
        "Accuracy, evaluation: accuracy_lenient": ["one/run", "two/run", "one/run final", "two/run final"],
        "Accuracy, evaluation: accuracy_strict": ["one/run", "two/run"],
    }


@pytest.fixture(scope="module")
def crowded(tmp_path_factory):
    """A run with metrics whose short names are the same, lines on one another, hints, and no accuracy."""
    folder = tmp_path_factory.mktemp("crowded") / "a-run-with-a-name-that-is-longer-than-a-phone"
    rows = [{"step": step} for step in range(6)]
    rows[0] |= {"update/grad_norm": 9.0, "sft/loss": 9.0}  # of the warm start
    for row in rows[1:]:
        row |= {"update/kl": 0.1, "reward/kl": 0.2, "throughput/tokens_per_s": 5, "rollout/tokens_per_s": 9}
        row |= {f"reward/function_{i}/mean": float(i) for i in range(9)}
    for row in (rows[0], rows[2], rows[4], rows[5]):
        row |= {"eval/accuracy_lenient": 0.5, "eval/accuracy_strict": 0.5, "eval/accuracy_errors": 40.0}
        row |= {"eval/reward": 0.5, "eval/episode/reward/mean": 0.5, "eval/completion_length": 12.0}
    write_rows(folder / "metrics.jsonl", rows)
    text = "cut at `rollout.max_new_tokens` (8); see `a` and an odd ` mark"
    write_rows(folder / "hints.jsonl", [{"step": 2, "hint": "truncated", "text": text}])
    for step, rewards in ((0, (0.0, 1.0, 0.5)), (5, (1.0, 0.5, 0.5))):
        samples = [
            eval_sample(i, 0, reward=reward, correct=None, rewards={}) for i, reward in enumerate(rewards)
        ]
        write_rows(folder / "samples" / f"eval_{step:06d}.jsonl", samples)
    (folder / "config.yaml").write_text(
        "eval: {accuracy: mine.py:exact}\nreward:\n  functions:\n"
        "    /a/long/path/to/a/folder/of_rewards/my_own_reward_functions.py:the_answer_is_in_the_text: 1.0\n"
    )
    write_rows(folder / "samples" / "step_000001.jsonl", [sample(0, 0.5)])
    Page([folder]).write(folder / "report.html")
    return (folder / "report.html").as_uri()


def legends(page):
    """Title of each chart -> the labels in its legend."""
    script = f"[{TITLE}, [...f.querySelectorAll('.label')].map((e) => e.textContent)]"
    return dict(page.js(f"return [...document.querySelectorAll('#curves figure')].map((f) => {script})"))


def test_the_lines_of_a_chart_are_told_apart_and_have_one_unit(browser, crowded):
    page = browser.open(crowded)
    found = legends(page)
    assert "Gradient norm" not in found
    assert "9" in page.texts("[data-metric='update/grad_norm'] td")
    assert found["KL"] == ["update/kl", "reward/kl"]
    assert found["Throughput"] == ["throughput/tokens_per_s", "rollout/tokens_per_s"]
    assert found["Accuracy, evaluation"] == ["accuracy_lenient", "accuracy_strict"]  # not the count of errors
    assert found["Reward, evaluation"] == ["reward"]
    swatches = {
        title: page.js(
            "const figures = [...document.querySelectorAll('#curves figure')];"
            f"const figure = figures.find((f) => {TITLE} === '{title}');"
            "return [...figure.querySelectorAll('.swatch')].map((e) => e.style.background)"
        )
        for title in ("Reward by function", "Accuracy, evaluation")
    }
    assert len(set(swatches["Reward by function"])) == 9
    assert ["gradient" in each for each in swatches["Accuracy, evaluation"]] == [False, True]


def test_backticks_in_a_sentence_mark_code(browser, crowded):
    page = browser.open(crowded)
    assert page.texts(".hints code") == ["rollout.max_new_tokens", "a"]
    assert page.text(".hints li").endswith("cut at rollout.max_new_tokens (8); see a and an odd ` mark")
    assert "eval.accuracy" in page.texts("[data-metric='eval/accuracy_lenient'] td code")


def test_without_a_judge_the_filters_of_right_and_wrong_give_way(browser, crowded):
    page = browser.open(crowded)
    page.wait("return document.querySelectorAll('#outcomes button').length")
    assert page.texts("#outcomes button") == [
        "all 3",
        "reward rose 1",
        "reward fell 1",
        "reward stayed 1",
        "truncated after 0",
    ]
    page.click("[data-outcome=rose]")
    assert page.texts("#pairs h3") == ["Prompt 0"]
    page.wait("return document.querySelectorAll('#filters button').length")
    assert page.texts("#filters button") == ["all", "truncated 0", "no signal 1 group"]
    assert "give mine.py:exact (eval.accuracy) a weight, which may be 0" in page.text("#filters .aside")
    display = "return getComputedStyle(document.querySelector('#filters .aside .whole')).display"
    assert page.js(display) == "inline-block"  # a name in the sentence has no line of its own


def test_on_a_wide_screen_the_names_in_tables_are_whole(browser, crowded):
    assert browser.open(crowded, size=(1280, 800)).js(BROKEN) == []


def test_on_a_phone_a_row_is_a_block_and_no_word_is_broken_or_cut(browser, crowded, pages):
    for address_of in (crowded, pages["one"], pages["two"]):
        page = browser.open(address_of, size=browser.PHONE)
        assert page.js("return document.querySelectorAll('td').length") > 20
        assert page.js(OUTSIDE) == []
        assert page.js(BROKEN) == []
        nav, top = (
            page.js(f"return document.querySelector('{each}').getBoundingClientRect().bottom")
            for each in ("#nav", ".top")
        )
        assert nav <= top


def test_a_run_without_samples_says_so(browser, tmp_path):
    write_rows(tmp_path / "bare" / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    Page([tmp_path / "bare"]).write(tmp_path / "bare.html")
    page = browser.open((tmp_path / "bare.html").as_uri())
    assert "no samples" in page.text("#completions-note")
    assert "no evaluation completions" in page.text("#eval-note")
    assert "no plan.json" in page.text("#plan")


def test_what_is_left_out_is_said_with_how_to_see_it(browser, tmp_path, monkeypatch):
    from quatrain.report import page as module

    folder = make_run(tmp_path, steps=8)
    monkeypatch.setitem(
        module.CAP_BYTES, "step", 3 * (folder / "samples" / "step_000001.jsonl").stat().st_size
    )
    Page([folder]).write(tmp_path / "cap.html")
    note = browser.open((tmp_path / "cap.html").as_uri()).text("#completions-note")
    assert "30 completions in 5 whole steps" in note
    assert "quatrain samples first --step N" in note


def test_a_live_page_takes_up_a_step_and_keeps_the_readers_place(browser, tmp_path):
    folder = make_run(tmp_path)
    with server([folder], port=0) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            page = browser.open(address(http))
            page.wait("return document.querySelectorAll('#group .card').length")
            page.keys("\ue012")
            page.wait("return document.querySelector('#step').value === '2'")
            page.keys("j")
            page.type("#config-search", "rollout")
            page.click("[data-metric='reward/mean'] button")
            page.js(
                "document.querySelector(\"[data-metric='reward/mean'] button\").focus({preventScroll: true})"
            )
            write_rows(folder / "samples" / "step_000004.jsonl", step_samples(4))
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": 4, "reward/mean": 0.125}) + "\n")
            page.wait("return document.querySelector('#step-count').textContent === '2 of 4'")
            assert page.js("return document.querySelector('#step').value") == "2"
            assert page.text("#group h3") == "Prompt 1"
            assert page.js("return document.querySelector('#config-search').value") == "rollout"
            assert "0.125" in page.text("#curves .legend")
            assert page.js("return document.activeElement.textContent") == "reward/mean"
            assert page.texts("[data-metric='reward/mean'] td")[2] == "0.125"
            assert len(page.texts("#metrics-content figure")) == 1
        finally:
            http.shutdown()
            thread.join()


@pytest.fixture
def episode_page(browser, tmp_path):
    """A run of one step with three episodes: a hostile tool, a flood of text, a fault."""
    flood = [turn("tool", "z" * 2**20 + " end of the flood", name="flood"), turn("assistant", "so much")]
    rows = [
        episode_sample(0, 1.25, tool_turns(SCRIPT), tokens=episode_tokens()),
        episode_sample(0, 0.5, flood, finish_reason="turns"),
        episode_sample(0, -1.0, [], finish_reason="error", rewards={"environment": -1.0}),
    ]
    write_rows(tmp_path / "run" / "samples" / "step_000001.jsonl", rows)
    for step, right in ((0, 0), (1, 1)):
        row = eval_sample(0, right) | {
            "turns": tool_turns(f"tool of step {step}"),
            "environment_reward": 1.25,
        }
        write_rows(tmp_path / "run" / "samples" / f"eval_{step:06d}.jsonl", [row])
    write_rows(tmp_path / "run" / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    Page([tmp_path / "run"]).write(tmp_path / "run.html")
    browser.open((tmp_path / "run.html").as_uri())
    browser.wait("return document.querySelectorAll('#group .card').length === 3")
    return browser


def test_an_episode_is_a_conversation_in_which_the_policys_turns_stand_out(episode_page):
    first = "#group .card:nth-child(1)"
    assert episode_page.texts(f"{first} .turn-head") == [
        "assistantturn 1reward +0.25",
        "toolmul",
        "assistantturn 2reward +1",
    ]
    assert episode_page.texts(f"{first} .turn.given .text") == [SCRIPT]
    assert episode_page.js("return window.broken") is None
    assert episode_page.js("return document.querySelectorAll('main img, main script').length") == 0
    assert episode_page.texts(f"{first} .badges .badge")[1:] == [
        "ended by the environment",
        "7 tokens",
        "2 turns",
    ]
    border = f"return getComputedStyle(document.querySelector('{first} .turn.%s')).borderLeftColor"
    assert episode_page.js(border % "own") != episode_page.js(border % "given")
    assert "environment1.25" in episode_page.text(f"{first} .numbers")
    assert episode_page.text("#group .card:nth-child(3) .body") == "empty"
    assert episode_page.texts("#group .card:nth-child(3) .badge.bad")[-1] == "environment error"
    assert episode_page.text("#group .card:nth-child(3) .numbers").count("environment") == 1


def test_sequences_of_an_agents_episode_say_which_answers_they_train(browser, tmp_path):
    place = {"sample": 0, "sequences": 2}
    first, after, other = (turn("assistant", text, answer=k) for k, text in enumerate("abc", start=1))
    asked = turn("user", "And now?")
    rows = [
        episode_sample(0, 1.0, [first, asked, after], episode={**place, "sequence": 0}),
        episode_sample(
            0, 1.0, [first | {"trained": False}, asked, other],
            episode={**place, "sequence": 1, "began": "message 1 changed"},
        ),
    ]  # fmt: skip
    write_rows(tmp_path / "run" / "samples" / "step_000001.jsonl", rows)
    write_rows(tmp_path / "run" / "metrics.jsonl", [{"step": 1, "loss": 1.0}])
    Page([tmp_path / "run"]).write(tmp_path / "run.html")
    browser.open((tmp_path / "run.html").as_uri())
    browser.wait("return document.querySelectorAll('#group .card').length === 2")
    heads = [browser.texts(f"#group .card:nth-child({k}) .turn-head") for k in (1, 2)]
    assert heads == [
        ["assistantanswer 1", "user", "assistantanswer 2"],
        ["assistantanswer 1trained in another sequence", "user", "assistantanswer 3"],
    ]
    assert browser.texts("#group .card:nth-child(2) .turn.own .text") == ["c"]
    assert "began anew: message 1 changed" in browser.texts("#group .card:nth-child(2) .badge")


def test_a_long_text_is_folded_until_the_reader_asks_or_the_search_finds_its_end(episode_page):
    text = "return document.querySelector('.given .text').textContent.length"
    button = "#group .card:nth-child(2) .fold"
    length = episode_page.js(
        f"return document.querySelector('{button[:-6]} .given .text').textContent.length"
    )
    assert length < 1100
    assert episode_page.text(button) == "show all 1,048,593 characters"
    episode_page.js(f"document.querySelector('{button}').focus()")
    episode_page.keys("\ue007")  # enter
    assert (
        episode_page.js(f"return document.querySelector('{button}').getAttribute('aria-expanded')") == "true"
    )
    assert episode_page.js(f"return document.activeElement === document.querySelector('{button}')") is True
    episode_page.click(button)
    episode_page.type("#search", "END of the flood")
    episode_page.wait("return document.querySelectorAll('#group .card').length === 1")
    assert episode_page.js(text) == 2**20 + 17
    assert episode_page.texts("#group mark") == ["end of the flood"]
    episode_page.wait("return document.querySelectorAll('#results mark').length === 1")


def test_tokens_of_an_episode_leave_out_what_the_policy_did_not_sample(episode_page):
    episode_page.choose("#colour", "advantage")
    first = "#group .card:nth-child(1)"
    assert episode_page.texts(f"{first} .turn-head") == [
        "assistantturn 1reward +0.25",
        "environment and template",
        "assistantturn 2reward +1",
    ]
    assert episode_page.texts(f"{first} .given .text") == ["<|end|>\n<|tool|>42<|end|>\n<|assistant|>"]
    over = "new PointerEvent('pointerover', {bubbles: true})"
    episode_page.js(f"[...document.querySelectorAll('{first} [data-token]')].at(-1).dispatchEvent({over})")
    assert "token7, id 7" in episode_page.text("#tip")
    colours = (
        f"return [...document.querySelectorAll('{first} [data-token]')].map((e) => e.style.backgroundColor)"
    )
    assert len(episode_page.js(colours)) == 5
    assert all("--high" in colour for colour in episode_page.js(colours))


def test_episodes_are_found_by_what_a_tool_wrote_and_by_a_fault_of_their_environment(episode_page):
    assert "environment failed 1" in episode_page.texts("#filters button")
    episode_page.click("[data-filter=failed]")
    assert len(episode_page.texts("#group .card")) == 1
    assert episode_page.texts("#pairs .given .text") == ["tool of step 0", "tool of step 1"]
    labels = "return [...document.querySelectorAll('#pairs .body')].map((e) => e.getAttribute('aria-label'))"
    assert episode_page.js(labels) == ["Episode before", "Episode after"]


def test_a_thousand_steps_of_64_samples_open_soon(browser, tmp_path, capsys):
    folder = tmp_path / "long"
    words = [
        f"{a}{b}" for a in ("add", "then", "so", "7", "12", "minus") for b in ("", "ing", "s", "42", "?")
    ]
    rng = random.Random(0)
    rows = [{"step": 0}]
    for step in range(1, 1001):
        samples = [
            sample(step * 8 + i // 8, rng.random(), completion=" ".join(rng.choices(words, k=150)))
            for i in range(64)
        ]
        write_rows(folder / "samples" / f"step_{step:06d}.jsonl", samples)
        rows.append({"step": step} | {f"metric/{i}": rng.random() for i in range(100)})
    write_rows(folder / "metrics.jsonl", rows)
    page = Page([folder])
    page.write(folder / "report.html")
    begin = time.monotonic()
    page.write(folder / "report.html")
    again_s = time.monotonic() - begin
    begin = time.monotonic()
    browser.open((folder / "report.html").as_uri())
    browser.wait("return document.querySelectorAll('#group .card').length === 8")
    opened_s = time.monotonic() - begin
    size = (folder / "report.html").stat().st_size
    with capsys.disabled():
        print(
            f"\n1,000 x 64 samples: a page of {size / 1e6:.1f} MB, open in {opened_s:.2f} s, "
            f"refreshed in {again_s:.2f} s"
        )
    assert opened_s < 8  # the figure that counts is printed; a busy machine must not fail the test
    browser.type("#search", "thens42 adding 7")
    browser.wait(f"return / in \\d+ steps?(, the first 200 below)?$/.test({STATUS})", 60)


SHOWN = "return [...document.querySelectorAll('#group .prompt img')].map((e) => [e.naturalWidth, e.width])"


def test_pictures_are_shown_in_the_prompt_beside_completions(browser, tmp_path):
    """A picture that the page's own policy forbids, or that stands for another; live, and in a file."""
    out = io.BytesIO()
    Image.new("RGB", (640, 480), "red").save(out, "PNG")
    one = Picture.of(out.getvalue(), (640, 480))
    folder = make_run(tmp_path)
    write_picture(folder / "pictures", one)
    content = ["left ", named_picture(one), {**named_picture(one), "picture": "f" * 16}, "<b>right"]
    row = sample(0, 1.0, prompt=[{"role": "user", "content": content}])
    write_rows(folder / "samples" / "step_000003.jsonl", [row])
    Page([folder]).write(tmp_path / "page.html")
    browser.open((tmp_path / "page.html").as_uri())
    browser.wait("return document.querySelectorAll('#group .card').length")
    browser.wait(f"{SHOWN}.every(([real]) => real)")
    assert browser.js(SHOWN) == [[256, 256]]
    assert browser.text("#group .prompt") == "userleft [image 640x480 ffffff]<b>right"
    with server([folder], port=0) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            browser.open(address(http))
            browser.wait("return document.querySelectorAll('#group .card').length")
            browser.wait(f"{SHOWN}.some(([real]) => real === 512)")
            browser.wait("return document.querySelector('#group .prompt').textContent.includes('ffffff')")
            [missing] = browser.complaints()
            assert f"picture/{'f' * 16} - Failed to load resource" in missing
        finally:
            http.shutdown()
            thread.join()
