"""langchain-openai and langchain-anthropic."""

from checks import BASE, CITY, CITY_SCHEMA, ENDLESS, KEY, MODEL, QUESTION, URL, cancelled, error_of, main
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


model = ChatOpenAI(model=MODEL, base_url=BASE, api_key=KEY, max_retries=0)
SCHEMA = {"title": "city", "description": "A city.", **CITY_SCHEMA}


def of_messages():
    return ChatAnthropic(model=MODEL, base_url=URL, api_key=KEY, max_retries=0, max_tokens=100)


def of_responses():
    return ChatOpenAI(model=MODEL, base_url=BASE, api_key=KEY, max_retries=0, use_responses_api=True)


def chat():
    return model.invoke(QUESTION).text


def stream():
    return [part.text for part in model.stream(QUESTION)]


def round_trip(asked):
    messages, calls = [HumanMessage(QUESTION)], []
    while True:
        said = asked.bind_tools([add]).invoke(messages)
        messages.append(said)
        if not said.tool_calls:
            return {"calls": calls, "text": said.text}
        for call in said.tool_calls:
            calls.append(call["args"])
            messages.append(add.invoke(call))


def tools():
    return round_trip(model)


def structured():
    return model.with_structured_output(SCHEMA, method="json_schema", strict=True).invoke(CITY)


def structured_by_a_tool():
    return model.with_structured_output(SCHEMA, method="function_calling").invoke(CITY)


def parallel():
    return [each.text for each in model.batch([QUESTION] * 8)]


async def cancel():
    return await cancelled(model.ainvoke(ENDLESS))


def models():
    return [each.id for each in model.root_client.models.list()]


def lacks():
    return error_of(lambda: model.invoke(QUESTION, logit_bias={"5": 3}))


def messages_chat():
    return of_messages().invoke(QUESTION).text


def messages_stream():
    return [part.text for part in of_messages().stream(QUESTION)]


def messages_tools():
    return round_trip(of_messages())


def responses_chat():
    return of_responses().invoke(QUESTION).text


def responses_stream():
    return [part.text for part in of_responses().stream(QUESTION)]


def responses_tools():
    return round_trip(of_responses())


def responses_structured():
    return of_responses().with_structured_output(SCHEMA, method="json_schema", strict=True).invoke(CITY)


if __name__ == "__main__":
    main()
