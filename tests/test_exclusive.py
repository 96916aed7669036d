"""Whether to take turns on a device: the trial by counts, and real processes that find each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

import jax_mlp_offload as jmo
from jax_mlp_offload import exclusive
from jax_mlp_offload.exclusive import RETRIAL_PHASES, Access, Trial, Turns
from tests.support import assert_bits_equal, make_params, record_gradients, run, run_and_flush, tiered

DEVICE = os.makedev(4094, 977)  # of no real device, so that no other process uses it


@pytest.fixture(autouse=True)
def _own_directory(tmp_path, monkeypatch):
    """Lock files of its own, so that tests in other processes are not met."""
    monkeypatch.setattr(exclusive, "_directory", lambda: tmp_path)


TRIED = 22  # phases until the first trial is over


def trial_of(gain, phases=40):
    """The trial's choices where turns multiply the bandwidth by ``gain``, and the trial."""
    trial, on, choices = Trial(), False, []
    for _ in range(phases):
        on = trial.phase(100e6 * (gain if on else 1.0))
        choices.append(on)
    return choices, trial


@pytest.mark.parametrize(("gain", "stays"), [(0.9, False), (1.0, False), (1.04, False), (1.1, True), (2.0, True)])
def test_turns_stay_where_they_pay(gain, stays):
    choices, trial = trial_of(gain)
    assert True in choices and False in choices[:TRIED]  # both were tried
    assert choices[TRIED:] == [stays] * (len(choices) - TRIED)
    assert trial.gain == pytest.approx(gain)


def test_a_trial_is_repeated():
    choices, _ = trial_of(0.9, phases=RETRIAL_PHASES + 40)
    first, again = choices.index(True), choices.index(True, TRIED)
    assert again - first == RETRIAL_PHASES + 18  # a trial has 18 phases
    tried = sum(choices[:TRIED])
    assert sum(choices) == 2 * tried
    assert tried / RETRIAL_PHASES < 0.01  # the part of phases that trials spend with turns


def test_nor_in_a_trial_that_is_repeated():
    trial, on, before = Trial(), False, False
    for _ in range(RETRIAL_PHASES + 2 * TRIED):
        bps = 1.0 if on != before else (300.0 if on else 100.0)
        before, on = on, trial.phase(bps)
        if trial.gain is not None:
            assert trial.gain == pytest.approx(3.0)
    assert on


def test_one_good_round_is_not_enough():
    trial, on, seen = Trial(), False, 0
    for _ in range(40):
        seen += on
        on = trial.phase(3e8 if on and seen <= 3 else 1e8)
    assert trial.on is False


def test_phases_that_moved_nothing_are_not_counted():
    trial = Trial()
    for _ in range(100):
        assert trial.phase(None) is False
    assert trial.gain is None


def test_the_phase_after_a_change_is_not_counted():
    trial, on, before = Trial(), False, False
    for _ in range(TRIED):
        bps = 1.0 if on != before else (300.0 if on else 100.0)
        before, on = on, trial.phase(bps)
    assert trial.gain == pytest.approx(3.0)


@pytest.mark.parametrize(("value", "access"), [(True, "always"), (False, "never"), ("auto", "auto")])
def test_settings(value, access):
    assert Access.of(value) is Access(access)


@pytest.mark.parametrize("value", ["yes", None, 1, "True"])
def test_wrong_settings(value, tmp_path):
    with pytest.raises(ValueError, match=r"exclusive=.*'auto', True or False"):
        jmo.Store(tmp_path, exclusive=value)


class Phases:
    """Phases of a second each, in which each of some processes moves so many bytes."""

    def __init__(self, *processes):
        self.processes = processes
        self.now_s = 100.0

    def next(self, *moved):
        for process, size_bytes in zip(self.processes, moved, strict=True):
            process.moved(size_bytes)
        self.now_s += 1.0
        return [process.phase(self.now_s) for process in self.processes]


def test_alone_there_are_no_turns():
    turns = Turns(Access.AUTO, DEVICE)
    phases = Phases(turns)
    assert [phases.next(10**8) for _ in range(30)] == [[False]] * 30
    assert turns.facts() == {"setting": "auto", "on": False, "why": "alone on the device", "gain": None}
    turns.close()
    turns.close()


