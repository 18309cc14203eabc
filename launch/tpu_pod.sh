#!/usr/bin/env bash
# Runs one command on every worker of a TPU VM pod. See docs/launch_tpu_pod.md.
#
#   launch/tpu_pod.sh NAME ZONE setup                      installs the checked-out commit on every worker
#   launch/tpu_pod.sh NAME ZONE train CONFIG.yaml …        runs train, eval or sft with these arguments
set -euo pipefail

usage() {
  echo "usage: $0 NAME ZONE setup | train … | eval … | sft …   (NAME and ZONE of the TPU VM)" >&2
  exit 2
}

[[ $# -ge 3 ]] || usage
name=$1 zone=$2
shift 2

on_every_worker() {
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --quiet --command="$1"
}

setup() {
  local archive
  archive=$(mktemp -t quatrain-XXXXXX.tar.gz)
  # shellcheck disable=SC2064  # expand the file's name now, not when the trap runs
  trap "rm -f '$archive'" EXIT
  git archive --format=tar.gz --output="$archive" HEAD
  gcloud compute tpus tpu-vm scp "$archive" "$name:quatrain.tar.gz" --zone="$zone" --worker=all --quiet
  on_every_worker '
    set -e
    mkdir -p ~/quatrain
    tar -xzf ~/quatrain.tar.gz -C ~/quatrain
    rm ~/quatrain.tar.gz
    cd ~/quatrain
    command -v python3.11 || sudo apt-get install -y python3.11 python3.11-venv
    python3.11 -m venv .venv
    .venv/bin/pip install --quiet -c constraints.txt -e ".[hub,tpu]"
  '
}

case $1 in
  setup)
    [[ $# -eq 1 ]] || usage
    setup
    ;;
  train | eval | sft)
    # Quotes each argument for the worker's shell, and prints the worker's name before each line of its output.
    printf -v words '%q ' "$@"
    on_every_worker "set -o pipefail; cd ~/quatrain && .venv/bin/quatrain $words 2>&1 | sed -u \"s/^/[\$(hostname)] /\""
    ;;
  *)
    usage
    ;;
esac
