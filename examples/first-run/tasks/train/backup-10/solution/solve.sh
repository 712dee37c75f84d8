#!/bin/sh
sed -i 's/^every = day$/every = week/' /workspace/backup.conf
