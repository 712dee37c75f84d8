#!/bin/sh
echo error > /workspace/log_level
