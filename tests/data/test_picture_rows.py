"""Data sets with pictures: what a row becomes, and what is left out, refused or passed on."""

import json
import logging
import pickle
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from rollouts import make_rollouts
from seeing import encoded, seeing_tokenizer, shades, square

from quatrain.config.schema import DataConfig, RewardConfig
from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.examples import load_examples
from quatrain.data.expansion import BLIND
from quatrain.data.preferences import load_judged, load_pairs
from quatrain.data.prompts import load_prompts
from quatrain.data.token_table import TokenRow
from quatrain.reward.calls import Samples
from quatrain.reward.scorer import RewardScorer
from quatrain.types.batches import Prompt
from quatrain.types.pictures import TEXT, Picture, PicturesInJson

IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def tokenizer():
    return seeing_tokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a picture for each shade 10, 20, 30 of `square`, and one that is broken."""
    for shade in (10, 20, 30):
        square(shade).save(tmp_path / f"{shade}.png")
    (tmp_path / "broken.png").write_bytes(encoded(square(40))[:-30])
    return tmp_path


@pytest.fixture
def written(folder: Path):
    """The path of a data set with some rows, beside the pictures."""

    def write(*rows, name="rows.jsonl"):
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
        return str(folder / name)

    return write


def say(text):
    return {"type": "text", "text": text}


def user(content):
    return [{"role": "user", "content": content}]


def load(spec, tokenizer, rows=None, **data):
    return load_prompts(
        spec, DataConfig(**data), tokenizer, seed=0, **({} if rows is None else {"rows": rows})
    )


def seen(prompt):
    """The shades of the pictures of a prompt, each once for each placeholder."""
    assert prompt.pictures is None or len(prompt.pictures) == len(prompt.input_ids)
    return [shade for shade in shades(prompt.pictures, len(prompt.input_ids)) if shade is not None]


def test_all_forms_of_rows_have_their_pictures_in_order(written, tokenizer) -> None:
    spec = written(
        {"prompt": user([{**IMAGE, "path": "10.png"}, say("a"), {**IMAGE, "image": "20.png"}])},
        {"prompt": user([IMAGE, say("a"), IMAGE]), "images": ["20.png", "10.png"]},
        {"prompt": user("<image>a<image>"), "images": ["20.png", "30.png"]},
        {"prompt": user("a"), "images": ["30.png"]},
        {"prompt": user("a"), "images": None},
        {"messages": [*user("a"), {"role": "assistant", "content": "b"}], "image": "30.png"},
    )
    rows = [json.loads(line) for line in Path(spec).read_text().splitlines()]
    prompts = load(written(*rows[:-1]), tokenizer).head()
    expected = [(10, 20), (20, 10), (20, 30), (30,), ()]
    assert [seen(prompt) for prompt in prompts] == [[s for s in each for _ in range(4)] for each in expected]
    assert [len(prompt.columns["images"]) for prompt in prompts] == [2, 2, 2, 1, 0]
    [last] = load(written(rows[-1]), tokenizer).head()
    assert seen(last) == [30] * 4
    assert last.columns["images"] == [last.columns["image"]]
    assert [part["type"] for part in last.text[0]["content"]] == ["image", "text"]


def test_a_question_gets_the_pictures_of_its_row(written, tokenizer) -> None:
    spec = written({"problem": "<image>Which?", "images": ["10.png"]}, {"problem": "None?", "images": []})
    found, none = load(spec, tokenizer, question_column="problem", system_prompt="s").head()
    assert seen(found) == [10] * 4
    assert [message["role"] for message in found.text] == ["system", "user"]
    assert none.pictures is None
    assert none.text[1]["content"] == "None?"
    plain = written({"prompt": "Which?", "images": ["10.png"]})
    with pytest.raises(
        ValueError, match=r"row 1: a prompt with pictures must be messages, .*question_column"
    ):
        load(plain, tokenizer)
    assert seen(load(plain, tokenizer, system_prompt="s").head()[0]) == [10] * 4


def test_bytes_and_pil_pictures_of_other_sources(folder: Path, tokenizer) -> None:
    content = encoded(square(50))
    table = pyarrow.table({"prompt": [user("<image>a")], "images": [[{"bytes": content, "path": None}]]})
    parquet.write_table(table, folder / "rows.parquet")
    given = [{"prompt": user("a"), "image": Image.open(folder / "20.png")}]
    [stored] = load(str(folder / "rows.parquet"), tokenizer).head()
    [shown] = load("given", tokenizer, rows={"given": given}).head()
    assert (seen(stored), seen(shown)) == ([50] * 4, [20] * 4)
    path = [{"prompt": user("a"), "image": "20.png"}]
    with pytest.raises(ValueError, match=r"given, row 1: a path of a picture must be below a folder"):
        load("given", tokenizer, rows={"given": path})
    [found] = load("given", tokenizer, rows={"given": path}, image_root=str(folder)).head()
    assert seen(found) == [20] * 4


def test_data_sets_of_the_hub_keep_the_bytes_of_their_pictures(folder: Path, tokenizer) -> None:
    datasets = pytest.importorskip("datasets")
    content = encoded(square(50))
    some = datasets.Features(
        {
            "prompt": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "images": datasets.List(datasets.Image()),
            "image": datasets.Image(),
        }
    )
    row = {"prompt": user("<image>a"), "images": [{"bytes": content, "path": None}], "image": None}
    found = datasets.Dataset.from_list([row], features=some)
    [prompt] = load("given", tokenizer, rows={"given": found}).head()
    assert [each.encoded for each in prompt.columns["images"]] == [content]


def test_a_bad_picture_ends_the_run_or_its_row_is_left_out_and_counted(
    written, tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"prompt": user("a"), "images": ["10.png"]}
    bad = [
        {"prompt": user("a"), "images": ["broken.png"]},
        {"prompt": user("a"), "images": ["missing.png"]},
        {"prompt": user("<image><image>"), "images": ["10.png"]},
        {"prompt": user("a <|image_pad|>"), "images": ["10.png"]},
        {"prompt": user("a <|image_pad|>"), "images": []},
    ]
    for row, reason in zip(
        bad, ("must be a whole picture", "no file", "2 times <image>", "must not have", "must not have")
    ):
        with pytest.raises(ValueError, match=rf"rows\.jsonl, row 2: .*{reason}.*") as caught:
            load(written(good, row), tokenizer)
        assert "or set data.on_bad_image to skip, which leaves such rows out" in str(caught.value)
    with caplog.at_level(logging.WARNING, "quatrain"):
        source = load(written(bad[0], good, *bad[1:]), tokenizer, on_bad_image="skip")
    assert [seen(prompt) for prompt in source.head()] == [[10] * 4]
    assert (source.unseen, source.skipped, source.filtered) == (5, 0, 0)
    assert "5 rows are left out, because a picture of theirs cannot be used" in source.warnings[-1]
    assert "rows.jsonl, row 1 is left out: 'broken.png' must be a whole picture" in caplog.text
    with pytest.raises(ValueError, match=r"data\.on_bad_image=skip leaves out every row"):
        load(written(bad[0]), tokenizer, on_bad_image="skip")
    [lazy] = load(written(bad[0]), tokenizer, verify_images=False).head()
    assert len(lazy.pictures.used) == 1
    # What is wrong with the messages is no matter of the picture.
    with pytest.raises(ValueError, match="must have a `role`"):
        load(
            written(good, {"prompt": [*user("a"), {"content": "b"}], "images": ["10.png"]}),
            tokenizer,
            on_bad_image="skip",
        )


def test_answers_of_which_no_picture_can_be_used_are_said_to_have_none(written, tokenizer) -> None:
    """The fault: with data.on_bad_image=skip and a wrong folder of pictures, the error named the flags of 0
    rows (weight, train), which no row had."""
    spec = written({"prompt": user("a"), "completion": "b", "images": ["missing.png"]})
    config = DataConfig(on_bad_image="skip")
    with pytest.raises(ValueError, match=r"no row is left: data\.on_bad_image=skip leaves out every row"):
        load_examples(spec, config, tokenizer, train_on="completion", seed=0)


def test_long_prompts_with_pictures_are_skipped_and_never_cut(written, tokenizer) -> None:
    spec = written({"prompt": user("a" * 99), "images": ["10.png"]}, {"prompt": user("b"), "images": None})
    [short, long] = sorted(load(spec, tokenizer).head(), key=lambda prompt: len(prompt.input_ids))
    assert len(long.input_ids) == len(short.input_ids) + 98 + 6
    limit = len(long.input_ids) - 1
    assert load(spec, tokenizer, max_prompt_length=limit + 1).skipped == 0
    assert load(spec, tokenizer, max_prompt_length=limit, on_long_prompt="skip").skipped == 1
    with pytest.raises(ValueError, match=r"data\.on_long_prompt to skip$"):
        load(spec, tokenizer, max_prompt_length=limit)
    with pytest.raises(ValueError, match=r"truncate_left must not be set with pictures, .* row 1 has one"):
        load(spec, tokenizer, on_long_prompt="truncate_left")


def test_a_model_that_does_not_see_refuses_pictures(written, folder: Path) -> None:
    blind = builtin_tokenizer()
    rows = [{"prompt": user("a"), "image": {"bytes": encoded(square(10))}}]
    with pytest.raises(ValueError, match=rf"given, row 1: {BLIND[:40]}"):
        load("given", blind, rows={"given": rows})
    with pytest.raises(ValueError, match=rf"row 1: {BLIND[:40]}"):
        load(written({"prompt": user([{**IMAGE, "path": "10.png"}, say("a")])}), blind)
    for prompt in (user("<image>a"), "<image>a"):
        with pytest.raises(ValueError, match=rf"row 1: {BLIND[:40]}"):
            load(written({"prompt": prompt, "images": ["10.png"]}), blind)
    [prompt] = load(written({"prompt": user("a"), "image": "python:3.11"}), blind).head()
    assert prompt.columns == {"image": "python:3.11"}


def test_digests_tell_pictures_apart(written, tokenizer) -> None:
    def digests(*shades):
        rows = [{"prompt": user([{**IMAGE, "path": f"{shade}.png"}])} for shade in shades]
        return load(written(*rows), tokenizer)

    one, other = digests(10, 20), digests(20, 10)
    assert one.digests() == digests(10, 20).digests()
    assert one.digests().keys() == other.digests().keys()
    assert one.digests()["the pictures of the prompts"] != other.digests()["the pictures of the prompts"]
    assert one.digests()["the tokens of the prompts"] == other.digests()["the tokens of the prompts"]
    text = load(written({"prompt": user("a")}), tokenizer)
    assert "the pictures of the prompts" not in text.digests()
    assert list(text.head()[0].columns) == []


def test_a_row_with_pictures_reaches_other_processes_whole(written, tokenizer) -> None:
    source = load(written({"prompt": user("<image>a"), "images": ["10.png"], "n": 3}), tokenizer)
    [row] = source._table.take([0])
    content = json.dumps(row.packed(), default=PicturesInJson().written)
    again = TokenRow.unpacked(json.loads(content, object_hook=PicturesInJson().read))
    assert content.count(json.loads(content)[3]["images"][0]["quatrain.picture"]) == 3
    assert again.text == row.text
    assert again.columns == row.columns
    np.testing.assert_array_equal(again.pictures.ids, row.pictures.ids)
    [picture] = again.pictures.used
    assert picture.source == encoded(square(10))  # the bytes: another machine may not have the file


def test_reward_functions_get_pil_pictures_each_once(folder: Path) -> None:
    pictures = [Picture.of(encoded(square(shade)), (16, 16)) for shade in (10, 20)]
    file = Picture.of(folder / "30.png", (16, 16))
    parts = user([{**IMAGE, "image": pictures[0]}, say("a")])
    columns = {
        "images": [[pictures[0]], [pictures[0], pictures[1]], []],
        "image": [file, None, "name"],
        "messages": [parts, parts, user("b")],
    }
    batch = make_rollouts(["x", "y", "z"], [tuple(parts), "plain", tuple(user("b"))], **columns)
    given = pickle.loads(pickle.dumps(Samples.of(batch).arguments))  # as a worker gets them
    assert [[each.getpixel((0, 0))[0] for each in row] for row in given["images"]] == [[10], [10, 20], []]
    assert isinstance(given["images"][0][0], Image.Image)
    assert given["images"][0][0] is given["images"][1][0] is given["messages"][1][0]["content"][0]["image"]
    assert given["prompts"][0][0]["content"][0]["image"] is given["images"][0][0]
    assert given["prompts"][1:] == ["plain", user("b")]
    assert given["image"][0].getpixel((0, 0)) == (30, 0, 0)
    assert given["image"][1:] == [None, "name"]


def test_reward_functions_are_tried_with_pil_pictures(folder: Path) -> None:
    """The fault: before the run began, a right function failed on what is no PIL picture."""
    red = Picture.of(encoded(square(10)), (16, 16))
    columns = {"images": [red], "answer": "a"}
    prompt = Prompt(0, np.ones(1, np.int32), tuple(user([{**IMAGE, "image": red}, say("a")])), columns)
    seen = []

    def looks(completions, images, prompts, **rest):
        shown = [*(each for row in images for each in row), *(p[0]["content"][0]["image"] for p in prompts)]
        seen.extend(each.getpixel((0, 0))[0] for each in shown)
        return [0.0] * len(completions)

    rewards = RewardScorer(RewardConfig(functions={"looks": 1.0}), functions={"looks": looks})
    assert rewards.try_on({None: prompt}, [1]) == []
    assert seen == [10] * 4


def test_examples_have_their_pictures_and_train_no_placeholder(written, tokenizer) -> None:
    dialogue = [
        *user([{**IMAGE, "path": "10.png"}, say("a")]),
        {"role": "assistant", "content": "first"},
        *user([say("b"), {**IMAGE, "path": "20.png"}]),
        {"role": "assistant", "content": "second"},
    ]

    def example(row, train_on, **settings):
        spec = written(row)
        source = load_examples(spec, DataConfig(), tokenizer, train_on=train_on, seed=0, **settings)
        return source.head()[0] if len(source) else None

    def trained(example):
        return tokenizer.decode(example.input_ids[example.scored])

    both = example({"messages": dialogue}, "assistant")
    assert seen(both) == [10] * 4 + [20] * 4
    assert trained(both) == "first<|im_end|>second<|im_end|>"
    last = example({"messages": dialogue}, "completion")
    assert (seen(last), trained(last)) == ([10] * 4 + [20] * 4, "second<|im_end|>")
    np.testing.assert_array_equal(last.input_ids, both.input_ids)
    whole = example({"messages": dialogue}, "all")
    assert seen(whole) == seen(both)
    assert not whole.scored[whole.pictures.ids != TEXT].any()
    assert whole.scored.sum() == len(whole.input_ids) - 1 - 8
    row = {"prompt": user("<image>a"), "images": ["30.png"], "completion": "yes"}
    one = example(row, "completion")
    assert (seen(one), trained(one)) == ([30] * 4, "yes<|im_end|>")
    limit = {"most_tokens": {"the limit": len(one.input_ids) - 2}, "on_long": "truncate"}
    cut = example(row, "completion", **limit)
    assert (seen(cut), trained(cut)) == ([30] * 4, "ye"[: len(cut.input_ids) - len(one.input_ids) + 4])
    # Every token is trained, so that the end may be within a picture: the row is left out.
    with pytest.raises(ValueError, match="no row is left"):
        example(row, "all", **limit)
    wrong = written({**row, "images": []})
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 1: .* 1 times <image> and 0 pictures"):
        load_examples(wrong, DataConfig(), tokenizer, train_on="completion", seed=0)


def test_preferences_have_no_pictures(written, tokenizer) -> None:
    pair = {"prompt": user("a"), "chosen": "b", "rejected": "c", "images": ["10.png"]}
    judged = {"prompt": user("a"), "completion": "b", "label": True, "images": ["10.png"]}
    for load_some, row in ((load_pairs, pair), (load_judged, judged)):
        with pytest.raises(ValueError, match="row 1: preferences are trained on texts alone"):
            load_some(written(row), DataConfig(), tokenizer, seed=0)
        assert len(load_some(written(row | {"images": []}), DataConfig(), tokenizer, seed=0)) == 1
