"""Recipes of the cookbook, as they are, against `quatrain serve --train` (`make test-tinker`).

Their data sets cannot be had without a network: folders with the same names and columns stand in for them.
"""

import collections
import json
import shutil
import time

import numpy as np
import pytest
from tinker_server import PROGRAMS, Server, finished, metrics_of, run_recipe, served, start_program

pytestmark = pytest.mark.tinker

NAMED = ("Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-4B")
"""Names of models that recipes look their renderer up by; each is a folder with the tokenizer as well."""
ALIASES = "tinker.aliases={" + ", ".join(f"{name}: 'builtin:tiny'" for name in NAMED) + "}"
SFT = ("batch_size=8", "lora_rank=8", "learning_rate=3e-3", "renderer_name=role_colon")
RL = (
    "env=arithmetic", "loss_fn=importance_sampling", "renderer_name=role_colon", "groups_per_batch=4",
    "group_size=4", "lora_rank=8", "learning_rate=1e-3",
)  # fmt: skip
DISTILLED = (
    "teacher_model={base}", "groups_per_batch=2", "group_size=2", "max_tokens=6", "lora_rank=8",
    "renderer_name=role_colon",
)  # fmt: skip
TWO = "max_steps=2"
CONVERSATIONS = [
    [{"role": "user", "content": f"What is {a} + {b}?"}, {"role": "assistant", "content": str(a + b)}]
    for a in range(16)
    for b in range(8)
]


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conversations(place):
    return lines(place / "conversations.jsonl", [{"messages": each} for each in CONVERSATIONS])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    place = tmp_path_factory.mktemp("recipes")
    with served(place, ALIASES) as running:
        yield running


def model(server):
    return f"model_name={server.base}"


def drawn(place):
    """How often each (prompt, tokens of its samples) was drawn."""
    found = [json.loads(line) for line in (place / "tokens.jsonl").read_text().splitlines()]
    return collections.Counter(
        (tuple(prompt), tuple(tokens)) for prompt, sequences in found for tokens in sequences
    )


def test_sft_learns(server, tmp_path):
    """The quick form of T7, on the built-in model without a warm start."""
    began = time.monotonic()
    steps = run_recipe(
        server, "chat_sl.train", tmp_path, model(server), *SFT, f"dataset={conversations(tmp_path)}",
        "num_epochs=3", "lr_schedule=constant", "learning_rate=1e-2",
    )  # fmt: skip
    losses = [step["train_mean_nll"] for step in steps if "train_mean_nll" in step]
    print(f"\n{len(losses)} steps, {time.monotonic() - began:.1f} s, nll {losses[0]:.3f} to {losses[-1]:.3f}")
    assert losses[-1] < 0.6 * losses[0], losses


