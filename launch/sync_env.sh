#!/usr/bin/env bash
# Copies a file of secrets to every worker of a TPU VM pod, readable by its owner alone; prints none of it.
#
#   launch/sync_env.sh NAME ZONE [FILE]      FILE: .env here unless given
set -euo pipefail

if [[ $# -lt 2 || $# -gt 3 ]]; then
  echo "usage: $0 NAME ZONE [FILE]   (NAME and ZONE of the TPU VM; FILE: .env unless given)" >&2
  exit 2
fi
name=$1 zone=$2 file=${3:-.env}
if [[ ! -f $file ]]; then
  echo "error: there is no file $file; write it as .env.example shows, or name another" >&2
  exit 2
fi

on_every_worker() {
  gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --quiet --command="$1"
}

# A copy is born with the mode that the worker likes: it is made inside a folder closed to others.
on_every_worker 'rm -rf ~/.quatrain-env && mkdir -m 700 ~/.quatrain-env && mkdir -p ~/quatrain'
gcloud compute tpus tpu-vm scp "$file" "$name:.quatrain-env/env" --zone="$zone" --worker=all --quiet
on_every_worker 'install -m 600 ~/.quatrain-env/env ~/quatrain/.env && rm -rf ~/.quatrain-env'
echo "$file is ~/quatrain/.env on every worker of $name, with mode 600"
