"""Agents that tests play; each writes what it sent and got into the file `log`, a line of JSON a request."""

import asyncio
import json
import os
import random
import signal
import sys
import threading
import time

import openai


class Policy:
    """An OpenAI client that keeps a log of ids."""

    def __init__(self, client, row, log):
        self.model, self.log = client.model, log
        self.place = [row["id"], client.sample]
        self.openai = openai.AsyncOpenAI(
            base_url=client.base_url, api_key=client.api_key, max_retries=0, timeout=120
        )

    async def ask(self, messages, **fields):
        answer = await self.openai.chat.completions.create(
            model=self.model, messages=messages, max_tokens=5, extra_body={"return_token_ids": True}, **fields
        )
        [choice] = answer.choices
        line = {
            "place": self.place,
            "prompt_ids": answer.prompt_token_ids,
            "token_ids": choice.token_ids,
            "text": choice.message.content,
        }
        with open(self.log, "a") as file:
            file.write(json.dumps(line) + "\n")
        return choice.message


async def edits(client, row, log):
    """Three turns, random pauses, an edited history in the middle, and one error in four."""
    policy, messages = Policy(client, row, log), list(row["prompt"])
    for turn in range(3):
        await asyncio.sleep(random.random() / 20)
        messages.append(await policy.ask(messages))
        if turn == 1 and client.sample % 4 == 1:
            messages[1] = {"role": "assistant", "content": "I forgot – was war's? 🙂"}
        if turn == 1 and client.sample % 4 == 3:
            raise KeyError("the fourth sample")
        messages.append({"role": "user", "content": f"more {turn} ü"})
    return {"reward": float(client.sample), "metrics": {"turns": 3}}


async def branches(client, row, log):
    """Asks twice after the same first answer, at the same time, and once more for another answer to it."""
    policy, messages = Policy(client, row, log), list(row["prompt"])
    messages.append(await policy.ask(messages))
    asked = [[*messages, {"role": "user", "content": text}] for text in ("left", "right", "left")]
    await asyncio.gather(*[policy.ask(each) for each in asked])
    return 1.0


async def once(client, row):
    await client.chat(row["prompt"])


async def untrained(client, row):
    """A simulated user is asked between two turns."""
    messages = [*row["prompt"], await client.chat(row["prompt"], max_tokens=5)]
    said = await client.chat(row["prompt"], train=False, temperature=0, max_tokens=3)
    await client.chat([*messages, {"role": "user", "content": said["content"]}])
    return 0.5


async def many_turns(client, row):
    """Asks until the server refuses it."""
    messages = list(row["prompt"])
    while True:
        messages += [await client.chat(messages, max_tokens=2), {"role": "user", "content": "go on"}]


async def talks(client, row):
    """Eight turns of a dialogue."""
    messages = list(row["prompt"])
    for turn in range(8):
        answer = await client.chat(messages, max_tokens=10)
        messages += [answer, {"role": "user", "content": f"and {turn} more things"}]
    return 1.0


def in_a_thread(client, row, reward=2.0):
    asyncio.run(once(client, row))
    assert threading.current_thread() is not threading.main_thread()
    return reward


async def faulty(client, row, folder):
    """Sample 0 hangs, 1 leaves, 2 returns nonsense, 3 dies at its first try, 4 at every try, 5 is well."""
    await client.chat(row["prompt"])
    match client.sample:
        case 0:
            await asyncio.sleep(1000)
        case 1:
            sys.exit(3)
        case 2:
            return "a text"
        case 3:
            mark = os.path.join(folder, "died")
            if not os.path.exists(mark):
                open(mark, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        case 4:
            while not os.path.exists(os.path.join(folder, "died")):  # sample 3 dies first
                await asyncio.sleep(0.02)
            os._exit(0)
        case _:
            await asyncio.sleep(0.5)
    return 1.0


async def hangs_its_thread(client, row):
    await client.chat(row["prompt"])
    if client.sample == 0:
        time.sleep(1000)
    return 1.0


async def leaves_requests_behind(client, row):
    """Returns while equal requests, a stream and an untrained one are being answered."""
    asked = [client.chat(row["prompt"]) for _ in range(3)]
    asked.append(client.chat(row["prompt"], train=False))
    tasks = [asyncio.ensure_future(each) for each in asked]
    await asyncio.sleep(0.2)
    return float(len(tasks))


async def is_cancelled(client, row):
    if client.sample == 0:
        raise asyncio.CancelledError("an inner task")
    return 1.0


async def shortens_its_history(client, row):
    """Meets the limit of the sequence, and goes on with a new one."""
    messages = list(row["prompt"])
    for _ in range(40):
        try:
            messages += [await client.chat(messages, max_tokens=1), {"role": "user", "content": "x" * 20}]
        except RuntimeError as error:
            if "context_length_exceeded" in str(error):
                break
            raise
    await client.chat([{"role": "user", "content": "summary"}], max_tokens=1)
    if client.sample == 1:
        raise KeyError("a bug of its own")
    return 1.0


def hangs_in_a_thread(client, row):
    asyncio.run(client.chat(row["prompt"], max_tokens=3))
    if client.sample == 0:
        time.sleep(60)
    return 1.0


async def asks_a_judge(client, row):
    await client.chat(row["prompt"], max_tokens=4)
    said = [await client.chat(row["prompt"], train=False, max_tokens=4) for _ in range(2)]
    letters = [ord(letter) for each in said for letter in each["content"]]
    return {"reward": 1.0, "metrics": {str(client.sample): sum(letters)}}


async def two_players(client, row, log, leave_out="", rename=""):
    """Two roles of one dialogue each, of which the second hears the first; a sum of rewards that is 0."""
    first, second = (Policy(client.role(name), row, f"{log}.{name}") for name in ("first", "second"))
    said = await first.ask(row["prompt"])
    messages = [{"role": "user", "content": f"They say: {said.content}"}]
    for _ in range(2):
        messages += [await second.ask(messages), {"role": "user", "content": "And now?"}]
    won = float(client.sample) - 1.5
    rewards = {"first": won, rename or "second": -won}
    rewards.pop(leave_out, None)
    return {"reward": rewards, "metrics": {"won": won}}


async def a_role_asks_until_it_is_refused(client, row):
    """One player goes on until the limit of its own answers, the other answers once."""
    other, player = client.role("other"), client.role("player")
    await other.chat(row["prompt"], max_tokens=2)
    await many_turns(player, row)


async def rewards_too_many_roles(client, row):
    await client.chat(row["prompt"], max_tokens=2)
    return 1.0 if client.sample else {"reward": {f"role{number}": 1.0 for number in range(100)} | {"": 1.0}}
