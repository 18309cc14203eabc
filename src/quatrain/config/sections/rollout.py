"""The section `rollout`: sampling of completions."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from quatrain.config.fields import (
    NOT_SET,
    Count,
    Derived,
    Fraction,
    Mesh,
    MustAgreeOnResume,
    NonNegative,
    PlainValue,
    Section,
    Text,
    must,
)

MAX_STALENESS = 64
"""More copies of the weights than any run has memory for; learning breaks down far below."""
MAX_DRAFTS = 16
"""A decode step of more drafts costs more than what their matches have ever been worth."""
LARGEST_PORT = 65535
MOST_KEPT = 512
"""Most words that are recorded of a token, and so the largest `top_k` with sampling-mask replay."""
COLUMN = "column"
"""The key of `rollout.environment` that names a data column, where there are several environments."""
_ADDRESS = re.compile(r"https?://(\[[0-9a-fA-F:.]+\]|[^/\s?#@:\[\]]+)(:(?P<port>\d{1,9}))?(/[^\s?#]*)?")


def is_address(text: str) -> bool:
    """Whether `text` is the address of a server: http or https, a host, and perhaps a port and a path."""
    parts = _ADDRESS.fullmatch(text)
    return parts is not None and int(parts["port"] or 0) <= LARGEST_PORT


Url = Annotated[str, must("be an address such as http://host:8000", is_address)]


class RolloutConfig(Section):
    """Stage 1 of a training step: sampling completions."""

    n: Annotated[Count, MustAgreeOnResume()] = 8
    """Samples per prompt (the group size)."""
    max_new_tokens: Count = 256
    """Maximum length of a completion, in tokens, stop token included."""
    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0: greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus sampling: sample from the smallest set of tokens with at least this probability; 1: all
    tokens."""
    top_k: NonNegative = 0
    """Sample from this many most likely tokens; 0: all. Derived: 512 with `rollout.top_p` or `rollout.min_p`,
    whose kept words are recorded (`rollout.replay_mask`)."""
    min_p: Fraction = 0.0
    """Drop tokens less likely than this fraction of the most likely token's probability; 0: drop none."""
    stop: tuple[Text, ...] = Field((), strict=False)
    """Strings that end a completion, in addition to the model's stop tokens."""
    max_concurrency: Count | None = None
    """Most sequences that decode at the same time, on all replicas together; null: all of a training step.
    Where the KV cache has no room for so many, fewer do."""
    greedy_baseline: Derived[bool] = NOT_SET
    """Whether a greedy completion of each prompt is drawn too, scored and not trained on; derived: true for
    `advantage.estimator: remax`, else false. An estimator of your own that takes `baseline_rewards` needs
    true."""
    dynamic_sampling_rounds: Count = 1
    """With 2 or more, dynamic sampling (DAPO): a training step draws further prompts, in at most this many
    rounds, until `data.batch_size` groups have samples with different rewards (`gdpo`: advantages other than
    0), and trains on these. 1: the next `data.batch_size` prompts, whatever their rewards."""
    max_staleness: Annotated[int, MustAgreeOnResume()] = Field(0, ge=0, le=MAX_STALENESS)
    """Training steps by which the weights that sample a batch may be older than those at the start of its
    training step. 0: each batch is sampled after the update before it. With 1 or more, the next batches are
    sampled while this one is trained on: [async.md](async.md)."""
    in_flight: Annotated[bool, MustAgreeOnResume()] = False
    """With `rollout.max_staleness`: exchange the weights between two decode calls, and begin samples of the
    next batch while the last ones of a batch decode. Faster where lengths differ much; tokens then depend on
    timing."""
    environment: Text | dict[Text, Text] | None = None
    """Environment that answers each turn of the policy, as `path.py:Class`; null: completions have one turn,
    or there are tools. Several, as `{column: NAME, VALUE: path.py:Class, …}`: the data column NAME says which
    one a row has: [episodes.md](episodes.md)."""
    tools: tuple[Text, ...] = Field((), strict=False)
    """Functions that the policy can call in its turns, each as `path.py:function`."""
    agent: Text | None = None
    """A program of yours that plays each sample and asks the policy through a client of OpenAI's or
    Anthropic's interface, as `path.py:function` or `command: PROGRAM ARGUMENTS`, or environments of a hub, as
    `verifiers:TASKSET` or `openenv:URL`; null: quatrain runs the dialogue: [agents.md](agents.md),
    [hubs.md](hubs.md)."""
    agent_python: Text | None = None
    """Interpreter of the agents' processes, for packages that cannot be beside quatrain's, as
    `hub/bin/python`; null: the one that trains."""
    agent_args: dict[Text, PlainValue] = Field({})
    """Arguments of the agent by name, beside `client` and `row`."""
    agent_workers: Count | None = None
    """Processes in which agents run, each with any number of episodes; derived: the cores, at most 8."""
    agent_concurrency: Count | None = None
    """Most episodes that agents play at a time; null: all of a batch."""
    agent_timeout_s: float = Field(600.0, gt=0)
    """Seconds that an agent may take for an episode, which then ends by a fault."""
    agent_failure: Literal["penalise", "abstain"] = "penalise"
    """What an episode gets that a fault of its agent ended: `penalise`: the reward of an error, −1;
    `abstain`: no reward, so that it has advantage 0 and is left out of the statistics of its group."""
    max_turns: Count = 8
    """Most turns of the policy in an episode with an environment, tools or an agent."""
    max_environment_tokens: Count | None = None
    """Most tokens that an environment and the chat template may add to an episode; what would be more ends it
    as `length`. Derived: `rollout.max_new_tokens`, which bounds the tokens that the policy samples in all its
    turns."""
    environment_timeout_s: float = Field(60.0, gt=0)
    """Seconds that one call of an environment may take: `reset`, `step` with its tools, or the end. An
    episode whose environment takes longer ends with the reward of an error."""
    environment_workers: NonNegative = 0
    """Processes in which environments run; 0: threads of the process that trains. Only a process can be ended
    if an environment hangs, and without the run if one crashes."""
    prefix_share: float | None = Field(None, ge=0, le=0.9)
    """Share of the KV cache's memory in which contexts are kept for further requests that begin alike, of
    episodes of several turns and of `quatrain serve`: [rollout.md](rollout.md#kept-contexts). 0: every
    request computes its whole context. Derived: 0.5 with an environment, tools or an agent; null: 0.5 in
    `quatrain serve`, and none in runs of single turns."""
    mesh: Mesh | None = None
    """Device mesh for the rollout, in the form of `mesh`, with `cp` 1. null: `tp` and `ep` of `mesh`,
    and as many replicas of the sampler (`dp`) as there is room for, each with a complete copy of the weights
    on its `tp` x `ep` devices. With `rollout.workers`: that of each worker, over its own devices; null: `tp`
    of `mesh`."""
    workers: NonNegative = 0
    """Rollout workers on Ray (extra `ray`): processes with devices of their own, in which the engine samples,
    and whose death costs time and no data. 0: the devices of this run sample: [fleet.md](fleet.md)."""
    servers: tuple[Url, ...] = Field((), strict=False)
    """Addresses of inference servers that sample in place of this run's devices, e.g. `[http://gpu1:8000]`:
    `quatrain serve`, vLLM or SGLang: [servers.md](servers.md)."""
    sampler: Text | None = None
    """A sampler of your own, as `path.py:Class`, a class derived from `quatrain.Sampler`; null: the devices
    of this run, workers or servers: [library.md](library.md#a-sampler-of-ones-own)."""
    timeout_s: float = Field(600.0, gt=0)
    """With `rollout.workers` or `rollout.servers`: seconds without an answer after which a worker or server
    counts as lost and is started or connected to anew (while it starts: three times as many). Also the time
    in which it must load weights, and in which each must start before training; and if there is no worker or
    server for so long, the run ends."""
    weights_dir: Text | None = None
    """Folder on a file system that all rollout workers or servers share, through which they get the weights
    of each step, each run in a folder of its own there; null: workers get them through Ray's object store,
    servers through `weights/` in the run's folder."""
    stream_weights: bool = False
    """With `rollout.servers`: the weights of each step are sent to `quatrain serve` and vLLM over HTTP, from
    memory to memory, and only what has changed where that is less, in place of a folder that all can read:
    [servers.md](servers.md#weights-over-http)."""
    lora: Literal["merged", "adapter"] = "merged"
    """How the sampler computes a model with adapters (`lora.rank`): `merged`: with matrices into which the
    adapters are merged; it is as fast as without adapters, and needs a copy of these matrices, which in
    bfloat16 is rounded stochastically, so that small changes are kept in the mean; `adapter`: with base and
    adapters as training does; it needs no copy, and a few more products in each layer."""
    speculate: int = Field(0, ge=0, le=MAX_DRAFTS)
    """Draft tokens that a decode step checks for each sequence. They are looked up, without a draft model:
    the last tokens of the sequence are searched in its prompt, in itself and in the other samples of its
    group, and what followed them there is the draft. A step then gives a sequence one to 1 + this many
    tokens, the same ones as without drafts up to rounding, and takes longer: [rollout.md](rollout.md#drafts).
    0: none."""
    record_routes: Literal["auto", True, False] = "auto"
    """For models with experts: the sampler records which experts each token went through, and every pass of
    the update over the batch takes the same ones: [models.md](models.md#routing-replay). `auto`: yes, for
    such models; `true`: an error for others; `false`: each pass chooses anew."""
    replay_mask: Literal["auto", True, False] = "auto"
    """Sampling-mask replay: where `top_p`, `top_k`, `min_p` or a grammar leaves words (entries of the
    vocabulary) out, the sampler records the words that each token was drawn from, and the update computes
    log-probabilities over the same words: [rollout.md](rollout.md#sampling-mask-replay). Needs
    `rollout.top_k` of at most 512. `auto`: yes; `true`: an error at temperature 0; `false`: the update
    computes log-probabilities over all words, which is another distribution than the sampler's."""
    logprob_diff_warning: float | None = Field(0.05, gt=0)
    """A warning is given if the mean absolute difference between the sampler's and the trainer's
    log-probabilities of a training step's tokens exceeds this, in nats; null: no warning. If a
    server differs by more than four times this when the run starts, the run ends; null: servers are not
    compared."""

    @property
    def has_episodes(self) -> bool:
        """Whether samples are episodes of several turns, with an environment, tools or an agent."""
        return self.environment is not None or bool(self.tools) or self.agent is not None

    @property
    def has_fleet(self) -> bool:
        """Whether workers, servers or a sampler of one's own sample, and not the engine on this run's
        devices."""
        return self.workers > 0 or bool(self.servers) or self.sampler is not None

    @property
    def has_filters(self) -> bool:
        """Whether tokens are drawn from a part of the words, at some temperature."""
        return (self.top_p < 1 or self.top_k > 0 or self.min_p > 0) and self.temperature > 0

    @property
    def replays(self) -> bool:
        """Whether the words that each token is drawn from are recorded, where they are not all."""
        return self.replay_mask is not False

    @property
    def most_words(self) -> int:
        """`top_k`, which has a value where kept words are recorded."""
        return MOST_KEPT if self.replays and self.has_filters and not self.top_k else self.top_k

    @property
    def trains_what_is_sampled(self) -> bool:
        """Whether the update computes probabilities in the distribution that tokens are drawn from."""
        return self.temperature > 0 and (self.replays or not self.has_filters)

    @property
    def differs_from_trainer(self) -> bool:
        """Whether other weights or another engine sample than those that are trained."""
        return self.max_staleness > 0 or bool(self.servers) or self.sampler is not None
