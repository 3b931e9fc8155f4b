#!/bin/sh
# Without the GPU: refused or degraded as the profile says, never silently ok.
exec "$PYTHON" -m tests.gpu.hidden
