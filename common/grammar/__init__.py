"""Structured output: grammars that constrain answers.

The life of a grammar, and why:

* The API server builds a ``GrammarSpec`` (``serving/structured/``) and test-compiles it in a separate process
  (``trial.py``). A grammar is a program that a stranger sends: some compile for minutes, some exhaust the memory, and
  C++ code cannot be interrupted in a thread. The process can be killed, and a grammar that exceeds its limits is
  answered with 400. It also keeps torch, which xgrammar imports, out of the API server.
* Tensor-parallel rank 0, which samples for all, then compiles it again in a thread in parallel to its step loop
  (``store.py``); xgrammar releases the GIL there (longest gap of another thread: 9 ms). Sending the compiled grammar
  was measured, and is slower: for a schema with 60 fields and a vocabulary of 128,000 tokens, compiling took 0.14 s,
  packing 1.0 s, unpacking 0.22 s and 14 MB (xgrammar 0.2.8, 2 cores). llguidance compiles lazily: what is sent is
  its grammar as text.
* The API server sends the request only after rank 0 has reported that the grammar is ready (``service.py``). Ranks
  therefore need no queue of requests that wait for grammars, whose order would have to be the same on all of them.
* A backend (``backend.py``: xgrammar, llguidance) compiles, and makes the state that follows one answer. All else is
  the same for all of them.
* A request's ``Matcher`` (``matcher.py``) catches up with the request's tokens whenever a mask is needed. So tokens may
  come from anywhere (a step, another server's prefill, an answer that is continued), and retraction, which keeps the
  tokens, needs nothing. When nothing may follow, the mask allows end-of-sequence tokens only; every rank sees such a
  token arrive, so that an end by a grammar is no decision that ranks could take differently.

Jump-forward decoding, which appends text that the grammar determines without running the model, is not implemented. The
tokens of such text are not those that the model would sample (it may split the text differently, also at its ends), so
that outputs change. They would be equal only where the mask allows a single token: in random answers to 40 schemas with
a BPE vocabulary of 128,000 tokens that was 10 % of the masks (32 % without white space; 48 % for tinychat's 4,096
tokens). With overlapped scheduling the step that would be saved has been launched by the time the mask is known, and a
batch's step costs nearly the same with a row less.
"""
