"""An environment of two turns: the model guesses a number from 1 to 3, and gets a hint in between.

    quatrain train examples/guessing_game.yaml

The reward is 1 for the right number in the first or the second turn. A policy that follows the hints and
guesses 2 first always wins. One that pays no attention to hints wins at most 2 of 3 games, and one that
guesses at random 5 of 9.

`guessing_game/numbers.jsonl` has a row for each number. `guessing_game/demonstrations.jsonl` shows the form
of an answer in both turns, with each number equally often, so that the warm start teaches nothing else.
"""

import re

from quatrain import StepResult


class GuessingGame:
    """Says whether the number is more or less than the first guess."""

    def reset(self, number):
        """Begins a game; `number` is a column of the data."""
        self.number, self.turns = number, 0

    def step(self, completion):
        """The hint, or the end of the game after a right guess or the second one."""
        self.turns += 1
        guess = re.search(r"<answer>([1-3])</answer>", completion)
        right = guess is not None and int(guess[1]) == self.number
        if right or self.turns == 2:
            return StepResult([], reward=float(right), done=True)
        return StepResult([{"role": "user", "content": self.hint(guess and int(guess[1]))}])

    def hint(self, guess):
        """What follows a wrong guess, or None, a completion without one."""
        if guess is None:
            return "1, 2 or 3"
        return "more" if self.number > guess else "less"
