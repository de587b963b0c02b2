# syntax=docker/dockerfile:1
# What vLLM lacks, the wire for routers and our KV connector, as the folder /opt/diptych/vllm. From
# the root of the repository, either an image that only has this folder, which the operator copies
# into pods of a stock vLLM:
#   docker build -f docker/vllm.Dockerfile -t diptych-vllm-connector:0.1.0 .
# or vLLM itself with the folder on top, for a service's engine.image and transfer.connectorImage:
#   docker build -f docker/vllm.Dockerfile --target vllm -t vllm-with-diptych:0.32.0 .

ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

FROM python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# What vLLM's image has not: of the extra vllm all but numpy and pyzmq. Nothing of vLLM's is shadowed.
COPY pyproject.toml requirements.lock README.md LICENSE ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --target /opt/diptych/vllm --no-compile libucx-cu13 --constraint requirements.lock
COPY . .
# Without byte code: vLLM's Python may be another.
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --no-compile --target /opt/diptych/vllm .
RUN python docker/slim.py /opt/diptych/vllm

# hadolint ignore=DL3006
FROM ${VLLM_IMAGE} AS vllm
ENV PYTHONPATH=/opt/diptych/vllm
COPY --from=build /opt/diptych/vllm /opt/diptych/vllm

FROM python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="diptych-vllm-connector" \
      org.opencontainers.image.description="The KV connector for vLLM, to be copied into a pod." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
RUN groupadd --gid 10001 diptych \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin diptych
COPY --from=build /opt/diptych/vllm /opt/diptych/vllm
USER 10001:10001
WORKDIR /tmp
# The operator says what is copied, and where to.
ENTRYPOINT ["cp"]
