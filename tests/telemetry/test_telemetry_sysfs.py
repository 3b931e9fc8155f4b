"""The sysfs source on the trees of three boards, and on machines that have less."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge.board.board import Board, Cpu
from edge.board.probe import probe
from edge.board.tables import board_reference, table
from edge.telemetry import metrics
from edge.telemetry.document import sample_document
from edge.telemetry.sample import Rail, Sample, plausible
from edge.telemetry.sysfs import REPROBE_S, SysfsSource
from tests.fakes.fake_jetson.files import put
from tests.fakes.fake_jetson.tree import FakeBoard
from tests.trees.trees import NAMES, tree

BOARDS = ["agx-orin-64", "orin-nano-8", "agx-thor"]


def source_of(board: FakeBoard) -> SysfsSource:
    return SysfsSource(board.root, probe(board.root))


def temps(source: SysfsSource, now: float = 0.0) -> dict[str, float | None]:
    return {zone.name: zone.temp_c for zone in source.read(now).zones}


@pytest.mark.parametrize(
    ("board", "rail", "parts"),
    [
        ("agx-orin-64", "sum of rails", ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO")),
        ("orin-nano-8", "VDD_IN", ("VDD_IN",)),
        ("agx-thor", "VIN", ("VIN",)),
    ],
    indirect=["board"],
)
def test_the_rail_that_counts_is_named_and_in_watts(board: FakeBoard, rail: str, parts: tuple[str, ...]) -> None:
    board.set_total_power(37.5)
    power = source_of(board).read(0.0).power
    assert power is not None
    assert power.power_w == pytest.approx(37.5, rel=0.01)
    assert (power.rail, power.parts) == (rail, parts)
    assert (power.note is not None) == (rail == "sum of rails")


@pytest.mark.parametrize("board", BOARDS, indirect=True)
def test_values_change_live(board: FakeBoard) -> None:
    source = source_of(board)
    for watts, celsius in [(10.0, 50.0), (25.0, 70.0), (45.0, 95.0)]:
        board.set_total_power(watts)
        board.set_all_temps(celsius)
        sample = source.read(0.0)
        assert sample.power_w == pytest.approx(watts, rel=0.01)
        assert sample.temp_c == celsius


def test_every_kind_of_value_is_read(board: FakeBoard) -> None:
    board.set_gpu(load=87.5, mhz=1300.5)
    board.set_emc_percent(40)
    board.set_memory(used_kb=10_000_000, cached_kb=20_000_000, gpu_kb=3_000_000)
    sample = SysfsSource(board.root).read(5.0)
    gpu = sample.gpus[0]
    assert (gpu.load_ratio, gpu.clock_hz, gpu.max_clock_hz) == (0.875, 1300.5e6, 1300.5e6)
    assert sample.memory is not None
    assert sample.memory.available_bytes == (64349628 - 10_000_000 - 100_000) * 1024  # cached counts as available
    assert sample.gpu_used_bytes == 3_000_000 * 1024
    assert sample.emc_load_ratio == pytest.approx(0.4)
    assert sample.fan is not None
    assert (sample.fan.speed_ratio, sample.fan.rpm) == (pytest.approx(66 / 255), 1500)
    assert sample.source == "sysfs"
    assert sample.age_s(6.5) == 1.5


def test_trip_points_are_the_boards_own(board: FakeBoard) -> None:
    for zone in SysfsSource(board.root).read(0.0).zones:
        assert (zone.passive_c, zone.critical_c) == (99.0, 104.5)


def test_fc62_eagain_of_a_gated_gpu_zone_is_absent(board: FakeBoard) -> None:
    """FC-62: the read really fails with EAGAIN; the hottest of the others still counts."""
    source = SysfsSource(board.root)
    writer = board.gate("gpu")
    path = board.sys / "class/thermal/thermal_zone1/temp"
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(BlockingIOError):
            os.read(reader, 16)
        board.set_temp("tj", 61.5)
        assert temps(source)["gpu"] is None
        assert source.read(0.0).temp_c == 61.5
    finally:
        os.close(reader)
        os.close(writer)


def test_fc62_only_the_sentinel_is_dropped_and_frost_stays(board: FakeBoard) -> None:
    """FC-62: −256 °C is a sensor that is off; −20 °C is winter."""
    board.set_all_temps(-256)
    assert SysfsSource(board.root).read(0.0).temp_c is None
    board.set_all_temps(-20.5)
    assert SysfsSource(board.root).read(0.0).temp_c == -20.5


def test_fc71_a_gpu_node_that_appears_late_is_found(board: FakeBoard) -> None:
    """FC-71: looked for again, instead of saying 0 % for the whole session."""
    board.remove_gpu()
    board.set_gpu(load=64)
    source = SysfsSource(board.root)
    assert source.read(0.0).gpus == ()
    board.add_gpu()
    assert source.read(REPROBE_S / 2).gpus == ()
    assert source.read(REPROBE_S + 1).gpus[0].load_ratio == 0.64


def test_fc43_power_mode_by_name_whatever_its_number(board: FakeBoard) -> None:
    """FC-43: numbers are permuted between images; the label is not a measured power."""
    table = {0: "MODE_20W_6CORE", 1: "MAXN_SUPER", 2: "GPU_FREQ_100", 3: "25W"}
    put(board.root / "etc/nvpmodel.conf", "\n".join(f"< POWER_MODEL ID={n} NAME={name} >" for n, name in table.items()))
    for number, name in table.items():
        board.set_power_mode(number)
        sample = source_of(board).read(0.0)
        assert sample.power_mode is not None
        assert (sample.power_mode.id, sample.power_mode.name) == (number, name)
        assert sample.power_w == pytest.approx(9.552, abs=0.01)


def test_fc44_clocks_and_mode_are_read_not_remembered(board: FakeBoard) -> None:
    """FC-44: after a power cycle the clock lock is gone, and so is it in the sample."""
    for number in range(board.spec["cpus"]):
        put(board.sys / f"devices/system/cpu/cpu{number}/cpufreq/scaling_min_freq", board.spec["cpu_khz"]["max"])
    put(board.sys / "class/devfreq/17000000.gpu/min_freq", board.spec["gpu_hz"]["max"])
    source = SysfsSource(board.root)
    assert source.read(0.0).jetson_clocks is True
    put(board.sys / "class/devfreq/17000000.gpu/min_freq", board.spec["gpu_hz"]["min"])
    assert source.read(60.0).jetson_clocks is False


def test_fc44_a_busy_gpu_below_its_clock_is_throttled(board: FakeBoard) -> None:
    """FC-44: three samples in a row, so that a clock on its way up is not called throttling."""
    board.set_gpu(load=99, mhz=600)
    source = SysfsSource(board.root)
    assert [source.read(float(t)).throttled for t in range(3)] == [(), (), ("gpu-clock-below-max",)]
    board.set_gpu(mhz=1300.5)
    assert source.read(4.0).throttled == ()


def test_throttle_alerts_count_and_a_fan_does_not(board: FakeBoard) -> None:
    board.set_cooling("pwm-fan", 7)
    assert SysfsSource(board.root).read(0.0).throttled == ()
    board.set_cooling("gpu-throttle-alert", 1)
    assert SysfsSource(board.root).read(0.0).throttled == ("gpu-throttle-alert",)
    board.set_cooling("cpufreq-cpu0", 3)
    assert SysfsSource(board.root).read(0.0).throttled == ("cpufreq-cpu0", "gpu-throttle-alert")


def test_overcurrent_is_counted_from_when_we_began(board: FakeBoard) -> None:
    board.set_overcurrent(3, 700)
    source = SysfsSource(board.root)
    assert source.read(0.0).overcurrent == {"oc1": 0, "oc2": 0, "oc3": 0}
    board.set_overcurrent(3, 712)
    assert source.read(1.0).overcurrent["oc3"] == 12
    assert SysfsSource(board.root, since_boot=True).read(1.0).overcurrent["oc3"] == 712


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"-500", b"99999999999", b"9" * 400])
def test_fc73_a_rail_without_sense_is_absent_and_so_is_its_sum(board: FakeBoard, garbage: bytes) -> None:
    """FC-73: a sum with a rail missing would look like a saving, and nonsense is not a measurement."""
    put(board.sys / "class/hwmon/hwmon3/curr1_input", garbage)
    sample = source_of(board).read(0.0)
    assert sample.power is None
    assert sample.notes == ("no total power: rail VDD_GPU_SOC cannot be read",)
    assert [rail.name for rail in sample.rails] == ["VDD_CPU_CV", "VIN_SYS_5V0", "VDDQ_VDD2_1V8AO"]


def test_thor_has_no_load_file_and_says_so(tmp_path: Path) -> None:
    gpu = SysfsSource(FakeBoard(tmp_path / "b", "agx-thor").root).read(0.0).gpus[0]
    assert gpu.load_ratio is None
    assert gpu.clock_hz == 315e6


def test_jetpack5_zone_names_are_the_same_zones(board: FakeBoard) -> None:
    for number, kind in enumerate(["CPU", "GPU"]):
        put(board.sys / f"class/thermal/thermal_zone{number}/type", kind)
    assert {"cpu", "gpu", "tj"} <= set(temps(SysfsSource(board.root)))


def test_a_machine_without_sensors_gives_an_honest_nothing(tmp_path: Path) -> None:
    sample = SysfsSource(tmp_path).read(0.0)
    assert (sample.power, sample.zones, sample.gpus, sample.memory, sample.throttled) == (None, (), (), None, ())
    assert (sample.fan, sample.power_mode, sample.jetson_clocks, sample.emc_load_ratio) == (None, None, None, None)


def test_x86_placeholder_trips_are_no_limits(tmp_path: Path) -> None:
    zone = tmp_path / "sys/class/thermal/thermal_zone0"
    rows = {"type": "x86_pkg_temp", "temp": 61000, "trip_point_0_type": "passive", "trip_point_0_temp": 0}
    for node, value in rows.items():
        put(zone / node, value)
    assert [(z.temp_c, z.passive_c) for z in SysfsSource(tmp_path).read(0.0).zones] == [(61.0, None)]


@pytest.mark.parametrize("name", NAMES)
def test_every_board_tree_can_be_read(name: str) -> None:
    """Trees of real machines: whatever is missing is absent, nothing is invented."""
    sample = SysfsSource(tree(name)).read(0.0)
    assert sample.memory is not None
    assert all(zone.temp_c is None or -40 < zone.temp_c < 130 for zone in sample.zones)
    assert all(0 <= rail.power_w < 200 for rail in sample.rails)
    assert bool(sample.power) <= bool(sample.rails)


def test_an_orin_nano_s_own_files() -> None:
    """As its owner published them: VDD_IN of 4984 mV and 1856 mA, and a GPU zone that is off."""
    sample = SysfsSource(tree("orin-nano-8")).read(0.0)
    assert sample.power is not None
    assert (sample.power.rail, round(sample.power.power_w, 3)) == ("VDD_IN", 9.250)
    assert sample.temp_c == 63.781
    assert {"oc1", "oc3"} <= set(sample.overcurrent)


def chip(root: Path, number: int, name: str, **files: object) -> Path:
    """Write a hwmon chip."""
    folder = root / f"sys/class/hwmon/hwmon{number}"
    put(folder / "name", name)
    for file, value in files.items():
        put(folder / file, value)
    return folder


def test_parts_are_never_the_whole(tmp_path: Path) -> None:
    """An Orin Nano without VDD_IN: its two other rails are 1.9 W of a board that may draw 60."""
    board = FakeBoard(tmp_path / "b", "orin-nano-8")
    for label in (board.sys / "class/hwmon").glob("hwmon*/in*_label"):
        if label.read_text().strip() == "VDD_IN":
            put(label, "NC")
    sample = source_of(board).read(0.0)
    assert len(sample.rails) == 2 and sample.power is None
    assert sample.notes == ("no total power: rail VDD_IN of this board is not there",)


def test_a_chip_that_is_probed_late_completes_the_total(board: FakeBoard) -> None:
    """The second INA3221 of an AGX Orin appears after the start: 36 of 40 W are no total, and 40 W are one."""
    board.set_total_power(40.0)
    late = board.sys / "class/hwmon/hwmon4"
    target = late.readlink()
    late.unlink()
    source = source_of(board)
    sample = source.read(0.0)
    assert sample.power is None and len(sample.rails) == 3
    late.symlink_to(target)
    assert source.read(REPROBE_S / 2).power is None
    power = source.read(REPROBE_S + 1).power
    assert power is not None and power.power_w == pytest.approx(40.0, rel=0.01)


def test_a_small_offset_below_zero_is_zero(board: FakeBoard) -> None:
    """An unloaded rail reads −3 mA through the shunt's offset; that does not take the total away."""
    put(board.sys / "class/hwmon/hwmon3/curr1_input", b"-3")
    sample = source_of(board).read(0.0)
    assert sample.power is not None and min(rail.power_w for rail in sample.rails) == 0.0


