"""Generates without a server: the engine's processes are children of this script.

``python examples/offline_engine.py [MODEL]``; without a model, the one that ships with Baton. Flags of
``launch_server`` are keywords of ``Engine``.
"""

import sys

import baton


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "tinychat"
    with baton.Engine(model, log_level="warning") as engine:
        for answer in engine.generate(["The capital of Italy is", "Twelve and seven make"],
                                      {"temperature": 0, "max_new_tokens": 8}):
            print(repr(answer["text"]))
        for chunk in engine.chat([{"role": "user", "content": "What is the capital of France?"}], stream=True,
                                 temperature=0):
            print(chunk["choices"][0]["delta"].get("content") or "", end="")
        print()


if __name__ == "__main__":  # the engine's processes import this file
    main()
