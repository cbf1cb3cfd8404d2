"""Held-out questions for tinychat in the formats of public exams, which ``bench_eval`` reads.

``python -m baton.tests.tinychat.exam`` writes the files of ``exam/``.
"""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path

from . import exchanges, words

FOLDER = Path(__file__).parent / "exam"
COUNT = 40
_LETTERS = "ABCD"


def mmlu(subject: str) -> str:
    """CSV rows without a header: question, four choices, the right one's letter."""
    rng = random.Random(f"{subject} exam")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for _ in range(COUNT):
        question, right, others = _capital(rng) if subject == "capitals" else _spelling(rng)
        choices = rng.sample([right, *others], 4)
        writer.writerow([question, *choices, _LETTERS[choices.index(right)]])
    return text.getvalue()


def _capital(rng: random.Random) -> tuple[str, str, list[str]]:
    country, city = rng.choice(tuple(words.CAPITALS.items()))
    return f"What is the capital of {country}?", city, rng.sample([c for c in words.CAPITALS.values() if c != city], 3)


def _spelling(rng: random.Random) -> tuple[str, str, list[str]]:
    while True:
        word = words.word_of(rng, "held_out")
        wrong = {"".join(rng.sample(word, len(word))) for _ in range(20)} - {word}
        if len(wrong) >= 3:
            return (f"Spell the word {word}.", "-".join(word), ["-".join(each) for each in sorted(wrong)[:3]])


def gsm8k() -> str:
    """JSONL: sums of held-out pairs."""
    rng = random.Random("sums exam")
    lines = []
    for _ in range(COUNT):
        question, answer = exchanges.two_digit_sum(rng, "held_out")
        lines.append(json.dumps({"question": question, "answer": f"They are {answer} together.\n#### {answer}"}))
    return "\n".join(lines) + "\n"


def hellaswag() -> str:
    """JSONL: which numbers follow a request to count."""
    rng = random.Random("count exam")
    lines = []
    for _ in range(COUNT):
        question, answer = exchanges.count(rng, "held_out")
        numbers = answer.split()
        wrong = [" ".join(reversed(numbers)), " ".join(str(int(n) + 1) for n in numbers), " ".join(numbers[::2])]
        endings = rng.sample([answer, *wrong], 4)
        lines.append(json.dumps({"ctx": question, "endings": endings, "label": endings.index(answer)}))
    return "\n".join(lines) + "\n"


def files() -> dict[str, str]:
    """The text of each file by its path below ``FOLDER``."""
    return {**{f"mmlu/test/{subject}_test.csv": mmlu(subject) for subject in ("capitals", "spelling")},
            "gsm8k.jsonl": gsm8k(), "hellaswag.jsonl": hellaswag()}


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).parent.mkdir(parents=True, exist_ok=True)
        (FOLDER / name).write_text(text, encoding="utf-8")