def test_a_recipe_run_twice_has_the_same_numbers(server, tmp_path):
    """T14. Catches randomness that depends on clocks, names of sessions or the order of arrival."""
    for name in ("first", "second"):
        data_sets(tmp_path / name)
    words = [*distilled(server, tmp_path / "student"), "max_steps=4"]
    runs = [
        run_recipe(server, "distillation.on_policy_distillation", tmp_path / name, *words)
        for name in ("first", "second")
    ]
    kept = [
        [{key: value for key, value in step.items() if not key.startswith("time")} for step in steps]
        for steps in runs
    ]
    logged = sorted((server.place / "state").glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    losses = [[json.loads(line)["loss"] for line in log.read_text().splitlines()] for log in logged[-2:]]
    print(f"\n{len(kept[0][0])} figures of {len(kept[0])} rows, losses {losses}, seconds of steps "
          f"{[round(step['time/total'], 2) for step in runs[1] if 'time/total' in step]}")  # fmt: skip
    assert all(abs(loss) > 1e-3 for loss in losses[0])
    for first, second in zip(*kept, strict=True):
        assert first.keys() == second.keys()
        for key in first:
            # What the sampler's log-probabilities are in: they round with the batch of their decode, which
            # requests join as they arrive.
            rounds = key.startswith(("optim/kl_sample_train", "optim/entropy", "teacher_kl", "grad_norm"))
            wanted = pytest.approx(second[key], rel=1e-5, abs=1e-6) if rounds else second[key]
            assert first[key] == wanted, key
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert drawn(tmp_path / "first") == drawn(tmp_path / "second")


def distilled(server, place):
    """What the recipe for distillation needs, with a student trained for two steps: its KL is not 0.

    In `math_rl` the built-in model solves nothing: rewards are equal, and so all advantages 0.
    """
    words = [f"dataset={conversations(place)}", "save_every=0", TWO]
    run_recipe(server, "chat_sl.train", place, model(server), *SFT, *words)
    saved = json.loads((place / "log" / "checkpoints.jsonl").read_text().splitlines()[-1])
    teacher = [word.format(base=server.base) for word in DISTILLED]
    return [*teacher, model(server), "eval_every=0", f"load_checkpoint_path={saved['state_path']}"]


def with_tokenizers(server, place):
    """The server; names that recipes look up lead to its tokenizer in the folder of a program.

    Its special tokens have the names there that the cookbook's chat format of Qwen needs as one token each.
    """
    for name in NAMED:
        shutil.copytree(server.base, place / name)
        for file in (place / name).iterdir():
            words = file.read_text().replace("<|end|>", "<|im_end|>").replace("<|user|>", "<|im_start|>")
            file.write_text(words)
    return server


def killed_and_resumed(server, recipe, words, step):
    """The recipe with server and program killed when step `step` has been logged, and both started again.

    Returns the checkpoints that the server then has.
    """
    place, log = server.place, server.place / "log" / "metrics.jsonl"
    started = [PROGRAMS / "recorded.py", f"tinker_cookbook.recipes.{recipe}", f"log_path={log.parent}"]
    words = [*started, *words]
    process = start_program(server, words, place)
    while not log.is_file() or len(log.read_text().splitlines()) < step:
        assert process.poll() is None, (place / "out.log").read_text()[-4000:]
        time.sleep(0.05)
    server.kill()
    process.kill()
    process.wait()
    server.start()
    finished(start_program(server, words, place), place)
    return server.get("checkpoints?limit=1000&offset=0")["checkpoints"]


def arrays_of(server):
    """The arrays of the last checkpoint with the optimizer's state, by name, of the newest training run."""
    from safetensors.numpy import load_file

    folders = sorted((server.place / "state").glob("**/weights/final"), key=lambda path: path.stat().st_mtime)
    files = sorted(folders[-1].glob("**/*.safetensors"))
    assert files, list(folders[-1].iterdir())
    return {f"{file.name}:{name}": array for file in files for name, array in load_file(file).items()}


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_a_run_goes_on_after_both_sides_were_killed(tmp_path, kind):
    """T10. SFT ends with the same weights to the bit; RL draws what the uninterrupted run drew.

    Of the recipes for SFT, `chat_sl` saves after it has sent the next batch, which a resumed run repeats.
    """
    servers = []
    for name in ("whole", "again"):
        place = tmp_path / name
        data_sets(place)
        servers.append(Server(place, ALIASES))
    for server in servers:
        try:
            with_tokenizers(server.start(), server.place)
            if kind == "sft":
                recipe, words = "sl_loop", ["batch_size=16", "learning_rate=1e-2", "lora_rank=8"]
                words.append(f"model_name={NAMED[0]}")
            else:
                recipe, words = "distillation.on_policy_distillation", ["behavior_if_log_dir_exists=resume"]
                words += distilled(server, server.place / "student")
            words += ["save_every=3", "max_steps=12"]
            if server.place.name == "whole":
                run_recipe(server, recipe, server.place, *words)
            else:
                saved = killed_and_resumed(server, recipe, words, step=7)
        finally:
            if server.process.poll() is None:
                server.kill()
    whole, again = servers
    print(f"\n{kind}: {len(saved)} checkpoints after the second start")
    assert saved
    first, second = arrays_of(whole), arrays_of(again)
    assert first.keys() == second.keys()
    if kind == "sft":
        assert all(first[name].tobytes() == second[name].tobytes() for name in first)
        losses = [
            {step["step"]: step["train_mean_nll"] for step in metrics_of(each.place)} for each in servers
        ]
        assert losses[0] == losses[1]
        print(f"{len(losses[0])} losses and {len(first)} arrays are equal")
    else:
        apart = max(np.abs(first[name] - second[name]).max() for name in first)
        found, wanted = drawn(again.place), drawn(whole.place)
        share = 1 - (found - wanted - wanted).total() / found.total()  # some steps are sampled twice
        print(f"{share:.4f} of {found.total()} sequences alike, weights apart {apart:.2g}")
        assert share >= 0.999


def data_sets(place):
    """Stand-ins, in the working directory, for data sets and models that recipes name."""
    said = [[question["content"], answer["content"]] for question, answer in CONVERSATIONS]
    readme = "---\nconfigs:\n- config_name: main\n  data_files:\n"
    readme += (
        "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test")) + "---\n"
    )
    for split in ("train", "test"):
        gsm8k = [{"question": q, "answer": f"It is {a}.\n#### {a}"} for q, a in said]
        lines(place / "openai" / "gsm8k" / f"{split}.jsonl", gsm8k)
        robots = [{"messages": each, "prompt": q} for each, (q, _) in zip(CONVERSATIONS, said)]
        lines(place / "HuggingFaceH4" / "no_robots" / f"{split}.jsonl", robots * 2)
        pairs = [
            {
                key: f"\n\nHuman: {q}\n\nAssistant: {a if key == 'chosen' else 'no'}"
                for key in ("chosen", "rejected")
            }
            for q, a in said
        ]
        lines(place / "Anthropic" / "hh-rlhf" / f"{split}.jsonl", pairs)
        deep = [{"question": q, "final_answer": a, "difficulty": 1.0} for q, a in said]
        lines(place / "zwhe99" / "DeepMath-103K" / f"{split}.jsonl", deep)
    (place / "openai" / "gsm8k" / "README.md").write_text(readme)


