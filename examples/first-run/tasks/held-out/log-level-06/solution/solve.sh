#!/bin/sh
echo info > /workspace/log_level
