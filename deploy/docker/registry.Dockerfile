# Build from the repository root: docker build -f deploy/docker/registry.Dockerfile -t loraplex-registry .
# A mirror or a digest of your own: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY loraplex loraplex
COPY services loraplex_services
RUN python -m venv /opt/loraplex \
    && /opt/loraplex/bin/pip install --no-cache-dir -c constraints.txt '.[registry]'
# What is inside, with licences and their texts, in CycloneDX's format.
RUN python -m venv /opt/sbom && /opt/sbom/bin/pip install --no-cache-dir cyclonedx-bom==7.5.0 \
    && /opt/sbom/bin/cyclonedx-py environment --gather-license-texts --output-reproducible \
    --pyproject pyproject.toml --output-file /opt/loraplex/sbom.cdx.json /opt/loraplex/bin/python

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/loraplex /opt/loraplex
USER 10001:10001
ENV PATH=/opt/loraplex/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    LORAPLEX_METRICS_LISTEN=127.0.0.1:9090
EXPOSE 50052 9090
# Kubernetes has probes of its own; this one is for plain containers, on the port without TLS.
HEALTHCHECK --start-period=30s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9090/healthz', timeout=5)"]
ENTRYPOINT ["python", "-m", "loraplex_services.registry"]
