"""What a judge is asked and says: questions, answers, the cache and the limits, without a server."""

import asyncio
import json
import logging
import multiprocessing

import pytest

from quatrain.config.sections.judge import JudgeBudget, JudgeConfig
from quatrain.reward.judge.cache import JudgementCache, key_of
from quatrain.reward.judge.judge import Judge
from quatrain.reward.judge.judgements import Judgement, NoJudgement, judgement_in, schema
from quatrain.reward.judge.limits import Limits, Spending
from quatrain.reward.judge.questions import Questions, prompt_text

SCALE = (0.0, 10.0)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ('{"reason": "so", "score": 7}', 7.0),
        ('<think>{"score": 1}</think>\n```json\n{"score": 7.5, "reason": "x"}\n```', 7.5),
        ('The answer says {"score": 10}. My verdict: {"score": 2, "reason": "no"}', 2.0),
        ('{"score": 3, "parts": {"score": 9}}', 3.0),
        ("{{{ no {json\nScore: 4", 4.0),
        ("**Score:** 6.5 of 10", 6.5),
        ('{"score": "7"}', 7.0),
        ("Score: **7** / 10", 7.0),
        ("Score: 7\nMaximum score: 10", 7.0),
    ],
)
def test_a_score_is_found(text, score):
    """Catches a reader that takes an object of a thought, of the completion, or inside of another."""
    found = judgement_in(text, SCALE)
    assert isinstance(found, Judgement)
    assert found.score == score


@pytest.mark.parametrize(
    "text",
    ["", "good", '{"score": true}', '{"score": 11}', '{"score": NaN}', '{"score": 1e999}',
     '{"score": -1}', "score of 7", "Score: 4/5", "Score: 80 out of 100", "Max score: 10",
     '{"score": ' + "9" * 400 + "}", "[" * 5000 + "{" * 5000],
)  # fmt: skip
def test_no_score_is_made_up(text):
    """Catches scores that are clipped, converted, guessed or of another scale, and what breaks the reader."""
    found = judgement_in(text, SCALE)
    assert isinstance(found, NoJudgement)
    assert found.kind == "unreadable"


@pytest.mark.parametrize(
    ("text", "cut_at"),
    [
        ("<think>… A full answer gets score: 10, an empty one score: 0. The answer", 9),
        ("<think>A full answer gets score: 10, an empty one score: 0.", None),
        ('<think>The format is {"reason": "...", "score": 10}. Now let me look…', 9),
        ('The format is {"reason": "...", "score": 10}. Now let me look', 9),
        ('{"reason": "The answer orders the judge to write score: 10, which', 9),
        ('{"reason": "x", "score": 1', 9),
    ],
)
def test_a_score_in_an_unfinished_answer_is_none(text, cut_at):
    """Catches a score that the judge only thought about, quoted, or had not written to its end."""
    found = judgement_in(text, SCALE, cut_at=cut_at)
    assert isinstance(found, NoJudgement)
    assert found.kind == "unreadable"
    cut = "it was cut at 9 tokens (reward.judge.max_tokens, or its body); "
    assert (cut in found.detail) == (cut_at is not None)


@pytest.mark.parametrize(
    ("text", "cut_at"),
    [
        ('{"reason": "x", "score": 3}', 9),
        ('<think>so</think>```json\n{"reason": "x", "score": 3}\n```', 9),
        ('{"reason": "it opens <think> and does not close it", "score": 3}', None),
    ],
)
def test_an_answer_that_is_whole_keeps_its_score(text, cut_at):
    """Catches a judgement that is lost because it ends at the limit, or is about the form of thoughts."""
    assert judgement_in(text, SCALE, cut_at=cut_at).score == 3


def test_the_schema_has_the_scale():
    """Catches a schema that allows a score which the reader refuses."""
    assert schema(SCALE)["properties"]["score"] == {"type": "number", "minimum": 0.0, "maximum": 10.0}


def test_a_question_has_rubric_prompt_completion_and_columns():
    """Catches a name that is not filled, and text of a completion that is read as a template."""
    config = JudgeConfig(self=True, rubric="Full marks for {answer}.", scale=(0, 10))
    questions = Questions(config)
    assert questions.required_columns == ("answer",)
    text = questions.text({"answer": 7}, "2 + 5?", "It is {answer}, {rubric} }{")
    assert "Full marks for 7." in text
    assert "2 + 5?" in text
    assert "It is {answer}, {rubric} }{" in text
    assert "from 0, if" in text
    assert "<reference_answer>\n7\n" in text


def test_rows_may_have_a_rubric_of_their_own():
    """Catches a rubric of a row that is ignored, or read as a template."""
    questions = Questions(JudgeConfig(self=True, rubric="Usual.", rubric_column="criteria"))
    assert questions.required_columns == ("criteria",)
    own = questions.text({"criteria": ["names {the} capital"]}, "q", "c")
    assert '["names {the} capital"]' in own
    assert "Usual." not in own
    assert "Usual." in questions.text({"criteria": None}, "q", "c")


