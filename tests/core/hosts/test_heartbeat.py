"""Hosts that monitor one another, as processes without training: each way to end, and the messages of all hosts."""

import dataclasses
import re
import socket
import time

import pytest

from core.hosts import activity, exit_codes, failure_diagnosis, heartbeat, host_messages
from core.hosts.activity import Place
from core.hosts.rendezvous import Roll

# Host 0 waits for the story of the test to be told by the others; everybody ends through the watch.
WATCHED = """
import os, signal, sys, time
from core.hosts import rendezvous
from core.hosts import failure_diagnosis, heartbeat, activity
heartbeat.BEAT_SECONDS, failure_diagnosis.EARLY_SECONDS = 0.2, 1.0
roll = rendezvous.answer(COORDINATOR, index=PROCESS, count=HOSTS, timeout_seconds=30)
limits = failure_diagnosis.Limits(step_seconds=1.5, slow_seconds=30.0, silent_seconds=2.0, reports_only=False)
heartbeat.start(roll, limits=limits)
activity.at(activity.TRAINING, step=17)
time.sleep(0.7)  # until everybody has said where it is
def works_on(seconds=20.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        activity.at(activity.TRAINING)
        time.sleep(0.1)
def stop_the_clock():
    print("AT", time.time(), flush=True)
"""
LOST, HUNG = exit_codes.PEER_LOST, exit_codes.HUNG


@pytest.fixture
def ends(run_hosts):
    """Runs a story on three hosts and gives how they ended, and the seconds from what happened to the last end."""

    def run(story, hosts=3, *, reports=False):
        watched = WATCHED.replace("reports_only=False", f"reports_only={reports}")
        results = run_hosts(watched + story, hosts=hosts, timeout=60)
        ended = time.time()
        began = [float(at) for r in results for at in re.findall(r"^AT (\S+)", r.output, re.M)]
        return results, ended - min(began)

    return run


def say(results, hosts, sentence):
    for host in hosts:
        assert sentence in results[host].output, results[host].output


@pytest.mark.parametrize("host", [1, 0])
def test_a_killed_host_is_named_with_its_last_place(ends, host):
    story = f"if PROCESS == {host}: stop_the_clock(); os.kill(os.getpid(), signal.SIGKILL)\nworks_on()"
    results, seconds = ends(story)
    others = [i for i in range(3) if i != host]
    assert [results[i].returncode for i in (host, *others)] == [-9, LOST, LOST], results
    say(results, others, f"host {host} (127.0.0.1) was lost: last seen at step 17, training. Read the end of its log.")
    say(results, others[-1:], f"host {others[-1]} (127.0.0.1) of 3 ends: ")
    assert seconds < 5


def test_an_exception_on_one_host_is_reported_with_its_type(ends):
    story = """
if PROCESS == 2:
    stop_the_clock()
    heartbeat.raised("OverflowError: only here", code=13, is_consequence=False)
if PROCESS == 1:
    time.sleep(0.2)
    heartbeat.raised("JaxRuntimeError: Gloo all-reduce failed", code=13, is_consequence=True)
works_on()
"""
    results, seconds = ends(story)
    assert [r.returncode for r in results] == [LOST, LOST, 13], results
    say(results, (0, 1), "host 2 (127.0.0.1) raised OverflowError: only here (at step 17, training)")
    assert seconds < 8


def test_an_exception_on_all_hosts_is_blamed_on_all(ends):
    story = "stop_the_clock(); heartbeat.raised('NonFiniteLossError: loss = nan', code=17, is_consequence=False)"
    results, seconds = ends(story)
    assert [r.returncode for r in results] == [17] * 3, results
    assert seconds < 6


def test_an_error_that_a_loss_causes_is_not_taken_for_the_cause(ends):
    story = """
if PROCESS == 1:
    stop_the_clock()
    heartbeat.raised("JaxRuntimeError: Gloo all-reduce failed", code=13, is_consequence=True)
if PROCESS == 2: time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)
works_on()
"""
    results, _ = ends(story)
    assert [r.returncode for r in results] == [LOST, LOST, -9], results
    say(results, (0, 1), "host 2 (127.0.0.1) was lost")