GAME = ("renderer_name=role_colon", "batch_size=2", "group_size=2", "max_tokens=4", "eval_every=0", TWO)
RECIPES = {
    "math_rl.train ppo": [*RL[:1], "loss_fn=ppo", *RL[2:], TWO],
    "math_rl.train cispo": ["env=gsm8k", "loss_fn=cispo", *RL[2:], "num_substeps=2", "max_tokens=6", TWO],
    "math_rl.train off policy": ["env=arithmetic", "loss_fn=ppo", *RL[2:], "max_steps_off_policy=1", TWO],
    "math_rl.train post kl": [*RL, "compute_post_kl=True", TWO],
    "multiplayer_rl.guess_number.train": GAME,
    "multiplayer_rl.twenty_questions.train": GAME,
    "chat_sl.train": [*SFT, "dataset=conversations.jsonl", TWO],
    "prompt_distillation.train": [*SFT, "file_path=conversations.jsonl", TWO],
    "preference.dpo.train": ["dataset=hhh", "batch_size=8", "renderer_name=role_colon", TWO],
    "distillation.on_policy_distillation": [*DISTILLED, TWO],
    "sl_loop": ["batch_size=16", "lora_rank=8", TWO],
    "rl_loop": ["loss_fn=cispo", "batch_size=4", "group_size=2", "max_tokens=6", "lora_rank=8", TWO],
    "sl_basic": ["max_steps=1"],
    "rl_basic": ["max_steps=1", "max_tokens=4"],  # its batches cannot be made smaller
}  # fmt: skip
BY_TABLE = ("sl_loop", "rl_loop", "sl_basic", "rl_basic")
"""Recipes that take their renderer from the cookbook's table of models, and so need a name from it."""
ANSWERED = "multiplayer_rl.twenty_questions.train"
"""The recipe whose questions a model answers that it names itself."""


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_run(server, tmp_path, name):
    """T15. Each ends well, with the steps that were asked for."""
    recipe, words = name.partition(" ")[0], [word.format(base=server.base) for word in RECIPES[name]]
    data_sets(tmp_path)
    conversations(tmp_path)
    if recipe in (*BY_TABLE, ANSWERED):
        with_tokenizers(server, tmp_path)
    if recipe not in BY_TABLE:
        words.append(model(server))
    began = time.monotonic()
    steps = run_recipe(server, recipe, tmp_path, *words)
    print(f"\n{name}: {time.monotonic() - began:.1f} s, server {server.memory_mb()[0]} MB")
    wanted = 1 if "max_steps=1" in words else 2
    assert len({step["step"] for step in steps}) >= wanted


def test_the_default_loss_of_a_recipe_is_refused_by_name(server, tmp_path):
    """It is computed by the service alone; the message says what to give instead."""
    words = [
        PROGRAMS / "recorded.py",
        "tinker_cookbook.recipes.math_rl.train",
        f"log_path={tmp_path / 'log'}",
    ]
    words += [model(server), "env=arithmetic", "renderer_name=role_colon", "groups_per_batch=2", TWO]
    process = start_program(server, words, tmp_path)
    assert process.wait(300) != 0
    assert "stable_reinforce is computed only by Tinker's service" in (tmp_path / "out.log").read_text()
