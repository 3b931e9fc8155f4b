#!/bin/sh
# Watts during a completion and tokens per joule, edgellm's figures against NVML's own.
exec "$PYTHON" -m tests.gpu.telemetry "$URL" "$RESULTS/telemetry.json"
