"""Internal seeds: equal on both servers of a pair, different for each request, and none where none is needed."""

from __future__ import annotations

from baton.common.api.messages import Bootstrap, Generate
from baton.common.api.sampling import SamplingParams
from baton.common.request.seeds import seeded
from baton.common.scheduler.request_tracker import RequestTracker


def message(rid="a", room=None, **sampling) -> Generate:
    bootstrap = None if room is None else Bootstrap("host", 1, room)
    return Generate(rid, [1, 2], SamplingParams(**sampling), bootstrap=bootstrap)


def test_a_pair_has_one_seed_and_each_choice_another():
    found = {seeded(message(rid, room), 0).seed for room in range(500) for rid in ("prefill", "decode")}
    assert len(found) == 500 and min(found) < 0 < max(found)
    assert len({seeded(message(f"a-{choice}"), 0).seed for choice in range(500)} | found) == 1000
    assert seeded(message(), 1).seed != seeded(message(), 2).seed
    assert seeded(message("7"), 0).seed != seeded(message("x", 7), 0).seed


def test_greedy_and_seeded_requests_stay_as_they_are():
    for sampling in ({"temperature": 0}, {"top_k": 1}, {"seed": 0}, {"seed": 5}):
        asked = message(**sampling)
        assert seeded(asked, 3) is asked.sampling


def test_only_a_tracker_with_a_random_seed_gives_seeds():
    def accepted(**options):
        tracker = RequestTracker([].append, eos_ids=frozenset(), vocab_size=9, max_request_tokens=999, max_requests=2,
                                 timeout=1, **options)
        return tracker.accept(message(top_p=0.5), 0.0).sampling

    assert accepted().seed is None
    assert accepted(random_seed=0) == seeded(message(top_p=0.5), 0) != accepted(random_seed=1)
