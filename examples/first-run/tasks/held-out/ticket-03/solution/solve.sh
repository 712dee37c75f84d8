#!/bin/sh
echo money > /workspace/team.txt
