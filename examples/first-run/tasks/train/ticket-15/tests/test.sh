#!/bin/sh
# Reward 1 if each file under /tests/expected is in /workspace with the same text (trailing newlines do not count) and
# no path of /tests/absent.txt is there, else 0. Nothing of the workspace is run; links are refused.
reward=1
cd /tests/expected || exit 1
for wanted in * */*; do
    [ -f "$wanted" ] || continue
    found=/workspace/$wanted
    if [ ! -f "$found" ] || [ "$(realpath "$found")" != "$found" ]; then
        reward=0
    elif [ "$(head -c 4096 "$found")" != "$(cat "$wanted")" ]; then
        reward=0
    fi
done
while read -r gone; do
    if [ -e "/workspace/$gone" ] || [ -L "/workspace/$gone" ]; then reward=0; fi
done < /tests/absent.txt
mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
