#!/usr/bin/env bash
# Installs peers, each into an environment of its own: install.sh FOLDER [vllm] [llamacpp] [routers]
# Prints what DIPTYCH_BENCH_PEERS has to be. Nothing of the project needs them.
set -euo pipefail
folder=$1
shift
peers=()

environment() {
    python3 -m venv "$folder/$1"
    "$folder/$1/bin/pip" install --quiet --disable-pip-version-check "${@:2}" >&2
}

[ $# -gt 0 ] || set -- vllm llamacpp routers
for peer in "$@"; do
    python=$folder/$peer/bin/python
    case $peer in
    vllm)
        python3 "$(dirname "$0")/../../install_vllm.py" --venv "$folder/vllm" >&2
        peers+=("vllm=$python")
        ;;
    llamacpp)
        environment llamacpp xllamacpp==2026.10.11549 numpy
        peers+=("llamacpp=$python")
        ;;
    routers)
        environment routers vllm-router sglang-router
        peers+=("vllm-router=$python" "sglang-router=$python")
        ;;
    *)
        echo "no peer is called $peer" >&2
        exit 1
        ;;
    esac
done
(IFS=, && echo "export DIPTYCH_BENCH_PEERS=${peers[*]}")
