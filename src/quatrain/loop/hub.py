"""Sends an exported model to the Hugging Face Hub, with its card (`hub.push`, `quatrain export --push`).

Data flow: the folder that `loop.export` wrote, and the run's folder -> a repository on the Hub.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quatrain.config.places import HUB_ID
from quatrain.loop.export import ADAPTER, BASE
from quatrain.report.card import model_card
from quatrain.weights.hf import INDEX, SINGLE

CARD = "README.md"
STALE = (INDEX, SINGLE, "model-*.safetensors", f"{ADAPTER}/*")
"""What an earlier push may have left, and a model would be loaded from beside or instead of the new files."""


def make_repository(repository: str, *, private: bool) -> None:
    """Create the model repository `repository` on the Hub, unless it exists.

    Raises ValueError if it cannot be created or seen: no login, no right, no network.
    """
    from huggingface_hub import HfApi

    with _asking(repository):
        HfApi().create_repo(repository, private=private, exist_ok=True)


def push(folder: Path, repository: str, *, run: Path, step: int) -> str:
    """Write the card of the model in `folder`, send both to `repository`, and return the commit's address.

    `folder` has the model of training step `step` of the run at `run`. Adapters are left out unless they
    belong to a model on the Hub, as is their base: peft would look for it in a local folder. Weights and
    adapters in the repository that are not among the new files are deleted there. Raises ValueError if the
    Hub does not take it.
    """
    from huggingface_hub import HfApi

    (folder / CARD).write_text(model_card(run, step, repository), encoding="utf-8")
    left_out = [f"{BASE}/**"]
    adapter = folder / ADAPTER / "adapter_config.json"
    if adapter.is_file():
        base = json.loads(adapter.read_text("utf-8"))["base_model_name_or_path"]
        if not HUB_ID.fullmatch(base):
            left_out.append(f"{ADAPTER}/**")
    with _asking(repository):
        done = HfApi().upload_folder(
            repo_id=repository,
            folder_path=folder,
            ignore_patterns=left_out,
            delete_patterns=list(STALE),
            commit_message=f"Step {step} of {run.resolve().name}",
        )
    return str(done.commit_url)


@contextmanager
def _asking(repository: str) -> Iterator[None]:
    """Raises ValueError for the exceptions of huggingface_hub and its HTTP libraries, of many classes."""
    try:
        yield
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"the Hugging Face Hub refused {repository} ({type(error).__name__}: {reason}): set HF_TOKEN to "
            "a token that may write there, or log in with `hf auth login`, and check the name and the network"
        ) from error