# test_a_host_that_ends_with_a_code_is_named is quick, of host 1
@pytest.mark.parametrize("host", [pytest.param(1, marks=pytest.mark.slow), 0])
def test_a_host_that_leaves_its_loop_is_named(ends, host):
    story = f"if PROCESS == {host}: stop_the_clock(); activity.at(activity.ENDING); sys.exit()\nworks_on()"
    results, seconds = ends(story)
    others = [i for i in range(3) if i != host]
    assert [results[i].returncode for i in (host, *others)] == [0, LOST, LOST], results
    says = f"host {host} (127.0.0.1) ended its training loop at step 17 while others were still in theirs: "
    say(results, others[:1], says + f"host {others[0]} (127.0.0.1) at step 17, training")
    assert seconds < 9


def test_a_host_that_ends_with_a_code_is_named(ends):
    story = """
failure_diagnosis.LEAVING_SECONDS = 1.0
if PROCESS == 1:
    stop_the_clock()
    heartbeat.leave(2, "error: no such file")
    os._exit(2)
works_on()
"""
    results, _ = ends(story)
    assert [r.returncode for r in results] == [2, 2, 2], results  # nor can another start help the others
    say(results, (0, 2), "host 1 (127.0.0.1) ended with exit code 2: error: no such file")


@pytest.mark.parametrize(("code", "others"), [(2, 2), (17, 17), (130, 130), (13, LOST), (137, LOST), (143, LOST)])
def test_the_others_of_a_host_that_no_start_helps_are_not_started_again(code, others):
    there = failure_diagnosis.Seen("host 1", Place(3, activity.TRAINING, 0.0))
    seen = {0: there, 1: dataclasses.replace(there, left=(code, "why", 0.0))}
    verdict = failure_diagnosis.judge(
        seen, limits=failure_diagnosis.USUAL_LIMITS, now=failure_diagnosis.LEAVING_SECONDS + 1
    )
    assert (verdict.hosts, verdict.others) == ((1,), others)


def test_all_that_leave_with_a_code_keep_it(ends):
    results, seconds = ends(
        "stop_the_clock(); time.sleep(PROCESS / 5); heartbeat.leave(143, 'told to stop'); os._exit(143)"
    )
    assert [r.returncode for r in results] == [143] * 3, results
    assert not any("ends: " in r.output for r in results), results
    assert seconds < 5


def test_a_frozen_host_is_named(run_hosts):
    story = """
if PROCESS == 2:
    if os.fork() == 0:  # wakes it up again when the others are gone
        os.closerange(3, 100)
        time.sleep(5); os.kill(os.getppid(), signal.SIGCONT); os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)
works_on()
"""
    results = run_hosts(WATCHED + story, hosts=3, timeout=60)
    assert [r.returncode for r in results] == [LOST, LOST, HUNG], results
    for host in (0, 1):
        assert re.search(
            r"host 2 \(127\.0\.0\.1\) has been silent for \d+ s: last seen at step 17, training", results[host].output
        )


@pytest.mark.covers("X08")
@pytest.mark.parametrize("host", [pytest.param(2, marks=pytest.mark.slow), 0])  # 0: the coordinator
def test_a_stuck_host_is_named_with_its_stack(ends, host):
    story = f"""
def a_hook_that_never_returns():
    activity.at(activity.BETWEEN)
    stop_the_clock()
    time.sleep(30)
if PROCESS == {host}: a_hook_that_never_returns()
time.sleep(30)
"""
    results, seconds = ends(story)
    others = [i for i in range(3) if i != host]
    assert [results[i].returncode for i in (host, *others)] == [HUNG, LOST, LOST], results
    for result in results:
        assert re.search(
            rf"host {host} \(127\.0\.0\.1\) has been at step 17, between steps for \d+ s \(limit 1.5 s\)", result.output
        )
        assert "; the others at step 17, training" in result.output
        assert "in a_hook_that_never_returns" in result.output
    assert seconds < 8


def test_a_host_in_another_branch_is_named(ends):
    story = """
stop_the_clock()
def evaluates_alone():
    activity.at(activity.EVALUATING)
    time.sleep(30)
if PROCESS == 1: evaluates_alone()
activity.at(activity.TRAINING, step=18)
time.sleep(30)
"""
    results, seconds = ends(story)
    assert [r.returncode for r in results] == [LOST, HUNG, LOST], results
    says = "host 1 (127.0.0.1) is at step 17, evaluating; the others at step 18, training: they wait for one another"
    say(results, range(3), says)
    say(results, range(3), "in evaluates_alone")
    assert seconds < 8


