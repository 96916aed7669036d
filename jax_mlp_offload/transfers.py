"""Reads and writes that are under way, and storage that fails or gives no answer.

What always holds: a slot belongs to its request until the request ends, even where it was given up. Such a request is
*overdue*: nobody waits for it any more, but it may still read from the slot or write to it.

Pure; used by the scheduler's thread only.
"""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Sequence

from jax_mlp_offload import errors
from jax_mlp_offload.placement import Placement, TierSpec
from jax_mlp_offload.sizes import format_bytes
from jax_mlp_offload.types import Life, Record


class Transfers:
    """Requests to tiers.

    Args:
      tiers: where records may go.
      deadline_s: how long storage may take to answer a request.
    """

    def __init__(self, tiers: Sequence[TierSpec], deadline_s: float) -> None:
        self.placement = Placement(tiers)
        self.deadline_s = deadline_s
        self.overdue: dict[int, errors.OffloadError] = {}  # by record index, why it was given up
        self._stuck: dict[int, int] = {}  # record index -> the slot that an overdue request has
        self._since_s: OrderedDict[int, float] = OrderedDict()  # record index -> start, oldest first
        self._errors: list[errors.OffloadError] = []  # why tiers were retired, one each

    @property
    def none(self) -> bool:
        """Whether no request is under way, those that were given up aside."""
        return not self._since_s

    def begin(self, record: Record, tier: int, now_s: float) -> None:
        """A record is read from a tier or written to it, as its ``life`` says."""
        self._since_s[record.index] = now_s
        if record.life is Life.READING:
            self.placement.read_begins(tier, record.size_bytes, now_s)
        else:
            self.placement.write_begins(tier, record.size_bytes, now_s, record.index)

    def end(
        self, record: Record, life: Life, ok: bool, now_s: float, begun_s: float | None, free_bytes: int | None
    ) -> tuple[int, bool]:
        """A request ended; returns the tier, and whether the request had been given up.

        Args:
          record: whose request.
          life: READING or WRITING.
          ok: whether it ended well.
          now_s: the time.
          begun_s: when storage began with it; None: unknown.
          free_bytes: what was free on the tier's file system when it ended; None: unknown.
        """
        tier = record.tier
        if record.life is not life or tier is None:
            raise RuntimeError(f"a transfer ended ({life.value}) that was not under way: {record}")
        since_s = self._since_s.pop(record.index, None)
        queue_s = 0.0 if since_s is None or begun_s is None else max(0.0, begun_s - since_s)
        late = self.overdue.pop(record.index, None) is not None
        ended = self.placement.read_ends if life is Life.READING else self.placement.write_ends
        ended(tier, record.size_bytes, now_s, ok, queue_s, late, record.index)
        self.placement.tiers[tier].files.system.seen(free_bytes)
        self._stuck.pop(record.index, None)
        return tier, late

    def deadline(self) -> float | None:
        """When the oldest request is to be given up."""
        return next(iter(self._since_s.values())) + self.deadline_s if self._since_s else None

    def suspended(self, duration_s: float) -> None:
        """So much time does not count for the requests that are under way."""
        for index in self._since_s:
            self._since_s[index] += duration_s

    def late(self, now_s: float) -> int | None:
        """A record whose request is past its deadline."""
        index = next(iter(self._since_s), None)
        return index if index is not None and now_s >= self._since_s[index] + self.deadline_s else None

    def give_up(self, record: Record, described: str, now_s: float) -> errors.OffloadError:
        """Waits for the record's request no longer; returns why."""
        assert record.tier is not None
        assert record.slot is not None
        verb = "reading" if record.life is Life.READING else "writing"
        name = self.placement.tiers[record.tier].spec.name
        cause = errors.DeadlineError(f"tier {name!r} gave no answer for {self.deadline_s:g} s while {verb} {described}")
        self.placement.abandon(record.tier, record.size_bytes, record.life is Life.READING, now_s)
        del self._since_s[record.index]
        self.overdue[record.index] = cause
        self._stuck[record.index] = record.slot
        return cause

    def why_stuck(self, slots: set[int]) -> errors.OffloadError:
        """Why one of these slots is not to be had."""
        return next(self.overdue[index] for index, slot in self._stuck.items() if slot in slots)

    def retire(self, tier: int, error: errors.OffloadError) -> str | None:
        """Writes nothing more to a tier that failed; returns what to tell the user, None if it was retired before."""
        if self.placement.tiers[tier].retired:
            return None
        live = self.placement.retire(tier)
        self._errors.append(error)
        rest = f"writes go to {', '.join(live)}" if live else "no other is left to write to"
        return f"{error}; the tier is retired, {rest}"

    def no_room(self, record: Record, described: str) -> errors.OffloadError:
        """Why no tier takes the record."""
        if self._errors and all(tier.retired for tier in self.placement.tiers):
            return self._errors[-1]
        earlier = f" (retired before: {self._errors[0]})" if self._errors else ""
        full = "".join(f"; {self._without_space(i)}" for i, t in enumerate(self.placement.tiers) if t.full)
        return errors.TierError(
            f"no tier has room for {record.size_bytes} bytes of {described}{full}; give the store another tier, more "
            f"capacity or more host_memory{earlier}"
        )

    def told_full(self, tier: int) -> str:
        """What to tell the user of a tier whose file system is full."""
        others = [t.spec.name for t in self.placement.tiers if not (t.full or t.retired)]
        rest = f"writes go to {', '.join(others)}" if others else "no other is left to write to"
        return f"{self._without_space(tier)}; the tier takes no new records until there is room, {rest}"

    def _without_space(self, tier: int) -> str:
        found = self.placement.tiers[tier]
        free = format_bytes(found.files.system.free_bytes or 0)
        return f"tier {found.spec.name!r}: {os.strerror(errno.ENOSPC)} ({free} free)"
