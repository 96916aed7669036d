"""Room in a tier: the capacity that the user gave it, and what is really free on its file system.

1. A record is written over a file of its size whose record has moved on, where the tier has one (a *spare*); else it
   needs a new file. So a tier holds, for each size, as many bytes as it ever stored at once.
2. A record that was given up (its optimizer starts afresh) keeps its file until it is written anew: over that file in
   the same tier, else the file becomes a spare.
3. The file of a record that is *kept* (a checkpoint or snapshot holds a link to it) is never written over: once the
   record is written anew, it is no longer the tier's.
4. A tier that refused a write for want of room takes no more, not even over a spare, until there is room for a new file
   (what it lacked may have been a directory's block).
5. A new file needs room: what was last seen to be free on the file system, less what was given out since. A write in
   flight counts whole, though it may have taken part of its room already: so more seems taken than is, never less.

Tiers without a file system that fills up (none was ever seen) have room up to their capacity.
Pure; used by the scheduler's thread only.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

_MAP_SHARE = 256  # a file system takes at most 1/256 of a file for its map: ext4 maps 340 blocks in one of its own


@dataclasses.dataclass(slots=True)
class FileSystem:
    """What is free on it, in bytes; None: unknown, or without end."""

    free_bytes: int | None = None  # as last seen, less what was written since
    promised_bytes: int = 0  # to writes in flight

    def has_room(self, size_bytes: int) -> bool:
        """Whether a new file of this size fits."""
        needed = size_bytes + size_bytes // _MAP_SHARE
        return self.free_bytes is None or self.promised_bytes + needed <= self.free_bytes

    def seen(self, free_bytes: int | None) -> None:
        """So much is free; None: it was not looked at."""
        if free_bytes is not None:
            self.free_bytes = free_bytes

    def grows(self, size_bytes: int) -> None:
        """A new file of this size is written."""
        self.promised_bytes += size_bytes

    def grew(self, size_bytes: int) -> None:
        """It was written; ``seen`` may know more of it."""
        self.promised_bytes -= size_bytes
        if self.free_bytes is not None:
            self.free_bytes = max(0, self.free_bytes - size_bytes)


class Files:
    """The files of one tier.

    Args:
      system: where they are; tiers may share it.
      capacity_bytes: most bytes of records to keep; None: as many as fit.
    """

    def __init__(self, system: FileSystem, capacity_bytes: int | None) -> None:
        self.system = system
        self.capacity_bytes = capacity_bytes
        self.stored_bytes = 0  # of records that are here, or on their way
        self.held_bytes = 0  # of all files
        self._spares: Counter[int] = Counter()  # by size
        self._growing: Counter[int] = Counter()  # writes in flight that need a new file, by size
        self._given_up: dict[int, int] = {}  # record -> size of the file that it keeps
        self._kept: dict[int, set[int]] = {}  # records whose file has other links -> whose they are
        self.links = 0  # of those who will let go of them
        self._refused_bytes = 0  # what it had no room for, though it was taken to have; 0: nothing

    @property
    def bounded(self) -> bool:
        """Whether it may become full."""
        return self.capacity_bytes is not None or self.system.free_bytes is not None

    def has_room(self, size_bytes: int, record: int | None) -> bool:
        """Whether this record fits (None: one that has no file)."""
        if self.capacity_bytes is not None and self.stored_bytes + size_bytes > self.capacity_bytes:
            return False
        return self.has_space(size_bytes, record)

    def has_space(self, size_bytes: int, record: int | None) -> bool:
        """Whether there is a file or space for this record, capacity aside."""
        if self._refused_bytes and not self.system.has_room(self._refused_bytes):
            return False
        return self._spares[size_bytes] > 0 or record in self._given_up or self.system.has_room(size_bytes)

    def refuses(self, size_bytes: int) -> bool:
        """A write failed for want of room; false if there seems to be room, so that it would be tried for ever."""
        if self.system.free_bytes is None or self.system.has_room(size_bytes):
            return False
        self._refused_bytes = size_bytes
        return True

    def write_begins(self, size_bytes: int, record: int | None) -> None:
        """A record comes here."""
        self._refused_bytes = 0
        self.stored_bytes += size_bytes
        if record is not None and record in self._given_up:
            del self._given_up[record]
        elif self._spares[size_bytes]:
            self._spares[size_bytes] -= 1
        else:
            self.held_bytes += size_bytes
            self._growing[size_bytes] += 1
            self.system.grows(size_bytes)

    def write_ends(self, size_bytes: int) -> None:
        """A write ended. Which of several of one size had the new file makes no difference."""
        if self._growing[size_bytes]:
            self._growing[size_bytes] -= 1
            self.system.grew(size_bytes)

    def keep(self, record: int, number: int) -> None:
        """The record's file has another link, of somebody who wants it to stay as it is and will let go of it."""
        self._kept.setdefault(record, set()).add(number)
        self.links += 1

    def let_go(self, record: int, number: int) -> None:
        """The link is gone again; the record may have another file by now."""
        self.links -= 1
        others = self._kept.get(record, set())
        others.discard(number)
        if not others:
            self._kept.pop(record, None)

    def stays(self, record: int, number: int) -> None:
        """The link stays, under whatever name."""
        self.links -= 1

    def moved_on(self, size_bytes: int, record: int | None) -> None:
        """A record lives elsewhere now: its file may be taken over, unless it is kept."""
        self.stored_bytes -= size_bytes
        if record is not None and record in self._kept:
            del self._kept[record]
            self.held_bytes -= size_bytes
        else:
            self._spares[size_bytes] += 1

    def give_up(self, size_bytes: int, record: int) -> None:
        """What is stored of the record no longer counts, but it keeps the file until it is written anew."""
        self.stored_bytes -= size_bytes
        if record in self._kept:
            del self._kept[record]
            self.held_bytes -= size_bytes
        else:
            self._given_up[record] = size_bytes

    def written_elsewhere(self, record: int) -> None:
        """If the record kept a file here, that may be taken over."""
        size_bytes = self._given_up.pop(record, None)
        if size_bytes is not None:
            self._spares[size_bytes] += 1
