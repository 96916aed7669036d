"""Tickets: which execution of which step an arriving operation belongs to, and whether it may run.

1. Every bucket op of one execution of a step comes with the same ticket and the same run id; together they are one
   :class:`Step`, which has one new serial. An optimizer's serials rise from a random start and are never used twice;
   starts lie so far apart that a ticket also tells its optimizer, and one restored from another process fits nothing.
2. An op may run if its ticket is the serial that its (bucket, device) was last given, or 0, which starts afresh.
3. Where a step may not run, it is *doomed*: all its ops on all devices are held until the last one came, and then
   fail together. One device that fails alone would leave the others in a collective. A step that is found out when
   some of its ops run already *fails* instead: the others hand back old params and the poison ticket.
4. An optimizer whose step failed half-way is *broken*: steps are doomed with the first cause until ticket 0 comes.
5. Where an optimizer *spans* processes, each proposes its own serial for a step, and the largest one, which the program
   hands to ``agree`` on every device, is the step's. A process may fail a step on its own account only by poison: the
   others would wait for it in a collective. All doom the one after, since all were given the poison.

Pure; imports nothing of jax, of the extension or of the tiers. Used by the scheduler's thread only.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Sequence

from jax_mlp_offload.types import POISON

MAX_OPEN_STEPS = 64
_STARTS = 2**31  # starts lie below, so that as many steps are left to each
_started = itertools.count(secrets.randbelow(_STARTS))
_begun = itertools.count(1)
ELSEWHERE = "its update failed in another process, whose own message says why"


def _start() -> int:
    """A serial to begin with, far from all others: golden-ratio steps (Knuth, TAOCP 3, §6.4) from a random one."""
    return 1 + next(_started) * 0x9E3779B1 % _STARTS


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """One execution of one optimizer's update."""

    serial: int
    ticket: int
    run_id: int
    order: int  # among the steps of all optimizers of this process, in which they began
    arrived: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    completed: int = 0
    came_s: dict[int, float] = dataclasses.field(default_factory=dict)  # when each device's last operation came
    begun: bool = False  # an operation of it was started
    failed: bool = False
    doomed: str | None = None
    held: list[int] = dataclasses.field(default_factory=list)  # requests of a doomed step
    adopted: set[str] = dataclasses.field(default_factory=set)  # leaves whose params were replaced from outside


class Ledger:
    """The tickets of one optimizer.

    Args:
      name: the optimizer's name, for messages.
      buckets: number of buckets.
      devices: ordinals of the devices it runs on.
      spans: whether other processes take part in its steps.
      first: the first serial (None: a random one).
    """

    def __init__(
        self, name: str, buckets: int, devices: Sequence[int], spans: bool = False, first: int | None = None
    ) -> None:
        self.name = name
        self.spans = spans
        self.broken: str | None = None
        self.latest = 0  # serial of the last step that was allowed to run
        self.era = 0  # serial of the step that last started afresh
        self.agreed = True  # whether all processes' ticket of the last step is known
        self._next = _start() if first is None else first
        self._expected = buckets * len(devices)
        self._last: dict[tuple[int, int], int] = {}
        self._lost: int | None = None  # run of which an operation never came
        self._open: list[Step] = []  # steps whose operations have not all come, oldest first

    def admit(self, bucket: int, device: int, run_id: int, ticket: int) -> Step:
        """Returns the step this operation belongs to; look at ``doomed`` and ``failed`` before running it."""
        key = (bucket, device)
        step = next((s for s in self._open if key not in s.arrived and _belongs(s, run_id, ticket)), None)
        if step is None:
            step = self._begin(key, run_id, ticket)
        step.arrived.add(key)
        if len(step.arrived) == self._expected:
            self._open.remove(step)
        if step.doomed is None:
            last = self._last.get(key, 0)
            if ticket in (0, last):
                self._last[key] = step.serial
            elif not step.failed:
                step.failed = True
                if step.serial >= self.era and self.broken is None:
                    self.broken = self._stale(ticket, last)
        return step

    def agree(self, device: int, mine: int, agreed: int) -> bool:
        """Takes up what all processes agreed on as the ticket of a step that a device has been through.

        Args:
          device: its ordinal.
          mine: the ticket of that step here.
          agreed: the largest one of all processes.

        Returns:
          Whether the step failed in another process only, and this optimizer is broken by it.
        """
        self.agreed = self.agreed or self.latest == mine
        if agreed == POISON:
            news = self.broken is None and self.era <= mine < POISON
            if news:
                self.broken = f"optimizer {self.name!r}: {ELSEWHERE}"
            return news
        for key, last in self._last.items():
            if key[1] == device and last == mine:
                self._last[key] = agreed
        if self.latest == mine:
            self.latest = agreed
        self._next = max(self._next, agreed + 1)
        return False

    def lose(self, run_id: int) -> None:
        """An operation of this run never comes: what else it sends fails, even if it starts afresh."""
        self._lost = run_id

    def all_here(self, step: Step) -> bool:
        """Whether every operation of the step has come."""
        return len(step.arrived) == self._expected

    def completed(self, step: Step) -> bool:
        """Counts one operation of the step as ended; true when it was the last."""
        step.completed += 1
        return step.completed == self._expected

    def open_steps(self) -> list[Step]:
        """Steps that were allowed to run and whose operations have not all come yet."""
        return [step for step in self._open if step.doomed is None]

    def give_up(self, step: Step) -> None:
        """Waits no longer for the step's other operations."""
        if step in self._open:
            self._open.remove(step)

    def _begin(self, key: tuple[int, int], run_id: int, ticket: int) -> Step:
        step = Step(self._next, ticket, run_id, next(_begun))
        self._next += 1
        last = self._last.get(key, 0)
        if run_id == self._lost:
            step.failed = True
        elif ticket == 0:
            self.broken = None
            self.era = step.serial
        elif self.broken is not None and self.spans and ticket == last:
            step.failed = True  # the other processes know nothing of it
        elif self.broken is not None:
            step.doomed = self.broken
        elif ticket != last:
            step.doomed = self._stale(ticket, last)
        if step.doomed is None:
            self.latest = step.serial
            self.agreed = not self.spans
        self._open.append(step)
        if len(self._open) > MAX_OPEN_STEPS:
            # programs that XLA cut short never send the rest
            self._open.remove(next((s for s in self._open if s.doomed is None), step))
        return step

    def _stale(self, ticket: int, last: int) -> str:
        if ticket == POISON:
            return (
                f"optimizer {self.name!r}: this state comes from an update that failed; "
                "go on with store.restore_snapshot, or restore params from a checkpoint and call init again"
            )
        known = f"the latest is {last}" if last else "this store holds no state of that update"
        return (
            f"optimizer {self.name!r}: the state given to update has ticket {ticket}, but {known}. The moments live in "
            "the store, in one version: an update can only follow the last one. Pass on the state that the last update "
            "returned, or go back with store.restore_snapshot or a checkpoint, or start afresh with init. Two optimizers of "
            "one store with the same leaves need a name= each, and one optimizer is not the same on another mesh or with "
            "other specs. "
            "optax.MultiSteps updates at every micro-step from one state: use this optimizer's accumulate_steps=k instead"
        )


def _belongs(step: Step, run_id: int, ticket: int) -> bool:
    """Whether an operation is of this step; where the last step failed, some devices may not have seen its poison."""
    return step.run_id == run_id and (step.ticket == ticket or POISON in (step.ticket, ticket))
