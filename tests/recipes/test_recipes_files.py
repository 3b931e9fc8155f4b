"""The files of docs/recipes: parsed, and each name in them exists in edgellm."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from edge.board.probe import probe
from edge.config.load import KEYS, env_layers, file_layer
from edge.config.values import GatewayConfig, HoldConfig, RestartConfig, TelemetryConfig
from edge.daemon.options import parse
from edge.gateway.own_routes import PUBLIC
from edge.paths import folders
from edge.supervisor.status import Gate, ModelStatus, State
from edge.telemetry import metrics
from edge.telemetry.sample import GpuState
from edge.telemetry.telemetry import Telemetry
from tests.docs.test_docs_pages import understood
from tests.fakes.fake_jetson.tree import fake_board
from tests.fakes.upstream.engine import Line, Received
from tests.gateway.conftest import Rig, Rigs, rig, sockets

__all__ = ["rig", "sockets"]  # fixtures
ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "docs" / "recipes"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 15\r\n\r\n" + b'{"messages":[]}'
# Words of PromQL, and what Grafana puts in.
FUNCTIONS = {"sum", "by", "rate", "increase", "histogram_quantile", "label_values"}


def load(name: str) -> Any:
    return yaml.safe_load((RECIPES / name).read_text(encoding="utf-8"))


def expressions() -> dict[str, str]:
    """Every query of the dashboard and of the alerts, by its place."""
    dashboard = json.loads((RECIPES / "dashboard.json").read_text())
    found = {
        f"dashboard: {panel['title']} {target['refId']}": target["expr"]
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    found |= {f"dashboard: ${each['name']}": each.get("definition", "") for each in dashboard["templating"]["list"]}
    rules = [rule for group in load("alerts.yml")["groups"] for rule in group["rules"]]
    return found | {f"alerts: {rule['alert']}": rule["expr"] for rule in rules}


async def chat(line: Line, request: Received) -> None:
    usage = {"prompt_tokens": 30, "completion_tokens": 8}
    timings = {"predicted_per_second": 96.5, "prompt_ms": 20.0}
    await line.stream()
    await line.chunk(f"data: {json.dumps({'choices': [], 'usage': usage, 'timings': timings})}\n\n".encode())
    await line.chunk(b"data: [DONE]\n\n")
    await line.end()


async def exported(rig: Rigs) -> tuple[Rig, str]:
    """Return a gateway with a board's telemetry after one request, and its /metrics."""
    with fake_board("agx-orin-64") as board:
        telemetry = Telemetry.of(probe(board.root), TelemetryConfig(jtop="off"), root=board.root)
        for _ in range(2):  # loads are differences
            await telemetry.sampler._full()
        for reader in telemetry.sampler.readers:
            reader.close()
    assert telemetry.latest is not None
    # A discrete GPU beside the board's own, and a request that was long enough to be measured.
    gpu = GpuState("RTX", uuid="GPU-1", load_ratio=0.5, power_w=120.0)
    telemetry.sampler.latest = replace(telemetry.latest, gpus=(*telemetry.latest.gpus, gpu))
    start_s = telemetry.sampler.clock() + 2.0
    work = telemetry.energy.begin(start_s, "chat")
    for second in range(-1, 12):
        telemetry.energy.add(start_s + second, 20.0)
    assert telemetry.energy.request(start_s, start_s + 10.0, 80, work) is not None
    here = await rig(chat)
    here.model.state = ModelStatus("chat", State.READY, gates={"warm": Gate(True, 1.0, 0.5, "")})
    here.context.metrics.add(metrics.TelemetryCollector(telemetry))
    assert (await here.once(POST)).status == 200
    return here, (await here.once(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")).body.decode()


async def test_every_metric_and_label_of_dashboard_and_alerts_is_exported(rig: Rigs) -> None:
    _, text = await exported(rig)
    labels: dict[str, set[str]] = {"up": {"job", "instance"}}
    for family in text_string_to_metric_families(text):
        # A family without a sample yet still has its name: a counter's samples end in _total.
        names = {sample.name for sample in family.samples} or {family.name, f"{family.name}_total"}
        for name in names:
            used = [sample.labels for sample in family.samples if sample.name == name]
            labels.setdefault(name, {"instance", "job"}).update(*used)
    unknown = []
    for place, expression in expressions().items():
        plain = re.sub(r'"[^"]*"', '""', expression)
        for name in re.findall(r"\b(?:edgellm_\w+|up)\b", plain):
            if name not in labels:
                unknown.append(f"{place}: {name}")
        (metric, *_) = re.findall(r"\b(?:edgellm_\w+|up)\b", plain) or [None]
        listed = ",".join(re.findall(r"\{([^}]*)\}", plain) + re.findall(r"by \(([^)]*)\)", plain))
        for label in re.findall(r"[a-z_]+(?==)|\b[a-z_]+\b", listed):
            if metric in labels and label not in labels[metric]:
                unknown.append(f"{place}: {metric} has no label {label}")
    assert unknown == []
    states = {state.value for state in State} | {level.name for level in metrics.Level}
    for expression in expressions().values():
        for values in re.findall(r'(?:state|level)=~?"([A-Z|]+)"', expression):
            assert set(values.split("|")) <= states


# Panels that come with Grafana (public/app/plugins/panel), and units of its valueFormats/categories.ts: an unknown unit
# is shown as a suffix, an unknown panel as "Panel plugin not found".
PANELS = {"timeseries", "stat", "gauge", "bargauge", "barchart", "table", "text", "row", "state-timeline", "heatmap"}
UNITS = {"none", "short", "percent", "percentunit", "bytes", "s", "ms", "reqps", "ops", "celsius", "watt", "joule"}


def test_panels_and_units_are_known_to_grafana() -> None:
    dashboard = json.loads((RECIPES / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        fields = panel["fieldConfig"]
        properties = [one for each in fields.get("overrides", []) for one in each["properties"]]
        units = [one["value"] for one in properties if one["id"] == "unit"]
        assert panel["type"] in PANELS, panel["title"]
        assert {fields["defaults"]["unit"], *units} <= UNITS, panel["title"]


def test_panels_and_legends_name_labels_once() -> None:
    dashboard = json.loads((RECIPES / "dashboard.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    assert len({panel["title"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in dashboard["panels"]:
        assert all("$instance" in target["expr"] for target in panel["targets"])


def test_prometheus_reads_the_alerts_that_are_there() -> None:
    config = load("prometheus.yml")
    assert [(RECIPES / name).is_file() for name in config["rule_files"]] == [True]
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "edgellm" and 'job="edgellm"' in (RECIPES / "alerts.yml").read_text()


# What the Compose specification allows where the recipe uses it: a misspelled key must not pass for an unknown one.
SERVICE = {
    "build", "image", "command", "environment", "ports", "volumes", "networks", "stop_grace_period", "restart",
    "profiles", "depends_on", "runtime",
}  # fmt: skip


@pytest.mark.parametrize("name", ["compose.yml", "compose.nvidia.yml"])
def test_compose_starts_edgellm_with_options_and_keys_that_exist(name: str) -> None:
    document = load(name)
    assert set(document) <= {"name", "services", "volumes"}
    for service in document["services"].values():
        assert set(service) <= SERVICE
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in document["volumes"] or (RECIPES / source).is_file() or source == "./edgellm.key"
    edgellm = document["services"]["edgellm"]
    program, *options = edgellm["command"]
    assert program == "up"
    parsed = parse(options)
    assert parsed["profile"] and (ROOT / "profiles" / f"{parsed['profile']}.toml").is_file()
    assert edgellm["build"].get("dockerfile", "build/Containerfile") == "build/Containerfile"
    container = (ROOT / "build/Containerfile").read_text()
    assert set(edgellm["build"]["args"]) <= set(re.findall(r"^ARG (\w+)", container, re.MULTILINE))
    assert (ROOT / "build" / f"{edgellm['build']['args']['RECIPE']}.cmake").is_file()
    ours = {key: value for key, value in edgellm["environment"].items() if key.startswith("EDGELLM_")}
    for layer in env_layers(ours):
        assert set(layer.values) <= set(KEYS) and layer.values
    assert len(env_layers(ours)) == len(ours)
    if "volumes" in edgellm:
        folders = [volume.split(":")[1] for volume in edgellm["volumes"]]
        # They belong to the image's user only because the image has them.
        assert all(re.search(rf"install -d .*{re.escape(folder)}\b", container) for folder in folders)


def test_the_image_builds_with_options_that_exist() -> None:
    container = (ROOT / "build/Containerfile").read_text().replace("\\\n", " ")
    (line,) = re.findall(r"/bin/edgellm build (.*?) && ", container)
    # ${ARCH:+--arch "${ARCH}"} as the shell leaves it with ARCH=87.
    words = re.sub(r'\$\{ARCH:\+(.*?"\$\{ARCH\}")\}', r"\1", line).replace("${ARCH}", "87").replace("${RECIPE}", "orin")
    understood(f"edgellm build {words}")


def test_compose_reaches_the_ports_it_names() -> None:
    services = load("compose.yml")["services"]
    assert services["open-webui"]["environment"]["OPENAI_API_BASE_URL"] == "http://edgellm:8080/v1"
    (job,) = load("prometheus.yml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target.partition(":")[0] in services["edgellm"]["networks"]["default"]["aliases"]
    assert "8080" in services["edgellm"]["command"][-2]


def test_continue_uses_an_address_that_the_gateway_answers() -> None:
    (model,) = load("continue.yaml")["models"]
    assert model["provider"] == "openai" and model["apiBase"].endswith("/v1")


def node() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ros2_chat_node", RECIPES / "ros2_chat_node.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def event(text: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n".encode()


async def test_the_ros_node_yields_an_answer_piece_by_piece(rig: Rigs) -> None:
    asked: list[dict[str, Any]] = []
    go_on = asyncio.Event()

    async def script(line: Line, request: Received) -> None:
        asked.append(json.loads(request.body))
        await line.stream()
        await line.chunk(b": waiting LOADING 63 %\n\n")
        await line.chunk(event("Hel"))
        await go_on.wait()
        await line.chunk(event("lo é"))
        await line.chunk(b'data: {"choices":[]}\n\ndata: [DONE]\n\n')
        await line.end()

    here = await rig(script)
    parts = node().answer_parts(f"http://127.0.0.1:{here.port}/v1", "hi", key="k" * 20, system="Be brief.")
    assert await asyncio.to_thread(next, parts) == "Hel"  # before the second piece exists
    go_on.set()
    assert await asyncio.to_thread(list, parts) == ["lo é"]
    assert [each["role"] for each in asked[0]["messages"]] == ["system", "user"]
    assert asked[0]["stream"] is True


async def test_the_ros_node_raises_what_the_server_reports(rig: Rigs) -> None:
    async def script(line: Line, request: Received) -> None:
        if b"cut" in request.body:
            await line.stream()
            await line.chunk(event("Hel"))
            await line.end()
        elif b"dies" in request.body:
            await line.stream()
            await line.chunk(event("Hel"))
            line.cut()
        else:
            await line.json({"error": {"message": "no messages", "code": 400}}, "400 Bad Request")

    here, module = await rig(script), node()
    url = f"http://127.0.0.1:{here.port}/v1/"
    for prompt, reported in (("bad", "400: no messages"), ("cut", "before its end"), ("dies", "engine|ended")):
        with pytest.raises(module.ServerError, match=reported):
            await asyncio.to_thread(list, module.answer_parts(url, prompt))
    with pytest.raises(OSError):
        await asyncio.to_thread(list, module.answer_parts("http://127.0.0.1:1/v1", "nothing listens"))


def manifests() -> dict[str, dict[str, Any]]:
    documents = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text(encoding="utf-8"))
    return {document["kind"]: document for document in documents}


def test_the_pod_is_the_image_with_a_configuration_that_loads(tmp_path: Path) -> None:
    found = manifests()
    pod = found["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    program, *options = container["args"]
    assert program == "up"
    parse(options)
    for name, text in found["ConfigMap"]["data"].items():
        (tmp_path / name).write_text(text)
    layer = file_layer(tmp_path / "edgellm.toml")
    assert layer is not None and layer.models is not None
    assert (ROOT / "profiles" / f"{layer.values['profile']}.toml").is_file()
    image = (ROOT / "build/Containerfile").read_text()
    user = str(pod["securityContext"]["runAsUser"])
    assert f"--uid {user} " in image and f"USER {user}\n" in image
    assert 'ENTRYPOINT ["edgellm"]' in image and "EDGELLM_STATE_DIR=/edgellm" in image
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert set(mounts) == set(volumes)
    assert volumes["models"]["hostPath"]["type"] == "Directory", "on the node's own disk, and never made by a typo"
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    own = folders({"EDGELLM_STATE_DIR": "/edgellm"})
    assert (mounts["config"], mounts["models"]) == (str(own.config), str(own.models))
    keys_file = Path(str(layer.values["gateway.keys_file"]))
    assert str(keys_file.parent) == mounts["keys"] and keys_file.name == "keys.toml"


def test_probes_ask_public_routes_at_the_port_that_is_served(tmp_path: Path) -> None:
    found = manifests()
    pod = found["DaemonSet"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    (port,) = container["ports"]
    assert f"0.0.0.0:{port['containerPort']}" in found["ConfigMap"]["data"]["edgellm.toml"]
    probes = {kind: container[kind]["httpGet"] for kind in ("livenessProbe", "readinessProbe")}
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    paths = {kind: probe["path"] for kind, probe in probes.items()}
    # A model may load for minutes: the pod is alive meanwhile, and gets no requests.
    assert paths == {"livenessProbe": "/livez", "readinessProbe": "/readyz"}
    assert set(paths.values()) <= PUBLIC
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    labels = pod["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels == found["DaemonSet"]["spec"]["selector"]["matchLabels"]
    stop_s = RestartConfig().drain_s + RestartConfig().term_s
    assert pod["spec"]["terminationGracePeriodSeconds"] > stop_s


def test_timeouts_of_the_proxies_outlast_a_request_that_waits() -> None:
    held_s = HoldConfig().seconds
    for name, pattern in (
        ("nginx.conf", r"proxy_read_timeout (\d+)m"),
        ("haproxy.cfg", r"timeout (?:client|server) (\d+)m"),
    ):
        minutes = re.findall(pattern, (RECIPES / name).read_text())
        assert minutes and all(int(each) * 60 > held_s for each in minutes)
    body = re.search(r"client_max_body_size (\d+)m", (RECIPES / "nginx.conf").read_text())
    assert body is not None and int(body[1]) << 20 >= GatewayConfig().max_body_bytes