@pytest.mark.parametrize(
    ("node", "note"), [("in1_input", "rail VDD_IN cannot be read"), ("curr1_input", "0 W is what")]
)
@pytest.mark.parametrize("board", ["orin-nano-8"], indirect=True)
def test_a_board_that_runs_never_draws_0_watts(board: FakeBoard, node: str, note: str) -> None:
    (folder,) = {path.parent for path in board.sys.glob("class/hwmon/*/in1_label") if path.read_text() == "VDD_IN\n"}
    put(folder / node, b"0")
    sample = source_of(board).read(0.0)
    assert sample.power is None and any(note in each for each in sample.notes)


@pytest.mark.parametrize("board", ["agx-orin-64"], indirect=True)
def test_a_rail_without_voltage_is_no_part_of_a_sum(board: FakeBoard) -> None:
    """8 of 20 W would be shown as a saving."""
    put(board.sys / "class/hwmon/hwmon3/in1_input", b"0")
    sample = source_of(board).read(0.0)
    assert sample.power is None and sample.notes == ("no total power: rail VDD_GPU_SOC cannot be read",)


def test_a_channel_that_is_switched_off_is_named(board: FakeBoard) -> None:
    folder = board.sys / "class/hwmon/hwmon3"
    put(folder / "in1_enable", b"0")
    put(folder / "curr1_input", b"")
    sample = source_of(board).read(0.0)
    assert sample.power is None
    assert sample.notes == ("no total power: rail VDD_GPU_SOC is switched off (in1_enable is 0)",)


