"""A data set in several files, read by several processes: threads here, which meet in `gather_objects`."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quatrain.config.data_sets import MixedSet
from quatrain.config.schema import DataConfig
from quatrain.data import prompts, token_table
from quatrain.data.examples import load_examples
from quatrain.data.prompts import load_prompts


@pytest.fixture
def files(tmp_path):
    """Three files of 4, 1 and 3 rows; only the last has the column `hint`, and a message list."""
    rows = [{"prompt": f"{i} + 1 =", "answer": f"{i + 1}", "completion": f"{i + 1}"} for i in range(8)]
    rows[6]["prompt"] = [{"role": "user", "content": "6 + 1 ="}]
    rows[7] |= {"hint": "eight", "prompt": "7 + 1 = " * 9}
    for i, part in enumerate((rows[:4], rows[4:5], rows[5:])):
        (tmp_path / f"part-{i}.jsonl").write_text("\n".join(map(json.dumps, part)))
    return f"{tmp_path}/part-*.jsonl"


def _together(monkeypatch, count, work):
    """What `work` returns in each of `count` processes, and the files that each has read."""
    barrier, place, said = threading.Barrier(count), threading.local(), [None] * count
    reads = [[] for _ in range(count)]
    original = prompts.read_rows

    def gather(value):
        said[place.index] = json.loads(json.dumps(value))
        barrier.wait(30)
        everything = list(said)
        barrier.wait(30)
        return everything

    def read(spec, *given):
        reads[place.index].append(spec.rpartition("/")[2])
        return original(spec, *given)

    def run(index):
        place.index = index
        try:
            return work()
        except BaseException:
            barrier.abort()
            raise

    with monkeypatch.context() as patch:
        for module in (prompts, token_table):
            patch.setattr(module, "gather_objects", gather)
        patch.setattr(prompts, "assert_same", lambda what, values: gather(values))
        patch.setattr(prompts, "joined", lambda: True)
        patch.setattr(prompts, "num_processes", lambda: count)
        patch.setattr(prompts, "process_index", lambda: place.index)
        patch.setattr(prompts, "read_rows", read)
        with ThreadPoolExecutor(count) as threads:
            running = [threads.submit(run, index) for index in range(count)]
        own = [e for e in (r.exception() for r in running) if not isinstance(e, threading.BrokenBarrierError)]
        if any(own):
            raise next(filter(None, own))
        return [r.result() for r in running], reads


def _plain(prompt):
    return (prompt.group_id, prompt.input_ids.tolist(), prompt.text, dict(prompt.columns))


def test_processes_that_read_one_file_compare_all_that_is_in_it(monkeypatch, tokenizer, tmp_path):
    """What differs is named: a process with other answers would train on other rewards."""
    compared = []
    monkeypatch.setattr(prompts, "joined", lambda: True)
    monkeypatch.setattr(prompts, "assert_same", lambda what, values: compared.append((what, values)))
    file = tmp_path / "sums.jsonl"
    for gold in (4, 4, 5):
        rows = [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "2 + 3 =", "answer": f"{gold}"}]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        load_prompts(str(file), DataConfig(), tokenizer, seed=3)
    (kind, first), (_, again), (_, other) = compared
    assert (kind, first[str(file)]) == ("data set", "2 rows")
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {f"{file}, the column `answer`"}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("long", ["skip", "truncate_left"])
def test_shares_make_the_batches_of_one_process(monkeypatch, tokenizer, files, count, long):
    data = DataConfig(max_prompt_length=30, on_long_prompt=long)

    def work():
        source = load_prompts(files, data, tokenizer, seed=3)
        drawn = [_plain(p) for index in range(4) for p in source.batch(index, 5)]
        return len(source), source.skipped, source.truncated, drawn, [_plain(p) for p in source.head(6)]

    alone = work()
    assert (alone[0], alone[1] + alone[2]) == ((7, 1) if long == "skip" else (8, 1))
    assert "hint" in alone[3][0][3]
    everywhere, reads = _together(monkeypatch, count, work)
    assert everywhere == [alone] * count
    assert reads == [[f"part-{i}.jsonl" for i in range(own, 3, count)] for own in range(count)]


def test_rows_left_out_by_their_pass_rate_are_counted_over_all_shares(monkeypatch, tokenizer, tmp_path):
    for part, rates in enumerate(((0.0, 0.5), (1.0,), (0.25, 0.0, 0.75))):
        rows = [{"prompt": f"{part}{i}", "pass_rate": rate} for i, rate in enumerate(rates)]
        (tmp_path / f"part-{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig(min_pass_rate=0.1, max_pass_rate=0.9)

    def work():
        source = load_prompts(f"{tmp_path}/part-*.jsonl", data, tokenizer, seed=3, by_pass_rate=True)
        return source.filtered, [prompt.text for prompt in source.head()]

    assert _together(monkeypatch, 2, work)[0] == [(3, ["01", "20", "22"])] * 2


def test_a_tally_counts_the_rows_of_all_shares(monkeypatch, tokenizer, files):
    def work():
        source = load_prompts(files, DataConfig(max_prompt_length=300), tokenizer, seed=3)
        kinds = source.tally(
            lambda row: "chat" if isinstance(row.text, tuple) else row.columns["hint"] or "none"
        )
        return {kind: count for kind, (count, _) in kinds.items()}

    alone = work()
    assert alone == {"none": 6, "chat": 1, "eight": 1}
    assert _together(monkeypatch, 3, work)[0] == [alone] * 3


def test_examples_are_shared_out_too(monkeypatch, tokenizer, files):
    def work():
        source = load_examples(files, DataConfig(), tokenizer, train_on="assistant", seed=1)
        return [[row.input_ids.tolist(), row.scored.tolist()] for row in source.batch(1, 6)]

    alone = work()
    assert len({json.dumps(row) for row in alone}) > 3
    assert _together(monkeypatch, 2, work)[0] == [alone] * 2


def test_columns_that_cannot_travel_are_refused(monkeypatch, tokenizer, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    for i in range(2):
        pq.write_table(pa.table({"prompt": ["a"], "raw": [b"bytes"]}), tmp_path / f"part-{i}.parquet")
    spec = f"{tmp_path}/part-*.parquet"
    assert len(load_prompts(spec, DataConfig(), tokenizer, seed=0)) == 2
    with pytest.raises(ValueError, match=r"part-\d.parquet, row 1: .* must be JSON-serialisable"):
        _together(monkeypatch, 2, lambda: load_prompts(spec, DataConfig(), tokenizer, seed=0))


def test_a_pattern_that_matches_nothing(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"matches no file \(looked in "):
        load_prompts(f"{tmp_path}/part-*.jsonl", DataConfig(), tokenizer, seed=0)


def test_a_pattern_is_read_in_the_order_of_names(files, tokenizer):
    source = load_prompts(files, DataConfig(max_prompt_length=300), tokenizer, seed=0)
    assert [p.columns["answer"] for p in source.head()] == [f"{i + 1}" for i in range(8)]
    np.testing.assert_array_equal([p.group_id for p in source.head()], np.arange(8))


def test_a_list_of_data_sets_is_shared_by_file_and_checked_by_data_set(
    monkeypatch, tokenizer, files, tmp_path
):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "last", "level": 1}))
    data = DataConfig(max_prompt_length=300, shuffle=False)
    specs = [files, str(other)]
    alone = load_prompts(specs, data, tokenizer, seed=3)

    def work():
        return [_plain(prompt) for prompt in load_prompts(specs, data, tokenizer, seed=3).take(0, 40)]

    together, reads = _together(monkeypatch, 2, work)
    assert together == [[_plain(prompt) for prompt in alone.take(0, 40)]] * 2
    assert sum("other.jsonl" in read for read in reads) == 1
    needed = {"level": "the reward `f`"}
    with pytest.raises(ValueError, match=r"part-\*\.jsonl: the reward `f` needs the column `level`"):
        _together(
            monkeypatch, 2, lambda: load_prompts(specs, data, tokenizer, seed=3, required_columns=needed)
        )


def test_processes_draw_a_mixture_alike(monkeypatch, tokenizer, files, tmp_path):
    """Each reads a share of the files; the row at a position, its source and the digests are the same."""
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"prompt": f"{i} - 1"}) for i in range(16)))
    data, mixture = DataConfig(max_prompt_length=300), (MixedSet(files, 1), MixedSet(str(other), 3))

    def work():
        source = load_prompts(mixture, data, tokenizer, seed=3)
        drawn = [(_plain(prompt), prompt.source) for prompt in source.take(20, 8)]
        return drawn, source.digests(), source.rows_of(0), source.rows_of(1)

    alone = work()
    assert [source for _, source in alone[0]].count("other") == 6
    assert alone[2:] == (range(8), range(8, 24))
    together, reads = _together(monkeypatch, 2, work)
    assert together == [alone] * 2
    assert sorted(map(len, reads)) == [2, 2]


def _digests(*rows, first=None):
    own = {
        number: token_table.TokenRow(number + 1, text, np.array(ids, np.int32), {"answer": answer})
        for number, (text, ids, answer) in enumerate(rows)
    }
    return token_table.Table(own, len(own)).digests(first)


def test_digests_tell_the_order_and_every_part_of_the_rows():
    """They decide whether a run may be resumed with its data; `first`: of so many rows."""
    one, two, three = ("a", [1, 2], "x"), ("b", [3], "y"), ("c", [4], "z")
    names = ["the prompts", "the tokens of the prompts", "the column `answer`"]
    usual = _digests(one, two)
    assert list(usual) == names

    def changed(*rows):
        now = _digests(*rows)
        return [name for name in names if now[name] != usual[name]]

    assert changed(one, two) == []
    assert changed(two, one) == names
    assert changed(("A", [1, 2], "x"), two) == names[:1]
    assert changed(("a", [1, 9], "x"), two) == names[1:2]
    assert changed(("a", [1, 2], "X"), two) == names[2:]
    assert changed(one, two, three) == names
    assert _digests(one, two, three, first=2) == usual
