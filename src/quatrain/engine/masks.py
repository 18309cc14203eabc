"""Which tokens may follow in sequences with a grammar, as bits; computed by llguidance (extra `serve`).

Data flow: `PerRequestSampling.grammar` -> `Guide.matcher` -> a round of `session.py`: `Guide.masks` -> the
decode step draws among these tokens -> `Matcher.consume` -> the masks of the next step. Plain Python.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

INSTALL = (
    "structured outputs need llguidance, which is not installed; install quatrain with the extra `serve` "
    "(pip install -e '.[serve]')"
)
NO_END = "structured outputs need a token that ends an answer, and the model has none"
MOST_GRAMMARS = 256
"""Compiled grammars that are kept."""
MOST_MASKS = 1024
"""Masks that are kept for tokens that have the same."""
MOST_CHARS = 2**20
"""Characters of a grammar."""


class Matcher:
    """How far a sequence has come in its grammar."""

    def __init__(self, matcher: Any, guide: Guide):
        self._matcher, self.guide = matcher, guide

    def copy(self) -> Matcher:
        """One that goes on alone."""
        return Matcher(self._matcher.deep_copy(), self.guide)

    @property
    def error(self) -> str | None:
        """Why it says nothing of the next token, in a line; None: it does."""
        return _line(self._matcher.get_error()) if self._matcher.is_error() else None

    @property
    def place(self) -> Any:
        """What `Guide.masks` asks."""
        return self._matcher

    def consume(self, token: int) -> None:
        """The sequence has a further token, which does not end it."""
        self._matcher.consume_token(token)


class Guide:
    """Compiles grammars for the vocabulary of a tokenizer, of which the model scores `vocab_size` words.

    `stop_ids` end an answer; where the grammar is at its end, all of them are allowed. Any thread may call
    `check` and `matcher`.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]):
        """Raises ValueError without llguidance, and for a model without stop ids."""
        if (reason := why_not(stop_ids)) is not None:
            raise ValueError(reason)
        from llguidance import LLExecutor, LLTokenizer

        # One alone, which stands for all: not every version of llguidance takes several.
        self._end, self._stop_ids = stop_ids[0], tuple(stop_ids)
        self._vocab_size = vocab_size
        text = tokenizer.backend_tokenizer.to_str()
        self._tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=self._end)
        self._executor = LLExecutor()
        self._compiled: OrderedDict[bytes, Matcher] = OrderedDict()
        self._shared: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, grammar: str) -> None:
        """Raises ValueError, with the reason in llguidance's words, for a grammar that it does not take."""
        self._first(grammar)

    def matcher(self, grammar: str) -> Matcher:
        """The beginning of a sequence; raises ValueError as `check` does."""
        return self._first(grammar).copy()

    def _first(self, grammar: str) -> Matcher:
        from llguidance import LLMatcher

        if len(grammar) > MOST_CHARS:
            raise ValueError(f"a grammar has at most {MOST_CHARS} characters; got {len(grammar)}; shorten it")
        key = hashlib.blake2b(grammar.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        with self._lock:
            if (known := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
                return known
        # `validate_grammar` says more than the error of a matcher does.
        if error := LLMatcher.validate_grammar(grammar, self._tokenizer):
            raise ValueError(_line(error))
        made = Matcher(LLMatcher(self._tokenizer, grammar, log_level=0), self)
        if made.error is not None:
            raise ValueError(made.error)
        with self._lock:
            self._compiled[key] = made
            while len(self._compiled) > MOST_GRAMMARS:
                self._compiled.popitem(last=False)
        return made

    def shared(self, mask: np.ndarray) -> np.ndarray:
        """A copy of `mask` [ceil(V / 32)], the same one for equal masks: a grammar has few distinct ones."""
        key = hashlib.blake2b(mask.tobytes(), digest_size=16).digest()
        with self._lock:
            found = self._shared.setdefault(key, mask.copy())
            self._shared.move_to_end(key)
            while len(self._shared) > MOST_MASKS:
                self._shared.popitem(last=False)
        return found

    def masks(self, matchers: Sequence[Matcher | None]) -> np.ndarray:
        """[B, ceil(V / 32)] uint32: a bit for each word that may follow; all words where there is no matcher.

        Bit i of number w is word 32 w + i. A matcher that comes to an error has all words, as what is drawn
        does not count then.
        """
        from llguidance.numpy import fill_next_token_bitmask_par

        words = -(-self._vocab_size // 32)
        masks = np.full((len(matchers), words), -1, np.int32)
        asked = [(each.place, row) for row, each in enumerate(matchers) if each is not None]
        if asked:
            fill_next_token_bitmask_par(self._executor, asked, masks)
        for each, row in asked:
            if each.is_error():
                masks[row] = -1
        found = masks.view(np.uint32)
        word, bit = divmod(self._end, 32)
        rows = [row for _, row in asked]
        ends = (found[rows, word] >> np.uint32(bit)) & np.uint32(1)
        for stop in self._stop_ids:  # nowhere else: it would end an answer that is not whole
            found[rows, stop // 32] &= ~(np.uint32(1) << np.uint32(stop % 32))
            found[rows, stop // 32] |= ends << np.uint32(stop % 32)
        return found


def why_not(stop_ids: Sequence[int]) -> str | None:
    """Why no grammar can be followed, and what to do about it; None: they can."""
    try:
        import llguidance  # noqa: F401 - whether it is there
    except ImportError:
        return INSTALL
    return None if stop_ids else NO_END


_guides: dict[bytes, Guide] = {}
_guides_lock = threading.Lock()


def guide_of(tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> Guide:
    """The guide of this vocabulary, made once in a process; raises ValueError as it does."""
    if (reason := why_not(stop_ids)) is not None:
        raise ValueError(reason)
    facts = f"{vocab_size}/{stop_ids}/{tokenizer.backend_tokenizer.to_str()}"
    key = hashlib.blake2b(facts.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    with _guides_lock:
        if key not in _guides:
            _guides[key] = Guide(tokenizer, vocab_size, stop_ids)
        return _guides[key]


def _line(text: str) -> str:
    """The first line of an error of llguidance."""
    return text.strip().partition("\n")[0]
