"""Telemetry as the application holds it: levels, limits, documents, metrics and log lines on fake boards."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from edge.board.board import Gpu, PowerMode
from edge.board.probe import probe
from edge.config.values import TelemetryConfig, ThermalConfig
from edge.telemetry import metrics, nvml
from edge.telemetry.document import notes
from edge.telemetry.energy import EnergyMeter
from edge.telemetry.governor import OVERCURRENT_QUIET_S, AdmissionLimit, ChangeReporter, Decision, Level
from edge.telemetry.sample import GpuState, PowerState, Sample, Zone
from edge.telemetry.telemetry import Telemetry
from tests.fakes.fake_jetson.tree import FakeBoard
from tests.fakes.waiting import running, until
from tests.trees.trees import tree


class Clock:
    """Each look is a second later: dwell times pass without waiting."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Registry:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def add(self, collector: metrics.TelemetryCollector) -> None:
        self.registry.register(collector)

    def values(self) -> dict[tuple[str, Mapping[str, str]], float]:
        text = generate_latest(self.registry).decode()
        families = text_string_to_metric_families(text)
        return {(s.name, tuple(s.labels.items())): s.value for family in families for s in family.samples}


def telemetry_of(board: FakeBoard, thermal: ThermalConfig | None = None, **options: Any) -> Telemetry:
    settings = TelemetryConfig(jtop="off", interval_s=0.02)
    return Telemetry.of(probe(board.root), settings, thermal, root=board.root, **options)


async def test_heating_and_cooling_drive_each_level_once_and_limits_follow(
    board: FakeBoard, caplog: pytest.LogCaptureFixture
) -> None:
    """50 → 104 °C and back, every degree sampled, ten seconds apart."""
    caplog.set_level(logging.INFO, "edge.telemetry")
    clock, seen, limits = Clock(), [], []
    telemetry = telemetry_of(board, ThermalConfig(act=True), clock=clock)
    telemetry.slots = lambda: 4
    telemetry.on_limit(limits.append)
    telemetry.sampler.on_sample(seen.append)
    for celsius in [*range(50, 105), *range(104, 49, -1)]:
        board.set_all_temps(float(celsius))
        clock.now += 10.0
        await telemetry.sampler._full()
    assert limits == [
        AdmissionLimit(0.5, cause="heat"),
        AdmissionLimit(0.5, hold_new=True, cause="heat"),
        AdmissionLimit(0.5, hold_new=True, drain=True, cause="heat"),
        AdmissionLimit(0.5, cause="heat"),
        AdmissionLimit(),
    ]
    levels = [record.message.split(": ")[1] for record in caplog.records if record.message.startswith("thermal: ")]
    assert levels == ["PASSIVE", "HOT", "CRITICAL", "HOT", "PASSIVE", "NOMINAL"]
    assert "passive at 99.0 °C; fewer requests at once" in caplog.records[1].message
    for reader in telemetry.sampler.readers:
        reader.close()


async def test_what_a_sleeping_model_saves_is_measured_before_and_after(board: FakeBoard) -> None:
    """14 W with an idle engine, 9 W without; the watts of the end itself (20 W) belong to neither."""
    clock = Clock()
    telemetry = telemetry_of(board, clock=clock)

    async def seconds(count: int, watts: float) -> None:
        board.set_total_power(watts)
        for _ in range(count):
            clock.now += 1.0
            await telemetry.sampler._full()

    await seconds(60, 14.0)
    before = round(telemetry.document(history=False)["power"]["power_w"], 2)
    telemetry.falls_asleep("chat")
    await seconds(9, 20.0)
    await seconds(20, 9.0)
    sleep = telemetry.document(history=False)["sleep"]
    assert sleep == {"chat": {"before_w": before, "after_w": None}}
    await seconds(15, 9.0)
    after = round(telemetry.document(history=False)["power"]["power_w"], 2)
    assert telemetry.document(history=False)["sleep"] == {"chat": {"before_w": before, "after_w": after}}
    telemetry.falls_asleep("other")
    telemetry.wakes("other")
    await seconds(60, 9.0)
    assert telemetry.document(history=False)["sleep"]["other"]["after_w"] is None, "it woke before it was measured"
    for reader in telemetry.sampler.readers:
        reader.close()


class Broken:
    """A governor with a fault of its own."""

    def decide(self, sample: Sample | None, now: float, *, active: int = 0, slots: int = 1) -> Decision:
        raise ZeroDivisionError("a bug")


