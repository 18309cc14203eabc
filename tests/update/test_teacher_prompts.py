"""Prompts of the teacher's own: how they are written, that ids are aligned, and what does not go together."""

import dataclasses
from functools import partial

import numpy as np
import pytest
from seeing import prompt_of, seeing_tokenizer, shades, square

from quatrain.config.schema import DataConfig, DistillConfig
from quatrain.data.pictures import PictureReader
from quatrain.data.prompts import load_prompts
from quatrain.data.tokenizer import render
from quatrain.types.pictures import Pictures, joined
from quatrain.types.piece import Piece
from quatrain.types.rollouts import Completion, rollout_batch
from quatrain.update.server_teacher import ServerTeacher
from quatrain.update.teacher import has_teacher
from quatrain.update.teacher_prompts import TeacherPrompts

QUESTION = ({"role": "user", "content": "Tom has 2 coins and finds 3 more. How many now?"},)
WITH_SYSTEM = ({"role": "system", "content": "Be brief."}, *QUESTION)
HINT = "The answer is {answer}."
SOURCE = """
def shown(row):
    *before, last = row["prompt"]
    return [*before, {"role": "user", "content": f"{last['content']} ({row['answer']})"}]

def answered(row):
    return [*row["prompt"], {"role": "assistant", "content": "5"}]

def nothing(row):
    row.get("answer")

def hint(row):
    return row["hint"]
"""


def test_a_text_is_a_system_message_or_the_end_of_one(tokenizer):
    prompts = TeacherPrompts(HINT, tokenizer)
    assert prompts.columns == ("answer",)
    said = {"role": "system", "content": "The answer is 5."}
    assert prompts.text(QUESTION, {"answer": 5}) == (said, *QUESTION)
    both = {"role": "system", "content": "Be brief.\n\nThe answer is 5."}
    assert prompts.text(WITH_SYSTEM, {"answer": "5"}) == (both, *QUESTION)
    assert prompts.text("2 + 3 =", {"answer": "5"}) == "The answer is 5.\n2 + 3 ="
    with pytest.raises(ValueError, match=r"names the column 'answer'; the data has other"):
        prompts.text(QUESTION, {"other": 1})


