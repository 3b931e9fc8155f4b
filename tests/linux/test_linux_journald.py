"""Journal entries: journald's own protocol over a real socket, and what stands in where there is none."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
from functools import partial
from pathlib import Path

import pytest

from edge.daemon.journal import Reporter
from edge.linux.journald import ERROR, NOTICE, WARNING, Handler, Journal, goes_to_journal
from edge.supervisor.status import Failure, ModelStatus, State
from edge.units import printable


def fields(entry: bytes) -> dict[str, str]:
    """journald's reading: NAME=value lines, or NAME, a length and a value with line breaks."""
    found: dict[str, str] = {}
    while entry:
        head, _, rest = entry.partition(b"\n")
        if b"=" in head:
            name, _, value = head.partition(b"=")
            entry = rest
        else:
            name, size = head, int.from_bytes(rest[:8], "little")
            value, entry = rest[8 : 8 + size], rest[8 + size + 1 :]
        found[name.decode()] = value.decode()
    return found


def test_an_entry_with_fields_and_line_breaks(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(short_dir / "journal.sock"))
        journal = Journal(short_dir / "journal.sock")
        evidence = "error: invalid argument: --x\nMESSAGE=forged\nPRIORITY=0"
        Reporter(journal).failed("chat", Failure("bad_flag", evidence, "remove it"), gives_up=True)
        got = fields(inbox.recv(65536))
        journal.close()
    assert got["MESSAGE"] == "chat failed: bad_flag (PRIORITY=0); next: remove it"
    assert got["PRIORITY"] == str(ERROR)
    assert got["EDGELLM_EVIDENCE"] == evidence
    assert (got["EDGELLM_MODEL"], got["EDGELLM_KIND"]) == ("chat", "bad_flag")
    assert got["SYSLOG_IDENTIFIER"] == "edgellm"


def test_what_journalctl_would_hide_is_escaped_and_cut_between_characters(short_dir: Path) -> None:
    """It prints an entry with a control character, or one that is no UTF-8, as `[37B blob data]`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(short_dir / "journal.sock"))
        journal = Journal(short_dir / "journal.sock", shown=partial(printable, newlines=True))
        Reporter(journal).failed("chat", Failure("bad_flag", "one\n\x1b[2J\x9b\u202e", "x" + "é" * 9000), gives_up=True)
        got = fields(inbox.recv(1 << 18))
        journal.close()
    assert got["MESSAGE"].startswith("chat failed: bad_flag (\\x1b[2J\\x9b\\u202e); next: xé")
    assert got["EDGELLM_EVIDENCE"] == "one\n\\x1b[2J\\x9b\\u202e"
    assert set(got["EDGELLM_HINT"]) == {"x", "é"}


def test_a_journald_with_a_new_socket_is_found_again(short_dir: Path) -> None:
    path = short_dir / "journal.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as former:
        former.bind(str(path))
        journal = Journal(path, io.StringIO())
        journal.send("one", NOTICE)
        assert fields(former.recv(65536))["MESSAGE"] == "one"
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(path))
        inbox.setblocking(False)
        journal.send("two", NOTICE)
        assert fields(inbox.recv(65536))["MESSAGE"] == "two"
        journal.close()


def test_without_the_socket_priorities_stand_before_each_line(tmp_path: Path) -> None:
    out = io.StringIO()
    journal = Journal(tmp_path / "none", out)
    journal.send("two\nlines", NOTICE, EDGELLM_MODEL="chat")
    Reporter(journal).state(ModelStatus("chat", State.LOADING))
    assert out.getvalue() == "<5>two\n<5>lines\n<6>chat: LOADING\n"


def test_pythons_log_goes_there_too(tmp_path: Path) -> None:
    out = io.StringIO()
    logger = logging.Logger("edge.gateway")
    logger.addHandler(Handler(Journal(tmp_path / "none", out)))
    logger.info("a request")
    logger.warning("keys: %s", "gone")
    assert out.getvalue() == f"<{WARNING}>keys: gone\n"


def test_only_the_journals_own_stream_counts(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        state = os.fstat(out.fileno())
        assert goes_to_journal({"JOURNAL_STREAM": f"{state.st_dev}:{state.st_ino}"}, out.fileno())
        assert not goes_to_journal({"JOURNAL_STREAM": f"{state.st_dev}:{state.st_ino + 1}"}, out.fileno())
        assert not goes_to_journal({}, out.fileno())


def test_a_wait_is_a_warning_and_says_how_long(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failure = Failure("model_missing", "no such file: /mnt/m.gguf\n/mnt is empty: is its disk mounted?", "mount it")
    Reporter(Journal(tmp_path / "none")).waits("chat", failure, 30)
    assert capsys.readouterr().out == "<4>chat waits up to 30 s: /mnt is empty: is its disk mounted?\n"


def test_a_journald_that_stands_still_stops_nothing(short_dir: Path) -> None:
    """Its queue fills up (net.unix.max_dgram_qlen), and then a blocking send would never return."""
    out = io.StringIO()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        inbox.bind(str(short_dir / "journal.sock"))
        journal = Journal(short_dir / "journal.sock", out)
        journal._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # type: ignore[union-attr]
        for number in range(20):
            journal.send(f"entry {number}" + " " * 1000, NOTICE)
        assert journal.dropped and out.getvalue() == ""
        inbox.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                inbox.recv(65536)
        journal.send("after", NOTICE)
        assert fields(inbox.recv(65536))["MESSAGE"] == "after"
        journal.close()


def test_a_name_that_is_no_utf8_is_replaced(short_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(short_dir / "journal.sock"))
        journal = Journal(short_dir / "journal.sock")
        journal.send("model \udcff", NOTICE, EDGELLM_MODEL="\udcff")
        assert fields(inbox.recv(65536))["MESSAGE"] == "model ?"
        journal.close()
    Journal(short_dir / "none", io.TextIOWrapper(io.BytesIO(), encoding="ascii")).send("✓", NOTICE)
