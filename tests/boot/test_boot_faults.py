"""Each fault ends in its documented state: one error line, a 503 with the hint, no storm of starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edge.service.units import UnitSettings, drop_ins
from tests.boot.board import Board
from tests.boot.conftest import EDGELLM, Product
from tests.boot.journal import entries

pytestmark = pytest.mark.full

NewBoard = Callable[..., Board]
MODEL = "SmolLM2-135M-Instruct"
CONFIG = "/etc/edgellm/edgellm.toml"

# Answers --version and --help as llama-server does, and refuses every other flag.
BAD_FLAG = """#!/bin/sh
case "$1" in
--version) echo "version: 9999 (0c1e57098)" >&2;;
--help) printf '%s\\n' "-m,    --model FNAME            model path" "--host HOST                     ip address";;
*) echo "error: invalid argument: $1" >&2; exit 1;;
esac
"""


def faulty_config(board: Board) -> None:
    board.disk.write(CONFIG, 'schema = 1\nprofil = "cpu"\n')


def faulty_model(board: Board) -> None:
    whole = next((board.disk.root / "var/lib/edgellm/models").glob("*/*.gguf")).read_bytes()
    (board.disk.root / "srv/cut.gguf").write_bytes(whole[: len(whole) // 2])
    board.disk.write(CONFIG, f'schema = 1\nprofile = "cpu"\n[[model]]\nid = "{MODEL}"\nref = "/srv/cut.gguf"\n')


def faulty_engine(board: Board) -> None:
    board.disk.write("/opt/engine/llama-server", BAD_FLAG, 0o755)
    text = (board.disk.root / CONFIG.lstrip("/")).read_text()
    board.disk.write(CONFIG, text.replace("schema = 1", 'schema = 1\nengine = "/opt/engine/llama-server"'))


def faulty_keys(board: Board) -> None:
    board.disk.write("/etc/edgellm/keys.toml", "this is no TOML", 0o644)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (faulty_config, "config"),
        (faulty_model, "bad_model"),
        (faulty_engine, "bad_flag"),
        (faulty_keys, "config"),
    ],
    ids=["unknown-key", "truncated-model", "bad-flag", "broken-keys"],
)
def test_a_permanent_fault_is_answered_and_not_restarted(
    new_board: NewBoard, fault: Callable[[Board], None], kind: str
) -> None:
    """FC-79 and the storm behind a socket unit: clients retry, and no start is attempted for them."""
    with new_board() as board:
        fault(board)
        board.power_on()
        client = board.client()
        status, body = board.chat()
        assert status == 503
        assert body["error"]["kind"] == kind
        assert body["error"]["hint"]
        pid = board.main_pid()
        for _ in range(20):
            assert board.chat()[0] == 503
        seen = client.end()
        assert {chat[2] for chat in seen["chats"]} == {503}
        assert seen["refused"] == []
        assert board.main_pid() == pid
        assert board.show("NRestarts") == "0"
        assert board.show("ActiveState") == "active"
        assert len(entries(board, "EDGELLM_STATE=STARTING")) <= 1
        errors = entries(board, "-p", "err", "SYSLOG_IDENTIFIER=edgellm")
        assert [each["EDGELLM_KIND"] for each in errors] == [kind]
        assert errors[0]["EDGELLM_HINT"] in errors[0]["MESSAGE"]
        assert board.request("GET", "/livez")[0] == 200
        assert "failed" in board.show("StatusText") or kind == "config"


def test_models_on_a_mount_that_systemd_knows_and_that_is_late(new_board: NewBoard) -> None:
    """FC-79: the service waits for the mount, its clients with it; not even the late disk delays the address."""
    with new_board() as board:
        move_models(board, "/disk", "/mnt/models")
        mount(board, "/bin/sleep 10")
        board.power_on(wait=False)
        client = board.client()
        began, ended, status = client.chat()
        client.end()
        assert status == 200
        mounted_s = int(board.show("ActiveEnterTimestampMonotonic", "mnt-models.mount")) / 1e6
        assert began < mounted_s < ended
        assert int(board.show("ExecMainStartTimestampMonotonic")) / 1e6 >= mounted_s
        assert board.run("findmnt", "-n", "-o", "TARGET", "/mnt/models") == "/mnt/models"


def test_models_on_a_mount_that_systemd_does_not_know(new_board: NewBoard) -> None:
    """FC-79: the service names the folder it waits for, holds requests, and serves without a restart."""
    with new_board() as board:
        move_models(board, "/disk", "/mnt/models")
        board.power_on()
        client = board.client()
        waits = board.until(lambda: entries(board, "EDGELLM_EVENT=waits"), "a journal entry `waits`")
        assert "/mnt/models" in waits[0]["MESSAGE"]
        assert board.run("ls", "-A", "/mnt/models") == ""
        assert board.request("GET", "/healthz")[1]["status"] == "starting"
        board.run("mount", "--bind", "/disk", "/mnt/models")
        assert client.chat()[2] == 200
        client.end()
        assert board.show("NRestarts") == "0"
        assert entries(board, "-p", "err", "SYSLOG_IDENTIFIER=edgellm") == []


def test_a_mount_that_fails(new_board: NewBoard) -> None:
    """FC-79: no storm of starts (a hard dependency makes one); patience ends, 503 names the folder, and it may come."""
    with new_board() as board:
        move_models(board, "/disk", "/mnt/models")
        mount(board, "/bin/false")
        board.power_on()
        status, body = board.chat()
        assert status == 503
        assert "/mnt/models" in body["error"]["hint"]
        errors = entries(board, "-p", "err", "SYSLOG_IDENTIFIER=edgellm")
        assert len(errors) == 1
        assert "Dependency failed for edgellm" not in board.journal()
        board.run("mount", "--bind", "/disk", "/mnt/models")
        board.until(lambda: board.chat()[0] == 200, "it serves once the disk is there")
        assert board.show("NRestarts") == "0"


def test_a_closed_parent_folder_is_named(new_board: NewBoard) -> None:
    """FC-79: the folder itself is open, one above it is not."""
    with new_board() as board:
        move_models(board, "/srv/private/deep/models", "/srv/private/deep/models")
        (board.disk.root / "srv/private").chmod(0o700)
        board.power_on()
        status, body = board.chat()
        assert status == 503
        assert body["error"]["hint"].startswith("chmod o+x /srv/private,")
        errors = entries(board, "-p", "err", "SYSLOG_IDENTIFIER=edgellm")
        assert len(errors) == 1
        assert "user edgellm may not enter /srv/private" in errors[0]["MESSAGE"]
        refused = board.execute(EDGELLM, "service", "install", "--model-dir", "/srv/private/deep/models", "-p", "cpu")
        assert refused.returncode == 78
        assert "user edgellm may not enter /srv/private" in refused.stderr
        board.run("chmod", "o+x", "/srv/private")
        board.until(lambda: board.chat()[0] == 200, "it serves once the folder is open")
        assert board.show("NRestarts") == "0"


def test_a_disk_that_is_full(new_board: NewBoard) -> None:
    """The history of starts is lost, which one warning reports; the model answers."""
    size = "size=300k"
    with new_board(f"--tmpfs=/var/lib/edgellm/state:{size},mode=0755", f"--tmpfs=/var/cache:{size}") as board:
        board.disk.write("/etc/systemd/system/fill.service", FILL)
        board.disk.chroot("systemctl", "enable", "fill.service")
        board.power_on()
        assert board.chat()[0] == 200
        lost = board.until(lambda: [e for e in entries(board, "-p", "warning") if "disk full" in e["MESSAGE"]], "said")
        assert len(lost) == 1
        assert board.show("NRestarts") == "0"


def test_a_root_that_is_read_only(new_board: NewBoard) -> None:
    """State lives in memory, and one warning names what a power-off loses."""
    volatile = ["/var/lib/edgellm/state", "/var/cache", "/var/log", "/var/tmp"]
    with new_board("--read-only", *(f"--tmpfs={folder}:mode=0755" for folder in volatile)) as board:
        board.power_on()
        assert board.chat()[0] == 200
        said = [each["MESSAGE"] for each in entries(board, "-p", "warning") if "lost at power-off" in each["MESSAGE"]]
        assert len(said) == 1
        assert "starts and crashes" in said[0]


def test_groups_that_do_not_exist(product: Product, new_board: NewBoard) -> None:
    """A group that is not there keeps a unit from starting (216/GROUP): only those that exist are written."""
    with new_board(lowers=product.bare) as board:
        board.power_on()
        for group in ("video", "render"):
            board.run("groupdel", group, check=False)
        board.run(EDGELLM, "service", "install", "--offline", "/opt/offline", "-p", "cpu")
        assert board.show("SupplementaryGroups") == ""
        assert board.chat()[0] == 200
        board.run("groupadd", "video")
        changed = board.run(EDGELLM, "service", "install", "--offline", "/opt/offline", "-p", "cpu")
        assert "+ write /etc/systemd/system/edgellm.service.d/10-install.conf" in changed
        assert board.show("SupplementaryGroups") == "video"
        assert board.chat()[0] == 200
        board.run("groupdel", "video")
        lost = board.execute(EDGELLM, "service", "diff")
        assert lost.returncode == 1
        assert "10-install.conf is no longer part of the service" in lost.stdout


def test_an_old_jtop_unit_makes_no_cycle(new_board: NewBoard) -> None:
    """jetson-stats 4.3.2 orders its unit after multi-user.target: being ordered after that would delete our start."""
    with new_board() as board:
        jtop = "[Unit]\nAfter=multi-user.target\n[Service]\nExecStart=/bin/sleep inf\n"
        jtop += "[Install]\nWantedBy=multi-user.target\n"
        board.disk.write("/etc/systemd/system/jtop.service", jtop)
        board.disk.chroot("systemctl", "enable", "jtop.service")
        board.power_on()
        assert board.chat()[0] == 200
        assert "ordering cycle" not in board.run("journalctl", "-b", "--no-pager")


def move_models(board: Board, where: str, mounted: str) -> None:
    """The models lie in `where`, and the configuration says `mounted`."""
    root = board.disk.root
    (root / mounted.lstrip("/")).mkdir(parents=True, exist_ok=True)
    (root / where.lstrip("/")).mkdir(parents=True, exist_ok=True)
    model = next((root / "var/lib/edgellm/models").glob("*/*.gguf"))
    (root / where.lstrip("/") / model.name).write_bytes(model.read_bytes())
    board.disk.chroot("rm", "-r", str("/" / model.parent.relative_to(root)))
    model_table = f'[[model]]\nid = "{MODEL}"\nref = "{mounted}/{model.name}"\n'
    board.disk.write(CONFIG, f'schema = 1\nprofile = "cpu"\n[store]\ndirs = ["{mounted}"]\n{model_table}')


def mount(board: Board, first: str) -> None:
    """/disk is mounted on /mnt/models once `first` has ended well; the units know of it as the installer would say."""
    disk = "[Unit]\nDefaultDependencies=no\n[Service]\nType=oneshot\nRemainAfterExit=yes\n"
    board.disk.write("/etc/systemd/system/disk.service", f"{disk}ExecStart={first}\n")
    unit = "[Unit]\nRequires=disk.service\nAfter=disk.service\n"
    unit += "[Mount]\nWhat=/disk\nWhere=/mnt/models\nType=none\nOptions=bind\n[Install]\nWantedBy=multi-user.target\n"
    board.disk.write("/etc/systemd/system/mnt-models.mount", unit)
    board.disk.chroot("systemctl", "enable", "mnt-models.mount")
    for name, text in drop_ins(UnitSettings(model_dirs=("/mnt/models",))).items():
        board.disk.write(f"/etc/systemd/system/{name}.d/10-install.conf", text)


FILL = """[Unit]
DefaultDependencies=no
After=local-fs.target
Before=edgellm.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/mkdir -p /var/cache/edgellm /var/lib/edgellm/state/main
ExecStart=/bin/chown edgellm: /var/cache/edgellm /var/lib/edgellm/state /var/lib/edgellm/state/main
ExecStart=-/bin/sh -c 'cat /dev/zero > /var/cache/full'
ExecStart=-/bin/sh -c 'cat /dev/zero > /var/lib/edgellm/state/full'
[Install]
WantedBy=sysinit.target
"""


def test_each_engine_has_a_control_group_that_ends_with_it(new_board: NewBoard) -> None:
    """A process with a session of its own, in the group of the engine, as one that the engine had detached."""
    with new_board() as board:
        board.power_on()
        assert board.chat()[0] == 200
        (folder,) = groups(board)
        (engine,) = board.run("cat", f"{folder}/cgroup.procs").split()
        enter = f"echo 0 >{folder}/cgroup.procs && exec setsid sleep 1000"
        board.run("systemd-run", "--quiet", "--unit=detached", "/bin/sh", "-c", enter)
        board.until(lambda: len(board.run("cat", f"{folder}/cgroup.procs").split()) == 2, "it is in the group")
        board.run("kill", "-KILL", engine)
        board.until(lambda: folder not in groups(board), "the group is removed, so all of it has ended")
        assert board.chat()[0] == 200
        (again,) = groups(board)
        assert again != folder


def groups(board: Board) -> list[str]:
    """The engines' groups; v2 is one folder deeper where v1 controllers are mounted."""
    tree = "/sys/fs/cgroup/system.slice /sys/fs/cgroup/unified/system.slice"
    found = board.execute("sh", "-c", f"find {tree} -maxdepth 2 -name 'edgellm-engine-*' -type d")
    return found.stdout.split()
