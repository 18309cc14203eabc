"""Environments and tools that return pictures: what the model is shown, and what is trained on."""

from __future__ import annotations

import base64
import json
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from picture_tables import store_of, whole_params, without_tower
from rollouts import local_rollouts
from seeing import Says, encoded, prompt_of, seeing_tokenizer, shades, square
from towers import CONFIGS, PROCESSORS

from quatrain import StepResult
from quatrain.config.schema import RolloutConfig
from quatrain.data.messages import pictures_of
from quatrain.data.pictures import PictureReader
from quatrain.data.tokenizer import render
from quatrain.data.turns import TurnTemplate
from quatrain.episodes import environment
from quatrain.episodes.environment import CheckedEnvironment
from quatrain.episodes.environment_episodes import EnvironmentPlayer, EpisodeRules
from quatrain.episodes.environment_threads import InThreads
from quatrain.episodes.environment_workers import _VALUES, _answer
from quatrain.episodes.load_environment import load_environment
from quatrain.episodes.tools import Tools
from quatrain.forward.planner import MicroBatchPlanner
from quatrain.forward.predict import predict_tokens
from quatrain.forward.specs import PolicySpec
from quatrain.forward.table import TokenTable
from quatrain.models.families import architecture_from_hf
from quatrain.rollout.rollouts import Rollouts
from quatrain.types.pictures import Pictures
from quatrain.types.rollouts import Sampling
from quatrain.workers.faults import Fault


def url(content: bytes) -> dict[str, object]:
    return {"url": f"data:image/png;base64,{base64.b64encode(content).decode()}"}


class Screen:
    """Shows a screen of another shade at the start and after each turn, in each of the forms of a part."""

    def reset(self, number):
        self.shade = 10 * number
        return [{"role": "user", "content": [self.part(0), {"type": "text", "text": "Go."}]}]

    def step(self, completion):
        self.shade += 1
        turn = self.shade % 10
        content = [{"type": "text", "text": "Now:"}, self.part(turn)] if turn != 3 else "No picture."
        return StepResult([{"role": "user", "content": content}], reward=1.0, done=turn == 4)

    def part(self, turn):
        screen = square(self.shade + 100, (16 + 8 * turn, 16))
        return [
            {"type": "image", "image": screen},
            {"type": "image", "bytes": encoded(screen)},
            {"type": "image_url", "image_url": url(encoded(screen))},
        ][turn % 3]


@pytest.fixture(scope="module")
def tokenizer():
    return seeing_tokenizer()


def played(tokenizer, made, prompts, *said, max_tokens=600, turns=9):
    """The batch of one episode of each prompt, and what the sampler was asked for."""
    environments = load_environment(made)
    rules = EpisodeRules(
        tokenizer,
        environments.turns(tokenizer, [tokenizer.eos_token_id]),
        InThreads(environments, 20.0),
        max_turns=turns,
        max_environment_tokens=600,
        max_tokens=max_tokens,
        seed=1,
    )
    sampler = Says(tokenizer, *said)
    with closing(Rollouts(sampler, tokenizer, Sampling(1, 99), EnvironmentPlayer(rules))) as rollouts:
        return rollouts.generate(prompts), sampler.asked


def test_every_turn_is_asked_for_with_the_pictures_so_far(tokenizer):
    """The faults: a turn without those before it, or each picture some tokens beside its placeholders.

    The policy also says the token of placeholders, which is text.
    """
    picture = PictureReader().placed([{"role": "user", "content": [{"type": "image", "image": square(7)}]}])
    prompts = [
        prompt_of(tokenizer, picture, group=1),
        prompt_of(tokenizer, [{"role": "user", "content": "?"}], group=2),
    ]
    batch, asked = played(tokenizer, Screen, prompts, "a<|image_pad|>b")
    placeholder = tokenizer.expansion.vision.placeholder_id
    for row in range(2):
        size = batch.lengths[row]
        ids, messages = batch.input_ids[row, :size], batch.columns["messages"][row]
        own = shades(row_of(batch, row), size)
        said = [message for message in messages if message["role"] == "assistant"]
        assert [message["content"] for message in said] == ["ab"] * 4
        of_dialogue = [shade for shade in own if shade is not None]
        number = batch.columns["number"][row]
        expected = ([7] * 4 if number == 1 else []) + [100 + 10 * number] * 4
        for turn, cells in ((1, 6), (2, 8)):
            expected += [100 + 10 * number + turn] * cells
        assert of_dialogue == expected
        placed = [shade is not None for shade in own]
        sampled = batch.completion_mask[row, :size]
        assert ((ids == placeholder) == (np.array(placed) | (sampled & (ids == placeholder)))).all()
        assert (ids[sampled] == placeholder).sum() == 4
        turns = [each for each in asked if each.group_id == number]
        assert len(turns) == 4
        for each in turns:
            count = len(each.input_ids)
            assert each.input_ids.tolist() == ids[:count].tolist()
            assert shades(each.pictures, count) == own[:count]
        assert len(pictures_of(messages)) == (5 if number == 1 else 4)
    assert batch.finish_reason.tolist() == ["environment"] * 2


