#!/bin/sh
# Reward 1 if count.sh prints the right number for each of cases/*.in, else 0. It runs where `candidate` takes it: in a sandbox of
# its own that holds the workspace and none of these files. Give it inputs, never the expected output.
reward=1
for given in /tests/cases/*.in; do
    wanted=$(cat "${given%.in}.out")
    printed=$(candidate --timeout 10 sh count.sh < "$given") || reward=0
    if [ "$printed" != "$wanted" ]; then
        echo "$(basename "$given"): printed $(printf %.80s "$printed"), wanted $wanted"
        reward=0
    fi
done
echo "$reward" > /logs/verifier/reward.txt
