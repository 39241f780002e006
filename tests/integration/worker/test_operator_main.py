"""A real operator process, with the test as its wrapper: what it hears, says and leaves behind."""

import os
import signal
import socket
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.operator_process import OperatorUnderTest, a_task, an_input, an_output, operator_process
from tracelake.contracts.dispatcher_api import PayloadInvalidation
from tracelake.contracts.operator_protocol import (
    MAX_FRAME,
    CallProblem,
    Cancel,
    EmitEvents,
    Finished,
    ListFiles,
    Pause,
    Progress,
    Reply,
    SaveState,
    Token,
)
from tracelake.domain.errors import TooLarge
from tracelake.worker.operator.channel import (
    HEADER,
    ChannelBroken,
    ChannelClosed,
    decode_from_operator,
    decode_to_operator,
    encode,
    read_frame,
    write_frame,
)
from tracelake.worker.operator.main import GONE

OPERATORS = """
    import logging, os, subprocess, sys, threading, time
    from tracelake.domain.errors import Invalid
    import msgspec
    from tracelake.operators import OperatorSpec, operator

    @operator("say")
    def say(ctx):
        print("to stdout")
        print("to stderr", file=sys.stderr)
        logging.getLogger("mine").warning("by logging")
        ctx.log.info("by ctx.log", number=5, text="two words")
        os.system("echo by a child")
        print("no end of line", end="")

    @operator("surroundings")
    def surroundings(ctx):
        open("left.txt", "w").write("x")
        names = {"PATH", "HOME", "LANG", "TMPDIR"}
        assert os.getcwd() == os.environ["HOME"] == os.environ["TMPDIR"], os.environ
        print(sorted((name, value) for name, value in os.environ.items() if name not in names))
        print(os.getcwd(), os.listdir())

    @operator("fail")
    def fail(ctx):
        raise eval(ctx.config["raise"])

    class Unspeakable(Exception):
        def __str__(self):
            raise ValueError

    class Settings(msgspec.Struct):
        depth: int = 1

    @operator("declared", spec=OperatorSpec("declared", Settings))
    def declared(ctx):
        print("ran")

    @operator("call")
    def call(ctx):
        print(ctx.state)
        ctx.save({"at": 1})
        ctx.emit(ctx.outputs[0].event(cursor=3))
        try:
            ctx.inputs[0].files()
        except Invalid as error:
            print("refused:", error.reason, error.message)

    @operator("wait")
    def wait(ctx):
        ctx.progress(message="waiting")
        ctx.sleep(600)
        ctx.outputs[0].announce(cursor=1)

    @operator("pausing")
    def pausing(ctx):
        ctx.progress(message="running")
        while not ctx.paused:
            ctx.sleep(0.01)
        ctx.save(os.environ["TRACE_TASK_CAPABILITY_TOKEN"])
        ctx.wait_while_paused()

    @operator("deaf")
    def deaf(ctx):
        ctx.progress(message="busy")
        ctx.progress(message="silent from here on")
        while True:
            time.sleep(60)

    @operator("leave_child")
    def leave_child(ctx):
        subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    @operator("leave_thread")
    def leave_thread(ctx):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        threading.Thread(target=lambda: time.sleep(600), daemon=True).start()

    @operator("finished_pool")
    def finished_pool(ctx):
        from concurrent.futures import ThreadPoolExecutor
        ThreadPoolExecutor(2).submit(print, "from a pool").result()
        assert subprocess.run(["true"]).returncode == 0

    @operator("too_much")
    def too_much(ctx):
        ctx.save("x" * (17 * 1024 * 1024))
"""


@pytest.fixture
def operators(tmp_path: Path) -> Path:
    path = tmp_path / "some_operators.py"
    path.write_text(textwrap.dedent(OPERATORS))
    return path


@pytest.fixture
def process(tmp_path: Path, operators: Path) -> Iterator[OperatorUnderTest]:
    work = tmp_path / "work"
    work.mkdir()
    with operator_process(work, operators) as process:
        process.ready()
        yield process


