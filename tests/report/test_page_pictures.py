import base64
import html
import io
import logging
import re
from dataclasses import replace

import numpy as np
import pytest
from page_runs import episode_sample, make_run, sample, turn, unpacked, write_rows
from PIL import Image
from rich.console import Console

from quatrain.config.schema import LoggingConfig
from quatrain.report import page_pictures
from quatrain.report.page import Page, shell
from quatrain.report.page_samples import read_samples
from quatrain.report.print_samples import print_samples
from quatrain.report.writer import Report
from quatrain.run.pictures import named, smaller, write_picture
from quatrain.run.run_dir import RunDir
from quatrain.run.samples import evaluation_sample, training_sample, transcript
from quatrain.types.batches import AdvantagedBatch, RewardedBatch, RolloutBatch
from quatrain.types.pictures import Picture, Pictures


def encoded(size, colour="red", form="PNG"):
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, form)
    return out.getvalue()


def picture(size=(640, 480), colour="red"):
    return Picture.of(encoded(size, colour), size)


def part(one, **more):
    return {"type": "image", "picture": one.name, "size": list(one.size), **more}


ONE, TWO = picture(), picture((40, 30), "blue")
MARK, OTHER = f"[image 640x480 {ONE.name[:6]}]", f"[image 40x30 {TWO.name[:6]}]"
WORDS = {"type": "text", "text": "Which colour? "}
QUESTION = ({"role": "user", "content": [WORDS, {"type": "image", "image": ONE}]},)
WRITTEN = ({"role": "user", "content": [WORDS, part(ONE)]},)


def batch(prompt=QUESTION, columns=None):
    """Two completions of a prompt whose second and third token stand for a picture."""
    ids = np.array([[1, 9, 9, 4, 5]] * 2, np.int32)
    sampled = np.arange(5) >= 3
    completion = np.stack([sampled, sampled])
    rollouts = RolloutBatch(
        input_ids=ids,
        attention_mask=ids > 0,
        completion_mask=completion,
        rollout_logprobs=np.where(completion, -0.5, 0).astype(np.float32),
        policy_version=np.where(completion, 0, -1).astype(np.int32),
        finish_reason=np.array(["stop", "stop"]),
        group_ids=np.array([7, 7]),
        prompts=(prompt, prompt),
        completions=("red", "blue"),
        columns=columns or {},
        pictures=Pictures(np.where(ids == 9, ONE.id, 0), {ONE.id: ONE, TWO.id: TWO}),
    )
    rewards = np.array([1, 0], np.float32)
    rewarded = RewardedBatch(rollouts, rewards, rewards[None], ("correct",))
    return AdvantagedBatch(rewarded, np.where(completion, [[0.5], [-0.5]], 0).astype(np.float32))


def test_a_record_names_its_pictures_and_has_them_for_the_writer():
    record = training_sample(batch(), 0, step=1)
    assert record["prompt"] == WRITTEN
    assert record["pictures"] == (ONE,), "not the other picture of the batch"
    greedy = evaluation_sample(batch().rewarded, 1, greedy=True, right=None, strict=None)
    assert greedy["pictures"] == (ONE,)
    text_alone = batch()
    rollouts = replace(text_alone.rollouts, pictures=None, prompts=("2+2?",) * 2)
    without = training_sample(
        AdvantagedBatch(replace(text_alone.rewarded, rollouts=rollouts), text_alone.advantages), 0, step=1
    )
    assert "pictures" not in without
    assert without["prompt"] == "2+2?"


def test_pictures_in_texts_and_columns_become_names():
    """Objects would be written as `Picture(id=…)`, and a part with a path would tell where files are."""
    prompt = ({"role": "user", "content": [{"type": "image", "path": "/home/me/a.png", "image": ONE}]},)
    columns = {"images": ([ONE],) * 2, "maps": ((ONE, TWO),) * 2, "n": (3, 4)}
    record = training_sample(batch(prompt, columns), 1, step=1)
    assert record["prompt"] == ({"role": "user", "content": [part(ONE)]},)
    assert record["columns"] == {"maps": [part(ONE), part(TWO)], "n": 4}
    text = training_sample(batch(prompt, {"images": (["a.png"],) * 2}), 0, step=1)
    assert text["columns"] == {"images": ["a.png"]}
    assert named({"a": [1, None]}) == {"a": [1, None]}


