"""The section `distill`: on-policy distillation from a teacher."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from quatrain.config.fields import NOT_SET, Count, Derived, Fraction, Mesh, Section, Text, must

DEFAULT = "default"
"""The entry of `distill.teacher` for the rows of all data sources that it does not name."""
OWN = ("policy", "initial")
"""Teachers with weights of the run itself."""


HTTP = ("http://", "https://")
"""How the address of a server begins."""


class DistillConfig(Section):
    """On-policy distillation: a teacher says how likely it finds each token that the policy sampled."""

    teacher: Annotated[
        Text | dict[Text, Text | None] | None,
        must(
            "be a teacher, or a mapping from data sources to teachers, one of them not null, as "
            "{math: A, code: B, default: null}",
            lambda teacher: (
                teacher is None
                or (teacher and isinstance(teacher, str))
                or (isinstance(teacher, dict) and any(teacher.values()))
            ),
            before=True,
        ),
    ] = None
    """The teacher: a frozen model in the forms of `model.path`, of any supported family and size, whose
    tokenizer must be the policy's; `initial`, the reference, which may follow the policy
    (`update.reference_sync_steps`); the address of a server that gives log-probabilities of prompts, as
    `http://host:8000`; or `policy`, its weights at the start of the training step, which need a
    `distill.prompt`. A mapping from values of the column `data_source` to these gives each row its teacher;
    `default` is that of all other values, and null is none. null: no distillation."""
    prompt: Text | None = None
    """What the teacher reads in place of the prompt: a text with names of data columns, as
    `The answer is {answer}.` (a literal brace is written twice), which becomes a system message before the
    prompt's messages, or a function of the row as `path/file.py:function` that returns messages; null: the
    prompt."""
    loss: Literal["sampled", "reverse_kl", "forward_kl", "jsd"] = "sampled"
    """What the policy learns from the teacher: `sampled`: the difference of log-probabilities of the sampled
    token, as an advantage; the others: a divergence over the whole vocabulary, as a loss of its own:
    [distill.md](distill.md#losses-over-the-vocabulary)."""
    beta: float = Field(0.5, gt=0, lt=1)
    """Weight β of the teacher in the mixture of `distill.loss: jsd`."""
    top_k: int = Field(0, ge=0)
    """Words that a loss over the vocabulary tells apart, the teacher's likeliest in each place; all others
    count as one. The teacher, of any form, is then asked once for each batch, before the update. 0: all
    words, by a teacher that is one model on the devices and the mesh of training."""
    weight: float = Field(1.0, ge=0)
    """Weight of the teacher's term; 0: it is measured and not trained on."""
    rl_weight: float = Field(1.0, ge=0)
    """Weight of the advantage that comes from rewards; 0: rewards are measured and not trained on."""
    clip: float = Field(10.0, gt=0)
    """Bound, in nats, of a token's difference of log-probabilities, teacher minus policy."""
    discount: Fraction = 0.0
    """Discount γ: a token's term is the sum of those from this token on, each times γ to the power of the
    number of sampled tokens between; 0: its own alone."""
    temperature: Derived[float] = Field(NOT_SET, gt=0)
    """Temperature of the teacher's distribution; derived: `rollout.temperature`."""
    warmdown_steps: Count | None = None
    """`distill.weight` falls to 0, linearly, over so many last training steps; null: it is constant."""
    max_tokens_per_device: Derived[Count] = NOT_SET
    """Token budget of the teacher: maximum number of tokens per data shard in one forward pass. Derived with
    a teacher: `logprob.max_tokens_per_device`; if that is null, 32768, or twice the length of the longest
    possible sequence if that is more."""
    mesh: Mesh | None = None
    """Device mesh of the teacher, in the forms of `mesh`, on the devices of `placement.teacher`; null: that
    of training on the same devices, else `auto`."""

    @property
    def teachers(self) -> dict[str, str | None]:
        """The teachers by data source, that of the others as `default`; empty without any."""
        if isinstance(self.teacher, dict):
            return self.teacher
        return {} if self.teacher is None else {DEFAULT: self.teacher}

    @property
    def own(self) -> tuple[str, ...]:
        """The teachers with weights of the run."""
        return tuple(name for name in OWN if name in self.teachers.values())

    @property
    def models(self) -> tuple[str, ...]:
        """The teachers with weights of their own, each once."""
        paths = (path for path in self.teachers.values() if path is not None)
        return tuple(dict.fromkeys(path for path in paths if path not in OWN and not path.startswith(HTTP)))

    @property
    def servers(self) -> tuple[str, ...]:
        """The addresses of teachers behind servers, each once."""
        paths = (path for path in self.teachers.values() if path is not None)
        return tuple(dict.fromkeys(path for path in paths if path.startswith(HTTP)))
