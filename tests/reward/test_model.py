"""Reward models: parity with transformers, rendering, packing, missing scores, and errors at the start."""

import dataclasses
import json
import logging
import shutil

import jax
import numpy as np
import pytest
from architectures import changed
from classifiers import save_classifier
from goldens import SCORE_CASES, read_score_golden, weights_crc
from rollouts import make_rollouts
from safetensors.numpy import load_file, save_file

from quatrain.config.schema import LogprobConfig, ModelConfig, RewardConfig
from quatrain.forward.predict import sequence_scores
from quatrain.forward.specs import CriticSpec
from quatrain.models.rope import Rope
from quatrain.parallel.mesh import one_device
from quatrain.reward.reward_model import RewardModel, load_reward_models
from quatrain.reward.scorer import RewardScorer
from quatrain.weights.load_model import load_classifier

TOLERANCE = 1e-5
"""Largest difference from transformers' scores, which are about 1, in float32; measured: at most 2.1e-6."""
MESSAGES = ({"role": "user", "content": "Tom has 2 coins and finds 3 more. How many now?"},)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory, small_arch, tokenizer):
    """A folder with a small reward model and the built-in tokenizer."""
    return save_classifier(tmp_path_factory.mktemp("models") / "judge", small_arch, tokenizer)


@pytest.fixture
def copy(classifier, tmp_path):
    """A copy of the folder, to damage."""
    return shutil.copytree(classifier, tmp_path / "judge")


def load(folder, max_tokens=256, **options):
    entry = f"model:{folder}"
    config = RewardConfig(functions={entry: 1.0}, model_max_tokens_per_device=max_tokens)
    return load_reward_models(config, ModelConfig(), mesh=one_device(), **options)[entry]


def score_sequences(params, sequences, spec, *, max_tokens):
    planner = spec.planner(LogprobConfig(max_tokens_per_device=max_tokens))
    return sequence_scores(params, sequences, model=spec, planner=planner)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.slow] * (case not in ("qwen3", "gemma3_text")))
        for case in SCORE_CASES
    ],
)
def test_scores_are_those_of_transformers_packed_and_one_by_one(case, tmp_path):
    golden = read_score_golden(case)
    assert weights_crc(golden.weights()) == golden.weights_crc
    model = load_classifier(str(golden.write_model(tmp_path)))
    spec = CriticSpec(model.arch)
    for max_tokens in (40, 64, 256):
        packed = score_sequences(model.params, golden.sequences, spec, max_tokens=max_tokens)
        np.testing.assert_allclose(packed, golden.scores, atol=TOLERANCE, rtol=0)
    alone = [score_sequences(model.params, [ids], spec, max_tokens=40)[0] for ids in golden.sequences]
    np.testing.assert_allclose(alone, golden.scores, atol=TOLERANCE, rtol=0)


def test_the_goldens_notice_pooling_at_the_padding_token(tmp_path):
    golden = read_score_golden("llama")
    model = load_classifier(str(golden.write_model(tmp_path)))
    spec = CriticSpec(dataclasses.replace(model.arch, pad_token_id=None))
    off = np.abs(score_sequences(model.params, golden.sequences, spec, max_tokens=256) - golden.scores)
    assert off[-1] > 100 * TOLERANCE
    assert off[:-1].max() < TOLERANCE


def test_messages_are_rendered_with_the_models_own_template_and_tokenizer(classifier, tokenizer):
    model = load(classifier)
    model.tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}never{% endif %}"
    )
    rollouts = make_rollouts(["5", " How"], [MESSAGES, "Tom"])
    texts = (f"[user] {MESSAGES[0]['content']}[assistant] 5", "Tom How")
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    params = load_classifier(str(classifier)).params
    expected = score_sequences(params, ids, model.spec, max_tokens=256)
    np.testing.assert_array_equal(model.score(rollouts).values, expected)
    assert expected[0] != expected[1]


def test_a_sequence_that_is_too_long_gets_no_score_and_is_counted(classifier):
    """The others get the scores that they get without it."""
    model = load(classifier, max_tokens=32)
    rollouts = make_rollouts(["a", "b" * 40, "c"], ["Tom"] * 3)
    values, counts, seconds = model.score(rollouts)[:3]
    tokens = sum(len(model.tokenizer.encode(text, add_special_tokens=False)) for text in ("Toma", "Tomc"))
    assert counts == {"errors": 0, "too_long": 1, "tokens": tokens}
    assert seconds > 0
    short = model.score(make_rollouts(["a", "c"], ["Tom"] * 2)).values
    np.testing.assert_allclose(values, [short[0], np.nan, short[1]], rtol=1e-5)
    assert model.score(make_rollouts(["b" * 40], ["Tom"])).counts["too_long"] == 1
    assert model.score(make_rollouts([], [])).values.shape == (0,)


def test_a_score_that_is_not_finite_is_no_score(copy, caplog):
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"score.weight": tensors["score.weight"] * np.inf}, copy / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        values, counts, _ = load(copy).score(make_rollouts(["a", "b"], ["Tom"] * 2))[:3]
    assert np.isnan(values).all()
    assert (counts["errors"], counts["too_long"]) == (2, 0)
    assert "2 scores that are not finite" in caplog.text


def test_a_model_with_fewer_positions_than_a_run_needs_is_told(copy, caplog):
    edit_config(copy, max_position_embeddings=20)
    with caplog.at_level(logging.WARNING):
        model = load(copy, longest=48)
    assert model.longest == 20
    assert "reads at most 20 tokens, and the longest sequence of this run has 48" in caplog.text


