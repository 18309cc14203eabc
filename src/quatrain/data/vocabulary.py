"""Whether two tokenizers give the same ids to the same texts.

Data flow: the tokenizers of two models that read the same ids, policy and teacher -> an error that says
where they differ.
"""

from typing import Any

TEXTS = ("Hello, world!", "3 + 4 = 7, so x = 0.5.", "  def f(x):\n\treturn x ** 2", "naïve – 東京 🙂")
"""Texts whose ids are compared: words, numbers, white space, and what is not ASCII."""


def check_same_tokens(other: Any, tokenizer: Any) -> None:
    """Raises ValueError, with the first difference, if `other` reads other texts in ids of `tokenizer`.

    Their vocabularies must have the same token for each id that both have, special tokens too, and the ids
    of a few texts must be equal. Tokens beyond the last of the smaller vocabulary may be anything: they are
    padding, or special tokens that only one of the models was given.
    """
    own, theirs = _by_id(tokenizer), _by_id(other)
    rows = min(max(own), max(theirs)) + 1
    for token in range(rows):
        if own.get(token) != theirs.get(token):
            _refuse(f"id {token} is {theirs.get(token)!r} there and {own.get(token)!r} in the policy's")
    for text in TEXTS:
        ids, wanted = (list(each.encode(text, add_special_tokens=False)) for each in (other, tokenizer))
        if ids != wanted:
            _refuse(f"{text!r} has the ids {ids} there and {wanted} in the policy's")


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {token: text for text, token in tokenizer.get_vocab().items()}


def _refuse(difference: str) -> None:
    raise ValueError(
        f"its tokenizer must be the policy's, because it reads the same token ids: {difference}; choose a "
        "model with the tokenizer of the policy"
    )
