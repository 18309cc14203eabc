"""Objects in buckets, in memory: copies, listings, uploads, and the keys that may not name any."""

import sys
from datetime import UTC, datetime

import pytest
from object_store import Bucket, buckets_in_memory

from quatrain.config.buckets import COMPLETE, delete, entries, local_copy, move, upload
from quatrain.config.errors import ConfigError
from quatrain.config.load import load_config
from quatrain.config.places import is_bucket


@pytest.fixture
def objects(tmp_path):
    with buckets_in_memory(tmp_path / "cache") as made:
        yield made


@pytest.mark.parametrize(
    ("path", "found"),
    [("gs://b/a.jsonl", True), ("s3://b", True), ("/s3://b", False), ("owner/name", False), (None, False)],
)
def test_what_names_a_bucket(path, found):
    assert is_bucket(path) == found


def test_a_copy_is_kept_until_the_object_changes(objects, tmp_path):
    """Catches a copy that is made each time, and one of an object that is another by now."""
    objects.put("s3://b/rows.jsonl", b"one")
    first = local_copy("s3://b/rows.jsonl")
    assert (first.name, first.read_bytes()) == ("rows.jsonl", b"one")
    first.write_bytes(b"kept")
    assert local_copy("s3://b/rows.jsonl").read_bytes() == b"kept"
    objects.put("s3://b/rows.jsonl", b"two")
    Bucket.store["/b/rows.jsonl"].created = datetime(2030, 1, 1, tzinfo=UTC)
    assert local_copy("s3://b/rows.jsonl").read_bytes() == b"two"
    assert not list((tmp_path / "cache").rglob("*.part"))


def test_a_copy_that_was_interrupted_is_not_taken(objects, monkeypatch):
    """Catches half a model that is loaded: the connection breaks after the first of its files."""
    for name in ("config.json", "a.safetensors", "notes.md"):
        objects.put(f"gs://b/model/{name}", name.encode())
    whole = Bucket.get_file

    def breaks(self, remote, local, **options):
        if remote.endswith("config.json"):
            raise OSError("the connection was lost")
        return whole(self, remote, local, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "get_file", breaks)
        with pytest.raises(
            ValueError, match=r"gs://b/model cannot be read .*OSError: the connection was lost"
        ):
            local_copy("gs://b/model", ["*.json", "*.safetensors"])
    copy = local_copy("gs://b/model", ["*.json", "*.safetensors"])
    assert {file.name: file.read_text() for file in copy.iterdir()} == {
        "config.json": "config.json",
        "a.safetensors": "a.safetensors",
    }


def test_an_object_that_changes_while_it_is_copied_is_not_taken(objects, monkeypatch):
    """Catches a file of one version beside files of another."""
    objects.put("s3://b/rows.jsonl", b"before")
    whole = Bucket.get_file

    def late(self, remote, local, **options):
        whole(self, remote, local, **options)
        objects.put("s3://b/rows.jsonl", b"after it")

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "get_file", late)
        with pytest.raises(ValueError, match=r"s3://b/rows.jsonl has changed while it was copied"):
            local_copy("s3://b/rows.jsonl")
    assert local_copy("s3://b/rows.jsonl").read_bytes() == b"after it"


