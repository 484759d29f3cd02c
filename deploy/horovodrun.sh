#!/usr/bin/env bash
# Trains on several hosts over ssh, one process a GPU: run it on one of them.
#   HOSTS=a:8,b:8 deploy/horovodrun.sh --preset=gpt2_1558m --run_dir=/shared/run
# Needs passwordless ssh from this host to all others, the same paths everywhere, and a run folder
# that all of them see. NETWORK_INTERFACE names the card where there are several.
set -euo pipefail
: "${HOSTS:?set HOSTS, e.g. HOSTS=a:8,b:8 (host:processes)}"
num_processes=0
for host in ${HOSTS//,/ }; do
  [[ $host =~ ^[^:]+:[0-9]+$ ]] || { echo "horovodrun.sh: $host is not host:processes" >&2; exit 2; }
  num_processes=$((num_processes + ${host##*:}))
done
exec horovodrun -np "$num_processes" -H "$HOSTS" --start-timeout "${START_TIMEOUT:-600}" \
  ${NETWORK_INTERFACE:+--network-interfaces "$NETWORK_INTERFACE"} \
  "${PYTHON:-python}" -m tfbig.train --strategy="${STRATEGY:-horovod}" "$@"
