"""The configuration of `quatrain sft`, `dpo` and `rm`: what has a part, is derived, and must stay."""

import re
from datetime import UTC, datetime

import pytest

from quatrain.config.dump import dump_yaml
from quatrain.config.errors import ConfigError
from quatrain.config.fields import DERIVED, value_at
from quatrain.config.load import load_config
from quatrain.config.schema import Config, fields
from quatrain.config.tasks import has_part
from quatrain.run.resume import must_agree_on_resume

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
PAIRS = {"rl": (), "sft": (), "dpo": ("dpo.data=pairs.jsonl",), "rm": ("rm.data=pairs.jsonl",)}


def loaded(task, *overrides, path=None, **options):
    return load_config(path, [*PAIRS[task], *overrides], {}, task=task, now=NOW, **options)


def written(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    return path


def test_the_command_sets_the_task_and_a_file_for_another_command_is_refused(tmp_path):
    """A file for `quatrain sft` that `quatrain train` ran would sample where it was to be supervised."""
    sft = loaded("sft")
    assert (sft.config.run.task, sft.provenance["run.task"]) == ("sft", "quatrain sft")
    assert loaded("rl").provenance["run.task"] == "default"
    path = written(tmp_path, "run: {task: sft}\nsft: {data: a.jsonl}\n")
    assert load_config(path, (), {}).config.run.task == "sft"
    assert load_config(path, (), {}, task="sft").config.given.data == "a.jsonl"
    for task, command in (("rl", "train"), ("dpo", "dpo"), ("rm", "rm")):
        message = f"run.task is that of the command, {task} for quatrain {command}; got 'sft' (from file"
        with pytest.raises(ConfigError, match=re.escape(message)) as error:
            load_config(path, PAIRS[task], {}, task=task)
        assert "use quatrain sft, or leave it out" in str(error.value)
    with pytest.raises(ConfigError, match="task must be one of rl, sft, dpo"):
        load_config(None, (), {}, task="train")


@pytest.mark.parametrize("task", ["sft", "dpo", "rm"])
def test_a_runs_own_configuration_loads_again_for_its_command(tmp_path, task):
    """Derived values that have no part would be refused when a run is resumed from its config.yaml."""
    first = loaded(task, "data.eval=q.jsonl" if task != "rm" else "seed=3")
    path = written(tmp_path, dump_yaml(first))
    assert load_config(path, (), {}, task=task).config == first.config
    assert load_config(path, (), {}).config == first.config


@pytest.mark.parametrize(
    ("task", "override", "remedy"),
    [
        ("dpo", "sft.steps=3", "run quatrain sft first, and set model.path to the final/ of its run"),
        ("rm", "sft.learning_rate=1e-4", "run quatrain sft first"),
        ("dpo", "rm.center=0.1", "run quatrain rm"),
        ("sft", "dpo.data=x.jsonl", "run quatrain dpo"),
        ("rl", "dpo.data=x.jsonl", "run quatrain dpo"),
        ("rl", "rm.steps=3", "run quatrain rm"),
        ("rl", "sft.epochs=2", "run quatrain sft"),
        ("rl", "sft.eval=x.jsonl", "run quatrain sft"),
        ("dpo", "rollout.max_new_tokens=5", "without data.eval; set that"),
        ("sft", "rollout.n=4", "use quatrain train"),
        ("rm", "rollout.max_new_tokens=5", "use quatrain train"),
        ("rm", "reward.functions={correct: 1}", "use quatrain train"),
        ("dpo", "eval.num_prompts=5", "without data.eval; set that"),
        ("sft", "advantage.estimator=gae", "use quatrain train"),
        ("dpo", "critic.path=x", "use quatrain train"),
        ("dpo", "critic_optimizer.beta1=0.5", "use quatrain train"),
        ("sft", "distill.teacher=x", "use quatrain train"),
        ("dpo", "update.loss=gspo", "set dpo.loss"),
        ("rm", "update.loss=gspo", "set rm.loss"),
        ("sft", "update.loss=gspo", "use quatrain train"),
        ("dpo", "update.kl_coef=0.1", "set dpo.beta"),
        ("sft", "update.kl_coef=0.1", "use quatrain train"),
        ("dpo", "run.steps=3", "set dpo.steps"),
        ("sft", "run.epochs=3", "set sft.epochs"),
        ("rm", "data.batch_size=3", "set rm.batch_size"),
        ("dpo", "data.train=x.jsonl", "set dpo.data"),
        ("rm", "data.eval=x.jsonl", "set rm.eval"),
        ("sft", "optimizer.learning_rate=1e-3", "set sft.learning_rate"),
        ("dpo", "optimizer.schedule=linear", "set dpo.schedule"),
        ("dpo", "optimizer.warmup_steps=3", "set dpo.warmup_steps"),
        ("rm", "placement.critic=0", "use quatrain train"),
        ("dpo", "logging.sample_tokens=true", "use quatrain train"),
        ("sft", "update.share_prompts=false", "use quatrain train"),
    ],
)
def test_what_has_no_part_in_a_run_is_refused_with_what_to_do(task, override, remedy):
    """A key that a command passes over in silence leaves its user with other numbers than were asked for."""
    key, command = override.partition("=")[0], {"rl": "train"}.get(task, task)
    with pytest.raises(ConfigError) as error:
        loaded(task, override)
    [problem] = error.value.problems
    assert problem.startswith(f"{key} has no effect in quatrain {command}")
    assert remedy in problem
    assert "or leave this key out; got " in problem


def test_data_and_a_section_of_its_own_are_not_both_given():
    with pytest.raises(ConfigError, match=r"data\.train has no effect beside sft\.data; leave one"):
        loaded("sft", "data.train=a.jsonl", "sft.data=b.jsonl")
    assert loaded("sft", "data.train=a.jsonl").config.sft.data == "a.jsonl"


@pytest.mark.parametrize(
    "setting",
    [
        "data.image_root=/pictures",
        "data.verify_images=false",
        "data.on_bad_image=skip",
        "data.image_max_pixels=100000",
        "data.image_min_pixels=1000",
    ],
)
def test_keys_of_pictures_have_a_part_where_pictures_are_read(setting):
    """`quatrain sft` asked for `data.image_root` where it found no picture, and refused the key."""
    key = setting.partition("=")[0]
    assert loaded("sft", "sft.data=a.jsonl", "data.eval=null", setting).chose(key)
    assert loaded("dpo", "data.eval=q.jsonl", setting).chose(key)
    for task in ("dpo", "rm"):
        with pytest.raises(ConfigError, match=rf"{key} has no effect in quatrain {task}"):
            loaded(task, setting)


def test_prompts_to_complete_bring_the_keys_of_rollouts_and_rewards():
    config = loaded(
        "dpo", "data.eval=q.jsonl", "rollout.max_new_tokens=5", "reward.functions={correct: 1}", "eval.n=2"
    ).config
    assert (config.rollout.max_new_tokens, config.eval.n) == (5, 2)
    assert loaded("sft", "rollout.max_new_tokens=5").config.data.eval == "builtin:arithmetic-heldout"
    with pytest.raises(ConfigError, match=r"without data\.eval"):
        loaded("sft", "sft.data=mine.jsonl", "rollout.max_new_tokens=5")
    # Completions are greedy or drawn as `eval` says: these were accepted, and changed nothing.
    for setting in ("temperature=0.7", "top_p=0.9", "top_k=20", "min_p=0.1"):
        with pytest.raises(ConfigError, match=rf"rollout\.{setting[:5]}.* has no effect in quatrain dpo"):
            loaded("dpo", "data.eval=q.jsonl", f"rollout.{setting}")


@pytest.mark.parametrize(
    ("task", "overrides", "message"),
    [
        (
            "dpo",
            ("dpo.data=null",),
            "dpo.data must name data with the columns `chosen` and `rejected`, or `co",
        ),
        (
            "rm",
            ("rm.data=null",),
            "rm.data must name data with the columns `chosen` and `rejected`; set it, ",
        ),
        ("dpo", ("dpo.beta=0",), "dpo.beta must be greater than 0"),
        ("dpo", ("dpo.loss=robust", "dpo.label_smoothing=0.5"), "dpo.label_smoothing must be less than 0.5"),
        (
            "dpo",
            ("dpo.loss=ipo", "dpo.label_smoothing=0.1"),
            "label_smoothing has no effect for dpo.loss ipo",
        ),
        ("dpo", ("dpo.loss=orpo", "dpo.reference=m"), "dpo.reference has no effect for dpo.loss orpo, which"),
        (
            "dpo",
            ("dpo.desirable_weight=2",),
            "has no effect for dpo.loss sigmoid, which reads pairs; set dpo.",
        ),
        (
            "dpo",
            ("dpo.loss_args={x: 1}",),
            "dpo.loss_args has no effect for dpo.loss sigmoid, whose arguments",
        ),
        (
            "dpo",
            ("dpo.loss=apo",),
            "dpo.loss must be one of sigmoid, ipo, robust, hinge, orpo, simpo, kto, o",
        ),
        ("rm", ("rm.loss_args={x: 1}",), "rm.loss_args has no effect for rm.loss bradley_terry"),
        ("dpo", ("dpo.gamma=0.1",), "dpo.gamma has no effect for dpo.loss sigmoid; take simpo"),
        ("sft", ("sft.train_on=answers",), "sft.train_on must be 'completion', 'assistant' or 'all'"),
        ("sft", ("sft.on_long=drop",), "sft.on_long must be 'error', 'skip' or 'truncate'"),
        (
            "sft",
            ("checkpoint.best_metric=eval/loss",),
            "checkpoint.best_mode must be min for checkpoint.best_m",
        ),
        (
            "sft",
            ("run.stop_when={metric: eval/loss, patience: 0}",),
            "run.stop_when must be {metric: NAME, at",
        ),
        (
            "sft",
            ("run.stop_when={metric: eval/loss, patience: 1.5}",),
            "run.stop_when must be {metric: NAME,",
        ),
        (
            "sft",
            ("run.stop_when={metric: a, patience: 2, at_most: 1}",),
            "run.stop_when must be {metric: NAME",
        ),
        ("sft", ("run.stop_when={patience: 2}",), "run.stop_when must be {metric: NAME"),
    ],
)
def test_what_does_not_go_together_is_said(task, overrides, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        loaded(task, *overrides)


def test_losses_of_preferences_that_go_together():
    for loss in ("sigmoid", "robust"):
        assert (
            loaded("dpo", f"dpo.loss={loss}", "dpo.label_smoothing=0.49").config.dpo.label_smoothing == 0.49
        )
    own = loaded("dpo", "dpo.loss=a.py:f", "dpo.loss_args={x: 1}", "dpo.label_smoothing=0.1").config.dpo
    assert (own.loss, own.loss_args) == ("a.py:f", {"x": 1})
    loaded("dpo", "dpo.loss=kto", "dpo.undesirable_weight=2", "dpo.reference=m")
    loaded("sft", "checkpoint.best_metric=eval/loss", "checkpoint.best_mode=min")
    loaded("sft", "run.stop_when={metric: eval/loss, patience: 3}")


@pytest.mark.parametrize(
    ("task", "path", "rank", "rate"),
    [
        *(
            (task, "builtin:tiny", rank, 1e-3 * 10 ** (rank > 0))
            for task in ("sft", "dpo", "rm")
            for rank in (0, 4)
        ),
        ("sft", "org/model", 0, 1e-5),
        ("sft", "org/model", 4, 1e-4),
        ("dpo", "org/model", 0, 5e-7),
        ("dpo", "org/model", 4, 5e-6),
        ("rm", "org/model", 0, 1e-5),
        ("rm", "org/model", 4, 1e-4),
    ],
)
def test_learning_rates_are_those_of_task_model_and_adapters(tmp_path, task, path, rank, rate):
    file = written(tmp_path, f"model: {{path: {path}}}\nlora: {{rank: {rank}}}\n")
    found = loaded(task, path=file)
    assert found.config.given.learning_rate == rate
    assert found.provenance[f"{task}.learning_rate"] == "derived"
    assert found.config.optimizer.learning_rate is None


@pytest.mark.parametrize("task", ["sft", "dpo", "rm"])
def test_what_has_no_part_stays_null(task):
    """A derived value of a key without a part would be refused at the next load, or read as if it counted."""
    config = loaded(task).config
    for key, field in fields().items():
        if not has_part(config, key):
            assert value_at(config, key) == field.default, key
    own = {key for key in fields() if key.startswith(f"{task}.") and DERIVED in fields()[key].metadata}
    assert own
    assert all(value_at(config, key) is not None for key in own)


@pytest.mark.parametrize(
    ("task", "overrides", "budgets"),
    [
        ("sft", ("sft.max_length=20000",), (20000, 40000)),
        ("dpo", ("dpo.max_length=20000", "mesh=1,1,1,2"), (16384, 32768)),
        ("rm", ("rm.max_length=512",), (16384, 32768)),
        ("rl", ("sft.max_length=20000",), (20000, 40000)),
        ("rl", ("sft.max_length=20000", "sft.steps=0"), (16384, 32768)),
    ],
)
def test_token_budgets_come_from_the_length_of_rows(task, overrides, budgets):
    """A budget below `max_length` could not hold a row; one of rollouts' lengths says nothing about rows."""
    config = loaded(task, *overrides).config
    assert (config.update.max_tokens_per_device, config.logprob.max_tokens_per_device) == budgets


@pytest.mark.parametrize(
    ("task", "override", "message"),
    [
        (
            "sft",
            "update.max_tokens_per_device=99",
            "update.max_tokens_per_device=99 cannot hold one sequence of sft",
        ),
        (
            "dpo",
            "logprob.max_tokens_per_device=99",
            "logprob.max_tokens_per_device=99 cannot hold one sequence of d",
        ),
        ("rl", "update.max_tokens_per_device=99", "of sft.max_length = 100 tokens; set it to at least 100"),
    ],
)
def test_a_budget_below_max_length_is_refused(task, override, message):
    section = "sft" if task == "rl" else task
    with pytest.raises(ConfigError, match=re.escape(message)):
        loaded(task, f"{section}.max_length=100", override)
    loaded(task, f"{section}.max_length=99", override, "logprob.max_tokens_per_device=99")


def test_no_budget_of_rollouts_binds_rows():
    """`data.max_prompt_length` + `rollout.max_new_tokens`, 768 by default, are no lengths of given rows."""
    assert loaded("rm", "update.max_tokens_per_device=100").config.update.max_tokens_per_device == 100


def test_the_quickstart_gives_a_command_what_it_reads():
    sft = loaded("sft")
    assert (sft.config.sft.steps, sft.config.sft.learning_rate) == (80, 2e-3)
    assert (sft.config.rollout.max_new_tokens, sft.provenance["rollout.n"]) == (16, "default")
    assert sft.warnings == []
    dpo = loaded("dpo", "dpo.eval=held.jsonl")
    assert dpo.config.model.path == "builtin:tiny"
    assert dpo.provenance["rollout.max_new_tokens"] == "default"
    assert dpo.config.data.eval is None
    assert dpo.warnings == []
    [warning] = loaded("dpo", "dpo.eval=held.jsonl", "model.path=m").warnings
    assert "the defaults hold for optimizer, model.remat, whose" in warning
    assert "as --set dpo.learning_rate=" in warning


def test_surprises_are_warned_about():
    said = "has no effect, because sft.steps is 80; set sft.steps=0 to count epochs"
    assert f"sft.epochs (2) {said}" in loaded("sft", "sft.epochs=2").warnings
    # The default, asked for: the quickstart's 80 steps were 426 epochs of a small file, without a word.
    assert f"sft.epochs (1) {said}" in loaded("sft", "sft.epochs=1").warnings
    assert [w for w in loaded("rm").warnings if w.startswith("rm.eval is null: there is no evaluation")]
    assert [w for w in loaded("rm", "rm.learning_rate=0").warnings if w.startswith("rm.learning_rate is 0")]
    found = loaded("dpo", "lora.rank=4", "dpo.learning_rate=5e-7").warnings
    assert [w for w in found if "and dpo.learning_rate 5e-07, a rate for training all weights" in w]


def test_commands_that_train_nothing_read_a_runs_configuration_whatever_its_task():
    """`quatrain eval` and `serve` of a run on given data need keys of rollouts, which the run refuses."""
    found = loaded("dpo", "rollout.max_new_tokens=5", "data.eval=q.jsonl", "data.train=x.jsonl", trains=False)
    config = found.config
    assert (config.rollout.max_new_tokens, config.update.mini_batch_size) == (5, 16)
    assert found.warnings == []
    assert loaded("rm", trains=False).config.data.eval is None


def test_what_must_agree_on_resume_is_of_the_task():
    given = {"data", "steps", "epochs", "batch_size", "max_length", "on_long"}
    sft = must_agree_on_resume(loaded("sft").config)
    assert {f"sft.{key}" for key in (*given, "train_on")} <= sft.keys()
    assert {"run.task", "seed"} <= sft.keys()
    dpo = must_agree_on_resume(loaded("dpo").config)
    own = (
        "loss",
        "loss_args",
        "beta",
        "label_smoothing",
        "reference",
        "gamma",
        "desirable_weight",
        "undesirable_weight",
    )
    assert {f"dpo.{key}" for key in (*given, *own)} <= dpo.keys()
    rm = must_agree_on_resume(loaded("rm").config)
    assert {f"rm.{key}" for key in (*given, "loss", "loss_args", "center")} <= rm.keys()
    free = {"sft.learning_rate", "sft.schedule", "sft.warmup_steps", "sft.eval"}
    assert not free & sft.keys()
    assert must_agree_on_resume(loaded("rl").config).keys() & {f"sft.{key}" for key in given} == set()
    assert "sft.steps" in must_agree_on_resume(loaded("rl", "lora.rank=4").config)


def test_paths_of_given_data_are_beside_their_configuration(tmp_path):
    for name in ("a.jsonl", "b.jsonl", "mine.py", "model"):
        (tmp_path / name).touch()
    path = written(tmp_path, "dpo: {data: a.jsonl, eval: b.jsonl, loss: mine.py:f, reference: model}\n")
    dpo = load_config(path, (), {}, task="dpo").config.dpo
    assert (dpo.data, dpo.eval) == (str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert (dpo.loss, dpo.reference) == (f"{tmp_path}/mine.py:f", str(tmp_path / "model"))


def test_the_section_of_a_run():
    assert type(Config().given).__name__ == "SFTConfig"
    assert type(loaded("rm").config.given).__name__ == "RMConfig"
