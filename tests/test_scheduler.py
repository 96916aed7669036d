"""The scheduler: a thousand seeds of the simulator, its misses and its time."""

from __future__ import annotations

import math

import pytest

from jax_mlp_offload.types import Order
from tests.simulator import Simulation
from tests.worlds import MB, Execution, Pattern, TierModel, World, random_world

SEEDS = 1000
BATCH = 50

AT_ONCE = Execution()
FORWARD = Execution(Pattern.FORCED)
BACKWARD = Execution(Pattern.FORCED, backwards=True)


# -- seeds


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_random_worlds(first, request):
    replayed = request.config.getoption("--replay-seed", default=None)
    if replayed is not None and first > 0:
        pytest.skip("one seed is replayed")
    for seed in range(first, first + BATCH) if replayed is None else [replayed]:
        try:
            Simulation(random_world(seed)).run()
        except Exception as error:
            pytest.fail(
                f"seed {seed}: {error!r}\nreplay it with: pytest tests/test_scheduler.py --replay-seed {seed}, "
                f"or python -m tests.simulator {seed}"
            )


def test_simulator_is_deterministic():
    first, second = (Simulation(random_world(7)).run() for _ in range(2))
    assert first.moves == second.moves
    assert first.now_s == second.now_s


# -- hits


def reads_by_step(records, slots, executions, **settings):
    settings.setdefault("optimizers", (((4 * MB,),) * records,))
    simulation = Simulation(World(slots=slots, executions=tuple(executions), **settings)).run()
    scheduler = simulation.scheduler
    assert scheduler.misses == sum(simulation.by_run[i]["reads"] for i in range(len(executions)))
    return [simulation.by_run[i]["reads"] for i in range(len(executions))]


@pytest.mark.parametrize(("records", "slots"), [(12, 1), (12, 4), (12, 11), (12, 12), (36, 12), (10, 5), (7, 2)])
@pytest.mark.parametrize("backwards", [False, True])
def test_all_at_once_misses_what_does_not_fit(records, slots, backwards):
    executions = [Execution(backwards=backwards)] * 5
    assert reads_by_step(records, slots, executions) == [0] + [max(0, records - slots)] * 4


def test_all_at_once_hits_are_counted():
    simulation = Simulation(World(executions=(AT_ONCE,) * 4)).run()
    assert simulation.scheduler.misses == 3 * 24
    assert simulation.scheduler.hits == 3 * 12


@pytest.mark.parametrize(("records", "slots"), [(12, 1), (12, 4), (12, 11), (36, 12), (10, 5), (7, 2)])
@pytest.mark.parametrize("forced", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    "first",
    [[], [AT_ONCE], [AT_ONCE, AT_ONCE], [Execution(backwards=True)], [Execution(Pattern.GAPS, gap_s=0.002)] * 2],
)
def test_forced_order_is_beladys(records, slots, forced, first):
    period = records - 1
    reads = reads_by_step(records, slots, [*first, *[forced] * (3 * period + 2)])
    assert max(reads[1:]) <= records - slots + 1
    for start in (len(first) + 2, len(first) + 2 + period):
        total = sum(reads[start : start + period])
        assert total <= records * (records - slots), "over a period of N - 1 steps: N(N - K) misses"
    mean = sum(reads[len(first) + 2 :][:records]) / records
    assert mean <= math.ceil(records * records * (records - slots) / (records - 1)) / records


def test_gaps_miss_at_most_one_more():
    for gap_s in (0.0005, 0.002, 0.01):
        for backwards in (False, True):
            reads = reads_by_step(36, 12, [Execution(Pattern.GAPS, backwards, gap_s)] * 8)
            assert max(reads[1:]) <= 25, (gap_s, backwards)
            assert min(reads[1:]) >= 24


def test_alternating_saves_what_fits_and_sequential_nothing():
    executions = [AT_ONCE] * 6
    assert reads_by_step(36, 12, executions, order=Order.SEQUENTIAL) == [0] + [36] * 5
    assert reads_by_step(36, 12, executions, order=Order.ALTERNATING) == [0] + [24] * 5


def test_ablation_orders_are_the_models():
    def last_reads(order, count):
        """Of a program that hands over its buckets backwards, which makes no difference."""
        world = World(
            tiers=(TierModel(400 * MB, 400 * MB),),
            slots=4,
            optimizers=(((4 * MB,) * 2,) * 6,),
            executions=(Execution(backwards=True),) * count,
            order=order,
        )
        reads = [record for kind, record, _ in Simulation(world).run().moves if kind == "read"]
        return reads[-12 if order is Order.SEQUENTIAL else -8 :]

    assert last_reads(Order.SEQUENTIAL, 3) == list(range(12))
    assert last_reads(Order.SEQUENTIAL, 4) == list(range(12))
    assert last_reads(Order.ALTERNATING, 4) == list(range(4, 12))
    assert last_reads(Order.ALTERNATING, 5) == list(range(7, -1, -1))


