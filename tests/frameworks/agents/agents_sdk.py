"""An agent of openai-agents, which asks by Responses."""

import openai
from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)  # it would send dialogues to OpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def agent(client, row):
    asking = openai.AsyncOpenAI(base_url=client.base_url, api_key=client.api_key)
    model = OpenAIResponsesModel(model=client.model, openai_client=asking)
    adder = Agent(name="adder", instructions="Use the tool.", tools=[add], model=model)
    result = await Runner.run(adder, row["prompt"][-1]["content"], max_turns=30)
    return float("5" in result.final_output)
