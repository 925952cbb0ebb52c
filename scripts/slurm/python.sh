# Sourced by the job scripts, after `home` was set to forge's folder. Sets PYTHON, unless the environment does: to the interpreter
# beside the active environment's torchrun, or to that of forge's own environment.
# shellcheck shell=bash disable=SC2154
if [[ -z ${PYTHON:-} ]]; then
    torchrun=$(command -v torchrun || echo "$home/.venv/bin/torchrun")
    PYTHON=$(dirname "$torchrun")/python
    if [[ ! -x $PYTHON ]]; then
        echo "no environment with torch is active nor in $home/.venv; activate it before sbatch" >&2
        exit 2
    fi
fi
export PYTHON
