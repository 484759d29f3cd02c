#!/usr/bin/env bash
# Builds the CPU image without Docker, a daemon or an image registry: buildah, in a chroot, on a Debian
# made by debootstrap. Needs root and Debian's packages buildah and debootstrap.
#   deploy/build_image.sh [NAME]          NAME defaults to tfbig:cpu
# MIRROR is Debian's; CERTIFICATES a file of further certificates to trust while building (behind a
# proxy that has its own); PIP_INDEX_URL another package index; STORAGE where images are kept;
# BASE an image that is there already.
set -euo pipefail
name=${1:-tfbig:cpu}
mirror=${MIRROR:-http://deb.debian.org/debian}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
storage=${STORAGE:-/var/lib/tfbig-images}
for program in buildah debootstrap; do
  command -v "$program" > /dev/null || {
    echo "build_image.sh: $program is missing: apt-get install $program" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "build_image.sh: run it as root" >&2; exit 2; }
image() { buildah --root "$storage/root" --runroot "$storage/run" --storage-driver vfs "$@"; }

base=${BASE:-localhost/tfbig-base:debian12}
if ! image inspect --type image "$base" > /dev/null 2>&1; then
  root=$(mktemp -d)
  trap 'rm -rf "$root"' EXIT
  debootstrap --variant=minbase bookworm "$root/debian" "$mirror"
  rm -rf "$root"/debian/var/cache/apt/archives/*.deb "$root"/debian/var/lib/apt/lists/*
  container=$(image from scratch)
  image add --quiet "$container" "$root/debian" /
  image config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
  image commit --quiet --rm "$container" "$base"
  rm -rf "$root"
fi
trust=()
if [ -n "${CERTIFICATES:-}" ]; then
  trust=(--volume "$CERTIFICATES:/run/certificates.crt:ro" --build-arg PIP_CERT=/run/certificates.crt)
fi
image bud --isolation chroot --layers=false --tag "$name" --build-arg BASE="$base" \
  --build-arg EXTRA=cpu --build-arg RUN_AS="${RUN_AS:-tfbig}" "${trust[@]}" \
  ${PIP_INDEX_URL:+--build-arg PIP_INDEX_URL="$PIP_INDEX_URL"} "$here"
echo "build_image.sh: $name is in $storage/root"
