#!/bin/sh
sed -i 's/^every = day$/every = hour/' /workspace/backup.conf
