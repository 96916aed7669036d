"""The scheduler: a thousand seeds of the simulator, and each rule of it on its own."""

from __future__ import annotations

import itertools
import math

import pytest

from jax_mlp_offload import errors
from jax_mlp_offload.instances import ForeignParams
from jax_mlp_offload.operations import QUIET_GRACE_S
from jax_mlp_offload.placement import TierSpec
from jax_mlp_offload.scheduler import STALL_GRACE_S, Scheduler
from jax_mlp_offload.types import POISON, Complete, Fail, HandBack, Life, Order, Read, Update, Warn, Write
from tests.simulator import Simulation
from tests.worlds import MB, Execution, Pattern, Source, TierModel, World, random_world

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


# -- by hand


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
            itertools.count(1),
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

    def settle(self, write=None, read=None, adopt=False):
        """Carries out what is asked until nothing is left to do; errors by function of the record."""
        while self.open:
            match self.open.pop(0):
                case Update(record, _, fresh):
                    self.updates.append((record.bucket, fresh))
                    self.scheduler.update_done(record, [0] if adopt and not fresh else [], self.now_s)
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


def test_most_recently_updated_is_written_first():
    hand = Hand(buckets=4, slots=3)
    run = next(hand.runs)
    for bucket in (1, 0, 2):
        hand.arrive(bucket, run=run)
        hand.settle()
    hand.arrive(3, run=run)
    assert [action.record.bucket for action in hand.open] == [2]


def test_a_record_that_is_due_stays_until_nothing_else_moves():
    hand = Hand(buckets=2, slots=1)
    ticket = hand.step()
    run = next(hand.runs)
    hand.arrive(0, ticket=ticket, run=run)
    assert not hand.open
    assert hand.scheduler.next_tick_s() == pytest.approx(STALL_GRACE_S)
    hand.now_s = STALL_GRACE_S
    hand.scheduler.tick(hand.now_s)
    hand.take()
    assert [type(action) for action in hand.open] == [Write]
    hand.settle()
    hand.arrive(1, ticket=ticket, run=run)
    hand.settle()
    assert hand.ended[4] == ticket + 1


def test_steps_have_one_new_serial():
    hand = Hand(devices=2, buckets=3, slots=2)
    tickets = [hand.step()]
    for _ in range(4):
        tickets.append(hand.step(tickets[-1]))
    assert tickets == [1, 2, 3, 4, 5]
    assert hand.instance.steps == 5
    assert hand.instance.ledger.latest == 5


def test_failure_ends_all_devices_and_dooms_the_next_step_as_a_whole():
    hand = Hand(devices=2, buckets=3, slots=1)
    ticket = hand.step()
    run = next(hand.runs)
    requests = [hand.arrive(b, d, ticket, run) for d in range(2) for b in range(2)]
    hand.scheduler.tick(STALL_GRACE_S)  # no record is over yet: one that is due has to go
    hand.take()
    hand.settle(read=error_of())
    late = [hand.arrive(2, d, ticket, run) for d in range(2)]
    hand.settle()
    assert hand.ended_with([*requests, *late]) == [POISON] * 6
    assert isinstance(hand.instance.error, errors.TierError)

    run = next(hand.runs)
    requests = []
    for device, bucket in itertools.product(range(2), range(3)):
        assert all(hand.ended.get(request) is None for request in requests), "fails before all came"
        requests.append(hand.arrive(bucket, device, POISON, run))
    messages = set(hand.ended_with(requests))
    assert len(messages) == 1
    assert "No space left" in messages.pop()

    ticket = hand.step(0)
    assert ticket != POISON
    assert hand.instance.error is None
    assert hand.updates[-6:] == [(bucket, True) for bucket, _ in hand.updates[-6:]]
    assert hand.step(ticket) == ticket + 1


def test_a_device_that_did_not_see_the_poison_joins_the_refused_step():
    hand = Hand(devices=2, buckets=1, slots=1)
    ticket = hand.step()
    hand.scheduler.fail_all(errors.TierError("tier 't0' is gone"))
    run = next(hand.runs)
    first = hand.arrive(0, 0, ticket, run)
    assert hand.ended.get(first) is None
    second = hand.arrive(0, 1, POISON, run)
    assert hand.ended_with([first, second]) == ["tier 't0' is gone"] * 2


def test_a_refused_step_that_never_becomes_whole_fails_in_the_end():
    hand = Hand(devices=2, buckets=2, slots=2)
    ticket = hand.step()
    hand.step(ticket)
    run = next(hand.runs)
    requests = [hand.arrive(0, device, ticket, run) for device in range(2)]
    assert hand.ended_with(requests) == [None, None]
    next_s = hand.scheduler.next_tick_s()
    assert next_s == pytest.approx(QUIET_GRACE_S)
    hand.scheduler.tick(next_s)
    hand.take()
    assert all("has ticket 1, but the latest is 2" in message for message in hand.ended_with(requests))
    assert hand.scheduler.quiescent


