"""A bench fails when a limit is exceeded."""

import json

import pytest

from tests.bench.rows import Row, report


@pytest.mark.parametrize("as_json", [True, False])
def test_a_limit_that_is_exceeded_is_shown_and_is_the_exit_code(
    as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    within = [Row("age", 1.9, "s", 2.0), Row("CPU", 99.0, "%")]
    assert report(within, as_json=as_json) == 0
    assert "EXCEEDED" not in capsys.readouterr().out
    assert report([*within, Row("p99", 50.1, "ms", 50.0)], as_json=as_json) == 1
    said = capsys.readouterr().out
    assert json.loads(said)["rows"][2]["limit"] == 50.0 if as_json else "EXCEEDED" in said
