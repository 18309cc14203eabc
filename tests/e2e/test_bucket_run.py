"""A whole run whose data and checkpoints are in a bucket in memory, and whose folder is lost on the way."""

import json
import shutil

import pytest
from given_runs import given_run
from object_store import buckets_in_memory
from runs import interrupted_after, steady_metrics
from typer.testing import CliRunner

from quatrain.cli.main import app
from quatrain.loop.train import train
from quatrain.run.run_dir import checkpoint_steps
from quatrain.update.supervised import GivenLearner
from quatrain.weights.load_model import load_model

pytestmark = pytest.mark.usefixtures("narrow_model")
STORE = "s3://bucket/runs/cut"


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    with buckets_in_memory(tmp_path_factory.mktemp("cache")) as made:
        yield made


@pytest.fixture(scope="module")
def runs(objects, tmp_path_factory):
    """(folder, a run with local files, the same with a bucket, which goes on after its folder is lost)."""
    folder = tmp_path_factory.mktemp("runs")
    whole = train(given_run(folder, "whole", "sft", "lora.rank=2"))
    for name in ("sft", "sft_eval"):
        objects.put(f"gs://data/{name}.jsonl", (folder / f"{name}.jsonl").read_bytes())
    options = ("sft.data=gs://data/sft.jsonl", "sft.eval=gs://data/sft_eval.jsonl", "lora.rank=2")
    resolved = given_run(
        folder, "cut", "sft", *options, "checkpoint.dir=s3://bucket/runs", "checkpoint.keep=2"
    )
    with interrupted_after(5, GivenLearner), pytest.raises(KeyboardInterrupt):
        train(resolved)
    assert checkpoint_steps(folder / "cut") == [2, 4]
    shutil.rmtree(folder / "cut")
    return folder, whole, train(resolved, resume="auto")


def test_a_run_goes_on_from_the_bucket_alone_to_the_bit(runs, objects):
    """Catches a start over, or other numbers, on a fresh machine that has only the bucket."""
    _folder, whole, resumed = runs
    assert "from step 4 in s3://bucket/runs/cut: its folder" in (resumed.run / "run.log").read_text()
    weights = [(summary.run / "final" / "model.safetensors").read_bytes() for summary in (whole, resumed)]
    assert weights[0] == weights[1]
    assert steady_metrics(resumed.run) == steady_metrics(whole.run)[5:]
    assert resumed.before == whole.before
    assert checkpoint_steps(resumed.run) == [4, 6]
    assert {name.split("/")[1] for name in objects.names(STORE)} == {"4", "6"}
    assert not (resumed.run / "checkpoints").exists()


def test_the_run_is_found_by_its_folder_and_only_with_its_bucket(runs):
    """Catches a resume that begins anew because checkpoint.dir has changed."""
    folder, _whole, resumed = runs
    elsewhere = given_run(folder, "cut", "sft", "checkpoint.dir=s3://bucket/other", "lora.rank=2")
    with pytest.raises(
        ValueError, match=rf"has its checkpoints in {STORE}/checkpoints; got s3://bucket/other"
    ):
        train(elsewhere, resume="auto")
    shutil.move(resumed.run, folder / "aside")
    try:
        again = given_run(folder, "cut", "sft", "checkpoint.dir=s3://bucket/runs", "lora.rank=2")
        with pytest.raises(
            ValueError, match=rf"must have an unused place for its checkpoints: {STORE} has some"
        ):
            train(again)
    finally:
        shutil.move(folder / "aside", resumed.run)


def test_a_checkpoint_is_exported_into_a_bucket_and_read_from_there(runs, objects):
    """Catches a model without its adapters, an adapter whose base is a folder that is gone, and a second
    export over the first."""
    resumed = runs[2]
    command = ["export", str(resumed.run), "s3://bucket/models/tiny"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert (
        objects.get("s3://bucket/models/tiny/model.safetensors")
        == (resumed.run / "final" / "model.safetensors").read_bytes()
    )
    adapter = json.loads(objects.get("s3://bucket/models/tiny/adapter/adapter_config.json"))
    assert adapter["base_model_name_or_path"] == "s3://bucket/models/tiny/base"
    assert load_model("s3://bucket/models/tiny/base").arch == load_model("s3://bucket/models/tiny").arch
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, ValueError)
    assert "s3://bucket/models/tiny exists and is not an empty folder" in str(again.exception)
