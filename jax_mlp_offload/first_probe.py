"""A short probe of tiers whose bandwidth is unknown, in the background of the first step.

It runs from the moment that an optimizer is registered, mostly while XLA still compiles, so that the first step already
splits its writes well. It moves what a tier takes in half a second, so it is left out where a step moves little more: such a
step's own traffic tells soon enough. Thread contract: ``stop`` from any thread but the probe's.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from jax_mlp_offload import errors
from jax_mlp_offload.probe import ProbeStoppedError, measure_briefly
from jax_mlp_offload.tiers import Tier

_log = logging.getLogger("jax_mlp_offload")
LEAST_BYTES = 256 * 2**20  # that a step writes to each tier, for a probe to be worth it
_STOP_S = 5.0


class FirstProbe:
    """Measures tiers one after another on a thread of its own.

    Args:
      tiers: what to measure, by number.
      record_bytes: size of a record.
      tell: called on that thread with a tier's number and its bytes/s read and written.
    """

    def __init__(
        self, tiers: Sequence[tuple[int, Tier]], record_bytes: int, tell: Callable[[int, float, float], None]
    ) -> None:
        self._tiers = tiers
        self._record_bytes = record_bytes
        self._tell = tell
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._main, name="jmo-probe", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends it. What it stores is removed by itself, in a moment."""
        self._stop.set()
        self._thread.join(_STOP_S)

    def _main(self) -> None:
        for number, tier in self._tiers:
            try:
                self._tell(number, *measure_briefly(tier, self._record_bytes, stop=self._stop))
            except (ProbeStoppedError, errors.ClosedError):
                return
            except (OSError, ValueError, RuntimeError) as error:  # training goes on without, and meets the same trouble
                if self._stop.is_set():
                    return
                _log.warning("tier %r could not be probed: %s", tier.name, error)
