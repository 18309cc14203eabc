import json
import re
import sys
from pathlib import Path

import pytest

from quatrain.cli import main as cli
from quatrain.config.load import load_config
from quatrain.config.settings import QUICKSTART

CONFIGS = Path(__file__).parents[2] / "configs"
ALL = sorted(CONFIGS.glob("*.yaml"))
ON_GIVEN_DATA = [path for path in ALL if path.name.startswith(("sft_", "dpo_", "rm_"))]
EACH = pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
EACH_BY_REWARDS = pytest.mark.parametrize(
    "path", [path for path in ALL if path not in ON_GIVEN_DATA], ids=lambda path: path.stem
)
ALGORITHMS = ("ppo", "dapo", "gspo", "cispo", "dr_grpo", "rloo", "remax", "dppo", "vapo")


def test_each_is_listed_once():
    page = (CONFIGS / "README.md").read_text("utf-8")
    listed = re.findall(r"^\| \[(\S+\.yaml)\]\(\1\) ", page, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in CONFIGS.glob("*.yaml"))


@EACH
def test_each_loads_without_a_warning(path):
    assert load_config(path, [], {}).warnings == []


@EACH_BY_REWARDS
@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_takes_another_batch_size_alone(path, size):
    whole = load_config(path, [], {}).config
    if whole.run.on_given_data:
        key = f"{whole.run.task}.batch_size"
        assert load_config(path, [f"{key}={size}"], {}).config.given.batch_size == size
        return
    config = load_config(path, [f"data.batch_size={size}"], {}).config
    steps = whole.data.batch_size // whole.update.mini_batch_size
    assert config.update.mini_batch_size == -(-size // steps)
    if config.critic.enabled:
        assert config.critic.mini_batch_size == config.update.mini_batch_size


@EACH
def test_each_is_planned_without_a_warning(path, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["quatrain", "plan", str(path), "--devices", "1", "--json"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    captured = capsys.readouterr()
    plan = json.loads(captured.out)
    assert (plan["warnings"], captured.err) == ([], "")
    config = load_config(path, [], {}).config
    if config.run.on_given_data:
        assert plan["rows_per_step"] == config.given.batch_size
    else:
        steps = config.data.batch_size // config.update.mini_batch_size
        assert plan["optimizer_steps_per_train_step"] == steps


@pytest.mark.parametrize("path", ON_GIVEN_DATA, ids=lambda path: path.stem)
def test_a_recipe_on_given_data_is_that_of_the_command_in_its_name(path):
    """And of the command that its own first lines name."""
    task = path.name.partition("_")[0]
    assert load_config(path, [], {}, task=task).config.run.task == task
    assert f"#   quatrain {task} configs/{path.name}\n" in path.read_text("utf-8")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_recipe_differs_from_the_grpo_one_only_in_its_algorithm(name):
    recipe, grpo = (
        load_config(CONFIGS / f"{stem}.yaml", [], {}).config
        for stem in (f"{name}_gsm8k_qwen25_0p5b", "gsm8k_qwen25_0p5b")
    )
    assert (recipe.model, recipe.eval, recipe.checkpoint) == (grpo.model, grpo.eval, grpo.checkpoint)
    assert recipe.data.system_prompt == grpo.data.system_prompt
    added = {"overlong": 1.0} if name == "dapo" else {}
    assert recipe.reward.functions == {**grpo.reward.functions, **added}
    assert recipe.optimizer.learning_rate == grpo.optimizer.learning_rate
    passes = recipe.data.batch_size / recipe.run.epochs
    assert passes == grpo.data.batch_size / grpo.run.epochs, "as many training steps"


@pytest.mark.parametrize(
    ("name", "estimator", "loss", "aggregation", "kl_in_reward", "optimizer_steps"),
    [
        ("ppo", "gae", "ppo_clip", "token_mean", 0.001, 4),
        ("dapo", "grpo", "ppo_clip", "token_mean", 0, 4),
        ("gspo", "grpo", "gspo", "seq_mean_token_mean", 0, 4),
        ("cispo", "grpo", "cispo", "token_mean", 0, 4),
        ("dr_grpo", "dr_grpo", "ppo_clip", "seq_mean_token_sum_norm", 0, 1),
        ("rloo", "rloo", "reinforce", "seq_mean_token_sum", 0.05, 1),
        ("remax", "remax", "reinforce", "seq_mean_token_sum", 0.05, 1),
        ("dppo", "grpo", "dppo_kl", "token_mean", 0, 4),
        ("vapo", "length_adaptive_gae", "ppo_clip", "token_mean", 0, 4),
    ],
)
def test_the_recipes_are_as_announced(name, estimator, loss, aggregation, kl_in_reward, optimizer_steps):
    config = load_config(CONFIGS / f"{name}_gsm8k_qwen25_0p5b.yaml", [], {}).config
    assert (config.advantage.estimator, config.update.loss) == (estimator, loss)
    assert config.update.loss_aggregation == aggregation
    assert (config.reward.kl_coef, config.update.kl_coef) == (kl_in_reward, 0)
    assert config.data.batch_size // config.update.mini_batch_size == optimizer_steps
    assert config.critic.enabled == (name in ("ppo", "vapo"))
    assert (config.rollout.dynamic_sampling_rounds > 1) == (name == "dapo")


def test_the_quickstart_is_the_embedded_one():
    assert (CONFIGS / "quickstart.yaml").resolve() == QUICKSTART.resolve()


def test_the_cpu_run_is_as_announced():
    config = load_config(CONFIGS / "gsm8k_smollm2_cpu.yaml", [], {}).config
    assert config.model.path == "models/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (config.data.train, config.data.eval) == ("openai/gsm8k:main", "openai/gsm8k:main:test")
    assert (config.data.batch_size, config.rollout.n, config.rollout.max_new_tokens) == (8, 8, 128)
    assert config.run.steps == 30


def test_the_run_with_pictures_trains_a_tower_and_is_evaluated_by_kinds_of_questions():
    """A recipe whose random tower stays as it is, or that lacks the control with shuffled pictures."""
    config = load_config(CONFIGS / "shapes.yaml", [], {}).config
    assert (config.model.path, config.model.vision) == ("builtin:tiny_vl", "all")
    kinds = ("colour", "larger", "count", "shuffled")
    assert config.data.eval == {kind: f"builtin:shapes-{kind}-heldout" for kind in kinds}


def test_the_gpu_run_is_as_announced():
    config = load_config(CONFIGS / "gsm8k_qwen25_0p5b.yaml", [], {}).config
    assert config.model.path == "Qwen/Qwen2.5-0.5B-Instruct"
    assert (config.data.batch_size, config.rollout.n, config.rollout.max_new_tokens) == (64, 8, 512)
    assert (config.optimizer.learning_rate, config.model.dtype) == (1e-6, "bfloat16")
    assert config.run.steps is None


@pytest.mark.parametrize("name", ["gsm8k_smollm2_cpu", "gsm8k_qwen25_0p5b"])
def test_the_prompt_asks_for_the_form_that_is_rewarded(name):
    prompt = load_config(CONFIGS / f"{name}.yaml", [], {}).config.data.system_prompt
    assert prompt is not None
    assert re.search(r"<think>[^<]+</think>\n<answer>[^<]+</answer>", prompt)
