"""Secrets: which values of the environment and of `.env` files are, and their redaction in all output.

Every log message, printed line, configuration dump, sample and metric name goes through `redact` before it is
written. A value is a secret

- by the name of its variable (`is_secret_name`), from SHORTEST_SECRET characters on;
- by its form: tokens of known services, passwords in URLs and connection strings, private keys;
- by its place, a `.env` file: any other value of SHORTEST_VALUE characters or more there.

No secret are numbers, switches, ordinary words of under SHORTEST_VALUE characters, paths that exist,
`QUATRAIN__` variables, which are configuration, and in a `.env` file the values that a configuration key has
by default or offers.

What is written to be compared later goes through `comparable`: a redacted form depends on the environment,
and different values may share one.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote, unquote

SERVE_TOKEN = "QUATRAIN_SERVE_TOKEN"
"""The environment variable with the token that servers are sent, and that `quatrain serve` asks for."""
TINKER_KEY = "QUATRAIN_TINKER_KEY"
"""The environment variable with the only API key that `quatrain serve --train` takes."""

REDACTED = "[redacted]"
SHORTEST_SECRET = 4
"""Redacting shorter values, or switches such as `true`, would hide ordinary text."""
SHORTEST_VALUE = 8
"""Of a value of `.env` whose name and form tell of no secret, and of a secret that is an ordinary word."""
CONFIG_PREFIX = "QUATRAIN__"

_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|PASS$|CREDENTIAL"
    r"|(?:^|_)(?:API_?KEY|KEY|TOKEN|PAT|PWD|AUTH|DSN|COOKIE|WEBHOOK(?:_URL)?)$",
    re.IGNORECASE,
)
_NO_SECRET_NAMES = frozenset({"PWD", "OLDPWD"})
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"hf_[A-Za-z0-9]{16,}|(?:sk|gsk|r8|nvapi|glpat|npm|pypi|dop_v1|xox[a-z])[-_][\w-]{16,}"
    r"|gh[a-z]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[\w-]{30,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]+)?)"
)
_PASSWORD = re.compile(
    r"[a-z][a-z0-9+.-]*://[^/?#\s:@]*:([^\s]+)@"
    r"|[a-z][a-z0-9+.-]*://([^/?#\s:@]{8,})@"
    r"|(?:password|passwd|pwd|secret|token|api_?key|access_?key|account_?key|sig)=([^;&\s]+)",
    re.IGNORECASE,
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY")
_ORDINARY = re.compile(
    r"true|false|yes|no|on|off|none|null|[-+]?[0-9]{1,5}|[-+0-9]*\.[-+0-9e]*", re.IGNORECASE
)
_NUMBERS = re.compile(r"[-+0-9.,:;x ]*")
_SEPARATORS = re.compile(r"[-_./, ]+")

_of_dotenv: set[str] = set()
"""Secret values of the `.env` file that was read, also of variables that were set already."""


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret: `*_KEY`, `*_TOKEN`, `*PASSWORD*`, `*_PAT` and so on."""
    config = name.upper().startswith(CONFIG_PREFIX)
    return not config and name.upper() not in _NO_SECRET_NAMES and _NAME.search(name) is not None


def remember_dotenv(variables: Mapping[str, str], ordinary: Collection[str] = ()) -> None:
    """Have the secrets among `variables`, those of a `.env` file, redacted from now on.

    Texts in `ordinary` are none, unless the name of their variable is that of a secret.
    """
    _of_dotenv.update(*(_secrets_of_variable(name, value) for name, value in variables.items()))
    _of_dotenv.update(
        value.strip()
        for name, value in variables.items()
        if not name.upper().startswith(CONFIG_PREFIX) and len(value.strip()) >= SHORTEST_VALUE
        if not _NUMBERS.fullmatch(value.strip()) and value.strip() not in ordinary
    )


def redactor(environ: Mapping[str, str]) -> Callable[[str], str]:
    """`redact` with the secrets that `environ` has now: for a batch of texts, which reads it once.

    Not to be kept: a variable may get a secret later, as a user's reward function sets one.
    """
    pattern = _pattern(frozenset(environ.items()), frozenset(_of_dotenv))
    return partial(pattern.sub, REDACTED) if pattern else lambda text: text


