"""A child process that renders chat templates, which are programs from a model's folder.

A template can take any time and memory (`{{ 'a' * 10**10 }}`). `tokenizer.py` runs this script as a
`Child` (`workers/child.py`); a timer signal kills it on a slow template. It reads lines with a JSON list
[template, special tokens and other variables (schemas of tools among them), messages, add_generation_prompt],
and writes [true, text] or [false, reason] for each. It imports nothing from quatrain.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import signal
import sys
from typing import Any

# Threads of numpy's libraries would take address space, which is limited below.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}

CPU_LIMIT_S = 2.0
MEMORY_LIMIT_BYTES = 1 << 30
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


def _render(
    template: Any, variables: dict[str, Any], messages: list[Any], add_prompt: bool
) -> tuple[bool, str]:
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


def main() -> None:
    """Answers requests until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles keyboard interrupts
    _tokenizer('""')  # imports transformers, whose time does not count as a template's
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    for line in sys.stdin:
        request = json.loads(line)
        # The default action of SIGPROF ends the process, even in the middle of C code.
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        reply = json.dumps(_render(*request))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, flush=True)


if __name__ == "__main__":
    main()
