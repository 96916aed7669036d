"""The scheduler by hand: tiers that fail, are full or give no answer, and programs out of step."""

from __future__ import annotations

import pytest

from jax_mlp_offload import errors
from jax_mlp_offload.placement import TierSpec
from jax_mlp_offload.scheduler import STALL_GRACE_S
from jax_mlp_offload.types import POISON, Life, Read, Update, Write
from tests.hand import Hand, error_of
from tests.simulator import Simulation
from tests.worlds import MB, Execution, Source, TierModel, World

# -- tiers that fail

AT_ONCE = Execution()


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


def test_update_that_fails_ends_the_step_as_a_failed_read_does():
    hand = Hand(devices=2, buckets=3, slots=2)
    ticket = hand.step()
    updates = iter(range(100))

    def broken(record):
        return errors.AcceleratorError("copy_to_host failed") if next(updates) == 1 else None

    run = next(hand.runs)
    requests = [hand.arrive(b, d, ticket, run) for b in range(3) for d in range(2)]
    hand.settle(update=broken)
    assert POISON in hand.ended_with(requests)
    assert None not in hand.ended_with(requests)
    assert isinstance(hand.instance.error, errors.AcceleratorError)
    assert "copy_to_host failed. Alive are" in str(hand.instance.error)
    assert hand.scheduler.quiescent
    refused = hand.step(POISON)
    assert "copy_to_host failed" in refused
    assert hand.step(0) > ticket, "afresh"
    assert hand.instance.error is None


def test_capacity_is_kept_and_a_full_store_says_so():
    specs = [TierSpec("small", capacity_bytes=200), TierSpec("large", capacity_bytes=400)]
    hand = Hand(specs=specs, buckets=7, slots=1)
    assert hand.step() == 1
    assert [tier.files.stored_bytes for tier in hand.scheduler.placement.tiers] == [200, 400]
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


def test_time_in_which_the_process_stood_still_is_not_storage_time():
    hand = Hand(deadline_s=60.0)
    ticket = hand.step()
    requests = [hand.arrive(bucket, ticket=ticket, run=77) for bucket in range(3)]
    assert hand.open  # storage has been asked for something
    hand.scheduler.suspended(1000.0)
    hand.now_s = 1000.0
    hand.scheduler.tick(hand.now_s)
    hand.take()
    assert not hand.warnings
    hand.wait_out()
    assert set(hand.ended_with(requests)) == {ticket + 1}