def test_two_follow_one_trial_and_a_third_one_alone():
    leader, follower = Turns(Access.AUTO, DEVICE), Turns(Access.AUTO, DEVICE)
    other = Turns(Access.AUTO, os.makedev(4094, 978))
    phases, on = Phases(leader, follower, other), False
    for _ in range(30):
        on, follows, alone = phases.next(10**8, 3 * 10**8 if on else 10**8, 10**8)
        assert follows == on
        assert not alone
    assert on
    assert "measured: 2.00" in leader.facts()["why"]  # of both together
    assert "another process" in follower.facts()["why"]
    leader.close()
    assert follower.phase(200.0) is False  # alone now
    follower.close()
    other.close()


@pytest.mark.parametrize("leads", [0, 1])
def test_what_one_gains_of_the_other_is_no_gain(leads):
    pair = Turns(Access.AUTO, DEVICE), Turns(Access.AUTO, DEVICE)
    phases, on = Phases(*pair), False
    for _ in range(30):
        moved = (3 * 10**8, 10**8) if on else (2 * 10**8, 2 * 10**8)
        on, _ = phases.next(*(moved if leads else moved[::-1]))
    assert pair[0].facts()["gain"] == pytest.approx(1.0)
    assert not on
    for turns in pair:
        turns.close()


def test_always_and_never():
    always, never = Turns(Access.ALWAYS, DEVICE), Turns(Access.NEVER, DEVICE)
    assert always.phase(1.0) and not never.phase(1.0)
    assert always.path and not never.path
    always.close()


def test_a_directory_of_somebody_else_is_not_used(tmp_path, monkeypatch):
    def refuse():
        raise PermissionError("belongs to somebody else")

    monkeypatch.setattr(exclusive, "_directory", refuse)
    turns = Turns(Access.ALWAYS, DEVICE)
    assert not turns.on
    assert "somebody else" in turns.facts()["why"]


def test_a_killed_leader_is_followed_by_another(tmp_path):
    """The kernel frees its locks: the one that is left finds itself alone, then leads where a third one comes."""
    code = f"""
    import pathlib, sys, time
    from jax_mlp_offload import exclusive
    exclusive._directory = lambda: pathlib.Path({str(tmp_path)!r})
    turns = exclusive.Turns(exclusive.Access.AUTO, {DEVICE})
    other = exclusive.Turns(exclusive.Access.AUTO, {DEVICE})  # so that there is something to lead
    turns.phase(1.0)
    print("leads", flush=True)
    time.sleep(600)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "leads\n"
        turns = Turns(Access.AUTO, DEVICE)
        turns.phase(1.0)
        assert "another process" in turns.facts()["why"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert turns.phase(2.0) is False
    assert "alone" in turns.facts()["why"]
    third = Turns(Access.AUTO, DEVICE)
    turns.phase(3.0)
    assert "being measured" in turns.facts()["why"]
    third.close()
    turns.close()


@pytest.mark.parametrize("setting", [True, False, "auto"])
def test_numbers_and_statistics(setting, two_tiers):
    """Turns change no bit, also where two stores of one process share the devices."""
    params = make_params({"w": (300, 100), "b": (7,)})
    grads = record_gradients(params, 6)
    with jmo.Store() as store:
        expected, _ = run(jmo.adamw(1e-2, store=store), params, grads)
    with tiered(two_tiers, exclusive=setting) as store:  # two tiers on one device are no two processes
        run_and_flush(store, jmo.adamw(1e-2, store=store), params, grads)
        whys = {tier["exclusive"]["why"] for tier in store.stats()["tiers"]}
        assert whys == {{True: "asked for", False: "not asked for"}.get(setting, "alone on the device")}
    with tiered(two_tiers, exclusive=setting) as store, tiered(two_tiers, exclusive=setting) as other:
        tx = jmo.adamw(1e-2, store=store)
        new, _ = run_and_flush(store, tx, params, grads)
        assert_bits_equal(new, expected)
        new, _ = run_and_flush(other, jmo.adamw(1e-2, store=other), params, grads)
        assert_bits_equal(new, expected)
        for tier in store.stats()["tiers"]:
            facts = tier["exclusive"]
            assert facts["setting"] == {True: "always", False: "never"}.get(setting, "auto")
            assert facts["on"] == (setting is True) or setting == "auto"
            assert (facts["read"][0] > 0) == (setting is True) or setting == "auto"
