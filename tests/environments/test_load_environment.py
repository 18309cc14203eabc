"""Finding environments and tools of users, in both forms, and refusing what is neither."""

from collections import Counter

import numpy as np
import pytest
from chat_templates import FAMILIES, tokenizer_of

from quatrain.episodes.environment import StepResult
from quatrain.episodes.load_environment import load_environment, load_environments, load_tools
from quatrain.episodes.tools import Tools
from quatrain.workers.faults import Fault

GAME = '''
from __future__ import annotations
from quatrain import StepResult

class Game:
    def reset(self, target, hint="none", **_):
        self.target = target
        return [{"role": "user", "content": hint}]

    def step(self, completion):
        if completion == self.target:
            return StepResult([], 1.0, done=True)
        return StepResult([{"role": "user", "content": "no"}])

def make():
    return Game()

class Static:
    def reset(self, target):
        return None
    def step(self, completion):
        return None

def double(number: int) -> int:
    """Doubles.

    Args:
        number: A number.
    """
    return 2 * number
'''


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "game.py"
    file.write_text(GAME)
    return str(file)


def test_a_class_and_a_function_that_makes_one(path):
    for name in ("Game", "make"):
        environments = load_environment(f"{path}:{name}")
        assert environments.schemas == ()
        assert environments.accepts is None
        assert environments.required_columns == ("target",)
        environment = environments({})
        opening = environment.reset({"target": "7", "hint": "odd", "prompt": "Guess."})
        assert opening == ({"role": "user", "content": "odd"},)
        assert environment.step("3") == StepResult(({"role": "user", "content": "no"},))
        assert environment.step("7") == StepResult((), 1.0, True)
        assert environments({}) is not environments({})


def test_reset_gets_the_columns_that_it_names(path):
    environments = load_environment(f"{path}:Static")
    assert environments.accepts == {"target"}
    assert environments({}).reset({"target": "7", "other": 1, "prompt": "Guess."}) is None


def test_tools_from_a_file(path):
    environments = load_tools([f"{path}:double"])
    assert [schema["function"]["name"] for schema in environments.schemas] == ["double"]
    first, second = environments({}), environments({})
    turn = first.step('<tool_call>{"name": "double", "arguments": {"number": 4}}</tool_call>')
    assert turn.messages[0]["content"] == "8"
    assert first.reset({"answer": 1}) is None
    assert (first.counts, second.counts) == (Counter(tool_calls=1), Counter())


def test_tools_and_an_environment_of_one_file_share_its_variables(tmp_path):
    source = """
kept = []

def put(value: int) -> int:
    \"\"\"Keeps.

    Args:
        value: A number.
    \"\"\"
    kept.append(value)
    return len(kept)

def get() -> list:
    \"\"\"Gives what was kept.\"\"\"
    return kept

def make():
    return Holder()

class Holder:
    held = kept

    def step(self, completion):
        return None
"""
    (tmp_path / "t.py").write_text(source)
    tools = load_tools([f"{tmp_path}/t.py:put", f"{tmp_path}/t.py:get"])({})
    calls = (
        '<tool_call>{"name": "put", "arguments": {"value": 4}}</tool_call>'
        '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    )
    assert [message["content"] for message in tools.step(calls).messages] == ["1", "[4]"]
    assert load_environment(f"{tmp_path}/t.py:make").make().held == [4]


class WordGame:
    """As in TRL's documentation of environment_factory."""

    made = 0

    def __init__(self):
        self.reward = 0.0
        WordGame.made += 1

    def reset(self, **kwargs) -> str | None:
        self.word = kwargs["word"]
        self.row = kwargs
        self.done = False
        return f" It has {len(self.word)} letters."

    def guess(self, guess: str) -> str:
        """
        Make a guess.

        Args:
            guess: The guessed word.

        Returns:
            The feedback message.
        """
        if self.done:
            raise ValueError("Game over.")
        self.done = guess == self.word
        self.reward = float(self.done)
        return "right" if self.done else "wrong"

    def _helper(self):
        raise AssertionError


def guess(word):
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"guess": "{word}"}}}}\n</tool_call>'


