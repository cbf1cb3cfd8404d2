"""Lets the model call a function, runs it, and gives the model its result.

The server reads the model's own way of writing calls (``--tool-call-parser auto``); ``tool_choice="required"`` makes it
write one, whose arguments fit the schema.
"""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("BATON_URL", "http://127.0.0.1:30000") + "/v1", api_key="none")
model = client.models.list().data[0].id
TOOLS = [{"type": "function", "function": {
    "name": "get_weather", "description": "Get the current weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}},
                   "required": ["city"]}}}]


def get_weather(city: str) -> str:
    return f"18 degrees and sunny in {city}"


messages = [{"role": "user", "content": "What is the weather in Paris?"}]
reply = client.chat.completions.create(
    model=model, messages=messages, tools=TOOLS, tool_choice="required", temperature=0)
call = reply.choices[0].message.tool_calls[0]
print(f"The model calls {call.function.name}({call.function.arguments})")

messages += [reply.choices[0].message,
             {"role": "tool", "tool_call_id": call.id, "content": get_weather(**json.loads(call.function.arguments))}]
reply = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, temperature=0, max_tokens=50)
print(reply.choices[0].message.content)