def test_stale_ticket_names_both_serials():
    hand = Hand(buckets=2, slots=2)
    first = hand.step()
    second = hand.step(first)
    message = hand.step(first)
    assert f"has ticket {first}, but the latest is {second}" in message
    assert "'adam'" in message
    assert hand.step(second) > second, "the right state still works"


def test_poisoned_state_says_so():
    hand = Hand(buckets=2, slots=2)
    ticket = hand.step()
    assert "comes from an update that failed" in hand.step(POISON)
    assert hand.step(ticket) > ticket


def test_two_updates_of_one_state_at_the_same_time():
    hand = Hand(buckets=2, slots=2)
    ticket = hand.step()
    runs = next(hand.runs), next(hand.runs)
    requests = [hand.arrive(b, 0, ticket, run) for b, run in [(0, runs[0]), (1, runs[1]), (1, runs[0]), (0, runs[1])]]
    hand.settle()
    assert hand.ended_with(requests)[2:] == [POISON, POISON]
    assert isinstance(hand.instance.error, errors.StaleTicketError)
    assert "has ticket 1, but the latest is" in hand.step(POISON)


def test_fresh_start_while_the_last_step_runs():
    hand = Hand(buckets=2, slots=2)
    ticket = hand.step()
    run = next(hand.runs)
    old = [hand.arrive(b, 0, ticket, run) for b in range(2)]
    assert len(hand.open) == 2
    run = next(hand.runs)
    new = [hand.arrive(b, 0, 0, run) for b in range(2)]
    assert len(hand.open) == 2, "waits for the operation on the same record"
    hand.settle()
    assert hand.ended_with(old) == [2, 2]
    assert hand.ended_with(new) == [3, 3]
    assert hand.updates[-2:] == [(0, True), (1, True)]
    assert hand.step(3) == 4


def test_reinitialised_optimizer_forgets_what_is_stored():
    hand = Hand(buckets=3, slots=1)
    hand.step(hand.step())
    hand.updates.clear()
    before = hand.scheduler.misses
    ticket = hand.step(0)
    assert {fresh for _, fresh in hand.updates} == {True}
    assert hand.scheduler.misses == before
    assert hand.step(ticket) == ticket + 1


def test_skipped_step_changes_nothing():
    hand = Hand(buckets=3, slots=2)
    ticket = hand.step()
    hand.updates.clear()
    skipped = hand.step(ticket, skip=True)
    assert skipped == ticket + 1
    assert not hand.updates
    assert hand.instance.skipped == 1
    assert [w.category for w in hand.warnings] == [errors.SkippedStepWarning]
    assert hand.step(skipped) == skipped + 1
    assert {fresh for _, fresh in hand.updates} == {False}


def test_skipped_first_step_still_starts_afresh():
    hand = Hand(buckets=2, slots=2)
    hand.step()
    ticket = hand.step(0, skip=True)
    hand.updates.clear()
    hand.step(ticket)
    assert {fresh for _, fresh in hand.updates} == {True}


def test_failure_of_an_older_step_spares_the_one_that_started_afresh():
    hand = Hand(buckets=3, slots=1)
    ticket = hand.step()
    run = next(hand.runs)
    old = [hand.arrive(bucket, 0, ticket, run) for bucket in (0, 2)]
    run = next(hand.runs)
    new = [hand.arrive(1, 0, 0, run)]
    hand.wait_out(read=error_of())
    assert hand.ended[old[0]] == POISON
    assert hand.instance.error is None
    new += [hand.arrive(bucket, 0, 0, run) for bucket in (0, 2)]
    hand.settle()
    assert hand.ended_with(new) == [3, 3, 3]
    assert hand.step(3) == 4


def test_record_that_is_waited_for_is_not_read_ahead_as_well():
    hand = Hand(buckets=6, slots=4)
    ticket = 0
    for _ in range(3):
        ticket = hand.step(ticket)
    stored = [record.bucket for record in hand.scheduler.records if record.life is Life.STORED]
    resident = next(record.bucket for record in hand.scheduler.records if record.life is Life.DIRTY)
    runs = next(hand.runs), next(hand.runs)
    first = hand.arrive(stored[0], 0, ticket, runs[0])
    second = hand.arrive(resident, 0, ticket, runs[1])
    before = hand.scheduler.misses
    hand.settle()
    hand.scheduler.tick(1.0)
    hand.take()
    hand.settle()
    assert hand.ended_with([first, second]) == [4, 5]
    assert hand.scheduler.misses - before <= len(stored)


