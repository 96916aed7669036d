"""What the scheduler's simulator simulates: tiers, programs, and worlds drawn from a seed."""

from __future__ import annotations

import dataclasses
import enum
import random

from jax_mlp_offload.instances import ForeignParams
from jax_mlp_offload.placement import QUEUE
from jax_mlp_offload.types import Order

MB = 10**6


class Pattern(enum.Enum):
    """How a program hands over its buckets."""

    AT_ONCE = "all at once"
    GAPS = "one after another, with gaps"
    FORCED = "the next one after the last one completed"
    RANDOM = "at random times"


class Source(enum.Enum):
    """Which ticket an execution is given."""

    LATEST = "latest"
    ZERO = "zero: starts afresh"
    STALE = "of an older step"
    ZERO_UNASKED = "zero, while the last execution still runs"
    TWICE = "the one that the running execution was given"


@dataclasses.dataclass(frozen=True)
class TierModel:
    """A tier: bandwidths in bytes/s, and what goes wrong on it."""

    read_bps: float
    write_bps: float
    latency_s: float = 0.0
    jitter_s: float = 0.0
    duplex: bool = True
    fifo: bool = True  # else requests share the bandwidth
    capacity_bytes: int | None = None
    known: bool = True  # whether the scheduler is told the bandwidths
    read_errors: float = 0.0  # probability
    write_errors: float = 0.0
    dies_s: float = float("inf")  # writes fail from then on
    hangs_s: float = float("inf")  # requests from then on get no answer
    changes: tuple[tuple[float, float, float], ...] = ()  # (time, read, write) bandwidths from then on
    slice_s: float = 0.0  # it is throttled: grants its bandwidth in such slices, one at once after idling
    device: int | None = None  # tiers of one device share its bandwidth: the first one's model counts
    queue: int = QUEUE
    free_bytes: int | None = None  # on the file system of its device; None: without end
    neighbour: tuple[tuple[float, int], ...] = ()  # (time, bytes): what others then take of that space, or give back


@dataclasses.dataclass(frozen=True)
class Execution:
    """One run of the user's program."""

    pattern: Pattern = Pattern.AT_ONCE
    backwards: bool = False
    gap_s: float = 0.0
    source: Source = Source.LATEST
    skip: bool = False
    optimizers: tuple[int, ...] | None = None  # None: all


@dataclasses.dataclass(frozen=True)
class World:
    """What is simulated."""

    tiers: tuple[TierModel, ...] = (TierModel(400 * MB, 400 * MB), TierModel(200 * MB, 200 * MB))
    devices: int = 1
    slots: int = 12  # a device
    optimizers: tuple[tuple[tuple[int, ...], ...], ...] = (((4 * MB,),) * 36,)  # record sizes by bucket
    executions: tuple[Execution, ...] = (Execution(),) * 5
    order: Order = Order.RESIDENT_FIRST
    kernel_bps: float = 20e9
    compute_s: float = 0.01  # between executions
    lag_s: float = 0.0  # most that a device may be behind in an execution's start
    barrier: bool = True  # devices start an execution together
    foreign: ForeignParams = ForeignParams.WATCH
    adoptions: float = 0.0  # probability a record and update
    update_errors: float = 0.0  # likewise: an accelerator fails
    deadline_s: float = 30.0
    batch: int = 1  # most events the driver takes at once
    may_fail: bool = False
    seed: int = 0