@pytest.mark.slow
def test_a_watchdog_that_only_reports_names_the_hung_host_and_ends_nothing(ends):
    story = """
stop_the_clock()
def a_hook_that_takes_long():
    activity.at(activity.BETWEEN)
    time.sleep(3.5)
ends_at = time.monotonic() + 5.0
if PROCESS == 1: a_hook_that_takes_long()
works_on(ends_at - time.monotonic())
heartbeat.leave()
time.sleep(0.5)
heartbeat.stop()
"""
    results, _ = ends(story, reports=True)
    assert [r.returncode for r in results] == [0, 0, 0], results
    says = r"watchdog: host 1 .* has been at step 17, between steps for \d+ s \(limit 1.5 s\).*The run continues"
    assert len(re.findall(says, results[0].output)) == 1, results[0].output
    assert "in a_hook_that_takes_long" in results[0].output
    assert not re.search("ends: ", "".join(r.output for r in results))


def test_a_frozen_host_zero_is_named_by_the_others_if_the_watchdog_only_reports(capfd):
    limits = failure_diagnosis.Limits(step_seconds=60.0, slow_seconds=60.0, silent_seconds=0.6, reports_only=True)
    zero, one = socket.socketpair()
    with zero:
        watch = heartbeat._Watch(Roll(1, 2, ("10.0.0.3", "10.0.0.4"), {0: one}), limits)
        host_messages.send(zero, {"at": list(Place(17, activity.TRAINING, 0.0))}, b"", seconds=1.0)
        watch.start()
        time.sleep(1.6)
        watch.tell({"stop": True}).wait(5.0)  # from here on it listens no more
        zero.shutdown(socket.SHUT_WR)
        watch.join(5.0)
    said = capfd.readouterr().err
    named = (
        r"watchdog: host 0 \(10\.0\.0\.3\) has been silent for 1 s: last seen at step 17, training\. The run continues"
    )
    assert len(re.findall(named, said)) == 1, said


def test_only_host_zero_keeps_what_hosts_compare():
    limits = failure_diagnosis.Limits(step_seconds=60.0, slow_seconds=60.0)
    kept = {}
    for index in (0, 1):
        watch = heartbeat._Watch(Roll(index, 2, ("10.0.0.3", "10.0.0.4"), {}), limits)
        for step in range(3):
            watch._note(index, {"compared": step, "numbers": [1, 2]})
        kept[index] = len(watch._compared)
    assert kept == {0: 3, 1: 0}


def test_a_save_has_as_long_as_its_own_limit_allows():
    limits = failure_diagnosis.Limits(step_seconds=600.0, slow_seconds=3600.0)

    def ends(seconds, own_limit):
        seen = {0: failure_diagnosis.Seen("host 0", Place(4, activity.SAVING, seconds, own_limit))}
        return failure_diagnosis.judge(seen, limits=limits, now=0.0) is not None

    assert not ends(3700.0, 3700.0)
    assert ends(3700.0 + failure_diagnosis.LATER_SECONDS + 1, 3700.0)
    assert (ends(3599.0, 300.0), ends(3601.0, 300.0)) == (False, True)


@pytest.mark.parametrize(
    ("places", "silent", "rehearsal", "tpu"),
    [
        ([Place(4, activity.TRAINING, 1.0), Place(4, activity.TRAINING, 1.0)], 30.0, True, False),
        ([Place(4, activity.TRAINING, 1.0), Place(4, activity.TRAINING, 1.0)], 130.0, True, True),
        ([Place(4, activity.SAVING, 300.0), Place(5, activity.TRAINING, 300.0)], 0.0, True, False),
        ([Place(4, activity.SAVING, 601.0), Place(5, activity.TRAINING, 601.0)], 0.0, True, True),
        ([Place(4, activity.EVALUATING, 30.0), Place(5, activity.TRAINING, 30.0)], 0.0, True, False),
        ([Place(4, activity.EVALUATING, 121.0), Place(5, activity.TRAINING, 121.0)], 0.0, True, True),
    ],
)
def test_a_tpu_has_more_time_than_a_rehearsal(places, silent, rehearsal, tpu):
    seen = {i: failure_diagnosis.Seen(f"host {i}", place) for i, place in enumerate(places)}
    seen[1].heard_seconds = silent
    for limits, ends in ((failure_diagnosis.USUAL_LIMITS, rehearsal), (failure_diagnosis.ON_TPU, tpu)):
        assert bool(failure_diagnosis.judge(seen, limits=limits, now=0.0)) == ends
        only = limits._replace(reports_only=True)
        assert failure_diagnosis.judge(seen, limits=only, now=0.0) is None
        assert failure_diagnosis.judge_host_zero(seen[1], seen[0], limits=only, now=0.0) is None
        assert bool(failure_diagnosis.overdue(seen, limits=only)) == ends


