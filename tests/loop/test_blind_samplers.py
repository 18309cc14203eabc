"""Data with pictures where something would not see them: an error before anything is sampled."""

from types import SimpleNamespace

import pytest
from seeing import Says, seeing_tokenizer, square
from towers import seeing

from quatrain.config.schema import Config
from quatrain.loop import stages
from quatrain.loop.policy import LoadedPolicy

TEXT = [{"prompt": [{"role": "user", "content": "?"}]}]
SEEN = [{"prompt": [{"role": "user", "content": "?"}], "images": [square(1)]}]


@pytest.fixture(scope="module")
def policy():
    arch, tokenizer = seeing("qwen3_vl"), seeing_tokenizer()
    return SimpleNamespace(
        arch=arch, tokenizer=tokenizer, required_by={}, turns=None, _blind=lambda config: None
    )


def prompts(policy, rows, **sections):
    config = Config.model_validate(
        {"model": {"path": "x"}, "data": {"train": "rows"}, "reward": {"functions": {"x:y": 1}}, **sections}
    )
    scorer = SimpleNamespace(required_by={}, check_prompt=None)
    return LoadedPolicy.prompts(policy, config, "rows", scorer, {"rows": rows}, {})


def test_what_reads_data_with_pictures_must_see(policy, monkeypatch):
    assert prompts(policy, SEEN, rollout={"servers": ["http://a:1"]}).has_pictures
    monkeypatch.setattr(policy, "_blind", lambda config: "the critic has no tower")
    with pytest.raises(ValueError, match="rows has some; the critic has no tower"):
        prompts(policy, SEEN)
    assert len(prompts(policy, TEXT)) == 1


def test_a_sampler_that_cannot_see_is_closed_before_the_first_step(policy, monkeypatch):
    closed = []
    sampler = Says(policy.tokenizer, "x")
    sampler.close = lambda: closed.append(1)
    monkeypatch.setattr(stages, "build_sampler", lambda config, loaded: sampler)
    monkeypatch.setattr(stages, "build_player", lambda *given: None)
    monkeypatch.setattr(stages, "Rollouts", lambda *given: given)
    monkeypatch.setattr(stages, "replace", lambda loaded, **changes: loaded)
    config = SimpleNamespace(
        data=SimpleNamespace(batch_size=1), rollout=SimpleNamespace(greedy_baseline=False)
    )
    monkeypatch.setattr(stages, "Sampling", SimpleNamespace(of=lambda rollout: None))
    for rows, cannot_see, refused in ((SEEN, None, 0), (TEXT, "why", 0), (SEEN, "why", 1)):
        sampler.cannot_see = cannot_see
        source = prompts(policy, rows)
        if refused:
            with pytest.raises(ValueError, match="prompts have pictures: why"):
                stages.build_engine(config, policy, None, source)
        else:
            stages.build_engine(config, policy, None, source)
        assert len(closed) == refused
