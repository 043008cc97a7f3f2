"""The network of one node: an address for every pod, cluster IPs, names, and network policies.

Pods are network namespaces with a routed address each, as most network plugins set them up. Cluster
IPs and NetworkPolicies are nftables rules in the node's own namespace, and names come from dnsmasq.
The node is the namespace that the tests run in (`make deploy-test` makes one).
"""

from __future__ import annotations

import ipaddress
import itertools
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.kustomize import Document

GATEWAY = "169.254.1.1"
"""The node, as every pod sees it: next hop and name server."""
DOMAIN = "svc.cluster.local"
DNS_PORT = 53


def run(*command: str, text: str | None = None) -> str:
    """Standard output of a command. Raises CalledProcessError."""
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr or done.stdout}\n{text or ''}")
    return done.stdout


@dataclass(frozen=True)
class Endpoint:
    """A pod as the network sees it."""

    address: str
    labels: Mapping[str, str]
    ports: Mapping[str, int]
    """Container ports by name."""
    is_ready: bool


@dataclass
class Network:
    """Owns the addresses. `apply` puts the rules in force for the pods of this moment."""

    folder: Path
    namespace: str = ""
    services: dict[str, tuple[str, Document]] = field(default_factory=dict)
    """By name: the cluster IP (empty for a headless Service) and the document."""
    policies: list[Document] = field(default_factory=list)
    _pod_addresses: Iterator[Any] = field(
        default_factory=lambda: iter(ipaddress.ip_network("10.88.0.0/16").hosts())
    )
    _service_addresses: Iterator[Any] = field(
        default_factory=lambda: iter(ipaddress.ip_network("10.96.0.0/16").hosts())
    )
    _dns: subprocess.Popen[bytes] | None = None
    _links: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def start(self, documents: Sequence[Document]) -> None:
        """Routing, the name server, and an address for every Service."""
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        run("ip", "link", "set", "lo", "up")
        run("ip", "address", "replace", f"{GATEWAY}/32", "dev", "lo")
        for document in documents:
            if document["kind"] == "Service":
                is_headless = document["spec"].get("clusterIP") == "None"
                address = "" if is_headless else str(next(self._service_addresses))
                self.services[document["metadata"]["name"]] = (address, document)
                self.namespace = document["metadata"]["namespace"]
            if document["kind"] == "NetworkPolicy":
                self.policies.append(document)
        # Locally made traffic to cluster IPs needs a route before it is translated.
        run("ip", "route", "replace", "10.96.0.0/16", "dev", "lo", "src", GATEWAY)
        hosts, settings = self.folder / "hosts", self.folder / "dnsmasq.conf"
        hosts.write_text("")
        settings.write_text("")
        self._dns = subprocess.Popen(
            [
                *("dnsmasq", "--keep-in-foreground", "--no-resolv", "--no-hosts", "--user=root"),
                *("--bind-interfaces", f"--listen-address={GATEWAY}", "--no-negcache"),
                *(f"--addn-hosts={hosts}", "--local=/cluster.local/", f"--conf-file={settings}"),
                f"--pid-file={self.folder / 'dnsmasq.pid'}",
            ]
        )

    def stop(self) -> None:
        """End the name server; the namespaces end with the test run."""
        if self._dns is not None:
            self._dns.terminate()
            self._dns.wait()

    def add_pod(self, name: str) -> str:
        """Make the namespace of a pod and return its address."""
        address, link = str(next(self._pod_addresses)), f"pod{next(self._links)}"
        run("ip", "netns", "add", name)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", link, "up")
        run("ip", "route", "add", f"{address}/32", "dev", link)
        for command in (
            ("link", "set", "lo", "up"),
            ("address", "add", f"{address}/32", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("route", "add", GATEWAY, "dev", "eth0"),
            ("route", "add", "default", "via", GATEWAY, "dev", "eth0"),
        ):
            run("ip", "-n", name, *command)
        # The node answers for its link-local address on every pod's link.
        run("ip", "address", "add", f"{GATEWAY}/32", "dev", link)
        return address

    def remove_pod(self, name: str) -> None:
        """Delete a pod's namespace, and with it its link and its route."""
        run("ip", "netns", "delete", name)

    def resolv_conf(self) -> str:
        """What the kubelet writes into a pod."""
        search = f"{self.namespace}.{DOMAIN} {DOMAIN} cluster.local"
        return f"nameserver {GATEWAY}\nsearch {search}\noptions ndots:5\n"

    def apply(self, pods: Sequence[Endpoint]) -> None:
        """Names, cluster IPs and policies for these pods, each replaced in one transaction."""
        self._write_names(pods)
        run("nft", "-f", "-", text=self._rules(pods))

    def _write_names(self, pods: Sequence[Endpoint]) -> None:
        lines = []
        for name, (address, service) in self.services.items():
            ready = [address] if address else [pod.address for pod in _behind(service, pods)]
            lines += [f"{ip} {name}.{self.namespace}.{DOMAIN}\n" for ip in ready]
        hosts = self.folder / "hosts"
        with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False) as draft:
            draft.writelines(lines)
        if hosts.read_text() != "".join(lines):
            Path(draft.name).chmod(0o644)
            Path(draft.name).replace(hosts)
            assert self._dns is not None
            self._dns.send_signal(1)
        else:
            Path(draft.name).unlink()

    def _rules(self, pods: Sequence[Endpoint]) -> str:
        nat = "\n".join(self._service_rules(pods))
        forward, chains = [], []
        for pod in pods:
            for direction, key in (("Egress", "saddr"), ("Ingress", "daddr")):
                chain = f"{direction.lower()}_{pod.address.replace('.', '_')}"
                rules = self._policy_rules(pod, direction, pods)
                if rules is not None:
                    forward.append(f"ip {key} {pod.address} jump {chain}")
                    chains.append(f"chain {chain} {{\n" + "\n".join([*rules, "drop"]) + "\n}")
        return "\n".join(
            [
                "table ip cluster",
                "delete table ip cluster",
                "table ip cluster {",
                *chains,
                "chain services {",
                nat,
                "}",
                "chain prerouting { type nat hook prerouting priority -100; jump services; }",
                "chain output { type nat hook output priority -100; jump services; }",
                "chain forward { type filter hook forward priority 0; policy accept;",
                "ct state established,related accept",
                *forward,
                "}",
                "}",
            ]
        )

    def _service_rules(self, pods: Sequence[Endpoint]) -> Iterable[str]:
        for address, service in self.services.values():
            for port in service["spec"]["ports"] if address else ():
                target = port.get("targetPort", port["port"])
                backends = [
                    f"{pod.address} . {pod.ports.get(target, target)}"
                    for pod in _behind(service, pods)
                ]
                match = f"ip daddr {address} tcp dport {port['port']}"
                if not backends:
                    # As kube-proxy does for a Service without endpoints.
                    yield f"{match} counter"
                    continue
                table = ", ".join(f"{i} : {backend}" for i, backend in enumerate(backends))
                yield f"{match} dnat ip to numgen random mod {len(backends)} map {{ {table} }}"

    def _policy_rules(
        self, pod: Endpoint, direction: str, pods: Sequence[Endpoint]
    ) -> list[str] | None:
        """Rules that let traffic of a pod pass; None where no policy selects the pod."""
        selecting = [
            policy["spec"]
            for policy in self.policies
            if direction in policy["spec"]["policyTypes"]
            and _matches(policy["spec"]["podSelector"], pod.labels)
        ]
        if not selecting:
            return None
        key, peer_key = ("egress", "to") if direction == "Egress" else ("ingress", "from")
        side = "daddr" if direction == "Egress" else "saddr"
        rules = []
        for rule in (rule for spec in selecting for rule in spec.get(key, [])):
            peers = [_peer(peer, side, pods) for peer in rule.get(peer_key, [{}])]
            ports = [_port(port, pod, direction) for port in rule.get("ports", [{}])]
            rules += [
                f"{peer} {port} return" for peer in peers if peer is not None for port in ports
            ]
        return rules


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}, f"this selector is not understood: {selector}"
    return selector.get("matchLabels", {}).items() <= labels.items()


def _behind(service: Document, pods: Sequence[Endpoint]) -> list[Endpoint]:
    wanted = service["spec"]["selector"].items()
    return [pod for pod in pods if pod.is_ready and wanted <= pod.labels.items()]


def _peer(peer: Document, side: str, pods: Sequence[Endpoint]) -> str | None:
    """An nftables match; empty for anybody, None where no pod is selected."""
    if not peer:
        return ""
    if "namespaceSelector" in peer:
        return None  # There is one namespace here, and no policy names it.
    assert set(peer) == {"podSelector"}, f"this peer is not understood: {peer}"
    chosen = [pod.address for pod in pods if _matches(peer["podSelector"], pod.labels)]
    return f"ip {side} {{ {', '.join(chosen)} }}" if chosen else None


def _port(port: Document, pod: Endpoint, direction: str) -> str:
    if not port:
        return ""
    number = port["port"] if direction == "Egress" else pod.ports.get(port["port"], port["port"])
    return f"{port.get('protocol', 'TCP').lower()} dport {number}"
