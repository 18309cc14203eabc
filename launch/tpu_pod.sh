#!/usr/bin/env bash
# One command on every worker of a TPU VM pod. docs/launch_tpu_pod.md has the whole story.
#
#   launch/tpu_pod.sh NAME ZONE setup                      install this commit on every worker
#   launch/tpu_pod.sh NAME ZONE train CONFIG.yaml …        train, eval or sft: as on one machine
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
  # shellcheck disable=SC2064  # the name of now, not that of the end
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
    # Each word quoted for the shell of the worker; each line with the worker it comes from before it.
    printf -v words '%q ' "$@"
    on_every_worker "set -o pipefail; cd ~/quatrain && .venv/bin/quatrain $words 2>&1 | sed -u \"s/^/[\$(hostname)] /\""
    ;;
  *)
    usage
    ;;
esac
