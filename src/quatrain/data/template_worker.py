"""Renders chat templates, which are programs from a model's folder, in a worker process (`tokenizer.py`).

A template can take any time and memory (`{{ 'a' * 10**10 }}`). This module imports nothing from quatrain.
"""

from __future__ import annotations

import functools
import json
import os
from typing import Any

# Threads of numpy's libraries would take memory, which is limited.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}

MAX_ADDED_CHARS = 1_000_000
"""Characters that a template may write beyond those of the messages."""
MAX_REASON_CHARS = 300


@functools.cache
def _tokenizer(template: str) -> Any:
    """A tokenizer without a vocabulary, which renders `template`, a JSON value."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), chat_template=json.loads(template)
    )


def render(request: str) -> tuple[bool, str]:
    """Whether a template takes messages, and the text, or else the reason.

    `request` is JSON of the template, the variables that it gets (special tokens, schemas of tools and
    others), the messages, and whether the start of an answer is added.
    """
    template, variables, messages, add_prompt = json.loads(request)
    try:
        text = _tokenizer(json.dumps(template)).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_prompt, **variables
        )
    except Exception as error:  # templates raise exceptions of any class
        own = type(error).__module__.startswith("jinja2.")
        reason = str(error) if own else f"{type(error).__name__}: {error}"
        return False, reason[:MAX_REASON_CHARS]
    if len(text) > len(str(messages)) + MAX_ADDED_CHARS:
        return False, f"it writes {len(text)} characters; {MAX_ADDED_CHARS} beyond the messages are allowed"
    return True, text


_tokenizer('""')  # imports transformers, whose time does not count as a template's
