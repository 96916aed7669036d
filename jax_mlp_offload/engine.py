"""One store's machinery: native engine, scheduler, driver, the tiers' backends, and the optimizers that were registered.

Registering an optimizer plans its records, allocates slots (touched once, never in a step) and tells native engine and
scheduler. Thread contract: any thread; registration is serialised by a lock. What only the driver's thread may touch
(scheduler, records) is asked of it through ``Driver.call``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jax_mlp_offload import errors, native, sizing
from jax_mlp_offload.backends import Backend, make_backend
from jax_mlp_offload.devices import Devices
from jax_mlp_offload.driver import Driver
from jax_mlp_offload.exclusive import Access, Sharing
from jax_mlp_offload.first_probe import LEAST_BYTES, FirstProbe
from jax_mlp_offload.instances import ForeignParams
from jax_mlp_offload.placement import Device, TierSpec
from jax_mlp_offload.plan import (
    CELL_ELEMENTS,
    MAX_SUBGROUP_ELEMENTS,
    BucketPlan,
    Layout,
    LeafSpec,
    Plan,
    common_bucket_elements,
    make_plan,
)
from jax_mlp_offload.profile import ProfileLike, TierProfile, find, read_profile
from jax_mlp_offload.scheduler import Scheduler
from jax_mlp_offload.states import States
from jax_mlp_offload.tiers import Tier
from jax_mlp_offload.types import Order, Record
from jax_mlp_offload.update_on import UpdateOn

_CALL_TIMEOUT_S = 60.0  # for what the driver does at once
_numbers = itertools.count()
_left_behind: list[Any] = []  # engines whose threads hang in a system call: their memory must not be freed


if CELL_ELEMENTS != native.CELL_ELEMENTS:
    raise ImportError(
        f"the extension hashes {native.CELL_ELEMENTS} elements a cell, the package {CELL_ELEMENTS}; build it again"
    )


class Engine:
    """See the module's text.

    Args:
      tiers: where records may go.
      host_bytes: memory for slots, over all devices; None: see ``sizing.choose``.
      subgroup_elements: most elements of a subgroup; None: chosen from the sizes.
      order: of eviction.
      kernel_threads: threads of the fused update; None: one a core.
      deadline_s: how long storage may take for one record.
      access: whether processes that share a storage device take turns.
      profile: measured bandwidths of tiers; None: those beside their data, if there are any.
      update_on: where updates of accelerators' params run.

    Raises:
      ValueError: if ``profile`` is none.
      TypeError: likewise.
      OSError: if a tier cannot be used; nothing is left behind in the others.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        host_bytes: int | None,
        subgroup_elements: int | None,
        order: Order,
        kernel_threads: int | None,
        deadline_s: float,
        access: Access = Access.AUTO,
        profile: ProfileLike | None = None,
        update_on: UpdateOn = UpdateOn.AUTO,
    ) -> None:
        self.number = next(_numbers)
        self.deadline_s = deadline_s
        self.started_s = native.now_s()
        profiles = None if profile is None else read_profile(profile)
        self._host_bytes = host_bytes
        self._subgroup_elements = subgroup_elements
        self._lock = threading.Lock()
        self._instances = itertools.count()
        self._slot_bytes: int | None = None
        self._device_slots: Counter[int] = Counter()  # slots of each device
        self._directories: dict[int, str] = {}  # of each optimizer, in the tiers
        self.closed = False
        self._probe: FirstProbe | None = None
        self.backends: list[Backend] = []
        threads = kernel_threads or native.cores()
        self._native = native.Engine(threads)
        self.devices = Devices(self._native, update_on, threads)
        sharing = Sharing(access)
        try:
            for tier in tiers:
                self.backends.append(make_backend(tier, self._native, sharing))
            self.scheduler = Scheduler([_spec(backend, profiles) for backend in self.backends], order, deadline_s)
            self.driver = Driver(self._native, self.scheduler, self.backends, self._array_name)
        except BaseException:
            self._stop()
            self._close_backends()
            raise
        self.states = States(self.driver, self.scheduler, self.backends, self._native, self._array_name, deadline_s)
        native.register_engine(self.number, self._native)

    # -- optimizers

    def serve(self, platform: str) -> bool:
        """Gets ready for devices of a JAX platform: see :meth:`Devices.serve`."""
        with self._lock:
            return self.devices.serve(platform)

    def add_instance(
        self,
        name: str,
        leaves: Sequence[LeafSpec],
        layouts: dict[str, Layout],
        rules: dict[str, native.RuleSpec],
        reads_params: dict[str, bool],
        devices: Sequence[int],
        foreign: ForeignParams,
        spans: bool = False,
    ) -> tuple[int, Plan]:
        """Registers an optimizer and returns its number and plan.

        Args:
          name: for messages and arrays.
          leaves: one device's operands, in the order in which they make up buckets.
          layouts: by param dtype.
          rules: by param dtype.
          reads_params: by param dtype, whether the op gets the params.
          devices: ordinals.
          foreign: see ``foreign_params``.
          spans: whether other processes take part in its steps.

        Raises:
          ValueError: if host memory is too small, or a record cannot fit the store's slots.
          RuntimeError: if the system gives no memory for slots.
          errors.OffloadError: if the driver has failed, or gives no answer.
        """
        with self._lock:
            if self.closed:
                raise errors.ClosedError("the store is closed")
            number = next(self._instances)  # not used again if anything below fails
            plan, slot_bytes, slots = self._size(leaves, layouts, devices, spans)
            self.devices.add(devices, len(plan.buckets))
            first = self._native.slot_count()
            if slots:
                self.devices.add_slots(devices, slots, slot_bytes)
                self._slot_bytes = slot_bytes
                self._device_slots.update(dict.fromkeys(devices, slots))
            self._directories[number] = f"{number}-{re.sub('[^A-Za-z0-9_.-]+', '_', name)[:64]}"
            for index, bucket in enumerate(plan.buckets):
                dtype = leaves[bucket.leaves[0]].dtype
                self._native.add_bucket(number, index, _bucket_spec(bucket, plan, rules[dtype], reads_params[dtype]))
                self._add_arrays(number, index, bucket, devices)

            def tell_scheduler() -> None:
                for i, device in enumerate(devices):
                    self.scheduler.add_slots(device, range(first + i * slots, first + (i + 1) * slots))
                _tell_instance(self.scheduler, number, name, plan, devices, foreign, spans)

            self.driver.call(tell_scheduler, _CALL_TIMEOUT_S)
            if self._probe is None:
                self._probe_tiers((plan.records - slots) * len(devices) * plan.largest_record_bytes)
            return number, plan

    def _add_arrays(self, number: int, index: int, bucket: BucketPlan, devices: Sequence[int]) -> None:
        for device in devices:
            array = self._bucket_array(number, index, device)
            for backend in self.backends:
                backend.add_array(array, len(bucket.subgroups), bucket.record_bytes)

    def _probe_tiers(self, moved_bytes: int) -> None:
        """Has tiers of unknown bandwidth measured, one of each device, if a step moves enough for that."""
        placement = self.scheduler.placement
        if len(placement.devices) < 2 or moved_bytes < LEAST_BYTES * len(placement.tiers):
            return  # a single path gets all writes, however fast it is

        def unknown() -> list[int]:
            first: dict[Device, int] = {}
            for number, tier in enumerate(placement.tiers):
                if tier.read_bps is None or tier.write_bps is None:
                    first.setdefault(tier.device, number)
            return list(first.values())

        def tell(number: int, read_bps: float, write_bps: float) -> None:
            self.driver.call(lambda: placement.tell(number, read_bps, write_bps), _CALL_TIMEOUT_S)

        if numbers := self.driver.call(unknown, _CALL_TIMEOUT_S):
            self._probe = FirstProbe([(i, self.backends[i].tier) for i in numbers], self.slot_bytes, tell)

    def _size(
        self, leaves: Sequence[LeafSpec], layouts: dict[str, Layout], devices: Sequence[int], spans: bool
    ) -> tuple[Plan, int, int]:
        """The plan, the bytes of a slot, and how many new slots each device gets."""
        bucket_elements = common_bucket_elements(leaves) if spans else None
        if not devices:  # the mesh is that of other processes: traced here, and never run
            return make_plan(leaves, layouts, MAX_SUBGROUP_ELEMENTS, bucket_elements=bucket_elements), 0, 0
        if self._slot_bytes is None:
            sized = sizing.choose(
                lambda elements: make_plan(leaves, layouts, elements, bucket_elements=bucket_elements),
                len(devices),
                self._host_bytes,
                self._subgroup_elements,
                self.driver.call(self.scheduler.placement.speeds, _CALL_TIMEOUT_S),
            )
            return sized.plan, sized.slot_bytes, sized.slots
        # A further optimizer: records fit the slots there are; it gets more of them while the memory lasts.
        element_bytes = max(layout.element_bytes for layout in layouts.values()) or 1
        elements = self._subgroup_elements or max(1, self._slot_bytes // element_bytes)
        plan = make_plan(leaves, layouts, elements, self._slot_bytes, bucket_elements)
        slots = plan.records
        if self._host_bytes is not None:
            left_bytes = self._host_bytes - self._device_slots.total() * self._slot_bytes
            slots = min(slots, left_bytes // (self._slot_bytes * len(devices)))
        elif self.backends:
            slots = min(slots, sizing.least_slots(len(self.backends), len(devices)))
        if not self.backends and slots < plan.records:
            needed = plan.records * self._slot_bytes * len(devices)
            raise ValueError(
                f"host_memory={self._host_bytes} has no room for {needed} more bytes of state, and the store has no tier; "
                "raise host_memory or give it a tier"
            )
        bare = [device for device in devices if not self._device_slots[device]]
        if plan.records and not slots and bare:
            raise ValueError(
                f"host_memory={self._host_bytes} has no room for a slot of {self._slot_bytes} bytes on device(s) {bare}: "
                "optimizers on other devices have it all; raise host_memory, or use another Store"
            )
        return plan, self._slot_bytes, slots

    def _bucket_array(self, number: int, bucket: int, device: int) -> str:
        return f"{self._directories[number]}/b{bucket}.d{device}"

    def _array_name(self, record: Record) -> str:
        return self._bucket_array(record.instance, record.bucket, record.device)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot; 0 before the first optimizer."""
        return self._slot_bytes or 0

    # -- ends

    def flush(self, timeout_s: float) -> None:
        """Waits until no operation is open and nothing is in flight.

        Raises:
          errors.DeadlineError: if that takes longer than ``timeout_s``.
          errors.OffloadError: the first cause, if an optimizer is broken.
        """

        def first_error() -> errors.OffloadError | None:
            return next((i.error for i in self.scheduler.instances.values() if i.error is not None), None)

        error = self.driver.call(first_error, timeout_s, when_quiescent=True)
        if error is not None:
            raise error

    def close(self) -> None:
        """Stops threads, ends open operations with an error, removes what is stored. Idempotent.

        Raises:
          errors.DeadlineError: if storage does not let go of a transfer. Its thread and the slots are then left behind.
        """
        with self._lock:
            if self.closed:
                return
            self.closed = True
        until_s = native.now_s() + self.deadline_s
        for capture in list(self.driver.captures):  # a checkpoint that is being written
            capture.wait(max(0.0, until_s - native.now_s()))

        def stop() -> None:  # on a thread of its own: either may hang in a system call
            self.driver.stop()
            self._stop()

        if self._probe is not None:
            self._probe.stop()
        closing = threading.Thread(target=stop, name="jmo-close", daemon=True)
        closing.start()
        closing.join(self.deadline_s)
        native.unregister_engine(self.number)  # not before: XLA's buffers are in use until all ops have ended
        self._close_backends()
        if closing.is_alive():
            _left_behind.append(self._native)
            raise errors.DeadlineError(
                f"storage did not end a transfer within {self.deadline_s:g} s of closing the store"
            )

    def forked(self) -> None:
        """This is a forked child: it has no threads of the parent's, and must not touch the tiers."""
        self.closed = True
        for backend in self.backends:
            backend.forked()

    def _stop(self) -> None:
        for backend in self.backends:
            backend.stop()
        self._native.close()

    def _close_backends(self) -> None:
        for backend in self.backends:
            backend.close()


def _tell_instance(
    scheduler: Scheduler,
    number: int,
    name: str,
    plan: Plan,
    devices: Sequence[int],
    foreign: ForeignParams,
    spans: bool,
) -> None:
    """On the driver's thread: a new optimizer."""
    scheduler.add_instance(
        number,
        name,
        devices,
        [[bucket.record_bytes] * len(bucket.subgroups) for bucket in plan.buckets],
        plan.paths,
        lambda bucket, leaf: plan.leaves[plan.buckets[bucket].leaves[leaf]].path,
        foreign,
        spans,
    )


def _spec(backend: Backend, profiles: list[TierProfile] | None) -> TierSpec:
    """What placement is told of a tier: what was measured of it, but not more than its limits."""
    spec = backend.spec()
    found = find(backend.tier, profiles)
    if found is None:
        return spec
    read_bps, write_bps = (min(found.mixed_bps, limit or math.inf) for limit in (spec.read_bps, spec.write_bps))
    return dataclasses.replace(spec, read_bps=read_bps, write_bps=write_bps)


def _bucket_spec(bucket: BucketPlan, plan: Plan, rule: native.RuleSpec, reads_params: bool) -> dict[str, Any]:
    """A bucket as the extension takes it."""
    return {
        "rule": native.RULES[rule.rule],
        "param": native.DTYPES[plan.leaves[bucket.leaves[0]].dtype],
        "mu": native.DTYPES[rule.mu_dtype],
        "nu": native.DTYPES[rule.nu_dtype],
        "has_mu": rule.has_mu,
        "nesterov": rule.nesterov,
        "reads_params": reads_params,
        "hyper_count": rule.hyper_count,
        "leaves": [(plan.leaves[leaf].elements, plan.leaves[leaf].decay) for leaf in bucket.leaves],
        "subgroups": list(bucket.subgroups),
        "mu_offset": bucket.mu_offset,
        "nu_offset": bucket.nu_offset,
        "master_offset": bucket.master_offset,
        "cells_offset": bucket.cells_offset,
        "record_bytes": bucket.record_bytes,
    }
