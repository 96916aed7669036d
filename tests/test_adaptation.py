"""How the split follows the tiers' bandwidth, and how near the limit steps get: simulated.

The limit of a step is that of design section 1: N - K records of b bytes over the sum of what each device sustains each
way, min(R, W) if it is duplex and 1/(1/R + 1/W) if one budget serves both. An ideal share is a device's part of that sum.
"""

from __future__ import annotations

import dataclasses

import pytest

from jax_mlp_offload.placement import QUEUE
from tests.simulator import Simulation
from tests.worlds import MB, Execution, TierModel, World

NEAR = 0.03  # of a share


def simulate(tiers, steps, records=144, slots=48, size=4 * MB, compute_s=0.01):
    """Steps with all gradients at hand."""
    return Simulation(
        World(
            tiers=tuple(tiers),
            slots=slots,
            optimizers=(((size,),) * records,),
            executions=(Execution(backwards=True),) * steps,
            compute_s=compute_s,
            deadline_s=1e6,
        )
    ).run()


def sustained_bps(model, read_bps=None, write_bps=None):
    """What a device moves each way when it reads as much as it writes."""
    read_bps, write_bps = read_bps or model.read_bps, write_bps or model.write_bps
    return min(read_bps, write_bps) if model.duplex else 1 / (1 / read_bps + 1 / write_bps)


def share(simulation, run, what, tier=0):
    counts = simulation.tiers_by_run[run, what]
    return counts[tier] / counts.total()


def over_limit(simulation, first=3):
    """Time of each step from the ``first`` on, in parts of the limit."""
    world = simulation.world
    size, records = world.optimizers[0][0][0], len(world.optimizers[0])
    devices = {model.device if model.device is not None else f"own {i}": model for i, model in enumerate(world.tiers)}
    limit_s = (records - world.slots) * size / sum(map(sustained_bps, devices.values()))
    return [(run.end_s - run.start_s) / limit_s for run in simulation.runs[first:]]


def mean(values):
    return sum(values) / len(values)


# -- bandwidth that changes


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("duplex", [True, False])
@pytest.mark.parametrize("fifo", [True, False])
@pytest.mark.parametrize("drop_s", [4.0, 4.3])
def test_split_follows_a_drop_and_a_recovery(known, duplex, fifo, drop_s):
    """Writes after one full step, reads (of what was written then) after two.

    Where one budget serves both ways, a step that reads and writes unequal parts shows either way as wrong: such a device
    is near after one step, and right after four.
    """
    drop_s = drop_s if duplex else 2 * drop_s
    back_s = drop_s + (10.0 if duplex else 20.0)
    changes = ((drop_s, 100 * MB, 100 * MB), (back_s, 400 * MB, 400 * MB))
    first = TierModel(400 * MB, 400 * MB, changes=changes, duplex=duplex, fifo=fifo, known=known)
    other = TierModel(200 * MB, 200 * MB, duplex=duplex, fifo=fifo, known=known)
    simulation = simulate([first, other], 24)
    for (since_s, bps), until_s in zip([(0.0, 400), (drop_s, 100), (back_s, 400)], [drop_s, back_s, 1e9], strict=True):
        ideal = bps / (bps + 200)
        steps = [run.number for run in simulation.runs[1:] if run.start_s >= since_s and run.end_s <= until_s]
        assert len(steps) >= (4 if duplex else 5), "the next change comes before this one can be followed"
        for full_steps, number in enumerate(steps):
            tolerance = NEAR if duplex or full_steps >= 4 else 3 * NEAR
            if full_steps >= 1:
                assert share(simulation, number, "writes") == pytest.approx(ideal, abs=tolerance), number
            if full_steps >= 2:
                before = NEAR if duplex or full_steps >= 5 else 3 * NEAR
                assert share(simulation, number, "reads") == pytest.approx(ideal, abs=before), number


@pytest.mark.parametrize("factor", [0.1, 0.5, 2.0])
def test_split_follows_within_the_step(factor):
    """A step that takes long must not keep to its split till its end."""
    bps = 100 * MB * factor
    other = TierModel(100 * MB, 100 * MB, known=False)
    tiers = [dataclasses.replace(other, changes=((4.0, bps, bps),)), other]
    simulation = simulate(tiers, 4, records=400, slots=40, size=16 * MB)  # steps of half a minute
    assert simulation.runs[0].start_s < 4.0 < simulation.runs[0].end_s / 4
    ideal = factor / (1 + factor)
    assert abs(share(simulation, 0, "writes") - ideal) < abs(0.5 - ideal) / 2
    assert share(simulation, 1, "writes") == pytest.approx(ideal, abs=NEAR)


# -- unequal tiers

CASES = {
    "equal": ((400, 400), (400, 400)),
    "400 + 200": ((400, 400), (200, 200)),
    "reads and writes apart": ((600, 300), (200, 300)),
    "800 + 100": ((800, 800), (100, 100)),
    "400 + 50": ((400, 400), (50, 50)),
    "three": ((400, 400), (200, 200), (50, 50)),
}


