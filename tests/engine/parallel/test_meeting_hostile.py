"""What anybody who reaches a party's meeting place can write there: it costs a line, not the run's composure."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from uvcc_engine.parallel import member_connection, unix_group
from uvcc_engine.parallel.presence import GONE, read_withdrawal


@pytest.mark.parametrize(
    "word", [b"\x1b[2J" * 5000, b"9" * 6000 + b" x", "٣ x".encode(), b"", b"\xff\x00", b"1 " * 999]
)
def test_a_word_of_a_stranger_is_short_and_clean(word: bytes) -> None:
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), False)
    store.set(GONE, word)
    error = read_withdrawal(store, 0, 1)
    assert error is not None
    assert error.party == 1
    assert str(error).isprintable()
    assert len(str(error)) < 600


def test_a_caller_that_says_nothing_is_let_go_soon() -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX)
    began = time.monotonic()
    assert unix_group.calling_member(mine, 0.1) == -1
    assert time.monotonic() - began < 60
    theirs.sendall(b"\3\0")
    theirs.close()
    assert unix_group.calling_member(mine, 0.1) == -1
    mine.close()


def test_a_message_that_is_announced_with_more_than_memory_is_refused() -> None:
    mine, theirs = socket.socketpair(socket.AF_UNIX)
    line = member_connection.MemberConnection(mine, 5.0)
    sending = threading.Thread(target=theirs.sendall, args=(member_connection.HEAD.pack(7, 1 << 60),))
    sending.start()
    with pytest.raises(RuntimeError, match="for operation 7"):
        line.receive(1, memoryview(bytearray(4)))
    sending.join()
    line.close()
    theirs.close()
