"""Reads input files as quatrain does, in a process of its own with limits on time and memory.

`python fuzz_targets.py` answers one JSON line [target, folder] after the other with one JSON line
[error's class or null, whether the command line prints it as one error, its message]. The files of the input
are in the folder. `fuzz_worker.py` starts the process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

TIME_LIMIT_S = 5.0
"""Seconds of the processor that one input may take."""
MEMORY_LIMIT_BYTES = 10**9
"""Memory that one input may take beyond what the process needs without it."""
HI = [{"role": "user", "content": "hi"}]


def architecture(folder: Path) -> None:
    """config.json and generation_config.json, as `quatrain plan --params` and reward models read them."""
    from quatrain.models.params import abstract_params
    from quatrain.weights.hf import check_classifier, read_architecture

    abstract_params(read_architecture(folder))
    if "ForSequenceClassification" in (folder / "config.json").read_text("utf-8", "replace"):
        check_classifier(str(folder))


def model(folder: Path) -> None:
    """A model folder: config.json, index, safetensors."""
    from quatrain.weights.hf import load_hf

    load_hf(folder)


def tokenizer(folder: Path) -> None:
    """A tokenizer folder, and its chat template."""
    from quatrain.data.tokenizer import load_tokenizer, render, stop_token_ids

    loaded = load_tokenizer(str(folder))
    stop_token_ids(loaded, ())
    render(loaded, "hi")
    render(loaded, HI)


def gguf(folder: Path) -> None:
    """A GGUF file: architecture, tokenizer, weights."""
    from quatrain.data.tokenizer import load_tokenizer, render, stop_token_ids
    from quatrain.weights.gguf import gguf_architecture, load_gguf

    path = folder / "model.gguf"
    arch = gguf_architecture(path)
    loaded = load_tokenizer(str(path))
    stop_token_ids(loaded, arch.eos_token_ids)
    render(loaded, "hi")
    render(loaded, HI)
    load_gguf(path)


def data(folder: Path) -> None:
    """A data file, with the prompts of its rows, and what a run writes of them."""
    from quatrain.config.schema import DataConfig
    from quatrain.data.builtin import builtin_tokenizer
    from quatrain.data.examples import load_examples
    from quatrain.data.prompts import load_prompts

    (path,) = folder.iterdir()
    prompts = load_prompts(str(path), DataConfig(), builtin_tokenizer(), seed=0)
    for prompt in prompts.head(None):
        json.dumps(prompt.text, allow_nan=False, ensure_ascii=False).encode()
    if "completion" in prompts.head(1)[0].columns:
        load_examples(str(path), DataConfig(), builtin_tokenizer(), train_on="assistant", seed=0).batch(0, 4)


def config(folder: Path) -> None:
    """A configuration file, and the plan and the copy of it in the run's folder."""
    from quatrain.config.dump import dump_yaml, to_json
    from quatrain.config.load import load_config
    from quatrain.plan.batch_plan import plan, render

    resolved = load_config(folder / "config.yaml", environ={})
    dump_yaml(resolved)
    to_json(resolved)
    render(plan(resolved.config, devices=8, processes=2))


def dotenv(folder: Path) -> None:
    """An .env file."""
    from quatrain.config.dotenv import load_dotenv

    load_dotenv({"HOME": str(folder)}, folder)


def metrics(folder: Path) -> None:
    """The metrics of a run that is resumed."""
    from quatrain.run.metrics import MetricsFile, read_metrics

    read_metrics(folder / "metrics.jsonl")
    file = MetricsFile(folder / "metrics.jsonl")
    file.rewind(3)
    file.write(10**9, {"reward/mean": 0.5})


def saved_state(folder: Path) -> None:
    """The host data of a checkpoint."""
    from quatrain.config.files import read_json
    from quatrain.run.resume import check_saved_state
    from quatrain.types.batches import PromptPosition

    host = read_json(folder / "host.json")
    check_saved_state(host, folder)
    PromptPosition(**host["place"])


def spin(folder: Path) -> None:
    """Takes all time, to test the limit."""
    while True:
        pass


def hoard(folder: Path) -> None:
    """Takes all memory, to test the limit."""
    bytearray(2 * MEMORY_LIMIT_BYTES)


TARGETS = (architecture, model, tokenizer, gguf, data, config, dotenv, metrics, saved_state)


def _outcome(target: str, folder: Path) -> tuple[str | None, bool, str]:
    try:
        run = next(each for each in (*TARGETS, spin, hoard) if each.__name__ == target)
        run(folder)
    except BaseException as error:  # also a panic of a library in Rust
        kind = type(error)
        # As in quatrain.cli.main.
        printed = isinstance(error, ValueError | OSError) or kind.__module__.startswith("quatrain.")
        return kind.__name__, printed, str(error)
    return None, True, ""


def _warm_up() -> None:
    """Imports what the targets need, so that its time and memory are not counted as an input's."""
    import jax
    import jax.numpy as jnp
    import pyarrow.csv
    import pyarrow.parquet  # noqa: F401
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    import quatrain.data.prompts
    import quatrain.data.tokenizer
    import quatrain.plan.batch_plan
    import quatrain.weights.gguf
    import quatrain.weights.hf  # noqa: F401

    jax.block_until_ready(jnp.zeros(3))


def main() -> None:
    """Answers requests until standard input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no reply
    os.environ["HF_HUB_OFFLINE"] = "1"
    _warm_up()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + MEMORY_LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        target, folder = json.loads(line)
        # The default action of SIGPROF ends the process, even in the middle of C code.
        signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
        outcome = _outcome(target, Path(folder))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(outcome), file=replies, flush=True)


if __name__ == "__main__":
    main()