async def test_a_failure_of_ours_is_logged_and_limits_end(board: FakeBoard, caplog: pytest.LogCaptureFixture) -> None:
    """A level that is no longer updated would keep the engine stopped: everything is admitted until samples come."""
    telemetry = telemetry_of(board, ThermalConfig(act=True))
    telemetry._pauses_s = (0.01, 0.01)
    limits: list[AdmissionLimit] = []

    def failing(_: AdmissionLimit) -> None:
        raise RuntimeError("the first listener fails")

    telemetry.on_limit(failing)
    telemetry.on_limit(limits.append)
    board.set_all_temps(104.0)
    sound = telemetry.governor
    async with running(telemetry.run()):
        await until(lambda: limits and limits[-1].drain)
        telemetry.governor = Broken()  # type: ignore[assignment]
        await until(lambda: limits[-1] == AdmissionLimit())
        assert telemetry.decision.because == "nothing is measured: telemetry failed"
        await until(lambda: sum("ZeroDivisionError" in record.message for record in caplog.records) >= 2)
        telemetry.governor = sound
        await until(lambda: limits[-1].drain)
    assert any("a listener failed: RuntimeError" in record.message for record in caplog.records)


async def test_document_summary_and_their_age(board: FakeBoard) -> None:
    board.set_total_power(30.0)
    board.set_all_temps(70.0)
    telemetry = telemetry_of(board)
    assert telemetry.summary() == {"source": "none", "age_s": None, "thermal": "UNKNOWN"}
    async with running(telemetry.run()):
        await until(lambda: len(telemetry.sampler.history.seconds) > 5)
        document = json.loads(json.dumps(telemetry.document()))
        summary = telemetry.summary()
    assert summary["source"] == "sysfs"
    assert summary["age_s"] < 60.0
    assert document["schema"] == 1
    assert document["power"]["rail"] == "sum of rails"
    assert document["power"]["power_w"] == pytest.approx(30.0, rel=0.01)
    assert document["temp_c"] == 70.0
    assert document["power_mode"] == {"id": 2, "name": "MODE_30W"}
    assert document["governor"]["act"] is False
    assert set(document["sources"]) == {"sysfs", "host"}
    assert {source["state"] for source in document["sources"].values()} == {"ok"}
    assert document["notes"] == ["power: sum of the module's rails; the carrier board is not measured"]
    rows = document["history"]["seconds"]
    assert document["history"]["columns"] == ["at", "power_w", "temp_c", "gpu_load_ratio", "memory_used_bytes"]
    assert len(rows) > 5
    assert rows[-1][1:4] == [pytest.approx(30.0, rel=0.01), 70.0, 0.0]
    assert rows[-1][0] > 1_600_000_000


async def test_fc67_a_dead_source_leaves_a_marked_age_and_an_unmoved_limit(board: FakeBoard) -> None:
    """FC-67: stale is said (`age_s`, `silent`), and no data stops nothing."""
    clock = Clock()
    telemetry = telemetry_of(board, clock=clock)
    await telemetry.sampler._full()
    clock.now += 40.0
    assert telemetry.summary()["age_s"] == 40.0
    assert {source["state"] for source in telemetry.document()["sources"].values()} == {"silent"}
    assert telemetry.decision.limit == AdmissionLimit()
    for reader in telemetry.sampler.readers:
        reader.close()


@pytest.mark.parametrize("board", ["agx-orin-64", "orin-nano-8", "agx-thor"], indirect=True)
async def test_metrics_follow_the_conventions(board: FakeBoard) -> None:
    board.set_total_power(20.0)
    registry = Registry()
    telemetry = telemetry_of(board)
    registry.add(metrics.TelemetryCollector(telemetry))
    registry.values()  # before anything was measured
    async with running(telemetry.run()):
        await until(lambda: telemetry.energy.total_joules > 0)
        work = telemetry.energy.begin(telemetry.sampler.clock(), "chat")
        await until(lambda: work.samples > 3)
        telemetry.energy.request(work.start_s, telemetry.sampler.clock(), 7, work)
    values = registry.values()
    assert telemetry.latest.power is not None
    rail = telemetry.latest.power.rail
    assert values["edgellm_power_watts", (("rail", rail),)] == pytest.approx(20.0, rel=0.01)
    assert values["edgellm_temperature_celsius", (("zone", "tj"),)] == 45.0
    assert values["edgellm_energy_joules_total", ()] > 0
    assert values["edgellm_tokens_per_joule", (("model", "chat"),)] > 0
    assert values["edgellm_thermal_level", (("level", "NOMINAL"),)] == 1.0
    units = ("_celsius", "_watts", "_joules_total", "_ratio", "_bytes", "_hertz", "_seconds")
    plain = ("_level", "_up", "_throttled", "_events_total", "_per_joule", "_per_minute")
    assert [name for name, _ in values if not name.endswith(units + plain)] == []


