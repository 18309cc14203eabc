import re
from pathlib import Path

import pytest

from quatrain.config.algorithms import ESTIMATORS, LOSSES
from quatrain.config.aliases import (
    _EXPLAINED,
    _VALUES,
    INSIDE,
    NAMES_ELSEWHERE,
    key_for,
    suggestion,
    value_for,
)
from quatrain.config.convert import read_theirs
from quatrain.config.errors import ConfigError
from quatrain.config.load import load_config
from quatrain.config.settings import sections, valid_keys

THEIRS = Path(__file__).with_name("theirs")
PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"


def test_every_name_has_a_valid_key_and_is_on_the_page_that_explains_it_or_in_a_sample():
    assert set(NAMES_ELSEWHERE.values()) <= set(valid_keys())
    assert not NAMES_ELSEWHERE.keys() & set(valid_keys())
    page = PAGE.read_text("utf-8") + " `".join(
        key for path in THEIRS.iterdir() for key in read_theirs(path.read_text("utf-8"), path.name)
    )
    last_parts = [name.rpartition(".")[2] for name in NAMES_ELSEWHERE]
    assert [name for name in last_parts if not re.search(rf"[`.:]\s?{re.escape(name)}\b", page)] == []


PARENTHESES = re.compile(r"\((?:[^()`]|`[^`]*`)*\)")
COLUMNS, CALLS = {"prompt", "prompts"}, {"train", "compute_score", "None", "RLOOTrainer", "ToolEnvironment"}
"""Names in the tables that are no keys: columns of data sets, functions, trainers and other classes."""
TRAINERS = {"DPOTrainer", "KTOConfig", "ORPOConfig", "EarlyStoppingCallback"}
OBJECTS = {"GRPOConfig", "RLCluster", "critic", "reward_model", "actor", "actor.policy_loss"}
VALUES = {
    "binary_kl",
    "binary_tv",
    "left",
    "colocate_async",
    "separate_async",
    "ppo",
    "kl",
    "mse",
    "mse_kl",
    "low_var_kl",
    "k3+",
}
MODULES = {"trl.experimental.gmpo", "trl.experimental.dppo"}


def _columns():
    """(title, cell, cell of quatrain's column) of each column of another library in the page's tables."""
    for block in PAGE.read_text("utf-8").split("\n\n"):
        lines = [line.strip("|").split("|") for line in block.splitlines() if line.startswith("|")]
        head, *rows = [[cell.strip() for cell in cells] for cells in lines] or [[]]
        for column, title in enumerate(head):
            if title.startswith(("verl", "TRL", "Tunix")):
                yield from ((title, row[column], row[0]) for row in rows[1:] if row[0] != "verl")


def _names(cell):
    """The names in a cell, without their values; `.name` continues the name before it."""
    previous = ""
    for text in re.findall(r"`([^`]+)`", PARENTHESES.sub("", cell)):
        name = re.split(r"[:(]", text)[0].removesuffix(".*")
        previous = previous.rpartition(".")[0] + name if name.startswith(".") else name
        yield previous


def test_every_key_in_the_tables_of_the_page_has_a_suggestion():
    ours = set(valid_keys())
    values = {value for title, cell, _ in _columns() if _value_key(title, "") for value in _names(cell)}
    no_keys = values | VALUES | COLUMNS | CALLS | OBJECTS | MODULES | TRAINERS
    names = {name for _, cell, _ in _columns() for name in _names(cell)} - ours - no_keys
    assert len(names) > 150
    assert sorted(name for name in names if suggestion(name) is None) == []


def _value_key(title, ours):
    """The key here whose values a table of values lists, by the title of its column."""
    named = re.search(r": `(?:\w+\.)*(\w+)`$", title)
    if named is None or named[1] == "optim":
        return None
    return "update.loss_aggregation" if named[1] == "loss_type" else key_for(named[1])


def test_every_value_in_the_tables_of_values_has_ours():
    checked = 0
    for title, cell, ours in _columns():
        key = _value_key(title, ours)
        for value in _names(cell) if key else ():
            if "." in value or value in ("gamma", "gae_lambda", *LOSSES, *ESTIMATORS):
                continue  # a key beside the value, or a name that is valid here too
            accepted = re.findall(r"`([a-z0-9_]+)`", ours)
            here = value_for(key, value) or value
            assert re.split("[ ,]", here)[0] in accepted, value
            checked += 1
    assert checked > 15


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("gradient_accumulation_steps=4", "is derived here: 'update.mini_batch_size'"),
        ("trainer.n_gpus_per_node=8", "the number of devices is derived here"),
        ("rollout.gpu_memory_utilization=0.5", "'rollout.max_concurrency' limits"),
        ("report_to=wandb", "here it is 'logging.wandb', 'logging.trackio' or 'logging.tensorboard'"),
        ("update.clip_max=0.3", "1 + 'update.clip_high'"),
        ("update.loss=dapo", "here it is ppo_clip, with its clip_high of 0.28"),
        ("update.kl_estimator=low_var_kl", "here it is k3"),
        ("kl_estimator=low_var_kl", "the nearest valid key is 'update.kl_estimator'"),
        ("advantage.estimator=reinforce_plus_plus", "here it is reinforce_pp"),
    ],
)
def test_the_error_says_what_to_do_here(setting, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        load_config(None, [setting], environ={})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("rollout.num_generations", "rollout.n"),
        ("optimizer.lr", "optimizer.learning_rate"),
        ("actor_rollout_ref.actor.optim.lr", "optimizer.learning_rate"),
        ("critic.optim.lr", "critic_optimizer.learning_rate"),
        ("critic.learning_rate", "critic_optimizer.learning_rate"),
        ("critic.lr", "critic_optimizer.learning_rate"),
        ("sft.lr", "sft.learning_rate"),
        ("critic.ppo_epochs", "critic.epochs"),
        ("actor_rollout_ref.actor.ppo_epochs", "update.epochs"),
        ("data.max_response_length", "rollout.max_new_tokens"),
        ("learning_rate", "optimizer.learning_rate"),
        ("warmup_steps", "optimizer.warmup_steps"),
        ("stf.learning_rate", None),
        ("rollout.tempature", None),
        ("grpo.sync_ref_model", "update.reference_sync_steps"),
        ("data.prompt_key", "data.question_column"),
        ("data.train_files", "data.train"),
        ("custom_reward_function.path", "reward.functions"),
        ("training.profiler_options", "run.profile_steps"),
        ("rollout.tensor_parallel_size", "rollout.mesh"),
        ("actor_rollout_ref.rollout.n", "rollout.n"),
        ("temperature", "rollout.temperature"),
        ("data.seed", "seed"),
    ],
)
def test_names_of_other_libraries(name, key):
    assert key_for(name) == key


def test_the_error_about_an_unknown_key_names_ours():
    with pytest.raises(
        ValueError, match=r"unknown key 'optimizer.lr' .*; here it is 'optimizer.learning_rate'"
    ):
        load_config(None, ["optimizer.lr=1e-5"], environ={})


def test_each_key_of_another_librarys_file_has_its_own_error(tmp_path):
    path = tmp_path / "verl.yaml"
    path.write_text(
        "actor_rollout_ref: {rollout: {n: 5}, actor: {ppo_mini_batch_size: 4, odd: 1}}\nfoo: {a: 1}\n"
    )
    with pytest.raises(ConfigError) as error:
        load_config(path, [], {})
    problems = [problem.replace(f" (from file {path})", "") for problem in error.value.problems]
    assert problems[:2] == [
        "unknown key 'actor_rollout_ref.rollout.n'; here it is 'rollout.n'",
        "unknown key 'actor_rollout_ref.actor.ppo_mini_batch_size'; here it is 'update.mini_batch_size'",
    ]
    assert [problem.partition(";")[0] for problem in problems[2:]] == [
        "unknown key 'actor_rollout_ref.actor.odd'",
        "unknown key 'foo'",
    ]


def test_each_value_and_each_key_that_advice_names_loads():
    """Catches advice that is an error itself, such as a setting above 0 that must be 2 or more."""
    for key, values in _VALUES.items():
        for ours in dict.fromkeys(values.values()):
            load_config(None, [f"{key}={re.split('[ ,]', ours)[0]}", "rollout.n=2"], environ={})
    texts = [
        *_EXPLAINED.values(),
        *INSIDE.values(),
        *(v for values in _VALUES.values() for v in values.values()),
    ]
    named = {name for text in texts for name in re.findall(r"'([a-z_.]+)'", text)}
    assert named - {*valid_keys(), *sections(), "model:PATH"} == set()
    for rounds in re.findall(r"'rollout.dynamic_sampling_rounds' of (\d+)", " ".join(texts)):
        load_config(None, [f"rollout.dynamic_sampling_rounds={rounds}"], environ={})
    assert "'rollout.dynamic_sampling_rounds' above 0" not in " ".join(texts)
