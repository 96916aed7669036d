"""A scheduler whose events a test gives one by one."""

from __future__ import annotations

import itertools

from jax_mlp_offload import errors
from jax_mlp_offload.instances import ForeignParams
from jax_mlp_offload.placement import TierSpec
from jax_mlp_offload.scheduler import Scheduler
from jax_mlp_offload.types import Complete, Fail, HandBack, Order, Read, Update, Warn, Write


class Hand:
    """A scheduler whose events a test gives one by one."""

    def __init__(self, tiers=1, devices=1, buckets=3, slots=1, size=100, **settings):
        specs = [t if isinstance(t, TierSpec) else TierSpec(f"t{i}") for i, t in enumerate(range(tiers))]
        specs = settings.pop("specs", specs)
        self.scheduler = Scheduler(specs, settings.pop("order", Order.RESIDENT_FIRST), settings.pop("deadline_s", 60.0))
        for device in range(devices):
            self.scheduler.add_slots(device, range(device * slots, (device + 1) * slots))
        self.devices, self.buckets = devices, buckets
        self.now_s = 0.0
        self.runs = itertools.count(1)
        self.requests = itertools.count(1)
        self.ended = {}
        self.warnings = []
        self.updates = []
        self.open = []
        self.instance = self.scheduler.add_instance(
            0,
            "adam",
            range(devices),
            [[size]] * buckets,
            lambda bucket, subgroup: [f"w{bucket}"],
            lambda bucket, leaf: f"w{bucket}",
            settings.pop("foreign", ForeignParams.WATCH),
            spans=settings.pop("spans", False),
            first_serial=1,
        )

    def arrive(self, bucket, device=0, ticket=0, run=None, skip=False):
        request = next(self.requests)
        self.scheduler.arrived(request, 0, bucket, device, run or next(self.runs), ticket, skip, self.now_s)
        self.take()
        return request

    def take(self):
        actions = self.scheduler.take_actions()
        for action in actions:
            match action:
                case Complete(request, ticket):
                    assert request not in self.ended
                    self.ended[request] = ticket
                case Fail(request, message):
                    assert request not in self.ended
                    self.ended[request] = message
                case Warn():
                    self.warnings.append(action)
                case _:
                    self.open.append(action)
        return actions

    def settle(self, write=None, read=None, adopt=False, update=None):
        """Carries out what is asked until nothing is left to do; errors by function of the record."""
        while self.open:
            match self.open.pop(0):
                case Update(record, _, fresh):
                    self.updates.append((record.bucket, fresh))
                    adopted = [0] if adopt and not fresh else []
                    self.scheduler.update_done(record, adopted, self.now_s, update and update(record))
                case Write(record):
                    self.scheduler.write_done(record, 0, write and write(record), self.now_s)
                case Read(record):
                    self.scheduler.read_done(record, read and read(record), self.now_s)
                case HandBack(request):
                    self.scheduler.handed_back(request, self.now_s)
            self.take()

    def wait_out(self, **settings):
        """Lets time pass until nothing is left to do."""
        self.settle(**settings)
        while (next_s := self.scheduler.next_tick_s()) is not None:
            self.now_s = next_s
            self.scheduler.tick(next_s)
            self.take()
            self.settle(**settings)

    def step(self, ticket=0, **settings):
        """A step on all devices; returns the results, or the one they share."""
        run = next(self.runs)
        skip = settings.pop("skip", False)
        requests = [self.arrive(b, d, ticket, run, skip) for b in range(self.buckets) for d in range(self.devices)]
        self.settle(**settings)
        results = {self.ended.get(request) for request in requests}
        return results.pop() if len(results) == 1 else results

    def ended_with(self, requests):
        return [self.ended.get(request) for request in requests]


def error_of(tier="t0"):
    return lambda record: errors.TierError(f"tier {tier!r}: No space left on device; w{record.bucket}")
