#!/bin/sh
sed -i 's/^every = day$/every = year/' /workspace/backup.conf
