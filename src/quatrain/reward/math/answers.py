"""Decides whether a completion's answer equals the gold answer; text is parsed, never evaluated as code.

Used by the reward `correct` (`reward/functions.py`) and by the accuracy in evaluation. `extract.py`
finds the answer. Numbers are compared exactly, as fractions (`exact.py`); words, dates and
letters of a choice by `texts.py`, all other answers by `expressions.py`.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from quatrain.reward.math import texts
from quatrain.reward.math.exact import DECIMAL, EXPONENT, is_decimal, same_value
from quatrain.reward.math.expressions import exact_expression, is_judgeable, same_expression
from quatrain.reward.math.extract import answer_of, unboxed, without_markdown
from quatrain.reward.math.grader import NUM_PROCESSES, Budget, Unjudged, spending
from quatrain.reward.math.notation import uniform
from quatrain.reward.math.words import (
    ATTACHED_UNIT,
    LETTER_UNIT,
    NO_WORDS,
    SCALES,
    between_words,
    is_changed,
    is_word,
    may_follow_a_number,
    without_letter_unit,
    without_units,
)
from quatrain.workers.loop_thread import map_in_threads
from quatrain.workers.pool import Failure

# Of a long text only the last characters are read, because the answer is expected at the end.
_TAIL_CHARS = 4000
_NUMBER_CHARS = 300
_MOST_PARTS = 4  # of a text with several times, which a longer sentence may say in many ways

# Digits inside a word (H2O), an exponent (cm^2) or an index (x_1) are not matched as numbers.
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9])(?<!\^)(?<!\^-)(?<!\^\{)(?<!\^\{-)(?<![A-Za-z]_)(?<![A-Za-z]_\{)"
    rf"(?P<value>{DECIMAL})(?P<exponent>{EXPONENT})?"
    rf"(?:[ ]{{1,2}}(?P<top>[0-9]+)[ ]?/[ ]?(?P<bottom>[0-9]+)|[ ]?/[ ]?(?P<divisor>{DECIMAL}))?"
    rf"(?:[$]?\s{{0,3}}(?P<scale>(?i:{'|'.join(SCALES)}))s?\b)?"
    r"(?P<percent>[$]?[ ]?(?:%|(?:percent|percentage|per cent|pct)\b))?(?=(?P<letters>[A-Za-z]*))"
)
# A minus directly before a number is a sign unless an operand precedes it (10-3). A minus followed by a space
# is a sign only after = and similar characters (= - 3): "10 - 3" is a subtraction, and "- 3" a list item.
_MINUS = re.compile(
    r"(?:(?:\A|[^0-9A-Za-z)\]}%.-])-[$£€]?|(?:\A|[=(:$]|\\approx)[ ]{0,2}-[ ]?[$£€]?[ ]?|[$£€]-)\Z"
)
# Notation in which a number is only a part of the value: roots, fractions, powers, scientific notation.
_MORE_THAN_A_NUMBER = re.compile(
    r"\\(?:sqrt|pi|frac|binom|pm|ln|log|infty|unknown)\b|√|(?<![A-Za-z]{2})!|[0-9)}]\s?\^|[0-9)]\*\*[0-9(]"
    r"|\\(?:times|cdot)\s*10\s*\^"
)
# After a number in a sentence, which has words, an exclamation mark may also end it.
_EXCLAMATION = re.compile(r"(?<=[0-9])!+(?=\s|\Z)")
_SENTENCE = re.compile(r"(?<![\\A-Za-z])[A-Za-z][a-z]+[\s:]")
_NEGATIVE = re.compile(r"\b[Nn]egative\s(?=[$£€]?[0-9.])")
_FRACTION = re.compile(
    r"\\frac\s*(?:\{\s*(?P<a>-?[0-9.,]+)\s*\}\s*\{\s*(?P<b>[0-9.,]+)\s*\}|(?P<c>[0-9])(?P<d>[0-9]))"
)
# Sums and products of plain numbers: the question, not its answer.
_NOT_COMPUTED = re.compile(
    r"(?:[0-9.,$(){}+/ -]|\\[()\[\]]|(?<!\*)\*(?!\*)|\\(?:times|cdot|div)(?![A-Za-z]))*"
)
# Relations and lists are no numbers, so that math-verify need not be asked about them.
_NO_NUMBER = re.compile(r"[<>,;]|\\(?:le|ge|ne|in)(?![A-Za-z])")
# What may stand before the last number of a list: another number, and a comma, "and" or "or" after it; or of
# a quantity in two units (5 ft 12 in): a number and its unit; or the argument of a function: P(X = 5).
_LIST_BEFORE = re.compile(
    r"(?<![_0-9])[0-9]+[ \t]?(?:(?:ft|feet|foot|yards?|hours?|hrs?|h|min|minutes?|lbs?|pounds?)\b)?"
    r"[ \t]{1,4}\Z|"
    r"[A-Za-z][(\[][^()\[\]]{0,20}=\s?\Z|"
    r"[0-9)\]}%$](?:\s?[A-Za-z]{1,15}\b){0,2}[\s$)}\]]{0,4}(?:[,;&]|,?\s{0,2}\b(?:and|or)\b)[\s$({\[\\+-]{0,6}"
    r"(?:[A-Za-z](?:_\{?[0-9]\}?)?\s?=\s?)?[\s$£€({\[\\+-]{0,6}\Z"
)
# A variable as the next item of a list: 3 and x.
_LIST_AFTER = re.compile(r"[\s$)}]{0,3}(?:[,;]|\b(?:and|or)\b)[\s$(]{0,3}-?[b-zB-HJ-Z](?![A-Za-z'])")
# Where an expression ends: at a line, an equals sign, the end of a sentence.
_BREAK = re.compile(
    r"\n|=|\\(?:approx|to|(?:long)?[rR]ightarrow|implies|therefore)(?![A-Za-z])|[.:;!?](?=\s)|####|</?[a-z]{1,10}>"
)
# What one alternative has taken no other takes again (`*+`): else a letter that is not ASCII, or white space,
# is read in two ways, and a text of 30 of them in 2^30.
_PLAIN_BEFORE = re.compile(
    r"(?:(?<![^\W\d_])(?:[aAI]|[^\W\d_]{2,})[,:.]?\s+|\([a-z]{1,3}\)\s"
    r"|[\s$£€#*_.,:;'\"({\[+-]|[^\x00-\x7f]|[\x00-\x1f]|\\[(\[{]|\\f?boxed\s?\{)*+"
)
_PLAIN_AFTER = re.compile(
    r"(?:[^\W\d_]|[^\x00-\x7f]|[\x00-\x1f]|[\s$£€#*.,:;'\")}\](!?-]|\\[)\]}]|/\s?(?=[A-Za-z]{2}))*+"
)
_ACRONYM = re.compile("[A-Z]{3,}s?")
_THOUSANDS_SPACE = re.compile(r"\s*-?[1-9][0-9]{0,2}(?: [0-9]{3})+(?:\.[0-9]+)?\s*")
# 2,74, but not 2,740.
_DECIMAL_COMMA = re.compile(r"(?<![0-9,.])(?![1-9][0-9]{0,2},[0-9]{3}(?![0-9]))([0-9]+),([0-9]+)(?![0-9,])")


Verdict = bool | Failure | None
"""Whether an answer is right; None if its gold answer cannot be judged; why it was not judged."""


class Number(NamedTuple):
    """A number in a text: its value without the percent sign, and whether a percent sign follows."""

    value: Fraction
    percent: bool


def gold_text(answer: Any) -> str:
    """The text after the last `####` of a gold answer, or all its text; empty for None and blank answers."""
    return "" if answer is None else str(answer).rpartition("####")[2].strip()


def judge(completions: Sequence[str], answers: Sequence[Any], timeout_s: float) -> list[Verdict]:
    """`is_correct` of each completion and gold answer, None for a gold answer without text.

    Each pair is judged once, and slow comparisons may take `timeout_s` seconds in all, in several processes.
    What is not judged then, or because a process fails, is a failure.
    """
    pairs = [(completion, gold_text(gold)) for completion, gold in zip(completions, answers, strict=True)]
    no_time = Budget(0.0)  # most answers need no process
    found = {pair: _judged(pair, no_time) for pair in dict.fromkeys(pairs)}
    slow = [pair for pair, verdict in found.items() if isinstance(verdict, Failure)]
    if slow:
        budget = Budget(timeout_s)
        verdicts = map_in_threads(lambda pair: _judged(pair, budget), slow, NUM_PROCESSES)
        found |= zip(slow, verdicts, strict=True)
    return [found[pair] for pair in pairs]


def _judged(pair: tuple[str, str], budget: Budget) -> Verdict:
    with spending(budget):
        try:
            return is_correct(*pair) if pair[1] else None
        except Unjudged as error:
            return error.failure


def is_correct(completion: str, answer: Any) -> bool | None:
    r"""Whether the completion's answer equals the gold answer; None if the gold answer cannot be judged.

    The completion's answer stands after its last `</think>`, if there is text. It is the content of the last
    `<answer>…</answer>` there, or else all of it; if that contains a `\boxed{…}`, the content of the last
    one. The gold answer is the text after the last `####` of `answer`, or all of it, and the content of its
    `\boxed{…}` if it has one.

    If the gold answer is a number, the answer is the last number, unless that is a part of an expression, a
    list or an inequality. Signs, thousands separators, fractions, mixed numbers, percents (50% equals both 50
    and 0.5), powers and decimals are understood; a decimal equals a fraction or a root to six digits. Units
    are ignored. Dates and clock times are compared by their parts: 12:30 is no ratio. Up to three words are
    compared as text, letters of a choice as letters, and all other answers by math-verify. A gold answer
    cannot be judged if it is a longer text or not parsed.

    Raises ValueError for a gold answer without text, and `grader.Unjudged` if math-verify takes too long or
    its process fails. `####` follows GSM8K; the other rules are quatrain's.
    """
    gold = gold_text(answer)
    if not gold:
        raise ValueError(f"the gold answer must have text (after its last ####, if any); got {answer!r}")
    box = unboxed(gold)
    gold = gold if box is None else box
    if len(gold) > _TAIL_CHARS:
        return None
    said, boxed = answer_of(completion)
    said = said[-_TAIL_CHARS:]
    return _verdict(uniform(said if boxed else without_markdown(said)), uniform(gold), boxed)


@functools.lru_cache(maxsize=4096)
def _verdict(said: str, gold: str, boxed: bool) -> bool | None:
    label, rest = texts.split_label(gold)
    if label:
        chosen = texts.choice_of(said)
        if chosen or not rest or texts.split_label(rest)[0]:
            return chosen == label
        return bool(_verdict(said, rest, boxed))
    line = said if boxed else _last_line(said)
    if (choices := texts.choices_of(gold)) and texts.choices_of(line) == choices:
        return True
    if moment := texts.moment_of(gold):
        return texts.same_moment(line, moment)
    if texts.has_moment(gold):  # several, or with other text
        return _as_text(line) == _as_text(gold) if len(gold.split()) <= _MOST_PARTS else None
    number = whole_number(gold)
    if number is None:
        # The value of powers, factorials and scientific notation; a sum may be the question.
        computed = without_letter_unit(gold)
        value = None if _NOT_COMPUTED.fullmatch(computed) else exact_expression(computed)
        number = None if value is None else Number(value, "%" in computed)
    if number is not None:
        return _same_number(said, number) or (boxed and _as_text(said) == _as_text(gold))
    if words := texts.words_of(gold):
        return texts.same_words(line, words) if len(words) <= texts.MAX_WORDS else None
    if _DECIMAL_COMMA.fullmatch(gold) and whole_number(said) == whole_number(gold.replace(",", ".")):
        return True
    if not is_judgeable(gold):
        return False if choices else None
    same = _as_text(texts.ungrouped(said)) == _as_text(texts.ungrouped(gold))
    return same or same_expression(line, gold)


def _same_number(said: str, gold: Number) -> bool:
    r"""Whether the answer `said` is the number `gold`; of 1/3 \approx 0.33, either side may be."""
    label, rest = texts.split_label(said)
    said = rest if label else said
    if _THOUSANDS_SPACE.fullmatch(said):
        said = said.replace(" ", "")
    elif gold.value.denominator > 1:
        said = _DECIMAL_COMMA.sub(r"\1.\2", said)
    exact, approx, rest = said.partition("\\approx")
    if _ends_with(said, gold) or bool(approx and "\n" not in rest and _ends_with(exact, gold)):
        return True
    line = _last_line(said)
    exclaimed = _SENTENCE.search(line) and _EXCLAMATION.search(line)
    return bool(exclaimed) and _ends_with(_EXCLAMATION.sub(".", line), gold)


def _ends_with(said: str, gold: Number) -> bool:
    """Whether the last number of `said` is `gold`, and not a part of an expression, a list or a relation."""
    said = without_units(_tidy(said))
    match = _last(_NUMBER, said)
    if match is None or is_changed(said, *match.span()):
        return False
    before = said[max(0, match.start() - 80) : match.start()]
    if _LIST_BEFORE.search(before) or _LIST_AFTER.match(said, match.end()):
        return False
    if ATTACHED_UNIT.match(said, match.end()):
        said = said[: match.end()]
    # The expression around the number: without the words, the lines and the sides of = next to it.
    start, end = _last(_BREAK, said, match.start()), _BREAK.search(said, match.end())
    limits = start.end() if start else 0, end.start() if end else len(said)
    piece = without_letter_unit(between_words(said, limits, match.span()))
    if _is_plain(piece, match[0]) and may_follow_a_number(match["letters"]):
        number = _to_number(said, match)
        return number is not None and _equal(number, gold)
    if _NOT_COMPUTED.fullmatch(piece) or _NO_NUMBER.search(piece):
        return False
    value = exact_expression(piece)
    if value is not None:
        return _equal(Number(value, "%" in piece), gold)
    return same_expression(piece, _decimal(gold.value))


def whole_number(text: str) -> Number | None:
    """The number in `text`, which may also contain a currency sign, units and words; None for other text."""
    tidy = without_units(_tidy(uniform(text)))
    match = _last(_NUMBER, tidy)
    if match is None or match["letters"] or _MORE_THAN_A_NUMBER.search(tidy):
        return None
    if is_changed(tidy, *match.span()):
        return None
    after = tidy[match.end() :]
    after = "" if LETTER_UNIT.fullmatch(after) and "\\" not in tidy else after
    rest = f"{tidy[: match.start()]} {after}"
    rest = re.sub(r"\\(?:boxed|text|mathrm|mathbf|textbf|circ)\b|\\[()\[\]]|[{}$£€]", " ", rest)
    if not re.fullmatch(r"(?:[^\W\d_]{2,}+|a\b|[\s.,:;'\"°+-])*", rest):
        return None
    return _to_number(tidy, match) if all(map(is_word, re.findall(r"[^\W\d_]{2,}", rest))) else None


def _tidy(text: str) -> str:
    """`text` with fractions of numbers as a/b."""
    text = _NEGATIVE.sub("-", text)
    if "\\" not in text:
        return text
    return re.sub(r"(\\[A-Za-z]+)(?=[0-9])", r"\1 ", _FRACTION.sub(_fraction_text, text))


def _fraction_text(match: re.Match[str]) -> str:
    after_digit = match.start() > 0 and match.string[match.start() - 1].isdigit()
    return f"{' ' if after_digit else ''}{match['a'] or match['c']}/{match['b'] or match['d']}"


def _last(pattern: re.Pattern[str], text: str, end: int = sys.maxsize) -> re.Match[str] | None:
    """The last match of `pattern` before `end`."""
    return next(iter(deque(pattern.finditer(text, 0, end), maxlen=1)), None)


def _to_number(text: str, match: re.Match[str]) -> Number | None:
    if len(match[0]) > _NUMBER_CHARS:
        return None
    value = Fraction((match["value"] + (match["exponent"] or "")).replace(",", ""))
    try:
        if match["bottom"]:
            value += Fraction(int(match["top"]), int(match["bottom"]))
        elif match["divisor"]:
            value /= Fraction(match["divisor"].replace(",", ""))
    except ZeroDivisionError:
        return None
    value *= 10 ** SCALES.get((match["scale"] or "").casefold(), 0)
    negative = _MINUS.search(text[max(0, match.start() - 20) : match.start()])
    return Number(-value if negative else value, bool(match["percent"]))


def _equal(said: Number, gold: Number) -> bool:
    if same_value(said.value, gold.value):
        return True
    if said.percent == gold.percent:
        return False
    one, other = (said, gold) if said.percent else (gold, said)
    return same_value(one.value / 100, other.value)


def _decimal(x: Fraction) -> str:
    """A number as math-verify reads it: 0.25 as a decimal, which may be rounded, or 1/3."""
    digits = x.denominator.bit_length()
    if x.denominator == 1 or not is_decimal(x) or digits > 60:
        return str(x)
    scaled = f"{abs(x.numerator) * 10**digits // x.denominator:0{digits + 1}d}"
    return f"{'-' if x < 0 else ''}{scaled[:-digits]}.{scaled[-digits:].rstrip('0')}"


def _is_plain(piece: str, number: str) -> bool:
    """Whether `piece` is only a number with its sign, currency, unit and brackets."""
    before, _, after = piece.rpartition(number)
    if _MORE_THAN_A_NUMBER.search(piece) or not _PLAIN_BEFORE.fullmatch(before):
        return False
    if not _PLAIN_AFTER.fullmatch(after):
        return False
    if any(NO_WORDS.fullmatch(name.casefold()) for name in re.findall("[A-Za-z]+", before)):
        return False
    names = re.findall("[A-Za-z]+", after)
    return all(may_follow_a_number(name) or name == "a" or _ACRONYM.fullmatch(name) for name in names)


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _as_text(text: str) -> str:
    return re.sub(r"[\s$]|\.$", "", text.strip())
