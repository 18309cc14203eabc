import re
from pathlib import Path

import pytest

from quatrain.config.aliases import NAMES_ELSEWHERE, key_for
from quatrain.config.layers import valid_keys
from quatrain.config.load import load_config

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"


def test_every_name_has_a_valid_key_and_is_on_the_page_that_explains_it():
    assert set(NAMES_ELSEWHERE.values()) <= set(valid_keys())
    assert not NAMES_ELSEWHERE.keys() & set(valid_keys())
    page = PAGE.read_text("utf-8")
    last_parts = [name.rpartition(".")[2] for name in NAMES_ELSEWHERE]
    assert [name for name in last_parts if not re.search(rf"[`.:]\s?{re.escape(name)}\b", page)] == []


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
    ],
)
def test_names_of_other_libraries(name, key):
    assert key_for(name) == key


def test_the_error_about_an_unknown_key_names_ours():
    with pytest.raises(
        ValueError, match=r"unknown key 'optimizer.lr' .*; here it is 'optimizer.learning_rate'"
    ):
        load_config(None, ["optimizer.lr=1e-5"], environ={})