def test_a_lost_host_ends_a_run_whose_watchdog_only_reports():
    seen = {i: failure_diagnosis.Seen(f"host {i}", Place(4, activity.TRAINING, 1.0)) for i in range(2)}
    seen[1].gone = True
    assert failure_diagnosis.judge(
        seen, limits=failure_diagnosis.ON_TPU._replace(reports_only=True), now=0.0
    ).hosts == (1,)


def test_all_stacks_are_shown_if_no_host_is_behind(ends):
    results, _ = ends("stop_the_clock()\ndef waits_for_a_device(): time.sleep(30)\nwaits_for_a_device()", hosts=2)
    assert [r.returncode for r in results] == [HUNG] * 2, results
    for result in results:
        says = r"no host completed a step for \d+ s, and no host is behind the others: step 17, training"
        assert re.search(says, result.output)
        assert result.output.count("in waits_for_a_device") == 2


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_host_that_does_not_get_to_its_loop_is_named(hosts):
    limits = failure_diagnosis.Limits(step_seconds=600.0, slow_seconds=3600.0)

    def seen(after_seconds):
        places = {0: Place(0, activity.OPENING, after_seconds)}
        places |= {i: Place(1, activity.COMPILING, after_seconds - 5) for i in range(1, hosts)}
        return {i: failure_diagnosis.Seen(f"host {i}", place) for i, place in places.items()}

    assert failure_diagnosis.judge(seen(3599.0), limits=limits, now=0.0) is None
    verdict = failure_diagnosis.judge(seen(3606.0), limits=limits, now=0.0)
    assert (verdict.hosts, verdict.code, verdict.others) == ((0,), HUNG, LOST)
    assert "host 0 has been at step 0, opening for 3606 s (limit 3600 s)" in verdict.says


def test_only_preparing_data_has_no_limit():
    words = [word for name, word in vars(activity).items() if name.isupper() and isinstance(word, str)]
    assert activity.JOINING in words
    limits = failure_diagnosis.Limits(step_seconds=5.0, slow_seconds=50.0)
    unlimited = [word for word in words if limits.of(Place(0, word, 0.0)) > failure_diagnosis.JOINING_SECONDS]
    assert unlimited == [activity.PREPARING]


def test_the_stacks_of_a_thousand_hosts_fit_into_a_message():
    long = "x" * 15_000
    alike = {host: f"Thread 0x{host:x} {long}" for host in range(990)}
    found = heartbeat.grouped_by_text(alike | {host: f"{host} {long}" for host in range(990, 1000)})
    assert len(found) == 8
    assert found[0] == (list(range(990)), alike[0])
    assert found[1][0] == [990]
    assert len(host_messages.pack({"stacks of": found}, b"")) < host_messages.MAX_BYTES


def test_stacks_are_of_the_hosts_that_sent_them():
    """Only some hosts hang, so their indices have gaps, and they are not told in order."""
    stacks = {12: "waits 0x2", 3: "waits 0x1", 7: "reads", 21: "reads"}
    assert heartbeat.grouped_by_text(stacks) == [([3, 12], "waits 0x1"), ([7, 21], "reads")]


def test_a_fault_of_the_watch_ends_the_process(run_hosts):
    story = (
        WATCHED.replace("heartbeat.start(roll", "roll.close(); heartbeat.start(None") + "heartbeat._watch.tell(None)\n"
    )
    (result,) = run_hosts(story + "time.sleep(20)", hosts=1)
    assert result.returncode == exit_codes.RAISED, result.output
    assert re.search(r"the watch over the hosts failed:\nTraceback.*TypeError", result.output, re.DOTALL)


