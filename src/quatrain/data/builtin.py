"""The built-in offline tasks: arithmetic word problems, demonstrations of solutions, and tokenizers.

The task with pictures is that of `shapes.py`. `rows.py` uses the rows and `tokenizer.py` the tokenizers.
Needs no file and no network.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quatrain.data import shapes

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerFast

# Difficulty of the task: the model must learn each fact, a triple (first operand, operator, second operand)
# with operands up to MAX_OPERAND and a result >= 0; names, objects and sentences vary around it. The
# demonstrations always have the right format, but in most of them the result is off by one. Supervised
# training on them cannot reach a good accuracy, so that the effect of reinforcement learning is visible.
MAX_OPERAND = 5
DEMONSTRATED_RIGHT = 0.25  # share of demonstrations with the right result
TRAIN_ROWS_PER_FACT = 32
HELDOUT_ROWS = 200
HELDOUT_SHARE = 8  # one in HELDOUT_SHARE texts is held out

NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Mia", "Sam", "Zoe")
OBJECTS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")
TEMPLATES = {
    "+": (
        "{name} has {a} {objects} and buys {b} more. How many now?",
        "{name} has {a} {objects} and finds {b} more. How many now?",
        "{name} has {a} {objects} and gets {b} more. How many now?",
    ),
    "-": (
        "{name} has {a} {objects} and loses {b}. How many now?",
        "{name} has {a} {objects} and sells {b}. How many now?",
        "{name} has {a} {objects} and gives away {b}. How many now?",
    ),
}
SPLITS = ("arithmetic", "arithmetic-heldout")
SEES = "tiny_vl"
"""The built-in model that reads pictures, with a tokenizer for `builtin:shapes`."""

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
PAD, EOS = "<|pad|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
# A word's token includes the space before it, and the space after it if a digit follows, so that a digit is
# the same token in every context.
_PIECES = r"</?(?:think|answer)>| ?\p{L}+(?: (?=\p{N}))?|\p{N}"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# As in Qwen's vocabulary; the placeholder is the last token but one (`families.builtin_architecture`).
PICTURE = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
PICTURE_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    f"{{{{ '{''.join(PICTURE)}' }}}}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def builtin_rows(name: str) -> list[dict[str, Any]]:
    """The fixed rows of `builtin:<name>`, with columns `prompt` (messages), `answer` and `completion`.

    `arithmetic` is for training, `arithmetic-heldout` for evaluation; the rows with pictures are those of
    `shapes_rows`. The hash of a problem's text decides to which part it belongs, so no text is in both. Each
    fact (such as 3 + 4) in the evaluation data is also in the training data, with other names and
    objects. Raises ValueError for an unknown name.
    """
    if name not in (*SPLITS, *shapes.SPLITS):
        known = ", ".join((*SPLITS, *shapes.SPLITS))
        raise ValueError(f"no built-in data set is called {name!r}; there are {known}")
    return [dict(row) for row in (_arithmetic()[name] if name in SPLITS else shapes.shapes_rows(name))]


@functools.cache
def _arithmetic() -> dict[str, list[dict[str, Any]]]:
    # The first operand is at least 2, because the sentences use the plural.
    pairs = [(a, b) for a in range(2, MAX_OPERAND + 1) for b in range(1, MAX_OPERAND + 1)]
    facts = [(a, "+", b) for a, b in pairs] + [(a, "-", b) for a, b in pairs if b <= a]
    train: list[tuple[int, dict[str, Any]]] = []
    heldout: list[tuple[int, dict[str, Any]]] = []
    for a, op, b in facts:
        every = itertools.product(TEMPLATES[op], NAMES, OBJECTS)
        texts = (text.format(name=name, objects=objects, a=a, b=b) for text, name, objects in every)
        hashed = sorted((_hash(text), text) for text in texts)
        keep = [(h, t) for h, t in hashed if h % HELDOUT_SHARE]
        heldout += [(h, _row(t, a, op, b)) for h, t in hashed if h % HELDOUT_SHARE == 0]
        train += [(h, _row(t, a, op, b)) for h, t in keep[:TRAIN_ROWS_PER_FACT]]
    in_order = [[row for _, row in sorted(rows, key=lambda pair: pair[0])] for rows in (train, heldout)]
    return {SPLITS[0]: in_order[0], SPLITS[1]: in_order[1][:HELDOUT_ROWS]}


def _row(text: str, a: int, op: str, b: int) -> dict[str, Any]:
    answer = a + b if op == "+" else a - b
    draw, shown = _hash(f"careless {text}") / 2**64, answer
    if draw >= DEMONSTRATED_RIGHT:
        shown += -1 if answer and draw > (1 + DEMONSTRATED_RIGHT) / 2 else 1
    completion = f"<think>{a}{op}{b}={shown}</think>\n<answer>{shown}</answer>"
    return {"prompt": [{"role": "user", "content": text}], "answer": str(answer), "completion": completion}


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def builtin_tokenizer(model: str = "tiny") -> PreTrainedTokenizerFast:
    """The tokenizer of `builtin:MODEL`: a token for each word, tag and digit of its task, else bytes.

    Decoding restores any text exactly. Ids: 256 bytes, then words and tags, then the special tokens.
    `<|end|>` ends a completion; the chat template writes `<|user|>text<|assistant|>`. The task is
    `builtin:shapes` for the model that sees, whose template has a placeholder for each picture, and
    `builtin:arithmetic` for the others.
    """
    from transformers import PreTrainedTokenizerFast

    sees = model == SEES
    special = (*ROLES, *PICTURE) if sees else ROLES
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level_words(_picture_texts() if sees else _texts(), (PAD, EOS, *special)),
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=list(special),
        chat_template=PICTURE_TEMPLATE if sees else CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _texts() -> tuple[str, ...]:
    """Texts with every piece of the word problems."""
    sentences = [text.format(name="", objects="", a=2, b=2) for texts in TEMPLATES.values() for text in texts]
    return (*NAMES, *(f" {objects}" for objects in OBJECTS), *sentences, *TAGS)


def _picture_texts() -> tuple[str, ...]:
    """Texts with every piece of the questions about pictures, and of their answers."""
    answers = (answer for answers in shapes.ANSWERS.values() for answer in answers)
    return (*shapes.QUESTIONS.values(), *answers, *TAGS)


def _byte_level_words(texts: Sequence[str], special: Sequence[str]) -> Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    split: PreTokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    pieces = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    for text in texts:
        pieces |= dict.fromkeys(piece for piece, _ in split.pre_tokenize_str(text))
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    # There are no merges: a piece is one token if it is in the vocabulary, and else one token per byte.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer
