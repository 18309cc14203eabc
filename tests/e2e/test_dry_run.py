"""`quatrain train --dry-run`: what it checks, and that it leaves nothing."""

import json
import sys

import pytest
from runs import small_run

from quatrain.loop.policy import load_policy
from quatrain.loop.train import dry_run, train

pytestmark = pytest.mark.usefixtures("narrow_model")


def test_a_dry_run_prints_the_plan_and_leaves_nothing(tmp_path):
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def fails(completions):\n    return completions[0][999]\n")
    options = f"reward.functions={{correct: 1.0, '{rewards}:fails': 1.0, 'model:none': {{weight: 0.1}}}}"
    with pytest.raises(ValueError, match="the reward model model:none cannot be used"):
        dry_run(small_run(tmp_path / "runs", "dry", options))
    assert [path.name for path in tmp_path.iterdir()] == ["rewards.py"]
    options = f"reward.functions={{correct: 1.0, '{rewards}:fails': 1.0}}"
    plan, warnings = dry_run(small_run(tmp_path / "runs", "dry", options))
    assert plan.startswith("4 steps of 4 prompts x 4 samples, 68 training prompts\nprompts_per_step")
    assert "total_in_gradient" in plan
    (warning,) = warnings
    assert "`fails` fails on a made-up completion" in warning
    assert "IndexError" in warning
    assert "rewards.py" in {path.name for path in tmp_path.iterdir()}
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_leaves_no_folder_for_checkpoints_either(tmp_path):
    store = f"checkpoint.dir={tmp_path / 'runs' / 'stores' / 'mine'}"
    dry_run(small_run(tmp_path / "runs", "dry", store))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("reward", "data", "message"),
    [
        ("def f(completions, /):\n    return 0.0", "builtin:arithmetic", "positional-only arguments"),
        ("def f(completions, colour):\n    return 0.0", "builtin:arithmetic", "needs the column `colour`"),
        ("def f(completions):\n    return 0.0", "rows.jsonl", "no column `prompt`"),
        ("def f(completions):\n    return 0.0", "gone.jsonl", "no such file"),
    ],
)
def test_rewards_and_columns_are_checked_before_there_is_a_tokenizer(
    tmp_path, monkeypatch, reward, data, message
):
    """A mistake in a user's own files was found after a model's tokenizer and weights were there."""
    monkeypatch.setattr("quatrain.loop.build.load_policy", lambda *a, **k: pytest.fail("it comes later"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(reward)
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1"}\n')
    options = ("reward.functions={mine.py:f: 1}", f"data.train={data}", "data.eval=null")
    with pytest.raises(ValueError, match=message):
        dry_run(small_run(tmp_path / "runs", "dry", *options))


def test_answers_prompts_and_formats_are_checked(tmp_path):
    data = tmp_path / "rows.jsonl"
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think><answer>"
    templated = f"data.chat_template='{template}'"

    def warnings_of(*answers):
        rows = [{"prompt": '[{"role": "user", "content": "q"}]', "answer": answer} for answer in answers]
        data.write_text("\n".join(map(json.dumps, rows)))
        options = (f"data.train={data}", "sft.steps=0", "data.max_prompt_length=64", templated)
        return dry_run(small_run(tmp_path / "runs", "dry", *options, "data.system_prompt=S"))[1]

    json_text, judged, format_ = warnings_of(*["5"] * 3, {"a": 5})
    assert json_text.startswith(f"{data}: 4 of 4 prompts (the first is row 1) are the JSON of messages")
    assert judged == (
        f"{data}: `correct` cannot judge by 1 of 4 values of the column `answer`, and abstains on their "
        "completions: of the type dict: 1 (row 4)"
    )
    assert format_.startswith("`format` and `tag_count` can never be 1")
    with pytest.raises(ValueError, match=r"can judge by none, which are of the type dict: 1"):
        warnings_of({"a": 5})


@pytest.mark.parametrize(
    ("budget", "size", "limit"),
    [
        (64, 60, r"a micro-batch may be \(update.max_tokens_per_device\), 64"),
        (16384, 500, "the 2048 positions of builtin:tiny, in"),
    ],
)
def test_an_example_that_is_too_long_is_found_with_its_row(tmp_path, budget, size, limit):
    """The warm start ended at the step that drew it, or trained beyond the positions."""
    path = tmp_path / "demos.jsonl"
    rows = [{"prompt": "3+4?", "completion": "3+4=7 " * count} for count in (1, 1, size)]
    path.write_text("\n".join(map(json.dumps, rows)))
    options = (f"sft.data={path}", f"update.max_tokens_per_device={budget}", "rollout.max_new_tokens=12")
    message = rf"demos\.jsonl: 1 of 3 examples are longer than {limit} tokens \(row 3"
    with pytest.raises(ValueError, match=message):
        dry_run(small_run(tmp_path / "runs", "dry", *options, "data.max_prompt_length=32"))


def test_answers_that_only_an_evaluation_would_judge_are_said(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "q", "answer": {"a": 5}}')
    options = (f"data.train={data}", f"data.eval={data}", "sft.steps=0", "reward.functions={tag_count: 1}")
    _, (warning,) = dry_run(small_run(tmp_path / "runs", "dry", *options))
    assert warning.startswith("there is no accuracy, because eval.accuracy is null and")
    with pytest.raises(ValueError, match="can judge by none, which are of the type dict"):
        dry_run(small_run(tmp_path / "runs", "dry", *options, "eval.accuracy=correct"))


def test_no_weights_are_read(tmp_path):
    loaded = load_policy(small_run(tmp_path, "a", "advantage.estimator=gae").config, weights=False)
    assert loaded.params is loaded.critic_params is None
    assert loaded.critic_arch.head == "value_head"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("data.train=no.jsonl", "no such file"),
        ("mesh=3,1,1", "mesh"),
        ("update.loss=a.py:f", "no such file"),
        ("data.max_prompt_length=100000", "maximum number of positions"),
    ],
)
def test_bad_input_is_an_error(tmp_path, option, message):
    with pytest.raises(ValueError, match=message):
        dry_run(small_run(tmp_path / "runs", "dry", "data.eval=builtin:arithmetic-heldout", option))
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_without_resume_is_of_a_new_run(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(ValueError, match="a new run must have an unused name"):
        dry_run(small_run(tmp_path, "taken"))


@pytest.fixture(scope="module")
def first(tmp_path_factory, narrow_model):
    """The folder of a run of two steps."""
    folder = tmp_path_factory.mktemp("runs")
    return train(small_run(folder, "first", "run.steps=2", "eval.before=false", "sft.steps=0")).run


def files_of(run):
    return {
        path: path.stat().st_mtime_ns
        for path in run.rglob("*")
        if path.is_file() and path.name[:5] != ".lock"
    }


def test_a_dry_run_of_a_run_to_resume_changes_nothing(first):
    before = files_of(first)
    plan, _ = dry_run(small_run(first.parent, "first"), resume="first")
    assert plan.startswith(f"resuming {first} from step 2\n4 steps of 4 prompts")
    assert files_of(first) == before


OTHER_ARRAYS = "the arrays of a checkpoint must have the names, shapes and dtypes of this run's: at "


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["seed=5"], "seed of a resumed run must not change"),
        (["optimizer.name=lion"], OTHER_ARRAYS),
        (["optimizer.name=sgd", "optimizer.beta1=0"], OTHER_ARRAYS),
        (["optimizer.name=muon"], OTHER_ARRAYS + "'opt_state"),
        (["optimizer.max_grad_norm=null"], OTHER_ARRAYS + "'opt_state"),
        (["model.path=builtin:tiny_moe"], OTHER_ARRAYS + "'params"),
        (["model.param_dtype=bfloat16", "model.dtype=bfloat16"], OTHER_ARRAYS + "'params.*bfloat16"),
        (["advantage.estimator=gae"], OTHER_ARRAYS + "'critic"),
        (["lora.rank=2"], r"lora\.rank of a resumed run must not change"),
    ],
)
def test_a_dry_run_refuses_what_the_resume_would(first, options, message):
    """No weights are read for it: the description of the checkpoint tells."""
    with pytest.raises(ValueError, match=message):
        dry_run(small_run(first.parent, "first", "sft.steps=0", *options), resume="first")


def test_a_resume_with_other_arrays_is_refused_before_anything_is_changed(first):
    before = files_of(first)
    with pytest.raises(ValueError, match=OTHER_ARRAYS):
        train(small_run(first.parent, "first", "sft.steps=0", "optimizer.name=lion"), resume="first")
    assert files_of(first) == before


def test_a_dry_run_names_packages_that_are_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    options = ("logging.trackio=mine", "data.system_prompt=S")
    _, warnings = dry_run(small_run(tmp_path, "dry", *options))
    assert any("pip install -e '.[trackio]'" in warning for warning in warnings)
