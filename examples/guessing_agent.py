"""The guessing game as an agent that asks the policy itself; the same as an environment: guessing_game.py.

quatrain train examples/guessing_agent.yaml
"""

import re


async def agent(client, row):
    """Plays a game of two guesses for the number in `row`; its reward is 1 if one of them is right."""
    messages = list(row["prompt"])
    for _ in range(2):
        answer = await client.chat(messages)
        guess = re.search(r"<answer>([1-3])</answer>", answer["content"])
        if guess and int(guess[1]) == row["number"]:
            return 1.0
        hint = "1, 2 or 3" if guess is None else "more" if row["number"] > int(guess[1]) else "less"
        messages += [answer, {"role": "user", "content": hint}]
    return 0.0
