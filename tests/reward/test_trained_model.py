"""What a run of `quatrain rm` exports scores as it did in training: here, in transformers and in peft.

tests/golden/judges.json has the scores of torch's models (`tests/oracles/make_judge_goldens.py`).
"""

import json

import numpy as np
import pytest
from classifiers import QUESTION, TO_SCORE, TRAINED, trained_classifier
from goldens import GOLDEN
from rollouts import make_rollouts
from transformers import AutoTokenizer

from quatrain.config.schema import DataConfig, ModelConfig, RewardConfig
from quatrain.data.builtin import builtin_tokenizer
from quatrain.data.chat_template import with_chat_template
from quatrain.data.preferences import load_pairs
from quatrain.data.tokenizer import encode, for_scoring, load_tokenizer, render_completed
from quatrain.parallel.mesh import one_device
from quatrain.reward.reward_model import load_reward_models

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=TRAINED)
def final(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return request.param, trained_classifier(folder / "final", request.param, folder / "base")


def test_scores_are_those_of_transformers_and_peft(final):
    """As where padding, the end token, the merge of adapters or the score head differed."""
    case, folder = final
    config = RewardConfig(functions={f"model:{folder}": 1.0}, model_max_tokens_per_device=256)
    (model,) = load_reward_models(config, ModelConfig(), mesh=one_device()).values()
    prompts, completions = zip(*TO_SCORE, strict=True)
    scores = json.loads((GOLDEN / "judges.json").read_text())["scores"][case]
    found = model.score(make_rollouts(completions, prompts)).values
    np.testing.assert_allclose(found, scores, atol=TOLERANCE, rtol=0)


def test_others_read_the_same_tokens_which_end_as_in_training(final):
    """A text ends with the end token, a conversation with what the template writes behind its last answer."""
    _, folder = final
    tokenizer, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)
    for prompt, completion in TO_SCORE:
        ids = render_completed(tokenizer, prompt, completion)
        if isinstance(prompt, str):
            assert theirs(prompt + completion)["input_ids"] == ids
            assert ids[-1] == tokenizer.eos_token_id
        else:
            dialogue = [*prompt, {"role": "assistant", "content": completion}]
            assert theirs.apply_chat_template(dialogue)["input_ids"] == ids
        assert ids[-1] != tokenizer.pad_token_id
    assert theirs.pad_token_id == json.loads((folder / "config.json").read_text())["pad_token_id"]
    assert encode(tokenizer, "Tom", closed=False) == encode(builtin_tokenizer(), "Tom")


def test_pairs_are_trained_as_they_are_scored(final):
    """As where a template's line break behind an answer, or the end token of a text, was left out in one."""
    _, folder = final
    tokenizer = load_tokenizer(str(folder))
    asked, text = [dict(QUESTION[0])], "Tom has 2 coins"
    messages = [{"role": "assistant", "content": "<answer>5</answer>"}]
    table = [
        {"prompt": asked, "chosen": "<answer>5</answer>", "rejected": "<answer>56</answer>"},
        {
            "prompt": asked,
            "chosen": messages,
            "rejected": [{"role": "assistant", "content": "<answer>6</answer>"}],
        },
        {"chosen": [*asked, *messages], "rejected": [*asked, {"role": "assistant", "content": "6"}]},
        {"prompt": text, "chosen": " and finds 3 more.", "rejected": " and finds"},
        {"chosen": f"{text} and finds 3 more.", "rejected": f"{text} and finds 1."},
    ]
    answers = [
        *[
            (QUESTION, "<answer>5</answer>", "<answer>56</answer>"),
            (QUESTION, "<answer>5</answer>", "<answer>6</answer>"),
        ],
        *[(QUESTION, "<answer>5</answer>", "6"), (text, " and finds 3 more.", " and finds")],
        (text, " and finds 3 more.", " and finds 1."),
    ]
    for row, (prompt, *both) in zip(table, answers, strict=True):
        given = {"rows": {"given": [row]}, "seed": 0, "scored": True, "section": "rm"}
        (pair,) = load_pairs("given", DataConfig(), tokenizer, **given).head()
        assert len(pair.prompt_ids) > 3
        for ids, answer in zip((pair.chosen_ids, pair.rejected_ids), both, strict=True):
            assert [*pair.prompt_ids, *ids] == render_completed(tokenizer, prompt, answer)
            assert len(ids) > 0


def scored_pairs(template, **columns):
    """The source of one row's pair, for a reward model whose template is `template`."""
    tokenizer = builtin_tokenizer()
    tokenizer.chat_template = template
    row = {"prompt": [dict(QUESTION[0])], "chosen": "5", "rejected": "6", **columns}
    given = {"rows": {"given": [row]}, "seed": 0, "stop_ids": (tokenizer.eos_token_id,), "section": "rm"}
    return load_pairs("given", DataConfig(), tokenizer, scored=True, **given)


WRITTEN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{{ mood }}{% endfor %}"


def test_answers_that_the_template_writes_alike_are_no_pair():
    with pytest.raises(ValueError, match="must be two different answers; both are '5'"):
        scored_pairs(WRITTEN, rejected="5 ")


def test_what_scoring_does_not_give_to_the_template_is_told():
    assert scored_pairs(WRITTEN).warnings == []
    (warning,) = scored_pairs(WRITTEN, chat_template_kwargs={"mood": "!"}).warnings
    assert "a reward model gets neither where it scores" in warning


def test_files_say_what_they_are_to_transformers_and_peft(final):
    _, folder = final
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"][0].endswith("ForSequenceClassification")
    assert len(config["id2label"]) == 1
    assert not (folder / "generation_config.json").exists()
    adapter = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (adapter["task_type"], adapter["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert "score" not in adapter["target_modules"]


def test_a_padding_token_ends_no_completion_or_there_is_none(caplog):
    tokenizer = builtin_tokenizer()
    own, end, user = (tokenizer.convert_tokens_to_ids(name) for name in ("<|pad|>", "<|end|>", "<|user|>"))
    assert for_scoring(builtin_tokenizer(), (end,)).pad_token_id == own
    tokenizer.pad_token = "<|end|>"
    assert for_scoring(tokenizer, (end,)).pad_token_id == own  # by its name
    others = set(tokenizer.added_tokens_decoder) - {user}
    assert for_scoring(builtin_tokenizer(), others).pad_token_id == user
    assert not caplog.records
    assert for_scoring(builtin_tokenizer(), {*others, user}).pad_token_id is None
    assert "scores one sequence at a time" in caplog.text


def test_variables_of_the_template_that_scoring_would_lack_are_refused():
    template = "{% for m in messages %}{{ m['content'] }}{{ mood }}{% endfor %}"
    data = DataConfig(chat_template=template, chat_template_kwargs={"mood": "!"})
    with pytest.raises(ValueError, match=r"without data\.chat_template_kwargs; got .*; leave the key out"):
        for_scoring(with_chat_template(builtin_tokenizer(), data), (1,))
