"""Never longer than one interval and a minute without a checkpoint while a disk takes writes, whatever disks do.

What is expected is computed from the disks' timetable and from the files alone.
"""

import logging
import random
from pathlib import Path

import pytest

from ml_factory.checkpoints.child_slots import LOCAL_DISK, MOUNT
from ml_factory.checkpoints.schedule import SaveTimer
from ml_factory.checkpoints.uploader import COPIED
from tests.checkpoints.save_simulation import KINDS, Clock, Outage, Simulation, random_outages


@pytest.mark.parametrize("seed", [0, 1, 2, 3, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, 60))])
def test_manager_under_random_faults_is_never_longer_than_interval_and_minute_without_checkpoint(
    tmp_path, monkeypatch, caplog, seed
):
    caplog.set_level(logging.CRITICAL, "ml_factory")
    chance, hours = random.Random(seed), 4.0
    outages = {name: random_outages(chance, hours * 3600) for name in (LOCAL_DISK, MOUNT)}
    if seed % 3 == 2:  # both at once, as where the machine's network or memory fails
        outages[MOUNT] = sorted([*outages[MOUNT], *outages[LOCAL_DISK][::2]], key=lambda one: one.start)
    simulation = Simulation(tmp_path, monkeypatch, outages, chance.choice([1, 3, 10, 30]), mounted=seed % 4 != 3)
    worst = 0.0
    while simulation.clock.now < hours * 3600:
        simulation.step(chance.uniform(0.5, 5.0))
        worst = max(worst, simulation.overdue())
    assert worst <= 0, f"{worst:.0f} s longer than promised"
    assert all(len(list(folder.glob("slot-*.ckpt"))) <= 6 for folder in simulation.folders.values())
    newest = simulation.newest()
    for disk in simulation.disks.values():
        disk.outages, disk._gave_up = [], -1.0
    simulation.manager.close()
    assert simulation._manager(seed % 4 != 3).load_latest_checkpoint("p")["state"]["at"] == newest


@pytest.mark.parametrize("kind", KINDS)
def test_manager_after_twenty_seconds_of_faults_saves_within_a_minute(tmp_path, monkeypatch, caplog, kind):
    simulation = Simulation(tmp_path, monkeypatch, {LOCAL_DISK: [Outage(1790.0, 1815.0, kind)]}, 30, mounted=False)
    while simulation.clock.now < 1830:
        simulation.step(1.0)
    assert 1800 < simulation.newest() < 1827
    assert caplog.text.count("not saved, the run goes on and tries again") == (kind != "hang")
    assert "mount" not in caplog.text
    simulation.manager.close()


@pytest.mark.parametrize("kind", KINDS)
def test_manager_writes_to_mount_while_local_disk_refuses_and_locally_again_after_recovery(
    tmp_path, monkeypatch, caplog, kind
):
    outages = {LOCAL_DISK: [Outage(100.0, 2000.0, kind)], MOUNT: [Outage(50.0, 99.0, "EIO")]}
    simulation, reached = Simulation(tmp_path, monkeypatch, outages, 1), set()
    while simulation.clock.now < 2700:
        simulation.step(1.0)
        assert simulation.overdue() <= 0
        # What could not be uploaded a minute ago is older than what the mount has.
        assert not 160 < simulation.clock.now < 1999 or not simulation.manager.store.uploader.pending
        if simulation.clock.now > 160:
            reached.add((simulation.clock.now > 2650, simulation.manager.phase("p").last_save.where))
    assert reached == {(False, COPIED), (True, COPIED)}
    infos = simulation.manager.list_checkpoints("p")
    assert {Path(info["path"]).parent.name for info in infos} == {"here"}  # the last three, above those on the mount
    assert caplog.text.count("written to the mount itself for now") == 1 == caplog.text.count("takes checkpoints again")
    simulation.manager.close()


def test_manager_tries_disk_that_hung_after_the_other_one(tmp_path, monkeypatch):
    simulation = Simulation(tmp_path, monkeypatch, {LOCAL_DISK: [Outage(50.0, 1e9, "hang")]}, 1)
    took = []
    while simulation.clock.now < 300:
        before = simulation.clock.now
        simulation.step(1.0)
        took.append(simulation.clock.now - before)
    assert sorted(took)[-2] < 2 < 15 < sorted(took)[-1] < 17
    simulation.manager.close()


def test_save_timer_after_refusals_is_due_after_growing_delays_of_at_most_ten_seconds():
    clock = Clock()
    timer, delays = SaveTimer(1800, 1800, clock=clock), []
    for _ in range(7):
        timer.record_save()
        assert not timer.due() and timer.due_in() == 1800
        timer.record_refused()
        delays.append(timer.due_in())
        clock.now += delays[-1]
        assert timer.due() and timer.due_in() == 0
    assert delays == [1, 2, 4, 8, 10, 10, 10]
    timer.record_save()
    timer.record_accepted()
    assert timer.due_in() == 1800
    timer.record_save()
    timer.record_refused()
    assert timer.due_in() == 1


def test_save_timer_of_run_without_accepted_save_stays_young():
    clock = Clock()
    timer = SaveTimer(1800, 120, clock=clock)
    for accepted in (False, True):
        timer.record_save()
        timer.record_accepted() if accepted else timer.record_refused()
        clock.now += 3600
    timer.record_save()
    timer.record_accepted()
    assert timer.interval == 1800
    clock.now = 0.0
    timer = SaveTimer(1800, 120, clock=clock)
    timer.record_save()
    timer.record_refused()
    clock.now = 3600
    timer.record_save()
    timer.record_accepted()
    assert timer.interval == 120


@pytest.mark.parametrize("kind", KINDS)
def test_manager_refused_for_an_hour_makes_few_slots(tmp_path, monkeypatch, caplog, kind):
    caplog.set_level(logging.CRITICAL, "ml_factory")
    simulation = Simulation(tmp_path, monkeypatch, {LOCAL_DISK: [Outage(0.0, 3600.0, kind)]}, 1, mounted=False)
    while simulation.clock.now < 3700:
        simulation.step(3.0)
    assert simulation.newest() > 3600 and len(list(tmp_path.rglob("slot-*.ckpt"))) <= 3
    simulation.manager.close()
