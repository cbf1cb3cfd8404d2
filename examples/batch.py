"""Answers a file of requests in the background, with OpenAI's batch API.

The server needs ``--file-storage-path FOLDER``. It records each answer as it comes and continues after a restart.
"""

import json
import os
import time

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("BATON_URL", "http://127.0.0.1:30000") + "/v1", api_key="none")
model = client.models.list().data[0].id
QUESTIONS = [f"What is {number} plus {number + 2}?" for number in range(1, 6)]

lines = [json.dumps({"custom_id": question, "method": "POST", "url": "/v1/chat/completions", "body": {
    "model": model, "temperature": 0, "messages": [{"role": "user", "content": question}]}}) for question in QUESTIONS]
file = client.files.create(file=("questions.jsonl", "\n".join(lines).encode()), purpose="batch")
batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")

while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(f"{batch.status}: {batch.request_counts.completed} of {batch.request_counts.total} lines")
for line in client.files.content(batch.output_file_id).text.splitlines():
    answer = json.loads(line)
    print(answer["custom_id"], answer["response"]["body"]["choices"][0]["message"]["content"])
