#!/bin/sh
# Print how many words the standard input has.
wc -l
