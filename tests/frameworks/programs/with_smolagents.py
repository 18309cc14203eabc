"""smolagents: a model, and an agent that must call a tool in each step."""

import json
from concurrent.futures import ThreadPoolExecutor

from checks import BASE, CITY, CITY_SCHEMA, ENDLESS, KEY, MODEL, QUESTION, error_of, left, main
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage


def new_model():
    return OpenAIModel(model_id=MODEL, api_base=BASE, api_key=KEY, client_kwargs={"max_retries": 0})


model = new_model()


def asked(text):
    return [ChatMessage(role="user", content=[{"type": "text", "text": text}])]


def chat():
    return model.generate(asked(QUESTION)).content


def stream():
    return [part.content or "" for part in model.generate_stream(asked(QUESTION))]


def tools():
    """The agent's own loop, which asks with `tool_choice: required`."""
    calls = []

    @tool
    def add(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first.
            b: The second.
        """
        calls.append({"a": a, "b": b})
        return a + b

    agent = ToolCallingAgent(tools=[add], model=model, max_steps=12, verbosity_level=0)
    return {"text": str(agent.run(QUESTION)), "calls": calls}


def structured():
    kind = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY_SCHEMA, "strict": True}}
    return json.loads(model.generate(asked(CITY), response_format=kind).content)


def parallel():
    with ThreadPoolExecutor(8) as pool:
        return [each.content for each in pool.map(lambda _: model.generate(asked(QUESTION)), range(8))]


def cancel():
    """smolagents keeps the connection of a stream that is left open; its client is closed."""
    model = new_model()
    return left(model.generate_stream(asked(ENDLESS)), model.client.close)


def models():
    return [each.id for each in model.client.models.list()]


def lacks():
    return error_of(lambda: model.generate(asked(QUESTION), logit_bias={"5": 3}))


if __name__ == "__main__":
    main()
