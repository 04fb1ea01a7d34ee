"""What ranks tell each other when one of them fails; whole jobs that fail are in tests/faults."""

import json
import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from d9d.core.failures.activity import Activity, describe_stack
from d9d.core.failures.channel import Channel, Message
from d9d.core.failures.error_file import recording_errors, write_error_file
from d9d.core.failures.hub import Hub
from d9d.core.failures.report import Failure, JobFailedError, is_echo, is_timeout, spans

LIMIT_S = 30.0


@pytest.mark.parametrize(
    ("ranks", "text"), [([4], "4"), ([0, 1, 2], "0-2"), ([0, 2, 3, 7], "0, 2-3, 7"), ([5, 6, 8, 9], "5-6, 8-9")]
)
def test_ranks_as_text(ranks: list[int], text: str):
    assert spans(ranks) == text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (dist.DistBackendError("NCCL"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (JobFailedError("rank 3"), True),
        (RuntimeError("the sample is broken"), False),
        (ValueError("gloo"), False),
    ],
)
def test_errors_that_others_may_have_caused(error: Exception, expected: bool):
    assert is_echo(error) == expected


def test_a_timeout_of_gloo_is_known():
    assert is_timeout(
        RuntimeError("[gloo/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation to complete")
    )
    assert not is_timeout(ValueError("timeout"))


def test_a_failure_survives_its_way():
    failure = Failure(3, 'line\n"quoted" \u00e9', is_observed=True)
    assert Failure.from_json(failure.to_json()) == failure


def test_the_place_of_an_error_is_kept_and_that_of_a_block_is_left():
    activity = Activity()
    with activity.inside("inner", 5.0):
        assert (activity.place, activity.limit_s) == ("inner", 5.0)
    assert activity.describe() == "start-up"
    activity.step = 4
    with pytest.raises(ValueError, match="broken"), activity.inside("inner", 5.0):
        raise ValueError("broken")
    assert activity.describe() == "step 4, inner"


def wait_here(event: threading.Event) -> None:
    event.wait()


def test_the_stack_of_another_thread_names_its_calls():
    event = threading.Event()
    thread = threading.Thread(target=wait_here, args=(event,))
    thread.start()
    try:
        assert thread.ident is not None
        assert "test_failures.py" in describe_stack(thread.ident)
        assert "in wait_here" in describe_stack(thread.ident)
    finally:
        event.set()
        thread.join()
    assert describe_stack(thread.ident) == "    its thread has ended"


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def test_the_first_error_stays_in_the_file(error_file: Path):
    with pytest.raises(ValueError, match="first"), recording_errors():
        raise ValueError("first")
    write_error_file(RuntimeError("second"))
    message = json.loads(error_file.read_text())["message"]
    assert message["message"] == "ValueError: first"
    assert "raise ValueError" in message["extraInfo"]["py_callstack"]


def test_an_echo_is_dated_after_its_cause(error_file: Path):
    before_s = int(time.time())
    write_error_file(JobFailedError("rank 1 failed"), is_echo=True)
    extra = json.loads(error_file.read_text())["message"]["extraInfo"]
    # Torchrun stamps a process without a file up to a second later than it has died.
    assert int(extra["timestamp"]) > before_s + 1


def test_no_file_is_written_where_torchrun_wants_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    write_error_file(ValueError("x"))
    assert list(tmp_path.iterdir()) == []


class Ranks:
    """Connections with a hub, as the ranks of a job have them."""

    def __init__(self, num_ranks: int) -> None:
        self.hub = Hub(num_ranks, is_local=True, decide=lambda failure: failure)

    def connect(self, rank: int, token: str | None = None) -> Channel:
        channel = Channel(socket.create_connection(("127.0.0.1", self.hub.port)))
        channel.send(Message("hello", rank, self.hub.token if token is None else token))
        channel.send(Message("at", rank, f"place {rank}"))
        return channel


def next_message(channel: Channel) -> Message | None:
    channel.socket.settimeout(LIMIT_S)
    messages = channel.receive()
    return messages[0] if messages else None


def failure_of(channel: Channel) -> Failure:
    message = next_message(channel)
    assert message is not None
    assert message.kind == "failed"
    return Failure.from_json(message.text)


def test_all_hear_of_the_first_failure_and_of_no_other():
    ranks = Ranks(3)
    channels = [ranks.connect(rank) for rank in range(3)]
    channels[2].send(Message("failed", 2, Failure(2, "broken").to_json()))
    assert [failure_of(channel) for channel in channels] == [Failure(2, "broken")] * 3
    channels[1].send(Message("failed", 1, Failure(1, "broken too").to_json()))
    late = ranks.connect(1)
    assert failure_of(late) == Failure(2, "broken")
    ranks.hub.close()


def test_who_leaves_without_a_word_is_gone_and_who_says_so_is_not():
    ranks = Ranks(3)
    channels = [ranks.connect(rank) for rank in range(3)]
    channels[1].send(Message("bye", 1))
    assert next_message(channels[1]) is None
    channels[2].close()
    failure = failure_of(channels[0])
    assert failure.rank == 2
    assert "rank 2 is gone without an account, last seen in place 2" in failure.text
    ranks.hub.close()


def test_strangers_are_not_heard():
    ranks = Ranks(2)
    stranger = ranks.connect(1, token="guessed")
    stranger.send(Message("hello", 0, "guessed again"))
    stranger.send(Message("failed", 1, Failure(1, "a lie").to_json()))
    assert next_message(stranger) is None
    rank = ranks.connect(0)
    rank.send(Message("failed", 0, Failure(0, "the truth").to_json()))
    assert failure_of(rank) == Failure(0, "the truth")
    ranks.hub.close()


def test_a_report_says_where_all_ranks_are():
    ranks = Ranks(4)
    channels = [ranks.connect(rank) for rank in range(3)]
    channels[0].send(Message("stuck", 0, Failure(0, "too long", is_observed=True).to_json()))
    for rank, channel in enumerate(channels[:2]):
        message = next_message(channel)
        assert message is not None
        assert message.kind == "where"
        channel.send(Message("here", rank, "in an all_reduce"))
    lines = failure_of(channels[0]).text.splitlines()
    assert lines[0] == "too long"
    assert "rank 2: does not answer: native code keeps its interpreter. Last seen in place 2" in lines
    assert "rank 3: has not come this far, or is gone" in lines
    assert lines[-1] == "ranks 0-1: in an all_reduce"
    ranks.hub.close()


@pytest.mark.parametrize("line", [b'["hello", 0, "\xc3\xa9"]', b"[" * 100_000], ids=["no ASCII", "many brackets"])
def test_what_strangers_send_does_not_end_the_watch(line: bytes):
    ranks = Ranks(1)
    stranger = Channel(socket.create_connection(("127.0.0.1", ranks.hub.port)))
    stranger.socket.sendall(line + b"\n")
    assert next_message(stranger) is None
    rank = ranks.connect(0)
    rank.send(Message("failed", 0, Failure(0, "the truth").to_json()))
    assert failure_of(rank) == Failure(0, "the truth")
    ranks.hub.close()
