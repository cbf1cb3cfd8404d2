#!/usr/bin/env bash
# Prefill on one host, decode on another, the router on either or on a third one. On each host:
#   MODEL=Qwen/Qwen3-8B PREFILL_HOST=10.0.0.1 DECODE_HOST=10.0.0.2 examples/two_hosts.sh prefill|decode|router [FLAG...]
# Further words are flags of that process. Decode connects to the prefill host: open PREFILL_PORT, BOOTSTRAP_PORT and the
# ephemeral ports to it.
set -euo pipefail

MODEL=${MODEL:?is the model to serve}
PREFILL_HOST=${PREFILL_HOST:?is the address of the prefill host} DECODE_HOST=${DECODE_HOST:?is the address of the decode host}
PREFILL_PORT=${PREFILL_PORT:-30001} BOOTSTRAP_PORT=${BOOTSTRAP_PORT:-8998} DECODE_PORT=${DECODE_PORT:-30002}
ROUTER_PORT=${ROUTER_PORT:-30000}

role=${1:?is prefill, decode or router}
shift
case $role in
  prefill)
    exec launch_prefill --model-path "$MODEL" --host "$PREFILL_HOST" --port "$PREFILL_PORT" \
      --disaggregation-bootstrap-port "$BOOTSTRAP_PORT" "$@" ;;
  decode)
    exec launch_decode --model-path "$MODEL" --host "$DECODE_HOST" --port "$DECODE_PORT" "$@" ;;
  router)
    exec launch_router --host 0.0.0.0 --port "$ROUTER_PORT" --pd-disaggregation \
      --prefill "http://$PREFILL_HOST:$PREFILL_PORT" "$BOOTSTRAP_PORT" --decode "http://$DECODE_HOST:$DECODE_PORT" "$@" ;;
  *)
    echo "two_hosts.sh: the role is prefill, decode or router, not $role" >&2
    exit 2 ;;
esac
