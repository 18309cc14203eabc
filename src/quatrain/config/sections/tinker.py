"""The section about the training server, `quatrain serve MODEL --train`: `tinker`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from quatrain.config.fields import Count, Section, Text

REPLACEMENTS = Literal["importance_sampling", "ppo", "cispo"]


class TinkerConfig(Section):
    """The training server, which programs of others train through: [tinker.md](tinker.md). Runs read none
    of it."""

    aliases: dict[Text, Text] = Field({})
    """Further names by which programs may ask for the served model, as in
    `{Qwen/Qwen3.5-9B: models/smollm2}`; each value is `model.path`."""
    replace_stable_reinforce: REPLACEMENTS | None = None
    """The loss that stands in for `stable_reinforce`, whose formula is not public; null: programs that ask
    for it get an error."""
    max_models: Count | None = None
    """Training clients at once; null: as many as the memory has room for, by what each of them takes."""
    max_samplers: Count | None = None
    """Samplers that decode at once, each with a KV cache of its own; others wait until one has finished.
    null: as the memory has room, at most 4, on a CPU 2."""
    session_timeout_s: Count = 900
    """Seconds after which a program that gave no sign of life loses its training clients and samplers.
    Checkpoints stay."""
    state: Text = "tinker-state"
    """Folder with checkpoints, figures of training clients, and the tokenizer that programs load."""
