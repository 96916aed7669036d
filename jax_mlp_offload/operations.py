"""The operations that XLA waits for: which may run, in which order, and how each one ends.

1. An operation of a step that may not run is held until all operations of that step came; they fail together.
   A program that runs its ops one by one never sends them all: once each device has sent one, and no more have come
   for longer than they ever took, all devices are at the same op, and they fail too. Where other processes take part, a
   slow one may still need this one's collectives: there it takes the whole grace.
2. The others run, those on the same records one after another, in the order in which they came.
3. An operation ends well once all its records are updated, with the step's serial as its ticket.
4. A failure ends every operation of that optimizer on all devices with the *old* params and the poison ticket. One that
   began before the optimizer last started afresh concerns only what is as old as itself.
5. A step that other processes take part in is refused only if they refuse it too, so by what they see as well: a ticket
   that is not the last. What only this process knows ends the step as a failure does.

What always holds: each operation ends exactly once, and not before the kernels that use its buffers are done.
Pure; used by the scheduler's thread only.
"""

from __future__ import annotations

from jax_mlp_offload import errors
from jax_mlp_offload.cache import DeviceCache
from jax_mlp_offload.instances import ForeignParams, Instance
from jax_mlp_offload.ledger import Step
from jax_mlp_offload.types import POISON, Action, Complete, Fail, HandBack, Life, Operation, Record, Warn

DOOM_GRACE_S = 10.0  # how long a refused step waits for devices that sent no operation yet
QUIET_GRACE_S = 0.25  # and once all have sent one, for further operations: so long, or twice what they took before,
QUIET_GRACE_OF_SEVERAL_S = 1.0  # or this where one device that is given up too early leaves others in a collective


