"""Authenticates messages between servers that share a ``--cluster-secret``: HMAC-SHA256 over a message and its
position.

On the control channel a signed message is two frames, the message and its authentication code. The code covers the
session's id (fresh random of the receiver), the direction and a counter that must grow, so a message cannot be altered,
replayed within its session, reflected, or carried into another one. Counters of a session outlive it: its id is never
new again, and Hello names the sender's instance, which dies with the process. Without a secret a message is one frame.

The bootstrap server's HTTP is authenticated in the same way, see bootstrap.py. Nothing is encrypted: pages and messages
travel as they are.
"""

from __future__ import annotations

import hashlib
import hmac

TO_SENDER, TO_RECEIVER = b"to sender", b"to receiver"

SECRET_MISMATCH = "the two servers have different --cluster-secrets, or only one of them has any"

_COUNTER_BYTES = 8
_MAC_BYTES = _COUNTER_BYTES + hashlib.sha256().digest_size


class AuthError(Exception):
    """Raised for a message whose authentication code is missing, invalid, replayed, or cannot be checked."""


class Secret:
    """A cluster's shared secret. Equal words make equal authentication codes in every process."""

    def __init__(self, words: str):
        self._key = hashlib.sha256(b"baton cluster secret\0" + words.encode()).digest()

    def mac(self, *parts: bytes) -> bytes:
        """Returns the code of the parts and their boundaries: ``(b"ab", b"c")`` and ``(b"a", b"bc")`` differ."""
        state = hmac.new(self._key, digestmod="sha256")
        for part in parts:
            state.update(len(part).to_bytes(8, "little"))
            state.update(part)
        return state.digest()

    def verifies(self, mac: bytes, *parts: bytes) -> bool:
        return hmac.compare_digest(mac, self.mac(*parts))


def make_secret(words: str | None) -> Secret | None:
    return None if words is None else Secret(words)


class Channel:
    """Signs and verifies the messages of one session at one end; ``sends`` is the direction of our own messages."""

    def __init__(self, secret: Secret | None, session: bytes, sends: bytes):
        self._secret = secret
        self._session = session
        self._sends = sends
        self._receives = TO_SENDER if sends == TO_RECEIVER else TO_RECEIVER
        self._sent = 0
        self._received = 0

    def sign(self, message: bytes) -> list[bytes]:
        if self._secret is None:
            return [message]
        self._sent += 1
        counter = self._sent.to_bytes(_COUNTER_BYTES, "little")
        return [message, counter + self._secret.mac(self._session, self._sends, counter, message)]

    def verify(self, frames: list[bytes]) -> bytes:
        """Verifies ``frames`` and returns their message. Raises Unsealed, and then remembers nothing of it."""
        if self._secret is None:
            if len(frames) != 1:
                raise AuthError
            return frames[0]
        if len(frames) != 2 or len(frames[1]) != _MAC_BYTES:
            raise AuthError
        message, (counter, mac) = frames[0], (frames[1][:_COUNTER_BYTES], frames[1][_COUNTER_BYTES:])
        number = int.from_bytes(counter, "little")
        if number <= self._received or not self._secret.verifies(mac, self._session, self._receives, counter, message):
            raise AuthError
        self._received = number
        return message


class Channels:
    """The sender's channels, one for each session.

    With a secret none is forgotten, so that a recorded session cannot be replayed: 300 bytes for each connection of a
    decode server. Only messages with a valid authentication code add one.
    """

    def __init__(self, secret: Secret | None):
        self._secret = secret
        self._plain = Channel(None, b"", TO_RECEIVER)
        self._channels: dict[bytes, Channel] = {}

    def verify(self, session: bytes, frames: list[bytes]) -> bytes:
        """Verifies ``frames`` and returns their message, as ``Channel.verify`` does."""
        if self._secret is None:
            return self._plain.verify(frames)
        channel = self._channels.get(session) or self._new(session)
        message = channel.verify(frames)
        self._channels[session] = channel
        return message

    def sign(self, session: bytes, message: bytes) -> list[bytes]:
        if self._secret is None:
            return self._plain.sign(message)
        return (self._channels.get(session) or self._new(session)).sign(message)

    def _new(self, session: bytes) -> Channel:
        return Channel(self._secret, session, TO_RECEIVER)