def test_leaving_waits_until_the_message_is_sent(run_hosts):
    story = """
noted = []
def slowly(self, host, message, note=heartbeat._Watch._note):
    time.sleep(0.1)
    note(self, host, message)
    noted.append(list(message)[0])
heartbeat._Watch._note = slowly
heartbeat.compare(1, {})
time.sleep(0.5)
heartbeat.compare(2, {})
heartbeat.compare(3, {})
heartbeat.leave()
print("NOTED", *noted)
"""
    (result,) = run_hosts(
        WATCHED.replace("heartbeat.start(roll", "roll.close(); heartbeat.start(None") + story, hosts=1
    )
    assert "NOTED compared compared compared left\n" in result.output, result.output


def test_no_message_follows_a_partial_one():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not host_messages.send(ours, {"at": "x" * 2**21}, b"", seconds=0.2)
        assert not host_messages.send(ours, {"at": 1}, b"", seconds=0.2)
        inbox = host_messages.Inbox(b"")
        while piece := theirs.recv(1 << 16):
            assert not inbox.add(piece)
        assert inbox.missing_bytes()
        assert ours.recv(1) == b""


def test_a_single_process_is_monitored_for_hangs(run_hosts):
    story = (
        WATCHED.replace("heartbeat.start(roll", "roll.close(); heartbeat.start(None") + "activity.at(activity.SAVING)\n"
    )
    story = story.replace("slow_seconds=30.0", "slow_seconds=0.5")
    (result,) = run_hosts(story + "def writes_for_ever(): time.sleep(30)\nwrites_for_ever()", hosts=1)
    assert result.returncode == HUNG, result.output
    assert "host 0 has been at step 17, saving for" in result.output
    assert "in writes_for_ever" in result.output


@pytest.mark.covers("X07")
def test_hosts_with_other_numbers_are_named(ends):
    story = """
heartbeat.compare(20, {"params/w": [7, 7], "params/v": [9]})
heartbeat.compare(40, {"params/w": [7, 8 if PROCESS == 1 else 7], "params/v": [9]})
stop_the_clock()
works_on()
"""
    results, seconds = ends(story)
    assert [r.returncode for r in results] == [exit_codes.DIVERGED] * 3, results
    say(results, range(3), "after step 40, host 1 disagrees with the majority: params/w.")
    assert seconds < 6


@pytest.mark.covers("X07")
def test_a_process_that_nothing_watches_compares_its_own_copies():
    heartbeat.compare(20, {"params/w": [7, 7], "params/v": [9]})
    with pytest.raises(
        heartbeat.DivergedError, match=r"^after step 40, copies on the devices of this process differ: params/w\. "
    ) as e:
        heartbeat.compare(40, {"params/w": [7, 7, 8], "params/v": [9]})
    assert (e.value.exit_code, e.value.ends_without_save) == (exit_codes.DIVERGED, True)


def test_hosts_that_end_together_cause_no_verdict(run_hosts):
    story = """
activity.at(activity.ENDING)
time.sleep((HOSTS - PROCESS) * 0.4)
print("done", flush=True)
"""
    results = run_hosts(WATCHED + story, hosts=3, timeout=60)
    assert [(r.returncode, r.output) for r in results] == [(0, "done\n")] * 3


def test_limits_depend_on_the_phase():
    limits = failure_diagnosis.Limits(step_seconds=1, slow_seconds=2)
    found = {
        p: limits.of(failure_diagnosis.Place(3, p, 0.0)) for p in ("training", "between steps", "saving", "joining")
    }
    assert found == {"training": 1, "between steps": 1, "saving": 2, "joining": failure_diagnosis.JOINING_SECONDS}


ENDING = """
import atexit, sys, time
from core.hosts import failure_diagnosis, heartbeat

def end_slowly():  # as a busy machine does, once threads have been stopped
    sys.setswitchinterval(60)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        pass

atexit.register(end_slowly)  # runs after the one that `start` registers
heartbeat.start(None, limits=failure_diagnosis.Limits(30.0, 30.0, silent_seconds=0.5))
time.sleep(0.1)
"""


def test_a_process_that_ends_slowly_prints_no_stacks(run_hosts):
    [result] = run_hosts(ENDING, hosts=1)
    assert (result.returncode, result.output) == (0, "")