class Operations:
    """The open operations, and the optimizers they belong to.

    Args:
      devices: slots and records by device, shared with the scheduler.
    """

    def __init__(self, devices: dict[int, DeviceCache]) -> None:
        self.instances: dict[int, Instance] = {}
        self.actions: list[Action] = []
        self.ready: list[Operation] = []  # may start now
        self._devices = devices
        self._open: dict[int, Operation] = {}
        self._steps: dict[int, Step] = {}  # by request
        self._turns: dict[tuple[int, int, int], list[Operation]] = {}  # on the same records; the first one runs
        self.now_s = 0.0  # of the event that is being told
        self._held: dict[Step, float] = {}  # refused steps that are not whole, and until when they wait

    @property
    def quiescent(self) -> bool:
        """Whether no operation is open."""
        return not self._open and not self._held

    def others_run(self, operation: Operation) -> bool:
        """Whether an operation of another step was started and has not ended."""
        return any(other.started and other.order != operation.order for other in self._open.values())

    # -- arrival

    def arrive(
        self,
        request: int,
        instance: int,
        bucket: int,
        device: int,
        run_id: int,
        ticket: int,
        skip: bool,
        loads: bool = False,
    ) -> None:
        """XLA handed over one bucket of one device, or a state is put in; what may start is in ``ready``."""
        owner = self.instances[instance]
        step = owner.ledger.admit(bucket, device, run_id, ticket)
        if step.doomed is not None:
            self._hold(owner, step, request, device)
            return
        self._note_gap(owner, step, device)
        if ticket == 0 and not step.begun and not step.failed and step.serial == owner.ledger.era:
            owner.start_afresh()
        if step.failed and owner.ledger.broken is not None and owner.error is None:
            owner.error = errors.StaleTicketError(owner.ledger.broken)
        fresh = ticket == 0
        operation = Operation(request, instance, bucket, device, step.serial, step.order, skip, fresh, loads)
        self._open[request] = operation
        self._steps[request] = step
        self._devices[device].op_arrived(self.now_s)
        self._turns.setdefault((instance, bucket, device), []).append(operation)
        if step.failed:
            self._fail([operation], owner.ledger.broken or "")
        else:
            self._next_turn(operation)

    def _next_turn(self, operation: Operation) -> None:
        key = operation.instance, operation.bucket, operation.device
        turns = self._turns.get(key)
        if turns and not turns[0].started and not turns[0].failed:
            turns[0].started = True
            self.ready.append(turns[0])

    def _note_gap(self, owner: Instance, step: Step, device: int) -> None:
        """Learns how long the operations of a step take to follow each other on a device."""
        came_s = step.came_s.get(device, self.now_s)
        owner.longest_gap_s = max(owner.longest_gap_s, self.now_s - came_s)
        step.came_s[device] = self.now_s

    def _hold(self, owner: Instance, step: Step, request: int, device: int) -> None:
        step.held.append(request)
        step.came_s[device] = self.now_s
        if owner.ledger.all_here(step):
            self._held.pop(step, None)
            self._fail_held(step)
        elif len(step.came_s) == len(owner.devices):
            self._held[step] = self.now_s + min(max(_quiet_grace_s(owner), 2 * owner.longest_gap_s), DOOM_GRACE_S)
        else:
            self._held.setdefault(step, self.now_s + DOOM_GRACE_S)

    def _fail_held(self, step: Step) -> None:
        assert step.doomed is not None
        self.actions.extend(Fail(request, step.doomed) for request in step.held)
        step.held.clear()

    def give_up_s(self) -> float | None:
        """When the first refused step stops waiting for its other operations."""
        return min(self._held.values(), default=None)

    def give_up(self) -> None:
        """Fails refused steps that waited long enough for their other operations."""
        for step in [step for step, until_s in self._held.items() if self.now_s >= until_s]:
            self._give_up(step)

    def _give_up(self, step: Step) -> None:
        del self._held[step]
        for owner in self.instances.values():
            owner.ledger.give_up(step)
        self._fail_held(step)

    def agreed(self, instance: int, device: int, mine: int, ticket: int) -> None:
        """All processes gave the step this ticket."""
        owner = self.instances[instance]
        if owner.ledger.agree(device, mine, ticket) and owner.error is None:
            owner.error = errors.OffloadError(owner.ledger.broken or "")

    # -- progress

    def begins_step(self, operation: Operation) -> bool:
        """Whether the operation that starts is the first of a step that wants its records updated."""
        step = self._steps[operation.request]
        owner = self.instances[operation.instance]
        if step.begun:
            return False
        step.begun = True
        if operation.skip:
            owner.skipped += 1
            self.warn(
                errors.SkippedStepWarning,
                f"optimizer {owner.name!r}: skipped a step with gradients that are not finite",
            )
            return False
        owner.ran(step.serial)
        return True

    def hand_back(self, operation: Operation) -> None:
        """Asks for the old params in the operation's results."""
        operation.handing_back = True
        self.actions.append(HandBack(operation.request))

    def handed_back(self, request: int) -> None:
        """The old params are in the operation's results."""
        operation = self._open[request]
        operation.handing_back = False
        self._complete(operation, POISON if operation.failed else operation.serial)
        self._raise_together(operation)

    def updated(self, operation: Operation) -> None:
        """One record of the operation was updated."""
        operation.pending -= 1
        operation.updating -= 1
        self.settle(operation)

    def settle(self, operation: Operation) -> None:
        """Ends the operation if nothing is left to do for it."""
        if operation.failed:
            self._end_failed(operation)
        elif operation.pending == 0:
            self._complete(operation, operation.serial)

    def adopted(self, operation: Operation, leaves: list[str]) -> None:
        """A kernel found that 16-bit params were replaced, and adopted them."""
        if operation.failed:
            return
        owner = self.instances[operation.instance]
        self._steps[operation.request].adopted.update(leaves)
        twice = owner.adopts(operation.serial)
        if owner.foreign is ForeignParams.ERROR or (owner.foreign is ForeignParams.WATCH and twice):
            again = "again " if twice else ""
            cause = errors.ForeignParamsError(
                f"optimizer {owner.name!r}: 16-bit params ({', '.join(leaves[:4])}) are {again}not what the last "
                "update left. A transform after jmo's optimizer changes its updates; move it in front. "
                "If params are meant to be replaced before each update, pass foreign_params='adopt'"
            )
            alone = len(owner.devices) == 1 and not owner.ledger.spans
            self.fail(owner, cause, operation.serial, at_once=alone)

    def _complete(self, operation: Operation, ticket: int) -> None:
        self.actions.append(Complete(operation.request, ticket))
        self._ended(operation)

    def _ended(self, operation: Operation) -> None:
        owner = self.instances[operation.instance]
        step = self._steps.pop(operation.request)
        del self._open[operation.request]
        self._devices[operation.device].op_ended(self.now_s)
        key = operation.instance, operation.bucket, operation.device
        turns = self._turns[key]
        turns.remove(operation)
        if not turns:
            del self._turns[key]
        self._next_turn(operation)
        if owner.ledger.completed(step) and not step.failed:
            owner.last_order = max(owner.last_order, step.order)
            if not operation.loads:
                owner.steps += 1
                owner.updates += not operation.skip and step.serial >= owner.ledger.era
                self._tell_adopted(owner, step)

    def _tell_adopted(self, owner: Instance, step: Step) -> None:
        if not step.adopted:
            return
        owner.adopted += 1
        if owner.foreign is not ForeignParams.ADOPT:
            names = sorted(step.adopted)
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            self.warn(
                errors.ForeignParamsWarning,
                f"optimizer {owner.name!r}: params were replaced from outside since the last update and were "
                f"adopted, their float32 remainders dropped: {shown}",
            )

    def warn(self, category: type[Warning], message: str) -> None:
        """Tells the user something that is no error."""
        self.actions.append(Warn(category, message))

    # -- failures

    def fail(
        self, owner: Instance, cause: errors.OffloadError, serial: int | None = None, at_once: bool = False
    ) -> None:
        """Ends an optimizer's open operations; its steps are refused from here on, until it starts afresh.

        Args:
          owner: the optimizer.
          cause: what went wrong.
          serial: the step in which it did; None: it concerns whatever runs.
          at_once: raise now instead of handing back old params (with one device only).
        """
        old = serial is not None and serial < owner.ledger.era
        operations = [op for op in self._open.values() if op.instance == owner.number and not op.failed]
        if old:
            operations = [op for op in operations if op.serial < owner.ledger.era]
        else:
            owner.error = owner.error or errors.of_update(cause)
            owner.ledger.broken = owner.ledger.broken or str(owner.error)
        for step in [*owner.ledger.open_steps(), *(self._steps[op.request] for op in operations)]:
            step.failed = step.failed or not old or step.serial < owner.ledger.era
        self._fail(operations, str(cause), at_once)

    def fail_held(self) -> None:
        """Ends every refused step at once."""
        for step in list(self._held):
            self._give_up(step)

    def _fail(self, operations: list[Operation], cause: str, at_once: bool = False) -> None:
        for operation in operations:
            operation.failed, operation.cause = True, cause
            operation.poisoned = not at_once
            cache = self._devices[operation.device]
            cache.withdraw(operation)
            cache.expect_none(operation.instance)
            for record in self.instances[operation.instance].records[operation.bucket, operation.device]:
                self._let_go(cache, record, operation)
        self.ready = [operation for operation in self.ready if not operation.failed]
        for operation in operations:
            self._end_failed(operation)

    def _let_go(self, cache: DeviceCache, record: Record, operation: Operation) -> None:
        if record.wanted_by is operation and record.life is not Life.UPDATING:
            cache.drop(record)
            record.wanted_by = None

    def _end_failed(self, operation: Operation) -> None:
        """Ends a failed operation once no kernel works for it."""
        if operation.updating or operation.handing_back:
            return
        if operation.poisoned:
            self.hand_back(operation)
        else:
            self._raise_together(operation)

    def _raise_together(self, operation: Operation) -> None:
        """Raises what is to be raised at once, when every kernel of the step is done: XLA then takes its buffers."""
        step = [op for op in self._open.values() if op.order == operation.order]
        together = [op for op in step if op.failed and not op.poisoned]
        if together and not any(op.updating or op.handing_back for op in step):
            for op in together:
                self.actions.append(Fail(op.request, op.cause))
                self._ended(op)


def _quiet_grace_s(owner: Instance) -> float:
    if owner.ledger.spans:
        return DOOM_GRACE_S
    return QUIET_GRACE_S if len(owner.devices) == 1 else QUIET_GRACE_OF_SEVERAL_S