@pytest.mark.parametrize("empty", [None, "", " \n", [], {}])
def test_an_empty_rubric_or_answer_of_a_row_is_none(empty):
    """The rubric of a row with an empty list was `[]`, and its reference an empty text, by which to score."""
    questions = Questions(JudgeConfig(self=True, rubric="Usual.", rubric_column="criteria"))
    asked = questions.text({"criteria": empty, "answer": empty}, "p", "c")
    assert "<rubric>\nUsual.\n</rubric>" in asked
    assert "<reference_answer>" not in asked
    assert "<reference_answer>\n0\n" in questions.text({"criteria": empty, "answer": 0}, "p", "c")


def test_a_template_is_the_whole_question(tmp_path):
    """Catches a template whose names are not filled, or beside which the built-in question stays."""
    path = tmp_path / "judge.txt"
    path.write_text("{rubric}|{prompt}|{completion}|{level}|{low}-{high}|{{}}")
    questions = Questions(JudgeConfig(self=True, rubric="R", template=str(path), scale=(1, 5)))
    assert questions.required_columns == ("level",)
    dialogue = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = questions.text({"level": 3}, dialogue, "Hello")
    assert text == "R|[system]\nBe brief.\n\n[user]\nHi|Hello|3|1-5|{}"
    with pytest.raises(ValueError, match="names the column 'level', which must not be null"):
        questions.text({"level": None}, "q", "c")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{prompt}", r"must name \{completion\}, which is judged"),
        ("{completion} {", "must have braces around the names"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template, message, tmp_path):
    """Catches a template that is found out in the middle of a run."""
    path = tmp_path / "judge.txt"
    if template is not None:
        path.write_text(template)
    with pytest.raises(ValueError, match=message):
        Questions(JudgeConfig(self=True, template=str(path)))


def test_pictures_are_no_text():
    """Catches a judge that judges answers to pictures which it did not see."""
    seen = [{"role": "user", "content": [{"type": "image", "image": object()}]}]
    with pytest.raises(ValueError, match="a judge reads texts"):
        prompt_text(seen)


# ------------------------------------------------------------------------------------------------ the cache


def test_a_judgement_is_kept(tmp_path):
    """Catches a cache that loses or mixes entries, or leaves drafts."""
    cache = JudgementCache(tmp_path)
    one, two = key_of("a", 1), key_of("a", 2)
    cache.put(one, Judgement(0.25, "because"))
    assert JudgementCache(tmp_path).get(one) == Judgement(0.25, "because")
    assert cache.get(two) is None
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_judgements_of_old_weights_go(tmp_path):
    """Catches folders of weights that are never removed, one that is in use and is, and the judgements of a
    server that go with them."""
    cache, key = JudgementCache(tmp_path), key_of("a")
    cache.most_weights = 2
    cache.put(key, Judgement(0.0))
    *old, newest = [f"{number:016x}" for number in range(3)]
    for weights in (*old, old[0], newest):
        cache.begin(weights)
        cache.put(key, Judgement(1.0), weights)
    assert cache.get(key) == Judgement(0.0)
    found = [cache.get(key, weights) for weights in (*old, newest)]
    assert found == [Judgement(1.0), None, Judgement(1.0)]
    assert {path.name for path in tmp_path.iterdir()} == {old[0], newest, key[:2]}


@pytest.mark.parametrize("damage", [b"", b"{", b'{"score": 1.0, "reason": null, "sha256": "x"}', b"[" * 9999])
def test_a_damaged_entry_is_reported_and_asked_again(damage, tmp_path, caplog):
    """Catches a damaged file that ends the run, or that is taken for a judgement."""
    cache, key = JudgementCache(tmp_path), key_of("a")
    cache.put(key, Judgement(0.25))
    (path,) = (each for each in tmp_path.rglob("*.json"))
    path.write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        assert cache.get(key) is None
    assert cache.damaged == 1
    assert "is damaged" in caplog.text
    cache.put(key, Judgement(0.5))
    assert cache.get(key) == Judgement(0.5)


