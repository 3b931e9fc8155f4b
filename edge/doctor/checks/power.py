"""Power mode, clocks, heat and fan: looked at, never changed. Pure."""

from __future__ import annotations

from edge.doctor.check import Check, bad, ok, unknown, warn
from edge.doctor.facts import Facts

_PASSIVE_C = 99.0  # Orin's own figure, where no trip point can be read
_MARGIN_C = 10.0
_WARM_C = 65.0


def mode(facts: Facts) -> Check | None:
    """FC-43: by name. The label is a clock cap, not a measured power; the biggest mode is not the best per joule."""
    active, wanted = facts.board.power_mode, facts.serving.power_mode_wanted
    if facts.board.soc is None:
        return None
    if active is None:
        return unknown("power.mode", "nvpmodel's state cannot be read")
    others = ", ".join(f"{mode.name}={mode.id}" for mode in facts.power.modes if mode != active)
    says = f"{active.name} (number {active.id} on this image; others: {others or 'none'})"
    if not wanted or wanted == active.name:
        return ok("power.mode", says)
    target = next((mode for mode in facts.power.modes if mode.name == wanted), None)
    if target is None:
        says = f"{says}; the profile wants {wanted}, which this image does not have"
        step = "choose one of its names in the profile; Super modes come with JetPack 6.2's Super configuration"
        return warn("power.mode", says, step)
    step = f"the profile wants {wanted}; some modes ask for a reboot"
    return warn("power.mode", says, step, f"sudo nvpmodel -m {target.id}")


def clocks(facts: Facts) -> Check | None:
    """jetson_clocks shows as lowest = highest. It does not survive a reboot, nor a change of the power mode."""
    if facts.board.soc is None or not facts.power.clocks:
        return None
    shown = ", ".join(f"{c.name} {c.min_hz // 10**6}–{c.max_hz // 10**6} MHz" for c in facts.power.clocks)
    locked = [clock.name for clock in facts.power.clocks if clock.min_hz == clock.max_hz]
    if locked:
        return ok(
            "power.clocks", f"{shown}; {' and '.join(locked)} locked at the top, until the next boot or mode change"
        )
    return ok("power.clocks", f"{shown}; they rise by themselves under load")


def heat(facts: Facts) -> Check | None:
    """FC-44: said before the throttle point, with the distance to it."""
    zones = facts.heat.zones
    if not zones:
        return unknown("power.heat", "no temperature can be read") if facts.board.soc else None
    name = "tj" if "tj" in zones else max(zones, key=lambda zone: zones[zone])
    now, limit = zones[name], facts.heat.passive_c or facts.heat.critical_c or _PASSIVE_C
    what = "throttling" if facts.heat.passive_c else "the limit"
    says = f"{name} {now:.0f} °C, {limit - now:.0f} below {what} at {limit:.0f} °C"
    if facts.heat.throttling:
        slowed = ", ".join(facts.heat.throttling[:3])
        return bad("power.heat", f"{says}; throttling now: {slowed}", "cool it, or choose a smaller power mode")
    if limit - now < _MARGIN_C:
        return warn("power.heat", says, "it will throttle under a long load: check heat sink, fan and power mode")
    return ok("power.heat", says)


def fan(facts: Facts) -> Check | None:
    found = facts.heat
    if facts.board.soc is None:
        return None
    if found.fan_pwm is None and found.fan_rpm is None:
        return unknown("power.fan", "no fan is known here: a passive carrier, or its driver is not loaded")
    turning = f"{found.fan_rpm} rpm" if found.fan_rpm is not None else f"set to {found.fan_pwm} of 255"
    hottest = max(found.zones.values(), default=0.0)
    still = found.fan_rpm == 0 or (found.fan_rpm is None and found.fan_pwm == 0)
    if still and hottest > _WARM_C:
        return warn(
            "power.fan",
            f"the fan stands still at {hottest:.0f} °C",
            "check nvfancontrol and the fan's plug",
            "systemctl status nvfancontrol",
        )
    return ok("power.fan", turning)


def over_current(facts: Facts) -> Check | None:
    """Counted since boot. Some healthy boards count all the time at their biggest mode: reported, not alarmed."""
    count = facts.heat.over_current_events
    if count is None:
        return None
    note = "" if count == 0 else "; common in the biggest power mode, worth a look with a weak supply"
    return ok("power.over_current", f"{count} over-current events since boot{note}")


CHECKS = (mode, clocks, heat, fan, over_current)
