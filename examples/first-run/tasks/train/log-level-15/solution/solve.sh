#!/bin/sh
echo warning > /workspace/log_level
