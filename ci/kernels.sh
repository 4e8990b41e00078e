#!/usr/bin/env bash
# All tests with the kernels of another processor.   bash ci/kernels.sh [0|1|2]   (no number: this week's)
#   0  no vector instructions in PyTorch, AVX2 in oneDNN and MKL, one thread
#   1  AVX2 in all three, two threads
#   2  what this processor has, two threads
set -euo pipefail
week=$(date +%V)
number=${1:-$((10#$week % 3))}
case $number in
  0) export ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 DRIVELIT_THREADS=1 ;;
  1) export ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 DRIVELIT_THREADS=2 ;;
  2) export DRIVELIT_THREADS=2 ;;
  *) echo "ci/kernels.sh: $number? There are 0, 1 and 2" >&2; exit 2 ;;
esac
echo "kernels $number: $(env | grep -E '^(ATEN|ONEDNN|MKL_ENABLE|DRIVELIT_THREADS)' | sort | tr '\n' ' ')"
exec bash "$(dirname "${BASH_SOURCE[0]}")/test.sh"
