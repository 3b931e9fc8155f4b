"""The reader's shapes and lines, without a service."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.telemetry import jtop_reader
from edge.telemetry.document import sample_document
from edge.telemetry.jtop_line import JtopFault, error_line, interval_of, jtop_fault, parse
from edge.telemetry.sample import Sample, Zone, merge

SOURCE = Path(jtop_reader.__file__).read_text()


def line(**values: Any) -> bytes:
    return json.dumps({"schema": 1, "event": "sample", "at_s": 10.0, "interval_s": 5.0, **values}).encode()


def test_the_reader_stands_alone_and_speaks_python_3_8() -> None:
    tree = ast.parse(SOURCE, feature_version=(3, 8))
    imports = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imports |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imports == {
        "__future__",
        "argparse",
        "collections.abc",
        "json",
        "os",
        "select",
        "socket",
        "sys",
        "threading",
        "time",
        "typing",
        "jtop",
    }


def test_fc73_milliwatts_become_watts_and_nonsense_is_dropped() -> None:
    """FC-73: the structured properties, in their own unit, within what a board can draw."""
    power = {
        "rail": {
            "VDD_GPU_SOC": {"volt": 19000, "curr": 200, "power": 3800, "online": True},
            "VDD_OFF": {"power": 0, "online": False},
            "VDD_BROKEN": {"power": 9_999_999, "online": True},
            "ucsi_source_psy_1": {"power": 15000, "online": True},
        },
        "tot": {"power": 10018799},
    }
    rails = jtop_reader.rails_of(power)
    assert rails == [{"name": "VDD_GPU_SOC", "power_w": 3.8, "voltage_v": 19.0, "current_a": 0.2}]
    assert jtop_reader.power_of(power, rails) == {"power_w": 3.8, "rail": "sum of rails", "parts": ["VDD_GPU_SOC"]}
    named = {"rail": {}, "tot": {"power": 7432, "name": "VDD_IN"}}
    assert jtop_reader.power_of(named, []) == {"power_w": 7.432, "rail": "VDD_IN", "parts": ["VDD_IN"]}
    assert jtop_reader.power_of({}, []) is None


def test_fc62_the_sentinel_is_left_out() -> None:
    """FC-62: −256 °C, online or not; an old name and a new name are one sensor."""
    temperature = {
        "gpu": {"temp": -256, "online": False},
        "cv0": {"temp": -256, "online": True},
        "CPU": {"temp": 47.4, "online": True},
        "tmp451 tboard": {"temp": -12.5, "online": True},
    }
    assert jtop_reader.temps_of(temperature) == {"cpu": 47.4, "tboard": -12.5}
    assert jtop_reader.temps_of({"cpu": {"temp": -256, "online": False}}) == {}


def test_fc62_a_zone_file_that_reads_wins_over_an_offline_sensor() -> None:
    files = Sample(1.0, "sysfs", zones=(Zone("gpu", 51.0, 99.0, 104.5), Zone("tj", None, 99.0, 104.5)))
    jtop = Sample(0.5, "jtop", zones=(Zone("tj", 52.0),))
    merged = merge([files, jtop])
    assert merged is not None
    assert merged.zones == (Zone("gpu", 51.0, 99.0, 104.5), Zone("tj", 52.0, 99.0, 104.5))


@pytest.mark.parametrize(("clock", "known"), [(1300500, True), (1575, False), (0, False), (None, False)])
def test_clocks_in_an_unknown_unit_are_not_guessed(clock: int | None, known: bool) -> None:
    """On Thor jtop gives MHz from NVML or kHz from devfreq, without saying which."""
    gpu = jtop_reader.gpu_of("Thor", {"status": {"load": 12.0}, "freq": {"cur": clock}})
    assert ("clock_hz" in gpu) == known
    assert gpu["load_ratio"] == 0.12


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (
            RuntimeError("The jtop.service is not active. Please run:\nsudo systemctl restart jtop.service"),
            "not_active",
        ),
        (RuntimeError("I can't access jtop.service.\nPlease logout or reboot this board."), "no_access"),
        (RuntimeError("Mismatch version jtop service: [4.2.2] and client: [4.2.1]. Please run:"), "version_mismatch"),
        (RuntimeError("Mismatch of Python versions between library and service"), "python_mismatch"),
        (RuntimeError("Lost connection with jtop server"), "lost"),
        (BrokenPipeError(32, "Broken pipe"), "lost"),
        (ConnectionResetError(), "lost"),
        (EOFError(), "lost"),
        (ModuleNotFoundError("No module named 'jtop'"), "not_installed"),
        (AttributeError("'NoneType' object has no attribute '_update'"), "failed"),
    ],
)
def test_whatever_the_client_raises_has_a_kind(error: Exception, kind: str) -> None:
    assert jtop_reader.kind_of(error) == kind
    found = jtop_fault(kind, str(error))
    assert found.kind == kind
    assert found.hint


def test_fc65_a_version_mismatch_names_both() -> None:
    """FC-65: service 4.2.2, client 4.2.1."""
    message = (
        "Mismatch version jtop service: [4.2.2] and client: [4.2.1]. Please run: sudo systemctl restart jtop.service"
    )
    found = jtop_fault("version_mismatch", message)
    assert found.because == "version mismatch: service 4.2.2, client 4.2.1"
    assert parse(error_line(found), 0.0) == found


@pytest.mark.parametrize("kind", ["no_socket", "frozen", "lost", "no_access", "failed", "unheard of"])
def test_troubles_survive_being_shared(kind: str) -> None:
    found = jtop_fault(kind, "by cause")
    assert parse(error_line(found), 0.0) == JtopFault(found.kind, found.because, found.hint)


def test_a_line_from_a_clock_ahead_is_not_from_the_future() -> None:
    sample = parse(line(), 7.0)
    assert isinstance(sample, Sample)
    assert sample.at_s == 7.0


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"schema": 2, "event": "sample"}',
        b"\xff\xfe",
        line(at_s=None),
        line(event="sale"),
    ],
)
def test_lines_that_are_not_ours_are_ignored(garbage: bytes) -> None:
    assert parse(garbage, 0.0) is None


GOOD: dict[str, Any] = {
    "power": {"power_w": 7.4, "rail": "VDD_IN", "parts": ["VDD_IN"]},
    "rails": [{"name": "VDD_SOC", "power_w": 1.5}],
    "temps_c": {"cpu": 51.5, "tj": 53.0},
    "gpus": [{"name": "gpu", "load_ratio": 0.5}],
    "processes": [{"pid": 7, "name": "llama-server", "gpu_memory_bytes": 1024}],
    "fan": {"speed_ratio": 0.3, "rpm": 1500},
    "power_mode": {"id": 2, "name": "MODE_30W"},
    "emc_load_ratio": 0.4,
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("power", {"power_w": "much", "rail": "VDD_IN"}),
        ("power", {"power_w": float("nan"), "rail": "VDD_IN"}),
        ("power", {"power_w": 10**400, "rail": "VDD_IN"}),
        ("power", 7),
        ("temps_c", [1]),
        ("temps_c", {"cpu": "warm", "tj": float("inf")}),
        ("gpus", [{"no": "name"}]),
        ("processes", [{}, 3]),
        ("fan", "off"),
        ("power_mode", {"id": "two"}),
        ("emc_load_ratio", float("nan")),
        ("rails", {"VDD_SOC": 1}),
        ("odd", 7),
    ],
)
def test_one_bad_field_costs_one_field(name: str, value: object) -> None:
    """Also from a peer on the shared socket: NaN and 400 digits are no JSON and no float of ours."""
    sample = parse(line(**{**GOOD, name: value}), 20.0)
    assert isinstance(sample, Sample)
    good = parse(line(**GOOD), 20.0)
    assert isinstance(good, Sample)
    kept = {"power", "rails", "zones", "gpus", "gpu_processes", "fan", "power_mode", "emc_load_ratio"}
    kept.discard({"temps_c": "zones", "processes": "gpu_processes"}.get(name, name))
    assert {field: getattr(sample, field) for field in kept} == {field: getattr(good, field) for field in kept}
    json.dumps(sample_document(sample, 20.0), allow_nan=False)


def test_one_bad_value_costs_one_value() -> None:
    row = line(temps_c={"cpu": "warm", "tj": 53.0}, gpus=[{"name": "gpu", "load_ratio": "half", "clock_hz": 5}, {}])
    sample = parse(row, 20.0)
    assert isinstance(sample, Sample)
    assert sample.zones == (Zone("tj", 53.0),)
    assert [(gpu.name, gpu.load_ratio, gpu.clock_hz) for gpu in sample.gpus] == [("gpu", None, 5.0)]


def test_text_that_no_document_can_hold_costs_its_characters_only() -> None:
    """/metrics and to_builtins need UTF-8; JSON may name half a surrogate pair."""
    rails = [{"name": "VDD\ud800_IN", "power_w": 3.0}, {"name": "VDD_CPU", "power_w": 1.0}]
    text = line(
        rails=rails, temps_c={"cpu\udfff": 50.0, "gpu \U0001f525": 40.0}, power_mode={"id": 1, "name": "\udc80"}
    )
    for each in (text, text.replace(b"\\ud800", b"\xed\xa0\x80")):
        sample = parse(each, 20.0)
        assert isinstance(sample, Sample)
        assert [rail.name for rail in sample.rails][1:] == ["VDD_CPU"] and len(sample.rails) == 2
        assert {"gpu \U0001f525"} < {zone.name for zone in sample.zones}
        json.dumps(sample_document(sample, 20.0), ensure_ascii=False).encode()


def test_a_sum_of_jtop_is_the_total_only_if_it_is_the_whole_board() -> None:
    rails = [{"name": "VDD_CPU_GPU_CV", "power_w": 1.2}, {"name": "VDD_SOC", "power_w": 0.7}]
    row = line(power={"power_w": 1.9, "rail": "sum of rails", "parts": ["VDD_CPU_GPU_CV", "VDD_SOC"]}, rails=rails)
    part = parse(row, 20.0, (("VDD_IN",),))
    assert isinstance(part, Sample) and part.power is None and len(part.rails) == 2
    whole = parse(row, 20.0, (("VDD_CPU_GPU_CV", "VDD_SOC"),))
    assert isinstance(whole, Sample) and whole.power_w == pytest.approx(1.9)


class Client:
    """A connected client of which two properties raise."""

    def __init__(self) -> None:
        self.power = {"rail": {"A": {"power": "much"}, "B": {"power": 1500, "volt": None}}, "tot": {}}
        self.temperature = {"cpu": {"temp": "warm"}, "tj": {"temp": 51.0}, "gpu": None}
        self.gpu = {"gpu": {"status": {"load": "50"}, "freq": {"cur": 1300500}}}
        self.nvpmodel = None
        self.processes = [[7, "u", "I", "Compute", 0, "S", 1.0, 10, 2048, "engine"], [8, "short"]]
        self.memory = {"EMC": {"cur": 3199000, "val": float("nan")}, "RAM": {"shared": 4}}

    @property
    def fan(self) -> dict[str, Any]:
        raise KeyError("speed")

    @property
    def jetson_clocks(self) -> bool:
        raise AttributeError("'NoneType' object has no attribute '_update'")


def test_an_attribute_that_raises_is_left_out_and_named() -> None:
    found = jtop_reader.describe(Client())
    assert found["rails"] == [{"name": "B", "power_w": 1.5}]
    assert found["temps_c"] == {"tj": 51.0}
    assert found["gpus"] == [{"name": "gpu", "clock_hz": 1300500000}]
    assert found["processes"] == [{"pid": 7, "gpu_memory_bytes": 2048 * 1024, "name": "engine"}]
    assert [text.split(":")[0] for text in found["odd"]] == ["fan", "jetson_clocks"]
    assert (found["emc_clock_hz"], found["gpu_used_bytes"]) == (3199000000, 4096)
    json.dumps(found, allow_nan=False)
    sample = parse(line(**found), 20.0)
    assert isinstance(sample, Sample)
    assert sample.notes[0] == "jtop: fan: KeyError: 'speed'"


class Failing:
    """A client whose property `name` raises `error`; all others are empty."""

    def __init__(self, name: str, error: Exception) -> None:
        self._name, self._error = name, error

    def __getattr__(self, name: str) -> object:
        if name == self._name:
            raise self._error
        return [] if name == "processes" else None if name in ("nvpmodel", "jetson_clocks") else {}


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("dictionary changed size during iteration"),
        RuntimeError("power mode is not set"),
        AssertionError(),
        ImportError("No module named 'smbus2'"),
        FileNotFoundError(2, "No such file or directory", "/sys/x"),
        PermissionError(13, "Permission denied"),
        Exception("Fan pwmfan does not exist"),
    ],
)
@pytest.mark.parametrize("name", ["fan", "temperature", "nvpmodel", "processes", "memory"])
def test_whatever_one_property_raises_is_no_end_of_the_service(name: str, error: Exception) -> None:
    odd = jtop_reader.describe(Failing(name, error))["odd"]
    assert len(odd) == 1
    assert type(error).__name__ in odd[0]


@pytest.mark.parametrize(
    "error",
    [BrokenPipeError(32, "Broken pipe"), EOFError(), OSError("handle is closed"), Exception("Lost connection with …")],
)
def test_the_end_of_the_connection_is_no_odd_field(error: Exception) -> None:
    with pytest.raises(type(error)):
        jtop_reader.describe(Failing("memory", error))
    assert jtop_reader.kind_of(error) == "lost"


@pytest.mark.parametrize(
    ("fans", "row"),
    [
        ({"pwmfan": {"speed": ["N/A"], "rpm": [1500]}}, {"rpm": 1500}),
        ({"pwmfan": {"speed": 30, "rpm": [1500]}}, {"rpm": 1500}),
        ({"pwmfan": {"speed": [30.0], "rpm": [None]}}, {"speed_ratio": 0.3}),
        ({"gone": None, "pwmfan": {"speed": [30.0]}}, {"speed_ratio": 0.3}),
        ({"pwmfan": {"speed": [], "rpm": []}}, None),
    ],
)
def test_one_bad_value_of_a_fan_costs_one_value(fans: dict[str, Any], row: dict[str, Any] | None) -> None:
    assert jtop_reader.fan_of(fans) == row


def test_one_bad_value_of_the_memory_or_of_a_process_costs_one_value() -> None:
    assert jtop_reader.memory_of({"EMC": "off", "RAM": {"shared": 4}}) == {"gpu_used_bytes": 4096}
    assert jtop_reader.process_of(7, "u", "I", "C", 0, "S", 1.0, 10, "2 GB", "e") == {"pid": 7, "name": "e"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fan", {"speed_ratio": 40.0, "rpm": -5}),
        ("gpus", [{"name": "gpu", "power_w": -9.0, "memory_used_bytes": -5, "load_ratio": 1.5, "clock_hz": -1}]),
        ("emc_load_ratio", -0.4),
        ("emc_clock_hz", 1e14),
        ("gpu_used_bytes", -4096),
        ("rails", [{"name": "VDD", "power_w": 1.5, "voltage_v": -5.0, "current_a": 1e6}]),
        ("power", {"power_w": 4294967.295, "rail": "VDD_IN"}),
    ],
)
def test_what_no_board_has_is_absent(name: str, value: object) -> None:
    sample = parse(line(**{name: value}), 20.0)
    assert isinstance(sample, Sample)
    shown = json.dumps(sample_document(sample, 20.0)["fan" if name == "fan" else "gpus"])
    assert not any(str(number) in shown for number in ("40.0", "-5", "-9", "1.5", "-1"))
    assert (sample.emc_load_ratio, sample.emc_clock_hz, sample.gpu_used_bytes, sample.power) == (None,) * 4
    assert all((rail.power_w, rail.voltage_v, rail.current_a) == (1.5, None, None) for rail in sample.rails)


KEYS = ["power", "power_w", "rail", "rails", "name", "temps_c", "gpus", "fan", "power_mode", "id", "processes", "pid"]
shapes = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), shapes))
def test_no_line_raises(row: dict[str, Any]) -> None:
    parse(line(**row), 1.0)


@pytest.mark.parametrize("text", ["1" + "0" * 400, "1e400", "NaN", "-1", "null", '"1"x', "[" * 2000])
def test_an_interval_of_another_kind_is_none(text: str) -> None:
    """400 digits ended the task that reads jtop's lines."""
    assert interval_of(b'{"interval_s": ' + text.encode() + b"}") is None


@pytest.mark.parametrize("instant", ['"-inf"', '"nan"', '"5"', "true", "null", "[]", "1e300"])
def test_an_instant_that_is_no_number_is_no_sample(instant: str) -> None:
    assert parse(b'{"schema":1,"event":"sample","at_s":%s}' % instant.encode(), 9.0) is None


def test_the_reason_of_a_share_is_bounded() -> None:
    found = parse(b'{"schema":1,"event":"error","kind":"lost","because":"%s"}' % (b"x" * 10**6), 9.0)
    assert isinstance(found, JtopFault) and len(found.because) <= 300
