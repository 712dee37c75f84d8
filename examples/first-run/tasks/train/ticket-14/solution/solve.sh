#!/bin/sh
echo account > /workspace/team.txt