@pytest.mark.parametrize(
    ("name", "source", "power", "temperature"),
    [("wsl2", "host", False, False), ("x86-vm", "host", False, False), ("orin-nano-8", "sysfs", True, True)],
)
async def test_smaller_machines_give_an_honest_smaller_picture(
    name: str, source: str, power: bool, temperature: bool
) -> None:
    """A WSL2 box and a machine with no sensor: memory and CPU, no invented heat or power."""
    root = tree(name)
    telemetry = Telemetry.of(probe(root), TelemetryConfig(jtop="off", interval_s=0.02), root=root)
    async with running(telemetry.run()):
        await until(lambda: telemetry.latest and telemetry.latest.cpu_load_ratio is not None)
        document = telemetry.document()
    assert (document["power"] is not None, document["temp_c"] is not None) == (power, temperature)
    assert document["memory"]["available_bytes"] > 0
    assert document["governor"]["level"] == ("NOMINAL" if temperature else "UNKNOWN"), "no sensor is not nominal"
    assert document["source"] == source


def test_fc71_load_0_while_tokens_flow_is_a_hint_not_a_verdict() -> None:
    """FC-71: only when nothing else knows the load; a readable devfreq node settles it."""
    stuck = Sample(0.0, "jtop", gpus=(GpuState("gpu", load_ratio=0.0),))
    assert notes(stuck, {"jtop": stuck}, 12.0) == [
        "jtop reports GPU load 0 while tokens are generated: restart jtop.service"
    ]
    assert notes(stuck, {"jtop": stuck}, None) == []
    files = Sample(0.0, "sysfs", gpus=(GpuState("gpu", load_ratio=0.8),))
    assert notes(files, {"jtop": stuck, "sysfs": files}, 12.0) == []


def test_fc64_the_release_file_names_jetpack_not_jtop(board: FakeBoard) -> None:
    """FC-64: L4T 36.4.7 and newer unknown ones come from the board's own file; jtop's table is never asked."""
    assert probe(board.root).l4t == "36.4.7"
    for revision, version in [("5.0", "36.5.0"), ("9.9", "36.9.9")]:
        release = board.root / "etc/nv_tegra_release"
        release.write_text(board.spec["release"].replace("4.7", revision))
        found = probe(board.root)
        assert found.l4t == version
        assert found.jetpack
    assert not {"jetpack", "l4t", "board"} & set(Sample.__struct_fields__)


async def test_an_alarm_of_the_supply_is_in_document_metric_and_log(
    board: FakeBoard, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "edge.telemetry")
    alarm, trouble = board.sys / "class/hwmon/hwmon3/curr2_crit_alarm", "power supply: VDD_CPU_CV curr2_crit_alarm"
    alarm.write_text("1\n")
    clock, registry = Clock(), Registry()
    telemetry = telemetry_of(board, clock=clock)
    registry.add(metrics.TelemetryCollector(telemetry))
    for state in (1, 1, 0):
        alarm.write_text(f"{state}\n")
        clock.now += OVERCURRENT_QUIET_S + 1
        await telemetry.sampler._full()
        document, values = telemetry.document(history=False), registry.values()
        assert document["supply"] == [trouble] * state
        assert (trouble in document["notes"]) == bool(state)
        assert values.get(("edgellm_supply_alarm", (("alarm", trouble),))) == (1.0 if state else None)
    told = [record.message for record in caplog.records if "supply" in record.message]
    assert told == [trouble, "power supply: no trouble any more"]
    for reader in telemetry.sampler.readers:
        reader.close()


async def test_fc44_throttling_is_told_with_the_tokens_per_second(
    board: FakeBoard, caplog: pytest.LogCaptureFixture
) -> None:
    """FC-44: once when it begins and once when it ends, apart from the levels."""
    clock = Clock()
    telemetry = telemetry_of(board, clock=clock)
    work = telemetry.energy.begin(clock.now, "chat")
    for state in (0, 0, 1, 0, 1, 0, 0, 0):
        board.set_cooling("gpu-throttle-alert", state)
        clock.now += 4.0
        work.tokens += 80
        await telemetry.sampler._full()
    told = [record.message for record in caplog.records]
    assert told == [
        "throttled by the board itself: gpu-throttle-alert, 20.0 tokens/s",
        "throttled by the board itself: no longer, 20.0 tokens/s",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    for reader in telemetry.sampler.readers:
        reader.close()


async def test_overcurrent_is_told_when_it_begins_and_when_it_ends(
    board: FakeBoard, caplog: pytest.LogCaptureFixture
) -> None:
    """A board that counts all the time is one line, not one a second."""
    clock = Clock()
    telemetry = telemetry_of(board, clock=clock)
    for count in (700, 700, 701, 705, 720, 720, 721, 721, 721, 721, 721):
        board.set_overcurrent(3, count)
        clock.now += 20.0
        await telemetry.sampler._full()
    assert [record.message for record in caplog.records] == ["over-current: oc3", "over-current: no longer"]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    for reader in telemetry.sampler.readers:
        reader.close()


async def test_fc44_the_start_says_which_mode_and_clocks_are_active(
    board: FakeBoard, caplog: pytest.LogCaptureFixture
) -> None:
    """FC-44: once, and again after a change; unknown values are left out."""
    caplog.set_level(logging.INFO, "edge.telemetry")
    clock = Clock()
    telemetry = telemetry_of(board, clock=clock)
    for number in (0, 0, 1, 1):
        board.set_power_mode(number)
        clock.now += 20.0
        await telemetry.sampler._full()
    clocks = "GPU at most 1300 MHz, memory controller 2133 MHz, clocks not locked"
    assert [record.message for record in caplog.records] == [
        f"power mode MAXN, {clocks}",
        f"power mode MODE_15W, {clocks}",
    ]
    assert ChangeReporter().mode(Sample(0.0, "jtop", power_mode=PowerMode(2, "25W"))) == "power mode 25W"
    assert ChangeReporter().mode(Sample(0.0, "host")) is None
    for reader in telemetry.sampler.readers:
        reader.close()


def test_a_gpu_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "installed", lambda: False)
    board = replace(probe(tree("rtx-4090")), gpus=(Gpu("NVIDIA GeForce RTX 4090", "GPU-1"),))
    sources = Telemetry.of(board).document()["sources"]
    assert sources["nvml"]["state"] == "unavailable"
    assert sources["nvml"]["hint"] == "pip install 'edgellm[nvml]'"


