# Build from the repository root. The default is a CPU image; for NVIDIA GPUs build with
#   --build-arg TORCH=torch==2.13.0 --build-arg TORCH_INDEX=https://pypi.org/simple
FROM python:3.12-slim-bookworm AS build
ARG TORCH=torch==2.13.0+cpu
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python -m venv /opt/loraplex \
    && /opt/loraplex/bin/pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" "${TORCH}"
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY loraplex loraplex
COPY services services
RUN /opt/loraplex/bin/pip install --no-cache-dir -c constraints.txt '.[worker]'

FROM python:3.12-slim-bookworm
COPY --from=build /opt/loraplex /opt/loraplex
COPY demo/base /opt/loraplex/demo/base
USER 10001:10001
ENV PATH=/opt/loraplex/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
EXPOSE 50053 9090
ENTRYPOINT ["python", "-m", "services.worker"]