def random_world(seed: int) -> World:
    """Draws a world; a third of them is without any trouble."""
    rng = random.Random(seed)
    devices = rng.choice([1, 1, 2, 2, 3])
    optimizers = tuple(
        tuple(
            tuple(rng.choice([1, 1, 2]) * MB for _ in range(rng.choice([1, 1, 1, 2, 4])))
            for _ in range(rng.randint(1, 10))
        )
        for _ in range(rng.choice([1, 1, 1, 2, 3]))
    )
    total = sum(len(bucket) for optimizer in optimizers for bucket in optimizer)
    trouble = rng.random() > 0.35

    def chance(probability: float) -> bool:
        return trouble and rng.random() < probability

    tiers = []
    for _ in range(rng.randint(1, 3)):
        read_bps = rng.choice([50, 100, 200, 400]) * MB
        tiers.append(
            TierModel(
                read_bps,
                read_bps * rng.choice([0.5, 1, 1, 2]),
                latency_s=rng.choice([0, 1e-4, 5e-3]),
                jitter_s=rng.choice([0, 0, 0.02]),
                duplex=rng.random() < 0.7,
                fifo=rng.random() < 0.5,
                known=rng.random() < 0.5,
                capacity_bytes=rng.randint(1, 2 * total * devices) * MB if chance(0.15) else None,
                read_errors=0.02 if chance(0.2) else 0.0,
                write_errors=0.02 if chance(0.2) else 0.0,
                dies_s=rng.random() if chance(0.1) else float("inf"),
                hangs_s=rng.random() if chance(0.1) else float("inf"),
            )
        )
    tiers = _draw_storage(tiers, total * devices, trouble, seed)
    odd = [Source.ZERO, Source.STALE, Source.ZERO_UNASKED, Source.TWICE]
    executions = tuple(
        Execution(
            rng.choice(list(Pattern)),
            rng.random() < 0.5,
            rng.choice([0.0, 1e-3, 0.03]),
            rng.choice(odd) if i and chance(0.15) else Source.LATEST,
            rng.random() < 0.1,
            (rng.randrange(len(optimizers)),) if rng.random() < 0.2 else None,
        )
        for i in range(rng.randint(3, 10))
    )
    return World(
        tiers=tuple(tiers),
        devices=devices,
        slots=rng.randint(1, total + 1),
        optimizers=optimizers,
        executions=executions,
        order=rng.choice([*[Order.RESIDENT_FIRST] * 4, Order.SEQUENTIAL, Order.ALTERNATING]),
        kernel_bps=rng.choice([1e8, 2e9, 2e10]),
        compute_s=rng.choice([0.0, 0.01]),
        lag_s=rng.choice([0.0, 0.01, 0.1, 15.0 if trouble and rng.random() < 0.1 else 0.01]),
        barrier=rng.random() < 0.5,
        foreign=rng.choice(list(ForeignParams)) if trouble else ForeignParams.ADOPT,
        adoptions=rng.choice([0.0, 0.0, 0.01, 0.2]),
        deadline_s=rng.choice([2.0, 30.0]) if trouble else 1e6,
        batch=rng.choice([1, 1, 4, 64]),
        may_fail=trouble,
        update_errors=random.Random(f"accelerators of {seed}").choice([0.0, 0.0, 0.0, 0.01]) if trouble else 0.0,
        seed=seed,
    )


def _draw_storage(tiers: list[TierModel], records: int, trouble: bool, seed: int) -> list[TierModel]:
    """Draws what devices are shared, how full they are, and how their bandwidth changes."""
    rng = random.Random(f"storage of {seed}")
    shared = len(tiers) > 1 and rng.random() < 0.3
    free_bytes = rng.randint(1, 2 * records) * MB if trouble and rng.random() < 0.3 else None
    drawn = []
    for i, tier in enumerate(tiers):
        changes = ()
        if rng.random() < 0.3:
            factors = rng.choice([(0.25, 1.0), (4.0,), (0.5, 0.1, 2.0)])
            changes = tuple((0.3 * (j + 1), tier.read_bps * f, tier.write_bps * f) for j, f in enumerate(factors))
        drawn.append(
            dataclasses.replace(
                tier,
                changes=changes,
                slice_s=rng.choice([0.0, 0.0, 0.0, 0.1]),
                device=0 if shared and i < 2 else None,
                queue=rng.choice([QUEUE, QUEUE, QUEUE, 1, 16]),
                free_bytes=free_bytes if i == 0 or (shared and i == 1) else None,
                neighbour=((0.5, rng.randint(0, 4) * MB), (1.0, -8 * MB))
                if i == 0 and trouble and rng.random() < 0.5
                else (),
            )
        )
    return drawn