def test_a_no_op_says_that_its_scope_is_done_and_the_process_is_ready_again(
    process: OperatorUnderTest,
) -> None:
    for start in (0, 10):
        process.run(a_task("noop", inputs=[an_input(start=start, end=start + 9)], outputs=[an_output()]))
        finished, said = process.until_finished()
        assert said == []
        assert (finished.status, finished.reusable) == ("Completed", True)
        assert [(event.start, event.end) for event in finished.events] == [(start, start + 9)]
        assert process.log() == ""


def test_an_operator_is_not_run_for_a_cursor_that_has_not_moved_unless_something_was_taken_back(
    process: OperatorUnderTest,
) -> None:
    process.run(a_task("say", inputs=[an_input(after=9, upto=9)]))
    finished, _ = process.until_finished()
    assert (finished.status, process.log()) == ("Completed", "")
    process.run(
        a_task("say", inputs=[an_input(after=9, upto=9, invalidation=PayloadInvalidation(10, 12, 1))])
    )
    finished, _ = process.until_finished()
    assert finished.status == "Completed"
    assert "to stdout" in process.log()


def test_everything_that_an_operator_prints_is_in_its_log(process: OperatorUnderTest) -> None:
    process.run(a_task("say"))
    finished, _ = process.until_finished()
    assert finished.status == "Completed", finished
    log = process.log()
    for line in (
        "to stdout\n",
        "to stderr\n",
        "WARNING mine: by logging\n",
        "by a child\n",
        "no end of line",
    ):
        assert line in log
    assert "info    by ctx.log number=5 text='two words'\n" in log


def test_an_attempt_finds_its_own_variables_and_an_empty_folder_and_nothing_of_the_one_before(
    process: OperatorUnderTest, tmp_path: Path
) -> None:
    folders = set()
    for attempt in ("1", "2"):
        process.run(a_task("surroundings"), {"TRACE_ATTEMPT": attempt})
        finished, _ = process.until_finished()
        assert finished == Finished(status="Completed")
        variables, place = process.log().splitlines()
        assert variables == f"[('TRACE_ATTEMPT', '{attempt}')]"
        folder, _, files = place.partition(" ")
        assert files == "['left.txt']"
        folders.add(folder)
    assert len(folders) == 2
    assert list((tmp_path / "work").iterdir()) == []


def test_a_process_that_held_secrets_is_not_used_again(process: OperatorUnderTest) -> None:
    process.run(a_task("surroundings"), {"TRACE_ATTEMPT": "1", "API_KEY": "k-123456"})
    finished, _ = process.until_finished()
    assert (finished.status, finished.reusable) == ("Completed", False)
    assert process.process.wait(60) == 0


@pytest.mark.parametrize(
    ("error", "message", "retryable"),
    [
        ("ValueError('no such thing')", "ValueError: no such thing", True),
        ("ValueError()", "ValueError without a message", True),
        ("KeyError('k')", "KeyError: 'k'", True),
        ("Unspeakable()", "Unspeakable: (its message can't be shown: ValueError)", True),
        ("SystemExit(0)", "SystemExit: the operator called exit(0) instead of returning", True),
        ("KeyboardInterrupt()", "KeyboardInterrupt without a message", True),
        ("MemoryError()", "MemoryError without a message", True),
        ("Invalid('BadConfig', 'can never work')", "BadConfig: can never work", False),
        (
            "ValueError('key k-123456 and \\\\x00 and \\\\udc80')",
            "ValueError: key … and \\x00 and \\udc80",
            True,
        ),
    ],
)
def test_whatever_an_operator_raises_is_told_and_can_be_read_in_the_log(
    process: OperatorUnderTest, error: str, message: str, retryable: bool
) -> None:
    process.run(a_task("fail", config={"raise": error}), {"API_KEY": "k-123456"})
    finished, _ = process.until_finished()
    assert finished == Finished(status="Failed", error_message=message, retryable=retryable, reusable=False)
    assert "Traceback" in process.log()


def test_an_endless_message_is_cut(process: OperatorUnderTest) -> None:
    process.run(a_task("fail", config={"raise": "ValueError('é' * 10_000_000)"}))
    finished, _ = process.until_finished()
    assert len((finished.error_message or "").encode()) <= 4096


