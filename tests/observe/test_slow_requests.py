"""Why requests were slow: stages by arithmetic on the slices, medians, operations, waits. (OBS-7)"""

from __future__ import annotations

from nnfmq.observe.machine_record import CpuUse, Stop
from nnfmq.observe.slow_requests import STAGES, Explanation, explain, requests_of
from nnfmq.observe.trace_files import Slice, ThreadTimes, Trace
from nnfmq.observe.trace_layout import TURN, burst_of, packet_of, request_base, worker_of

CLIENT, DRIVER = (1, 11), (2, 22)


def request(number: int, at: int, *, wake: int = 10, decode: int = 0, bind: int = 0, add: int = 30) -> list[Slice]:
    """Return a request's slices: 5 to write, `wake`, decode, bind, 4 to start, the engine, 6 to reply, 8, 3."""
    identity = request_base(2, 7) | number

    def client(name: str, begin: int, end: int) -> Slice:
        return Slice(*CLIENT, begin, end, name, identity)

    def driver(name: str, begin: int, end: int, request: int = identity) -> Slice:
        return Slice(*DRIVER, begin, end, name, request)

    sent = at + 5
    received = sent + wake
    decoded = received + decode
    bound = decoded + bind
    begun = bound + 4
    ended = begun + add + 20
    replied = ended + 6
    read = replied + 8
    slices = [
        client("[NN_LR_PE]execute", at, read + 3),
        client("[NN_LR_PIO]write", at, sent),
        client("[NN_LI_PE]wait", sent, read),
        client("[NN_LR_PR]read", read, read + 3),
        driver("[NN_LD_PE]request", received, replied),
        driver("[NN_LC_PE]engine", begun, ended),
        driver("[NN_LC_PCO]0 ADD", begun, begun + add, 0),
        driver("[NN_LC_PCO]1 MUL", begun + add, ended, 0),
    ]
    slices += [driver("[NN_LD_PIO]decode", received, decoded)] if decode else []
    slices += [driver("[NN_LD_PIO]bind", decoded, bound)] if bind else []
    return slices


def trace_of(*requests: list[Slice]) -> Trace:
    trace = Trace([one for slices in requests for one in slices], {1: "application", 2: "driver"})
    trace.sort()
    return trace


def test_OBS_7_the_stages_of_a_request_are_the_times_between_its_slices() -> None:
    (found,) = requests_of(trace_of(request(1, 1000, wake=10, decode=40, bind=50)))
    assert found.stages == dict(zip(STAGES, (5, 10, 40, 50, 0, 4, 50, 6, 8, 3), strict=True))
    assert found.total_ns == sum(found.stages.values())
    assert (worker_of(found.request), burst_of(found.request), packet_of(found.request)) == (2, 7, 1)
    assert found.threads == {"client": CLIENT, "worker": DRIVER}


def test_OBS_7_the_slowest_requests_come_first_with_the_abnormal_stage() -> None:
    trace = trace_of(request(1, 0), request(2, 1000, wake=900), request(3, 3000, add=500), request(4, 5000))
    slow, next_slow = explain(trace, 2)
    assert [packet_of(one.request.request) for one in (slow, next_slow)] == [2, 3]
    assert slow.abnormal is not None and next_slow.abnormal is not None
    assert (slow.abnormal.name, slow.abnormal.duration_ns, slow.abnormal.typical_ns) == ("request wake-up", 900, 10)
    assert (next_slow.abnormal.name, next_slow.abnormal.duration_ns) == ("engine", 520)
    assert sum(stage.share for stage in slow.stages) == 1.0


def test_OBS_7_the_slowest_operations_of_the_engine_are_beside_their_medians() -> None:
    trace = trace_of(request(1, 0), request(2, 1000, add=400), request(3, 3000))
    (slow,) = explain(trace, 1)
    assert [(one.name, one.duration_ns, one.typical_ns) for one in slow.operations] == [
        ("0 ADD", 400, 30),
        ("1 MUL", 20, 20),
    ]


def test_only_an_execution_that_waits_for_its_turn_is_in_the_queue_for_cores() -> None:
    trace = trace_of(request(1, 0), [Slice(*DRIVER, 16, 18, TURN), Slice(*DRIVER, 5_000, 9_000, TURN)])
    (found,) = requests_of(trace)
    assert (found.stages["queue for cores"], found.stages["engine start"]) == (2, 2)


# ---- causes: usual requests take 86, one of them `EXTRA` more


EXTRA = 10_000


def slow_in(extra: str) -> Trace:
    """Return a trace of usual requests, and one that begins at 100,000 and takes EXTRA more at a place."""
    slow = request(9, 100_000, **{extra: EXTRA + {"wake": 10, "add": 30}[extra]})
    return trace_of(*(request(number, number * 200) for number in range(1, 6)), slow)


