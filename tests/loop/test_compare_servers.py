"""Each server is compared with the trainer before the first step: on prompts, and on one with a picture."""

from types import SimpleNamespace

import numpy as np
import pytest
from seeing import seeing_tokenizer
from towers import seeing

from quatrain.loop import run as loop
from quatrain.rollout.fleet import Fleet
from quatrain.types.batches import Prompt
from quatrain.types.rollouts import Sampling


class Sampled:
    """In the place of `Rollouts`: what it is asked for comes back."""

    def __init__(self, sampler, tokenizer, sampling):
        assert sampling.n == 1

    def submit(self, prompts):
        return prompts

    def wait(self, ticket):
        return ticket


@pytest.mark.parametrize(
    ("pictured", "of_texts", "refused"), [(True, 0.0, 1), (False, 0.0, 0), (False, 1.0, 1)]
)
def test_a_gap_on_the_picture_alone_is_found(monkeypatch, pictured, of_texts, refused):
    """The fault: a mean over all prompts, in which a server that sees other pixels is near the trainer."""
    fleet = Fleet.__new__(Fleet)
    monkeypatch.setattr(loop, "Rollouts", Sampled)
    monkeypatch.setattr(loop, "OneWorker", lambda fleet, number: number)
    texts = [Prompt(i, np.ones(1, np.int32), "?") for i in range(4)]
    seen = []

    def gap(state, prompts):
        seen.extend(prompts)
        return 1.0 if prompts[0].pictures is not None else of_texts

    run = SimpleNamespace(
        config=SimpleNamespace(rollout=SimpleNamespace(logprob_diff_warning=0.1, servers=["http://a:1"])),
        loaded=SimpleNamespace(arch=seeing("qwen3_vl"), tokenizer=seeing_tokenizer()),
        prompts=SimpleNamespace(head=lambda count: texts[:count], has_pictures=pictured),
        stages=SimpleNamespace(
            rollout=SimpleNamespace(
                sampler=fleet, tokenizer=None, sampling=Sampling(4, 8), sync_weights=lambda *given: None
            ),
            update=SimpleNamespace(sampler_mismatch=gap),
        ),
    )
    state = SimpleNamespace(params=None, step=0)
    if refused:
        with pytest.raises(ValueError, match="http://a:1 differs by 1 nats"):
            loop.compare_servers(run, state)
    else:
        loop.compare_servers(run, state)
    assert len(seen) == 4 + pictured
    assert [prompt.pictures is not None for prompt in seen] == [False] * 4 + [True] * pictured
