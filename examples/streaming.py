"""Streams the answers to several questions at once, and prints when each began."""

import asyncio
import os
import time

from openai import AsyncOpenAI

client = AsyncOpenAI(base_url=os.environ.get("BATON_URL", "http://127.0.0.1:30000") + "/v1", api_key="none")
QUESTIONS = ("How do you spell banana?", "What is 7 plus 5?", "What is the capital of Italy?")


async def ask(model: str, question: str) -> None:
    began, first, text = time.perf_counter(), None, ""
    stream = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": question}], temperature=0, stream=True)
    async for chunk in stream:
        if delta := chunk.choices[0].delta.content:
            first = first or time.perf_counter() - began
            text += delta
    print(f"{question} {text} (first token after {first * 1000:.0f} ms)")


async def main() -> None:
    model = (await client.models.list()).data[0].id
    await asyncio.gather(*(ask(model, question) for question in QUESTIONS))


asyncio.run(main())
