#!/bin/sh
echo device > /workspace/team.txt