def explained(trace: Trace, *, is_sampled: bool = True) -> Explanation:
    trace.machine.is_sampled = is_sampled
    (found,) = explain(trace, 1)
    assert packet_of(found.request.request) == 9
    assert found.excess_ns == EXTRA
    assert sum(cause.explained for cause in found.causes) <= found.excess_ns
    return found


def causes_of(found: Explanation) -> dict[str, int]:
    return {cause.name: cause.explained for cause in found.causes}


def test_a_stopped_worker_is_a_stop_and_its_operation_is_not_slow() -> None:
    trace = slow_in("add")
    trace.machine.stops = [Stop(DRIVER[0], 100_100, 109_100, "stopped"), Stop(77, 0, 200_000, "stopped")]
    found = explained(trace)
    assert causes_of(found) == {"stops": 9_000}
    assert "the worker was stopped by a signal" in found.causes[0].evidence
    (slow, _) = found.operations
    assert (slow.name, slow.off_cpu_ns) == ("0 ADD", 9_000)
    assert {stage.name: stage.off_cpu_ns for stage in found.stages if stage.off_cpu_ns} == {"engine": 9_000}


def test_a_stop_ends_when_the_worker_records_again_and_not_when_its_client_sends() -> None:
    trace = slow_in("wake")
    identity = request_base(2, 7) | 9
    trace.slices = [one for one in trace.slices if (one.pid, one.thread) == DRIVER]
    trace.slices += [Slice(*DRIVER, 100_005, 110_015, "[NN_LI_PE]wake-up", identity)]
    trace.slices += [
        Slice(*DRIVER, at + 5, at + 15, "[NN_LI_PE]wake-up", identity - 9 + n)
        for n, at in ((number, number * 200) for number in range(1, 6))
    ]
    trace.sort()
    trace.machine.stops = [Stop(DRIVER[0], 99_000, 115_000, "stopped")]
    assert causes_of(explained(trace)) == {"stops": EXTRA}


def test_a_client_that_is_stopped_while_the_worker_computes_explains_nothing() -> None:
    trace = slow_in("add")
    trace.machine.stops = [Stop(CLIENT[0], 100_100, 109_100, "stopped")]
    assert causes_of(explained(trace)) == {}


def test_a_wait_for_a_cpu_says_who_had_it() -> None:
    trace = slow_in("add")
    trace.times = [ThreadTimes(*DRIVER, 99_000, 111_000, 8_000, 3_000)]
    trace.machine.uses = [
        CpuUse(*DRIVER, 90_000, 99_000, 9_000, (1,)),
        CpuUse(50, 51, 100_000, 108_000, 6_000, (1,)),
        CpuUse(60, 60, 100_000, 108_000, 8_000, (0,)),  # on the other CPU
    ]
    trace.machine.processes, trace.machine.threads = {50: "busy.py", 60: "other"}, {(50, 51): "spinner"}
    found = explained(trace)
    assert causes_of(found) == {"cpu-worker": 8_000}
    assert "busy.py (50), thread spinner had it" in found.causes[0].evidence
    assert "other" not in found.causes[0].evidence
    assert [(one.pid, one.had_ns) for one in found.threads[1].holders] == [(50, 6_000)]
    assert found.operations[0].off_cpu_ns == 8_000


def test_compile_processes_on_its_cpu_are_a_compilation() -> None:
    trace = slow_in("add")
    trace.times = [ThreadTimes(*DRIVER, 99_000, 111_000, 8_000, 2_000)]
    trace.machine.uses = [CpuUse(50, 50, 100_000, 108_000, 9_000, (1,))]
    trace.machine.processes = {50: "nnfmq-compiler"}
    assert causes_of(explained(trace)) == {"compilation": 8_000}


def test_a_wait_longer_than_the_request_explains_no_more_than_the_request() -> None:
    trace = slow_in("wake")
    trace.times = [ThreadTimes(*DRIVER, 1_000, 111_000, 77_000, 2_000)]
    assert causes_of(explained(trace)) == {"cpu-worker": EXTRA}


def test_what_the_clients_thread_waits_for_while_the_worker_computes_explains_nothing() -> None:
    trace = slow_in("add")
    trace.times = [ThreadTimes(*CLIENT, 99_000, 111_000, 9_000, 2_000)]
    assert causes_of(explained(trace)) == {}


def test_a_worker_that_neither_ran_nor_waited_was_off_the_cpu() -> None:
    """It handled requests for 10,060 of the 11,000, of which it ran 1,000: at least 9,060 are unknown."""
    trace = slow_in("add")
    trace.times = [ThreadTimes(*DRIVER, 100_000, 111_000, 0, 1_000)]
    handled = EXTRA + 60
    found = explained(trace, is_sampled=False)
    assert causes_of(found) == {"off-cpu": handled - 1_000}
    assert "or was stopped: nobody looked" in found.causes[0].evidence
    assert "nobody looked" not in explained(trace).causes[0].evidence
    assert found.operations[0].off_cpu_ns > 9_000


