"""Tickets: which step an operation belongs to, and whether it may run."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_mlp_offload.ledger import MAX_OPEN_STEPS, Ledger
from jax_mlp_offload.types import POISON


def ledger(buckets=2, devices=(0, 1)):
    return Ledger("adam", buckets, devices, first=1)


def admit_all(ledger, run_id, ticket, keys=None):
    keys = keys or list(itertools.product(range(2), (0, 1)))
    return [ledger.admit(bucket, device, run_id, ticket) for bucket, device in keys]


def test_operations_of_an_execution_are_one_step():
    book = ledger()
    steps = admit_all(book, 7, 0)
    assert len(set(map(id, steps))) == 1
    assert steps[0].serial == 1
    assert book.all_here(steps[0])
    assert not book.open_steps()
    assert [book.completed(steps[0]) for _ in range(4)] == [False, False, False, True]


def test_next_step_follows_the_last():
    book = ledger()
    admit_all(book, 1, 0)
    (step, *_) = admit_all(book, 2, 1)
    assert (step.serial, step.doomed, step.failed) == (2, None, False)
    assert book.latest == 2


def test_iterations_of_one_run_are_told_apart():
    book = ledger()
    first = book.admit(0, 0, 1, 0)
    ahead = book.admit(1, 0, 1, 0)
    assert ahead is first
    again = book.admit(0, 0, 1, first.serial)
    assert again.serial == 2
    assert book.admit(0, 1, 1, 0) is first
    assert book.admit(0, 1, 1, first.serial) is again


def test_devices_may_be_in_different_steps():
    book = ledger()
    admit_all(book, 1, 0)
    ahead = [book.admit(bucket, 0, 2, 1) for bucket in range(2)]
    further = [book.admit(bucket, 0, 3, 2) for bucket in range(2)]
    behind = [book.admit(bucket, 1, 2, 1) for bucket in range(2)]
    assert {step.serial for step in ahead + behind} == {2}
    assert {step.serial for step in further} == {3}
    assert not any(step.failed or step.doomed for step in [*ahead, *further, *behind])


@pytest.mark.parametrize("ticket", [1, 99])
def test_stale_ticket_dooms_the_step(ticket):
    book = ledger()
    admit_all(book, 1, 0)
    admit_all(book, 2, 1)
    steps = admit_all(book, 3, ticket)
    assert len(set(map(id, steps))) == 1
    assert f"has ticket {ticket}, but the latest is 2" in steps[0].doomed
    assert book.broken is None
    assert book.latest == 2
    assert admit_all(book, 4, 2)[0].doomed is None, "the right state still works"


def test_unknown_state_is_refused():
    step = ledger().admit(0, 0, 1, 5)
    assert "this store holds no state of that update" in step.doomed


def test_broken_until_it_starts_afresh():
    book = ledger()
    admit_all(book, 1, 0)
    book.broken = "no space"
    assert admit_all(book, 2, POISON)[0].doomed == "no space"
    assert admit_all(book, 3, 1)[0].doomed == "no space"
    step = admit_all(book, 4, 0)[0]
    assert (step.doomed, book.broken, book.era) == (None, None, step.serial)


def test_poison_joins_the_step_of_its_run():
    book = ledger()
    admit_all(book, 1, 0)
    book.broken = "no space"
    steps = [book.admit(0, 0, 2, 1), book.admit(0, 1, 2, POISON), book.admit(1, 1, 2, POISON), book.admit(1, 0, 2, 1)]
    assert len(set(map(id, steps))) == 1
    assert book.all_here(steps[0])


def test_step_that_turns_out_stale_fails_and_breaks():
    book = ledger()
    admit_all(book, 1, 0)
    first = book.admit(0, 0, 2, 1)
    second = book.admit(1, 0, 3, 1)
    assert first is not second
    assert book.admit(1, 0, 2, 1).failed
    assert book.admit(0, 0, 3, 1).failed
    assert "has ticket 1, but the latest is" in book.broken


def test_older_step_does_not_break_what_started_afresh():
    book = ledger()
    admit_all(book, 1, 0)
    old = book.admit(0, 0, 2, 1)
    new = admit_all(book, 3, 0)[0]
    assert book.admit(0, 1, 2, 1) is old
    assert old.failed
    assert book.broken is None
    steps = admit_all(book, 4, new.serial)
    assert not any(step.doomed or step.failed for step in steps)


def test_open_steps_are_bounded():
    book = ledger()
    for run_id in range(3 * MAX_OPEN_STEPS):
        book.admit(0, 0, run_id, 0)
    assert len(book.open_steps()) == MAX_OPEN_STEPS


def test_step_that_is_given_up():
    book = ledger()
    admit_all(book, 1, 0)
    step = book.admit(0, 0, 2, 99)
    book.give_up(step)
    book.give_up(step)
    assert book.admit(0, 1, 2, 99) is not step


@given(st.lists(st.permutations(list(itertools.product(range(3), range(2)))), min_size=1, max_size=6))
def test_any_order_of_arrival_gives_one_serial_a_step(orders):
    book = Ledger("adam", 3, (0, 1), first=1)
    ticket = 0
    for run_id, order in enumerate(orders):
        steps = [book.admit(bucket, device, run_id, ticket) for bucket, device in order]
        assert len({step.serial for step in steps}) == 1
        assert steps[0].serial > ticket
        assert not any(step.doomed or step.failed for step in steps)
        ticket = steps[0].serial


# -- several processes


class Job:
    """Processes that run the same steps, each with a ledger of its own."""

    def __init__(self, processes):
        self.ledgers = [Ledger("adam", 2, (0, 1), spans=True, first=first) for first in processes]

    def step(self, run_id, ticket, failing=()):
        """The ticket that all come out with; None if the step is refused. Everything refused has to be so by all."""
        mine, refused = [], []
        for number, book in enumerate(self.ledgers):
            steps = admit_all(book, run_id, ticket)
            assert len(set(map(id, steps))) == 1
            if number in failing and steps[0].doomed is None:  # as Operations.fail does
                book.broken = book.broken or f"process {number} failed"
                steps[0].failed = True
            refused.append(steps[0].doomed is not None)
            mine.append(POISON if steps[0].failed else steps[0].serial)
        assert len(set(refused)) == 1, "some wait for the others in a collective"
        if refused[0]:
            return None
        self.mine = mine
        for book, own in zip(self.ledgers, mine, strict=True):
            for device in (0, 1):
                book.agree(device, own, max(mine))
        return max(mine)


def test_processes_agree_on_the_largest_serial():
    job = Job([5, 1000])
    first = job.step(1, 0)
    assert first == 1000
    assert [book.latest for book in job.ledgers] == [1000, 1000]
    assert [job.step(2 + i, 1000 + i) for i in range(3)] == [1001, 1002, 1003]
    assert job.mine == [1003, 1003]  # none proposes what may be an older ticket
    assert job.step(9, 1001) is None  # a replay
    assert job.step(10, 1003) == 1005  # the refused one took a serial
    assert job.step(11, 5) is None  # what one of them proposed once means nothing
    assert job.step(12, 0) > 1005


def test_a_failure_is_news_to_the_others_only():
    book = Ledger("adam", 2, (0, 1), spans=True, first=1)
    (step, *_) = admit_all(book, 1, 0)
    assert book.agree(0, step.serial, POISON)
    assert "failed in another process" in book.broken
    assert not book.agree(1, step.serial, POISON)
    broken = Ledger("adam", 2, (0, 1), spans=True, first=1)
    admit_all(broken, 1, 0)
    broken.broken = "its own"
    assert not broken.agree(0, POISON, POISON)
    assert broken.broken == "its own"


def test_old_news_spare_the_step_that_started_afresh():
    book = Ledger("adam", 2, (0, 1), spans=True, first=1)
    (old, *_) = admit_all(book, 1, 0)
    (new, *_) = admit_all(book, 2, 0)
    assert not book.agree(0, old.serial, POISON)
    assert book.broken is None
    assert not book.agree(0, old.serial, 500)  # nor does what was agreed on then
    (step, *_) = admit_all(book, 3, new.serial)
    assert step.doomed is None


@given(
    st.lists(st.integers(1, 100), min_size=2, max_size=3),
    st.lists(
        st.one_of(
            st.tuples(st.just("go on"), st.sets(st.integers(0, 2), max_size=2)),
            st.tuples(st.sampled_from(["afresh", "replay", "poison", "break"]), st.integers(0, 2)),
        ),
        max_size=30,
    ),
)
def test_whatever_happens_all_refuse_or_none(starts, events):
    job = Job(starts)
    tickets = [0]  # of states, oldest first
    for run_id, (what, detail) in enumerate(events):
        if what == "break":  # a write of this process failed after its step
            book = job.ledgers[detail % len(starts)]
            book.broken = book.broken or "a write failed"
            continue
        old = tickets[-1 - detail :][0] if what == "replay" else 0
        ticket = {"go on": tickets[-1], "afresh": 0, "poison": POISON, "replay": old}[what]
        known = [book.broken for book in job.ledgers]
        result = job.step(run_id, ticket, detail if what == "go on" else ())
        if ticket == 0:
            assert result is not None
        elif any(known):
            assert result in (None, POISON), "a step went well after a failure"
        elif ticket == tickets[-1] != POISON:
            assert result is not None
        if result is not None:
            tickets.append(result)
            assert len({book.latest for book in job.ledgers}) == 1 or result == POISON
            assert all(book.broken for book in job.ledgers) == (result == POISON)


@given(st.lists(st.integers(1, 100), min_size=2, max_size=3), st.randoms(), st.lists(st.integers(0, 8), max_size=8))
def test_devices_of_several_processes_go_at_their_own_pace(starts, random, faults):
    """A device agrees and goes on while others have yet to agree; a failure may come between two operations of a step."""
    books = [Ledger("adam", 2, (0, 1), spans=True, first=first) for first in starts]
    lanes = [(process, device) for process in range(len(books)) for device in (0, 1)]
    tickets = dict.fromkeys(lanes, 0)  # of the state that each device has
    steps, refused, own = {}, {}, {}
    for run_id in range(6):
        fault = faults.pop() if faults else None
        waiting = [(lane, bucket) for lane in lanes for bucket in (0, 1)]
        random.shuffle(waiting)
        here = {lane: 0 for lane in lanes}
        for lane, bucket in waiting:
            if here[lane] == 0 and run_id:  # it agrees on the last step before it begins this one
                tickets[lane] = max(own.values())
                books[lane[0]].agree(lane[1], own[lane[0]], tickets[lane])
            here[lane] += 1
            step = steps.setdefault((lane[0], run_id), books[lane[0]].admit(bucket, lane[1], run_id, tickets[lane]))
            refused[lane[0], run_id] = step.doomed is not None
            if fault is not None and sum(here.values()) == fault + 1 and not refused[lane[0], run_id]:
                books[lane[0]].broken = books[lane[0]].broken or "a record could not be read"
                step.failed = True
        assert len({refused[process, run_id] for process in range(len(books))}) == 1
        if refused[0, run_id]:
            assert all(ticket == POISON for ticket in tickets.values())
            return
        own = {
            process: POISON if steps[process, run_id].failed else steps[process, run_id].serial
            for process in range(len(books))
        }
        if run_id:
            assert len(set(own.values()) - {POISON}) <= 1, "after the first step all count alike"


def test_run_that_lost_an_operation_fails_though_it_starts_afresh():
    ledger = Ledger("adam", 2, [0])
    ledger.broken = "copy_to_host was refused"
    ledger.lose(run_id=7)
    step = ledger.admit(0, 0, 7, 0)
    assert step.failed
    assert ledger.broken == "copy_to_host was refused"
    again = ledger.admit(0, 0, 8, 0)
    assert not again.failed
    assert ledger.broken is None
