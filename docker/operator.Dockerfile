# syntax=docker/dockerfile:1
# The operator. From the root of the repository:
#   docker build -f docker/operator.Dockerfile -t diptych-operator:0.1.0 .

FROM python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b AS build
ENV PATH=/opt/diptych/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore
RUN python -m venv /opt/diptych/venv
WORKDIR /src

# The dependencies alone, so that a change of code leaves their layer as it is.
COPY pyproject.toml requirements.lock README.md LICENSE ./
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install '.[operator]' --constraint requirements.lock && pip uninstall --yes diptych
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install --no-deps --target /opt/diptych/code .
RUN python docker/slim.py /opt/diptych/venv/lib/python3.11/site-packages /opt/diptych/code

FROM python:3.11.16-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="diptych-operator" \
      org.opencontainers.image.description="Makes InferenceServices out of Deployments and keeps them so." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
RUN groupadd --gid 10001 diptych \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin diptych
ENV PATH=/opt/diptych/venv/bin:$PATH \
    PYTHONPATH=/opt/diptych/code \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    USER=diptych
COPY --from=build /opt/diptych/venv /opt/diptych/venv
COPY --from=build /opt/diptych/code /opt/diptych/code
USER 10001:10001
WORKDIR /tmp
EXPOSE 8080
ENTRYPOINT ["python", "-m", "diptych_operator"]
