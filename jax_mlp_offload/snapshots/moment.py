"""What a snapshot is of: the optimizers of a store between two steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax_mlp_offload.capture import Capture, Key
from jax_mlp_offload.engine import Engine
from jax_mlp_offload.instances import Instance


@dataclasses.dataclass(frozen=True)
class Moment:
    """What was captured of the optimizers, by number."""

    captures: Mapping[int, Capture]
    tickets: Mapping[int, int]
    counts: Mapping[int, int]
    orders: Mapping[int, int]  # of their last steps, among those of all
    held: Mapping[int, Sequence[Key]]  # their records that updates wait for until they are read

    def close(self, kept: bool = False) -> None:
        """Lets go of everything."""
        for capture in self.captures.values():
            capture.close(kept)


def begin(engine: Engine) -> Moment | None:
    """Captures every optimizer that has a state; None: a step is on its way. On the driver's thread, with nothing in flight.

    Raises:
      errors.OffloadError: if an optimizer's last update failed.
    """
    instances = [instance for instance in engine.scheduler.instances.values() if instance.ledger.latest]
    if any(map(in_step, instances)):
        return None
    captures = engine.states.begin_captures([instance.number for instance in instances])
    return Moment(
        captures,
        {instance.number: instance.ledger.latest for instance in instances},
        {instance.number: instance.updates for instance in instances},
        {instance.number: instance.last_order for instance in instances},
        {number: sorted(capture.held) for number, capture in captures.items()},
    )


def in_step(instance: Instance) -> bool:
    """Whether a step of an optimizer has begun and is not over.

    One that has still to hand over buckets, or whose ticket the processes have yet to agree on. A step that was cut short
    never will; it does not count once a later one has ended.
    """
    return not instance.ledger.agreed or any(step.order > instance.last_order for step in instance.ledger.open_steps())
