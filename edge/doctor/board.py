"""Checks of the board: JetPack release, power mode, temperature, fan and supply. Pure."""

from __future__ import annotations

from edge.board.tables import board_reference
from edge.doctor.check import Finding, bad, ok, unknown, warn
from edge.doctor.facts import DoctorFacts

_PASSIVE_C = 99.0  # `*-sw-throttle` of NVIDIA's device trees for Orin (p3701, p3767)
_MARGIN_C = 10.0  # an idle board this near to throttling reaches it under load
_WARM_C = 65.0  # well above idle: nvfancontrol turns the fan long before this


def supported(facts: DoctorFacts) -> Finding:
    """Check that the board has a GPU generation that llama.cpp can use."""
    board = facts.board
    if board.refused:
        return bad(board.refused, "serve from its CPU", "edgellm up --profile cpu")
    system = f", L4T {board.l4t} (JetPack {board.jetpack}, CUDA {board.cuda})" if board.l4t else ""
    cards = "".join(f", {gpu.name}" for gpu in board.gpus) if board.soc is None else ""
    return ok(f"{board.module}{cards}{system}")


def release(facts: DoctorFacts) -> Finding | None:
    """Report an L4T release that the table lacks; the nearest known release is used, never refused (FC-64)."""
    if facts.board.soc is None or facts.board.refused:
        return None
    guesses = [note for note in facts.board.notes if "L4T" in note]
    if guesses:
        return unknown(guesses[0], "nothing to do; a newer edgellm may know it")
    return ok(f"JetPack {facts.board.jetpack} is in the table of releases")


def known_faults(facts: DoctorFacts) -> Finding | None:
    """Warn of a release with a known fault: L4T 36.4.7 refuses allocations that fit (FC-16)."""
    if facts.board.l4t is None:
        return None
    for issue in board_reference().issues:
        if facts.board.l4t in issue.l4t:
            return warn(issue.says, f"{issue.next} ({issue.source})")
    return ok(f"no known fault of L4T {facts.board.l4t}")


def mode(facts: DoctorFacts) -> Finding | None:
    """Compare nvpmodel's mode with the profile's, by name: numbers differ between images (FC-43)."""
    active, wanted = facts.board.power_mode, facts.serving.power_mode_wanted
    if facts.board.soc is None:
        return None
    if active is None:
        return unknown("nvpmodel's state cannot be read")
    others = ", ".join(f"{mode.name}={mode.id}" for mode in facts.power_modes if mode != active)
    says = f"{active.name} (number {active.id} on this image; others: {others or 'none'})"
    if not wanted or wanted == active.name:
        return ok(says)
    target = next((mode for mode in facts.power_modes if mode.name == wanted), None)
    if target is None:
        says = f"{says}; the profile wants {wanted}, which this image does not have"
        step = "choose one of its names in the profile; Super modes come with JetPack 6.2's Super configuration"
        return warn(says, step)
    return warn(says, f"the profile wants {wanted}; some modes ask for a reboot", f"sudo nvpmodel -m {target.id}")


def heat(facts: DoctorFacts) -> Finding | None:
    """Warn before the throttling point is reached, with the distance to it (FC-44)."""
    readings = {zone.name: zone.temp_c for zone in facts.sensors.zones if zone.temp_c is not None}
    if not readings:
        return unknown("no temperature can be read") if facts.board.soc else None
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
        return bad(f"{says}; throttling now: {slowed}", "cool it, or choose a smaller power mode")
    if limit - now < _MARGIN_C:
        return warn(says, "it will throttle under a long load: check heat sink, fan and power mode")
    return ok(says)


def fan(facts: DoctorFacts) -> Finding | None:
    """Warn where the fan stands still on a hot board."""
    if facts.board.soc is None:
        return None
    found = facts.sensors.fan
    if found is None:
        return unknown("no fan is found: a passive carrier board, or its driver is not loaded")
    turning = f"{found.rpm} rpm" if found.rpm is not None else f"set to {found.speed_ratio or 0:.0%}"
    hottest = facts.sensors.temp_c or 0.0
    if not (found.speed_ratio if found.rpm is None else found.rpm) and hottest > _WARM_C:
        step = "check nvfancontrol and the fan's plug"
        return warn(f"the fan stands still at {hottest:.0f} °C", step, "systemctl status nvfancontrol")
    return ok(turning)


def supply(facts: DoctorFacts) -> Finding | None:
    """Report alarms of the power supply and a sagging 5 V rail: a board with a weak supply throttles or resets."""
    if not facts.sensors.supply:
        return None
    says = ", ".join(text.removeprefix("power supply: ") for text in facts.sensors.supply[:3])
    step = "check supply, cable and plug against the board's rated input; a smaller power mode draws less"
    return warn(f"the power supply is in trouble: {says}", step)


CHECKS = {"board.supported": supported, "board.release": release, "board.faults": known_faults}
POWER_CHECKS = {"power.mode": mode, "power.heat": heat, "power.fan": fan, "power.supply": supply}