def test_alarms_of_the_supply_are_read(board: FakeBoard) -> None:
    folder = board.sys / "class/hwmon/hwmon3"
    put(folder / "curr2_crit_alarm", b"1")
    put(folder / "curr3_crit_alarm", b"0")
    assert source_of(board).read(0.0).supply == ("power supply: VDD_CPU_CV curr2_crit_alarm",)


@pytest.mark.parametrize("name", ["curr2_lcrit_alarm", "in2_min_alarm", "power2_crit_alarm", "power2_cap_alarm"])
def test_alarms_of_every_kind_are_read(board: FakeBoard, name: str) -> None:
    put(board.sys / "class/hwmon/hwmon3" / name, b"1")
    assert source_of(board).read(0.0).supply == (f"power supply: VDD_CPU_CV {name}",)


def test_alarms_of_another_power_monitor_are_read(tmp_path: Path) -> None:
    """A carrier board's own INA226, which has no labels."""
    folder = tmp_path / "sys/class/hwmon/hwmon0"
    for node, value in {"name": b"ina226\n", "in1_lcrit_alarm": b"1\n", "power1_crit_alarm": b"0\n"}.items():
        put(folder / node, value)
    put(tmp_path / "sys/class/hwmon/hwmon1/name", b"nct6775")
    put(tmp_path / "sys/class/hwmon/hwmon1/in1_alarm", b"1")
    assert SysfsSource(tmp_path).read(0.0).supply == ("power supply: ina226 in1_lcrit_alarm",)


