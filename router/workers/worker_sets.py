"""Sets of workers by number: what a router remembers of a million pages refers to a few of them."""

from __future__ import annotations

NOBODY = 0
_FOR_GOOD = 2**62


class WorkerSets:
    """Sets of worker ids by number, each kept while it is used; 0 is the empty one.

    Numbers instead of the sets themselves make a dictionary of a million entries invisible to the garbage collector,
    which would walk all of it: 80 ms in which every stream stands still.
    """

    def __init__(self) -> None:
        self.by_number: list[frozenset[int]] = [frozenset()]
        self._numbers: dict[frozenset[int], int] = {frozenset(): NOBODY}
        self._uses = [_FOR_GOOD]
        self._unused: list[int] = []
        self._alone: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def alone(self, worker_id: int) -> int:
        """The number of the set that holds this worker only; it is kept for good and need not be given back."""
        number = self._alone.get(worker_id)
        if number is None:
            number = self._alone[worker_id] = self.take(frozenset((worker_id,)))
            self._uses[number] += _FOR_GOOD
        return number

    def take(self, holders: frozenset[int]) -> int:
        """The set's number; to be given back by ``drop``."""
        number = self._numbers.get(holders)
        if number is None:
            number = self._unused.pop() if self._unused else len(self.by_number)
            if number == len(self.by_number):
                self.by_number.append(holders)
                self._uses.append(0)
            self.by_number[number] = holders
            self._numbers[holders] = number
        self._uses[number] += 1
        return number

    def leave(self, worker_id: int) -> None:
        """Take a worker out of all sets; two that become equal keep their numbers."""
        self._alone.pop(worker_id, None)
        for holders in [holders for holders in self._numbers if worker_id in holders]:
            del self._numbers[holders]
        for number, holders in enumerate(self.by_number):
            if worker_id in holders:
                self.by_number[number] = rest = holders - {worker_id}
                self._numbers.setdefault(rest, number)

    def drop(self, number: int) -> None:
        self._uses[number] -= 1
        if not self._uses[number]:
            if self._numbers.get(self.by_number[number]) == number:
                del self._numbers[self.by_number[number]]
            self.by_number[number] = frozenset()
            self._unused.append(number)
