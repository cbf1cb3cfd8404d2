"""One round of reinforcement learning (PPO): sample, improve the model, send its weights, sample again.

``python examples/rl_round.py``, against a server or a router with tinychat; needs torch and transformers. The reward is
the share of the letter e in an answer. All servers behind a router change their weights as one; the requests that run
meanwhile are retracted and go on with the new weights.
"""

import base64
import json
import os
import urllib.request

import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.common.tinychat import CHECKPOINT

URL = os.environ.get("BATON_URL", "http://127.0.0.1:30000")
PROMPTS = ["The", "In the morning", "My friend says", "One of"]
SAMPLES, CLIP, EPOCHS = 8, 0.2, 3
PART_BYTES = 8 << 20

tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
policy = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)


def post(path, **body):
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def sample(prompts):
    """Answers in one list: ids, log-probabilities of the server, reward, and the weights' version."""
    found = post("/generate", input_ids=[ids for ids in prompts for _ in range(SAMPLES)], return_logprob=True,
                 sampling_params={"max_new_tokens": 24, "temperature": 1.0})
    return [{"prompt": ids, "output": one["output_ids"], "reward": one["text"].count("e") / max(1, len(one["text"])),
             "logprobs": torch.tensor([row[0] for row in one["meta_info"]["output_token_logprobs"]]),
             "version": one["meta_info"]["weight_version"]}
            for ids, one in zip([ids for ids in prompts for _ in range(SAMPLES)], found)]


def logprobs_of(answer):
    """The trainer's log-probabilities of an answer's tokens."""
    prompt, output = answer["prompt"], answer["output"]
    logits = policy(torch.tensor([prompt + output])).logits[0, len(prompt) - 1:-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]


def difference(answers):
    with torch.no_grad():
        return max(float((logprobs_of(one) - one["logprobs"]).abs().max()) for one in answers)


def improve(answers):
    """PPO's clipped objective over the answers, each compared with the others to its prompt."""
    rewards = torch.tensor([one["reward"] for one in answers]).view(-1, SAMPLES)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    for _ in range(EPOCHS):
        for one, advantage in zip(answers, advantages):
            ratio = (logprobs_of(one) - one["logprobs"]).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            (-gain.mean() / len(answers)).backward()
        optimizer.step()
        optimizer.zero_grad()


def send(version):
    """Sends all weights in requests of some megabytes, and has them applied at once."""
    post("/begin_weight_update")
    part = {}
    tensors = {name: tensor.contiguous() for name, tensor in policy.state_dict().items() if name != "lm_head.weight"}
    for i, (name, tensor) in enumerate(tensors.items(), 1):
        part[name] = tensor
        if i == len(tensors) or sum(each.nbytes for each in part.values()) > PART_BYTES:
            post("/update_weights_from_tensor", serialized_named_tensors=[base64.b64encode(save(part)).decode()])
            part = {}
    return post("/end_weight_update", weight_version=version, pause_mode="retract")


prompts = [tokenizer.encode(text) for text in PROMPTS]
before = sample(prompts)
print(f"{len(before)} answers, mean reward {sum(one['reward'] for one in before) / len(before):.3f}; "
      f"trainer and server differ by {difference(before):.4f}")
improve(before)
print(f"the step changes log-probabilities by up to {difference(before):.2f}")
told = send("step 1")
print(f"sent: {told['message']}")
after = sample(prompts)
assert {one["version"] for one in after} == {"step 1"}
print(f"{len(after)} answers of {after[0]['version']}, mean reward "
      f"{sum(one['reward'] for one in after) / len(after):.3f}; trainer and server differ by {difference(after):.4f}")
