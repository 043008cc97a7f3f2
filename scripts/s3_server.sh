#!/bin/sh
# Run a command with a real S3 server: scripts/s3_server.sh [ceph|localstack|s3rver] COMMAND...
#
#   ceph        Ceph's object gateway on one monitor and one disk daemon. Checks signatures, keeps
#               objects on disk. Needs: apt-get install --no-install-recommends radosgw ceph-mon ceph-osd
#   localstack  Checks every checksum that a client sends. Installs itself into a folder of its own.
#   s3rver      Ignores conditional writes: what the registry must refuse. Needs npm.
#
# The command finds the server in the usual AWS_* variables; its state is removed when it ends.
set -eu

server=ceph
case "${1:-}" in ceph|localstack|s3rver) server=$1; shift ;; esac
[ $# -gt 0 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }

dir=$(mktemp -d)
pids=
stop() {
    for pid in $pids; do kill "$pid" 2>/dev/null || true; done
    for pid in $pids; do wait "$pid" 2>/dev/null || true; done
    rm -rf "$dir"
}
trap stop EXIT
trap 'exit 130' INT TERM

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

# Start a daemon whose output is shown only when it does not come up.
daemon() {
    "$@" >>"$dir/log" 2>&1 &
    pids="$! $pids"
}

until_it_answers() {
    for _ in $(seq 300); do
        if python3 -c 'import socket, sys; socket.create_connection(("127.0.0.1", int(sys.argv[1])), 1)' \
            "$port" 2>/dev/null; then
            return
        fi
        sleep 0.2
    done
    tail -n 40 "$dir/log" >&2
    echo "s3_server.sh: the $server server did not start within a minute" >&2
    exit 1
}

start_ceph() {
    for program in ceph-mon ceph-osd radosgw; do
        command -v "$program" >/dev/null || {
            echo "s3_server.sh: run first: apt-get install -y --no-install-recommends radosgw ceph-mon ceph-osd" >&2
            exit 1
        }
    done
    conf=$dir/ceph.conf
    ring=$dir/keyring
    fsid=$(cat /proc/sys/kernel/random/uuid)
    disk=$(cat /proc/sys/kernel/random/uuid)
    mkdir "$dir/mon" "$dir/osd"
    cat >"$conf" <<END
[global]
fsid = $fsid
mon host = [v2:127.0.0.1:$(free_port)/0]
keyring = $ring
run dir = $dir
log file = $dir/\$name.log
admin socket = $dir/\$name.asok
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data = $dir/mon
mon data avail crit = 1
osd data = $dir/osd
bluestore block size = 8589934592
rgw frontends = beast endpoint=127.0.0.1:$port
rgw init timeout = 60
END
    ceph-authtool --create-keyring "$ring" --gen-key -n mon. --cap mon 'allow *' >/dev/null
    for name in client.admin osd.0; do
        ceph-authtool "$ring" --gen-key -n "$name" \
            --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *' >/dev/null
    done
    ceph-mon -c "$conf" --mkfs -i a --fsid "$fsid" --keyring "$ring" >>"$dir/log" 2>&1
    daemon ceph-mon -c "$conf" -f -i a
    ceph -c "$conf" --connect-timeout 30 osd new "$disk" >>"$dir/log" 2>&1
    ceph-osd -c "$conf" -i 0 --mkfs --osd-uuid "$disk" >>"$dir/log" 2>&1
    daemon ceph-osd -c "$conf" -f -i 0
    radosgw-admin -c "$conf" user create --uid test --display-name test \
        --access-key "$AWS_ACCESS_KEY_ID" --secret-key "$AWS_SECRET_ACCESS_KEY" >>"$dir/log" 2>&1
    daemon radosgw -c "$conf" -f -n client.admin
}

start_localstack() {
    venv=${XDG_CACHE_HOME:-$HOME/.cache}/loraplex/localstack-4.2.0
    if [ ! -e "$venv/complete" ]; then
        "${PYTHON:-python3}" -m venv --clear "$venv"
        "$venv/bin/pip" install --quiet 'localstack-core[base-runtime]==4.2.0' 'moto-ext[s3]' 'cbor2<5.8' \
            'pyopenssl<24.3' 'cryptography<44' service_identity
        touch "$venv/complete"
    fi
    daemon env GATEWAY_LISTEN="127.0.0.1:$port" SERVICES=s3 EAGER_SERVICE_LOADING=1 \
        SKIP_SSL_CERT_DOWNLOAD=1 DISABLE_EVENTS=1 LOCALSTACK_VOLUME_DIR="$dir" \
        "$venv/bin/python" -m localstack.runtime.main
}

start_s3rver() {
    npm install --silent --no-fund --no-audit --prefix "$dir/npm" s3rver@3.7.1 >>"$dir/log" 2>&1
    mkdir "$dir/data"
    daemon "$dir/npm/node_modules/.bin/s3rver" --directory "$dir/data" --address 127.0.0.1 --port "$port"
}

port=$(free_port)
export AWS_ACCESS_KEY_ID=S3RVER AWS_SECRET_ACCESS_KEY=S3RVER AWS_DEFAULT_REGION=us-east-1
export AWS_ENDPOINT_URL_S3="http://127.0.0.1:$port" S3_SERVER="$server"
unset AWS_SESSION_TOKEN AWS_PROFILE
"start_$server"
until_it_answers
"$@"
