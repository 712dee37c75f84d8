#!/bin/sh
mv /workspace/inbox/note.txt /workspace/today/
