# SPDX-License-Identifier: Apache-2.0
"""Who may pin how much of a cache at once, so that threads that share it never wait for each other in a circle.

A call into a module takes, before it pins anything, as much as it and everything inside of it will pin at most; what it takes later
is part of that. Calls are served in the order in which they came. A thread that has something already is not made to wait for more:
that could be for itself.
"""
from __future__ import annotations

import collections
import threading
import weakref

from headrace._cache import Cache


class Room:
    """The bytes of one cache that calls into modules have been promised."""

    def __init__(self, cache: Cache) -> None:
        self._cache = weakref.ref(cache)
        self._changed = threading.Condition()
        self._promised = 0
        self._waiting: collections.deque[object] = collections.deque()
        self._here = threading.local()

    def _fits(self, nbytes: int) -> bool:
        if not self._promised:
            return True  # if it is too much all the same, the cache says so
        cache = self._cache()
        return cache is None or self._promised + nbytes <= cache.budget

    def take(self, nbytes: int) -> None:
        """Waits until so much is free."""
        calls = getattr(self._here, "calls", 0)
        with self._changed:
            if not calls and (self._waiting or not self._fits(nbytes)):
                me = object()
                self._waiting.append(me)
                try:
                    while self._waiting[0] is not me or not self._fits(nbytes):
                        self._changed.wait(0.5)
                finally:
                    self._waiting.remove(me)
                    self._changed.notify_all()
            self._promised += nbytes
        self._here.calls = calls + 1

    def give(self, nbytes: int) -> None:
        """Gives back what take() took in the same thread."""
        with self._changed:
            self._promised -= nbytes
            if self._waiting:
                self._changed.notify_all()
        self._here.calls -= 1


_rooms: weakref.WeakKeyDictionary[Cache, Room] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def room_of(cache: Cache) -> Room:
    """The one Room of a cache."""
    with _lock:
        return _rooms.setdefault(cache, Room(cache))
