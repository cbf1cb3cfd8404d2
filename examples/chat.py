"""Asks a question and prints the answer."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("BATON_URL", "http://127.0.0.1:30000") + "/v1", api_key="none")
model = client.models.list().data[0].id

reply = client.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "What is the capital of France?"}], temperature=0)
print(reply.choices[0].message.content)
print(f"{reply.usage.prompt_tokens} prompt tokens, {reply.usage.prompt_tokens_details.cached_tokens} of them cached")
