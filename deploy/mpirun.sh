#!/usr/bin/env bash
# Trains under Open MPI's mpirun, which only starts the processes: they talk by Gloo or NCCL, so that
# Horovod needs no MPI build.
#   HOSTS=a:8,b:8 deploy/mpirun.sh --preset=gpt2_1558m --run_dir=/shared/run
set -euo pipefail
: "${HOSTS:?set HOSTS, e.g. HOSTS=a:8,b:8 (host:processes)}"
num_processes=0
for host in ${HOSTS//,/ }; do
  [[ $host =~ ^[^:]+:[0-9]+$ ]] || { echo "mpirun.sh: $host is not host:processes" >&2; exit 2; }
  num_processes=$((num_processes + ${host##*:}))
done
first=${HOSTS%%:*}
export_flags=()
# mpirun hands no variable to other hosts but those that it is told.
for name in PATH PYTHONPATH LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES OMP_NUM_THREADS \
    $(compgen -e | grep -E '^(HOROVOD|NCCL|TFBIG)_' || true); do
  if [ -n "${!name:-}" ]; then export_flags+=(-x "$name"); fi
done
if [ "$(id -u)" = 0 ]; then export_flags+=(--allow-run-as-root); fi
exec mpirun -np "$num_processes" --host "$HOSTS" --bind-to none --map-by slot "${export_flags[@]}" \
  ${NETWORK_INTERFACE:+--mca btl_tcp_if_include "$NETWORK_INTERFACE"} \
  ${NETWORK_INTERFACE:+--mca oob_tcp_if_include "$NETWORK_INTERFACE"} \
  "${PYTHON:-python}" -m tfbig.launch --cluster=mpi --hosts="$first" --restarts=0 \
  --num_processes="$num_processes" --network_interface="${NETWORK_INTERFACE:-}" \
  --port="${PORT:-0}" -- "${PYTHON:-python}" -m tfbig.train --strategy="${STRATEGY:-horovod}" "$@"