def test_a_function_of_the_row(tokenizer, tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    prompts = TeacherPrompts(f"{tmp_path}/mine.py:shown", tokenizer)
    assert prompts.columns == ()
    own = np.array(render(tokenizer, QUESTION).ids)
    ids = prompts.tokens(QUESTION, {"answer": 5}, own).ids
    assert "How many now? (5)" in tokenizer.decode(ids)
    wrong = TeacherPrompts(f"{tmp_path}/mine.py:answered", tokenizer)
    with pytest.raises(ValueError, match=r"must end as the policy's.*it ends with .*the policy's with"):
        wrong.tokens(QUESTION, {"answer": 5}, np.array(render(tokenizer, WITH_SYSTEM).ids)[:-1])
    with pytest.raises(ValueError, match="has no attribute 'missing'"):
        TeacherPrompts(f"{tmp_path}/mine.py:missing", tokenizer)
    for name, problem in (
        ("nothing", "ValueError: a prompt must be a string or"),
        ("hint", "KeyError: 'hint'"),
    ):
        broken = TeacherPrompts(f"{tmp_path}/mine.py:{name}", tokenizer)
        with pytest.raises(ValueError, match=rf"distill\.prompt .*mine\.py:{name} must return .*{problem}"):
            broken.tokens(QUESTION, {"answer": 5}, own)


def test_a_path_with_a_space_is_a_function(tokenizer, tmp_path):
    folder = tmp_path / "my dir"
    folder.mkdir()
    (folder / "mine.py").write_text(SOURCE)
    assert TeacherPrompts(f"{folder}/mine.py:hint", tokenizer).text(QUESTION, {"hint": "2 + 3"}) == "2 + 3"
    with pytest.raises(ValueError, match=r"teacher's prompt \(distill\.prompt\) .*no such file"):
        TeacherPrompts("Look into the file solution.py:answer", tokenizer)


@pytest.mark.parametrize(
    "text", ["It is {row.answer}.", "It is {answer }.", "{}", "{answer", "a } b", "{{{answer}}"]
)
def test_braces_are_around_names(tokenizer, text):
    with pytest.raises(ValueError, match=r"distill\.prompt must have braces around the names"):
        TeacherPrompts(text, tokenizer)


def test_literal_braces_are_written_twice(tokenizer):
    prompts = TeacherPrompts("\\boxed{{{answer}}}, not {{x}}", tokenizer)
    assert prompts.columns == ("answer",)
    assert prompts.text("?", {"answer": "{5}"}) == "\\boxed{{5}}, not {x}\n?"


def test_the_prompts_of_all_rows_are_made_before_a_run(tokenizer):
    """The longest is found; a null column is an error of its row, if that row has a teacher."""
    rows = [
        {"prompt": list(QUESTION), "answer": answer, "data_source": source}
        for answer, source in (("5", "math"), ("5" * 40, "math"), (None, "chat"))
    ]
    source = load_prompts("rows", DataConfig(), tokenizer, seed=0, rows={"rows": rows})
    prompts = TeacherPrompts(HINT, tokenizer)
    config = DistillConfig(teacher={"math": "policy", "default": None})
    taught = partial(has_teacher, config)
    own = np.array(render(tokenizer, QUESTION).ids)
    longest = prompts.tokens(QUESTION, {"answer": "5" * 40}, own).ids
    assert prompts.longest("rows", source, taught) == len(longest)
    with pytest.raises(
        ValueError, match=r"rows, row 3: distill\.prompt names the column 'answer', which must"
    ):
        prompts.longest("rows", source, partial(has_teacher, DistillConfig(teacher="policy")))


def test_a_teacher_sees_the_pictures_of_its_prompt_and_of_later_turns():
    """The faults: it reads placeholders as text, or one picture in the places of another."""
    tokenizer = seeing_tokenizer()
    parts = [{"type": "image", "image": square(9)}, {"type": "text", "text": "Which?"}]
    messages = PictureReader().placed([{"role": "user", "content": parts}])
    first = prompt_of(tokenizer, messages)
    later = PictureReader().read(square(5, (24, 16)))
    completion = Completion([60, 61], [-1.0] * 2, [0, 0])
    size = len(first.input_ids) + 2
    new = Pictures.of([None, *[later] * 6, None])
    completion.begin_turn([1] * 8, joined((first.pictures, len(first.input_ids)), (None, 2), (new, 8)))
    completion.append(Piece([62], [-1.0], [0]), 0)
    first = dataclasses.replace(first, columns={"answer": "red"})
    rollouts = rollout_batch([(first, completion)], tokenizer, {})
    prompts = TeacherPrompts(HINT, tokenizer)
    for taught in (True, False):
        table = prompts.table(rollouts, [taught])
        width = table.input_ids.shape[1]
        seen = shades(table.pictures[0], width)
        own = shades(rollouts.pictures[0], size + 9)
        assert width > size + 9 if taught else width == size + 9
        assert seen[-11:] == own[-11:] == [None] * 3 + [5] * 6 + [None] * 2
        placed = np.flatnonzero(table.input_ids[0] == tokenizer.expansion.vision.placeholder_id)
        assert [seen[place] for place in placed] == [9] * 4
    server = ServerTeacher.__new__(ServerTeacher)
    with pytest.raises(ValueError, match=r"a teacher on a server \(distill.teacher\) gets no pictures"):
        server.scores(table)
    text = ({"role": "system", "content": parts}, *QUESTION)
    said = prompts.text(text, {"answer": "red"})[0]["content"]
    assert said == [*parts, {"type": "text", "text": "\n\nThe answer is red."}]


def _with_prompts(batch, tokenizer):
    """`batch` with real prompts before its completions, and answers as a column."""
    r, rows = batch.rewarded.rollouts, len(batch.rewarded.rollouts)
    starts = r.completion_mask.argmax(axis=1)
    texts = tuple((QUESTION, WITH_SYSTEM)[int(group) % 2] for group in r.group_ids)
    fronts = [np.array(render(tokenizer, text).ids, np.int32) for text in texts]
    pieces = [
        (front, r.input_ids[row, starts[row] : r.lengths[row]], row) for row, front in enumerate(fronts)
    ]
    width = max(len(front) + len(rest) for front, rest, _ in pieces)
    names = ("input_ids", "attention_mask", "completion_mask", "rollout_logprobs")
    made = {name: np.zeros((rows, width), getattr(r, name).dtype) for name in names}
    made["policy_version"] = np.full((rows, width), -1, np.int32)
    for front, rest, row in pieces:
        first, end = len(front), len(front) + len(rest)
        made["input_ids"][row, :end] = np.concatenate([front, rest])
        made["attention_mask"][row, :end] = True
        for name in ("completion_mask", "rollout_logprobs", "policy_version"):
            made[name][row, first:end] = getattr(r, name)[row, starts[row] : r.lengths[row]]
    columns = {"answer": tuple(str(group % 7) for group in r.group_ids)}
    return dataclasses.replace(r, **made, prompts=texts, columns=columns)


@pytest.mark.parametrize("seed", range(3))
def test_every_token_comes_back_to_its_place(tokenizer, make_batch, seed):
    """Given tokens between sampled ones are read and not scored; the tokens are the policy's, id by id."""
    rollouts = _with_prompts(make_batch(seed, holes=True), tokenizer)
    prompts = TeacherPrompts(HINT, tokenizer)
    table = prompts.table(rollouts, [True] * len(rollouts))
    scored = rollouts.completion_mask.any(axis=1)
    assert (table.lengths[scored] > rollouts.lengths[scored]).all()
    for row in np.flatnonzero(scored):
        start = rollouts.completion_mask[row].argmax()
        rest = rollouts.input_ids[row, start : rollouts.lengths[row]]
        ids = table.input_ids[row, : table.lengths[row]]
        np.testing.assert_array_equal(ids[-len(rest) :], rest)
        before = tokenizer.decode(ids[: -len(rest)])
        assert f"The answer is {rollouts.columns['answer'][row]}." in before
    values = np.where(table.completion_mask, table.input_ids, 0).astype(np.float32)
    expected = np.where(rollouts.completion_mask, rollouts.input_ids, 0)
    np.testing.assert_array_equal(prompts.back(values, table, rollouts), expected)


def test_rows_without_a_teacher_need_no_prompt_of_its_own(tokenizer, make_batch):
    rollouts = _with_prompts(make_batch(0), tokenizer)
    scored = rollouts.completion_mask.any(axis=1)
    row = int(scored.argmax())
    answers = tuple(None if each == row else "5" for each in range(len(rollouts)))
    rollouts = dataclasses.replace(rollouts, columns={"answer": answers})
    table = TeacherPrompts(HINT, tokenizer).table(rollouts, [each != row for each in range(len(rollouts))])
    np.testing.assert_array_equal((table.lengths > rollouts.lengths)[scored], np.flatnonzero(scored) != row)
    length = rollouts.lengths[row]
    np.testing.assert_array_equal(table.input_ids[row, :length], rollouts.input_ids[row, :length])
