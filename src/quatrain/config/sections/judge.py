"""The section inside `reward`: `reward.judge`, a model that reads completions and gives them scores."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from quatrain.config.fields import Count, NonNegative, PlainValue, Section, Text, must
from quatrain.config.places import has_scheme
from quatrain.config.secrets import is_secret_name

JUDGE = "judge"
"""The entry of `reward.functions` that has the judge's weight."""
SELF = "self"
RUBRIC = (
    "The answer is correct and complete, follows all instructions of the question, and says nothing that is "
    "false or beside the point."
)
OF_SERVERS = ("served_model", "key_variable", "body", "rpm", "tpm", "retries", "timeout_s")
"""Keys that only a judge behind a server reads."""
OWN = {
    "messages": "reward.judge.template is the question",
    "model": "name it in served_model",
    "n": "set reward.judge.n, as one answer of a request is read",
    "stream": "an answer is read whole",
}
"""Entries that `body` must not have, and why."""
_USER = re.compile(r"^https?://[^/?#\s]*@")


def _scale(value: Any) -> bool:
    low, high = value
    numbers = all(type(each) in (int, float) and math.isfinite(each) for each in (low, high))
    return numbers and low < high


class JudgeBudget(Section):
    """What a judge may use in a run, attempts that failed included; null: not limited."""

    requests: Count | None = None
    tokens: Count | None = None


