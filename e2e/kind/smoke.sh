#!/usr/bin/env bash
# Install a packaged chart in the cluster of $KUBECONFIG as a user would, with no value set, and ask the example's service
# a question. Needs helm, kubectl and curl.
#   e2e/kind/smoke.sh dist/diptych-VERSION.tgz
set -euo pipefail
cd "$(dirname "$0")/../.."
helm install diptych "$1" --namespace diptych-system --create-namespace --wait --timeout 5m
helm test diptych --namespace diptych-system
kubectl apply --filename examples/smollm2.yaml
kubectl wait --for=condition=Available --timeout=10m inferenceservice/smollm2
kubectl port-forward service/smollm2-router 8080:8000 &
trap 'kill %1' EXIT
# Nobody listens in the first moments. The answer rests on no near tie.
answer=$(curl --silent --show-error --fail --retry 30 --retry-delay 1 --retry-connrefused --max-time 120 \
    http://127.0.0.1:8080/v1/chat/completions --header 'content-type: application/json' --data \
    '{"model": "smollm2", "max_tokens": 16, "temperature": 0, "messages": [{"role": "user", "content": "What is the capital of Japan?"}]}')
echo "$answer"
grep --quiet Tokyo <<< "$answer"
