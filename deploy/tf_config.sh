#!/usr/bin/env bash
# One worker of --strategy=multi_worker, with TF_CONFIG made from a list of hosts; run it on each.
#   HOSTS=a,b INDEX=0 deploy/tf_config.sh --preset=gpt2_1558m --run_dir=/shared/run
# HOSTS may give ports (a:2222); INDEX counts from 0.
set -euo pipefail
: "${HOSTS:?set HOSTS, e.g. HOSTS=a,b}" "${INDEX:?set INDEX, which of HOSTS this is, from 0}"
workers=
for host in ${HOSTS//,/ }; do
  case "$host" in *:*) ;; *) host=$host:${PORT:-2222} ;; esac
  workers+=${workers:+,}\"$host\"
done
export TF_CONFIG="{\"cluster\":{\"worker\":[$workers]},\"task\":{\"type\":\"worker\",\"index\":$INDEX}}"
exec "${PYTHON:-python}" -m tfbig.train --strategy=multi_worker "$@"