def test_a_class_in_trls_form_works_as_it_is():
    before = WordGame.made
    environments = load_environment(WordGame)
    assert WordGame.made == before
    (schema,) = environments.schemas
    assert schema["function"]["name"] == "guess"
    assert list(schema["function"]["parameters"]["properties"]) == ["guess"]
    assert environments.required_columns == ()
    game, other = environments({}), environments({})
    assert WordGame.made == before + 2
    assert game.reset({"word": "pen", "prompt": "Guess."}) == " It has 3 letters."
    assert other.reset({"word": "book"}) == " It has 4 letters."
    wrong, right, over = (game.step(guess(word)) for word in ("cup", "pen", "pen"))
    assert [turn.messages[0]["content"] for turn in (wrong, right)] == ["wrong", "right"]
    assert over.messages[0]["content"].startswith("Error: ValueError: Game over.")
    # A turn is credited with what its tools earned; the rest, counted once, comes at the end.
    assert [turn.reward for turn in (wrong, right, over)] == [0.0, 1.0, 0.0]
    assert game.step("Done.") is None
    assert (game.final_reward(), other.final_reward()) == (0.0, 0.0)
    assert game.counts == Counter(tool_calls=3, tool_errors=1)
    game.close()


@pytest.mark.parametrize(
    ("reward", "earned"), [(np.array(0.5), 0.5), (np.float32(0.5), 0.5), (None, 0.0), ("0.5", 0.0)]
)
def test_a_reward_may_be_an_array_without_dimensions(reward, earned):
    """The fault: a reward that numpy, torch or JAX had computed was taken as none, and the episode had 0."""

    class Given(WordGame):
        def guess(self, guess: str) -> str:
            """Guess the word.

            Args:
                guess: A word.
            """
            self.reward = reward
            return "no"

    environment = load_environment(Given)({})
    environment.reset({"word": "yes"})
    assert environment.step(guess("no")).reward == earned
    assert environment.final_reward() == 0.0


def test_a_helper_and_a_reset_without_docstring_are_no_tools():
    environment = load_environment(WordGame)({})
    environment.reset({"word": "pen"})
    (message,) = environment.step('<tool_call>{"name": "_helper", "arguments": {}}</tool_call>').messages
    assert message["content"] == "Error: there is no tool '_helper'; the tools are guess"


class Rewarding(WordGame):
    closed = 0

    def get_reward(self) -> float:
        return 5.0 if self.done else -5.0

    def close(self):
        Rewarding.closed += 1

    @staticmethod
    def stay() -> str:
        """Does nothing."""
        return "stayed"

    @classmethod
    def name_it(cls) -> str:
        """Names the game."""
        return cls.__name__


def test_get_reward_and_close_are_no_tools_and_inherited_methods_are():
    environments = load_environment(lambda: Rewarding())
    assert Rewarding.closed == 1  # the one that was made to see its form
    assert [tool.name for tool in environments.tools] == ["guess", "name_it", "stay"]
    game = environments({})
    game.reset({"word": "pen"})
    assert game.final_reward() == -5.0
    turn = game.step('[{"name": "stay", "arguments": {}}, {"name": "name_it", "arguments": {}}]')
    assert [message["content"] for message in turn.messages] == ["stayed", "Rewarding"]
    game.close()
    assert Rewarding.closed == 2


def double(number: int) -> int:
    """Doubles.

    Args:
        number: A number.
    """
    return 2 * number


class Scored(Tools):
    def __init__(self):
        super().__init__(double)

    def get_reward(self):
        return 0.25 * self.counts["tool_calls"]


@pytest.mark.parametrize("found", [Scored, lambda: Scored()])
def test_an_environment_derived_from_tools(found):
    environments = load_environment(found)
    assert [tool.name for tool in environments.tools] == ["double"]
    environment = environments({})
    assert environment.step('[{"name": "double", "arguments": {"number": 4}}]').messages[0]["content"] == "8"
    assert environment.final_reward() == 0.25


class Failing:
    def __init__(self):
        raise ConnectionError("no server")

    def step(self, completion):
        return None