def test_an_operation_that_ran_all_the_time_is_slow() -> None:
    trace = slow_in("add")
    trace.times = [ThreadTimes(*DRIVER, 100_000, 111_000, 0, 10_900)]
    found = explained(trace)
    assert causes_of(found) == {}
    assert (found.operations[0].name, found.operations[0].off_cpu_ns) == ("0 ADD", 0)
    assert found.abnormal is not None and found.abnormal.name == "engine"


def test_a_pause_names_the_class_and_the_worker_for_which_it_was() -> None:
    trace = slow_in("add")
    trace.slices.append(Slice(*DRIVER, 100_500, 108_500, "[NN_LC_PE]paused for interactive clients"))
    trace.sort()
    trace.machine.uses = [CpuUse(70, 70, 100_000, 110_000, 9_000, (0,)), CpuUse(80, 80, 100_000, 110_000, 9_000, (1,))]
    trace.machine.processes = {70: "nnfmq-worker of camera.py", 80: "other"}
    found = explained(trace)
    assert causes_of(found) == {"pause": 8_000}
    assert "for interactive clients; nnfmq-worker of camera.py (70) computed for" in found.causes[0].evidence
    assert found.operations[0].off_cpu_ns == 8_000


def test_who_had_a_cpu_is_said_to_be_unknown_if_nobody_looked_or_nobody_was_seen() -> None:
    trace = slow_in("wake")
    trace.times = [ThreadTimes(*DRIVER, 99_000, 111_000, 9_000, 2_000)]
    assert "who had it was not recorded" in explained(trace, is_sampled=False).causes[0].evidence
    assert "who had it is not known" in explained(trace).causes[0].evidence


def test_a_trace_of_the_driver_alone_begins_when_the_client_sent_the_request() -> None:
    slices = [one for one in request(1, 0, wake=700) if (one.pid, one.thread) == DRIVER]
    wake_up = Slice(*DRIVER, 5, 705, "[NN_LI_PE]wake-up", slices[0].request)
    (found,) = requests_of(trace_of([wake_up, *slices]))
    assert (found.stages["request wake-up"], found.begin_ns, found.total_ns) == (700, 5, 760)


# ---- traces of one side


def test_a_trace_of_the_driver_alone_has_its_stages() -> None:
    slices = [one for one in request(1, 0, decode=9) if (one.pid, one.thread) == DRIVER]
    (found,) = requests_of(trace_of(slices))
    assert found.stages == {
        "decode": 9, "bind": 0, "queue for cores": 0, "engine start": 4, "engine": 50, "reply": 6,
    }  # fmt: skip
    assert found.total_ns == 69


def test_requests_from_before_the_worker_recorded_are_left_out() -> None:
    early, lost = ([one for one in request(n, at) if (one.pid, one.thread) == CLIENT] for n, at in ((1, 0), (3, 2000)))
    found = requests_of(trace_of(early, request(2, 1000), lost))
    assert [packet_of(one.request) for one in found] == [2, 3]


def test_a_trace_of_the_client_alone_has_the_driver_as_one_stage() -> None:
    slices = [one for one in request(1, 0) if (one.pid, one.thread) == CLIENT]
    (found,) = requests_of(trace_of(slices))
    assert found.stages == {"client write": 5, "driver": 78, "client read": 3}


def test_a_failed_request_has_no_engine() -> None:
    slices = [one for one in request(1, 0) if "[NN_LC" not in one.name]
    (slow,) = explain(trace_of(slices), 1)
    assert [stage.name for stage in slow.stages] == [
        "client write", "request wake-up", "decode", "bind", "result wake-up", "client read",
    ]  # fmt: skip
    assert slow.operations == []


def test_a_receiver_that_polls_is_awake_before_send_returns() -> None:
    slices = request(1, 100, wake=0)
    moved = [one._replace(begin_ns=one.begin_ns - 3) if one.name == "[NN_LD_PE]request" else one for one in slices]
    (found,) = requests_of(trace_of(moved))
    assert found.stages["request wake-up"] == 0


def test_no_time_counts_twice_if_the_sides_overlap() -> None:
    """The driver has the request before the client's wake-up call returns, the client the result likewise."""
    moved = {"[NN_LR_PIO]write": 7, "[NN_LI_PE]wait": -10}
    slices = [one._replace(end_ns=one.end_ns + moved.get(one.name, 0)) for one in request(1, 100, wake=0)]
    (found,) = requests_of(trace_of(slices))
    assert found.stages["client write"] == 5
    assert found.stages["reply"] == 4  # the client sees the result 2 before the driver's slice ends
    assert sum(found.stages.values()) <= found.total_ns


def test_calls_of_the_control_channel_are_no_requests() -> None:
    trace = Trace([Slice(1, 1, 0, 5, "[NN_LI_PC]PrepareModel", request_base(2) | 3)])
    assert requests_of(trace) == []
    assert explain(trace, 3) == []
