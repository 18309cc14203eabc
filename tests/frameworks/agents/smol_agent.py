"""An agent of smolagents, whose model must call a tool in each step."""

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def agent(client, row):
    model = OpenAIModel(
        model_id=client.model, api_base=client.base_url, api_key=client.api_key, max_tokens=64
    )
    played = ToolCallingAgent(tools=[add], model=model, max_steps=6, verbosity_level=0)
    return float("5" in str(played.run(row["prompt"][-1]["content"])))