def test_an_unknown_operator_fails_for_good(process: OperatorUnderTest) -> None:
    process.run(a_task("nop"))
    finished, said = process.until_finished()
    assert said == []
    assert finished.retryable is False
    assert (finished.error_message or "").startswith("UnknownOperator: this worker has no operator 'nop'")


def test_a_config_is_checked_against_the_declaration_of_its_operator(process: OperatorUnderTest) -> None:
    process.run(a_task("declared", config={"depth": 2}))
    assert process.until_finished()[0].status == "Completed"
    assert process.log() == "ran\n"
    process.run(a_task("declared", config={"depth": "deep", "dept": 1}))
    finished, _ = process.until_finished()
    assert (finished.status, finished.retryable) == ("Failed", False)
    assert finished.error_message == (
        "InvalidConfig: config: dept: declared has no such setting; config: depth: Expected `int`, got `str`"
    )


def test_calls_are_answered_one_by_one_and_a_refusal_is_raised(process: OperatorUnderTest) -> None:
    process.run(a_task("call", inputs=[an_input(storage="parquet")], outputs=[an_output()]), state="before")
    save = process.until_call()
    assert save.action == SaveState({"at": 1})
    process.send(Reply(call_id=save.call_id + 1000, value="for nobody"))
    process.send(Reply(call_id=save.call_id))
    emit = process.until_call()
    assert isinstance(emit.action, EmitEvents)
    process.send(Reply(call_id=emit.call_id))
    files = process.until_call()
    assert files.action == ListFiles(0)
    process.send(Reply(call_id=files.call_id, problem=CallProblem(422, "NoSuchInput", "not there")))
    finished, _ = process.until_finished()
    assert finished == Finished(status="Completed")
    assert process.log() == "before\nrefused: NoSuchInput not there\n"


def test_a_canceled_operator_stops_and_what_it_had_is_not_reported(process: OperatorUnderTest) -> None:
    process.run(a_task("wait", outputs=[an_output()]))
    assert process.receive() == Progress({"message": "waiting"})
    process.send(Cancel("the task was canceled"))
    finished, _ = process.until_finished()
    assert finished == Finished(status="Canceled", reusable=False)


def test_a_pause_and_a_fresh_token_reach_a_running_operator(process: OperatorUnderTest) -> None:
    process.run(a_task("pausing"), {"TRACE_TASK_CAPABILITY_TOKEN": "old"})
    assert process.receive() == Progress({"message": "running"})
    process.send(Token("new"))
    process.send(Pause(True))
    save = process.until_call()
    assert save.action == SaveState("new")
    process.send(Reply(call_id=save.call_id))
    process.send(Pause(False))
    finished, _ = process.until_finished()
    assert finished.status == "Completed"


def test_words_for_an_attempt_that_is_over_are_not_heard_by_the_next(process: OperatorUnderTest) -> None:
    process.run(a_task("noop"))
    process.until_finished()
    process.send(Cancel("too late"))
    process.send(Reply(call_id=1))
    process.run(a_task("noop"))
    finished, _ = process.until_finished()
    assert finished.status == "Completed"


@pytest.mark.parametrize("operator", ["leave_child", "leave_thread"])
def test_a_process_with_something_left_in_it_is_not_used_again(
    process: OperatorUnderTest, operator: str
) -> None:
    process.run(a_task(operator))
    finished, _ = process.until_finished()
    assert (finished.status, finished.reusable) == ("Completed", False)
    assert process.process.wait(60) == 0


def test_children_and_pools_that_are_done_leave_nothing(process: OperatorUnderTest) -> None:
    process.run(a_task("finished_pool"))
    finished, _ = process.until_finished()
    assert finished == Finished(status="Completed")


def test_a_message_that_no_frame_can_hold_is_the_operators_mistake(process: OperatorUnderTest) -> None:
    process.run(a_task("too_much"))
    finished, _ = process.until_finished()
    assert (finished.error_message or "").startswith("MessageTooLarge:")
    assert finished.retryable is False