def test_turns_of_an_episode_name_theirs():
    looked = {"role": "tool", "content": [{"type": "image", "image": TWO}, {"type": "text", "text": "seen"}]}
    said = {"role": "assistant", "content": "blue"}
    columns = {
        "messages": ((*QUESTION, looked, said),) * 2,
        "environment_reward": (1.0, 1.0),
        "turn_rewards": ((1.0,),) * 2,
    }
    turns = training_sample(batch(QUESTION, columns), 0, step=1)["turns"]
    assert [each["role"] for each in turns] == ["tool", "assistant"], "the prompt is not repeated"
    assert turns[0]["content"] == [part(TWO), {"type": "text", "text": "seen"}]
    assert transcript(turns) == f"[tool]\n{OTHER}seen\n\n[assistant (reward 1)]\nblue"


def test_the_run_folder_gets_each_picture_once_and_small(tmp_path, caplog):
    run = RunDir.create(tmp_path, "first")
    report = Report(run, LoggingConfig(), redactor=lambda: lambda text: text)
    report.samples(1, batch())
    file = run.pictures / f"{ONE.name}.webp"
    assert [path.name for path in run.pictures.iterdir()] == [file.name]
    with Image.open(file) as image:
        assert (image.format, image.size) == ("WEBP", (512, 384))
    written = file.stat().st_mtime_ns
    report.evaluation(2, [evaluation_sample(batch().rewarded, 0, greedy=True, right=None, strict=None)])
    assert file.stat().st_mtime_ns == written
    (first, *_) = read_samples(run.samples / "step_000001.jsonl").samples
    assert first["prompt"][0]["parts"] == ["Which colour? ", {"picture": ONE.name, "size": [640, 480]}]
    assert "pictures" not in (run.samples / "eval_000002.jsonl").read_text()

    broken = Picture.of(encoded((640, 480))[:60], (640, 480))
    gone = batch()
    lost = Pictures(np.where(gone.rollouts.pictures.ids, broken.id, 0), {broken.id: broken})
    rollouts = replace(gone.rollouts, pictures=lost)
    with caplog.at_level(logging.WARNING, "quatrain"):
        report.samples(3, AdvantagedBatch(replace(gone.rewarded, rollouts=rollouts), gone.advantages))
    report.close()
    assert (run.samples / "step_000003.jsonl").is_file(), "a picture that cannot be read costs no samples"
    assert "pictures cannot be written" in run.log.read_text()


def test_drawings_keep_their_pixels(tmp_path):
    """A lossy file of 32 x 32 pixels would show a person other shapes than the model saw."""
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    write_picture(tmp_path, one := Picture.of(out.getvalue(), (32, 32)))
    kept = (tmp_path / f"{one.name}.webp").read_bytes()
    for file in (kept, smaller(kept, 256)):
        with Image.open(io.BytesIO(file)) as image:
            assert (np.asarray(image) == pixels).all()


def run_with(tmp_path, rows, pictures=(ONE,)):
    folder = tmp_path / "run"
    write_rows(folder / "samples" / "step_000001.jsonl", rows)
    write_rows(folder / "metrics.jsonl", [{"step": 1, "reward/mean": 1.0}])
    for each in pictures:
        write_picture(folder / "pictures", each)
    return folder


