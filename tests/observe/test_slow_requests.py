"""Why requests were slow: stages by arithmetic on the slices, medians, operations, waits. (OBS-7)"""

from __future__ import annotations

from nnfmq.observe.trace_analysis import STAGES, explain, requests_of
from nnfmq.observe.trace_files import CpuWait, Slice, Trace
from nnfmq.observe.trace_layout import burst_of, packet_of, request_base, worker_of

CLIENT, DRIVER = (1, 11), (2, 22)


def request(number: int, at: int, *, wake: int = 10, decode: int = 0, bind: int = 0, add: int = 30) -> list[Slice]:
    """Return a request's slices: 5 to write, `wake`, decode, bind, 4 in the queue, the engine, 6 to reply, 8, 3."""
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
    assert found.stages == dict(zip(STAGES, (5, 10, 40, 50, 4, 50, 6, 8, 3), strict=True))
    assert found.total_ns == sum(found.stages.values())
    assert (worker_of(found.request), burst_of(found.request), packet_of(found.request)) == (2, 7, 1)
    assert found.threads == (CLIENT, DRIVER)


def test_OBS_7_the_slowest_requests_come_first_with_the_abnormal_stage() -> None:
    trace = trace_of(request(1, 0), request(2, 1000, wake=900), request(3, 3000, add=500), request(4, 5000))
    slow, next_slow = explain(trace, 2)
    assert [packet_of(one.request.request) for one in (slow, next_slow)] == [2, 3]
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


def test_OBS_7_waits_for_a_cpu_of_its_threads_are_evidence() -> None:
    trace = trace_of(request(1, 1000))
    trace.waits = [
        CpuWait(*DRIVER, 900, 1030, 77),
        CpuWait(*DRIVER, 0, 900, 1),  # before it
        CpuWait(*CLIENT, 2000, 2100, 2),  # after it
        CpuWait(2, 99, 900, 1100, 3),  # another thread
    ]
    (slow,) = explain(trace, 1)
    assert [wait.waited_ns for wait in slow.waits] == [77]


def test_a_trace_of_the_driver_alone_has_its_stages() -> None:
    slices = [one for one in request(1, 0, decode=9) if (one.pid, one.thread) == DRIVER]
    (found,) = requests_of(trace_of(slices))
    assert found.stages == {"decode": 9, "bind": 0, "queue for cores": 4, "engine": 50, "reply": 6}
    assert found.total_ns == 69


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
