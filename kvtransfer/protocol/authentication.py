"""Proof that a message comes from a holder of ``--cluster-secret``: HMAC-SHA256 over it and its place.

On the control channel a sealed message is two frames, the message and its seal. The seal covers the session's id (fresh
random of the receiver), the direction and a counter that must grow, so nothing can be altered, replayed within its
session, reflected, or carried into another one. Counters of a session outlive it: its id is never new again, and
Hello names the sender's instance, which dies with the process. Without a secret a message is one frame.

The bootstrap server's HTTP is sealed in the same way, see bootstrap.py. Seals prove; they hide nothing: pages and
messages travel as they are.
"""

from __future__ import annotations

import hashlib
import hmac

TO_SENDER, TO_RECEIVER = b"to sender", b"to receiver"

OTHER_SECRET = "the two servers have different --cluster-secrets, or only one of them has any"

_COUNTER_BYTES = 8
_SEAL_BYTES = _COUNTER_BYTES + hashlib.sha256().digest_size


class AuthError(Exception):
    """A message without a valid seal, or with one that was seen before, or with a seal that nobody can check."""


class Secret:
    """A cluster's shared secret. Equal words make equal seals, in whatever process."""

    def __init__(self, words: str):
        self._key = hashlib.sha256(b"baton cluster secret\0" + words.encode()).digest()

    def mac(self, *parts: bytes) -> bytes:
        """Of the parts and their boundaries: ``(b"ab", b"c")`` and ``(b"a", b"bc")`` differ."""
        state = hmac.new(self._key, digestmod="sha256")
        for part in parts:
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state.digest()

    def verifies(self, mac: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(mac, self.mac(*parts))


def secret_of(words: str | None) -> Secret | None:
    return None if words is None else Secret(words)


class Channel:
    """Both directions of one session, at one of its ends: ``sends`` is the direction of our own messages."""

    def __init__(self, secret: Secret | None, session: bytes, sends: bytes):
        self._secret = secret
        self._session = session
        self._sends = sends
        self._receives = TO_SENDER if sends == TO_RECEIVER else TO_RECEIVER
        self._sent = 0
        self._received = 0

    def seal(self, message: bytes) -> list[bytes]:
        if self._secret is None:
            return [message]
        self._sent += 1
        counter = self._sent.to_bytes(_COUNTER_BYTES, "little")
        return [message, counter + self._secret.mac(self._session, self._sends, counter, message)]

    def open(self, frames: list[bytes]) -> bytes:
        """The message of ``frames``. Raises Unsealed, and then remembers nothing of it."""
        if self._secret is None:
            if len(frames) != 1:
                raise AuthError
            return frames[0]
        if len(frames) != 2 or len(frames[1]) != _SEAL_BYTES:
            raise AuthError
        message, (counter, mac) = frames[0], (frames[1][:_COUNTER_BYTES], frames[1][_COUNTER_BYTES:])
        number = int.from_bytes(counter, "little")
        if number <= self._received or not self._secret.verifies(mac, self._session, self._receives, counter, message):
            raise AuthError
        self._received = number
        return message


class Channels:
    """The sender's channels, one a session.

    With a secret none is forgotten, lest a recorded session be played again: 300 bytes for each time that a decode
    server connected. Only messages with a valid seal add one.
    """

    def __init__(self, secret: Secret | None):
        self._secret = secret
        self._plain = Channel(None, b"", TO_RECEIVER)
        self._channels: dict[bytes, Channel] = {}

    def open(self, session: bytes, frames: list[bytes]) -> bytes:
        """As Channel.open."""
        if self._secret is None:
            return self._plain.open(frames)
        channel = self._channels.get(session) or self._new(session)
        message = channel.open(frames)
        self._channels[session] = channel
        return message

    def seal(self, session: bytes, message: bytes) -> list[bytes]:
        if self._secret is None:
            return self._plain.seal(message)
        return (self._channels.get(session) or self._new(session)).seal(message)

    def _new(self, session: bytes) -> Channel:
        return Channel(self._secret, session, TO_RECEIVER)
