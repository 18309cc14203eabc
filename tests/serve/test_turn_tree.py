"""The tree of an agent's turns: what a request continues, and the rows that train each answer once."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quatrain.data.messages import pictures_of
from quatrain.serve.turn_tree import TurnTree
from quatrain.types.pictures import Pictures, Tokens
from quatrain.types.piece import Piece

PROMPT = [{"role": "user", "content": "How many?"}]
PROMPT_IDS = [1, 2, 3]
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def render_of(messages):
    """Ids that depend on every message; no answer of the policy has ids below 1000."""
    return [hash(str(m)) % 900 for m in messages] + [0]


def tokens_of(ids, messages):
    """The ids, the first of which stands for the last picture of the messages, if they have one."""
    pictures = pictures_of(messages)
    return Tokens(ids, Pictures.of([*pictures[-1:], *[None] * (len(ids) - 1)]) if pictures else None)


class Dialogue:
    """An agent and the server together; `log` has (context, answer) of each request."""

    def __init__(self, sequence_id=5, prompt=PROMPT):
        self.tree, self.log = TurnTree(sequence_id, prompt, Tokens(PROMPT_IDS)), []
        self.next_id = 1000

    def ask(self, messages, tools=(), *, calls=(), size=2, ended=True, variables=()):
        """(the answer's message, its turn)."""
        tools = [*tools, dict(variables)]
        suffixes = []

        def suffix(opening, sampled, new):
            suffixes.append((opening, list(sampled), new))
            return tokens_of([900, *(hash(str(m)) % 900 for m in new)], new)

        found = self.tree.find(messages, tools, lambda: tokens_of(render_of(messages), messages), suffix)
        turn = self.tree.begin(found)
        if ended:
            tokens = list(range(self.next_id, self.next_id + size))
            turn.answer(Piece(tokens, [-0.5] * size, [3] * size))
            self.next_id += size
            self.log.append((tuple(turn.prompt_ids), tuple(turn.tokens)))
        answer = {"role": "assistant", "content": f"answer {turn.tokens}"}
        if calls:
            answer["tool_calls"] = list(calls)
        if ended:
            self.tree.end(turn, [*messages, answer], tools)
        return copy.deepcopy(answer), turn

    def check(self):
        """Every answer is in one row's mask, behind the context in which it was sampled."""
        found = []
        for row in self.tree.rows():
            ids = list(row.path[0].prompt_ids)
            for turn in row.path:
                ids += turn.given if turn.parent is not None else []
                assert ids == turn.prompt_ids
                if turn in row.owned:
                    found.append((tuple(ids), tuple(turn.tokens)))
                ids += turn.tokens
        assert sorted(found) == sorted(self.log)


def call(identity, arguments, name="look"):
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_dialogue_is_one_sequence_with_the_ids_that_were_sampled():
    agent, messages = Dialogue(), list(PROMPT)
    for number in range(3):
        answer, turn = agent.ask(messages)
        messages += [answer, {"role": "user", "content": f"more {number}"}]
    [row] = agent.tree.rows()
    assert len(row.path) == 3
    assert turn.prompt_ids[: len(row.path[1].ids)] == row.path[1].ids
    agent.check()
    assert [t.reason for t in agent.tree.turns] == [None] * 3


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.update(content=f"  {m['content']}\n"),
        lambda m: m.update(refusal=None, annotations=[]),
        lambda m: m.update(reasoning_content="so I think"),
        lambda m: m["tool_calls"][0].update(id="another"),
        lambda m: m["tool_calls"][0]["function"].update(arguments={"b": [1, {"c": "ü"}], "a": None}),
    ],
)
def test_what_clients_write_anew_does_not_matter(change):
    agent = Dialogue()
    calls = [call("c1", {"a": None, "b": [1, {"c": "ü"}]})]
    answer, turn = agent.ask(PROMPT, TOOLS, calls=calls)
    change(answer)
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "3"}
    _, second = agent.ask([*PROMPT, answer, result], TOOLS)
    assert second.parent is turn


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda m, t: ([*m[:1], {**m[1], "content": "I said"}, *m[2:]], t), "message 1 changed"),
        (lambda m, t: ([{"role": "system", "content": "now"}, *m], t), "message 0 changed"),
        (lambda m, t: (m, []), "other tools"),
        (lambda m, t: (m[:1], t), "asked again"),
        (lambda m, t: ([{**m[0], "role": "system"}, *m[1:]], t), "message 0 changed"),
    ],
)
def test_an_edited_history_begins_anew_and_says_why(edit, reason):
    agent = Dialogue()
    answer, _ = agent.ask(PROMPT, TOOLS)
    messages, tools = edit([*PROMPT, answer, {"role": "user", "content": "more"}], TOOLS)
    _, turn = agent.ask(messages, tools)
    assert turn.parent is None
    assert turn.reason == reason
    assert len(agent.tree.rows()) == 2
    agent.check()


def test_other_variables_of_the_template_are_named():
    """Catches a reason that blames the tools, where thinking was switched on or off."""
    agent = Dialogue()
    answer, _ = agent.ask(PROMPT, TOOLS, variables={"enable_thinking": True})
    messages = [*PROMPT, answer, {"role": "user", "content": "more"}]
    _, turn = agent.ask(messages, TOOLS, variables={"enable_thinking": False})
    assert turn.reason == "other variables of the template"
    _, turn = agent.ask(messages, [], variables={"enable_thinking": False})
    assert turn.reason == "asked again"