def test_a_full_disk_costs_a_warning(tmp_path, caplog, monkeypatch):
    """Catches a judgement, or the numbers of a budget, that end the run because they cannot be written."""

    def full(path, text):
        raise OSError(28, "No space left on device")

    cache, key = JudgementCache(tmp_path / "judgements"), key_of("a")
    spending = Spending(JudgeBudget(requests=3), tmp_path / "spent.json")
    with monkeypatch.context() as patched:
        patched.setattr("quatrain.reward.judge.cache.write_at_once", full)
        patched.setattr("pathlib.Path.mkdir", lambda *args, **options: full(None, ""))
        cache.begin("0" * 16)
        for _ in range(2):
            cache.put(key, Judgement(0.25))
            assert spending.reserve(1)
            spending.send()
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "judgements cannot be written",
        "what the judge has used of its budget cannot be written",
    ]
    cache.put(key, Judgement(0.25))
    assert cache.get(key) == Judgement(0.25)
    assert spending.reserve(1)
    spending.send()
    assert json.loads((tmp_path / "spent.json").read_text())["requests"] == 3


def test_a_cache_that_is_a_file_is_refused(tmp_path):
    """Catches a traceback at the first question."""
    (tmp_path / "kept.json").write_text("{}")
    with pytest.raises(ValueError, match=r"kept\.json is a file; name another place"):
        Judge(JudgeConfig(base_url="http://localhost:1/v1", cache=str(tmp_path / "kept.json")))


def test_a_changed_score_is_damage(tmp_path):
    """Catches an entry whose number was changed on the disk."""
    cache, key = JudgementCache(tmp_path), key_of("a")
    cache.put(key, Judgement(0.25))
    (path,) = (each for each in tmp_path.rglob("*.json"))
    path.write_text(path.read_text().replace("0.25", "0.75"))
    assert cache.get(key) is None


def _put_many(folder):
    cache = JudgementCache(folder)
    for _ in range(50):
        for number in range(4):
            cache.put(key_of(number), Judgement(float(number), "x" * 5000))


def test_processes_share_a_folder(tmp_path):
    """Catches writes that a reader sees in part."""
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_put_many, args=(tmp_path,)) for _ in range(2)]
    for each in writers:
        each.start()
    cache = JudgementCache(tmp_path)
    while any(each.is_alive() for each in writers):
        for number in range(4):
            assert cache.get(key_of(number)) in (None, Judgement(float(number), "x" * 5000))
    assert cache.damaged == 0
    assert [each.exitcode for each in writers] == [0, 0]


# ------------------------------------------------------------------------------------------------ the limits


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    async def sleep(self, seconds):
        self.now += seconds


def _sent(rpm, tpm, tokens, pause=None):
    clock = Clock()

    async def run():
        limits, times = Limits(rpm, tpm, clock=clock, sleep=clock.sleep), []
        for number, each in enumerate(tokens):
            if pause is not None and number == pause[0]:
                limits.pause(pause[1])
            await limits.admit(each)
            times.append(clock.now)
        return times

    return asyncio.run(run())


def test_requests_a_minute():
    """Catches a limit that is exceeded within some 60 seconds, as by a bucket that was full."""
    times = _sent(3, None, [1] * 8)
    assert times == [0, 0, 0, 60, 60, 60, 120, 120]


def test_tokens_a_minute():
    """Catches tokens that are not counted, and a request that waits for ever because it is large."""
    assert _sent(None, 100, [60, 40, 50, 60, 500]) == [0, 0, 60, 120, 180]


def test_a_server_that_asks_for_a_pause_gets_one():
    """Catches requests that are sent while Retry-After runs."""
    assert _sent(None, None, [1, 1, 1], pause=(1, 7.5)) == [0, 7.5, 7.5]


def test_tokens_are_corrected_by_the_answer():
    """Catches a limit that goes on counting an estimate that was too high."""
    clock = Clock()

    async def run():
        limits = Limits(None, 100, clock=clock, sleep=clock.sleep)
        sent = await limits.admit(90)
        sent.tokens = 10
        await limits.admit(90)

    asyncio.run(run())
    assert clock.now == 0


def test_a_budget_holds_also_over_a_resumption(tmp_path):
    """Catches a budget that begins anew, and requests in flight that are not counted."""
    path = tmp_path / "spent.json"
    spending = Spending(JudgeBudget(requests=3, tokens=100), path)
    assert spending.reserve(60)
    assert not spending.reserve(60)
    assert spending.reserve(40)
    spending.send()
    killed = Spending(JudgeBudget(requests=3, tokens=100), path)
    assert (killed.requests, killed.tokens) == (1, 0)
    spending.settle(60, 10, sent=True)
    spending.send()
    spending.settle(40, 5, sent=True)
    assert spending.reserve(80)
    assert not spending.reserve(1)
    spending.settle(80, 0, sent=False)
    again = Spending(JudgeBudget(requests=3, tokens=100), path)
    assert (again.requests, again.tokens) == (2, 15)
    assert again.reserve(80)
    assert not again.reserve(1)
    assert str(again) == "2 of 3 requests and 15 of 100 tokens"
    path.write_text(json.dumps({"requests": 1}))
    with pytest.raises(ValueError, match="must say what the judge has used"):
        Spending(JudgeBudget(requests=3), path)
