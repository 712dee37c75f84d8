#!/bin/sh
echo debug > /workspace/log_level
