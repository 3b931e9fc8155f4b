"""Detect the kind of container or guest, as one word."""

from __future__ import annotations

from edge.board.tree import Tree


def read(tree: Tree) -> str | None:
    """Return `wsl2`, `docker`, `podman`, `kubernetes`, `systemd-nspawn`, `lxc`, …; None outside of any."""
    return "wsl2" if is_wsl(tree) else inside(tree)


def inside(tree: Tree) -> str | None:
    """Return the container, also within WSL2."""
    if tree.exists("/var/run/secrets/kubernetes.io") or tree.exists("/run/secrets/kubernetes.io"):
        return "kubernetes"
    if tree.exists("/run/.containerenv"):
        return "podman"
    if tree.exists("/.dockerenv"):
        return "docker"
    manager = tree.word("/run/systemd/container") or tree.word("/run/host/container-manager")
    if manager:
        return manager
    for entry in (tree.text("/proc/1/environ") or "").split("\0"):
        name, _, value = entry.partition("=")
        if name == "container" and value:
            return value
    return None


def is_wsl(tree: Tree) -> bool:
    """Return whether this is WSL2, which has a GPU through /dev/dxg."""
    version = (tree.text("/proc/version") or "").lower()
    return "microsoft" in version and ("wsl2" in version or tree.exists("/dev/dxg"))
