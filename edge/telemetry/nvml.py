"""Read NVIDIA GPUs through nvidia-ml-py (the extra `nvml`): discrete ones, and the integrated one of a Thor."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

from msgspec import Struct

from edge.telemetry.sample import GpuState, PowerState, Sample, Zone, celsius

# nvmlClocksEventReasons of nvml.h. Idle, application clocks and synchronized groups are no throttling.
_REASONS = {
    0x04: "gpu-power-cap",
    0x08: "gpu-hw-slowdown",
    0x20: "gpu-sw-thermal",
    0x40: "gpu-hw-thermal",
    0x80: "gpu-power-brake",
}
_SHUTDOWN, _SLOWDOWN = 0, 1  # nvmlTemperatureThresholds_t
_TEMPERATURE_GPU, _CLOCK_SM = 0, 1
NOTE = "GPU boards only; the host is not measured"
REOPEN_S = 30.0  # between two looks at a GPU that does not answer, while others do


def installed() -> bool:
    """Return whether nvidia-ml-py is installed. Whether a driver answers shows at the first read."""
    return importlib.util.find_spec("pynvml") is not None


class _Device(Struct, frozen=True):
    """A GPU and what does not change about it."""

    handle: Any
    uuid: str
    name: str
    slowdown_c: float | None
    shutdown_c: float | None


class NvmlSource:
    """A sensor source for all GPUs. `integrated`: one GPU that shares the board's memory (Thor).

    An integrated GPU has no UUID here, as in the other sources it is merged with, and its power is not the total.
    """

    name = "nvml"

    def __init__(self, *, integrated: bool = False) -> None:
        self._integrated = integrated
        self._nvml: ModuleType | None = None
        self._devices: list[_Device] = []
        self._silent: dict[str, Exception] = {}  # GPUs that do not answer
        self._opened_s = float("-inf")

    def read(self, now: float, *, quick: bool = False) -> Sample:
        """Return one sample. Raises pynvml.NVMLError or ImportError where no GPU answers; the next read starts again.

        While others answer, one that does not is asked again every REOPEN_S, and the sum of their power is unknown.
        """
        if self._silent and now - self._opened_s >= REOPEN_S:
            self.close()
        try:
            if not self._devices:
                self._open()
                self._opened_s = now
            states = self._states(quick)
            if self._silent and not states:
                raise next(iter(self._silent.values()))
            reasons = [] if quick else [reason for device, _ in states for reason in self._reasons(device)]
        except Exception:
            self.close()
            raise
        gpus = [state for _, state in states]
        return Sample(
            now,
            self.name,
            power=None if self._integrated or self._silent else _total(gpus),
            zones=tuple(self._zone(device, state) for device, state in states),
            gpus=tuple(gpus),
            throttled=tuple(dict.fromkeys(reasons)),
            notes=tuple(f"nvml: {name} does not answer: {error}" for name, error in self._silent.items()),
        )

    def close(self) -> None:
        nvml, self._nvml, self._devices, self._silent = self._nvml, None, [], {}
        if nvml is not None:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlShutdown()

    def _open(self) -> None:
        import pynvml as nvml

        nvml.nvmlInit()
        self._nvml = nvml
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                self._add(nvml.nvmlDeviceGetHandleByIndex(index))
            except (nvml.NVMLError, ValueError) as error:
                self._silent[f"GPU {index}"] = error

    def _add(self, handle: Any) -> None:
        """Take a GPU that is asked for. Raises NVMLError or ValueError for one that does not say which it is."""
        nvml = self._nvml
        assert nvml is not None
        uuid = nvml.nvmlDeviceGetUUID(handle)
        name = self._ask(nvml.nvmlDeviceGetName, handle) or "NVIDIA GPU"
        slowdown, shutdown = (
            self._ask(nvml.nvmlDeviceGetTemperatureThreshold, handle, kind) for kind in (_SLOWDOWN, _SHUTDOWN)
        )
        self._devices.append(_Device(handle, uuid, name, slowdown, shutdown))

    def _states(self, quick: bool) -> list[tuple[_Device, GpuState]]:
        """Read each GPU that answers. Raises NVMLError if the driver is gone."""
        nvml, found = self._nvml, []
        assert nvml is not None
        for device in list(self._devices):
            try:
                found.append((device, self._state(device, quick)))
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_GPU_IS_LOST:
                    raise
                self._devices.remove(device)
                self._silent[device.uuid] = error
        return found

    def _state(self, device: _Device, quick: bool) -> GpuState:
        nvml, handle = self._nvml, device.handle
        assert nvml is not None
        milliwatt = self._ask(nvml.nvmlDeviceGetPowerUsage, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        temp = self._ask(nvml.nvmlDeviceGetTemperature, handle, _TEMPERATURE_GPU)
        load = None if quick else self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        clock, highest = (
            None if quick else self._ask(ask, handle, _CLOCK_SM)
            for ask in (nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo)
        )
        return GpuState(
            device.name,
            uuid=None if self._integrated else device.uuid,
            load_ratio=None if load is None else load.gpu / 100,
            clock_hz=None if clock is None else clock * 1e6,
            max_clock_hz=None if highest is None else highest * 1e6,
            temp_c=None if temp is None else celsius(temp),
            power_w=None if milliwatt is None else milliwatt / 1000,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
        )

    def _zone(self, device: _Device, state: GpuState) -> Zone:
        name = "gpu" if self._integrated else device.uuid
        return Zone(name, state.temp_c, device.slowdown_c, device.shutdown_c)

    def _reasons(self, device: _Device) -> list[str]:
        assert self._nvml is not None
        # The second name is the one of nvidia-ml-py before 12; the bits are the same.
        names = ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons")
        ask = next((found for name in names if (found := getattr(self._nvml, name, None))), None)
        bits = 0 if ask is None else self._ask(ask, device.handle) or 0
        return [reason for bit, reason in _REASONS.items() if bits & bit]

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call NVML; None where this GPU does not support the call. Raises NVMLError if the GPU or driver is gone."""
        assert self._nvml is not None
        nvml = self._nvml
        try:
            return function(*arguments)
        except nvml.NVMLError as error:
            # Only these mean that a new nvmlInit is needed; all others are calls that this GPU does not have.
            gone = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_UNINITIALIZED, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
            if error.value in gone:
                raise
            return None
        except (AttributeError, TypeError, ValueError):  # an older library, or bytes that are no text
            return None


def _total(states: list[GpuState]) -> PowerState | None:
    """Sum the power of all GPUs; None if one is unknown: its absence would look like a saving."""
    watts = [state.power_w for state in states if state.power_w is not None]
    if not watts or len(watts) < len(states):
        return None
    rail = "GPU" if len(states) == 1 else "sum of GPUs"
    return PowerState(sum(watts), rail, tuple(state.uuid or state.name for state in states), NOTE)