def page_of(folder, tmp_path):
    Page([folder]).write(output := tmp_path / "out.html")
    page = output.read_text(encoding="utf-8")
    found = dict(re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', page))
    return found, unpacked(found["chunk-data"])


def sizes(found):
    opened = {name: Image.open(io.BytesIO(base64.b64decode(text))) for name, text in found.items()}
    return {name: image.size for name, image in opened.items()}


def test_the_page_shows_pictures_beside_completions(tmp_path):
    rows = [
        sample(0, 1.0, prompt=WRITTEN),
        episode_sample(1, 1.0, [turn("tool", [part(TWO)], name="look"), turn("assistant", "blue")]),
    ]
    found, data = page_of(run_with(tmp_path, rows, (ONE, TWO)), tmp_path)
    held = {name: text for name, text in found.items() if name.startswith("picture-")}
    assert sizes(held) == {f"picture-{ONE.name}": (256, 192), f"picture-{TWO.name}": (40, 30)}
    assert data["left_out_pictures"] == 0
    first, second = unpacked(found["chunk-0-step-1"])
    assert first["prompt"][0]["parts"][1] == {"picture": ONE.name, "size": [640, 480]}
    assert first["prompt"][0]["text"] == f"Which colour? {MARK}"
    looked = second["samples"][0]["turns"][0]
    assert (looked["text"], looked["parts"]) == (OTHER, [{"picture": TWO.name, "size": [40, 30]}])


def test_beyond_the_cap_the_pictures_of_the_last_steps_stay(tmp_path, monkeypatch):
    folder = run_with(tmp_path, [sample(0, 1.0, prompt=WRITTEN)], (ONE, TWO))
    later = ({"role": "user", "content": [part(TWO)]},)
    write_rows(folder / "samples" / "step_000002.jsonl", [sample(0, 1.0, prompt=later)])
    small = smaller((folder / "pictures" / f"{TWO.name}.webp").read_bytes(), 256)
    monkeypatch.setattr(page_pictures, "CAP_BYTES", len(small))
    found, data = page_of(folder, tmp_path)
    assert [name for name in found if name.startswith("picture-")] == [f"picture-{TWO.name}"]
    assert data["left_out_pictures"] == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "image", "picture": "../../../etc/passwd", "size": [1, 1]},
        {"type": "image", "picture": f'{ONE.name}"><img src=x>', "size": [1, 1]},
        {"type": "image", "picture": ONE.name, "size": ["<b>", 1]},
        {"type": "image", "picture": ONE.name, "size": [0, -1]},
        {"type": "image", "picture": ONE.name, "size": [True, 1]},
        {"type": "image", "picture": 3, "size": [1, 1]},
        {"type": "image", "picture": ONE.name},
        "text",
        None,
    ],
)
def test_what_is_no_part_with_a_picture_is_text(tmp_path, bad):
    """A file of samples may come from elsewhere: a name must be no path and no markup."""
    row = sample(0, 1.0, prompt=[{"role": "user", "content": [bad, part(ONE)]}])
    write_rows(tmp_path / "step_000001.jsonl", [row])
    ((message,),) = (each["prompt"] for each in read_samples(tmp_path / "step_000001.jsonl").samples)
    assert isinstance(message["parts"][0], str)
    assert message["parts"][1:] == [{"picture": ONE.name, "size": [640, 480]}]


@pytest.mark.parametrize(
    "content", [b"<svg xmlns='http://www.w3.org/2000/svg'><script>1</script></svg>", b"", encoded((9, 9))]
)
def test_a_file_that_is_no_kept_picture_is_not_in_the_page(tmp_path, content):
    folder = run_with(tmp_path, [sample(0, 1.0, prompt=WRITTEN)])
    (folder / "pictures" / f"{ONE.name}.webp").write_bytes(content)
    found, data = page_of(folder, tmp_path)
    assert not any(name.startswith("picture-") for name in found)
    assert data["left_out_pictures"] == 0


def test_a_larger_file_is_not_decoded(tmp_path):
    assert smaller(encoded((513, 1), form="WEBP"), 256) is None
    assert smaller(encoded((512, 1), form="WEBP"), 256) is not None


def test_the_terminal_names_pictures(tmp_path):
    rows = [
        sample(0, 1.0, prompt=WRITTEN),
        episode_sample(1, 1.0, [turn("tool", [part(TWO)], name="look"), turn("assistant", "blue")]),
    ]
    out = io.StringIO()
    print_samples(run_with(tmp_path, rows, ()), Console(file=out, width=100))
    assert f"user\nWhich colour? {MARK}\n" in out.getvalue()
    assert f"tool look\n│ {OTHER}\n" in out.getvalue()


def test_a_page_may_show_its_own_pictures_alone():
    def allowed(page):
        return re.search(r"img-src ([^;]*);", html.unescape(page))[1]

    assert allowed(shell("title")) == "data:"
    assert allowed(shell("title", live=True)) == "data: 'self'"


def test_a_run_without_pictures_embeds_none(tmp_path):
    found, data = page_of(make_run(tmp_path), tmp_path)
    assert not any(name.startswith("picture-") for name in found)
    assert data["left_out_pictures"] == 0
