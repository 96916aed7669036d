"""One optimizer as the scheduler sees it: its records, its tickets, and what went wrong with it.

Plain data; used by the scheduler's thread only.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Callable, Sequence

from jax_mlp_offload import errors
from jax_mlp_offload.ledger import Ledger
from jax_mlp_offload.types import Record


class ForeignParams(enum.Enum):
    """What to do where 16-bit params were replaced between two updates."""

    WATCH = "watch"  # adopt and warn; refuse if it happens in two steps running
    ADOPT = "adopt"
    ERROR = "error"


@dataclasses.dataclass(eq=False)
class Instance:
    """One optimizer: its records by (bucket, device), its tickets, and what went wrong."""

    number: int
    name: str
    devices: tuple[int, ...]
    records: dict[tuple[int, int], list[Record]]
    leaf_names: Callable[[int, int], list[str]]  # (bucket, subgroup) -> leaves
    bucket_leaf: Callable[[int, int], str]  # (bucket, leaf in bucket) -> name
    foreign: ForeignParams
    ledger: Ledger
    error: errors.OffloadError | None = None
    steps: int = 0  # executions that ended well, skipped ones included
    skipped: int = 0
    updates: int = 0  # steps that the state has had: since it was fresh, skipped ones excluded; a load says how many
    loads: int = 0
    last_order: int = 0  # of the last step that ended well or was skipped, among the steps of all optimizers
    longest_gap_s: float = 0.0  # between operations of one step on one device
    adopted: int = 0  # steps in which params were adopted
    serials: list[int] = dataclasses.field(default_factory=list)  # of the last steps that ran, skipped ones excluded
    adopted_serials: set[int] = dataclasses.field(default_factory=set)  # those of them that adopted params

    @property
    def buckets(self) -> int:
        """Operations of a step on each device."""
        return len(self.records) // len(self.devices)

    def outside(self) -> Counter[int]:
        """How many records have no slot, by device."""
        return Counter(record.device for row in self.records.values() for record in row if record.slot is None)

    def describe(self, record: Record) -> str:
        """A record in words, for messages."""
        names = self.leaf_names(record.bucket, record.subgroup)
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        return (
            f"optimizer {self.name!r}, subgroup {record.subgroup} of bucket {record.bucket} "
            f"on device {record.device} (leaves {shown})"
        )

    def ran(self, serial: int) -> None:
        """A step that is not skipped begins."""
        self.serials = [*self.serials[-2:], serial]
        self.adopted_serials.intersection_update(self.serials)

    def adopts(self, serial: int) -> bool:
        """A step found its params replaced; returns whether it is the second in a row."""
        self.adopted_serials.add(serial)
        pairs = zip(self.serials, self.serials[1:], strict=False)
        return any(first in self.adopted_serials and second in self.adopted_serials for first, second in pairs)

    def start_afresh(self) -> None:
        """Forgets what went wrong: the state is new."""
        self.error = None
        self.updates = 0
        self.serials.clear()
        self.adopted_serials.clear()


def make_instance(
    number: int,
    name: str,
    devices: Sequence[int],
    bucket_records: Sequence[Sequence[int]],
    leaf_names: Callable[[int, int], list[str]],
    bucket_leaf: Callable[[int, int], str],
    foreign: ForeignParams,
    known: list[Record],
    spans: bool = False,
    first_serial: int | None = None,
) -> Instance:
    """Makes an optimizer and its records.

    Args:
      number: its number in compiled programs.
      name: for messages.
      devices: ordinals; each has all buckets.
      bucket_records: for each bucket the sizes of its records in bytes.
      leaf_names: names of the leaves under (bucket, subgroup).
      bucket_leaf: name of a leaf of a bucket.
      foreign: what replaced 16-bit params lead to.
      known: all records of the store by index; those of the optimizer are added.
      spans: whether other processes take part in its steps.
      first_serial: see :class:`Ledger`.
    """
    records: dict[tuple[int, int], list[Record]] = {}
    for device in devices:
        for bucket, sizes in enumerate(bucket_records):
            first = len(known)
            row = [Record(first + i, number, bucket, device, i, size) for i, size in enumerate(sizes)]
            known.extend(row)
            records[bucket, device] = row
    ledger = Ledger(name, len(bucket_records), devices, spans, first_serial)
    return Instance(number, name, tuple(devices), records, leaf_names, bucket_leaf, foreign, ledger)
