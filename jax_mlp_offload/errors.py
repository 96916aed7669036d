"""What can go wrong, by name.

Every failure of storage or of an update that was cut short is an :class:`OffloadError`; it says which tier, which
leaves and what the cause was. Bad arguments are plain ``ValueError``/``TypeError``. Inside a jitted step the same text
arrives as JAX's own runtime error, since XLA carries only a message.
"""

from __future__ import annotations

import errno


class OffloadError(RuntimeError):
    """The state of an optimizer could not be moved or updated; the message names tier, leaves and cause."""


class TierError(OffloadError):
    """A tier refused a read or a write, and no other tier could take its place."""

    no_space = False  # whether it refused a write for want of room


class CorruptRecordError(OffloadError):
    """A record came back shorter than it was written, or with another checksum."""


def of_transfer(text: str, error_number: int) -> OffloadError:
    """Why a transfer failed: what the system did not refuse (errno 0) came back wrong."""
    if not error_number:
        return CorruptRecordError(text)
    error = TierError(text)
    error.no_space = error_number in (errno.ENOSPC, errno.EDQUOT)
    return error


GO_ON = (
    "Alive are the process and the params, lost are this optimizer's moments: go on with store.restore_snapshot(path), with "
    "a checkpoint, or afresh with init(params)"
)


def of_update(cause: OffloadError) -> OffloadError:
    """Why an optimizer's update failed, and how to go on."""
    if isinstance(cause, ForeignParamsError):  # says so itself
        return cause
    return type(cause)(f"{cause}. {GO_ON}")


class StaleTicketError(OffloadError):
    """An update was asked for from a state that is not the latest one (a replay, a rollback, two updates of one)."""


class ForeignParamsError(OffloadError):
    """16-bit params changed between updates twice in a row: something behind the optimizer alters its updates."""


class AcceleratorError(OffloadError):
    """A device failed while gradients, params or results were moved, or while it updated records."""


class DeadlineError(OffloadError):
    """Storage gave no answer within the store's deadline."""


class CheckpointError(OffloadError):
    """A checkpoint or snapshot cannot be restored: it is damaged, incomplete, or of something else."""


class ClosedError(OffloadError):
    """The store was used after it had been closed."""


class ForeignParamsWarning(UserWarning):
    """16-bit params were replaced from outside; the new ones were adopted."""


class DeviceWarning(UserWarning):
    """A device works, but not as well as it could."""


class TierWarning(UserWarning):
    """A tier failed and was retired, or its file system is full; the others go on."""


class SkippedStepWarning(UserWarning):
    """A step was skipped because its gradients were not finite."""


class SnapshotWarning(UserWarning):
    """A snapshot that the store takes by itself could not be taken; training goes on."""


class CheckpointWarning(UserWarning):
    """A checkpoint was restored that is not quite as this optimizer would have written it."""
