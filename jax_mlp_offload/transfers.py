"""Reads and writes that are under way, and storage that fails or gives no answer.

What always holds: a slot belongs to its request until the request ends, even where it was given up. Such a request is
*overdue*: nobody waits for it any more, but it may still read from the slot or write to it.

Pure; used by the scheduler's thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from jax_mlp_offload import errors
from jax_mlp_offload.placement import Placement, TierSpec
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
            self.placement.write_begins(tier, record.size_bytes, now_s)

    def end(self, record: Record, tier: int, ok: bool, now_s: float) -> bool:
        """A request ended; returns whether it had been given up."""
        self._since_s.pop(record.index, None)
        if record.life is Life.READING:
            self.placement.read_ends(tier, record.size_bytes, now_s, ok)
        else:
            self.placement.write_ends(tier, record.size_bytes, now_s, ok)
        self._stuck.pop(record.index, None)
        return self.overdue.pop(record.index, None) is not None

    def deadline(self) -> float | None:
        """When the oldest request is to be given up."""
        return next(iter(self._since_s.values())) + self.deadline_s if self._since_s else None

    def late(self, now_s: float) -> int | None:
        """A record whose request is past its deadline."""
        index = next(iter(self._since_s), None)
        return index if index is not None and now_s >= self._since_s[index] + self.deadline_s else None

    def give_up(self, record: Record, described: str) -> errors.OffloadError:
        """Waits for the record's request no longer; returns why."""
        assert record.tier is not None
        assert record.slot is not None
        verb = "reading" if record.life is Life.READING else "writing"
        name = self.placement.tiers[record.tier].spec.name
        cause = errors.DeadlineError(f"tier {name!r} gave no answer for {self.deadline_s:g} s while {verb} {described}")
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
        return errors.TierError(
            f"no tier has room for {record.size_bytes} bytes of {described}; give the store another tier, more "
            f"capacity or more host_memory{earlier}"
        )