def redact(text: str, environ: Mapping[str, str]) -> str:
    """`text` with every secret of `environ` and of the `.env` file that was read replaced by `[redacted]`."""
    return redactor(environ)(text)


def redact_tokens(text: str, environ: Mapping[str, str]) -> str:
    """`text` as `redact` returns it, without tokens of known services that no variable holds either.

    For what a user wrote and a run keeps or publishes: code, the command line, values in a model card. Other
    text of this form, such as the name `npm_install_the_packages`, is replaced too.
    """
    return _TOKEN.sub(REDACTED, redact(text, environ))


def redact_values(value: Any, environ: Mapping[str, str]) -> Any:
    """`value`, made of mappings, sequences and scalars, with its texts redacted, names in mappings too."""
    return texts_changed(value, redactor(environ))


def texts_changed(value: Any, change: Callable[[str], str]) -> Any:
    """`value`, made of mappings, sequences and scalars, with `change` of its texts, names in mappings too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {texts_changed(name, change): texts_changed(inner, change) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [texts_changed(inner, change) for inner in value]
    return value


def comparable(value: Any, environ: Mapping[str, str]) -> Any:
    """The JSON value `value` in a form that may be written, and that `same` compares with a value later.

    It is `value` itself; with a secret in it, its redacted form and its digest.
    """
    plain = json.loads(json.dumps(value))
    redacted = redact_values(plain, environ)
    return plain if redacted == plain else {REDACTED: redacted, "sha256": _sha256(plain)}


def same(saved: Any, value: Any) -> bool:
    """Whether `comparable` made `saved` of the JSON value `value`, in this or another environment."""
    plain = json.loads(json.dumps(value))
    if isinstance(saved, dict) and REDACTED in saved:
        return saved["sha256"] == _sha256(plain)
    return saved == plain


def _sha256(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=8)
def _pattern(variables: frozenset[tuple[str, str]], of_dotenv: frozenset[str]) -> re.Pattern[str] | None:
    secrets = {s for name, value in variables for s in _secrets_of_variable(name, value)} | of_dotenv
    forms = {form for secret in secrets if not _is_ordinary(secret) for form in _written_forms(secret)}
    # The longest first, because one secret may be a prefix of another.
    longest_first = sorted(forms, key=lambda form: (-len(form), form))
    return re.compile("|".join(map(re.escape, longest_first))) if forms else None


def _secrets_of_variable(name: str, value: str) -> Iterator[str]:
    """The secrets that the name and the form of a variable tell of."""
    value = value.strip()
    by_form = [match[0] for match in _TOKEN.finditer(value)]
    passwords = [part for match in _PASSWORD.finditer(value) for part in match.groups() if part]
    by_form += [
        *passwords,
        *(password.partition("@")[0] for password in passwords),
    ]  # with @ in it, or two URLs
    yield from by_form
    if by_form or is_secret_name(name) or _PRIVATE_KEY.search(value):
        yield value


def _written_forms(secret: str) -> Iterable[str]:
    """How a secret may stand in a text: in pieces of a line, escaped, or as a part of a URL."""
    # A secret of several lines may be printed line by line; in JSON and Python its quotes are escaped.
    lines = (line.strip() for line in secret.splitlines())
    pieces = {secret, *(line for line in lines if not _is_ordinary(line))}
    pieces |= {unquote(piece) for piece in pieces}
    pieces |= {quote(piece, safe=safe, errors="surrogateescape") for piece in pieces for safe in ("", "/")}
    pieces |= {json.dumps(piece, ensure_ascii=ascii)[1:-1] for piece in pieces for ascii in (True, False)}
    pieces |= {repr(piece)[1:-1] for piece in pieces}
    return (piece for piece in pieces if len(piece) >= SHORTEST_SECRET)


def _is_ordinary(value: str) -> bool:
    """Whether redacting `value` would hide text that has nothing to do with it."""
    return (
        len(value) < SHORTEST_SECRET
        or _ORDINARY.fullmatch(value) is not None
        or (len(value) < SHORTEST_VALUE and all(map(_is_word, _SEPARATORS.split(value))))
        or ("/" in value and os.path.exists(os.path.expanduser(value)))
    )


def _is_word(text: str) -> bool:
    """Whether `text` consists of letters, of one case after the first."""
    return not text or (text.isalpha() and text in (text.lower(), text.upper(), text.capitalize()))
