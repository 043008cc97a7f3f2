"""Runs the rendered manifests of an overlay: Deployments become pods, which are real processes.

This stands in for a kubelet, a scheduler with one node, kube-proxy and the Deployment controller.
It is no Kubernetes: nothing checks admission, and resources, seccomp, autoscalers, disruption
budgets and topology are not enforced.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.deploy.cluster.images import Images
from tests.deploy.cluster.network import Network
from tests.deploy.cluster.pods import Pod, Settings, decoded
from tests.deploy.kustomize import Document

TICK_S = 0.25
READY_S = 240.0


class Cluster:
    """Every Deployment of `documents`, running. A context manager."""

    def __init__(self, documents: Sequence[Document], folder: Path) -> None:
        self.network = Network(folder)
        self.images = Images()
        self.pods: list[Pod] = []
        self._ending: list[Pod] = []
        self._folder = folder
        self._documents = documents
        self._deployments = {
            doc["metadata"]["name"]: doc for doc in documents if doc["kind"] == "Deployment"
        }
        self._settings = Settings(
            {d["metadata"]["name"]: d["data"] for d in documents if d["kind"] == "ConfigMap"},
            {d["metadata"]["name"]: decoded(d) for d in documents if d["kind"] == "Secret"},
        )
        self._numbers: Iterator[int] = itertools.count()
        self._lock = threading.RLock()
        self._ends = threading.Event()
        self._kubelet = threading.Thread(target=self._tick_until_the_end, daemon=True)
        self._failure: BaseException | None = None

    def __enter__(self) -> Cluster:
        self.network.start(self._documents)
        self._kubelet.start()
        for name, deployment in self._deployments.items():
            for _ in range(deployment["spec"].get("replicas", 1)):
                self.add_pod(name)
        return self

    def __exit__(self, *_: object) -> None:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(self.remove_pod, list(self.pods)))
        self._ends.set()
        self._kubelet.join()
        self.network.stop()
        self.images.close()

    # --- what an operator does

    def address(self, service: str) -> str:
        """The cluster IP of a Service."""
        return self.network.services[service][0]

    def pods_of(self, deployment: str) -> list[Pod]:
        """The pods that a Deployment has now, oldest first."""
        with self._lock:
            return [pod for pod in self.pods if pod.name.startswith(f"{deployment}-")]

    def add_pod(self, deployment: str) -> Pod:
        """Start one more pod of a Deployment, without waiting for it."""
        template = self._deployments[deployment]["spec"]["template"]
        [container] = template["spec"]["containers"]
        image = self.images.get(container["image"])
        with self._lock:
            name = f"{deployment}-{next(self._numbers)}"
            pod = Pod(name, template, image, self._settings, self.network, self._folder / "pods")
            self.pods.append(pod)
        return pod

    def run_job(self, name: str, template: Document) -> str:
        """Run a pod to its end and return its log. Raises RuntimeError if it fails."""
        [container] = template["spec"]["containers"]
        image = self.images.get(container["image"])
        with self._lock:
            pod = Pod(name, template, image, self._settings, self.network, self._folder / "pods")
            self._ending.append(pod)
            self._apply()
        status = pod.wait(READY_S)
        with self._lock:
            pod.stop()
            self._ending.remove(pod)
        if status != 0:
            raise RuntimeError(f"the job {name} ended with {status}:\n{pod.log()}")
        return pod.log()

    def remove_pod(self, pod: Pod) -> None:
        """Withdraw a pod from every Service, then end it with its grace period."""
        with self._lock:
            self.pods.remove(pod)
            self._ending.append(pod)
            self._apply()
        pod.stop()
        with self._lock:
            self._ending.remove(pod)

    def scale(self, deployment: str, replicas: int) -> None:
        """Add pods and wait for them, or remove the newest ones."""
        while len(self.pods_of(deployment)) < replicas:
            self.add_pod(deployment)
        self.wait_ready(deployment)
        for pod in self.pods_of(deployment)[replicas:]:
            self.remove_pod(pod)

    def roll_out(self, deployment: str) -> None:
        """Replace every pod as the Deployment's strategy says."""
        spec = self._deployments[deployment]["spec"]
        surge = spec.get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", "25%")
        old = self.pods_of(deployment)
        if isinstance(surge, str):
            surge = math.ceil(len(old) * int(surge.rstrip("%")) / 100)
        for pod in old:
            if surge:
                self.add_pod(deployment)
                self.wait_ready(deployment)
            self.remove_pod(pod)
            if not surge:
                self.add_pod(deployment)
                self.wait_ready(deployment)

    def wait_ready(self, *deployments: str) -> None:
        """Until every pod of these Deployments, or of all, is ready. Raises TimeoutError."""
        names = deployments or tuple(self._deployments)
        self.wait(lambda: all(pod.is_ready for name in names for pod in self.pods_of(name)))

    def wait(self, condition: Callable[[], Any], timeout_s: float = READY_S) -> None:
        """Until the condition holds. Raises TimeoutError with the last lines of every pod's log."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if self._failure is not None:
                raise RuntimeError("the cluster's own loop ended") from self._failure
            if time.monotonic() > deadline_s:
                raise TimeoutError("\n".join(pod.summary() for pod in self.pods))
            time.sleep(TICK_S)

    # --- the loop

    def _tick_until_the_end(self) -> None:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            try:
                while not self._ends.wait(TICK_S):
                    with self._lock:
                        pods = list(self.pods)
                    list(pool.map(Pod.tick, pods))
                    with self._lock:
                        self._apply()
            except BaseException as error:
                self._failure = error
                raise

    def _apply(self) -> None:
        # A pod that ends is behind no Service any more, but network policies still know it.
        ending = [dataclasses.replace(pod.endpoint, is_ready=False) for pod in self._ending]
        self.network.apply([*(pod.endpoint for pod in self.pods), *ending])