def test_thermal_settings_become_limits() -> None:
    thermal = ThermalConfig(act=True, max_watts=25.0, warn_margin_c=12.0, act_margin_c=5.0)
    telemetry = Telemetry.of(probe(tree("rtx-4090")), thermal=thermal)
    assert [telemetry.document()["governor"][name] for name in ("act", "max_watts")] == [True, 25.0]
    samples = [Sample(at_s, "sysfs", zones=(Zone("tj", c, 99.0),)) for at_s, c in enumerate((86.9, 87.0, 93.9, 94.0))]
    levels = [telemetry.governor.decide(sample, sample.at_s).level for sample in samples]
    assert levels == [Level.NOMINAL, Level.PASSIVE, Level.PASSIVE, Level.HOT]


def test_jtop_is_not_asked_where_there_is_no_jetson(tmp_path: Path, board: FakeBoard) -> None:
    assert Telemetry.of(probe(tmp_path), root=tmp_path).sampler.jtop is None
    assert Telemetry.of(probe(board.root), TelemetryConfig(jtop="off"), root=board.root).sampler.jtop is None
    assert Telemetry.of(probe(board.root), root=board.root).sampler.jtop is not None


def test_energy_meter_and_power_are_what_a_request_needs() -> None:
    """The gateway's calls, in their order."""
    meter = EnergyMeter()
    work = meter.begin(10.0, "chat")
    for at in range(10, 16):
        meter.add(float(at), PowerState(8.0, "VDD_IN").power_w)
    assert meter.request(10.0, 15.0, 100, work) == pytest.approx(40.0)
    assert meter.tokens_per_joule("chat") == pytest.approx(2.5)


COUNTED = {"tokens", "requests", "open", "swap_used_bytes", "swap_total_bytes", "gap_s"}  # really zero, not unknown


def zeros(value: object, path: str = "") -> list[str]:
    """Return the paths of numbers that are zero."""
    if isinstance(value, dict):
        return [found for key, each in value.items() for found in zeros(each, f"{path}.{key}")]
    if isinstance(value, list):
        return [found for number, each in enumerate(value) for found in zeros(each, f"{path}[{number}]")]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return [path] if number and value == 0 and path.rpartition(".")[2] not in COUNTED else []


async def test_what_is_not_measured_is_nowhere_zero() -> None:
    """A machine without any sensor: /telemetry has null or nothing where nothing is measured."""
    root = tree("x86-vm")
    telemetry = Telemetry.of(probe(root), TelemetryConfig(jtop="off", interval_s=0.02), root=root)
    async with running(telemetry.run()):
        await until(lambda: telemetry.latest and telemetry.latest.cpu_load_ratio is not None)
        work = telemetry.energy.begin(telemetry.sampler.clock(), "chat")
        telemetry.energy.request(work.start_s, telemetry.sampler.clock(), 7, work)
        document = telemetry.document(history=False)
    document.pop("cpu_load_ratio")  # an idle machine's is zero
    ages = {path for path in zeros(document) if path.endswith("age_s")}
    limits = {path for path in zeros(document) if path.startswith(".governor")}
    assert set(zeros(document)) - ages - limits - {".tokens_per_s"} == set()
    assert document["energy"]["joules"] is None and document["energy"]["models"]["chat"]["joules"] is None
    assert document["thermal"] == "UNKNOWN" and document["temp_c"] is None and document["power"] is None
