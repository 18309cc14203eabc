"""Teachers: what they score and what they cannot, their metrics, and what is refused when they are loaded."""

import dataclasses
import json
import logging
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from architectures import changed
from teachers import save_policy

from quatrain.config.schema import Config
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.parallel.mesh import one_device
from quatrain.update.teacher import OwnWeights, Teacher, TeacherLoader
from quatrain.update.teacher_scores import TeacherScores
from quatrain.weights.load_model import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory, small_arch, tokenizer):
    """A teacher of another width than the policy."""
    arch = changed(small_arch, hidden_size=48, width=64, num_layers=3)
    return save_policy(tmp_path_factory.mktemp("models") / "teacher", arch, tokenizer)


def load(folder, tokenizer, *, max_tokens=256, temperature=0.8, longest=2, weights=True, **sections):
    teacher = (
        {name: path and str(path) for name, path in folder.items()}
        if isinstance(folder, dict)
        else str(folder)
    )
    sections["distill"] = {
        "teacher": teacher,
        "max_tokens_per_device": max_tokens,
        "temperature": temperature,
    }
    sections |= {"data": {"max_prompt_length": longest - 1}, "rollout": {"max_new_tokens": 1}}
    return TeacherLoader(Config(**sections), policy_of(tokenizer)).load(weights=weights)


def policy_of(tokenizer):
    """What a loader reads of a policy."""
    arch = SimpleNamespace(longest=256, vocab_size=len(tokenizer), vision=None)
    meshes = SimpleNamespace(teacher=one_device())
    return SimpleNamespace(
        tokenizer=tokenizer, arch=arch, meshes=meshes, store_beside=lambda arch, path, mesh: None
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_tokens": 20},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ({"offload": {"teacher": True}}, {"update": {"share_prompts": False}})
        ),
    ],
)
def test_scores_are_the_teachers_own_log_probabilities(folder, tokenizer, make_batch, options):
    rewarded = make_batch(0, holes=True).rewarded
    model = load_model(str(folder))
    spec = PolicySpec(model.arch, temperature=0.8)
    one_by_one = MicroBatchPlanner(rows=1)
    table = TokenTable.of(rewarded.rollouts)
    expected = predict_tokens(model.params, table, model=spec, planner=one_by_one)
    found = load(folder, tokenizer, **options).score(rewarded)
    np.testing.assert_allclose(found.token_logprobs["teacher_logprobs"], expected, rtol=1e-5, atol=1e-5)
    assert found.rewards is rewarded.rewards
    mask = rewarded.rollouts.completion_mask
    gap = (rewarded.rollouts.rollout_logprobs - expected)[mask]
    assert found.metrics["distill/kl"].result() == pytest.approx(gap.mean(), rel=1e-4)
    assert found.metrics["distill/teacher_logprob"].result() == pytest.approx(expected[mask].mean(), rel=1e-5)
    assert found.metrics["distill/no_teacher"].result() == 0


def test_a_temperature_of_its_own(folder, tokenizer, make_batch):
    rewarded = make_batch(1).rewarded
    flat, sharp = (
        load(folder, tokenizer, temperature=t).score(rewarded).token_logprobs["teacher_logprobs"]
        for t in (50.0, 1.0)
    )
    mask = rewarded.rollouts.completion_mask
    np.testing.assert_allclose(flat[mask], -np.log(len(tokenizer)), atol=0.2)
    assert sharp[mask].std() > 5 * flat[mask].std()


def test_sequences_that_are_too_long_have_no_teacher(folder, tokenizer, make_batch, caplog):
    rewarded = make_batch(2, groups=5).rewarded
    lengths = rewarded.rollouts.lengths
    with caplog.at_level(logging.WARNING):
        teacher = load(folder, tokenizer, max_tokens=9, longest=15)
    assert "reads at most 9 tokens, and the longest sequence of this run has 15" in caplog.text
    found = teacher.score(rewarded)
    logprobs = found.token_logprobs["teacher_logprobs"]
    mask, long = rewarded.rollouts.completion_mask, lengths > 9
    assert 0 < long.sum() < len(long)
    np.testing.assert_array_equal(np.isnan(logprobs), mask & long[:, None])
    assert found.metrics["distill/no_teacher"].result() == (mask & long[:, None]).any(axis=1).sum()
    gap = (rewarded.rollouts.rollout_logprobs - logprobs)[mask & ~long[:, None]]
    assert found.metrics["distill/kl"].result() == pytest.approx(gap.mean(), rel=1e-5)


def test_each_data_source_has_its_own_kl(folder, tokenizer, make_batch):
    rewarded = make_batch(3).rewarded
    rows = len(rewarded.rollouts)
    sources = tuple("math" if row % 3 else "code" for row in range(rows))
    rollouts = dataclasses.replace(rewarded.rollouts, columns={"data_source": sources})
    rewarded = dataclasses.replace(rewarded, rollouts=rollouts)
    found = load(folder, tokenizer).score(rewarded)
    gaps = rollouts.rollout_logprobs - found.token_logprobs["teacher_logprobs"]
    for source in ("math", "code"):
        mask = rollouts.completion_mask & (np.array(sources) == source)[:, None]
        assert found.metrics[f"distill/kl/{source}"].result() == pytest.approx(gaps[mask].mean(), rel=1e-4)


