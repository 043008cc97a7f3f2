#!/bin/sh
# Run the manifests of deploy/k8s on this machine: every pod a process of its image, in a network namespace of
# its own, behind cluster IPs, names and network policies. docs/operate/install.md says what this is not.
#
#   scripts/deploy_test.sh COMMAND...   run COMMAND as the node; it and all pods end together
#
# Needs root and, on Debian or Ubuntu: apt-get install buildah dnsmasq-base iproute2 netcat-openbsd nftables redis-server
# The images come from `BUILDER=buildah make images`.
set -eu
missing=
for program in buildah dnsmasq ip nc nft redis-server unshare; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
[ -z "$missing" ] || { echo "deploy-test: not found:$missing (see $0)" >&2; exit 1; }
[ "$(id -u)" = 0 ] || { echo "deploy-test: namespaces need root" >&2; exit 1; }
mkdir -p /run/netns
# The name spaces of the node: what is mounted, routed or started there goes with it.
exec unshare --net --mount --pid --fork --kill-child --mount-proc \
    sh -c 'mount -t tmpfs node /run/netns && exec "$@"' node "$@"
