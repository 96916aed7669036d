"""The states of a store's optimizers, as a whole: read, kept as they are for a while, replaced from outside.

Thread contract: any thread but the driver's; ``begin_captures`` on the driver's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_mlp_offload import errors, native
from jax_mlp_offload.backends import Backend
from jax_mlp_offload.capture import Capture, Key
from jax_mlp_offload.driver import Driver
from jax_mlp_offload.instances import Instance
from jax_mlp_offload.load import Fill, Load
from jax_mlp_offload.scheduler import Scheduler
from jax_mlp_offload.types import Record

_CALL_TIMEOUT_S = 60.0  # for what the driver does at once
Rows = dict[tuple[int, int], list[np.ndarray[Any, Any] | None]]
"""By (bucket, device) its records, uint8 [record_bytes]; None: nothing is stored."""


class States:
    """See the module's text.

    Args:
      driver: of the store.
      scheduler: of the store.
      backends: of its tiers.
      engine: the native one.
      array_name: the array that holds a record, in every tier.
      deadline_s: how long steps and transfers may take to end.
    """

    def __init__(
        self,
        driver: Driver,
        scheduler: Scheduler,
        backends: Sequence[Backend],
        engine: Any,
        array_name: Callable[[Record], str],
        deadline_s: float,
    ) -> None:
        self._driver, self._scheduler, self._backends, self._engine = driver, scheduler, backends, engine
        self._array_name, self._deadline_s = array_name, deadline_s

    def latest_tickets(self) -> dict[int, int]:
        """For each optimizer the ticket of its last step that was allowed to run; 0: there was none.

        Raises:
          errors.OffloadError: if the driver has failed, or gives no answer.
        """

        def collect() -> dict[int, int]:
            return {number: instance.ledger.latest for number, instance in self._scheduler.instances.items()}

        result: dict[int, int] = self._driver.call(collect, _CALL_TIMEOUT_S)
        return result

    def read(self, number: int, serial: int) -> Rows:
        """A copy of every record of an optimizer.

        Args:
          number: the optimizer.
          serial: the ticket of the state it is read for.

        Raises:
          errors.OffloadError: if its last update failed, or a record cannot be read.
          errors.StaleTicketError: if the store holds another step than that of the state.
        """
        capture = self.capture({number: serial})[number]
        try:
            return {
                (bucket, device): [_copy(capture, Key(bucket, device, r.subgroup), r.size_bytes) for r in row]
                for (bucket, device), row in self._scheduler.instances[number].records.items()
            }
        finally:
            capture.close()

    def capture(self, serials: Mapping[int, int]) -> dict[int, Capture]:
        """Keeps optimizers' records as they are now, between two steps; training goes on. Each has to be closed.

        Args:
          serials: for each optimizer the ticket of the state that is wanted.

        Raises:
          errors.OffloadError: if an optimizer's last update failed.
          errors.StaleTicketError: if the store holds another step than that of the state.
          errors.DeadlineError: if steps or transfers do not end in time.
        """

        def begin() -> dict[int, Capture]:
            for number, serial in serials.items():
                _check_current(self._scheduler.instances[number], serial)
            return self.begin_captures(serials)

        captures: dict[int, Capture] = self._driver.call(begin, self._deadline_s, when_quiescent=True)
        return captures

    def begin_captures(self, numbers: Iterable[int]) -> dict[int, Capture]:
        """The same on the driver's thread, between two steps, whatever step the store holds."""
        captures = {
            number: Capture(
                self._scheduler.instances[number],
                self._driver,
                self._scheduler,
                self._backends,
                self._engine,
                self._array_name,
                self._deadline_s,
            )
            for number in numbers
        }
        try:
            for capture in captures.values():
                self._driver.captures.add(capture)
                capture.begin()
        except BaseException:
            for capture in captures.values():
                capture.end()
            raise
        return captures

    def load(self, number: int, fill: Fill, count: int = 0) -> int:
        """Puts a state from outside in the place of an optimizer's; returns its ticket. See :class:`Load`.

        Args:
          number: the optimizer.
          fill: fills in its records.
          count: updates that the state has had.
        """
        ticket = Load(number, self._driver, self._scheduler, self._engine).run(fill)

        def note() -> None:
            instance = self._scheduler.instances[number]
            instance.updates, instance.loads = count, instance.loads + 1

        self._driver.call(note, _CALL_TIMEOUT_S)
        return ticket

    def take_ticket(self, number: int, mine: int, agreed: int) -> None:
        """All processes of a job agreed on the ticket of a state that each has loaded."""

        def take() -> None:
            for device in self._scheduler.instances[number].devices:
                self._scheduler.agreed(number, device, mine, agreed, native.now_s())

        self._driver.call(take, _CALL_TIMEOUT_S)


def _check_current(instance: Instance, serial: int) -> None:
    if instance.error is not None:
        raise instance.error
    if serial != instance.ledger.latest:
        raise errors.StaleTicketError(
            f"optimizer {instance.name!r}: the state has ticket {serial}, but the store holds that of "
            f"{instance.ledger.latest}; read the state that the last update returned"
        )


def _copy(capture: Capture, key: Key, size_bytes: int) -> np.ndarray[Any, Any] | None:
    if not capture.has(key):
        return None
    target = np.empty(size_bytes, np.uint8)
    capture.read(key, target)
    return target
