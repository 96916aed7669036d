"""Room in a tier: capacity, and what is free on its file system."""

from __future__ import annotations

import errno

import pytest

from jax_mlp_offload import errors
from jax_mlp_offload.placement import Placement, TierSpec
from jax_mlp_offload.types import Life, Update, Write
from tests.hand import Hand
from tests.simulator import Simulation
from tests.worlds import MB, Execution, TierModel, World


def write(placement, tier, size_bytes, record=None):
    placement.write_begins(tier, size_bytes, 0.0, record)
    placement.write_ends(tier, size_bytes, 1.0, True)


def read(placement, tier, size_bytes):
    placement.read_begins(tier, size_bytes, 0.0)
    placement.read_ends(tier, size_bytes, 1.0, True)


def test_file_system_that_fills_up_takes_no_more():
    placement = Placement([TierSpec("a", free_bytes=25)])
    tier = placement.tiers[0]
    write(placement, 0, 10)
    assert tier.has_room(10)
    placement.write_begins(0, 10, 0.0)
    assert not tier.has_room(10), "what is on its way counts"
    assert placement.choose_write(10) is None and not placement.can_write(10)
    placement.write_ends(0, 10, 1.0, True)
    assert tier.files.system.free_bytes == 5
    assert not tier.has_room(10)
    assert tier.has_room(5)


def test_record_that_moved_on_leaves_its_file():
    placement = Placement([TierSpec("a", free_bytes=20)])
    write(placement, 0, 10)
    write(placement, 0, 10)
    assert not placement.tiers[0].has_room(10)
    read(placement, 0, 10)
    assert placement.tiers[0].has_room(10), "over the file of the one that was read"
    assert not placement.tiers[0].has_room(8), "of another size: that file stays"
    write(placement, 0, 10)
    assert placement.tiers[0].files.held_bytes == placement.tiers[0].files.stored_bytes == 20
    assert placement.tiers[0].files.system.free_bytes == 0, "it took no new space"


def test_space_that_comes_back_is_used():
    placement = Placement([TierSpec("a", free_bytes=10)])
    system = placement.tiers[0].files.system
    write(placement, 0, 10)
    assert not placement.tiers[0].has_room(10)
    system.seen(30)
    assert placement.tiers[0].has_room(10)
    system.seen(None)
    assert placement.tiers[0].has_room(10), "nobody looked"
    system.seen(9)
    assert not placement.tiers[0].has_room(10), "a neighbour took it"