@pytest.mark.parametrize("order", [Order.SEQUENTIAL, Order.ALTERNATING])
def test_ablation_orders_do_not_wait_for_ever(order):
    """A forced program never has all of a step's operations open: the order then is that of their arrival."""
    reads = reads_by_step(12, 4, [FORWARD] * 6, order=order)
    assert reads == [0] + [12] * 5


def test_two_optimizers_share_the_slots():
    optimizers = (((4 * MB,),) * 12, ((4 * MB,),) * 24)
    assert reads_by_step(36, 12, [AT_ONCE] * 5, optimizers=optimizers) == [0] + [24] * 4
    apart = [Execution(optimizers=(i % 2,)) for i in range(12)]
    reads = reads_by_step(36, 12, apart, optimizers=optimizers)
    pairs = [a + b for a, b in zip(reads[2::2], reads[3::2], strict=True)]
    # the first records that one of them evicts are the other's, as many as keep the tiers busy
    assert max(pairs) <= 24 + 4


def test_an_idle_optimizer_gives_up_its_slots():
    """A model that is no longer trained must not hold the memory for ever."""
    optimizers = (((4 * MB,),) * 12, ((4 * MB,),) * 12)
    executions = [Execution(optimizers=(0,))] * 3 + [Execution(optimizers=(1,))] * 8
    reads = reads_by_step(24, 12, executions, optimizers=optimizers)
    assert sum(reads[-3:]) == 0
    back = reads_by_step(24, 12, [*executions, *[Execution(optimizers=(0,))] * 6], optimizers=optimizers)
    assert back[len(executions)] == 12
    assert back[-1] == 0


# -- time

TIMED = {"at once": 0.0, "backward": 0.3}


@pytest.mark.parametrize("pattern", TIMED)
@pytest.mark.parametrize("speeds", [(400, 200), (800, 100)])
@pytest.mark.parametrize("fifo", [True, False])
def test_phase_time_is_near_the_limit(pattern, speeds, fifo):
    """Design section 1: (N - K) records over the sum of the tiers' bandwidths."""
    records, slots, size = 144, 48, 16 * MB
    limit_s = (records - slots) * size / (sum(speeds) * MB)
    gap_s = TIMED[pattern] * limit_s / records
    execution = Execution(Pattern.GAPS if gap_s else Pattern.AT_ONCE, backwards=True, gap_s=gap_s)
    world = World(
        tiers=tuple(TierModel(s * MB, s * MB, latency_s=2e-4, fifo=fifo) for s in speeds),
        slots=slots,
        optimizers=(((size,),) * records,),
        executions=(execution,) * 10,
    )
    simulation = Simulation(world).run()
    times_s = [run.end_s - run.start_s for run in simulation.runs[3:]]
    assert sum(times_s) / len(times_s) <= 1.1 * limit_s


def test_short_phase_time():
    """With 24 records a step, what is left over the limit is one record in and one out of the slower tier."""
    records, slots, size, speeds = 36, 12, 16 * MB, (400 * MB, 200 * MB)
    world = World(slots=slots, optimizers=(((size,),) * records,), executions=(AT_ONCE,) * 10)
    simulation = Simulation(world).run()
    limit_s = (records - slots) * size / sum(speeds)
    edges_s = size / min(speeds) + size / sum(speeds)
    for run in simulation.runs[2:]:
        assert run.end_s - run.start_s <= limit_s + edges_s


def test_shares_follow_the_tiers():
    world = World(executions=(AT_ONCE,) * 10, tiers=tuple(TierModel(s * MB, s * MB, known=False) for s in (400, 200)))
    writes = [tier for kind, _, tier in Simulation(world).run().moves if kind == "write"]
    assert writes[-96:].count(0) / 96 == pytest.approx(2 / 3, abs=0.01)


def test_devices_share_a_tier_fairly():
    world = World(devices=2, executions=(AT_ONCE,) * 5)
    simulation = Simulation(world).run()
    ends = {d: max(run.end_s for run in simulation.runs) for d in range(2)}
    assert [simulation.by_run[i]["reads"] for i in range(5)] == [0, 48, 48, 48, 48]
    assert ends[0] == ends[1]
