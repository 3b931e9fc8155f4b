"""llama.cpp's own server tests, bare and through the gateway: see README.md."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from edge.resources import load_toml
from tests.suite import compare
from tests.suite.prepare import HERE, only_run, prepare
from tests.suite.run import run


@pytest.mark.full
@pytest.mark.e2e
def test_nothing_differs_that_was_not_reviewed(test_cache: Path, smollm2: Path, built_server: Path) -> None:
    out = test_cache / "llama-suite" / "out"
    with only_run(test_cache):
        result = run(prepare(test_cache, smollm2), built_server, out, HERE / "required.txt", None)
    assert result.surprises == []
    assert result.bare_passed == result.required, "the bare server fails its own tests: nothing is proven"
    assert result.cancel_with_smollm2 == "pass"


def test_a_second_run_of_the_suite_waits_for_the_first(tmp_path: Path) -> None:
    """Its own port would give the tree another key, and the tree of the first would be removed under its tests."""
    with only_run(tmp_path):
        (lock,) = (tmp_path / "llama-suite").iterdir()
        with lock.open("w") as second, pytest.raises(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with only_run(tmp_path):
        assert [lock] == list((tmp_path / "llama-suite").iterdir())


def row(test: str, body: str) -> str:
    exchange = {"method": "POST", "path": "/completion", "status": 200, "headers": {}, "body": body}
    return json.dumps({"test": test, "rows": [exchange, {"method": "GET", "path": "/health"}]})


def test_a_difference_is_found_and_a_reviewed_one_is_named() -> None:
    bare = compare.trace("\n".join([row("a::x", "same"), row("a::y", "one"), row("b::z", "one")]))
    ours = compare.trace("\n".join([row("a::x", "same"), row("a::y", "two"), row("b::z", "two")]))
    differs = compare.different(bare, ours)
    assert set(differs) == {"a::y", "b::z"}
    passed = dict.fromkeys(("a::x", "a::y", "b::z", "c::w"), "pass")
    known = [compare.Reviewed("meant", ("b::",), 1), compare.Reviewed("no longer", ("d::",), 2)]
    surprises, met = compare.judge(passed, passed | {"c::w": "fail"}, differs, known)
    assert [each.split(":\n")[0].split("\n")[0] for each in surprises] == [
        "a::y: says something else",
        "c::w: fails",
        "reviewed for 2 tests, met by 0: no longer",
    ]
    assert met == {"meant": 1}


def test_one_test_more_under_a_reviewed_reason_is_a_surprise() -> None:
    bare = dict.fromkeys(("b::x", "b::y"), "pass")
    known = [compare.Reviewed("meant", ("b::",), 1)]
    assert compare.judge(bare, bare | {"b::x": "fail"}, {}, known)[0] == []
    surprises, _ = compare.judge(bare, dict.fromkeys(bare, "fail"), {}, known)
    assert surprises == ["reviewed for 1 tests, met by 2: meant"]


def test_a_test_that_fails_bare_proves_nothing_about_us() -> None:
    surprises, _ = compare.judge({"a::x": "fail"}, {"a::x": "fail"}, {}, [])
    assert surprises == []


def test_outcomes_are_read_from_junit() -> None:
    junit = """<testsuites><testsuite>
      <testcase classname="unit.test_a" name="x[1]"/>
      <testcase classname="unit.test_a" name="y"><failure message="no"/></testcase>
      <testcase classname="unit.test_a" name="z"><skipped/></testcase></testsuite></testsuites>"""
    assert compare.outcomes(junit) == {
        "unit/test_a.py::x[1]": "pass",
        "unit/test_a.py::y": "fail",
        "unit/test_a.py::z": "skip",
    }


def test_every_reviewed_difference_has_a_reason_and_is_about_a_required_test() -> None:
    required = (HERE / "required.txt").read_text().splitlines()
    assert len(required) == 327
    known = compare.reviewed(load_toml(HERE / "reviewed.toml"))
    assert {each.why: each.count for each in known} == json.loads((HERE / "result.json").read_text())["reviewed"]
    for each in known:
        assert len(each.why) > 20
        for start in each.tests:
            assert any(test.startswith(start) for test in required), start
