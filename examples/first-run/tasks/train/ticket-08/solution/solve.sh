#!/bin/sh
echo network > /workspace/team.txt
