#!/bin/sh
# On the board, as root, without a network: sh install.sh [OPTIONS of `edgellm service install`]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' || {
    echo "needs Python 3.10 or newer with venv (apt-get install python3-venv), or PYTHON=/path/to/python3" >&2
    exit 69
}
"$python" -m venv /opt/edgellm
/opt/edgellm/bin/pip install -q --disable-pip-version-check --no-index --find-links "$here/wheels" 'edgellm[embedded]'
ln -sfn /opt/edgellm/bin/edgellm /usr/local/bin/edgellm
exec /opt/edgellm/bin/edgellm service install --yes --offline "$here" "$@"
