import re
from pathlib import Path

import pytest

from quatrain.config.layers import QUICKSTART
from quatrain.config.load import load_config

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_each_loads_without_a_warning(path):
    assert load_config(path, [], {}).warnings == []


def test_the_quickstart_is_the_embedded_one():
    assert (CONFIGS / "quickstart.yaml").resolve() == QUICKSTART.resolve()


def test_the_cpu_run_is_as_announced():
    config = load_config(CONFIGS / "gsm8k_smollm2_cpu.yaml", [], {}).config
    assert config.model.path == "models/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (config.data.train, config.data.eval) == ("openai/gsm8k:main", "openai/gsm8k:main:test")
    assert (config.data.batch_size, config.rollout.n, config.rollout.max_new_tokens) == (8, 8, 128)
    assert config.run.steps == 30


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
