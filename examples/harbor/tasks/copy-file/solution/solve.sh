#!/bin/bash
set -e
cp /app/in.txt /app/out.txt
