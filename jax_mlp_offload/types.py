"""What the scheduler is told and what it answers: records, operations and actions.

Plain data; imports nothing of jax, of the extension or of the tiers. Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import dataclasses
import enum

POISON = 2**32 - 1
"""The ticket of an update that failed: the largest value, so that ``max`` carries it."""


class Life(enum.Enum):
    """Where a subgroup's state is. Nothing else stores that fact."""

    ABSENT = "absent"  # nothing stored: moments and remainder are zero
    READING = "reading"  # a slot is being filled from a tier
    READY = "ready"  # in a slot for an operation that waits for it: just read, or held
    UPDATING = "updating"  # in a slot that a kernel works on
    DIRTY = "dirty"  # in a slot; whatever a tier holds of it is older
    WRITING = "writing"  # in a slot that is being written out
    STORED = "stored"  # on a tier only


@dataclasses.dataclass(eq=False, slots=True)
class Record:
    """The state of one subgroup on one device."""

    index: int
    instance: int
    bucket: int
    device: int
    subgroup: int
    size_bytes: int
    life: Life = Life.ABSENT
    slot: int | None = None
    tier: int | None = None  # STORED, READING: where it is; WRITING: where it goes
    crc: int = 0
    void: bool = False  # the next update starts afresh, whatever is stored
    holds: int = 0  # who still copies what it holds: until they are done it is not updated, nor evicted
    asked: int = 0  # the last step whose operation came for it, whether it ran or not
    wanted_by: Operation | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Operation:
    """One bucket op of one execution on one device: XLA waits for it."""

    request: int
    instance: int
    bucket: int
    device: int
    serial: int
    order: int  # of its step among all steps
    skip: bool = False  # leave the state alone and hand back
    fresh: bool = False  # ticket 0: nothing stored counts
    loads: bool = False  # no step of XLA's: a state is put in from outside
    started: bool = False  # else it waits for an older operation on the same records
    pending: int = 0  # records not updated yet
    updating: int = 0  # records that a kernel works on
    failed: bool = False
    cause: str = ""
    poisoned: bool = True  # once failed: hand back old params (else raise at once)
    handing_back: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """Fill the record's slot from its tier."""

    record: Record


@dataclasses.dataclass(frozen=True, slots=True)
class Write:
    """Write the record's slot to its tier."""

    record: Record


@dataclasses.dataclass(frozen=True, slots=True)
class Update:
    """Run the kernel over the record's slot for an operation."""

    record: Record
    request: int
    fresh: bool


@dataclasses.dataclass(frozen=True, slots=True)
class HandBack:
    """Put the old params (or zero updates) into the operation's results; answered by ``handed_back``."""

    request: int


@dataclasses.dataclass(frozen=True, slots=True)
class Complete:
    """End the operation: XLA goes on with this ticket."""

    request: int
    ticket: int


@dataclasses.dataclass(frozen=True, slots=True)
class Fail:
    """End the operation with an error."""

    request: int
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class Warn:
    """Tell the user something that is no error."""

    category: type[Warning]
    message: str


Action = Read | Write | Update | HandBack | Complete | Fail | Warn


class Order(enum.Enum):
    """In which order records are evicted (design choice of the cache, for ablation)."""

    RESIDENT_FIRST = "resident-first"
    SEQUENTIAL = "sequential"
    ALTERNATING = "alternating"