@pytest.mark.parametrize("garbage", [b"-1\n", b"4294967295\n", b"-999999999999999999\n", b"\xff\xfe\n"])
@pytest.mark.parametrize("board", ["orin-nano-8", "agx-thor"], indirect=True)
def test_no_file_with_garbage_shows_a_value_that_no_board_has(board: FakeBoard, garbage: bytes) -> None:
    found = probe(board.root)
    for file in [path for path in board.sys.rglob("*") if path.is_file() and not path.is_symlink()]:
        kept = file.read_bytes()
        file.write_bytes(garbage)
        document = sample_document(plausible(SysfsSource(board.root, found).read(0.0)), 0.0)
        file.write_bytes(kept)
        wrong = [(key, value) for key, value in numbers(document) if not 0 <= value <= highest(key)]
        assert not wrong, (file, wrong)


def numbers(document: object, key: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(document, dict):
        for name, value in document.items():
            yield from numbers(value, name)
    elif isinstance(document, list):
        for value in document:
            yield from numbers(value, key)
    elif isinstance(document, (int, float)) and key.endswith(("_ratio", "_hz", "_w", "_v", "_a", "_bytes", "rpm")):
        yield key, document


def highest(key: str) -> float:
    return {"ratio": 1.0, "w": 500.0, "v": 1e3, "a": 1e3, "hz": 1e11, "rpm": 1e5}.get(key.rpartition("_")[2], 2.0**60)


def test_a_sagging_5_v_rail_is_trouble_of_the_supply(tmp_path: Path) -> None:
    board = FakeBoard(tmp_path / "b", "orin-nano-8")
    volt = next(
        label.with_name(label.name.replace("label", "input"))
        for label in (board.sys / "class/hwmon").glob("hwmon*/in*_label")
        if label.read_text().strip() == "VDD_IN"
    )
    put(volt, b"4620")
    assert source_of(board).read(0.0).supply == ("power supply: VDD_IN sags to 4.62 V",)


CPU = Cpu("x", 4, 4)
ARM = Board("aarch64", "Raspberry Pi 5", None, None, 8 << 30, False, CPU)
PC = Board("x86_64", "a PC", None, None, 32 << 30, False, CPU)


def zone(root: Path, number: int, kind: str, temp_c: float, passive_c: float, critical_c: float) -> None:
    folder = root / f"sys/class/thermal/thermal_zone{number}"
    rows = {"type": kind, "temp": round(temp_c * 1000)}
    rows |= {"trip_point_0_type": "passive", "trip_point_0_temp": round(passive_c * 1000)}
    rows |= {"trip_point_1_type": "critical", "trip_point_1_temp": round(critical_c * 1000)}
    for node, value in rows.items():
        put(folder / node, value)


def test_a_board_that_is_no_jetson_has_trips_and_an_under_voltage_alarm(tmp_path: Path) -> None:
    """A Raspberry Pi: the device tree's zone and the firmware's alarm."""
    zone(tmp_path, 0, "cpu-thermal", 79.0, 80.0, 110.0)
    chip(tmp_path, 1, "rpi_volt", in0_lcrit_alarm=1)
    sample = SysfsSource(tmp_path, ARM).read(0.0)
    assert [(z.name, z.limits, z.passive_c) for z in sample.zones] == [("cpu", True, 80.0)]
    assert sample.supply == ("power supply: rpi_volt in0_lcrit_alarm",)


def test_trips_of_a_pc_s_acpi_zones_are_shown_and_limit_nothing(tmp_path: Path) -> None:
    zone(tmp_path, 0, "acpitz", 62.0, 60.0, 110.0)
    sample = SysfsSource(tmp_path, PC).read(0.0)
    assert [(z.temp_c, z.passive_c, z.limits) for z in sample.zones] == [(62.0, 60.0, False)]


@pytest.mark.parametrize("milli", [127_000, 45_000_000, -256_000, 10**400])
def test_an_implausible_temperature_is_absent(tmp_path: Path, milli: int) -> None:
    zone(tmp_path, 0, "cpu-thermal", 50.0, 80.0, 110.0)
    put(tmp_path / "sys/class/thermal/thermal_zone0/temp", str(milli))
    assert SysfsSource(tmp_path, ARM).read(0.0).temp_c is None


def test_numbers_of_400_digits_take_no_sample_down(board: FakeBoard) -> None:
    digits = "9" * 400
    for path in [*board.sys.glob("class/hwmon/hwmon*/*_input"), *board.sys.glob("class/devfreq/*/cur_freq")]:
        put(path, digits)
    put(board.root / "proc/meminfo", f"MemTotal: {digits} kB\nMemAvailable: {digits} kB\n")
    sample = source_of(board).read(0.0)
    assert (sample.power, sample.memory) == (None, None)
    json.dumps(sample_document(sample, 1.0), allow_nan=False)


def test_two_chips_with_one_label_are_one_series() -> None:
    rails = (Rail("VIN", 5.0), Rail("VIN", 6.0), Rail("CPU", 1.0))
    (family,) = [
        each for each in metrics._power(Sample(0.0, "sysfs", rails=rails)) if each.name == "edgellm_rail_power_watts"
    ]
    assert [each.labels["rail"] for each in family.samples] == ["VIN", "CPU"]


def test_every_board_of_the_table_has_its_sensors() -> None:
    listed = [name for row in board_reference().sensors for name in row.boards]
    assert len(listed) == len(set(listed))
    assert {row.id for row in table().rows} <= set(listed)
    assert all(row.source and row.zones for row in board_reference().sensors)
