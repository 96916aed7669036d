"""Whether the processes of one node take turns on a storage device (MLP-Offload, arXiv 2509.02480, section 3.3).

1. Processes that use one device find each other by a file that is named after it, in memory, a user's own. Each holds a
   shared lock on one byte of it as long as it lives, so one system call tells whether anyone else is there. Each counts
   in an entry of its own what it has moved.
2. ``True`` takes turns always, ``False`` never. ``"auto"``: never while alone.
3. While others are there, the process that got the leader's lock tries both: update phases without turns and with them,
   alternately, the first phase after each change not counted. Turns stay if all processes together moved clearly more
   bytes a second with them, in each of the rounds. (What one process gains may be what another loses, and what one
   round shows may be noise.) What the leader tries and decides is one byte in the file, which the others follow at
   their next phase.
4. The trial is repeated after ``RETRIAL_PHASES``, or when others come back after this process was alone.

The turns themselves are taken by the native I/O threads, on other bytes of the same file. Locks are those of open file
descriptions: the kernel frees them however a process ends. Thread contract: one thread at a time.
"""

from __future__ import annotations

import enum
import fcntl
import mmap
import os
import pathlib
import stat
import statistics
import struct
import tempfile
from typing import Any

RETRIAL_PHASES = 1000
_SETTLE_PHASES = 4  # before the first trial: processes start, make files, compile
_ROUNDS = 3  # of both ways, against drift and noise
_PHASES = 2  # counted, in each round and way
_LEAST_GAIN = 1.05  # of bandwidth, for turns to stay
_LEAST_PHASE_S = 0.05  # a shorter one tells nothing
_MODE = 0  # the byte that says whether turns are taken
_PRESENT, _LEADER = 4, 5  # bytes to lock; those before are the native threads' (ffi/core/turn.h)
_ENTRIES_AT, _ENTRIES = 64, 496  # unsigned 64-bit counters; an entry's owner has its first byte locked
_FILE_BYTES = _ENTRIES_AT + 8 * _ENTRIES
_FLOCK = "hhqqixxxx"  # struct flock: l_type, l_whence, l_start, l_len, l_pid