def test_large_files_leave_room_for_their_maps():
    placement = Placement([TierSpec("a", free_bytes=MB)])
    assert not placement.tiers[0].has_room(MB)
    assert placement.tiers[0].has_room(MB - MB // 200)


def test_ample_space_and_unknown_space_refuse_nothing():
    for placement in (Placement([TierSpec("a")]), Placement([TierSpec("a", free_bytes=10**15)])):
        for size in (1, MB, 700 * MB):
            for _ in range(20):
                assert placement.tiers[0].has_room(size)
                write(placement, 0, size)


def test_capacity_holds_beside_free_space():
    placement = Placement(
        [TierSpec("a", capacity_bytes=30, free_bytes=20), TierSpec("b", capacity_bytes=10, free_bytes=99)]
    )
    write(placement, 0, 10)
    write(placement, 0, 10)
    assert not placement.tiers[0].has_room(10), "no space, though capacity"
    placement.tiers[0].files.system.seen(50)
    write(placement, 0, 10)
    assert not placement.tiers[0].has_room(10), "no capacity, though space"
    read(placement, 0, 10)
    assert placement.tiers[0].has_room(10)
    write(placement, 1, 10)
    assert not placement.tiers[1].has_room(10)


@pytest.mark.parametrize("settings", [{"device": 1}, {"file_system": 7}])
def test_tiers_of_one_file_system_share_what_is_free(settings):
    placement = Placement([TierSpec("a", free_bytes=25, **settings), TierSpec("b", free_bytes=25, **settings)])
    write(placement, 0, 10)
    write(placement, 1, 10)
    assert not placement.tiers[0].has_room(10)
    read(placement, 1, 10)
    assert placement.tiers[1].has_room(10)
    assert not placement.tiers[0].has_room(10), "the file is the other folder's"
    apart = Placement([TierSpec("a", free_bytes=25), TierSpec("b", free_bytes=25)])
    write(apart, 0, 20)
    assert apart.tiers[1].has_room(20)


def test_record_that_starts_afresh_keeps_its_file():
    placement = Placement([TierSpec("a", free_bytes=10), TierSpec("b")])
    write(placement, 0, 10, record=3)
    placement.give_up(0, 10, 3)
    assert placement.tiers[0].files.stored_bytes == 0
    assert placement.tiers[0].has_room(10, 3)
    assert not placement.tiers[0].has_room(10, 4), "the file is still that of record 3"
    write(placement, 1, 10, record=3)
    assert placement.tiers[0].has_room(10, 4), "it lives elsewhere now"


# -- with the scheduler


def test_full_tier_is_not_retired_and_the_others_take_the_rest():
    hand = Hand(specs=[TierSpec("full", free_bytes=250), TierSpec("large")], buckets=6, slots=1)
    ticket = 0
    for _ in range(4):
        ticket = hand.step(ticket)
    small, large = hand.scheduler.placement.tiers
    assert not small.retired
    assert len(hand.warnings) == 1 and "takes no new records until there is room" in hand.warnings[0].message
    assert small.files.held_bytes == 200
    assert small.written.requests > 2, "its files are written again"
    assert large.files.stored_bytes >= 300


def test_full_store_says_so_and_goes_on_once_there_is_space():
    hand = Hand(specs=[TierSpec("full", free_bytes=250)], buckets=4, slots=1)
    hand.step()
    assert "no tier has room for 100 bytes" in str(hand.instance.error)
    hand.scheduler.space_seen(0, 1000, hand.now_s)
    assert hand.step() > 0
    assert hand.instance.error is None
    assert sum(record.life is Life.STORED for record in hand.scheduler.records) == 3


def test_write_refused_for_want_of_room_shuts_the_tier_until_there_is_some():
    """A file may be taken over, but nothing made beside it: say, the directory of another optimizer."""
    hand = Hand(specs=[TierSpec("full", free_bytes=250), TierSpec("large")], buckets=4, slots=1)
    ticket = hand.step()
    full = hand.scheduler.placement.tiers[0]
    hand.scheduler.space_seen(0, 0, hand.now_s)
    refused = []

    def no_space(record):
        if record.tier == 0:
            refused.append(record)
            return errors.of_transfer("No space left on device", errno.ENOSPC)
        return None

    ticket = hand.step(ticket, write=no_space)
    assert len(refused) == 1, "it is not asked again"
    assert not full.retired
    assert ["takes no new records until there is room" in w.message for w in hand.warnings] == [True]
    written = full.written.requests
    hand.scheduler.space_seen(0, 1000, hand.now_s)
    assert hand.step(ticket) > ticket
    assert full.written.requests > written, "it is used again"


def test_write_refused_for_want_of_room_that_seems_to_be_there_retires_the_tier():
    hand = Hand(specs=[TierSpec("odd", free_bytes=10**6), TierSpec("large")], buckets=4, slots=1)

    def no_space(record):
        return errors.of_transfer("No space left on device", errno.ENOSPC) if record.tier == 0 else None

    assert hand.step(write=no_space) == 1
    assert hand.scheduler.placement.tiers[0].retired
    assert "the tier is retired" in hand.warnings[0].message


def test_space_that_comes_back_lets_a_waiting_device_go_on():
    hand = Hand(specs=[TierSpec("full", free_bytes=100)], buckets=4, slots=2)
    run = next(hand.runs)
    requests = [hand.arrive(b, run=run) for b in range(4)]
    for update in [action for action in hand.open if isinstance(action, Update)]:
        hand.open.remove(update)
        hand.scheduler.update_done(update.record, [], hand.now_s)
        hand.take()
    assert [type(action) for action in hand.open] == [Write], "the other waits for room"
    hand.scheduler.space_seen(0, 300, hand.now_s)
    hand.take()
    assert [type(action) for action in hand.open] == [Write, Write]
    hand.settle()
    assert hand.ended_with(requests) == [1] * 4


def test_what_transfers_see_is_taken_up():
    hand = Hand(specs=[TierSpec("a")], buckets=2, slots=1)
    run = next(hand.runs)
    for bucket in range(2):
        hand.arrive(bucket, run=run)
    while not isinstance(hand.open[0], Write):
        update = hand.open.pop(0)
        hand.scheduler.update_done(update.record, [], hand.now_s)
        hand.take()
    record = hand.open.pop(0).record
    hand.scheduler.write_done(record, 0, None, 3.0, 1.0, 12345)
    tier = hand.scheduler.placement.tiers[0]
    assert tier.files.system.free_bytes == 12345
    assert tier.written.mean_queue_s == pytest.approx(1.0), "it was given out at 0 and begun at 1"
    hand.take()
    hand.settle()


def test_no_write_meets_a_full_file_system():
    """The simulator's files take space as folders do; it checks every write."""
    tiers = (
        TierModel(400 * MB, 400 * MB, free_bytes=33 * MB),
        TierModel(200 * MB, 200 * MB, free_bytes=1000 * MB),
    )
    world = World(tiers=tiers, executions=(Execution(),) * 8)
    simulation = Simulation(world).run()
    full = simulation.scheduler.placement.tiers[0]
    assert not full.retired
    assert ["takes no new records" in warning.message for warning in simulation.warnings] == [True]
    assert full.files.held_bytes == 32 * MB == 33 * MB - simulation.disks[0].free_bytes
    assert simulation.no_space == 0


def test_neighbours_space_is_used_when_it_is_given_back():
    taken = 80 * MB
    model = TierModel(400 * MB, 400 * MB, free_bytes=100 * MB, neighbour=((0.0, taken), (1.0, -taken)))
    world = World(tiers=(model, TierModel(200 * MB, 200 * MB)), executions=(Execution(),) * 20)
    simulation = Simulation(world).run()
    writes = [tier for kind, _, tier in simulation.moves if kind == "write"]
    assert writes[24:48].count(0) < 10
    assert writes[-24:].count(0) == 16, "two thirds, as its bandwidth is"
    assert not any(tier.retired for tier in simulation.scheduler.placement.tiers)
