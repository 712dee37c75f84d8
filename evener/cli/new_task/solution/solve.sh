#!/bin/sh
# A right answer, for `evener tasks check`; no agent sees it.
sed -i "s/^wc -l$/wc -w/" /workspace/count.sh
