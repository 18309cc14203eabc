#!/usr/bin/env bash
# Copies a file with secrets to every worker of a TPU VM pod, where only its owner can read it. Prints no secret.
#
#   launch/sync_env.sh NAME ZONE [FILE]      FILE: .env in the working directory unless given
set -euo pipefail

if [[ $# -lt 2 || $# -gt 3 ]]; then
  echo "usage: $0 NAME ZONE [FILE]   (NAME and ZONE of the TPU VM; default of FILE: .env)" >&2
  exit 2
fi
name=$1 zone=$2 file=${3:-.env}
if [[ ! -f $file ]]; then
  echo "error: there is no file $file; create it like .env.example, or give another FILE" >&2
  exit 2
fi

on_every_worker() {
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --quiet --command="$1"
}

# scp creates the copy with the worker's default mode; so it is created in a folder that others cannot enter.
on_every_worker 'rm -rf ~/.quatrain-env && mkdir -m 700 ~/.quatrain-env && mkdir -p ~/quatrain'
gcloud compute tpus tpu-vm scp "$file" "$name:.quatrain-env/env" --zone="$zone" --worker=all --quiet
on_every_worker 'install -m 600 ~/.quatrain-env/env ~/quatrain/.env && rm -rf ~/.quatrain-env'
echo "$file is ~/quatrain/.env on every worker of $name, with mode 600"
