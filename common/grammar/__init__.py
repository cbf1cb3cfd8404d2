"""Structured output: grammars that answers obey.

The path of a grammar, and why:

* The front states it as a ``GrammarSpec`` (``openai/structured.py``) and has it tried in a process of its own
  (``trial.py``). A grammar is a program that a stranger sends: some compile for minutes, some exhaust the memory, and
  C++ code cannot be interrupted in a thread. The process can be killed, and what it cannot do within its limits is
  answered with 400. It also keeps torch, which xgrammar imports, out of the front.
* Tensor-parallel rank 0, which alone chooses tokens, then compiles it again in a thread beside its step loop
  (``store.py``); xgrammar lets go of the GIL there (longest gap of another thread: 9 ms). Sending the compiled grammar
  was measured, and lost: of a schema with 60 fields over a vocabulary of 128,000 tokens, compiling took 0.14 s, packing
  1.0 s, unpacking 0.22 s and 14 MB (xgrammar 0.2.8, 2 cores).
* Only when rank 0 has said that it is ready does the front send the request (``service.py``). Ranks therefore need no
  queue of requests that wait for grammars, whose order would have to be the same on all of them.
* A request's ``Matcher`` (``matcher.py``) catches up with the request's tokens whenever a mask is wanted. Tokens may
  thus come from anywhere (a step, another server's prefill, an answer that is continued), and retraction, which
  keeps them, needs nothing. When nothing may follow, the mask leaves end-of-sequence tokens alone; every rank sees
  such a token arrive, so that an end under a grammar is no decision that ranks could take differently.

Jump-forward decoding, which appends text that the grammar leaves no choice about without running the model, is not
done. The tokens of such text are not those that the model would choose (it may split the text otherwise, at its ends
too), so that outputs change. Only where the mask leaves a single token would they be equal: of random answers to 40
schemas over a BPE vocabulary of 128,000 tokens that was 10 % of the masks (32 % without white space; 48 % for
tinychat's 4,096 tokens). With overlapped scheduling the step that would be saved has been launched by the time the mask
is known, and a batch's step costs nearly the same with a row less.
"""
