# Build from the repository root, by `make images`. The default is a CPU image with the kernels of every processor
# of this family. The CUDA image (scripts/images.sh has its arguments) installs CUDA's torch and a C compiler, because
# Triton compiles its launchers as it runs. A mirror or a digest of your own: PYTHON_IMAGE=python@sha256:... make images
ARG PYTHON_IMAGE=python:3.12-slim-bookworm
FROM ${PYTHON_IMAGE} AS build
ARG REQUIREMENTS=worker
ARG TORCH=torch==2.13.0+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
# pip compares every file with the hashes of these lists, which scripts/image_requirements.sh writes. Only the CPU build
# of torch comes without: from this index alone, so that no name is looked up in both.
COPY deploy/docker/requirements requirements
RUN python -m venv /opt/build \
    && /opt/build/bin/pip install --no-cache-dir --require-hashes -r requirements/build.txt
RUN python -m venv /opt/loraplex && { [ -z "${TORCH}" ] \
    || /opt/loraplex/bin/pip install --no-cache-dir --no-deps --index-url "${TORCH_INDEX}" "${TORCH}"; } \
    && /opt/loraplex/bin/pip install --no-cache-dir --require-hashes -r "requirements/${REQUIREMENTS}.txt"
COPY pyproject.toml README.md LICENSE ./
COPY loraplex loraplex
COPY services loraplex_services
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /dist . \
    && /opt/loraplex/bin/pip install --no-cache-dir --no-deps /dist/*.whl && /opt/loraplex/bin/pip check
# What is inside, with licences and their texts, in CycloneDX's format.
RUN /opt/build/bin/cyclonedx-py environment --gather-license-texts --output-reproducible \
    --pyproject pyproject.toml --output-file /opt/loraplex/sbom.cdx.json /opt/loraplex/bin/python
WORKDIR /
RUN /opt/loraplex/bin/python -m loraplex_services.worker.native.build --all

FROM ${PYTHON_IMAGE}
ARG RUNTIME_PACKAGES=""
RUN [ -z "${RUNTIME_PACKAGES}" ] || { apt-get update \
    && apt-get install -y --no-install-recommends $(echo "${RUNTIME_PACKAGES}" | tr , ' ') && rm -rf /var/lib/apt/lists/*; }
COPY --from=build /opt/loraplex /opt/loraplex
COPY demo/base /opt/loraplex/demo/base
USER 10001:10001
ENV PATH=/opt/loraplex/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    LORAPLEX_METRICS_LISTEN=127.0.0.1:9090
EXPOSE 50053 9090
# Kubernetes has probes of its own; this one is for plain containers, on the port without TLS.
HEALTHCHECK --start-period=20m \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:9090/healthz', timeout=5)"]
ENTRYPOINT ["python", "-m", "loraplex_services.worker"]
