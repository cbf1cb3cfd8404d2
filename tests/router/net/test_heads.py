"""Heads that are looked up mean what llhttp takes them for, whatever the bytes."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from baton.router.net.heads import KnownHeads
from baton.router.net.request import Request
from baton.router.net.request_reader import HeadRules, RequestReader
from baton.router.net.upstream_pool import read_plain_response

PLAIN = b"POST /generate HTTP/1.1\r\nHost: r\r\nX-A: b\r\nContent-Length: 4\r\n\r\nabcd"
READ = ("method", "target", "path", "query", "body", "headers", "authorization", "authorization_line", "origin",
        "traceparent", "reply_headers", "keep_alive", "on_head", "is_http_1_0")


def looked_up(rules: HeadRules, data: bytes) -> Request | None:
    return RequestReader(rules, 1000).parse_known(data)


def learnt(data: bytes) -> HeadRules:
    rules = HeadRules()
    for _ in range(3):
        looked_up(rules, data)
    return rules


def parsed(data: bytes) -> list:
    """``data`` as parsed by a reader that knows no head; the last item is True at the boundary of a request."""
    reader = RequestReader(HeadRules(), 1000)
    reader.feed(data)
    return [*reader.ready, reader.partial is None and not reader.refused]


def test_a_head_is_known_when_it_is_met_for_the_third_time_whatever_its_length_is():
    rules = HeadRules()
    assert [looked_up(rules, PLAIN) is not None for _ in range(3)] == [False, True, True]
    longer = PLAIN.replace(b"th: 4", b"th: 12") + b"efghijkl"
    first, second = looked_up(rules, PLAIN), looked_up(rules, longer)
    assert (first.body, second.body) == (b"abcd", b"abcdefghijkl")
    assert first.request_id != second.request_id and len(first.request_id) == 32
    assert looked_up(rules, PLAIN[:-1]) is None and looked_up(rules, PLAIN + b"e") is None


line = st.sampled_from([
    b"Host: r", b"X-A: b", b"x-a:b", b"Authorization: Bearer k", b"Origin: http://o", b"Connection: keep-alive",
    b"Connection: close", b"Connection: upgrade", b"Upgrade: h2c", b"Expect: 100-continue", b"X-Request-Id: i",
    b"Transfer-Encoding: chunked", b"Content-Length: 4", b"content-length: 4", b"Content-Length:4",
    b"CONTENT-LENGTH: 4", b"Content-Length: 4 ", b"Content-Length:  4", b"Content-Length: +4", b"Content-Length: 4, 4",
    b"Content-Length: 0x4", b"Content-Length: 04", b"Content-Length: 0", b"Content-Length: 99999", b"Content-Length: ",
    b"Content-Length: 4\r\n 4", b"X: Content-Length: 4", b"X-Content-Length: 9", b"X : y", b" X: y", b"X: \x00",
    b"X: a\nContent-Length: 4", b"X: a\rContent-Length: 4", b"X\r\nContent-Length: 4", b"\n", b"\r"])
start = st.sampled_from([b"POST /generate HTTP/1.1", b"POST /generate?a=b HTTP/1.0", b"GET http://r/x HTTP/1.1",
                         b"HEAD /v1/models HTTP/1.1", b"CONNECT r:1 HTTP/1.1", b"BREW / HTTP/1.1",
                         b"\r\nPOST / HTTP/1.1", b"POST / HTTP/1.1\n", b"POST /\xff HTTP/1.1", b"POST / HTTP/9.9"])
body = st.sampled_from([b"", b"abcd", b"\r\n\r\n", b"4\r\nabcd\r\n0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"abcd\r\n"])
message = st.builds(lambda first, lines, rest: b"\r\n".join([first, *lines, b"", b""]) + rest, start,
                    st.lists(line, max_size=5), body)


@settings(max_examples=400, deadline=None)
@given(message, st.integers(0, 12))
@example(PLAIN, 4)
@example(PLAIN.replace(b"X-A: b", b"Content-Length: 4"), 9)
@example(b"POST / HTTP/1.1\r\nContent-Length: 4\r\nX: y\n\n\r\n\r\nabcd", 4)
def test_a_looked_up_head_equals_the_parsed_one(data, size):
    rules = learnt(data)
    other = data.replace(b"Content-Length: 4\r\n", b"Content-Length: %d\r\n" % size)
    for now in (data, other, data[:-1], data + b"x", other + b"y" * size):
        request = looked_up(rules, now)
        if request is None:
            continue
        alone, at_boundary = parsed(now)
        assert at_boundary
        assert [getattr(request, name) for name in READ] == [getattr(alone, name) for name in READ]


@pytest.mark.parametrize("odd", [
    b"Connection: close\r\nContent-Length: 1", b"Transfer-Encoding: chunked\r\nContent-Length: 1",
    b"Content-Length: 1\r\nContent-Length: 1", b"Expect: 100-continue\r\nContent-Length: 1",
    b"X-Request-Id: a\r\nContent-Length: 1", b"Upgrade: h2c\r\nConnection: upgrade\r\nContent-Length: 1",
    b"X: a\n\n\r\nContent-Length: 1", b"X y: z\r\nContent-Length: 1"])
def test_requests_that_are_not_plain_are_never_looked_up(odd):
    data = b"POST / HTTP/1.1\r\nHost: r\r\n" + odd + b"\r\n\r\nx"
    rules = learnt(data)
    assert looked_up(rules, data) is None


@pytest.mark.parametrize("start, lines, plain", [
    (b"HTTP/1.1 200 OK", b"", True), (b"HTTP/1.1 404 Not Found", b"date: now\r\n", True),
    (b"HTTP/1.0 200 OK", b"", False), (b"HTTP/1.1 200 OK", b"connection: close\r\n", False),
    (b"HTTP/1.1 200 OK", b"transfer-encoding: chunked\r\n", False), (b"HTTP/1.1 204 No Content", b"", False),
    (b"HTTP/1.1 304 Not Modified", b"", False), (b"HTTP/1.1 100 Continue", b"", False),
    (b"HTTP/1.1 200 OK", b"content-length: 1\r\n", False), (b"SSH-2.0", b"", False)])
def test_answers_that_are_not_plain_are_never_looked_up(start, lines, plain):
    known = KnownHeads(read_plain_response)
    data = start + b"\r\n" + lines + b"content-length: 2\r\n\r\n{}"
    found = [known.find(data, None) for _ in range(3)][-1]
    assert (found is not None) is plain
    if found is not None:
        assert found[1:] == (len(data) - 2, 2) and known.find(data, found[0]) == found


def test_heads_that_never_come_again_are_not_stored():
    known = KnownHeads(read_plain_response)
    for number in range(20_000):
        known.find(b"HTTP/1.1 200 OK\r\nid: %d\r\ncontent-length: 2\r\n\r\n{}" % number, None)
    assert len(known) == 0
    for number in range(2 * 5_000):
        known.find(b"HTTP/1.1 200 OK\r\nid: %d\r\ncontent-length: 2\r\n\r\n{}" % (number // 2), None)
    assert len(known) <= 1024
