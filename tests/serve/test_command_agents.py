"""Programs as agents: what they read in their environment leads them to the policy, and to its helper."""

import asyncio
import sys

import anthropic
import openai
from test_chat_tools import ASK
from test_sessions import session_of

from quatrain.episodes.child import Client, loaded

PROGRAM = """
import json, os
names = [name for name in os.environ if name.startswith(("OPENAI_", "ANTHROPIC_", "CLAUDE_CODE_"))]
print(json.dumps({"reward": 1, "metrics": {}, **{name: os.environ[name] for name in names}}))
"""


def test_clients_that_read_their_environment_ask_the_policy(tmp_path, monkeypatch):
    """A program that is not changed would ask another server, or train a helper's titles."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "the user's own")
    with session_of(["one", "two", "three", "title", "title"]) as (client, session, _, _):
        url = str(client.base_url).rstrip("/")
        told = Client(url, session.key, "small", f"{url.removesuffix('/v1')}/untrained/v1", 1, 2, 3, False)
        command = loaded(f"command: {sys.executable} {program}", {})
        found = asyncio.run(command(client=told, row={"prompt": []}))
        for name, value in found.items():
            if name not in ("reward", "metrics"):
                monkeypatch.setenv(name, value)
        assert (found["OPENAI_AGENTS_DISABLE_TRACING"], found["CLAUDE_CODE_ATTRIBUTION_HEADER"]) == ("1", "0")
        assert found["ANTHROPIC_AUTH_TOKEN"] == session.key
        with openai.OpenAI() as one:
            one.chat.completions.create(model=found["OPENAI_MODEL"], messages=ASK)
            one.responses.create(model=found["OPENAI_MODEL"], input="a")
        with anthropic.Anthropic() as other:
            fields = {"max_tokens": 9, "messages": [{"role": "user", "content": "b"}]}
            other.messages.create(model=found["ANTHROPIC_MODEL"], **fields)
            assert len(session.tree.turns) == 3
            for name in ("ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"):
                assert other.messages.create(model=found[name], **fields).content[0].text == "title"
    assert len(session.tree.turns) == 3
    assert session.counts["untrained_requests"] == 2
