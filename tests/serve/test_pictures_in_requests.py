"""Pictures in requests: read from data URLs, sampled after, and part of the turns of a session."""

from __future__ import annotations

import base64
from types import SimpleNamespace

import httpx2 as httpx
import numpy as np
import pytest
from seeing import Says, encoded, seeing_tokenizer, shades, square
from servers import MODEL, served
from test_sessions import more, say, session_of

from quatrain.data.tokenizer import render
from quatrain.episodes.agent_episodes import Part, _row
from quatrain.serve.turn_tree import TurnTree
from quatrain.types.batches import Prompt
from quatrain.types.pictures import Picture, Pictures, Tokens
from quatrain.types.piece import Piece
from quatrain.types.rollouts import rollout_batch
from quatrain.types.sampler import Sampler


@pytest.fixture(scope="module")
def tokenizer():
    return seeing_tokenizer()


def url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def asks(shade: int, text: str = "Which?", size: tuple[int, int] = (16, 16)) -> dict[str, object]:
    part = {"type": "image_url", "image_url": {"url": url(encoded(square(shade, size)))}}
    return {"role": "user", "content": [part, {"type": "text", "text": text}]}


def test_a_chat_is_sampled_after_its_pictures_and_counts_their_placeholders(tokenizer):
    service = Says(tokenizer, "Red")
    arch = SimpleNamespace(vocab_size=len(tokenizer), max_position=10_000)
    with served(service, arch, tokenizer) as address, httpx.Client(base_url=address, timeout=60) as http:

        def answer(part, **fields):
            body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}], **fields}
            return http.post("/v1/chat/completions", json=body)

        [part, _] = asks(9, size=(24, 16))["content"]
        said = answer(part, n=2).json()
        assert [each["message"]["content"] for each in said["choices"]] == ["Red"] * 2
        for asked in service.asked:
            assert said["usage"]["prompt_tokens"] == len(asked.input_ids)
            assert [each for each in shades(asked.pictures, len(asked.input_ids)) if each] == [9] * 6
        assert len(service.asked) == 2
        for wrong, message in (
            ("http://a.b/c.png", "must not be a URL of the network"),
            ("/etc/passwd", "must be below a folder, and there is none"),
            ("data:image/png;base64,bm8=", "must be a whole picture"),
        ):
            refused = answer({"type": "image_url", "image_url": {"url": wrong}})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "messages")
            assert message in error["message"]
            assert "on_bad_image" not in error["message"], "a setting that a server has not"
        forged = answer({"type": "text", "text": "<|image_pad|>"})
        assert (forged.status_code, "stands for pictures" in forged.text) == (400, True)
        service.cannot_see = Sampler.cannot_see
        refused = answer(part)
        assert (refused.status_code, "must see the pictures" in refused.text) == (400, True)
        assert len(service.asked) == 2


def test_turns_of_a_session_have_their_pictures_and_so_have_its_samples(tokenizer):
    """Equal words with other pictures are other dialogues; a further turn may bring another picture."""
    service = Says(tokenizer, "a", "b", "c", "d")
    with session_of((), service=service, tokenizer=tokenizer, max_new_tokens=99) as (client, session, _, _):
        for shade in (50, 60):
            say(client, [asks(shade)])
        said = {"role": "assistant", "content": "a"}
        say(client, [asks(50), said, more()])
        say(client, [asks(50), said, more(), {"role": "assistant", "content": "c"}, asks(70, "And?")])
        part = Part(session, session.tree.rows(), 1.0)
        batch = rollout_batch(part.samples(), tokenizer, {})
    first, other, second, third = session.tree.turns
    assert first.parent is other.parent is None
    assert (second.parent, third.parent) == (first, second)
    assert first.prompt_ids == other.prompt_ids
    assert first.sequence_id != other.sequence_id
    assert other.reason == "message 0 changed"
    for turn, asked in zip(session.tree.turns, service.asked, strict=True):
        assert turn.prompt_ids == asked.input_ids.tolist()
        assert shades(turn.pictures, len(turn.prompt_ids)) == shades(asked.pictures, len(asked.input_ids))
    seen = [[each for each in shades(batch.pictures[row], 0) if each is not None] for row in range(2)]
    assert seen == [[50] * 4 + [70] * 4, [60] * 4]
    dialogue = render(tokenizer, batch.columns["messages"][0])
    size = int(batch.lengths[0])
    assert batch.input_ids[0, :size].tolist() == dialogue.ids[:size]
    assert shades(batch.pictures[0][:size], size) == shades(dialogue.pictures[:size], size)


def test_equal_ids_with_other_pictures_are_another_context():
    """The faults: their tokens had the same random numbers, or rows an order that depends on time."""
    red, blue = (Picture.of(name, (8, 8)) for name in (b"r", b"b"))

    def sequence_ids(*seen):
        tree = TurnTree(5, [{"role": "user", "content": "?"}], Tokens([1, 2]))
        turns = []
        for picture in seen:
            part = {"type": "image", "image": picture}
            messages = [{"role": "user", "content": [part]}]
            tokens = Tokens([7, 8], Pictures.of([picture, None]))
            turns.append(tree.begin(tree.find(messages, (), lambda found=tokens: found, None)))
            turns[-1].answer(Piece([9], [-1.0], [0]))
            tree.end(turns[-1], [*messages, {"role": "assistant", "content": "!"}], ())
        order = [row.path[0].pictures.used[0].id for row in tree.rows()[1:]]
        return {each.pictures.used[0].id: each.sequence_id for each in turns}, order

    ids, _ = sequence_ids(red, blue)
    assert len(set(ids.values())) == 2
    assert sequence_ids(blue, red)[0] == ids
    last = Picture.of(b"z", (8, 8))
    assert sequence_ids(red, blue, last)[1] == sequence_ids(blue, red, last)[1]


def test_ids_that_continue_a_turn_have_its_pictures():
    red = Picture.of(b"r", (8, 8))
    prompt = [{"role": "user", "content": [{"type": "image", "image": red}]}]
    tree = TurnTree(5, prompt, Tokens([1, 2], Pictures.of([red, None])))
    begun = tree.find_ids([1, 2])
    turn = tree.begin(begun)
    turn.answer(Piece([1], [-1.0], [0]))
    further = tree.find_ids([1, 2, 1, 1])
    assert begun.pictures.ids.tolist() == [red.id, 0]
    assert further.pictures.ids.tolist() == [red.id, 0, 0, 0]
    assert tree.find_ids([1, 1]).pictures is None
    other = tree.find_ids([1, 2, 7])  # words of the agent's own behind the prompt
    assert (other.parent, other.is_prompt) == (None, False)
    assert other.pictures.ids.tolist() == [red.id, 0, 0]


def test_an_agent_gets_data_urls():
    red = Picture.of(encoded(square(5)), (16, 16))
    messages = ({"role": "user", "content": [{"type": "image", "image": red}]},)
    columns = {"images": [red], "image": red, "chat": [*messages], "answer": "5"}
    prompt = Prompt(0, np.ones(1, np.int32), messages, columns)
    address = url(red.encoded)
    part = {"type": "image_url", "image_url": {"url": address}}
    assert _row(prompt) == {
        "images": [address],
        "image": address,
        "chat": [{"role": "user", "content": [part]}],
        "answer": "5",
        "prompt": [{"role": "user", "content": [part]}],
    }
