"""Asks for an answer that fits a JSON schema: a grammar constrains every token to it."""

import json
import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("BATON_URL", "http://127.0.0.1:30000") + "/v1", api_key="none")
model = client.models.list().data[0].id
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}, "is_capital": {"type": "boolean"}},
          "required": ["city", "is_capital"], "additionalProperties": False}

reply = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Name a capital of Europe."}], temperature=0, max_tokens=60,
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}})
answer = json.loads(reply.choices[0].message.content)
print(f"{answer['city']}, capital: {answer['is_capital']}")