def row_of(batch, row):
    return batch.pictures[row][: batch.lengths[row]]


def test_ids_are_those_of_the_whole_dialogue(tokenizer):
    prompts = [prompt_of(tokenizer, [{"role": "user", "content": "?"}])]
    batch, _ = played(tokenizer, Screen, prompts, "yes", turns=3)
    messages = batch.columns["messages"][0]
    shown = render(tokenizer, messages[:-1])  # what came after the last turn was not shown
    size = len(shown.ids) - len(tokenizer.encode("\n<|im_start|>assistant\n"))
    assert batch.input_ids[0, :size].tolist() == shown.ids[:size]
    assert shades(row_of(batch, 0)[:size], size) == shades(shown.pictures[:size], size)


def test_a_turn_that_does_not_fit_ends_the_episode_and_no_picture_is_cut(tokenizer):
    prompts = [prompt_of(tokenizer, [{"role": "user", "content": "?"}])]
    whole, _ = played(tokenizer, Screen, prompts, "yes", turns=2)
    size = int(whole.lengths[0])
    fits, _ = played(tokenizer, Screen, prompts, "yes", turns=2, max_tokens=size)
    assert (fits.lengths[0], fits.finish_reason[0]) == (size, "turns")
    said = len(tokenizer.encode("yes")) + 1
    cut, _ = played(tokenizer, Screen, prompts, "yes", turns=2, max_tokens=size - said)
    assert cut.finish_reason[0] == "length"
    assert set(shades(row_of(cut, 0), int(cut.lengths[0]))) == {None, 100}


def test_a_model_that_does_not_see_ends_the_run(tokenizer):
    """The fault: each episode would be a fault of its environment, and the run would go on without any."""
    prompts = [prompt_of(tokenizer, [{"role": "user", "content": "?"}])]
    expansion, tokenizer.expansion = tokenizer.expansion, None
    try:
        with pytest.raises(ValueError, match="an environment returned a picture: the model does not see"):
            played(tokenizer, Screen, prompts, "yes")
    finally:
        tokenizer.expansion = expansion


class Returns:
    def __init__(self, content):
        self.content = content

    def step(self, completion):
        return StepResult([{"role": "user", "content": self.content}])


def checked(content):
    return CheckedEnvironment("it", Returns(content)).step("").messages


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        ([{"type": "image", "image": square(1)}] * 9, "too_long", "at most 8 pictures; step returned 9"),
        ([{"type": "image", "url": "http://a/b.png"}], "invalid", "must not be a URL of the network"),
        ([{"type": "image", "path": "b.png"}], "invalid", "there is none for 'b.png'"),
        ([{"type": "image", "bytes": b"no"}], "invalid", "it is none of PNG"),
        ([{"type": "image"}], "invalid", "must have a picture"),
    ],
)
def test_what_an_environment_must_not_return_is_its_fault(content, kind, message):
    with pytest.raises(Fault, match=message) as fault:
        checked(content)
    assert fault.value.kind == kind


def test_pictures_of_a_turn_have_a_size_in_all(monkeypatch):
    """Not each alone; and their bytes do not count as characters."""
    content = encoded(square(1))
    monkeypatch.setattr(environment, "MAX_TURN_PICTURE_BYTES", 3 * len(content))
    monkeypatch.setattr(environment, "MAX_TURN_CHARS", 40)
    assert len(pictures_of(checked([{"type": "image", "bytes": content}] * 3))) == 3
    with pytest.raises(Fault, match=r"pictures of at most 0 MiB; step returned 0 MiB") as fault:
        checked([{"type": "image", "bytes": content}] * 4)
    assert fault.value.kind == "too_long"


def test_a_process_sends_the_same_messages_as_a_thread():
    """Through JSON; what it sends is read again, and not believed."""
    turn = StepResult(checked([{"type": "text", "text": "a"}, {"type": "image", "image": square(9)}]), 0.5)
    sent = []

    def reply(**value):
        sent.append(json.loads(json.dumps(value)))

    for value in (turn, turn.messages):
        future = Future()
        future.set_result(value)
        _answer(reply, future)
    assert _VALUES["step"](sent[0]["value"]) == turn
    assert _VALUES["begin"](sent[1]["value"]) == turn.messages
    part = sent[1]["value"][0]["content"][1]
    part["image_url"]["url"] = part["image_url"]["url"].partition(",")[0] + ",bm8="
    with pytest.raises(ValueError, match="whole picture"):
        _VALUES["begin"](sent[1]["value"])


def look(shade: int):
    """Looks.

    Args:
        shade: How dark.
    """
    screen = square(shade)
    return screen if shade < 5 else [{"type": "text", "text": "Here"}, {"type": "image", "image": screen}]


