#!/usr/bin/env bash
# The version of pyproject.toml, for the steps behind this one; fails unless it is what the tag says.
set -euo pipefail
version="$(python3 -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')"
if [ "v${version}" != "${GITHUB_REF_NAME}" ]; then
    echo "the tag is ${GITHUB_REF_NAME}, but pyproject.toml has the version ${version}: tag v${version}, or correct the file" >&2
    exit 1
fi
echo "version=${version}" >> "${GITHUB_OUTPUT}"