def test_what_is_not_there_or_cannot_be_reached_is_told(objects, monkeypatch):
    """Catches a list that is empty because the store did not answer, and a library's own error."""
    with pytest.raises(ValueError, match=r"s3://b/gone.jsonl cannot be read .*FileNotFoundError"):
        local_copy("s3://b/gone.jsonl")
    with pytest.raises(ValueError, match=r"a folder with files such as \*.json; gs://b/gone has none"):
        local_copy("gs://b/gone", ["*.json"])
    assert entries("s3://b/gone") == []

    def fails(self, path, **options):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(Bucket, "ls", fails)
    with pytest.raises(ValueError, match=r"PermissionError: Access Denied.*AWS_ACCESS_KEY_ID"):
        entries("s3://b/a")


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_missing_package_is_named_with_its_command(scheme, package, monkeypatch):
    """Catches a traceback of fsspec where the extra is not installed."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"needs the package {package}: `pip install -e '.\[buckets\]'`"):
        local_copy(f"{scheme}://b/rows.jsonl")


def test_an_upload_ends_with_the_file_that_marks_it(objects, tmp_path, monkeypatch):
    """Catches a reader that finds config.json before the weights."""
    (tmp_path / "model" / "adapter").mkdir(parents=True)
    for name in ("config.json", "adapter/a.json", "z.safetensors"):
        (tmp_path / "model" / name).write_text(name)
    sent, whole = [], Bucket.put_file

    def put(self, local, remote, **options):
        sent.append(remote)
        whole(self, local, remote, **options)

    monkeypatch.setattr(Bucket, "put_file", put)
    upload(tmp_path / "model", "s3://b/out/", last="config.json")
    assert [name.rpartition("out/")[2] for name in sent] == ["adapter/a.json", "z.safetensors", "config.json"]
    assert objects.names("s3://b/out") == ["adapter/a.json", "config.json", "z.safetensors"]


def test_what_is_deleted_or_moved_is_incomplete_from_the_first_moment_on(objects, monkeypatch):
    """Catches half a checkpoint that still looks whole after its deletion was interrupted."""
    for name in (
        f"1/{COMPLETE}",
        "1/arrays/d",
        "1/host",
        f"2/{COMPLETE}",
        "2/arrays/d",
        "20/x",
    ):
        objects.put(f"s3://b/run/{name}", name.encode())

    def dies(self, path, recursive=False, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "rm", dies)
        for change in (lambda: delete("s3://b/run/1"), lambda: move("s3://b/run/2", "s3://b/damaged/2")):
            with pytest.raises(KeyboardInterrupt):
                change()
    assert not [name for name in objects.names("s3://b/run") if "commit" in name]
    delete("s3://b/run/1")
    delete("s3://b/run/1")
    move("s3://b/run/2", "s3://b/damaged/2")
    assert objects.names("s3://b/run") == ["20/x"]
    assert objects.get("s3://b/damaged/2/arrays/d") == b"2/arrays/d"


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("run.dir", "set checkpoint.dir to the bucket"),
        ("run.compilation_cache", "set a folder, or null"),
        ("data.image_root", "mount the bucket"),
        ("rollout.weights_dir", "set a folder that all workers see"),
    ],
)
@pytest.mark.parametrize("scheme", ["s3", "gcs", "S3"])
def test_what_must_be_on_this_machine_is_refused(key, remedy, scheme):
    """Catches a local folder that is called `s3:`, or `gcs:`."""
    with pytest.raises(
        ConfigError, match=rf"{key}.* must be a local path, not one in a bucket or .*: .*{remedy}"
    ):
        load_config(None, [f"{key}={scheme}://b/name", "rollout.servers=[http://localhost:1]"], {})


OTHERS = ("gcs://b/x", "s3a://b/x", "S3://b/x", "s3://", "s3:///x", "gs:/b/x", "file:///x", "https://b/x")


@pytest.mark.parametrize("place", OTHERS)
def test_an_address_of_another_scheme_gets_no_checkpoints(place):
    """Catches checkpoints in a local folder that is called `gcs:`, which is lost with its machine."""
    rule = rf"checkpoint\.dir must be a folder, gs://BUCKET/NAME or s3://BUCKET/NAME; .*; got '{place}'"
    with pytest.raises(ConfigError, match=rule):
        load_config(None, [f"checkpoint.dir={place}"], {})


@pytest.mark.parametrize("place", ["gs://b", "s3://b/x", "runs", "~/runs", "/a/b:c/d", "run:1/x"])
def test_folders_and_buckets_get_checkpoints(place):
    """Catches a folder with a colon in its name that is taken for an address."""
    assert load_config(None, [f"checkpoint.dir={place}"], {}).config.checkpoint.dir == place


@pytest.mark.parametrize("place", ["s3://b/judged", "gcs://b/judged"])
def test_judgements_are_kept_on_this_machine(place):
    """Catches a local folder that is called `gcs:`."""
    judge = f"reward.judge={{server: 'http://localhost:1', model: m, rubric: r, cache: '{place}'}}"
    with pytest.raises(ConfigError, match=r"cache must be true, false or the path of a folder on this"):
        load_config(None, [judge], {})
