"""Checks of power mode, temperature and fan. Pure."""

from __future__ import annotations

from edge.doctor.check import Check, bad, ok, unknown, warn
from edge.doctor.facts import DoctorFacts

_PASSIVE_C = 99.0  # `*-sw-throttle` of NVIDIA's device trees for Orin (p3701, p3767)
_MARGIN_C = 10.0  # an idle board this near to throttling reaches it under load
_WARM_C = 65.0  # well above idle: nvfancontrol turns the fan long before this


def mode(facts: DoctorFacts) -> Check | None:
    """Compare nvpmodel's mode with the profile's, by name: numbers differ between images (FC-43)."""
    active, wanted = facts.board.power_mode, facts.serving.power_mode_wanted
    if facts.board.soc is None:
        return None
    if active is None:
        return unknown("power.mode", "nvpmodel's state cannot be read")
    others = ", ".join(f"{mode.name}={mode.id}" for mode in facts.power_modes if mode != active)
    says = f"{active.name} (number {active.id} on this image; others: {others or 'none'})"
    if not wanted or wanted == active.name:
        return ok("power.mode", says)
    target = next((mode for mode in facts.power_modes if mode.name == wanted), None)
    if target is None:
        says = f"{says}; the profile wants {wanted}, which this image does not have"
        step = "choose one of its names in the profile; Super modes come with JetPack 6.2's Super configuration"
        return warn("power.mode", says, step)
    step = f"the profile wants {wanted}; some modes ask for a reboot"
    return warn("power.mode", says, step, f"sudo nvpmodel -m {target.id}")


def heat(facts: DoctorFacts) -> Check | None:
    """Warn before the throttling point is reached, with the distance to it (FC-44)."""
    readings = {zone.name: zone.temp_c for zone in facts.sensors.zones if zone.temp_c is not None}
    if not readings:
        return unknown("power.heat", "no temperature can be read") if facts.board.soc else None
    # `tj` is the kernel's maximum of all zones; discrete GPUs have none.
    name = "tj" if "tj" in readings else max(readings, key=lambda zone: readings[zone])
    # Trip points of other zones, such as a PC's ACPI zone at 60 °C, are not those at which the processor is throttled.
    zones = [zone for zone in facts.sensors.zones if zone.limits]
    passive_c = min((zone.passive_c for zone in zones if zone.passive_c is not None), default=None)
    critical_c = min((zone.critical_c for zone in zones if zone.critical_c is not None), default=None)
    now, limit = readings[name], passive_c or critical_c or _PASSIVE_C
    what = "throttling" if passive_c else "the limit"
    says = f"{name} {now:.0f} °C, {limit - now:.0f} below {what} at {limit:.0f} °C"
    if facts.sensors.throttled:
        slowed = ", ".join(facts.sensors.throttled[:3])
        return bad("power.heat", f"{says}; throttling now: {slowed}", "cool it, or choose a smaller power mode")
    if limit - now < _MARGIN_C:
        return warn("power.heat", says, "it will throttle under a long load: check heat sink, fan and power mode")
    return ok("power.heat", says)


def fan(facts: DoctorFacts) -> Check | None:
    """Warn where the fan stands still on a hot board."""
    if facts.board.soc is None:
        return None
    found = facts.sensors.fan
    if found is None:
        return unknown("power.fan", "no fan is found: a passive carrier board, or its driver is not loaded")
    turning = f"{found.rpm} rpm" if found.rpm is not None else f"set to {found.speed_ratio or 0:.0%}"
    hottest = facts.sensors.temp_c or 0.0
    if not (found.speed_ratio if found.rpm is None else found.rpm) and hottest > _WARM_C:
        step = "check nvfancontrol and the fan's plug"
        return warn("power.fan", f"the fan stands still at {hottest:.0f} °C", step, "systemctl status nvfancontrol")
    return ok("power.fan", turning)


def supply(facts: DoctorFacts) -> Check | None:
    """Report alarms of the power supply and a sagging 5 V rail: a board with a weak supply throttles or resets."""
    if not facts.sensors.supply:
        return None
    says = ", ".join(text.removeprefix("power supply: ") for text in facts.sensors.supply[:3])
    step = "check supply, cable and plug against the board's rated input; a smaller power mode draws less"
    return warn("power.supply", f"the power supply is in trouble: {says}", step)


CHECKS = (mode, heat, fan, supply)
