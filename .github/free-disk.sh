#!/usr/bin/env bash
# Take from a hosted runner of GitHub what nothing here uses (Android, .NET, Haskell, Swift, CodeQL): some 20 GB, without
# which a CUDA torch and the images do not fit. Does nothing elsewhere.
set -euo pipefail
[ "${GITHUB_ACTIONS:-}" = true ] || { echo "not a runner of GitHub: nothing removed"; exit 0; }
sudo rm -rf /usr/local/lib/android /usr/share/dotnet /opt/ghc /usr/local/.ghcup /usr/share/swift \
    /usr/local/share/powershell /usr/local/share/chromium /opt/hostedtoolcache/CodeQL
df --human-readable /