def test_longropes_short_factors_score_no_longer_sequence_than_they_were_trained_for(
    small_arch, tokenizer, tmp_path
):
    factors = (1.0,) * (small_arch.layers[0].mixer.head_dim // 2)
    written = (("long_factor", factors), ("original_max_position_embeddings", 40), ("short_factor", factors))
    rope = Rope(kind="longrope", original_max_position=40, written=written)
    folder = save_classifier(tmp_path / "judge", changed(small_arch, rope=rope), tokenizer)
    short, long = load(folder, longest=40), load(folder, longest=41)
    assert (short.longest, long.longest) == (40, min(256, small_arch.max_position))
    assert long.spec.arch.layers[0].mixer.rope.long
    counts = short.score(make_rollouts(["b" * 60], ["Tom"])).counts
    assert counts["too_long"] == 1


def test_the_scorer_weighs_models_and_functions(classifier):
    entry = f"model:{classifier}"
    functions = {"format": 0.5, entry: 2.0, "tag_count": 1.0}
    config = RewardConfig(functions=functions, model_max_tokens_per_device=256)
    models = load_reward_models(config, ModelConfig(), mesh=one_device())
    rollouts = make_rollouts(["<think>1", "x" * 300, "2"], [MESSAGES] * 3)
    rewarded = RewardScorer(config, models=models).score(rollouts)
    own = models[entry].score(rollouts).values
    assert rewarded.function_names == ("format", "judge", "tag_count")
    np.testing.assert_array_equal(rewarded.rewards_per_function, [[0, 0, 0], own, [0.25, 0, 0]])
    np.testing.assert_allclose(rewarded.rewards, [2 * own[0] + 0.25, 0, 2 * own[2]], rtol=1e-6)
    counts = {name: metric.result() for name, metric in rewarded.metrics.items()}
    assert (counts["reward/judge/too_long"], counts["reward/judge/abstained"]) == (1, 1)
    assert counts["reward/judge/mean"] == pytest.approx(np.nanmean(own))
    assert "reward/format/too_long" not in counts


def test_models_of_one_name_get_their_entries_as_names(classifier, tmp_path):
    other = shutil.copytree(classifier, tmp_path / "judge")
    config = RewardConfig(
        functions={f"model:{classifier}": 1.0, f"model:{other}": 1.0}, model_max_tokens_per_device=64
    )
    models = load_reward_models(config, ModelConfig(), mesh=one_device())
    names = RewardScorer(config, models=models).score(make_rollouts(["x"], ["Tom"])).function_names
    assert names == (f"model:{classifier}", f"model:{other}")


def test_a_scorer_without_its_models_says_how_to_load_them():
    with pytest.raises(ValueError, match=r"model:judge is not; pass models=.*load_reward_models"):
        RewardScorer(RewardConfig(functions={"model:judge": 1.0}))


def test_prompts_are_checked_before_anything_is_computed(classifier):
    model = load(classifier, max_tokens=40)
    model.check_prompt(MESSAGES)
    model.check_prompt("Tom")
    with pytest.raises(ValueError, match=r"this one has \d+ tokens for .*judge.* is 40; remove the prompt"):
        model.check_prompt("x" * 41)
    model.tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(ValueError, match="judge cannot read this prompt: the chat template rejects"):
        model.check_prompt(MESSAGES)
    model.tokenizer.chat_template = None
    model.check_prompt("Tom")
    with pytest.raises(ValueError, match="its tokenizer has none; add chat_template to its tokenizer_config"):
        model.check_prompt(MESSAGES)


def edit_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text()) | fields
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def drop_head(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors")


def drop_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: edit_config(folder, architectures=["LlamaForCausalLM"]),
            "must name a class …ForSequenceClassification; it names LlamaForCausalLM",
        ),
        (lambda folder: edit_config(folder, architectures=None), "it names none"),
        (lambda folder: edit_config(folder, id2label=None), "2 labels \\(id2label is missing, which means 2"),
        (lambda folder: edit_config(folder, id2label={"0": "a", "1": "b", "2": "c"}), "has 3 labels; give"),
        (lambda folder: edit_config(folder, model_type="bert"), "unsupported model_type 'bert'"),
        (lambda folder: edit_config(folder, vocab_size=100), "must not have more tokens than its model's"),
        (drop_head, "must have the tensor score.weight, its output head; the weights in .* lack it"),
        (drop_tokenizer, "has none of them; save a tokenizer there"),
        (shutil.rmtree, "does not exist or is not a directory"),
    ],
)
def test_a_folder_that_is_no_reward_model_is_refused(copy, damage, message):
    if "more tokens" in message:
        embed = load_file(copy / "model.safetensors")
        save_file(
            embed | {"model.embed_tokens.weight": embed["model.embed_tokens.weight"][:100]},
            copy / "model.safetensors",
        )
    damage(copy)
    with pytest.raises(ValueError, match=message) as raised:
        load(copy)
    assert str(raised.value).startswith(f"the reward model model:{copy} cannot be used: ")


@pytest.mark.parametrize("path", ["builtin:tiny", "judge.gguf"])
def test_only_hugging_face_models_have_a_score_head(path):
    with pytest.raises(ValueError, match=f"must be a Hugging Face folder or a hub id .*; {path} is neither"):
        load(path)


def test_offloaded_parameters_are_on_the_host_between_calls(classifier):
    """On a CPU both memories are the host's; the values are the same."""
    rollouts = make_rollouts(["a", "b"], ["Tom"] * 2)
    offloaded = load(classifier, memory="host")
    assert isinstance(offloaded, RewardModel)
    np.testing.assert_array_equal(offloaded.score(rollouts).values, load(classifier).score(rollouts).values)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(offloaded._params)}
    assert kinds == {"pinned_host"}
