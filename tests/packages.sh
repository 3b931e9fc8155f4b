#!/usr/bin/env bash
# Debian packages of `make test-full`: compilers for the real build, a system to boot, a browser, node for its client.
# As root they are installed; else the one line to run is printed.
set -euo pipefail
missing=()
need() { # COMMAND PACKAGE
    command -v "$1" >/dev/null || missing+=("$2")
}
need cmake cmake
need ninja ninja-build
need g++ g++
need ccache ccache
need systemd-nspawn systemd-container
need mmdebstrap mmdebstrap
need chromium chromium
need npm npm
need node nodejs
need curl curl
need setpriv util-linux
[ -d /usr/share/i18n/charmaps ] || missing+=(locales) # what localedef makes a locale of
[ ${#missing[@]} -gt 0 ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "make test-full needs: sudo apt-get install ${missing[*]}" >&2
    exit 69
fi
export DEBIAN_FRONTEND=noninteractive
dpkg --configure -a >/dev/null || true # of an installation that was cut off: apt-get refuses to go on from there
for _ in $(seq 12); do
    apt-get update -qq && break # another apt-get has its lock
    sleep 5
done
apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
