#!/usr/bin/env bash
# A CUDA 13.0 toolkit for a machine that has no GPU and no nvcc, so that the `cuda` feature can be
# compiled, linted and linked there (x86-64 Linux):
#
#     eval "$(.ci/cuda-toolkit.sh)"
#     cargo test --features cuda --no-run
#
# The parts are NVIDIA's PyPI wheels. Every one is pinned by version and by hash: PTX written by a newer
# nvcc does not load on a 13.0 driver. libcuda comes with a driver and not with a toolkit, so a stub
# takes its place, in which every function answers CUDA_ERROR_STUB_LIBRARY. Programs link against it
# and start, and opening a CUDA device is then an ordinary error.
#
# Needs python3 with pip, and gcc and g++ (nvcc's host compiler). The first run downloads about 650 MB.
# The result, about 1.2 GB, stays under $CUDA_TOOLKIT_CACHE (default: candle-softmax in the user's cache
# directory) and later runs only print.
set -euo pipefail

# Raise this when the way a toolkit is put together changes; a changed pin needs nothing.
layout=1
wheels='
nvidia-cuda-nvcc==13.0.88    --hash=sha256:56fe502eb77625a12f25172caa3cdddb4e4c8ba2c8c17dba44b164761b380f03
nvidia-nvvm==13.0.88         --hash=sha256:c5f41ffeb6466944a026dfa5317d7d85355c119bbec279205d22f1869d1054e0
nvidia-cuda-crt==13.0.88     --hash=sha256:2c8043c7c9e02492716426e9919fc78d2c5b3b2a7a768a88e952676b08aa55a4
nvidia-cuda-cccl==13.0.85    --hash=sha256:e0da7ad981f3a8aff08241b5bfc1af868742a63e2762f53a5171c492ef242649
nvidia-cuda-runtime==13.0.96 --hash=sha256:7f82250d7782aa23b6cfe765ecc7db554bd3c2870c43f3d1821f1d18aebf0548
nvidia-cuda-nvrtc==13.0.88   --hash=sha256:ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575
nvidia-cublas==13.1.0.3      --hash=sha256:ee8722c1f0145ab246bccb9e452153b5e0515fd094c3678df50b2a0888b8b171
nvidia-curand==10.4.0.35     --hash=sha256:1aee33a5da6e1db083fe2b90082def8915f30f3248d5896bcec36a579d941bfc
'

say() { echo "cuda-toolkit: $*" >&2; }
die() {
  say "$*"
  exit 1
}

# `eval "$(...)"` does not see this script's exit status, so a failure prints a command that fails.
work=
finish() {
  local status=$?
  if [ -n "$work" ]; then rm -rf "$work"; fi
  if [ "$status" -ne 0 ]; then echo false; fi
}
trap finish EXIT

# Puts a whole toolkit into the empty directory $1. Links inside it are relative: it is moved afterwards.
build() {
  local root=$1 lib
  printf '%s' "$wheels" > "$work/requirements.txt"
  python3 -m pip download --quiet --disable-pip-version-check --no-cache-dir \
    --no-deps --only-binary=:all: --require-hashes \
    --requirement "$work/requirements.txt" --dest "$work/wheels" >&2
  python3 - "$work/wheels" "$work/unpacked" <<'PYTHON'
import pathlib, sys, zipfile
for wheel in sorted(pathlib.Path(sys.argv[1]).glob("*.whl")):
    zipfile.ZipFile(wheel).extractall(sys.argv[2])
    wheel.unlink()
PYTHON
  mv "$work"/unpacked/nvidia/cu13/* "$root/"
  chmod +x "$root"/bin/* "$root"/nvvm/bin/*

  # Linkers look for lib64/libNAME.so; the wheels hold lib/libNAME.so.MAJOR.
  ln -s lib "$root/lib64"
  for lib in "$root"/lib/*.so.*; do ln -s "$(basename "$lib")" "${lib%.so.*}.so"; done

  # A function for every name that cuda.h knows, so also for the _v2 names that its macros lead to.
  mkdir "$root/lib/stubs"
  grep -owE 'cu[A-Z][A-Za-z0-9_]*' "$root/include/cuda.h" | sort -u \
    | sed 's/.*/int &(void) { return 34; }/' > "$work/libcuda.c" # 34: CUDA_ERROR_STUB_LIBRARY
  cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$root/lib/stubs/libcuda.so.1" "$work/libcuda.c"
  ln -s libcuda.so.1 "$root/lib/stubs/libcuda.so"

  # Does it compile at all? Better asked here than nine minutes into a build.
  echo '__global__ void probe(float *x) { x[threadIdx.x] *= 2.f; }' > "$work/probe.cu"
  "$root/bin/nvcc" --ptx -arch=sm_90 -o "$work/probe.ptx" "$work/probe.cu" >&2
}

[ "$(uname -s) $(uname -m)" = 'Linux x86_64' ] || die 'the pinned wheels are for x86-64 Linux'
cache=${CUDA_TOOLKIT_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/candle-softmax}
mkdir -p "$cache"
cache=$(cd "$cache" && pwd)
# The name follows from the pins, so that a changed pin is never served from an older toolkit.
toolkit=$cache/cuda-13.0-$(printf '%s' "$layout$wheels" | sha256sum | cut -c 1-12)

# A toolkit gets its name by one rename when it is whole, so what has the name is whole. Of two runs at
# once, the second to finish finds the name taken and uses that one.
if [ ! -d "$toolkit" ]; then
  python3 -m pip --version > /dev/null 2>&1 || die 'python3 with pip is needed to download the toolkit'
  for tool in cc gcc g++; do
    command -v "$tool" > /dev/null || die "$tool is needed: nvcc and the libcuda stub use the host compiler"
  done
  say "putting CUDA 13.0 together in $toolkit"
  find "$cache" -maxdepth 1 -name '.partial.*' -mmin +120 -exec rm -rf {} + # left by a killed run
  work=$(mktemp -d "$cache/.partial.XXXXXXXX")
  mkdir "$work/root"
  build "$work/root"
  mv -T "$work/root" "$toolkit" 2> /dev/null || [ -d "$toolkit" ] || die "cannot create $toolkit"
fi

# With a driver here, its libcuda is the one to run with; the stub is then for linking only.
run_path=$toolkit/lib64
if ! python3 -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2> /dev/null; then
  run_path+=:$toolkit/lib64/stubs
fi

q() { printf '%q' "$1"; }
cat <<END
unset NVCC
export CUDA_HOME=$(q "$toolkit") CUDA_PATH=$(q "$toolkit") CUDA_ROOT=$(q "$toolkit")
export PATH=$(q "$toolkit/bin"):"\$PATH"
export LIBRARY_PATH=$(q "$toolkit/lib64:$toolkit/lib64/stubs")"\${LIBRARY_PATH:+:\$LIBRARY_PATH}"
export LD_LIBRARY_PATH=$(q "$run_path")"\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
export CUDA_COMPUTE_CAP="\${CUDA_COMPUTE_CAP:-90}"
END