def test_of_equal_answers_the_ids_of_calls_say_which():
    agent = Dialogue()
    turns = []
    for identity in ("c1", "c2"):
        turns.append(agent.ask(PROMPT, calls=[call(identity, {})])[1])
    for turn in turns:  # as if both had said the same
        turn.messages = [
            *PROMPT,
            {"role": "assistant", "content": "", "tool_calls": turn.messages[-1]["tool_calls"]},
        ]
    agent.tree._answers = {}
    for turn in turns:
        agent.tree.end(turn, turn.messages, [{}])
    for number in (0, 1):
        _, third = agent.ask([*turns[number].messages, {"role": "user", "content": "x"}])
        assert third.parent is turns[number]
    without = {"role": "assistant", "content": "", "tool_calls": [call("other", {})]}
    assert agent.ask([*PROMPT, without, {"role": "user", "content": "y"}])[1].parent is turns[1]


def test_results_in_another_order_are_another_history():
    agent = Dialogue()
    answer, turn = agent.ask(PROMPT, calls=[call("a", {"x": 1}), call("b", {"x": 2})])
    results = [{"role": "tool", "tool_call_id": i, "content": "same"} for i in ("a", "b")]
    second, _ = agent.ask([*PROMPT, answer, *results])
    _, third = agent.ask([*PROMPT, answer, *reversed(results), second, {"role": "user", "content": "go"}])
    assert third.parent is turn  # it continues the first answer alone: the second followed other messages


def test_random_numbers_go_on_and_are_of_their_own_where_a_context_is_asked_again():
    agent = Dialogue(sequence_id=7)
    answer, first = agent.ask(PROMPT, size=3)
    _, again = agent.ask(PROMPT)
    _, second = agent.ask([*PROMPT, answer, {"role": "user", "content": "more"}])
    _, other = agent.ask([{"role": "user", "content": "something else"}])
    assert (first.sequence_id, first.offset) == (7, 0)
    assert (second.sequence_id, second.offset) == (7, 3 + 2)
    assert again.sequence_id not in (7, other.sequence_id)
    assert other.offset == again.offset == 0
    repeated = Dialogue(sequence_id=7)
    repeated.ask([{"role": "user", "content": "something else"}])
    repeated.ask(PROMPT)
    assert repeated.ask(PROMPT)[1].sequence_id == again.sequence_id
    assert repeated.tree.turns[0].sequence_id == other.sequence_id


def test_ids_continue_the_longest_turn_that_begins_them():
    agent = Dialogue()
    turn = agent.tree.begin(agent.tree.find_ids(PROMPT_IDS))
    turn.answer(Piece([1000, 1001], [-0.5] * 2, [3] * 2))
    assert (turn.sequence_id, turn.reason) == (5, None)
    second = agent.tree.find_ids([*PROMPT_IDS, 1000, 1001, 4])
    assert second.parent is turn
    assert agent.tree.find_ids([*PROMPT_IDS, 1000, 4]).parent is None
    other = agent.tree.find_ids([9, 9])
    assert (other.parent, other.is_prompt, other.reason) == (None, False, "other ids")


def test_an_answer_that_nobody_read_is_left_out_unless_it_was_continued():
    agent = Dialogue()
    answer, turn = agent.ask(PROMPT)
    turn.is_known = False
    agent.ask(PROMPT, ended=False)
    assert agent.tree.rows() == []
    agent.ask([*PROMPT, answer, {"role": "user", "content": "more"}])
    [row] = agent.tree.rows()
    assert turn in row.owned


def test_the_first_row_has_the_last_request():
    agent = Dialogue()
    answer, first = agent.ask(PROMPT)
    agent.ask([*PROMPT, answer, {"role": "user", "content": "left"}])
    _, last = agent.ask([*PROMPT, answer, {"role": "user", "content": "right"}])
    rows = agent.tree.rows()
    assert rows[0].path[-1] is last
    assert sum(first in row.owned for row in rows) == 1


def _random_dialogue(seed: int) -> Dialogue:
    """Requests that continue, branch, edit, shorten, change the tools, or come again."""
    rng, agent = random.Random(seed), Dialogue()
    histories = [list(PROMPT)]
    for number in range(rng.randint(1, 12)):
        messages = copy.deepcopy(rng.choice(histories))
        match rng.randint(0, 6):
            case 0 if len(messages) > 1:
                place = rng.randrange(len(messages))
                messages[place]["content"] += " edited"
                messages[place].pop("tool_calls", None)
            case 1:
                messages = [{"role": "user", "content": f"summary {number}"}]
            case 2:
                messages = messages[-1:] if messages[-1]["role"] == "user" else messages
        tools = TOOLS if rng.random() < 0.3 else ()
        calls = [call(f"c{number}", {"n": number % 2})] if rng.random() < 0.3 else ()
        answer, turn = agent.ask(messages, tools, calls=calls, ended=rng.random() < 0.95)
        if turn.tokens:
            new = {"role": "user", "content": f"go {rng.randint(0, 1)}"}
            if calls:
                new = {"role": "tool", "tool_call_id": f"c{number}", "content": "result"}
            histories.append([*messages, answer, new])
    return agent


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9))
def test_of_random_trees_each_answer_is_trained_once(seed):
    _random_dialogue(seed).check()


@pytest.mark.slow
def test_of_a_thousand_random_trees_each_answer_is_trained_once():
    sizes = []
    for seed in range(1000):
        agent = _random_dialogue(seed)
        agent.check()
        sizes.append(len(agent.tree.rows()))
    assert max(sizes) > 5
    assert sum(size > 1 for size in sizes) > 300
