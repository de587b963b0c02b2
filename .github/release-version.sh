#!/usr/bin/env bash
# The version of pyproject.toml, for the steps behind this one; fails unless it is what the tag says. Fails, too, if
# somebody else has the project's name on the Python index: who installs by that name would get a stranger's program.
set -euo pipefail
of_project() { python3 -c "import tomllib; print(tomllib.load(open('pyproject.toml', 'rb'))['project']['$1'])"; }
version="$(of_project version)"
name="$(of_project name)"
if [ "v${version}" != "${GITHUB_REF_NAME}" ]; then
    echo "the tag is ${GITHUB_REF_NAME}, but pyproject.toml has the version ${version}: tag v${version}, or correct the file" >&2
    exit 1
fi
answer="$(curl --silent --show-error --location --max-time 30 --write-out '\n%{http_code}' "${INDEX}/pypi/${name}/json")"
case "${answer##*$'\n'}" in
    404) ;;  # nobody's
    200)
        if ! grep -qiE "https://github\.com/${GITHUB_REPOSITORY}[\"/]" <<< "${answer}"; then
            echo "${INDEX} has a project ${name} that does not name github.com/${GITHUB_REPOSITORY}: choose another name" >&2
            exit 1
        fi ;;
    *)
        echo "${INDEX} does not say whose the name ${name} is (${answer##*$'\n'}): run the job again" >&2
        exit 1 ;;
esac
echo "version=${version}" >> "${GITHUB_OUTPUT}"