def test_weights_of_the_run_are_asked_for(make_batch):
    rewarded = make_batch(4).rewarded
    asked = []

    def own(teacher, table, temperature, top):
        asked.append((teacher, len(table), temperature, top))
        return TeacherScores(np.where(table.completion_mask, np.float32(-1), np.float32(0)))

    found = Teacher({"default": OwnWeights("initial", 0.8, 15)}).score(rewarded, own)
    assert asked == [("initial", len(rewarded.rollouts), 0.8, None)]
    mask = rewarded.rollouts.completion_mask
    np.testing.assert_array_equal(found.token_logprobs["teacher_logprobs"], np.where(mask, -1, 0))
    with pytest.raises(ValueError, match=r"give teacher\.score what computes with them"):
        Teacher({"default": OwnWeights("policy", 0.8, 15)}).score(rewarded)


class Constant:
    """A source that gives every token the same log-probability."""

    longest = 100

    def __init__(self, value):
        self.value = value

    def scores(self, table, own, top):
        return TeacherScores(np.where(table.completion_mask, np.float32(self.value), np.float32(0)))


def _with_sources(rewarded, names):
    sources = tuple(names[row % len(names)] for row in range(len(rewarded.rollouts)))
    rollouts = dataclasses.replace(rewarded.rollouts, columns={"data_source": sources})
    return dataclasses.replace(rewarded, rollouts=rollouts), np.array([str(source) for source in sources])


def test_each_row_is_scored_by_the_teacher_of_its_source(folder, tokenizer, make_batch):
    rewarded, sources = _with_sources(make_batch(5).rewarded, ("math", "code", "chat", "other"))
    alone = load(folder, tokenizer).score(rewarded).token_logprobs["teacher_logprobs"]
    model = load(folder, tokenizer)._sources["default"]
    teacher = Teacher({"math": model, "code": Constant(-2.5), "chat": None, "default": Constant(-1)})
    found = teacher.score(rewarded)
    logprobs, mask = found.token_logprobs["teacher_logprobs"], rewarded.rollouts.completion_mask
    np.testing.assert_allclose(logprobs[sources == "math"], alone[sources == "math"], rtol=1e-5, atol=1e-6)
    for name, value in (("code", -2.5), ("chat", np.nan), ("other", -1)):
        rows = sources == name
        np.testing.assert_array_equal(logprobs[rows], np.where(mask[rows], np.float32(value), 0))
    assert (
        found.metrics["distill/no_teacher"].result()
        == (mask & (sources == "chat")[:, None]).any(axis=1).sum()
    )


def test_data_sources_that_are_no_text_are_found_as_the_configuration_writes_them(make_batch):
    rewarded, sources = _with_sources(make_batch(6).rewarded, (1, 2, [3, 4], None))
    teacher = Teacher({"1": Constant(-1), "2": Constant(-2), "default": Constant(-3)})
    teacher.check_sources([1, 2, None])
    found, mask = teacher.score(rewarded), rewarded.rollouts.completion_mask
    expected = np.array([{"1": -1, "2": -2}.get(str(source), -3) for source in sources])
    np.testing.assert_array_equal(
        found.token_logprobs["teacher_logprobs"], np.where(mask, np.float32(expected)[:, None], 0)
    )
    assert found.metrics["distill/no_teacher"].result() == 0
    assert {name for name in found.metrics if name.startswith("distill/kl/")} == {
        f"distill/kl/{source}" for source in ("1", "2", "[3, 4]", "None")
    }


def test_a_model_that_teaches_two_sources_is_loaded_once(folder, tokenizer):
    teacher = load({"math": folder, "code": folder, "chat": None}, tokenizer)
    assert teacher._sources["math"] is teacher._sources["code"] is not None
    assert teacher._sources["chat"] is None
    teacher.check_sources(["math", "code", "chat", "math"])
    with pytest.raises(
        ValueError, match="must name values of the column data_source, which are math; got code"
    ):
        teacher.check_sources(["math"])
    with pytest.raises(ValueError, match="a teacher for each data source; other has none"):
        teacher.check_sources(["math", "code", "chat", "other"])
    load({"math": folder, "default": None}, tokenizer).check_sources(["math", "other"])


def test_no_teacher_and_no_weights(folder, tokenizer):
    assert TeacherLoader(Config(), policy_of(tokenizer)).load() is None
    assert load(folder, tokenizer, weights=False) is None


def _swapped(content):
    """The vocabulary with two of its words in each other's places."""
    vocabulary = content["model"]["vocab"]
    one, other = list(vocabulary)[20:22]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


def test_another_tokenizer_is_refused_with_the_first_difference(folder, tokenizer, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "other")
    content = json.loads((copy / "tokenizer.json").read_text())
    _swapped(content)
    (copy / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"other cannot be used: its tokenizer must be the policy.*id \d+ is"
    ):
        load(copy, tokenizer)


def test_a_teacher_with_fewer_embeddings_than_tokens_is_refused(tokenizer, small_arch, tmp_path):
    small = save_policy(
        tmp_path / "small", changed(small_arch, vocab_size=small_arch.vocab_size - 5), tokenizer
    )
    with pytest.raises(ValueError, match="must have an embedding for each token"):
        load(small, tokenizer)


def test_a_folder_that_is_no_model_is_named(tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"distill\.teacher .*nothing cannot be used"):
        load(tmp_path / "nothing", tokenizer)
