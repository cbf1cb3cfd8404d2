"""Sets of workers by number: what a router remembers of a million pages refers to a few of them."""

from __future__ import annotations

EMPTY_SET = 0
_PERMANENT = 2**62


class WorkerSets:
    """Reference-counted sets of worker ids, each known by a number; 0 is the empty one.

    Numbers instead of the sets themselves make a dictionary of a million entries invisible to the garbage collector,
    which would walk all of it: 80 ms in which every stream stops.
    """

    def __init__(self) -> None:
        self.by_number: list[frozenset[int]] = [frozenset()]
        self._numbers: dict[frozenset[int], int] = {frozenset(): EMPTY_SET}
        self._references = [_PERMANENT]
        self._unused: list[int] = []
        self._singletons: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def singleton(self, worker_id: int) -> int:
        """Returns the number of the set of this worker only, which is permanent and need not be released."""
        number = self._singletons.get(worker_id)
        if number is None:
            number = self._singletons[worker_id] = self.acquire(frozenset((worker_id,)))
            self._references[number] += _PERMANENT
        return number

    def acquire(self, workers: frozenset[int]) -> int:
        """Returns the set's number, to be given back by ``release``."""
        number = self._numbers.get(workers)
        if number is None:
            number = self._unused.pop() if self._unused else len(self.by_number)
            if number == len(self.by_number):
                self.by_number.append(workers)
                self._references.append(0)
            self.by_number[number] = workers
            self._numbers[workers] = number
        self._references[number] += 1
        return number

    def release(self, number: int) -> None:
        """Gives back a number that ``acquire`` returned."""
        self._references[number] -= 1
        if not self._references[number]:
            if self._numbers.get(self.by_number[number]) == number:
                del self._numbers[self.by_number[number]]
            self.by_number[number] = frozenset()
            self._unused.append(number)

    def remove_worker(self, worker_id: int) -> None:
        """Removes a worker from all sets; two that become equal keep their numbers."""
        self._singletons.pop(worker_id, None)
        for workers in [workers for workers in self._numbers if worker_id in workers]:
            del self._numbers[workers]
        for number, workers in enumerate(self.by_number):
            if worker_id in workers:
                self.by_number[number] = rest = workers - {worker_id}
                self._numbers.setdefault(rest, number)