class Access(enum.Enum):
    """What the user asks for."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"

    @classmethod
    def of(cls, value: Any) -> Access:
        """From ``Store(exclusive=)``.

        Raises:
          ValueError: if it is none of ``"auto"``, True and False.
        """
        if value is True or value is False:
            return cls.ALWAYS if value else cls.NEVER
        if value == "auto":
            return cls.AUTO
        raise ValueError(f"exclusive={value!r} is unknown; use 'auto', True or False")


class Trial:
    """Compares the bandwidth of all processes in phases with and without turns. Pure."""

    def __init__(self) -> None:
        self.gain: float | None = None  # bandwidth with turns over that without: median of the last trial's rounds
        self.on = False
        self._left = _SETTLE_PHASES  # phases until the next trial
        self._plan()

    def _plan(self) -> None:
        rounds = range(_ROUNDS)
        # (round, with turns, counted) of each phase to come
        self._schedule = [(n, on, i > 0) for n in rounds for on in (False, True) for i in range(1 + _PHASES)]
        self._seen: dict[tuple[int, bool], list[float]] = {(n, on): [] for n in rounds for on in (False, True)}

    def phase(self, seen_bps: float | None) -> bool:
        """A phase ended and one begins.

        Args:
          seen_bps: the ended phase's bandwidth, bytes/s; None: it moved too little to tell.

        Returns:
          Whether the new phase takes turns.
        """
        if self._left > 0:
            self._left -= 1
            if self._left == 0:
                self.on = self._schedule[0][1]  # the trial's first phase, which is not counted
            return self.on
        if seen_bps is not None:
            number, on, counted = self._schedule.pop(0)
            if counted:
                self._seen[number, on].append(seen_bps)
            if not self._schedule:
                self._decide()
                return self.on
        self.on = self._schedule[0][1]
        return self.on

    def _decide(self) -> None:
        gains = [statistics.fmean(self._seen[n, True]) / statistics.fmean(self._seen[n, False]) for n in range(_ROUNDS)]
        self.gain = statistics.median(gains)
        self.on = min(gains) > _LEAST_GAIN
        self._left = RETRIAL_PHASES
        self._plan()


class Turns:
    """One store's view of one device, whatever the number of its tiers there.

    Args:
      access: what the user asks for.
      device: the device's number (``st_dev``).
    """

    def __init__(self, access: Access, device: int) -> None:
        self.access = access
        self.on = access is Access.ALWAYS
        self.path = ""
        self._file = -1
        self._leads = False
        self._trial = Trial()
        self._entries: memoryview | None = None
        self._own = 0  # entry
        self._last = (0.0, 0)  # when the last phase began, and what all had moved by then
        self._why = {Access.AUTO: "alone on the device", Access.ALWAYS: "asked for", Access.NEVER: "not asked for"}[
            access
        ]
        if access is not Access.NEVER:
            try:
                self._join(device)
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._why = f"no locks here: {error}"

    def _join(self, device: int) -> None:
        path = _directory() / f"{os.major(device)}.{os.minor(device)}"
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        os.ftruncate(self._file, _FILE_BYTES)
        memory = memoryview(mmap.mmap(self._file, _FILE_BYTES))
        self._entries = memory[_ENTRIES_AT:].cast("Q")
        if self._alone():
            os.pwrite(self._file, b"\0", _MODE)  # what the last ones decided
        _lock(self._file, fcntl.F_RDLCK, _PRESENT)
        own = next((i for i in range(_ENTRIES) if _try_lock(self._file, fcntl.F_WRLCK, _ENTRIES_AT + 8 * i)), None)
        if own is None:
            raise OSError(f"more than {_ENTRIES} stores use the device")
        self._own = own
        self.path = str(path)

    def moved(self, size_bytes: int) -> None:
        """A transfer ended that moved so much."""
        if self._entries is not None:
            self._entries[self._own] = (self._entries[self._own] + size_bytes) % 2**64

    def phase(self, now_s: float) -> bool:
        """An update phase begins; returns whether it takes turns. Each of the device's tiers may ask."""
        if self.access is Access.AUTO and self._file >= 0 and now_s != self._last[0]:
            try:
                self.on = self._choose(self._seen_bps(now_s))
            except OSError as error:
                self._give_up(error)
        return self.on

    def _seen_bps(self, now_s: float) -> float | None:
        """What all processes together moved since the last phase began, bytes/s; None: too little to tell."""
        assert self._entries is not None
        (since_s, before), total = self._last, sum(self._entries)
        self._last = now_s, total
        return (total - before) / (now_s - since_s) if total > before and now_s - since_s >= _LEAST_PHASE_S else None

    def _choose(self, seen_bps: float | None) -> bool:
        if self._alone():
            self._trial = Trial()
            self._why = "alone on the device"
            return False
        self._leads = self._leads or _try_lock(self._file, fcntl.F_WRLCK, _LEADER)
        if not self._leads:
            self._why = "as another process of this node found"
            return os.pread(self._file, 1, _MODE) == b"\1"
        on = self._trial.phase(seen_bps)
        os.pwrite(self._file, b"\1" if on else b"\0", _MODE)
        gain = self._trial.gain
        self._why = "being measured" if gain is None else f"measured: {gain:.2f} times the bandwidth with turns"
        return on

    def _alone(self) -> bool:
        """Whether no other process (or store) uses the device."""
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, _PRESENT, 1, 0)
        answer = fcntl.fcntl(self._file, fcntl.F_OFD_GETLK, request)
        return bool(struct.unpack(_FLOCK, answer)[0] == fcntl.F_UNLCK)

    def facts(self) -> dict[str, Any]:
        """What was chosen and why, for statistics."""
        return {"setting": self.access.value, "on": self.on, "why": self._why, "gain": self._trial.gain}

    def close(self) -> None:
        """Leaves the device. Idempotent."""
        self._entries = None
        if self._file >= 0:
            os.close(self._file)
        self._file, self.path, self.on = -1, "", False


class Sharing:
    """How one store shares its devices with others.

    Args:
      access: what the user asks for.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._turns: dict[int, Turns] = {}

    def turns(self, device: int) -> Turns:
        """The turns on a device (``st_dev``)."""
        if device not in self._turns:
            self._turns[device] = Turns(self._access, device)
        return self._turns[device]


def _directory() -> pathlib.Path:
    """This user's own directory in memory, for lock files.

    Raises:
      OSError: if it cannot be made, or is another user's.
    """
    root = pathlib.Path("/dev/shm")
    if not os.access(root, os.W_OK):
        root = pathlib.Path(tempfile.gettempdir())
    path = root / f"jmo-turns-{os.geteuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to somebody else")
    return path


def _lock(file: int, kind: int, byte: int) -> None:
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))


def _try_lock(file: int, kind: int, byte: int) -> bool:
    try:
        _lock(file, kind, byte)
    except BlockingIOError:
        return False
    return True
