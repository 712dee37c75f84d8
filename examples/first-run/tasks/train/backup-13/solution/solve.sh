#!/bin/sh
sed -i 's/^every = day$/every = month/' /workspace/backup.conf