@pytest.mark.parametrize(("records", "fifo"), [(144, True), (144, False), (252, False)])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("duplex", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_steady_steps_are_near_the_limit(case, duplex, known, records, fifo):
    """About 100 and 180 records leave memory in a step."""
    tiers = [
        TierModel(read * MB, write * MB, duplex=duplex, known=known, fifo=fifo, latency_s=2e-4)
        for read, write in CASES[case]
    ]
    simulation = simulate(tiers, 6, records=records, slots=48 if records == 144 else 72, size=16 * MB)
    assert max(over_limit(simulation)) <= 1.1
    total_bps = sum(map(sustained_bps, tiers))
    for i, model in enumerate(tiers):
        written = mean([share(simulation, run, "writes", i) for run in range(3, 6)])
        assert written == pytest.approx(sustained_bps(model) / total_bps, abs=NEAR)


@pytest.mark.parametrize("fifo", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_first_step_splits_by_write_speed_though_nothing_is_known(case, fifo):
    tiers = [TierModel(read * MB, write * MB, known=False, fifo=fifo) for read, write in CASES[case]]
    simulation = simulate(tiers, 1)
    total_bps = sum(model.write_bps for model in tiers)
    run = simulation.runs[0]
    edge_s = (
        QUEUE * 4 * MB / min(model.write_bps for model in tiers)
    )  # what the slowest still has when all is given out
    assert run.end_s - run.start_s <= 96 * 4 * MB / total_bps + edge_s
    for i, model in enumerate(tiers):
        assert share(simulation, 0, "writes", i) == pytest.approx(model.write_bps / total_bps, abs=NEAR)


def test_slow_tier_is_measured_in_every_step():
    fast = TierModel(800 * MB, 800 * MB)
    slow = TierModel(2 * MB, 2 * MB, changes=((30.0, 800 * MB, 800 * MB),))
    simulation = simulate([fast, slow], 60)
    assert all(simulation.tiers_by_run[run, "writes"][1] >= 1 for run in range(60))
    assert share(simulation, 59, "writes") == pytest.approx(0.5, abs=NEAR), "so it is found to be fast again"


# -- throttles


@pytest.mark.parametrize("compute_s", [0.01, 0.5])
@pytest.mark.parametrize("size", [4 * MB, 16 * MB])
@pytest.mark.parametrize("duplex", [True, False])
@pytest.mark.parametrize("case", ["equal", "400 + 200", "800 + 100"])
def test_throttles_that_grant_slices_do_not_mislead(case, duplex, size, compute_s):
    """Slices of 100 ms, one of which passes free after the pause between two steps."""
    tiers = [TierModel(r * MB, w * MB, duplex=duplex, known=False, slice_s=0.1) for r, w in CASES[case]]
    simulation = simulate(tiers, 10, size=size, compute_s=compute_s)
    assert mean(over_limit(simulation)) <= 1.1
    ideal = sustained_bps(tiers[0]) / sum(map(sustained_bps, tiers))
    assert mean([share(simulation, run, "writes") for run in range(3, 10)]) == pytest.approx(ideal, abs=NEAR)


# -- shared devices and long queues


@pytest.mark.parametrize("known", [True, False])
def test_tiers_of_one_device_get_its_bandwidth_together(known):
    """As three devices they would be given a third each of what two devices do."""
    one = TierModel(400 * MB, 400 * MB, device=1, known=known)
    simulation = simulate([one, one, TierModel(200 * MB, 200 * MB, known=known)], 8)
    assert max(over_limit(simulation)) <= 1.1
    for i in range(3):
        assert share(simulation, 7, "writes", i) == pytest.approx(1 / 3, abs=NEAR)


def test_tier_that_dies_leaves_its_device_to_the_other():
    one = TierModel(400 * MB, 400 * MB, device=1)
    tiers = [dataclasses.replace(one, dies_s=2.0), one, TierModel(200 * MB, 200 * MB)]
    simulation = simulate(tiers, 12)
    assert [tier.retired for tier in simulation.scheduler.placement.tiers] == [True, False, False]
    assert share(simulation, 11, "writes", 1) == pytest.approx(2 / 3, abs=NEAR)
    assert over_limit(simulation)[-1] <= 1.1


@pytest.mark.parametrize(("records", "slots", "gain"), [(36, 12, 1.0), (144, 48, 1.0), (600, 200, 1.1)])
@pytest.mark.parametrize("latency_s", [0.02, 0.1])
def test_long_queue_hides_latency_and_never_costs(records, slots, gain, latency_s):
    """A remote tier beside a local one. A queue that is long for the step would hold slots that the other needs."""

    def time(queue):
        local = TierModel(400 * MB, 400 * MB, known=False)
        remote = TierModel(200 * MB, 200 * MB, latency_s=latency_s, fifo=False, known=False, queue=queue)
        return mean(over_limit(simulate([local, remote], 7, records=records, slots=slots)))

    assert time(2) >= (gain if latency_s == 0.1 else 1.0) * time(16)
