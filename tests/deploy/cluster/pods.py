"""One pod: its files, its process, its probes and its end, as the manifest gives them."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.deploy.cluster.images import Image
from tests.deploy.cluster.network import Endpoint, Network, run
from tests.deploy.kustomize import Document

DEVICES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
"""Minor numbers; the major one is 1."""


@dataclass(frozen=True)
class Settings:
    """ConfigMaps and Secrets of the namespace: values by name, then by key."""

    config_maps: Mapping[str, Mapping[str, str]]
    secrets: Mapping[str, Mapping[str, str]]


class Pod:
    """A pod of one container. `tick` probes it; `stop` ends it as the kubelet does."""

    def __init__(
        self,
        name: str,
        template: Document,
        image: Image,
        settings: Settings,
        network: Network,
        folder: Path,
    ) -> None:
        self.name = name
        self.spec = template["spec"]
        self.labels: Mapping[str, str] = template["metadata"]["labels"]
        self.image = image
        self.folder = folder / name
        self.num_restarts = 0
        self.has_started = False
        self.is_ready = False
        self._settings = settings
        self._network = network
        self._failures = 0
        self._probe_at_s = 0.0
        self._mounts: list[Path] = []
        [self.container] = self.spec["containers"]
        self.address = network.add_pod(name)
        self.root = self._make_root()
        self._process = self._start()

    @property
    def endpoint(self) -> Endpoint:
        """What the network needs to know."""
        ports = {port["name"]: port["containerPort"] for port in self.container.get("ports", [])}
        return Endpoint(self.address, self.labels, ports, self.is_ready)

    def log(self) -> str:
        """Everything that the container has printed."""
        return (self.folder / "log").read_text(errors="replace")

    def summary(self) -> str:
        """The state of the pod and the last lines of its log."""
        state = f"started={self.has_started} ready={self.is_ready} restarts={self.num_restarts}"
        return f"--- {self.name} {state}\n{self.log()[-1000:]}"

    # --- files

    def _make_root(self) -> Path:
        """The image under a layer of the pod's own, mounted read-only, with the pod's volumes."""
        self.folder.mkdir(parents=True)
        if self.image.is_stand_in:
            return Path("/")
        layers = {part: self.folder / part for part in ("upper", "work", "root")}
        for layer in layers.values():
            layer.mkdir()
        (layers["upper"] / "etc").mkdir()
        (layers["upper"] / "etc/resolv.conf").write_text(self._network.resolv_conf())
        mounts = self.container.get("volumeMounts", [])
        for path in ("proc", "dev", *(mount["mountPath"][1:] for mount in mounts)):
            (layers["upper"] / path).mkdir(parents=True, exist_ok=True)
        options = f"lowerdir={self.image.root},upperdir={layers['upper']},workdir={layers['work']}"
        self._mount("overlay", layers["root"], "-t", "overlay", "-o", options)
        run("mount", "-o", "remount,ro", str(layers["root"]))
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes", [])}
        for mount in mounts:
            source = self._volume(volumes[mount["name"]])
            how = "bind,ro" if mount.get("readOnly") else "bind"
            self._mount(str(source), layers["root"] / mount["mountPath"][1:], "-o", how)
        self._mount("tmpfs", layers["root"] / "dev", "-t", "tmpfs", "-o", "mode=755")
        for device, minor in DEVICES.items():
            path = layers["root"] / "dev" / device
            os.mknod(path, stat.S_IFCHR, os.makedev(1, minor))
            path.chmod(0o666)
        (layers["root"] / "dev/shm").mkdir(mode=0o1777)
        self._mount("tmpfs", layers["root"] / "dev/shm", "-t", "tmpfs", "-o", "size=64m,mode=1777")
        return layers["root"]

    def _mount(self, source: str, target: Path, *options: str) -> None:
        run("mount", *options, source, str(target))
        self._mounts.append(target)

    def _volume(self, volume: Document) -> Path:
        if "persistentVolumeClaim" in volume:
            folder = claim_folder(self.folder.parent, volume["persistentVolumeClaim"]["claimName"])
        else:
            folder = self.folder / "volumes" / volume["name"]
        folder.mkdir(parents=True, exist_ok=True)
        group = self.spec["securityContext"]["fsGroup"]
        if "secret" in volume:
            source = volume["secret"]
            values = self._settings.secrets[source["secretName"]]
            items = source.get("items", [{"key": key, "path": key} for key in values])
            for item in items:
                path = folder / item["path"]
                path.write_text(values[item["key"]])
                os.chown(path, 0, group)
                path.chmod(source.get("defaultMode", 0o644))
        elif "configMap" in volume:
            for name, text in self._settings.config_maps[volume["configMap"]["name"]].items():
                (folder / name).write_text(text)
        else:
            assert set(volume) <= {"name", "emptyDir", "persistentVolumeClaim"}, volume
            os.chown(folder, 0, group)
            folder.chmod(0o2777)
        return folder

    # --- the process

    def _environ(self) -> dict[str, str]:
        environ = dict(self.image.environ)
        if self.image.is_stand_in:
            environ["PATH"] = os.environ["PATH"]
        for source in self.container.get("envFrom", []):
            if "configMapRef" in source:
                environ |= self._settings.config_maps[source["configMapRef"]["name"]]
            else:
                environ |= self._settings.secrets[source["secretRef"]["name"]]
        for variable in self.container.get("env", []):
            if "value" in variable:
                environ[variable["name"]] = _expanded(variable["value"], environ)
            else:
                reference = variable["valueFrom"]["secretKeyRef"]
                secret = self._settings.secrets[reference["name"]]
                environ[variable["name"]] = secret[reference["key"]]
        return environ

    def _start(self) -> subprocess.Popen[bytes]:
        environ = self._environ()
        inside = [*("unshare", "--mount", "--pid", "--fork", "--kill-child")]
        if self.image.is_stand_in:
            command = [*inside, *self.image.entrypoint]
        else:
            security = self.spec["securityContext"]
            user = f"{security['runAsUser']}:{security['runAsGroup']}"
            command = [
                *(*inside, f"--mount-proc={self.root / 'proc'}"),
                *("setpriv", "--no-new-privs"),
                *("/usr/sbin/chroot", f"--userspec={user}", f"--groups={security['fsGroup']}"),
                *(str(self.root), *self.container.get("command", self.image.entrypoint)),
                *(_expanded(word, environ) for word in self.container.get("args", [])),
            ]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                ["/sbin/ip", "netns", "exec", self.name, *command],
                env=environ,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
            )

    def kill(self) -> None:
        """Kill every process of the container at once; the next tick restarts it."""
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        """Stop every process of the container, which keeps its connections, until `resume`."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused container go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for first in psutil.Process(self._process.pid).children():
                first.send_signal(number)

    # --- probes

    def tick(self) -> None:
        """Restart a container that ended, and probe one that runs."""
        if self._process.poll() is not None:
            self._restart()
        elif time.monotonic() >= self._probe_at_s:
            self._probe()

    def _restart(self) -> None:
        self.num_restarts += 1
        self.has_started = self.is_ready = False
        self._failures = 0
        self._process = self._start()

    def _probe(self) -> None:
        kind = "readinessProbe" if self.has_started else "startupProbe"
        # Without a startup probe, a container that does not answer ends by its liveness probe.
        probe = self.container.get(kind, self.container["livenessProbe"])
        self._probe_at_s = time.monotonic() + probe.get("periodSeconds", 10)
        passed = self._passes(probe)
        if not self.has_started:
            self.has_started = passed
            self._probe_at_s = 0.0 if passed else self._probe_at_s
            self._failures += not passed
            if self._failures >= probe.get("failureThreshold", 3):
                self.kill()
            return
        self.is_ready = passed
        liveness = self.container["livenessProbe"]
        self._failures = 0 if passed or self._passes(liveness) else self._failures + 1
        if self._failures >= liveness.get("failureThreshold", 3):
            self.kill()

    def _passes(self, probe: Document) -> bool:
        timeout_s = float(probe.get("timeoutSeconds", 1))
        if self.image.is_stand_in:
            return _connects(self.address, self.image.health_port, timeout_s)
        if "grpc" in probe:
            target = f"{self.address}:{probe['grpc']['port']}"
            return _is_serving(target, probe["grpc"]["service"], timeout_s)
        get = probe["httpGet"]
        port = self.endpoint.ports.get(get["port"], get["port"])
        return _answers(f"http://{self.address}:{port}{get['path']}", timeout_s)

    # --- the end

    def wait(self, timeout_s: float) -> int:
        """The exit status of a container that ends by itself. Raises TimeoutExpired."""
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """The preStop pause, SIGTERM, the grace period, SIGKILL. The caller has withdrawn it."""
        deadline_s = time.monotonic() + self.spec.get("terminationGracePeriodSeconds", 30)
        time.sleep(
            self.container.get("lifecycle", {})
            .get("preStop", {})
            .get("sleep", {})
            .get("seconds", 0)
        )
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self.exit_status = self._process.returncode
        for target in reversed(self._mounts):
            run("umount", "--lazy", str(target))
        shutil.rmtree(self.folder / "volumes", ignore_errors=True)
        self._network.remove_pod(self.name)


def claim_folder(pods: Path, claim: str) -> Path:
    """What a PersistentVolumeClaim holds, given the folder of all pods."""
    return pods / "claims" / claim


def decoded(secret: Document) -> dict[str, str]:
    """The values of a Secret."""
    data = {key: base64.b64decode(text).decode() for key, text in secret.get("data", {}).items()}
    return data | secret.get("stringData", {})


def _connects(address: str, port: int, timeout_s: float) -> bool:
    try:
        socket.create_connection((address, port), timeout_s).close()
    except OSError:
        return False
    return True


def _answers(url: str, timeout_s: float) -> bool:
    try:
        return bool(urllib.request.urlopen(url, timeout=timeout_s).status == 200)
    except OSError:
        return False


def _is_serving(target: str, service: str, timeout_s: float) -> bool:
    with grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _expanded(value: str, environ: Mapping[str, str]) -> str:
    """The value of a variable, with the variables that it names as `$(NAME)`."""
    return re.sub(r"\$\((\w+)\)", lambda match: environ[match[1]], value)
