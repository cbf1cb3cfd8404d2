"""A prefill or decode rank in a process of its own, driven over stdin: ``python peer.py sender|receiver BACKEND PORT``.

Every line is JSON ``[call, *arguments]``; every answer is a JSON line. The pool is random with seed 1 (sender) or zero.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

from baton.common.config.server import DisaggregationArgs
from baton.common.kvcache.layout import KVLayout
from baton.common.shared_memory.host import shared_bytes
from baton.kvtransfer.backends import make_backend
from baton.kvtransfer.bootstrap import register_rank
from baton.kvtransfer.protocol.messages import PrefillResult
from baton.kvtransfer.receiver.kv_receiver import KVReceiver
from baton.kvtransfer.sender.kv_sender import KVSender


class Peer:
    def __init__(self, role: str, backend: str, port: int, groups: list[int], num_pages: int,
                 peer_timeout: float):
        self.layout = KVLayout(tuple(groups), num_kv_heads=2, head_dim=8, page_size=4, dtype="float32")
        rng = np.random.default_rng(1)
        self.pool = [shared_bytes(num_pages * self.layout.group_page_bytes(g)).reshape(num_pages, -1)
                     for g in range(len(groups))]
        if role == "sender":
            for pages in self.pool:
                pages[:] = rng.integers(0, 256, pages.shape, dtype=np.uint8)
        build = KVSender if role == "sender" else KVReceiver
        args = DisaggregationArgs(peer_timeout=peer_timeout)
        self.endpoint = build(args=args, host="127.0.0.1", rank=0, tp_size=1, layout=self.layout,
                              num_pages=num_pages, regions=[(a.ctypes.data, a.nbytes, -1) for a in self.pool],
                              backend=make_backend(backend))
        if role == "sender":
            register_rank(f"http://127.0.0.1:{port}", self.endpoint.info)

    def expect(self, room, num_tokens):
        self.endpoint.expect(room, 77, num_tokens)

    def reserve(self, room, port, num_tokens, page_ids):
        self.endpoint.reserve(room, ("127.0.0.1", port), 77, num_tokens, 0, np.array(page_ids))

    def push(self, room, first, src):
        for group in range(len(self.pool)):
            self.endpoint.push(room, group, first, np.array(src), None)

    def finish(self, room, token_id):
        self.endpoint.finish(room, PrefillResult(token_id, 0))

    def phase(self, room):
        return self.endpoint.phase(room).name

    def error(self, room):
        return [self.endpoint.error(room).code, self.endpoint.error(room).message]

    def digest(self, page_ids):
        return [hashlib.sha256(pages[page_ids].tobytes()).hexdigest() for pages in self.pool]

    def close(self):
        self.endpoint.close()


def main() -> None:
    role, backend, port, groups, num_pages, peer_timeout = sys.argv[1:]
    peer = Peer(role, backend, int(port), json.loads(groups), int(num_pages), float(peer_timeout))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        call, *arguments = json.loads(line)
        print(json.dumps(getattr(peer, call)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