def test_a_run_of_another_version_is_refused(process: OperatorUnderTest) -> None:
    process.run(a_task("noop"), version=2)
    finished, _ = process.until_finished()
    assert finished.error_message == "this operator process uses version 1 of the protocol, its wrapper 2"
    assert process.log() == ""


def test_a_full_disk_fails_the_attempt_and_not_the_worker(process: OperatorUnderTest, tmp_path: Path) -> None:
    (tmp_path / "work").rmdir()
    process.run(a_task("noop"))
    finished, _ = process.until_finished()
    assert (finished.error_message or "").startswith("FileNotFoundError:")
    assert finished.retryable


def test_an_idle_process_ends_when_its_wrapper_hangs_up(process: OperatorUnderTest) -> None:
    process.hang_up()
    assert process.process.wait(60) == 0


def test_a_busy_process_ends_when_its_wrapper_hangs_up(process: OperatorUnderTest) -> None:
    process.run(a_task("deaf"))
    assert process.receive() == Progress({"message": "busy"})
    process.hang_up()
    assert process.process.wait(60) == GONE


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", HEADER.pack(2) + b"no", HEADER.pack(2) + b"{}"])
def test_garbage_from_the_wrapper_ends_the_process(process: OperatorUnderTest, garbage: bytes) -> None:
    process.send_bytes(garbage)
    assert process.process.wait(60) == 0


def test_a_broken_module_keeps_the_process_from_starting(tmp_path: Path) -> None:
    broken = tmp_path / "broken_operators.py"
    broken.write_text("import no_such_module")
    under_test = OperatorUnderTest(tmp_path, [str(broken)])
    assert under_test.process.wait(60) != 0
    with pytest.raises(ChannelClosed):
        under_test.receive()
    under_test.hang_up()


def test_a_frame_brings_its_descriptors_along() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull, "rb") as null:
        write_frame(ours, encode(Cancel("why")), [null.fileno()])
        body, [descriptor] = read_frame(theirs)
        assert decode_to_operator(body) == Cancel("why")
        assert os.path.sameopenfile(descriptor, null.fileno())
        assert not os.get_inheritable(descriptor)
        os.close(descriptor)


def test_a_frame_that_is_too_long_or_cut_off_is_no_frame() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(HEADER.pack(MAX_FRAME + 1))
        with pytest.raises(ChannelBroken, match="at most"):
            read_frame(theirs)
        ours.sendall(HEADER.pack(10) + b"half")
        ours.close()
        with pytest.raises(ChannelBroken, match="ended within a frame"):
            read_frame(theirs)
        with pytest.raises(ChannelClosed):
            read_frame(theirs)


def test_a_frame_with_a_heap_of_descriptors_is_refused_and_they_are_closed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, open(os.devnull, "rb") as null:
        before = len(os.listdir("/proc/self/fd"))
        write_frame(ours, b"{}", [null.fileno()] * 50)
        with pytest.raises(ChannelBroken, match="descriptors"):
            read_frame(theirs)
        assert len(os.listdir("/proc/self/fd")) == before


def test_what_no_frame_can_hold_is_not_sent() -> None:
    with pytest.raises(TooLarge):
        encode(Progress({"message": "x" * MAX_FRAME}))


@pytest.mark.parametrize(
    "body", [b"", b"nope", b"[]", b'{"type": "run"}', b'{"type": "what"}', b"\xff", b"[" * 10_000]
)
def test_what_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(ChannelBroken):
        decode_to_operator(body)
    with pytest.raises(ChannelBroken):
        decode_from_operator(body)


def test_an_operator_that_is_killed_is_seen_as_the_end_of_the_channel(process: OperatorUnderTest) -> None:
    process.run(a_task("deaf"))
    assert process.receive() == Progress({"message": "busy"})
    assert process.receive() == Progress({"message": "silent from here on"})
    os.kill(process.process.pid, signal.SIGKILL)
    with pytest.raises(ChannelClosed):
        process.receive()


def test_starting_the_operator_process_needs_neither_arrow_nor_spark(process: OperatorUnderTest) -> None:
    loaded = subprocess.run(
        ["grep", "-c", "libarrow", f"/proc/{process.process.pid}/maps"], capture_output=True, text=True
    )
    assert loaded.stdout.strip() == "0"
