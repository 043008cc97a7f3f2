# Build from the repository root: docker build -f deploy/docker/gateway.Dockerfile -t loraplex-gateway .
# A mirror or a digest of your own: --build-arg PYTHON_IMAGE=python@sha256:...
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
FROM ${PYTHON_IMAGE} AS build
WORKDIR /src
# pip compares every file with the hashes of these lists, which scripts/image_requirements.sh writes.
COPY deploy/docker/requirements requirements
RUN python -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt
RUN python -m venv /opt/loraplex \
    && /opt/loraplex/bin/pip install --no-cache-dir --require-hashes -r requirements/gateway.txt
COPY pyproject.toml README.md LICENSE ./
COPY loraplex loraplex
COPY services loraplex_services
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/loraplex/bin/pip install --no-cache-dir --no-deps /dist/*.whl && /opt/loraplex/bin/pip check
# What is inside, with licences and their texts, in CycloneDX's format.
RUN /opt/build/bin/cyclonedx-py environment --gather-license-texts --output-reproducible \
    --pyproject pyproject.toml --output-file /opt/loraplex/sbom.cdx.json /opt/loraplex/bin/python

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/loraplex /opt/loraplex
USER 10001:10001
ENV PATH=/opt/loraplex/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    LORAPLEX_METRICS_LISTEN=127.0.0.1:9090
EXPOSE 8080 50051 9090
# Kubernetes has probes of its own; this one is for plain containers, on the port without TLS.
HEALTHCHECK --start-period=30s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9090/healthz', timeout=5)"]
ENTRYPOINT ["python", "-m", "loraplex_services.gateway"]
