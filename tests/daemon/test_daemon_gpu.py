"""Plans for a GPU that is late, missing or back: wait, refuse, use the CPU, return to the GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace

from edge.board import nvidia, nvml
from edge.board.device_nodes import WAIT_S
from edge.board.probe import probe
from edge.config import load
from edge.daemon.device_recovery import recover_gpu
from edge.daemon.fleet import Fleet, terms_of
from edge.daemon.late_start import LateStart
from edge.errors import DeviceMissingError
from edge.paths import Folders, folders
from edge.plan.prepare import HostView, Prepared, prepare
from edge.supervisor.status import State
from edge.supervisor.supervisor import SupervisorCallbacks
from tests.board.test_board_nvml import library as library
from tests.daemon.served import install
from tests.fakes.llama_switches import argv, write_fake
from tests.serving import Up, eventually
from tests.supervisor.rig import gpu_settings, launch_plan, rigged, settings
from tests.trees.trees import copy, write

NODES = ("dev/nvmap", "dev/nvhost-ctrl-gpu")


@pytest.fixture
def orin(short_dir: Path) -> Path:
    """An Orin just after power-on: no device node yet."""
    root = copy("orin-nano-8", short_dir)
    for node in (*NODES, "dev/nvgpu/igpu0/ctrl"):
        (root / node).unlink(missing_ok=True)
    write(root, "proc/uptime", "9.00 9.00\n")
    return root


@pytest.fixture
def places(short_dir: Path) -> Folders:
    found = folders({}, short_dir / "s")
    install(found.data, "c-orin-1", gpu={"CUDA0": "Orin"})
    built_for(found, "c-orin-1", 87)
    return found


def built_for(places: Folders, engine: str, *arch: int) -> None:
    manifest = places.engines / engine / "engine.json"
    manifest.write_text(manifest.read_text().replace('"cuda_arch": []', f'"cuda_arch": {list(arch)}'))


def planned(places: Folders, model: Path, place: HostView, **sets: str) -> Prepared:
    flags: dict[str, object] = {
        "profile": "orin",
        "model": [f"chat={model}"],
        "engine": "c-orin-1",
        "set": [f"{key}={value}" for key, value in sets.items()],
    }
    return prepare(load(places, flags, {}), places, place)


def appear(root: Path) -> None:
    for node in NODES:
        write(root, node, "")


def test_fc74_nodes_that_are_not_there_yet_are_waited_for(orin: Path, places: Folders, smollm2: Path) -> None:
    with pytest.raises(DeviceMissingError) as caught:
        planned(places, smollm2, HostView(orin))
    assert caught.value.patience_s == WAIT_S and "/dev/nvmap" in str(caught.value)
    appear(orin)
    plan = planned(places, smollm2, HostView(orin)).plan.models["chat"].ladder.plans[0]
    assert plan.settings.n_gpu_layers == 31


def test_when_they_stay_away_it_is_refused_or_degraded_as_the_profile_says(
    orin: Path, places: Folders, smollm2: Path
) -> None:
    long = HostView(orin, waited_s=WAIT_S + 1)
    with pytest.raises(DeviceMissingError):
        planned(places, smollm2, long)
    prepared = planned(places, smollm2, long, fallback="cpu")
    model = prepared.plan.models["chat"]
    assert model.ladder.plans[0].settings.n_gpu_layers == 0
    (known,) = terms_of(prepared, model).known
    assert (known.subject, known.wanted, known.got) == ("device", "GPU", "CPU") and "/dev/nvmap" in known.because


@pytest.mark.parametrize(("gpus", "capability"), [("[]", "8.9"), ('["T4"]', "7.5"), ('["GPU-2222", "0"]', "8.9")])
def test_the_supervisor_is_given_the_gpu_that_the_plan_uses(
    short_dir: Path, smollm2: Path, gpus: str, capability: str
) -> None:
    """Its evidence that machine code ran names that one, and not the newest card of the machine."""
    root = copy("rtx-4090", short_dir / "root")
    cards = root / "nvidia-smi.csv"
    old = "1, GPU-2222, Tesla T4, 00000000:09:00.0, 15360, 15000, 7.5, [N/A], 570.133.07\n"
    cards.write_text(cards.read_text().rstrip() + "\n" + old)
    found = folders({}, short_dir / "s")
    install(found.data, "c-cuda-1", gpu={"CUDA0": "NVIDIA GeForce RTX 4090"})
    built_for(found, "c-cuda-1", 75, 89)
    found.config.mkdir(parents=True, exist_ok=True)
    text = f'schema = 1\nengine = "c-cuda-1"\n[[model]]\nid = "chat"\nref = "{smollm2}"\nset = {{ gpus = {gpus} }}\n'
    (found.config / "edgellm.toml").write_text(text)
    prepared = prepare(load(found, {}, {}), found, HostView(root))
    assert prepared.board.compute_capability == "8.9"
    model = prepared.plan.models["chat"]
    assert model.ladder.plans[0].settings.n_gpu_layers == 31
    assert terms_of(prepared, model).capability == capability


def test_long_after_boot_fallback_cpu_is_not_waited_for(orin: Path, places: Folders, smollm2: Path) -> None:
    """`up` by hand and `plan` decide alike: the CPU at once, as a degradation."""
    write(orin, "proc/uptime", "9999.00 9.00\n")
    with pytest.raises(DeviceMissingError):
        planned(places, smollm2, HostView(orin))
    model = planned(places, smollm2, HostView(orin), fallback="cpu").plan.models["chat"]
    assert model.ladder.plans[0].settings.n_gpu_layers == 0


async def test_fc74_requests_wait_for_a_late_gpu(orin: Path, places: Folders, smollm2: Path) -> None:
    with pytest.raises(DeviceMissingError) as caught:
        planned(places, smollm2, HostView(orin))
    config = load(places, {"model": [f"chat={smollm2}"]}, {})
    late_start = LateStart(config, caught.value)
    assert late_start.patience_s == WAIT_S
    stand_in = late_start.placeholders["chat"]
    assert stand_in.status().state is State.STARTING, "held, not failed"
    coming = asyncio.create_task(
        late_start.until(
            lambda waited_s: planned(places, smollm2, HostView(orin, waited_s=waited_s)), lambda _: None, look_s=0.05
        )
    )
    await asyncio.sleep(0.3)
    assert not coming.done()
    appear(orin)
    prepared = await asyncio.wait_for(coming, 30)
    assert prepared.plan.models["chat"].ladder.plans[0].settings.n_gpu_layers == 31


async def test_a_model_that_lost_its_gpu_is_restarted_on_it(
    orin: Path, places: Folders, smollm2: Path, short_dir: Path
) -> None:
    appear(orin)
    prepared = planned(places, smollm2, HostView(orin))
    command = argv(short_dir / "fake", offloaded=0)
    callbacks = SupervisorCallbacks(cpu=lambda: launch_plan(command, 0, settings()))
    async with rigged(short_dir, argv=command, chosen=gpu_settings(), callbacks=callbacks) as rig:
        await rig.ready()
        assert rig.supervisor.on_cpu_instead
        looks = 0

        def answers(_: Prepared) -> bool:
            nonlocal looks
            looks += 1
            if looks == 1:
                raise RuntimeError("can't start new thread")  # the next look may go better
            if looks == 3:
                rig.change(offloaded=None, gpu={"CUDA0": "Orin"})
            return looks >= 3

        watching = asyncio.create_task(
            recover_gpu(lambda: prepared, ship(rig.supervisor), nothing, answers=answers, pauses_s=(0.05,))
        )
        try:
            await rig.until(lambda: rig.supervisor.machine.rung == 0 and rig.states[-1] == "READY")
        finally:
            watching.cancel()
        assert looks == 3 and rig.supervisor.status().degraded == ()


async def test_what_was_planned_without_the_gpu_is_planned_again(orin: Path, places: Folders, smollm2: Path) -> None:
    prepared = planned(places, smollm2, HostView(orin, waited_s=WAIT_S + 1), fallback="cpu")
    again = asyncio.Event()

    async def plan_again() -> None:
        again.set()

    for current, expected in ((replace(prepared, profile=cpu_only(prepared)), False), (prepared, True)):
        watching = asyncio.create_task(
            recover_gpu(lambda now=current: now, ship(), plan_again, answers=lambda _: True, pauses_s=(0.01,))
        )
        await (asyncio.wait_for(again.wait(), 60) if expected else asyncio.sleep(0.2))
        watching.cancel()
        assert again.is_set() == expected


def cpu_only(prepared: Prepared) -> Any:
    return replace(prepared.profile, preset=replace(prepared.profile.preset, backend="cpu"))


async def nothing() -> None:
    """Plan nothing."""


def ship(*supervisors: Any) -> Fleet:
    """Return a fleet that only lists its supervisors."""

    class Few:
        def supervisors(self) -> list[Any]:
            return list(supervisors)

    return cast(Fleet, Few())


def test_a_driver_that_hangs_is_waited_for_like_a_late_one(
    library: str, monkeypatch: pytest.MonkeyPatch, short_dir: Path, smollm2: Path
) -> None:
    """The plan is refused at once, so that `up` serves its probes and plans again when the driver answers."""
    hang = short_dir / "hang"
    hang.touch()
    monkeypatch.setenv("FAKE_NVML_HANG", str(hang))
    monkeypatch.setattr(nvidia, "_DRIVER_NODES", ("/proc/self",))
    monkeypatch.setattr(nvml.read, "__defaults__", ((library,), 0.05, print))
    places = folders({}, short_dir / "s")
    install(places.data, "c-cpu-1")
    config = load(places, {"model": [f"chat={smollm2}"], "engine": "c-cpu-1"}, {})
    board = probe()
    assert board.gpus == () and nvml.HANGS in board.notes
    try:
        with pytest.raises(DeviceMissingError) as caught:
            prepare(config, places)
        assert str(caught.value) == nvml.HANGS and caught.value.patience_s == WAIT_S
    finally:
        hang.unlink()
    assert nvml._call is not None
    nvml._call.join(30)
    monkeypatch.setattr(nvml.read, "__defaults__", ((library,), 30.0, print))
    assert prepare(config, places).plan.models


# Only the look whether a driver is worth asking is replaced: there is none on a machine that runs the tests.
AS_DRIVER = """import sys
from edge.board import nvidia
from edge.daemon import launch
nvidia._DRIVER_NODES = ("/proc/self",)
sys.exit(launch.up(sys.argv[1:]))
"""


def test_up_answers_its_probes_and_names_the_driver_while_nvml_hangs(
    library: str, short_dir: Path, smollm2: Path
) -> None:
    hang = short_dir / "hang"
    hang.touch()
    engine = write_fake(short_dir)
    env = {"LD_LIBRARY_PATH": str(Path(library).parent), "FAKE_NVML_HANG": str(hang)}
    options = ("-p", "auto", "-m", f"demo={smollm2}", "--engine", str(engine))
    with Up(short_dir / "s", *options, env=env, program=("-c", AS_DRIVER)) as up:

        def livez() -> bool:
            try:
                return httpx.get(f"{up.url}/livez", timeout=10, verify=False).status_code == 200
            except httpx.HTTPError:
                return False

        def named() -> bool:
            return any(nvml.HANGS in event.get("text", "") for event in up.events())

        try:
            eventually(livez, lambda: f"no /livez: {up.output}")
            demo = up.healthz()["models"]["demo"]
            assert demo["failure"]["kind"] == "device_missing"
            (gate,) = demo["gates"].items()
            assert (gate[0], gate[1]["ready"], gate[1]["evidence"]) == ("driver", False, nvml.HANGS)
            eventually(named, lambda: f"not named: {up.output}")
            assert livez(), "it goes on answering"
        finally:
            hang.unlink()
