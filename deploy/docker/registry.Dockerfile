# Build from the repository root: docker build -f deploy/docker/registry.Dockerfile -t loraplex-registry .
FROM python:3.12-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY loraplex loraplex
COPY services services
RUN python -m venv /opt/loraplex \
    && /opt/loraplex/bin/pip install --no-cache-dir -c constraints.txt '.[registry]'

FROM python:3.12-slim-bookworm
COPY --from=build /opt/loraplex /opt/loraplex
USER 10001:10001
ENV PATH=/opt/loraplex/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
EXPOSE 50052 9090
ENTRYPOINT ["python", "-m", "services.registry"]
