"""The scheduler by hand: tickets, refused steps, restarts and replaced params, event by event."""

from __future__ import annotations

import itertools

import pytest

from jax_mlp_offload import errors
from jax_mlp_offload.instances import ForeignParams
from jax_mlp_offload.operations import DOOM_GRACE_S, QUIET_GRACE_OF_SEVERAL_S, QUIET_GRACE_S
from jax_mlp_offload.placement import TierSpec
from jax_mlp_offload.scheduler import STALL_GRACE_S, Scheduler
from jax_mlp_offload.types import POISON, Life, Write
from tests.hand import Hand, error_of


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
    assert hand.ended_with([first, second]) == [f"tier 't0' is gone. {errors.GO_ON}"] * 2


@pytest.mark.parametrize(
    ("devices", "spans", "grace_s"),
    [(1, False, QUIET_GRACE_S), (2, False, QUIET_GRACE_OF_SEVERAL_S), (1, True, DOOM_GRACE_S), (2, True, DOOM_GRACE_S)],
)
def test_a_refused_step_that_never_becomes_whole_fails_in_the_end(devices, spans, grace_s):
    """Where other processes take part, they may need this one's collectives until their operations come."""
    hand = Hand(devices=devices, buckets=2, slots=2, spans=spans)
    ticket = hand.step()
    hand.step(ticket)
    run = next(hand.runs)
    requests = [hand.arrive(0, device, ticket, run) for device in range(devices)]
    assert hand.ended_with(requests) == [None] * devices
    next_s = hand.scheduler.next_tick_s()
    assert next_s == pytest.approx(grace_s)
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


# -- several processes


def agree(hand, mine, ticket):
    for device in range(hand.devices):
        hand.scheduler.agreed(0, device, mine, ticket, hand.now_s)
    hand.take()


def test_a_failure_in_another_process_is_known_at_once():
    hand = Hand(devices=2, buckets=2, slots=2, spans=True)
    first = hand.step()
    agree(hand, first, first + 100)
    second = hand.step(first + 100)
    assert second == first + 101
    assert hand.instance.error is None
    agree(hand, second, POISON)
    assert "failed in another process" in str(hand.instance.error)
    assert "failed in another process" in hand.step(POISON)
    fresh = hand.step()
    assert isinstance(fresh, int)
    assert hand.instance.error is None


@pytest.mark.parametrize("devices", [1, 2])
def test_what_this_process_alone_knows_ends_by_poison(devices):
    """The others would wait for it in a collective; they refuse the step after together with it."""
    hand = Hand(devices=devices, buckets=2, slots=2, spans=True)
    first = hand.step()
    agree(hand, first, first)
    hand.scheduler.fail_all(errors.TierError("tier 't0' is gone"))
    assert hand.step(first) == POISON
    agree(hand, POISON, POISON)
    assert hand.step(POISON) == f"tier 't0' is gone. {errors.GO_ON}"
    # a replay that all see is refused by all, broken or not
    assert hand.step(first + 77) == f"tier 't0' is gone. {errors.GO_ON}"


def test_misuse_found_by_one_kernel_does_not_raise_on_a_lone_device():
    """Without other processes it would, in the step itself."""
    for spans in (False, True):
        hand = Hand(devices=1, buckets=1, slots=1, spans=spans, foreign=ForeignParams.ERROR)
        ticket = hand.step()
        agree(hand, ticket, ticket)
        result = hand.step(ticket, adopt=True)
        assert (result == POISON) if spans else ("16-bit params" in result)