class JudgeConfig(Section):
    """A model that reads each prompt with its completion and gives a score: [reward.md](reward.md#judges).

    Exactly one of `self`, `model` and `base_url` says which model. `reward.judge: self` is short for
    `{self: true}`. Its weight is that of the entry `judge` in `reward.functions`.
    """

    self: bool = False
    """The policy is the judge, with the weights that sampled the completions."""
    model: Text | None = None
    """The judge is another model, in the forms of `model.path`, on the devices of `placement.reward`."""
    base_url: (
        Annotated[
            Text,
            must(
                "be the address of an OpenAI-compatible API, as http://host:8000/v1, without a user or a key",
                lambda url: url.startswith(("http://", "https://")) and not _USER.match(url),
            ),
        ]
        | None
    ) = None
    """The judge is behind this address, at `/chat/completions`, as `https://api.openai.com/v1`."""
    served_model: Text | None = None
    """The name of the judge there; null: the only model that the server lists."""
    key_variable: (
        Annotated[
            Text,
            must(
                "be the name of an environment variable that is known as a secret: letters, digits and _, "
                "with _KEY or _TOKEN at its end",
                lambda name: re.fullmatch(r"[A-Za-z_]\w*", name) and is_secret_name(name),
            ),
        ]
        | None
    ) = None
    """The environment variable (or that of `.env`) with the server's API key, as OPENAI_API_KEY; null:
    QUATRAIN_SERVE_TOKEN, if that is set."""
    rubric: Text = RUBRIC
    """What the judge decides by: a text, in which `{prompt}`, `{completion}` and names of data columns, as
    `{answer}`, stand for their values. A literal brace is written twice."""
    rubric_column: Text | None = None
    """Data column whose text takes the place of `rubric` in the rows that have one; lists and mappings are
    written as JSON."""
    template: Text | None = None
    """File with the whole question to the judge in place of the built-in one, in the form of `rubric`; beside
    the columns it may name `{prompt}`, `{completion}`, `{rubric}`, `{low}` and `{high}`."""
    scale: Annotated[
        tuple[float, float],
        must("be two numbers, the lowest score and a higher one, as [0, 10]", _scale, before=True),
        WithJsonSchema({"const": "[low, high]"}),
    ] = Field((0.0, 1.0), strict=False)
    """The lowest and the highest score. The score is the reward; one outside is a failed judgement."""
    n: Count = 1
    """Judgements of each completion; their mean is the reward."""
    temperature: float | None = Field(None, ge=0, le=2)
    """Temperature of the judge; null: 0 for one judgement, 1 for several."""
    max_tokens: Count = 512
    """Tokens of a judgement at most."""
    body: dict[Text, PlainValue] = Field({})
    """Further entries of each request to the server, as `{reasoning_effort: low}`; null takes one out. Not
    `messages`, `model`, `n` and `stream`."""
    concurrency: Count = 16
    """Judgements that are asked for at the same time."""
    rpm: Count | None = None
    """Requests that are sent within any 60 seconds at most; null: any number."""
    tpm: Count | None = None
    """Tokens of requests and answers within any 60 seconds at most; null: any number."""
    retries: NonNegative = 5
    """Further attempts at a judgement after a lost connection, a timeout, or status 408, 429 or 5xx."""
    timeout_s: float = Field(60.0, ge=0.01, le=86400)
    """Seconds of a request to the server at most."""
    cache: Annotated[
        bool | str,
        must(
            "be true, false or the path of a folder on this machine",
            lambda value: (
                isinstance(value, bool) or (isinstance(value, str) and value and not has_scheme(value))
            ),
            before=True,
        ),
        WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string"}]}),
    ] = True
    """Where judgements are kept, so that none is asked for twice: true: in the folder of the run; a folder,
    which runs may share; false: nowhere."""
    budget: JudgeBudget = JudgeBudget()
    """`{requests: N, tokens: N}`: requests, and tokens of requests and answers, that the judge may use in the
    whole run, resumed or not; null: not limited."""
    on_budget: Literal["error", "abstain"] = "error"
    """When the budget is used up: `error`: the run ends, and can be resumed with a larger one; `abstain`: the
    judge abstains on what it was not asked, which is counted."""

    @model_validator(mode="after")
    def _keys_agree(self) -> Self:
        for broken, sentence in self._rules():
            if broken:
                raise PydanticCustomError("rule", "{rule}", {"rule": sentence})
        return self

    def _rules(self) -> list[tuple[Any, str]]:
        defaults = type(self).model_fields
        unread = [name for name in OF_SERVERS if getattr(self, name) != defaults[name].default]
        named = [name for name in (SELF, "model", "base_url") if getattr(self, name)]
        most, budget = self.most_tokens, self.budget.tokens
        harmless = {"n": 1, "stream": False}
        own = [name for name in OWN if self.body.get(name) not in (None, harmless.get(name))]
        return [
            (
                len(named) != 1,
                "must have exactly one of self, model and base_url, which say what model judges; it has "
                f"{' and '.join(named) or 'none'}; keep one, as {{base_url: http://host:8000/v1}}",
            ),
            (
                unread and not self.base_url,
                f"must have {', '.join(unread)} with base_url alone: a judge on this run's devices has no "
                "server; leave that out, or name a server",
            ),
            (
                own,
                "must have a body without the entries that a judge writes or reads itself; it has "
                + "; ".join(f"{name}: {OWN[name]}" for name in own),
            ),
            (
                self.n > 1 and self.temperature == 0,
                f"must have temperature above 0 for n {self.n}: at 0 all judgements are equal; set n to 1, "
                "or leave temperature out",
            ),
            (
                self.tpm is not None and self.tpm <= most,
                f"must have tpm above max_tokens ({most}), the tokens of one answer; got {self.tpm}; raise "
                "it, or lower max_tokens",
            ),
            (
                budget is not None and budget <= most,
                f"must have budget.tokens above max_tokens ({most}), the tokens of one answer; got {budget}; "
                "raise it, or lower max_tokens",
            ),
            (
                self.on_budget != "error" and self.budget == JudgeBudget(),
                "must have a budget for on_budget abstain; set budget, as {requests: 10000}, or leave "
                "on_budget out",
            ),
            (
                self.self and isinstance(self.cache, str),
                "must have cache true or false for the judge self, whose weights are those of one run; got "
                "the folder of several; set true",
            ),
        ]

    @property
    def most_tokens(self) -> int:
        """Tokens of an answer at most, as a request says, also by `body`."""
        given = (self.body.get(name) for name in ("max_completion_tokens", "max_tokens"))
        return next((count for count in given if type(count) is int), self.max_tokens)

    @property
    def judging_temperature(self) -> float:
        """`temperature`, or what stands for null."""
        return (0.0 if self.n == 1 else 1.0) if self.temperature is None else self.temperature


Judge = Annotated[
    JudgeConfig | None,
    must(
        "be self, or a mapping as {base_url: http://host:8000/v1, rubric: …}",
        lambda value: value is None or value == SELF or isinstance(value, dict | JudgeConfig),
        before=True,
    ),
    BeforeValidator(lambda value: {SELF: True} if value == SELF else value),
    WithJsonSchema({"anyOf": [{"const": SELF}, {"const": "{…}"}, {"type": "null"}]}),
]
"""The type of `reward.judge`."""