def test_records_of_a_skipped_step_are_over():
    """Another optimizer may have their slots at once."""
    scheduler = Scheduler([TierSpec("t")])
    scheduler.add_slots(0, range(1))
    for number in range(2):
        scheduler.add_instance(number, f"opt{number}", [0], [[100]], lambda b, s: ["w"], lambda b, leaf: "w")
    scheduler.arrived(1, 0, 0, 0, 1, 0, False, 0.0)
    (update,) = scheduler.take_actions()
    scheduler.update_done(update.record, [], 0.0)
    (complete,) = scheduler.take_actions()
    scheduler.arrived(2, 0, 0, 0, 2, complete.ticket, True, 0.0)
    scheduler.take_actions()
    scheduler.handed_back(2, 0.0)
    scheduler.take_actions()
    scheduler.arrived(3, 1, 0, 0, 3, 0, False, 0.0)
    assert [type(action) for action in scheduler.take_actions()] == [Write]


# -- replaced params


def test_foreign_params_are_adopted_once():
    hand = Hand(buckets=2, slots=2)
    ticket = hand.step()
    ticket = hand.step(ticket, adopt=True)
    assert hand.instance.adopted == 1
    assert [w.category for w in hand.warnings] == [errors.ForeignParamsWarning]
    assert "w0, w1" in hand.warnings[0].message
    ticket = hand.step(ticket)
    ticket = hand.step(ticket, adopt=True)
    assert hand.instance.adopted == 2
    assert hand.instance.error is None


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("skip_between", [False, True])
def test_foreign_params_twice_running_are_refused(devices, skip_between):
    hand = Hand(buckets=2, slots=2, devices=devices)
    ticket = hand.step(hand.step(), adopt=True)
    if skip_between:
        ticket = hand.step(ticket, skip=True)
    result = hand.step(ticket, adopt=True)
    assert isinstance(hand.instance.error, errors.ForeignParamsError)
    if devices == 1:
        assert "A transform after" in str(result), "one device raises at once"
    else:
        assert POISON in (result if isinstance(result, set) else {result})
        assert "A transform after" in hand.step(POISON)
    assert hand.instance.adopted == 1
    assert hand.step(0) not in (POISON, None)
    assert hand.instance.error is None


def test_foreign_params_policies():
    hand = Hand(buckets=2, slots=2, foreign=ForeignParams.ADOPT)
    ticket = hand.step()
    for _ in range(3):
        ticket = hand.step(ticket, adopt=True)
    assert hand.instance.adopted == 3
    assert not hand.warnings
    hand = Hand(buckets=2, slots=2, foreign=ForeignParams.ERROR)
    assert "are not what the last update left" in str(hand.step(hand.step(), adopt=True))
    assert isinstance(hand.instance.error, errors.ForeignParamsError)


# -- tiers that fail


def test_record_of_a_tier_that_fails_goes_to_another():
    hand = Hand(tiers=2, buckets=4, slots=1)

    def broken(record):
        return error_of()(record) if record.tier == 0 else None

    ticket = hand.step(write=broken)
    assert ticket == 1
    assert hand.scheduler.placement.tiers[0].retired
    assert [w.category for w in hand.warnings] == [errors.TierWarning]
    assert "No space left" in hand.warnings[0].message
    assert "writes go to t1" in hand.warnings[0].message
    assert hand.step(ticket) == 2
    assert {record.tier for record in hand.scheduler.records if record.life is Life.STORED} == {1}


def test_last_tier_that_fails_names_the_cause():
    hand = Hand(buckets=3, slots=1)
    assert POISON in (hand.step(write=error_of()), POISON)
    assert "No space left" in str(hand.instance.error)
    assert "no other is left" in hand.warnings[0].message
    assert hand.scheduler.quiescent


def test_capacity_is_kept_and_a_full_store_says_so():
    specs = [TierSpec("small", capacity_bytes=200), TierSpec("large", capacity_bytes=400)]
    hand = Hand(specs=specs, buckets=7, slots=1)
    assert hand.step() == 1
    assert [tier.stored_bytes for tier in hand.scheduler.placement.tiers] == [200, 400]
    hand = Hand(specs=specs, buckets=8, slots=1)
    hand.step()
    assert "no tier has room for 100 bytes" in str(hand.instance.error)
    assert "w" in str(hand.instance.error)
    hand = Hand(specs=[], buckets=2, slots=1)
    hand.step()
    assert "no tier has room" in str(hand.instance.error)


