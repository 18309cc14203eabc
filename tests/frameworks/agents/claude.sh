#!/bin/sh
# Claude Code ($1: its program), without settings of its own and without requests to other servers. The reward is
# that its answer names what stands in the file.
set -e
question=$(python3 -c 'import json, os; print(json.load(open(os.environ["QUATRAIN_ROW"]))["prompt"][-1]["content"])')
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
echo five > "$place/sum.txt"
cd "$place"
export HOME="$place" CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
"$1" -p "$question" --bare --tools Bash --allowedTools Bash --system-prompt "Use the tool." \
    --no-session-persistence --output-format json < /dev/null > said.json
python3 -c 'import json; print(json.dumps({"reward": float("5" in json.load(open("said.json"))["result"])}))'
