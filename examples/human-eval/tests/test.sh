#!/bin/sh
exec python3 -I /tests/grade.py
