#!/usr/bin/env bash
# Packs a Triton from the package index for a GPU machine that reaches none, small enough to be carried (40 MB of 3.9's
# 250): without debug symbols, AMD's libraries, profilers and NVIDIA's tools, which the Triton that is there has.
#
#   tests/bench/pack_triton.sh 3.9.0 3.12 .device/triton.tar.xz        # version, Python, archive
#
# There, with the archive beside the checkout, both Tritons over the same kernels:
#   mkdir -p /tmp/triton && tar -C /tmp/triton -xJf .device/triton.tar.xz && source /tmp/triton/use.sh
#   python3 -m baton.tests.bench.triton_versions --other /tmp/triton
set -euo pipefail
version=${1:?version of Triton} python=${2:?version of Python} out=${3:?archive to write}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
platforms=()
for minor in $(seq 17 35); do platforms+=(--platform "manylinux_2_${minor}_x86_64"); done
python3 -m pip download -q --no-deps --only-binary=:all: --python-version "$python" --implementation cp \
  "${platforms[@]}" -d "$work" "triton==$version"
python3 -m zipfile -e "$work"/triton-*.whl "$work/site"
cd "$work/site"
rm -rf ./*.dist-info triton/_C/libproton.so triton/instrumentation triton/plugins triton/FileCheck triton/profiler \
  triton/include triton/backends/amd/lib triton/backends/amd/bin triton/backends/nvidia/bin \
  triton/backends/nvidia/lib/cupti*
strip --strip-unneeded triton/_C/libtriton.so
cat > use.sh <<'USE'
bin=$(python3 -c 'import triton; print(triton.__path__[0])')/backends/nvidia/bin
export TRITON_PTXAS_PATH=$bin/ptxas TRITON_PTXAS_BLACKWELL_PATH=$bin/ptxas-blackwell
export TRITON_CUOBJDUMP_PATH=$bin/cuobjdump TRITON_NVDISASM_PATH=$bin/nvdisasm
USE
cd - >/dev/null
mkdir -p "$(dirname "$out")"
tar -C "$work/site" -c . | xz -6 -T2 > "$out"
ls -l "$out"
