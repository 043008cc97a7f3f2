"""The subset of `kubectl` that the operators' pages use, on the cluster of this folder.

A shell finds it on its PATH, so that the commands of a page run as they are written. A command that
is not known here fails.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import re
import socketserver
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.cluster.cluster import Cluster
from tests.deploy.cluster.pods import claim_folder
from tests.deploy.kustomize import Document, render

CLIENT = Path(__file__).with_name("kubectl_client.py")
Fill = Callable[[Path], None]


class Kubectl:
    """Objects that were applied, and the cluster that runs them. A context manager."""

    def __init__(self, desk: Path, fill_models: Fill) -> None:
        """
        Args:
            desk: folder of the shell; the cluster's files are in a folder of their own in it.
            fill_models: stands in for the job that downloads a base into its claim.
        """
        self.desk = desk
        self.objects: dict[tuple[str, str], Document] = {}
        self.cluster: Cluster | None = None
        self._fill_models = fill_models
        self._running = contextlib.ExitStack()
        self._server = socketserver.ThreadingUnixStreamServer(str(desk / "kubectl.sock"), _Handler)
        self._server.kubectl = self  # type: ignore[attr-defined]
        (desk / "bin").mkdir()
        command = desk / "bin" / "kubectl"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} {CLIENT} "$@"\n')
        command.chmod(0o755)

    def __enter__(self) -> Kubectl:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()
        self._server.shutdown()
        self._server.server_close()

    @property
    def environ(self) -> dict[str, str]:
        """What a shell needs in order to find this one."""
        return {"KUBECTL_SOCKET": str(self.desk / "kubectl.sock")}

    def run(self, arguments: list[str]) -> dict[str, Any]:
        """Do what a call says; its output, its error and the port that it forwards, if any."""
        # As kubectl does, argparse would not take an option between two words.
        args = _parser().parse_args(sorted(arguments, key=lambda word: word.startswith("--")))
        return {"out": "", "error": "", "forward": None} | (
            getattr(self, f"_{args.verb}")(args) or {}
        )

    def claim(self, name: str) -> Path:
        """What a PersistentVolumeClaim holds."""
        return claim_folder(self.desk / "cluster" / "pods", name)

    def _kustomize(self, args: argparse.Namespace) -> dict[str, Any]:
        return {"out": yaml.safe_dump_all(render(self.desk / args.folder))}

    def _apply(self, args: argparse.Namespace) -> None:
        if args.k:
            documents = render(self.desk / args.k)
        else:
            documents = [doc for doc in yaml.safe_load_all((self.desk / args.f).read_text()) if doc]
        self.objects |= {(doc["kind"], doc["metadata"]["name"]): doc for doc in documents}
        if args.k:
            (self.desk / "cluster").mkdir(exist_ok=True)
            self.cluster = Cluster(list(self.objects.values()), self.desk / "cluster")
            self._running.enter_context(self.cluster)
        elif self.cluster is not None:
            self.cluster.network.policies += [d for d in documents if d["kind"] == "NetworkPolicy"]

    def _create(self, args: argparse.Namespace) -> None:
        if args.what[0] == "job":
            template = self.objects["CronJob", args.from_.removeprefix("cronjob/")]["spec"]
            assert self.cluster is not None
            self.cluster.run_job(args.what[1], template["jobTemplate"]["spec"]["template"])
            self.objects["Job", args.what[1]] = template["jobTemplate"]
            return
        kind, generic, name = args.what
        assert (kind, generic) == ("secret", "generic"), args.what
        pairs = dict(each.split("=", 1) for each in args.from_literal)
        for each in args.from_file:
            key, _, path = each.rpartition("=")
            pairs[key or path] = (self.desk / path).read_text()
        data = {key: base64.b64encode(text.encode()).decode() for key, text in pairs.items()}
        document = {"kind": "Secret", "metadata": {"name": name}, "data": data}
        self.objects["Secret", name] = document

    def _wait(self, args: argparse.Namespace) -> None:
        if args.what[0] == "deployment":
            assert self.cluster is not None and args.for_ == "condition=Available" and args.all
            self.cluster.wait_ready()
            return
        kind, _, name = args.what[0].partition("/")
        assert (kind, args.for_) == ("job", "condition=Complete"), args
        job = self.objects["Job", name]
        if name == "fill-models":
            [volume] = [
                v for v in job["spec"]["template"]["spec"]["volumes"] if v["name"] == "models"
            ]
            self._fill_models(self.claim(volume["persistentVolumeClaim"]["claimName"]))

    def _port_forward(self, args: argparse.Namespace) -> dict[str, Any]:
        kind, _, name = args.what.partition("/")
        assert self.cluster is not None and kind == "service", args.what
        address, service = self.cluster.network.services[name]
        port = int(args.port)
        assert port in {each["port"] for each in service["spec"]["ports"]}, args
        return {"forward": [port, address, port]}


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        arguments = json.loads(self.rfile.readline())
        try:
            answer = self.server.kubectl.run(arguments)  # type: ignore[attr-defined]
        except BaseException as error:
            answer = {"out": "", "error": f"kubectl {arguments}: {error!r}\n", "forward": None}
        self.wfile.write(json.dumps(answer).encode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("kubectl", exit_on_error=False)
    parser.add_argument("-n", choices=["loraplex"])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("kustomize").add_argument("folder")
    apply = verbs.add_parser("apply").add_mutually_exclusive_group(required=True)
    apply.add_argument("-f")
    apply.add_argument("-k")
    create = verbs.add_parser("create")
    create.add_argument("what", nargs="+")
    create.add_argument("--from", dest="from_")
    create.add_argument("--from-literal", action="append", default=[])
    create.add_argument("--from-file", action="append", default=[])
    wait = verbs.add_parser("wait")
    wait.add_argument("what", nargs="+")
    wait.add_argument("--for", dest="for_", required=True)
    wait.add_argument("--all", action="store_true")
    wait.add_argument(
        "--timeout", type=lambda text: re.fullmatch(r"\d+[hms]", text)[0], required=True
    )  # type: ignore[index]
    forward = verbs.add_parser("port-forward")
    forward.set_defaults(verb="port_forward")
    forward.add_argument("what")
    forward.add_argument("port")
    return parser