def test_device_waits_for_room_that_another_is_about_to_free():
    hand = Hand(specs=[TierSpec("tight", capacity_bytes=300)], devices=2, buckets=2, slots=1)
    ticket = 0
    for _ in range(4):
        ticket = hand.step(ticket)
    assert ticket == 4
    hand = Hand(specs=[TierSpec("too tight", capacity_bytes=200)], devices=2, buckets=2, slots=1)
    hand.step(hand.step())
    assert "no tier has room" in str(hand.instance.error)


def test_write_without_answer_retires_the_tier_and_the_step_goes_on():
    hand = Hand(tiers=2, buckets=4, slots=2, deadline_s=5.0)
    run = next(hand.runs)
    requests = [hand.arrive(b, 0, 0, run) for b in range(4)]
    hung = []
    while hand.open:
        if isinstance(hand.open[0], Write) and hand.open[0].record.tier == 0:
            hung.append(hand.open.pop(0).record)
            continue
        head, hand.open = hand.open[:1], hand.open[1:]
        rest, hand.open = hand.open, head
        match hand.open.pop():
            case Update(record, _, _):
                hand.scheduler.update_done(record, [], 0.0)
            case Write(record):
                hand.scheduler.write_done(record, 0, None, 0.0)
        hand.open = rest
        hand.take()
    assert hung
    while (next_s := hand.scheduler.next_tick_s()) is not None and next_s <= 5.0 + STALL_GRACE_S:
        hand.now_s = max(next_s, hand.now_s)
        hand.scheduler.tick(hand.now_s)
        hand.take()
        hand.open = [a for a in hand.open if not (isinstance(a, Write) and a.record.tier == 0)]
        hand.settle()
    assert all(ticket == 1 for ticket in hand.ended_with(requests))
    assert "gave no answer for 5 s while writing" in hand.warnings[0].message
    assert hand.scheduler.quiescent
    # its record cannot be used while the request still has the slot
    message = hand.step(1)
    assert POISON in (message if isinstance(message, set) else {message})
    assert isinstance(hand.instance.error, errors.DeadlineError)
    for record in hung:
        hand.scheduler.write_done(record, 0, None, hand.now_s)
    hand.take()
    ticket = hand.step(0)
    assert ticket not in (POISON, None)
    assert hand.step(ticket) == ticket + 1


def test_read_without_answer_fails_by_the_deadline():
    hand = Hand(buckets=2, slots=1, deadline_s=5.0)
    ticket = hand.step()
    run = next(hand.runs)
    requests = [hand.arrive(b, 0, ticket, run) for b in range(2)]
    while not any(isinstance(action, Read) for action in hand.open):
        head = hand.open.pop(0)
        match head:
            case Update(record, _, _):
                hand.scheduler.update_done(record, [], hand.now_s)
            case Write(record):
                hand.scheduler.write_done(record, 0, None, hand.now_s)
        hand.take()
    read = hand.open.pop(0)
    assert hand.scheduler.next_tick_s() == pytest.approx(5.0)
    hand.now_s = 5.0
    hand.scheduler.tick(hand.now_s)
    hand.take()
    hand.settle()
    assert hand.ended[requests[0]] == POISON
    assert "gave no answer for 5 s while reading" in str(hand.instance.error)
    assert hand.scheduler.quiescent
    hand.scheduler.read_done(read.record, None, 6.0)
    hand.take()
    assert sorted(hand.scheduler.devices[0].free + [r.slot for r in hand.scheduler.records if r.slot is not None]) == [
        0
    ]


def test_fail_all_ends_everything():
    hand = Hand(devices=2, buckets=2, slots=1)
    ticket = hand.step()
    stale = hand.arrive(0, 0, 99)
    running = [hand.arrive(0, device, ticket, 50) for device in range(2)]
    hand.scheduler.fail_all(errors.ClosedError("the store is closed"))
    hand.take()
    hand.settle()
    assert all(hand.ended.get(request) is not None for request in [stale, *running])
    assert hand.scheduler.quiescent


def test_device_that_is_a_step_ahead():
    """Devices need not be in the same step: a record is over once its own device's operation came."""
    world = World(
        devices=2,
        executions=(AT_ONCE,) * 6,
        barrier=False,
        lag_s=0.2,
        tiers=(TierModel(400 * MB, 400 * MB), TierModel(200 * MB, 200 * MB)),
    )
    simulation = Simulation(world).run()
    total = sum(counts["reads"] for counts in simulation.by_run.values())
    assert total == 5 * 48


def test_unasked_restart_and_replay_in_mid_run():
    executions = [AT_ONCE] * 3
    executions += [Execution(source=Source.STALE), AT_ONCE, Execution(source=Source.ZERO_UNASKED), AT_ONCE]
    simulation = Simulation(World(devices=2, executions=tuple(executions), may_fail=True)).run()
    assert any("has ticket" in message for message in simulation.failures)
    assert not any(call.ended != "completed" for call in simulation.runs[-1].calls)