def test_a_tool_may_return_a_picture_or_parts():
    """As TRL's tools do; PIL pictures alone, too."""
    tools = Tools(look)
    for shade, texts in ((3, []), (6, ["Here"])):
        call = json.dumps({"name": "look", "arguments": {"shade": shade}})
        turn = CheckedEnvironment("it", tools).step(f"<tool_call>{call}</tool_call>")
        [message] = turn.messages
        [picture] = pictures_of([message])
        assert picture.size == (16, 16)
        assert [part["text"] for part in message["content"] if part["type"] == "text"] == texts
    assert tools.counts["tool_errors"] == 0


def test_an_environment_gets_pil_pictures():
    """Of the column and of the prompt's messages, whose samples do not share them."""
    got = []

    class Looks:
        def reset(self, images, prompt):
            got.append([*images, prompt[0]["content"][1]["image"]])
            images.clear()

    picture = PictureReader().read(square(7, (24, 16)))
    content = [{"type": "text", "text": "?"}, {"type": "image", "image": picture}]
    columns = {"images": [picture], "prompt": [{"role": "user", "content": content}]}
    for _ in range(2):
        CheckedEnvironment("it", Looks()).reset(columns)
    for pictures in got:
        assert [(each.size, each.getpixel((0, 0))) for each in pictures] == [((24, 16), (7, 0, 0))] * 2
    assert columns["images"] == [picture]


@pytest.mark.parametrize("shows", [True, False])
def test_a_template_that_writes_no_pictures_of_tools_is_said_at_the_start(tokenizer, caplog, shows):
    template = tokenizer.chat_template
    if not shows:
        tokenizer.chat_template = template.replace(
            "p.type == 'image'", "p.type == 'image' and m.role != 'tool'"
        )
    try:
        TurnTemplate(tokenizer, [tokenizer.eos_token_id], [Tools(look).tools[0].schema])
    finally:
        tokenizer.chat_template = template
    assert ("does not write pictures of messages of the role `tool`" in caplog.text) != shows


def test_what_reset_says_follows_the_parts_of_the_prompt(tokenizer):
    class Says:
        def reset(self):
            return " Go!"

        def step(self, completion):
            return None

    parts = [{"type": "image", "image": square(7)}, {"type": "text", "text": "Look."}]
    messages = PictureReader().placed([{"role": "user", "content": parts}])
    batch, _ = played(tokenizer, Says, [prompt_of(tokenizer, messages)], "yes")
    ids = batch.input_ids[0, : batch.lengths[0]].tolist()
    assert "<|vision_end|>Look. Go!<|im_end|>" in tokenizer.decode(ids)
    assert [each for each in shades(row_of(batch, 0), len(ids)) if each is not None] == [7] * 4


@pytest.mark.slow
def test_the_sampler_and_the_trainer_see_the_same_in_every_turn(tokenizer):
    """V4 and V22: three turns with a picture in each, at 1e-4; with other pictures they differ."""
    vision = tokenizer.expansion.vision
    config = CONFIGS["qwen3_vl"]
    text = {**config["text_config"], "vocab_size": 288}
    config = {**config, "image_token_id": vision.placeholder_id, "text_config": text}
    arch = architecture_from_hf(config, vision=PROCESSORS["qwen3_vl"])
    whole = whole_params(arch)
    store, params = store_of(arch, whole), without_tower(whole, arch)
    environments = load_environment(Screen)
    stop_ids = tuple(range(0, 256, 7))
    rules = EpisodeRules(
        tokenizer,
        environments.turns(tokenizer, stop_ids),
        InThreads(environments, 20.0),
        max_turns=3,
        max_environment_tokens=400,
        max_tokens=600,
        seed=1,
    )
    settings = RolloutConfig(n=2, max_new_tokens=60, temperature=1.0)
    options = {"stop_ids": stop_ids, "seed": 11, "cache_bytes": 1 << 26, "features": store}
    player = EnvironmentPlayer(rules)
    with closing(local_rollouts(arch, settings, tokenizer, player=player, **options)) as rollouts:
        rollouts.sync_weights(params, 3)
        batch = rollouts.generate(
            [prompt_of(tokenizer, [{"role": "user", "content": "?"}], number) for number in (1, 2)]
        )
    counts = [len(row_of(batch, row).used) for row in range(len(batch))]
    assert max(counts) == 3
    table, mask = TokenTable.of_policy(batch, arch), batch.completion_mask

    def scored(table):
        planner = MicroBatchPlanner(max_tokens=1024, share_prompts=True, store=store)
        return predict_tokens(params, table, model=PolicySpec(arch), planner=planner)

    np.testing.assert_allclose(scored(table)[mask], batch.rollout_logprobs[mask], atol=1e-4)
    others = dict(zip(batch.pictures.by_id, reversed(batch.pictures.by_id.values()), strict=True))
    same_sizes = {
        number: other if other.size == batch.pictures.by_id[number].size else batch.pictures.by_id[number]
        for number, other in others.items()
    }
    renamed = np.vectorize(lambda number: same_sizes[number].id if number else 0)(batch.pictures.ids)
    shuffled = Pictures(renamed, batch.pictures.by_id)
    gap = np.abs(scored(replace(table, pictures=shuffled))[mask] - batch.rollout_logprobs[mask])
    assert gap.max() > 1e-2
