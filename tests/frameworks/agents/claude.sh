#!/bin/sh
# Claude Code, without its settings and without what it asks of other servers; the reward is that it found the file.
set -e
question=$(python3 -c 'import json, os; print(json.load(open(os.environ["QUATRAIN_ROW"]))["prompt"][-1]["content"])')
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
echo five > "$place/sum.txt"
cd "$place"
export HOME="$place" CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
"$CLAUDE" -p "$question" --bare --tools Bash --allowedTools Bash --system-prompt "Use the tool." \
    --no-session-persistence --output-format json < /dev/null > said.json
python3 -c 'import json; print(json.dumps({"reward": float("5" in json.load(open("said.json"))["result"])}))'