def test_an_environment_that_cannot_be_made_costs_its_episode():
    with pytest.raises(Fault, match="Failing: making it raised ConnectionError: no server") as caught:
        load_environment(Failing)({})
    assert caught.value.kind == "error"


class NeedsWord:
    def __init__(self, word):
        pass

    def step(self, completion):
        return None


class Empty:
    pass


class BadStep:
    def step(self):
        return None


class Untyped:
    def guess(self, word):
        """Guesses.

        Args:
            word: A word.
        """
        return word


def failing():
    raise ConnectionError("no server")


def leaving():
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (NeedsWord, "environment NeedsWord must be made without arguments; it needs word; give them default"),
        (Empty, "environment Empty must have a method `step.*or public methods.*it has neither"),
        (BadStep, r"environment BadStep must have a method step\(self, completion\).*too many positional"),
        (
            Untyped,
            "environment Untyped: a tool must have a type hint.*guess has not: Argument word.*names with _",
        ),
        (failing, "environment failing must make an environment; it raised ConnectionError: no server"),
        (leaving, "environment leaving must make an environment; it raised SystemExit: 0"),
        (lambda: 3, "it has neither"),
        ("game.py", "environment 'game.py' must be `path/file.py:name`.*add a colon and the name"),
        ("nowhere.py:Game", "environment 'nowhere.py:Game': no such file"),
        ("json:nothing", "environment 'json:nothing': json has no attribute 'nothing'"),
    ],
)
def test_what_is_no_environment_is_one_error(found, message):
    with pytest.raises(ValueError, match=message):
        load_environment(found)


def test_what_are_no_tools_is_one_error(path):
    with pytest.raises(ValueError, match=r"tool 'double' must be `path/file.py:name`"):
        load_tools(["double"])
    with pytest.raises(ValueError, match="got none; correct the list of tools"):
        load_tools([])
    with pytest.raises(ValueError, match="got double twice"):
        load_tools([f"{path}:double", f"{path}:double"])
    with pytest.raises(ValueError, match=r"make has not: .*no docstring"):
        load_tools([f"{path}:make"])


class Asynchronous:
    async def step(self, completion):
        return None


class Generating:
    def reset(self, **columns):
        yield None

    def step(self, completion):
        return None


@pytest.mark.parametrize(("form", "method"), [(Asynchronous, "step"), (Generating, "reset")])
def test_methods_that_do_not_return_their_result_are_refused(form, method):
    with pytest.raises(ValueError, match=f"{method} is asynchronous or a generator; write it without async"):
        load_environment(form)


def test_a_column_chooses_the_environment_and_its_tools(path):
    environments = load_environments({"column": "game", "words": WordGame, "numbers": f"{path}:Game"})
    assert environments.required_columns == ("game",)
    words, numbers = ({"game": name, "word": "pen", "target": "7"} for name in ("words", "numbers"))
    assert environments(words).reset(words) == " It has 3 letters."
    assert environments(numbers).reset(numbers) == ({"role": "user", "content": "none"},)
    assert [environments.kind(row) for row in (words, numbers)] == ["words", "numbers"]
    tokenizer = tokenizer_of(FAMILIES["qwen2.5"])
    turns = environments.turns(tokenizer, [tokenizer.eos_token_id])
    asked = ({"role": "user", "content": "Play."},)
    written = [tokenizer.decode(turns(row).prompt(asked).ids) for row in (words, numbers)]
    assert ['"name": "guess"' in text for text in written] == [True, False]
    with pytest.raises(ValueError, match=r"game\.py:Game needs the column `target`, which this row has not"):
        turns({"game": "numbers", "target": None})
    assert turns({"game": "words"}) is turns(words)


@pytest.mark.parametrize("row", [{}, {"game": None}, {"game": "chess"}, {"game": 3}])
def test_a_row_must_name_one_of_the_environments(path, row):
    environments = load_environments({"column": "game", "numbers": f"{path}:Game"})
    with pytest.raises(ValueError, match="column `game` must name one of the environments numbers"):
        environments.kind(row)
